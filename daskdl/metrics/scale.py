"""What a model's scores are, as its loss says. No Dask."""

import functools
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from daskdl.metrics.base import Scale

# Before the others: a loss of probabilities may be made from one of something else.
_CLASSES: dict[type[nn.Module], Scale] = {
    nn.CrossEntropyLoss: "logits",
    nn.MultiMarginLoss: "logits",
    nn.BCEWithLogitsLoss: "logits",
    nn.MultiLabelSoftMarginLoss: "logits",
    nn.SoftMarginLoss: "logits",
    nn.NLLLoss: "log_probabilities",
    nn.BCELoss: "probabilities",
}
_FUNCTIONS: dict[Any, Scale] = {
    functional.cross_entropy: "logits",
    functional.multi_margin_loss: "logits",
    functional.binary_cross_entropy_with_logits: "logits",
    functional.multilabel_soft_margin_loss: "logits",
    functional.soft_margin_loss: "logits",
    functional.nll_loss: "log_probabilities",
    functional.binary_cross_entropy: "probabilities",
}
# Of a sum of probabilities in bfloat16, which has 8 bits.
_ROUNDING = 2e-2


def scale_of(loss: Any, output: Any) -> Scale:
    """Say what class scores are.

    A loss of the user's own may say it as an attribute ``scale``. If nothing does, the
    scores of a few rows may: those over several classes that are never negative and sum
    to 1 are probabilities, those whose exponentials are such are their logarithms, and
    all else is logits.

    Args:
        loss: What the model is trained with, or None.
        output: Of the model for a few rows.

    Example:
        >>> scale_of(nn.BCELoss(), None)
        'probabilities'
        >>> scale_of(lambda output, y: output.sum(), torch.tensor([[0.25, 0.75]]))
        'probabilities'
    """
    told: Any = getattr(loss, "scale", None)
    if isinstance(told, str) and told in get_args(Scale):
        return cast(Scale, told)
    for kind, scale in _CLASSES.items():
        if isinstance(loss, kind):
            return scale
    function = loss.func if isinstance(loss, functools.partial) else loss
    for known, scale in _FUNCTIONS.items():
        if function is known:
            return scale
    return _seen(output)


def _seen(output: Any) -> Scale:
    if not isinstance(output, Tensor) or output.ndim < 2 or output.shape[1] < 2:
        return "logits"
    scores = output.double()
    if bool((scores >= 0).all()) and _is_one(scores.sum(dim=1)):
        return "probabilities"
    if bool((scores <= 0).all()) and _is_one(scores.exp().sum(dim=1)):
        return "log_probabilities"
    return "logits"


def _is_one(sums: Tensor) -> bool:
    return torch.allclose(sums, torch.ones_like(sums), atol=_ROUNDING, rtol=0)
