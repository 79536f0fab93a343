"""The kernels on CUDA, for float32: each passes over memory as few times as it can.

Triton compiles them on first use. They return the same bits as
:class:`daskdl.compression.kernels.VectorGroup`, which remains for float64 and where
Triton is missing. ``enable_fp_fusion=False`` rounds products and sums separately, as
torch does.

A scan reads local and shared once. Each program stages the entries of its block in
slots of its own; a second kernel moves them to their place in the list, which is known
only when all blocks have been counted. A block with more entries than slots is scanned
again.

With ``TRITON_INTERPRET=1``, set before this module is imported, they run on a CPU, for
tests.

Shape suffixes: N = parameters of the group, K = entries of one update, B = blocks,
S = slots of all blocks.
"""

# Triton evaluates annotations, and knows only its own.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN202

import math
import subprocess
import threading
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError
from typing_extensions import override

from daskdl.compression.kernels import (
    ALL,
    GUARD,
    PinnedGroup,
    most_levels,
    own_factor,
)

BLOCK = 2048  # positions of one program in a pass over all of them
# Entries that a program can stage: thresholds aim at far fewer.
SLOTS = BLOCK // 8
WARPS = 8
ENTRIES = 1024  # of one program in a pass over entries
BLOCKS = 4  # whose entries one program lists: more programs would take longer to start
# A block that has more entries than slots counts in the upper half of an int64.
OVERFLOW = 32

LOWEST, HIGHEST = tl.constexpr(-GUARD), tl.constexpr(GUARD)
# Kernels are compiled again for values that are 1 or multiples of 16, except for these.
VARYING = ["count", "first_number", "start", "K", "blocks"]
# Aligned, a thread would load several neighbors at once, and store them scattered: all
# intermediate values would be exchanged between threads.
SCATTERED = [
    "local_N",
    "shared_N",
    "counts_B",
    "ends_B",
    "entries_S",
    "distances_S",
    "entries_K",
    "levels_K",
]
kernel = triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SCATTERED)


@triton.jit  # type: ignore[untyped-decorator]
def _residuals(local_N, shared_N, N, grid, quantum, BLOCK: tl.constexpr):
    """Load a block; return ``local - shared * grid``, and which positions to emit."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    inside = lane < tl.minimum(N - begin, BLOCK).to(tl.int32)
    shared = tl.load(shared_N + begin + lane, mask=inside, other=0)
    local = tl.load(local_N + begin + lane, mask=inside, other=0.0)
    ahead = local - shared.to(tl.float32) * grid
    # Two comparisons, not abs: int32's minimum is its own absolute value.
    safe = (shared >= LOWEST) & (shared <= HIGHEST)
    return ahead, inside & safe & (tl.abs(ahead) >= quantum)


@triton.jit  # type: ignore[untyped-decorator]
def _entries_of(ahead, first_number, BLOCK: tl.constexpr):
    numbers = first_number + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return tl.where(ahead < 0, -numbers, numbers)


@triton.jit
def _levels_of(distance, quantum, most):
    # Limited before the conversion, which is not defined for infinity.
    quanta = tl.minimum(tl.div_rn(distance, quantum), most)
    return tl.maximum(quanta, 1.0).to(tl.uint8)


@kernel  # type: ignore[untyped-decorator]
def _stage(
    local_N,
    shared_N,
    counts_B,
    entries_S,
    distances_S,
    N,
    grid,
    quantum,
    first_number,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    OVERFLOW: tl.constexpr,
):
    """Count the entries of a block, and stage as many as there are slots."""
    block = tl.program_id(0)
    ahead, emitted = _residuals(local_N, shared_N, N, grid, quantum, BLOCK)
    ones = emitted.to(tl.int32)
    slot = tl.cumsum(ones, 0) - 1
    staged = emitted & (slot < SLOTS)
    begin = block.to(tl.int64) * SLOTS
    entries = _entries_of(ahead, first_number, BLOCK)
    tl.store(entries_S + begin + slot, entries, mask=staged)
    tl.store(distances_S + begin + slot, tl.abs(ahead), mask=staged)
    count = tl.sum(ones, 0).to(tl.int64)
    overflows = (count > SLOTS).to(tl.int64)
    tl.store(counts_B + block, count + (overflows << OVERFLOW))


@kernel  # type: ignore[untyped-decorator]
def _list(
    counts_B,
    ends_B,
    entries_S,
    distances_S,
    entries_K,
    levels_K,
    blocks,
    quantum,
    most,
    SLOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Move the staged entries of some blocks to the list, with their levels."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    slot = tl.arange(0, SLOTS)[None, :]
    counts = tl.load(counts_B + block, mask=block < blocks, other=0)
    # To int32 without the number of blocks that overflow.
    begin = (tl.load(ends_B + block, mask=block < blocks, other=0) - counts).to(
        tl.int32
    )
    filled = slot < tl.where(counts <= SLOTS, counts, 0).to(tl.int32)
    staged = block.to(tl.int64) * SLOTS + slot
    entries = tl.load(entries_S + staged, mask=filled, other=0)
    distances = tl.load(distances_S + staged, mask=filled, other=0.0)
    tl.store(entries_K + begin + slot, entries, mask=filled)
    levels = _levels_of(distances, quantum, most)
    tl.store(levels_K + begin + slot, levels, mask=filled)


@kernel  # type: ignore[untyped-decorator]
def _list_overflowing(
    local_N,
    shared_N,
    counts_B,
    ends_B,
    entries_K,
    levels_K,
    N,
    grid,
    quantum,
    first_number,
    most,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """List the entries of a block that has more of them than slots."""
    block = tl.program_id(0)
    count = tl.load(counts_B + block)
    if count > SLOTS:
        begin = (tl.load(ends_B + block) - count).to(tl.int32)
        ahead, emitted = _residuals(local_N, shared_N, N, grid, quantum, BLOCK)
        at = begin + tl.cumsum(emitted.to(tl.int32), 0) - 1
        entries = _entries_of(ahead, first_number, BLOCK)
        tl.store(entries_K + at, entries, mask=emitted)
        levels = _levels_of(tl.abs(ahead), quantum, most)
        tl.store(levels_K + at, levels, mask=emitted)


@triton.jit  # type: ignore[untyped-decorator]
def _moves(
    entries_K,
    levels_K,
    start,
    K,
    LEVELS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Load entries; return which there are, their positions and signed quanta."""
    at = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    inside = at < K
    entries = tl.load(entries_K + at, mask=inside, other=1)
    quanta = tl.where(entries < 0, -1, 1)
    if LEVELS:
        quanta *= tl.load(levels_K + at, mask=inside, other=0).to(tl.int32)
    return inside, tl.abs(entries).to(tl.int64) - 1 - start, quanta


@kernel  # type: ignore[untyped-decorator]
def _commit_(
    local_N,
    shared_N,
    entries_K,
    levels_K,
    cut_B,
    start,
    K,
    count,
    grid,
    moved,
    most,
    LEVELS: tl.constexpr,
    MOVES: tl.constexpr,
    CLIPS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    inside, at, quanta = _moves(entries_K, levels_K, start, K, LEVELS, ENTRIES)
    shared = tl.load(shared_N + at, mask=inside, other=0) + count * quanta
    if MOVES or CLIPS:
        before = tl.load(local_N + at, mask=inside, other=0.0)
        local = before
        if MOVES:
            local = before + quanta.to(tl.float32) * moved
        after = local
        if CLIPS:
            sent = shared.to(tl.float32) * grid
            ahead = local - sent
            after = tl.where(ahead > most, sent + most, local)
            after = tl.where(ahead < -most, sent - most, after)
            cut = tl.abs(local.to(tl.float64) - after.to(tl.float64))
            tl.store(cut_B + tl.program_id(0), tl.sum(tl.where(inside, cut, 0.0), 0))
        # Most positions are not clipped, and need not be written.
        tl.store(local_N + at, after, mask=inside & (after != before))
    tl.store(shared_N + at, shared, mask=inside)


@kernel  # type: ignore[untyped-decorator]
def _apply_(
    local_N,
    shared_N,
    entries_K,
    levels_K,
    start,
    K,
    count,
    grid,
    LEVELS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    inside, at, quanta = _moves(entries_K, levels_K, start, K, LEVELS, ENTRIES)
    counts = count * quanta
    shared = tl.load(shared_N + at, mask=inside, other=0)
    local = tl.load(local_N + at, mask=inside, other=0.0)
    tl.store(shared_N + at, shared + counts, mask=inside)
    tl.store(local_N + at, local + counts.to(tl.float32) * grid, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _apply_counts_(local_N, shared_N, counts_N, N, step, BLOCK: tl.constexpr):
    positions = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = positions < N
    counts = tl.load(counts_N + positions, mask=inside, other=0)
    shared = tl.load(shared_N + positions, mask=inside, other=0)
    local = tl.load(local_N + positions, mask=inside, other=0.0)
    tl.store(shared_N + positions, shared + counts, mask=inside)
    tl.store(local_N + positions, local + counts.to(tl.float32) * step, mask=inside)


_launching = threading.Lock()


def _launch(
    compiled: Any, blocks: int, vector: Tensor, *args: Any, **options: Any
) -> None:
    """Run a kernel on the current stream; one thread at a time may compile it."""
    with _launching, torch.cuda.device_of(vector):
        compiled[(blocks,)](vector, *args, **options, enable_fp_fusion=False)


class TritonGroup(PinnedGroup):
    """See :class:`daskdl.compression.kernels.VectorGroup`."""

    @override
    def find(
        self, count: int, grid: float, local_factor: float = 1.0, where: slice = ALL
    ) -> tuple[Tensor, Tensor]:
        local_N, shared_N = self.local_N[where], self.shared_N[where]
        N, device = local_N.numel(), local_N.device
        if local_N.dtype != torch.float32 or not N:
            return super().find(count, grid, local_factor, where)
        blocks = triton.cdiv(N, BLOCK)
        first_number = self.start + (where.start or 0) + 1
        quantum, most = local_factor * count * grid, float(most_levels(count))
        counts_B = torch.empty(blocks, dtype=torch.int64, device=device)
        entries_S = torch.empty(blocks * SLOTS, dtype=torch.int32, device=device)
        distances_S = torch.empty(blocks * SLOTS, dtype=torch.float32, device=device)
        _launch(
            _stage,
            blocks,
            local_N,
            shared_N,
            counts_B,
            entries_S,
            distances_S,
            N,
            grid,
            quantum,
            first_number,
            BLOCK,
            SLOTS,
            OVERFLOW,
            num_warps=WARPS,
        )
        ends_B = counts_B.cumsum(0)
        overflowing, K = divmod(int(ends_B[-1]), 1 << OVERFLOW)  # waits for the device
        entries_K = torch.empty(K, dtype=torch.int32, device=device)
        levels_K = torch.empty(K, dtype=torch.uint8, device=device)
        if K:
            _launch(
                _list,
                triton.cdiv(blocks, BLOCKS),
                counts_B,
                ends_B,
                entries_S,
                distances_S,
                entries_K,
                levels_K,
                blocks,
                quantum,
                most,
                SLOTS,
                BLOCKS,
            )
        if overflowing:
            _launch(
                _list_overflowing,
                blocks,
                local_N,
                shared_N,
                counts_B,
                ends_B,
                entries_K,
                levels_K,
                N,
                grid,
                quantum,
                first_number,
                most,
                BLOCK,
                SLOTS,
                num_warps=WARPS,
            )
        return entries_K, levels_K

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
        K = entries_K.numel()
        if self.local_N.dtype != torch.float32 or not K:
            return super().commit_(
                entries_K, count, grid, bound, local_factor, levels_K, momentum
            )
        blocks = triton.cdiv(K, ENTRIES)
        moved = own_factor(local_factor, momentum) * count * grid
        most = local_factor * bound
        clips = most < math.inf
        cut_B = torch.empty(blocks, dtype=torch.float64, device=entries_K.device)
        _launch(
            _commit_,
            blocks,
            self.local_N,
            self.shared_N,
            entries_K,
            levels_K,
            cut_B,
            self.start,
            K,
            count,
            grid,
            moved,
            most if clips else 0.0,
            LEVELS=levels_K is not None,
            MOVES=moved != 0,
            CLIPS=clips,
            ENTRIES=ENTRIES,
        )
        return float(cut_B.sum()) / local_factor if clips else 0.0

    @override
    def apply_(
        self,
        entries_K: Tensor,
        count: int,
        grid: float,
        levels_K: Tensor | None = None,
    ) -> None:
        K = entries_K.numel()
        if self.local_N.dtype != torch.float32 or not K:
            super().apply_(entries_K, count, grid, levels_K)
            return
        _launch(
            _apply_,
            triton.cdiv(K, ENTRIES),
            self.local_N,
            self.shared_N,
            entries_K,
            levels_K,
            self.start,
            K,
            count,
            grid,
            LEVELS=levels_K is not None,
            ENTRIES=ENTRIES,
        )

    @override
    def apply_counts_(
        self, counts_N: Tensor, grid: float, factor: float = 1.0, where: slice = ALL
    ) -> None:
        local_N, shared_N = self.local_N[where], self.shared_N[where]
        N = local_N.numel()
        if local_N.dtype != torch.float32 or not N:
            super().apply_counts_(counts_N, grid, factor, where)
            return
        _launch(
            _apply_counts_,
            triton.cdiv(N, BLOCK),
            local_N,
            shared_N,
            counts_N,
            N,
            factor * grid,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


LAUNCH_ERROR = "Triton Error ["  # begins messages with an error of the driver


def check_compiles(device: torch.device) -> None:
    """Compile a kernel and run it.

    Raises:
        ImportError: If Triton cannot compile for the device, for example because there
            is no C compiler. Errors of the device itself are raised as they are.
    """
    values = torch.ones(1, device=device)
    counts = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        TritonGroup(values, values, counts, 0).apply_counts_(counts, grid=1.0)
    except (OSError, AssertionError, subprocess.SubprocessError, TritonError) as error:
        raise ImportError(str(error)) from error
    except RuntimeError as error:
        message = str(error)
        # Errors of torch have classes of their own. A driver refuses the image of a
        # kernel if Triton's compiler is for other drivers.
        launched = message.startswith(LAUNCH_ERROR) and "kernel image" not in message
        if launched or type(error) is not RuntimeError:
            raise
        raise ImportError(message) from error
