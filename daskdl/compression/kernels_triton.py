"""The kernels on CUDA, for float32: each passes over memory as few times as it can.

Triton compiles them on first use. They return the bits of
:class:`daskdl.compression.kernels.VectorGroup`, which remains for float64 and where
Triton is missing. Products and sums are rounded separately (``enable_fp_fusion=False``)
as torch rounds them.

With ``TRITON_INTERPRET=1``, set before this module is imported, they run on a CPU, for
tests.

Shape suffixes: N = parameters of the group, K = entries of one update, B = blocks.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from daskdl.compression.kernels import ALL, GUARD, VectorGroup, most_levels

BLOCK = 4096  # positions of one program in a scan
FEW = 1024  # entries of one program

LOWEST, HIGHEST = tl.constexpr(-GUARD), tl.constexpr(GUARD)


@triton.jit  # type: ignore[untyped-decorator]
def _residuals(
    local_N: Any, shared_N: Any, size: Any, grid: Any, quantum: Any, BLOCK: tl.constexpr
) -> Any:
    """Load a block; return positions, what local is ahead, and which are entries."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    shared = tl.load(shared_N + places, mask=inside, other=0)
    local = tl.load(local_N + places, mask=inside, other=0.0)
    ahead = local - shared.to(tl.float32) * grid
    # Two comparisons, not abs: int32's minimum is its own absolute value.
    safe = (shared >= LOWEST) & (shared <= HIGHEST)
    return places, ahead, inside & safe & (tl.abs(ahead) >= quantum)


@triton.jit  # type: ignore[untyped-decorator]
def _count(
    local_N: Any,
    shared_N: Any,
    counts_B: Any,
    size: Any,
    grid: Any,
    quantum: Any,
    BLOCK: tl.constexpr,
) -> None:
    _, _, emitted = _residuals(local_N, shared_N, size, grid, quantum, BLOCK)
    tl.store(counts_B + tl.program_id(0), tl.sum(emitted.to(tl.int32), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _list(
    local_N: Any,
    shared_N: Any,
    ends_B: Any,
    counts_B: Any,
    entries_K: Any,
    levels_K: Any,
    size: Any,
    grid: Any,
    quantum: Any,
    first: Any,
    most: Any,
    BLOCK: tl.constexpr,
) -> None:
    places, ahead, emitted = _residuals(local_N, shared_N, size, grid, quantum, BLOCK)
    block, ones = tl.program_id(0), emitted.to(tl.int32)
    begin = tl.load(ends_B + block) - tl.load(counts_B + block)
    at = begin + tl.cumsum(ones, 0) - ones
    positions = (places + first).to(tl.int32)
    tl.store(entries_K + at, tl.where(ahead < 0, -positions, positions), mask=emitted)
    # Limited before the conversion, which is not defined for infinity.
    quanta = tl.minimum(tl.div_rn(tl.abs(ahead), quantum), most)
    levels = tl.maximum(quanta, 1.0).to(tl.uint8)
    tl.store(levels_K + at, levels, mask=emitted)


@triton.jit  # type: ignore[untyped-decorator]
def _entries(
    entries_K: Any,
    levels_K: Any,
    start: Any,
    size: Any,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """Load entries; return which there are, their positions and signed quanta."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    entries = tl.load(entries_K + at, mask=inside, other=1)
    quanta = tl.where(entries < 0, -1, 1)
    if LEVELS:
        quanta *= tl.load(levels_K + at, mask=inside, other=0).to(tl.int32)
    return inside, tl.abs(entries).to(tl.int64) - 1 - start, quanta


@triton.jit  # type: ignore[untyped-decorator]
def _commit_(
    local_N: Any,
    shared_N: Any,
    entries_K: Any,
    levels_K: Any,
    cut_B: Any,
    start: Any,
    size: Any,
    count: Any,
    grid: Any,
    back: Any,
    most: Any,
    LEVELS: tl.constexpr,
    CLIPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    inside, places, quanta = _entries(entries_K, levels_K, start, size, LEVELS, BLOCK)
    shared = tl.load(shared_N + places, mask=inside, other=0) + count * quanta
    tl.store(shared_N + places, shared, mask=inside)
    local = tl.load(local_N + places, mask=inside, other=0.0)
    local += quanta.to(tl.float32) * back
    if CLIPS:
        sent = shared.to(tl.float32) * grid
        ahead = local - sent
        after = tl.where(ahead > most, sent + most, local)
        after = tl.where(ahead < -most, sent - most, after)
        cut = tl.abs(local.to(tl.float64) - after.to(tl.float64))
        tl.store(cut_B + tl.program_id(0), tl.sum(tl.where(inside, cut, 0.0), 0))
        local = after
    tl.store(local_N + places, local, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _apply_(
    local_N: Any,
    shared_N: Any,
    entries_K: Any,
    levels_K: Any,
    start: Any,
    size: Any,
    count: Any,
    grid: Any,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    inside, places, quanta = _entries(entries_K, levels_K, start, size, LEVELS, BLOCK)
    counts = count * quanta
    shared = tl.load(shared_N + places, mask=inside, other=0)
    tl.store(shared_N + places, shared + counts, mask=inside)
    local = tl.load(local_N + places, mask=inside, other=0.0)
    tl.store(local_N + places, local + counts.to(tl.float32) * grid, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _apply_counts_(
    local_N: Any,
    shared_N: Any,
    counts_N: Any,
    size: Any,
    step: Any,
    BLOCK: tl.constexpr,
) -> None:
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    counts = tl.load(counts_N + places, mask=inside, other=0)
    shared = tl.load(shared_N + places, mask=inside, other=0)
    tl.store(shared_N + places, shared + counts, mask=inside)
    local = tl.load(local_N + places, mask=inside, other=0.0)
    tl.store(local_N + places, local + counts.to(tl.float32) * step, mask=inside)


class TritonGroup(VectorGroup):
    """See :class:`daskdl.compression.kernels.VectorGroup`."""

    @override
    def find(
        self, count: int, grid: float, lead: float = 1.0, where: slice = ALL
    ) -> tuple[Tensor, Tensor]:
        local_N, shared_N = self.local_N[where], self.shared_N[where]
        size, device = local_N.numel(), local_N.device
        if local_N.dtype != torch.float32 or not size:
            return super().find(count, grid, lead, where)
        blocks = (triton.cdiv(size, BLOCK),)
        counts_B = torch.empty(blocks, dtype=torch.int32, device=device)
        scan = (size, grid, lead * count * grid)
        _count[blocks](local_N, shared_N, counts_B, *scan, BLOCK)
        ends_B = counts_B.cumsum(0, dtype=torch.int32)
        entries = int(ends_B[-1])  # the only wait for the device
        entries_K = torch.empty(entries, dtype=torch.int32, device=device)
        levels_K = torch.empty(entries, dtype=torch.uint8, device=device)
        if entries:
            first, most = self.start + (where.start or 0) + 1, most_levels(count)
            _list[blocks](
                *(local_N, shared_N, ends_B, counts_B, entries_K, levels_K, *scan),
                *(first, float(most), BLOCK),
            )
        return entries_K, levels_K

    @override
    def commit_(
        self,
        entries_K: Tensor,
        count: int,
        grid: float,
        bound: float = math.inf,
        lead: float = 1.0,
        levels_K: Tensor | None = None,
    ) -> float:
        size = entries_K.numel()
        if self.local_N.dtype != torch.float32 or not size:
            return super().commit_(entries_K, count, grid, bound, lead, levels_K)
        blocks = (triton.cdiv(size, FEW),)
        most = lead * bound
        clips = most < math.inf
        cut_B = torch.zeros(blocks, dtype=torch.float64, device=entries_K.device)
        _commit_[blocks](
            *(self.local_N, self.shared_N, entries_K, levels_K, cut_B),
            *(self.start, size, count, grid, (1.0 - lead) * count * grid),
            *(most if clips else 0.0, levels_K is not None, clips, FEW),
            enable_fp_fusion=False,
        )
        return float(cut_B.sum()) / lead if clips else 0.0

    @override
    def apply_(
        self,
        entries_K: Tensor,
        count: int,
        grid: float,
        levels_K: Tensor | None = None,
    ) -> None:
        size = entries_K.numel()
        if self.local_N.dtype != torch.float32 or not size:
            super().apply_(entries_K, count, grid, levels_K)
            return
        _apply_[(triton.cdiv(size, FEW),)](
            *(self.local_N, self.shared_N, entries_K, levels_K, self.start, size),
            *(count, grid, levels_K is not None, FEW),
        )

    @override
    def apply_counts_(
        self, counts_N: Tensor, grid: float, factor: float = 1.0, where: slice = ALL
    ) -> None:
        local_N, shared_N = self.local_N[where], self.shared_N[where]
        if local_N.dtype != torch.float32 or not local_N.numel():
            super().apply_counts_(counts_N, grid, factor, where)
            return
        size = local_N.numel()
        _apply_counts_[(triton.cdiv(size, BLOCK),)](
            *(local_N, shared_N, counts_N, size, factor * grid, BLOCK),
            enable_fp_fusion=False,
        )
