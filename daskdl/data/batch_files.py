"""Batch files, which `export` writes: rows of tensors that are ready to train on.

Each file is a safetensors file of some batches. Its arrays are named as in the user's
code, ``x`` or ``x['image']``, and the manifest says how they form the trees x and y.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.numpy
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Rows
from daskdl.data.manifest import File, Kind, Manifest, is_count, naming_damage
from daskdl.data.named_columns import Columns, NamedRows
from daskdl.data.source import SHOWN_ROWS, Source
from daskdl.data.storage import AnyPath, store_of
from daskdl.data.tables import check_arrays
from daskdl.errors import DataError

KIND = Kind(
    "daskdl batch files",
    1,
    "manifest.json",
    "daskdl.data.export writes batch files",
    "export again with overwrite=True",
)
# Fingerprint of the data and options of an unfinished export.
ORIGIN = ".unfinished/origin.json"

_ARRAY = "array"  # a leaf of an outline
_DTYPES = {np.dtype(code).name for code in "?bBhHiIqQefd"}


@dataclass(frozen=True)
class Schema:
    """Structure, shapes and dtypes of the rows of an export."""

    # Outlines as JSON: "array", ["tuple", [outline, ...]], ["dict", [[key, outline]]].
    x: Any
    y: Any  # None without labels
    dtype: np.dtype  # of a row: a field for each array, named as in the user's code

    @classmethod
    def of(cls, rows: Rows) -> "Schema":
        """The schema of some rows, trees of numpy arrays."""
        check_arrays(*rows)
        fields = [
            (name, array.dtype.newbyteorder("="), array.shape[1:])
            for name, array in named_arrays(rows).items()
        ]
        x, y = rows
        own = None if y is None else outline_of(y)
        return cls(outline_of(x), own, np.dtype(fields))

    @classmethod
    def from_json(
        cls, content: Mapping[str, Any], row_bytes: float = math.inf
    ) -> "Schema":
        """Read what `to_json` returns.

        Args:
            content: Result of `to_json`.
            row_bytes: Maximum size of a row.

        Raises:
            ValueError: If the content does not describe rows, or rows that are larger.
        """
        fields = []
        for name, dtype, shape in content["rows"]:
            if dtype not in _DTYPES or not all(map(is_count, shape)):
                raise ValueError(f"{name!r:.80} is {dtype!r:.80} {shape!r:.80}")
            row_bytes -= math.prod(shape) * np.dtype(dtype).itemsize
            fields.append((name, dtype, tuple(shape)))
        if row_bytes < 0:
            raise ValueError("a row has more bytes than its file")
        x, y = content["x"], content["y"]
        numbers = itertools.count()
        tree = restored(x, numbers), None if y is None else restored(y, numbers)
        if [*named_arrays(tree)] != [name for name, *_ in fields] or not (
            batching.leaves(tree[0]) and (y is None or batching.leaves(tree[1]))
        ):
            raise ValueError(f"{x!r:.80} and {y!r:.80} are not made of its arrays")
        return cls(x, y, np.dtype(fields))

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        fields = ((name, self.dtype[name]) for name in self.dtype.names or ())
        rows = [[name, kind.base.name, [*kind.shape]] for name, kind in fields]
        return {"x": self.x, "y": self.y, "rows": rows}

    def records(self, rows: Rows, order: np.ndarray) -> np.ndarray:
        """Copy rows into records, in this order."""
        records = np.empty(len(order), self.dtype)
        for name, array in named_arrays(rows).items():
            records[name] = array[order]
        return records

    def check(self, arrays: Mapping[str, np.ndarray], rows: int) -> None:
        """Raise a ValueError if these are not the arrays of `rows` rows."""
        if arrays.keys() != {*(self.dtype.names or ())}:
            raise ValueError(f"it has the arrays {[*arrays]!r:.200}")
        for name in self.dtype.names or ():
            array, row = arrays[name], self.dtype[name]
            if (array.dtype, array.shape) != (row.base, (rows, *row.shape)):
                raise ValueError(
                    f"{name} is {array.dtype} {array.shape}, and is listed as "
                    f"{row.base} {(rows, *row.shape)}"
                )

    def rows(self, records: np.ndarray | Mapping[str, np.ndarray]) -> Rows:
        """The trees x and y of records, or of whole arrays by name."""
        names = self.dtype.names or ()
        arrays = (np.ascontiguousarray(records[name]) for name in names)
        x = restored(self.x, arrays)
        return x, None if self.y is None else restored(self.y, arrays)

    def agreeing(self, before: "Schema | None", where: str) -> "Schema":
        """Return this schema; a DataError if it differs from the former one."""
        if before is not None and before != self:
            raise DataError(
                f"rows of {where} are {self}, but those before are {before}; all rows "
                "must be alike"
            )
        return self

    @override
    def __str__(self) -> str:
        rows = self.to_json()["rows"]
        return ", ".join(f"{name}: {dtype} {shape}" for name, dtype, shape in rows)


def named_arrays(rows: Rows) -> dict[str, Any]:
    """The arrays of x, then of y, by their names in the user's code."""
    return batching.named_both(rows, ("x", "y"))


def outline_of(tree: Any) -> Any:
    """The structure of a tree, as plain values for JSON."""
    if isinstance(tree, dict):
        for key in tree:
            if not isinstance(key, str | int):
                raise DataError(
                    f"keys of dicts must be strings or whole numbers to be exported, "
                    f"got {key!r}"
                )
        return ["dict", [[key, outline_of(child)] for key, child in tree.items()]]
    if isinstance(tree, tuple):
        return ["tuple", [outline_of(child) for child in tree]]
    return _ARRAY


def restored(outline: Any, arrays: Iterator[Any]) -> Any:
    """The tree of an outline with these arrays; named tuples become plain ones."""
    if outline == _ARRAY:
        return next(arrays)
    kind, children = outline
    if kind == "dict":
        return {key: restored(child, arrays) for key, child in children}
    if kind != "tuple":
        raise ValueError(f"{kind!r:.80} is no structure")
    return tuple(restored(child, arrays) for child in children)


class BatchFiles(Source):
    """A finished export as a source; a part is a file.

    Args:
        url: The folder that ``daskdl.data.export`` has written.
        storage_options: For fsspec, such as credentials; the workers use them too.

    Attributes:
        url: The folder.
        files: ``name``, ``nbytes`` and ``details["rows"]`` of each file, in order.
        rows: Number of rows in all files.
        batch_size: Rows of a batch.
        classes: Names of the labels 0, 1, ...; None: labels have no names.
        columns: Names of the columns of the exported tables.
        made_from: Data and options of the export.

    Raises:
        DataError: If there is no export, or it is not finished, or its manifest cannot
            be used. Also when a part is loaded, if its file is not as listed.
    """

    url: str
    lengths: Sequence[int]
    files: Sequence[File]
    rows: int
    batch_size: int
    columns: Columns
    made_from: Mapping[str, Any]

    given = True

    def __init__(
        self, url: AnyPath, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._store = store_of(url, storage_options)
        self.url = self._store.url
        if not self._store.exists(KIND.name):
            if self._store.exists(ORIGIN):
                raise DataError(
                    f"the export to {self.url} has not been finished; run it again, "
                    "and it goes on where it stopped"
                )
            raise DataError(
                f"there is no {KIND.name} in {self.url}; make batch files with "
                "daskdl.data.export"
            )
        manifest = Manifest.read(self._store, KIND)
        self.files, self.parts = manifest.files, len(manifest.files)
        with naming_damage(self._store.url_of(KIND.name), KIND.remedy):
            self._take(manifest.content)
        self.rows = sum(self.lengths)
        self.first = self._schema.rows(np.zeros(SHOWN_ROWS, self._schema.dtype))

    def _take(self, content: Mapping[str, Any]) -> None:
        """Set the attributes from the manifest, which is checked against the files."""
        self.batch_size, self.made_from = content["batch_size"], content["made_from"]
        self.lengths = [file.details["rows"] for file in self.files]
        if not all(is_count(n, least=1) for n in (self.batch_size, *self.lengths)):
            raise ValueError("batch_size and rows must be whole numbers >= 1")
        classes = content["classes"]
        names = [] if classes is None else classes
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise ValueError(f"{classes!r:.80} are no names of classes")
        self.classes = None if classes is None else tuple(names)
        if not isinstance(self.made_from, dict):
            raise TypeError("made_from must be a dict")
        # Memory is allocated for rows below: a row is not larger than an intact file.
        there = (f for f in self.files if self._store.size(f.name) == f.nbytes)
        if (file := next(there, None)) is None:
            raise ValueError("it lists no file that exists in its full size")
        self._schema = Schema.from_json(content["schema"], file.nbytes)
        self.columns = self._names = self._columns_of(content["columns"])

    def _columns_of(self, content: Any) -> Columns:
        """Read names of columns, one for each in the files."""
        columns = {}
        for place, names in dict(content).items():
            field = "x" + place[1:] if place.startswith("X") else place
            width = self._schema.dtype[field].shape[-1:]
            strings = isinstance(names, list) and all(isinstance(n, str) for n in names)
            if not strings or width != (len(names),):
                raise ValueError(
                    f"{names!r:.80} are no names of the columns of {place}"
                )
            columns[place] = tuple(names)
        return columns

    @override
    def load(self, part: int) -> Rows:
        file = self.files[part]
        content = file.read(self._store, KIND.remedy)
        with naming_damage(self.name(part), KIND.remedy):
            arrays = safetensors.numpy.load(content)
            self._schema.check(arrays, file.details["rows"])
        rows = NamedRows.of(self._schema.rows(arrays), self._names)
        return rows.arranged(self.columns, self.name(part))

    @override
    def name(self, part: int) -> str:
        return self._store.url_of(self.files[part].name)


def is_export(url: AnyPath, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Whether there is an export at a URL or path, finished or not."""
    store = store_of(url, storage_options)
    return store.exists(KIND.name) or store.exists(ORIGIN)
