"""Numbers of one flat vector: torch in, torch out, no state, no bytes.

Every vector is a pair: ``local_N`` (floating, parameter units) and ``shared_N``
(int32, steps of ``grid``). The residual is ``(local - shared * grid) / weight`` and is
never stored: local is ahead by ``weight`` times what has yet to be sent, as if as many
others had gone the same way. As ``shared`` counts whole steps, sums of quanta are exact
and do not depend on their order. Each function picks :mod:`daskdl.kernels.cpu` (numba)
or :mod:`daskdl.kernels.generic` (torch) by the vector it gets; both give the same bits.

Shape suffixes: N = parameters of one flat vector, K = entries of one update.
"""

import math
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from daskdl.kernels import cpu, generic

__all__ = [
    "GUARD",
    "apply_",
    "apply_counts_",
    "check",
    "find",
    "fold_",
    "from_counts",
    "move_",
    "residual_counts",
    "take_",
]

GUARD = generic.GUARD  # entries wait, and dense updates end, at this |shared|

Counts = npt.NDArray[np.int32]


def from_counts(counts: Counts) -> Tensor:
    """Return an int32 array as a tensor; the memory is shared if it is writable.

    Decoded arrays are read-only, and torch has no tensors that are.

    Example:
        >>> from_counts(np.array([1, -4], np.int32))
        tensor([ 1, -4], dtype=torch.int32)
    """
    return torch.from_numpy(np.require(counts, np.int32, ["C", "W"]))


def _pick(local_N: Tensor) -> ModuleType:
    return cpu if cpu.supports(local_N) else generic


def check(entries_K: Tensor, base: int, size: int) -> None:
    """Refuse entries that are not strictly ascending positions of a vector.

    Args:
        entries_K: Entries, int32, any device.
        base: Position of the vector's first parameter.
        size: Parameters of the vector.

    Raises:
        CodecError: If an entry is zero, outside the vector, or not beyond the one
            before it.

    Example:
        >>> import torch
        >>> check(torch.tensor([1, -4], dtype=torch.int32), base=0, size=4)
        >>> check(torch.tensor([1, -5], dtype=torch.int32), base=0, size=4)
        Traceback (most recent call last):
        ...
        daskdl.errors.CodecError: entry 1 is -5; need ascending positions in [1, 4]
    """
    (cpu if entries_K.device.type == "cpu" else generic).check(entries_K, base, size)


def find(
    local_N: Tensor,
    shared_N: Tensor,
    count: int,
    grid: float,
    base: int = 0,
    weight: float = 1.0,
) -> Tensor:
    """List where the residual has reached one quantum. Reads only.

    An entry is emitted where ``|local - shared * grid| >= weight * count * grid``, one
    per position, unless ``|shared| > 2**30``: those wait, so that int32 never wraps.
    NaN is never an entry.

    Args:
        local_N: A replica's own parameters, floating.
        shared_N: What has been shared, int32, steps of ``grid``.
        count: Quantum in steps of ``grid``, in [1, 2**22].
        grid: Size of one step, parameter units, a power of two.
        base: Position of the vector's first parameter.
        weight: How many times the residual local is ahead of shared, > 0.

    Returns:
        Entries, int32, shape (K,), on the vector's device: ``+(i + 1)`` means one
        quantum up at position ``i``, ``-(i + 1)`` one down. Ascending in ``i``.

    Example:
        >>> import torch
        >>> local, shared = torch.tensor([1.5, 0.25, -3.5]), torch.zeros(3).int()
        >>> find(local, shared, count=2, grid=0.25)
        tensor([ 1, -3], dtype=torch.int32)

    Source:
        Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud
        Computing", Interspeech 2015; here the residual is a difference.
    """
    entries_K: Tensor = _pick(local_N).find(
        local_N, shared_N, count, grid, base, weight
    )
    return entries_K


def take_(
    local_N: Tensor,
    shared_N: Tensor,
    entries_K: Tensor,
    count: int,
    grid: float,
    bound: float = math.inf,
    base: int = 0,
) -> float:
    """Move shared by a replica's own entries, then limit what those leave over.

    With ``bound >= count * grid`` no other position can exceed the bound (it would
    have been an entry), so that this equals clipping the whole residual.

    Args:
        local_N: A replica's own parameters. Changed in place where clipped.
        shared_N: What has been shared, int32. Changed in place.
        entries_K: What :func:`find` returned, int32, any device.
        count: Quantum in steps of ``grid``, in [1, 2**22].
        grid: Size of one step, parameter units, a power of two.
        bound: Most that local is ahead of shared, parameter units; infinity: no limit.
        base: Position of the vector's first parameter.

    Returns:
        Clipped mass: sum of the lengths by which local was moved, parameter units.

    Raises:
        CodecError: If an entry is refused by :func:`check`; nothing is written.

    Example:
        >>> import torch
        >>> local, shared = torch.tensor([1.5, 0.0]), torch.zeros(2).int()
        >>> entries = torch.tensor([1], dtype=torch.int32)
        >>> take_(local, shared, entries, count=2, grid=0.25, bound=0.75)
        0.25
        >>> local, shared
        (tensor([1.2500, 0.0000]), tensor([2, 0], dtype=torch.int32))
    """
    kernels, entries_K = _pick(local_N), entries_K.to(local_N.device)
    return float(kernels.take_(local_N, shared_N, entries_K, count, grid, bound, base))


def move_(local_N: Tensor, entries_K: Tensor, amount: float, base: int = 0) -> None:
    """Move local where a replica's own entries are, and shared not.

    Args:
        local_N: A replica's own parameters. Changed in place.
        entries_K: What :func:`find` returned, int32, any device.
        amount: Added for an entry up, taken away for one down; parameter units.
        base: Position of the vector's first parameter.

    Raises:
        CodecError: If an entry is refused by :func:`check`; nothing is written.

    Example:
        >>> import torch
        >>> local = torch.tensor([1.5, 0.0])
        >>> move_(local, torch.tensor([-1], dtype=torch.int32), amount=0.5)
        >>> local
        tensor([1., 0.])
    """
    _pick(local_N).move_(local_N, entries_K.to(local_N.device), amount, base)


def apply_(
    local_N: Tensor,
    shared_N: Tensor,
    entries_K: Tensor,
    count: int,
    grid: float,
    base: int = 0,
) -> None:
    """Move local and shared by another replica's entries; the residual stays.

    Args:
        local_N: A replica's own parameters. Changed in place.
        shared_N: What has been shared, int32. Changed in place.
        entries_K: Entries as :func:`find` returns them, int32, any device.
        count: Quantum in steps of ``grid``, in [1, 2**22].
        grid: Size of one step, parameter units, a power of two.
        base: Position of the vector's first parameter.

    Raises:
        CodecError: If an entry is refused by :func:`check`; nothing is written.

    Example:
        >>> import torch
        >>> local, shared = torch.zeros(2), torch.zeros(2).int()
        >>> apply_(local, shared, torch.tensor([-2]).int(), count=2, grid=0.25)
        >>> local, shared
        (tensor([ 0.0000, -0.5000]), tensor([ 0, -2], dtype=torch.int32))
    """
    kernels, entries_K = _pick(local_N), entries_K.to(local_N.device)
    kernels.apply_(local_N, shared_N, entries_K, count, grid, base)


def apply_counts_(
    local_N: Tensor,
    shared_N: Tensor,
    counts_N: Tensor,
    grid: float,
    factor: float = 1.0,
) -> None:
    """Move shared by a dense update, and local by so many times of it.

    Args:
        local_N: A replica's own parameters. Changed in place.
        shared_N: What has been shared, int32. Changed in place.
        counts_N: The update, int32, steps of ``grid``, any device.
        grid: Size of one step, parameter units, a power of two.
        factor: 1 for another replica's update, so that the residual stays; 1 less the
            weight of the residual for an own one, which leaves it.

    Example:
        >>> import torch
        >>> local, shared = torch.zeros(2), torch.zeros(2).int()
        >>> apply_counts_(local, shared, torch.tensor([3, -1]).int(), grid=0.25)
        >>> local, shared
        (tensor([ 0.7500, -0.2500]), tensor([ 3, -1], dtype=torch.int32))
    """
    counts_N = counts_N.to(local_N.device)
    _pick(local_N).apply_counts_(local_N, shared_N, counts_N, grid, factor)


def fold_(total_N: Tensor | Counts, entries_K: Tensor | Counts, count: int) -> None:
    """Add entries to a dense vector of steps, as a full inbox does.

    Args:
        total_N: Sum so far, int32, steps of the grid. Changed in place.
        entries_K: Entries as :func:`find` returns them, int32, any device.
        count: Quantum in steps of the grid, in [1, 2**22].

    Raises:
        CodecError: If an entry is refused by :func:`check`; nothing is written.

    Example:
        >>> import torch
        >>> total = torch.zeros(3, dtype=torch.int32)
        >>> fold_(total, torch.tensor([1, -3]).int(), count=5)
        >>> total
        tensor([ 5,  0, -5], dtype=torch.int32)
    """
    if isinstance(total_N, np.ndarray):
        total_N = torch.from_numpy(total_N)
    if isinstance(entries_K, np.ndarray):
        entries_K = from_counts(entries_K)
    entries_K = entries_K.to(total_N.device)
    on_cpu = total_N.device.type == "cpu" and total_N.is_contiguous()
    (cpu if on_cpu else generic).fold_(total_N, entries_K, count)


def residual_counts(
    local_N: Tensor, shared_N: Tensor, grid: float, most: int, weight: float = 1.0
) -> Tensor:
    """Return the residual in whole steps of the grid. Reads only.

    Rounded to even, and limited so that neither it nor shared plus it leaves int32.
    NaN counts as 0: a replica that diverged keeps that to itself.

    Args:
        local_N: A replica's own parameters, floating.
        shared_N: What has been shared, int32, steps of ``grid``.
        grid: Size of one step, parameter units, a power of two.
        most: Largest ``|shared|`` that shared plus the result reaches, in steps, in
            [1, 2**31 - 1].
        weight: How many times the residual local is ahead of shared, > 0.

    Returns:
        Counts, int32, shape (N,), on the CPU, fresh.

    Example:
        >>> import torch
        >>> local, shared = torch.tensor([1.1, -9.0]), torch.tensor([2, 0]).int()
        >>> residual_counts(local, shared, grid=0.25, most=30)
        tensor([  2, -30], dtype=torch.int32)
    """
    kernels = _pick(local_N)
    counts_N: Tensor = kernels.residual_counts(local_N, shared_N, grid, most, weight)
    return counts_N
