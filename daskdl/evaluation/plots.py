"""Colours that differ for every kind of eye: Okabe and Ito, without yellow.

A confusion matrix drawn. No torch; matplotlib is given, not imported.

ROC and precision-recall curves drawn. Matplotlib is given, not imported.

A reliability diagram drawn. No torch; matplotlib is given, not imported.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", ":")
PALE = "#BBBBBB"
DARK = "#555555"


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

COUNTED = 20  # classes up to which each cell has its number
_TICKS = 10  # class names along one side, of more classes than that
_CROWDED = 12  # names are small, and long ones upright
_LETTERS = 12  # of a class name


def drawn_confusion(
    confusion_CC: NDArray[np.int64], names: Sequence[str], figure: "SubFigure"
) -> None:
    """Draw a confusion matrix: colours are shares of the row, numbers are counts.

    Args:
        confusion_CC: Rows are the labels, columns the predictions.
        names: Of the classes.
        figure: Is drawn on.
    """
    axes = figure.add_subplot()
    whole = np.maximum(confusion_CC.sum(axis=1, keepdims=True), 1)
    share_CC = confusion_CC / whole
    image = axes.imshow(share_CC, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the row", fraction=0.046)
    _name(axes, names)
    axes.set(title="Confusion matrix", xlabel="predicted", ylabel="actual")
    if len(names) <= COUNTED:
        _number(axes, confusion_CC, share_CC)


def _name(axes: "Axes", names: Sequence[str]) -> None:
    step = 1 if len(names) <= COUNTED else -(-len(names) // _TICKS)
    places = range(0, len(names), step)
    shown = [_short(names[k]) for k in places]
    crowded = len(shown) > _CROWDED
    size = "small" if crowded else "medium"
    axes.set_yticks(places, shown, fontsize=size)
    if max(map(len, shown)) <= 2 or len(shown) <= 4:
        axes.set_xticks(places, shown, fontsize=size)
    elif crowded:
        axes.set_xticks(places, shown, fontsize=size, rotation=90)
    else:
        axes.set_xticks(places, shown, fontsize=size, rotation=45, ha="right")


def _short(name: str) -> str:
    # Matplotlib reads what is between dollars as mathematics.
    name = name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…"
    return name.replace("$", r"\$")


def _number(
    axes: "Axes", confusion_CC: NDArray[np.int64], share_CC: NDArray[np.float64]
) -> None:
    digits = len(str(confusion_CC.max()))
    size = min(10.0, 300 / (len(confusion_CC) * max(digits, 2)))
    for (row, column), count in np.ndenumerate(confusion_CC):
        if count:
            axes.text(
                column,
                row,
                str(count),
                ha="center",
                va="center",
                fontsize=size,
                color="white" if share_CC[row, column] > 0.5 else "black",
            )


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

NAMED = 10  # curves with a colour of their own; of more, those with the least area
_LETTERS_curve_picture = 14  # of a class name

_TEXTS = {
    "roc": ("ROC", "false positive rate", "true positive rate", "AUC"),
    "precision_recall": ("Precision and recall", "recall", "precision", "AP"),
}


def drawn_curves(
    kind: str,
    curves_C2P: NDArray[np.float64],
    areas_C: NDArray[np.float64],
    names: Sequence[str],
    figure: "SubFigure",
) -> None:
    """Draw one curve for each class, named beside the picture.

    Args:
        kind: "roc" or "precision_recall".
        curves_C2P: Along x and y; NaN where there is none.
        areas_C: Below the curves.
        names: Of the classes.
        figure: Is drawn on.
    """
    title, x, y, area = _TEXTS[kind]
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y, xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    if kind == "roc":
        axes.plot([0, 1], [0, 1], color=PALE, linestyle=":", zorder=1)
    there = np.flatnonzero(~np.isnan(areas_C))
    named = there if len(there) <= NAMED else there[np.argsort(areas_C[there])[:NAMED]]
    for k in np.setdiff1d(there, named):
        _draw(axes, kind, curves_C2P[k], {"color": PALE, "linewidth": 0.6, "zorder": 2})
    for place, k in enumerate(named):
        label = f"{_short_curve_picture(names[k])} ({area} {areas_C[k]:.3f})"
        _draw(axes, kind, curves_C2P[k], {"label": label, **_style(place)})
    if len(named):
        heading = None if len(named) == len(there) else f"the {NAMED} lowest"
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(1.02, 1),
            fontsize="small",
            title=heading,
            frameon=False,
        )


def _style(place: int) -> dict[str, Any]:
    dashes = DASHES[place // len(COLOURS) % len(DASHES)]
    color = COLOURS[place % len(COLOURS)]
    return {"color": color, "linestyle": dashes, "linewidth": 1.3, "zorder": 3}


def _draw(
    axes: "Axes", kind: str, curve_2P: NDArray[np.float64], style: dict[str, Any]
) -> None:
    if kind == "roc":
        axes.plot(*curve_2P, **style)
    else:  # precision holds from one threshold to the next
        axes.step(*curve_2P, where="pre", **style)


def _short_curve_picture(name: str) -> str:
    # Matplotlib reads what is between dollars as mathematics, and hides "_" labels.
    name = (
        name
        if len(name) <= _LETTERS_curve_picture
        else f"{name[: _LETTERS_curve_picture - 1]}…"
    )
    return name.replace("$", r"\$").replace("_", "\u200b_", 1)


if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

Numbers = NDArray[np.float64]


def drawn_reliability(
    edges: Numbers,
    count_M: NDArray[np.int64],
    confidence_M: Numbers,
    accuracy_M: Numbers,
    figure: "SubFigure",
) -> None:
    """Draw how often predictions of each confidence are right, and how many they are.

    Args:
        edges: Of the M bins, M + 1.
        count_M: Predictions.
        confidence_M: Their mean confidence; NaN where there are none.
        accuracy_M: The share of right ones, likewise.
        figure: Is drawn on.
    """
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    there = count_M > 0
    width = np.diff(edges)
    above.bar(
        edges[:-1][there],
        accuracy_M[there],
        width[there],
        align="edge",
        color=COLOURS[4],
        edgecolor="white",
        label="accuracy of the bin",
    )
    above.plot([0, 1], [0, 1], color=DARK, linestyle=":", label="perfectly calibrated")
    above.plot(
        confidence_M[there],
        accuracy_M[there],
        color=COLOURS[1],
        marker="o",
        markersize=4,
        label="at mean confidence",
    )
    above.set(
        title="Reliability", ylabel="accuracy of the bin", xlim=(0, 1), ylim=(0, 1.02)
    )
    above.legend(
        loc="upper left", bbox_to_anchor=(1.02, 1), fontsize="small", frameon=False
    )
    below.bar(edges[:-1], count_M, width, align="edge", color=PALE, edgecolor="white")
    below.set(xlabel="confidence", ylabel="predictions")
