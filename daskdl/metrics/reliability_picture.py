"""A reliability diagram drawn. No torch; matplotlib is given, not imported."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from daskdl.metrics.colours import COLOURS, DARK, PALE

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
