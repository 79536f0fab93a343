"""What areas below curves are computed from, as metrics of torchmetrics. No Dask.

Scores as they are, exact and as many as there are rows; or counted between
thresholds, in a memory that does not grow. What is made of either is in
:mod:`daskdl.metrics.curves`.

N rows, K classes or labels, T thresholds.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from daskdl.errors import OptionError
from daskdl.metrics.curves import (
    Steps,
    average_precision,
    binned_steps,
    precision_recall_curve,
    roc_area,
    roc_curve,
    steps_of,
)

MASKED = -1  # in the place of a label that does not count


class KeptScores(Metric):
    """Scores and labels of all rows: 8 bytes for each score.

    Args:
        columns: Classes, or labels of which each is 0, 1 or masked.
    """

    full_state_update = False
    scores: list[Tensor]
    targets: list[Tensor]

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns
        self.add_state("scores", [], dist_reduce_fx="cat")
        self.add_state("targets", [], dist_reduce_fx="cat")

    @override
    def update(self, scores_NK: Tensor, targets: Tensor) -> None:
        """Keep some rows.

        Args:
            scores_NK: Higher for what is more likely.
            targets: Class indices, (N,); or 0, 1 and `MASKED`, (N, K).
        """
        self.scores.append(scores_NK)
        self.targets.append(targets)

    @override
    def compute(self) -> list[Steps]:
        """The steps of each column."""
        if not len(self.scores):
            return [binned_steps(*np.zeros((2, 0), dtype=np.int64))] * self.columns
        scores = dim_zero_cat(self.scores).reshape(-1, self.columns).cpu().numpy()
        targets = dim_zero_cat(self.targets).cpu().numpy()

        def steps(k: int) -> Steps:
            if targets.ndim == 1:
                return steps_of(scores[:, k].copy(), targets == k)
            counted = targets[:, k] != MASKED
            return steps_of(scores[counted, k], targets[counted, k] == 1)

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # numpy sorts without the lock
            return list(pool.map(steps, range(self.columns)))


class CountedScores(Metric):
    """How many rows have a score between thresholds, of the class and of others.

    Args:
        columns: Classes or labels.
        thresholds: How many, evenly from 0 to 1; 2 or more.
    """

    full_state_update = False
    hits: Tensor
    others: Tensor

    def __init__(self, columns: int, thresholds: int) -> None:
        super().__init__()
        self.columns, self.thresholds = columns, thresholds
        for name in ("hits", "others"):
            empty = torch.zeros(columns, thresholds, dtype=torch.int64)
            self.add_state(name, empty, dist_reduce_fx="sum")

    @override
    def update(self, scores_NK: Tensor, targets: Tensor) -> None:
        """Count some rows; the arguments are those of `KeptScores`."""
        each = torch.arange(self.columns, device=scores_NK.device)
        if targets.ndim == 1:
            hit, counted = targets[:, None] == each, None
        else:
            hit, counted = targets == 1, targets != MASKED
        edges = torch.linspace(
            0, 1, self.thresholds, dtype=torch.float64, device=scores_NK.device
        )
        bins = torch.bucketize(scores_NK.double().contiguous(), edges, right=True) - 1
        place = bins + each * self.thresholds
        self.hits += self._count(place[hit])
        self.others += self._count(place[~hit if counted is None else ~hit & counted])

    def _count(self, place: Tensor) -> Tensor:
        size = self.columns * self.thresholds
        return torch.bincount(place, minlength=size).reshape(self.columns, -1)

    @override
    def compute(self) -> list[Steps]:
        """The steps of each column."""
        both = zip(self.others.cpu().numpy(), self.hits.cpu().numpy(), strict=True)
        return [binned_steps(*each) for each in both]


def ranking(columns: int, thresholds: int | None) -> Metric:
    """Make the metric that keeps scores, or the one that counts them."""
    if thresholds is None:
        return KeptScores(columns)
    return CountedScores(columns, thresholds)


def ranked(steps: list[Steps]) -> dict[str, Any]:
    """Areas and curves of each class or label, by name.

    Args:
        steps: What the metric computed.
    """
    return {
        "roc_auc_per_class": np.array([roc_area(s) for s in steps]),
        "average_precision_per_class": np.array([average_precision(s) for s in steps]),
        "roc_curves": np.stack([roc_curve(s) for s in steps]),
        "precision_recall_curves": np.stack([precision_recall_curve(s) for s in steps]),
    }


def check_thresholds(thresholds: int | None) -> None:
    """Check how many thresholds were asked for.

    Raises:
        OptionError: If they are fewer than 2.
    """
    if thresholds is not None and thresholds < 2:
        raise OptionError(
            f"thresholds must be 2 or more, or None for all there are, got {thresholds}"
        )
