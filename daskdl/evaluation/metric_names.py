"""Parses the argument ``metrics``: names, functions, torchmetrics, metrics by output.

A name selects a value of a preset of `daskdl.metrics`; outputs, labels and loss
determine the preset. Functions, such as those of scikit-learn, receive all labels and
predictions at once, so the client gathers up to `GATHERED_BYTES` of them.
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
from daskdl.keras.compiled import OutputLosses
from daskdl.losses import Labels, probabilities

# Most labels and predictions for functions: 67 million rows of class indices.
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
# Values that a preset cannot compute.
_UNDEFINED: Mapping[type[MetricSet], tuple[str, ...]] = {
    ClassificationMetrics: ("specificity", "exact_match"),
    BinaryMetrics: ("exact_match",),
    MultilabelMetrics: ("specificity", "balanced_accuracy", "mcc", "cohen_kappa"),
}
_PRESETS: dict[str, type[MetricSet]] = {
    "classification": ClassificationMetrics,
    "binary": BinaryMetrics,
    "multilabel": MultilabelMetrics,
    "regression": RegressionMetrics,
    "calibration": CalibrationMetrics,
}
_ALLOWED = (
    "a name such as 'accuracy', a function f(y_true, y_pred), a preset of "
    "daskdl.metrics, a Metric or MetricCollection of torchmetrics, a mapping from "
    "names to functions or metrics, a mapping from outputs to lists of metrics, or a "
    "list of these"
)


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_KEYS = {_key(name): name for name in _NAMES} | {
    _key(alias): name for alias, name in _ALIASES.items()
}


def known_metric(name: str) -> str | None:
    """Return the standard name of a metric, or None if the name is unknown.

    Example:
        >>> known_metric("F1Score"), known_metric("top-3 accuracy"), known_metric("f7")
        ('f1', 'top_3_accuracy', None)
    """
    top = re.fullmatch(r"top([1-9]\d*)(accuracy)?", _key(name))
    return f"top_{int(top[1])}_accuracy" if top else _KEYS.get(_key(name))


def _raise_unknown(name: str) -> NoReturn:
    key = _key(name).removeprefix("neg")
    close = difflib.get_close_matches(key, _KEYS, 1, cutoff=0.6)
    suggestion = f"; did you mean {_KEYS[close[0]]!r}?" if close else "."
    raise OptionError(
        f"metrics by name are {', '.join(map(repr, _NAMES))}, and the presets "
        f"{', '.join(map(repr, _PRESETS))}, got {name!r}{suggestion} For any other "
        "metric, pass a function f(y_true, y_pred), such as those of sklearn.metrics, "
        "or a metric of torchmetrics"
    )


def _class_indices(labels: Labels | None, output: Tree, y: Tree) -> Tree:
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


def _class_preset(
    sample: SampleBatch, *, areas: bool = False, top: int = 0
) -> MetricSet:
    """Return the preset for class labels; `areas`: with exact areas under curves."""
    output, y = sample.output, sample.y
    # Curves that nobody requests need 2 thresholds instead of all rows.
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
class _InferredMetrics(MetricSet):
    """Metrics whose preset follows from outputs and labels."""

    @abstractmethod
    def _preset(self, sample: SampleBatch) -> MetricSet: ...

    @override
    def sample(
        self, loss: Any, output: Tree, y: Tree, classes: Sequence[str] | None
    ) -> SampleBatch:
        sample = super().sample(loss, output, y, classes)
        return sample._replace(y=_class_indices(sample.labels, output, y))

    @override
    def collection(self, sample: SampleBatch) -> MetricCollection:
        return self._preset(sample).collection(sample)

    @override
    def prepared(self, sample: SampleBatch, output: Tree, y: Tree) -> Pair:
        y = _class_indices(sample.labels, output, y)
        return self._preset(sample).prepared(sample, output, y)


@dataclass(frozen=True)
class NamedMetrics(_InferredMetrics):
    """Values of a preset, under the user's names."""

    names: Mapping[str, str]  # standard names, by the user's names
    family: Family  # "score": accuracy for classes, else R2, as in scikit-learn

    @override
    def _preset(self, sample: SampleBatch) -> MetricSet:
        output, y = sample.output, sample.y
        if self.family == "calibration":
            return CalibrationMetrics()
        if self.family == "score":
            classes = sample.labels in ("classes", "binary") or is_per_class(output, y)
            return _class_preset(sample) if classes else RegressionMetrics()
        per_class = is_per_class(output, y)
        shown = "metrics " + ", ".join(map(repr, self.names))
        if self.family == "numbers":
            if per_class and not y.is_floating_point():
                raise ModelError(
                    f"{shown} compare numbers, got scores of classes, "
                    f"{_outputs_and_labels(sample)}; for classes use 'accuracy' or 'f1'"
                )
            return RegressionMetrics()
        if sample.labels == "numbers" and not per_class:
            raise ModelError(
                f"{shown} compare classes, but the loss compares numbers, "
                f"{_outputs_and_labels(sample)}; for numbers use 'r2', 'mse' or 'mae'"
            )
        tops = [name for name in self.names.values() if name.startswith("top_")]
        top = max((int(name.split("_")[1]) for name in tops), default=0)
        areas = {"roc_auc", "average_precision"} & {*self.names.values()}
        preset = _class_preset(sample, areas=bool(areas), top=top)
        undefined = {*_UNDEFINED[type(preset)]}
        if not isinstance(preset, ClassificationMetrics):
            undefined |= {*tops}
        for alias, name in self.names.items():
            if name in undefined:
                defined = [
                    known
                    for known, family in _NAMES.items()
                    if family == "classes" and known not in undefined
                ]
                raise OptionError(
                    f"{alias!r} is not defined for {_outputs_and_labels(sample)}; use "
                    f"one of {', '.join(defined)}"
                )
        return preset

    @override
    def numbers(self, sample: SampleBatch) -> list[str]:
        return [
            alias for alias, name in self.names.items() if name != "confusion_matrix"
        ]

    @override
    def section(self, sample: SampleBatch, computed: Mapping[str, Any]) -> Section:
        values = self._preset(sample).section(sample, computed).values
        if self.family == "score":
            score = values["accuracy" if "accuracy" in values else "r2"]
            return report.user_metrics({"score": score})
        chosen = {alias: _value(values, name) for alias, name in self.names.items()}
        return report.user_metrics(chosen)


def _value(values: Mapping[str, Any], name: str) -> Any:
    """Return a value of a preset, or compute it from the confusion matrices."""
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
        chance = float((predicted / total) @ (support / total))
        return float((hits.sum() / total - chance) / (1 - chance or math.nan))
    rate, _, average = name.partition("_")
    if average == "macro":
        return streaming.mean_of(rates[rate], support + predicted > 0)
    if average == "weighted":
        return float(streaming.divided(rates[rate] @ support, support.sum()))
    pooled = streaming.rates(hits.sum(), predicted.sum(), support.sum())
    return float(pooled[rate])


class Gathered(Metric):
    """All labels and predictions, for functions; torchmetrics has no such metric."""

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


def check_gathered(nbytes: int) -> None:
    """Raise a DataError for more than `GATHERED_BYTES` of labels and predictions."""
    if nbytes > GATHERED_BYTES:
        raise DataError(
            "functions as metrics receive all labels and predictions at once, but "
            f"these take more than {GATHERED_BYTES / 2**30:g} GiB; measure fewer rows, "
            "or pass metrics by name or metrics of torchmetrics, which need constant "
            "memory"
        )


SCORE = NamedMetrics({}, "score")


@dataclass(frozen=True, eq=False)
class FunctionMetrics(_InferredMetrics):
    """Functions ``f(y_true, y_pred)``, by name."""

    functions: Mapping[str, Callable[[Any, Any], Any]]
    scored: bool  # whether the functions take probabilities instead of classes

    @override
    def _preset(self, sample: SampleBatch) -> MetricSet:
        output, y = sample.output, sample.y
        tensors = isinstance(output, Tensor) and isinstance(y, Tensor)
        numbers = sample.labels == "numbers" or (
            sample.labels is None and tensors and y.is_floating_point()
        )
        if is_per_class(output, y) or not numbers:
            return _class_preset(sample)
        return RegressionMetrics()

    @override
    def numbers(self, sample: SampleBatch) -> list[str]:
        return list(self.functions)

    @override
    def collection(self, sample: SampleBatch) -> MetricCollection:
        super().collection(sample)  # raises an error for unsuitable outputs
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
                    f"metric {name!r} failed on labels of shape {labels.shape} and "
                    f"predictions of shape {predictions.shape}: {error}"
                ) from error
        return report.user_metrics(values)


def _flat(rows: Tensor) -> Tensor:
    """Return a vector instead of a single column."""
    return rows[:, 0] if rows.ndim == 2 and rows.shape[1] == 1 else rows


# Second parameters that take probabilities, and functions of scikit-learn that take
# probabilities as y_pred.
_PROBABILITY_PARAMETERS = ("y_score", "y_prob", "y_proba", "pred_decision")
_PROBABILITY_FUNCTIONS = ("log_loss", "d2_log_loss_score")


def _name_of(function: Any) -> str:
    """Return the name of a function; raise an OptionError for a scorer."""
    inner = function.func if isinstance(function, functools.partial) else function
    # Scorers have this private attribute; a public test would import scikit-learn.
    if hasattr(inner, "_score_func"):
        raise OptionError(
            "metrics must be functions f(y_true, y_pred), but a scorer calls an "
            f"estimator, got {inner!r}; pass the scorer's function, such as "
            "sklearn.metrics.f1_score"
        )
    return str(getattr(inner, "__name__", type(inner).__name__))


def _takes_probabilities(function: Any) -> bool:
    inner = function.func if isinstance(function, functools.partial) else function
    if getattr(inner, "__name__", None) in _PROBABILITY_FUNCTIONS:
        return True
    try:
        names = [*inspect.signature(inner).parameters]
    except (TypeError, ValueError):  # a builtin may have no signature
        return False
    return len(names) > 1 and names[1] in _PROBABILITY_PARAMETERS


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
        """Return this output, and its labels.

        A number selects an output of a dict by position, but its labels by name,
        because a dict of labels may have another order.
        """
        name = self.name
        if isinstance(output, dict) and name not in output and isinstance(name, int):
            name = dict(enumerate(output)).get(name, name)
        output = self._selected(output, name, "outputs")
        if isinstance(y, dict | tuple):  # otherwise all outputs share the labels
            y = self._selected(y, name if isinstance(y, dict) else self.name, "labels")
        return output, y

    def _selected(self, tree: Tree, name: str | int, what: str) -> Tree:
        several = isinstance(tree, dict | tuple)
        try:
            if several:
                return tree[name]
        except (LookupError, TypeError):
            pass
        got = outline(tree) if several else f"one {type(tree).__name__}"
        raise ModelError(
            f"metrics[{self.name!r}] selects the output {self.name!r}, but the {what} "
            f"are {got}; use the names in a dict of {what}, or numbers from 0; for a "
            "single output, pass a list of metrics"
        )

    @override
    def sample(
        self, loss: Any, output: Tree, y: Tree, classes: Sequence[str] | None
    ) -> SampleBatch:
        loss = loss.loss_of(self.name) if isinstance(loss, OutputLosses) else None
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
    """The user's metrics of torchmetrics, by name."""

    metrics: Mapping[str, Metric]  # in the order of the report; never updated
    # Whether to update with probabilities: torchmetrics treats scores as logits if any
    # score of an update is outside [0, 1], so the result would depend on the batches.
    scored: bool

    @override
    def numbers(self, sample: SampleBatch) -> list[str]:
        return list(self.metrics)  # some cannot be computed from two rows

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
        # The values of metrics that return several of them have other names.
        in_order = [name for name in self.metrics if name in computed]
        names = dict.fromkeys([*in_order, *computed])
        return report.user_metrics({name: plain(computed[name]) for name in names})


def plain(value: Any) -> Any:
    """Convert tensors to Python numbers and numpy arrays, also in containers."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        return value.item() if value.ndim == 0 else value.detach().cpu().numpy()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _classifies(metric: Metric) -> bool:
    """Whether a metric, or a nested metric, belongs to torchmetrics.classification."""
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
        if isinstance(metric, Metric):
            group: tuple[Any, bool] = UserMetrics, _classifies(metric)
        else:
            group = FunctionMetrics, _takes_probabilities(metric)
        groups.setdefault(group, {})[name] = metric
    sets += [kind(members, scored) for (kind, scored), members in groups.items()]
    if not sets:
        raise OptionError(f"metrics must be {_ALLOWED}, got {metrics!r}")
    return tuple(sets)


def _check_user_metric(name: str, metric: Any, metrics: Mapping[str, Any]) -> None:
    """Raise an OptionError if a metric cannot be measured together with `metrics`."""
    if name == "loss":
        raise OptionError("metrics must not include the name 'loss', which is reserved")
    if name in metrics:
        shown = f"{type(metric).__name__}(...)" if isinstance(metric, Metric) else name
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
    """Yield metric sets, standard names, metrics and functions, by the user's names."""
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
            yield from _metrics_of_item(name, metric)
    elif isinstance(metrics, Sequence):
        for metric in metrics:
            yield from _metrics_by_name(metric)
    elif _is_function(metrics):
        yield _name_of(metrics), metrics
    else:
        raise OptionError(f"metrics must be {_ALLOWED}, got {_shown(metrics)}")


def _metrics_of_item(name: Any, metric: Any) -> Iterator[tuple[str, Any]]:
    """Yield the metrics of an item of a mapping."""
    several = isinstance(metric, str | Sequence | MetricSet | Mapping)
    if isinstance(metric, MetricCollection):
        yield from (
            (f"{name}_{inner}", member) for inner, member in _metrics_by_name(metric)
        )
    elif isinstance(name, str | int) and several:
        yield from (("", OutputMetrics(name, member)) for member in metric_sets(metric))
    elif isinstance(name, str) and _is_function(metric):
        if not isinstance(metric, Metric):
            _name_of(metric)  # raises an OptionError for a scorer
        yield name, metric
    else:
        raise OptionError(
            f"metrics[{name!r}] must be a function f(y_true, y_pred), a Metric or "
            "MetricCollection of torchmetrics under a name, or a list of metrics of "
            f"the output with this name, got {_shown(metric)}"
        )


def _is_function(metric: Any) -> bool:
    """Whether an object can be called, as a metric of torchmetrics can."""
    return callable(metric) and not isinstance(metric, type)


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}; create one, {value.__name__}(...)"
    return repr(value)
