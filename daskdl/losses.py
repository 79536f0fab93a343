"""What a loss implies: the kind of the labels, and the scale of the scores.

Metrics, accuracies and class probabilities depend on both.
"""

import functools
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from daskdl.objective import ModelLoss, scored

Scale = Literal["logits", "probabilities", "log_probabilities"]
Labels = Literal["classes", "binary", "numbers"]  # indices or one-hot rows; 0 and 1

# Labels and scores that torch's losses take; None: none of the kinds above.
_LOSSES: dict[Any, tuple[Labels | None, Scale | None]] = {
    nn.CrossEntropyLoss: ("classes", "logits"),
    nn.MultiMarginLoss: ("classes", "logits"),
    nn.NLLLoss: ("classes", "log_probabilities"),
    nn.BCEWithLogitsLoss: ("binary", "logits"),
    nn.MultiLabelSoftMarginLoss: ("binary", "logits"),
    nn.BCELoss: ("binary", "probabilities"),
    nn.SoftMarginLoss: (None, "logits"),
    ModelLoss: (None, "logits"),  # of transformers
    nn.MSELoss: ("numbers", None),
    nn.L1Loss: ("numbers", None),
    nn.SmoothL1Loss: ("numbers", None),
    nn.HuberLoss: ("numbers", None),
    functional.cross_entropy: ("classes", "logits"),
    functional.multi_margin_loss: ("classes", "logits"),
    functional.nll_loss: ("classes", "log_probabilities"),
    functional.binary_cross_entropy_with_logits: ("binary", "logits"),
    functional.multilabel_soft_margin_loss: ("binary", "logits"),
    functional.binary_cross_entropy: ("binary", "probabilities"),
    functional.soft_margin_loss: (None, "logits"),
    functional.mse_loss: ("numbers", None),
    functional.l1_loss: ("numbers", None),
    functional.smooth_l1_loss: ("numbers", None),
    functional.huber_loss: ("numbers", None),
}
ROUNDING = 2e-2  # largest error of a sum of bfloat16 probabilities (8-bit precision)


def labels_and_scale(loss: Any) -> tuple[Labels | None, Scale | None]:
    """Return the labels that a loss takes and the scale of its scores; None if unknown.

    Attributes ``labels`` and ``scale`` of the loss take precedence.

    Example:
        >>> labels_and_scale(nn.BCELoss()), labels_and_scale(nn.MSELoss())
        (('binary', 'probabilities'), ('numbers', None))
    """
    function = loss.func if isinstance(loss, functools.partial) else loss
    labels, scale = next(
        (
            kinds
            for known, kinds in _LOSSES.items()
            if function is known
            or (isinstance(known, type) and isinstance(function, known))
        ),
        (None, None),
    )
    stated = getattr(loss, "labels", None), getattr(loss, "scale", None)
    if isinstance(stated[0], str) and stated[0] in get_args(Labels):
        labels = cast(Labels, stated[0])
    if isinstance(stated[1], str) and stated[1] in get_args(Scale):
        scale = cast(Scale, stated[1])
    return labels, scale


def scale_of(loss: Any, output: Any) -> Scale:
    """Return the scale of class scores.

    The type of the loss or its attribute ``scale`` determines the scale. If neither
    does, scores of several classes are probabilities if they are >= 0 and sum to 1, and
    log probabilities if their exponentials sum to 1; all other scores are logits.

    Example:
        >>> scale_of(nn.BCELoss(), None)
        'probabilities'
        >>> scale_of(lambda output, y: output.sum(), torch.tensor([[0.25, 0.75]]))
        'probabilities'
    """
    _, scale = labels_and_scale(loss)
    if scale is not None:
        return scale
    if isinstance(output, Tensor) and output.ndim > 1 and output.shape[1] > 1:
        scores = output.double()
        if bool((scores >= 0).all()) and _are_ones(scores.sum(dim=1)):
            return "probabilities"
        if bool((scores <= 0).all()) and _are_ones(scores.exp().sum(dim=1)):
            return "log_probabilities"
    return "logits"


def _are_ones(sums: Tensor) -> bool:
    return torch.allclose(sums, torch.ones_like(sums), atol=ROUNDING, rtol=0)


def probabilities(scores: Tensor, scale: Scale, *, over_classes: bool) -> Tensor:
    """Convert scores to probabilities, float64.

    Example:
        >>> probabilities(torch.tensor([[0.0, 0.0]]), "logits", over_classes=True)
        tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    scores = scores.double()
    if scale == "logits":
        return torch.softmax(scores, dim=1) if over_classes else torch.sigmoid(scores)
    return scores.exp() if scale == "log_probabilities" else scores


def class_probabilities(output: Any, loss: Any) -> Tensor:
    """Convert the outputs of a batch to probabilities of classes.

    Args:
        output: Scores of C classes (B, C); or, for a binary loss, scores of class 1,
            (B,) or (B, 1), or of L labels, (B, L).
        loss: Determines the scale of the scores.

    Returns:
        Probabilities: (B, C); (B, 2), of classes 0 and 1, for one binary score per row;
        or (B, L).

    Example:
        >>> class_probabilities(torch.tensor([[0.25]]), nn.BCELoss())
        tensor([[0.7500, 0.2500]])
    """
    output, (labels, _) = scored(output), labels_and_scale(loss)
    if isinstance(loss, ModelLoss) and isinstance(output, Mapping):
        output = output.get("logits", output)
    scale = scale_of(loss, output)
    binary = labels == "binary" or isinstance(loss, nn.SoftMarginLoss)
    classes_last = hasattr(loss, "aligned") and output.ndim > 2
    scores = output.movedim(-1, 1) if classes_last else output
    result = probabilities(scores, scale, over_classes=not binary).to(output.dtype)
    if binary and output.numel() == len(output):
        result = result.reshape(-1, 1)
        result = torch.cat([1 - result, result], dim=1)
    return result.movedim(1, -1) if classes_last else result


def aligned(loss: Any, output: Any, y: Any) -> tuple[Any, Any]:
    """Return outputs and labels in the shapes that torch's own losses take.

    Keras' losses take other shapes, for example with classes along the last axis.
    """
    align = getattr(loss, "aligned", None)
    return (output, y) if align is None or y is None else align(output, y)
