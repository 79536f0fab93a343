"""Loaders: functions of an open binary file that return (x, y), or x alone.

`Npy`, `Npz`, `Safetensors`, `Csv` and `Parquet` load files of these formats; some of
them read the number of rows from the header alone. This module also checks the results
of all loaders; error messages name the file.
"""

import contextlib
import csv
import importlib
import io
import json
import re
import struct
import sys
import threading
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, BinaryIO, ClassVar

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Rows, Tree
from daskdl.data.named_columns import Columns as NamedColumns
from daskdl.data.named_columns import NamedRows, few
from daskdl.data.source import SHOWN_ROWS, Facts, facts_of
from daskdl.data.tables import as_numpy, check_array
from daskdl.errors import DataError, OptionError

Loader = Callable[[BinaryIO], Any]

# Errors that readers raise for damaged files; Pillow even raises a SyntaxError. Other
# errors are bugs and propagate.
DAMAGED: tuple[type[Exception], ...] = (
    OSError,
    ValueError,
    EOFError,
    LookupError,
    SyntaxError,
    struct.error,
    csv.Error,
    zlib.error,
    zipfile.BadZipFile,
    SafetensorError,
)

# Python 3.11 keeps one recursion counter of its parser for all threads, and raises a
# SystemError if two threads parse at a time; numpy parses the header of each array.
_parser_lock: contextlib.AbstractContextManager[Any] = (
    threading.Lock() if sys.version_info < (3, 12) else contextlib.nullcontext()
)


class Reader(ABC):
    """A loader for one format, sent to the workers by value.

    Attributes:
        classes: Names of the labels 0, 1, ..., or None.
        reads_headers: Whether `facts` reads only a small part of a file.
    """

    classes: Sequence[str] | None = None
    reads_headers: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, file: BinaryIO) -> Any:
        """Read (x, y) from an open file: trees of arrays; y is None without labels."""

    def facts(self, file: BinaryIO) -> Facts | None:
        """Return facts from the header; None if they require the complete file."""
        return None


def check_loader(loader: Any) -> None:
    """Refuse a loader that is not callable."""
    if isinstance(loader, type) and issubclass(loader, Reader):
        name = loader.__name__
        raise OptionError(
            f"loader must be an object, got the class {name}; write {name}(...)"
        )
    if not callable(loader):
        raise OptionError(
            "loader must be a function load(file) -> (x, y) of an open binary file, or "
            f"one of Csv, Npy, Npz, Parquet and Safetensors, got {loader!r}"
        )


@contextlib.contextmanager
def reading(url: str, *also: type[Exception]) -> Iterator[None]:
    """Turn errors of a damaged file, and those in `also`, into a DataError."""
    try:
        yield
    except OptionError:  # a ValueError with a complete message
        raise
    except (*DAMAGED, *also) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"cannot read {url}: {reason}") from error


def rows_of(result: Any, url: str, *, one_example: bool = False) -> Rows:
    """Convert the result of a loader to trees of numpy arrays of equal length.

    A tuple of two is (x, y); any other value is x alone. With `one_example`, arrays
    have no axis of rows, and y may be a number.

    Example:
        >>> rows_of((np.zeros(3), 7), "a.png", one_example=True)
        (array([[0., 0., 0.]]), array([7]))
    """
    is_pair = isinstance(result, tuple) and len(result) == 2
    rows: Rows = (result[0], result[1]) if is_pair else (result, None)
    if one_example:
        rows = batching.tree_map(_as_row, rows)
    for name, tree in zip("xy", rows, strict=True):
        if not batching.leaves(tree):
            raise DataError(f"{name} of {url} must not be empty, got {tree!r}")
    lengths = {
        name: _length(leaf, f"{name} of {url}")
        for name, leaf in batching.leaves_by_name(rows, ("x", "y")).items()
    }
    if len(set(lengths.values())) != 1:
        shown = ", ".join(f"{name} has {n}" for name, n in lengths.items())
        raise DataError(f"arrays of {url} must have equally many rows, but {shown}")
    rows = batching.tree_map(as_numpy, rows)
    if isinstance(result, NamedRows):
        return NamedRows.of(rows, result.columns)
    return rows


def _as_row(leaf: Any) -> Any:
    if isinstance(leaf, bool | int | float | np.generic):
        leaf = np.asarray(leaf)
    # Anything but arrays is refused by `check_array`.
    return leaf[None] if isinstance(leaf, np.ndarray | Tensor) else leaf


def _length(leaf: Any, name: str) -> int:
    """Return the length of an array; 0 is allowed: a file may have no rows."""
    if isinstance(leaf, np.ndarray | Tensor) and leaf.ndim and len(leaf) == 0:
        return 0
    return len(leaf) if check_array(leaf, name) else 0


def header_facts(rows: int, empty: Any, url: str) -> Facts:
    """Return the facts of a file from its number of rows and a result without rows."""

    def zeros(leaf: np.ndarray) -> np.ndarray:
        return np.zeros((min(rows, SHOWN_ROWS), *leaf.shape[1:]), leaf.dtype)

    named = NamedRows.of(rows_of(empty, url))
    x, y = batching.tree_map(zeros, (named[0], named[1]))
    return Facts(rows, NamedRows.of((x, y), named.columns))


@dataclass(frozen=True)
class Npy(Reader):
    """The array of an ``.npy`` file as x; one of its columns may be y.

    Attributes:
        label_column: Index of the column that becomes y, from 0, or from the end as -1.
            The dtype does not change: classes must be an array of integers. None: no
            labels.
    """

    label_column: int | None = None
    reads_headers = True

    @override
    def __call__(self, file: BinaryIO) -> Any:
        with _parser_lock:
            return self._split(np.load(file, allow_pickle=False), file.name)

    @override
    def facts(self, file: BinaryIO) -> Facts:
        with _parser_lock:
            version = np.lib.format.read_magic(file)
            # Version 3.0 differs only in field names, which arrays of numbers lack.
            if version == (1, 0):
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            else:
                shape, _, dtype = np.lib.format.read_array_header_2_0(file)
        rows, shape = (shape[0], (0, *shape[1:])) if shape else (1, ())
        empty = self._split(np.empty(shape, dtype), file.name)
        return header_facts(rows, empty, file.name)

    def _split(self, array: np.ndarray, url: str) -> Any:
        column = self.label_column
        if column is None:
            return array
        if array.ndim != 2 or not -array.shape[1] <= column < array.shape[1]:
            raise DataError(
                f"{url} must be a table with the column {column} for "
                f"Npy(label_column={column}), got the shape {array.shape}"
            )
        return np.delete(array, column, axis=1), array[:, column]


@dataclass(frozen=True)
class NamedArrays(Reader):
    """Arrays of a file by name; see `Npz`."""

    x: Tree = "x"
    y: Tree = "y"

    def _chosen(self, arrays: Mapping[str, Any], url: str) -> tuple[Tree, Tree]:
        """The arrays with the names in x and y."""
        for name in batching.leaves_by_name((self.x, self.y)).values():
            if name not in arrays:
                raise DataError(
                    f"{url} must have an array named {name!r}, but has "
                    f"{sorted(arrays)}; name them with x=... and y=..., y=None without "
                    "labels"
                )
        return batching.tree_map(lambda name: arrays[name], (self.x, self.y))


@dataclass(frozen=True)
class Npz(NamedArrays):
    """Named arrays of an ``.npz`` file.

    Attributes:
        x: A name; for several inputs, a tuple or dict of names.
        y: The same for labels; None: no labels.
    """

    @override
    def __call__(self, file: BinaryIO) -> Any:
        with _parser_lock:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise DataError(
                    f"{file.name} must be an .npz file, got one array; use Npy"
                )
            with loaded as arrays:
                return self._chosen(arrays, file.name)


_LENGTH_BYTES = 8  # a file begins with the length of its header
_MAX_HEADER_BYTES = 100_000_000  # the limit of the library


@dataclass(frozen=True)
class Safetensors(NamedArrays):
    """Named tensors of a safetensors file.

    Attributes:
        x: A name; for several inputs, a tuple or dict of names.
        y: The same for labels; None: no labels.
    """

    reads_headers = True

    @override
    def __call__(self, file: BinaryIO) -> Any:
        return self._chosen(load(file.read()), file.name)

    @override
    def facts(self, file: BinaryIO) -> Facts | None:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"its header would have {length} bytes")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        rows = {name: entry["shape"][:1] for name, entry in header.items()}
        for entry in header.values():  # the same file without rows
            entry |= {"shape": [0, *entry["shape"][1:]], "data_offsets": [0, 0]}
        text = json.dumps(header).encode()
        tensors = load(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        empty = self._chosen(tensors, file.name)
        names = batching.leaves_by_name((self.x, self.y)).values()
        lengths = {tuple(rows[name]) for name in names}
        if len(lengths) > 1 or () in lengths:
            return None  # loading the file raises the error
        ((count,),) = lengths
        return header_facts(count, empty, file.name)


Column = str | int  # its name, or its index from 0 or from the end
Columns = Sequence[tuple[str, Any]]  # names, and series of pandas

_SHOWN = 10


@dataclass(frozen=True)
class Table(Reader):
    """Columns of a table: features as x, one or several as y."""

    features: Sequence[Column] | None = None
    label: Column | Sequence[Column] | None = None
    _: KW_ONLY
    dtype: str = "float32"
    label_dtype: str | None = None
    classes: Sequence[str] | None = None

    def _chosen(self, names: Sequence[str], url: str) -> tuple[list[int], list[int]]:
        """Return the indices of the columns of x, and of the columns of y."""
        labels = [_index(names, c, "label", url) for c in _as_list(self.label)]
        if self.features is None:
            features = [i for i in range(len(names)) if i not in labels]
        else:
            features = [_index(names, c, "feature", url) for c in self.features]
        repeated = {i for i in labels if i in features or labels.count(i) > 1}
        if repeated:
            raise DataError(
                f"label {names[min(repeated)]!r} of {url} must be selected once, and "
                "must not be a feature"
            )
        if not features:
            raise DataError(f"{url} has no columns for x, only {few(names, _SHOWN)}")
        return features, labels

    def _rows(self, features: Columns, labels: Columns, url: str) -> Any:
        """The columns as (x, y)."""
        columns = [_numeric(s, f"column {name!r} of {url}") for name, s in features]
        x, y = np.stack(columns, axis=1).astype(self.dtype), None
        if labels:
            each = [self._labels(s, f"column {name!r} of {url}") for name, s in labels]
            single = isinstance(self.label, str | int)
            y = each[0] if single else np.stack(each, axis=1)
        return NamedRows.of((x, y), self._names(features, labels))

    def _names(self, features: Columns, labels: Columns) -> NamedColumns:
        """The names of the columns, except of those that are chosen by index."""
        names: dict[str, tuple[str, ...]] = {}
        if not _by_index(self.features):
            names["X"] = tuple(name for name, _ in features)
        if len(labels) > 1 and not _by_index(self.label):
            names["y"] = tuple(name for name, _ in labels)
        return names

    def _labels(self, series: Any, where: str) -> np.ndarray:
        """Return numbers, or class numbers of names; missing labels are NaN."""
        if self.classes is not None:
            return _class_numbers(series, self.classes, where)
        labels = _numeric(series, where)
        if self.label_dtype is None:
            return labels
        integral = np.dtype(self.label_dtype).kind in "iu"
        missing = np.isnan(labels)
        with np.errstate(invalid="ignore"):  # infinity has no remainder
            fractional = integral & ~missing & (labels % 1 != 0)
        if fractional.any():
            row = int(np.argmax(fractional))
            raise DataError(
                f"label {where} must be whole numbers, got {labels[row]} in row {row}; "
                "for regression use label_dtype='float32'"
            )
        return labels if integral and missing.any() else labels.astype(self.label_dtype)


def _as_list(columns: Column | Sequence[Column] | None) -> Sequence[Column]:
    return [columns] if isinstance(columns, str | int) else columns or []


def _by_index(columns: Column | Sequence[Column] | None) -> bool:
    """Whether the user chose a column by index, so that its name does not matter."""
    return any(isinstance(column, int) for column in _as_list(columns))


def _index(names: Sequence[str], column: Column, what: str, url: str) -> int:
    if isinstance(column, str) and names.count(column) == 1:
        return names.index(column)
    if isinstance(column, int) and -len(names) <= column < len(names):
        return column % len(names)
    problem = "the name of several columns" if column in names else "not a column"
    raise DataError(
        f"{what} {column!r} is {problem} of {url}; it has {few(names, _SHOWN)}"
    )


def _numeric(series: Any, where: str) -> np.ndarray:
    if not len(series) and series.dtype == object:  # CSV without rows
        return np.empty(0)
    array: np.ndarray = series.to_numpy()
    if array.dtype.kind in "biuf":
        return array
    pandas = optional_module("pandas")
    wrong = pandas.to_numeric(series, errors="coerce").isna() & series.notna()
    row = int(np.argmax(wrong)) if wrong.any() else 0
    got = f"{series.iloc[row]!r} in row {row}" if len(series) else str(series.dtype)
    raise DataError(
        f"{where} must hold numbers, got {got}; leave it out with features=[...], or "
        "give classes=[...] if it is the label"
    )


def _class_numbers(series: Any, classes: Sequence[str], where: str) -> np.ndarray:
    """Return the class number of each name, int64; float64 if some are missing."""
    pandas = optional_module("pandas")
    texts = series.map(str, na_action="ignore")
    numbers: np.ndarray = pandas.Index(list(classes)).get_indexer(texts)
    missing = texts.isna().to_numpy()
    unknown = (numbers < 0) & ~missing
    if unknown.any():
        row = int(np.argmax(unknown))
        raise DataError(
            f"{where} has the label {texts.iloc[row]!r} in row {row}, which is not "
            f"among the classes {few([*classes], _SHOWN)}"
        )
    if missing.any():
        return np.where(missing, np.nan, numbers)
    return numbers.astype(np.int64)


def optional_module(name: str) -> Any:
    """Import a package for tables; an OptionError says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise OptionError(
            f"tables in files need {name.partition('.')[0]}; install it with "
            "pip install 'daskdl[dataframe]'"
        ) from error


_WHITE_SPACE = r"\s+"


def _cells(lines: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of each line, and its number; a quoted cell may have several lines."""
    reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True)
    return ((reader.line_num, line) for line in reader)


@dataclass(frozen=True, kw_only=True)
class Csv(Table):
    r"""Columns of a CSV file: features as x, one or several labels as y.

    pandas reads the file. Cells must be numbers, of which ``nan`` is one. An empty cell
    or text, and a line with too many or too few cells, raise an error that names the
    column and the row. Labels may be names if ``classes`` are given. A label that is
    empty or ``nan`` is missing; the labels of such a file are floats.

    Attributes:
        features: Names or indices of the columns of x; None: all columns except the
            labels.
        label: Name or index of the label column; with a list, y has two axes. None: no
            labels.
        dtype: dtype of x.
        label_dtype: dtype of y: an integer type for classes, "float32" for regression.
        classes: For labels that are names: all names, in the order of the class numbers
            0, 1, ....
        header: Whether the first line has the column names; if not, they are "0", "1",
            ....
        delimiter: The character between two cells. Several characters are a regular
            expression, such as ``r"\s+"`` for white space; with any other expression,
            quotes have no special meaning.
    """

    label_dtype: str | None = "int64"
    header: bool = True
    delimiter: str = ","

    @override
    def _names(self, features: Columns, labels: Columns) -> NamedColumns:
        return super()._names(features, labels) if self.header else {}

    def __post_init__(self) -> None:
        if len(self.delimiter) == 1:
            return
        try:
            between = re.fullmatch(self.delimiter, "") is None
        except re.error:
            between = False
        if not between:
            raise OptionError(
                "delimiter must be a character, or a regular expression that matches "
                f"at least one, got {self.delimiter!r}; put a backslash before special "
                r"characters, as in r'\|\|'"
            )

    @override
    def __call__(self, file: BinaryIO) -> Any:
        pandas = optional_module("pandas")
        url, content = file.name, file.read()
        # pandas has two parsers; that in Python fills short lines with NaN.
        fast = self.delimiter == _WHITE_SPACE or len(self.delimiter.encode()) == 1
        exact = {}
        # pandas 3.1 is exact and deprecates the option; 2.1 and 3.0 are not exact.
        version = tuple(map(int, pandas.__version__.split(".")[:2]))
        if fast and version < (3, 1):
            exact["float_precision"] = "round_trip"
        read = partial(
            pandas.read_csv,
            sep=self.delimiter,
            engine="c" if fast else "python",
            header=None,
            keep_default_na=False,
            skipinitialspace=True,
            encoding="utf-8-sig",
            **exact,
        )
        try:  # two lines: pandas makes an index of first cells if the second is longer
            head = read(io.BytesIO(content), nrows=2, dtype=str)
        except pandas.errors.EmptyDataError:
            raise DataError(f"{url} must have rows, got an empty file") from None
        names = [str(i) for i in head]
        if self.header:
            names = [cell.strip() for cell in head.iloc[0]]
        features, labels = self._chosen(names, url)
        if not fast:
            self._check_lines(content, len(names), url)
        missing = ["nan", "NaN", "NAN"]
        frame = read(
            io.BytesIO(content),
            header=0 if self.header else None,
            names=list(head),
            na_values={i: [*missing, ""] if i in labels else missing for i in head},
            dtype=dict.fromkeys(labels, str) if self.classes is not None else None,
        )
        if fast and frame[labels].isna().any(axis=None):
            self._check_lines(content, len(names), url)
        return self._rows(
            [(names[i], frame[i]) for i in features],
            [(names[i], frame[i]) for i in labels],
            url,
        )

    def _check_lines(self, content: bytes, cells: int, url: str) -> None:
        """Refuse lines with more or fewer cells, which pandas may accept."""
        text = io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="")
        if len(self.delimiter) == 1:
            lines = _cells(text, self.delimiter)
        elif self.delimiter == _WHITE_SPACE:
            lines = _cells((line.replace("\t", " ").strip() for line in text), " ")
        else:
            split = (re.split(self.delimiter, line.strip()) for line in text)
            lines = enumerate(split, 1)
        for number, line in lines:
            if any(line) and len(line) != cells:
                raise DataError(
                    f"every line of {url} must have {cells} cells, got {len(line)} in "
                    f"line {number}; the delimiter is {self.delimiter!r}"
                )

    @override
    def facts(self, file: BinaryIO) -> Facts:
        facts = facts_of(rows_of(self(file), file.name))
        assert facts.first_rows is not None, "the file has been read"
        shown = NamedRows.of(facts.first_rows)
        x, y = shown
        if y is None:
            return facts
        # The dtype is that of all files, even if labels are missing in this one.
        dtype = self.label_dtype if self.classes is None else "int64"
        y = np.nan_to_num(y).astype(dtype)
        return facts._replace(first_rows=NamedRows.of((x, y), shown.columns))


@dataclass(frozen=True)
class Parquet(Table):
    """Columns of a Parquet file: features as x, one or several labels as y.

    Features must be numbers without missing values; a column of text raises an error
    that names it, unless it is the label and ``classes`` are given. Missing labels
    become NaN. Only the selected columns are decoded.

    Attributes:
        features: Names or indices of the columns of x; None: all columns except the
            labels.
        label: Name or index of the label column; with a list, y has two axes. None: no
            labels.
        dtype: dtype of x.
        label_dtype: dtype of y; None: that of the column.
        classes: For labels that are names: all names, in the order of the class numbers
            0, 1, ....
    """

    reads_headers = True

    @override
    def __call__(self, file: BinaryIO) -> Any:
        parquet = optional_module("pyarrow.parquet").ParquetFile(file)
        return self._decoded(parquet.schema_arrow, parquet.read, file.name)

    @override
    def facts(self, file: BinaryIO) -> Facts:
        parquet = optional_module("pyarrow.parquet").ParquetFile(file)
        schema = parquet.schema_arrow
        empty = self._decoded(schema, schema.empty_table().select, file.name)
        return header_facts(parquet.metadata.num_rows, empty, file.name)

    def _decoded(self, schema: Any, read: Callable[[list[str]], Any], url: str) -> Any:
        features, labels = self._chosen(schema.names, url)
        names = [schema.names[i] for i in (*features, *labels)]
        table = read(names)
        for i, name in enumerate(names[: len(features)]):
            missing = table.column(i).null_count
            if missing:
                raise DataError(
                    f"column {name!r} of {url} has {missing} missing values; fill them "
                    "in, or leave the rows out, before it is written"
                )
        columns = [(name, table.column(i).to_pandas()) for i, name in enumerate(names)]
        return self._rows(columns[: len(features)], columns[len(features) :], url)
