"""ROC and precision-recall curves drawn. Matplotlib is given, not imported."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from daskdl.metrics.colours import COLOURS, DASHES, PALE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

NAMED = 10  # curves with a colour of their own; of more, those with the least area
_LETTERS = 14  # of a class name

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
        label = f"{_short(names[k])} ({area} {areas_C[k]:.3f})"
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


def _short(name: str) -> str:
    # Matplotlib reads what is between dollars as mathematics, and hides "_" labels.
    name = name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…"
    return name.replace("$", r"\$").replace("_", "\u200b_", 1)
