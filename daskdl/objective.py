"""The objective of training: a loss of the model's output, or the user's own step.

Code that runs a model on labelled rows accepts either.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from daskdl.errors import OptionError

Loss = Callable[[Any, Any], Tensor]  # (output of the model, labels) -> scalar
Batch = tuple[Any, Any]  # (x, y): tensors, or tuples and dicts of tensors


@dataclass(frozen=True)
class OwnStep:
    """A user's step, for models whose forward pass is not ``model(x)``.

    Attributes:
        function: Maps the model and a batch (x, y) to the batch's mean loss, a scalar.
    """

    function: Callable[[nn.Module, Batch], Tensor]


Objective = Loss | OwnStep


def objective_of(loss: Any, step: Any) -> Any:
    """Return the objective for a trainer's `loss` and `step`.

    A loss is returned unchecked.

    Example:
        >>> objective_of(None, None)
        Traceback (most recent call last):
        daskdl.errors.OptionError: exactly one of loss and step must be given, got \
neither
    """
    if (loss is None) == (step is None):
        got = "neither" if loss is None else f"loss={loss!r} and step={step!r}"
        raise OptionError(f"exactly one of loss and step must be given, got {got}")
    if step is None:
        return loss
    if not callable(step):
        raise OptionError(
            "step must be a function of (model, (x, y)) that returns the batch's mean "
            f"loss, got {step!r}"
        )
    return OwnStep(step)


def batch_loss(objective: Objective, module: nn.Module, batch: Batch) -> Tensor:
    """Run a model on a batch and return the loss.

    Example:
        >>> x = torch.tensor([[3.0]])
        >>> batch_loss(OwnStep(lambda model, batch: batch[0].sum()), nn.ReLU(), (x, x))
        tensor(3.)
    """
    if isinstance(objective, OwnStep):
        return objective.function(module, batch)
    x, y = batch
    return objective(module(x), y)


class Penalised(ABC):
    """A module that adds a penalty to the loss, such as weight decay."""

    @abstractmethod
    def penalty(self) -> Tensor | None:
        """Return the penalty after a forward pass, independent of the rows, or None."""


def on_device(objective: Objective, device: torch.device) -> Objective:
    """Move the objective's tensors, such as class weights; modules change in place."""
    holder = objective.function if isinstance(objective, OwnStep) else objective
    if isinstance(holder, nn.Module):
        holder.to(device)
    return objective


def is_sum(objective: Objective) -> bool:
    """Whether an objective sums over the rows of a batch; otherwise it is a mean.

    Example:
        >>> is_sum(nn.MSELoss(reduction="sum")), is_sum(nn.MSELoss())
        (True, False)
        >>> is_sum(functools.partial(nn.functional.mse_loss, reduction="sum"))
        True
    """
    if isinstance(objective, functools.partial) and "reduction" in objective.keywords:
        return bool(objective.keywords["reduction"] == "sum")
    return getattr(objective, "reduction", "mean") == "sum"
