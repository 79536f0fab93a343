"""One array in each file, as ``numpy.save`` writes it."""

import io
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from daskdl.data.batching import Rows
from daskdl.data.formats.loaders import Format
from daskdl.data.formats.results import header_facts, one_parses, reading, rows_of
from daskdl.data.source import Facts
from daskdl.data.stores.store import Store
from daskdl.errors import DataError

# More than the header of any array of numbers: those are of 128 bytes, unless there
# are very many axes.
_HEADER_BYTES = 4096


@dataclass(frozen=True)
class Npy(Format):
    """The array of an ``.npy`` file is x; a column of it may be y.

    Attributes:
        label_column: The index of the column of a table, from 0 or from the end as -1,
            that is y and not in x. Its dtype stays: classes must be whole numbers.
            None: there are no labels.
    """

    label_column: int | None = None

    @override
    def __call__(self, content: bytes, name: str) -> Rows:
        with reading(name), one_parses:
            array = np.load(io.BytesIO(content), allow_pickle=False)
            return rows_of(self._split(array, name), name)

    @override
    def look(self, store: Store, name: str) -> Facts:
        url = store.url_of(name)
        with reading(url), one_parses:
            empty, rows = _header(store.read(name, 0, _HEADER_BYTES))
            x, y = rows_of(self._split(empty, url), url)
        return header_facts(rows, x, y)

    def _split(
        self, array: np.ndarray, name: str
    ) -> tuple[np.ndarray, np.ndarray | None]:
        column = self.label_column
        if column is None:
            return array, None
        if array.ndim != 2 or not -array.shape[1] <= column < array.shape[1]:
            raise DataError(
                f"{name} must be a table with the column {column} for "
                f"Npy(label_column={column}), got the shape {array.shape}"
            )
        return np.delete(array, column, axis=1), array[:, column]


def _header(beginning: bytes) -> tuple[np.ndarray, int]:
    """An array without rows, else like that of the file, and how many rows that has."""
    file = io.BytesIO(beginning)
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    else:  # 3.0 differs in the names of fields only, which arrays of numbers have not
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    if not shape:
        return np.empty((), dtype), 1
    return np.empty((0, *shape[1:]), dtype), shape[0]
