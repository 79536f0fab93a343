"""Plots of an evaluation: confusion matrix, curves, reliability diagram.

Matplotlib is imported on first use, and its global state does not change.

Shape suffixes: C = classes, M = bins, P = points of a curve.
"""

import functools
import io
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

_WIDTH, _HEIGHT = 6.0, 4.5  # of one plot, inches
_COUNTED = 20  # classes of the largest matrix whose cells show their counts
_TICKS = 10  # class names along the sides of larger matrices
_NAMED = 10  # curves with a color and a name: those with the smallest areas
_LEGEND_BESIDE: dict[str, Any] = {
    "loc": "upper left",
    "bbox_to_anchor": (1.02, 1),
    "fontsize": "small",
    "frameon": False,
}


def figure_of(plots: "Sequence[Callable[[SubFigure], None]]") -> "Figure":
    """Draw plots in two columns."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError(
            "plot needs matplotlib: pip install 'daskdl[plots]'"
        ) from None
    columns = min(len(plots), 2)
    rows = -(-len(plots) // columns)
    size = (_WIDTH * columns, _HEIGHT * rows)
    figure = Figure(figsize=size, layout="constrained", dpi=100)
    FigureCanvasAgg(figure)
    parts = figure.subfigures(rows, columns, squeeze=False).flatten()
    for plot, part in zip(plots, parts, strict=False):
        plot(part)
    # Notebooks otherwise show figures of pyplot only. An attribute of the instance,
    # since the class of a figure without pyplot exists only with matplotlib.
    figure._repr_png_ = functools.partial(_png, figure)  # type: ignore[attr-defined]
    return figure


def _png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def short(name: str, limit: int) -> str:
    """Truncate a name to a number of characters."""
    return name if len(name) <= limit else f"{name[: limit - 1]}…"


def draw_confusion(
    confusion_CC: NDArray[np.int64], names: Sequence[str], figure: "SubFigure"
) -> None:
    """Draw a confusion matrix: colors show shares of the row, numbers are counts."""
    axes = figure.add_subplot()
    share_CC = confusion_CC / np.maximum(confusion_CC.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(share_CC, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the row", fraction=0.046)
    axes.set(title="Confusion matrix", xlabel="predicted", ylabel="actual")
    spacing = 1 if len(names) <= _COUNTED else -(-len(names) // _TICKS)
    ticks = range(0, len(names), spacing)
    # Matplotlib typesets text between dollar signs as mathematics.
    labels = [short(names[k], 12).replace("$", r"\$") for k in ticks]
    axes.set_yticks(ticks, labels)
    upright = len(labels) > 4 and max(map(len, labels)) > 2
    axes.set_xticks(ticks, labels, rotation=90 if upright else 0)
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
    """Draw a curve for each class, with a legend beside the plot."""
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
    defined = np.flatnonzero(~np.isnan(areas_C))
    lowest = defined[np.argsort(areas_C[defined])[:_NAMED]]
    named = defined if len(defined) <= _NAMED else lowest
    pale: dict[str, Any] = {"color": PALE, "linewidth": 0.6, "zorder": 2}
    for k in np.setdiff1d(defined, named):
        axes.plot(*curves_C2P[k], drawstyle=drawstyle, **pale)
    for i, k in enumerate(named):
        # Matplotlib hides labels that begin with "_".
        name = short(names[k], 14).replace("$", r"\$").replace("_", "\u200b_", 1)
        axes.plot(
            *curves_C2P[k],
            drawstyle=drawstyle,
            label=f"{name} ({area} {areas_C[k]:.3f})",
            color=COLORS[i % len(COLORS)],
            linestyle=DASHES[i // len(COLORS)],
            linewidth=1.3,
            zorder=3,
        )
    if len(named):
        heading = None if len(named) == len(defined) else f"the {_NAMED} lowest"
        axes.legend(title=heading, **_LEGEND_BESIDE)


def draw_reliability(
    edges: Numbers,
    count_M: NDArray[np.int64],
    confidence_M: Numbers,
    accuracy_M: Numbers,
    figure: "SubFigure",
) -> None:
    """Draw the accuracy by confidence, above the number of predictions."""
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    filled = count_M > 0
    width = np.diff(edges)
    bars: dict[str, Any] = {"align": "edge", "edgecolor": "white"}
    above.bar(
        edges[:-1][filled],
        accuracy_M[filled],
        width[filled],
        color=COLORS[4],
        label="accuracy of the bin",
        **bars,
    )
    above.plot([0, 1], [0, 1], color=DARK, linestyle=":", label="perfectly calibrated")
    above.plot(
        confidence_M[filled],
        accuracy_M[filled],
        color=COLORS[1],
        marker="o",
        markersize=4,
        label="at mean confidence",
    )
    above.set(
        title="Reliability", ylabel="accuracy of the bin", xlim=(0, 1), ylim=(0, 1.02)
    )
    above.legend(**_LEGEND_BESIDE)
    below.bar(edges[:-1], count_M, width, color=PALE, **bars)
    below.set(xlabel="confidence", ylabel="predictions")
