"""What a set of metrics promises: a specification that travels, and makes live ones."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from daskdl.data.batching import Tree
from daskdl.evaluation.report import PlainSection, Section

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

Scale = Literal["logits", "probabilities", "log_probabilities"]

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


class Shown(NamedTuple):
    """What outputs and labels look like, as the first rows show before any is scored.

    Attributes:
        output: The model's output for these rows, B >= 1, on the CPU.
        y: Their labels.
        scale: What class scores are, which the loss says; of no meaning to others.
        classes: Names of the classes 0, 1, ..., or None.
        ignored: Label that does not count, or None.
    """

    output: Tree
    y: Tree
    scale: Scale
    classes: Sequence[str] | None
    ignored: int | None


class MetricSet(ABC):
    """Some metrics, measured together; frozen, picklable, without a state.

    The live metrics belong to whoever scores a part; their states are merged by
    :mod:`daskdl.evaluation.metric_state`.
    """

    @property
    def masks_nan(self) -> bool:
        """Whether labels that are NaN are masked, by ``ignore=float("nan")``."""
        ignore = getattr(self, "ignore", None)
        return ignore is not None and bool(ignore != ignore)

    @abstractmethod
    def collection(self, shown: Shown) -> "MetricCollection":
        """Make live metrics, in their beginning.

        Args:
            shown: What they are for.

        Raises:
            DataError: If the labels are not such as these metrics need.
            ModelError: If the outputs are not.
        """

    @abstractmethod
    def prepared(self, shown: Shown, output: Tree, y: Tree) -> tuple[Any, Any]:
        """What the metrics are updated with.

        Each row is treated by itself, so that it does not matter with which others it
        comes.

        Args:
            shown: As in `collection`.
            output: Of some rows, of any number but 0.
            y: Their labels.

        Returns:
            Predictions and targets, as torchmetrics takes them.

        Raises:
            DataError: If a label is none of those that `shown` allows.
        """

    @abstractmethod
    def values(self, shown: Shown, computed: Mapping[str, Any]) -> dict[str, Any]:
        """What is told to the user.

        Args:
            shown: As in `collection`.
            computed: What the merged metrics computed, by name.

        Returns:
            Numbers, and numpy arrays, by name.
        """

    def section(self, shown: Shown, values: Mapping[str, Any]) -> Section:
        """How it is told: a part of the report.

        Args:
            shown: As in `collection`.
            values: What `values` returned.
        """
        return PlainSection(values)


def probabilities(scores: Tensor, scale: Scale) -> Tensor:
    """Turn class scores into probabilities, float64.

    Args:
        scores: Shape (B, C, ...), classes along the second axis.
        scale: What they are.

    Example:
        >>> probabilities(torch.tensor([[0.0, 0.0]]), "logits")
        tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    scores = scores.double()
    if scale == "logits":
        return torch.softmax(scores, dim=1)
    return scores.exp() if scale == "log_probabilities" else scores


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
