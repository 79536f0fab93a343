"""One batch file: the arrays of some batches as safetensors, with a checksum outside.

The names in it are those of the arrays, ``x`` or ``x['image']``; how they make up the
trees of x and y is in the manifest, as is the checksum.
"""

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.numpy

from daskdl.data.batching import Rows
from daskdl.data.exports.schema import Schema, named_arrays
from daskdl.data.stores.store import Store
from daskdl.errors import DataError


@dataclass(frozen=True)
class BatchFile:
    """What is known of one batch file.

    Attributes:
        name: Below the folder of the export.
        rows: How many are in it.
        size_bytes: Of the file.
        crc32: Checksum of its bytes: finds damage, not forgery.
    """

    name: str
    rows: int
    size_bytes: int
    crc32: int

    @classmethod
    def from_json(cls, content: Any) -> "BatchFile":
        """Read what ``dataclasses.asdict`` made.

        Raises:
            ValueError: Or KeyError or TypeError, if it is something else.
        """
        numbers = (int(content[key]) for key in ("rows", "size_bytes", "crc32"))
        file = cls(str(content["name"]), *numbers)
        if file.rows < 1 or not file.name or "/" in file.name:
            raise ValueError(f"there cannot be a {file}")
        return file

    @classmethod
    def written(cls, store: Store, name: str, rows: Rows) -> "BatchFile":
        """Write a batch file, all at once.

        Args:
            store: Where to.
            name: Of the file; one that is there is replaced.
            rows: Trees of numpy arrays, at least one row.
        """
        # Of an array that is not contiguous, safetensors takes the wrong bytes.
        arrays = {n: np.ascontiguousarray(array) for n, array in named_arrays(rows)}
        content = safetensors.numpy.save(arrays)
        store.write(name, content)
        count = len(next(iter(arrays.values())))
        return cls(name, count, len(content), zlib.crc32(content))

    def read(self, store: Store, schema: Schema) -> Rows:
        """The rows in it.

        Args:
            store: Where it is.
            schema: What they must look like.

        Raises:
            DataError: If it cannot be read, is damaged, or has other rows; names its
                URL.
        """
        content = store.read(self.name)
        if not self._is_intact(content):
            raise DataError(
                f"{store.url_of(self.name)} is damaged: it has {len(content)} bytes "
                f"with the checksum {zlib.crc32(content):08x}, {self.size_bytes} with "
                f"{self.crc32:08x} were written; export again with overwrite=True"
            )
        rows = schema.rows(safetensors.numpy.load(content))
        schema.check(Schema.of(rows), store.url_of(self.name))
        return rows

    def is_there(self, store: Store) -> bool:
        """Whether its bytes are those that were written."""
        if not store.exists(self.name):
            return False
        return self._is_intact(store.read(self.name))

    def _is_intact(self, content: bytes) -> bool:
        return len(content) == self.size_bytes and zlib.crc32(content) == self.crc32
