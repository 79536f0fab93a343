"""Sums over replicas along a tree, rounded with error feedback; the outer optimizer."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from daskdl import codec
from daskdl.channel.base import Channel
from daskdl.channel.protocol import Arrays, Routes
from daskdl.codec import Kind, Stamp, counts_of, quantize
from daskdl.compression.flat import (
    FROZEN,
    Buffers,
    Frozen,
    Group,
    load_buffers_,
    pack_buffers,
    working_dtype,
)
from daskdl.data.models import trainable
from daskdl.errors import OptionError
from daskdl.serialization import Packed
from daskdl.training.base import check_like
from daskdl.training.optimizer_step import (
    OptimizerState,
    restore_,
    restore_optimizer_,
    weigh,
)

# Of the names of arrays: what is added, and of what the maximum is taken.
SUM, MOST = "sum ", "most "
OPTIMIZER = "optimizer "
PARAMETER_ARRAYS = "parameters "
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
            arrays[f"{SUM}{PARAMETER_ARRAYS}{number}"] = flat.numpy() * weight
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
                values = np.array(arrays[f"{SUM}{PARAMETER_ARRAYS}{number}"])
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
        return name.startswith(f"{SUM}{PARAMETER_ARRAYS}")
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


class Feedback:
    """The residual of a replica that sends rounded sums: error feedback.

    It changes with each sum that the replica has passed on, but only if a mean came
    of that, which the replica may learn at the next meeting: else all is sent again,
    rounded from the residual that there was before.

    Attributes:
        residual: By name; empty if nothing is left. Not changed in place.

    Example:
        >>> import numpy as np
        >>> feedback = Feedback()
        >>> feedback.propose(7, {"a": np.array([0.25])})
        >>> feedback.settle_(latest=6)
        >>> feedback.residual
        {}
        >>> feedback.propose(8, {"a": np.array([0.25])})
        >>> feedback.settle_(latest=8)
        >>> feedback.residual
        {'a': array([0.25])}

    Source:
        Seide and others, "1-Bit Stochastic Gradient Descent", Interspeech 2014.
    """

    residual: Arrays

    def __init__(self) -> None:
        self.residual = {}
        self._number = -1
        self._proposed: Arrays | None = None

    def propose(self, number: int, residual: Arrays) -> None:
        """Say what is left here if a mean is made.

        Args:
            number: Of the mean.
            residual: Takes the place of the present one; not changed any more.
        """
        self._number, self._proposed = number, residual

    def settle_(self, latest: int) -> None:
        """Take over what was proposed for a mean that exists; forget it otherwise.

        Args:
            latest: Number of the last mean that anybody has.
        """
        if self._proposed is not None and self._number == latest:
            self.residual = self._proposed
        self._proposed = None

    def restore_(self, residual: Arrays) -> None:
        """Go on with a residual, of this replica or of several, added up."""
        self.residual, self._proposed = residual, None


FRAME = "dense8 "  # before dtype, shape and name of an array that is a frame
# Counts stay within int32, and a block whose largest number is 2**-23 of that of the
# array still has eight bits.
COUNT_BITS = 30
# Exponents of a grid: it has to be exact in float32, as 2**31 times it must be.
LEAST, MOST_BITS_ = -126, 96


class Rounded(NamedTuple):
    """Arrays as they travel, and what that leaves."""

    sent: Arrays  # frames, or the arrays themselves
    left: Arrays  # array - what is read of its frame, where that is not 0


def rounded(arrays: Arrays, stamp: Stamp) -> Rounded:
    """Write arrays as DENSE8 frames.

    An array stays as it is if a frame would not be smaller, or could not hold it: NaN
    and infinities arrive as such.

    Args:
        arrays: Floating ones, not changed.
        stamp: Of all frames.

    Example:
        >>> array = np.linspace(-1, 1, 256, dtype=np.float32)
        >>> sent, left = rounded({"a": array}, Stamp(7, 0, 1, 5))
        >>> [(name, frame.nbytes) for name, frame in sent.items()]
        [('dense8 <f4 256 a', 324)]
        >>> bool(np.all(read(sent)["a"] + left["a"] == array))
        True
    """
    sent: dict[str, NDArray[Any]] = {}
    left: dict[str, NDArray[Any]] = {}
    for name, array in arrays.items():
        written = _written(array, stamp)
        if written is None:
            sent[name] = array
            continue
        frame, values_N = written
        shape = ",".join(map(str, array.shape))
        sent[f"{FRAME}{array.dtype.str} {shape} {name}"] = frame
        rest = array - values_N.reshape(array.shape)
        if rest.any():
            left[name] = rest
    return Rounded(sent, left)


def _written(
    array: NDArray[Any], stamp: Stamp
) -> tuple[NDArray[np.uint8], NDArray[Any]] | None:
    """A frame and what is read of it; None: it would be of no use."""
    grid = _grid(array)
    if grid is None:
        return None
    steps_N = array.reshape(-1) / grid
    quantized = quantize(np.rint(steps_N, out=steps_N).astype(np.int32))
    frame = codec.encode_dense8(stamp, grid, quantized)
    if frame.nbytes >= array.nbytes:
        return None
    return frame, _values(counts_of(quantized), grid, array.dtype)


def read(arrays: Arrays) -> dict[str, NDArray[Any]]:
    """Arrays as others have sent them, each under its own name.

    Raises:
        CodecError: If a frame is damaged.
    """
    return dict(_read(name, array) for name, array in arrays.items())


def _read(full: str, array: NDArray[Any]) -> tuple[str, NDArray[Any]]:
    if not full.startswith(FRAME):
        return full, array
    _, kind, shape, name = full.split(" ", 3)
    update = codec.decode(array.data)
    assert isinstance(update, codec.DenseUpdate)
    values_N = _values(update.counts_N, update.grid, np.dtype(kind))
    return name, values_N.reshape([int(length) for length in shape.split(",")])


def _grid(array: NDArray[Any]) -> float | None:
    """The step that suits an array; None: there is none."""
    largest = float(np.abs(array).max(initial=0.0))
    exponent = max(LEAST, math.frexp(largest)[1] - COUNT_BITS)
    if not array.size or not math.isfinite(largest) or exponent > MOST_BITS_:
        return None
    return math.ldexp(1.0, exponent)


def _values(
    counts_N: NDArray[np.int32], grid: float, dtype: np.dtype[Any]
) -> NDArray[Any]:
    values_N: NDArray[Any] = counts_N.astype(dtype)
    values_N *= grid
    return values_N


class Terms(ABC):
    """One replica's part in one mean.

    Attributes:
        kind: Of what travels.
        sent_bytes: Of what this replica adds to the mean, with those below it.
    """

    kind: str
    sent_bytes: int = 0

    @abstractmethod
    def own(self, weight: float | None) -> Arrays:
        """What this replica adds; empty: nothing.

        Args:
            weight: Of what it has trained; None: it has not.
        """

    @abstractmethod
    def add(self, sums: Sequence[Arrays]) -> Arrays:
        """Its own, and what those below it have sent, as it goes on."""

    @abstractmethod
    def mean(self, total: Arrays) -> Arrays:
        """What the root has made, as all are to have it."""


class Whole(Terms):
    """Everything as it is, and what rounding has left before: none is left then.

    Args:
        shares: Of the replica.
        feedback: Of the replica.
        number: Of the mean.
    """

    kind = "MEAN"

    def __init__(self, shares: Shares, feedback: Feedback, number: int) -> None:
        self._shares = shares
        self._residual = feedback.residual
        feedback.propose(number, {})

    @override
    def own(self, weight: float | None) -> Arrays:
        own = _added(
            {} if weight is None else self._shares.take(weight), self._residual
        )
        self.sent_bytes = sum(array.nbytes for array in own.values())
        return own

    @override
    def add(self, sums: Sequence[Arrays]) -> Arrays:
        return add(sums)

    @override
    def mean(self, total: Arrays) -> Arrays:
        return total


class Differences(Terms):
    """How far all have moved from what they had in common, rounded at each node.

    What rounding leaves there is sent with the next mean. What rounding could harm
    goes as it is, see :func:`daskdl.training.tree_reduce.is_linear`.

    Args:
        shares: Of the replica.
        common: What all had after the last mean, of what is linear.
        feedback: Of the replica.
        stamp: Of the frames; its sequence is the number of the mean.
    """

    kind = Kind.DENSE8.name

    def __init__(
        self, shares: Shares, common: Arrays, feedback: Feedback, stamp: Stamp
    ) -> None:
        self._shares = shares
        self._common = common
        self._feedback = feedback
        self._stamp = stamp

    @override
    def own(self, weight: float | None) -> Arrays:
        residual = self._feedback.residual
        return _added({} if weight is None else self._moved(weight), residual)

    def _moved(self, weight: float) -> Arrays:
        moved = self._shares.take(1.0)
        for name, common in self._common.items():
            moved[name] = moved[name] - common if name in moved else -common
        return {
            name: array * weight if name.startswith(SUM) else array
            for name, array in moved.items()
        }

    @override
    def add(self, sums: Sequence[Arrays]) -> Arrays:
        total = add([read(one) for one in sums])
        linear = {name: array for name, array in total.items() if is_linear(name)}
        others = {name: array for name, array in total.items() if name not in linear}
        frames, left = rounded(linear, self._stamp)
        self._feedback.propose(self._stamp.sequence, left)
        sent = {**others, **frames}
        self.sent_bytes = sum(array.nbytes for array in sent.values())
        return sent

    @override
    def mean(self, total: Arrays) -> Arrays:
        return _added(read(total), self._common)


def _added(one: Arrays, two: Arrays) -> Arrays:
    there = [arrays for arrays in (one, two) if arrays]
    return add(there) if there else {}


BROKEN = "broken"  # the one name in what is passed on when somebody was lost


class Reduction:
    """One replica's part in a reduction.

    Args:
        channel: Of this replica.
        routes: Of those who take part; the generation tells reductions apart.
        root: Where the result is made.
        replica: This one.
    """

    def __init__(
        self, channel: Channel, routes: Routes, root: int, replica: int
    ) -> None:
        self._channel = channel
        self._children = routes.children(root, replica)
        above = [m for m in routes.members if replica in routes.children(root, m)]
        self._parent = above[0] if above else None
        self._number = routes.generation

    def result(
        self,
        own: Arrays,
        add: Callable[[Sequence[Arrays]], Arrays],
        finish: Callable[[Arrays], Arrays],
    ) -> Arrays | None:
        """Take part, and return the result.

        Args:
            own: What this replica adds; empty: nothing.
            add: Adds up several.
            finish: Makes the result of the sum; called at the root alone.

        Returns:
            None if somebody was lost who was needed. Others may have it even so.
        """
        total = self._total(own, add)
        if self._parent is None:
            result = None if total is None else finish(total)
        else:
            self._channel.publish_blob(f"sum {self._number}", _or_broken(total))
            result = self._fetch(self._parent, f"mean {self._number}")
        if self._children:
            self._channel.publish_blob(f"mean {self._number}", _or_broken(result))
        return result

    def _total(
        self, own: Arrays, add: Callable[[Sequence[Arrays]], Arrays]
    ) -> Arrays | None:
        shares = [own] if own else []
        whole = True
        for child in self._children:
            share = self._fetch(child, f"sum {self._number}")
            whole = whole and share is not None
            if share:
                shares.append(share)
        if not whole:
            return None
        return add(shares) if shares else {}

    def _fetch(self, replica: int, name: str) -> Arrays | None:
        fetched = self._channel.fetch_blob(replica, name)
        return None if fetched is None or BROKEN in fetched else fetched


def _or_broken(arrays: Arrays | None) -> Arrays:
    return {BROKEN: np.empty(0)} if arrays is None else arrays


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
