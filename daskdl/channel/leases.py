"""Who trains on what in one epoch: what all ways of dealing it out share. No I/O.

A part is what is loaded in one go; a piece is what is leased at a time, ranges of rows
of one part or of several. How pieces are cut is in `first_come` and `fixed_shares`.
An epoch has one lap or several: between two of them nobody holds anything.
"""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from daskdl.channel.shapes import FromMinusOne, Whole

TO_ITS_END = -1  # where a range stops whose part has no known length

NOBODY = -1  # whose share something is that anybody may take

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
    """A piece, as it is handed out."""

    number: int  # from 0, in the order in which pieces are cut
    ranges: tuple[Range, ...]
    ahead: int | None = None  # the part that its replica will probably load next

    @property
    def rows(self) -> int:
        """In all its ranges."""
        return sum(piece.rows for piece in self.ranges)


class Left(NamedTuple):
    """What a replica would have trained on next."""

    replica: FromMinusOne  # or `NOBODY`
    ranges: tuple[Range, ...]  # in the order to train on them


class Done(NamedTuple):
    """What a replica has trained on in an epoch, in pieces that it finished."""

    loss_sum: float
    examples: Whole


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
    """The same rows in the same order, in as few ranges as can be.

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


def left_of(fields: Iterable[Any]) -> list[Left]:
    """Read what is left as it came over the wire, where a tuple has no names."""
    return [Left(r, tuple(Range(*one) for one in ranges)) for r, ranges in fields]


def done_of(fields: Iterable[Any]) -> list[Done]:
    """Read what was done as it came over the wire."""
    return [Done(*one) for one in fields]


def ranges_in(left: Iterable[Left]) -> list[Range]:
    """All that is left, whoever would have got it."""
    return [one for each in left for one in each.ranges]


class Leases(ABC):
    """Pieces of one epoch, handed out one at a time.

    Args:
        rows: To be handed out in all; a part of unknown length counts as one.
        lap_rows: To be handed out in one lap, see `_over`; None: all of them.

    Attributes:
        repeated: Pieces handed out again because their replica was lost.
    """

    repeated: int

    def __init__(self, rows: int, lap_rows: int | None = None) -> None:
        self.repeated = 0
        self._lap_rows = self._limit = lap_rows
        self._handed: Counter[int] = Counter()  # rows in this lap, by replica
        self._count = 0  # pieces cut so far
        self._free = rows  # in no piece yet
        self._unfinished = rows
        self._held: dict[int, dict[int, Lease]] = {}  # by replica, and by number
        self._again: deque[Lease] = deque()  # those of lost replicas

    def take(self, replica: int, is_near: IsNear | None = None) -> Lease | None:
        """Lease a piece to a replica; None if there is none left for it.

        Args:
            replica: Who asks.
            is_near: Tells parts that its worker holds from others; None: all are
                equally far.
        """
        return None if self._is_over(replica) else self._take(replica, is_near)

    def has_one_for(self, replica: int) -> bool:
        """Whether `take` would lease this replica a piece now."""
        return not self._is_over(replica) and self._has_one_for(replica)

    def end_lap(self) -> None:
        """Hand out no more of this lap than goes with what was handed out before."""
        self._limit = self._limit_now()

    def begin_lap(self) -> None:
        """All have met: go on."""
        self._handed.clear()
        self._limit = self._lap_rows

    def lap_is_over(self, members: Iterable[int]) -> bool:
        """Whether there is more, but for nobody before the next lap."""
        return (
            self._limit is not None
            and self._unfinished > 0
            and not any(self._held.values())
            and not any(self.has_one_for(replica) for replica in members)
        )

    def _is_over(self, replica: int) -> bool:
        return self._limit is not None and self._room(replica) <= 0

    @abstractmethod
    def _room(self, replica: int) -> int:
        """Rows that a replica may still get in this lap, if it has a limit."""

    @abstractmethod
    def _limit_now(self) -> int:
        """The limit with which what was handed out before is a whole lap."""

    @abstractmethod
    def _take(self, replica: int, is_near: IsNear | None) -> Lease | None:
        """See `take`; within a lap."""

    @abstractmethod
    def _has_one_for(self, replica: int) -> bool:
        """See `has_one_for`; within a lap."""

    @abstractmethod
    def left(self) -> list[Left]:
        """What nobody has trained on; between two laps, when nobody holds anything."""

    def finish(self, replica: int, number: int) -> bool:
        """A replica has trained on its piece; False if the lease was not its own."""
        lease = self._held.get(replica, {}).pop(number, None)
        self._unfinished -= 0 if lease is None else lease.rows
        return lease is not None

    def lose(self, replica: int) -> None:
        """Free what a lost replica held or would have got."""
        held = self._held.pop(replica, {})
        self._again.extend(held[number] for number in sorted(held))

    def unfinished(self) -> int:
        """Rows that nobody has finished yet."""
        return self._unfinished

    def _hand_out(
        self, replica: int, ranges: Sequence[Range], ahead: int | None
    ) -> Lease:
        lease = Lease(self._count, tuple(ranges), ahead)
        self._handed[replica] += lease.rows
        self._count += 1
        self._free -= lease.rows
        self._held.setdefault(replica, {})[lease.number] = lease
        return lease

    def _repeat(self, replica: int) -> Lease | None:
        """Hand out again, whole, what was lost first; nothing is known to follow."""
        if not self._again:
            return None
        lease = self._again.popleft()._replace(ahead=None)
        self.repeated += 1
        self._handed[replica] += lease.rows
        self._held.setdefault(replica, {})[lease.number] = lease
        return lease
