"""Loss, accuracy and metrics of a model on data, on a cluster or in this process.

Parts are scored separately. Sums, counts and metric states are merged, never means, so
the result does not depend on the partitioning. Loss and accuracy are computed here
without torchmetrics, because replicas validate with them and do not load it.
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
from daskdl.errors import DataError, OptionError
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
from daskdl.process_settings import freed_memory_kept
from daskdl.serialization import Packed, PackedModel
from daskdl.util import client_or_process

if TYPE_CHECKING:  # torchmetrics loads SciPy and matplotlib, about 90 MB
    from daskdl.evaluation.metric_state import MetricSpec, PartStates
    from daskdl.evaluation.presets import MetricSet

T = TypeVar("T")
logger = logging.getLogger(__name__)


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
) -> Evaluation:
    """Evaluate any model in one pass, as :meth:`Trainer.evaluate` does.

    Args:
        model: Any module, in training or evaluation mode; not changed.
        X: Inputs, or inputs and labels, of any type that :meth:`Trainer.fit` takes.
        y: Labels, or None if `X` includes them.
        loss: ``loss(model(x), labels)``, which also determines the meaning of outputs.
            None: no loss is measured, and the meaning of the outputs is inferred from
            the first batch.
        metrics: See :meth:`Trainer.evaluate`.
        sample_weight: See :meth:`Trainer.evaluate`.
        client: A synchronous `distributed.Client`; None: the default client, else a
            temporary `LocalCluster`; False: this process.
        batch_size: Rows per forward pass. None: those of a `DataLoader`, or 64.
        transform: Applied to each batch, see :class:`Trainer`.
        label: Column, or key, of `X` that has the labels, see :meth:`Trainer.fit`.
        on_bad_batch: Treatment of unreadable parts, see :meth:`Trainer.fit`.

    Returns:
        A dict of all metrics over all rows, which prints as a report.

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
    classes: Sequence[str] | None = None,
) -> Evaluation:
    """Evaluate a model with a loss or a step; see `Trainer.evaluate`."""
    labelled = not isinstance(objective, OwnStep)
    if sample_weight is not None:
        if metrics is not None:
            raise OptionError(
                "sample_weight weights only loss and accuracy, and metrics were given; "
                "evaluate without metrics, or without weights"
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
        output, labels_seen = scored(run.output), run.y
        specs: tuple[MetricSpec, ...] = ()
        if sets:
            from daskdl.evaluation.metric_state import metric_specs

            specs = metric_specs(
                sets, objective, output, labels_seen, source.classes or classes
            )
        elif objective is None and not checks.is_classification(output, labels_seen):
            raise OptionError(
                "there is nothing to measure without loss and metrics, because labels "
                "are not class indices; pass loss=, metrics=, or both"
            )
        masked = run.classes is None and any(spec.metrics.masks_nan for spec in specs)
        labels = None if masked else run.labels
        if labels is not None:
            labels.check_source(source)
        named = "loss" if labelled else "step"
        scorer = PartScorer(
            packed,
            None if objective is None else Packed(objective, named),
            read.batch_size,
            read.transform,
            labels,
            read.skips,
            batching.row_spec(run.rows),
            has_accuracy(objective, output, labels_seen),
            Packed(specs, "metrics") if specs else None,
        )
        mergers = [spec.merger() for spec in specs]
        scores: dict[int, Score] = {}
        for part, (score, states) in map_split(source, scorer, cluster):
            scores[part] = score
            for merger, part_states in zip(mergers, states, strict=True):
                merger.add_(part, part_states)
    warn_of_unscored(read, [part for part in scores if not scores[part].examples])
    # In order of the parts, so that the sum does not depend on their arrival.
    values = sum((scores[part] for part in sorted(scores)), Score()).metrics()
    if objective is None:
        del values["loss"]
    return Evaluation(
        values, [s.section(m) for s, m in zip(specs, mergers, strict=True)]
    )


def metrics_for(objective: Objective | None, metrics: Any) -> "Sequence[MetricSet]":
    """Return the sets of metrics for an objective; refuse metrics beside a step."""
    if type(objective) is OwnStep:
        raise OptionError(
            "metrics need the outputs of the model, which a step does not return; log "
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
    """Call a function for each part; streams are split among the workers."""
    if client is not False:
        source = source.divided(len(workers_of(client)))
    return map_parts(source, function, client, send=True)


def warn_of_unscored(read: ReadOptions, parts: Sequence[int]) -> None:
    """Log the parts without rows to score; the workers' logs have the reasons."""
    if read.skips and parts:
        logger.warning("%s parts had no rows to score: %s", len(parts), sorted(parts))


@dataclass(frozen=True)
class Scorer:
    """Scores parts with a model and an objective, in any process; picklable."""

    model: PackedModel
    objective: Packed[Objective] | None  # None: the loss is 0
    batch_size: int
    transform: Transform | None
    labels: LabelCheck | None  # None: labels are not checked
    skips: bool  # leave out parts that cannot be read

    def unpacked(self) -> tuple[nn.Module, Any, torch.device]:
        """Return the module of this thread, the objective, and their device."""
        device = batching.auto_device()
        module = self.model.module(lambda copy: copy.eval().to(device))
        if self.objective is None:
            return module, None, device
        objective = self.objective.shared(lambda copy: on_device(copy, device))
        return module, objective, device


def without_gradients(objective: Objective | None) -> Any:
    """Return a context without gradients; a step may enable them, such as for x."""
    with_step = isinstance(objective, OwnStep)
    return torch.no_grad() if with_step else torch.inference_mode()


@dataclass(frozen=True)
class PartScorer(Scorer):
    """Scores a part by loss, accuracy and metrics."""

    row_spec: RowSpec  # of the rows of the dry run
    accuracy: bool  # whether to count right labels
    specs: "Packed[tuple[MetricSpec, ...]] | None"

    def __call__(
        self, source: Source, part: int
    ) -> "tuple[Score, tuple[PartStates, ...]]":
        """Return loss and accuracy, and the states of each set of metrics."""
        module, objective, device = self.unpacked()
        shapes = ShapeCheck(self.row_spec, self.transform)

        def check(rows: Rows, name: str) -> None:
            if self.labels is not None:
                self.labels.check(rows[1], name)
            if not isinstance(objective, OwnStep):
                shapes.check(module, device, rows, name)

        readable = unreadable.stream_readable(
            source, part, self.batch_size, check, self.skips
        )
        scored_batches = batches(map(batching.all_rows, readable), self.batch_size)
        if self.transform is not None:
            scored_batches = map(self.transform, scored_batches)
        with freed_memory_kept(), without_gradients(objective):
            if self.specs is None:
                score = score_batches(
                    module, objective, scored_batches, device, accuracy=self.accuracy
                )
                return score, ()
            from daskdl.evaluation.metric_state import MetricAccumulator

            measuring = MetricAccumulator(self.specs.shared(), source.name(part))
            score = score_batches(
                module,
                objective,
                scored_batches,
                device,
                measuring.add_,
                accuracy=False,
            )
            return score, measuring.states()


Sums = Mapping[str, tuple[float, int]]  # sum over rows and number of rows, by name


def added(left: Sums, right: Sums) -> Sums:
    """Add two sets of sums."""
    sums = dict(left)
    for name, (total, rows) in right.items():
        left_total, left_rows = sums.get(name, (0.0, 0))
        sums[name] = left_total + total, left_rows + rows
    return sums


def means(sums: Sums) -> dict[str, float]:
    """Return the mean over the rows, by name."""
    return {name: total / rows for name, (total, rows) in sums.items()}


class LogSums:
    """Sums of what a step logs, on its device; only `take` waits for an accelerator."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, int]] = {}

    def add(self, logs: Logs, rows: int) -> None:
        """Add the logs of a batch, which are means over its rows."""
        if not logs.keys() <= self._sums.keys():
            check_log_names(logs)
        for name, value in logs.items():
            if isinstance(value, Tensor):
                value = value.detach().double().reshape(())
            total, before = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value * rows, before + rows

    def take(self) -> Sums:
        """Return the sums since the last call."""
        sums, self._sums = self._sums, {}
        return {name: (float(total), rows) for name, (total, rows) in sums.items()}


class Score(NamedTuple):
    """Loss, accuracy and logs on some rows, as sums that can be added."""

    loss_sum: float = 0.0
    correct: float = 0  # correctly predicted labels, or their weight
    labels: float = 0  # counted labels; 0 without an accuracy
    examples: int = 0  # rows
    # Weight of the rows in the mean loss, minus their number: negative if the loss
    # ignores labels or class weights are below 1, positive if rows have several labels.
    surplus: float = 0.0
    logs: Mapping[str, tuple[float, int]] = {}

    @override
    def __add__(self, score: "Score") -> "Score":  # type: ignore[override]
        sums = map(operator.add, self[:-1], score[:-1])
        return Score._make([*sums, added(self.logs, score.logs)])

    def metrics(self) -> dict[str, float]:
        """Return the mean loss, NaN if all rows are ignored, the accuracy, and logs."""
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

    Labels that are classes give an accuracy, unless `accuracy` is False.

    Uses `no_grad` rather than inference mode: a module that is being trained must not
    cache tensors of inference mode.
    """
    total, sums = Score(), LogSums()
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
                sums.add(logs, rows)
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
                both = right & counted, counted
                correct, labels = ((n * weight).sum().item() for n in both)
            total += Score(loss_sum, correct, labels, rows, surplus)
    return total._replace(logs=sums.take())


def right_labels(loss: Any, output: Tree, y: Tree) -> tuple[Tensor, Tensor] | None:
    """Return masks of the correctly predicted and of the counted labels, if any.

    Labels are class indices or one-hot rows, with one score for each class. With a
    binary loss they are 0 and 1, with one score each; other labels, which are soft, do
    not count. A score of NaN is never correct. Returns None for all other labels.
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
    """Whether an accuracy is defined for such labels."""
    predicted = right_labels(loss, output, y)
    if predicted is None or labels_and_scale(checks.unweighted(loss))[0] != "binary":
        return predicted is not None
    return bool(predicted[1].all())


def mean_weights(loss: Objective, y: Tree, rows: int) -> list[float]:
    """Return the weight of a batch for each term of a loss, see `batch_weight`.

    A loss of several outputs has a term for each output, any other loss has one term.
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
        return _term(loss, output, y, weights[0], totals[0])
    pairs = zip(loss.paired(output, "outputs"), loss.paired(y), strict=True)
    weighted = zip(pairs, weights, totals, strict=True)
    return loss.combined(
        [
            _term(term, tensor, labels, weight, total)
            for ((term, tensor), (_, labels)), weight, total in weighted
        ]
    )


def _term(loss: Any, output: Any, y: Tree, weight: float, total: float) -> Tensor:
    if is_sum(loss):
        total_loss: Tensor = loss(output, y)
        return total_loss
    if weight:
        return shared(loss(output, y), weight, total)
    if isinstance(loss, checks.WeightedLoss):
        return loss.sums(output, y)[0] * 0
    if isinstance(loss, nn.Module):
        summed: Any = copy.copy(loss)  # replicas of a process share the loss
        summed.reduction = "sum"
    else:
        summed = functools.partial(loss, reduction="sum")
    # May differ from 0: with label smoothing, a class of weight 0 has a loss.
    value: Tensor = summed(output, y)
    return value / total if total else value * 0


def shared(mean: Tensor, weight: float, total: float) -> Tensor:
    """Return the contribution of a batch to the weighted mean over all batches."""
    # Not multiplied by weight / total: equal batches give exactly mean / k.
    return mean if weight == total else mean / (total / weight)


def _loss_sum(
    loss: Loss | None, output: Tree, y: Tree, rows: int
) -> tuple[float, float]:
    """Return the sum of a batch's losses, and its weight minus the number of rows."""
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
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
