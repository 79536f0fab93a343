"""A module's parameters and buffers as flat vectors, and back.

Parameters are grouped by (dtype, device) in the order of their first appearance in
``named_parameters``; the groups are concatenated. Replicas and the client agree on that
order because their modules are built alike. Buffers, and frozen parameters that the
model changes itself, are not compressed: replicas average them at sync points.

Shape suffixes: N = parameters over all groups, F = floating and I = integer buffer
elements.
"""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
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
ALIGNMENT = 64  # bytes: a cache line, and the widest vector instruction


class Group(NamedTuple):
    """The parameters of one dtype on one device, as views of one vector."""

    flat: Tensor  # shape (numels summed,)
    start: int  # position of flat[0] among all N
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    numels: tuple[int, ...]


class FlatParameters:
    """Turn the trainable parameters of a module into views of flat vectors.

    Parameter objects, values and gradients stay the same, so optimizers keep working.
    Frozen parameters are left alone, tied ones appear once. Memory formats such as
    channels-last become contiguous.

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
    """Return an uninitialised vector, aligned to 64 bytes as torch's own are.

    On the CPU numpy allocates it, because numpy asks the system for huge pages: with
    small pages, an update whose entries are far apart spends more time on looking up
    pages than on applying itself.

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
    """Return the dtype of local: float64 for float64 parameters, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def grid_for(parameters: FlatParameters) -> float:
    """Return the step in which shared is counted: a power of two, at least 2**-24.

    Args:
        parameters: As they are when a run starts; the largest absolute value decides.

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

    The module is not flattened: the client's model stays an ordinary one.

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
    """Yield each trainable parameter with its values from a vector of counts."""
    parameters = [p for named in _layout(module) for _, p in named]
    numels = [parameter.numel() for parameter in parameters]
    if len(counts_N) != sum(numels):
        raise ModelError(f"need {sum(numels)} parameters, got {len(counts_N)} values")
    # Copied, because torch has no read-only tensors.
    parts = torch.split(torch.from_numpy(np.array(counts_N)), numels)
    for parameter, part in zip(parameters, parts, strict=True):
        values = part.to(working_dtype(parameter.dtype)) * grid  # as replicas do
        yield parameter, values.view(parameter.shape)


class Buffers(NamedTuple):
    """The buffers of a module, as plain numbers."""

    floating_F: npt.NDArray[np.float64]  # complex ones as pairs
    integer_I: npt.NDArray[np.int64]  # bool ones as 0 and 1


def pack_buffers(module: nn.Module) -> Buffers:
    """Copy a module's buffers, persistent or not, into two arrays.

    Args:
        module: Read only. A buffer that is registered twice is copied once.

    Returns:
        The floating and complex ones, and the integer and bool ones, each in the order
        of ``named_buffers``.

    Example:
        >>> pack_buffers(torch.nn.BatchNorm1d(2))
        Buffers(floating_F=array([0., 0., 1., 1.]), integer_I=array([0]))
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
    """Average the buffers of several replicas.

    Args:
        packed: Buffers and number of examples trained on, one pair per replica; the
            order decides the rounding.

    Returns:
        Floating ones: the mean weighted by examples, unweighted if all weights are 0;
        values on which all replicas agree are unchanged, infinities included. Integer
        ones: the maximum.

    Raises:
        ModelError: If there are none, or their sizes differ.

    Example:
        >>> one = Buffers(np.array([1.0]), np.array([3]))
        >>> two = Buffers(np.array([4.0]), np.array([5]))
        >>> average_buffers([(one, 20), (two, 10)])
        Buffers(floating_F=array([2.]), integer_I=array([5]))
    """
    sizes = {(b.floating_F.size, b.integer_I.size) for b, _ in packed}
    if len(sizes) != 1:
        raise ModelError(f"need buffers of one size, got {sorted(sizes)}")
    return Buffers(
        _average([(buffers.floating_F, n) for buffers, n in packed]),
        _average([(buffers.integer_I, n) for buffers, n in packed]),
    )


def load_buffers_(module: nn.Module, buffers: Buffers) -> None:
    """Load packed buffers into a module.

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
    got = [part.size for part in buffers]
    want = [part.size for part in pack_buffers(module)]
    if got != want:
        raise ModelError(f"got [floating, integer] buffers {got}, model has {want}")
    # Copied, because torch has no read-only tensors.
    floating, integer = (torch.from_numpy(part.copy()) for part in buffers)
    with torch.no_grad():
        for target in (_real(buffer) for buffer in module.buffers()):
            if target.is_floating_point():
                part, floating = floating.tensor_split([target.numel()])
            else:
                part, integer = integer.tensor_split([target.numel()])
            target.copy_(part.view(target.shape))


FROZEN = "frozen "  # before the names of arrays


class Frozen:
    """Tracks frozen parameters that a module changes itself, such as moving averages.

    Those that never change are neither copied nor sent, however large they are.

    Args:
        module: In the state in which the run starts, the same on the client.

    Example:
        >>> layer = torch.nn.Linear(1, 1).requires_grad_(False)
        >>> frozen = Frozen(layer)
        >>> _ = layer.bias.data.fill_(0.5)
        >>> frozen.look()
        >>> frozen.take()
        {'frozen bias': array([0.5], dtype=float32)}
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forms = _forms(module)
        self._changed: dict[str, None] = {}  # at any time, in their order
        self._steps = 0
        self._checksums = {n: _checksum(p) for n, p in self._parameters().items()}

    def _parameters(self) -> dict[str, Tensor]:
        named = self._module.named_parameters()
        return {n: p.detach() for n, p in named if not p.requires_grad}

    def look(self) -> None:
        """Find those that have changed; reads all frozen parameters.

        Raises:
            ModelError: If the shape or dtype of one, or of a buffer, has changed.
        """
        self._check()
        for name, parameter in self._parameters().items():
            if _checksum(parameter) != self._checksums.get(name):
                self._changed[name] = None

    def after_step(self) -> None:
        """Look after steps 1, 2, 4, 8 and so on.

        A pass after each step would be expensive, and a model that changes a frozen
        parameter mostly does so in every step from some step on.

        Raises:
            ModelError: See `look`.
        """
        self._steps += 1
        if self._steps & (self._steps - 1) == 0:
            self.look()

    def _check(self) -> None:
        forms = _forms(self._module)
        for name in {**self._forms, **forms}:
            before, now = self._forms.get(name), forms.get(name)
            if before != now:
                raise ModelError(
                    f"{name} of the model was {before} before the fit and is {now} "
                    "now: several replicas can only average what keeps its shape and "
                    "dtype; give it those before the fit, or train one replica"
                )

    def take(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of those that have changed, by `FROZEN` and their names.

        Raises:
            ModelError: See `look`.
        """
        self._check()
        own = self._parameters()
        return {FROZEN + name: _array(own[name]) for name in self._changed}

    def load_(self, arrays: Mapping[str, Any]) -> None:
        """Load what `take` returned on any replica; other names are ignored."""
        own = {n: a for n, a in arrays.items() if n.startswith(FROZEN)}
        load_frozen_(self._module, own)
        self._changed.update((n.removeprefix(FROZEN), None) for n in own)


def average_frozen(
    packed: Sequence[tuple[Mapping[str, Any], int]],
) -> dict[str, npt.NDArray[Any]]:
    """Average each frozen parameter over the replicas that have changed it.

    Args:
        packed: What `Frozen.take` returned, other keys are ignored, and the number of
            examples trained on, one pair per replica; the order decides the rounding.

    Returns:
        As :func:`average_buffers`.

    Example:
        >>> one, two = {"frozen a": np.float32([1])}, {"frozen a": np.float32([4])}
        >>> average_frozen([(one, 20), (two, 10), ({}, 5)])
        {'frozen a': array([2.], dtype=float32)}
    """
    names = dict.fromkeys(n for a, _ in packed for n in a if n.startswith(FROZEN))
    return {
        name: _average([(a[name], n) for a, n in packed if name in a]) for name in names
    }


def _average(packed: Sequence[tuple[npt.NDArray[Any], int]]) -> npt.NDArray[Any]:
    """Average arrays as :func:`average_buffers` says, in their own dtype."""
    arrays = [array for array, _ in packed]
    first = arrays[0]
    if first.dtype.kind not in "fc":
        return np.asarray(np.max(arrays, axis=0))
    total = sum(examples for _, examples in packed)
    used = [(a, n if total else 1) for a, n in packed if n or not total]
    first = used[0][0]
    wide = np.result_type(first, np.float64)
    weighted, agreed = np.zeros(first.shape, wide), np.ones(first.shape, bool)
    with np.errstate(invalid="ignore"):  # infinities of both signs: NaN is the answer
        for array, examples in used:
            weighted += array * wide.type(examples)
            agreed &= array == first
    mean = weighted / sum(examples for _, examples in used)
    return np.where(agreed, first, mean.astype(first.dtype))


def load_frozen_(module: nn.Module, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Load frozen parameters into a module.

    Args:
        module: Built like the one they come from. Changed in place.
        arrays: What `Frozen.take` returned.
    """
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, array in arrays.items():
            # Copied, because torch has no read-only tensors.
            own[name.removeprefix(FROZEN)].copy_(torch.from_numpy(np.array(array)))


def _forms(module: nn.Module) -> dict[str, str]:
    frozen = [(n, p) for n, p in module.named_parameters() if not p.requires_grad]
    return {
        n: f"{t.dtype} {tuple(t.shape)}" for n, t in (*frozen, *module.named_buffers())
    }


def _checksum(tensor: Tensor) -> int:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(plain.view(torch.uint8).numpy().data)


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return np.array(tensor.cpu().numpy())


def _real(buffer: Tensor) -> Tensor:
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer
