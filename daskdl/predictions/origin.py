"""What predictions are made from: enough to tell others at the same URL."""

import hashlib
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from daskdl.data.exports.origin import origin_of, token_of
from daskdl.data.source import Source
from daskdl.serialization import MAKER

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Its mode, what is looked at otherwise, and who made it.
_OF_ALL = frozenset({*vars(nn.Module()), MAKER})
_TELLING = (
    *(int, float, complex, str, bytes, type(None), type, torch.dtype),
    *(Tensor, np.ndarray, np.generic),
    *(types.FunctionType, types.BuiltinFunctionType),
)


def origin_of_predictions(
    model: nn.Module, source: Source, X: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe predictions, as plain values for JSON.

    Args:
        model: Of which; see `fingerprint`.
        source: The parts of the data.
        X: The data, which are told as those of an export are.
        options: Plain values, which decide what comes out.
    """
    return {"model": fingerprint(model), **origin_of(source, (X, None), options)}


def fingerprint(model: nn.Module) -> str:
    """What tells a model from others: its class, its layers, and all of its numbers.

    Numbers, text, arrays and functions count wherever they are attributes of a layer,
    in lists and dicts too. It is the same in every session. What the code of a class
    does is not looked at, nor objects of other classes.

    Example:
        >>> one = nn.Linear(2, 1)
        >>> fingerprint(one) == fingerprint(nn.Linear(2, 1))
        False
    """
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    found = hashlib.sha256(f"{kind} {_ADDRESS.sub('', repr(model))}".encode())
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        found.update(f" {name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(_bytes_of(tensor))
    for name, value in _attributes(model):
        found.update(f" {name} {token_of(_telling(value))} ".encode())
    return found.hexdigest()[:32]


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What layers have beside parameters, buffers and other layers, by name."""
    for layer, module in model.named_modules():
        for name, value in sorted(vars(module).items()):
            if name not in _OF_ALL:
                yield f"{layer}.{name}", value


def _telling(value: Any) -> Any:
    """Of objects that may look different in each session nothing but the class."""
    if isinstance(value, dict):
        return {str(key): _telling(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_telling(item) for item in value]
    if isinstance(value, set | frozenset):
        return [_telling(item) for item in sorted(value, key=str)]
    return value if isinstance(value, _TELLING) else type(value).__qualname__


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
