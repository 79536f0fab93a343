"""Leases of rows to replicas: dynamic, or a static partition. No I/O, clock or thread.

Each row is leased once per epoch, and again only if its replica is lost. After a sync
interval no replica holds a lease, so the remaining rows describe the position in the
epoch.
"""

import bisect
import itertools
import zlib
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from typing_extensions import override

from daskdl.channel.protocol import (
    IntervalNumber,
    Natural,
    Positive,
    RunId,
    Token,
    TrainedWork,
    check,
    hints_of,
    run_id,
)
from daskdl.config import Timeouts
from daskdl.errors import shown

TO_ITS_END = -1  # `stop` of a range whose part has unknown length

NOBODY = -1  # `replica` of rows that any replica may take

IsNear = Callable[[str], bool]  # whether a worker holds the result of a Dask task


class Range(NamedTuple):
    """Consecutive rows of a part, by position in the order they are trained on."""

    part: Natural
    start: Natural
    stop: IntervalNumber  # exclusive, or `TO_ITS_END`

    @property
    def rows(self) -> int:
        """Number of rows; 1 for a part of unknown length."""
        return 1 if self.stop == TO_ITS_END else self.stop - self.start


class Lease(NamedTuple):
    """Rows leased to one replica."""

    number: int  # counted from 0 in its phase and epoch
    ranges: tuple[Range, ...]  # in training order
    keys: Mapping[int, str] = MappingProxyType({})  # Dask key by part; "": none
    ahead: int | None = None  # part that the replica will probably load next

    @property
    def rows(self) -> int:
        """Number of rows in all ranges."""
        return sum(part.rows for part in self.ranges)


class RemainingWork(NamedTuple):
    """Rows that are in no lease."""

    replica: IntervalNumber  # replica to train on them, or `NOBODY`
    ranges: tuple[Range, ...]  # in training order


Finished = Sequence[Mapping[str, Any]]  # each with the fields of a `FinishedLease`


class SyncPoint(NamedTuple):
    """Position in an epoch when all replicas meet between two sync intervals."""

    order: int  # checksum of the data and their order, see `RunSpec.order`
    remaining: Sequence[RemainingWork]
    departed: Sequence[TrainedWork] = ()  # of gone replicas in this epoch

    def to_wire(self) -> list[Any]:
        """The sync point as plain lists."""
        remaining = [[r, [list(part) for part in parts]] for r, parts in self.remaining]
        return [self.order, remaining, list(self.departed)]


class PartitionSizes(NamedTuple):
    """Sizes of the parts, steps and leases of a phase."""

    rows: tuple[IntervalNumber, ...]  # rows of each part; -1 if unknown
    keys: tuple[str, ...]  # Dask key of each part; "" if no worker holds it
    step_rows: Positive  # rows per optimizer step of one replica
    lease_rows: Positive  # target rows per lease; a multiple of `step_rows`


class SyncIntervals(NamedTuple):
    """Division of training epochs; all replicas meet after each interval."""

    replicas: Positive = 1  # initial replicas
    rows: Positive | None = None  # rows per replica and interval; None: no bound
    seconds: float | None = None  # duration of an interval; None: no bound
    resumed: SyncPoint | None = None  # position to resume at; None: start of the epoch


WHOLE_EPOCHS = SyncIntervals()

# Enough that a replica at half the speed of the others barely delays the end of an
# epoch; few enough that a lease is worth its request.
LEASES_PER_REPLICA = 8


def partition_sizes(
    rows: Sequence[int],
    step_rows: int,
    replicas: int,
    keys: Sequence[str] | None = None,
) -> PartitionSizes:
    """Choose a lease size that gives each replica about eight leases per epoch.

    Args:
        rows: Rows of each part; -1 if unknown.
        step_rows: Rows per optimizer step of one replica.
        replicas: Number of replicas.
        keys: Dask key of each part, "" if no worker holds it; None: no part is held.

    Example:
        >>> partition_sizes([100, 60], step_rows=4, replicas=2).lease_rows
        12
    """
    total = sum(count for count in rows if count > 0)
    steps = -(-total // (LEASES_PER_REPLICA * replicas * step_rows))
    held = ("",) * len(rows) if keys is None else tuple(keys)
    counts = tuple(int(count) for count in rows)
    return PartitionSizes(counts, held, step_rows, max(steps, 1) * step_rows)


@dataclass(frozen=True)
class RunSpec:
    """Specification of a run by its client; plain values, sent as a dict.

    Attributes:
        run: Id of the run, random; it stays if the run opens again after the loss of
            all replicas. The secret and the numbers of the replicas are then others.
        replicas: Worker address of each initial replica.
        sizes: Sizes of each phase ("train", "validation").
        seed: Seed of the order of the training parts; None keeps their order.
        epochs_before: Epochs of earlier fits, so that each epoch has its own order.
        synchronous: Static partition instead of dynamic leases.
        relay_bytes: Bound on the relay's queue for each replica, bytes. Last updates
            of a leaving replica may exceed it, see `run_state.EXCESS_BYTES`.
        min_replicas: With fewer active replicas, no replica gets a lease.
        timeouts: Bounds on waiting, seconds, by name.
        relayed: Whether the scheduler relays updates; see `Routing`.
        first_epoch: First epoch to train, counted from 0; a resumed run skips some.
        intervals: Division of the epochs.
        epochs: Number of epochs, including those before `first_epoch`; None: unknown.
        name: Name of the run, chosen by its user.
        title: Describes the model, for the dashboard.
        payload_bytes: Bound of what a replica sends at a barrier or with a lease.
        secret: In each request about the run, see `check_secret`.
        merge_s: Longest time that updates wait in the relay for those of the other
            replicas, to be sent as their sum, seconds; see `RunState.due`. 0: they do
            not wait, and are sent one by one. Only for a relay, and not if replicas are
            synchronous: sums would round local otherwise.
        sum_fan_out: Most workers to which the scheduler, or another worker, sends a
            large sum.
        parameters: Number of trainable parameters; 0: unknown.
    """

    run: RunId
    replicas: Mapping[Natural, str]
    sizes: Mapping[str, PartitionSizes]
    seed: Natural | None
    epochs_before: Natural
    synchronous: bool
    relay_bytes: Natural
    min_replicas: Natural
    timeouts: Mapping[str, float]
    relayed: bool = True
    first_epoch: Natural = 0
    intervals: SyncIntervals = WHOLE_EPOCHS
    epochs: Natural | None = None
    name: str = ""
    title: str = ""
    payload_bytes: Natural = 2**26
    secret: Token = field(default=0, repr=False)
    merge_s: float = 0.0
    sum_fan_out: Positive = 2
    parameters: Natural = 0

    @property
    def merges(self) -> bool:
        """Whether the relay sends sums of updates."""
        return self.merge_s > 0

    @property
    def queue_bytes(self) -> int:
        """Bound on the relay's queue for each replica, bytes.

        With merging, there is room for what is sent together, twice: a sum of dense
        updates, of up to four bytes per parameter, and one of others, of up to two.
        """
        return max(self.relay_bytes, 12 * self.parameters * self.merges)

    @property
    def label(self) -> str:
        """Name and id of the run, for logs."""
        name = shown(self.name)
        return f"{name} ({run_id(self.run)})" if name else run_id(self.run)

    @property
    def order(self) -> int:
        """Checksum of the part sizes and their order, on which ranges depend."""
        rows = self.sizes["train"].rows
        return zlib.crc32(repr((rows, self.seed, self.epochs_before)).encode())

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> Self:
        """Read a specification from its wire form, in which tuples have no names."""
        spec = cls(**check(fields, hints_of(cls)))
        if not spec.replicas or "train" not in spec.sizes:
            raise ValueError("a run needs replicas, and data to train on")
        if any(len(rows) != len(keys) for rows, keys, *_ in spec.sizes.values()):
            raise ValueError("each part has one number of rows and one key")
        if spec.merges and (spec.synchronous or not spec.relayed):
            raise ValueError(
                "only a relay merges updates, and not of synchronous replicas"
            )
        Timeouts(**spec.timeouts)
        return spec


def part_order(parts: int, epoch: int, seed: int | None) -> list[int]:
    """Order of the parts in an epoch; independent of the number of replicas."""
    if seed is None:
        return list(range(parts))
    return [int(i) for i in np.random.default_rng([seed, epoch]).permutation(parts)]


def whole_parts(order: Sequence[int], rows: Sequence[int]) -> list[Range]:
    """One range for each part that is not empty, in the given order.

    Example:
        >>> whole_parts([2, 1, 0], [4, 0, -1])
        [Range(part=2, start=0, stop=-1), Range(part=0, start=0, stop=4)]
    """
    return [Range(part, 0, rows[part]) for part in order if rows[part] != 0]


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Merge adjacent ranges; rows and order stay the same.

    Example:
        >>> joined([Range(7, 0, 4), Range(7, 4, 6), Range(2, 6, 8)])
        (Range(part=7, start=0, stop=6), Range(part=2, start=6, stop=8))
    """
    merged: list[Range] = []
    for part in ranges:
        if merged and merged[-1][::2] == (part.part, part.start):
            merged[-1] = merged[-1]._replace(stop=part.stop)
        else:
            merged.append(part)
    return tuple(merged)


def split(part: Range, rows: int) -> tuple[Range, Range]:
    """Split a range into its first `rows` rows and the rest."""
    middle = part.start + rows
    return part._replace(stop=middle), part._replace(start=middle)


def portions(ranges: Iterable[Range], sizes: Iterable[int]) -> Iterator[list[Range]]:
    """Cut ranges, in order, into portions of the given sizes.

    Args:
        ranges: Ranges of known length.
        sizes: Rows of each portion; the last portions may get fewer, or none.

    Example:
        >>> for portion in portions([Range(7, 0, 6), Range(2, 0, 4)], [8, 8]):
        ...     print(portion)
        [Range(part=7, start=0, stop=6), Range(part=2, start=0, stop=2)]
        [Range(part=2, start=2, stop=4)]
    """
    uncut = deque(ranges)
    for size in sizes:
        portion = []
        while uncut and size > 0:
            part = uncut.popleft()
            if part.rows > size:
                part, later = split(part, size)
                uncut.appendleft(later)
            portion.append(part)
            size -= part.rows
        yield portion


class Leasing(ABC):
    """The leases of one phase, epoch after epoch.

    Attributes:
        epoch: Current epoch, counted from 0; -1 before the first.
        repeated: Leases granted again in this epoch because their replica was gone.
        unfinished: Rows of this epoch that no replica has finished yet.
    """

    shared_limit: ClassVar[bool]  # one limit per sync interval for all, or per replica

    epoch: int
    repeated: int
    unfinished: int
    _limit: int | None  # rows leased per sync interval; None: no bound

    def __init__(
        self,
        sizes: PartitionSizes,
        seed: int | None = None,
        epochs_before: int = 0,
        intervals: SyncIntervals = WHOLE_EPOCHS,
    ) -> None:
        self.epoch = -1
        self._sizes = sizes
        self._keys = list(sizes.keys)
        self._any_held = any(sizes.keys)
        self._seed = seed
        self._epochs_before = epochs_before
        self._resumed = intervals.resumed
        self._interval_rows = intervals.rows
        if intervals.rows is not None and self.shared_limit:
            self._interval_rows = intervals.rows * intervals.replicas
        self._begin([], [], [])

    def open(self, epoch: int, replicas: Sequence[int]) -> None:
        """Begin an epoch, unless it has begun."""
        if epoch < self.epoch:
            raise ValueError(
                f"epoch {epoch} is over; the current epoch is {self.epoch}"
            )
        if epoch == self.epoch:
            return
        self.epoch = epoch
        rows = self._sizes.rows
        order = part_order(len(rows), self._epochs_before + epoch, self._seed)
        remaining = [RemainingWork(NOBODY, tuple(whole_parts(order, rows)))]
        if self._resumed is not None:
            remaining, self._resumed = list(self._resumed.remaining), None
        self._begin(order, remaining, replicas)

    def take(self, replica: int, is_near: IsNear | None = None) -> Lease | None:
        """Lease rows to a replica; None if there are none for it now."""
        if not self.has_one_for(replica):
            return None
        lease = self._take(replica, is_near if self._any_held else None)
        parts = dict.fromkeys(taken.part for taken in lease.ranges)
        if lease.ahead is not None:
            parts.setdefault(lease.ahead)
        lease = lease._replace(keys={part: self._keys[part] for part in parts})
        self._leased[self._limit_key(replica)] += lease.rows
        self._held.setdefault(replica, {})[lease.number] = lease
        return lease

    def has_one_for(self, replica: int) -> bool:
        """Whether `take` would lease rows to this replica now."""
        within = (
            self._limit is None or self._leased[self._limit_key(replica)] < self._limit
        )
        free = bool(self._lost_leases) or self._has_free(replica)
        return within and free and not self._interval_over and not self._ended

    def finish(self, replica: int, number: int) -> bool:
        """Finish a lease; False, and no change, if the replica does not hold it."""
        lease = self._held.get(replica, {}).pop(number, None)
        self.unfinished -= 0 if lease is None else lease.rows
        return lease is not None

    def lose(self, replica: int) -> None:
        """Free the leases of a gone replica, and its share or parts."""
        held = self._held.pop(replica, {})
        if self._ended:
            self.unfinished -= sum(lease.rows for lease in held.values())
            return
        self._lost_leases.extend(held[number] for number in sorted(held))

    def rows_held(self, replica: int) -> int:
        """Rows that a replica has leased and not finished."""
        return sum(lease.rows for lease in self._held.get(replica, {}).values())

    def end_epoch(self) -> None:
        """Lease no more rows in this epoch; held leases may still be finished."""
        self._ended = True
        self.unfinished = sum(map(self.rows_held, self._held))

    def end_interval(self) -> None:
        """Limit the sync interval to the largest number of rows leased so far."""
        self._limit = max(self._leased.values(), default=0)

    def begin_interval(self) -> None:
        """Begin the next sync interval, after all replicas have met."""
        self._leased.clear()
        self._limit = self._interval_rows
        self._interval_over = False

    def interval_is_over(self, replicas: Iterable[int]) -> bool:
        """Whether rows remain that no replica can lease before the next interval.

        Stays true when replicas join or are lost: some may be at the barrier already.
        """
        self._interval_over = self._interval_over or (
            self._limit is not None
            and self.unfinished > 0
            and not any(self._held.values())
            and not any(self.has_one_for(replica) for replica in replicas)
        )
        return self._interval_over

    def held_key(self, part: int) -> str:
        """Current Dask key of a part that a worker holds."""
        if not self._keys[part]:
            raise ValueError(f"no worker holds part {part}")
        return self._keys[part]

    def replace_key(self, part: int, key: str) -> None:
        """Set the new key of a part that was lost with its worker; see `held_key`."""
        self.held_key(part)
        self._keys[part] = key

    @abstractmethod
    def remaining(self) -> list[RemainingWork]:
        """Rows that no replica has trained on; call while no lease is held."""

    def _begin(
        self,
        order: Sequence[int],
        remaining: Sequence[RemainingWork],
        replicas: Sequence[int],
    ) -> None:
        """Begin an epoch with its remaining work, which may be the whole epoch."""
        self.repeated = 0
        self.unfinished = sum(part.rows for work in remaining for part in work.ranges)
        self._count = 0  # leases cut so far
        self._limit = self._interval_rows
        self._interval_over = self._ended = False
        self._leased: Counter[int] = Counter()  # rows in this interval, by replica
        self._held: dict[int, dict[int, Lease]] = {}  # by replica and lease number
        self._lost_leases: deque[Lease] = deque()  # unfinished leases of gone replicas

    @abstractmethod
    def _has_free(self, replica: int) -> bool:
        """Whether a replica could get rows that are in no lease."""

    @abstractmethod
    def _take(self, replica: int, is_near: IsNear | None) -> Lease:
        """Lease rows to a replica; called only if `has_one_for` it."""

    def _limit_key(self, replica: int) -> int:
        return NOBODY if self.shared_limit else replica

    def _cut_lease(self, ranges: Sequence[Range], ahead: int | None) -> Lease:
        self._count += 1
        return Lease(self._count - 1, tuple(ranges), ahead=ahead)

    def _repeat(self) -> Lease:
        """Lease the oldest lost lease again, without a part to load ahead."""
        self.repeated += 1
        return self._lost_leases.popleft()._replace(ahead=None)


# With parts spread over the workers at random, four looks per replica find a near part
# with 98 % probability, 1 - exp(-4); the bound keeps answers fast with many parts.
LOOKS_PER_REPLICA, MIN_LOOKS = 4, 64

# Assumed time to load a part, as a fraction of the time to train on it. A replica
# shares the part of another replica only if more than this fraction of rows is left.
LOADING_FRACTION = 0.005


class DynamicLeasing(Leasing):
    """Replicas work through one part after another, so that most parts load once.

    The next part of a replica is one that its worker holds, or else the next in order.
    The part is reserved and loaded while the replica trains on its current part. A part
    larger than one replica's share is divided into stretches. Once all parts are begun
    or reserved, a replica without rows takes over a reserved part, then shares a begun
    part. Leases become smaller near the end, so that all replicas finish at about the
    same time.
    """

    shared_limit = True

    @override
    def _begin(
        self,
        order: Sequence[int],
        remaining: Sequence[RemainingWork],
        replicas: Sequence[int],
    ) -> None:
        super()._begin(order, remaining, replicas)
        self._order = {part: i for i, part in enumerate(order)}
        self._unleased = self.unfinished  # rows
        most = LEASES_PER_REPLICA * self._sizes.lease_rows
        # In reverse order: the next part is at the end, where removal is cheap.
        self._parts = [
            stretch
            for work in remaining
            for part in work.ranges
            for stretch in stretches(part, most, self._sizes.step_rows)
        ][::-1]
        self._free = list(range(len(self._parts)))  # positions of parts not begun
        self._left_over: list[Range] = []  # unleased rows of gone replicas' parts
        self._begun: dict[int, Range] = {}  # unleased rows of each replica's part
        self._reserved: dict[int, Range] = {}  # next part of each replica
        self._reserved_far: set[int] = set()  # replicas whose reserved part is not near
        self._looked: dict[int, int] = {}  # where a replica's search resumes
        self._active: set[int] = set()

    @override
    def remaining(self) -> list[RemainingWork]:
        free = (self._parts[position] for position in self._free)
        begun = (*self._left_over, *self._begun.values(), *self._reserved.values())
        again = (part for lease in self._lost_leases for part in lease.ranges)
        ranges = [*free, *begun, *again]
        ranges.sort(key=lambda part: (self._order[part.part], part.start))
        return [RemainingWork(NOBODY, joined(ranges))]

    @override
    def _has_free(self, replica: int) -> bool:
        return bool(
            replica in self._begun
            or self._free
            or self._left_over
            or self._reserved
            or self._shareable()
        )

    @override
    def lose(self, replica: int) -> None:
        super().lose(replica)
        self._active.discard(replica)
        for parts in (self._begun, self._reserved):
            if replica in parts:
                self._left_over.append(parts.pop(replica))

    @override
    def _take(self, replica: int, is_near: IsNear | None) -> Lease:
        self._active.add(replica)
        if not self._ensure_part(replica, is_near):
            if self._lost_leases:
                return self._repeat()
            self._take_over(replica)
        ranges: list[Range] = []
        rows, most = 0, self._lease_rows()
        while rows < most and self._ensure_part(replica, is_near):
            part = self._begun.pop(replica)
            if part.stop == TO_ITS_END:
                if ranges:  # a part of unknown length is leased alone
                    self._begun[replica] = part
                    break
                most = 0
            elif part.rows > most - rows:
                part, self._begun[replica] = split(part, most - rows)
            ranges.append(part)
            rows += part.rows
        self._unleased -= rows
        ahead = self._reserved[replica].part if replica in self._reserved else None
        return self._cut_lease(ranges, None if ahead == ranges[-1].part else ahead)

    def _lease_rows(self) -> int:
        """Target rows of a lease; near the end, half of a fair share of the rest."""
        step, rows = self._sizes.step_rows, self._unleased
        if self._limit is not None:
            rows = min(rows, self._limit - self._leased[NOBODY])
        share = -(-rows // (2 * len(self._active) * step)) * step
        return min(self._sizes.lease_rows, share)

    # ---- own parts

    def _ensure_part(self, replica: int, is_near: IsNear | None) -> bool:
        """Ensure that a replica has a part, and reserve its next; False if none."""
        if replica not in self._begun:
            if not self._reserve(replica, is_near):
                return False
            self._begun[replica] = self._reserved.pop(replica)
        self._reserve(replica, is_near)
        return True

    def _reserve(self, replica: int, is_near: IsNear | None) -> bool:
        if replica not in self._reserved:
            part = None if is_near is None else self._find_near(replica, is_near)
            self._reserved_far.discard(replica)
            if part is None:
                self._reserved_far.add(replica)
                if self._left_over:
                    part = self._left_over.pop(0)
                elif self._free:
                    part = self._parts[self._free.pop()]
                else:
                    return False
            self._reserved[replica] = part
        return True

    def _find_near(self, replica: int, is_near: IsNear) -> Range | None:
        """A part that the replica's worker holds and no replica trains on, if found."""

        def near(part: Range) -> bool:
            key = self._keys[part.part]
            return key != "" and is_near(key)

        for part in self._left_over:
            if near(part):
                self._left_over.remove(part)
                return part
        # A bounded search; the next one resumes where this one ends.
        most = max(LOOKS_PER_REPLICA * len(self._active), MIN_LOOKS)
        resumes_at = self._looked.get(replica, len(self._parts))
        at = bisect.bisect_right(self._free, resumes_at) - 1
        for index in range(at, at - min(most, len(self._free)), -1):
            self._looked[replica] = self._free[index] - 1
            if near(self._parts[self._free[index]]):
                return self._parts[self._free.pop(index)]
        # Parts reserved for replicas that would have to fetch them from this worker.
        for holder in sorted(self._reserved_far & self._reserved.keys()):
            if near(self._reserved[holder]):
                return self._reserved.pop(holder)
        return None

    # ---- parts of other replicas

    def _shareable(self) -> list[int]:
        """Replicas with enough unleased rows of their part to share it."""
        rows = self._sizes.rows
        return [
            r
            for r, part in self._begun.items()
            if part.rows > LOADING_FRACTION * rows[part.part]
        ]

    def _take_over(self, replica: int) -> None:
        """Take over rows that another replica would train on next."""

        def to_do(holder: int) -> int:
            parts = (self._begun.get(holder), self._reserved.get(holder))
            return sum(part.rows for part in parts if part is not None)

        if self._reserved:
            busiest = max(self._reserved, key=to_do)
            self._begun[replica] = self._reserved.pop(busiest)
            return
        busiest = max(sorted(self._shareable()), key=to_do)
        part, step = self._begun.pop(busiest), self._sizes.step_rows
        if part.rows >= 2 * step:  # half of the rows, in whole steps; else all
            loading = int(LOADING_FRACTION * self._sizes.rows[part.part])
            kept = (part.rows + loading + step) // (2 * step)
            most = part.rows // step - 1
            self._begun[busiest], part = split(part, min(kept, most) * step)
        self._begun[replica] = part


def stretches(part: Range, most: int, step_rows: int) -> list[Range]:
    """Cut a part into equal stretches of about `most` rows, in whole steps.

    Example:
        >>> stretches(Range(7, 0, 100), most=40, step_rows=8)
        [Range(part=7, start=0, stop=56), Range(part=7, start=56, stop=100)]
    """
    if part.stop == TO_ITS_END:
        return [part]
    count = max(round(part.rows / most), 1)
    size = max(-(-part.rows // (count * step_rows)), 1) * step_rows
    starts = range(part.start, part.stop, size)
    return [Range(part.part, at, min(at + size, part.stop)) for at in starts]


class StaticPartition(Leasing):
    """Repeatable leases for synchronous runs: an equal share of steps per replica.

    The rows of the epoch are numbered in the order of the parts and cut into steps;
    each replica gets consecutive steps. Neither the replica of a step nor its rows
    depend on how the data are cut into parts or where the parts are. Parts of unknown
    length are dealt out in turn. A gone replica's rows are free for all others.

    A resumed epoch keeps its shares if the number of replicas is the same; otherwise
    its remaining rows are shared out again.
    """

    shared_limit = False

    @override
    def _begin(
        self,
        order: Sequence[int],
        remaining: Sequence[RemainingWork],
        replicas: Sequence[int],
    ) -> None:
        super()._begin(order, remaining, replicas)
        shared = sorted(work for work in remaining if work.replica != NOBODY)
        free = [work for work in remaining if work.replica == NOBODY]
        shares: list[Sequence[Range]] = [work.ranges for work in shared]
        if len(shared) != len(replicas):
            parts = [part for work in remaining for part in work.ranges]
            free = []
            shares = [*shared_out(parts, self._sizes.step_rows, len(replicas))]
        self._orphans = self._cut([part for work in free for part in work.ranges])
        cut = map(self._cut, shares)
        self._shares = dict(zip(sorted(replicas), cut, strict=True))

    def _cut(self, share: Sequence[Range]) -> deque[tuple[Range, ...]]:
        """Cut a share into leases; none crosses the end of a sync interval."""
        known = [part for part in share if part.stop != TO_ITS_END]
        rows, most = sum(part.rows for part in known), self._sizes.lease_rows
        interval = self._interval_rows or max(rows, 1)
        sizes = [min(most, interval - at) for at in range(0, interval, most)]
        intervals = -(-rows // interval)
        leases = map(tuple, portions(known, sizes * intervals))
        unbounded = ((part,) for part in share if part.stop == TO_ITS_END)
        return deque([*filter(None, leases), *unbounded])

    @override
    def remaining(self) -> list[RemainingWork]:
        flat = itertools.chain.from_iterable
        work = [RemainingWork(r, joined(flat(s))) for r, s in self._shares.items()]
        again = (lease.ranges for lease in self._lost_leases)
        free = joined(flat([*again, *self._orphans]))
        return [*work, RemainingWork(NOBODY, free)] if free else work

    @override
    def _has_free(self, replica: int) -> bool:
        return bool(self._shares.get(replica) or self._orphans)

    @override
    def lose(self, replica: int) -> None:
        super().lose(replica)
        self._orphans.extend(self._shares.pop(replica, ()))

    @override
    def _take(self, replica: int, is_near: IsNear | None) -> Lease:
        # The locations of copies must not change a repeatable run.
        share = self._shares.get(replica) or self._orphans
        if not share:
            return self._repeat()
        ranges = share.popleft()
        parts = (part.part for later in share for part in later)
        ahead = next((part for part in parts if part != ranges[-1].part), None)
        return self._cut_lease(ranges, ahead)


def shared_out(
    parts: Sequence[Range], step_rows: int, replicas: int
) -> list[list[Range]]:
    """Cut the rows of parts into one share per replica, in whole steps.

    The first shares may have one step more than the others.

    Example:
        >>> for share in shared_out([Range(7, 0, 6), Range(2, 0, 4)], 2, replicas=2):
        ...     print(share)
        [Range(part=7, start=0, stop=6)]
        [Range(part=2, start=0, stop=4)]
    """
    known = [part for part in parts if part.stop != TO_ITS_END]
    unbounded = [part for part in parts if part.stop == TO_ITS_END]
    rows = sum(part.rows for part in known)
    steps, remainder = divmod(-(-rows // step_rows), replicas)
    sizes = [(steps + (i < remainder)) * step_rows for i in range(replicas)]
    shares = portions(known, sizes)
    return [[*share, *unbounded[i::replicas]] for i, share in enumerate(shares)]
