"""Optimizer state as plain arrays: averaged over replicas, and put back.

Tensors with an axis (momentum, second moments) are averaged, weighted by the
examples each replica saw; scalars (step counters) take the maximum, so that
schedules and bias corrections never go back. What is sparse, as the momentum of an
embedding with sparse gradients, leaves a replica dense.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import Optimizer

from daskdl.errors import SaveError
from daskdl.packed import Packed
from daskdl.training.states import check_like

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


def restore_optimizer_(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Go on from a state dict of a checkpoint.

    torch itself looks at nothing before a step.

    Raises:
        SaveError: If a group lacks an option, or has one of another kind; or if a
            tensor of one of torch's own optimizers has another shape than its
            parameter, or lacks one that others have.
    """
    groups = optimizer.param_groups
    made = [{name: group[name] for name in optimizer.defaults} for group in groups]
    optimizer.load_state_dict(dict(state))
    for number, group in enumerate(optimizer.param_groups):
        for name, own in made[number].items():
            _check_option(own, group.get(name), f"param_groups[{number}].{name}")
        if _has_tensors_like_parameters(optimizer):
            _check_tensors(optimizer, group, f"state of group {number}")


def _check_option(own: Any, found: Any, what: str) -> None:
    """Torch takes numbers and tensors for each other, and None for what it chooses."""
    if own is not None and not isinstance(own, bool | torch.Tensor):
        if not isinstance(found, torch.Tensor):
            check_like(own, found, what)
    elif isinstance(found, str | Mapping | Sequence):
        raise SaveError(f"{what} is damaged: it is a {type(found).__name__}")


def _has_tensors_like_parameters(optimizer: Optimizer) -> bool:
    own = type(optimizer).__module__.startswith("torch.optim")
    return own and type(optimizer).__name__ not in ("LBFGS", "Adafactor")


def _check_tensors(optimizer: Optimizer, group: Mapping[str, Any], what: str) -> None:
    states = [(p, optimizer.state[p]) for p in group["params"] if p in optimizer.state]
    named = {name for _, state in states for name in state}
    for number, (parameter, state) in enumerate(states):
        for name in named:
            where, value = f"{what}[{number}].{name}", state.get(name)
            if name not in state:
                raise SaveError(f"{where} is missing")
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                check_like(parameter, value, where)
            elif not isinstance(value, torch.Tensor | int | float | None):
                raise SaveError(f"{where} is damaged: it is a {type(value).__name__}")


def load_optimizer_(optimizer: Optimizer, payload: NDArray[np.uint8]) -> None:
    """Go on from another replica's state, as the bytes of a pack."""
    state: Packed[dict[str, Any]] = Packed.of(payload, "optimizer")
    optimizer.load_state_dict(state.unpack())
