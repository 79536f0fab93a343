"""What a model does on batches, as numbers that can be added up. No Dask.

What is merged are sums and counts, never means, so that unequal parts weigh what
they should and any way of cutting the data gives the same answer.

Loss and accuracy of a model on data: in one process, and over all workers.

What one process makes of batches is in :mod:`daskdl.evaluation.evaluate`.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from distributed import Client
from torch import Tensor, nn

from daskdl.data import batching
from daskdl.data.batching import (
    Batch,
    Chunk,
    Kinds,
    Rows,
    Transform,
    Tree,
    auto_device,
    batches,
    floating_dtype,
    rows_in,
    to_device,
    whole,
)
from daskdl.data.checks import (
    UNREADABLE,
    LabelCheck,
    ShapeCheck,
    check_loss,
    check_module,
    dry_run,
    ignored_label,
    is_classification,
    is_left_out,
    join_readable,
    load_each,
)
from daskdl.data.distribute import map_parts, workers_of
from daskdl.data.inputs import ReadOptions, infer_metadata
from daskdl.data.source import Source, rows_of_part
from daskdl.data.torch_datasets import split_stream
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.evaluation.base import MetricSet, Shown, scale_of
from daskdl.evaluation.report import Evaluation, Section
from daskdl.objective import Loss, Objective, OwnStep, batch_loss, is_sum, on_device
from daskdl.serialization import Packed, PackedModel
from daskdl.util import freed_memory_kept

logger = logging.getLogger(__name__)

Tell = Callable[[Tree, Tree], None]  # of a model's output, and the labels


@dataclass(frozen=True)
class Score:
    """What a model did on some examples, as sums that can be added up.

    Args:
        loss_sum: Sum of the losses of the examples.
        correct: Labels that were predicted right.
        labels: Labels that were predicted at all; 0 if they are no class indices.
        examples: Rows of the data.
        more: By how many rows the loss weighs them as more than they are; negative
            where it ignores labels, or classes weigh less than 1.

    Example:
        >>> (Score(3.0, 1, 2, 2) + Score(1.0, 1, 1, 1)).metrics()
        {'loss': 1.3333333333333333, 'accuracy': 0.6666666666666666}
    """

    loss_sum: float = 0.0
    correct: int = 0
    labels: int = 0
    examples: int = 0
    more: float = 0.0

    @property
    def has_accuracy(self) -> bool:
        """Whether there were class indices to be right about."""
        return self.labels > 0

    def __iter__(self) -> Iterator[float]:
        """The numbers, so that ``Score(*list(score))`` is the score again."""
        return iter(
            (self.loss_sum, self.correct, self.labels, self.examples, self.more)
        )

    def __add__(self, other: "Score") -> "Score":
        return Score(
            self.loss_sum + other.loss_sum,
            self.correct + other.correct,
            self.labels + other.labels,
            self.examples + other.examples,
            self.more + other.more,
        )

    def metrics(self) -> dict[str, float]:
        """The mean loss per example, and the share of right labels if there is one.

        The loss is NaN if there are examples, but none that counts for it.

        Raises:
            DataError: If nothing has been scored.
        """
        if not self.examples:
            raise DataError("no examples were scored")
        weight = self.examples + self.more
        metrics = {"loss": self.loss_sum / weight if weight else math.nan}
        if self.has_accuracy:
            metrics["accuracy"] = self.correct / self.labels
        return metrics


def score_batches(
    module: nn.Module,
    loss: Objective | None,
    batches: Iterable[Batch],
    device: torch.device | str,
    tell: Tell | None = None,
) -> Score:
    """Score a module on batches, in evaluation mode, which is undone afterwards.

    Gradients are off, but not by inference mode: what a live module caches at its
    first forward pass would then be of no use to training.

    Args:
        module: On ``device``; its parameters and modes are left as they were.
        loss: On ``device``, as in `evaluate`; None: it counts as 0.
        batches: Pairs (x, y) on any device.
        device: Where to compute.
        tell: Is told the output and the labels of each batch, which it may keep; no
            labels are counted then. None: nobody is.

    Example:
        >>> rows = [(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))]
        >>> score_batches(nn.Identity(), nn.NLLLoss(), rows, "cpu")
        Score(loss_sum=-1.0, correct=1, labels=1, examples=1, more=0.0)
    """
    total = Score()
    dtype = floating_dtype(module)
    with _evaluating(module), torch.no_grad():
        for x, y in batches:
            batch = to_device(x, y, device, dtype)
            if isinstance(loss, OwnStep):
                total += _of_step(module, loss, batch)
            else:
                total += _score_batch(module, loss, batch, tell)
    return total


def _of_step(module: nn.Module, step: OwnStep, batch: Batch) -> Score:
    rows = rows_in(batch)
    return Score(batch_loss(step, module, batch).item() * rows, examples=rows)


def _score_batch(
    module: nn.Module, loss: Loss | None, batch: Batch, tell: Tell | None
) -> Score:
    rows = rows_in(batch)
    x, y = batch
    output = module(x)
    loss_sum, more = _loss_sum(loss, output, y, rows)
    if tell is not None:
        tell(output, y)
    elif is_classification(output, y):
        return Score(loss_sum, *_right(output, y, ignored_label(loss)), rows, more)
    return Score(loss_sum, examples=rows, more=more)


def _loss_sum(
    loss: Loss | None, output: Tree, y: Tree, rows: int
) -> tuple[float, float]:
    """Of a batch, and by how many rows it weighs more than it has."""
    if loss is None:
        return 0.0, 0.0
    weight = _weight(loss, output, y, rows)
    if not weight:  # the loss would be 0/0
        return 0.0, -rows
    value = loss(output, y).item()
    return value * (1 if is_sum(loss) else weight), weight - rows


def _weight(loss: Loss, output: Tree, y: Tree, rows: int) -> float:
    """Rows that a batch weighs as: by what the loss has divided the sum of it.

    That of class indices divides by the labels that it does not ignore, and by the
    weights of their classes. If each batch weighed by its rows, one of which all is
    ignored would make NaN of everything, and the others would give another mean for
    another batch size.
    """
    ignored = ignored_label(loss)
    if ignored is None or is_sum(loss) or not is_classification(output, y):
        return rows
    counted = y != ignored
    if isinstance(loss, functools.partial):
        weights_C = loss.keywords.get("weight")
    else:
        weights_C = getattr(loss, "weight", None)
    labels: Tensor = counted
    if weights_C is not None:
        labels = weights_C.to(y.device).double()[y.where(counted, 0)] * counted
    weight: float = labels.sum().item() * rows / max(y.numel(), 1)
    return weight


def _right(output: Tensor, y: Tensor, ignored: int | None) -> tuple[int, int]:
    """Labels predicted right, and all that count; of NaN scores none is the best."""
    counted = torch.ones_like(y, dtype=torch.bool) if ignored is None else y != ignored
    best = output.max(dim=1)
    right = (best.indices == y) & counted & ~best.values.isnan()
    return int(right.sum()), int(counted.sum())


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode; each submodule gets its own mode back, frozen ones too."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


if TYPE_CHECKING:  # they need torchmetrics, and most evaluations do not
    from daskdl.evaluation.metric_state import Measure, States


@dataclass(frozen=True)
class Wanted:
    """Sets of metrics.

    Attributes:
        sets: In the order in which they are told.
        classes: Names of the labels 0, 1, ... where the data have none; or None.
    """

    sets: tuple[MetricSet, ...]
    classes: Sequence[str] | None = None

    @classmethod
    def of(
        cls,
        metrics: Any,
        objective: Objective | None,
        classes: Sequence[str] | None = None,
    ) -> Self | None:
        """What the user asks for; None: nothing.

        Args:
            metrics: See :meth:`daskdl.Trainer.evaluate`.
            objective: Of the model, or None.
            classes: Names of the labels, or None.

        Raises:
            OptionError: If it is none of what is allowed, or there is a step.
        """
        if metrics is None:
            return None
        if isinstance(objective, OwnStep):
            raise OptionError(
                "metrics need the outputs of the model, which a step does not show; "
                "use daskdl.evaluate(trainer.model_, ..., metrics=...) if model(x) is "
                "what is to be measured"
            )
        from daskdl.evaluation.metric_sets import metric_sets

        return cls(metric_sets(metrics), classes)

    def measures(
        self,
        objective: Objective | None,
        output: Tree,
        y: Tree,
        classes: Sequence[str] | None,
    ) -> tuple["Measure", ...]:
        """Make all sets ready for a model and data.

        Args:
            objective: Of the model, or None.
            output: Of a few rows.
            y: Their labels, or None.
            classes: Names of the labels that the data have, or None.

        Raises:
            DataError: If the labels are not such as they need, or missing.
            ModelError: If the outputs are not.
        """
        if y is None:
            raise DataError("labels must be given, or data that have them, for metrics")
        for name, leaf in batching.named(output, "output"):
            if not isinstance(leaf, Tensor):
                raise ModelError(
                    "metrics need a model that returns tensors, or tuples and dicts of "
                    f"them; {name} is a {type(leaf).__name__}"
                )
        from daskdl.evaluation.metric_state import joined, measure_of

        shown = Shown(
            joined([output]),
            joined([y]),
            scale_of(objective, output),
            classes or self.classes,
            ignored_label(objective),
        )
        with torch.no_grad():
            return tuple(measure_of(one, shown) for one in self.sets)


class Scored(NamedTuple):
    """What one part comes to."""

    score: Score
    states: "tuple[States, ...]" = ()  # of each set of metrics


@dataclass(frozen=True)
class Scoring:
    """Scores one part at a time, wherever it is; picklable.

    Attributes:
        model: Not changed.
        loss: What is made of its outputs.
        batch_size: Rows per forward pass.
        transform: What is made of each batch before, or None.
        labels: What labels are held to; None: they are not looked at.
        skips: Whether a part that cannot be read is left out; one that is gone through
            bit by bit, from there on.
        first: Kinds of the rows that the model was tried with; None: it was not.
        measures: Metrics beside the loss; None: accuracy, where there is one.
    """

    model: PackedModel
    loss: Packed[Objective] | None
    batch_size: int
    transform: Transform | None
    labels: LabelCheck | None
    skips: bool = False
    measures: "Packed[tuple[Measure, ...]] | None" = None
    first: Kinds | None = None

    def __call__(self, source: Source, part: int) -> Scored:
        """Score a part.

        Raises:
            DataError: If it has a label that the loss does not accept, or that metrics
                do not. What loading it raises comes out.
            ModelError: If metrics cannot be measured on the outputs.
        """
        device = auto_device()
        module = self.model.module(lambda copy: copy.eval().to(device))
        loss: Objective | None = None
        if self.loss is not None:
            loss = self.loss.shared(lambda copy: on_device(copy, device))
        # What a step of the user's own computes may need gradients with respect to x.
        own = isinstance(loss, OwnStep)
        shapes = ShapeCheck(self.first, self.transform)

        def check(rows: Rows, name: str) -> None:
            if self.labels is not None:
                self.labels.check(rows[1], name)
            if not own and self.first is not None:
                shapes.check(module, device, rows, name)

        made = batches(self._chunks(source, part, check), self.batch_size)
        if self.transform is not None:
            made = map(self.transform, made)
        without_gradients = torch.no_grad() if own else torch.inference_mode()
        with freed_memory_kept(), without_gradients:
            if self.measures is None:
                return Scored(score_batches(module, loss, made, device))
            from daskdl.evaluation.metric_state import Meter

            meter = Meter(self.measures.shared(), source.name(part))
            score = score_batches(module, loss, made, device, meter.add)
            return Scored(score, meter.states(part))

    def _chunks(
        self, source: Source, part: int, check: Callable[[Rows, str], None]
    ) -> Iterator[Chunk]:
        name = source.name(part)
        try:
            for rows in rows_of_part(source, part, self.batch_size):
                check(rows, name)
                yield whole(rows)
        except UNREADABLE as error:
            if not is_left_out(error, name, self.skips):
                raise
            left, _ = join_readable(load_each(source.separate(part), skips=True), check)
            if left is not None:
                yield whole(left)


def evaluate(
    model: nn.Module,
    loss: Objective | None,
    source: Source,
    read: ReadOptions,
    client: Client | Literal[False],
    wanted: Wanted | None = None,
) -> Evaluation:
    """Measure a model on data, with every worker doing a part.

    Args:
        model: Not changed, whatever mode it is in.
        loss: ``loss(output, labels)``, a mean over a batch, or a sum if it has
            ``reduction="sum"``; or a step of the user's own. Batches weigh by their
            examples; for class indices by what it divides by. None: there is none.
        source: Examples and their labels; parts are loaded and dropped one after the
            other.
        read: How they are read.
        client: A synchronous client; False: in this process.
        wanted: Metrics; None: accuracy.

    Returns:
        ``"loss"``, the mean over the examples, and what `wanted` comes to; or
        ``"accuracy"``, the share of right labels, if the labels are class indices and
        the outputs one score per class. A step of the user's own shows no outputs: of
        it there is only the loss.

    Raises:
        DataError: If the data cannot be used.
        ModelError: If model and loss do not fit the data.
        OptionError: If the client cannot be used, or there is nothing to measure.

    Example:
        >>> from daskdl.data.tables import InMemory
        >>> source = InMemory(torch.tensor([[0.0, 1.0]]), torch.tensor([1]), 1)
        >>> evaluate(nn.Identity(), nn.NLLLoss(), source, ReadOptions(1), False)
        {'loss': -1.0, 'accuracy': 1.0}
    """
    check_module(model)
    if loss is not None:
        check_loss(loss)
    if source.first is None:
        source = infer_metadata(source, client, skips=read.skips)
    packed = PackedModel(model, here=client is False)
    scoring, measures = _prepared(model, packed, loss, source, read, wanted)
    if client is not False:
        source = split_stream(source, len(workers_of(client)))
    score, states = _totals(source, scoring, client)
    values = score.metrics()
    if loss is None:
        del values["loss"]
    return Evaluation(values, _sections(measures, states))


def _sections(
    measures: "Sequence[Measure]", states: "Sequence[States]"
) -> list[Section]:
    if not measures:
        return []
    from daskdl.evaluation.metric_state import computed

    each = [(one, computed(one, of)) for one, of in zip(measures, states, strict=True)]
    return [one.metrics.section(one.shown, values) for one, values in each]


def _prepared(
    model: nn.Module,
    packed: PackedModel,
    loss: Objective | None,
    source: Source,
    read: ReadOptions,
    wanted: Wanted | None,
) -> "tuple[Scoring, tuple[Measure, ...]]":
    """Look at everything on a few rows, and pack what is needed for the others."""
    run = dry_run(packed.unpack(), source.first, read.transform, loss)
    seen = run.output, run.batch[1]
    measures: tuple[Measure, ...] = ()
    if wanted is not None:
        measures = wanted.measures(loss, *seen, source.classes)
    elif loss is None and not is_classification(*seen):
        raise OptionError(
            "there is nothing to measure without loss and metrics where labels are not "
            "class indices; give loss=, metrics=, or both"
        )
    masked = run.classes is None and any(one.metrics.masks_nan for one in measures)
    labels = None if masked else run.labels
    if labels is not None:
        labels.check_source(source)
    named = "step" if isinstance(loss, OwnStep) else "loss"
    scoring = Scoring(
        packed,
        None if loss is None else Packed(loss, named),
        read.batch_size,
        read.transform,
        labels,
        read.skips,
        None if wanted is None else Packed(measures, "metrics"),
        batching.kinds(run.rows),
    )
    return scoring, measures


def _added(
    states: "tuple[States, ...]", others: "tuple[States, ...]"
) -> "tuple[States, ...]":
    return tuple(one + more for one, more in zip(states, others, strict=True))


def _totals(
    source: Source, scoring: Scoring, client: Client | Literal[False]
) -> Scored:
    """Of all parts; states of metrics are added up as they come."""
    scores: dict[int, Score] = {}
    states: tuple[States, ...] = ()
    for part, scored in map_parts(source, scoring, client, send=True):
        scores[part] = scored.score
        states = _added(states, scored.states) if states else scored.states
    unscored = [part for part in sorted(scores) if not scores[part].examples]
    if scoring.skips and unscored:  # why, is in the logs of the workers
        logger.warning("%s parts gave nothing to score: %s", len(unscored), unscored)
    # In order, so that the sum does not depend on who came first.
    return Scored(sum((scores[part] for part in sorted(scores)), Score()), states)
