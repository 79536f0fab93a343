"""Reduction of replicas' states along a tree, and the outer optimizer.

This module names arrays, rounds them with error feedback, and writes them to blobs.
"""

import enum
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from daskdl import codec
from daskdl.channel.base import Channel
from daskdl.channel.protocol import Arrays, MeshTopology
from daskdl.codec import Kind, Stamp, counts_of, quantize
from daskdl.compression.flat import (
    FROZEN,
    FlatParameters,
    Untrained,
    working_dtype,
)
from daskdl.data.checks import trainable
from daskdl.errors import CodecError, OptionError
from daskdl.serialization import Packed
from daskdl.training.optimizer_step import restore_optimizer_, state_of
from daskdl.training.state import check_like, class_name, is_same_class

ALMOST, ONE = 1e-9, np.ones(1)
# Entries of optimizer states that change parameters linearly.
LINEAR_STATE = frozenset({"momentum_buffer"})
NUMERIC = (Tensor, int, float)  # types of the entries that are averaged
PLAIN = {"int": int, "float": float, "bool": bool}  # types of plain numbers in a state


class ReduceOp(enum.StrEnum):
    """How the arrays of several replicas are combined."""

    SUM = "sum"
    MAX = "max"


class Key(NamedTuple):
    """Names one array of a replica's state.

    Example:
        >>> Key(ReduceOp.SUM, "parameters").linear
        True
        >>> Key(ReduceOp.SUM, "optimizer", "exp_avg", 3, "float32").linear
        False
    """

    op: ReduceOp
    part: str  # "parameters", "untrained", "weight" or "optimizer"
    name: str = ""  # name of an untrained array, or of an optimizer's entry
    number: int = 0  # number of a flat vector, or of a parameter in the optimizer
    dtype: str = ""  # dtype of an optimizer's tensor, or type of a plain number

    @property
    def linear(self) -> bool:
        """Whether small errors in the array cause only small errors in the parameters.

        This holds for parameters and momentum. Optimizers like Adam divide by the
        square root of their state: an error that is small relative to the largest
        number of a block may be many times the smallest number, and distort its step.
        """
        return self.op is ReduceOp.SUM and (
            self.part == "parameters"
            or (self.part == "optimizer" and self.name in LINEAR_STATE)
        )


Reduced = Mapping[Key, NDArray[Any]]  # one replica's arrays, or a sum of several


def total_of(states: Sequence[Reduced]) -> dict[Key, NDArray[Any]]:
    """Combine several replicas' arrays by `ReduceOp`; the order decides the rounding.

    Example:
        >>> one, two = Key(ReduceOp.SUM, "weight"), Key(ReduceOp.MAX, "untrained")
        >>> first = {one: np.array([0.5]), two: np.array([3])}
        >>> second = {one: np.array([1.0]), two: np.array([2])}
        >>> [array.tolist() for array in total_of([first, second]).values()]
        [[1.5], [3]]
    """
    total: dict[Key, NDArray[Any]] = {}
    for state in states:
        for key, array in state.items():
            if key not in total:
                total[key] = array
            elif key.op is ReduceOp.MAX:
                total[key] = np.maximum(total[key], array)
            else:
                # Diverged parameters are detected before the next sync.
                with np.errstate(over="ignore", invalid="ignore"):
                    total[key] = total[key] + array
    return total


# ---- blobs

KEYS = "keys"  # name of the list of keys in a blob; the arrays are "0", "1" and so on
# Counts stay within int32, and a block whose largest number is 2**-23 of that of the
# array still has eight bits.
COUNT_BITS = 30
# Exponents of a grid: the grid and 2**31 times the grid must be exact in float32.
MIN_EXPONENT, MAX_EXPONENT = -126, 96


def to_blob(state: Reduced, stamp: Stamp | None = None) -> tuple[Arrays, Reduced]:
    """Write arrays to a blob for other replicas.

    With a stamp, linear arrays become DENSE8 frames if a frame is smaller and can hold
    the array. Arrays with NaN or infinity are written exactly.

    Args:
        state: Arrays, not changed.
        stamp: Stamp of all frames; None: no rounding.

    Returns:
        The blob, and the residual, which is the array minus its rounded value, for
        arrays where it is not 0.

    Example:
        >>> key = Key(ReduceOp.SUM, "parameters")
        >>> array = np.linspace(-1, 1, 256, dtype=np.float32)
        >>> blob, left = to_blob({key: array}, Stamp(7, 0, 1, 5))
        >>> blob["0"].nbytes
        324
        >>> bool(np.all(from_blob(blob)[key] + left[key] == array))
        True
    """
    keys: list[tuple[Any, ...]] = []
    blob: dict[str, NDArray[Any]] = {}
    left: dict[Key, NDArray[Any]] = {}
    for number, (key, array) in enumerate(state.items()):
        written = _frame(array, stamp) if stamp and key.linear else None
        if written is None:
            keys.append((*key, None, None))
            blob[str(number)] = array
            continue
        frame, values_N = written
        keys.append((*key, array.dtype.str, array.shape))
        blob[str(number)] = frame
        error = array - values_N.reshape(array.shape)
        if error.any():
            left[key] = error
    return {KEYS: np.frombuffer(json.dumps(keys).encode(), np.uint8), **blob}, left


def from_blob(blob: Arrays) -> dict[Key, NDArray[Any]]:
    """Read a blob of `to_blob`."""
    state = {}
    try:
        for number, fields in enumerate(json.loads(blob[KEYS].tobytes())):
            op, *key, kind, shape = fields
            array = blob[str(number)]
            if kind is not None:
                update = codec.decode(array.data)
                assert isinstance(update, codec.DenseUpdate)
                values_N = _values(update.counts_N, update.grid, np.dtype(kind))
                array = values_N.reshape(shape)
            state[Key(ReduceOp(op), *key)] = array
    except (LookupError, TypeError, ValueError) as error:
        if isinstance(error, CodecError):
            raise
        raise CodecError(f"arrays of another replica are damaged: {error}") from error
    return state


def _frame(
    array: NDArray[Any], stamp: Stamp
) -> tuple[NDArray[np.uint8], NDArray[Any]] | None:
    """Return a frame and its decoded values, or None if a frame does not pay off."""
    largest = float(np.abs(array).max(initial=0.0))
    exponent = max(MIN_EXPONENT, math.frexp(largest)[1] - COUNT_BITS)
    if not array.size or not math.isfinite(largest) or exponent > MAX_EXPONENT:
        return None
    grid = math.ldexp(1.0, exponent)
    steps_N = array.reshape(-1) / grid
    quantized = quantize(np.rint(steps_N, out=steps_N).astype(np.int32))
    frame = codec.encode_dense(stamp, grid, quantized)
    if frame.nbytes >= array.nbytes:
        return None
    return frame, _values(counts_of(quantized), grid, array.dtype)


def _values(
    counts_N: NDArray[np.int32], grid: float, dtype: np.dtype[Any]
) -> NDArray[Any]:
    values_N: NDArray[Any] = counts_N.astype(dtype)
    values_N *= grid
    return values_N


# ---- optimizer states


def optimizer_arrays(optimizer: Optimizer, weight: float) -> dict[Key, NDArray[Any]]:
    """Return an optimizer's state as new arrays for a mean over replicas.

    Tensors are multiplied by the replica's weight, in float64 where the state is
    float64, else in float32. Numbers and zero-dimensional tensors, such as step
    counters, are not: the mean has their maximum.
    """
    arrays: dict[Key, NDArray[Any]] = {}
    for number, entries in state_of(optimizer)["state"].items():
        for name, value in entries.items():
            op, kind = ReduceOp.MAX, type(value).__name__
            if isinstance(value, Tensor):
                kind = str(value.dtype).removeprefix("torch.")
                if value.dim() > 0:
                    wide = torch.promote_types(value.dtype, torch.float32)
                    op = ReduceOp.SUM
                    value = value.detach().to("cpu", wide).numpy() * weight
                else:
                    value = value.item()
            elif not isinstance(value, int | float):
                continue
            arrays[Key(op, "optimizer", name, number, kind)] = np.asarray(value)
    return arrays


def rest_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state dict without the entries in `optimizer_arrays`."""
    state = optimizer.state_dict()
    others = {
        number: {n: v for n, v in entries.items() if not isinstance(v, NUMERIC)}
        for number, entries in state["state"].items()
    }
    return {**state, "state": others}


def load_optimizer_(
    optimizer: Optimizer, arrays: Reduced, others: Mapping[str, Any]
) -> None:
    """Load a mean of `optimizer_arrays`, and the `rest_of` one optimizer."""
    state = {number: dict(entries) for number, entries in others["state"].items()}
    for key, array in arrays.items():
        if key.part == "optimizer":
            entries = state.setdefault(key.number, {})
            if key.dtype in PLAIN:
                entries[key.name] = PLAIN[key.dtype](array.item())
            else:
                tensor = torch.from_numpy(np.array(array))
                entries[key.name] = tensor.to(getattr(torch, key.dtype))
    optimizer.load_state_dict({**others, "state": state})


# ---- state and error feedback


OUTER = "outer"  # name of the outer optimizer's state in a blob


class ReduceState:
    """The averaged state: a module, optionally its optimizer and an outer optimizer.

    Args:
        module: The memory of its parameters is replaced, see `FlatParameters`.
        optimizer: Optimizer of the module; None: its state is not averaged.
        outer: Creates the outer optimizer; None: there is none.
        compressed: Whether rounded differences are averaged.
        untrained: Untrained tensors of the module.

    Attributes:
        residual: Rounding errors by key, sent with the next sum; empty without any. Not
            changed in place.
        common: Linear arrays that all replicas had after the last mean; None if unknown
            or not needed.

    Source:
        Error feedback: Seide and others, "1-Bit Stochastic Gradient Descent",
        Interspeech 2014.
    """

    residual: Reduced
    common: Reduced | None

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        outer: Callable[[Any], Optimizer] | None,
        *,
        compressed: bool,
        untrained: Untrained,
    ) -> None:
        self.compressed = compressed
        self.residual = {}
        self.common = None
        self._proposed: tuple[int, Reduced] | None = None
        self.outer = None if outer is None else OuterOptimizer(outer, module)
        self._parameters = FlatParameters(module)
        self._optimizer = optimizer
        self._untrained = untrained

    def propose(self, number: int, residual: Reduced) -> None:
        """Propose the residual to keep if the mean with this number is computed."""
        self._proposed = number, residual

    def resolve_residual_(self, latest: int) -> None:
        """Keep the proposed residual if its mean exists; discard it otherwise.

        A replica may learn only in the next round whether the mean of its sum was
        computed. Without the mean, it sends a new sum with the previous residual.
        """
        if self._proposed is not None and self._proposed[0] == latest:
            self.residual = self._proposed[1]
        self._proposed = None

    def keep_common_(self) -> None:
        """Copy the linear arrays as `common`, if compressed and not done yet.

        Call before the first step after a mean or the start, when all replicas are
        equal.
        """
        if self.compressed and self.common is None:
            arrays = self.take(1.0)
            self.common = {key: a for key, a in arrays.items() if key.linear}

    def take(self, weight: float) -> dict[Key, NDArray[Any]]:
        """Return this replica's share of a mean.

        Returns:
            New arrays; `ReduceOp.SUM` arrays are multiplied by the weight.
        """
        self._parameters.gather_()
        arrays: dict[Key, NDArray[Any]] = {}
        for number, group in enumerate(self._parameters.groups):
            flat = group.flat.detach().to("cpu", working_dtype(group.flat.dtype))
            key = Key(ReduceOp.SUM, "parameters", number=number)
            arrays[key] = flat.numpy() * weight
        for name, array in self._untrained.take().items():
            if array.dtype.kind == "f":
                share = array * array.dtype.type(weight)
                arrays[Key(ReduceOp.SUM, "untrained", name)] = share
                if name.startswith(FROZEN):  # some replicas may not have changed it
                    arrays[Key(ReduceOp.SUM, "weight", name)] = np.array([weight])
            else:
                arrays[Key(ReduceOp.MAX, "untrained", name)] = array
        if self._optimizer is not None:
            arrays |= optimizer_arrays(self._optimizer, weight)
        return arrays

    def load_(self, arrays: Reduced) -> None:
        """Load a mean."""
        self._parameters.gather_()
        with torch.no_grad():
            for number, group in enumerate(self._parameters.groups):
                key = Key(ReduceOp.SUM, "parameters", number=number)
                group.flat.copy_(torch.from_numpy(np.array(arrays[key])))
        self._untrained.load_(_untrained_means(arrays))
        if self._optimizer is not None:
            load_optimizer_(self._optimizer, arrays, rest_of(self._optimizer))
        self.common = None

    def to_blob(self) -> Arrays:
        """Return the whole state for another replica, as new arrays."""
        return self.with_outer(to_blob(self.take(1.0))[0])

    def with_outer(self, blob: Arrays) -> Arrays:
        """Add the outer optimizer's state, for replicas without the last mean."""
        return blob if self.outer is None else {**blob, OUTER: self.outer.payload()}

    def load_blob_(self, blob: Arrays) -> None:
        """Load another replica's state."""
        self.load_(from_blob(blob))
        if self.outer is not None:
            self.outer.load_(blob[OUTER])

    def residual_norm(self) -> float:
        """Return the norm of the parameters' residual; NaN without compression."""
        if not self.compressed:
            return math.nan
        left = self.residual.items()
        parts = [a.reshape(-1) for key, a in left if key.part == "parameters"]
        return math.sqrt(sum(float(np.dot(part, part)) for part in parts))


def _untrained_means(arrays: Reduced) -> dict[str, NDArray[Any]]:
    means: dict[str, NDArray[Any]] = {}
    for key, array in arrays.items():
        if key.part == "untrained":
            weight = arrays.get(Key(ReduceOp.SUM, "weight", key.name), ONE)
            total = float(weight[0])
            # Weights that sum to 1, apart from rounding, leave the array unchanged.
            is_complete = abs(total - 1.0) < ALMOST
            means[key.name] = array if is_complete else array / array.dtype.type(total)
    return means


BROKEN = "broken"  # the only name in a blob sent after a replica has failed


class TreeMean:
    """One replica's side of one mean, which is reduced along a tree of replicas.

    An exact mean sums all arrays without rounding, and includes the residuals. Else
    replicas sum the differences to the common state and round at each node of the tree;
    the residual of a node is sent with the next mean. Arrays for which rounding is
    harmful are sent exactly, see `Key.linear`.

    Attributes:
        kind: ``"MEAN"`` if exact, else ``"DENSE8"``.
        sent_bytes: Bytes of the sum over this replica and its descendants.
    """

    kind: str
    sent_bytes: int

    def __init__(
        self,
        state: ReduceState,
        channel: Channel,
        topology: MeshTopology,
        root: int,
        stamp: Stamp,
        *,
        exact: bool,
    ) -> None:
        replica, members = stamp.origin, topology.members
        self._state = state
        self._channel = channel
        self._stamp = stamp
        self._exact = exact or not state.compressed
        self._children = topology.children(root, replica)
        above = [m for m in members if replica in topology.children(root, m)]
        self._parent = above[0] if above else None
        self.kind = "MEAN" if self._exact else Kind.DENSE8.name
        self.sent_bytes = 0
        if not self._exact:
            state.keep_common_()  # there may have been no step since the mean
        self._common = state.common or {}

    def reduce(self, weight: float | None, *, with_outer: bool) -> Arrays | None:
        """Take part in the reduction, and return the mean.

        Args:
            weight: Weight of this replica; None: it has not trained.
            with_outer: Whether a replica also needs the outer optimizer's state.

        Returns:
            The mean, or None if a required replica has failed. Other replicas may still
            have the mean.
        """
        share = self._share(weight)
        states, lost = [share] if share else [], False
        for child in self._children:
            blob = self._fetch(child, "sum")
            lost = lost or blob is None
            if blob:
                states.append(from_blob(blob))
        # Even an empty sum is published: the parent waits for it.
        total = None if lost else self._sum(states) if states else {}
        if self._parent is not None:
            self._publish("sum", total)
            mean = self._fetch(self._parent, "mean")
        else:
            late = total is not None and with_outer
            mean = self._state.with_outer(total or {}) if late else total
        if self._children:
            self._publish("mean", mean)
        return mean

    def _share(self, weight: float | None) -> Reduced:
        """Return this replica's contribution; empty if there is none."""
        if weight is None:
            share: Reduced = {}
        elif self._exact:
            share = self._state.take(weight)
        else:
            moved = self._state.take(1.0)
            for key, common in self._common.items():
                moved[key] = moved[key] - common if key in moved else -common
            share = {
                key: array if key.op is ReduceOp.MAX else array * weight
                for key, array in moved.items()
            }
        return total_of([share, self._state.residual])

    def _sum(self, states: Sequence[Reduced]) -> Arrays:
        stamp = None if self._exact else self._stamp
        blob, left = to_blob(total_of(states), stamp)
        self._state.propose(self._stamp.sequence, left)
        self.sent_bytes = sum(a.nbytes for n, a in blob.items() if n != KEYS)
        return blob

    def _publish(self, name: str, blob: Arrays | None) -> None:
        broken = {BROKEN: np.empty(0)}
        name = f"{name} {self._stamp.sequence}"
        self._channel.publish_blob(name, broken if blob is None else blob)

    def _fetch(self, replica: int, name: str) -> Arrays | None:
        blob = self._channel.fetch_blob(replica, f"{name} {self._stamp.sequence}")
        return None if blob is None or BROKEN in blob else blob

    def load_(self, mean: Arrays, *, step: bool) -> None:
        """Continue from the mean, or from the outer step towards it.

        Args:
            mean: Result of `reduce`.
            step: Whether to make an outer step; else the outer optimizer only takes the
                mean as its common parameters.
        """
        total, outer = from_blob(mean), self._state.outer
        self._state.load_(total if self._exact else total_of([total, self._common]))
        if outer is not None:
            if OUTER in mean:
                outer.load_(mean[OUTER])
            outer.step_() if step else outer.follow_()


class OuterOptimizer:
    """Applies an optimizer to means: common parameters minus the mean is the gradient.

    Each replica has an instance, and all instances make the same steps.

    Source:
        Douillard and others, "DiLoCo: Distributed Low-Communication Training of
        Language Models", 2023, algorithm 1.
    """

    def __init__(self, make: Callable[[Any], Optimizer], module: nn.Module) -> None:
        self._module = module
        self._common = [nn.Parameter(p.detach().clone()) for p in trainable(module)]
        self._optimizer = make(self._common)

    def step_(self) -> None:
        """Make an outer step from the mean in the module; load the result into it."""
        for common, mean in zip(self._common, trainable(self._module), strict=True):
            common.grad = common.detach() - mean.detach()
        self._optimizer.step()
        with torch.no_grad():
            for common, mean in zip(self._common, trainable(self._module), strict=True):
                mean.copy_(common)
                common.grad = None

    def values(self) -> dict[str, Any]:
        """Return the common parameters and the optimizer's state, not copied."""
        return {
            "common": [parameter.detach() for parameter in self._common],
            "optimizer": self._optimizer.state_dict(),
            "kind": class_name(self._optimizer),
        }

    def restore_(self, values: Mapping[str, Any]) -> None:
        """Restore the result of `values`."""
        expected = {**self.values(), "optimizer": {}}
        check_like(expected, values, "exchange.outer")
        kind = class_name(self._optimizer)
        if not is_same_class(values["kind"], kind):
            raise OptionError(
                f"outer makes a {kind}, and the state to go on from is of a "
                f"{values['kind']}; resume with the same one, or with none"
            )
        with torch.no_grad():
            for common, value in zip(self._common, values["common"], strict=True):
                common.copy_(value)
        restore_optimizer_(self._optimizer, values["optimizer"])

    def follow_(self) -> None:
        """Take the module's parameters as the common ones, without a step."""
        with torch.no_grad():
            parameters = trainable(self._module)
            for common, parameter in zip(self._common, parameters, strict=True):
                common.copy_(parameter)

    def payload(self) -> NDArray[np.uint8]:
        """Return the result of `values` as packed bytes."""
        return Packed(self.values(), "outer").payload

    def load_(self, state: NDArray[np.uint8]) -> None:
        """Restore the `payload` of another replica."""
        packed: Packed[dict[str, Any]] = Packed.of(state, "outer")
        self.restore_(packed.unpack())
