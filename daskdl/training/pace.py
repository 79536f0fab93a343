"""When replicas of gradient sharing exchange updates.

An exchange costs time, but the more steps lie between two exchanges, the less each step
improves the shared model. `ExchangePace` balances the two; `MeasuredInterval` applies
it to one replica, with durations that the replica measures while it trains.
"""

import math
from collections import deque
from dataclasses import dataclass, replace
from statistics import median

from daskdl.config import check_whole

RECENT = 5  # exchanges in the median of the cost
RAMP = 32  # steps made so far / the longest interval above `first_longest`


@dataclass(frozen=True)
class ExchangePace:
    """How much time exchanges may take, and how far apart they may be.

    Intervals are `shortest` times a power of two, so that the exchanges of the slower
    replicas fall on exchanges of the faster ones.

    Args:
        time_fraction: Part of a replica's time that exchanging may take. 0: intervals
            are the longest that is allowed, whatever an exchange costs.
        first_fraction: The same while an interval is more than ``1 / RAMP`` of the
            steps made so far, as a model moves fastest at first.
        shortest: Shortest interval, in steps.
        first_longest: Longest interval, in steps, at first.
        longest: Longest interval, in steps. An interval longer than `first_longest` is
            at most ``1 / RAMP`` of the steps made so far.
        first_ramp: Steps made so far / the longest interval, up to `first_longest`. 0:
            no such bound.
    """

    time_fraction: float
    first_fraction: float
    first_longest: int
    longest: int
    shortest: int = 1
    first_ramp: int = 0

    def __post_init__(self) -> None:
        check_whole("shortest", self.shortest, 1)
        check_whole("first_longest", self.first_longest, self.shortest)
        check_whole("longest", self.longest, self.first_longest)

    @classmethod
    def fixed(cls, steps: int) -> "ExchangePace":
        """Return a pace with one interval.

        Example:
            >>> ExchangePace.fixed(12).steps_between(cost=0.2, steps_made=10**6)
            12
        """
        return cls(0.0, 0.0, steps, steps, steps)

    def at_most(self, steps: int) -> "ExchangePace":
        """Return a pace whose intervals are no longer than a number of steps."""
        return replace(
            self,
            first_longest=min(self.first_longest, steps),
            longest=min(self.longest, steps),
        )

    def steps_between(self, cost: float, steps_made: int) -> int:
        """Return the steps between two exchanges.

        Args:
            cost: Duration of an exchange, in durations of a step.
            steps_made: Steps of a replica, over all fits.

        Example:
            >>> [EAGER.steps_between(cost, 10**6) for cost in (0.01, 0.2, 9.0)]
            [1, 8, 64]
            >>> [EAGER.steps_between(0.2, steps_made) for steps_made in (0, 100, 1000)]
            [2, 2, 8]
            >>> [ADAPTIVE.steps_between(9.0, steps_made) for steps_made in (0, 32, 128)]
            [1, 4, 16]
        """
        by_ramp, early_limit = steps_made // RAMP, self.first_longest
        if self.first_ramp:
            early_limit = min(early_limit, steps_made // self.first_ramp)
        limit = min(max(by_ramp, early_limit), self.longest)
        steps = self.shortest
        while 2 * steps <= limit:
            late = 2 * steps <= by_ramp
            fraction = self.time_fraction if late else self.first_fraction
            if fraction and cost <= fraction * steps:
                break
            steps *= 2
        return steps

    def longest_after(self, steps_made: int) -> int:
        """Return the longest interval after a number of steps, at any cost.

        Example:
            >>> [EAGER.longest_after(steps) for steps in (0, 100, 1000, 10**6)]
            [16, 16, 16, 64]
        """
        return self.steps_between(math.inf, steps_made)


EAGER = ExchangePace(
    time_fraction=0.03, first_fraction=0.1, first_longest=16, longest=64
)
# An adaptive optimizer, such as Adam, learns markedly more from the same steps if
# replicas exchange often, most of all from the first: the bound on these costs at most
# 32 exchanges more.
ADAPTIVE = ExchangePace(
    time_fraction=0.1,
    first_fraction=0.1,
    first_longest=16,
    longest=64,
    first_ramp=8,
)
# In lockstep, results are reproducible, so no measured time may decide.
LOCKSTEP = ExchangePace(
    time_fraction=0.0, first_fraction=0.0, first_longest=1, longest=16
)
EACH_STEP = ExchangePace.fixed(1)


class MeasuredInterval:
    """Steps between the exchanges of one replica, by what its exchanges cost.

    Args:
        pace: Chooses the interval.

    Attributes:
        steps: The present interval.
    """

    def __init__(self, pace: ExchangePace) -> None:
        self._pace = pace
        self._costs: deque[float] = deque(maxlen=RECENT)  # of an exchange, in steps
        self._warm = False
        self.steps = pace.steps_between(0.0, 0)

    def note(self, exchange_s: float, step_s: float) -> None:
        """Add the durations of an exchange and of a step.

        The first exchange does not count, as it finds nothing in the caches.
        """
        if self._warm and step_s > 0:
            self._costs.append(exchange_s / step_s)
        self._warm = True

    def choose_(self, steps_made: int) -> None:
        """Choose the interval, for a number of steps over all fits."""
        cost = median(self._costs) if self._costs else 0.0
        self.steps = self._pace.steps_between(cost, steps_made)
