"""What a model does on batches, as numbers that can be added up. No Dask.

What is merged are sums and counts, never means, so that unequal parts weigh what
they should and any way of cutting the data gives the same answer.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from daskdl.data.accuracy import is_classification
from daskdl.data.batches import Batch, floating_dtype, rows_in, to_device
from daskdl.data.rehearsal import ignored_label
from daskdl.data.trees import Tree
from daskdl.errors import DataError
from daskdl.objective import Objective, OwnStep, batch_loss, is_sum


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
    if not is_classification(output, y):
        return Score(loss_sum, examples=rows)
    ignored = ignored_label(loss)
    counted = torch.ones_like(y, dtype=torch.bool) if ignored is None else y != ignored
    right = (output.argmax(dim=1) == y) & counted
    return Score(loss_sum, int(right.sum()), int(counted.sum()), rows)


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
