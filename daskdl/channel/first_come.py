"""Pieces for whoever asks: fast replicas get more of them. No I/O, no clock."""

from collections.abc import Sequence

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
from daskdl.channel.plan import PIECES_PER_REPLICA, Extent
from daskdl.channel.remaining import Remaining

# Enough that of parts spread over the workers at random one is found nearly always
# (1 - exp(-4) = 98 %), few enough that an answer takes no longer with more parts.
LOOKS_PER_REPLICA, LEAST_LOOKS = 4, 64

# To load a part takes up to so much of the time to train on it: it is not loaded once
# more for fewer rows than that.
LOADING = 0.005


class FirstCome(Leases):
    """A replica goes through its parts one after the other, so that each loads once.

    A new part is one that its worker holds, else the next one in order; it is reserved
    when the one before is begun, to be loaded meanwhile. Of a part that is more than
    one replica's share, several replicas get stretches. At the end, when all parts are
    reserved or begun, who has nothing left takes reserved ones, then shares begun ones,
    and pieces become smaller, so that all come to the end at about the same time.

    Args:
        order: Of the parts.
        extent: How much there is.
        lap_rows: Of all replicas together in one lap; None: all there are.
        left: Of an epoch that was broken off; None: all of it.
    """

    def __init__(
        self,
        order: Sequence[int],
        extent: Extent,
        lap_rows: int | None = None,
        left: Sequence[Left] | None = None,
    ) -> None:
        parts = whole_parts(order, extent.rows) if left is None else ranges_in(left)
        super().__init__(sum(part.rows for part in parts), lap_rows)
        self._order = {part: i for i, part in enumerate(order)}
        self._extent = extent
        share = PIECES_PER_REPLICA * extent.piece_rows
        self._parts = [
            stretch
            for part in parts
            for stretch in stretches(part, share, extent.step_rows)
        ]
        self._untouched = Remaining(len(self._parts))  # positions in `_parts`
        self._rests: list[Range] = []  # of parts that lost replicas had
        self._own: dict[int, Range] = {}  # what is free of the part a replica is on
        self._ample: set[int] = set()  # replicas that have enough of it to share
        self._reserved: dict[int, Range] = {}  # and the part that it goes on with
        self._far: set[int] = set()  # replicas whose reserved part is elsewhere
        self._looked: dict[int, int] = {}  # where a replica looks on for a near part
        self._takers: set[int] = set()

    @override
    def _room(self, replica: int) -> int:
        return (self._limit or 0) - self._handed.total()

    @override
    def _limit_now(self) -> int:
        return self._handed.total()

    @override
    def left(self) -> list[Left]:
        positions = self._untouched.round(0, len(self._untouched))
        untouched = (self._parts[position] for position in positions)
        begun = (*self._rests, *self._own.values(), *self._reserved.values())
        again = (one for lease in self._again for one in lease.ranges)
        ranges = [*untouched, *begun, *again]
        ranges.sort(key=lambda one: (self._order[one.part], one.start))
        return [Left(NOBODY, joined(ranges))]

    @override
    def _take(self, replica: int, is_near: IsNear | None) -> Lease | None:
        self._takers.add(replica)
        if not self._go_on(replica, is_near):
            again = self._repeat(replica)
            if again is not None or not self._join_in(replica):
                return again
        ranges = self._cut(replica, is_near)
        ahead = self._ahead(replica, ranges[-1].part)
        return self._hand_out(replica, ranges, ahead)

    def _ahead(self, replica: int, here: int) -> int | None:
        reserved = self._reserved.get(replica)
        return None if reserved is None or reserved.part == here else reserved.part

    @override
    def _has_one_for(self, replica: int) -> bool:
        own = replica in self._own or self._untouched or self._rests
        return bool(own or self._again or self._reserved or self._ample)

    @override
    def lose(self, replica: int) -> None:
        super().lose(replica)
        self._takers.discard(replica)
        rests = (self._go_to(replica, None), self._reserved.pop(replica, None))
        self._rests += [rest for rest in rests if rest is not None]

    # ---- one piece

    def _cut(self, replica: int, is_near: IsNear | None) -> list[Range]:
        """The next rows of a replica that has some: of its part, and of those after."""
        ranges: list[Range] = []
        room = self._piece_rows()
        while room > 0 and self._go_on(replica, is_near):
            own = self._own[replica]
            if own.is_whole and ranges:
                break
            ranges.append(self._cut_one(replica, room))
            room = 0 if own.is_whole else room - ranges[-1].rows
        return ranges

    def _cut_one(self, replica: int, most: int) -> Range:
        own = self._own[replica]
        if own.rows > most:
            own, rest = split(own, most)
            self._go_to(replica, rest)
        else:
            self._go_to(replica, None)
        return own

    def _go_to(self, replica: int, part: Range | None) -> Range | None:
        """From now on a replica is on a part, or on none; returns what it was on."""
        former = self._own.pop(replica, None)
        self._ample.discard(replica)
        if part is not None:
            self._own[replica] = part
            if part.rows > LOADING * self._extent.rows[part.part]:
                self._ample.add(replica)
        return former

    def _piece_rows(self) -> int:
        """The size aimed at, but half of a fair share of what is free at the end."""
        step = self._extent.step_rows
        free = self._free if self._limit is None else min(self._free, self._room(0))
        share = -(-free // (2 * len(self._takers) * step)) * step
        return min(self._extent.piece_rows, share)

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
        own, step = self._own[other], self._extent.step_rows
        rest = None
        if own.rows >= 2 * step:
            loading = int(LOADING * self._extent.rows[own.part])
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
