"""The manifest: what is in a folder of batch files, as JSON beside them.

It is written when everything else is there, so a folder without one has not been
finished. It has a checksum of itself: a number that changed on a disk is found when it
is read, not when a row is missing.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from daskdl.data.exports.batch_file import BatchFile
from daskdl.data.exports.schema import Schema
from daskdl.data.stores.store import Store
from daskdl.errors import DataError

NAME = "manifest.json"
_KIND = "daskdl batch files"
_VERSION = 1  # of this layout; raised by whoever changes it


@dataclass(frozen=True)
class Manifest:
    """What an export has made.

    Attributes:
        batch_size: Rows of a batch.
        files: Each of the batch files, in order.
        schema: What the rows look like.
        classes: Names of the labels 0, 1, ...; None: they have none.
        made_from: Which data and options the export was made from; see
            :mod:`daskdl.data.exports.origin`.
    """

    batch_size: int
    files: Sequence[BatchFile]
    schema: Schema
    classes: Sequence[str] | None
    made_from: Mapping[str, Any]

    @property
    def rows(self) -> int:
        """How many are in all files together."""
        return sum(file.rows for file in self.files)

    @classmethod
    def read(cls, store: Store) -> "Manifest":
        """Read the manifest in a folder.

        Raises:
            DataError: If there is none, or it is damaged, of something else, or of a
                newer version of daskdl.
        """
        where = store.url_of(NAME)
        content = _contents(store.read(NAME), where)
        try:
            return cls._from_json(content)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"{where} is damaged: {error!r}; {_REMEDY}") from error

    def write(self, store: Store) -> None:
        """Put it into a folder, where all of the files must be."""
        content = {
            "kind": _KIND,
            "version": _VERSION,
            "rows": self.rows,
            "batch_size": self.batch_size,
            "classes": self.classes if self.classes is None else list(self.classes),
            "schema": self.schema.to_json(),
            "made_from": dict(self.made_from),
            "files": [asdict(file) for file in self.files],
        }
        content["crc32"] = _checksum(content)
        store.write(NAME, json.dumps(content, indent=1).encode())

    @classmethod
    def _from_json(cls, content: Mapping[str, Any]) -> "Manifest":
        manifest = cls(
            int(content["batch_size"]),
            tuple(BatchFile.from_json(file) for file in content["files"]),
            Schema.from_json(content["schema"]),
            None if content["classes"] is None else tuple(content["classes"]),
            dict(content["made_from"]),
        )
        if manifest.rows != content["rows"] or not manifest.files:
            raise ValueError(f"{manifest.rows} rows instead of {content['rows']}")
        return manifest


_REMEDY = "export again with overwrite=True"


def _contents(encoded: bytes, where: str) -> dict[str, Any]:
    """The content of a manifest, if it is one, undamaged, and not too new."""
    try:
        content = json.loads(encoded)
    except ValueError as error:  # also of bytes that are not text
        raise DataError(f"{where} is damaged: {error}; {_REMEDY}") from error
    if not isinstance(content, dict) or content.get("kind") != _KIND:
        raise DataError(
            f"{where} is not of {_KIND}; export to another URL, or give one that "
            "daskdl.data.export was given"
        )
    version = content.get("version")
    if not isinstance(version, int) or version > _VERSION:
        raise DataError(
            f"{where} is of version {version}, but this daskdl reads up to {_VERSION}; "
            "install a newer one"
        )
    if content.pop("crc32", None) != _checksum(content):
        raise DataError(f"{where} is damaged: its checksum is wrong; {_REMEDY}")
    return content


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
