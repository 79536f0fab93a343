"""Atomic saves: safetensors files in a folder, and a manifest.

Files are named after their checksums and the manifest is written last, so the folder
holds the old save or the new one, whenever the writer dies. On file systems that cannot
replace a file atomically it may hold none that can be read; see `storage.put`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from daskdl.data.manifest import File, Kind, Manifest
from daskdl.data.storage import Store, is_path, store_of
from daskdl.errors import DataError, OptionError, SaveError

Tensors = Mapping[str, Tensor]

LENGTH_BYTES = 8  # at the start of a file: the length of its header, little-endian
# About 100 bytes per tensor: enough for a million tensors.
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
DIGITS = 16  # of the checksum in a file's name
READS = 3  # attempts, if another process replaces the save meanwhile


def encode_tensors(tensors: Tensors, reused: Tensor | None = None) -> Tensor:
    """Copy tensors into the bytes of a safetensors file.

    The library's writer holds the GIL while it copies, which would stop training.
    The memory of an earlier result, `reused`, is taken again if its size fits.

    Source:
        https://github.com/huggingface/safetensors, README.md, "Format".
    """
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
    # Widest first: then each tensor is aligned for its elements.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    ends, described = [0], {}
    for name in names:
        tensor = tensors[name]
        ends.append(ends[-1] + tensor.nbytes)
        described[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": ends[-2:],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    header = bytearray(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    content = reused
    if content is None or len(content) != len(header) + ends[-1]:
        content = torch.empty(len(header) + ends[-1], dtype=torch.uint8)
    content[: len(header)] = torch.frombuffer(header, dtype=torch.uint8)
    for name, start, end in zip(names, ends, ends[1:], strict=False):
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
            "cannot be saved; floats of 16, 32 and 64 bits, integers and booleans can"
        )


def decode_tensors(content: bytes) -> dict[str, Tensor]:
    """Read an untrusted safetensors file."""
    header_bytes = int.from_bytes(content[:LENGTH_BYTES], "little")
    room = min(len(content) - LENGTH_BYTES, MOST_HEADER_BYTES)
    if not 0 < header_bytes <= room:
        raise SaveError(
            f"it is no safetensors file: its first 8 bytes announce a header of "
            f"{header_bytes} bytes, of {len(content)} in all"
        )
    try:
        tensors = dict(sorted(load(content).items()))  # in no fixed order
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise SaveError(f"it is no safetensors file: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise SaveError(f"{name!r:.200} is {tensor.dtype}, which is never saved")
    return tensors


@dataclass(frozen=True)
class SaveFolder:
    """The folder of a save; only one process at a time may write to it."""

    store: Store
    kind: Kind
    roles: tuple[str, ...]

    def write(self, content: Any, files: Mapping[str, Tensor]) -> None:
        """Save, and replace an earlier save."""
        with save_errors("write", self.store):
            listed = []
            for role, encoded in files.items():
                data = encoded.numpy().data
                file = File.of("", data, role=role)
                name = f"{role}-{file.sha256[:DIGITS]}.safetensors"
                listed.append(File(name, file.nbytes, file.sha256, file.details))
                self.store.write(name, data)
            Manifest(tuple(listed), content).write(self.store, self.kind)
            kept = {file.name for file in listed}
            self.store.delete(name for name in self._files() if name not in kept)

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

    def _files(self) -> list[str]:
        """Return all files of tensors, including those of earlier, unfinished saves."""
        form = re.compile(
            rf"({'|'.join(self.roles)})-[0-9a-f]{{{DIGITS}}}\.safetensors"
        )
        return list(filter(form.fullmatch, self.store.names("*")))

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
    """Turn errors into a SaveError that names the URL."""
    try:
        yield
    except (SaveError, DataError) as error:
        raise SaveError(f"cannot {verb} {store.url}: {error}") from error


def folder_store(url: Any, storage_options: Mapping[str, Any] | None = None) -> Store:
    """Return the store of a save or of checkpoints; OptionError if `url` is no URL."""
    if not is_path(url):
        raise OptionError(f"url must be a URL or a path of a folder, got {url!r}")
    return store_of(url, storage_options)
