"""What predictions are made from: enough to tell others at the same URL."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from daskdl.data.exports.origin import origin_of
from daskdl.data.source import Source

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


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

    It is the same in every session. What its code does is not looked at.

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
    return found.hexdigest()[:32]


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
