"""Arithmetic on one flat vector, in torch operations.

Every vector is a pair: ``local_N`` (float32 or float64, parameter units) and
``shared_N`` (int32, steps of ``grid``). The residual is
``(local - shared * grid) / lead`` and is never stored: local is ahead of shared by
``lead`` times the residual, as if ``lead - 1`` other replicas had moved the same way.
As ``shared`` counts whole steps, sums of updates are exact and do not depend on their
order.

Entries are int32, ascending in the position ``i``: ``+(i + 1)`` moves position ``i`` up
by one quantum, ``-(i + 1)`` down. Kernels do not validate entries, which come from
``find`` or from :func:`daskdl.codec.decode`, which checks them.

:class:`Kernels` runs on any device and is the reference; on the CPU
:class:`daskdl.compression.kernels_numba.NumbaKernels` returns the same bits faster.

Shape suffixes: N = parameters of one flat vector, K = entries of one update.
"""

import math

import torch
from torch import Tensor

# Largest |shared| at which entries are sent and that dense updates reach: 2**30 steps
# remain before int32 wraps.
GUARD = 2**30
INT32_MAX = 2**31 - 1


class Kernels:
    """Operations on a pair of vectors, in torch: the readable reference.

    All tensors are on one device, and contiguous.
    """

    def find(
        self,
        local_N: Tensor,
        shared_N: Tensor,
        count: int,
        grid: float,
        base: int = 0,
        lead: float = 1.0,
    ) -> Tensor:
        """List the positions whose residual has reached one quantum. Reads only.

        A position gets one entry if ``|local - shared * grid| >= lead * count * grid``.
        There are no entries where ``|shared| > 2**30``, so that int32 never wraps, and
        none for NaN.

        Args:
            local_N: Local values, float32 or float64, parameter units.
            shared_N: Shared values, int32, steps of ``grid``.
            count: Quantum in steps of ``grid``, in [1, 2**22].
            grid: Size of one step, parameter units, a power of two.
            base: Position of the vector's first parameter.
            lead: Ratio of ``local - shared * grid`` to the residual, > 0.

        Returns:
            Entries, int32, shape (K,), on the vector's device, ascending in position.

        Example:
            >>> local, shared = torch.tensor([1.5, 0.25, -3.5]), torch.zeros(3).int()
            >>> Kernels().find(local, shared, count=2, grid=0.25)
            tensor([ 1, -3], dtype=torch.int32)

        Source:
            Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud
            Computing", Interspeech 2015; here the residual is a difference.
        """
        ahead_N = local_N - _sent(local_N, shared_N, grid)
        # Two comparisons, not abs: int32's minimum is its own absolute value.
        safe_N = (shared_N >= -GUARD) & (shared_N <= GUARD)
        # Rounded like local: a comparison with a Python number would not round.
        quantum = torch.tensor(lead * count * grid, dtype=local_N.dtype)
        emitted_N = (ahead_N.abs() >= quantum) & safe_N
        positions_K = emitted_N.nonzero().squeeze(1)
        signs_K = ahead_N[positions_K].sign().to(torch.int32)
        # Integer product: float32 cannot hold positions above 2**24.
        return signs_K * (positions_K + (base + 1)).to(torch.int32)

    def commit_(
        self,
        local_N: Tensor,
        shared_N: Tensor,
        entries_K: Tensor,
        count: int,
        grid: float,
        bound: float = math.inf,
        base: int = 0,
        lead: float = 1.0,
    ) -> float:
        """Take own entries out of the residual, then clip the residual there.

        For each entry shared moves by one quantum, and local moves back by ``lead - 1``
        quanta, which it expects from other replicas. With ``bound >= count * grid`` no
        other position can exceed the bound (it would be an entry), so this equals
        clipping the whole residual.

        Example:
            >>> local, shared = torch.tensor([1.5, 0.0]), torch.zeros(2).int()
            >>> entries = torch.tensor([1], dtype=torch.int32)
            >>> Kernels().commit_(local, shared, entries, 2, 0.25, bound=0.75)
            0.25
            >>> local, shared
            (tensor([1.2500, 0.0000]), tensor([2, 0], dtype=torch.int32))
        """
        positions_K = _positions(entries_K, base)
        back = (1.0 - lead) * count * grid
        shared_N[positions_K] += count * entries_K.sign()
        if back:
            local_N[positions_K] += entries_K.sign().to(local_N.dtype) * back
        most = lead * bound
        if most == math.inf:
            return 0.0
        sent_K = _sent(local_N, shared_N[positions_K], grid)
        before_K = local_N[positions_K]
        ahead_K = before_K - sent_K
        after_K = torch.where(ahead_K > most, sent_K + most, before_K)
        after_K = torch.where(ahead_K < -most, sent_K - most, after_K)
        local_N[positions_K] = after_K
        # Moved to the CPU first: not every device has float64.
        cut_K = before_K.cpu().double() - after_K.cpu().double()
        return float(cut_K.abs().sum()) / lead

    def apply_(
        self,
        local_N: Tensor,
        shared_N: Tensor,
        entries_K: Tensor,
        count: int,
        grid: float,
        base: int = 0,
    ) -> None:
        """Move local and shared by another replica's entries; the residual stays.

        Example:
            >>> local, shared = torch.zeros(2), torch.zeros(2).int()
            >>> entries = torch.tensor([-2], dtype=torch.int32)
            >>> Kernels().apply_(local, shared, entries, count=2, grid=0.25)
            >>> local, shared
            (tensor([ 0.0000, -0.5000]), tensor([ 0, -2], dtype=torch.int32))
        """
        positions_K = _positions(entries_K, base)
        counts_K = count * entries_K.sign()
        shared_N[positions_K] += counts_K
        local_N[positions_K] += _sent(local_N, counts_K, grid)

    def apply_counts_(
        self,
        local_N: Tensor,
        shared_N: Tensor,
        counts_N: Tensor,
        grid: float,
        factor: float = 1.0,
    ) -> None:
        """Move shared by a dense update, and local by ``factor`` times the update.

        The factor is 1 for another replica's update, and ``1 - lead`` for an own one,
        which is taken out of the residual.

        Example:
            >>> local, shared = torch.zeros(2), torch.zeros(2).int()
            >>> counts = torch.tensor([3, -1], dtype=torch.int32)
            >>> Kernels().apply_counts_(local, shared, counts, grid=0.25)
            >>> local, shared
            (tensor([ 0.7500, -0.2500]), tensor([ 3, -1], dtype=torch.int32))
        """
        shared_N += counts_N
        local_N += _sent(local_N, counts_N, factor * grid)

    def residual_counts(
        self,
        local_N: Tensor,
        shared_N: Tensor,
        grid: float,
        most: int,
        lead: float = 1.0,
    ) -> Tensor:
        """Return the residual in whole steps of the grid. Reads only.

        The counts are rounded half to even, and limited so that neither they nor shared
        plus the counts overflow int32. NaN becomes 0, so diverged replicas do not send
        it.

        Example:
            >>> local, shared = torch.tensor([1.1, -9.0]), torch.tensor([2, 0]).int()
            >>> Kernels().residual_counts(local, shared, grid=0.25, most=30)
            tensor([  2, -30], dtype=torch.int32)
        """
        # On the CPU, as not every device has float64.
        before_N = shared_N.cpu().double()
        target_N = before_N + (local_N.cpu().double() / grid - before_N) / lead
        target_N = torch.round(target_N).clamp(-most, most)
        counts_N = (target_N - before_N).nan_to_num(0.0)
        return counts_N.clamp(-INT32_MAX, INT32_MAX).to(torch.int32)


def _sent(local_N: Tensor, shared_N: Tensor, grid: float) -> Tensor:
    return shared_N.to(local_N.dtype) * grid


def _positions(entries_K: Tensor, base: int) -> Tensor:
    return entries_K.long().abs() - 1 - base
