"""What a set of metrics is: a specification that travels, and makes live ones."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from daskdl.data.batching import Tree
from daskdl.metrics.sections import PlainSection, Section

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

Scale = Literal["logits", "probabilities", "log_probabilities"]


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
    :mod:`daskdl.metrics.states`.
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
