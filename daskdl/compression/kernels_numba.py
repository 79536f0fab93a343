"""The kernels on the CPU: compiled loops that pass over memory once.

Numba compiles them on first use and caches them on disk; they release the GIL. They do
not validate arguments: entries must be positions of the vectors.

Numba does not vectorise a loop that packs comparisons into a word of bits, and has no
prefetch. Intrinsics add both on every processor that LLVM supports.

Shape suffixes: N = parameters of one flat vector, K = entries of one update,
L = fewer than 64 neighbors.

Source:
    LLVM Language Reference Manual, ``fcmp``, ``bitcast``, ``llvm.prefetch``.
"""

import math
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor
from typing_extensions import override

from daskdl.codec.golomb import compiled, lowest_bit
from daskdl.compression.kernels import (
    ALL,
    GUARD,
    INT32_MAX,
    ReceivedEntries,
    VectorGroup,
    most_levels,
    own_factor,
)

Array = np.ndarray[Any, np.dtype[Any]]

# Prefetch distance: positions of a pass, entries of a list. Hardware prefetch stops at
# page boundaries and does not follow lists.
POSITIONS_AHEAD = 1024
ENTRIES_AHEAD = 32
LINE = 64  # bytes that a processor fetches at once
INT32_MAX_FLOAT = float(INT32_MAX)
LANES = 64  # positions compared at once: one word of flags
INT32 = ir.IntType(32)
TOGETHER = 2**13  # parameters whose local and shared fit the second cache


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    proxy = cgutils.create_struct_proxy(kind)
    return builder.gep(proxy(context, builder, array).data, [index])


def _loaded(builder: Any, address: Any, vector: ir.VectorType, align: int) -> Any:
    lanes = builder.load(builder.bitcast(address, vector.as_pointer()))
    lanes.align = align  # alignment of one element: arrays may start at any element
    return lanes


def _repeated(builder: Any, value: Any, vector: ir.VectorType) -> Any:
    nothing = ir.Constant(vector, ir.Undefined)
    lane = builder.insert_element(nothing, value, ir.Constant(INT32, 0))
    zeros = ir.Constant(ir.VectorType(INT32, LANES), [0] * LANES)
    return builder.shuffle_vector(lane, nothing, zeros)


@intrinsic  # type: ignore[untyped-decorator]
def reached(
    _: Any, local_N: Any, shared_N: Any, start: Any, quantum: Any, grid: Any
) -> Any:
    """Compare 64 positions from ``start`` on, all within the vectors.

    Bit b of the result (uint64) is set if ``|local - shared * grid|`` at ``start + b``
    is at least ``quantum``.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        local_type, shared_type = signature.args[:2]
        local, shared, index, quantum, grid = args
        bits = local_type.dtype.bitwidth
        floats = ir.VectorType(context.get_value_type(local_type.dtype), LANES)
        ints = ir.VectorType(INT32, LANES)
        address = _address(context, builder, local_type, local, index)
        local_L = _loaded(builder, address, floats, bits // 8)
        address = _address(context, builder, shared_type, shared, index)
        shared_L = builder.sitofp(_loaded(builder, address, ints, 4), floats)
        sent_L = builder.fmul(shared_L, _repeated(builder, grid, floats))
        absolute = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(floats, [floats]),
            f"llvm.fabs.v{LANES}f{bits}",
        )
        residual_L = builder.call(absolute, [builder.fsub(local_L, sent_L)])
        least_L = _repeated(builder, quantum, floats)
        flags_L = builder.fcmp_ordered(">=", residual_L, least_L)
        return builder.bitcast(flags_L, ir.IntType(LANES))

    number = local_N.dtype
    return types.uint64(local_N, shared_N, types.int64, number, number), generate


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_: Any, array: Any, index: Any) -> Any:
    """Prefetch one element for writing; harmless outside the array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature.args[0], *args)
        byte = ir.IntType(8).as_pointer()
        hint = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte, INT32, INT32, INT32]),
            "llvm.prefetch.p0i8",
        )
        # For writing, into all cache levels, data.
        how = [ir.Constant(INT32, n) for n in (1, 3, 1)]
        builder.call(hint, [builder.bitcast(address, byte), *how])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@compiled
def _reached(local_L: Array, shared_L: Array, quantum: float, grid: float) -> np.uint64:
    """Same as `reached`, for the last positions, fewer than 64."""
    word = np.uint64(0)
    for lane in range(local_L.size):
        sent = local_L.dtype.type(shared_L[lane]) * grid
        if abs(local_L[lane] - sent) >= quantum:
            word |= np.uint64(1) << np.uint64(lane)
    return word


@compiled
def _scan_(
    local_N: Array,
    shared_N: Array,
    entries_K: Array,
    levels_K: Array,
    scan_from: int,
    base: int,
    step: tuple[float, float, float],
) -> tuple[int, int]:
    """Write entries and levels until the end of the vector or of the output.

    Args:
        local_N: Float32 or float64.
        shared_N: Int32.
        entries_K: Output, int32. Changed in place.
        levels_K: Output, uint8, whole quanta of the entries. Changed in place.
        scan_from: First position to scan.
        base: Position of the vector's first parameter.
        step: Least ``|local - shared * grid|`` of an entry, the grid, and the highest
            level, all in local's dtype.

    Returns:
        The position at which to continue with another output, N once the whole vector
        has been scanned, and the number of entries written.
    """
    quantum, grid, most = step
    filled = 0
    full_lanes = local_N.size - local_N.size % LANES
    for start in range(scan_from, local_N.size, LANES):
        if filled + min(LANES, local_N.size - start) > entries_K.size:
            return start, filled
        if start < full_lanes:
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
                ahead = local_N[i] - local_N.dtype.type(shared_N[i]) * grid
                position = base + 1 + i
                entries_K[filled] = position if ahead > 0 else -position
                levels_K[filled] = np.uint8(min(abs(ahead) / quantum, most))
                filled += 1
    return local_N.size, filled


@compiled
def _commit_(
    local_N: Array,
    shared_N: Array,
    entries_K: Array,
    levels_K: Array,
    base: int,
    count: int,
    limits: tuple[float, float, float],
) -> float:
    """Move shared and local by own entries, then limit local - shared.

    ``levels_K`` are empty if each entry has one quantum. ``limits`` are the grid, the
    change of local for a positive quantum, and the bound on
    ``|local - shared * grid|``, all in local's dtype. Returns the mass cut from local.
    """
    grid, moved, most = limits
    removed = 0.0
    last = entries_K.size - 1
    shared_only = moved == 0 and most == math.inf  # local is not read
    for k in range(entries_K.size):
        coming = abs(np.int64(entries_K[min(k + ENTRIES_AHEAD, last)])) - 1 - base
        prefetch(shared_N, coming)
        if not shared_only:
            prefetch(local_N, coming)
        entry = np.int64(entries_K[k])
        i = abs(entry) - 1 - base
        level = np.int64(levels_K[k]) if levels_K.size else np.int64(1)
        quanta = level if entry > 0 else -level
        shared_N[i] += count * quanta
        if moved != 0:
            local_N[i] += local_N.dtype.type(quanta) * moved
        if most == math.inf:
            continue
        sent = local_N.dtype.type(shared_N[i]) * grid
        before = local_N[i]
        ahead = before - sent
        if abs(ahead) > most:
            local_N[i] = sent + (most if ahead > 0 else -most)
            removed += abs(np.float64(before) - np.float64(local_N[i]))
    return removed


@compiled
def _apply_(
    local_N: Array,
    shared_N: Array,
    entries_K: Array,
    levels_K: Array,
    base: int,
    count: int,
    quantum: float,
) -> None:
    """Move shared by ``count`` and local by ``quantum`` for each quantum."""
    last = entries_K.size - 1
    for k in range(entries_K.size):
        coming = abs(np.int64(entries_K[min(k + ENTRIES_AHEAD, last)])) - 1 - base
        prefetch(shared_N, coming)
        prefetch(local_N, coming)
        entry = np.int64(entries_K[k])
        i = abs(entry) - 1 - base
        level = np.int64(levels_K[k]) if levels_K.size else np.int64(1)
        quanta = level if entry > 0 else -level
        shared_N[i] += count * quanta
        local_N[i] += local_N.dtype.type(quanta) * quantum


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(_: Any, address: Any) -> Any:
    """Return an address as a pointer, for `carray`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.uint64), generate


@compiled
def _apply_all_(
    local_N: Array,
    shared_N: Array,
    updates_F: Array,
    quanta_F: Array,
    at_F: Array,
    base: int,
) -> None:
    """Apply the entries of several updates, ``TOGETHER`` parameters at a time.

    The vectors are read from memory and written once, not once for each update.

    Args:
        local_N: Float32 or float64. Changed in place.
        shared_N: Int32. Changed in place.
        updates_F: Uint64, four for each update: the addresses of its entries and of its
            levels, 0 for one quantum each, their number, and the quantum in steps of
            the grid.
        quanta_F: Quantum of each update, in local's dtype.
        at_F: Int64 zeros. Changed in place.
        base: Position of the vector's first parameter.
    """
    for start in range(0, local_N.size, TOGETHER):
        stop = base + min(start + TOGETHER, local_N.size)  # the last entry
        for f in range(updates_F.shape[0]):
            size = np.int64(updates_F[f, 2])
            entries_K = numba.carray(_pointer(updates_F[f, 0]), size, np.int32)
            levels_K = numba.carray(_pointer(updates_F[f, 1]), size, np.uint8)
            with_levels = updates_F[f, 1] != 0
            count, quantum = np.int64(updates_F[f, 3]), quanta_F[f]
            k = at_F[f]
            while k < size:
                entry = np.int64(entries_K[k])
                place = abs(entry)
                if place > stop:
                    break
                i = np.uint64(place - 1 - base)
                level = np.int64(levels_K[k]) if with_levels else np.int64(1)
                quanta = level if entry > 0 else -level
                shared_N[i] += count * quanta
                local_N[i] += local_N.dtype.type(quanta) * quantum
                k += 1
            at_F[f] = k


@compiled
def _apply_counts_(
    local_N: Array, shared_N: Array, counts_N: Array, step: float
) -> None:
    """Move shared by counts, and local by ``step`` for each count."""
    for i in range(local_N.size):
        shared_N[i] += counts_N[i]
        local_N[i] += local_N.dtype.type(counts_N[i]) * step


@compiled
def fold_(total_N: Array, entries_K: Array, levels_K: Array, count: int) -> None:
    """Add entries of one update to a dense sum of counts."""
    for k in range(entries_K.size):
        entry = np.int64(entries_K[k])
        level = np.int64(levels_K[k]) if levels_K.size else np.int64(1)
        total_N[abs(entry) - 1] += count * (level if entry > 0 else -level)


@compiled
def _residual_counts_(
    local_N: Array,
    shared_N: Array,
    counts_N: Array,
    step: tuple[float, float],
    most: float,
) -> None:
    """Round the residual to steps; ``step`` is the grid and the local_factor."""
    grid, local_factor = step
    per_step = 1.0 / grid  # exact, as the grid is a power of two
    for i in range(local_N.size):
        before = np.float64(shared_N[i])
        ahead = np.float64(local_N[i]) * per_step - before
        target = np.rint(before + ahead / local_factor)
        target = most if target > most else target
        target = -most if target < -most else target
        count = target - before
        count = INT32_MAX_FLOAT if count > INT32_MAX_FLOAT else count
        count = -INT32_MAX_FLOAT if count < -INT32_MAX_FLOAT else count
        counts_N[i] = np.int32(count if count == count else 0.0)  # NaN is not itself


ONE_EACH = np.empty(0, np.uint8)  # levels of entries with one quantum


class NumbaGroup(VectorGroup):
    """A group on the CPU; its methods return the same bits as the reference."""

    @override
    def find(
        self, count: int, grid: float, local_factor: float = 1.0, where: slice = ALL
    ) -> tuple[Tensor, Tensor]:
        local, shared = self.local_N[where].numpy(), self.shared_N[where].numpy()
        base = self.start + (where.start or 0)
        number = local.dtype.type
        step = (
            number(local_factor * count * grid),
            number(grid),
            number(most_levels(count)),
        )
        # Room for a density of 1/16, above the densities that thresholds aim at.
        room = min(local.size, local.size // 16 + LANES)
        parts: list[tuple[Tensor, Tensor]] = []
        scan_from = 0
        while scan_from < local.size or not parts:
            entries_K, levels_K = np.empty(room, np.int32), np.empty(room, np.uint8)
            scan_from, filled = _scan_(
                local, shared, entries_K, levels_K, scan_from, base, step
            )
            part = (entries_K[:filled], levels_K[:filled])
            parts.append((torch.from_numpy(part[0]), torch.from_numpy(part[1])))
        if len(parts) == 1:
            return parts[0]  # without a copy
        entries, levels = zip(*parts, strict=True)
        return torch.cat(entries), torch.cat(levels)

    @override
    def commit_(
        self,
        entries_K: Tensor,
        count: int,
        grid: float,
        bound: float = math.inf,
        local_factor: float = 1.0,
        levels_K: Tensor | None = None,
        momentum: float = 0.0,
    ) -> float:
        local = self.local_N.numpy()
        limits = (
            local.dtype.type(grid),
            local.dtype.type(own_factor(local_factor, momentum) * count * grid),
            local.dtype.type(local_factor * bound),
        )
        levels = ONE_EACH if levels_K is None else levels_K.numpy()
        shared, entries = self.shared_N.numpy(), entries_K.numpy()
        cut = _commit_(local, shared, entries, levels, self.start, count, limits)
        return float(cut) / local_factor

    @override
    def apply_(
        self,
        entries_K: Tensor,
        count: int,
        grid: float,
        levels_K: Tensor | None = None,
    ) -> None:
        local = self.local_N.numpy()
        levels = ONE_EACH if levels_K is None else levels_K.numpy()
        quantum = local.dtype.type(count * grid)
        shared, entries = self.shared_N.numpy(), entries_K.numpy()
        _apply_(local, shared, entries, levels, self.start, count, quantum)

    @override
    def apply_all_(self, updates: Sequence[ReceivedEntries], grid: float) -> None:
        if len(updates) == 1:
            return super().apply_all_(updates, grid)  # reads only what it changes
        local, shared = self.local_N.numpy(), self.shared_N.numpy()
        updates_F = np.array(
            [
                (
                    entries_K.data_ptr(),
                    0 if levels_K is None else levels_K.data_ptr(),
                    len(entries_K),
                    quantum_count,
                )
                for entries_K, levels_K, quantum_count in updates
            ],
            np.uint64,
        )
        quanta_F = np.array(
            [update.quantum_count * grid for update in updates], local.dtype
        )
        at_F = np.zeros(len(updates), np.int64)
        _apply_all_(local, shared, updates_F, quanta_F, at_F, self.start)
        return None

    @override
    def apply_counts_(
        self, counts_N: Tensor, grid: float, factor: float = 1.0, where: slice = ALL
    ) -> None:
        local, shared = self.local_N[where].numpy(), self.shared_N[where].numpy()
        step = local.dtype.type(factor * grid)
        _apply_counts_(local, shared, counts_N.numpy(), step)

    @override
    def residual_counts(
        self,
        grid: float,
        most: int = INT32_MAX,
        local_factor: float = 1.0,
        where: slice = ALL,
    ) -> Tensor:
        local, shared = self.local_N[where].numpy(), self.shared_N[where].numpy()
        counts = np.empty(local.size, np.int32)
        _residual_counts_(local, shared, counts, (grid, local_factor), float(most))
        return torch.from_numpy(counts)
