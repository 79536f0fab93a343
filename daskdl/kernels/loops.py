"""The loops of the kernels on the CPU: numba, arrays in, arrays out.

One pass over memory each, no interpreter lock held, nothing checked: entries have to
be positions of the vectors. :mod:`daskdl.kernels.cpu` sees to that.

Shape suffixes: N = parameters of one flat vector, K = entries of one update,
L = fewer than 64 neighbours.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

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
def scan_(
    local_N: Array,
    shared_N: Array,
    entries_K: Array,
    place: tuple[int, int],
    base: int,
    step: tuple[float, float],
) -> tuple[int, int]:
    """Write the entries from a position on, until all is seen or the room is used up.

    Args:
        local_N: Floating.
        shared_N: Int32.
        entries_K: Room for entries, int32. Changed in place from the place on.
        place: Position to look at first, and how many entries there are already.
        base: Position of the vector's first parameter.
        step: Least length of a difference, and the grid, both in local's type.

    Returns:
        The place from which to go on with more room; its first is N at the end.
    """
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
def first_bad(entries_K: Array, base: int, size: int) -> int:
    """Index of the first entry that is not an ascending position, or -1."""
    before = base
    for k in range(entries_K.size):
        position = abs(np.int64(entries_K[k]))  # int32's minimum has no int32 abs
        if position <= before or position > base + size:
            return k
        before = int(position)
    return -1


@compiled
def take_(
    local_N: Array,
    shared_N: Array,
    entries_K: Array,
    place: tuple[int, int],
    limits: tuple[float, float],
) -> float:
    """Move shared by own entries, limit what they leave; how far local was moved."""
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
def move_(local_N: Array, entries_K: Array, base: int, amount: float) -> None:
    """Move local where entries are."""
    last = entries_K.size - 1
    for k in range(entries_K.size):
        coming = abs(np.int64(entries_K[min(k + ENTRIES_AHEAD, last)])) - 1 - base
        prefetch(local_N, coming)
        entry = np.int64(entries_K[k])
        local_N[abs(entry) - 1 - base] += amount if entry > 0 else -amount


@compiled
def apply_(
    local_N: Array,
    shared_N: Array,
    entries_K: Array,
    base: int,
    count: int,
    quantum: float,
) -> None:
    """Move local and shared by entries."""
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
def apply_counts_(
    local_N: Array, shared_N: Array, counts_N: Array, step: float
) -> None:
    """Move shared by counts, and local by so long a step for each."""
    for i in range(local_N.size):
        shared_N[i] += counts_N[i]
        local_N[i] += local_N.dtype.type(counts_N[i]) * step


@compiled
def fold_(total_N: Array, entries_K: Array, count: int) -> None:
    """Add entries to a sum."""
    for k in range(entries_K.size):
        entry = np.int64(entries_K[k])
        total_N[abs(entry) - 1] += count if entry > 0 else -count


@compiled
def residual_counts_(
    local_N: Array,
    shared_N: Array,
    counts_N: Array,
    step: tuple[float, float],
    most: float,
) -> None:
    """Round the residual to steps; of step: the grid and the weight."""
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
