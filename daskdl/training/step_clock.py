"""How long a replica computes between two chances to exchange."""

import time
from collections.abc import Callable


class StepClock:
    """Adds up steps, without what lies between them: waits, exchanges, data.

    Args:
        now: Seconds, of a clock that never goes back.

    Example:
        >>> clock = StepClock(now=iter([10.0, 10.5, 12.0, 12.25]).__next__)
        >>> for _ in range(2):
        ...     clock.begin()
        ...     clock.end()
        >>> clock.chance()
        >>> clock.take()
        0.75
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._began = 0.0
        self._computed_s = 0.0
        self._chances = 0

    def begin(self) -> None:
        """A step begins."""
        self._began = self._now()

    def end(self) -> None:
        """It has ended."""
        self._computed_s += self._now() - self._began

    def chance(self) -> None:
        """An exchange is due, whether there is room for it or not."""
        self._chances += 1

    def take(self) -> float:
        """Seconds of computing for each chance since the last call."""
        step_s = self._computed_s / max(self._chances, 1)
        self._computed_s, self._chances = 0.0, 0
        return step_s
