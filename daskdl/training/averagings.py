"""What averaging does, in one step and in one epoch: counts and times."""

import math
import time
from collections.abc import Callable

from daskdl.training.observer import Stopwatch
from daskdl.training.statistics import Exchanged, Statistics


class Averagings:
    """Counts and times of one replica.

    Args:
        now: Seconds, of a clock that never goes back.

    Attributes:
        waiting: Times the waits of this step.

    Example:
        >>> done = Averagings()
        >>> done.begin_step()
        >>> done.stepped()
        >>> done.averaged("MEAN", 800, anew=True)
        >>> done.statistics().exchanges, done.exchanged(math.nan).sent_bytes
        (1, 800)
    """

    waiting: Stopwatch

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.waiting = Stopwatch(now)
        self._steps = self._means = self._sent_bytes = 0
        self._kind: str | None = None

    def begin_step(self) -> None:
        """A step begins."""
        self.waiting.seconds = 0.0
        self._sent_bytes = 0

    def stepped(self) -> None:
        """A step of the optimizer was made."""
        self._steps += 1

    def averaged(self, kind: str, sent_bytes: int, *, anew: bool) -> None:
        """A mean has come.

        Args:
            kind: Of what has travelled.
            sent_bytes: From here.
            anew: Whether it is one of its own; else it completes the one before.
        """
        self._means += anew
        self._kind = kind
        self._sent_bytes += sent_bytes

    def statistics(self) -> Statistics:
        """What was done since the last call."""
        means, steps = self._means, self._steps
        self._means = self._steps = 0
        return Statistics(means, float(means), math.nan, 0.0, 0, steps)

    def exchanged(self, residual_norm: float) -> Exchanged:
        """What was done in this step, in which there was a mean."""
        return Exchanged(
            density=1.0,
            sent_bytes=self._sent_bytes,
            kind=self._kind,
            residual_norm=residual_norm,
            wait_s=self.waiting.seconds,
        )
