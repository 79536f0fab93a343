"""Rows that are right in a wider or a stricter sense, in whole numbers. No Dask.

Torchmetrics' own of the same definitions make (N, C) of integers several times over
for top N, which takes longer than many a model, and count a row as wrong in which a
label is masked.

N rows, C classes, L labels.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from daskdl.metrics.ranking import MASKED
from daskdl.metrics.rates import share


class Right(NamedTuple):
    """What was counted.

    Attributes:
        right: Rows that are.
        rows: All of them.
    """

    right: int
    rows: int

    @property
    def share(self) -> float:
        """Of all; NaN of none."""
        return share(self.right, self.rows)


class RightRows(Metric):
    """Counts rows that are right."""

    full_state_update = False
    right: Tensor
    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("right", "rows"):
            zero = torch.zeros((), dtype=torch.int64)
            self.add_state(name, zero, dist_reduce_fx="sum")

    def count(self, right_N: Tensor) -> None:
        """Add rows."""
        self.right += right_N.sum()
        self.rows += len(right_N)

    @override
    def compute(self) -> Right:
        """The counts."""
        return Right(int(self.right), int(self.rows))


class TopRight(RightRows):
    """Rows whose label is among the best scores.

    Args:
        top: How many these are.
    """

    def __init__(self, top: int) -> None:
        super().__init__()
        self.top = top

    @override
    def update(self, scores_NC: Tensor, labels_N: Tensor) -> None:
        """Count some rows."""
        best = scores_NC.topk(self.top, dim=1).indices
        self.count((best == labels_N[:, None]).any(dim=1))


class AllRight(RightRows):
    """Rows of which every label is predicted right, but those that are masked.

    Args:
        threshold: A label is predicted above it.
    """

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    @override
    def update(self, scores_NL: Tensor, labels_NL: Tensor) -> None:
        """Count some rows; one that is all masked is none."""
        masked = labels_NL == MASKED
        right = ((scores_NL > self.threshold) == (labels_NL == 1)) | masked
        self.count(right.all(dim=1)[~masked.all(dim=1)])
