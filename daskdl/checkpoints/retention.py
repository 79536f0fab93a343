"""Which checkpoints are kept. No I/O."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Entry(NamedTuple):
    """A checkpoint that is whole, as far as it matters here."""

    number: int  # in its folder
    ordinal: int  # in its fit, from 1, however often that was resumed
    score: float  # of what counts for the best; NaN: there is none


@dataclass(frozen=True)
class Retention:
    """What is kept of the checkpoints of a fit.

    Attributes:
        last: So many of the newest; None: all.
        every: Each so many-th; None: none because of that.
        best: Whether the one with the best score is, the first of equals.
        largest_is_best: Else the least is.

    Example:
        >>> entries = [Entry(n, n, score=abs(n - 2.0)) for n in range(1, 8)]
        >>> Retention(last=1, every=3, best=True).kept(entries)
        {2, 3, 6, 7}
    """

    last: int | None = None
    every: int | None = None
    best: bool = False
    largest_is_best: bool = False

    def kept(self, entries: Sequence[Entry]) -> set[int]:
        """The numbers of those that are kept.

        Args:
            entries: All that are whole, of one fit, in ascending order.
        """
        newest = entries if self.last is None else entries[-self.last :]
        kept = {entry.number for entry in newest}
        if self.every is not None:
            kept |= {e.number for e in entries if e.ordinal % self.every == 0}
        scored = [entry for entry in entries if math.isfinite(entry.score)]
        if self.best and scored:
            sign = -1.0 if self.largest_is_best else 1.0
            kept.add(min(scored, key=lambda entry: sign * entry.score).number)
        return kept
