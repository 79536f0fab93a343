"""Outputs that are one score per class, and labels that are class indices. No Dask.

B rows, C classes, N labels that count: of a sequence, each step has one.
"""

from typing import Any

import torch
from torch import Tensor

from daskdl.data.batching import Tree, outline
from daskdl.errors import DataError, ModelError
from daskdl.metrics.base import Scale, Shown, probabilities


def one_tensor(what: str, given: Tree) -> Tensor:
    """The only array that there is.

    Args:
        what: "output" or "labels", for the message.
        given: Of a model.

    Raises:
        DataError: If labels are several, or missing.
        ModelError: If outputs are several.
    """
    if isinstance(given, Tensor):
        return given
    got = outline(given) if isinstance(given, dict | tuple) else type(given).__name__
    message = (
        f"metrics by name need {what} of one tensor, got {got}: wrap the model so that "
        "it returns what is measured, or give metrics of your own"
    )
    raise ModelError(message) if what == "output" else DataError(message)


def is_per_class(output: Tree, y: Tree) -> bool:
    """Whether there is one score per class, 2 or more, along dimension 1."""
    return (
        isinstance(output, Tensor)
        and isinstance(y, Tensor)
        and output.ndim == y.ndim + 1
        and output.shape[1] >= 2
        and (output.shape[0], *output.shape[2:]) == y.shape
    )


def check_classes(shown: Shown) -> int:
    """Check that outputs and labels are of classes, and count these.

    Raises:
        DataError: If labels are no class indices.
        ModelError: If outputs are not one score per class.
    """
    output, y = one_tensor("output", shown.output), one_tensor("labels", shown.y)
    if y.dtype.is_floating_point or y.dtype == torch.bool:
        raise DataError(
            f"labels must be class indices, 0 to classes - 1, as integers, got "
            f'{y.dtype} of shape {tuple(y.shape)}: for labels 0 and 1 use "binary" or '
            '"multilabel", for numbers "regression", and of one-hot rows give '
            "y.argmax(1)"
        )
    if not is_per_class(output, y):
        raise ModelError(
            f"outputs must be one score per class, 2 classes or more, along dimension "
            f"1, as (B, C) or (B, C, T) for labels (B,) or (B, T); got outputs "
            f"{tuple(output.shape)} for labels {tuple(y.shape)}: for one score per "
            'label use "binary" or "multilabel"'
        )
    return output.shape[1]


def class_rows(
    shown: Shown, output: Tree, y: Tree, ignore: float | None
) -> tuple[Tensor, Tensor]:
    """Probabilities and labels of what counts.

    Args:
        shown: Checked by `check_classes`.
        output: (B, C, ...).
        y: (B, ...).
        ignore: A label that does not count either.

    Returns:
        Probabilities, float64, (N, C), and class indices, int64, (N,).

    Raises:
        DataError: If a label is no class.
        ModelError: If a score is NaN.
    """
    scores_NC = probabilities(output, shown.scale).movedim(1, -1).flatten(0, -2)
    counted = is_counted(y, (shown.ignored, ignore)).flatten()
    labels_N, scores_NC = y.flatten()[counted].long(), scores_NC[counted]
    classes = scores_NC.shape[1]
    check_labels(
        labels_N, (labels_N >= 0) & (labels_N < classes), f"0 to {classes - 1}"
    )
    return checked(scores_NC, shown.scale), labels_N


def is_counted(y: Tensor, ignored: tuple[float | None, ...]) -> Tensor:
    """Which labels count.

    Args:
        y: Any.
        ignored: Values that do not; NaN is one too; None: none.

    Example:
        >>> is_counted(torch.tensor([0, -100]), (-100, None))
        tensor([ True, False])
    """
    counted = torch.ones_like(y, dtype=torch.bool)
    for value in ignored:
        if value is not None:
            counted &= ~torch.isnan(y) if value != value else y != value
    return counted


def check_labels(labels: Tensor, allowed: Tensor, range_: str) -> None:
    """Check that all labels that count are allowed.

    Args:
        labels: Those that count.
        allowed: Whether each is.
        range_: What is, for the message.

    Raises:
        DataError: If one is not.
    """
    if not bool(allowed.all()):
        worst: Any = labels[~allowed][0].item()
        raise DataError(
            f"labels must be {range_}, got {worst} ({int((~allowed).sum())} such): "
            "leave these rows out, or name the label that does not count as ignore="
        )


def checked(scores: Tensor, scale: Scale) -> Tensor:
    """Probabilities that are some, rounding aside.

    Args:
        scores: Of what counts.
        scale: What the model's outputs are taken for.

    Raises:
        ModelError: If one is NaN, or none.
    """
    if bool(torch.isnan(scores).any()):
        rows = int(torch.isnan(scores.reshape(len(scores), -1)).any(dim=1).sum())
        raise ModelError(
            f"{rows} of {len(scores)} outputs are NaN or infinite, of which nothing "
            "can be measured: look at the rows, and whether training diverged"
        )
    far = (scores < -1e-3) | (scores > 1 + 1e-3)
    if bool(far.any()):
        raise ModelError(
            f"outputs must be {scale.replace('_', ' ')}, as the loss takes them, got "
            f"{scores[far][0].item():g} where a probability from 0 to 1 was expected: "
            "return what the loss takes, or use a loss that takes what is returned"
        )
    return scores.clamp(0, 1)
