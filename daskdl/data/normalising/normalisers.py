"""Ways to scale what a model is trained on. One small class per rule.

A normaliser says what is wanted and is never changed; `fit` goes through the data once
and returns what x is scaled by.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.normalising.fitting import statistics_of_all
from daskdl.data.normalising.normalisation import Normalisation
from daskdl.data.normalising.scaling import Scaling
from daskdl.data.normalising.statistics import Per, Statistics, check_per
from daskdl.data.options import SourceOptions
from daskdl.data.sources import source_of
from daskdl.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Normaliser(ABC):
    """Choose what values are scaled by from their statistics.

    Attributes:
        per: What has numbers of its own: "feature", each place in a row; "channel",
            each index of the second axis, as of images (rows, channels, height,
            width), which may then differ in size; "all", nothing: one number for an
            array.
        only: Keys of x, where it is a dict or a tuple, that are scaled; the others
            are left as they are. None: all.

    Raises:
        OptionError: If an attribute is outside what is allowed.
    """

    per: Per = "feature"
    only: tuple[str | int, ...] | None = None

    def __post_init__(self) -> None:
        check_per(self.per)
        if self.only is not None and not isinstance(self.only, tuple):
            raise OptionError(
                f"only must be a tuple of keys of x, got {self.only!r}; "
                f"for one key use ({self.only!r},)"
            )

    @abstractmethod
    def scaling(self, statistics: Statistics) -> Scaling:
        """What the values of one array are to be scaled by.

        Args:
            statistics: Of all its rows.
        """

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        client: Any = None,
        loader: Any = None,
    ) -> Normalisation:
        """Go through the data once, each part where it is.

        Args:
            X: Whatever `Trainer.fit` takes.
            y: Labels, or their columns; not looked at.
            client: None: the default client, if there is one. False: no cluster.
            loader: As of `Trainer.fit`, for paths.

        Returns:
            What x is scaled by, of this data; a `transform` of `Trainer.fit`.

        Raises:
            DataError: Naming the part and the array if a value is NaN or infinite, if
                parts do not fit together, or if the data cannot be used.
            OptionError: If x has no such keys as `only`.
        """
        source = source_of(X, y, SourceOptions(loader=loader, labelled=False))
        found = statistics_of_all(source, self.per, self.only, client)
        return Normalisation(
            batching.mapped(
                lambda one: None if one is None else self.scaling(one), found
            )
        )


@dataclass(frozen=True)
class Standardize(Normaliser):
    """Mean 0 and standard deviation 1, as numpy's `mean` and `std`.

    What is constant in all rows is divided by 1, and so becomes 0.

    Attributes:
        epsilon: Deviations up to here count as constant, >= 0.

    Example:
        >>> fitted = Standardize().fit(np.array([[1.0, 7.0], [3.0, 7.0]]), client=False)
        >>> fitted.scalings.shift, fitted.scalings.scale
        (array([2., 7.]), array([1., 1.]))
    """

    epsilon: float = 0.0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise OptionError(f"epsilon must be finite and >= 0, got {self.epsilon}")

    @override
    def scaling(self, statistics: Statistics) -> Scaling:
        deviation = statistics.deviation
        return Scaling(
            statistics.mean, np.where(deviation <= self.epsilon, 1.0, deviation)
        )


@dataclass(frozen=True)
class MinMax(Normaliser):
    """From `low` for the lowest value to `high` for the highest.

    Values outside of what the data had come out outside: nothing is cut off. What is
    constant in all rows becomes `low`.

    Attributes:
        low: What the lowest value becomes.
        high: What the highest value becomes, > low.

    Example:
        >>> fitted = MinMax(-1, 1).fit(np.array([[0], [255]], "uint8"), client=False)
        >>> fitted.transform((np.array([[51]], "uint8"), None))[0]
        array([[-0.6]], dtype=float32)
    """

    low: float = 0.0
    high: float = 1.0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.high - self.low) and self.low < self.high):
            raise OptionError(
                f"low and high must be finite and low < high, got {self.low} and "
                f"{self.high}"
            )

    @override
    def scaling(self, statistics: Statistics) -> Scaling:
        extent = (statistics.high - statistics.low) / (self.high - self.low)
        return Scaling(
            statistics.low, np.where(extent > 0, extent, 1.0), float(self.low)
        )
