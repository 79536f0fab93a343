"""Rules that bound the residual after an exchange, one small class per rule.

A rule returns a bound, and the kernels clip. No tensors are used here.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from typing_extensions import override

from daskdl.errors import OptionError


class ResidualPostProcessor(ABC):
    """Bounds the residual after an exchange.

    Implementations are frozen and stateless: the compressor counts exchanges.
    """

    @abstractmethod
    def bound(self, exchange: int, threshold: float) -> float:
        """Return the largest ``|residual|`` to carry over.

        As the bound is at least ``threshold``, only positions that were just sent can
        exceed it, so the compressor clips only the entries it has sent.

        Args:
            exchange: Exchanges of this replica before this one, from 0.
            threshold: Quantum of this exchange, parameter units.

        Returns:
            A number >= ``threshold``, parameter units; infinity: no limit.
        """


@dataclass(frozen=True)
class ResidualClipping(ResidualPostProcessor):
    """Clips the residual to a multiple of the threshold every few exchanges.

    An entry sends 15 quanta at most, so a very large residual takes several exchanges
    to drain, and is stale when it arrives. Clipped mass is discarded; the history
    counts it as ``clipped``.

    Args:
        multiple: Bound in thresholds, finite, >= 1.
        frequency: Exchanges between clippings, >= 1; the first exchange never clips.

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> rule = ResidualClipping(multiple=5.0, frequency=2)
        >>> [rule.bound(exchange, threshold=0.5) for exchange in range(4)]
        [inf, inf, 2.5, inf]

    Source:
        Deeplearning4j, ResidualClippingPostProcessor.java (2021). Deeplearning4j skips
        an exchange without entries; here such an exchange clips no residual.
    """

    multiple: float = 5.0
    frequency: int = 5

    def __post_init__(self) -> None:
        if not 1 <= self.multiple < math.inf:
            raise OptionError(
                f"multiple must be finite and >= 1, got {self.multiple!r}"
            )
        if not (isinstance(self.frequency, int) and self.frequency >= 1):
            raise OptionError(
                f"frequency must be an integer >= 1, got {self.frequency!r}"
            )

    @override
    def bound(self, exchange: int, threshold: float) -> float:
        if exchange > 0 and exchange % self.frequency == 0:
            return self.multiple * threshold
        return math.inf


@dataclass(frozen=True)
class KeepResidual(ResidualPostProcessor):
    """Carries the whole residual over.

    Example:
        >>> KeepResidual().bound(exchange=5, threshold=0.5)
        inf
    """

    @override
    def bound(self, exchange: int, threshold: float) -> float:
        return math.inf
