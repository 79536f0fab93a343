"""The manifest: what is in a folder of batch files, as JSON beside them.

It is written when everything else is there, so a folder without one has not been
finished. It has a checksum of itself: a number that changed on a disk is found when it
is read, not when a row is missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from daskdl.data.exports.batch_file import BatchFile
from daskdl.data.exports.schema import Schema
from daskdl.data.exports.seal import Seal
from daskdl.data.stores.store import Store
from daskdl.errors import DataError

NAME = "manifest.json"
_REMEDY = "export again with overwrite=True"
_SEAL = Seal(
    "daskdl batch files",
    1,
    "export to another URL, or give one that daskdl.data.export was given",
    _REMEDY,
)


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
        content = _SEAL.opened(store.read(NAME), where)
        try:
            return cls._from_json(content)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"{where} is damaged: {error!r}; {_REMEDY}") from error

    def write(self, store: Store) -> None:
        """Put it into a folder, where all of the files must be."""
        content = {
            "rows": self.rows,
            "batch_size": self.batch_size,
            "classes": self.classes if self.classes is None else list(self.classes),
            "schema": self.schema.to_json(),
            "made_from": dict(self.made_from),
            "files": [asdict(file) for file in self.files],
        }
        store.write(NAME, _SEAL.closed(content))

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
