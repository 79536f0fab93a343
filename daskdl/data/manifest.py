"""The sealed list of files that makes a folder of daskdl whole.

Batch files, shards, predictions and saves are files in a folder and a manifest beside
them: JSON with a checksum of each file and of itself, written last and at once. So a
folder without one is unfinished, and damage is found when it is read.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch

from daskdl.config import VERSION, is_whole
from daskdl.data.storage import Store
from daskdl.errors import DataError

# Bytes of a manifest; 10,000 epochs of history or 1,000,000 packed files take 100 MB.
MOST_BYTES = 256 * 2**20

_DIGEST = re.compile("[0-9a-f]{64}")
# What JSON raises that is no text, is nested too deeply, or is something else.
_DAMAGED = (ValueError, TypeError, LookupError, RecursionError)
_FIXED = ("name", "nbytes", "sha256")


class Kind(NamedTuple):
    """What a folder holds; one kind has one manifest.

    Attributes:
        format: What it is, such as "daskdl batch files".
        version: Of the layout; raised by whoever changes it.
        name: File name of the manifest.
        hint: What to do where something else is found, for the message.
        remedy: What to do about a damaged folder.
    """

    format: str
    version: int
    name: str
    hint: str
    remedy: str


@dataclass(frozen=True)
class File:
    """A file beside the manifest.

    Attributes:
        name: In the folder; no path.
        nbytes: Of the file.
        sha256: Of its bytes, in hexadecimal.
        details: What else the manifest says of it, as JSON: ``rows``, ``role``, ...
    """

    name: str
    nbytes: int
    sha256: str
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, content: bytes | memoryview, **details: Any) -> "File":
        """Describe a file with this content."""
        digest = hashlib.sha256(content).hexdigest()
        return cls(name, len(content), digest, details)

    @classmethod
    def from_json(cls, entry: Any) -> "File":
        """Read what `to_json` made."""
        if not _describes_file(entry):
            raise ValueError(f"{entry!r:.200} describes no file")
        details = {key: value for key, value in entry.items() if key not in _FIXED}
        return cls(entry["name"], entry["nbytes"], entry["sha256"], details)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        own = {"name": self.name, "nbytes": self.nbytes, "sha256": self.sha256}
        return {**own, **self.details}

    def read(self, store: Store, remedy: str) -> bytes:
        """Read the file."""
        content = store.read(self.name)
        reason = self._damage(content)
        if reason:
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
    """What is in a folder.

    Attributes:
        files: In order; no name twice.
        content: What else there is to know, as JSON.
    """

    files: tuple[File, ...]
    content: Any

    @classmethod
    def read(cls, store: Store, kind: Kind) -> "Manifest":
        """Read the manifest of a folder."""
        url = store.url_of(kind.name)
        nbytes = store.size(kind.name)
        if nbytes > MOST_BYTES:
            raise DataError(f"{url} has {nbytes} bytes; it is no manifest")
        try:
            whole = _parsed(store.read(kind.name))
            _check_kind(whole, kind, url)
            _check_seal(whole)
            return cls(_files(whole["files"]), whole["content"])
        except DataError:
            raise
        except _DAMAGED as error:
            shown = f"{error!s:.200}"
            raise DataError(f"{url} is damaged: {shown}; {kind.remedy}") from error

    def write(self, store: Store, kind: Kind) -> None:
        """Put it into a folder, where all of the files must be."""
        whole = {
            "format": kind.format,
            "version": kind.version,
            "made_by": {"daskdl": VERSION, "torch": torch.__version__},
            "files": [file.to_json() for file in self.files],
            "content": self.content,
        }
        whole["sha256"] = _digest(whole)
        store.write(kind.name, json.dumps(whole, indent=1, allow_nan=False).encode())


def _parsed(encoded: bytes) -> dict[str, Any]:
    whole = json.loads(encoded, parse_constant=_refuse)
    return whole if isinstance(whole, dict) else {}


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _check_kind(whole: dict[str, Any], kind: Kind, url: str) -> None:
    if whole.get("format") != kind.format:
        raise DataError(f"{url} is not of the format {kind.format!r}; {kind.hint}")
    version: Any = whole.get("version")
    if not is_whole(version) or version < 1:
        raise ValueError(f"its version is {version!r:.80}")
    if version > kind.version:
        raise DataError(
            f"{url} is of version {version}, but this daskdl reads up to "
            f"{kind.version}; install a newer one"
        )


def _check_seal(whole: dict[str, Any]) -> None:
    if whole.pop("sha256", None) != _digest(whole):
        raise ValueError("its checksum is wrong")


def _digest(whole: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def _files(entries: Any) -> tuple[File, ...]:
    files = tuple(map(File.from_json, entries))
    if not isinstance(entries, list) or len({file.name for file in files}) < len(files):
        raise ValueError("its files are no list of different names")
    return files


def _describes_file(entry: Any) -> bool:
    if not isinstance(entry, dict) or not entry.keys() >= {*_FIXED}:
        return False
    name, nbytes, sha256 = (entry[key] for key in _FIXED)
    if not (isinstance(name, str) and isinstance(sha256, str) and is_whole(nbytes)):
        return False
    plain = name not in ("", ".", "..") and not {*name} & {"/", "\\", "\0"}
    return plain and nbytes >= 0 and _DIGEST.fullmatch(sha256) is not None
