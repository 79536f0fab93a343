"""Threshold algorithms for parts of a model, by the names of its parameters.

No tensors, no state: which names belong to which algorithm, and nothing else.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from typing_extensions import override

from daskdl.errors import OptionError
from daskdl.thresholds import LinkAlgorithm, ThresholdAlgorithm

ALL = "*"  # the pattern of an algorithm that is alone
SHOWN = 5  # names in a message


@dataclass(frozen=True, eq=False, repr=False)
class LayerThresholds(Mapping[str, ThresholdAlgorithm]):
    """Threshold algorithms by pattern of parameter names, in order; hashable.

    Equal to any mapping with the same patterns in the same order.

    Attributes:
        pairs: A pattern, as of :mod:`fnmatch`, and its algorithm, each.

    Raises:
        OptionError: If there is none, or one is not a pattern and an algorithm, or
            one that follows the link is not alone.

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
        for pattern, algorithm in self.pairs:
            if len(self.pairs) > 1 and isinstance(algorithm, LinkAlgorithm):
                raise OptionError(
                    f"threshold pattern {pattern!r} has an algorithm that follows the "
                    f"link, got {algorithm!r} beside others; the link is that of all "
                    "parameters, so give it alone"
                )

    @classmethod
    def of(cls, threshold: object) -> "LayerThresholds":
        """Return a mapping as this; of a single algorithm, for all parameters.

        Raises:
            OptionError: If it is neither.
        """
        if isinstance(threshold, LayerThresholds):
            return threshold
        if isinstance(threshold, ThresholdAlgorithm):
            return cls(((ALL, threshold),))
        if isinstance(threshold, Mapping):
            return cls(tuple(threshold.items()))
        raise OptionError(refusal(threshold))

    def assign(self, names: Collection[str]) -> dict[str, str]:
        """Return the pattern of each parameter: the first that matches.

        Args:
            names: As in ``named_parameters``, trainable ones only.

        Raises:
            OptionError: If a name has no pattern, or a pattern no name.

        Example:
            >>> from daskdl import AdaptiveThreshold, FixedThreshold
            >>> thresholds = LayerThresholds.of(
            ...     {"*.bias": FixedThreshold(1e-3), "*": AdaptiveThreshold()}
            ... )
            >>> thresholds.assign(["0.weight", "0.bias"])
            {'0.weight': '*', '0.bias': '*.bias'}
        """
        assigned = {name: self._first(name) for name in names}
        used = set(assigned.values())
        for pattern in self:
            if pattern not in used:
                raise OptionError(_useless(pattern, assigned))
        return assigned

    def _first(self, name: str) -> str:
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
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return self.pairs == tuple(other.items())

    @override
    def __hash__(self) -> int:
        return hash(self.pairs)

    @override
    def __repr__(self) -> str:
        return repr(dict(self.pairs))


def refusal(value: object) -> str:
    """What is allowed, for messages."""
    return (
        "threshold must be a daskdl.ThresholdAlgorithm, or a mapping from patterns of "
        f"parameter names to such, got {value!r}"
    )


def _useless(pattern: str, assigned: Mapping[str, str]) -> str:
    for name, first in assigned.items():
        if fnmatchcase(name, pattern):
            return (
                f"threshold pattern {pattern!r} gets no parameter: {name!r} and all "
                f"others that it matches go to {first!r} or others before it; put it "
                "first, or leave it out"
            )
    names = ", ".join(repr(name) for name in list(assigned)[:SHOWN])
    more = ", ..." if len(assigned) > SHOWN else ""
    return (
        f"threshold pattern {pattern!r} matches no trainable parameter of the model, "
        f"which are {names}{more}"
    )
