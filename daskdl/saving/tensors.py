"""Named tensors as the bytes of a safetensors file, which holds numbers and no code."""

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from daskdl.errors import OptionError, SaveError

LENGTH_BYTES = 8  # the file begins with the length of its header, little-endian
# About 100 bytes for each tensor: room for a million of them.
MOST_HEADER_BYTES = 100_000_000

DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Write tensors; they come back contiguous, and each with memory of its own.

    Args:
        tensors: By name, on any device; read only.

    Raises:
        OptionError: Naming one that safetensors cannot hold.

    Example:
        >>> from_bytes(to_bytes({"x": torch.tensor([1.5])}))
        {'x': tensor([1.5000])}
    """
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    # Copies, where memory is shared: the format refuses that, and ties are not its.
    return save({name: _alone(tensor) for name, tensor in tensors.items()})


def check_tensor(name: str, tensor: Any) -> None:
    """Refuse what cannot be written: a subclass, a sparse one, an unusual dtype.

    Raises:
        OptionError: Naming it.
    """
    if type(tensor) not in (Tensor, nn.Parameter):
        kind = type(tensor)
        raise OptionError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved "
            "as a plain tensor"
        )
    if tensor.is_meta or tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        raise OptionError(
            f"{name} is {tensor.dtype} ({tensor.layout}, on {tensor.device}), which "
            "cannot be saved; floats of 16, 32 and 64 bits, integers and booleans can"
        )


def from_bytes(content: bytes) -> dict[str, Tensor]:
    """Read tensors; on the CPU.

    Args:
        content: Of a file, whatever it is.

    Raises:
        SaveError: If it is no safetensors file, or not all of one.
    """
    header_bytes = int.from_bytes(content[:LENGTH_BYTES], "little")
    room = min(len(content) - LENGTH_BYTES, MOST_HEADER_BYTES)
    if not 0 < header_bytes <= room:
        raise SaveError(
            f"it is no safetensors file: its first 8 bytes speak of a header of "
            f"{header_bytes} bytes, of {len(content)} in all"
        )
    try:
        tensors = dict(sorted(load(content).items()))  # they come in any order
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise SaveError(f"it is no safetensors file: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise SaveError(f"{name!r:.200} is {tensor.dtype}, which is never saved")
    return tensors


def _alone(tensor: Tensor) -> Tensor:
    own = tensor.detach().cpu().contiguous()
    whole = own.untyped_storage().nbytes() == own.nbytes
    return own if whole and own.data_ptr() != tensor.data_ptr() else own.clone()
