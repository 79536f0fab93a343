"""Loss, accuracy and metrics of a model on data, on a cluster or in this process.

Parts are scored separately, and their sums, counts and metric states are merged. Means
are never merged, so the result does not depend on the partitioning. This module
computes loss and accuracy without torchmetrics, because replicas validate with them and
do not load torchmetrics.
"""

import contextlib
import copy
import functools
import logging
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from distributed import Client
from torch import Tensor, nn
from typing_extensions import override

from daskdl.data import batching, checks, unreadable
from daskdl.data.batching import (
    Batch,
    Rows,
    RowSpec,
    Transform,
    Tree,
    Weighted,
    batches,
)
from daskdl.data.checks import LabelCheck, ShapeCheck
from daskdl.data.distribute import map_parts, workers_of
from daskdl.data.inputs import OnBad, ReadOptions, infer_metadata, weighted_source
from daskdl.data.source import Source
from daskdl.errors import DataError, OptionError, short_tracebacks
from daskdl.evaluation.report import Evaluation
from daskdl.keras.compiled import OutputLosses, resolved_loss
from daskdl.losses import aligned, labels_and_scale
from daskdl.objective import (
    Logs,
    Loss,
    ModelLoss,
    Objective,
    OwnStep,
    batch_loss_and_logs,
    call,
    is_sum,
    model_loss,
    on_device,
    scored,
)
from daskdl.observe.history import check_log_names
from daskdl.process_settings import (
    device_name,
    device_to_evaluate_on,
    freed_memory_kept,
)
from daskdl.serialization import Packed, PackedModel
from daskdl.util import client_or_process

if TYPE_CHECKING:  # torchmetrics loads SciPy and matplotlib, about 90 MB
    from daskdl.evaluation.metric_state import (
        MetricAccumulator,
        MetricSpec,
        PartStates,
    )
    from daskdl.evaluation.presets import MetricSet

T = TypeVar("T")
logger = logging.getLogger(__name__)


@short_tracebacks
def evaluate(
    model: nn.Module,
    X: Any,
    y: Any = None,
    *,
    loss: Loss | None = None,
    metrics: Any = None,
    sample_weight: Any = None,
    client: Client | Literal[False] | None = None,
    batch_size: int | None = None,
    transform: Transform | None = None,
    label: Any = None,
    on_bad_batch: OnBad = "raise",
    device: str | torch.device = "auto",
) -> Evaluation:
    """Evaluate any model in one pass, as :meth:`Trainer.evaluate` does.

    Args:
        model: Any module, in training or evaluation mode; not changed.
        X: Inputs, or inputs and labels, of any type that :meth:`Trainer.fit` takes.
        y: Labels, or None if `X` includes them.
        loss: ``loss(model(x), labels)``, which also determines how outputs are
            interpreted, for example as logits or as probabilities. None: no loss is
            measured, and the first batch determines the interpretation.
        metrics: See :meth:`Trainer.evaluate`.
        sample_weight: See :meth:`Trainer.evaluate`.
        client: A synchronous `distributed.Client`. None: the default client, or a
            temporary `LocalCluster` if there is none. False: this process.
        batch_size: Rows per forward pass, >= 1. None: the batch size of a `DataLoader`,
            or 64.
        transform: Applied to each batch, see :class:`Trainer`.
        label: Column or key of `X` that contains the labels, see :meth:`Trainer.fit`.
        on_bad_batch: What happens to unreadable parts, see :meth:`Trainer.fit`.
        device: Device of the model on each worker: a torch device; or ``"auto"``: CUDA.
            Workers without CUDA use their CPU.

    Returns:
        A dict of the values over all rows, by name, which prints as a report.

    Raises:
        DataError: If the data cannot be used.
        ModelError: If the model does not fit the data.
        OptionError: If another argument cannot be used, or there is nothing to
            measure.

    Example:
        >>> import torch
        >>> rows, labels = torch.eye(2), torch.tensor([0, 1])
        >>> evaluate(nn.Identity(), rows, labels, client=False)
        {'accuracy': 1.0}
    """
    X, read = ReadOptions.scoring(X, batch_size, transform, label, on_bad_batch)
    return evaluate_model(
        model,
        X,
        y,
        resolved_loss(loss),
        metrics,
        sample_weight,
        read=read,
        client=client,
        device=device,
    )


def evaluate_model(
    model: nn.Module,
    X: Any,
    y: Any,
    objective: Objective | None,
    metrics: Any = None,
    sample_weight: Any = None,
    *,
    read: ReadOptions,
    client: Client | Literal[False] | None,
    device: str | torch.device = "auto",
    classes: Sequence[str] | None = None,
) -> Evaluation:
    """Evaluate a model with a loss or a step; see `Trainer.evaluate`."""
    device = device_name(device)
    labelled = not isinstance(objective, OwnStep)
    if sample_weight is not None:
        if metrics is not None:
            raise OptionError(
                "sample_weight applies only to loss and accuracy, so it cannot be "
                "combined with metrics=; evaluate without metrics, or without weights"
            )
        objective = objective and checks.WeightedLoss(objective)
        y, read = Weighted(y, sample_weight), read.weighted()
    sets: Sequence[MetricSet] = ()
    if metrics is not None:
        sets = metrics_for(objective, metrics)
    checks.check_module(model)
    if objective is not None:
        checks.check_loss(objective)
    source = weighted_source(X, y, read, labelled=labelled, classes=classes)
    checks.check_same_classes(source, classes)
    with client_or_process(client) as cluster:
        if source.first_rows is None:
            source = infer_metadata(source, cluster, skips=read.skips)
            checks.check_same_classes(source, classes)
        packed = PackedModel(model, here=cluster is False)
        run = checks.dry_run(
            packed.unpack(), source.first_rows, read.transform, objective
        )
        check_log_names(run.logs)
        output, first_labels = scored(run.output), run.y
        specs: tuple[MetricSpec, ...] = ()
        if sets:
            from daskdl.evaluation.metric_state import metric_specs

            specs = metric_specs(
                sets, objective, output, first_labels, source.classes or classes
            )
        elif objective is None and not checks.is_classification(output, first_labels):
            raise OptionError(
                "without loss and metrics there is nothing to measure, because the "
                "labels are not class indices; pass loss=, metrics=, or both"
            )
        masked = run.classes is None and any(spec.metrics.masks_nan for spec in specs)
        label_check = None if masked else run.labels
        if label_check is not None:
            label_check.check_source(source)
        argument = "loss" if labelled else "step"
        scorer = PartScorer(
            packed,
            None if objective is None else Packed(objective, argument),
            read.batch_size,
            read.transform,
            label_check,
            read.skips,
            device,
            batching.row_spec(run.rows),
            not specs and has_accuracy(objective, output, first_labels),
            Packed(specs, "metrics") if specs else None,
        )
        mergers = [spec.merger() for spec in specs]
        scores: dict[int, Score] = {}
        for part, (score, states) in map_split(source, scorer, cluster):
            scores[part] = score
            for merger, part_states in zip(mergers, states, strict=True):
                merger.add_(part, part_states)
    warn_of_unscored(read, [part for part in scores if not scores[part].examples])
    # Added in the order of the parts, so that rounding errors are reproducible.
    values = sum((scores[part] for part in sorted(scores)), Score()).metrics()
    if objective is None:
        del values["loss"]
    sections = [
        spec.section(merger) for spec, merger in zip(specs, mergers, strict=True)
    ]
    return Evaluation(values, sections)


def metrics_for(objective: Objective | None, metrics: Any) -> "Sequence[MetricSet]":
    """Return the metric sets for an objective; raise an OptionError for a step."""
    if type(objective) is OwnStep:
        raise OptionError(
            "metrics need the model's outputs, which a step does not return; log "
            "numbers in the step, or measure model(x) with "
            "daskdl.evaluate(trainer.model_, ..., metrics=...)"
        )
    from daskdl.evaluation.metric_names import metric_sets

    return metric_sets(metrics)


def map_split(
    source: Source,
    function: Callable[[Source, int], T],
    client: Client | Literal[False],
) -> Iterator[tuple[int, T]]:
    """Call a function with each part, after splitting streams among the workers."""
    if client is not False:
        source = source.divided(len(workers_of(client)))
    return map_parts(source, function, client, send=True)


def warn_of_unscored(read: ReadOptions, parts: Sequence[int]) -> None:
    """Warn of parts without readable rows; the workers' logs contain the reasons."""
    if read.skips and parts:
        logger.warning("%s parts had no rows to score: %s", len(parts), sorted(parts))


@dataclass(frozen=True)
class Scorer:
    """Picklable: scores parts with a model and an objective, in any process."""

    model: PackedModel
    objective: Packed[Objective] | None  # None: the loss is 0
    batch_size: int
    transform: Transform | None
    label_check: LabelCheck | None  # None: labels are not checked
    skips: bool  # whether unreadable data are left out
    device: str  # see `device_to_evaluate_on`

    def unpacked(self) -> tuple[nn.Module, Any, torch.device]:
        """Return this thread's module, the objective, and the device of both."""
        device = device_to_evaluate_on(self.device)
        module = self.model.module(lambda copy: copy.eval().to(device))
        if self.objective is None:
            return module, None, device
        objective = self.objective.shared(lambda copy: on_device(copy, device))
        return module, objective, device


def without_gradients(objective: Objective | None) -> Any:
    """Return a context without gradients, which a step may enable again."""
    return torch.no_grad() if isinstance(objective, OwnStep) else torch.inference_mode()


@dataclass(frozen=True)
class PartScorer(Scorer):
    """Scores a part by loss, accuracy and metrics."""

    row_spec: RowSpec  # of the rows of the dry run
    accuracy: bool  # whether to count correct predictions
    specs: "Packed[tuple[MetricSpec, ...]] | None"

    def __call__(
        self, source: Source, part: int
    ) -> "tuple[Score, tuple[PartStates, ...]]":
        """Return the score of a part, and the states of each set of metrics."""
        module, objective, device = self.unpacked()
        shape_check = ShapeCheck(self.row_spec, self.transform)

        def check(rows: Rows, name: str) -> None:
            if self.label_check is not None:
                self.label_check.check(rows[1], name)
            if not isinstance(objective, OwnStep):
                shape_check.check(module, device, rows, name)

        readable = unreadable.stream_readable(
            source, part, self.batch_size, check, self.skips
        )
        transformed = batches(map(batching.all_rows, readable), self.batch_size)
        if self.transform is not None:
            transformed = map(self.transform, transformed)
        with freed_memory_kept(), without_gradients(objective):
            accumulator = self._accumulator(source.name(part))
            score = score_batches(
                module,
                objective,
                transformed,
                device,
                None if accumulator is None else accumulator.add_,
                accuracy=self.accuracy,
            )
            return score, accumulator.states() if accumulator else ()

    def _accumulator(self, name: str) -> "MetricAccumulator | None":
        if self.specs is None:
            return None
        from daskdl.evaluation.metric_state import MetricAccumulator

        return MetricAccumulator(self.specs.shared(), name)


Sums = Mapping[str, tuple[float, int]]  # sum over rows and number of rows, by name


def add_sums(left: Sums, right: Sums) -> Sums:
    """Return the sums over the rows of both."""
    sums = dict(left)
    for name, (total, rows) in right.items():
        left_total, left_rows = sums.get(name, (0.0, 0))
        sums[name] = left_total + total, left_rows + rows
    return sums


def means(sums: Sums) -> dict[str, float]:
    """Return the means over the rows, by name."""
    return {name: total / rows for name, (total, rows) in sums.items()}


class LogSums:
    """Sums of a step's logs, on its device; only `take` waits for an accelerator."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, int]] = {}

    def add(self, logs: Logs, rows: int) -> None:
        """Add the logs of a batch, which are means over its rows."""
        if not logs.keys() <= self._sums.keys():
            check_log_names(logs)
        for name, value in logs.items():
            if isinstance(value, Tensor):
                value = value.detach().double().reshape(())
            earlier_total, earlier_rows = self._sums.get(name, (0.0, 0))
            self._sums[name] = earlier_total + value * rows, earlier_rows + rows

    def take(self) -> Sums:
        """Return the sums since the last call, and start again from 0."""
        sums, self._sums = self._sums, {}
        return {name: (float(total), rows) for name, (total, rows) in sums.items()}


class Score(NamedTuple):
    """Loss, accuracy and logs of some rows, as sums that can be added."""

    loss_sum: float = 0.0
    correct: float = 0  # number or weight of the correctly predicted labels
    labels: float = 0  # number or weight of the counted labels; 0: no accuracy
    examples: int = 0  # number of rows
    # Weight of the rows in the mean loss, minus their number: negative if the loss
    # ignores labels or class weights are below 1, positive if rows have several labels.
    surplus: float = 0.0
    logs: Mapping[str, tuple[float, int]] = {}

    @override
    def __add__(self, score: "Score") -> "Score":  # type: ignore[override]
        sums = map(operator.add, self[:-1], score[:-1])
        return Score._make([*sums, add_sums(self.logs, score.logs)])

    def metrics(self) -> dict[str, float]:
        """Return the mean loss (NaN if all rows are ignored), accuracy, and logs."""
        if not self.examples:
            raise DataError("no examples were scored")
        weight = self.examples + self.surplus
        metrics = {"loss": self.loss_sum / weight if weight else math.nan}
        if self.labels:
            metrics["accuracy"] = self.correct / self.labels
        return metrics | means(self.logs)


def score_batches(
    module: nn.Module,
    loss: Objective | None,
    batches: Iterable[Batch],
    device: torch.device | str,
    observe: Callable[[Tree, Tree], None] | None = None,
    *,
    accuracy: bool = True,
) -> Score:
    """Score a module on batches in evaluation mode; restore its modes afterwards.

    This uses `no_grad` rather than inference mode, because a module in training must
    not cache tensors of inference mode.

    Args:
        module: On `device`.
        loss: None: the loss is 0.
        batches: Pairs of inputs and labels, on any device.
        device: Where the batches are scored.
        observe: Called with the outputs and the labels of each batch.
        accuracy: Whether to count correct predictions, if labels are classes.
    """
    total, log_sums = Score(), LogSums()
    dtype = batching.floating_dtype(module)
    with _evaluating(module), torch.no_grad():
        for x, y in batches:
            batch = batching.to_device(x, y, device, dtype)
            rows, surplus = batching.length(batch), 0.0
            if isinstance(loss, ModelLoss):
                mean, output, y = model_loss(module, batch)
                loss_sum = mean.item() * rows
            elif isinstance(loss, OwnStep):
                mean, logs = batch_loss_and_logs(loss, module, batch)
                log_sums.add(logs, rows)
                total += Score(mean.item() * rows, examples=rows)
                continue
            else:
                x, y = batch
                output = scored(call(module, x))
                loss_sum, surplus = _loss_sum(loss, output, y, rows)
            correct: float = 0
            labels: float = 0
            weight: Tensor | int = 1
            if isinstance(y, Weighted):
                y, weight = y.labels, y.weight.double()
            predicted = right_labels(loss, output, y) if accuracy else None
            if observe is not None:
                observe(*aligned(loss, output, y))
            if predicted is not None:
                right, counted = predicted
                if isinstance(weight, Tensor):
                    weight = weight.reshape(-1, *[1] * (right.ndim - 1))
                correct = (right & counted).mul(weight).sum().item()
                labels = counted.mul(weight).sum().item()
            total += Score(loss_sum, correct, labels, rows, surplus)
    return total._replace(logs=log_sums.take())


def right_labels(loss: Any, output: Tree, y: Tree) -> tuple[Tensor, Tensor] | None:
    """Return masks of the correct predictions and of the counted labels.

    Labels are class indices or one-hot rows, with a score for each class. With a binary
    loss, labels are 0 or 1, with one score each; soft labels do not count. A prediction
    from a NaN score is never correct. For all other labels the result is None.
    """
    loss = checks.unweighted(loss)
    output, y = aligned(loss, output, batching.labels_of(y))
    if checks.is_classification(output, y):
        ignored, best = checks.ignored_label(loss), output.max(dim=1)
        counted = torch.ones_like(y).bool() if ignored is None else y != ignored
        return (best.indices == y) & ~best.values.isnan(), counted
    kind, scale = labels_and_scale(loss)
    tensors = isinstance(output, Tensor) and isinstance(y, Tensor)
    if not tensors or output.shape != y.shape:
        return None
    if kind == "classes" and y.ndim > 1:
        best = output.max(dim=1)
        right = (best.indices == y.argmax(1)) & ~best.values.isnan()
        return right, torch.ones_like(right)
    if kind != "binary":
        return None
    above = output > (0.5 if scale == "probabilities" else 0)
    return (above == (y == 1)) & ~output.isnan(), (y == 0) | (y == 1)


def has_accuracy(loss: Any, output: Tree, y: Tree) -> bool:
    """Whether accuracy is defined for such labels."""
    predicted = right_labels(loss, output, y)
    if predicted is None or labels_and_scale(checks.unweighted(loss))[0] != "binary":
        return predicted is not None
    return bool(predicted[1].all())


def mean_weights(loss: Objective, y: Tree, rows: int) -> list[float]:
    """Return the weight of a batch for each term of a loss, see `batch_weight`.

    A loss of several outputs has a term for each output; any other loss has one term.
    """
    if isinstance(loss, OutputLosses):
        return [
            checks.batch_weight(term, labels, rows) for term, labels in loss.paired(y)
        ]
    return [checks.batch_weight(loss, y, rows)]


def batch_mean(
    loss: Loss, output: Any, y: Tree, weights: Sequence[float], totals: Sequence[float]
) -> Tensor:
    """Return the contribution of a batch to the mean loss over several batches.

    Args:
        loss: A mean or a sum over the labels of a batch.
        output: Output of the model for the batch.
        y: Labels of the batch.
        weights: `mean_weights` of the batch. If a weight is 0, the term and its
            gradient are 0, although the mean over zero labels is NaN.
        totals: Sum of `mean_weights` over all batches.
    """
    if not isinstance(loss, OutputLosses):
        return _term_mean(loss, output, y, weights[0], totals[0])
    terms = zip(
        loss.paired(output, "outputs"), loss.paired(y), weights, totals, strict=True
    )
    return loss.combined(
        [
            _term_mean(term, tensor, labels, weight, total)
            for (term, tensor), (_, labels), weight, total in terms
        ]
    )


def _term_mean(loss: Any, output: Any, y: Tree, weight: float, total: float) -> Tensor:
    """Return the contribution of a batch to the mean of one term of a loss."""
    if is_sum(loss):
        total_loss: Tensor = loss(output, y)
        return total_loss
    if weight:
        return share_of_mean(loss(output, y), weight, total)
    if isinstance(loss, checks.WeightedLoss):
        return loss.sums(output, y)[0] * 0
    if isinstance(loss, nn.Module):
        summed: Any = copy.copy(loss)  # replicas of a process share the loss
        summed.reduction = "sum"
    else:
        summed = functools.partial(loss, reduction="sum")
    # With label smoothing, the loss of a class of weight 0 may differ from 0.
    value: Tensor = summed(output, y)
    return value / total if total else value * 0


def share_of_mean(mean: Tensor, weight: float, total: float) -> Tensor:
    """Return the contribution of a batch to the weighted mean over all batches."""
    # Not mean * (weight / total): k equal batches contribute exactly mean / k.
    return mean if weight == total else mean / (total / weight)


def _loss_sum(
    loss: Loss | None, output: Tree, y: Tree, rows: int
) -> tuple[float, float]:
    """Return the loss sum of a batch, and its weight minus its number of rows."""
    if loss is None:
        return 0.0, 0.0
    weights = mean_weights(loss, y, rows)
    divisors = [weight or 1 for weight in weights]
    value = batch_mean(loss, output, y, weights, divisors).item()
    weight = loss_weight(weights, rows)
    return value if is_sum(loss) else value * (weight or 1), weight - rows


def loss_weight(weights: Sequence[float], rows: int) -> float:
    """Return the weight of a mean loss in a mean over batches or steps.

    Args:
        weights: `mean_weights` of the batch, or their sums over the batches of a step.
            Several terms have no common weight; their sum is weighted by rows.
        rows: Rows of the batch or step.
    """
    if len(weights) == 1:
        return weights[0]
    return rows if any(weights) else 0


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode; restore the mode of each submodule afterwards."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training
