"""Whether the loss of one replica runs away, though it is still a number. No I/O."""

from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

# A decision after each so many steps. In fewer there would be too few low losses where
# they are noisy, as with a batch of one row.
BLOCK = 50
BLOCKS = 4  # that all have to be too high
LOW = 5  # of a block, the lowest: a tenth
# They have to be at least this share of the median. Else the losses are spread over
# everything from low to high, and the first one was by chance among the low.
SPREAD = 0.25


class Level(NamedTuple):
    """The losses of one block, above the first loss of all."""

    low: float  # nine of ten are higher
    median: float

    @classmethod
    def of(cls, rises: list[float]) -> "Level":
        """Of how far each is above it."""
        return cls(sorted(rises)[LOW], median(rises))

    def too_high(self, least: float) -> bool:
        """Whether they are all high, but for a few."""
        return self.low > least and self.low >= SPREAD * self.median


class LossWatch:
    """Decides whether training is lost, from the losses of one replica.

    It is when for four blocks of 50 steps in a row

    - nine of ten losses were more than ``max_rise * max(1, |first|)`` above the first,
    - they were near each other: the lowest of these nine was at least a quarter of the
      median above the first, and
    - they do not go down: the median of the last block is no lower than that of the
      first of the four.

    So a noisy loss, one that is small or negative, a spike, and a bad start that is
    made good never count. Nor does a loss that only comes back to where it began.

    Args:
        max_rise: See above; None: nothing counts.

    Attributes:
        first: The first loss, or None.
        last: The last one, or None.

    Example:
        >>> watch = LossWatch(max_rise=10)
        >>> [step for step in range(1, 501) if watch.note(2.0 if step < 101 else 50.0)]
        [300, 350, 400, 450, 500]
    """

    first: float | None
    last: float | None

    def __init__(self, max_rise: float | None) -> None:
        self.first = self.last = None
        self._max_rise = max_rise
        self._block: list[float] = []
        self._levels: list[Level] = []

    def note(self, loss: float) -> bool:
        """Take note of the finite loss of a step; whether it has run away."""
        if self.first is None:
            self.first = loss
        self.last = loss
        if self._max_rise is None:
            return False
        self._block.append(loss - self.first)
        if len(self._block) < BLOCK:
            return False
        self._levels = [*self._levels, Level.of(self._block)][-BLOCKS:]
        self._block = []
        least = self._max_rise * max(1.0, abs(self.first))
        return (
            len(self._levels) == BLOCKS
            and all(level.too_high(least) for level in self._levels)
            and self._levels[-1].median >= self._levels[0].median
        )

    def values(self) -> dict[str, Any]:
        """What it has seen, as plain values."""
        levels = [tuple(level) for level in self._levels]
        seen = {"first": self.first, "last": self.last}
        return {**seen, "block": list(self._block), "levels": levels}

    def restore_(self, values: Mapping[str, Any]) -> None:
        """Go on from what `values` made."""
        first, last = values["first"], values["last"]
        self.first = None if first is None else float(first)
        self.last = None if last is None else float(last)
        self._block = [float(rise) for rise in values["block"]]
        self._levels = [Level(*map(float, level)) for level in values["levels"]]

    @property
    def recent(self) -> int:
        """Steps on which a decision was made."""
        return BLOCK * len(self._levels)
