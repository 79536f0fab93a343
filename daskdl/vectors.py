"""A module's parameters as flat vectors and back, and its buffers as two arrays.

No thresholds, no exchange: :mod:`daskdl.accumulator` works on what is built here.

Positions: parameters are grouped by (dtype, device) in order of first appearance in
``named_parameters``; groups follow each other. Replicas and the client must agree on
that order, which they do when their modules are built alike.

Shape suffixes: N = parameters over all groups, F = floating and I = integer buffer
elements.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from daskdl.errors import ModelError

TRAINABLE = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
MAX_SIZE = 2**31 - 1  # an entry is a signed one-based int32 position
# A grid of 2**-24 of the largest parameter is float32's own resolution there.
GRID_BITS = 24


class Group(NamedTuple):
    """The parameters of one dtype on one device, as views into one vector."""

    flat: Tensor  # shape (numels summed,)
    start: int  # position of flat[0] among all N
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    numels: tuple[int, ...]


class Buffers(NamedTuple):
    """The buffers of a module, as plain numbers."""

    floating_F: npt.NDArray[np.float64]  # complex ones as pairs
    integer_I: npt.NDArray[np.int64]  # bool ones as 0 and 1


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
        >>> layer = torch.nn.Linear(2, 1)
        >>> parameters = FlatParameters(layer)
        >>> parameters.size, parameters.slices
        (3, {'weight': slice(0, 2, None), 'bias': slice(2, 3, None)})
        >>> _ = parameters.groups[0].flat.fill_(0.5)
        >>> layer.bias.item()
        0.5
    """

    groups: tuple[Group, ...]
    size: int  # N
    slices: dict[str, slice]  # of the N positions, in their order

    def __init__(self, module: nn.Module) -> None:
        layout = _layout(module)
        for named in layout:
            for name, parameter in named:
                _check_start(name, parameter)
        self.groups = ()
        self.size = 0
        self.slices = {}
        for named in layout:
            group = _flatten_(named, start=self.size)
            self.groups += (group,)
            for name, numel in zip(group.names, group.numels, strict=True):
                self.slices[name] = slice(self.size, self.size + numel)
                self.size += numel


Named = list[tuple[str, nn.Parameter]]


def _layout(module: nn.Module) -> list[Named]:
    groups: dict[tuple[torch.dtype, torch.device], Named] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            _check_kind(name, parameter)
            key = (parameter.dtype, parameter.device)
            groups.setdefault(key, []).append((name, parameter))
    size = sum(p.numel() for named in groups.values() for _, p in named)
    if not 0 < size <= MAX_SIZE:
        raise ModelError(
            "model has no trainable parameters; set requires_grad on those to train"
            if size == 0
            else f"model has {size} trainable parameters, the limit is {MAX_SIZE}"
        )
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


def _check_start(name: str, parameter: nn.Parameter) -> None:
    if not parameter.isfinite().all():
        raise ModelError(f"parameter {name!r} has values that are not finite")


def _check_overlap(parameters: dict[str, nn.Parameter]) -> None:
    """Refuse memory shared by two Parameter objects: views would untie them."""
    spans = []
    for name, parameter in parameters.items():
        if parameter.layout == torch.strided and parameter.numel() > 0:
            steps = zip(parameter.shape, parameter.stride(), strict=True)
            last = sum((length - 1) * stride for length, stride in steps)
            start = parameter.data_ptr()
            stop = start + (last + 1) * parameter.element_size()
            spans.append((str(parameter.device), start, stop, name))
    spans.sort()
    for before, after in pairwise(spans):
        trained = any(parameters[span[-1]].requires_grad for span in (before, after))
        if trained and before[0] == after[0] and after[1] < before[2]:
            raise ModelError(
                f"parameters {before[-1]!r} and {after[-1]!r} share memory; to tie "
                "them, assign the same Parameter object to both"
            )


def _flatten_(named: Named, start: int) -> Group:
    flat = torch.cat([parameter.detach().reshape(-1) for _, parameter in named])
    offset = 0
    for _, parameter in named:
        stop = offset + parameter.numel()
        parameter.data = flat[offset:stop].view(parameter.shape)
        offset = stop
    return Group(
        flat,
        start,
        tuple(name for name, _ in named),
        tuple(parameter.shape for _, parameter in named),
        tuple(parameter.numel() for _, parameter in named),
    )


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what a replica computes in: float64 for float64, else float32.

    Args:
        dtype: Of a trainable parameter.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def grid_for(parameters: FlatParameters) -> float:
    """Return the step in which shared is counted: a power of two, at least 2**-24.

    Args:
        parameters: The start of a run; the largest absolute value decides.

    Returns:
        ``2**(ceil(log2(max(1, max |parameter|))) - 24)``, parameter units.

    Example:
        >>> grid_for(FlatParameters(torch.nn.Linear(2, 1))) == 2.0**-24
        True
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
    parameters = [p for named in _layout(module) for _, p in named]
    size = sum(parameter.numel() for parameter in parameters)
    if len(counts_N) != size:
        raise ModelError(f"got {len(counts_N)} values for {size} trainable parameters")
    offset = 0
    with torch.no_grad():
        for parameter in parameters:
            stop = offset + parameter.numel()
            counts = torch.from_numpy(np.array(counts_N[offset:stop]))
            values = counts.to(working_dtype(parameter.dtype)) * grid  # as replicas do
            parameter.copy_(values.view(parameter.shape))
            offset = stop


def pack_buffers(module: nn.Module) -> Buffers:
    """Copy a module's buffers, persistent or not, into two arrays.

    Args:
        module: Read only. A buffer that is registered twice is taken once.

    Returns:
        Floating (and complex) ones and integer (and bool) ones, in the order of
        ``named_buffers``.

    Example:
        >>> buffers = pack_buffers(torch.nn.BatchNorm1d(2))
        >>> buffers.floating_F, buffers.integer_I
        (array([0., 0., 1., 1.]), array([0]))
    """
    floating = [np.empty(0, np.float64)]
    integer = [np.empty(0, np.int64)]
    for buffer in module.buffers():
        if buffer.is_floating_point() or buffer.is_complex():
            floating.append(_real(buffer).cpu().double().numpy().ravel())
        else:
            integer.append(buffer.cpu().long().numpy().ravel())
    return Buffers(np.concatenate(floating), np.concatenate(integer))


def average_buffers(packed: Sequence[tuple[Buffers, int]]) -> Buffers:
    """Merge the buffers of several replicas.

    Args:
        packed: Buffers and examples trained on, one pair per replica; the order
            decides the rounding.

    Returns:
        Floating ones: mean weighted by examples, plain if all weights are 0; values
        on which all agree stay as they are, infinities too. Integer ones: maximum.

    Raises:
        ModelError: If there is none, or they have different sizes.

    Example:
        >>> one = Buffers(np.array([1.0]), np.array([3]))
        >>> two = Buffers(np.array([4.0]), np.array([5]))
        >>> average_buffers([(one, 20), (two, 10)])
        Buffers(floating_F=array([2.]), integer_I=array([5]))
    """
    sizes = {(b.floating_F.size, b.integer_I.size) for b, _ in packed}
    if len(sizes) != 1:
        raise ModelError(f"need buffers of one size, got {sorted(sizes)}")
    total = sum(examples for _, examples in packed)
    used = [(b, n if total else 1) for b, n in packed if n or not total]
    first = used[0][0].floating_F
    weighted, agreed = np.zeros_like(first), np.ones(first.shape, bool)
    with np.errstate(invalid="ignore"):  # infinities of both signs: NaN is the answer
        for buffers, examples in used:
            weighted += buffers.floating_F * examples
            agreed &= buffers.floating_F == first
    mean = weighted / sum(examples for _, examples in used)
    integer_I = np.max([buffers.integer_I for buffers, _ in packed], axis=0)
    return Buffers(np.where(agreed, first, mean), integer_I)


def load_buffers_(module: nn.Module, buffers: Buffers) -> None:
    """Write packed buffers back.

    Args:
        module: Built like the one that was packed. Changed in place.
        buffers: What :func:`pack_buffers` or :func:`average_buffers` returned.

    Raises:
        ModelError: If the module's buffers have other sizes; nothing is written.

    Example:
        >>> layer = torch.nn.BatchNorm1d(1)
        >>> load_buffers_(layer, Buffers(np.array([0.5, 2.0]), np.array([7])))
        >>> layer.running_mean.item(), layer.num_batches_tracked.item()
        (0.5, 7)
    """
    own = pack_buffers(module)
    got = (buffers.floating_F.size, buffers.integer_I.size)
    want = (own.floating_F.size, own.integer_I.size)
    if got != want:
        raise ModelError(f"got (floating, integer) buffers {got}, model has {want}")
    offsets = {True: 0, False: 0}
    with torch.no_grad():
        for buffer in module.buffers():
            target = _real(buffer)
            floating = target.is_floating_point()
            values: npt.NDArray[Any] = (
                buffers.floating_F if floating else buffers.integer_I
            )
            stop = offsets[floating] + target.numel()
            part = torch.from_numpy(values[offsets[floating] : stop].copy())
            target.copy_(part.view(target.shape))
            offsets[floating] = stop


def _real(buffer: Tensor) -> Tensor:
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer
