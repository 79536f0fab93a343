"""Pieces that do not depend on who asks first. No I/O, no clock."""

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from typing_extensions import override

from daskdl.channel.leases import (
    NOBODY,
    IsNear,
    Lease,
    Leases,
    Left,
    Range,
    joined,
    ranges_in,
    whole_parts,
)
from daskdl.channel.plan import Extent


class Planned(NamedTuple):
    """A piece that was not asked for yet."""

    ranges: tuple[Range, ...]
    ahead: int | None  # the part of its share that comes next


class FixedShares(Leases):
    """For synchronous runs, which must be repeatable: as many steps for each replica.

    The rows of the epoch are numbered through in the order of the parts and cut into
    steps; each replica gets consecutive ones. So neither who makes a step nor what is
    in it depends on how the data are cut into parts, or on where they are. Parts of
    unknown length are dealt out in turn. What a lost replica had goes to whoever asks.

    Args:
        order: Of the parts.
        extent: How much there is.
        share_among: Replicas with a share each, >= 1.
        lap_rows: Of each replica in one lap; None: all it gets.
        left: Of an epoch that was broken off; None: all of it. As many replicas as
            there were then go on with what each had left, others share it anew.
    """

    def __init__(
        self,
        order: Sequence[int],
        extent: Extent,
        share_among: Sequence[int],
        lap_rows: int | None = None,
        left: Sequence[Left] | None = None,
    ) -> None:
        parts = whole_parts(order, extent.rows) if left is None else ranges_in(left)
        super().__init__(sum(part.rows for part in parts), lap_rows)
        self._extent = extent
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
            shares = [*shared_out(parts, extent.step_rows, len(replicas))]
        cut = [self._cut(ranges) for ranges in shares]
        self._shares = dict(zip(replicas, cut, strict=True))

    def _cut(self, share: Sequence[Range]) -> deque[Planned]:
        """The pieces of a share; none crosses the end of a lap."""
        known = Sequel([part for part in share if not part.is_whole])
        lap_rows = self._lap_rows or max(known.rows, 1)
        pieces = [
            piece
            for start in range(0, known.rows, lap_rows)
            for piece in known.cut(
                start, min(start + lap_rows, known.rows), self._extent.piece_rows
            )
        ]
        return _planned([*pieces, *((part,) for part in share if part.is_whole)])

    @override
    def _room(self, replica: int) -> int:
        return (self._limit or 0) - self._handed[replica]

    @override
    def _limit_now(self) -> int:
        return max(self._handed.values(), default=0)

    @override
    def left(self) -> list[Left]:
        shares = [
            Left(replica, _ranges_of(share)) for replica, share in self._shares.items()
        ]
        again = tuple(one for lease in self._again for one in lease.ranges)
        free = (*again, *_ranges_of(self._orphans))
        return [*shares, Left(NOBODY, free)] if free else shares

    @override
    def _take(self, replica: int, is_near: IsNear | None) -> Lease | None:
        # Where copies happen to be must not change a run that is to be repeatable.
        share = self._shares.get(replica) or self._orphans
        if not share:
            return self._repeat(replica)
        return self._hand_out(replica, *share.popleft())

    @override
    def _has_one_for(self, replica: int) -> bool:
        return bool(self._shares.get(replica) or self._orphans or self._again)

    @override
    def lose(self, replica: int) -> None:
        super().lose(replica)
        self._orphans.extend(self._shares.pop(replica, ()))


class Sequel:
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

    def cut(
        self, start: int, stop: int, piece_rows: int
    ) -> Iterator[tuple[Range, ...]]:
        """Yield the pieces between two rows, each of so many rows but the last."""
        for first in range(start, stop, piece_rows):
            yield tuple(self.between(first, min(first + piece_rows, stop)))

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
    known = Sequel([part for part in parts if not part.is_whole])
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


def _ranges_of(pieces: Iterable[Planned]) -> tuple[Range, ...]:
    return joined(one for piece in pieces for one in piece.ranges)


def _planned(pieces: Sequence[tuple[Range, ...]]) -> deque[Planned]:
    """Add to each piece of a share which part comes after those of the piece."""
    parts = dict.fromkeys(one.part for ranges in pieces for one in ranges)
    following = dict(itertools.pairwise(parts))
    return deque(Planned(own, following.get(own[-1].part)) for own in pieces)
