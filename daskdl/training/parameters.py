"""A replica's parameters and buffers as they leave it, and how they go on."""

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from daskdl.compression.flat import Buffers, load_buffers_, load_counts_, load_frozen_


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
        frozen: Frozen parameters that the model has changed, likewise.
        hidden: With `exact`, buffers that are not in the state dict, by name.
    """

    exact: Mapping[str, Any] | None = None
    shared_N: NDArray[np.int32] | None = None
    residual_N: NDArray[np.int32] | None = None
    grid: float = 0.0
    buffers: Buffers | None = None
    frozen: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    hidden: Mapping[str, Tensor] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self.exact is not None or self.shared_N is not None

    @classmethod
    def of(cls, module: nn.Module) -> "Parameters":
        """A module's own, copied to the CPU; tied ones stay tied on loading."""
        state, buffers = module.state_dict(), module.named_buffers()
        hidden = {name: value for name, value in buffers if name not in state}
        kept = [{n: v.cpu() for n, v in part.items()} for part in (state, hidden)]
        exact, hidden = copy.deepcopy(kept)
        return cls(exact=exact, hidden=hidden)

    def values(self) -> dict[str, Any]:
        """The same as plain values and tensors."""
        if self.shared_N is None or self.buffers is None:
            exact = None if self.exact is None else dict(self.exact)
            return {"exact": exact, "hidden": dict(self.hidden)}
        arrays = (self.shared_N, *self.buffers)
        shared, floating, integer = (torch.from_numpy(array) for array in arrays)
        frozen = {name: torch.from_numpy(a) for name, a in self.frozen.items()}
        buffers = [floating, integer]
        return {
            "shared": shared,
            "grid": self.grid,
            "buffers": buffers,
            "frozen": frozen,
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Parameters":
        """Read what `values` made."""
        if "shared" not in values:
            return cls(exact=values["exact"], hidden=values.get("hidden", {}))
        buffers = Buffers(*(tensor.numpy() for tensor in values["buffers"]))
        frozen = {n: tensor.numpy() for n, tensor in values.get("frozen", {}).items()}
        shared_N, grid = values["shared"].numpy(), values["grid"]
        return cls(None, shared_N, None, grid, buffers, frozen)

    def load_into(self, module: nn.Module) -> None:
        """Give a module these parameters and buffers; without any it stays as it is."""
        if self.exact is not None:
            _make_room_(module, self.exact, self.hidden)
            module.load_state_dict(self.exact)
            own = dict(module.named_buffers())
            for name in own.keys() & self.hidden.keys():
                own[name].copy_(self.hidden[name])
        elif self.shared_N is not None and self.buffers is not None:
            load_counts_(module, self.shared_N, self.grid)
            load_buffers_(module, self.buffers)
            load_frozen_(module, self.frozen)


def _make_room_(
    module: nn.Module, exact: Mapping[str, Any], hidden: Mapping[str, Tensor]
) -> None:
    """Let buffers be there, in the shapes and dtypes that they came to have."""
    tensors = {**exact, **hidden}
    for prefix, part in module.named_modules():
        for leaf, buffer in part.named_buffers(recurse=False):
            new = tensors.get(f"{prefix}.{leaf}" if prefix else leaf)
            if new is not None and _form(new) != _form(buffer):
                setattr(part, leaf, torch.empty_like(new))
    own = dict(module.named_buffers())
    for name in own.keys() - tensors.keys():
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, None)
    # A state dict may have other names than the parameters and buffers.
    there = {*own, *module.state_dict()}
    for name in [name for name in tensors if name not in there]:
        path, _, leaf = name.rpartition(".")
        # Where there is no place for it, it is left out, or refused on loading.
        with contextlib.suppress(AttributeError, KeyError):
            new = torch.empty_like(tensors[name])
            module.get_submodule(path).register_buffer(leaf, new, name in exact)


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape
