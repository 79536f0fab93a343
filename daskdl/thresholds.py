"""How large a step must be before it is sent. One small class per rule.

The rules work on outcomes (threshold, density); none of the built-in ones looks at
the residual, so it is made only for a rule that asks.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor
from typing_extensions import override

from daskdl.errors import OptionError
from daskdl.link import Link, Measured

HALVES_IN_20 = 0.5 ** (1 / 20)  # Deeplearning4j's decay
# The density that a dense message counts as: above every default band, so that the
# threshold rises. Where the bitmap of Deeplearning4j becomes smaller than its entries.
DENSE_DENSITY = 1 / 16


class Sent(NamedTuple):
    """What the last exchange did."""

    threshold: float  # as the rule said, before the grid; parameter units
    density: float  # entries sent / parameters, in [0, 1]
    link: Link | None = None  # what `learn` made of it; of this replica, now


class Residual(Protocol):
    """The progress not sent yet, made on request."""

    def tensor(self) -> Tensor:
        """Return ``local - shared``, shape (N,), parameter units, a fresh tensor."""

    def sample(self, most: int) -> Tensor:
        """Return about so many of its values, or all if there are no more.

        They come in short runs from the whole vector, always of the same positions; a
        fresh tensor, on the CPU.
        """


class ThresholdAlgorithm(ABC):
    """Choose the next threshold from what the last one did.

    Implementations are frozen and keep no state: the accumulator owns
    :class:`Sent` and passes it back in.
    """

    @abstractmethod
    def next_threshold(self, residual: Residual, last: Sent | None) -> float:
        """Return a threshold, finite and > 0, in parameter units.

        Args:
            residual: What the threshold will be applied to; costs a pass over memory
                if it is asked for.
            last: Outcome of the previous exchange; None on the first one.
        """


class LinkAlgorithm(ThresholdAlgorithm):
    """A threshold algorithm that follows what was measured of the link.

    It decides for all parameters at once: all of them go over the same link.
    """

    @abstractmethod
    def sends_dense(self, last: Sent | None) -> bool:
        """Return whether to send 8 bits for every parameter, and no entries.

        Args:
            last: As of :meth:`next_threshold`, which is not asked then.
        """

    @abstractmethod
    def learn(self, link: Link | None, measured: Measured) -> Link:
        """Return what is known of the link after one more exchange.

        It comes back in ``last.link``.

        Args:
            link: What this returned last, or None the first time.
            measured: What the exchange took.
        """


def average_sent(outcomes: Iterable[Sent | None]) -> Sent | None:
    """Merge what several replicas did, to carry it on to the next run or newcomer.

    Args:
        outcomes: One per replica; None where a replica has not sent yet.

    Returns:
        Mean threshold and mean density over those that have sent; None if none has.
        Nothing of their links: who carries on measures its own.

    Example:
        >>> average_sent([Sent(1.0, 0.25), None, Sent(2.0, 0.75)])
        Sent(threshold=1.5, density=0.5, link=None)

    Source:
        Deeplearning4j, AdaptiveThresholdAlgorithm.Reducer (2021).
    """
    used = [outcome for outcome in outcomes if outcome is not None]
    if not used:
        return None
    return Sent(
        math.fsum(outcome.threshold for outcome in used) / len(used),
        math.fsum(outcome.density for outcome in used) / len(used),
    )


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise OptionError(f"{name} must be finite and > 0, got {value!r}")


def _check_decay(decay: float) -> None:
    if not 0.5 <= decay < 1:
        raise OptionError(f"decay must be in [0.5, 1), got {decay!r}")


@dataclass(frozen=True)
class AdaptiveThreshold(ThresholdAlgorithm):
    """Steer the sent fraction into ``[min_density, max_density]``.

    Too little sent: lower the threshold by ``decay``. Too much: raise it by
    ``1 / decay``. Inside the band: leave it alone.

    Args:
        initial: First threshold, parameter units.
        min_density: Lower edge of the band, entries sent / parameters.
        max_density: Upper edge of the band.
        decay: Factor per exchange, in [0.5, 1); the default halves in 20 exchanges.

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> rule = AdaptiveThreshold(initial=1e-3, max_density=0.01, decay=0.5)
        >>> rule.next_threshold(residual=None, last=Sent(1e-3, density=0.2))
        0.002

    Source:
        Deeplearning4j, AdaptiveThresholdAlgorithm.java (2021).
    """

    initial: float = 1e-4
    min_density: float = 1e-4
    max_density: float = 1e-2
    decay: float = HALVES_IN_20

    def __post_init__(self) -> None:
        _check_positive("initial", self.initial)
        if not 0 < self.min_density <= self.max_density <= 1:
            raise OptionError(
                "need 0 < min_density <= max_density <= 1, "
                f"got {self.min_density!r} and {self.max_density!r}"
            )
        _check_decay(self.decay)

    @override
    def next_threshold(self, residual: Residual, last: Sent | None) -> float:
        if last is None:
            return self.initial
        if last.density < self.min_density:
            return last.threshold * self.decay
        if last.density > self.max_density:
            return last.threshold / self.decay
        return last.threshold


@dataclass(frozen=True)
class FixedThreshold(ThresholdAlgorithm):
    """Always the same threshold.

    Args:
        value: The threshold, parameter units.

    Raises:
        OptionError: If it is not finite and > 0.

    Example:
        >>> FixedThreshold(0.25).next_threshold(residual=None, last=Sent(1.0, 0.5))
        0.25
    """

    value: float = 1e-3

    def __post_init__(self) -> None:
        _check_positive("value", self.value)

    @override
    def next_threshold(self, residual: Residual, last: Sent | None) -> float:
        return self.value


@dataclass(frozen=True)
class TargetSparsityThreshold(ThresholdAlgorithm):
    """Steer the sent fraction to one number; moves at nearly every exchange.

    Args:
        initial: First threshold, parameter units.
        target: Density aimed at, in (0, 1/16).
        decay: Factor per exchange, in [0.5, 1); the default halves in 20 exchanges.

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> rule = TargetSparsityThreshold(target=0.01, decay=0.5)
        >>> rule.next_threshold(residual=None, last=Sent(1e-3, density=0.001))
        0.0005

    Source:
        Deeplearning4j, TargetSparsityThresholdAlgorithm.java (2021).
    """

    initial: float = 1e-4
    target: float = 1e-3
    decay: float = HALVES_IN_20

    def __post_init__(self) -> None:
        _check_positive("initial", self.initial)
        if not 0 < self.target < DENSE_DENSITY:
            raise OptionError(f"target must be in (0, 1/16), got {self.target!r}")
        _check_decay(self.decay)

    @override
    def next_threshold(self, residual: Residual, last: Sent | None) -> float:
        if last is None:
            return self.initial
        if last.density < self.target:
            return last.threshold * self.decay
        if last.density > self.target:
            return last.threshold / self.decay
        return last.threshold
