"""What a model does on batches, as numbers that can be added up. No Dask.

What is merged are sums and counts, never means, so that unequal parts weigh what
they should and any way of cutting the data gives the same answer.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from daskdl.data.accuracy import is_classification
from daskdl.data.batching import Batch, Tree, floating_dtype, rows_in, to_device
from daskdl.data.rehearsal import ignored_label
from daskdl.errors import DataError
from daskdl.objective import Loss, Objective, OwnStep, batch_loss, is_sum

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
