"""Optimizer state as plain arrays: averaged over replicas, and put back.

Tensors with an axis (momentum, second moments) are averaged, weighted by the
examples each replica saw; scalars (step counters) take the maximum, so that
schedules and bias corrections never go back. What is sparse, as the momentum of an
embedding with sparse gradients, leaves a replica dense.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import Optimizer

from daskdl.packed import Packed

Key = tuple[int, str]  # parameter number in the optimizer, name of the state


@dataclass
class OptimizerState:
    """One replica's share of the averaged state.

    Attributes:
        parts: Arrays already multiplied by the replica's weight, float64 where
            the state is float64, else float32.
        dtypes: Of the tensors, as torch names them.
        scalars: Step counters and the like.
        groups: Parameter groups, with the user's own learning rates.
    """

    parts: dict[Key, NDArray[np.floating[Any]]]
    dtypes: dict[Key, torch.dtype]
    scalars: dict[Key, Any]
    groups: list[dict[str, Any]]


def state_of(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state dict, its tensors dense.

    Example:
        >>> layer = torch.nn.Embedding(3, 2, sparse=True)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        >>> layer(torch.tensor([1])).sum().backward()
        >>> optimizer.step()
        >>> state_of(optimizer)["state"][0]["momentum_buffer"]
        tensor([[0., 0.],
                [1., 1.],
                [0., 0.]])
    """
    state = optimizer.state_dict()
    dense = {
        number: {name: _dense(value) for name, value in entries.items()}
        for number, entries in state["state"].items()
    }
    return {**state, "state": dense}


def _dense(value: Any) -> Any:
    is_sparse = isinstance(value, torch.Tensor) and value.layout != torch.strided
    return value.to_dense() if is_sparse else value


def weigh(optimizer: Optimizer, weight: float) -> OptimizerState:
    """Take an optimizer's state, its arrays multiplied by a replica's weight."""
    state = state_of(optimizer)
    result = OptimizerState({}, {}, {}, state["param_groups"])
    for number, entries in state["state"].items():
        for name, value in entries.items():
            key = (number, name)
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                wide = value.dtype if value.dtype == torch.float64 else torch.float32
                result.parts[key] = value.detach().cpu().to(wide).numpy() * weight
                result.dtypes[key] = value.dtype
            elif isinstance(value, torch.Tensor):
                result.scalars[key] = value.detach().cpu().item()
                result.dtypes[key] = value.dtype
            else:
                result.scalars[key] = value
    return result


def add(states: Sequence[OptimizerState]) -> OptimizerState:
    """The averaged state, from all replicas' weighted shares in order."""
    total = OptimizerState({}, {}, {}, states[0].groups)
    for state in states:
        total.dtypes.update(state.dtypes)
        for key, part in state.parts.items():
            total.parts[key] = total.parts[key] + part if key in total.parts else part
        for key, value in state.scalars.items():
            former = total.scalars.get(key)
            if former is None or (value is not None and value > former):
                total.scalars[key] = value
    return total


def restore_(optimizer: Optimizer, state: OptimizerState) -> None:
    """Put an averaged state into an optimizer over the same parameters."""
    entries: dict[int, dict[str, Any]] = {}
    for key, part in state.parts.items():
        tensor = torch.from_numpy(np.array(part)).to(state.dtypes[key])
        entries.setdefault(key[0], {})[key[1]] = tensor
    for key, value in state.scalars.items():
        dtype = state.dtypes.get(key)
        plain = value if dtype is None else torch.tensor(value, dtype=dtype)
        entries.setdefault(key[0], {})[key[1]] = plain
    optimizer.load_state_dict({"state": entries, "param_groups": state.groups})


def load_optimizer_(optimizer: Optimizer, payload: NDArray[np.uint8]) -> None:
    """Go on from another replica's state, as the bytes of a pack."""
    state: Packed[dict[str, Any]] = Packed.of(payload, "optimizer")
    optimizer.load_state_dict(state.unpack())
