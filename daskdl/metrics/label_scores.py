"""Outputs that are a score for each label, and labels that are 0 or 1. No Dask.

B rows, L labels.
"""

import torch
from torch import Tensor

from daskdl.data.batching import Tree
from daskdl.errors import ModelError, OptionError
from daskdl.metrics.base import Scale, Shown, probabilities
from daskdl.metrics.class_scores import (
    check_labels,
    checked,
    is_counted,
    is_per_class,
    one_tensor,
)
from daskdl.metrics.ranking import MASKED


def check_threshold(threshold: float) -> None:
    """Check the probability above which something is predicted.

    Raises:
        OptionError: If it is none, or 1.
    """
    if not 0 <= threshold < 1:
        raise OptionError(f"threshold must be in [0, 1), got {threshold}")


def check_binary(shown: Shown) -> None:
    """Check that there is one score, or one for each of two classes, for each label.

    Raises:
        DataError: If there are no labels.
        ModelError: If outputs are of another shape.
    """
    output, y = one_tensor("output", shown.output), one_tensor("labels", shown.y)
    two = is_per_class(output, y) and output.shape[1] == 2
    if not two and not _is_one_each(output, y):
        raise ModelError(
            "outputs must be one score for each label, as (B,) or (B, 1) for labels "
            "(B,), or two class scores, as (B, 2); got outputs "
            f"{tuple(output.shape)} for labels {tuple(y.shape)}: for more classes use "
            '"classification", for more labels "multilabel"'
        )


def check_multilabel(shown: Shown) -> int:
    """Check that there is one score for each label of each row, and count the labels.

    Raises:
        DataError: If there are no labels.
        ModelError: If outputs are of another shape.
    """
    output, y = one_tensor("output", shown.output), one_tensor("labels", shown.y)
    if output.shape != y.shape or output.ndim < 2:
        raise ModelError(
            "outputs and labels must both be (B, L), or (B, L, T), one score and one 0 "
            f"or 1 for each label; got outputs {tuple(output.shape)} for labels "
            f'{tuple(y.shape)}: for one class of each row use "classification"'
        )
    return output.shape[1]


def binary_rows(
    shown: Shown, output: Tree, y: Tree, ignore: float | None
) -> tuple[Tensor, Tensor]:
    """Probabilities of 1, and labels, of what counts; both (N,).

    Args:
        shown: Checked by `check_binary`.
        output: Of some rows.
        y: Their labels.
        ignore: A label that does not count, besides that which the loss passes over.

    Raises:
        DataError: If a label is neither 0 nor 1.
        ModelError: If a score is NaN.
    """
    if is_per_class(output, y):
        scores = probabilities(output, shown.scale)[:, 1]
    else:
        scores = likelihoods(output, shown.scale)
    counted = is_counted(y, (shown.ignored, ignore)).flatten()
    labels = y.flatten()[counted]
    check_labels(labels, (labels == 0) | (labels == 1), "0 or 1")
    return checked(scores.flatten()[counted], shown.scale), labels.long()


def multilabel_rows(
    shown: Shown, output: Tree, y: Tree, ignore: float | None
) -> tuple[Tensor, Tensor]:
    """Probabilities, and labels with `MASKED` where they do not count; both (N, L).

    Args:
        shown: Checked by `check_multilabel`.
        output: (B, L, ...).
        y: Likewise.
        ignore: A label that does not count, besides that which the loss passes over.

    Raises:
        DataError: If a label is neither 0 nor 1.
        ModelError: If a score is NaN.
    """
    scores = likelihoods(output, shown.scale).movedim(1, -1).flatten(0, -2)
    y = y.movedim(1, -1).flatten(0, -2)
    counted = is_counted(y, (shown.ignored, ignore))
    check_labels(y[counted], ((y == 0) | (y == 1))[counted], "0 or 1")
    labels = torch.where(counted, y.nan_to_num().long(), MASKED)
    scores = torch.where(counted, scores, 0)  # also of what is NaN
    return checked(scores, shown.scale), labels


def likelihoods(scores: Tensor, scale: Scale) -> Tensor:
    """Turn scores, each for itself, into probabilities, float64.

    Args:
        scores: Of any shape.
        scale: What they are.

    Example:
        >>> likelihoods(torch.tensor([0.0]), "logits")
        tensor([0.5000], dtype=torch.float64)
    """
    scores = scores.double()
    if scale == "logits":
        return torch.sigmoid(scores)
    return scores.exp() if scale == "log_probabilities" else scores


def _is_one_each(output: Tensor, y: Tensor) -> bool:
    """The same shape, but that one of both may have a dimension of 1 more."""
    return output.shape == y.shape or (
        output.shape[0] == y.shape[0]
        and output.numel() == y.numel()
        and abs(output.ndim - y.ndim) == 1
        and 1 in (output.shape[-1], y.shape[-1])
    )
