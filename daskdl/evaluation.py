"""Loss and accuracy of a model on data: in one process, and over all workers.

What is merged are sums and counts, never means, so that unequal parts weigh what
they should and any way of cutting the data gives the same answer.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from distributed import Client
from torch import Tensor, nn

from daskdl.data.batches import (
    Batch,
    Chunk,
    Transform,
    auto_device,
    batches,
    floating_dtype,
    rows_in,
    to_device,
    whole,
)
from daskdl.data.checks import (
    check_loss,
    check_module,
    check_rows,
    check_whole,
    rows_like,
)
from daskdl.data.datasets.iterable_style import sharded
from daskdl.data.faults import UNREADABLE, is_left_out
from daskdl.data.futures import workers_of
from daskdl.data.labels import LabelCheck
from daskdl.data.looking import looked_at
from daskdl.data.options import ReadOptions
from daskdl.data.passes import each_part
from daskdl.data.rehearsal import ignored_label
from daskdl.data.source import Source, rows_of_part
from daskdl.data.trees import Tree
from daskdl.errors import DataError
from daskdl.objective import Objective, OwnStep, batch_loss, is_sum, on_device
from daskdl.packed import Packed, PackedModel


@dataclass(frozen=True)
class Score:
    """What a model did on some examples, as sums that can be added up.

    Args:
        loss_sum: Sum of the losses of the examples.
        correct: Labels that were predicted right.
        labels: Labels that were predicted at all; 0 if they are no class indices.
        examples: Rows of the data.

    Example:
        >>> (Score(3.0, 1, 2, 2) + Score(1.0, 1, 1, 1)).metrics()
        {'loss': 1.3333333333333333, 'accuracy': 0.6666666666666666}
    """

    loss_sum: float = 0.0
    correct: int = 0
    labels: int = 0
    examples: int = 0

    @property
    def has_accuracy(self) -> bool:
        """Whether there were class indices to be right about."""
        return self.labels > 0

    def __iter__(self) -> Iterator[float]:
        """The four numbers, so that ``Score(*list(score))`` is the score again."""
        return iter((self.loss_sum, self.correct, self.labels, self.examples))

    def __add__(self, other: "Score") -> "Score":
        return Score(
            self.loss_sum + other.loss_sum,
            self.correct + other.correct,
            self.labels + other.labels,
            self.examples + other.examples,
        )

    def metrics(self) -> dict[str, float]:
        """The mean loss per example, and the share of right labels if there is one.

        Raises:
            DataError: If nothing has been scored.
        """
        if not self.examples:
            raise DataError("no examples were scored")
        metrics = {"loss": self.loss_sum / self.examples}
        if self.has_accuracy:
            metrics["accuracy"] = self.correct / self.labels
        return metrics


@dataclass(frozen=True)
class Scoring:
    """Scores one part at a time, wherever it is; picklable.

    Attributes:
        model: Not changed.
        loss: What is made of its outputs.
        batch_size: Rows per forward pass.
        transform: What is made of each batch before, or None.
        labels: What labels are held to; None: they are not looked at.
        skips: Whether a part that cannot be read counts as none.
    """

    model: PackedModel
    loss: Packed[Objective]
    batch_size: int
    transform: Transform | None
    labels: LabelCheck | None
    skips: bool = False

    def __call__(self, source: Source, part: int) -> Score:
        """Score a part.

        Raises:
            DataError: If it has a label that the loss does not accept. What loading
                it raises comes out.
        """
        device = auto_device()
        module = self.model.module(lambda copy: copy.eval().to(device))
        loss = self.loss.shared(lambda copy: on_device(copy, device))
        # What a step of the user's own computes may need gradients with respect to x.
        own = isinstance(loss, OwnStep)
        made = batches(self._chunks(source, part), self.batch_size)
        if self.transform is not None:
            made = map(self.transform, made)
        with torch.no_grad() if own else torch.inference_mode():
            return score_batches(module, loss, made, device)

    def _chunks(self, source: Source, part: int) -> Iterator[Chunk]:
        try:
            for rows in rows_of_part(source, part, self.batch_size):
                if self.labels is not None:
                    self.labels.check(rows[1], source.name(part))
                yield whole(rows)
        except UNREADABLE as error:
            if not is_left_out(error, source.name(part), self.skips):
                raise


def evaluate(
    model: nn.Module,
    loss: Objective,
    source: Source,
    read: ReadOptions,
    client: Client | Literal[False],
) -> dict[str, float]:
    """Measure a model on data, with every worker doing a part.

    Args:
        model: Not changed, whatever mode it is in.
        loss: ``loss(output, labels)``, a mean over a batch, or a sum if it has
            ``reduction="sum"``; or a step of the user's own. Batches weigh by their
            examples.
        source: Examples and their labels; parts are loaded and dropped one after the
            other.
        read: How they are read.
        client: A synchronous client; False: in this process.

    Returns:
        ``"loss"``, the mean over the examples, and ``"accuracy"``, the share of right
        labels, if the labels are class indices and the outputs one score per class.
        A step of the user's own shows no outputs: of it there is only the loss.

    Raises:
        DataError: If the data cannot be used.
        ModelError: If model and loss do not fit the data.
        OptionError: If the client cannot be used.

    Example:
        >>> from daskdl.data.in_memory import InMemory
        >>> source = InMemory(torch.tensor([[0.0, 1.0]]), torch.tensor([1]), 1)
        >>> evaluate(nn.Identity(), nn.NLLLoss(), source, ReadOptions(1), False)
        {'loss': -1.0, 'accuracy': 1.0}
    """
    check_module(model)
    check_loss(loss)
    if source.first is None:
        source = looked_at(source, client, skips=read.skips)
    accepted = check_rows(model, loss, *rows_like(source), read.transform)
    labels = None if read.transform else LabelCheck(accepted)
    if labels is not None:
        check_whole(source, labels)
    scoring = Scoring(
        PackedModel(model),
        Packed(loss, "step" if isinstance(loss, OwnStep) else "loss"),
        read.batch_size,
        read.transform,
        labels,
        read.skips,
    )
    if client is not False:
        source = sharded(source, len(workers_of(client)))
    scores = dict(each_part(source, scoring, client, send=True))
    # In order, so that the sum does not depend on who came first.
    return sum((scores[part] for part in sorted(scores)), Score()).metrics()


def score_batches(
    module: nn.Module,
    loss: Objective,
    batches: Iterable[Batch],
    device: torch.device | str,
) -> Score:
    """Score a module on batches, in evaluation mode, which is undone afterwards.

    Gradients are off, but not by inference mode: what a live module caches at its
    first forward pass would then be of no use to training.

    Args:
        module: On ``device``; its parameters and modes are left as they were.
        loss: On ``device``, as in `evaluate`.
        batches: Pairs (x, y) on any device.
        device: Where to compute.

    Example:
        >>> rows = [(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))]
        >>> score_batches(nn.Identity(), nn.NLLLoss(), rows, "cpu")
        Score(loss_sum=-1.0, correct=1, labels=1, examples=1)
    """
    total = Score()
    dtype = floating_dtype(module)
    with _evaluating(module), torch.no_grad():
        for x, y in batches:
            total += _score_batch(module, loss, *to_device(x, y, device, dtype))
    return total


def _score_batch(module: nn.Module, loss: Objective, x: Tree, y: Tree) -> Score:
    rows = rows_in((x, y))
    if isinstance(loss, OwnStep):
        return Score(batch_loss(loss, module, (x, y)).item() * rows, examples=rows)
    output = module(x)
    loss_sum = loss(output, y).item()
    if not is_sum(loss):
        loss_sum *= rows
    if not _is_classification(output, y):
        return Score(loss_sum, examples=rows)
    ignored = ignored_label(loss)
    counted = torch.ones_like(y, dtype=torch.bool) if ignored is None else y != ignored
    right = (output.argmax(dim=1) == y) & counted
    return Score(loss_sum, int(right.sum()), int(counted.sum()), rows)


def _is_classification(output: Any, y: Tree) -> bool:
    """Class indices, and one score per class along dimension 1 of the output."""
    return (
        isinstance(y, Tensor)
        and y.dtype == torch.int64  # as `to_device` makes every integer label
        and isinstance(output, Tensor)
        and output.ndim == y.ndim + 1
        and (output.shape[0], *output.shape[2:]) == y.shape
    )


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
