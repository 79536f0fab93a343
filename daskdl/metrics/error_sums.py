"""Sums over labels and errors, from which regression is judged. No Dask.

One metric instead of torchmetrics' four, whose definitions these are: theirs of R2
calls labels constant whose squares sum to less than 1e-4, and loses digits where the
mean of labels is far above their spread; theirs of Pearson gives NaN where a single
value is far out. Here sums are of differences to a value near the mean.

N rows, n columns.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

_SUMS = ("squared", "absolute", "y", "yy", "p", "pp", "py")
# Of a spread around the mean, a sum of squares: below, it is rounding.
_ROUNDING = 1e-13

Numbers = NDArray[np.float64]


class Sums(NamedTuple):
    """Of each column, over what counts; y and p are less their offset.

    Attributes:
        values: How many.
        squared: Of errors.
        absolute: Of errors.
        y: Labels.
        yy: Of labels squared.
        p: Predictions.
        pp: Of predictions squared.
        py: Of predictions times labels.
    """

    values: NDArray[np.int64]
    squared: Numbers
    absolute: Numbers
    y: Numbers
    yy: Numbers
    p: Numbers
    pp: Numbers
    py: Numbers


class ErrorSums(Metric):
    """Adds up labels, predictions and errors of each column.

    Args:
        predicted: Near the mean of each column's predictions, (n,), float64.
        labels: Near that of its labels.
    """

    full_state_update = False
    values: Tensor

    def __init__(self, predicted: Tensor, labels: Tensor) -> None:
        super().__init__()
        self.predicted, self.labels = predicted, labels
        none = torch.zeros(len(labels), dtype=torch.int64)
        self.add_state("values", none, dist_reduce_fx="sum")
        for name in _SUMS:
            self.add_state(name, none.double(), dist_reduce_fx="sum")

    @override
    def update(self, predictions_Nn: Tensor, labels_Nn: Tensor) -> None:
        """Add some rows; a label that is NaN does not count.

        Args:
            predictions_Nn: float64.
            labels_Nn: float64.
        """
        counted = ~torch.isnan(labels_Nn)
        p = torch.where(counted, predictions_Nn - self.predicted.to(counted.device), 0)
        y = torch.where(counted, labels_Nn - self.labels.to(counted.device), 0)
        error = torch.where(counted, predictions_Nn - labels_Nn, 0)
        self.values += counted.sum(dim=0)
        terms = (error**2, error.abs(), y, y * y, p, p * p, p * y)
        for name, term in zip(_SUMS, terms, strict=True):
            setattr(self, name, getattr(self, name) + term.sum(dim=0))

    @override
    def compute(self) -> Sums:
        """The sums, as arrays."""
        return Sums(*(getattr(self, n).reshape(-1).cpu().numpy() for n in Sums._fields))


def errors_of(sums: Sums) -> dict[str, Any]:
    """Errors, R2 and correlation of each column; NaN where they are not defined.

    R2 of labels that are all the same is 1 if there is no error, else 0, as that of
    scikit-learn and torchmetrics.

    Args:
        sums: What the metric computed.
    """
    count = np.where(sums.values, sums.values, np.nan)
    spread_y = _spread(sums.yy, sums.y, count)
    spread_p = _spread(sums.pp, sums.p, count)
    both = sums.py - sums.p * sums.y / count
    with np.errstate(divide="ignore", invalid="ignore"):
        r2 = 1 - sums.squared / spread_y
        pearson = both / np.sqrt(spread_y * spread_p)
    r2 = np.where(spread_y == 0, np.where(sums.squared == 0, 1.0, 0.0), r2)
    return {
        "mse": sums.squared / count,
        "mae": sums.absolute / count,
        "rmse": np.sqrt(sums.squared / count),
        "r2": np.where(sums.values < 2, np.nan, r2),
        "pearson": np.where(
            (spread_y > 0) & (spread_p > 0), pearson.clip(-1, 1), np.nan
        ),
    }


def _spread(squares: Numbers, total: Numbers, count: Numbers) -> Numbers:
    """Sum of squares around the mean; of values that are all the same, 0."""
    spread: Numbers = squares - total**2 / count
    return np.where(spread <= _ROUNDING * squares, 0.0, spread)
