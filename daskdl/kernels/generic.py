"""The kernels in torch operations: any device, and the readable reference.

No state, no bytes, no compilation. Tests hold :mod:`daskdl.kernels.cpu` to this.

Shape suffixes: N = parameters of one flat vector, K = entries of one update.
"""

import math

import torch
from torch import Tensor

from daskdl.errors import CodecError

# Entries wait, and dense updates end, at this |shared|. As in daskdl.kernels.loops; a
# test holds the two together.
GUARD = 2**30
INT32_MAX = 2**31 - 1


def _sent(local_N: Tensor, shared_N: Tensor, grid: float) -> Tensor:
    return shared_N.to(local_N.dtype) * grid


def _positions(entries_K: Tensor, base: int, size: int) -> Tensor:
    check(entries_K, base, size)
    return entries_K.long().abs() - 1 - base


def check(entries_K: Tensor, base: int, size: int) -> None:
    """See :func:`daskdl.kernels.check`."""
    positions_K = entries_K.long().abs()
    before_K = torch.cat([positions_K.new_tensor([base]), positions_K[:-1]])
    bad_K = (positions_K <= before_K) | (positions_K > base + size)
    if bad_K.any():
        k = int(bad_K.nonzero()[0])
        raise CodecError(
            f"entry {k} is {int(entries_K[k])}; need ascending positions in "
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
    ahead_N = local_N - _sent(local_N, shared_N, grid)
    # Two comparisons, not abs: int32's minimum is its own absolute value.
    safe_N = (shared_N >= -GUARD) & (shared_N <= GUARD)
    # Rounded as local is: a comparison with a Python number would not round.
    quantum = torch.tensor(weight * count * grid, dtype=local_N.dtype)
    emitted_N = (ahead_N.abs() >= quantum) & safe_N
    positions_K = emitted_N.nonzero().squeeze(1)
    signs_K = ahead_N[positions_K].sign().to(torch.int32)
    # Integer product: float32 cannot hold positions above 2**24.
    return signs_K * (positions_K + (base + 1)).to(torch.int32)


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
    positions_K = _positions(entries_K, base, local_N.numel())
    shared_N[positions_K] += count * entries_K.sign()
    if bound == math.inf:
        return 0.0
    sent_K = _sent(local_N, shared_N[positions_K], grid)
    before_K = local_N[positions_K]
    ahead_K = before_K - sent_K
    after_K = torch.where(ahead_K > bound, sent_K + bound, before_K)
    after_K = torch.where(ahead_K < -bound, sent_K - bound, after_K)
    local_N[positions_K] = after_K
    # Moved first: not every device has float64.
    return float((before_K.cpu().double() - after_K.cpu().double()).abs().sum())


def move_(local_N: Tensor, entries_K: Tensor, amount: float, base: int = 0) -> None:
    """See :func:`daskdl.kernels.move_`."""
    positions_K = _positions(entries_K, base, local_N.numel())
    local_N[positions_K] += entries_K.sign().to(local_N.dtype) * amount


def apply_(
    local_N: Tensor,
    shared_N: Tensor,
    entries_K: Tensor,
    count: int,
    grid: float,
    base: int = 0,
) -> None:
    """See :func:`daskdl.kernels.apply_`."""
    positions_K = _positions(entries_K, base, local_N.numel())
    counts_K = count * entries_K.sign()
    shared_N[positions_K] += counts_K
    local_N[positions_K] += _sent(local_N, counts_K, grid)


def apply_counts_(
    local_N: Tensor,
    shared_N: Tensor,
    counts_N: Tensor,
    grid: float,
    factor: float = 1.0,
) -> None:
    """See :func:`daskdl.kernels.apply_counts_`."""
    shared_N += counts_N
    local_N += _sent(local_N, counts_N, factor * grid)


def fold_(total_N: Tensor, entries_K: Tensor, count: int) -> None:
    """See :func:`daskdl.kernels.fold_`."""
    total_N[_positions(entries_K, 0, total_N.numel())] += count * entries_K.sign()


def residual_counts(
    local_N: Tensor, shared_N: Tensor, grid: float, most: int, weight: float = 1.0
) -> Tensor:
    """See :func:`daskdl.kernels.residual_counts`."""
    # On the CPU, as not every device has float64.
    before_N = shared_N.cpu().double()
    target_N = before_N + (local_N.cpu().double() / grid - before_N) / weight
    target_N = torch.round(target_N).clamp(-most, most)
    counts_N = (target_N - before_N).nan_to_num(0.0)
    return counts_N.clamp(-INT32_MAX, INT32_MAX).to(torch.int32)
