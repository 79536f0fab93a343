"""Metrics whose states merge exactly, and rates, areas and errors computed from them.

daskdl uses the metrics of torchmetrics that merge exactly; the docstrings here say why
a class replaces one. Rates and areas are float64: torchmetrics divides in float32, so
0.9 becomes 0.89999998. Rates are 0 instead of 0/0, as with scikit-learn's
``zero_division=0``.

Shape suffixes: N counted rows, K classes, labels or columns, T thresholds, M bins.
"""

import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import (
    MulticlassPrecisionRecallCurve,
    MultilabelPrecisionRecallCurve,
)
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

Counts = NDArray[np.int64]
Numbers = NDArray[np.float64]


def divided(numerator: Counts, denominator: Counts) -> Numbers:
    """Divide counts elementwise; 0/0 is 0."""
    return np.divide(
        numerator,
        denominator,
        out=np.zeros(np.shape(numerator)),
        where=denominator != 0,
    )


def rates(hits_K: Counts, predicted_K: Counts, support_K: Counts) -> dict[str, Numbers]:
    """Compute precision, recall and F1 of each class."""
    return {
        "precision": divided(hits_K, predicted_K),
        "recall": divided(hits_K, support_K),
        "f1": divided(2 * hits_K, predicted_K + support_K),
    }


def share(count: int, total: int) -> float:
    """Return the share of a total; NaN if the total is 0."""
    return int(count) / int(total) if total else math.nan


def mean_of(values: Numbers, counted: NDArray[np.bool_]) -> float:
    """Average the counted values that are not NaN; NaN if there are none."""
    counted = counted & ~np.isnan(values)
    return float(values[counted].mean()) if counted.any() else math.nan


def matthews(confusion_KK: Counts) -> float:
    """Compute Matthews' correlation coefficient.

    Replaces that of torchmetrics, which is 1 or -1 instead of 0 for constant labels.
    """
    # Python integers: above three billion rows, the products exceed 2**63.
    support = [int(n) for n in confusion_KK.sum(axis=1)]
    predicted = [int(n) for n in confusion_KK.sum(axis=0)]
    total, correct = sum(support), int(np.trace(confusion_KK))
    chance = sum(a * b for a, b in zip(support, predicted, strict=True))
    spread = (total**2 - sum(n * n for n in support)) * (
        total**2 - sum(n * n for n in predicted)
    )
    return (correct * total - chance) / math.sqrt(spread) if spread else 0.0


POINTS = 101  # of a curve, more than a figure can show
MASKED = -1  # replaces a label that does not count


class ThresholdCounts(NamedTuple):
    """Number of examples with scores at or above falling thresholds, (T + 1,) each."""

    others: Counts  # examples of other classes
    hits: Counts  # examples of the class


def counts_at_thresholds(
    scores_N: Numbers, hit_N: NDArray[np.bool_]
) -> ThresholdCounts:
    """Count the examples at or above each distinct score.

    Points on a straight segment of the ROC curve are left out, because they do not
    change the areas.
    """
    if not len(scores_N):
        return ThresholdCounts(np.zeros(1, np.int64), np.zeros(1, np.int64))
    order = np.argsort(-scores_N)
    falling = scores_N[order]
    last = np.append(np.flatnonzero(falling[1:] != falling[:-1]), len(falling) - 1)
    hits = np.cumsum(hit_N[order], dtype=np.int64)[last]
    gained = np.append(hits[0] > 0, hits[1:] > hits[:-1])
    corner = gained | np.append(gained[1:], True)
    last, hits = last[corner], hits[corner]
    return ThresholdCounts(np.append(0, last + 1 - hits), np.append(0, hits))


def _counts_by_column(scores: Any, targets: Any, columns: int) -> list[ThresholdCounts]:
    """Return exact counts from the states of a torchmetrics curve."""
    if not len(scores):
        return [counts_at_thresholds(np.zeros(0), np.zeros(0, bool))] * columns
    scores_NK = dim_zero_cat(scores).reshape(-1, columns).numpy()
    targets = dim_zero_cat(targets).numpy()

    def counts_of(k: int) -> ThresholdCounts:
        if targets.ndim == 1:
            return counts_at_thresholds(scores_NK[:, k].copy(), targets == k)
        counted = targets[:, k] != MASKED
        return counts_at_thresholds(scores_NK[counted, k], targets[counted, k] == 1)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # sorting releases the GIL
        return list(pool.map(counts_of, range(columns)))


class ClassCurves(MulticlassPrecisionRecallCurve):
    """Exact counts from all scores and class indices, which the base class gathers."""

    @override
    def compute(self) -> list[ThresholdCounts]:  # type: ignore[override]
        return _counts_by_column(self.preds, self.target, self.num_classes)


class LabelCurves(MultilabelPrecisionRecallCurve):
    """`ClassCurves` for labels 0, 1 and `MASKED`."""

    @override
    def compute(self) -> list[ThresholdCounts]:  # type: ignore[override]
        return _counts_by_column(self.preds, self.target, self.num_labels)


class BinnedCurves(Metric):
    """Counts of scores between thresholds, of the class and of all other classes.

    Replaces the curves of torchmetrics, which compare each score with each threshold
    and take 70 times as long.
    """

    full_state_update = False
    counts: Tensor  # (2, K, T): others, hits

    def __init__(self, columns: int, thresholds: int) -> None:
        super().__init__()
        self.shape = (2, columns, thresholds)
        empty = torch.zeros(self.shape, dtype=torch.int64)
        self.add_state("counts", empty, dist_reduce_fx="sum")

    @override
    def update(self, scores_NK: Tensor, targets: Tensor) -> None:
        """Add rows; targets are class indices (N,), or labels (N, K)."""
        _, columns, thresholds = self.shape
        column = torch.arange(columns)
        hit = targets[:, None] == column if targets.ndim == 1 else targets == 1
        edges = torch.linspace(0, 1, thresholds, dtype=scores_NK.dtype)
        bins = torch.bucketize(scores_NK.contiguous(), edges, right=True) - 1
        index = bins + (column + hit * columns) * thresholds
        counted = index[targets != MASKED] if targets.ndim == 2 else index.flatten()
        counts = torch.bincount(counted, minlength=self.counts.numel())
        self.counts += counts.reshape(self.shape)

    @override
    def compute(self) -> list[ThresholdCounts]:
        counts = self.counts.flip(-1).cumsum(-1).numpy()
        padded = np.pad(counts, ((0, 0), (0, 0), (1, 0)))
        return [
            ThresholdCounts(others, hits) for others, hits in padded.transpose(1, 0, 2)
        ]


def areas_and_curves(columns: list[ThresholdCounts]) -> dict[str, Any]:
    """Return areas and curves of all classes or labels by name, NaN where undefined."""
    by_column = [_areas_and_curves(*counts) for counts in columns]
    return {
        name: np.array([values[name] for values in by_column]) for name in by_column[0]
    }


def _areas_and_curves(others: Counts, hits: Counts) -> dict[str, Any]:
    """Return areas and curves of one class or label."""
    area = average = math.nan
    roc = precision_recall = np.full((2, POINTS), np.nan)
    if others[-1] and hits[-1]:
        # Integers, so the area is exact for any number of thresholds.
        twice = np.sum(np.diff(others) * (hits[1:] + hits[:-1]))
        area = float(twice / 2 / (float(others[-1]) * float(hits[-1])))
        roc = _thinned(np.stack([others / others[-1], hits / hits[-1]]))
    if hits[-1]:
        recall, predicted = hits / hits[-1], others + hits
        precision = np.where(predicted > 0, hits / np.maximum(predicted, 1), 1.0)
        average = float(np.sum(np.diff(recall) * precision[1:]))
        precision_recall = _thinned(np.stack([recall, precision]))
    return {
        "roc_auc_per_class": area,
        "average_precision_per_class": average,
        "roc_curves": roc,
        "precision_recall_curves": precision_recall,
    }


def _thinned(curve_2T: Numbers) -> Numbers:
    """Return `POINTS` points, evenly spaced along the curve or padded at its end."""
    count = curve_2T.shape[1]
    if count <= POINTS:
        return np.pad(curve_2T, ((0, 0), (0, POINTS - count)), mode="edge")
    distance = np.append(0.0, np.cumsum(np.abs(np.diff(curve_2T)).sum(axis=0)))
    even = np.linspace(0, distance[-1], POINTS)
    return curve_2T[:, np.minimum(np.searchsorted(distance, even), count - 1)]


class ErrorMoments(Metric):
    """Errors, means, squares and products of predictions and labels, by column.

    Replaces the metrics of torchmetrics, which cannot mask columns and lose digits of
    labels that are tiny or far from 0.
    """

    full_state_update = False
    moments: Tensor  # (8, K), float64, see `_merged`

    def __init__(self, columns: int) -> None:
        super().__init__()
        empty = torch.zeros(8, columns, dtype=torch.float64)
        self.add_state("moments", empty, dist_reduce_fx=_merged)

    @override
    def update(self, predictions_NK: Tensor, labels_NK: Tensor) -> None:
        """Add rows, float64; NaN labels do not count."""
        counted = ~torch.isnan(labels_NK)
        p, y = (torch.where(counted, rows, 0) for rows in (predictions_NK, labels_NK))
        mean_p, mean_y = _mean(p, counted), _mean(y, counted)
        error, from_p, from_y = p - y, (p - mean_p) * counted, (y - mean_y) * counted
        terms = (error**2, error.abs(), from_p**2, from_y**2, from_p * from_y)
        sums = [term.sum(dim=0) for term in terms]
        moments = torch.stack([counted.double().sum(dim=0), mean_p, mean_y, *sums])
        self.moments = _merged(torch.stack([self.moments, moments]))

    @override
    def compute(self) -> tuple[Counts, dict[str, Numbers]]:
        """Return counts, and errors, R2 and correlation by name, NaN where undefined.

        For constant labels, R2 is 1 if all errors are 0, else 0, as in scikit-learn.
        """
        counted, _, _, squared, absolute, pp, yy, py = self.moments.numpy()
        count = np.where(counted, counted, np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            r2 = 1 - squared / yy
            pearson = py / np.sqrt(pp * yy)
        r2 = np.where(yy == 0, np.where(squared == 0, 1.0, 0.0), r2)
        return counted.astype(np.int64), {
            "mse": squared / count,
            "mae": absolute / count,
            "rmse": np.sqrt(squared / count),
            "r2": np.where(counted < 2, np.nan, r2),
            "pearson": np.where((pp > 0) & (yy > 0), pearson.clip(-1, 1), np.nan),
        }


def _merged(moments_P8K: Tensor) -> Tensor:
    """Merge the moments of P sets of rows.

    The 8 moments are the number of rows, the means of predictions and labels, the sums
    of squared and absolute errors, and the sums of squares and products of the
    deviations from the means.
    """
    count, p, y = moments_P8K[:, :3].unbind(dim=1)
    mean_p, mean_y = _mean(p, count), _mean(y, count)
    p, y = p - mean_p, y - mean_y
    merged = moments_P8K.sum(dim=0)
    merged[1], merged[2] = mean_p, mean_y
    merged[5:] += torch.stack([p * p, y * y, p * y], dim=1).mul(count[:, None]).sum(0)
    return merged


def _mean(values_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Average over N; 0 without weights, and exact if all counted values are equal."""
    offset = values_NK.gather(0, (weights_NK > 0).int().argmax(dim=0, keepdim=True))[0]
    total = ((values_NK - offset) * weights_NK).sum(dim=0)
    return offset + total / weights_NK.sum(dim=0).clamp_min(1)


class ReliabilityBins(Metric):
    """Counts of predictions by confidence, in bins of equal width.

    Replaces that of torchmetrics, which keeps every confidence and has no errors per
    class.
    """

    full_state_update = False
    counts: Tensor  # (2, K, M), int64: all predictions, correct predictions
    confidences: Tensor  # (K, M), float64, summed

    def __init__(self, columns: int, bins: int) -> None:
        super().__init__()
        self.columns, self.bins = columns, bins
        empty = torch.zeros(2, columns, bins, dtype=torch.int64)
        self.add_state("counts", empty, dist_reduce_fx="sum")
        self.add_state("confidences", empty[0].double(), dist_reduce_fx="sum")

    @override
    def update(self, confidence_NK: Tensor, correct_NK: Tensor) -> None:
        """Add predictions; confidences are float64 from 0 to 1."""
        edges = torch.linspace(0, 1, self.bins + 1, dtype=confidence_NK.dtype)[1:-1]
        bins = torch.bucketize(confidence_NK.contiguous(), edges, right=True)
        index = bins + torch.arange(self.columns) * self.bins
        shape = self.confidences.shape
        for i, counted in enumerate((index.flatten(), index[correct_NK])):
            count = torch.bincount(counted, minlength=shape.numel())
            self.counts[i] += count.reshape(shape)
        self.confidences += torch.bincount(
            index.flatten(), confidence_NK.flatten(), minlength=shape.numel()
        ).reshape(shape)

    @override
    def compute(self) -> dict[str, Any]:
        """Return errors (K,) and values per bin (K, M), NaN for empty bins."""
        count, correct = self.counts.numpy()
        confidence = self.confidences.numpy()
        error = np.abs(correct - confidence)
        with np.errstate(invalid="ignore"):  # 0/0 of an empty bin
            largest = np.nan_to_num(error / count, nan=-1.0).max(axis=1)
            return {
                "ece": error.sum(axis=1) / count.sum(axis=1),
                "mce": np.where(largest < 0, np.nan, largest),
                "bin_count": count,
                "bin_confidence": confidence / count,
                "bin_accuracy": correct / count,
            }


class ExactMatch(Metric):
    """Number of rows whose unmasked labels are all correct.

    Replaces that of torchmetrics, which up to 1.7.1 counts rows with a masked label as
    incorrect.
    """

    full_state_update = False
    counts: Tensor  # correct rows, all rows; int64

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold
        empty = torch.zeros(2, dtype=torch.int64)
        self.add_state("counts", empty, dist_reduce_fx="sum")

    @override
    def update(self, scores_NK: Tensor, labels_NK: Tensor) -> None:
        """Add rows; masked scores are 0, rows with only masked labels do not count."""
        correct_NK = (scores_NK > self.threshold) == (labels_NK == 1)
        correct_N = correct_NK.all(dim=1)[(labels_NK != MASKED).any(dim=1)]
        self.counts += torch.tensor([int(correct_N.sum()), len(correct_N)])

    @override
    def compute(self) -> tuple[int, int]:
        correct, rows = self.counts.tolist()
        return correct, rows
