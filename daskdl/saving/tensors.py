"""Named tensors as the bytes of a safetensors file, which holds numbers and no code.

The library reads them. It does not write them here: while it copies tensors it lets no
other thread of Python run, and training, which goes on meanwhile, would wait for it.

Source:
    The format: https://github.com/huggingface/safetensors, README.md, "Format".
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from daskdl.errors import OptionError, SaveError

LENGTH_BYTES = 8  # the file begins with the length of its header, little-endian
# About 100 bytes for each tensor: room for a million of them.
MOST_HEADER_BYTES = 100_000_000

ALIGNMENT = 8  # bytes; of the first tensor, and larger than any element
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def laid_out(tensors: Mapping[str, Tensor], used: Tensor | None = None) -> Tensor:
    """Copy tensors to where they are in a file.

    They come back contiguous, and each with memory of its own.

    Args:
        tensors: By name, on any device; read only.
        used: What this has returned before and nobody needs: its memory is written to
            if there is as much of it as is wanted now.

    Returns:
        The bytes of the file, uint8, on the CPU; see `view`.

    Raises:
        OptionError: Naming one that safetensors cannot hold.

    Example:
        >>> content = laid_out({"x": torch.tensor([1.5])})
        >>> from_bytes(bytes(view(content)))
        {'x': tensor([1.5000])}
    """
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    # The widest first: then each is where its elements are aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header, ends = _header({name: tensors[name] for name in names})
    nbytes = len(header) + ends[-1]
    content = used
    if content is None or len(content) != nbytes:
        content = torch.empty(nbytes, dtype=torch.uint8)
    content[: len(header)] = torch.frombuffer(header, dtype=torch.uint8)
    for name, start, end in zip(names, ends, ends[1:], strict=False):
        tensor = tensors[name].detach()
        part = content[len(header) + start : len(header) + end]
        part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return content


def view(content: Tensor) -> memoryview:
    """The bytes of what is `laid_out`, for whoever writes them; not copied."""
    return content.numpy().data


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytearray, list[int]]:
    """What comes before the tensors, and where each of them ends after that."""
    ends, described = [0], {}
    for name, tensor in tensors.items():
        ends.append(ends[-1] + tensor.nbytes)
        described[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": ends[-2:],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return bytearray(len(text).to_bytes(LENGTH_BYTES, "little") + text), ends


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
