"""A module's tensors by name, as a checkpoint has them: what is trained, and the rest.

Buffers are among the rest, persistent or not. A tensor that has several names is there
once, under its first.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from daskdl.errors import SaveError


def trained_in(module: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters; they go on changing.

    Example:
        >>> list(trained_in(nn.BatchNorm1d(2)))
        ['weight', 'bias']
    """
    return {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}


def largest_in(module: nn.Module) -> float:
    """The largest absolute value of a trainable parameter; NaN if one is.

    Example:
        >>> largest_in(nn.LayerNorm(2))
        1.0
    """
    parameters = [p for p in trained_in(module).values() if p.numel()]
    largest = [float(end.abs()) for p in parameters for end in p.aminmax()]
    return math.nan if any(map(math.isnan, largest)) else max(largest, default=0.0)


def others_in(module: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters and buffers; they may go on changing.

    Example:
        >>> list(others_in(nn.BatchNorm1d(2)))
        ['running_mean', 'running_var', 'num_batches_tracked']
    """
    frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad}
    return {n: t.detach() for n, t in (*frozen.items(), *module.named_buffers())}


def load_tensors_(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into those of a module; parameters that are not given stay.

    Args:
        module: Changed in place; its tensors stay the same objects.
        tensors: By name, on any device; all that `others_in` names are there.

    Raises:
        SaveError: If the module has none of that name and shape, or more of them.
    """
    others = others_in(module)
    own = {**trained_in(module), **others}
    for name in {**tensors, **others}:
        theirs, ours = _shape(tensors.get(name)), _shape(own.get(name))
        if theirs != ours:
            raise SaveError(
                f"{name} is {theirs} in the checkpoint, and {ours} in the model"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def described(tensor: Tensor) -> str:
    """A tensor's dtype and shape.

    Example:
        >>> described(torch.zeros(2, 3))
        'float32 (2, 3)'
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(tensor.shape)}"


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)
