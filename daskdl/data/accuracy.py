"""Whether there is an accuracy: class indices, and one score for each class."""

from typing import Any

import torch
from torch import Tensor, nn

from daskdl.data.batching import Transform, Tree
from daskdl.data.checks import output_rows
from daskdl.objective import Objective, OwnStep


def is_classification(output: Any, y: Tree) -> bool:
    """Class indices, and one score per class along dimension 1 of the output.

    Args:
        output: Of a model.
        y: The labels, as `to_device` makes them.
    """
    return (
        isinstance(y, Tensor)
        and y.dtype == torch.int64  # as `to_device` makes every integer label
        and isinstance(output, Tensor)
        and output.ndim == y.ndim + 1
        and (output.shape[0], *output.shape[2:]) == y.shape
    )


def has_accuracy(
    model: nn.Module,
    objective: Objective | None,
    X: Tree,
    y: Tree,
    transform: Transform | None = None,
) -> bool:
    """Whether a model is scored by accuracy on data like these.

    Args:
        model: Not changed.
        objective: With the model it has been rehearsed on these data; or None.
        X: Examples, of which two are looked at.
        y: Labels, likewise, or None.
        transform: What is made of each batch before, or None.

    Example:
        >>> X = torch.zeros(3, 2)
        >>> has_accuracy(nn.Linear(2, 4), nn.CrossEntropyLoss(), X, torch.arange(3))
        True
        >>> has_accuracy(nn.Linear(2, 4), nn.MSELoss(), X, torch.zeros(3, 4))
        False
    """
    if isinstance(objective, OwnStep):
        return False  # it shows no outputs
    return is_classification(*output_rows(model, X, y, transform))
