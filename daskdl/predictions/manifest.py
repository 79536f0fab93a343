"""What is in a folder of predictions, as JSON beside them.

Its name begins with an underscore: readers of folders of Parquet files pass it over. It
is written when everything else is there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daskdl.data.exports.seal import Seal
from daskdl.data.stores.store import Store
from daskdl.errors import DataError
from daskdl.predictions.arrays import Arrays
from daskdl.predictions.base import Format
from daskdl.predictions.examples import Examples
from daskdl.predictions.part_file import PartFile
from daskdl.predictions.tables import Tables

NAME = "_predictions.json"
_REMEDY = "predict to another URL"
_SEAL = Seal("daskdl predictions", 1, _REMEDY, _REMEDY)
_FORMATS: Sequence[type[Format]] = (Arrays, Examples, Tables)


@dataclass(frozen=True)
class Manifest:
    """What `predict` has written.

    Attributes:
        format: How to read it.
        files: One for each part of the data, in order.
        made_from: Which model, data and options.
    """

    format: Format
    files: Sequence[PartFile]
    made_from: Mapping[str, Any]

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
            (kind,) = [one for one in _FORMATS if one.kind == content["format"]]
            return cls(
                kind.from_json(content["reading"]),
                tuple(map(PartFile.from_json, content["files"])),
                dict(content["made_from"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{where} is damaged: {error!r}; {_REMEDY}") from error

    def write(self, store: Store) -> None:
        """Put it into a folder, where all of the files must be."""
        content = {
            "format": self.format.kind,
            "reading": self.format.to_json(),
            "rows": sum(file.rows for file in self.files),
            "made_from": dict(self.made_from),
            "files": [file.to_json() for file in self.files],
        }
        store.write(NAME, _SEAL.closed(content))
