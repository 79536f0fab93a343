"""Rates of counts, in float64. No torch, no state.

The counts are those of torchmetrics' confusion matrices, and the rates are what
torchmetrics makes of them; but it divides in float32, which shows 0.9 as 0.89999998,
and of data with one class only its MCC is 1 or -1 where scikit-learn's is 0.

C classes or labels. A rate of nothing at all, 0/0, is 0, as scikit-learn's is with
``zero_division=0``.

Curves over every threshold and the areas below them, in float64. No torch, no state.

Everything follows from two counts at each threshold, the highest first: how many
examples of the class, and how many others, have a score at least that high. Counting
is what takes time, so that it is done once for all curves. The definitions are those
of torchmetrics and scikit-learn.

N examples, T thresholds.

Sums over labels and errors, from which regression is judged. No Dask.

One metric instead of torchmetrics' four, whose definitions these are: theirs of R2
calls labels constant whose squares sum to less than 1e-4, and loses digits where the
mean of labels is far above their spread; theirs of Pearson gives NaN where a single
value is far out. Here sums are of differences to a value near the mean.

N rows, n columns.

Predictions counted by their confidence, of any number of kinds. No Dask.

K kinds of predictions, M bins of confidence, N rows.

What areas below curves are computed from, as metrics of torchmetrics. No Dask.

Scores as they are, exact and as many as there are rows; or counted between
thresholds, in a memory that does not grow. What is made of either is in
:mod:`daskdl.evaluation.streaming`.

N rows, K classes or labels, T thresholds.

Rows that are right in a wider or a stricter sense, in whole numbers. No Dask.

Torchmetrics' own of the same definitions make (N, C) of integers several times over
for top N, which takes longer than many a model, and count a row as wrong in which a
label is masked.

N rows, C classes, L labels.
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
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from daskdl.errors import OptionError

Counts = NDArray[np.int64]
Numbers = NDArray[np.float64]


def divided(part: Counts, whole: Counts) -> Numbers:
    """Divide; 0/0 is 0.

    Example:
        >>> divided(np.array([1, 0]), np.array([2, 0]))
        array([0.5, 0. ])
    """
    return np.divide(part, whole, out=np.zeros(np.shape(part)), where=whole != 0)


def rates(hits_C: Counts, predicted_C: Counts, support_C: Counts) -> dict[str, Numbers]:
    """Precision, recall and F1 of each class.

    Args:
        hits_C: Examples of the class that were predicted as such.
        predicted_C: Examples predicted as such.
        support_C: Examples of the class.

    Example:
        >>> rates(np.array([1]), np.array([2]), np.array([1]))["f1"]
        array([0.66666667])
    """
    return {
        "precision": divided(hits_C, predicted_C),
        "recall": divided(hits_C, support_C),
        "f1": divided(2 * hits_C, predicted_C + support_C),
    }


def share(part: int, whole: int) -> float:
    """A share of counted things; of none it is NaN.

    Example:
        >>> share(1, 4), share(0, 0)
        (0.25, nan)
    """
    return int(part) / int(whole) if whole else math.nan


def mean_of(values: Numbers, counted: NDArray[np.bool_]) -> float:
    """The mean of those that are counted and are numbers; NaN if there are none.

    Example:
        >>> mean_of(np.array([1.0, 0.5, np.nan]), np.array([True, False, True]))
        1.0
    """
    counted = counted & ~np.isnan(values)
    return float(values[counted].mean()) if counted.any() else math.nan


def matthews(confusion_CC: Counts) -> float:
    """Matthews' correlation coefficient; 0 if labels or predictions are all the same.

    Args:
        confusion_CC: Rows are the labels, columns the predictions.

    Example:
        >>> matthews(np.array([[2, 0], [0, 3]])), matthews(np.array([[2, 0], [0, 0]]))
        (1.0, 0.0)
    """
    # Python's integers: the products below pass 2**63 at three thousand million rows.
    support = [int(n) for n in confusion_CC.sum(axis=1)]
    predicted = [int(n) for n in confusion_CC.sum(axis=0)]
    total, right = sum(support), int(np.trace(confusion_CC))
    both = sum(a * b for a, b in zip(support, predicted, strict=True))
    spread = (total**2 - sum(n * n for n in support)) * (
        total**2 - sum(n * n for n in predicted)
    )
    return (right * total - both) / math.sqrt(spread) if spread else 0.0


POINTS = 101  # of a curve that is kept: more than a picture shows


class Steps(NamedTuple):
    """Counts at falling thresholds, from 0 to all.

    Attributes:
        others_T: Examples of other classes with a score at least as high.
        hits_T: Examples of the class with such a score.
    """

    others_T: NDArray[np.int64]
    hits_T: NDArray[np.int64]

    @property
    def has_both(self) -> bool:
        """Whether there are examples of the class, and others."""
        return bool(self.hits_T[-1] and self.others_T[-1])


def steps_of(scores_N: Numbers, hit_N: NDArray[np.bool_]) -> Steps:
    """Count at the scores there are; equal scores are one step.

    Where no example of the class is gained, neither before nor after, a step is left
    out: it is on a straight line of the ROC curve, and adds nothing to any area.

    Args:
        scores_N: Higher for the class; not NaN.
        hit_N: Whether the example is of the class.

    Example:
        >>> steps_of(np.array([0.1, 0.9, 0.9]), np.array([False, True, False]))
        Steps(others_T=array([0, 1, 2]), hits_T=array([0, 1, 1]))
    """
    if not len(scores_N):
        return Steps(
            _from_zero(np.zeros(0, np.int64)), _from_zero(np.zeros(0, np.int64))
        )
    order = np.argsort(-scores_N)
    falling = scores_N[order]
    last = np.append(np.flatnonzero(falling[1:] != falling[:-1]), len(falling) - 1)
    hits = np.cumsum(hit_N[order], dtype=np.int64)[last]
    gained = np.append(hits[0] > 0, hits[1:] > hits[:-1])
    corner = gained | np.append(gained[1:], True)
    last, hits = last[corner], hits[corner]
    return Steps(_from_zero(last + 1 - hits), _from_zero(hits))


def binned_steps(others_T: NDArray[np.int64], hits_T: NDArray[np.int64]) -> Steps:
    """Count at thresholds, from what is in the bins between them.

    Args:
        others_T: Examples of other classes from this threshold up to the next.
        hits_T: Examples of the class there.
    """
    return Steps(*(_from_zero(np.cumsum(n[::-1])) for n in (others_T, hits_T)))


def roc_area(steps: Steps) -> float:
    """The area below the ROC curve; NaN if there is one class only.

    Example:
        >>> roc_area(steps_of(np.array([0.1, 0.9]), np.array([False, True])))
        1.0
    """
    if not steps.has_both:
        return math.nan
    others, hits = steps  # whole numbers: exact, whatever the number of steps
    twice = np.sum(np.diff(others) * (hits[1:] + hits[:-1]))
    return float(twice / 2 / (float(others[-1]) * float(hits[-1])))


def average_precision(steps: Steps) -> float:
    """Precision at each threshold, weighted by what recall gains; NaN without a hit.

    Example:
        >>> average_precision(steps_of(np.array([0.1, 0.9]), np.array([True, False])))
        0.5
    """
    if not steps.hits_T[-1]:
        return math.nan
    precision, recall = _precision_and_recall(steps)
    return float(np.sum(np.diff(recall) * precision[1:]))


def roc_curve(steps: Steps) -> Numbers:
    """False and true positive rate, (2, POINTS); NaN if there is one class only."""
    if not steps.has_both:
        return np.full((2, POINTS), np.nan)
    others, hits = steps
    return thinned(np.stack([others / others[-1], hits / hits[-1]]))


def precision_recall_curve(steps: Steps) -> Numbers:
    """Recall and precision, (2, POINTS); NaN without an example of the class."""
    if not steps.hits_T[-1]:
        return np.full((2, POINTS), np.nan)
    precision, recall = _precision_and_recall(steps)
    return thinned(np.stack([recall, precision]))


def thinned(curve_2T: Numbers) -> Numbers:
    """As many points as are kept, evenly along the curve; the last one repeats.

    Example:
        >>> thinned(np.array([[0.0, 1.0], [0.0, 1.0]]))[:, :3]
        array([[0., 1., 1.],
               [0., 1., 1.]])
    """
    count = curve_2T.shape[1]
    if count <= POINTS:
        return np.pad(curve_2T, ((0, 0), (0, POINTS - count)), mode="edge")
    along = np.append(0.0, np.cumsum(np.abs(np.diff(curve_2T)).sum(axis=0)))
    wanted = np.linspace(0, along[-1], POINTS)
    return curve_2T[:, np.minimum(np.searchsorted(along, wanted), count - 1)]


def _precision_and_recall(steps: Steps) -> tuple[Numbers, Numbers]:
    """At each threshold; precision of nothing is 1."""
    others, hits = steps
    found = others + hits
    precision = np.divide(hits, found, out=np.ones(len(hits)), where=found > 0)
    return precision, hits / hits[-1]


def _from_zero(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.append(np.int64(0), counts)


_SUMS = ("squared", "absolute", "y", "yy", "p", "pp", "py")
# Of a spread around the mean, a sum of squares: below, it is rounding.
_ROUNDING = 1e-13


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


class Bins(NamedTuple):
    """What is in the bins of each kind.

    Attributes:
        count_KM: Predictions.
        confidence_KM: The sum of their confidences.
        right_KM: Those that are right.
    """

    count_KM: NDArray[np.int64]
    confidence_KM: NDArray[np.float64]
    right_KM: NDArray[np.int64]

    @property
    def mean_confidence(self) -> NDArray[np.float64]:
        """Of each bin; NaN of an empty one."""
        return self.confidence_KM / np.where(self.count_KM, self.count_KM, np.nan)

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """The share of right ones of each bin; NaN of an empty one."""
        return self.right_KM / np.where(self.count_KM, self.count_KM, np.nan)

    @property
    def expected_error(self) -> NDArray[np.float64]:
        """Mean over the predictions of how far their bin's confidence is off."""
        off = np.abs(self.right_KM - self.confidence_KM).sum(axis=1)
        count = self.count_KM.sum(axis=1)
        return np.asarray(off / np.where(count, count, np.nan))

    @property
    def largest_error(self) -> NDArray[np.float64]:
        """Of any bin that is not empty; NaN if all are."""
        off = np.abs(self.accuracy - self.mean_confidence)
        largest = np.where(np.isnan(off), -1.0, off).max(axis=1)
        return np.where(largest < 0, np.nan, largest)


class ReliabilityBins(Metric):
    """Counts predictions by their confidence, in bins of the same width.

    A confidence on the edge of two bins is in the upper one, and 1 is in the last one.

    Args:
        kinds: How many are counted apart.
        bins: From 0 to 1.
    """

    full_state_update = False
    counts: Tensor
    confidences: Tensor
    rights: Tensor

    def __init__(self, kinds: int, bins: int) -> None:
        super().__init__()
        self.kinds, self.bins = kinds, bins
        none = torch.zeros(kinds, bins, dtype=torch.int64)
        self.add_state("counts", none, dist_reduce_fx="sum")
        self.add_state("confidences", none.double(), dist_reduce_fx="sum")
        self.add_state("rights", none.clone(), dist_reduce_fx="sum")

    @override
    def update(self, confidence_NK: Tensor, right_NK: Tensor) -> None:
        """Count some predictions.

        Args:
            confidence_NK: From 0 to 1, float64.
            right_NK: Whether they are right.
        """
        edges = edges_of(self.bins, confidence_NK)[1:-1]
        bins = torch.bucketize(confidence_NK.contiguous(), edges, right=True)
        kinds = torch.arange(self.kinds, device=bins.device)
        place = (bins + kinds * self.bins).flatten()
        weights = (None, confidence_NK.flatten(), right_NK.flatten().double())
        counts, confidences, rights = (self._sum(place, w) for w in weights)
        self.counts += counts
        self.confidences += confidences
        self.rights += rights.long()

    def _sum(self, place: Tensor, weight: Tensor | None) -> Tensor:
        sums = torch.bincount(place, weight, minlength=self.kinds * self.bins)
        return sums.reshape(self.kinds, self.bins)

    @override
    def compute(self) -> Bins:
        """The bins, as arrays."""
        states = (self.counts, self.confidences, self.rights)
        return Bins(*(s.reshape(self.kinds, -1).cpu().numpy() for s in states))


def edges_of(bins: int, like: Tensor) -> Tensor:
    """Edges of bins of the same width from 0 to 1.

    Args:
        bins: How many.
        like: Says where, and of which dtype.
    """
    return torch.linspace(0, 1, bins + 1, dtype=like.dtype, device=like.device)


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
