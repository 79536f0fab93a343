"""The kernels on the CPU: numba, one pass over memory, no interpreter lock held.

No state, no bytes, no choice of device. :mod:`daskdl.kernels.generic` says the same
in torch operations; both give the same bits.

Shape suffixes: N = parameters of one flat vector, K = entries of one update.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from torch import Tensor

from daskdl.errors import CodecError
from daskdl.kernels.llvm import LANES, lowest_bit, prefetch, reached

Array = np.ndarray[Any, np.dtype[Any]]
Function = TypeVar("Function", bound=Callable[..., object])

# How far ahead memory is asked for: positions of a pass, entries of a list. A
# processor's own guess ends with each page, and knows nothing of lists.
POSITIONS_AHEAD = 1024
ENTRIES_AHEAD = 32
LINE = 64  # bytes that a processor fetches at once
# An entry beyond it waits in the residual: 2**30 steps are left before int32 wraps.
GUARD = 2**30
INT32_MAX = 2.0**31 - 1


def compiled(function: Function) -> Function:
    """Compile on the first call, once per machine, and release the lock inside."""
    return cast(Function, numba.njit(cache=True, nogil=True)(function))


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


@compiled
def _reached(local_L: Array, shared_L: Array, quantum: float, grid: float) -> np.uint64:
    """``llvm.reached`` for the last positions, which are fewer than 64."""
    word = np.uint64(0)
    for lane in range(local_L.size):
        sent = local_L.dtype.type(shared_L[lane]) * grid
        if abs(local_L[lane] - sent) >= quantum:
            word |= np.uint64(1) << np.uint64(lane)
    return word


@compiled
def _scan(
    local_N: Array,
    shared_N: Array,
    entries_K: Array,
    place: tuple[int, int],
    base: int,
    step: tuple[float, float],
) -> tuple[int, int]:
    first, filled = place
    quantum, grid = step
    whole = local_N.size - local_N.size % LANES
    for start in range(first, local_N.size, LANES):
        if filled + min(LANES, local_N.size - start) > entries_K.size:
            return start, filled
        if start < whole:
            ahead = start + POSITIONS_AHEAD
            for i in range(ahead, ahead + LANES, LINE // local_N.itemsize):
                prefetch(local_N, i)
            for i in range(ahead, ahead + LANES, LINE // shared_N.itemsize):
                prefetch(shared_N, i)
            word = reached(local_N, shared_N, start, quantum, grid)
        else:
            word = _reached(local_N[start:], shared_N[start:], quantum, grid)
        while word != 0:
            i = start + lowest_bit(word)
            word &= word - np.uint64(1)
            if -GUARD <= shared_N[i] <= GUARD:
                ahead_of = local_N[i] > local_N.dtype.type(shared_N[i]) * grid
                position = base + 1 + i
                entries_K[filled] = position if ahead_of else -position
                filled += 1
    return local_N.size, filled


@compiled
def _first_bad(entries_K: Array, base: int, size: int) -> int:
    before = base
    for k in range(entries_K.size):
        position = abs(np.int64(entries_K[k]))  # int32's minimum has no int32 abs
        if position <= before or position > base + size:
            return k
        before = int(position)
    return -1


@compiled
def _take(
    local_N: Array,
    shared_N: Array,
    entries_K: Array,
    place: tuple[int, int],
    limits: tuple[float, float],
) -> float:
    base, count = place
    grid, bound = limits
    removed = 0.0
    last = entries_K.size - 1
    for k in range(entries_K.size):
        coming = abs(np.int64(entries_K[min(k + ENTRIES_AHEAD, last)])) - 1 - base
        prefetch(shared_N, coming)
        if bound != math.inf:
            prefetch(local_N, coming)
        entry = np.int64(entries_K[k])
        i = abs(entry) - 1 - base
        shared_N[i] += count if entry > 0 else -count
        if bound == math.inf:  # most exchanges; local is not even read
            continue
        sent = local_N.dtype.type(shared_N[i]) * grid
        before = local_N[i]
        residual = before - sent
        if abs(residual) > bound:
            local_N[i] = sent + (bound if residual > 0 else -bound)
            removed += abs(np.float64(before) - np.float64(local_N[i]))
    return removed


@compiled
def _move(local_N: Array, entries_K: Array, base: int, amount: float) -> None:
    last = entries_K.size - 1
    for k in range(entries_K.size):
        coming = abs(np.int64(entries_K[min(k + ENTRIES_AHEAD, last)])) - 1 - base
        prefetch(local_N, coming)
        entry = np.int64(entries_K[k])
        local_N[abs(entry) - 1 - base] += amount if entry > 0 else -amount


@compiled
def _apply(
    local_N: Array,
    shared_N: Array,
    entries_K: Array,
    base: int,
    count: int,
    quantum: float,
) -> None:
    last = entries_K.size - 1
    for k in range(entries_K.size):
        coming = abs(np.int64(entries_K[min(k + ENTRIES_AHEAD, last)])) - 1 - base
        prefetch(shared_N, coming)
        prefetch(local_N, coming)
        entry = np.int64(entries_K[k])
        i = abs(entry) - 1 - base
        if entry > 0:
            shared_N[i] += count
            local_N[i] += quantum
        else:
            shared_N[i] -= count
            local_N[i] -= quantum


@compiled
def _apply_counts(
    local_N: Array, shared_N: Array, counts_N: Array, step: float
) -> None:
    for i in range(local_N.size):
        shared_N[i] += counts_N[i]
        local_N[i] += local_N.dtype.type(counts_N[i]) * step


@compiled
def _fold(total_N: Array, entries_K: Array, count: int) -> None:
    for k in range(entries_K.size):
        entry = np.int64(entries_K[k])
        total_N[abs(entry) - 1] += count if entry > 0 else -count


@compiled
def _residual_counts(
    local_N: Array,
    shared_N: Array,
    counts_N: Array,
    step: tuple[float, float],
    most: float,
) -> None:
    grid, weight = step
    per_step = 1.0 / grid  # exact, as the grid is a power of two
    for i in range(local_N.size):
        before = np.float64(shared_N[i])
        ahead = np.float64(local_N[i]) * per_step - before
        target = np.rint(before + ahead / weight)
        target = most if target > most else target
        target = -most if target < -most else target
        count = target - before
        count = INT32_MAX if count > INT32_MAX else count
        count = -INT32_MAX if count < -INT32_MAX else count
        counts_N[i] = np.int32(count if count == count else 0.0)  # NaN is not itself


def check(entries_K: Tensor, base: int, size: int) -> None:
    """See :func:`daskdl.kernels.check`; entries on the CPU."""
    entries = entries_K.numpy()
    k = _first_bad(entries, base, size)
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
        place = _scan(local, shared, entries, place, base, step)
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
    return float(_take(local, shared, entries, (base, count), limits))


def move_(local_N: Tensor, entries_K: Tensor, amount: float, base: int = 0) -> None:
    """See :func:`daskdl.kernels.move_`."""
    check(entries_K, base, local_N.numel())
    local = local_N.numpy()
    _move(local, entries_K.numpy(), base, local.dtype.type(amount))


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
    _apply(local, shared_N.numpy(), entries_K.numpy(), base, count, quantum)


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
    _apply_counts(local, shared_N.numpy(), counts_N.numpy(), step)


def fold_(total_N: Tensor, entries_K: Tensor, count: int) -> None:
    """See :func:`daskdl.kernels.fold_`."""
    check(entries_K, 0, total_N.numel())
    _fold(total_N.numpy(), entries_K.numpy(), count)


def residual_counts(
    local_N: Tensor, shared_N: Tensor, grid: float, most: int, weight: float = 1.0
) -> Tensor:
    """See :func:`daskdl.kernels.residual_counts`."""
    counts = np.empty(local_N.numel(), np.int32)
    local, shared = local_N.numpy(), shared_N.numpy()
    _residual_counts(local, shared, counts, (grid, weight), float(most))
    return torch.from_numpy(counts)
