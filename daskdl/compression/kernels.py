"""Arithmetic on the vectors of one dtype and device, in torch operations.

``local_N`` is float32 or float64 in parameter units, ``shared_N`` int32 in steps of the
grid. The residual is ``(local - shared * grid) / local_factor`` and is never stored:
local is ahead of shared by ``local_factor`` times the residual, as if ``local_factor -
1`` other replicas had moved the same way. As ``shared`` counts whole steps, sums of
updates are exact and do not depend on their order.

Entries are int32, ascending in the position ``i``: ``+(i + 1)`` moves position ``i`` of
the model up by one quantum, ``-(i + 1)`` down; with levels, uint8, by 1 to 15 quanta.
They are not validated here: they come from ``find`` or from
:func:`daskdl.codec.decode`, which checks them.

:class:`VectorGroup` runs on any device and is the reference; on the CPU
:class:`daskdl.compression.kernels_numba.NumbaGroup` returns the same bits faster.

Shape suffixes: N = parameters of the group, K = entries of one update.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from daskdl.codec.levels import MAX_LEVEL

# Largest |shared| at which entries are sent and that dense updates reach: 2**30 steps
# remain before int32 wraps.
GUARD = 2**30
# Most steps by which an entry moves shared: exact in float32, and 64 entries of this
# size fit between the guard and int32's end.
MAX_STEPS = 2**24
INT32_MAX = 2**31 - 1
CHUNK = 2**20  # parameters: 8 MiB of float64
ALL = slice(None)


class ReceivedEntries(NamedTuple):
    """Entries of another replica's update in one group, on its device."""

    entries_K: Tensor
    levels_K: Tensor | None  # None: one quantum each
    quantum_count: int  # quantum in steps of the grid


@dataclass(frozen=True, eq=False)
class VectorGroup:
    """The vectors of the parameters of one dtype on one device, all contiguous.

    Attributes:
        flat: Values that the module computes with, the parameters' dtype.
        local_N: Values that the replica has trained, float32 or float64; flat itself in
            eager float32 and float64.
        shared_N: Values that all replicas have in common, int32, steps of the grid.
        start: Position of the first parameter in the model.

    Example:
        >>> local, shared = torch.tensor([1.5, 0.25, -3.5]), torch.zeros(3).int()
        >>> group = VectorGroup(local, local, shared, start=0)
        >>> entries, levels = group.find(count=2, grid=0.25)
        >>> entries, levels
        (tensor([ 1, -3], dtype=torch.int32), tensor([3, 7], dtype=torch.uint8))
        >>> group.commit_(entries, count=2, grid=0.25, bound=0.75)
        2.5
        >>> group.apply_(torch.tensor([-2], dtype=torch.int32), count=2, grid=0.25)
        >>> group.apply_counts_(torch.tensor([0, 3, 0], dtype=torch.int32), grid=0.25)
        >>> local, shared
        (tensor([ 1.2500,  0.5000, -1.2500]), tensor([ 2,  1, -2], dtype=torch.int32))
        >>> group.residual_counts(grid=0.25)
        tensor([ 3,  1, -3], dtype=torch.int32)
    """

    flat: Tensor
    local_N: Tensor
    shared_N: Tensor
    start: int

    def chunks(self) -> Iterator[slice]:
        """Yield slices of up to `CHUNK` parameters that cover the group."""
        size = self.shared_N.numel()
        for start in range(0, size, CHUNK):
            yield slice(start, min(start + CHUNK, size))

    def find(
        self, count: int, grid: float, local_factor: float = 1.0, where: slice = ALL
    ) -> tuple[Tensor, Tensor]:
        """List the positions whose residual has reached one quantum. Reads only.

        A position gets one entry if ``|local - shared * grid| >= local_factor * count *
        grid``. There are no entries where ``|shared| > 2**30``, so that int32 never
        wraps, and none for NaN.

        Args:
            count: Quantum in steps of ``grid``, in [1, 2**22].
            grid: Size of one step, parameter units, a power of two.
            local_factor: Ratio of ``local - shared * grid`` to the residual, > 0.
            where: Positions within the group.

        Returns:
            Entries, int32, ascending in position, and the whole quanta in the residual
            of each, 1 to 15, uint8; both of shape (K,), on the vectors' device. Large
            quanta have fewer levels: an entry moves shared by 2**24 steps at most.

        Source:
            Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud
            Computing", Interspeech 2015; here the residual is a difference.
        """
        local_N, shared_N = self.local_N[where], self.shared_N[where]
        ahead_N = local_N - _shared_values(local_N, shared_N, grid)
        # Two comparisons, not abs: int32's minimum is its own absolute value.
        safe_N = (shared_N >= -GUARD) & (shared_N <= GUARD)
        # Rounded like local: a comparison with a Python number would not round.
        quantum = torch.tensor(local_factor * count * grid, dtype=local_N.dtype)
        # On the device: CUDA multiplies by the reciprocal of a number from the CPU.
        quantum = quantum.to(local_N.device)
        emitted_N = (ahead_N.abs() >= quantum) & safe_N
        positions_K = emitted_N.nonzero().squeeze(1)
        ahead_K = ahead_N[positions_K]
        # Integer product: float32 cannot hold positions above 2**24.
        first_number = self.start + (where.start or 0) + 1
        entries_K = ahead_K.sign().int() * (positions_K + first_number).int()
        levels_K = (ahead_K.abs() / quantum).clamp(1, most_levels(count))
        return entries_K, levels_K.to(torch.uint8)

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
        """Take own entries out of the residual, then clip the residual there.

        For each entry shared moves by its quanta, and the residual keeps ``momentum``
        times as much: local moves by ``1 - local_factor * (1 - momentum)`` times the
        quanta, since it expects the rest from other replicas. With ``bound >= count *
        grid`` no other position can exceed the bound (it would be an entry), so this
        equals clipping the whole residual. Returns the removed mass, parameter units.
        """
        positions_K, quanta_K = self.positions(entries_K), _quanta(entries_K, levels_K)
        moved = own_factor(local_factor, momentum) * count * grid
        self.shared_N[positions_K] += count * quanta_K
        if moved:
            self.local_N[positions_K] += quanta_K.to(self.local_N.dtype) * moved
        most = local_factor * bound
        if most == math.inf:
            return 0.0
        sent_K = _shared_values(self.local_N, self.shared_N[positions_K], grid)
        before_K = self.local_N[positions_K]
        ahead_K = before_K - sent_K
        after_K = torch.where(ahead_K > most, sent_K + most, before_K)
        after_K = torch.where(ahead_K < -most, sent_K - most, after_K)
        self.local_N[positions_K] = after_K
        # Moved to the CPU first: not every device has float64.
        cut_K = before_K.cpu().double() - after_K.cpu().double()
        return float(cut_K.abs().sum()) / local_factor

    def apply_(
        self,
        entries_K: Tensor,
        count: int,
        grid: float,
        levels_K: Tensor | None = None,
    ) -> None:
        """Move local and shared by another replica's entries; the residual stays."""
        positions_K = self.positions(entries_K)
        counts_K = count * _quanta(entries_K, levels_K)
        self.shared_N[positions_K] += counts_K
        self.local_N[positions_K] += _shared_values(self.local_N, counts_K, grid)

    def apply_all_(self, updates: Sequence[ReceivedEntries], grid: float) -> None:
        """Apply several updates in this order, as :meth:`apply_` does."""
        for update in updates:
            self.apply_(update.entries_K, update.quantum_count, grid, update.levels_K)

    def apply_counts_(
        self, counts_N: Tensor, grid: float, factor: float = 1.0, where: slice = ALL
    ) -> None:
        """Move shared by a dense update, and local by ``factor`` times the update.

        The factor is 1 for another replica's update, and `own_factor` for an own one,
        which is taken out of the residual.
        """
        self.shared_N[where] += counts_N
        self.local_N[where] += _shared_values(self.local_N, counts_N, factor * grid)

    def residual_counts(
        self,
        grid: float,
        most: int = INT32_MAX,
        local_factor: float = 1.0,
        where: slice = ALL,
    ) -> Tensor:
        """Return the residual in whole steps of the grid, on the CPU. Reads only.

        The counts are rounded half to even, and limited so that neither they nor shared
        plus the counts overflow int32. NaN becomes 0, so diverged replicas do not send
        it.
        """
        # On the CPU, as not every device has float64.
        before_N = self.shared_N[where].cpu().double()
        local_N = self.local_N[where].cpu().double()
        target_N = before_N + (local_N / grid - before_N) / local_factor
        target_N = torch.round(target_N).clamp(-most, most)
        counts_N = (target_N - before_N).nan_to_num(0.0)
        return counts_N.clamp(-INT32_MAX, INT32_MAX).to(torch.int32)

    def positions(self, entries_K: Tensor) -> Tensor:
        """Return the positions of entries within the group."""
        return entries_K.long().abs() - 1 - self.start

    def from_host(self, values: Tensor) -> Tensor:
        """Return values from the host's memory on the vectors' device."""
        return values.to(self.flat.device)

    def to_host(self, *tensors: Tensor) -> list[Tensor]:
        """Return tensors from the vectors' device in the host's memory."""
        return [tensor.cpu() for tensor in tensors]


class PinnedGroup(VectorGroup):
    """A group on CUDA that copies through pinned memory.

    Torch caches pinned memory, and reuses it only once the device has copied it.
    """

    @override
    def from_host(self, values: Tensor) -> Tensor:
        if self.flat.device.type != "cuda":
            return super().from_host(values)
        return values.pin_memory().to(self.flat.device, non_blocking=True)

    @override
    def to_host(self, *tensors: Tensor) -> list[Tensor]:
        # Pinned, as the copies do not block.
        copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        if self.flat.device.type == "cuda":
            torch.cuda.current_stream(self.flat.device).synchronize()
        return copies


def own_factor(local_factor: float, momentum: float) -> float:
    """Return by how much of an own update local moves when it is sent.

    Example:
        >>> own_factor(local_factor=4.0, momentum=0.0)
        -3.0
        >>> own_factor(local_factor=4.0, momentum=0.75)
        0.0
    """
    return 1.0 - local_factor * (1.0 - momentum)


def most_levels(count: int) -> int:
    """Return the highest level of entries with a quantum of ``count`` steps."""
    return max(1, min(MAX_LEVEL, MAX_STEPS // count))


def _quanta(entries_K: Tensor, levels_K: Tensor | None) -> Tensor:
    signs_K = entries_K.sign()
    return signs_K if levels_K is None else signs_K * levels_K.int()


def _shared_values(local_N: Tensor, shared_N: Tensor, grid: float) -> Tensor:
    return shared_N.to(local_N.dtype) * grid
