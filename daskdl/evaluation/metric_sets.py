"""Which metrics of a collection have the same state, so that one is updated for all.

Torchmetrics decides it by the numbers that the first update happens to give: two
metrics that only agree there, such as two top-k accuracies on rows that are all right,
would share one state for ever. Here it is decided by what they are made of.

What a set of metrics is: a specification that travels, and makes live ones.

Outputs that are one score per class, and labels that are class indices. No Dask.

B rows, C classes, N labels that count: of a sequence, each step has one.

Classes of which each row has one: rates, top N, areas below curves. No Dask.

N labels that count, C classes.

Outputs that are a score for each label, and labels that are 0 or 1. No Dask.

B rows, L labels.

Something that is there or not: rates at a threshold, areas below curves. No Dask.

Whether what is said with a confidence is as often right. No Dask.

N labels that count, C classes.

Metrics of torchmetrics that the user brings. No Dask.

Labels of which a row may have any number: rates, areas below curves. No Dask.

Numbers that are predicted: errors, R2 and correlation of each column. No Dask.

Sets of metrics by their names.

What the user asks for as ``metrics``, as sets of metrics. No Dask.

What a model's scores are, as its loss says. No Dask.

What is to be measured, before model and data are known. No Dask.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    BinaryConfusionMatrix,
    MulticlassConfusionMatrix,
    MultilabelConfusionMatrix,
)
from torchmetrics.wrappers import Running
from typing_extensions import override

from daskdl.data.batching import Tree, outline
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.evaluation.base import MetricSet, Scale, Shown, probabilities
from daskdl.evaluation.report import (
    BinarySection,
    CalibrationSection,
    ClassSection,
    LabelSection,
    RegressionSection,
)
from daskdl.evaluation.streaming import (
    MASKED,
    AllRight,
    ErrorSums,
    ReliabilityBins,
    TopRight,
    check_thresholds,
    divided,
    errors_of,
    matthews,
    mean_of,
    ranked,
    ranking,
    rates,
    share,
)

# Of a metric, what has no part in its updates; of a class, likewise.
_LIVE = {"update", "compute", "_update_signature", "_computed", "_forward_cache"}
_COUNTED = {"_update_count", "_from_collection", "prefix", "postfix"}
_PLAIN = (str, int, float, set, torch.dtype, torch.device)
_TOLD = {
    "compute",
    "plot",
    "higher_is_better",
    "is_differentiable",
    "full_state_update",
}


def groups(collection: MetricCollection) -> list[list[str]]:
    """Names of metrics that share their state, each group headed by its first.

    Args:
        collection: Groups that it was given as lists are taken as they are.

    Example:
        >>> from torchmetrics import classification
        >>> kinds = classification.MulticlassPrecision, classification.MulticlassRecall
        >>> groups(MetricCollection([kind(3) for kind in kinds]))
        [['MulticlassPrecision', 'MulticlassRecall']]
        >>> tops = {f"top {k}": classification.MulticlassRecall(3, k) for k in (1, 2)}
        >>> groups(MetricCollection(tops))
        [['top 1'], ['top 2']]
    """
    if isinstance(collection._enable_compute_groups, list):
        return [list(names) for names in collection.compute_groups.values()]
    found: list[tuple[Metric, list[str]]] = []
    for name, metric in collection.items(keep_base=True, copy_state=False):
        for head, names in found:
            if _share(head, metric):
                names.append(name)
                break
        else:
            found.append((metric, [name]))
    return [names for _, names in found]


def _share(one: Metric, two: Metric) -> bool:
    if any(True for _ in one.children()) or any(True for _ in two.children()):
        return False
    if not one._defaults or _made_of(type(one)) != _made_of(type(two)):
        return False
    ours, theirs = _settings(one), _settings(two)
    return ours.keys() == theirs.keys() and all(
        _same(ours[name], theirs[name]) for name in ours
    )


@functools.cache
def _made_of(kind: type) -> dict[str, Any]:
    """All that its updates may call or look at, where it was defined."""
    return {
        name: getattr(kind, name)
        for name in dir(kind)
        if not name.startswith(("__", "plot_", "_abc")) and name not in _TOLD
    }


def _settings(metric: Metric) -> dict[str, Any]:
    left_out = _LIVE | _COUNTED | metric._defaults.keys()
    return {k: v for k, v in vars(metric).items() if k not in left_out}


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_same(one[k], two[k]) for k in one)
    if type(one) is not type(two):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(_same, one, two))
    return one is two or (isinstance(one, _PLAIN) and bool(one == two))


def collected(metrics: Mapping[str, Metric]) -> MetricCollection:
    """Metrics of which each has its own state.

    Torchmetrics would guess from the first rows which have the same one.
    """
    groups = [[name] for name in metrics]
    return MetricCollection(dict(metrics), compute_groups=groups)


if TYPE_CHECKING:
    from torchmetrics import MetricCollection


def one_tensor(what: str, given: Tree) -> Tensor:
    """The only array that there is.

    Args:
        what: "output" or "labels", for the message.
        given: Of a model.

    Raises:
        DataError: If labels are several, or missing.
        ModelError: If outputs are several.
    """
    if isinstance(given, Tensor):
        return given
    got = outline(given) if isinstance(given, dict | tuple) else type(given).__name__
    message = (
        f"metrics by name need {what} of one tensor, got {got}: wrap the model so that "
        "it returns what is measured, or give metrics of your own"
    )
    raise ModelError(message) if what == "output" else DataError(message)


def is_per_class(output: Tree, y: Tree) -> bool:
    """Whether there is one score per class, 2 or more, along dimension 1."""
    return (
        isinstance(output, Tensor)
        and isinstance(y, Tensor)
        and output.ndim == y.ndim + 1
        and output.shape[1] >= 2
        and (output.shape[0], *output.shape[2:]) == y.shape
    )


def check_classes(shown: Shown) -> int:
    """Check that outputs and labels are of classes, and count these.

    Raises:
        DataError: If labels are no class indices.
        ModelError: If outputs are not one score per class.
    """
    output, y = one_tensor("output", shown.output), one_tensor("labels", shown.y)
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


def class_rows(
    shown: Shown, output: Tree, y: Tree, ignore: float | None
) -> tuple[Tensor, Tensor]:
    """Probabilities and labels of what counts.

    Args:
        shown: Checked by `check_classes`.
        output: (B, C, ...).
        y: (B, ...).
        ignore: A label that does not count either.

    Returns:
        Probabilities, float64, (N, C), and class indices, int64, (N,).

    Raises:
        DataError: If a label is no class.
        ModelError: If a score is NaN.
    """
    scores_NC = probabilities(output, shown.scale).movedim(1, -1).flatten(0, -2)
    counted = is_counted(y, (shown.ignored, ignore)).flatten()
    labels_N, scores_NC = y.flatten()[counted].long(), scores_NC[counted]
    classes = scores_NC.shape[1]
    check_labels(
        labels_N, (labels_N >= 0) & (labels_N < classes), f"0 to {classes - 1}"
    )
    return checked(scores_NC, shown.scale), labels_N


def is_counted(y: Tensor, ignored: tuple[float | None, ...]) -> Tensor:
    """Which labels count.

    Args:
        y: Any.
        ignored: Values that do not; NaN is one too; None: none.

    Example:
        >>> is_counted(torch.tensor([0, -100]), (-100, None))
        tensor([ True, False])
    """
    counted = torch.ones_like(y, dtype=torch.bool)
    for value in ignored:
        if value is not None:
            counted &= ~torch.isnan(y) if value != value else y != value
    return counted


def check_labels(labels: Tensor, allowed: Tensor, range_: str) -> None:
    """Check that all labels that count are allowed.

    Args:
        labels: Those that count.
        allowed: Whether each is.
        range_: What is, for the message.

    Raises:
        DataError: If one is not.
    """
    if not bool(allowed.all()):
        worst: Any = labels[~allowed][0].item()
        raise DataError(
            f"labels must be {range_}, got {worst} ({int((~allowed).sum())} such): "
            "leave these rows out, or name the label that does not count as ignore="
        )


def checked(scores: Tensor, scale: Scale) -> Tensor:
    """Probabilities that are some, rounding aside.

    Args:
        scores: Of what counts.
        scale: What the model's outputs are taken for.

    Raises:
        ModelError: If one is NaN, or none.
    """
    if bool(torch.isnan(scores).any()):
        rows = int(torch.isnan(scores.reshape(len(scores), -1)).any(dim=1).sum())
        raise ModelError(
            f"{rows} of {len(scores)} outputs are NaN or infinite, of which nothing "
            "can be measured: look at the rows, and whether training diverged"
        )
    far = (scores < -1e-3) | (scores > 1 + 1e-3)
    if bool(far.any()):
        raise ModelError(
            f"outputs must be {scale.replace('_', ' ')}, as the loss takes them, got "
            f"{scores[far][0].item():g} where a probability from 0 to 1 was expected: "
            "return what the loss takes, or use a loss that takes what is returned"
        )
    return scores.clamp(0, 1)


_TOP = 5


@dataclass(frozen=True)
class ClassificationMetrics(MetricSet):
    """What ``metrics="classification"`` measures of one score per class.

    Outputs are (B, C), or (B, C, T) with a label for each step, and labels are class
    indices. Precision, recall and F1 of a class are 0 where they would be 0/0; their
    means ("macro") leave out classes that are neither labelled nor predicted. ROC AUC
    and average precision are of each class against the others, NaN without examples of
    both, and their means leave these out.

    Args:
        top: A prediction is right in top-N accuracy if the label is among this many
            best scores; of equal scores, those that `torch.topk` takes. None: 5 of 6
            classes or more, 2 of 3 to 5, and with 2 classes there is none.
        thresholds: None: areas and curves are exact, and 8 bytes are kept for each
            class of each row. A number: they are those of that many thresholds, evenly
            from 0 to 1, and memory does not grow with the data.
        ignore: A label that does not count, besides that which the loss passes over.
        classes: Their names, for the report; None: those of the data, or numbers.

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
    def collection(self, shown: Shown) -> MetricCollection:
        classes = check_classes(shown)
        check_names(self.classes, classes, "classes")
        top = self._top(classes)
        metrics: dict[str, Metric] = {
            "confusion": MulticlassConfusionMatrix(classes, validate_args=False),
            "ranking": ranking(classes, self.thresholds),
        }
        if top is not None:
            metrics["top"] = TopRight(top)
        return collected(metrics)

    def _top(self, classes: int) -> int | None:
        if self.top is None:
            return (_TOP if classes > _TOP else 2) if classes > 2 else None
        if self.top >= classes:
            raise OptionError(
                f"top must be below the number of classes, got {self.top} of {classes}"
            )
        return self.top

    @override
    def prepared(self, shown: Shown, output: Tree, y: Tree) -> tuple[Tensor, Tensor]:
        return class_rows(shown, output, y, self.ignore)

    @override
    def values(self, shown: Shown, computed: Mapping[str, Any]) -> dict[str, Any]:
        confusion = computed["confusion"].cpu().numpy()
        support, predicted = confusion.sum(axis=1), confusion.sum(axis=0)
        hits, seen = np.diag(confusion), support + predicted > 0
        each = {f"{k}_per_class": v for k, v in rates(hits, predicted, support).items()}
        each |= ranked(computed["ranking"])
        values = {"accuracy": share(hits.sum(), support.sum())}
        if "top" in computed:
            name = f"top_{self._top(len(support))}_accuracy"
            values[name] = computed["top"].share
        return {
            **values,
            **macro(each, seen),
            "mcc": matthews(confusion),
            "support": support,
            "predicted": predicted,
            "confusion_matrix": confusion,
            **each,
        }

    @override
    def section(self, shown: Shown, values: Mapping[str, Any]) -> ClassSection:
        names = class_names(self.classes, shown, len(values["support"]))
        return ClassSection(values, names)


def macro(each: Mapping[str, Any], seen: Any) -> dict[str, float]:
    """Means over classes, of all that there is of each.

    Args:
        each: By names that end in ``_per_class``.
        seen: Which classes count.
    """
    return {
        name.removesuffix("_per_class"): mean_of(values, seen)
        for name, values in each.items()
        if name.endswith("_per_class")
    }


def check_names(names: Sequence[str] | None, count: int, what: str) -> None:
    """Check that there are as many names as things.

    Raises:
        OptionError: If there are more, or fewer.
    """
    if names is not None and len(names) != count:
        raise OptionError(f"{what} must be {count} names, got {len(names)}: {names!r}")


def class_names(
    names: Sequence[str] | None, shown: Shown, count: int
) -> tuple[str, ...]:
    """A name for each class: its number, if there is no better one."""
    given = list(names or shown.classes or ())[:count]
    return (*map(str, given), *(str(k) for k in range(len(given), count)))


def check_threshold(threshold: float) -> None:
    """Check the probability above which something is predicted.

    Raises:
        OptionError: If it is none, or 1.
    """
    if not 0 <= threshold < 1:
        raise OptionError(f"threshold must be in [0, 1), got {threshold}")


def check_binary(shown: Shown) -> None:
    """Check that there is one score, or one for each of two classes, for each label.

    Raises:
        DataError: If there are no labels.
        ModelError: If outputs are of another shape.
    """
    output, y = one_tensor("output", shown.output), one_tensor("labels", shown.y)
    two = is_per_class(output, y) and output.shape[1] == 2
    if not two and not _is_one_each(output, y):
        raise ModelError(
            "outputs must be one score for each label, as (B,) or (B, 1) for labels "
            "(B,), or two class scores, as (B, 2); got outputs "
            f"{tuple(output.shape)} for labels {tuple(y.shape)}: for more classes use "
            '"classification", for more labels "multilabel"'
        )


def check_multilabel(shown: Shown) -> int:
    """Check that there is one score for each label of each row, and count the labels.

    Raises:
        DataError: If there are no labels.
        ModelError: If outputs are of another shape.
    """
    output, y = one_tensor("output", shown.output), one_tensor("labels", shown.y)
    if output.shape != y.shape or output.ndim < 2:
        raise ModelError(
            "outputs and labels must both be (B, L), or (B, L, T), one score and one 0 "
            f"or 1 for each label; got outputs {tuple(output.shape)} for labels "
            f'{tuple(y.shape)}: for one class of each row use "classification"'
        )
    return output.shape[1]


def binary_rows(
    shown: Shown, output: Tree, y: Tree, ignore: float | None
) -> tuple[Tensor, Tensor]:
    """Probabilities of 1, and labels, of what counts; both (N,).

    Args:
        shown: Checked by `check_binary`.
        output: Of some rows.
        y: Their labels.
        ignore: A label that does not count, besides that which the loss passes over.

    Raises:
        DataError: If a label is neither 0 nor 1.
        ModelError: If a score is NaN.
    """
    if is_per_class(output, y):
        scores = probabilities(output, shown.scale)[:, 1]
    else:
        scores = likelihoods(output, shown.scale)
    counted = is_counted(y, (shown.ignored, ignore)).flatten()
    labels = y.flatten()[counted]
    check_labels(labels, (labels == 0) | (labels == 1), "0 or 1")
    return checked(scores.flatten()[counted], shown.scale), labels.long()


def multilabel_rows(
    shown: Shown, output: Tree, y: Tree, ignore: float | None
) -> tuple[Tensor, Tensor]:
    """Probabilities, and labels with `MASKED` where they do not count; both (N, L).

    Args:
        shown: Checked by `check_multilabel`.
        output: (B, L, ...).
        y: Likewise.
        ignore: A label that does not count, besides that which the loss passes over.

    Raises:
        DataError: If a label is neither 0 nor 1.
        ModelError: If a score is NaN.
    """
    scores = likelihoods(output, shown.scale).movedim(1, -1).flatten(0, -2)
    y = y.movedim(1, -1).flatten(0, -2)
    counted = is_counted(y, (shown.ignored, ignore))
    check_labels(y[counted], ((y == 0) | (y == 1))[counted], "0 or 1")
    labels = torch.where(counted, y.nan_to_num().long(), MASKED)
    scores = torch.where(counted, scores, 0)  # also of what is NaN
    return checked(scores, shown.scale), labels


def likelihoods(scores: Tensor, scale: Scale) -> Tensor:
    """Turn scores, each for itself, into probabilities, float64.

    Args:
        scores: Of any shape.
        scale: What they are.

    Example:
        >>> likelihoods(torch.tensor([0.0]), "logits")
        tensor([0.5000], dtype=torch.float64)
    """
    scores = scores.double()
    if scale == "logits":
        return torch.sigmoid(scores)
    return scores.exp() if scale == "log_probabilities" else scores


def _is_one_each(output: Tensor, y: Tensor) -> bool:
    """The same shape, but that one of both may have a dimension of 1 more."""
    return output.shape == y.shape or (
        output.shape[0] == y.shape[0]
        and output.numel() == y.numel()
        and abs(output.ndim - y.ndim) == 1
        and 1 in (output.shape[-1], y.shape[-1])
    )


@dataclass(frozen=True)
class BinaryMetrics(MetricSet):
    """What ``metrics="binary"`` measures of one score, or of two classes.

    Outputs are (B,), (B, 1), or (B, 2) with the score of 1 second; labels are 0 and 1,
    as integers, bools or floats. Rates are those of 1, and 0 where they would be 0/0.
    ROC AUC is NaN without labels of both kinds, average precision without a 1.

    Args:
        threshold: 1 is predicted if its probability is above, in [0, 1).
        thresholds: Of areas and curves, as of `ClassificationMetrics`.
        ignore: A label that does not count, besides that which the loss passes over;
            NaN is one too.
        classes: Names of 0 and 1, for the report; None: those of the data, or 0 and 1.

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> BinaryMetrics(threshold=0.3)
        BinaryMetrics(threshold=0.3, thresholds=None, ignore=None, classes=None)
    """

    threshold: float = 0.5
    thresholds: int | None = None
    ignore: float | None = None
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_threshold(self.threshold)
        check_thresholds(self.thresholds)

    @override
    def collection(self, shown: Shown) -> MetricCollection:
        check_binary(shown)
        check_names(self.classes, 2, "classes")
        confusion = BinaryConfusionMatrix(self.threshold, validate_args=False)
        metrics = {"confusion": confusion, "ranking": ranking(1, self.thresholds)}
        return collected(metrics)

    @override
    def prepared(self, shown: Shown, output: Tree, y: Tree) -> tuple[Tensor, Tensor]:
        scores, labels = binary_rows(shown, output, y, self.ignore)
        return scores[:, None], labels[:, None]

    @override
    def values(self, shown: Shown, computed: Mapping[str, Any]) -> dict[str, Any]:
        confusion = computed["confusion"].cpu().numpy()
        (tn, fp), (fn, tp) = confusion
        at = {k: float(v) for k, v in rates(tp, tp + fp, tp + fn).items()}
        curves = ranked(computed["ranking"])
        return {
            "accuracy": share(tp + tn, confusion.sum()),
            **at,
            "specificity": float(divided(tn, tn + fp)),
            "mcc": matthews(confusion),
            "roc_auc": float(curves["roc_auc_per_class"][0]),
            "average_precision": float(curves["average_precision_per_class"][0]),
            "confusion_matrix": confusion,
            "roc_curves": curves["roc_curves"],
            "precision_recall_curves": curves["precision_recall_curves"],
        }

    @override
    def section(self, shown: Shown, values: Mapping[str, Any]) -> BinarySection:
        return BinarySection(values, class_names(self.classes, shown, 2))


@dataclass(frozen=True)
class CalibrationMetrics(MetricSet):
    """What ``metrics="calibration"`` measures of one score per class, or of one score.

    Of classes, a prediction is the best one, and its confidence is its probability; of
    one score, (B,) or (B, 1) with labels 0 and 1, it is 1, with the probability of 1.
    The expected calibration error (ECE) is the mean over predictions of how far the
    accuracy of their bin is from its mean confidence, and the largest one (MCE) that of
    the worst bin. The same errors are there for each class against the others.

    Args:
        bins: Of the same width, from 0 to 1. A confidence on an edge is in the upper
            bin, 1 in the last.
        ignore: A label that does not count, besides that which the loss passes over.
        classes: Their names, for tables; None: those of the data, or numbers.

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
    def collection(self, shown: Shown) -> MetricCollection:
        kinds = 1
        if is_per_class(shown.output, shown.y):
            kinds += check_classes(shown)
            check_names(self.classes, kinds - 1, "classes")
        else:
            check_binary(shown)
        return collected({"bins": ReliabilityBins(kinds, self.bins)})

    @override
    def prepared(self, shown: Shown, output: Tree, y: Tree) -> tuple[Tensor, Tensor]:
        if not is_per_class(output, y):
            scores, labels = binary_rows(shown, output, y, self.ignore)
            return scores[:, None], labels[:, None] == 1
        scores_NC, labels = class_rows(shown, output, y, self.ignore)
        confidence, best = scores_NC.max(dim=1, keepdim=True)
        right = best == labels[:, None]
        each = labels[:, None] == torch.arange(scores_NC.shape[1], device=labels.device)
        return torch.cat([confidence, scores_NC], 1), torch.cat([right, each], 1)

    @override
    def values(self, shown: Shown, computed: Mapping[str, Any]) -> dict[str, Any]:
        bins = computed["bins"]
        values = {
            "ece": float(bins.expected_error[0]),
            "mce": float(bins.largest_error[0]),
            "bin_edges": np.linspace(0, 1, self.bins + 1),
            "bin_count": bins.count_KM[0],
            "bin_confidence": bins.mean_confidence[0],
            "bin_accuracy": bins.accuracy[0],
        }
        if len(bins.count_KM) > 1:
            values |= {
                "ece_per_class": bins.expected_error[1:],
                "mce_per_class": bins.largest_error[1:],
                "bin_count_per_class": bins.count_KM[1:],
                "bin_confidence_per_class": bins.mean_confidence[1:],
                "bin_accuracy_per_class": bins.accuracy[1:],
            }
        return values

    @override
    def section(self, shown: Shown, values: Mapping[str, Any]) -> CalibrationSection:
        names = class_names(self.classes, shown, len(values.get("ece_per_class", ())))
        return CalibrationSection(values, names)


@dataclass(frozen=True, eq=False)
class OwnMetrics(MetricSet):
    """Metrics of torchmetrics, by name.

    Attributes:
        metrics: In the order in which they are told; not changed.
        scored: Whether they get probabilities: torchmetrics makes these of scores that
            it takes for logits, which it does if one of those at hand is outside
            [0, 1], so that the answer would depend on which rows come together. Else
            they get outputs as they are.
    """

    metrics: Mapping[str, Metric]
    scored: bool

    @override
    def collection(self, shown: Shown) -> MetricCollection:
        made: dict[str, Any] = {}
        for name, metric in self.metrics.items():
            made[name] = metric.clone().cpu()
            made[name].reset()
        return MetricCollection(made)

    @override
    def prepared(self, shown: Shown, output: Tree, y: Tree) -> tuple[Any, Any]:
        if not self.scored or not isinstance(output, Tensor):
            return output, y
        if not output.is_floating_point() or not isinstance(y, Tensor):
            return output, y
        classes = output.ndim == y.ndim + 1
        likely = probabilities if classes else likelihoods
        return checked(likely(output, shown.scale), shown.scale), y

    @override
    def values(self, shown: Shown, computed: Mapping[str, Any]) -> dict[str, Any]:
        order = {name: i for i, name in enumerate(self.metrics)}
        names = sorted(computed, key=lambda name: order.get(name, len(order)))
        return {name: _plain(computed[name]) for name in names}


def own_sets(metrics: Mapping[str, Metric]) -> tuple[OwnMetrics, ...]:
    """Those that need probabilities, and the others.

    Raises:
        OptionError: If one of them cannot be merged.
    """
    for name, metric in metrics.items():
        if any(isinstance(module, Running) for module in metric.modules()):
            raise OptionError(
                f"metrics[{name!r}] is of the last updates, of which there are none "
                "where parts are measured apart; give the metric without Running"
            )
    both = (
        OwnMetrics({n: m for n, m in metrics.items() if is_scored(m) is scored}, scored)
        for scored in (True, False)
    )
    return tuple(own for own in both if own.metrics)


def is_scored(metric: Metric) -> bool:
    """Whether it, or one that it is made of, is for classification.

    Example:
        >>> import torchmetrics
        >>> is_scored(torchmetrics.AUROC(task="binary"))
        True
        >>> is_scored(torchmetrics.MeanSquaredError())
        False
    """
    return any(
        base.__module__.startswith("torchmetrics.classification.")
        for module in metric.modules()
        for base in type(module).__mro__
    )


def _plain(value: Any) -> Any:
    """Numbers, and numpy arrays, in the place of tensors."""
    if isinstance(value, Tensor):
        return value.item() if value.ndim == 0 else value.detach().cpu().numpy()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


@dataclass(frozen=True)
class MultilabelMetrics(MetricSet):
    """What ``metrics="multilabel"`` measures of one score for each label.

    Outputs are (B, L), or (B, L, T), and labels are 0 and 1 of the same shape, as
    integers, bools or floats. Accuracy is the share of right labels, exact match that
    of rows in which all are. Other numbers are those of each label, and their means,
    by the rules of `ClassificationMetrics`.

    Args:
        threshold: A label is predicted if its probability is above, in [0, 1).
        thresholds: Of areas and curves, as of `ClassificationMetrics`.
        ignore: A label that does not count, besides that which the loss passes over;
            NaN is one too. Others of its row do.
        classes: Names of the labels, for the report; None: those of the data, or
            numbers.

    Raises:
        OptionError: If an argument is outside its range.

    Example:
        >>> MultilabelMetrics(ignore=-1)
        MultilabelMetrics(threshold=0.5, thresholds=None, ignore=-1, classes=None)
    """

    threshold: float = 0.5
    thresholds: int | None = None
    ignore: float | None = None
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_threshold(self.threshold)
        check_thresholds(self.thresholds)

    @override
    def collection(self, shown: Shown) -> MetricCollection:
        labels = check_multilabel(shown)
        check_names(self.classes, labels, "classes")
        metrics = {
            "confusion": MultilabelConfusionMatrix(
                labels, self.threshold, ignore_index=MASKED, validate_args=False
            ),
            "ranking": ranking(labels, self.thresholds),
            "exact": AllRight(self.threshold),
        }
        return collected(metrics)

    @override
    def prepared(self, shown: Shown, output: Tree, y: Tree) -> tuple[Tensor, Tensor]:
        return multilabel_rows(shown, output, y, self.ignore)

    @override
    def values(self, shown: Shown, computed: Mapping[str, Any]) -> dict[str, Any]:
        confusion = computed["confusion"].cpu().numpy().reshape(-1, 2, 2)
        tn, fp, fn, tp = confusion.reshape(-1, 4).T
        all_, predicted, support = tn + fp + fn + tp, tp + fp, tp + fn
        each = {"accuracy_per_class": divided(tp + tn, all_)}
        each |= {f"{k}_per_class": v for k, v in rates(tp, predicted, support).items()}
        each |= ranked(computed["ranking"])
        return {
            **macro(each, support + predicted > 0),
            "accuracy": share((tp + tn).sum(), all_.sum()),
            "exact_match": computed["exact"].share,
            "rows": computed["exact"].rows,
            "support": support,
            "predicted": predicted,
            "confusion_matrices": confusion,
            **each,
        }

    @override
    def section(self, shown: Shown, values: Mapping[str, Any]) -> LabelSection:
        return LabelSection(
            values, class_names(self.classes, shown, len(values["support"]))
        )


@dataclass(frozen=True)
class RegressionMetrics(MetricSet):
    """What ``metrics="regression"`` measures of numbers.

    Outputs and labels are (B,), one column, or (B, n), or (B, T, n) where each step
    counts as a row; (B, 1) and (B,) go together. The numbers of all columns are the
    means of those of each, RMSE and R2 too, as scikit-learn's "uniform_average".

    Args:
        ignore: A label that does not count; NaN is one too. Other columns of its row
            do.
        columns: Their names, for the report; None: numbers.

    Example:
        >>> RegressionMetrics(ignore=float("nan"))
        RegressionMetrics(ignore=nan, columns=None)
    """

    ignore: float | None = None
    columns: Sequence[str] | None = None

    @override
    def collection(self, shown: Shown) -> MetricCollection:
        output, y = one_tensor("output", shown.output), one_tensor("labels", shown.y)
        if not _go_together(output, y):
            raise ModelError(
                "outputs and labels must have the same shape, (B,), (B, n) or "
                f"(B, T, n), got outputs {tuple(output.shape)} for labels "
                f'{tuple(y.shape)}: for class indices use "classification"'
            )
        predictions, labels = _columns(output), _columns(y)
        check_names(self.columns, labels.shape[1], "columns")
        kept = is_counted(labels, (self.ignore, float("nan")))
        near = (_near(predictions, kept), _near(labels, kept))
        return collected({"errors": ErrorSums(*near)})

    @override
    def prepared(self, shown: Shown, output: Tree, y: Tree) -> tuple[Tensor, Tensor]:
        predictions, labels = _columns(output), _columns(y)
        counted = is_counted(labels, (self.ignore,))
        _check_numbers(labels[counted], predictions[counted])
        return predictions, torch.where(counted, labels, torch.nan)

    @override
    def values(self, shown: Shown, computed: Mapping[str, Any]) -> dict[str, Any]:
        sums = computed["errors"]
        each = errors_of(sums)
        every = np.ones(len(sums.values), dtype=bool)
        return {
            **{name: mean_of(values, every) for name, values in each.items()},
            **{f"{name}_per_column": values for name, values in each.items()},
            "count": sums.values,
        }

    @override
    def section(self, shown: Shown, values: Mapping[str, Any]) -> RegressionSection:
        numbered = range(len(values["count"]))
        names = tuple(self.columns or map(str, numbered))
        return RegressionSection(values, names)


def _go_together(output: Tensor, y: Tensor) -> bool:
    squeezed = {
        tuple(t.shape[:1]) if t.shape[1:] == (1,) else t.shape for t in (output, y)
    }
    return len(squeezed) == 1 and output.ndim > 0


def _columns(values: Tensor) -> Tensor:
    values = values.double()
    return values[:, None] if values.ndim == 1 else values.flatten(0, -2)


def _near(values_Nn: Tensor, kept_Nn: Tensor) -> Tensor:
    """The mean of what counts of each column, where that is a number, else 0."""
    near = torch.where(kept_Nn, values_Nn, torch.nan).nanmean(dim=0)
    return torch.where(near.isfinite(), near, 0).cpu()


def _check_numbers(labels: Tensor, predictions: Tensor) -> None:
    if not bool(labels.isfinite().all()):
        raise DataError(
            f"{int((~labels.isfinite()).sum())} labels are NaN or infinite: leave "
            'these rows out, or mask NaN by RegressionMetrics(ignore=float("nan"))'
        )
    if not bool(predictions.isfinite().all()):
        raise ModelError(
            f"{int((~predictions.isfinite()).sum())} of {predictions.numel()} outputs "
            "are NaN or infinite, of which nothing can be measured: look at the rows, "
            "and whether training diverged"
        )


Preset = Literal["classification", "binary", "multilabel", "regression", "calibration"]

_SETS: dict[str, type[MetricSet]] = {
    "classification": ClassificationMetrics,
    "binary": BinaryMetrics,
    "multilabel": MultilabelMetrics,
    "regression": RegressionMetrics,
    "calibration": CalibrationMetrics,
}


def metric_set_of(name: str) -> MetricSet:
    """The set of this name, with its defaults.

    Args:
        name: One of those that `Preset` lists.

    Raises:
        OptionError: If it is none.

    Example:
        >>> metric_set_of("calibration")
        CalibrationMetrics(bins=15, ignore=None, classes=None)
    """
    if name not in _SETS:
        raise OptionError(
            f"metrics by name are {', '.join(map(repr, _SETS))}, got {name!r}: give "
            "one of these, an object of daskdl.metrics, or metrics of torchmetrics"
        )
    return _SETS[name]()


_KINDS = (
    "the name of a preset, an object of daskdl.metrics, a Metric or MetricCollection "
    "of torchmetrics, a mapping of names to such metrics, or a sequence of all these"
)


def metric_sets(metrics: Any) -> tuple[MetricSet, ...]:
    """Sets of metrics, which are measured together.

    Args:
        metrics: See :meth:`daskdl.Trainer.evaluate`; not None.

    Raises:
        OptionError: If it is none of what is allowed, or two have the same name.

    Example:
        >>> from torchmetrics import MeanAbsoluteError
        >>> [type(one).__name__ for one in metric_sets(MeanAbsoluteError())]
        ['OwnMetrics']
    """
    sets: list[MetricSet] = []
    own: dict[str, Metric] = {}
    for one in _flat(metrics):
        if isinstance(one, str):
            sets.append(metric_set_of(one))
        elif isinstance(one, MetricSet):
            sets.append(one)
        else:
            _add_(own, _named(one))
    sets += own_sets(own)
    if not sets:
        raise OptionError(f"metrics must be {_KINDS}, got {metrics!r}")
    return tuple(sets)


def _flat(metrics: Any) -> Iterator[Any]:
    """What is in a sequence, however deep."""
    if isinstance(metrics, Sequence) and not isinstance(metrics, str):
        for one in metrics:
            yield from _flat(one)
    else:
        yield metrics


def _add_(own: dict[str, Metric], more: Mapping[str, Metric]) -> None:
    for name, metric in more.items():
        if name == "loss":
            raise OptionError("metrics must not have one named 'loss', which is there")
        if name in own:
            raise OptionError(
                f"metrics has two named {name!r}; name them: metrics={{'one': "
                f"{type(metric).__name__}(...), 'other': ...}}"
            )
        own[name] = metric


def _named(metrics: Any) -> dict[str, Metric]:
    if isinstance(metrics, Metric):
        return {type(metrics).__name__: metrics}
    if isinstance(metrics, MetricCollection):
        return {str(name): one for name, one in metrics.items(keep_base=False)}
    if not isinstance(metrics, Mapping):
        raise OptionError(f"metrics must be {_KINDS}, got {_shown(metrics)}")
    found: dict[str, Metric] = {}
    for name, metric in metrics.items():
        found |= _under(name, metric)
    return found


def _under(name: Any, metric: Any) -> dict[str, Metric]:
    if isinstance(metric, MetricCollection):
        return {f"{name}_{inner}": one for inner, one in _named(metric).items()}
    if not isinstance(name, str) or not isinstance(metric, Metric):
        raise OptionError(
            f"metrics[{name!r}] must be a Metric or MetricCollection of torchmetrics, "
            f"by a name, got {_shown(metric)}"
        )
    return {name: metric}


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}; create one, {value.__name__}(...)"
    return repr(value)


if TYPE_CHECKING:
    pass
