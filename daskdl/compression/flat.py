"""Conversion of a module's parameters and buffers to flat vectors and back.

Parameters are grouped by (dtype, device) in the order of their first appearance in
``named_parameters``; the groups are concatenated. Replicas and the client agree on the
order because their modules are built alike. Buffers, and frozen parameters that the
model changes itself, are not compressed: replicas average them at sync points.

Shape suffixes: N = parameters over all groups.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from daskdl.errors import ModelError

TRAINABLE = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
MAX_SIZE = 2**31 - 1  # an entry is a signed one-based int32 position
# 2**-24 of the largest parameter: the resolution of float32 there.
GRID_BITS = 24
ALIGNMENT = 64  # bytes: a cache line, and the widest vector instruction


class DtypeGroup(NamedTuple):
    """The parameters of one dtype on one device, as views of one vector."""

    flat: Tensor  # shape (sum of numels,)
    start: int  # position of flat[0] among all N
    names: tuple[str, ...]
    numels: tuple[int, ...]


class FlatParameters:
    """Turns the trainable parameters of a module into views of flat vectors.

    Parameter objects, values and gradients stay the same, so optimizers keep working.
    Frozen parameters are left alone, and tied ones appear once. Memory formats such as
    channels-last become contiguous. A model may give a parameter other memory in its
    forward pass, as ``flatten_parameters`` of recurrent layers does on CUDA, see
    :meth:`gather_`.

    Args:
        module: The module; the memory of its parameters is replaced.

    Raises:
        ModelError: If no parameter is trainable, or a trainable one is not a dense,
            finite, initialized tensor of float32, bfloat16, float16 or float64, or
            overlaps another parameter's memory.

    Example:
        >>> parameters = FlatParameters(torch.nn.Linear(2, 1))
        >>> parameters.size, parameters.slices
        (3, {'weight': slice(0, 2, None), 'bias': slice(2, 3, None)})
    """

    groups: tuple[DtypeGroup, ...]
    size: int  # N
    slices: dict[str, slice]  # positions by parameter name, ascending

    def __init__(self, module: nn.Module) -> None:
        layout = _trainable_groups(module)
        self.size = 0
        self.slices = {}
        for name, parameter in (pair for named in layout for pair in named):
            if not parameter.isfinite().all():
                raise ModelError(f"parameter {name!r} has values that are not finite")
            self.slices[name] = slice(self.size, self.size + parameter.numel())
            self.size = self.slices[name].stop
        self.groups = tuple(
            _flatten_(named, self.slices[named[0][0]].start) for named in layout
        )
        parameters = [p for named in layout for _, p in named if p.numel()]
        self._places = [(parameter, parameter.detach()) for parameter in parameters]
        self._addresses = [parameter.data_ptr() for parameter in parameters]

    def gather_(self, *, copy: bool = True) -> None:
        """Make parameters that have other memory now views of the flat vectors again.

        Args:
            copy: Whether the vectors get the values of these parameters; else the
                parameters get those of the vectors.
        """
        if [p.data_ptr() for p, _ in self._places] == self._addresses:
            return
        for parameter, view in self._places:
            if parameter.data_ptr() != view.data_ptr():
                if copy:
                    view.copy_(parameter.detach())
                parameter.data = view


Named = list[tuple[str, nn.Parameter]]


def _trainable_groups(module: nn.Module) -> list[Named]:
    groups: dict[tuple[torch.dtype, torch.device], Named] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            _check_kind(name, parameter)
            key = (parameter.dtype, parameter.device)
            groups.setdefault(key, []).append((name, parameter))
    size = sum(p.numel() for named in groups.values() for _, p in named)
    if size == 0:
        raise ModelError("model has no trainable parameters; set requires_grad on some")
    if size > MAX_SIZE:
        raise ModelError(f"model has {size} trainable parameters, limit is {MAX_SIZE}")
    _check_overlap(dict(module.named_parameters()))
    return list(groups.values())


def _check_kind(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.UninitializedParameter) or parameter.is_meta:
        raise ModelError(
            f"parameter {name!r} is not initialized; run one forward pass on the "
            "device to train on first"
        )
    if parameter.dtype not in TRAINABLE or parameter.layout != torch.strided:
        raise ModelError(
            f"parameter {name!r} is {parameter.dtype} ({parameter.layout}); trainable "
            "ones must be dense float32, bfloat16, float16 or float64"
        )


# Flattening would untie two Parameter objects that share memory.
def _check_overlap(parameters: dict[str, nn.Parameter]) -> None:
    spans = []
    for name, parameter in parameters.items():
        if parameter.layout == torch.strided and parameter.numel() > 0:
            steps = zip(parameter.shape, parameter.stride(), strict=True)
            last = sum((length - 1) * stride for length, stride in steps)
            start = parameter.data_ptr()
            stop = start + (last + 1) * parameter.element_size()
            spans.append((str(parameter.device), start, stop, name))
    for before, after in pairwise(sorted(spans)):
        trained = any(parameters[span[-1]].requires_grad for span in (before, after))
        if trained and before[0] == after[0] and after[1] < before[2]:
            raise ModelError(
                f"parameters {before[-1]!r} and {after[-1]!r} share memory; to tie "
                "them, assign the same Parameter object to both"
            )


def _flatten_(named: Named, start: int) -> DtypeGroup:
    names, parameters = zip(*named, strict=True)
    size = sum(parameter.numel() for parameter in parameters)
    flat = empty(size, parameters[0].dtype, parameters[0].device)
    with torch.no_grad():
        torch.cat([parameter.reshape(-1) for parameter in parameters], out=flat)
    numels = [parameter.numel() for parameter in parameters]
    for parameter, part in zip(parameters, torch.split(flat, numels), strict=True):
        parameter.data = part.view(parameter.shape)
    return DtypeGroup(flat, start, names, tuple(numels))


def empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized vector, aligned to 64 bytes as torch's vectors are.

    On the CPU numpy allocates the memory, because numpy requests huge pages. With small
    pages, applying an update with sparse entries takes more time for page look-ups than
    for arithmetic.

    Example:
        >>> empty(3, torch.bfloat16, torch.device("cpu")).shape
        torch.Size([3])
    """
    if device.type != "cpu":
        return torch.empty(size, dtype=dtype, device=device)
    length = size * dtype.itemsize
    memory = np.empty(length + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + length]).view(dtype)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of local: float64 for float64 parameters, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def grid_for(parameters: FlatParameters) -> float:
    """Return the grid, the unit of shared: a power of two, at least 2**-24.

    Example:
        >>> math.log2(grid_for(FlatParameters(torch.nn.Linear(2, 1))))
        -24.0
    """
    largest = max(
        float(group.flat.abs().max()) for group in parameters.groups if len(group.flat)
    )
    mantissa, exponent = math.frexp(max(1.0, largest))
    # log2 rounds; a power of two is its own ceiling.
    return math.ldexp(1.0, exponent - (mantissa == 0.5) - GRID_BITS)


def load_counts_(
    module: nn.Module,
    counts_N: npt.NDArray[np.int32],
    grid: float,
    *,
    add: bool = False,
) -> None:
    """Write a vector of counts into a module's trainable parameters.

    The module is not flattened, so the client's model stays an ordinary module.

    Args:
        module: Built like the replicas' modules. Changed in place.
        counts_N: Values in steps of ``grid``, in the order of FlatParameters.
        grid: Size of one step, parameter units, a power of two.
        add: Add the values to the parameters instead of replacing them.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> load_counts_(layer, np.array([1, 2, -3], np.int32), grid=0.5)
        >>> load_counts_(layer, np.array([1, 0, 0], np.int32), grid=0.25, add=True)
        >>> layer.weight.tolist(), layer.bias.tolist()
        ([[0.75, 1.0]], [-1.5])
    """
    parameters = [p for named in _trainable_groups(module) for _, p in named]
    numels = [parameter.numel() for parameter in parameters]
    if len(counts_N) != sum(numels):
        raise ModelError(f"need {sum(numels)} parameters, got {len(counts_N)} values")
    # Copied, because torch has no read-only tensors.
    parts = torch.split(torch.from_numpy(np.array(counts_N)), numels)
    with torch.no_grad():
        for parameter, part in zip(parameters, parts, strict=True):
            # The same rounding as on replicas.
            values = part.to(working_dtype(parameter.dtype)) * grid
            values = values.view(parameter.shape).to(parameter.device)
            if add:
                parameter.add_(values)
            else:
                parameter.copy_(values)


# Names of arrays: one for all floating buffers, one for all integer buffers, and a
# prefix for the array of each frozen parameter.
FLOATING, INTEGER, FROZEN = "floating buffers", "integer buffers", "frozen "


class Untrained:
    """Tracks the tensors of a module that change without being trained.

    These are its buffers, and frozen parameters that the module changes itself, such as
    moving averages. Frozen parameters that never change are neither copied nor sent.

    Args:
        module: The module in its state at the start of the run, as on the client.

    Example:
        >>> layer = torch.nn.Linear(1, 1).requires_grad_(False)
        >>> untrained = Untrained(layer)
        >>> _ = layer.bias.data.fill_(0.5)
        >>> untrained.find_changed()
        >>> untrained.take()["frozen bias"]
        array([0.5], dtype=float32)
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forms = _forms(module)
        self._changed: dict[str, None] = {}  # frozen parameters that have changed
        self._checksums = _checksums(module)

    def find_changed(self) -> None:
        """Find frozen parameters that have changed; reads all frozen parameters.

        Exchanges call this before sending the arrays, and after steps 1, 2, 4, 8 and so
        on: a model that changes a frozen parameter mostly does so in every step from
        some step on, and a pass after each step would be expensive.
        """
        self._check()
        for name, checksum in _checksums(self._module).items():
            if checksum != self._checksums.get(name):
                self._changed[name] = None

    def _check(self) -> None:
        forms = _forms(self._module)
        for name in {**self._forms, **forms}:
            before, now = self._forms.get(name), forms.get(name)
            if before != now:
                raise ModelError(
                    f"{name} of the model was {before} before the fit and is {now} "
                    "now: replicas can average only tensors of constant shape and "
                    "dtype; set both before the fit, or train one replica"
                )

    def take(self) -> dict[str, npt.NDArray[Any]]:
        """Copy the buffers, and the frozen parameters that have changed.

        Returns:
            One-dimensional arrays by name: float64 of all floating buffers (complex
            ones as pairs), int64 of all integer and bool ones, each in the order of
            ``named_buffers``, and each frozen parameter.
        """
        self._check()
        arrays = {}
        for name, (dtype, tensors) in _places(self._module).items():
            if name in self._changed or not name.startswith(FROZEN):
                parts = [tensor.cpu().reshape(-1).to(dtype) for tensor in tensors]
                # The empty tensor is for modules without buffers.
                flat = torch.cat([torch.empty(0, dtype=dtype), *parts])
                arrays[name] = flat.numpy()
        return arrays

    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers, and the frozen parameters that have changed, as views."""
        parameters = self._module.named_parameters()
        frozen = [(n, p) for n, p in parameters if FROZEN + n in self._changed]
        return {n: t.detach() for n, t in (*frozen, *self._module.named_buffers())}

    def load_(self, arrays: Mapping[str, Any]) -> None:
        """Load arrays that `take` returned on any replica; see `load_untrained_`."""
        load_untrained_(self._module, arrays)
        self._changed.update((name, None) for name in arrays if name.startswith(FROZEN))


def average_untrained(
    packed: Sequence[tuple[Mapping[str, Any], int]],
) -> dict[str, npt.NDArray[Any]]:
    """Average the untrained tensors of several replicas.

    Args:
        packed: For each replica, the arrays that `Untrained.take` returned (other keys
            are ignored) and the number of examples trained on. The order affects
            rounding.

    Returns:
        Each array, averaged over the replicas that have it. Floating arrays: the mean
        weighted by examples, unweighted if all weights are 0; values on which all
        replicas agree are unchanged, infinities included. Others: the maximum.

    Example:
        >>> one, two = {"frozen a": np.float32([1])}, {"frozen a": np.float32([4])}
        >>> average_untrained([(one, 20), (two, 10), ({}, 5)])
        {'frozen a': array([2.], dtype=float32)}
    """
    names = dict.fromkeys(
        name
        for arrays, _ in packed
        for name in arrays
        if name in (FLOATING, INTEGER) or name.startswith(FROZEN)
    )
    return {
        name: _average(
            name, [(arrays[name], n) for arrays, n in packed if name in arrays]
        )
        for name in names
    }


def _average(
    name: str, packed: Sequence[tuple[npt.NDArray[Any], int]]
) -> npt.NDArray[Any]:
    sizes = {array.size for array, _ in packed}
    if len(sizes) != 1:
        raise ModelError(f"need {name} of one size, got {sorted(sizes)}")
    if packed[0][0].dtype.kind != "f":
        return np.asarray(np.max([array for array, _ in packed], axis=0))
    total = sum(examples for _, examples in packed)
    used = [(a, n if total else 1) for a, n in packed if n or not total]
    values = used[0][0]
    weighted, agreed = np.zeros(values.shape), np.ones(values.shape, bool)
    with np.errstate(invalid="ignore"):  # infinities of both signs average to NaN
        for array, examples in used:
            weighted += array * np.float64(examples)
            agreed &= array == values
    mean = weighted / sum(examples for _, examples in used)
    return np.where(agreed, values, mean.astype(values.dtype))


def load_untrained_(module: nn.Module, arrays: Mapping[str, Any]) -> None:
    """Load buffers and frozen parameters into a module."""
    places = {n: place for n, place in _places(module).items() if n in arrays}
    for name, (_, tensors) in places.items():
        size = sum(tensor.numel() for tensor in tensors)
        if arrays[name].size != size:
            raise ModelError(f"got {arrays[name].size} {name}, model has {size}")
    for name, (_, tensors) in places.items():
        # Copied, because torch has no read-only tensors.
        values = torch.from_numpy(np.array(arrays[name]))
        parts = torch.split(values, [tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def _places(module: nn.Module) -> dict[str, tuple[torch.dtype, list[Tensor]]]:
    """Return the dtype of each array, and the tensors concatenated in it, by name."""
    buffers = [_real(buffer.detach()) for buffer in module.buffers()]
    floating = [buffer for buffer in buffers if buffer.is_floating_point()]
    integer = [buffer for buffer in buffers if not buffer.is_floating_point()]
    places = {FLOATING: (torch.float64, floating), INTEGER: (torch.int64, integer)}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            tensor = _real(parameter.detach())
            half = tensor.dtype in (torch.bfloat16, torch.float16)  # unknown to numpy
            places[FROZEN + name] = (torch.float32 if half else tensor.dtype, [tensor])
    return places


def _forms(module: nn.Module) -> dict[str, str]:
    frozen = [(n, p) for n, p in module.named_parameters() if not p.requires_grad]
    return {
        n: f"{t.dtype} {tuple(t.shape)}" for n, t in (*frozen, *module.named_buffers())
    }


def _checksums(module: nn.Module) -> dict[str, int]:
    """Return the CRC-32 of each frozen parameter, by the name of its array."""
    checksums = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            plain = parameter.detach().cpu().contiguous().reshape(-1)
            data = plain.view(torch.uint8).numpy().data
            checksums[FROZEN + name] = zlib.crc32(data)
    return checksums


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
