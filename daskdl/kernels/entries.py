"""Entries, a few positions of a vector: find, take out, apply and add them up.

They are int32, ascending in ``i``: ``+(i + 1)`` means one quantum up at position ``i``,
``-(i + 1)`` one down. What pairs of vectors are, :mod:`daskdl.kernels` says.

Shape suffixes: N = parameters of one flat vector, K = entries of one update.
"""

import math

import numpy as np
import torch
from torch import Tensor

from daskdl.kernels import cpu, generic
from daskdl.kernels.choice import kernels_for
from daskdl.kernels.counts import Counts, from_counts


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
    entries_K: Tensor = kernels_for(local_N).find(
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
    kernels, entries_K = kernels_for(local_N), entries_K.to(local_N.device)
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
    kernels_for(local_N).move_(local_N, entries_K.to(local_N.device), amount, base)


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
    kernels, entries_K = kernels_for(local_N), entries_K.to(local_N.device)
    kernels.apply_(local_N, shared_N, entries_K, count, grid, base)


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
