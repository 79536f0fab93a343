"""Loss and accuracy of a model on data: in one process, and over all workers.

What one process makes of batches is in :mod:`daskdl.scores`.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from distributed import Client
from torch import nn

from daskdl.data import batching
from daskdl.data.accuracy import has_accuracy
from daskdl.data.batching import (
    Chunk,
    Kinds,
    Rows,
    Transform,
    auto_device,
    batches,
    whole,
)
from daskdl.data.checks import check_rows, check_whole, output_rows, rows_like
from daskdl.data.datasets.iterable_style import sharded
from daskdl.data.faults import (
    UNREADABLE,
    is_left_out,
    joined_files,
    separated,
)
from daskdl.data.futures import workers_of
from daskdl.data.labels import LabelCheck
from daskdl.data.looking import looked_at
from daskdl.data.models import check_loss, check_module
from daskdl.data.options import ReadOptions
from daskdl.data.passes import each_part
from daskdl.data.rehearsal import ShapeCheck
from daskdl.data.source import Source, rows_of_part
from daskdl.errors import OptionError
from daskdl.metrics.evaluation import Evaluation
from daskdl.metrics.sections import Section
from daskdl.metrics.wanted import Wanted
from daskdl.objective import Objective, OwnStep, on_device
from daskdl.scores import Score, score_batches
from daskdl.serialization import Packed, PackedModel
from daskdl.util import freed_memory_kept

if TYPE_CHECKING:  # they need torchmetrics, and most evaluations do not
    from daskdl.metrics.meter import Measure
    from daskdl.metrics.states import States

logger = logging.getLogger(__name__)


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
            from daskdl.metrics.meter import Meter

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
            left, _ = joined_files(separated(source.separate(part), skips=True), check)
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
        >>> from daskdl.data.in_memory import InMemory
        >>> source = InMemory(torch.tensor([[0.0, 1.0]]), torch.tensor([1]), 1)
        >>> evaluate(nn.Identity(), nn.NLLLoss(), source, ReadOptions(1), False)
        {'loss': -1.0, 'accuracy': 1.0}
    """
    check_module(model)
    if loss is not None:
        check_loss(loss)
    if source.first is None:
        source = looked_at(source, client, skips=read.skips)
    packed = PackedModel(model, here=client is False)
    scoring, measures = _prepared(model, packed, loss, source, read, wanted)
    if client is not False:
        source = sharded(source, len(workers_of(client)))
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
    from daskdl.metrics.meter import computed

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
    rows = rows_like(source)
    accepted = None
    if loss is not None:
        accepted = check_rows(model, loss, *rows, read.transform)
    measures: tuple[Measure, ...] = ()
    if wanted is not None:
        seen = output_rows(model, *rows, read.transform)
        measures = wanted.measures(loss, *seen, source.classes)
    elif loss is None and not has_accuracy(model, loss, *rows, read.transform):
        raise OptionError(
            "there is nothing to measure without loss and metrics where labels are not "
            "class indices; give loss=, metrics=, or both"
        )
    masked = accepted is None and any(one.metrics.masks_nan for one in measures)
    labels = None if read.transform or masked else LabelCheck(accepted)
    if labels is not None:
        check_whole(source, labels)
    named = "step" if isinstance(loss, OwnStep) else "loss"
    scoring = Scoring(
        packed,
        None if loss is None else Packed(loss, named),
        read.batch_size,
        read.transform,
        labels,
        read.skips,
        None if wanted is None else Packed(measures, "metrics"),
        batching.kinds(rows_like(source)),
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
    for part, scored in each_part(source, scoring, client, send=True):
        scores[part] = scored.score
        states = _added(states, scored.states) if states else scored.states
    unscored = [part for part in sorted(scores) if not scores[part].examples]
    if scoring.skips and unscored:  # why, is in the logs of the workers
        logger.warning("%s parts gave nothing to score: %s", len(unscored), unscored)
    # In order, so that the sum does not depend on who came first.
    return Scored(sum((scores[part] for part in sorted(scores)), Score()), states)
