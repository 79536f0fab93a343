"""How large a step must be before it is sent. One small class per rule.

The rules work on outcomes (threshold, density); they look at the residual to begin
with at most, so it is made only for a rule that asks.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from daskdl.errors import OptionError
from daskdl.link import Link, Measured

DL4J_INITIAL = 1e-4
HALVES_IN_20 = 0.5 ** (1 / 20)  # Deeplearning4j's decay
# The density that a dense message counts as: above every default band, so that the
# threshold rises. Where the bitmap of Deeplearning4j becomes smaller than its entries.
DENSE_DENSITY = 1 / 16
# Of the parameters that moved, most that are sent as entries. One quantum for each of
# the 1/e largest moves the most mass at once where residuals are Laplacian; beyond,
# quanta get smaller faster than entries get more.
MOST = 1 / math.e
SAMPLE = 2**18  # values of the residual that are looked at


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


def threshold_for(density: float, residual: Residual) -> float | None:
    """Find the threshold that a share of the residual reaches, in a sample of it.

    Args:
        density: That share, entries / parameters; of what has moved it is 1/e at most.
        residual: At least one value of it is taken.

    Returns:
        Parameter units, > 0; None if nothing in the sample has moved.
    """
    sample = residual.sample(SAMPLE).abs()
    moved = sample[(sample > 0) & (sample < math.inf)]
    if not len(moved):
        return None
    most = max(min(density * len(sample), MOST * len(moved)), 1)
    return float(torch.topk(moved, round(most), sorted=False).values.min())


def first_threshold(initial: float | None, density: float, residual: Residual) -> float:
    """Begin with a given threshold, or with the one that sends so much.

    Args:
        initial: Parameter units; None: it is found in a sample of the residual.
        density: What is to be sent then, entries / parameters.
        residual: At least one value of it is taken, if `initial` is None.

    Returns:
        Parameter units, > 0; Deeplearning4j's 1e-4 if nothing in the sample has moved.
    """
    if initial is not None:
        return initial
    return threshold_for(density, residual) or DL4J_INITIAL


def check_initial(initial: float | None) -> None:
    """Refuse what cannot be a first threshold.

    Raises:
        OptionError: If it is a number, and not finite and > 0.
    """
    if initial is not None:
        _check_positive("initial", initial)


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
        initial: First threshold, parameter units. None: found in a sample of the first
            residual, such that the middle of the band is sent, on a logarithmic scale;
            1e-4 if nothing has moved.
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
        Deeplearning4j, AdaptiveThresholdAlgorithm.java (2021), which always begins at
        1e-4.
    """

    initial: float | None = DL4J_INITIAL
    min_density: float = 1e-4
    max_density: float = 1e-2
    decay: float = HALVES_IN_20

    def __post_init__(self) -> None:
        check_initial(self.initial)
        if not 0 < self.min_density <= self.max_density <= 1:
            raise OptionError(
                "need 0 < min_density <= max_density <= 1, "
                f"got {self.min_density!r} and {self.max_density!r}"
            )
        _check_decay(self.decay)

    @override
    def next_threshold(self, residual: Residual, last: Sent | None) -> float:
        if last is None:
            middle = math.sqrt(self.min_density * self.max_density)
            return first_threshold(self.initial, middle, residual)
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
        initial: First threshold, parameter units. None: found in a sample of the first
            residual, such that `target` is sent; 1e-4 if nothing has moved.
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

    initial: float | None = DL4J_INITIAL
    target: float = 1e-3
    decay: float = HALVES_IN_20

    def __post_init__(self) -> None:
        check_initial(self.initial)
        if not 0 < self.target < DENSE_DENSITY:
            raise OptionError(f"target must be in (0, 1/16), got {self.target!r}")
        _check_decay(self.decay)

    @override
    def next_threshold(self, residual: Residual, last: Sent | None) -> float:
        if last is None:
            return first_threshold(self.initial, self.target, residual)
        if last.density < self.target:
            return last.threshold * self.decay
        if last.density > self.target:
            return last.threshold / self.decay
        return last.threshold
