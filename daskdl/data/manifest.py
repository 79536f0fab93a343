"""Manifests: checksummed lists of the files in a folder of daskdl.

Packed files and saves are files in a folder with a manifest: JSON with a checksum of
each file and of itself, written last and atomically. A folder without a manifest is
unfinished, and damage is found when a file is read.
"""

import contextlib
import hashlib
import json
import struct
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from daskdl.config import VERSION
from daskdl.data.storage import Store
from daskdl.errors import DataError

# Errors of JSON that is not text, is nested too deeply, or has unexpected content; and
# of archives and safetensors files.
_DAMAGED = (
    ValueError,
    TypeError,
    LookupError,
    RuntimeError,
    EOFError,
    struct.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    SafetensorError,
)


@contextlib.contextmanager
def naming_damage(url: str, remedy: str) -> Iterator[None]:
    """Turn errors caused by the content of a file into a DataError with the remedy."""
    try:
        yield
    except DataError:
        raise
    except _DAMAGED as error:
        shown = f"{type(error).__name__}: {error!s:.200}"
        raise DataError(f"{url} is damaged: {shown}; {remedy}") from error


def is_count(value: Any, least: int = 0) -> bool:
    """Whether a value of JSON is a whole number of at least `least`."""
    return type(value) is int and value >= least


class Kind(NamedTuple):
    """What a folder holds; each kind has its own manifest."""

    format: str  # name of the format, such as "daskdl packed files"
    version: int  # of the layout
    name: str  # file name of the manifest
    hint: str  # remedy if the file is of another format
    remedy: str  # for a damaged folder


@dataclass(frozen=True)
class File:
    """A file beside the manifest."""

    name: str  # in the folder, not a path
    nbytes: int
    sha256: str  # checksum of its bytes, in hexadecimal
    details: Mapping[str, Any] = field(default_factory=dict)  # JSON: rows, role, ...

    @classmethod
    def of(cls, name: str, content: bytes | memoryview, **details: Any) -> "File":
        """Describe a file with this content."""
        digest = hashlib.sha256(content).hexdigest()
        return cls(name, len(content), digest, details)

    @classmethod
    def from_json(cls, entry: Any) -> "File":
        """Read what `to_json` returns; refuse a name that leads out of the folder."""
        details = dict(entry)
        name, nbytes, sha256 = map(details.pop, ("name", "nbytes", "sha256"))
        named = isinstance(name, str) and not {*name} & {*"/\\\0"}
        known = is_count(nbytes) and isinstance(sha256, str)
        if not named or name in ("", ".", "..") or not known:
            raise ValueError(f"{entry!r:.200} describes no file")
        return cls(name, nbytes, sha256, details)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        own = {"name": self.name, "nbytes": self.nbytes, "sha256": self.sha256}
        return {**own, **self.details}

    def read(self, store: Store, remedy: str) -> bytes:
        """Read the file; a DataError with the remedy if it is damaged."""
        content = store.read(self.name)
        if reason := self._damage(content):
            raise DataError(f"{store.url_of(self.name)} is damaged: {reason}; {remedy}")
        return content

    def is_intact(self, store: Store) -> bool:
        """Whether the file is there with these bytes."""
        return store.exists(self.name) and not self._damage(store.read(self.name))

    def _damage(self, content: bytes) -> str:
        if len(content) != self.nbytes:
            return f"it has {len(content)} bytes instead of {self.nbytes}"
        if hashlib.sha256(content).hexdigest() != self.sha256:
            return "its checksum is wrong"
        return ""


@dataclass(frozen=True)
class Manifest:
    """The contents of a folder."""

    files: tuple[File, ...]  # in order; no name twice
    content: Any  # everything else, as JSON

    @classmethod
    def read(cls, store: Store, kind: Kind) -> "Manifest":
        """Read the manifest of a folder."""
        url, encoded = store.url_of(kind.name), store.read(kind.name)
        with naming_damage(url, kind.remedy):
            return cls._checked(encoded, kind, url)

    @classmethod
    def _checked(cls, encoded: bytes, kind: Kind, url: str) -> "Manifest":
        whole = json.loads(encoded)
        if not isinstance(whole, dict) or whole.get("format") != kind.format:
            raise DataError(f"{url} is not of the format {kind.format!r}; {kind.hint}")
        if not is_count(whole["version"], least=1):
            raise ValueError(f"its version is {whole['version']!r:.200}")
        if whole["version"] > kind.version:
            raise DataError(
                f"{url} is of version {whole['version']}, but this daskdl reads up to "
                f"{kind.version}; install a newer one"
            )
        if whole.pop("sha256") != _digest(whole):
            raise ValueError("its checksum is wrong")
        files = tuple(map(File.from_json, whole["files"]))
        if len({file.name for file in files}) < len(files):
            raise ValueError("a file is listed twice")
        return cls(files, whole["content"])

    def write(self, store: Store, kind: Kind) -> None:
        """Write the manifest into a folder that already has all files."""
        whole = {
            "format": kind.format,
            "version": kind.version,
            "made_by": {"daskdl": VERSION, "torch": torch.__version__},
            "files": [file.to_json() for file in self.files],
            "content": self.content,
        }
        whole["sha256"] = _digest(whole)
        store.write(kind.name, json.dumps(whole, indent=1, allow_nan=False).encode())


def _digest(whole: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
