"""A replica's state as arrays that can be added up over replicas, and back.

Parameters, floating buffers and the optimizer's tensors are averaged; integer buffers
and the optimizer's counters take the maximum.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from daskdl.channel.protocol import Arrays
from daskdl.compression.flat import (
    FROZEN,
    Buffers,
    Frozen,
    Group,
    load_buffers_,
    pack_buffers,
    working_dtype,
)
from daskdl.training.optimizer_state import OptimizerState, restore_, weigh

# Of the names of arrays: what is added, and of what the maximum is taken.
SUM, MOST = "sum ", "most "
OPTIMIZER = "optimizer "
PARAMETERS = "parameters "
WEIGHT = "weight "
ALMOST, ONE = 1e-9, np.ones(1)
# State of torch's optimizers that a step adds to the parameters as it is.
LINEAR_STATE = frozenset({"momentum_buffer"})
PLAIN = {"int": int, "float": float, "bool": bool}  # numbers that are no tensors


class Shares:
    """Take a replica's state, weighted, and put an averaged one back.

    Args:
        module: Of the replica.
        groups: Its trainable parameters, as they lie in memory.
        optimizer: Of the same; None: it is not averaged.
        frozen: What the module changes itself; None: from now on.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[Group],
        optimizer: Optimizer | None,
        frozen: Frozen | None = None,
    ) -> None:
        self._module = module
        self._frozen = Frozen(module) if frozen is None else frozen
        self._groups = groups
        self._optimizer = optimizer

    def take(self, weight: float) -> dict[str, NDArray[Any]]:
        """This replica's share of a mean.

        Args:
            weight: In (0, 1].

        Returns:
            New arrays: floating ones times the weight, under names that begin with
            `SUM`; others under such that begin with `MOST`.
        """
        arrays: dict[str, NDArray[Any]] = {}
        for number, group in enumerate(self._groups):
            flat = group.flat.detach().to("cpu", working_dtype(group.flat.dtype))
            arrays[f"{SUM}{PARAMETERS}{number}"] = flat.numpy() * weight
        buffers = pack_buffers(self._module)
        arrays[f"{SUM}buffers"] = buffers.floating_F * weight
        arrays[f"{MOST}buffers"] = buffers.integer_I
        arrays.update(_weighed(self._frozen.take(), weight))
        if self._optimizer is not None:
            arrays.update(_optimizer_arrays(weigh(self._optimizer, weight)))
        return arrays

    def load_(self, arrays: Arrays) -> None:
        """Take over a mean.

        Args:
            arrays: The sum of all shares; not changed.
        """
        with torch.no_grad():
            for number, group in enumerate(self._groups):
                values = np.array(arrays[f"{SUM}{PARAMETERS}{number}"])
                group.flat.copy_(torch.from_numpy(values))
        floating_F, integer_I = arrays[f"{SUM}buffers"], arrays[f"{MOST}buffers"]
        load_buffers_(self._module, Buffers(floating_F, integer_I))
        self._frozen.load_(_means(arrays))
        if self._optimizer is not None:
            groups = self._optimizer.state_dict()["param_groups"]
            restore_(self._optimizer, _optimizer_state(arrays, groups))


def add(shares: Sequence[Arrays]) -> dict[str, NDArray[Any]]:
    """The sum of several replicas' shares; the order decides the rounding.

    Args:
        shares: At least one; not changed.

    Example:
        >>> one = {"sum a": np.array([0.5]), "most b": np.array([3])}
        >>> two = {"sum a": np.array([1.0]), "most b": np.array([2])}
        >>> {name: array.tolist() for name, array in add([one, two]).items()}
        {'sum a': [1.5], 'most b': [3]}
    """
    total = dict(shares[0])
    for share in shares[1:]:
        for name, array in share.items():
            if name not in total:
                total[name] = array
            elif name.startswith(SUM):
                # Parameters that diverged are seen at the end of the lap.
                with np.errstate(over="ignore", invalid="ignore"):
                    total[name] = total[name] + array
            else:
                total[name] = np.maximum(total[name], array)
    return total


def is_linear(name: str) -> bool:
    """Whether small errors of an array make but small ones in what is trained.

    So it is with parameters and with momentum. Adam and its like divide by the square
    root of what is in their state: an error that is small beside the largest numbers
    of a block may be many times the smallest, and as many times a step.

    Example:
        >>> is_linear("sum parameters 0"), is_linear("sum buffers")
        (True, False)
        >>> is_linear("sum optimizer 3 float32 momentum_buffer")
        True
        >>> is_linear("sum optimizer 3 float32 exp_avg")
        False
    """
    if not name.startswith(f"{SUM}{OPTIMIZER}"):
        return name.startswith(f"{SUM}{PARAMETERS}")
    return name.split(" ", 4)[4] in LINEAR_STATE


def _weighed(frozen: Arrays, weight: float) -> dict[str, NDArray[Any]]:
    """Shares of frozen parameters, and for each how much all who have it count."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, array in frozen.items():
        if array.dtype.kind in "fc":
            arrays[f"{SUM}{name}"] = np.asarray(array * array.dtype.type(weight))
            arrays[f"{SUM}{WEIGHT}{name}"] = np.array([weight])
        else:
            arrays[f"{MOST}{name}"] = array
    return arrays


def _means(arrays: Arrays) -> dict[str, NDArray[Any]]:
    means: dict[str, NDArray[Any]] = {}
    for full, array in arrays.items():
        name = full.removeprefix(SUM).removeprefix(MOST)
        if name.startswith(FROZEN):
            total = float(arrays.get(f"{SUM}{WEIGHT}{name}", ONE)[0])
            # One whose weights add up to 1 but for rounding is as it is.
            alone = abs(total - 1.0) < ALMOST
            means[name] = array if alone else array / array.dtype.type(total)
    return means


def _optimizer_arrays(state: OptimizerState) -> dict[str, NDArray[Any]]:
    arrays = {
        f"{SUM}{OPTIMIZER}{n} {_dtype_name(state.dtypes[n, name])} {name}": part
        for (n, name), part in state.parts.items()
    }
    for (n, name), value in state.scalars.items():
        if isinstance(value, int | float):  # others are each replica's own affair
            dtype = state.dtypes.get((n, name))
            kind = type(value).__name__ if dtype is None else _dtype_name(dtype)
            arrays[f"{MOST}{OPTIMIZER}{n} {kind} {name}"] = np.array(value)
    return arrays


def _optimizer_state(arrays: Arrays, groups: list[dict[str, Any]]) -> OptimizerState:
    state = OptimizerState({}, {}, {}, groups)
    for full, array in arrays.items():
        how, _, rest = full.partition(OPTIMIZER)
        if not rest:
            continue
        number, kind, name = rest.split(" ", 2)
        key = (int(number), name)
        if kind in PLAIN:
            state.scalars[key] = PLAIN[kind](array.item())
            continue
        state.dtypes[key] = getattr(torch, kind)
        if how == SUM:
            state.parts[key] = array
        else:
            state.scalars[key] = array.item()
    return state


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
