"""Pictures of an evaluation: confusion matrix, curves, reliability diagram.

Matplotlib is imported on use, and its global state does not change.
C classes, M bins, P points of a curve.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from daskdl.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

Numbers = NDArray[np.float64]

# Okabe and Ito's palette for color-blind readers, without yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--")
PALE, DARK = "#BBBBBB", "#555555"

_WIDTH, _HEIGHT = 6.0, 4.5  # of one picture, inches
_COUNTED = 20  # largest matrix whose cells show their counts
_TICKS = 10  # class names along the sides of larger matrices
_NAMED = 10  # curves with a color and a name, those with the smallest areas
_BESIDE: dict[str, Any] = {
    "loc": "upper left",
    "bbox_to_anchor": (1.02, 1),
    "fontsize": "small",
    "frameon": False,
}


def figure_of(pictures: "Sequence[Callable[[SubFigure], None]]") -> "Figure":
    """Draw pictures in two columns."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError(
            "plot needs matplotlib: pip install 'daskdl[plots]'"
        ) from None
    columns = min(len(pictures), 2)
    rows = -(-len(pictures) // columns)
    size = (_WIDTH * columns, _HEIGHT * rows)
    figure = Figure(figsize=size, layout="constrained", dpi=100)
    FigureCanvasAgg(figure)
    parts = figure.subfigures(rows, columns, squeeze=False).flatten()
    for picture, part in zip(pictures, parts, strict=False):
        picture(part)
    return figure


def short(name: str, letters: int) -> str:
    """Truncate a name."""
    return name if len(name) <= letters else f"{name[: letters - 1]}…"


def draw_confusion(
    confusion_CC: NDArray[np.int64], names: Sequence[str], figure: "SubFigure"
) -> None:
    """Draw a confusion matrix: colors show shares of the row, numbers are counts."""
    axes = figure.add_subplot()
    share_CC = confusion_CC / np.maximum(confusion_CC.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(share_CC, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the row", fraction=0.046)
    axes.set(title="Confusion matrix", xlabel="predicted", ylabel="actual")
    each = 1 if len(names) <= _COUNTED else -(-len(names) // _TICKS)
    places = range(0, len(names), each)
    # Matplotlib typesets text between dollar signs as mathematics.
    shown = [short(names[k], 12).replace("$", r"\$") for k in places]
    axes.set_yticks(places, shown)
    upright = len(shown) > 4 and max(map(len, shown)) > 2
    axes.set_xticks(places, shown, rotation=90 if upright else 0)
    if len(names) > _COUNTED:
        return
    digits = max(len(str(confusion_CC.max())), 2)
    size = min(10.0, 300 / (len(names) * digits))
    centered: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size}
    for (row, column), count in np.ndenumerate(confusion_CC):
        if count:
            color = "white" if share_CC[row, column] > 0.5 else "black"
            axes.text(column, row, str(count), color=color, **centered)


def draw_curves(
    kind: str,
    curves_C2P: Numbers,
    areas_C: Numbers,
    names: Sequence[str],
    figure: "SubFigure",
) -> None:
    """Draw a curve for each class, with a legend beside the picture."""
    roc = kind == "roc"
    title, x, y, area = (
        ("ROC", "false positive rate", "true positive rate", "AUC")
        if roc
        else ("Precision and recall", "recall", "precision", "AP")
    )
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y, xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    # Precision is constant between thresholds.
    drawstyle = "default" if roc else "steps-pre"
    if roc:
        axes.plot([0, 1], [0, 1], color=PALE, linestyle=":", zorder=1)
    there = np.flatnonzero(~np.isnan(areas_C))
    lowest = there[np.argsort(areas_C[there])[:_NAMED]]
    named = there if len(there) <= _NAMED else lowest
    pale: dict[str, Any] = {"color": PALE, "linewidth": 0.6, "zorder": 2}
    for k in np.setdiff1d(there, named):
        axes.plot(*curves_C2P[k], drawstyle=drawstyle, **pale)
    for place, k in enumerate(named):
        # Matplotlib hides labels that begin with "_".
        name = short(names[k], 14).replace("$", r"\$").replace("_", "\u200b_", 1)
        axes.plot(
            *curves_C2P[k],
            drawstyle=drawstyle,
            label=f"{name} ({area} {areas_C[k]:.3f})",
            color=COLORS[place % len(COLORS)],
            linestyle=DASHES[place // len(COLORS)],
            linewidth=1.3,
            zorder=3,
        )
    if len(named):
        heading = None if len(named) == len(there) else f"the {_NAMED} lowest"
        axes.legend(title=heading, **_BESIDE)


def draw_reliability(
    edges: Numbers,
    count_M: NDArray[np.int64],
    confidence_M: Numbers,
    accuracy_M: Numbers,
    figure: "SubFigure",
) -> None:
    """Draw the accuracy of predictions by confidence, above their number."""
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    there = count_M > 0
    width = np.diff(edges)
    bars: dict[str, Any] = {"align": "edge", "edgecolor": "white"}
    above.bar(
        edges[:-1][there],
        accuracy_M[there],
        width[there],
        color=COLORS[4],
        label="accuracy of the bin",
        **bars,
    )
    above.plot([0, 1], [0, 1], color=DARK, linestyle=":", label="perfectly calibrated")
    above.plot(
        confidence_M[there],
        accuracy_M[there],
        color=COLORS[1],
        marker="o",
        markersize=4,
        label="at mean confidence",
    )
    above.set(
        title="Reliability", ylabel="accuracy of the bin", xlim=(0, 1), ylim=(0, 1.02)
    )
    above.legend(**_BESIDE)
    below.bar(edges[:-1], count_M, width, color=PALE, **bars)
    below.set(xlabel="confidence", ylabel="predictions")
