"""Which replica trains on which rows: leases, handed out dynamically or partitioned.

Each row is leased once per epoch; what a failed replica had not finished is leased
again. Decides only: no I/O, no clock, no thread.

An epoch may be divided into sync intervals: all replicas meet after each, and then
nobody holds a lease, so that the rows that remain describe where the epoch is.
"""

import bisect
import itertools
import zlib
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from typing_extensions import override

from daskdl.channel.protocol import (
    IntervalNumber,
    Natural,
    Positive,
    RunId,
    check,
    hints_of,
)
from daskdl.config import Timeouts

TO_ITS_END = -1  # where a range stops whose part has no known length

NOBODY = -1  # the replica of rows that anybody may take

IsNear = Callable[[str], bool]  # whether a worker holds the result of a Dask task


class Range(NamedTuple):
    """Consecutive rows of a part, by position in the order they are trained on."""

    part: Natural
    start: Natural
    stop: IntervalNumber  # exclusive, or `TO_ITS_END`

    @property
    def rows(self) -> int:
        """How many; a part of unknown length counts as one."""
        return 1 if self.stop == TO_ITS_END else self.stop - self.start


class Lease(NamedTuple):
    """Rows that are leased to a replica at a time."""

    number: int  # from 0 in its phase and epoch
    ranges: tuple[Range, ...]  # in the order to train on them
    keys: Mapping[int, str] = MappingProxyType({})  # Dask's, of its parts; "": none
    ahead: int | None = None  # the part that its replica will probably load next

    @property
    def rows(self) -> int:
        """In all its ranges."""
        return sum(one.rows for one in self.ranges)


class RemainingWork(NamedTuple):
    """Rows that are in no lease."""

    replica: IntervalNumber  # that would train on them next, or `NOBODY`
    ranges: tuple[Range, ...]  # in the order to train on them


class Done(NamedTuple):
    """What a replica has trained on in an epoch, in leases that it finished."""

    loss_sum: float
    examples: Natural


Finished = Sequence[Mapping[str, Any]]  # of each what a `FinishedLease` has


class SyncPoint(NamedTuple):
    """Where an epoch is when all replicas meet between two sync intervals."""

    order: int  # checksum of what ranges depend on, see `RunSpec.order`
    remaining: Sequence[RemainingWork]
    departed: Sequence[Done] = ()  # of replicas that trained in it and have gone

    @classmethod
    def from_wire(cls, fields: Sequence[Any]) -> Self:
        """Read one as it came over the wire, where a tuple has no names."""
        order, remaining, departed = fields
        work = [
            RemainingWork(replica, tuple(Range(*one) for one in ranges))
            for replica, ranges in remaining
        ]
        return cls(order, work, done_of(departed))

    def to_wire(self) -> list[Any]:
        """The same as plain lists."""
        remaining = [[r, [list(one) for one in own]] for r, own in self.remaining]
        return [self.order, remaining, [list(one) for one in self.departed]]


def done_of(fields: Iterable[Any]) -> list[Done]:
    """Read what was done as it came over the wire, where a tuple has no names."""
    return [Done(*one) for one in fields]


class PartitionSizes(NamedTuple):
    """How much there is to train on in a phase, and in which portions."""

    rows: tuple[IntervalNumber, ...]  # of each part; -1 if only reading it tells
    keys: tuple[str, ...]  # of each part that a worker holds, else ""
    step_rows: Positive  # per optimizer step of one replica
    lease_rows: Positive  # aimed at; a multiple of `step_rows`


class SyncIntervals(NamedTuple):
    """How training epochs are divided: all replicas meet after each interval."""

    replicas: Positive = 1  # that the run begins with
    rows: Positive | None = None  # of each in one interval; None: as many as there are
    seconds: float | None = None  # after which an interval is ended; None: it is not
    resumed: SyncPoint | None = None  # where the first epoch begins; None: at its start


WHOLE_EPOCHS = SyncIntervals()

# Fine enough that a replica twice as slow as the others delays them little at the end
# of an epoch, coarse enough that a lease is worth a request.
LEASES_PER_REPLICA = 8


def partition_sizes(
    rows: Sequence[int],
    step_rows: int,
    replicas: int,
    keys: Sequence[str] | None = None,
) -> PartitionSizes:
    """Choose the usual size of a lease, about eight for each replica.

    Args:
        rows: Of each part; -1 if that is not known.
        step_rows: Per optimizer step of one replica.
        replicas: How many share it.
        keys: Dask key of each part that a worker holds, "" of others; None: all are
            loaded from elsewhere.

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
    """What a client asks for; plain values, sent as a dict.

    Attributes:
        run: RunId of the run, a random unsigned 64-bit integer.
        replicas: Worker address of each initial replica.
        sizes: What there is of each phase ("train", "validation").
        seed: Of the order of the training parts; None keeps their order.
        epochs_before: Of earlier fits, so that each has an order of its own.
        synchronous: Static partition instead of dynamic leases.
        relay_bytes: Bound of the relay's queue for each replica.
        min_replicas: With fewer active ones nobody gets a lease.
        timeouts: Bounds on waiting, seconds, by name.
        relayed: Whether the scheduler passes updates on; see `Routing`.
        first_epoch: That is trained, counted from 0; those before were, elsewhere.
        intervals: How the epochs are divided.
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

    @property
    def order(self) -> int:
        """A checksum of what ranges of rows depend on: the data, and their order."""
        rows = self.sizes["train"].rows
        return zlib.crc32(repr((rows, self.seed, self.epochs_before)).encode())

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> Self:
        """Read a specification as it came over the wire, where a tuple has no names.

        Raises:
            ValueError: If it is none that anybody makes, or a TypeError.
        """
        check(fields, hints_of(cls))
        sizes = {phase: PartitionSizes(*own) for phase, own in fields["sizes"].items()}
        intervals = SyncIntervals(*fields.get("intervals", WHOLE_EPOCHS))
        if intervals.resumed is not None:
            resumed = SyncPoint.from_wire(intervals.resumed)
            intervals = intervals._replace(resumed=resumed)
        spec = cls(**{**fields, "sizes": sizes, "intervals": intervals})
        if not spec.replicas or "train" not in sizes:
            raise ValueError("a run needs replicas, and data to train on")
        if any(len(rows) != len(keys) for rows, keys, *_ in sizes.values()):
            raise ValueError("each part has one number of rows and one key")
        Timeouts(**spec.timeouts)
        return spec


def part_order(parts: int, epoch: int, seed: int | None) -> list[int]:
    """The order in which an epoch goes through the parts, however many replicas.

    Args:
        parts: How many there are.
        epoch: Counted from 0; each has its own order.
        seed: None keeps the order of the data.
    """
    if seed is None:
        return list(range(parts))
    return [int(i) for i in np.random.default_rng([seed, epoch]).permutation(parts)]


def whole_parts(order: Sequence[int], rows: Sequence[int]) -> list[Range]:
    """All rows of all parts that have any, in this order.

    Args:
        order: Of the parts.
        rows: Of each part; -1 where that is not known.

    Example:
        >>> whole_parts([2, 1, 0], [4, 0, -1])
        [Range(part=2, start=0, stop=-1), Range(part=0, start=0, stop=4)]
    """
    return [Range(part, 0, rows[part]) for part in order if rows[part] != 0]


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same rows in the same order, in as few ranges as possible.

    Example:
        >>> joined([Range(7, 0, 4), Range(7, 4, 6), Range(2, 6, 8)])
        (Range(part=7, start=0, stop=6), Range(part=2, start=6, stop=8))
    """
    found: list[Range] = []
    for one in ranges:
        if found and found[-1][::2] == (one.part, one.start):
            found[-1] = found[-1]._replace(stop=one.stop)
        else:
            found.append(one)
    return tuple(found)


def split(own: Range, rows: int) -> tuple[Range, Range]:
    """The first rows of a range, and the others."""
    middle = own.start + rows
    return own._replace(stop=middle), own._replace(start=middle)


def portions(ranges: Iterable[Range], sizes: Iterable[int]) -> Iterator[list[Range]]:
    """Cut ranges, one after the other, into portions of so many rows.

    Args:
        ranges: Of known length.
        sizes: Rows of each portion; the last ones may get fewer, or none.

    Example:
        >>> for portion in portions([Range(7, 0, 6), Range(2, 0, 4)], [8, 8]):
        ...     print(portion)
        [Range(part=7, start=0, stop=6), Range(part=2, start=0, stop=2)]
        [Range(part=2, start=2, stop=4)]
    """
    rest = deque(ranges)
    for size in sizes:
        portion = []
        while rest and size > 0:
            own = rest.popleft()
            if own.rows > size:
                own, later = split(own, size)
                rest.appendleft(later)
            portion.append(own)
            size -= own.rows
        yield portion


class Leasing(ABC):
    """The leases of one phase, epoch after epoch.

    Args:
        sizes: How much there is.
        seed: Of the order of the parts, another one in each epoch; None: as they are.
        epochs_before: Of earlier fits, so that each has an order of its own.
        intervals: How the epochs are divided.

    Attributes:
        epoch: That runs, counted from 0; -1 before the first.
        repeated: Leases granted again in this epoch because their replica failed.
        unfinished: Rows of this epoch that nobody has finished yet.
    """

    shared_limit: ClassVar[bool]  # of a sync interval: for all together, or for each

    epoch: int
    repeated: int
    unfinished: int
    _limit: int | None  # of rows leased in a sync interval

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
        """Begin an epoch, unless it has begun.

        Args:
            epoch: Counted from 0; never one before the last one.
            replicas: That train now.

        Raises:
            ValueError: If the epoch is over.
        """
        if epoch < self.epoch:
            raise ValueError(f"epoch {epoch} is over, this is {self.epoch}")
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
        """Lease rows to a replica, with the keys of their parts; None: not now.

        Args:
            replica: Who asks.
            is_near: Whether its worker holds the part of a key; None: all parts are
                equally far.
        """
        if not self.has_one_for(replica):
            return None
        lease = self._take(replica, is_near if self._any_held else None)
        parts = dict.fromkeys(one.part for one in lease.ranges)
        if lease.ahead is not None:
            parts.setdefault(lease.ahead)
        lease = lease._replace(keys={part: self._keys[part] for part in parts})
        self._leased[self._counted(replica)] += lease.rows
        self._held.setdefault(replica, {})[lease.number] = lease
        return lease

    def has_one_for(self, replica: int) -> bool:
        """Whether `take` would lease this replica rows now."""
        within = (
            self._limit is None or self._leased[self._counted(replica)] < self._limit
        )
        return within and (bool(self._again) or self._has_free(replica))

    def finish(self, replica: int, number: int) -> bool:
        """A replica has finished its lease; False if it was not its own."""
        lease = self._held.get(replica, {}).pop(number, None)
        self.unfinished -= 0 if lease is None else lease.rows
        return lease is not None

    def lose(self, replica: int) -> None:
        """Free what a failed replica held or would have got."""
        held = self._held.pop(replica, {})
        self._again.extend(held[number] for number in sorted(held))

    def end_interval(self) -> None:
        """End the sync interval as soon as nobody is behind in it."""
        self._limit = max(self._leased.values(), default=0)

    def begin_interval(self) -> None:
        """All have met: go on."""
        self._leased.clear()
        self._limit = self._interval_rows

    def interval_is_over(self, replicas: Iterable[int]) -> bool:
        """Whether there is more, but for nobody before the next interval."""
        return (
            self._limit is not None
            and self.unfinished > 0
            and not any(self._held.values())
            and not any(self.has_one_for(replica) for replica in replicas)
        )

    def held_key(self, part: int) -> str:
        """The Dask key of a part that a worker holds, as it is now.

        Raises:
            ValueError: If none ever has, or a LookupError if there is no such part.
        """
        if not self._keys[part]:
            raise ValueError(f"no worker holds part {part}")
        return self._keys[part]

    def replace_key(self, part: int, key: str) -> None:
        """A part that was lost with its worker is computed again; see `held_key`."""
        self.held_key(part)
        self._keys[part] = key

    @abstractmethod
    def remaining(self) -> list[RemainingWork]:
        """Rows that nobody has trained on, while nobody holds a lease."""

    def _begin(
        self,
        order: Sequence[int],
        remaining: Sequence[RemainingWork],
        replicas: Sequence[int],
    ) -> None:
        """Begin an epoch with what remains of it, which may be all.

        Args:
            order: Of the parts.
            remaining: Of the epoch.
            replicas: That train now.
        """
        self.repeated = 0
        self.unfinished = sum(one.rows for work in remaining for one in work.ranges)
        self._count = 0  # leases cut so far
        self._limit = self._interval_rows
        self._leased: Counter[int] = Counter()  # in this interval, by replica
        self._held: dict[int, dict[int, Lease]] = {}  # by replica, and by number
        self._again: deque[Lease] = deque()  # those of failed replicas

    @abstractmethod
    def _has_free(self, replica: int) -> bool:
        """Whether a replica could get rows that are in no lease."""

    @abstractmethod
    def _take(self, replica: int, is_near: IsNear | None) -> Lease:
        """Lease the replica what it gets; there is something."""

    def _counted(self, replica: int) -> int:
        return NOBODY if self.shared_limit else replica

    def _cut_lease(self, ranges: Sequence[Range], ahead: int | None) -> Lease:
        self._count += 1
        return Lease(self._count - 1, tuple(ranges), ahead=ahead)

    def _repeat(self) -> Lease:
        """Lease again, as it was, what was lost first; nothing is known to follow."""
        self.repeated += 1
        return self._again.popleft()._replace(ahead=None)


# Enough that of parts spread over the workers at random one is found nearly always
# (1 - exp(-4) = 98 %), few enough that an answer takes no longer with more parts.
LOOKS_PER_REPLICA, LEAST_LOOKS = 4, 64

# To load a part takes up to so much of the time to train on it: it is not loaded once
# more for fewer rows than that.
LOADING = 0.005


class DynamicLeasing(Leasing):
    """A replica goes through its parts one after the other, so that each loads once.

    A new part is one that its worker holds, else the next one in order; it is reserved
    when the one before is begun, to be loaded meanwhile. Of a part that is more than
    one replica's share, several replicas get stretches. At the end, when all parts are
    reserved or begun, who has nothing left takes reserved ones, then shares begun ones,
    and leases become smaller, so that all come to the end at about the same time.
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
        # The next one is the last, so that it goes without moving the others.
        self._parts = [
            stretch
            for work in remaining
            for part in work.ranges
            for stretch in stretches(part, most, self._sizes.step_rows)
        ][::-1]
        self._free = list(range(len(self._parts)))  # positions of those nobody begun
        self._rests: list[Range] = []  # of parts that failed replicas had
        self._own: dict[int, Range] = {}  # what is free of the part a replica is on
        self._reserved: dict[int, Range] = {}  # and the part that it goes on with
        self._far: set[int] = set()  # replicas whose reserved part is elsewhere
        self._looked: dict[int, int] = {}  # where a replica looks on for a near part
        self._takers: set[int] = set()

    @override
    def remaining(self) -> list[RemainingWork]:
        free = (self._parts[position] for position in self._free)
        begun = (*self._rests, *self._own.values(), *self._reserved.values())
        again = (one for lease in self._again for one in lease.ranges)
        ranges = [*free, *begun, *again]
        ranges.sort(key=lambda one: (self._order[one.part], one.start))
        return [RemainingWork(NOBODY, joined(ranges))]

    @override
    def _has_free(self, replica: int) -> bool:
        return bool(
            replica in self._own
            or self._free
            or self._rests
            or self._reserved
            or self._ample()
        )

    @override
    def lose(self, replica: int) -> None:
        super().lose(replica)
        self._takers.discard(replica)
        for parts in (self._own, self._reserved):
            if replica in parts:
                self._rests.append(parts.pop(replica))

    @override
    def _take(self, replica: int, is_near: IsNear | None) -> Lease:
        self._takers.add(replica)
        if not self._go_on(replica, is_near):
            if self._again:
                return self._repeat()
            self._join_in(replica)
        ranges: list[Range] = []
        rows, most = 0, self._lease_rows()
        while rows < most and self._go_on(replica, is_near):
            own = self._own.pop(replica)
            if own.stop == TO_ITS_END:
                if ranges:  # it is leased alone
                    self._own[replica] = own
                    break
                most = 0
            elif own.rows > most - rows:
                own, self._own[replica] = split(own, most - rows)
            ranges.append(own)
            rows += own.rows
        self._unleased -= rows
        ahead = self._reserved[replica].part if replica in self._reserved else None
        return self._cut_lease(ranges, None if ahead == ranges[-1].part else ahead)

    def _lease_rows(self) -> int:
        """The size aimed at, but half of a fair share of what is free at the end."""
        step, rows = self._sizes.step_rows, self._unleased
        if self._limit is not None:
            rows = min(rows, self._limit - self._leased[NOBODY])
        share = -(-rows // (2 * len(self._takers) * step)) * step
        return min(self._sizes.lease_rows, share)

    # ---- parts of its own

    def _go_on(self, replica: int, is_near: IsNear | None) -> bool:
        """Whether a replica has a part to go on with; the next one is reserved."""
        if replica not in self._own:
            if not self._reserve(replica, is_near):
                return False
            self._own[replica] = self._reserved.pop(replica)
        self._reserve(replica, is_near)
        return True

    def _reserve(self, replica: int, is_near: IsNear | None) -> bool:
        if replica not in self._reserved:
            part = None if is_near is None else self._find_near(replica, is_near)
            self._far.discard(replica)
            if part is None:
                self._far.add(replica)
                if self._rests:
                    part = self._rests.pop(0)
                elif self._free:
                    part = self._parts[self._free.pop()]
                else:
                    return False
            self._reserved[replica] = part
        return True

    def _find_near(self, replica: int, is_near: IsNear) -> Range | None:
        """A part that its worker holds, and nobody is on, as far as is looked for."""

        def near(part: Range) -> bool:
            key = self._keys[part.part]
            return key != "" and is_near(key)

        for rest in self._rests:
            if near(rest):
                self._rests.remove(rest)
                return rest
        # It looks at some, and the next time goes on from there.
        most = max(LOOKS_PER_REPLICA * len(self._takers), LEAST_LOOKS)
        first = self._looked.get(replica, len(self._parts))
        at = bisect.bisect_right(self._free, first) - 1
        for index in range(at, at - min(most, len(self._free)), -1):
            self._looked[replica] = self._free[index] - 1
            if near(self._parts[self._free[index]]):
                return self._parts[self._free.pop(index)]
        # What is reserved for one that would have to fetch it from here.
        for other in sorted(self._far & self._reserved.keys()):
            if near(self._reserved[other]):
                return self._reserved.pop(other)
        return None

    # ---- what others have

    def _ample(self) -> list[int]:
        """Replicas that have enough of their part left to share it."""
        rows = self._sizes.rows
        own = self._own.items()
        return [r for r, part in own if part.rows > LOADING * rows[part.part]]

    def _join_in(self, replica: int) -> None:
        """Take over some of what others would do next."""

        def to_do(other: int) -> int:
            parts = (self._own.get(other), self._reserved.get(other))
            return sum(part.rows for part in parts if part is not None)

        if self._reserved:
            busiest = max(self._reserved, key=to_do)
            self._own[replica] = self._reserved.pop(busiest)
            return
        busiest = max(sorted(self._ample()), key=to_do)
        own, step = self._own.pop(busiest), self._sizes.step_rows
        if own.rows >= 2 * step:  # half of it, in whole steps; else all
            loading = int(LOADING * self._sizes.rows[own.part])
            kept = (own.rows + loading + step) // (2 * step)
            most = own.rows // step - 1
            self._own[busiest], own = split(own, min(kept, most) * step)
        self._own[replica] = own


def stretches(part: Range, most: int, step_rows: int) -> list[Range]:
    """Cut a part into equal ones of about so many rows, in whole steps.

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
    """For synchronous runs, which must be repeatable: as many steps for each replica.

    The rows of the epoch are numbered through in the order of the parts and cut into
    steps; each replica gets consecutive ones. So neither who makes a step nor what is
    in it depends on how the data are cut into parts, or on where they are. Parts of
    unknown length are dealt out in turn. What a failed replica had goes to all others.

    Of an epoch that is resumed each goes on with what a replica had left if there are
    as many of them as then; else all share it anew.
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
        own = sorted(work for work in remaining if work.replica != NOBODY)
        free = [work for work in remaining if work.replica == NOBODY]
        shares: list[Sequence[Range]] = [work.ranges for work in own]
        if len(own) != len(replicas):
            parts = [one for work in remaining for one in work.ranges]
            free = []
            shares = [*shared_out(parts, self._sizes.step_rows, len(replicas))]
        self._orphans = self._cut([one for work in free for one in work.ranges])
        cut = map(self._cut, shares)
        self._shares = dict(zip(sorted(replicas), cut, strict=True))

    def _cut(self, share: Sequence[Range]) -> deque[tuple[Range, ...]]:
        """The leases of a share; none crosses the end of a sync interval."""
        known = [one for one in share if one.stop != TO_ITS_END]
        rows, most = sum(one.rows for one in known), self._sizes.lease_rows
        interval = self._interval_rows or max(rows, 1)
        sizes = [min(most, interval - at) for at in range(0, interval, most)]
        intervals = -(-rows // interval)
        leases = map(tuple, portions(known, sizes * intervals))
        whole = ((one,) for one in share if one.stop == TO_ITS_END)
        return deque([*filter(None, leases), *whole])

    @override
    def remaining(self) -> list[RemainingWork]:
        flat = itertools.chain.from_iterable
        work = [RemainingWork(r, joined(flat(own))) for r, own in self._shares.items()]
        again = (lease.ranges for lease in self._again)
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
        # Where copies happen to be must not change a run that is to be repeatable.
        share = self._shares.get(replica) or self._orphans
        if not share:
            return self._repeat()
        ranges = share.popleft()
        later = (
            one.part for own in share for one in own if one.part != ranges[-1].part
        )
        return self._cut_lease(ranges, next(later, None))


def shared_out(
    parts: Sequence[Range], step_rows: int, replicas: int
) -> list[list[Range]]:
    """Cut the rows of some parts into a share for each replica, in whole steps.

    The first shares may have one step more than the others.

    Example:
        >>> for share in shared_out([Range(7, 0, 6), Range(2, 0, 4)], 2, replicas=2):
        ...     print(share)
        [Range(part=7, start=0, stop=6)]
        [Range(part=2, start=0, stop=4)]
    """
    known = [part for part in parts if part.stop != TO_ITS_END]
    whole = [part for part in parts if part.stop == TO_ITS_END]
    rows = sum(part.rows for part in known)
    steps, more = divmod(-(-rows // step_rows), replicas)
    sizes = [(steps + (i < more)) * step_rows for i in range(replicas)]
    shares = portions(known, sizes)
    return [[*share, *whole[i::replicas]] for i, share in enumerate(shares)]
