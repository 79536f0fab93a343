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
from typing import Any, NamedTuple, Self

import numpy as np
from typing_extensions import override

from daskdl.channel.protocol import (
    RELAYED,
    FromMinusOne,
    Identity,
    Positive,
    Whole,
    check,
    hints_of,
)
from daskdl.config import Timeouts

TO_ITS_END = -1  # where a range stops whose part has no known length

NOBODY = -1  # the replica of rows that anybody may take

IsNear = Callable[[int], bool]  # whether the worker of who asks holds a part


class Range(NamedTuple):
    """Consecutive rows of a part, by position in the order they are trained on."""

    part: Whole
    start: Whole
    stop: FromMinusOne  # exclusive, or `TO_ITS_END`

    @property
    def is_whole(self) -> bool:
        """Whether it is a part of unknown length, which nobody can share."""
        return self.stop == TO_ITS_END

    @property
    def rows(self) -> int:
        """How many; a part of unknown length counts as one."""
        return 1 if self.is_whole else self.stop - self.start


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
    """Rows that a replica would have trained on next."""

    replica: FromMinusOne  # or `NOBODY`
    ranges: tuple[Range, ...]  # in the order to train on them


class Done(NamedTuple):
    """What a replica has trained on in an epoch, in leases that it finished."""

    loss_sum: float
    examples: Whole


Finished = Sequence[Mapping[str, Any]]  # of each what a `FinishedLease` has


class SyncPoint(NamedTuple):
    """Where an epoch is when all replicas meet between two sync intervals."""

    order: int  # checksum of what ranges depend on, see `RunSpec.order`
    left: Sequence[RemainingWork]
    departed: Sequence[Done] = ()  # of those that trained in it, and are not there

    @classmethod
    def from_wire(cls, fields: Sequence[Any]) -> Self:
        """Read one as it came over the wire, where a tuple has no names."""
        order, left, departed = fields
        return cls(order, _remaining_of(left), done_of(departed))

    def to_wire(self) -> list[Any]:
        """The same as plain lists."""
        left = [[r, [list(one) for one in own]] for r, own in self.left]
        return [self.order, left, [list(one) for one in self.departed]]


class PartitionSizes(NamedTuple):
    """How much there is to train on in a phase, and in which portions."""

    rows: tuple[FromMinusOne, ...]  # of each part; -1 if only reading it tells
    keys: tuple[str, ...]  # of each part that a worker holds, else ""
    step_rows: Positive  # per optimizer step of one replica
    lease_rows: Positive  # aimed at; a multiple of `step_rows`


class SyncIntervals(NamedTuple):
    """How training epochs are divided: all replicas meet after each interval."""

    replicas: Positive = 1  # that the run begins with
    rows: Positive | None = None  # of each in one interval; None: as many as there are
    seconds: float | None = None  # after which an interval is ended; None: it is not
    left: Sequence[RemainingWork] | None = None  # of the first epoch; None: all of it
    departed: Sequence[Done] = ()  # of those that trained in that, in another run

    @classmethod
    def from_wire(cls, fields: Sequence[Any]) -> Self:
        """Read them as they came over the wire, where a tuple has no names."""
        replicas, rows, seconds, left, departed = fields
        left = None if left is None else _remaining_of(left)
        return cls(replicas, rows, seconds, left, done_of(departed))


def _remaining_of(fields: Iterable[Any]) -> list[RemainingWork]:
    return [
        RemainingWork(replica, tuple(Range(*one) for one in ranges))
        for replica, ranges in fields
    ]


def done_of(fields: Iterable[Any]) -> list[Done]:
    """Read what was done as it came over the wire, where a tuple has no names."""
    return [Done(*one) for one in fields]


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
        run: Identity of the run, a random unsigned 64-bit integer.
        replicas: Worker address of each initial replica.
        sizes: What there is of each phase ("train", "validation").
        seed: Of the order of the training parts; None keeps their order.
        epochs_before: Of earlier fits, so that each has an order of its own.
        synchronous: Static partition instead of dynamic leases.
        relay_bytes: Bound of the relay's queue for each replica.
        min_replicas: With fewer active ones nobody gets a lease.
        timeouts: Bounds on waiting, seconds, by name.
        routing: ``"plain"``, or ``"mesh"``: then no updates come here.
        first_epoch: That is trained, counted from 0; those before were, elsewhere.
        intervals: How the epochs are divided.
    """

    run: Identity
    replicas: Mapping[Whole, str]
    sizes: Mapping[str, PartitionSizes]
    seed: Whole | None
    epochs_before: Whole
    synchronous: bool
    relay_bytes: Whole
    min_replicas: Whole
    timeouts: Mapping[str, float]
    routing: str = "plain"
    first_epoch: Whole = 0
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
        intervals = SyncIntervals.from_wire(fields.get("intervals", WHOLE_EPOCHS))
        spec = cls(**{**fields, "sizes": sizes, "intervals": intervals})
        if not spec.replicas or "train" not in sizes:
            raise ValueError("a run needs replicas, and data to train on")
        if any(len(rows) != len(keys) for rows, keys, *_ in sizes.values()):
            raise ValueError("each part has one number of rows and one key")
        if spec.routing not in RELAYED:
            known = " or ".join(RELAYED)
            raise ValueError(f"routing must be {known}, got {spec.routing!r}")
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
        before = found[-1] if found else None
        if before is not None and before[::2] == (one.part, one.start):
            found[-1] = before._replace(stop=one.stop)
        else:
            found.append(one)
    return tuple(found)


def ranges_in(left: Iterable[RemainingWork]) -> list[Range]:
    """All that remains, whoever would have got it."""
    return [one for each in left for one in each.ranges]


class Leasing(ABC):
    """Leases of one epoch, handed out one at a time.

    Args:
        rows: To be leased in all; a part of unknown length counts as one.
        interval_rows: Limit of one sync interval, see `_counted`; None: no limit.

    Attributes:
        repeated: Leases granted again because their replica failed.
    """

    repeated: int

    def __init__(self, rows: int, interval_rows: int | None = None) -> None:
        self.repeated = 0
        self._interval_rows = self._limit = interval_rows
        self._granted: Counter[int] = Counter()  # rows in this interval, by replica
        self._count = 0  # leases cut so far
        self._free = rows  # in no lease yet
        self._unfinished = rows
        self._held: dict[int, dict[int, Lease]] = {}  # by replica, and by number
        self._again: deque[Lease] = deque()  # those of failed replicas

    def take(self, replica: int, is_near: IsNear | None = None) -> Lease | None:
        """Lease rows to a replica; None if there are none left for it.

        Args:
            replica: Who asks.
            is_near: Tells parts that its worker holds from others; None: all are
                equally far.
        """
        return self._take(replica, is_near) if self._has_room(replica) else None

    def has_one_for(self, replica: int) -> bool:
        """Whether `take` would lease this replica rows now."""
        return self._has_room(replica) and self._has_one_for(replica)

    def end_interval(self) -> None:
        """End the sync interval as soon as nobody is behind in it."""
        self._limit = max(map(self._counted, self._granted), default=0)

    def begin_interval(self) -> None:
        """All have met: go on."""
        self._granted.clear()
        self._limit = self._interval_rows

    def interval_is_over(self, members: Iterable[int]) -> bool:
        """Whether there is more, but for nobody before the next interval."""
        return (
            self._limit is not None
            and self._unfinished > 0
            and not any(self._held.values())
            and not any(self.has_one_for(replica) for replica in members)
        )

    def finish(self, replica: int, number: int) -> bool:
        """A replica has finished its lease; False if it was not its own."""
        lease = self._held.get(replica, {}).pop(number, None)
        self._unfinished -= 0 if lease is None else lease.rows
        return lease is not None

    def lose(self, replica: int) -> None:
        """Free what a failed replica held or would have got."""
        held = self._held.pop(replica, {})
        self._again.extend(held[number] for number in sorted(held))

    def unfinished(self) -> int:
        """Rows that nobody has finished yet."""
        return self._unfinished

    @abstractmethod
    def left(self) -> list[RemainingWork]:
        """Rows that nobody has trained on, while nobody holds a lease."""

    @abstractmethod
    def _counted(self, replica: int) -> int:
        """Rows leased in this interval that count towards a replica's limit."""

    @abstractmethod
    def _take(self, replica: int, is_near: IsNear | None) -> Lease | None:
        """See `take`; within an interval."""

    @abstractmethod
    def _has_one_for(self, replica: int) -> bool:
        """See `has_one_for`; within an interval."""

    def _has_room(self, replica: int) -> bool:
        return self._limit is None or self._counted(replica) < self._limit

    def _cut_lease(
        self, replica: int, ranges: Sequence[Range], ahead: int | None
    ) -> Lease:
        lease = Lease(self._count, tuple(ranges), ahead=ahead)
        self._count += 1
        self._free -= lease.rows
        return self._grant(replica, lease)

    def _repeat(self, replica: int) -> Lease | None:
        """Lease again, as it was, what was lost first; nothing is known to follow."""
        if not self._again:
            return None
        self.repeated += 1
        return self._grant(replica, self._again.popleft()._replace(ahead=None))

    def _grant(self, replica: int, lease: Lease) -> Lease:
        self._granted[replica] += lease.rows
        self._held.setdefault(replica, {})[lease.number] = lease
        return lease


class FreeList:
    """Positions 0 to n - 1, of which there are ever fewer.

    Finding the next one takes amortised constant time, however many have gone: each
    position that has gone points on towards the next that is left, and the way is
    shortened when it is walked.

    Args:
        count: How many there are at first.
    """

    def __init__(self, count: int) -> None:
        self._next = list(range(count + 1))
        self._end = count
        self._left = count

    def __len__(self) -> int:
        return self._left

    def first(self, start: int = 0) -> int | None:
        """The first that is left from a position on, None if there is none."""
        at, following = start, self._next
        while following[at] != at:
            following[at] = following[following[at]]
            at = following[at]
        return None if at == self._end else at

    def remove(self, position: int) -> None:
        """One that is left goes."""
        self._next[position] = position + 1
        self._left -= 1

    def round(self, start: int, most: int) -> Iterator[int]:
        """Those that are left, from a position on and round, but not too many.

        Args:
            start: Where to begin, below the count.
            most: So many, or all if there are fewer.
        """
        at = start
        for _ in range(min(most, self._left)):
            position = self.first(at)
            if position is None:
                position = self.first()
            assert position is not None  # some are left
            yield position
            at = position + 1


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

    Args:
        order: Of the parts.
        sizes: How much there is.
        interval_rows: Of all replicas together in one sync interval; None: all.
        left: Of an epoch that was broken off; None: all of it.
    """

    def __init__(
        self,
        order: Sequence[int],
        sizes: PartitionSizes,
        interval_rows: int | None = None,
        left: Sequence[RemainingWork] | None = None,
    ) -> None:
        parts = whole_parts(order, sizes.rows) if left is None else ranges_in(left)
        super().__init__(sum(part.rows for part in parts), interval_rows)
        self._order = {part: i for i, part in enumerate(order)}
        self._sizes = sizes
        share = LEASES_PER_REPLICA * sizes.lease_rows
        self._parts = [
            stretch
            for part in parts
            for stretch in stretches(part, share, sizes.step_rows)
        ]
        self._untouched = FreeList(len(self._parts))  # positions in `_parts`
        self._rests: list[Range] = []  # of parts that failed replicas had
        self._own: dict[int, Range] = {}  # what is free of the part a replica is on
        self._ample: set[int] = set()  # replicas that have enough of it to share
        self._reserved: dict[int, Range] = {}  # and the part that it goes on with
        self._far: set[int] = set()  # replicas whose reserved part is elsewhere
        self._looked: dict[int, int] = {}  # where a replica looks on for a near part
        self._takers: set[int] = set()

    @override
    def _counted(self, replica: int) -> int:
        return self._granted.total()

    @override
    def left(self) -> list[RemainingWork]:
        positions = self._untouched.round(0, len(self._untouched))
        untouched = (self._parts[position] for position in positions)
        begun = (*self._rests, *self._own.values(), *self._reserved.values())
        again = (one for lease in self._again for one in lease.ranges)
        ranges = [*untouched, *begun, *again]
        ranges.sort(key=lambda one: (self._order[one.part], one.start))
        return [RemainingWork(NOBODY, joined(ranges))]

    @override
    def _take(self, replica: int, is_near: IsNear | None) -> Lease | None:
        self._takers.add(replica)
        if not self._go_on(replica, is_near):
            again = self._repeat(replica)
            if again is not None or not self._join_in(replica):
                return again
        ranges = self._cut(replica, is_near)
        reserved = self._reserved.get(replica)
        ahead = None if reserved is None else reserved.part
        if ahead == ranges[-1].part:  # it is on it already
            ahead = None
        return self._cut_lease(replica, ranges, ahead)

    @override
    def _has_one_for(self, replica: int) -> bool:
        return bool(
            replica in self._own
            or self._untouched
            or self._rests
            or self._again
            or self._reserved
            or self._ample
        )

    @override
    def lose(self, replica: int) -> None:
        super().lose(replica)
        self._takers.discard(replica)
        rests = (self._go_to(replica, None), self._reserved.pop(replica, None))
        self._rests += [rest for rest in rests if rest is not None]

    # ---- one lease

    def _cut(self, replica: int, is_near: IsNear | None) -> list[Range]:
        """The next rows of a replica that has some: of its part, and of those after."""
        ranges: list[Range] = []
        room = self._lease_rows()
        while room > 0 and self._go_on(replica, is_near):
            own = self._own[replica]
            if own.is_whole and ranges:
                break
            rest = None
            if own.rows > room:
                own, rest = split(own, room)
            self._go_to(replica, rest)
            ranges.append(own)
            room = 0 if own.is_whole else room - own.rows
        return ranges

    def _go_to(self, replica: int, part: Range | None) -> Range | None:
        """From now on a replica is on a part, or on none; returns what it was on."""
        former = self._own.pop(replica, None)
        self._ample.discard(replica)
        if part is not None:
            self._own[replica] = part
            if part.rows > LOADING * self._sizes.rows[part.part]:
                self._ample.add(replica)
        return former

    def _lease_rows(self) -> int:
        """The size aimed at, but half of a fair share of what is free at the end."""
        step = self._sizes.step_rows
        free = self._free
        if self._limit is not None:
            free = min(free, self._limit - self._granted.total())
        share = -(-free // (2 * len(self._takers) * step)) * step
        return min(self._sizes.lease_rows, share)

    # ---- parts of its own

    def _go_on(self, replica: int, is_near: IsNear | None) -> bool:
        """Whether a replica has a part to go on with; the next one is reserved."""
        if replica not in self._own:
            if not self._reserve(replica, is_near):
                return False
            self._go_to(replica, self._reserved.pop(replica))
        self._reserve(replica, is_near)
        return True

    def _reserve(self, replica: int, is_near: IsNear | None) -> bool:
        if replica in self._reserved:
            return True
        part = None if is_near is None else self._choose_near(replica, is_near)
        self._far.discard(replica)
        if part is None:
            part = self._choose_next()
            self._far.add(replica)
        if part is not None:
            self._reserved[replica] = part
        return part is not None

    def _choose_next(self) -> Range | None:
        if self._rests:
            return self._rests.pop(0)
        position = self._untouched.first()
        if position is None:
            return None
        self._untouched.remove(position)
        return self._parts[position]

    def _choose_near(self, replica: int, is_near: IsNear) -> Range | None:
        for rest in self._rests:
            if is_near(rest.part):
                self._rests.remove(rest)
                return rest
        return self._find_near(replica, is_near) or self._claim_near(replica, is_near)

    def _find_near(self, replica: int, is_near: IsNear) -> Range | None:
        """Look at some untouched parts; the next time from there on."""
        most = max(LOOKS_PER_REPLICA * len(self._takers), LEAST_LOOKS)
        position = -1
        for position in self._untouched.round(self._looked.get(replica, 0), most):
            if is_near(self._parts[position].part):
                self._untouched.remove(position)
                self._looked[replica] = position
                return self._parts[position]
        self._looked[replica] = position + 1
        return None

    def _claim_near(self, replica: int, is_near: IsNear) -> Range | None:
        """Take what is reserved for one that would have to fetch it from here."""
        for other in self._far & self._reserved.keys():
            if is_near(self._reserved[other].part):
                return self._reserved.pop(other)
        return None

    # ---- what others have

    def _join_in(self, replica: int) -> bool:
        """Take over some of what others would do next; False if there is nothing."""
        if self._reserved:
            busiest = max(self._reserved, key=self._to_do)
            self._go_to(replica, self._reserved.pop(busiest))
        elif self._ample:
            self._go_to(replica, self._share(max(self._ample, key=self._to_do)))
        return replica in self._own

    def _to_do(self, replica: int) -> int:
        parts = (self._own.get(replica), self._reserved.get(replica))
        return sum(part.rows for part in parts if part is not None)

    def _share(self, other: int) -> Range:
        """Halve what another has, in whole steps; take it if that is too little."""
        own, step = self._own[other], self._sizes.step_rows
        rest = None
        if own.rows >= 2 * step:
            loading = int(LOADING * self._sizes.rows[own.part])
            kept = (own.rows + loading + step) // (2 * step)
            most = own.rows // step - 1
            rest, own = split(own, min(kept, most) * step)
        self._go_to(other, rest)
        return own


def stretches(part: Range, most: int, step_rows: int) -> list[Range]:
    """Cut a part into equal ones of about so many rows, in whole steps.

    Example:
        >>> stretches(Range(7, 0, 100), most=40, step_rows=8)
        [Range(part=7, start=0, stop=56), Range(part=7, start=56, stop=100)]
    """
    count = max(round(part.rows / most), 1)
    size = -(-part.rows // (count * step_rows)) * step_rows
    found = []
    while part.rows > size:
        first, part = split(part, size)
        found.append(first)
    return [*found, part]


def split(own: Range, rows: int) -> tuple[Range, Range]:
    """The first rows of a range, and the others."""
    middle = own.start + rows
    return own._replace(stop=middle), own._replace(start=middle)


class Planned(NamedTuple):
    """A lease that nobody has asked for yet."""

    ranges: tuple[Range, ...]
    ahead: int | None  # the part of its share that comes next


class StaticPartition(Leasing):
    """For synchronous runs, which must be repeatable: as many steps for each replica.

    The rows of the epoch are numbered through in the order of the parts and cut into
    steps; each replica gets consecutive ones. So neither who makes a step nor what is
    in it depends on how the data are cut into parts, or on where they are. Parts of
    unknown length are dealt out in turn. What a failed replica had goes to all others.

    Args:
        order: Of the parts.
        sizes: How much there is.
        share_among: Replicas with a share each, >= 1.
        interval_rows: Of each replica in one sync interval; None: all it gets.
        left: Of an epoch that was broken off; None: all of it. As many replicas as
            there were then go on with what each had left, others share it anew.
    """

    def __init__(
        self,
        order: Sequence[int],
        sizes: PartitionSizes,
        share_among: Sequence[int],
        interval_rows: int | None = None,
        left: Sequence[RemainingWork] | None = None,
    ) -> None:
        parts = whole_parts(order, sizes.rows) if left is None else ranges_in(left)
        super().__init__(sum(part.rows for part in parts), interval_rows)
        self._sizes = sizes
        replicas = sorted(share_among)
        own = [one for one in left or () if one.replica != NOBODY]
        self._orphans: deque[Planned] = deque()
        self._shares: dict[int, deque[Planned]]
        if len(own) == len(replicas):
            own.sort(key=lambda one: one.replica)
            shares: list[Sequence[Range]] = [one.ranges for one in own]
            self._orphans = self._cut(
                ranges_in(one for one in left or () if one.replica == NOBODY)
            )
        else:
            shares = [*shared_out(parts, sizes.step_rows, len(replicas))]
        cut = [self._cut(ranges) for ranges in shares]
        self._shares = dict(zip(replicas, cut, strict=True))

    def _cut(self, share: Sequence[Range]) -> deque[Planned]:
        """The leases of a share; none crosses the end of a sync interval."""
        known = RowSequence([part for part in share if not part.is_whole])
        interval_rows = self._interval_rows or max(known.rows, 1)
        leases: list[tuple[Range, ...]] = []
        for start in range(0, known.rows, interval_rows):
            end = min(start + interval_rows, known.rows)
            for first in range(start, end, self._sizes.lease_rows):
                stop = min(first + self._sizes.lease_rows, end)
                leases.append(tuple(known.between(first, stop)))
        leases += [(part,) for part in share if part.is_whole]
        parts = dict.fromkeys(one.part for ranges in leases for one in ranges)
        following = dict(itertools.pairwise(parts))
        return deque(Planned(own, following.get(own[-1].part)) for own in leases)

    @override
    def _counted(self, replica: int) -> int:
        return self._granted[replica]

    @override
    def left(self) -> list[RemainingWork]:
        shares = [
            RemainingWork(replica, _ranges_of(share))
            for replica, share in self._shares.items()
        ]
        again = tuple(one for lease in self._again for one in lease.ranges)
        free = (*again, *_ranges_of(self._orphans))
        return [*shares, RemainingWork(NOBODY, free)] if free else shares

    @override
    def _take(self, replica: int, is_near: IsNear | None) -> Lease | None:
        # Where copies happen to be must not change a run that is to be repeatable.
        share = self._shares.get(replica) or self._orphans
        if not share:
            return self._repeat(replica)
        return self._cut_lease(replica, *share.popleft())

    @override
    def _has_one_for(self, replica: int) -> bool:
        return bool(self._shares.get(replica) or self._orphans or self._again)

    @override
    def lose(self, replica: int) -> None:
        super().lose(replica)
        self._orphans.extend(self._shares.pop(replica, ()))


class RowSequence:
    """The rows of several parts, one part after the other, numbered through.

    Args:
        parts: Of known length.

    Attributes:
        rows: How many there are.
    """

    rows: int

    def __init__(self, parts: Sequence[Range]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(part.rows for part in parts))
        self.rows = self._ends[-1] if parts else 0

    def between(self, start: int, stop: int) -> Iterator[Range]:
        """Yield the ranges between two rows."""
        at = bisect.bisect_right(self._ends, start)
        while start < stop:
            part, end = self._parts[at], self._ends[at]
            before = end - part.rows
            offset = part.start - before
            yield Range(part.part, offset + start, offset + min(end, stop))
            start, at = end, at + 1


def shared_out(
    parts: Sequence[Range], step_rows: int, replicas: int
) -> list[list[Range]]:
    """Cut the rows of some parts into a share for each replica.

    Example:
        >>> for share in shared_out([Range(7, 0, 6), Range(2, 0, 4)], 2, replicas=2):
        ...     print(share)
        [Range(part=7, start=0, stop=6)]
        [Range(part=2, start=0, stop=4)]
    """
    known = RowSequence([part for part in parts if not part.is_whole])
    whole = [part for part in parts if part.is_whole]
    edges = share_edges(known.rows, step_rows, replicas)
    return [
        [*known.between(start, stop), *whole[i::replicas]]
        for i, (start, stop) in enumerate(itertools.pairwise(edges))
    ]


def share_edges(rows: int, step_rows: int, replicas: int) -> list[int]:
    """Where shares begin and end, in whole steps; the first may have one step more.

    Example:
        >>> share_edges(rows=13, step_rows=2, replicas=3)
        [0, 6, 10, 13]
    """
    steps, more = divmod(-(-rows // step_rows), replicas)
    shares = [steps + (i < more) for i in range(replicas)]
    return [min(end * step_rows, rows) for end in itertools.accumulate([0, *shares])]


def _ranges_of(planned: Iterable[Planned]) -> tuple[Range, ...]:
    return joined(one for lease in planned for one in lease.ranges)


class Schedule:
    """The leases of each phase, epoch after epoch.

    Args:
        sizes: Of each phase ("train", "validation").
        seed: Of the order of the training parts; None keeps their order.
        epochs_before: Of earlier fits, so that each has an order of its own.
        intervals: How the training epochs are divided.
    """

    def __init__(
        self,
        sizes: Mapping[str, PartitionSizes],
        seed: int | None,
        epochs_before: int,
        intervals: SyncIntervals = WHOLE_EPOCHS,
    ) -> None:
        self._sizes = sizes
        self._keys = {phase: list(own.keys) for phase, own in sizes.items()}
        self._held = {phase for phase, keys in self._keys.items() if any(keys)}
        self._seed = seed
        self._epochs_before = epochs_before
        self._intervals = intervals
        self._left = intervals.left  # of the first epoch
        self._leases: dict[str, tuple[int, Leasing]] = {}

    def open(
        self, phase: str, epoch: int, share_among: Sequence[int] | None
    ) -> Leasing:
        """The leases of an epoch; they are made when first asked for.

        Args:
            phase: Of the data.
            epoch: Counted from 0; never one before the last one asked for.
            share_among: Replicas with a fixed share each, if it is made now.

        Raises:
            ValueError: If the epoch is over.
        """
        current = self._leases[phase][0] if phase in self._leases else -1
        if epoch < current:
            raise ValueError(f"epoch {epoch} of {phase} is over, this is {current}")
        if epoch > current:
            self._leases[phase] = (epoch, self._make(phase, epoch, share_among))
        return self._leases[phase][1]

    def _make(
        self, phase: str, epoch: int, share_among: Sequence[int] | None
    ) -> Leasing:
        sizes = self._sizes[phase]
        trains = phase == "train"
        seed = self._seed if trains else None
        order = part_order(len(sizes.rows), self._epochs_before + epoch, seed)
        left, interval_rows = None, None
        if trains:
            left, self._left = self._left, None
            interval_rows = self._intervals.rows
        if share_among is not None:
            return StaticPartition(order, sizes, share_among, interval_rows, left)
        if interval_rows is not None:
            interval_rows *= self._intervals.replicas
        return DynamicLeasing(order, sizes, interval_rows, left)

    def lease(
        self, phase: str, replica: int, is_near: Callable[[str], bool]
    ) -> Lease | None:
        """Lease rows of the epoch that is open, with the keys of their parts.

        Args:
            phase: Of the data.
            replica: Who asks.
            is_near: Whether its worker holds the result of a task of Dask's.
        """
        keys, (_, leases) = self._keys[phase], self._leases[phase]

        def is_near_part(part: int) -> bool:
            return keys[part] != "" and is_near(keys[part])

        lease = leases.take(replica, is_near_part if phase in self._held else None)
        if lease is None:
            return None
        parts = dict.fromkeys(one.part for one in lease.ranges)
        if lease.ahead is not None:
            parts.setdefault(lease.ahead)
        return lease._replace(keys={part: keys[part] for part in parts})

    def held_key(self, phase: str, part: int) -> str:
        """The Dask key of a part that a worker holds, as it is now.

        Raises:
            ValueError: If none ever has, or a LookupError if there is no such part.
        """
        key = self._keys[phase][part]
        if not key:
            raise ValueError(f"no worker holds part {part} of {phase}")
        return key

    def replace(self, phase: str, part: int, key: str) -> None:
        """A part that was lost with its worker is computed again; see `held_key`."""
        self.held_key(phase, part)
        self._keys[phase][part] = key

    def end_interval(self) -> None:
        """Let all that train meet, as soon as possible."""
        if "train" in self._leases:
            self._leases["train"][1].end_interval()

    def begin_interval(self) -> None:
        """All have met: go on."""
        if "train" in self._leases:
            self._leases["train"][1].begin_interval()

    def lose(self, replica: int) -> None:
        """What a replica held, or would have got, is free for the others."""
        for _, leases in self._leases.values():
            leases.lose(replica)

    @property
    def repeated(self) -> int:
        """Training leases granted again because their replica failed."""
        return self._leases["train"][1].repeated if "train" in self._leases else 0
