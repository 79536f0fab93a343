"""Counts, steps of the grid at every position of a vector: read, make and apply them.

What pairs of vectors are, :mod:`daskdl.kernels` says.

Shape suffixes: N = parameters of one flat vector.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from daskdl.kernels.choice import kernels_for

Counts = npt.NDArray[np.int32]


def from_counts(counts: Counts) -> Tensor:
    """Return an int32 array as a tensor; the memory is shared if it is writable.

    Decoded arrays are read-only, and torch has no tensors that are.

    Example:
        >>> from_counts(np.array([1, -4], np.int32))
        tensor([ 1, -4], dtype=torch.int32)
    """
    return torch.from_numpy(np.require(counts, np.int32, ["C", "W"]))


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
    kernels = kernels_for(local_N)
    counts_N: Tensor = kernels.residual_counts(local_N, shared_N, grid, most, weight)
    return counts_N


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
    kernels_for(local_N).apply_counts_(local_N, shared_N, counts_N, grid, factor)
