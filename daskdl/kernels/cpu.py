"""The kernels on the CPU: tensors checked, and handed to compiled loops.

No state, no bytes, no choice of device. :mod:`daskdl.kernels.generic` says the same
in torch operations; both give the same bits.

Shape suffixes: N = parameters of one flat vector, K = entries of one update.
"""

import math

import numpy as np
import torch
from torch import Tensor

from daskdl.errors import CodecError
from daskdl.kernels import loops
from daskdl.kernels.llvm import LANES


def supports(local_N: Tensor) -> bool:
    """Tell whether these kernels can work on a vector: CPU, contiguous, 32 or 64 bit.

    Args:
        local_N: The vector, any device and dtype.

    Returns:
        True if this module can be used, False if it takes the generic one.
    """
    return (
        local_N.device.type == "cpu"
        and local_N.dtype in {torch.float32, torch.float64}
        and local_N.is_contiguous()
    )


def check(entries_K: Tensor, base: int, size: int) -> None:
    """See :func:`daskdl.kernels.check`; entries on the CPU."""
    entries = entries_K.numpy()
    k = loops.first_bad(entries, base, size)
    if k >= 0:
        raise CodecError(
            f"entry {k} is {entries[k]}; need ascending positions in "
            f"[{base + 1}, {base + size}]"
        )


def find(
    local_N: Tensor,
    shared_N: Tensor,
    count: int,
    grid: float,
    base: int = 0,
    weight: float = 1.0,
) -> Tensor:
    """See :func:`daskdl.kernels.find`."""
    local, shared = local_N.numpy(), shared_N.numpy()
    step = (local.dtype.type(weight * count * grid), local.dtype.type(grid))
    # Density 1/64 before the first growth: above what thresholds are steered to.
    entries = np.empty(min(local.size, local.size // 64 + LANES), np.int32)
    place = (0, 0)
    while True:
        place = loops.scan_(local, shared, entries, place, base, step)
        if place[0] == local.size:
            return torch.from_numpy(entries[: place[1]].copy())
        grown = np.empty(min(local.size, 4 * entries.size), np.int32)
        grown[: place[1]] = entries[: place[1]]
        entries = grown


def take_(
    local_N: Tensor,
    shared_N: Tensor,
    entries_K: Tensor,
    count: int,
    grid: float,
    bound: float = math.inf,
    base: int = 0,
) -> float:
    """See :func:`daskdl.kernels.take_`."""
    check(entries_K, base, local_N.numel())
    local, shared, entries = local_N.numpy(), shared_N.numpy(), entries_K.numpy()
    limits = (local.dtype.type(grid), local.dtype.type(bound))
    return float(loops.take_(local, shared, entries, (base, count), limits))


def move_(local_N: Tensor, entries_K: Tensor, amount: float, base: int = 0) -> None:
    """See :func:`daskdl.kernels.move_`."""
    check(entries_K, base, local_N.numel())
    local = local_N.numpy()
    loops.move_(local, entries_K.numpy(), base, local.dtype.type(amount))


def apply_(
    local_N: Tensor,
    shared_N: Tensor,
    entries_K: Tensor,
    count: int,
    grid: float,
    base: int = 0,
) -> None:
    """See :func:`daskdl.kernels.apply_`."""
    check(entries_K, base, local_N.numel())
    local = local_N.numpy()
    quantum = local.dtype.type(count * grid)
    loops.apply_(local, shared_N.numpy(), entries_K.numpy(), base, count, quantum)


def apply_counts_(
    local_N: Tensor,
    shared_N: Tensor,
    counts_N: Tensor,
    grid: float,
    factor: float = 1.0,
) -> None:
    """See :func:`daskdl.kernels.apply_counts_`."""
    local = local_N.numpy()
    step = local.dtype.type(factor * grid)
    loops.apply_counts_(local, shared_N.numpy(), counts_N.numpy(), step)


def fold_(total_N: Tensor, entries_K: Tensor, count: int) -> None:
    """See :func:`daskdl.kernels.fold_`."""
    check(entries_K, 0, total_N.numel())
    loops.fold_(total_N.numpy(), entries_K.numpy(), count)


def residual_counts(
    local_N: Tensor, shared_N: Tensor, grid: float, most: int, weight: float = 1.0
) -> Tensor:
    """See :func:`daskdl.kernels.residual_counts`."""
    counts = np.empty(local_N.numel(), np.int32)
    local, shared = local_N.numpy(), shared_N.numpy()
    loops.residual_counts_(local, shared, counts, (grid, weight), float(most))
    return torch.from_numpy(counts)
