"""Data whose rows are numbered, so that a lost or doubled one shows."""

import numpy as np
from typing_extensions import override

from daskdl.data.source import Source


class Numbered(Source):
    """Parts of these lengths; row i is x = {"id": i, "pair": (i, -i)} and y = i % 3.

    Args:
        lengths: Rows of each part.
    """

    def __init__(self, lengths):
        self.parts, self.lengths, self.first_rows = len(lengths), lengths, None
        self.classes = ("a", "b", "c")
        self.loaded = []

    @override
    def load(self, part):
        self.loaded.append(part)
        return numbered(sum(self.lengths[:part]), self.lengths[part])

    def __getstate__(self):
        return self.__dict__ | {"loaded": []}


class Streamed(Numbered):
    """The same, 7 rows at a time."""

    sequential = True

    @override
    def load(self, part):
        raise AssertionError("what is sequential is not loaded")

    @override
    def stream(self, part, rows):
        first = sum(self.lengths[:part])
        for start in range(0, self.lengths[part], 7):
            yield numbered(first + start, min(7, self.lengths[part] - start))


def numbered(first, count):
    """Rows of consecutive numbers."""
    ids = np.arange(first, first + count)
    pair = np.stack([ids, -ids], axis=1).astype("float32")
    return {"id": ids, "pair": (pair,)}, (ids % 3).astype("uint8")


def ids_of(source):
    """The numbers of all rows of a source in order, each row having been checked."""
    ids_by_part = []
    for part in range(source.parts):
        x, y = source.load(part)
        ids = x["id"]
        assert (ids.dtype, x["pair"][0].dtype, y.dtype) == ("int64", "float32", "uint8")
        np.testing.assert_array_equal(x["pair"][0], np.stack([ids, -ids], axis=1))
        np.testing.assert_array_equal(y, ids % 3)
        ids_by_part.append(ids)
    return np.concatenate(ids_by_part)
