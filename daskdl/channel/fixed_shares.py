"""Pieces that do not depend on who asks first. No I/O, no clock."""

import bisect
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from typing_extensions import override

from daskdl.channel.leases import IsNear, Lease, Leases, Range, whole_parts
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
    """

    def __init__(
        self, order: Sequence[int], extent: Extent, share_among: Sequence[int]
    ) -> None:
        parts = whole_parts(order, extent.rows)
        super().__init__(sum(part.rows for part in parts))
        self._orphans: deque[Planned] = deque()
        known = Sequel([part for part in parts if not part.is_whole])
        whole = [part for part in parts if part.is_whole]
        replicas = sorted(share_among)
        edges = share_edges(known.rows, extent.step_rows, len(replicas))
        self._shares: dict[int, deque[Planned]] = {}
        for i, replica in enumerate(replicas):
            pieces = known.cut(edges[i], edges[i + 1], extent.piece_rows)
            others = ((part,) for part in whole[i :: len(replicas)])
            self._shares[replica] = _planned([*pieces, *others])

    @override
    def take(self, replica: int, is_near: IsNear | None = None) -> Lease | None:
        # Where copies happen to be must not change a run that is to be repeatable.
        share = self._shares.get(replica) or self._orphans
        if not share:
            return self._repeat(replica)
        return self._hand_out(replica, *share.popleft())

    @override
    def has_one_for(self, replica: int) -> bool:
        return bool(self._shares.get(replica) or self._orphans or self._again)

    @override
    def lose(self, replica: int) -> None:
        super().lose(replica)
        self._orphans.extend(self._shares.pop(replica, ()))


class Sequel:
    """The rows of several parts, one part after the other, numbered through.

    Args:
        parts: Whole, of known length.

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
            yield tuple(self._between(first, min(first + piece_rows, stop)))

    def _between(self, start: int, stop: int) -> Iterator[Range]:
        at = bisect.bisect_right(self._ends, start)
        while start < stop:
            part, end = self._parts[at], self._ends[at]
            before = end - part.rows
            yield Range(part.part, start - before, min(end, stop) - before)
            start, at = end, at + 1


def share_edges(rows: int, step_rows: int, replicas: int) -> list[int]:
    """Where shares begin and end, in whole steps; the first may have one step more.

    Example:
        >>> share_edges(rows=13, step_rows=2, replicas=3)
        [0, 6, 10, 13]
    """
    steps, more = divmod(-(-rows // step_rows), replicas)
    shares = [steps + (i < more) for i in range(replicas)]
    return [min(end * step_rows, rows) for end in itertools.accumulate([0, *shares])]


def _planned(pieces: Sequence[tuple[Range, ...]]) -> deque[Planned]:
    """Add to each piece of a share which part comes after those of the piece."""
    parts = dict.fromkeys(one.part for ranges in pieces for one in ranges)
    following = dict(itertools.pairwise(parts))
    return deque(Planned(own, following.get(own[-1].part)) for own in pieces)
