"""What makes two modules behave differently, besides the values of their tensors."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from daskdl.serialization import MAKER

# In every module, and compared by themselves; lists of a recurrent one's parameters.
_NOT_COMPARED = frozenset(
    {"_parameters", "_buffers", "_modules", "training"}
    | {"_flat_weights", "_flat_weight_refs", MAKER}
)


def difference(module: nn.Module, rebuilt: nn.Module) -> str | None:
    """In what two modules differ, besides the values and dtypes of their tensors.

    Args:
        module: That is to be saved.
        rebuilt: Of its layers' arguments.

    Returns:
        What is to be put after the name of the module; None: they are alike.

    Example:
        >>> difference(nn.ReLU(inplace=True), nn.ReLU())
        ' has a value of inplace that its arguments do not make'
    """
    ours = dict(module.named_modules(remove_duplicate=False))
    theirs = dict(rebuilt.named_modules(remove_duplicate=False))
    for path, one in ours.items():
        shown = f".{path}" if path else ""
        other = theirs.get(path)
        if other is None or type(other) is not type(one):
            return f"{shown} is a {type(one).__name__} that its arguments do not make"
        found = _attribute(one, other) or _tensor(one, other)
        if found is not None:
            return f"{shown} has {found} that its arguments do not make"
    return None if len(ours) == len(theirs) else " has fewer layers"


def _attribute(one: nn.Module, other: nn.Module) -> str | None:
    ours, theirs = (
        {k: v for k, v in vars(m).items() if k not in _NOT_COMPARED}
        for m in (one, other)
    )
    for name in {**ours, **theirs}:
        if name not in ours or name not in theirs:
            return f"an attribute {name}"
        if not _equal(ours[name], theirs[name]):
            return f"a value of {name}"
    return None


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or isinstance(one, Tensor):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _tensor(one: nn.Module, other: nn.Module) -> str | None:
    for name in {**one._parameters, **other._parameters}:
        if _shape(one._parameters, name) != _shape(other._parameters, name):
            return f"a parameter {name}"
    for name in {**one._buffers, **other._buffers}:
        # One that is None there is a slot, into which the tensor is put.
        slot = name in other._buffers and other._buffers[name] is None
        if not slot and _shape(one._buffers, name) != _shape(other._buffers, name):
            return f"a buffer {name}"
    return None


def _shape(tensors: Mapping[str, Tensor | None], name: str) -> Any:
    tensor = tensors.get(name, name)  # a name where there is none
    return tuple(tensor.shape) if isinstance(tensor, Tensor) else tensor
