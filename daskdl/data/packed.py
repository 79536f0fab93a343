"""Packed files: rows, or original files, in a few large files.

A folder of packed files has a manifest, written last, with the checksum of each file.
Every packed file is a safetensors file with either rows of the arrays of x and y, named
as in the user's code (``x``, ``x['image']``), or the bytes of original files, named by
their paths relative to their root (``./cat/1.png``). A packed file is read in one
request: an object store takes tens of milliseconds for each, whatever the size.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
import safetensors.numpy
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Rows, Tree
from daskdl.data.manifest import File, Manifest, ManifestFormat, is_count, naming_damage
from daskdl.data.named_columns import Columns, NamedRows
from daskdl.data.source import SHOWN_ROWS, Source
from daskdl.data.storage import OpenBytes, Store
from daskdl.data.tables import check_arrays
from daskdl.errors import DataError

FORMAT = ManifestFormat(
    "daskdl packed files",
    1,
    "packed.json",
    "daskdl.data.pack writes packed files",
    "pack again with overwrite=True",
)
# Fingerprint of the data and options of an unfinished folder.
ORIGIN = ".unfinished/origin.json"

_ORIGINAL = "./"  # prefix of original files, because safetensors reserves a name
_DTYPES = {np.dtype(code).name for code in "?bBhHiIqQefd"}


@dataclass(frozen=True)
class Schema:
    """Structure, shapes and dtypes of rows.

    Attributes:
        x: A tree with the dtype of a row of each array.
        y: The same for labels; None without labels.
    """

    x: Tree
    y: Tree

    @classmethod
    def of(cls, rows: Rows) -> "Schema":
        """Return the schema of rows, trees of numpy arrays."""
        check_arrays(*rows)
        x, y = batching.tree_map(_dtype_of_a_row, (rows[0], rows[1]))
        return cls(x, y)

    @classmethod
    def from_json(
        cls, content: Mapping[str, Any], row_bytes: float = math.inf
    ) -> "Schema":
        """Read what `to_json` returns.

        Args:
            content: Result of `to_json`.
            row_bytes: Maximum size of a row in bytes.

        Raises:
            ValueError: If the content does not describe rows, or describes larger rows.
        """
        x, y = content["x"], content["y"]
        schema = cls(_tree_of(x), None if y is None else _tree_of(y))
        if not batching.leaves(schema.x) or not batching.leaves(schema.y):
            raise ValueError(f"{content!r:.200} has no arrays")
        if schema.record.itemsize > row_bytes:
            raise ValueError("a row has more bytes than its file")
        return schema

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        y = None if self.y is None else _json_of(self.y)
        return {"x": _json_of(self.x), "y": y}

    @functools.cached_property
    def record(self) -> np.dtype:
        """The dtype of a row, with a field for each array, named as in user code."""
        return np.dtype(
            [(name, kind.base, kind.shape) for name, kind in self._fields.items()]
        )

    @functools.cached_property
    def _fields(self) -> dict[str, np.dtype]:
        return named_arrays((self.x, self.y))

    def records(self, rows: Rows, order: np.ndarray) -> np.ndarray:
        """Copy rows into records, in this order."""
        records = np.empty(len(order), self.record)
        for name, array in named_arrays(rows).items():
            records[name] = array[order]
        return records

    def check(self, arrays: Mapping[str, np.ndarray], rows: int) -> None:
        """Raise a ValueError unless the arrays have this schema and number of rows."""
        if arrays.keys() != self._fields.keys():
            raise ValueError(f"it has the arrays {[*arrays]!r:.200}")
        for name, kind in self._fields.items():
            array, listed = arrays[name], (kind.base, (rows, *kind.shape))
            if (array.dtype, array.shape) != listed:
                raise ValueError(
                    f"{name} is {array.dtype} {array.shape}, and is listed as {listed}"
                )

    def rows(self, arrays: np.ndarray | Mapping[str, np.ndarray]) -> Rows:
        """Return the trees x and y of records, or of arrays by name."""
        ordered = (np.ascontiguousarray(arrays[name]) for name in self._fields)
        x = _filled(self.x, ordered)
        return x, None if self.y is None else _filled(self.y, ordered)

    def agreeing(self, before: "Schema | None", where: str) -> "Schema":
        """Return this schema; raise a DataError if it differs from an earlier one."""
        if before is not None and before.to_json() != self.to_json():
            raise DataError(
                f"rows of {where} are {self}, but those before are {before}; all rows "
                "must have the same names, dtypes and shapes"
            )
        return self

    @override
    def __str__(self) -> str:
        return ", ".join(
            f"{name}: {kind.base.name} {[*kind.shape]}"
            for name, kind in self._fields.items()
        )


def named_arrays(rows: Rows) -> dict[str, Any]:
    """Return the arrays of x, then of y, by their names in the user's code."""
    return batching.leaves_by_name(rows, ("x", "y"))


def _dtype_of_a_row(array: np.ndarray) -> np.dtype:
    return np.dtype((array.dtype.newbyteorder("="), array.shape[1:]))


def _filled(tree: Tree, arrays: Iterator[np.ndarray]) -> Tree:
    """Replace dtypes by arrays; `batching.with_leaves` takes twice as long."""
    if isinstance(tree, np.dtype):
        return next(arrays)
    if isinstance(tree, dict):
        return {key: _filled(child, arrays) for key, child in tree.items()}
    return tuple(_filled(child, arrays) for child in tree)


def _json_of(tree: Tree) -> Any:
    """Convert a tree of dtypes to plain values; named tuples become plain ones."""
    if isinstance(tree, dict):
        for key in tree:
            if not isinstance(key, str | int):
                raise DataError(
                    f"keys of dicts must be strings or whole numbers to be packed, got "
                    f"{key!r}"
                )
        return {"dict": [[key, _json_of(child)] for key, child in tree.items()]}
    if isinstance(tree, tuple):
        return {"tuple": [_json_of(child) for child in tree]}
    return [tree.base.name, [*tree.shape]]


def _tree_of(content: Any) -> Tree:
    match content:
        case {"dict": [*pairs]} if all(isinstance(key, str | int) for key, _ in pairs):
            return {key: _tree_of(child) for key, child in pairs}
        case {"tuple": [*children]}:
            return tuple(map(_tree_of, children))
        case [dtype, [*shape]] if dtype in _DTYPES and all(map(is_count, shape)):
            return np.dtype((dtype, tuple(shape)))
    raise ValueError(f"{content!r:.200} describes no array")


def check_files(files: Sequence[File], schema: Schema | None) -> None:
    """Raise a ValueError unless each file lists its rows, or its original files."""
    if not files:
        raise ValueError("it lists no files")
    for file in files:
        details = file.details
        if schema is not None:
            is_valid = is_count(details["rows"], least=1)
        else:
            names = details["names"]
            is_valid = _are_strings(names) and 0 < len({*names}) == len(names)
        if not is_valid:
            raise ValueError(f"contents of {file.name} are {dict(details)!r:.80}")


def arrays_of_files(contents: Mapping[str, bytes]) -> dict[str, np.ndarray]:
    """Return original files, by their paths, as the arrays of a packed file."""
    return {
        f"{_ORIGINAL}{name}": np.frombuffer(content, np.uint8)
        for name, content in contents.items()
    }


def _checked_arrays(
    store: Store, file: File, check: Callable[[dict[str, np.ndarray]], None]
) -> dict[str, np.ndarray]:
    """Read a packed file; raise a DataError if it is damaged or `check` fails."""
    content = file.read(store, FORMAT.remedy)
    with naming_damage(store.url_of(file.name), FORMAT.remedy):
        arrays: dict[str, np.ndarray] = safetensors.numpy.load(content)
        check(arrays)
        return arrays


@dataclass(frozen=True)
class PackedFiles:
    """Original files in one packed file, which are read together.

    Attributes:
        names: Paths of the original files relative to their root.
        store: The folder of the packed file.
        file: The packed file, without details.
        count: Number of all original files in the packed file.
    """

    names: Sequence[str]
    store: Store
    file: File
    count: int

    def url(self, number: int) -> str:
        """Return the name of a file, which looks like a path below the packed file."""
        return f"{self._packed_url}/{self.names[number]}"

    @functools.cached_property
    def _packed_url(self) -> str:
        return self.store.url_of(self.file.name)

    def opener(self, header: bool = False) -> Callable[[int], BinaryIO]:
        """Return a function that opens a file by its number.

        Its first call reads the complete packed file, whatever `header` is.
        """
        contents = functools.cache(self._contents)
        return lambda number: OpenBytes(contents()[number], self.url(number))

    def _contents(self) -> list[bytes]:
        keys = [f"{_ORIGINAL}{name}" for name in self.names]

        def check(arrays: dict[str, np.ndarray]) -> None:
            if len(arrays) != self.count or not arrays.keys() >= {*keys}:
                raise ValueError(f"its files are not those listed: {[*arrays]!r:.200}")

        arrays = _checked_arrays(self.store, self.file, check)
        return [arrays[key].tobytes() for key in keys]


class PackedRows(Source):
    """Packed rows; a part is a file.

    Attributes:
        rows: Total number of rows.
        columns: Column names of the tables that were packed.

    Raises:
        DataError: When a part is loaded whose file differs from the manifest.
    """

    lengths: Sequence[int]
    rows: int
    first_rows: Rows
    columns: Columns

    mergeable = True

    def __init__(self, store: Store, manifest: Manifest) -> None:
        """Check the manifest of a folder of packed rows.

        Raises:
            ValueError: Or another error that `naming_damage` turns into a DataError, if
                the manifest is invalid.
        """
        content, files = manifest.content, manifest.files
        # Memory is allocated for rows below; no row is larger than an intact file.
        intact = (file for file in files if store.size(file.name) == file.nbytes)
        if (example := next(intact, None)) is None:
            raise ValueError("it lists no file that exists in its full size")
        self._schema = Schema.from_json(content["schema"], example.nbytes)
        check_files(files, self._schema)
        self._store, self._files = store, files
        self.parts = len(files)
        self.lengths = [file.details["rows"] for file in files]
        self.rows = sum(self.lengths)
        self.first_rows = self._schema.rows(np.zeros(SHOWN_ROWS, self._schema.record))
        classes = content["classes"]
        if classes is not None and not _are_strings(classes):
            raise ValueError(f"{classes!r:.80} are not class names")
        self.classes = None if classes is None else tuple(classes)
        self.columns = self._names = self._columns_of(content["columns"])
        if not _are_strings(content["scaled_by"]):
            raise ValueError("scaled_by must be a list of strings")
        self.scaled_by = tuple(content["scaled_by"])

    def _columns_of(self, content: Any) -> Columns:
        """Read column names; their number must be that of the columns in the files."""
        columns = {}
        for place, names in dict(content).items():
            field = "x" + place[1:] if place.startswith("X") else place
            width = self._schema.record[field].shape[-1:]
            if not _are_strings(names) or width != (len(names),):
                raise ValueError(f"{names!r:.80} are not the column names of {place}")
            columns[place] = tuple(names)
        return columns

    @override
    def load(self, part: int) -> Rows:
        file, name = self._files[part], self.name(part)
        check = functools.partial(self._schema.check, rows=file.details["rows"])
        arrays = _checked_arrays(self._store, file, check)
        rows = NamedRows.of(self._schema.rows(arrays), self._names)
        return rows.arranged(self.columns, name)

    @override
    def name(self, part: int) -> str:
        return self._store.url_of(self._files[part].name)


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def packed_in(store: Store) -> PackedRows | list[PackedFiles] | None:
    """Return the packed files in a folder; None if it has none.

    Raises:
        DataError: If packing has not been finished, or the manifest is invalid.
    """
    if not store.exists(FORMAT.file_name):
        if not store.exists(ORIGIN):
            return None
        raise DataError(
            f"packing to {store.url} has not been finished; run it again, and it "
            "continues where it stopped"
        )
    manifest = Manifest.read(store, FORMAT)
    with naming_damage(store.url_of(FORMAT.file_name), FORMAT.remedy):
        if manifest.content["schema"] is not None:
            return PackedRows(store, manifest)
        check_files(manifest.files, None)
        groups = [(file.details["names"], file) for file in manifest.files]
        return [
            PackedFiles(names, store, replace(file, details={}), len(names))
            for names, file in groups
        ]
