"""A module's buffers as two arrays, and what several replicas make of theirs.

Buffers are not thresholded: replicas average them where they meet.

Shape suffixes: F = floating and I = integer buffer elements.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from daskdl.errors import ModelError


class Buffers(NamedTuple):
    """The buffers of a module, as plain numbers."""

    floating_F: npt.NDArray[np.float64]  # complex ones as pairs
    integer_I: npt.NDArray[np.int64]  # bool ones as 0 and 1


def pack_buffers(module: nn.Module) -> Buffers:
    """Copy a module's buffers, persistent or not, into two arrays.

    Args:
        module: Read only. A buffer that is registered twice is taken once.

    Returns:
        Floating (and complex) and integer (and bool) ones, as in ``named_buffers``.

    Example:
        >>> pack_buffers(torch.nn.BatchNorm1d(2))
        Buffers(floating_F=array([0., 0., 1., 1.]), integer_I=array([0]))
    """
    floating = [np.empty(0, np.float64)]
    integer = [np.empty(0, np.int64)]
    for buffer in module.buffers():
        if buffer.is_floating_point() or buffer.is_complex():
            floating.append(_real(buffer).cpu().double().numpy().ravel())
        else:
            integer.append(buffer.cpu().long().numpy().ravel())
    return Buffers(np.concatenate(floating), np.concatenate(integer))


def average_buffers(packed: Sequence[tuple[Buffers, int]]) -> Buffers:
    """Merge the buffers of several replicas.

    Args:
        packed: Buffers and examples trained on, one pair per replica; the order
            decides the rounding.

    Returns:
        Floating ones: mean weighted by examples, plain if all weights are 0; values
        on which all agree stay as they are, infinities too. Integer ones: maximum.

    Raises:
        ModelError: If there is none, or they have different sizes.

    Example:
        >>> one = Buffers(np.array([1.0]), np.array([3]))
        >>> two = Buffers(np.array([4.0]), np.array([5]))
        >>> average_buffers([(one, 20), (two, 10)])
        Buffers(floating_F=array([2.]), integer_I=array([5]))
    """
    sizes = {(b.floating_F.size, b.integer_I.size) for b, _ in packed}
    if len(sizes) != 1:
        raise ModelError(f"need buffers of one size, got {sorted(sizes)}")
    total = sum(examples for _, examples in packed)
    used = [(b, n if total else 1) for b, n in packed if n or not total]
    first = used[0][0].floating_F
    weighted, agreed = np.zeros_like(first), np.ones(first.shape, bool)
    with np.errstate(invalid="ignore"):  # infinities of both signs: NaN is the answer
        for buffers, examples in used:
            weighted += buffers.floating_F * examples
            agreed &= buffers.floating_F == first
    mean = weighted / sum(examples for _, examples in used)
    integer_I = np.max([buffers.integer_I for buffers, _ in packed], axis=0)
    return Buffers(np.where(agreed, first, mean), integer_I)


def load_buffers_(module: nn.Module, buffers: Buffers) -> None:
    """Write packed buffers back.

    Args:
        module: Built like the one that was packed. Changed in place.
        buffers: What :func:`pack_buffers` or :func:`average_buffers` returned.

    Raises:
        ModelError: If the module's buffers have other sizes; nothing is written.

    Example:
        >>> layer = torch.nn.BatchNorm1d(1)
        >>> load_buffers_(layer, Buffers(np.array([0.5, 2.0]), np.array([7])))
        >>> layer.running_mean.item(), layer.num_batches_tracked.item()
        (0.5, 7)
    """
    got = [part.size for part in buffers]
    want = [part.size for part in pack_buffers(module)]
    if got != want:
        raise ModelError(f"got [floating, integer] buffers {got}, model has {want}")
    # Copied: they may be read-only, and torch does not take those.
    floating, integer = (torch.from_numpy(part.copy()) for part in buffers)
    with torch.no_grad():
        for target in (_real(buffer) for buffer in module.buffers()):
            if target.is_floating_point():
                part, floating = floating.tensor_split([target.numel()])
            else:
                part, integer = integer.tensor_split([target.numel()])
            target.copy_(part.view(target.shape))


def _real(buffer: Tensor) -> Tensor:
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer
