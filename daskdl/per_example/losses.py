"""The loss of each example of a batch: what a batch that has only it would have.

No Dask, no state. The losses of torch that are known to take each row by itself are
computed for all rows at once. Any other is called row by row: whether it looks at more
than one row cannot be seen from outside.
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from daskdl.data import batching
from daskdl.data.accuracy import is_classification
from daskdl.data.batching import Batch, Tree, rows_in
from daskdl.keras.losses import CrossEntropyOfProbabilities
from daskdl.objective import Loss, Objective, OwnStep, batch_loss

# The very classes, for one that is derived from them may compute anything.
_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, CrossEntropyOfProbabilities)
_OF_LIKE_SHAPES = (
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.CrossEntropyLoss,  # of probabilities of classes
    nn.HingeEmbeddingLoss,
    nn.HuberLoss,
    nn.KLDivLoss,
    nn.L1Loss,
    nn.MSELoss,
    nn.MultiLabelMarginLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.PoissonNLLLoss,
    nn.SmoothL1Loss,
    nn.SoftMarginLoss,
)


class Losses(NamedTuple):
    """What a model did on each example of a batch."""

    losses: Tensor  # float64, on the CPU, one per row
    output: Any  # of the whole batch; None if the model was called row by row


def example_losses(
    module: nn.Module, objective: Objective, batch: Batch, *, by_rows: bool
) -> Losses:
    """Compute the loss of each example.

    Args:
        module: In evaluation mode, so that no row depends on another.
        objective: A loss of outputs and labels, or a step of the user's own, which is
            called with one row at a time.
        batch: Where the module is.
        by_rows: Whether outputs have a row for each of the batch, see `has_rows`; if
            not, the model is called with one row at a time, too.

    Returns:
        Of a loss with ``reduction="sum"`` the sum within each row, else the mean there,
        weighted as the loss does; NaN for a row of which the loss ignores everything.

    Example:
        >>> batch = torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.zeros(2, 2)
        >>> example_losses(nn.Identity(), nn.MSELoss(), batch, by_rows=True).losses
        tensor([5., 0.], dtype=torch.float64)
    """
    if isinstance(objective, OwnStep) or not by_rows:
        each = [batch_loss(objective, module, _one(batch, i)) for i in _each(batch)]
        return Losses(_plain(each), None)
    x, y = batch
    output = module(x)
    return Losses(_losses_of(objective, output, y), output)


def has_rows(module: nn.Module, x: Tree) -> bool:
    """Whether outputs have one row for each of the inputs, tried on two and on three.

    Args:
        module: In evaluation mode.
        x: Two rows.

    Example:
        >>> x = torch.zeros(2, 5)
        >>> has_rows(nn.Linear(5, 3), x), has_rows(nn.Flatten(0), x)
        (True, False)
    """
    three = batching.rows(x, [0, 1, 0])
    outputs = [module(batching.mapped(torch.clone, rows)) for rows in (x, three)]
    return all(map(_has_rows, outputs, (2, 3)))


def _has_rows(output: Any, rows: int) -> bool:
    """Mappings and tuples of other classes would not be the same when they are cut."""
    if isinstance(output, tuple | dict):
        inner = list(output.values() if isinstance(output, dict) else output)
        plain = type(output) in (tuple, dict) or hasattr(output, "_fields")
        return plain and bool(inner) and all(_has_rows(leaf, rows) for leaf in inner)
    return isinstance(output, Tensor) and output.ndim > 0 and len(output) == rows


def _losses_of(loss: Loss, output: Any, y: Tree) -> Tensor:
    together = _together(loss, output, y)
    if together is not None:
        return together.double().cpu()
    return _plain(
        [loss(_row(output, i), _row(y, i)) for i in range(batching.length(y))]
    )


def _together(loss: Any, output: Any, y: Any) -> Tensor | None:
    """The losses of all rows at once; None where that may be something else."""
    if not (isinstance(output, Tensor) and isinstance(y, Tensor)):
        return None
    if type(loss) in _OF_CLASSES and is_classification(output, y):
        values = _within_rows(_unreduced(loss, output, y))
        total = values.sum(1)
        if loss.reduction == "sum":
            return total
        return total / _within_rows(_weights(loss, y, values.dtype)).sum(1)
    if type(loss) is nn.MultiMarginLoss and output.ndim == 2 and y.ndim == 1:
        return _unreduced(loss, output, y)
    if type(loss) in _OF_LIKE_SHAPES and output.shape == y.shape:
        if not all(_same_for_rows(tensor, output) for tensor in loss.buffers()):
            return None
        values = _unreduced(loss, output, y)
        if values.ndim == 0:  # the rows of one axis were taken for classes
            return None
        values = _within_rows(values)
        return values.mean(1) if loss.reduction == "mean" else values.sum(1)
    return None


def _unreduced(loss: Any, output: Tensor, y: Tensor) -> Tensor:
    each = copy.copy(loss)  # threads share it
    each.reduction = "none"
    values: Tensor = each(output, y)
    return values


def _within_rows(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1)


def _weights(loss: Any, y: Tensor, dtype: torch.dtype) -> Tensor:
    """What each label counts in a mean."""
    counted: Tensor = y != loss.ignore_index
    if loss.weight is None:
        return counted.to(dtype)
    weights: Tensor = loss.weight[y.where(counted, 0)] * counted
    return weights


def _same_for_rows(weight: Tensor, output: Tensor) -> bool:
    """Whether a weight is stretched along the rows, or else is one for each row."""
    return weight.numel() == 1 or weight.ndim < output.ndim


def _plain(losses: list[Tensor]) -> Tensor:
    together = torch.stack([loss.detach().reshape(()) for loss in losses])
    return together.double().cpu()


def _each(batch: Batch) -> range:
    return range(rows_in(batch))


def _one(batch: Batch, i: int) -> Batch:
    """A batch of one."""
    return batching.of_both(lambda tree: _row(tree, i), batch)


def _row(tree: Tree, i: int) -> Tree:
    return batching.rows(tree, slice(i, i + 1))
