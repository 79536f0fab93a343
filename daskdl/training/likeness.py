"""What a fit is made of, as far as one that goes on from it must be made of it too."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from daskdl.errors import OptionError
from daskdl.training.tensors import described, others_in, trained_in


@dataclass(frozen=True)
class Likeness:
    """Said in words, to be compared.

    Attributes:
        tensors: Of the model, by name.
        optimizer: Of its trainable parameters.
        scheduler: Of that; None: there is none.

    Example:
        >>> import torch
        >>> layer = nn.Linear(3, 2, bias=False)
        >>> Likeness.of(layer, torch.optim.SGD(layer.parameters()), None).values()
        [{'weight': 'float32 (2, 3)'}, 'SGD of [1] parameters', None]
    """

    tensors: Mapping[str, str]
    optimizer: str
    scheduler: str | None

    @classmethod
    def of(
        cls, module: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None
    ) -> Self:
        """What a fit with these is made of."""
        tensors = {name: described(t) for name, t in trained_in(module).items()}
        for name, tensor in others_in(module).items():
            tensors[name] = f"{described(tensor)}, not trained"
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        made = f"{type(optimizer).__name__} of {sizes} parameters"
        schedules = None if scheduler is None else type(scheduler).__name__
        return cls(tensors, made, schedules)

    def values(self) -> list[Any]:
        """The same as plain values."""
        return [dict(self.tensors), self.optimizer, self.scheduler]

    @classmethod
    def from_values(cls, values: Any) -> Self:
        """Read what `values` made.

        Raises:
            ValueError: If it did not make them.
        """
        match values:
            case [dict(tensors), str(optimizer), str() | None as scheduler]:
                return cls(tensors, optimizer, scheduler)
        raise ValueError(f"it is made of {values!r:.80}")

    def check(self, other: "Likeness", url: str) -> None:
        """Refuse to go on from another one.

        Args:
            other: Of a checkpoint.
            url: Of that.

        Raises:
            OptionError: If its model, optimizer or scheduler are other ones.
        """
        for name in {**other.tensors, **self.tensors}:
            ours, theirs = self.tensors.get(name), other.tensors.get(name)
            if ours != theirs:
                raise OptionError(
                    f"{url} is of another model: {name} is {theirs} there, and {ours} "
                    "in the model of this trainer"
                )
        for kind in ("optimizer", "scheduler"):
            ours, theirs = getattr(self, kind), getattr(other, kind)
            if theirs not in (None, ours):
                raise OptionError(
                    f"{url} is of another {kind}: {theirs} there, and {ours} in this "
                    f"trainer; resume with the same {kind}, or make a new trainer with "
                    "the model"
                )
