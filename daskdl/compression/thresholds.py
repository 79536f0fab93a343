"""Algorithms that choose the threshold of each exchange, one small class each.

An algorithm gets the outcome of the last exchange (threshold, density) and can read the
residual, which most do only for the first threshold. A mapping from patterns of
parameter names gives each parameter group its own algorithm.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

from torch import Tensor
from typing_extensions import override

from daskdl.errors import OptionError

DL4J_INITIAL = 1e-4
HALVES_IN_20 = 0.5 ** (1 / 20)  # Deeplearning4j's decay
# The density recorded for a dense update. It is above every default band, so that the
# next sparse update has a larger threshold. At this density, a bitmap of Deeplearning4j
# becomes smaller than a list of entries.
DENSE_DENSITY = 1 / 16
# Largest share of the moved parameters to send as entries. With Laplacian residuals,
# one quantum for each of the 1/e largest moves the most mass at once; at higher
# densities, quanta shrink faster than the number of entries grows.
MAX_DENSITY = 1 / math.e
SAMPLE_SIZE = 2**18  # values of the residual in a sample


class Outcome(NamedTuple):
    """The outcome of the last exchange."""

    threshold: float  # threshold of the algorithm, not rounded to the grid
    density: float  # entries sent / parameters, in [0, 1]


class Residual(Protocol):
    """The residual of some parameters, computed on request."""

    def tensor(self) -> Tensor:
        """Return the whole residual, shape (N,), parameter units, a new tensor."""

    def sample(self, most: int) -> Tensor:
        """Return about ``most`` values of the residual, or all if there are fewer.

        The values are short runs spread over the whole vector, always at the same
        positions; a new tensor on the CPU.
        """


class ThresholdAlgorithm(ABC):
    """Chooses the next threshold from the outcome of the last exchange.

    Implementations are frozen and stateless: the compressor keeps :class:`Outcome` and
    passes it back.
    """

    @abstractmethod
    def next_threshold(self, residual: Residual, last: Outcome | None) -> float:
        """Return a threshold, finite and > 0, in parameter units.

        Args:
            residual: The residual to which the threshold will be applied; reading it
                costs a pass over memory.
            last: Outcome of the previous exchange; None before the first exchange.
        """


def average_outcome(
    outcomes: Iterable[Outcome | None],
) -> Outcome | None:
    """Average the outcomes of several replicas, for the next run or a joining replica.

    Example:
        >>> average_outcome([Outcome(1.0, 0.25), None, Outcome(2.0, 0.75)])
        Outcome(threshold=1.5, density=0.5)

    Source:
        Deeplearning4j, AdaptiveThresholdAlgorithm.Reducer (2021).
    """
    used = [outcome for outcome in outcomes if outcome is not None]
    if not used:
        return None
    return Outcome(
        math.fsum(outcome.threshold for outcome in used) / len(used),
        math.fsum(outcome.density for outcome in used) / len(used),
    )


def threshold_for(
    density: float, residual: Residual, most: int = SAMPLE_SIZE
) -> float | None:
    """Return the threshold for a density, from a sample of the residual.

    Args:
        density: Entries / parameters; limited to 1/e of the nonzero values. At least
            one value of the sample reaches the threshold.
        residual: The residual to sample.
        most: Values in the sample, about.

    Returns:
        Parameter units, > 0; None if no sampled value is finite and nonzero.
    """
    sample = residual.sample(most).abs().numpy()
    sample[~(sample < math.inf)] = 0.0
    moved = int((sample > 0).sum())
    if not moved:
        return None
    largest = round(max(min(density * len(sample), MAX_DENSITY * moved), 1))
    sample.partition(-largest)  # an eighth of the time of torch.topk
    return float(sample[-largest])


def first_threshold(initial: float | None, density: float, residual: Residual) -> float:
    """Return a given first threshold, or the threshold for a density."""
    if initial is not None:
        return initial
    return threshold_for(density, residual) or DL4J_INITIAL


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise OptionError(f"{name} must be finite and > 0, got {value!r}")


def _check_decay(decay: float) -> None:
    if not 0.5 <= decay < 1:
        raise OptionError(f"decay must be in [0.5, 1), got {decay!r}")


def _steered(last: Outcome, low: float, high: float, decay: float) -> float:
    if last.density < low:
        return last.threshold * decay
    if last.density > high:
        return last.threshold / decay
    return last.threshold


@dataclass(frozen=True)
class AdaptiveThreshold(ThresholdAlgorithm):
    """Steers the density into the band ``[min_density, max_density]``.

    The threshold is multiplied by ``decay`` below the band and divided by ``decay``
    above it.

    Args:
        initial: First threshold, parameter units. None: the threshold that sends the
            geometric mean of the band's edges in a sample of the first residual; 1e-4
            if the sample is all zero.
        min_density: Lower edge of the band, entries sent / parameters.
        max_density: Upper edge of the band.
        decay: Factor per exchange, in [0.5, 1); the default halves the threshold in 20
            exchanges.

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> rule = AdaptiveThreshold(initial=1e-3, max_density=0.01, decay=0.5)
        >>> rule.next_threshold(residual=None, last=Outcome(1e-3, density=0.2))
        0.002

    Source:
        Deeplearning4j, AdaptiveThresholdAlgorithm.java (2021), which always starts at
        1e-4.
    """

    initial: float | None = DL4J_INITIAL
    min_density: float = 1e-4
    max_density: float = 1e-2
    decay: float = HALVES_IN_20

    def __post_init__(self) -> None:
        if self.initial is not None:
            _check_positive("initial", self.initial)
        if not 0 < self.min_density <= self.max_density <= 1:
            raise OptionError(
                "need 0 < min_density <= max_density <= 1, "
                f"got {self.min_density!r} and {self.max_density!r}"
            )
        _check_decay(self.decay)

    @override
    def next_threshold(self, residual: Residual, last: Outcome | None) -> float:
        if last is None:
            middle = math.sqrt(self.min_density * self.max_density)
            return first_threshold(self.initial, middle, residual)
        return _steered(last, self.min_density, self.max_density, self.decay)


@dataclass(frozen=True)
class FixedThreshold(ThresholdAlgorithm):
    """Uses the same threshold for every exchange.

    Args:
        value: The threshold, parameter units.

    Raises:
        OptionError: If ``value`` is not finite and > 0.

    Example:
        >>> FixedThreshold(0.25).next_threshold(residual=None, last=Outcome(1.0, 0.5))
        0.25
    """

    value: float = 1e-3

    def __post_init__(self) -> None:
        _check_positive("value", self.value)

    @override
    def next_threshold(self, residual: Residual, last: Outcome | None) -> float:
        return self.value


@dataclass(frozen=True)
class TargetSparsityThreshold(ThresholdAlgorithm):
    """Steers the density to a target; the threshold changes at nearly every exchange.

    Args:
        initial: First threshold, parameter units. None: the threshold that sends
            `target` in a sample of the first residual; 1e-4 if the sample is all zero.
        target: Target density, entries sent / parameters, in (0, 1/16).
        decay: Factor per exchange, in [0.5, 1); the default halves the threshold in 20
            exchanges.

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> rule = TargetSparsityThreshold(target=0.01, decay=0.5)
        >>> rule.next_threshold(residual=None, last=Outcome(1e-3, density=0.001))
        0.0005

    Source:
        Deeplearning4j, TargetSparsityThresholdAlgorithm.java (2021).
    """

    initial: float | None = DL4J_INITIAL
    target: float = 1e-3
    decay: float = HALVES_IN_20

    def __post_init__(self) -> None:
        if self.initial is not None:
            _check_positive("initial", self.initial)
        if not 0 < self.target < DENSE_DENSITY:
            raise OptionError(f"target must be in (0, 1/16), got {self.target!r}")
        _check_decay(self.decay)

    @override
    def next_threshold(self, residual: Residual, last: Outcome | None) -> float:
        if last is None:
            return first_threshold(self.initial, self.target, residual)
        return _steered(last, self.target, self.target, self.decay)


# Values from which `SampledThreshold` takes a threshold: the density is then a few per
# cent off, and drawing them costs far less than the scan.
SMALL_SAMPLE_SIZE = 2**15


@dataclass(frozen=True)
class SampledThreshold(ThresholdAlgorithm):
    """Sends the same density in every exchange.

    Before each exchange, the threshold for this density is taken from a sample of the
    residual. How many steps lie between two exchanges then decides how much a step
    sends; see ``exchange_every`` of :class:`~daskdl.GradientSharing`.

    Args:
        density: Entries sent / parameters, in (0, 1/e).

    Raises:
        OptionError: If ``density`` is outside its range.

    Example:
        >>> SampledThreshold(density=0.5)
        Traceback (most recent call last):
        daskdl.errors.OptionError: density must be in (0, 1/e), got 0.5

    Source:
        Lin and others, "Deep Gradient Compression", ICLR 2018, section 3: top-k
        thresholds from a sample.
    """

    density: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.density < MAX_DENSITY:
            raise OptionError(f"density must be in (0, 1/e), got {self.density!r}")

    @override
    def next_threshold(self, residual: Residual, last: Outcome | None) -> float:
        threshold = threshold_for(self.density, residual, SMALL_SAMPLE_SIZE)
        return threshold or (DL4J_INITIAL if last is None else last.threshold)


def summable(threshold: float) -> float:
    """Round a threshold for updates that are summed on their way.

    A sum is written in the largest unit of which all its quanta are multiples. If all
    are powers of two, that is the smallest of them, and counts need few bits.

    Args:
        threshold: Finite and > 0.

    Returns:
        The largest power of two up to the threshold, so that an update has no fewer
        entries than without rounding.

    Example:
        >>> [summable(threshold) for threshold in (0.25, 0.3, 0.4, 0.7, 0.9)]
        [0.25, 0.25, 0.25, 0.5, 0.5]
    """
    return math.ldexp(0.5, math.frexp(threshold)[1])


ALL_NAMES = "*"  # the pattern of a single algorithm
MAX_NAMES_SHOWN = 5  # names in a message


@dataclass(frozen=True, eq=False, repr=False)
class LayerThresholds(Mapping[str, ThresholdAlgorithm]):
    """Threshold algorithms by pattern of parameter names, in order; hashable.

    Equal to any mapping with the same patterns in the same order.

    Attributes:
        pairs: Patterns for :mod:`fnmatch`, each with its algorithm.

    Example:
        >>> from daskdl import FixedThreshold
        >>> LayerThresholds.of(FixedThreshold(0.25))
        {'*': FixedThreshold(value=0.25)}
    """

    pairs: tuple[tuple[str, ThresholdAlgorithm], ...]

    def __post_init__(self) -> None:
        sound = all(
            isinstance(pattern, str) and isinstance(algorithm, ThresholdAlgorithm)
            for pattern, algorithm in self.pairs
        )
        if not self.pairs or not sound:
            raise OptionError(refusal(dict(self.pairs)))

    @classmethod
    def of(cls, threshold: object) -> "LayerThresholds":
        """Convert a mapping, or a single algorithm for all parameters."""
        if isinstance(threshold, LayerThresholds):
            return threshold
        if isinstance(threshold, ThresholdAlgorithm):
            return cls(((ALL_NAMES, threshold),))
        if isinstance(threshold, Mapping):
            return cls(tuple(threshold.items()))
        raise OptionError(refusal(threshold))

    def assign(self, names: Collection[str]) -> dict[str, str]:
        """Return the first pattern that matches each parameter.

        Example:
            >>> from daskdl import AdaptiveThreshold, FixedThreshold
            >>> thresholds = LayerThresholds.of(
            ...     {"*.bias": FixedThreshold(1e-3), "*": AdaptiveThreshold()}
            ... )
            >>> thresholds.assign(["0.weight", "0.bias"])
            {'0.weight': '*', '0.bias': '*.bias'}
        """
        assigned = {name: self._pattern_of(name) for name in names}
        used = set(assigned.values())
        for pattern in self:
            if pattern not in used:
                raise OptionError(_useless(pattern, assigned))
        return assigned

    def _pattern_of(self, name: str) -> str:
        for pattern in self:
            if fnmatchcase(name, pattern):
                return pattern
        raise OptionError(
            f"threshold has no pattern that parameter {name!r} matches, got "
            f"{list(self)}; end it with '*' for all others"
        )

    @override
    def __getitem__(self, pattern: str) -> ThresholdAlgorithm:
        return dict(self.pairs)[pattern]

    @override
    def __iter__(self) -> Iterator[str]:
        return (pattern for pattern, _ in self.pairs)

    @override
    def __len__(self) -> int:
        return len(self.pairs)

    @override
    def __eq__(self, value: object) -> bool:
        if not isinstance(value, Mapping):
            return NotImplemented
        return self.pairs == tuple(value.items())

    @override
    def __hash__(self) -> int:
        return hash(self.pairs)

    @override
    def __repr__(self) -> str:
        return repr(dict(self.pairs))


def refusal(value: object) -> str:
    """Return the error message for an invalid threshold option."""
    return (
        "threshold must be a daskdl.ThresholdAlgorithm, such as FixedThreshold(1e-3), "
        f"or a mapping from patterns of parameter names to such, got {value!r}"
    )


def _useless(pattern: str, assigned: Mapping[str, str]) -> str:
    for name, assigned_pattern in assigned.items():
        if fnmatchcase(name, pattern):
            return (
                f"threshold pattern {pattern!r} gets no parameter: {name!r} and all "
                f"others that it matches go to {assigned_pattern!r} or others before "
                "it; put it first, or leave it out"
            )
    names = ", ".join(repr(name) for name in list(assigned)[:MAX_NAMES_SHOWN])
    ellipsis = ", ..." if len(assigned) > MAX_NAMES_SHOWN else ""
    return (
        f"threshold pattern {pattern!r} matches no trainable parameter of the model, "
        f"which are {names}{ellipsis}"
    )
