"""The argument ``metrics``: names, functions, torchmetrics, and metrics of one output.

A name selects values of a preset of `daskdl.metrics`; outputs, labels and loss
determine the preset. Functions, such as those of scikit-learn, receive all labels and
predictions at once, which are gathered on the client, up to `GATHERED_BYTES`.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat
from torchmetrics.wrappers import Running
from typing_extensions import override

from daskdl.data.batching import Tree, outline
from daskdl.data.checks import described
from daskdl.data.unreadable import USER_ERRORS
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.evaluation import report, streaming
from daskdl.evaluation.presets import (
    BinaryMetrics,
    CalibrationMetrics,
    ClassificationMetrics,
    MetricSet,
    MultilabelMetrics,
    Pair,
    RegressionMetrics,
    SampleBatch,
    checked,
    collection_of,
    is_per_class,
)
from daskdl.evaluation.report import Section, Text
from daskdl.losses import Labels, probabilities

# Limit of labels and predictions for functions: 67 million rows of class indices.
GATHERED_BYTES = 2**30

Family = Literal["classes", "numbers", "calibration", "score"]

_AVERAGES = ("macro", "micro", "weighted")
_RATES = ("precision", "recall", "f1")
_NAMES: Mapping[str, Family] = {
    **dict.fromkeys(
        (
            *("accuracy", "balanced_accuracy", "top_5_accuracy", *_RATES),
            *(f"{rate}_{average}" for rate in _RATES for average in _AVERAGES),
            *("specificity", "mcc", "cohen_kappa", "roc_auc", "average_precision"),
            *("exact_match", "confusion_matrix"),
        ),
        "classes",
    ),
    **dict.fromkeys(("mse", "mae", "rmse", "r2", "pearson"), "numbers"),
    **dict.fromkeys(("ece", "mce"), "calibration"),
}
_ALIASES = {
    "acc": "accuracy",
    "binary_accuracy": "accuracy",
    "categorical_accuracy": "accuracy",
    "sparse_categorical_accuracy": "accuracy",
    "top_k_categorical_accuracy": "top_5_accuracy",
    "sparse_top_k_categorical_accuracy": "top_5_accuracy",
    "f1_score": "f1",
    "sensitivity": "recall",
    "matthews_corrcoef": "mcc",
    "kappa": "cohen_kappa",
    "cohen_kappa_score": "cohen_kappa",
    "auc": "roc_auc",
    "auroc": "roc_auc",
    "roc_auc_score": "roc_auc",
    "average_precision_score": "average_precision",
    "mean_squared_error": "mse",
    "mean_absolute_error": "mae",
    "root_mean_squared_error": "rmse",
    "r2_score": "r2",
    "pearsonr": "pearson",
    "pearson_corrcoef": "pearson",
}
# Values that are not defined for some kinds of labels.
_SINGLE = ("balanced_accuracy", "mcc", "cohen_kappa")  # one class for each row
_UNDEFINED: Mapping[type[MetricSet], tuple[str, ...]] = {
    ClassificationMetrics: ("specificity", "exact_match"),
    BinaryMetrics: ("exact_match",),
    MultilabelMetrics: ("specificity", *_SINGLE),
}
_PRESETS: dict[str, type[MetricSet]] = {
    "classification": ClassificationMetrics,
    "binary": BinaryMetrics,
    "multilabel": MultilabelMetrics,
    "regression": RegressionMetrics,
    "calibration": CalibrationMetrics,
}
_ALLOWED = (
    "a name such as 'accuracy', a function f(y_true, y_pred), an object of "
    "daskdl.metrics, a Metric or MetricCollection of torchmetrics, a mapping from "
    "names to functions and metrics, or from outputs to lists of metrics, or a list of "
    "these"
)


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_KEYS = {_key(name): name for name in _NAMES} | {
    _key(alias): name for alias, name in _ALIASES.items()
}


def known_metric(name: str) -> str | None:
    """Return the standard name of a metric for one of its names, or None.

    Example:
        >>> known_metric("F1Score"), known_metric("top-3 accuracy"), known_metric("f7")
        ('f1', 'top_3_accuracy', None)
    """
    top = re.fullmatch(r"top([1-9]\d*)(accuracy)?", _key(name))
    return f"top_{int(top[1])}_accuracy" if top else _KEYS.get(_key(name))


def _raise_unknown(name: str) -> NoReturn:
    key = _key(name).removeprefix("neg")
    close = difflib.get_close_matches(key, _KEYS, 1, cutoff=0.6)
    known = ", ".join(map(repr, _NAMES))
    raise OptionError(
        f"metrics by name are {known}, and the presets "
        f"{', '.join(map(repr, _PRESETS))}, got {name!r}"
        f"{f': did you mean {_KEYS[close[0]]!r}?' if close else ':'} For other "
        "metrics, pass a function f(y_true, y_pred), such as those of sklearn.metrics, "
        "or a metric of torchmetrics"
    )


def _indices(labels: Labels | None, output: Tree, y: Tree) -> Tree:
    """Replace one-hot rows by class indices, if the loss takes classes."""
    one_hot = (
        labels == "classes"
        and isinstance(output, Tensor)
        and isinstance(y, Tensor)
        and output.shape == y.shape
        and output.ndim > 1
        and y.is_floating_point()
    )
    return y.argmax(1) if one_hot else y


def _suited(sample: SampleBatch, *, areas: bool = False, top: int = 0) -> MetricSet:
    """Return the preset for class labels, with one or several labels for each row."""
    output, y = sample.output, sample.y
    # Curves that are not requested keep 2 thresholds instead of all rows.
    thresholds = None if areas else 2
    if is_per_class(output, y):
        if output.shape[1] == 2 and not top:
            return BinaryMetrics(thresholds=thresholds)
        return ClassificationMetrics(top or None, thresholds)
    tensors = isinstance(output, Tensor) and isinstance(y, Tensor)
    if tensors and output.shape == y.shape and output.ndim > 1 and output.shape[1] > 1:
        return MultilabelMetrics(thresholds=thresholds)
    return BinaryMetrics(thresholds=thresholds)


def _outputs_and_labels(sample: SampleBatch) -> str:
    return f"outputs of {described(sample.output)} and labels of {described(sample.y)}"


@dataclass(frozen=True)
class _ByLabels(MetricSet):
    """Metrics whose preset is determined by outputs and labels."""

    @abstractmethod
    def _preset(self, sample: SampleBatch) -> MetricSet: ...

    @override
    def sample(
        self, loss: Any, output: Tree, y: Tree, classes: Sequence[str] | None
    ) -> SampleBatch:
        sample = super().sample(loss, output, y, classes)
        return sample._replace(y=_indices(sample.labels, output, y))

    @override
    def collection(self, sample: SampleBatch) -> MetricCollection:
        return self._preset(sample).collection(sample)

    @override
    def prepared(self, sample: SampleBatch, output: Tree, y: Tree) -> Pair:
        y = _indices(sample.labels, output, y)
        return self._preset(sample).prepared(sample, output, y)


@dataclass(frozen=True)
class NamedMetrics(_ByLabels):
    """Values of a preset, by the names that the user chose."""

    names: Mapping[str, str]  # standard names, by the name that the user chose
    family: Family  # "score": accuracy for classes, else R2, as in scikit-learn

    @override
    def _preset(self, sample: SampleBatch) -> MetricSet:
        output, y = sample.output, sample.y
        if self.family == "calibration":
            return CalibrationMetrics()
        if self.family == "score":
            classes = sample.labels in ("classes", "binary") or is_per_class(output, y)
            return _suited(sample) if classes else RegressionMetrics()
        per_class = is_per_class(output, y)
        if self.family == "numbers":
            if per_class and not y.is_floating_point():
                raise ModelError(
                    f"{self._shown} compare numbers, got scores of classes, "
                    f"{_outputs_and_labels(sample)}: for classes use 'accuracy' or 'f1'"
                )
            return RegressionMetrics()
        if sample.labels == "numbers" and not per_class:
            raise ModelError(
                f"{self._shown} compare classes, and the loss compares numbers, "
                f"{_outputs_and_labels(sample)}: for numbers use 'r2', 'mse' or 'mae'"
            )
        tops = [int(n.split("_")[1]) for n in self.names.values() if "top_" in n]
        areas = {"roc_auc", "average_precision"} & {*self.names.values()}
        preset = _suited(sample, areas=bool(areas), top=max(tops, default=0))
        undefined = _UNDEFINED[type(preset)]
        if not isinstance(preset, ClassificationMetrics):
            undefined += tuple(n for n in self.names.values() if "top_" in n)
        for alias, name in self.names.items():
            if name in undefined:
                defined = [n for n in _NAMES if n not in undefined]
                raise OptionError(
                    f"{alias!r} is not defined for {_outputs_and_labels(sample)}; "
                    "these are: "
                    + ", ".join(n for n in defined if _NAMES[n] == "classes")
                )
        return preset

    @override
    def numbers(self, sample: SampleBatch) -> list[str]:
        return [
            alias for alias, name in self.names.items() if name != "confusion_matrix"
        ]

    @property
    def _shown(self) -> str:
        return "metrics " + ", ".join(map(repr, self.names))

    @override
    def section(self, sample: SampleBatch, computed: Mapping[str, Any]) -> Section:
        values = self._preset(sample).section(sample, computed).values
        if self.family == "score":
            score = values["accuracy" if "accuracy" in values else "r2"]
            return report.user_metrics({"score": score})
        chosen = {alias: _value(values, name) for alias, name in self.names.items()}
        return report.user_metrics(chosen)


def _value(values: Mapping[str, Any], name: str) -> Any:
    """Return a value of a preset, or compute it from its confusion matrices."""
    if name in values:
        return values[name]
    if "confusion_matrices" in values:  # (L, 2, 2)
        matrices = values["confusion_matrices"]
        if name == "confusion_matrix":
            return matrices
        hits, predicted = matrices[:, 1, 1], matrices[:, :, 1].sum(axis=1)
        support = matrices[:, 1].sum(axis=1)
    else:
        matrix = values["confusion_matrix"]
        hits, predicted, support = np.diag(matrix), matrix.sum(0), matrix.sum(1)
    rates = streaming.rates(hits, predicted, support)
    if name == "balanced_accuracy":
        return streaming.mean_of(rates["recall"], support > 0)
    if name == "cohen_kappa":
        total = int(support.sum()) or math.nan
        by_chance = float((predicted / total) @ (support / total))
        return float((hits.sum() / total - by_chance) / (1 - by_chance or math.nan))
    rate, _, average = name.partition("_")
    if average == "macro":
        return streaming.mean_of(rates[rate], support + predicted > 0)
    if average == "weighted":
        return float(streaming.divided(rates[rate] @ support, support.sum()))
    return float(streaming.rates(*(n.sum() for n in (hits, predicted, support)))[rate])


class Gathered(Metric):
    """All labels and predictions, for functions; torchmetrics lacks such a metric."""

    full_state_update = False
    labels: list[Tensor]
    predictions: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("labels", "predictions"):
            self.add_state(name, [], dist_reduce_fx="cat")
        self._bytes = 0

    @override
    def update(self, predictions: Tensor, labels: Tensor) -> None:
        self._bytes += predictions.nbytes + labels.nbytes
        check_gathered(self._bytes)
        self.predictions.append(predictions)
        self.labels.append(labels)

    @override
    def compute(self) -> tuple[Any, Any]:
        labels, predictions = dim_zero_cat(self.labels), dim_zero_cat(self.predictions)
        return labels.numpy(), predictions.numpy()


def check_gathered(size: int) -> None:
    """Refuse more than `GATHERED_BYTES` of labels and predictions for functions."""
    if size > GATHERED_BYTES:
        raise DataError(
            "metrics that are functions get all labels and predictions at once, which "
            f"take more than {GATHERED_BYTES / 2**30:g} GiB: measure fewer rows, or "
            "pass metrics by name or of torchmetrics, whose memory does not grow with "
            "the rows"
        )


SCORE = NamedMetrics({}, "score")


@dataclass(frozen=True, eq=False)
class FunctionMetrics(_ByLabels):
    """Functions ``f(y_true, y_pred)``, by name."""

    functions: Mapping[str, Callable[[Any, Any], Any]]
    scored: bool  # whether the functions get probabilities instead of classes

    @override
    def _preset(self, sample: SampleBatch) -> MetricSet:
        output, y = sample.output, sample.y
        tensors = isinstance(output, Tensor) and isinstance(y, Tensor)
        numbers = sample.labels == "numbers" or (
            sample.labels is None and tensors and y.is_floating_point()
        )
        if is_per_class(output, y) or not numbers:
            return _suited(sample)
        return RegressionMetrics()

    @override
    def numbers(self, sample: SampleBatch) -> list[str]:
        return list(self.functions)

    @override
    def collection(self, sample: SampleBatch) -> MetricCollection:
        super().collection(sample)  # raises for unsuitable outputs
        return collection_of(rows=Gathered())

    @override
    def prepared(self, sample: SampleBatch, output: Tree, y: Tree) -> Pair:
        preset = self._preset(sample)
        predictions, labels = super().prepared(sample, output, y)
        if not self.scored and isinstance(preset, ClassificationMetrics):
            predictions = predictions.argmax(1)
        elif not self.scored and not isinstance(preset, RegressionMetrics):
            predictions = (predictions > 0.5).long()
        return _flat(predictions), _flat(labels)

    @override
    def section(self, sample: SampleBatch, computed: Mapping[str, Any]) -> Section:
        labels, predictions = computed["rows"]
        values = {}
        for name, function in self.functions.items():
            try:
                values[name] = plain(function(labels, predictions))
            except USER_ERRORS as error:
                raise DataError(
                    f"metric {name!r} failed on {len(labels)} labels, shape "
                    f"{labels.shape}, and predictions, shape {predictions.shape}: "
                    f"{error}"
                ) from error
        return report.user_metrics(values)


def _flat(column: Tensor) -> Tensor:
    """Return a tensor of one column as a vector."""
    single = column.ndim == 2 and column.shape[1] == 1
    return column[:, 0] if single else column


# Names of second arguments that are probabilities, and functions that take
# probabilities under another name.
_SCORES = ("y_score", "y_prob", "y_proba", "pred_decision")
_OF_SCORES = ("log_loss", "d2_log_loss_score")


def _named_function(function: Any) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    if hasattr(inner, "_score_func"):
        raise OptionError(
            f"metrics must be functions f(y_true, y_pred), got the scorer {inner!r}, "
            "which calls an estimator: pass its function, such as "
            "sklearn.metrics.f1_score"
        )
    return str(getattr(inner, "__name__", type(inner).__name__))


def _takes_scores(function: Any) -> bool:
    inner = function.func if isinstance(function, functools.partial) else function
    if getattr(inner, "__name__", None) in _OF_SCORES:
        return True
    try:
        names = [*inspect.signature(inner).parameters]
    except (TypeError, ValueError):  # of a builtin
        return False
    return len(names) > 1 and names[1] in _SCORES


@dataclass(frozen=True)
class OutputMetrics(MetricSet):
    """Metrics of one of several outputs."""

    name: str | int
    metrics: MetricSet

    @property
    @override
    def masks_nan(self) -> bool:
        return self.metrics.masks_nan

    def _pair(self, output: Tree, y: Tree) -> Pair:
        """Return the output, and its labels.

        The number of an output in a dict is its position; the labels are looked up by
        name, because a dict of labels may have another order.
        """
        name = self.name
        if isinstance(output, dict) and name not in output and isinstance(name, int):
            name = dict(enumerate(output)).get(name, name)
        output = self._of(output, name, "outputs")
        if isinstance(y, dict | tuple):  # otherwise all outputs share the labels
            y = self._of(y, name if isinstance(y, dict) else self.name, "labels")
        return output, y

    def _of(self, tree: Tree, name: str | int, what: str) -> Tree:
        try:
            if isinstance(tree, dict | tuple):
                return tree[name]  # type: ignore[index]
        except (LookupError, TypeError):
            pass
        several = isinstance(tree, dict | tuple)
        got = outline(tree) if several else f"one {type(tree).__name__}"
        raise ModelError(
            f"metrics[{self.name!r}] are metrics of the output {self.name!r}, and the "
            f"{what} are {got}: use the names in a dict of {what}, or numbers from 0; "
            "for a single output, pass a list of metrics"
        )

    @override
    def sample(
        self, loss: Any, output: Tree, y: Tree, classes: Sequence[str] | None
    ) -> SampleBatch:
        loss_of = getattr(loss, "loss_of", None)  # of losses by output
        loss = None if loss_of is None else loss_of(self.name)
        output, y = self._pair(output, y)
        return self.metrics.sample(loss, output, y, None)

    @override
    def numbers(self, sample: SampleBatch) -> list[str]:
        return [f"{self.name}_{name}" for name in self.metrics.numbers(sample)]

    @override
    def collection(self, sample: SampleBatch) -> MetricCollection:
        return self.metrics.collection(sample)

    @override
    def prepared(self, sample: SampleBatch, output: Tree, y: Tree) -> Pair:
        output, y = self._pair(output, y)
        return self.metrics.prepared(sample, output, y)

    @override
    def section(self, sample: SampleBatch, computed: Mapping[str, Any]) -> Section:
        section = self.metrics.section(sample, computed)
        return dataclasses.replace(
            section,
            values={
                f"{self.name}_{name}": value for name, value in section.values.items()
            },
            blocks=[Text(f"Output {self.name}", "h4"), *section.blocks],
            names=(),
        )


@dataclass(frozen=True, eq=False)
class UserMetrics(MetricSet):
    """The user's torchmetrics, by name."""

    metrics: Mapping[str, Metric]  # in the order of the report; never updated
    # Whether to update with probabilities: torchmetrics treats scores as logits if any
    # score of an update is outside [0, 1], so the result would depend on the batches.
    scored: bool

    @override
    def numbers(self, sample: SampleBatch) -> list[str]:
        return list(self.metrics)  # of two rows, some cannot be computed

    @override
    def collection(self, sample: SampleBatch) -> MetricCollection:
        metrics = {name: metric.clone().cpu() for name, metric in self.metrics.items()}
        for metric in metrics.values():
            metric.reset()
        return collection_of(**metrics)

    @override
    def prepared(self, sample: SampleBatch, output: Tree, y: Tree) -> Pair:
        tensors = isinstance(output, Tensor) and isinstance(y, Tensor)
        if not self.scored or not tensors or not output.is_floating_point():
            return output, y
        over_classes = output.ndim == y.ndim + 1
        scores = probabilities(output, sample.scale, over_classes=over_classes)
        return checked(scores, sample.scale), y

    @override
    def section(self, sample: SampleBatch, computed: Mapping[str, Any]) -> Section:
        in_order = [name for name in self.metrics if name in computed]
        # A metric may return several values.
        names = dict.fromkeys([*in_order, *computed])
        return report.user_metrics({name: plain(computed[name]) for name in names})


def plain(value: Any) -> Any:
    """Replace tensors by numbers and numpy arrays."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        return value.item() if value.ndim == 0 else value.detach().cpu().numpy()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def is_scored(metric: Metric) -> bool:
    """Whether a metric, or a metric in it, is of torchmetrics.classification."""
    return any(
        base.__module__.startswith("torchmetrics.classification.")
        for module in metric.modules()
        for base in type(module).__mro__
    )


def metric_sets(metrics: Any) -> tuple[MetricSet, ...]:
    """Return the sets of metrics for the argument ``metrics`` of `evaluate`."""
    sets: list[MetricSet] = []
    names: dict[tuple[Family, int], dict[str, str]] = {}
    user: dict[str, Any] = {}
    for alias, metric in _metrics_by_name(metrics):
        if isinstance(metric, MetricSet):
            sets.append(metric)
        elif isinstance(metric, str):
            top = int(metric.split("_")[1]) if metric.startswith("top_") else 0
            names.setdefault((_NAMES.get(metric, "classes"), top), {})[alias] = metric
        else:
            _check_user_metric(alias, metric, user)
            user[alias] = metric
    sets += [NamedMetrics(aliases, family) for (family, _), aliases in names.items()]
    groups: dict[Any, dict[str, Any]] = {}
    for name, metric in user.items():
        kind: tuple[Any, bool] = FunctionMetrics, _takes_scores(metric)
        if isinstance(metric, Metric):
            kind = UserMetrics, is_scored(metric)
        groups.setdefault(kind, {})[name] = metric
    sets += [kind(group, scored) for (kind, scored), group in groups.items()]
    if not sets:
        raise OptionError(f"metrics must be {_ALLOWED}, got {metrics!r}")
    return tuple(sets)


def _check_user_metric(name: str, metric: Any, metrics: Mapping[str, Any]) -> None:
    """Refuse a metric that cannot be measured together with `metrics`."""
    if name == "loss":
        raise OptionError("metrics must not include the name 'loss', which is reserved")
    if name in metrics:
        kind = type(metric).__name__
        shown = f"{kind}(...)" if isinstance(metric, Metric) else name
        raise OptionError(
            f"two metrics are named {name!r}; give them names: "
            f"metrics={{'a': {shown}, 'b': ...}}"
        )
    modules = metric.modules() if isinstance(metric, Metric) else ()
    if any(isinstance(module, Running) for module in modules):
        raise OptionError(
            f"metrics[{name!r}] depends on the order of updates, but parts are "
            "measured in parallel; pass the metric without Running"
        )


def _metrics_by_name(metrics: Any) -> Iterator[tuple[str, Any]]:
    """Yield sets, standard names, torchmetrics and functions, by the user's names."""
    if isinstance(metrics, MetricSet):
        yield "", metrics
    elif isinstance(metrics, str):
        preset = _PRESETS.get(metrics)
        yield (
            metrics,
            preset() if preset else known_metric(metrics) or _raise_unknown(metrics),
        )
    elif isinstance(metrics, Metric):
        yield type(metrics).__name__, metrics
    elif isinstance(metrics, MetricCollection):
        yield from ((str(n), metric) for n, metric in metrics.items(keep_base=False))
    elif isinstance(metrics, Mapping):
        for name, metric in metrics.items():
            yield from _item(name, metric)
    elif isinstance(metrics, Sequence):
        for metric in metrics:
            yield from _metrics_by_name(metric)
    elif _is_one(metrics):
        yield _named_function(metrics), metrics
    else:
        raise OptionError(f"metrics must be {_ALLOWED}, got {_shown(metrics)}")


def _item(name: Any, metric: Any) -> Iterator[tuple[str, Any]]:
    """Yield the metrics of an item of a mapping."""
    several = isinstance(metric, str | Sequence | MetricSet | Mapping)
    if isinstance(metric, MetricCollection):
        yield from (
            (f"{name}_{inner}", member) for inner, member in _metrics_by_name(metric)
        )
    elif isinstance(name, str | int) and several:
        yield from (("", OutputMetrics(name, member)) for member in metric_sets(metric))
    elif isinstance(name, str) and _is_one(metric):
        if not isinstance(metric, Metric):
            _named_function(metric)  # raises for a scorer
        yield name, metric
    else:
        raise OptionError(
            f"metrics[{name!r}] must be a function f(y_true, y_pred), a Metric or "
            "MetricCollection of torchmetrics, by a name, or a list of metrics of the "
            f"output of that name, got {_shown(metric)}"
        )


def _is_one(metric: Any) -> bool:
    """Whether an object is a metric of torchmetrics or a function."""
    return callable(metric) and not isinstance(metric, type)


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}; create one, {value.__name__}(...)"
    return repr(value)
