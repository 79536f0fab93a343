"""Presets of metrics for `evaluate` and `Evaluate`: frozen, picklable specifications.

A preset checks the shapes of outputs and labels, prepares the input of its torchmetrics
and chooses the values of its report. `daskdl.metrics` exports the presets. This module
is imported only when needed: torchmetrics loads SciPy and matplotlib, about 90 MB per
process.

Shapes: B rows, C classes, L labels per row, T steps of a sequence, N counted labels.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    BinaryConfusionMatrix,
    MulticlassConfusionMatrix,
    MulticlassStatScores,
    MultilabelConfusionMatrix,
)
from typing_extensions import override

from daskdl.data.batching import Tree, outline
from daskdl.data.checks import ignored_label
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.evaluation import report, streaming
from daskdl.evaluation.report import Section
from daskdl.evaluation.streaming import MASKED
from daskdl.losses import Labels, Scale, labels_and_scale, probabilities, scale_of

Pair = tuple[Any, Any]  # predictions and targets for torchmetrics


class SampleBatch(NamedTuple):
    """Outputs and labels of the first rows, which determine what a metric set does."""

    output: Tree  # on the CPU
    y: Tree
    scale: Scale  # of class scores
    classes: Sequence[str] | None  # names of the classes 0, 1, ...
    ignored: int | None  # the label that the loss ignores
    labels: Labels | None = None  # the kind of labels of the loss; None: unknown


class MetricSet(ABC):
    """Stateless: metrics that share their input and their section of the report."""

    @property
    def masks_nan(self) -> bool:
        """Whether ``ignore=float("nan")`` masks NaN labels."""
        ignore = getattr(self, "ignore", None)
        return ignore is not None and math.isnan(ignore)

    def sample(
        self, loss: Any, output: Tree, y: Tree, classes: Sequence[str] | None
    ) -> SampleBatch:
        """Return what these metrics need of the first outputs and labels."""
        scale, (labels, _) = scale_of(loss, output), labels_and_scale(loss)
        return SampleBatch(output, y, scale, classes, ignored_label(loss), labels)

    def numbers(self, sample: SampleBatch) -> list[str]:
        """Return the names of the values that are single numbers."""
        trial = self.collection(sample)
        pair = self.prepared(sample, sample.output, sample.y)
        for metric in trial.values(copy_state=False):
            metric.update(*pair)
        values = self.section(sample, trial.compute()).values
        return [name for name, value in values.items() if np.ndim(value) == 0]

    @abstractmethod
    def collection(self, sample: SampleBatch) -> MetricCollection:
        """Return new metrics for data like the sample."""

    @abstractmethod
    def prepared(self, sample: SampleBatch, output: Tree, y: Tree) -> Pair:
        """Convert outputs and labels to the predictions and targets of the metrics."""

    @abstractmethod
    def section(self, sample: SampleBatch, computed: Mapping[str, Any]) -> Section:
        """Return the report of computed metrics."""


def check_thresholds(thresholds: int | None) -> None:
    if thresholds is not None and thresholds < 2:
        raise OptionError(
            f"thresholds must be >= 2, or None for exact curves, got {thresholds}"
        )


def check_names(names: Sequence[str] | None, count: int, what: str) -> None:
    if names is not None and len(names) != count:
        raise OptionError(f"{what} must be {count} names, got {len(names)}: {names!r}")


def class_names(
    names: Sequence[str] | None, sample: SampleBatch, count: int
) -> tuple[str, ...]:
    """Return the names of all classes; an unnamed class is named by its number."""
    known = list(names or sample.classes or ())[:count]
    return (*map(str, known), *(str(k) for k in range(len(known), count)))


def _single_tensors(sample: SampleBatch) -> tuple[Tensor, Tensor]:
    """Return output and labels; raise an error unless each is a single tensor."""
    for what, tree in (("output", sample.output), ("labels", sample.y)):
        if not isinstance(tree, Tensor):
            several = isinstance(tree, dict | tuple)
            got = outline(tree) if several else type(tree).__name__
            raise (ModelError if what == "output" else DataError)(
                f"for metrics by name, the {what} must be a single tensor, got {got}; "
                """select one of several by name: metrics={"head": ["accuracy"]}"""
            )
    return sample.output, sample.y


def is_per_class(output: Tree, y: Tree) -> bool:
    """Whether dimension 1 of the output holds the scores of 2 or more classes."""
    return (
        isinstance(output, Tensor)
        and isinstance(y, Tensor)
        and output.ndim == y.ndim + 1
        and output.shape[1] >= 2
        and (output.shape[0], *output.shape[2:]) == y.shape
    )


def check_classes(sample: SampleBatch) -> int:
    """Return the number of classes; raise an error unless labels are class indices."""
    output, y = _single_tensors(sample)
    if y.dtype.is_floating_point or y.dtype == torch.bool:
        raise DataError(
            f"labels must be integer class indices, 0 to classes - 1, got {y.dtype} of "
            f'shape {tuple(y.shape)}; for labels 0 and 1 use "binary" or "multilabel", '
            'for numbers use "regression", for one-hot rows pass y.argmax(1)'
        )
    if not is_per_class(output, y):
        raise ModelError(
            "outputs must have one score for each of 2 or more classes along "
            "dimension 1, (B, C) or (B, C, T) for labels (B,) or (B, T), got outputs "
            f"{tuple(output.shape)} for labels {tuple(y.shape)}; for one score per "
            'label use "binary" or "multilabel"'
        )
    return output.shape[1]


def check_binary(sample: SampleBatch) -> None:
    """Raise a ModelError without one score per label, or scores of two classes."""
    output, y = _single_tensors(sample)
    two_classes = is_per_class(output, y) and output.shape[1] == 2
    # Either of both may have an additional last dimension of 1.
    alike = output.shape == y.shape or (
        output.shape[0] == y.shape[0]
        and output.numel() == y.numel()
        and abs(output.ndim - y.ndim) == 1
        and 1 in (output.shape[-1], y.shape[-1])
    )
    if not two_classes and not alike:
        raise ModelError(
            "outputs must have one score for each label, (B,) or (B, 1) for labels "
            "(B,), or the scores of two classes, (B, 2), got outputs "
            f"{tuple(output.shape)} for labels {tuple(y.shape)}; for several classes "
            'use "classification", for several labels per row "multilabel"'
        )


def is_counted(y: Tensor, *ignored: float | None) -> Tensor:
    """Return a mask of the labels that equal none of `ignored`, which may be NaN."""
    counted = torch.ones_like(y, dtype=torch.bool)
    for value in ignored:
        if value is not None:
            counted &= ~torch.isnan(y) if math.isnan(value) else y != value
    return counted


def check_labels(labels: Tensor, allowed: Tensor, values: str) -> None:
    """Raise a DataError unless all labels are allowed; `values` says which are."""
    refused = labels[~allowed]
    if len(refused):
        raise DataError(
            f"labels must be {values}, got {refused[0].item()} ({len(refused)} "
            "invalid); remove these rows, or mask the label with ignore="
        )


def checked(scores: Tensor, scale: Scale) -> Tensor:
    """Clamp probabilities to [0, 1]; raise an error for NaN and values out of range."""
    undefined = torch.isnan(scores)
    if bool(undefined.any()):
        rows = int(undefined.reshape(len(scores), -1).any(dim=1).sum())
        raise ModelError(
            f"{rows} of {len(scores)} outputs are NaN or infinite, so nothing can be "
            "measured; check these rows, and whether training diverged"
        )
    refused = scores[(scores < -1e-3) | (scores > 1 + 1e-3)]
    if len(refused):
        raise ModelError(
            f"outputs must be {scale.replace('_', ' ')}, as the loss expects, but "
            f"{refused[0].item():g} is not a probability from 0 to 1; change the last "
            "layer of the model, or the loss"
        )
    return scores.clamp(0, 1)


def class_rows(
    sample: SampleBatch, output: Tensor, y: Tensor, ignore: float | None
) -> Pair:
    """Return probabilities, float64 (N, C), and class indices, int64 (N,)."""
    scores_NC = probabilities(output, sample.scale, over_classes=True)
    counted = is_counted(y, sample.ignored, ignore).flatten()
    scores_NC = scores_NC.movedim(1, -1).flatten(0, -2)[counted]
    labels_N = y.flatten()[counted].long()
    classes = scores_NC.shape[1]
    allowed = (labels_N >= 0) & (labels_N < classes)
    check_labels(labels_N, allowed, f"0 to {classes - 1}")
    return checked(scores_NC, sample.scale), labels_N


def binary_rows(
    sample: SampleBatch, output: Tensor, y: Tensor, ignore: float | None
) -> Pair:
    """Return probabilities of label 1, float64 (N,), and labels, int64 (N,)."""
    over_classes = is_per_class(output, y)
    scores = probabilities(output, sample.scale, over_classes=over_classes)
    scores = scores[:, 1] if over_classes else scores
    counted = is_counted(y, sample.ignored, ignore).flatten()
    labels = y.flatten()[counted]
    check_labels(labels, (labels == 0) | (labels == 1), "0 or 1")
    return checked(scores.flatten()[counted], sample.scale), labels.long()


def collection_of(**metrics: Metric) -> MetricCollection:
    by_name: dict[str, Any] = metrics
    return MetricCollection(by_name, compute_groups=False)


def _class_values(
    hits: Any, predicted: Any, support: Any, curves: Any
) -> dict[str, Any]:
    """Return rates and areas per class, and their means over classes that occur."""
    rates = streaming.rates(hits, predicted, support)
    per_class = {f"{name}_per_class": rate for name, rate in rates.items()}
    per_class |= streaming.areas_and_curves(curves)
    means = {
        name.removesuffix("_per_class"): streaming.mean_of(
            values, support + predicted > 0
        )
        for name, values in per_class.items()
        if name.endswith("_per_class")
    }
    return {**means, "support": support, "predicted": predicted, **per_class}


@dataclass(frozen=True)
class ClassificationMetrics(MetricSet):
    """Metrics of class scores and class indices, ``metrics="classification"``.

    Outputs are (B, C), or (B, C, T) with a label for each step. Precision, recall and
    F1 of a class are 0 instead of 0/0; their means ("macro") leave out classes that are
    neither labelled nor predicted. ROC AUC and average precision compare each class
    with all others; without examples of both they are NaN, and means leave them out.

    Args:
        top: N of the top-N accuracy, >= 2: the share of rows whose label is among the N
            best scores; ties are broken as in `torch.topk`. None: 5 for 6 or more
            classes, 2 for 3 to 5 classes, and no top-N accuracy for 2 classes.
        thresholds: Number of thresholds from 0 to 1 at which curves and areas are
            measured, >= 2, in constant memory. None: curves and areas are exact, which
            takes 8 bytes for each class of each row.
        ignore: A label that does not count, in addition to the one that the loss
            ignores.
        classes: Names of the classes. None: the names in the data, or numbers.

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> ClassificationMetrics(top=3)
        ClassificationMetrics(top=3, thresholds=None, ignore=None, classes=None)
    """

    top: int | None = None
    thresholds: int | None = None
    ignore: int | None = None
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.top is not None and self.top < 2:
            raise OptionError(
                f"top must be >= 2, got {self.top}; top-1 accuracy is the accuracy"
            )
        check_thresholds(self.thresholds)

    @override
    def collection(self, sample: SampleBatch) -> MetricCollection:
        classes = check_classes(sample)
        check_names(self.classes, classes, "classes")
        unchecked: Any = {"validate_args": False}
        metrics: dict[str, Metric] = {
            "confusion": MulticlassConfusionMatrix(classes, **unchecked),
            "curves": streaming.ClassCurves(classes, **unchecked)
            if self.thresholds is None
            else streaming.BinnedCurves(classes, self.thresholds),
        }
        if (top := self._top(classes)) is not None:
            options: Any = {"top_k": top, "average": "micro", **unchecked}
            metrics["top"] = MulticlassStatScores(classes, **options)
        return collection_of(**metrics)

    def _top(self, classes: int) -> int | None:
        if self.top is None:
            return (5 if classes > 5 else 2) if classes > 2 else None
        if self.top >= classes:
            raise OptionError(
                f"top must be below the number of classes, got {self.top} of {classes}"
            )
        return self.top

    @override
    def prepared(self, sample: SampleBatch, output: Tree, y: Tree) -> Pair:
        return class_rows(sample, output, y, self.ignore)

    @override
    def section(self, sample: SampleBatch, computed: Mapping[str, Any]) -> Section:
        confusion = computed["confusion"].numpy()
        classes, hits = len(confusion), np.diag(confusion)
        values: dict[str, Any] = {
            "accuracy": streaming.share(hits.sum(), confusion.sum())
        }
        if "top" in computed:
            correct, *_, rows = computed["top"].tolist()
            top = f"top_{self._top(classes)}_accuracy"
            values[top] = streaming.share(correct, rows)
        predicted, support = confusion.sum(axis=0), confusion.sum(axis=1)
        values |= _class_values(hits, predicted, support, computed["curves"])
        values |= {"mcc": streaming.matthews(confusion), "confusion_matrix": confusion}
        return report.classification(values, class_names(self.classes, sample, classes))


@dataclass(frozen=True)
class _LabelMetrics(MetricSet):
    """Arguments of the metrics of labels 0 and 1."""

    threshold: float = 0.5
    thresholds: int | None = None
    ignore: float | None = None
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 1:
            raise OptionError(f"threshold must be in [0, 1), got {self.threshold}")
        check_thresholds(self.thresholds)

    def curves(self, labels: int) -> Metric:
        """Return the metric that computes the curves of this number of labels."""
        if self.thresholds is not None:
            return streaming.BinnedCurves(labels, self.thresholds)
        return streaming.LabelCurves(labels, ignore_index=MASKED, validate_args=False)


@dataclass(frozen=True)
class BinaryMetrics(_LabelMetrics):
    """Metrics of labels 0 and 1, ``metrics="binary"``.

    Outputs are (B,), (B, 1), or (B, 2) with the score of class 1 second; labels are
    integers, bools or floats. Rates are those of class 1, and 0 instead of 0/0. ROC AUC
    is NaN unless both classes have labels, average precision unless class 1 has.

    Args:
        threshold: Class 1 is predicted above this probability, in [0, 1).
        thresholds: See `ClassificationMetrics`.
        ignore: A label that does not count, in addition to the one that the loss
            ignores; may be NaN.
        classes: Names of the classes 0 and 1. None: the names in the data, or "0" and
            "1".

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> BinaryMetrics(threshold=0.3)
        BinaryMetrics(threshold=0.3, thresholds=None, ignore=None, classes=None)
    """

    @override
    def collection(self, sample: SampleBatch) -> MetricCollection:
        check_binary(sample)
        check_names(self.classes, 2, "classes")
        return collection_of(
            confusion=BinaryConfusionMatrix(self.threshold, validate_args=False),
            curves=self.curves(1),
        )

    @override
    def prepared(self, sample: SampleBatch, output: Tree, y: Tree) -> Pair:
        scores, labels = binary_rows(sample, output, y, self.ignore)
        return scores[:, None], labels[:, None]

    @override
    def section(self, sample: SampleBatch, computed: Mapping[str, Any]) -> Section:
        confusion = computed["confusion"].numpy()
        (tn, fp), (fn, tp) = confusion
        curves = streaming.areas_and_curves(computed["curves"])
        values = {
            "accuracy": streaming.share(tp + tn, confusion.sum()),
            **{k: float(v) for k, v in streaming.rates(tp, tp + fp, tp + fn).items()},
            "specificity": float(streaming.divided(tn, tn + fp)),
            "mcc": streaming.matthews(confusion),
            "roc_auc": float(curves["roc_auc_per_class"][0]),
            "average_precision": float(curves["average_precision_per_class"][0]),
            "confusion_matrix": confusion,
            "roc_curves": curves["roc_curves"],
            "precision_recall_curves": curves["precision_recall_curves"],
        }
        return report.binary(values, class_names(self.classes, sample, 2))


@dataclass(frozen=True)
class MultilabelMetrics(_LabelMetrics):
    """Metrics of several labels 0 and 1 per row, ``metrics="multilabel"``.

    Outputs are (B, L) or (B, L, T); labels have the same shape and are integers, bools
    or floats. Accuracy is the share of correctly predicted labels, exact match the
    share of rows whose labels are all correct. Other values are computed per label and
    averaged as in `ClassificationMetrics`.

    Args:
        threshold: A label is predicted above this probability, in [0, 1).
        thresholds: See `ClassificationMetrics`.
        ignore: A label that does not count, in addition to the one that the loss
            ignores; may be NaN. Other labels of the same row count.
        classes: Names of the labels. None: the names in the data, or numbers.

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> MultilabelMetrics(ignore=-1)
        MultilabelMetrics(threshold=0.5, thresholds=None, ignore=-1, classes=None)
    """

    @override
    def collection(self, sample: SampleBatch) -> MetricCollection:
        output, y = _single_tensors(sample)
        if output.shape != y.shape or output.ndim < 2:
            raise ModelError(
                "outputs and labels must have the same shape, (B, L) or (B, L, T), "
                f"with one score for each label, got outputs {tuple(output.shape)} for "
                f'labels {tuple(y.shape)}; for one class per row use "classification"'
            )
        labels = output.shape[1]
        check_names(self.classes, labels, "classes")
        confusion = MultilabelConfusionMatrix(
            labels, self.threshold, ignore_index=MASKED, validate_args=False
        )
        exact = streaming.ExactMatch(self.threshold)
        return collection_of(
            confusion=confusion, curves=self.curves(labels), exact=exact
        )

    @override
    def prepared(self, sample: SampleBatch, output: Tree, y: Tree) -> Pair:
        scores = probabilities(output, sample.scale, over_classes=False)
        scores, y = (t.movedim(1, -1).flatten(0, -2) for t in (scores, y))
        counted = is_counted(y, sample.ignored, self.ignore)
        check_labels(y[counted], ((y == 0) | (y == 1))[counted], "0 or 1")
        labels = torch.where(counted, y.nan_to_num().long(), MASKED)
        scores = torch.where(counted, scores, 0)  # a masked score may be NaN
        return checked(scores, sample.scale), labels

    @override
    def section(self, sample: SampleBatch, computed: Mapping[str, Any]) -> Section:
        confusion = computed["confusion"].numpy().reshape(-1, 2, 2)
        tn, fp, fn, tp = confusion.reshape(-1, 4).T
        correct, total = tn + tp, tn + fp + fn + tp
        matches, rows = computed["exact"]
        values = {
            "accuracy": streaming.share(correct.sum(), total.sum()),
            "exact_match": streaming.share(matches, rows),
            "rows": rows,
            "accuracy_per_class": streaming.divided(correct, total),
            **_class_values(tp, tp + fp, tp + fn, computed["curves"]),
            "confusion_matrices": confusion,
        }
        return report.multilabel(values, class_names(self.classes, sample, len(tp)))


@dataclass(frozen=True)
class CalibrationMetrics(MetricSet):
    """Calibration errors of predicted probabilities, ``metrics="calibration"``.

    With one score per class, the confidence of a prediction is the probability of the
    best class. With a single score, (B,) or (B, 1), and labels 0 and 1, it is the
    probability of class 1. The expected calibration error (ECE) is the mean difference
    between confidence and accuracy over all bins, weighted by their predictions; the
    maximum calibration error (MCE) is the largest difference. With one score per class,
    both are also computed for each class against all others.

    Args:
        bins: Number of bins of equal width from 0 to 1, >= 1. A confidence on an edge
            belongs to the upper bin, and 1 to the last bin.
        ignore: A label that does not count, in addition to the one that the loss
            ignores.
        classes: Names of the classes. None: the names in the data, or numbers.

    Raises:
        OptionError: If `bins` is less than 1.

    Example:
        >>> CalibrationMetrics(bins=10)
        CalibrationMetrics(bins=10, ignore=None, classes=None)
    """

    bins: int = 15
    ignore: float | None = None
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.bins < 1:
            raise OptionError(f"bins must be >= 1, got {self.bins}")

    @override
    def collection(self, sample: SampleBatch) -> MetricCollection:
        classes = 0
        if is_per_class(sample.output, sample.y):
            classes = check_classes(sample)
            check_names(self.classes, classes, "classes")
        else:
            check_binary(sample)
        # Column 0 has the predictions, the other columns have the classes.
        return collection_of(bins=streaming.ReliabilityBins(1 + classes, self.bins))

    @override
    def prepared(self, sample: SampleBatch, output: Tree, y: Tree) -> Pair:
        if not is_per_class(output, y):
            scores, labels = binary_rows(sample, output, y, self.ignore)
            return scores[:, None], labels[:, None] == 1
        scores_NC, labels = class_rows(sample, output, y, self.ignore)
        confidence, best = scores_NC.max(dim=1, keepdim=True)
        correct = best == labels[:, None]
        is_class = labels[:, None] == torch.arange(scores_NC.shape[1])
        return torch.cat([confidence, scores_NC], 1), torch.cat([correct, is_class], 1)

    @override
    def section(self, sample: SampleBatch, computed: Mapping[str, Any]) -> Section:
        # MetricCollection merges the dict that its only metric returns.
        values = {name: columns[0] for name, columns in computed.items()}
        values |= {name: float(values[name]) for name in ("ece", "mce")}
        values["bin_edges"] = np.linspace(0, 1, self.bins + 1)
        if len(computed["ece"]) > 1:
            values |= {f"{name}_per_class": v[1:] for name, v in computed.items()}
        names = class_names(self.classes, sample, len(values.get("ece_per_class", ())))
        return report.calibration(values, names)


@dataclass(frozen=True)
class RegressionMetrics(MetricSet):
    """Errors of predicted numbers, ``metrics="regression"``.

    Outputs and labels are (B,), (B, n), or (B, T, n), where each step counts as a row;
    (B, 1) can be combined with (B,). Overall values, also RMSE and R2, are the means
    over all columns, as with scikit-learn's "uniform_average".

    Args:
        ignore: A label that does not count; may be NaN. Other columns of the same row
            count.
        columns: Names of the columns. None: numbers.

    Example:
        >>> RegressionMetrics(ignore=float("nan"))
        RegressionMetrics(ignore=nan, columns=None)
    """

    ignore: float | None = None
    columns: Sequence[str] | None = None

    @override
    def collection(self, sample: SampleBatch) -> MetricCollection:
        output, y = _single_tensors(sample)
        shapes = {
            tuple(t.shape[:1]) if t.shape[1:] == (1,) else t.shape for t in (output, y)
        }
        if len(shapes) > 1 or not output.ndim:
            raise ModelError(
                "outputs and labels must have the same shape, (B,), (B, n) or "
                f"(B, T, n), got outputs {tuple(output.shape)} for labels "
                f'{tuple(y.shape)}; for class indices use "classification"'
            )
        columns = _columns(y).shape[1]
        check_names(self.columns, columns, "columns")
        return collection_of(errors=streaming.ErrorMoments(columns))

    @override
    def prepared(self, sample: SampleBatch, output: Tree, y: Tree) -> Pair:
        predictions, labels = _columns(output), _columns(y)
        counted = is_counted(labels, self.ignore)
        if infinite := int((~labels[counted].isfinite()).sum()):
            raise DataError(
                f"{infinite} labels are NaN or infinite; remove these rows, or mask "
                'NaN with RegressionMetrics(ignore=float("nan"))'
            )
        if infinite := int((~predictions[counted].isfinite()).sum()):
            raise ModelError(
                f"{infinite} of {int(counted.sum())} outputs are NaN or infinite, so "
                "nothing can be measured; check these rows, and whether training "
                "diverged"
            )
        return predictions, torch.where(counted, labels, torch.nan)

    @override
    def section(self, sample: SampleBatch, computed: Mapping[str, Any]) -> Section:
        count, errors = computed["errors"]
        all_columns = np.ones(len(count), dtype=bool)
        values = {
            **{n: streaming.mean_of(error, all_columns) for n, error in errors.items()},
            **{f"{name}_per_column": error for name, error in errors.items()},
            "count": count,
        }
        names = self.columns or map(str, range(len(count)))
        return report.regression(values, tuple(names))


def _columns(values: Tensor) -> Tensor:
    values = values.double()
    return values[:, None] if values.ndim == 1 else values.flatten(0, -2)
