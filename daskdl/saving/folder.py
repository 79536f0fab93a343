"""Named tensors as the bytes of a safetensors file, which holds numbers and no code.

The library reads them. It does not write them here: while it copies tensors it lets no
other thread of Python run, and training, which goes on meanwhile, would wait for it.

Source:
    The format: https://github.com/huggingface/safetensors, README.md, "Format".

The index of a save: JSON that names each of its files, and has a checksum.

No I/O. What a file is called follows from what is in it, so a name in an index that was
tampered with leads nowhere else, and a new file never takes the place of an old one.

A save: files of tensors in a folder, and an index that makes them one.

The index is written last, and at once. Who reads before that sees what was there
before; only after it are the files deleted that no index names any more. So there is
always a whole save, the old one or the new one, whenever a writer dies.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from daskdl.data.storage import Store, is_path, store_of
from daskdl.errors import DataError, OptionError, SaveError

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


MOST_BYTES = 256 * 2**20  # of the JSON; 10,000 epochs of history take 10 MB
DIGITS = 16  # of the checksum in a file's name
SUFFIX = ".safetensors"
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Kind:
    """What is saved, and how it is laid out.

    Attributes:
        form: What the index says it is.
        version: Of the layout; raised by whoever changes it.
        index: File name of the index.
        roles: What files there may be.
    """

    form: str
    version: int
    index: str
    roles: tuple[str, ...]


class File(NamedTuple):
    """A file beside the index."""

    name: str
    nbytes: int
    sha256: str  # in hexadecimal


def file_of(role: str, content: bytes | memoryview) -> File:
    """Name a file after what is in it.

    Example:
        >>> file_of("model", b"").name
        'model-e3b0c44298fc1c14.safetensors'
    """
    digest = hashlib.sha256(content).hexdigest()
    return File(_name(role, digest), len(content), digest)


def encode_index(
    kind: Kind, made_by: Mapping[str, str], files: Mapping[str, File], content: Any
) -> bytes:
    """Write an index.

    Args:
        kind: Of what is saved.
        made_by: Versions of the libraries, for people.
        files: By role.
        content: JSON.
    """
    index: dict[str, Any] = {
        "format": kind.form,
        "version": kind.version,
        "made_by": dict(made_by),
        "files": {role: file._asdict() for role, file in files.items()},
        "content": content,
    }
    index["sha256"] = _digest(index)
    return json.dumps(index, indent=1, allow_nan=False).encode()


def decode_index(kind: Kind, encoded: bytes) -> tuple[dict[str, File], Any]:
    """Read an index.

    Args:
        kind: Of what it has to be.
        encoded: The file, whatever it is.

    Returns:
        The files by role, and the content.

    Raises:
        SaveError: If it is damaged, of something else, or too new.
    """
    index = _parsed(encoded)
    if not isinstance(index, dict) or index.get("format") != kind.form:
        raise SaveError(f"it is not of the format {kind.form!r}")
    version = index.get("version")
    if type(version) is not int or version < 1:
        raise SaveError(f"its version is {version!r:.80}, not a number from 1 on")
    if version > kind.version:
        raise SaveError(
            f"it is of version {version}, and this daskdl reads up to {kind.version}; "
            "install a newer one"
        )
    if index.pop("sha256", None) != _digest(index):
        raise SaveError("it is damaged: its checksum is wrong")
    return _files(kind, index.get("files")), index.get("content")


def _parsed(encoded: bytes) -> Any:
    try:
        return json.loads(encoded, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # also of bytes that are no text
        raise SaveError(f"it is no JSON: {error!s:.200}") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _digest(index: Mapping[str, Any]) -> str:
    try:
        return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    except RecursionError as error:
        raise SaveError("it is nested too deeply") from error


def _files(kind: Kind, listed: Any) -> dict[str, File]:
    if not isinstance(listed, dict):
        raise SaveError(f"its files are {listed!r:.80}")
    files = {}
    for role, entry in listed.items():
        if role not in kind.roles:
            raise SaveError(f"it names a file for {role!r:.80}, which is unknown")
        files[role] = _file(role, entry)
    return files


def _file(role: str, entry: Any) -> File:
    try:
        file = File(**entry)
    except TypeError as error:
        raise SaveError(f"it describes the file of {role} as {entry!r:.200}") from error
    whole = isinstance(file.sha256, str) and _DIGEST.fullmatch(file.sha256)
    if not whole or file.name != _name(role, file.sha256):
        raise SaveError(f"it describes the file of {role} as {entry!r:.200}")
    if type(file.nbytes) is not int:
        raise SaveError(f"it gives the file of {role} {file.nbytes!r:.80} bytes")
    return file


def _name(role: str, sha256: str) -> str:
    return f"{role}-{sha256[:DIGITS]}{SUFFIX}"


READS = 3  # of a save in whose place others are put meanwhile


class Saved(NamedTuple):
    """What is in a save."""

    content: Any  # JSON
    tensors: Mapping[str, Mapping[str, Tensor]]  # by role and name


@dataclass(frozen=True)
class Folder:
    """Where a save is, or is to be; one process at a time may write there.

    Attributes:
        store: The folder.
        kind: Of what is saved.
    """

    store: Store
    kind: Kind

    @classmethod
    def at(
        cls, url: Any, kind: Kind, storage_options: Mapping[str, Any] | None = None
    ) -> "Folder":
        """The folder at a URL or a path.

        Raises:
            OptionError: If it is neither.
        """
        if not is_path(url):
            raise OptionError(f"url must be a URL or a path of a folder, got {url!r}")
        return cls(Store(store_of(url).url, dict(storage_options or {})), kind)

    def write(
        self,
        content: Any,
        contents: Mapping[str, Mapping[str, Tensor]],
        made_by: Mapping[str, str],
    ) -> None:
        """Save; in place of what was there before, if there was something.

        Args:
            content: JSON.
            contents: Tensors by role and name; roles without tensors get no file.
            made_by: Versions of the libraries.

        Raises:
            OptionError: Naming a tensor that cannot be written.
            SaveError: If nothing can be written there.
        """
        with self._named("write"):
            filled = {role: own for role, own in contents.items() if own}
            files = {role: laid_out(own) for role, own in filled.items()}
        self.write_files(content, files, made_by)

    def write_files(
        self, content: Any, contents: Mapping[str, Tensor], made_by: Mapping[str, str]
    ) -> None:
        """Save what is laid out already.

        Args:
            content: JSON.
            contents: By role, see `tensors.laid_out`.
            made_by: Versions of the libraries.

        Raises:
            SaveError: If nothing can be written there.
        """
        with self._named("write"):
            files = {role: self._put(role, own) for role, own in contents.items()}
            index = encode_index(self.kind, made_by, files, content)
            self.store.write(self.kind.index, index)
            self.store.delete(self._stale(files))

    def read(self) -> Saved:
        """Load what is there.

        Raises:
            SaveError: If there is nothing, or it is damaged, of something else, or too
                new.
        """
        with self._named("read"):
            index = self._index()
            for _ in range(READS - 1):
                try:
                    return self._contents(index)
                except (SaveError, DataError):
                    before, index = index, self._index()
                    if index == before:  # else somebody has saved here meanwhile
                        raise
            return self._contents(index)

    def content(self) -> Any:
        """Read the JSON alone; of its files nothing is looked at.

        Raises:
            SaveError: As `read`.
        """
        with self._named("read"):
            return decode_index(self.kind, self._index())[1]

    def _put(self, role: str, own: Tensor) -> File:
        content = view(own)
        file = file_of(role, content)
        self.store.write(file.name, content)
        return file

    def _stale(self, files: Mapping[str, File]) -> list[str]:
        """Files of older saves, and of those that were broken off."""
        roles = "|".join(self.kind.roles)
        form = re.compile(rf"({roles})-[0-9a-f]{{{DIGITS}}}{re.escape(SUFFIX)}")
        named = {file.name for file in files.values()}
        return [
            name
            for name in self.store.names("*")
            if form.fullmatch(name) and name not in named
        ]

    def _index(self) -> bytes:
        size = self.store.size(self.kind.index)
        if size > MOST_BYTES:
            raise SaveError(f"its {self.kind.index} has {size} bytes")
        return self.store.read(self.kind.index)

    def _contents(self, index: bytes) -> Saved:
        files, content = decode_index(self.kind, index)
        return Saved(content, {role: self._got(file) for role, file in files.items()})

    def _got(self, file: File) -> Mapping[str, Tensor]:
        size = self.store.size(file.name)
        if size != file.nbytes:
            raise SaveError(f"{file.name} has {size} bytes instead of {file.nbytes}")
        content = self.store.read(file.name)
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise SaveError(f"{file.name} is damaged: its checksum is wrong")
        try:
            return from_bytes(content)
        except SaveError as error:
            raise SaveError(f"{file.name} cannot be read: {error}") from error

    @contextmanager
    def _named(self, verb: str) -> Iterator[None]:
        """Errors from here get the URL, and those of the store become ours."""
        try:
            yield
        except (SaveError, DataError) as error:
            raise SaveError(f"cannot {verb} {self.store.url}: {error}") from error
