"""Atomic saves: safetensors files in a folder, and a manifest.

Files are named after their checksums and the manifest is written last, so the folder
holds the old save or the new one, whenever the writer dies. On file systems that cannot
replace a file atomically it may hold none that can be read; see `storage.put`.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from daskdl.data.manifest import File, Manifest, ManifestFormat
from daskdl.data.storage import Store, is_path, store_of
from daskdl.errors import DataError, OptionError, SaveError

Tensors = Mapping[str, Tensor]

LENGTH_BYTES = 8  # size of the header's length, little-endian, at the start of a file
MAX_HEADER_BYTES = 100_000_000  # about 100 bytes for each of a million tensors
ALIGNMENT = 8  # bytes, of the first tensor; at least as large as any element
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
DIGITS = 16  # hexadecimal digits of the checksum in a file name
READS = 3  # attempts while other processes replace the save


def encode_tensors(tensors: Tensors, reused: Tensor | None = None) -> Tensor:
    """Copy tensors into the bytes of a safetensors file.

    The library's writer holds the GIL while it copies, which would stop training.
    The result uses the memory of an earlier result, `reused`, if the size is the same.

    Source:
        https://github.com/huggingface/safetensors, README.md, "Format".
    """
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    # Widest elements first, so each tensor is aligned for its elements.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    ends = [0, *itertools.accumulate(tensors[name].nbytes for name in names)]
    offsets = dict(zip(names, itertools.pairwise(ends), strict=True))
    descriptions = {
        name: {
            "dtype": DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": list(offsets[name]),
        }
        for name in names
    }
    text = json.dumps(descriptions, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    header = bytearray(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    content = reused
    if content is None or len(content) != len(header) + ends[-1]:
        size = len(header) + ends[-1]
        content = torch.empty(size, dtype=torch.uint8, device="cpu")
    content[: len(header)] = torch.frombuffer(header, dtype=torch.uint8)
    for name, (start, end) in offsets.items():
        tensor = tensors[name].detach()
        part = content[len(header) + start : len(header) + end]
        part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return content


def check_tensor(name: str, tensor: Any) -> None:
    """Refuse subclasses, sparse tensors and unsupported dtypes with an OptionError."""
    if type(tensor) not in (Tensor, nn.Parameter):
        kind = type(tensor)
        raise OptionError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved "
            "as a plain tensor"
        )
    if tensor.is_meta or tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        raise OptionError(
            f"{name} is {tensor.dtype} ({tensor.layout}, on {tensor.device}), which "
            "cannot be saved: its elements must be floats of 16, 32 or 64 bits, "
            "integers or booleans, and it must be dense"
        )


def decode_tensors(content: bytes) -> dict[str, Tensor]:
    """Read an untrusted safetensors file."""
    header_bytes = int.from_bytes(content[:LENGTH_BYTES], "little")
    most = min(len(content) - LENGTH_BYTES, MAX_HEADER_BYTES)
    if not 0 < header_bytes <= most:
        raise SaveError(
            f"not a safetensors file: the header length is {header_bytes} bytes, but "
            f"the file has {len(content)} bytes"
        )
    try:
        with torch.device("cpu"):  # the default may be another device
            tensors = dict(sorted(load(content).items()))  # in any order until here
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise SaveError(f"not a safetensors file: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise SaveError(f"{name!r:.200} has an unsupported dtype, {tensor.dtype}")
    return tensors


@dataclass(frozen=True)
class SaveFolder:
    """The folder of a save; only one process at a time may write to it."""

    store: Store
    kind: ManifestFormat
    roles: tuple[str, ...]

    def write(self, content: Any, files: Mapping[str, Tensor]) -> None:
        """Save, and replace an earlier save."""
        with save_errors("write", self.store):
            written = []
            for role, encoded in files.items():
                data = encoded.numpy().data
                file = File.of("", data, role=role)
                name = f"{role}-{file.sha256[:DIGITS]}.safetensors"
                written.append(replace(file, name=name))
                self.store.write(name, data)
            Manifest(tuple(written), content).write(self.store, self.kind)
            roles = "|".join(self.roles)
            pattern = re.compile(rf"({roles})-[0-9a-f]{{{DIGITS}}}\.safetensors")
            # Includes files that earlier, unfinished saves have left.
            existing = filter(pattern.fullmatch, self.store.names("*"))
            self.store.delete({*existing} - {file.name for file in written})

    def read(self) -> tuple[Any, dict[str, dict[str, Tensor]]]:
        """Return the JSON, and the tensors by role and name."""
        with save_errors("read", self.store):
            manifest = Manifest.read(self.store, self.kind)
            for _ in range(READS - 1):
                try:
                    return manifest.content, self._tensors(manifest)
                except (SaveError, DataError):
                    before, manifest = manifest, Manifest.read(self.store, self.kind)
                    if manifest == before:  # else another save has replaced it
                        raise
            return manifest.content, self._tensors(manifest)

    def content(self) -> Any:
        """Return the JSON without reading tensors; errors as `read`."""
        with save_errors("read", self.store):
            return Manifest.read(self.store, self.kind).content

    def _tensors(self, manifest: Manifest) -> dict[str, dict[str, Tensor]]:
        tensors = {}
        for file in manifest.files:
            role = file.details.get("role")
            if role not in self.roles or role in tensors:
                raise SaveError(f"{file.name!r:.80} has the role {role!r:.80}")
            content = file.read(self.store, self.kind.remedy)
            try:
                tensors[role] = decode_tensors(content)
            except SaveError as error:
                raise SaveError(f"{file.name} cannot be read: {error}") from error
        return tensors


@contextmanager
def save_errors(verb: str, store: Store) -> Iterator[None]:
    """Context manager: turn errors into a SaveError that names the URL."""
    try:
        yield
    except (SaveError, DataError) as error:
        raise SaveError(f"cannot {verb} {store.url}: {error}") from error


def folder_store(url: Any, storage_options: Mapping[str, Any] | None = None) -> Store:
    """Return the store of a folder.

    Raises:
        OptionError: If `url` is neither a URL nor a path.
    """
    if not is_path(url):
        raise OptionError(f"url must be the URL or path of a folder, got {url!r}")
    return store_of(url, storage_options)
