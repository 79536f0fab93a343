"""Batch files: what `export` writes, rows of tensors that are ready to train on.

Each is a safetensors file of some batches, whose arrays have the names that a user
would write, ``x`` or ``x['image']``. The manifest says how they make up the trees of x
and y, and what is in each file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import safetensors.numpy
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Rows
from daskdl.data.manifest import File, Kind, Manifest
from daskdl.data.source import SHOWN_ROWS, Source
from daskdl.data.storage import AnyPath, is_path, store_of
from daskdl.data.tables import as_numpy, check_array
from daskdl.errors import DataError

KIND = Kind(
    "daskdl batch files",
    1,
    "manifest.json",
    "daskdl.data.export writes batch files",
    "export again with overwrite=True",
)
# Says what an export is made from, until it is finished.
ORIGIN = ".unfinished/origin.json"

_ARRAY = "array"  # in an outline, where an array is


@dataclass(frozen=True)
class Schema:
    """Structure, shapes and dtypes of the rows of an export.

    Attributes:
        x: Outline of x, as JSON: ``"array"``, ``["tuple", [outline, ...]]`` or
            ``["dict", [[key, outline], ...]]``.
        y: The same of y; None without labels.
        dtype: Of a record, one row with all its arrays one after the other: a field for
            each array, named as the user would write it, with the shape of one row.
    """

    x: Any
    y: Any
    dtype: np.dtype

    @classmethod
    def of(cls, rows: Rows) -> "Schema":
        """The schema of some rows, trees of numpy arrays."""
        arrays = named_arrays(rows)
        lengths = {name: check_array(a, name) for name, a in arrays.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name} has {n}" for name, n in lengths.items())
            raise DataError(f"all arrays must have as many rows, but {shown}")
        fields = [
            (name, array.dtype.newbyteorder("="), array.shape[1:])
            for name, array in arrays.items()
        ]
        return cls(*batching.of_both(outline_of, rows), np.dtype(fields))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Schema":
        """Read what `to_json` made."""
        fields = [
            (str(a["name"]), np.dtype(str(a["dtype"])), tuple(map(int, a["shape"])))
            for a in content["arrays"]
        ]
        schema = cls(content["x"], content["y"], np.dtype(fields))
        names = [*named_arrays(schema.rows(np.zeros(1, schema.dtype)))]
        if names != [name for name, _, _ in fields]:
            raise ValueError(f"the outlines are of {names}")
        return schema

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        arrays = [
            {"name": name, "dtype": kind.base.name, "shape": list(kind.shape)}
            for name, kind in self._fields().items()
        ]
        return {"x": self.x, "y": self.y, "arrays": arrays}

    def records(self, rows: Rows, order: np.ndarray) -> np.ndarray:
        """Copy some rows into records, in that order."""
        records = np.empty(len(order), self.dtype)
        for name, array in named_arrays(rows).items():
            records[name] = array[order]
        return records

    def rows(self, records: np.ndarray | Mapping[str, np.ndarray]) -> Rows:
        """The trees of x and y of some records, or of whole arrays by name."""
        names = self.dtype.names or ()
        arrays = (np.ascontiguousarray(records[name]) for name in names)
        x = restored(self.x, arrays)
        return x, None if self.y is None else restored(self.y, arrays)

    def check(self, other: "Schema", where: str) -> None:
        """Refuse rows that look different."""
        mine, others = self._fields(), other._fields()
        for name in {**mine, **others}:
            if mine.get(name) != others.get(name):
                raise DataError(
                    f"{name} of {where} is {_shown(others.get(name))}, but of those "
                    f"before {_shown(mine.get(name))}; all rows must be alike"
                )
        if (self.x, self.y) != (other.x, other.y):
            raise DataError(
                f"x and y of {where} are {other.x} and {other.y}, but of those before "
                f"{self.x} and {self.y}; all rows must be alike"
            )

    def _fields(self) -> dict[str, np.dtype]:
        return {name: self.dtype[name] for name in self.dtype.names or ()}


def as_rows(batch: Rows) -> Rows:
    """A batch of tensors or arrays as numpy arrays; y may be None."""
    return batching.of_both(partial(batching.mapped, as_numpy), batch)


def named_arrays(rows: Rows) -> dict[str, Any]:
    """The arrays of x, then of y, as the user would write them."""
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
    """The tree of an outline with these in its places; a named tuple is a plain one."""
    if outline == _ARRAY:
        return next(arrays)
    kind, children = outline
    if kind == "dict":
        return {key: restored(child, arrays) for key, child in children}
    if kind == "tuple":
        return tuple(restored(child, arrays) for child in children)
    raise ValueError(f"an outline has {kind!r}")


def _shown(dtype: np.dtype | None) -> str:
    if dtype is None:
        return "missing"
    return f"{dtype.base.name} of shape (rows, {', '.join(map(str, dtype.shape))})"


def encoded(rows: Rows) -> bytes:
    """The content of a batch file."""
    # Of an array that is not contiguous, safetensors takes the wrong bytes.
    arrays = {n: np.ascontiguousarray(array) for n, array in named_arrays(rows).items()}
    return safetensors.numpy.save(arrays)


class BatchFiles(Source):
    """What ``daskdl.data.export`` has written; a part is a file.

    Args:
        url: The folder.
        storage_options: For fsspec, such as credentials; the workers use them too.

    Attributes:
        url: The folder.
        files: ``name``, ``nbytes`` and ``details["rows"]`` of each file, in order.
        rows: How many there are in all files.
        batch_size: Rows of a batch.
        classes: Names of the labels 0, 1, ...; None: they have none.
        made_from: Which data and options the export was made from.

    Raises:
        DataError: If the export has not been finished, or there is none, or its
            manifest cannot be used.
    """

    url: str
    files: Sequence[File]
    rows: int
    batch_size: int
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
        content, self.files = manifest.content, manifest.files
        self.batch_size, classes = content["batch_size"], content["classes"]
        self.classes = None if classes is None else tuple(classes)
        self.made_from = content["made_from"]
        self.parts = len(self.files)
        self.lengths = [file.details["rows"] for file in self.files]
        self.rows = sum(self.lengths)
        self._schema = Schema.from_json(content["schema"])
        self.first = self._schema.rows(np.zeros(SHOWN_ROWS, self._schema.dtype))

    @override
    def load(self, part: int) -> Rows:
        content = self.files[part].read(self._store, KIND.remedy)
        rows = self._schema.rows(safetensors.numpy.load(content))
        self._schema.check(Schema.of(rows), self.name(part))
        return rows

    @override
    def name(self, part: int) -> str:
        return self._store.url_of(self.files[part].name)


def is_export(value: Any, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Whether it is the URL or path of an export, finished or not.

    Example:
        >>> is_export([1, 2]), is_export("memory://nothing-here")
        (False, False)
    """
    if not is_path(value):
        return False
    store = store_of(value, storage_options)
    return store.exists(KIND.name) or store.exists(ORIGIN)
