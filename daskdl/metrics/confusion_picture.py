"""A confusion matrix drawn. No torch; matplotlib is given, not imported."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

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
