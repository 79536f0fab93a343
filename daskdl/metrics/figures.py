"""Pictures put together to a figure, without matplotlib's global state. No torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from daskdl.errors import OptionError
from daskdl.metrics.sections import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 6.0, 4.5  # of one picture, inches
_COLUMNS = 2


def figure_of(pictures: Sequence[Picture]) -> "Figure":
    """Draw pictures beside and below each other.

    Args:
        pictures: One or more.

    Raises:
        OptionError: If matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError("plot needs matplotlib: pip install daskdl[plots]") from None
    columns = min(len(pictures), _COLUMNS)
    rows = -(-len(pictures) // columns)
    figure = Figure(
        figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained", dpi=100
    )
    FigureCanvasAgg(figure)
    parts = figure.subfigures(rows, columns, squeeze=False).flatten()
    for picture, part in zip(pictures, parts, strict=False):
        picture(part)
    return figure
