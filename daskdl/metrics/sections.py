"""What one set of metrics measured, as a part of an evaluation. No torch, no Dask."""

import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from daskdl.metrics.blocks import Block, Facts, Heading, decimals

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

Picture = Callable[["SubFigure"], None]  # draws on it


@dataclass(frozen=True, eq=False)
class Section(ABC):
    """Values of one set of metrics, and how they are shown.

    Attributes:
        values: Numbers and arrays, by the names that the user sees.
        names: What rows of arrays are: classes, labels or columns; () if nothing is.
    """

    values: Mapping[str, Any]
    names: tuple[str, ...] = ()

    @property
    @abstractmethod
    def kind(self) -> str:
        """One word, which sets this section apart from others."""

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Make the report of this section."""

    def columns(self) -> dict[str, Any]:
        """What there is of each of `names`, by the names of values."""
        return {}

    def pictures(self) -> dict[str, Picture]:
        """What can be drawn, by kind."""
        return {}


class PlainSection(Section):
    """Numbers by name, of metrics that only the user knows."""

    @property
    @override
    def kind(self) -> str:
        return "own"

    @override
    def blocks(self) -> Iterator[Block]:
        yield Heading("Metrics")
        yield Facts([(name, _shown(value)) for name, value in self.values.items()])


def _shown(value: Any) -> str:
    if isinstance(value, numbers.Integral) or not isinstance(value, numbers.Real):
        return str(value)
    return decimals(float(value))
