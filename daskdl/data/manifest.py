"""Manifests: checksummed lists of the files in a folder.

Packed files and saves are folders with a manifest: JSON with the checksums of all files
and its own, written last and atomically. A folder without a manifest is unfinished;
damage is detected when a file is read.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from daskdl.config import VERSION
from daskdl.data.storage import Store
from daskdl.errors import DataError

# Errors of JSON that is not UTF-8, is nested too deeply, or has unexpected content, and
# of safetensors files.
_DAMAGED = (ValueError, TypeError, LookupError, RuntimeError, SafetensorError)


@contextlib.contextmanager
def naming_damage(url: str, remedy: str) -> Iterator[None]:
    """Turn errors caused by a damaged file into a DataError with the remedy."""
    try:
        yield
    except DataError:
        raise
    except _DAMAGED as error:
        reason = f"{type(error).__name__}: {error!s:.200}"
        raise DataError(f"{url} is damaged: {reason}; {remedy}") from error


def is_count(value: Any, least: int = 0) -> bool:
    """Whether a JSON value is an integer of at least `least`."""
    return type(value) is int and value >= least


class ManifestFormat(NamedTuple):
    """The format of a folder, and of its manifest."""

    title: str  # such as "daskdl packed files"
    version: int  # of the layout
    file_name: str  # of the manifest
    hint: str  # remedy if the manifest has another format
    remedy: str  # if a file is damaged


@dataclass(frozen=True)
class File:
    """A file that a manifest lists."""

    name: str  # without a folder
    nbytes: int
    sha256: str  # hexadecimal
    details: Mapping[str, Any] = field(default_factory=dict)  # JSON: rows, role, ...

    @classmethod
    def of(cls, name: str, content: bytes | memoryview, **details: Any) -> "File":
        """Describe a file with this content."""
        digest = hashlib.sha256(content).hexdigest()
        return cls(name, len(content), digest, details)

    @classmethod
    def from_json(cls, entry: Any) -> "File":
        """Read what `to_json` returns; reject names that lead out of the folder."""
        details = dict(entry)
        name, nbytes, sha256 = map(details.pop, ("name", "nbytes", "sha256"))
        is_name = isinstance(name, str) and not {*name} & {*"/\\\0"}
        has_content = is_count(nbytes) and isinstance(sha256, str)
        if not is_name or name in ("", ".", "..") or not has_content:
            raise ValueError(f"{entry!r:.200} describes no file")
        return cls(name, nbytes, sha256, details)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "name": self.name,
            "nbytes": self.nbytes,
            "sha256": self.sha256,
            **self.details,
        }

    def read(self, store: Store, remedy: str) -> bytes:
        """Read the file; a DataError with the remedy if it is damaged."""
        content = store.read(self.name)
        if reason := self._damage(content):
            raise DataError(f"{store.url_of(self.name)} is damaged: {reason}; {remedy}")
        return content

    def is_intact(self, store: Store) -> bool:
        """Whether the file exists with this checksum."""
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
    def read(cls, store: Store, form: ManifestFormat) -> "Manifest":
        """Read the manifest of a folder."""
        url, encoded = store.url_of(form.file_name), store.read(form.file_name)
        with naming_damage(url, form.remedy):
            document = json.loads(encoded)
            if not isinstance(document, dict) or document.get("format") != form.title:
                raise DataError(
                    f"{url} does not have the format {form.title!r}; {form.hint}"
                )
            version = document["version"]
            if not is_count(version, least=1):
                raise ValueError(f"its version is {version!r:.200}")
            if version > form.version:
                raise DataError(
                    f"{url} has version {version}, but this daskdl reads versions up "
                    f"to {form.version}; install a newer daskdl"
                )
            if document.pop("sha256") != _digest(document):
                raise ValueError("its checksum is wrong")
            files = tuple(map(File.from_json, document["files"]))
            if len({file.name for file in files}) < len(files):
                raise ValueError("a file is listed twice")
            return cls(files, document["content"])

    def write(self, store: Store, form: ManifestFormat) -> None:
        """Write the manifest into a folder that already has all files."""
        document = {
            "format": form.title,
            "version": form.version,
            "made_by": {"daskdl": VERSION, "torch": torch.__version__},
            "files": [file.to_json() for file in self.files],
            "content": self.content,
        }
        document["sha256"] = _digest(document)
        encoded = json.dumps(document, indent=1, allow_nan=False).encode()
        store.write(form.file_name, encoded)


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
