"""A module's tensors by name, as a checkpoint has them: what is trained, and the rest.

Buffers are among the rest, persistent or not. A tensor that has several names is there
once, under its first.
"""

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


def others_in(module: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters and buffers; they may go on changing.

    Example:
        >>> list(others_in(nn.BatchNorm1d(2)))
        ['running_mean', 'running_var', 'num_batches_tracked']
    """
    frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad}
    return {n: t.detach() for n, t in (*frozen.items(), *module.named_buffers())}


def load_tensors_(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into those of a module; others stay.

    Args:
        module: Changed in place; its tensors stay the same objects.
        tensors: By name, on any device.

    Raises:
        SaveError: If the module has none of that name and shape.
    """
    own = {**trained_in(module), **others_in(module)}
    for name, tensor in tensors.items():
        shape = own[name].shape if name in own else None
        if shape != tensor.shape:
            raise SaveError(
                f"{name} is {tuple(tensor.shape)} in the checkpoint, in the model "
                f"{'nothing' if shape is None else tuple(shape)}"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
