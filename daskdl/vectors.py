"""A module's parameters as flat vectors and back.

No thresholds, no exchange: :mod:`daskdl.model_progress` works on what is built here.

Positions: parameters are grouped by (dtype, device) in order of first appearance in
``named_parameters``; groups follow each other. Replicas and the client must agree on
that order, which they do when their modules are built alike.

Shape suffix: N = parameters over all groups.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from daskdl.errors import ModelError

TRAINABLE = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
MAX_SIZE = 2**31 - 1  # an entry is a signed one-based int32 position
# A grid of 2**-24 of the largest parameter is float32's own resolution there.
GRID_BITS = 24
ALIGNMENT = 64  # bytes: a cache line, and the widest vector instruction


class Group(NamedTuple):
    """The parameters of one dtype on one device, as views into one vector."""

    flat: Tensor  # shape (numels summed,)
    start: int  # position of flat[0] among all N
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    numels: tuple[int, ...]


class FlatParameters:
    """Turn the trainable parameters of a module into views of flat vectors.

    Parameter objects stay the same (optimizers keep working), values and gradients
    too; frozen parameters are left alone, tied ones appear once. Memory formats such
    as channels-last become contiguous.

    Args:
        module: Its parameters' memory is replaced.

    Raises:
        ModelError: If nothing is trainable, or a trainable parameter has another dtype
            than float32, bfloat16, float16 or float64, is not initialised, is not
            finite, or overlaps another parameter's memory.

    Example:
        >>> parameters = FlatParameters(torch.nn.Linear(2, 1))
        >>> parameters.size, parameters.slices
        (3, {'weight': slice(0, 2, None), 'bias': slice(2, 3, None)})
    """

    groups: tuple[Group, ...]
    size: int  # N
    slices: dict[str, slice]  # of the N positions, in their order

    def __init__(self, module: nn.Module) -> None:
        layout = _layout(module)
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


Named = list[tuple[str, nn.Parameter]]


def _layout(module: nn.Module) -> list[Named]:
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
            f"parameter {name!r} is not initialised; run one forward pass on the "
            "device to train on first"
        )
    if parameter.dtype not in TRAINABLE or parameter.layout != torch.strided:
        raise ModelError(
            f"parameter {name!r} is {parameter.dtype} ({parameter.layout}); trainable "
            "ones must be dense float32, bfloat16, float16 or float64"
        )


# Views would untie two Parameter objects that share memory.
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


def _flatten_(named: Named, start: int) -> Group:
    names, parameters = zip(*named, strict=True)
    size = sum(parameter.numel() for parameter in parameters)
    flat = empty(size, parameters[0].dtype, parameters[0].device)
    with torch.no_grad():
        torch.cat([parameter.reshape(-1) for parameter in parameters], out=flat)
    numels = [parameter.numel() for parameter in parameters]
    for parameter, part in zip(parameters, torch.split(flat, numels), strict=True):
        parameter.data = part.view(parameter.shape)
    shapes = tuple(parameter.shape for parameter in parameters)
    return Group(flat, start, names, shapes, tuple(numels))


def empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a vector whose elements have yet to be written.

    On the CPU numpy allocates it, which asks the system for huge pages: an update
    whose entries each lie on a small page of their own takes longer to find the pages
    than to apply. Aligned to 64 bytes, as torch's own.

    Example:
        >>> empty(3, torch.bfloat16, torch.device("cpu")).shape
        torch.Size([3])
    """
    if device.type != "cpu":
        return torch.empty(size, dtype=dtype, device=device)
    length = size * dtype.itemsize
    memory = np.empty(length + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[first : first + length]).view(dtype)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what a replica computes in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def grid_for(parameters: FlatParameters) -> float:
    """Return the step in which shared is counted: a power of two, at least 2**-24.

    Args:
        parameters: The start of a run; the largest absolute value decides.

    Returns:
        ``2**(ceil(log2(max(1, max |parameter|))) - 24)``, parameter units.

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
    module: nn.Module, counts_N: npt.NDArray[np.int32], grid: float
) -> None:
    """Write a vector of counts into a module's trainable parameters.

    The module is not flattened, so that the client's model stays an ordinary one.

    Args:
        module: Built like the replicas' modules. Changed in place.
        counts_N: Values in steps of ``grid``, in the order of FlatParameters.
        grid: Size of one step, parameter units, a power of two.

    Raises:
        ModelError: If the module has another number of trainable parameters.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> load_counts_(layer, np.array([1, 2, -3], np.int32), grid=0.5)
        >>> layer.weight.tolist(), layer.bias.tolist()
        ([[0.5, 1.0]], [-1.5])
    """
    with torch.no_grad():
        for parameter, values in _values(module, counts_N, grid):
            parameter.copy_(values)


def add_counts_(
    module: nn.Module, counts_N: npt.NDArray[np.int32], grid: float
) -> None:
    """Add a vector of counts to a module's trainable parameters.

    Args:
        module: As :func:`load_counts_` takes it. Changed in place.
        counts_N: Likewise.
        grid: Likewise.

    Raises:
        ModelError: Likewise.

    Example:
        >>> layer = torch.nn.Linear(1, 1)
        >>> load_counts_(layer, np.array([2, 2], np.int32), grid=0.5)
        >>> add_counts_(layer, np.array([1, -1], np.int32), grid=0.5)
        >>> layer.weight.item(), layer.bias.item()
        (1.5, 0.5)
    """
    with torch.no_grad():
        for parameter, values in _values(module, counts_N, grid):
            parameter.add_(values.to(parameter.device))


def _values(
    module: nn.Module, counts_N: npt.NDArray[np.int32], grid: float
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Each trainable parameter, and what is its own of a vector of counts."""
    parameters = [p for named in _layout(module) for _, p in named]
    numels = [parameter.numel() for parameter in parameters]
    if len(counts_N) != sum(numels):
        raise ModelError(f"need {sum(numels)} parameters, got {len(counts_N)} values")
    # Copied: they may be read-only, and torch does not take those.
    parts = torch.split(torch.from_numpy(np.array(counts_N)), numels)
    for parameter, part in zip(parameters, parts, strict=True):
        values = part.to(working_dtype(parameter.dtype)) * grid  # as replicas do
        yield parameter, values.view(parameter.shape)
