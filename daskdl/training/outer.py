"""The outer optimizer: what the mean of the replicas' moves does to what all know."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from daskdl.data.models import trainable
from daskdl.errors import OptionError
from daskdl.packed import Packed
from daskdl.training.optimizer_state import restore_optimizer_
from daskdl.training.states import check_like


class Outer:
    """Takes the way from the last common parameters to their mean for a gradient.

    Every replica has one, and all make the same steps.

    Args:
        make: Makes the optimizer from a list of parameters.
        module: Whose parameters are the first common ones; it is not changed.

    Source:
        Douillard and others, "DiLoCo: Distributed Low-Communication Training of
        Language Models", 2023, algorithm 1.
    """

    def __init__(self, make: Callable[[Any], Optimizer], module: nn.Module) -> None:
        self._module = module
        self._common = [nn.Parameter(p.detach().clone()) for p in trainable(module)]
        self._optimizer = make(self._common)

    def step_(self) -> None:
        """Let the module, which has the mean, take the outer step instead."""
        for common, mean in zip(self._common, trainable(self._module), strict=True):
            common.grad = common.detach() - mean.detach()
        self._optimizer.step()
        with torch.no_grad():
            for common, mean in zip(self._common, trainable(self._module), strict=True):
                mean.copy_(common)
                common.grad = None

    def values(self) -> dict[str, Any]:
        """The common parameters and the optimizer's state; they go on changing."""
        return {
            "common": [parameter.detach() for parameter in self._common],
            "optimizer": self._optimizer.state_dict(),
            "kind": type(self._optimizer).__name__,
        }

    def restore_(self, values: Mapping[str, Any]) -> None:
        """Go on from what `values` returned.

        Raises:
            OptionError: If that was of another kind of optimizer.
            SaveError: If its tensors are of other shapes.
        """
        own = {**self.values(), "optimizer": {}}
        check_like(own, values, "exchange.outer")
        kind = type(self._optimizer).__name__
        if values["kind"] != kind:
            raise OptionError(
                f"outer makes a {kind}, and the state to go on from is of a "
                f"{values['kind']}; resume with the same one, or with none"
            )
        with torch.no_grad():
            for common, value in zip(self._common, values["common"], strict=True):
                common.copy_(value)
        restore_optimizer_(self._optimizer, values["optimizer"])

    def follow_(self) -> None:
        """Take what the module has for the common parameters, without a step."""
        with torch.no_grad():
            for common, own in zip(self._common, trainable(self._module), strict=True):
                common.copy_(own)

    def state(self) -> NDArray[np.uint8]:
        """What `values` returns, as bytes."""
        return Packed(self.values(), "outer").payload

    def load_(self, state: NDArray[np.uint8]) -> None:
        """Go on from another replica's."""
        packed: Packed[dict[str, Any]] = Packed.of(state, "outer")
        self.restore_(packed.unpack())
