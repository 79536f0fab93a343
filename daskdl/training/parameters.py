"""A replica's parameters and buffers as they leave it, and how they go on."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from daskdl.buffers import Buffers, load_buffers_
from daskdl.vectors import load_counts_


@dataclass
class Parameters:
    """A replica's parameters and buffers as they leave it; one of the two forms.

    Attributes:
        exact: State dict of one replica's own module, on the CPU; else None.
        shared_N: Steps of `grid` that all replicas agree on, int32, else None.
        residual_N: Steps of `grid` that have not been sent, of this replica, or of all
            together, int32, else None. They are no part of the model.
        grid: Parameter units per step.
        buffers: Averaged buffers, where the parameters are not `exact`.
    """

    exact: Mapping[str, Any] | None = None
    shared_N: NDArray[np.int32] | None = None
    residual_N: NDArray[np.int32] | None = None
    grid: float = 0.0
    buffers: Buffers | None = None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self.exact is not None or self.shared_N is not None

    @classmethod
    def of(cls, module: nn.Module) -> "Parameters":
        """A module's own, copied to the CPU; tied ones stay tied on loading."""
        state = {name: value.cpu() for name, value in module.state_dict().items()}
        return cls(exact=copy.deepcopy(state))

    def values(self) -> dict[str, Any]:
        """The same as plain values and tensors."""
        if self.shared_N is None or self.buffers is None:
            return {"exact": None if self.exact is None else dict(self.exact)}
        arrays = (self.shared_N, *self.buffers)
        shared, floating, integer = (torch.from_numpy(array) for array in arrays)
        return {"shared": shared, "grid": self.grid, "buffers": [floating, integer]}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Parameters":
        """Read what `values` made."""
        if "shared" not in values:
            return cls(exact=values["exact"])
        buffers = Buffers(*(tensor.numpy() for tensor in values["buffers"]))
        return cls(None, values["shared"].numpy(), None, values["grid"], buffers)

    def load_into(self, module: nn.Module) -> None:
        """Give a module these parameters and buffers; without any it stays as it is."""
        if self.exact is not None:
            module.load_state_dict(self.exact)
        elif self.shared_N is not None and self.buffers is not None:
            load_counts_(module, self.shared_N, self.grid)
            load_buffers_(module, self.buffers)
