"""Presets of metrics for `evaluate` and `Evaluate`: frozen, picklable specifications.

Hides the expected shapes of outputs and labels, the input of the torchmetrics, and the
values of the report. `daskdl.metrics` exports the presets. Imported only when needed:
torchmetrics loads SciPy and matplotlib, about 90 MB per process.

B rows, C classes, L labels, N labels that count (each step of a sequence has one).
"""

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
    """The first rows, which show the shapes of outputs and labels."""

    output: Tree  # on the CPU
    y: Tree
    scale: Scale  # of class scores
    classes: Sequence[str] | None  # names of the classes 0, 1, ...
    ignored: int | None  # label that the loss ignores
    labels: Labels | None = None  # that the loss takes; None: unknown


class MetricSet(ABC):
    """Metrics that share their input and their section of the report; stateless."""

    @property
    def masks_nan(self) -> bool:
        """Whether NaN labels are masked, by ``ignore=float("nan")``."""
        ignore = getattr(self, "ignore", None)
        return ignore is not None and bool(ignore != ignore)

    def sample(
        self, loss: Any, output: Tree, y: Tree, classes: Sequence[str] | None
    ) -> SampleBatch:
        """Return the sample for these metrics of such outputs and labels."""
        scale, (labels, _) = scale_of(loss, output), labels_and_scale(loss)
        return SampleBatch(output, y, scale, classes, ignored_label(loss), labels)

    def numbers(self, sample: SampleBatch) -> list[str]:
        """Return the names of values that are single numbers."""
        trial = self.collection(sample)
        pair = self.prepared(sample, sample.output, sample.y)
        for metric in trial.values(copy_state=False):
            metric.update(*pair)
        values = self.section(sample, trial.compute()).values
        return [name for name, value in values.items() if np.ndim(value) == 0]

    @abstractmethod
    def collection(self, sample: SampleBatch) -> MetricCollection:
        """Return new torchmetrics for data like the sample."""

    @abstractmethod
    def prepared(self, sample: SampleBatch, output: Tree, y: Tree) -> Pair:
        """Return the predictions and targets to update the metrics with, row by row."""

    @abstractmethod
    def section(self, sample: SampleBatch, computed: Mapping[str, Any]) -> Section:
        """Return the report of computed metrics."""


def check_thresholds(thresholds: int | None) -> None:
    if thresholds is not None and thresholds < 2:
        raise OptionError(
            f"thresholds must be 2 or more, or None for exact curves, got {thresholds}"
        )


def check_names(names: Sequence[str] | None, count: int, what: str) -> None:
    if names is not None and len(names) != count:
        raise OptionError(f"{what} must be {count} names, got {len(names)}: {names!r}")


def class_names(
    names: Sequence[str] | None, sample: SampleBatch, count: int
) -> tuple[str, ...]:
    """Return the names of all classes; the name of an unnamed class is its number."""
    known = list(names or sample.classes or ())[:count]
    return (*map(str, known), *(str(k) for k in range(len(known), count)))


def _one_tensor_each(sample: SampleBatch) -> tuple[Tensor, Tensor]:
    for what, tree in (("output", sample.output), ("labels", sample.y)):
        if not isinstance(tree, Tensor):
            several = isinstance(tree, dict | tuple)
            got = outline(tree) if several else type(tree).__name__
            raise (ModelError if what == "output" else DataError)(
                f"metrics by name need {what} of one tensor, got {got}: choose one "
                """of several by its name, metrics={"head": ["accuracy"]}"""
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
    """Return the number of classes; refuse other outputs or labels."""
    output, y = _one_tensor_each(sample)
    if y.dtype.is_floating_point or y.dtype == torch.bool:
        raise DataError(
            f"labels must be class indices, 0 to classes - 1, as integers, got "
            f'{y.dtype} of shape {tuple(y.shape)}: for labels 0 and 1 use "binary" or '
            '"multilabel", for numbers "regression", and of one-hot rows give '
            "y.argmax(1)"
        )
    if not is_per_class(output, y):
        raise ModelError(
            f"outputs must be one score per class, 2 classes or more, along dimension "
            f"1, as (B, C) or (B, C, T) for labels (B,) or (B, T); got outputs "
            f"{tuple(output.shape)} for labels {tuple(y.shape)}: for one score per "
            'label use "binary" or "multilabel"'
        )
    return output.shape[1]


def check_binary(sample: SampleBatch) -> None:
    """Check for one score per label, or scores of two classes."""
    output, y = _one_tensor_each(sample)
    two = is_per_class(output, y) and output.shape[1] == 2
    same = output.shape == y.shape or (  # one of both may have a dimension of 1 more
        output.shape[0] == y.shape[0]
        and output.numel() == y.numel()
        and abs(output.ndim - y.ndim) == 1
        and 1 in (output.shape[-1], y.shape[-1])
    )
    if not two and not same:
        raise ModelError(
            "outputs must be one score for each label, as (B,) or (B, 1) for labels "
            "(B,), or two class scores, as (B, 2); got outputs "
            f"{tuple(output.shape)} for labels {tuple(y.shape)}: for more classes use "
            '"classification", for more labels "multilabel"'
        )


def is_counted(y: Tensor, *ignored: float | None) -> Tensor:
    """Return a mask of the labels that equal none of `ignored`, which may be NaN."""
    counted = torch.ones_like(y, dtype=torch.bool)
    for value in ignored:
        if value is not None:
            counted &= ~torch.isnan(y) if value != value else y != value
    return counted


def check_labels(labels: Tensor, allowed: Tensor, range_: str) -> None:
    if not bool(allowed.all()):
        worst: Any = labels[~allowed][0].item()
        raise DataError(
            f"labels must be {range_}, got {worst} ({int((~allowed).sum())} such): "
            "leave these rows out, or give the label that does not count as ignore="
        )


def checked(scores: Tensor, scale: Scale) -> Tensor:
    """Clamp probabilities to [0, 1]; refuse NaN, and values out of range."""
    if bool(torch.isnan(scores).any()):
        rows = int(torch.isnan(scores.reshape(len(scores), -1)).any(dim=1).sum())
        raise ModelError(
            f"{rows} of {len(scores)} outputs are NaN or infinite, so nothing can be "
            "measured: check these rows, and whether training diverged"
        )
    far = (scores < -1e-3) | (scores > 1 + 1e-3)
    if bool(far.any()):
        raise ModelError(
            f"outputs must be {scale.replace('_', ' ')}, as the loss expects, got "
            f"{scores[far][0].item():g} instead of a probability from 0 to 1: change "
            "the last layer of the model, or the loss"
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
    """Return probabilities of 1, float64 (N,), and labels, int64 (N,)."""
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


def _of_classes(hits: Any, predicted: Any, support: Any, curves: Any) -> dict[str, Any]:
    """Return rates and areas per class, and their means over classes that occur."""
    rates = streaming.rates(hits, predicted, support)
    each = {f"{name}_per_class": rate for name, rate in rates.items()}
    each |= streaming.areas_and_curves(curves)
    means = {
        name.removesuffix("_per_class"): streaming.mean_of(
            values, support + predicted > 0
        )
        for name, values in each.items()
        if name.endswith("_per_class")
    }
    return {**means, "support": support, "predicted": predicted, **each}


@dataclass(frozen=True)
class ClassificationMetrics(MetricSet):
    """Metrics of class scores and class indices, ``metrics="classification"``.

    Outputs are (B, C), or (B, C, T) with a label for each step. Precision, recall and
    F1 of a class are 0 instead of 0/0; their means ("macro") leave out classes that are
    neither labelled nor predicted. ROC AUC and average precision compare each class
    with the rest; they are NaN without examples of both, and then left out of means.

    Args:
        top: N of the top-N accuracy, the share of labels among the N best scores; ties
            are broken as in `torch.topk`. None: 5 for 6 classes or more, 2 for 3 to 5
            classes, no top-N accuracy for 2 classes.
        thresholds: Number of thresholds from 0 to 1 at which curves and areas are
            measured, in constant memory. None: they are exact, which takes 8 bytes for
            each class of each row.
        ignore: A label that does not count, like the one that the loss ignores.
        classes: Names of the classes; None: those of the data, or numbers.

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
            raise OptionError(f"top must be 2 or more, got {self.top}: 1 is accuracy")
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
            right, *_, rows = computed["top"].tolist()
            top = f"top_{self._top(classes)}_accuracy"
            values[top] = streaming.share(right, rows)
        predicted, support = confusion.sum(axis=0), confusion.sum(axis=1)
        values |= _of_classes(hits, predicted, support, computed["curves"])
        values |= {"mcc": streaming.matthews(confusion), "confusion_matrix": confusion}
        return report.classification(values, class_names(self.classes, sample, classes))


@dataclass(frozen=True)
class _LabelMetrics(MetricSet):
    """The arguments of metrics of labels 0 and 1."""

    threshold: float = 0.5
    thresholds: int | None = None
    ignore: float | None = None
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 1:
            raise OptionError(f"threshold must be in [0, 1), got {self.threshold}")
        check_thresholds(self.thresholds)

    def curves(self, labels: int) -> Metric:
        """Return the metric that holds the curves of this many labels."""
        if self.thresholds is not None:
            return streaming.BinnedCurves(labels, self.thresholds)
        return streaming.LabelCurves(labels, ignore_index=MASKED, validate_args=False)


@dataclass(frozen=True)
class BinaryMetrics(_LabelMetrics):
    """Metrics of labels 0 and 1, ``metrics="binary"``.

    Outputs are (B,), (B, 1), or (B, 2) with the score of class 1 second; labels are
    integers, bools or floats. Rates are those of class 1, and 0 instead of 0/0. ROC AUC
    is NaN without labels of both classes, average precision without a 1.

    Args:
        threshold: Class 1 is predicted above this probability, in [0, 1).
        thresholds: See `ClassificationMetrics`.
        ignore: A label that does not count, like the one that the loss ignores; may be
            NaN.
        classes: Names of 0 and 1; None: those of the data, or 0 and 1.

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
        ignore: A label that does not count, like the one that the loss ignores; may be
            NaN. Other labels of the same row count.
        classes: Names of the labels; None: those of the data, or numbers.

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> MultilabelMetrics(ignore=-1)
        MultilabelMetrics(threshold=0.5, thresholds=None, ignore=-1, classes=None)
    """

    @override
    def collection(self, sample: SampleBatch) -> MetricCollection:
        output, y = _one_tensor_each(sample)
        if output.shape != y.shape or output.ndim < 2:
            raise ModelError(
                "outputs and labels must both be (B, L), or (B, L, T), one score and "
                f"one 0 or 1 for each label; got outputs {tuple(output.shape)} for "
                f"labels {tuple(y.shape)}: for one class of each row use "
                '"classification"'
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
        all_, (matches, rows) = tn + fp + fn + tp, computed["exact"]
        values = {
            "accuracy": streaming.share((tp + tn).sum(), all_.sum()),
            "exact_match": streaming.share(matches, rows),
            "rows": rows,
            "accuracy_per_class": streaming.divided(tp + tn, all_),
            **_of_classes(tp, tp + fp, tp + fn, computed["curves"]),
            "confusion_matrices": confusion,
        }
        return report.multilabel(values, class_names(self.classes, sample, len(tp)))


@dataclass(frozen=True)
class CalibrationMetrics(MetricSet):
    """How well probabilities are calibrated, ``metrics="calibration"``.

    With one score per class, the confidence of a prediction is the probability of the
    best class. With one score, (B,) or (B, 1) and labels 0 and 1, it is the probability
    of class 1. The expected calibration error (ECE) is the mean difference between the
    confidence and the accuracy of a bin, weighted by predictions; the maximum
    calibration error (MCE) is the largest difference. Both are also computed for each
    class against the rest.

    Args:
        bins: Number of bins of equal width from 0 to 1. A confidence on an edge belongs
            to the upper bin, and 1 to the last.
        ignore: A label that does not count, like the one that the loss ignores.
        classes: Names of the classes; None: those of the data, or numbers.

    Raises:
        OptionError: If there is no bin.

    Example:
        >>> CalibrationMetrics(bins=10)
        CalibrationMetrics(bins=10, ignore=None, classes=None)
    """

    bins: int = 15
    ignore: float | None = None
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.bins < 1:
            raise OptionError(f"bins must be 1 or more, got {self.bins}")

    @override
    def collection(self, sample: SampleBatch) -> MetricCollection:
        kinds = 1
        if is_per_class(sample.output, sample.y):
            kinds += check_classes(sample)
            check_names(self.classes, kinds - 1, "classes")
        else:
            check_binary(sample)
        return collection_of(bins=streaming.ReliabilityBins(kinds, self.bins))

    @override
    def prepared(self, sample: SampleBatch, output: Tree, y: Tree) -> Pair:
        if not is_per_class(output, y):
            scores, labels = binary_rows(sample, output, y, self.ignore)
            return scores[:, None], labels[:, None] == 1
        scores_NC, labels = class_rows(sample, output, y, self.ignore)
        confidence, best = scores_NC.max(dim=1, keepdim=True)
        right = best == labels[:, None]
        each = labels[:, None] == torch.arange(scores_NC.shape[1])
        return torch.cat([confidence, scores_NC], 1), torch.cat([right, each], 1)

    @override
    def section(self, sample: SampleBatch, computed: Mapping[str, Any]) -> Section:
        # `computed` is the dict that the only metric of the collection returns.
        values = {name: value[0] for name, value in computed.items()}
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
    (B, 1) and (B,) may be mixed. Overall values are the means of all columns, as with
    scikit-learn's "uniform_average", also for RMSE and R2.

    Args:
        ignore: A label that does not count; may be NaN. Other columns of the same row
            count.
        columns: Names of the columns; None: numbers.

    Example:
        >>> RegressionMetrics(ignore=float("nan"))
        RegressionMetrics(ignore=nan, columns=None)
    """

    ignore: float | None = None
    columns: Sequence[str] | None = None

    @override
    def collection(self, sample: SampleBatch) -> MetricCollection:
        output, y = _one_tensor_each(sample)
        shapes = {
            tuple(t.shape[:1]) if t.shape[1:] == (1,) else t.shape for t in (output, y)
        }
        if len(shapes) > 1 or not output.ndim:
            raise ModelError(
                "outputs and labels must have the same shape, (B,), (B, n) or "
                f"(B, T, n), got outputs {tuple(output.shape)} for labels "
                f'{tuple(y.shape)}: for class indices use "classification"'
            )
        columns = _columns(y).shape[1]
        check_names(self.columns, columns, "columns")
        return collection_of(errors=streaming.ErrorMoments(columns))

    @override
    def prepared(self, sample: SampleBatch, output: Tree, y: Tree) -> Pair:
        predictions, labels = _columns(output), _columns(y)
        counted = is_counted(labels, self.ignore)
        if bad := int((~labels[counted].isfinite()).sum()):
            raise DataError(
                f"{bad} labels are NaN or infinite: leave these rows out, or mask NaN "
                'by RegressionMetrics(ignore=float("nan"))'
            )
        if bad := int((~predictions[counted].isfinite()).sum()):
            raise ModelError(
                f"{bad} of {int(counted.sum())} outputs are NaN or infinite, so "
                "nothing can be measured: check these rows, and whether training "
                "diverged"
            )
        return predictions, torch.where(counted, labels, torch.nan)

    @override
    def section(self, sample: SampleBatch, computed: Mapping[str, Any]) -> Section:
        count, each = computed["errors"]
        every = np.ones(len(count), dtype=bool)
        values = {
            **{name: streaming.mean_of(values, every) for name, values in each.items()},
            **{f"{name}_per_column": values for name, values in each.items()},
            "count": count,
        }
        names = self.columns or map(str, range(len(values["count"])))
        return report.regression(values, tuple(names))


def _columns(values: Tensor) -> Tensor:
    values = values.double()
    return values[:, None] if values.ndim == 1 else values.flatten(0, -2)
