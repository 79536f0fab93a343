"""What has a model, or will have."""

from collections.abc import Callable
from typing import Literal

from distributed import Client
from torch import Tensor, nn
from torch.optim import Optimizer

from daskdl.data.batches import Transform
from daskdl.errors import OptionError
from daskdl.objective import Loss, Objective, objective_of


class HasModel:
    """Has a model, or will have, and what is needed to do something with it.

    Attributes:
        client: Of the cluster to work on, if there is one.
        loss: Of the model, or None if there is a step.
        step: What computes the loss in its place, or None.
        transform: Of every batch, or None.
        model_: The model; not set before it is trained.
        optimizer_: Its optimizer, likewise.
    """

    client: Client | Literal[False] | None
    loss: Loss | None
    step: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor] | None
    transform: Transform | None
    model_: nn.Module
    optimizer_: Optimizer

    def _objective(self) -> Objective | None:
        objective: Objective = objective_of(self.loss, self.step)
        return objective

    def _fitted(self) -> nn.Module:
        if not hasattr(self, "model_"):
            raise OptionError("the trainer has no model_ yet; call fit first")
        return self.model_
