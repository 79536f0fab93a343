"""Labels that are names: each becomes its place among the classes.

The cells of a table in a text file: numbers, or labels that are names.

Which columns of a table are features, and which are labels.

Tables as text: a row in each line, numbers between delimiters.

Tables in Parquet files; needs pyarrow.
"""

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from daskdl.data.batching import Rows
from daskdl.data.formats import Format, header_facts, reading, rows_of
from daskdl.data.source import Facts
from daskdl.data.storage import Store
from daskdl.errors import DataError, OptionError

_SHOWN = 10


def as_indices(
    labels: Iterable[str | None], classes: Sequence[str], where: str
) -> np.ndarray:
    """The place of each label among the classes, as int64; with gaps, as float64.

    Args:
        labels: Names; None: there is none, which becomes NaN.
        classes: All names there may be.
        where: What has the labels, for the message: a column of a file.

    Raises:
        DataError: With a label that is not among the classes, and its row.

    Example:
        >>> as_indices(["b", "a"], ["a", "b"], "y")
        array([1, 0])
        >>> as_indices(["c"], ["a", "b"], "the column 'y' of x.csv")
        Traceback (most recent call last):
        daskdl.errors.DataError: the column 'y' of x.csv has the label 'c' in row 0, \
which is not among the classes 'a', 'b'
    """
    places = {name: place for place, name in enumerate(classes)}
    rows: list[float] = []
    for row, label in enumerate(labels):
        if label is None:
            rows.append(math.nan)
            continue
        if label not in places:
            raise DataError(
                f"{where} has the label {label!r} in row {row}, which is not among "
                f"the classes {quoted(classes)}"
            )
        rows.append(places[label])
    return np.array(rows, np.float64 if math.nan in rows else np.int64)


def quoted(names: Iterable[object]) -> str:
    """Names for a message; of many the first ones.

    Example:
        >>> quoted(["a", "b"])
        "'a', 'b'"
    """
    shown = [repr(name) for name in names]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


_QUOTE = '"'


@dataclass(frozen=True)
class Cells:
    """The lines of a file below its header.

    Attributes:
        text: Of the whole file.
        url: For messages.
        names: Of all columns.
        delimiter: Between two cells.
        skipped: How many lines are above the first row.
    """

    text: str
    url: str
    names: Sequence[str]
    delimiter: str
    skipped: int

    def count(self) -> int:
        """How many rows there are.

        Raises:
            DataError: With the line of a row that has more or fewer cells than names.
        """
        rows = 0
        for line, cells in self._rows():
            rows += 1
            if len(cells) != len(self.names):
                raise DataError(
                    f"every line of {self.url} must have {len(self.names)} cells, got "
                    f"{len(cells)} in line {line}; the delimiter is {self.delimiter!r}"
                )
        return rows

    def numbers(self, columns: Sequence[int], gaps: bool = False) -> np.ndarray:
        """A table of some columns, as float64.

        Args:
            columns: Their indices.
            gaps: Whether cells may be empty, which makes them NaN.

        Raises:
            DataError: With the column and line of a cell that is no number.
        """
        if not self.count():  # numpy would warn
            return np.empty((0, len(columns)))
        try:
            return self._table(columns, gaps and self._have_gaps(columns))
        except ValueError as error:
            reason = self._reason(columns, gaps) or f"{self.url}: {error}"
            raise DataError(reason) from error

    def indices(self, columns: Sequence[int], classes: Sequence[str]) -> np.ndarray:
        """A table of some columns whose cells are names of classes.

        Args:
            columns: Their indices.
            classes: All names; an empty cell is none, and becomes NaN.

        Raises:
            DataError: With a label that is not among them.
        """
        self.count()
        places = [
            as_indices(
                (cells[column].strip() or None for _, cells in self._rows()),
                classes,
                f"the column {self.names[column]!r} of {self.url}",
            )
            for column in columns
        ]
        return np.stack(places, axis=1)

    def _table(self, columns: Sequence[int], gaps: bool) -> np.ndarray:
        return np.loadtxt(
            io.StringIO(self.text, newline=""),
            delimiter=self.delimiter,
            comments=None,
            converters=dict.fromkeys(columns, _number_or_nan) if gaps else None,
            quotechar=_QUOTE,
            skiprows=self.skipped,
            usecols=columns,
            ndmin=2,
            encoding=None,
        )

    def _have_gaps(self, columns: Sequence[int]) -> bool:
        return any(
            not cells[column].strip() for _, cells in self._rows() for column in columns
        )

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """Each row with its line in the file, from 1."""
        file = io.StringIO(self.text, newline="")
        reader = csv.reader(file, delimiter=self.delimiter, quotechar=_QUOTE)
        for cells in reader:
            if cells and reader.line_num > self.skipped:
                yield reader.line_num, cells

    def _reason(self, columns: Sequence[int], gaps: bool) -> str | None:
        for line, cells in self._rows():
            for column in columns:
                if not _is_number(cells[column], gaps):
                    return (
                        f"column {self.names[column]!r} of {self.url} must hold "
                        f"numbers, got {cells[column]!r} in line {line}; leave it out "
                        "with features=[...], or give classes=[...] if it is the label"
                    )
        return None


def _number_or_nan(cell: str) -> float:
    if "_" in cell:  # which Python reads in numbers, and nobody else
        raise ValueError(f"could not convert string {cell!r}")
    return float(cell) if cell.strip() else math.nan


def _is_number(cell: str, gaps: bool) -> bool:
    if gaps and not cell.strip():
        return True
    try:
        float(cell)
    except ValueError:
        return False
    return True


Column = str | int  # its name, or its index from 0 or from the end


class Chosen(NamedTuple):
    """Indices of columns."""

    features: list[int]
    labels: list[int]  # empty: there are none


def chosen(
    names: Sequence[str],
    features: Sequence[Column] | None,
    label: Column | Sequence[Column] | None,
    url: str,
) -> Chosen:
    """Find the columns of a file that the user means.

    Args:
        names: Of all columns.
        features: Those of x; None: all that are no labels.
        label: That of y, or those of y; None: there are no labels.
        url: Of the file, for messages.

    Raises:
        DataError: If a column is not there, is meant twice, or if none is left for x.

    Example:
        >>> chosen(["a", "b", "c"], None, "b", "x.csv")
        Chosen(features=[0, 2], labels=[1])
        >>> chosen(["a", "b"], None, "d", "x.csv")
        Traceback (most recent call last):
        daskdl.errors.DataError: label 'd' is not a column of x.csv; it has 'a', 'b'
    """
    given = [] if label is None else [label] if isinstance(label, str | int) else label
    labels = [_index(names, column, "label", url) for column in given]
    if features is None:
        wanted = [i for i in range(len(names)) if i not in labels]
    else:
        wanted = [_index(names, column, "feature", url) for column in features]
    twice = {i for i in labels if i in wanted or labels.count(i) > 1}
    if twice:
        shown = names[min(twice)]
        raise DataError(f"label {shown!r} of {url} must be meant once, and not in x")
    if not wanted:
        raise DataError(f"{url} has no columns for x, only {quoted(names)}")
    return Chosen(wanted, labels)


def _index(names: Sequence[str], column: Column, what: str, url: str) -> int:
    if isinstance(column, str) and names.count(column) == 1:
        return names.index(column)
    if isinstance(column, int) and -len(names) <= column < len(names):
        return column % len(names)
    problem = "the name of several columns" if column in names else "not a column"
    raise DataError(f"{what} {column!r} is {problem} of {url}; it has {quoted(names)}")


@dataclass(frozen=True)
class Csv(Format):
    """The columns of a CSV file: features as x, one or several as y.

    Cells are numbers; a cell that is empty or text is refused with its column and
    line. ``nan`` is a number. A label may be a name if ``classes`` are given; one that
    is empty or ``nan`` is missing, and makes floats of the labels of its file.

    Attributes:
        label: The name of the column of labels, or its index; a list of them makes y
            a table too. None: there are no labels.
        features: Names or indices of the columns of x; None: all others.
        header: Whether the first line has the names; else they are "0", "1", ....
        delimiter: Between two cells.
        dtype: Of x.
        label_dtype: Of y. Classes are whole numbers; for regression "float32".
        classes: If labels are names: all of them, in the order of the labels 0, 1, ....
    """

    label: Column | Sequence[Column] | None = None
    features: Sequence[Column] | None = None
    header: bool = True
    delimiter: str = ","
    dtype: str = "float32"
    label_dtype: str = "int64"
    classes: Sequence[str] | None = None

    @override
    def __call__(self, content: bytes, name: str) -> Rows:
        with reading(name):
            text = content.decode("utf-8-sig")
            names, skipped = self._names(text, name)
            columns = chosen(names, self.features, self.label, name)
            table = Cells(text, name, names, self.delimiter, skipped)
            x = table.numbers(columns.features).astype(self.dtype)
            return rows_of((x, self._labels(table, columns)), name)

    @override
    def look(self, store: Store, name: str) -> Facts:
        facts = super().look(store, name)
        x, y = facts.first
        if y is None:
            return facts
        # Like those of all files, also if labels are missing in this one.
        dtype = self.label_dtype if self.classes is None else "int64"
        return facts._replace(first=(x, np.nan_to_num(y).astype(dtype)))

    def _names(self, text: str, name: str) -> tuple[list[str], int]:
        """Of the columns, and how many lines are above the first row."""
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=self.delimiter)
        first = next((cells for cells in reader if cells), None)
        if first is None:
            raise DataError(f"{name} must have rows, got an empty file")
        if self.header:
            return [cell.strip() for cell in first], reader.line_num
        return [str(i) for i in range(len(first))], 0

    def _labels(self, table: Cells, columns: Chosen) -> np.ndarray | None:
        if not columns.labels:
            return None
        if self.classes is not None:
            return self._shaped(table.indices(columns.labels, self.classes))
        labels = table.numbers(columns.labels, gaps=True)
        missing = np.isnan(labels)
        whole = np.dtype(self.label_dtype).kind in "iu"
        with np.errstate(invalid="ignore"):  # of infinity there is no remainder
            broken = whole & ~missing & (labels % 1 != 0)
        if broken.any():
            row, column = np.argwhere(broken)[0]
            raise DataError(
                f"label {table.names[columns.labels[column]]!r} of {table.url} must "
                f"be whole numbers, got {labels[row, column]} in row {row}; for "
                "regression use label_dtype='float32'"
            )
        kept = whole and missing.any()
        return self._shaped(labels if kept else labels.astype(self.label_dtype))

    def _shaped(self, labels: np.ndarray) -> np.ndarray:
        """One column is a vector, unless it was given as a list."""
        return labels[:, 0] if isinstance(self.label, str | int) else labels


_MAGIC = b"PAR1"  # the first and the last bytes of a file
_TAIL_BYTES = 8  # the length of the footer, and the magic


@dataclass(frozen=True)
class Parquet(Format):
    """The columns of a Parquet file: features as x, one or several as y.

    Columns are numbers without missing values; text is refused by name, unless it is a
    label and ``classes`` are given. Labels that are missing are NaN. Only the columns
    that are needed are decoded.

    Attributes:
        features: Names or indices of the columns of x; None: all that are no labels.
        label: The name of the column of labels, or its index; a list of them makes y
            a table too. None: there are no labels.
        dtype: Of x. That of y is the column's own.
        classes: If labels are names: all of them, in the order of the labels 0, 1, ....
    """

    features: Sequence[Column] | None = None
    label: Column | Sequence[Column] | None = None
    dtype: str = "float32"
    classes: Sequence[str] | None = None

    @override
    def __call__(self, content: bytes, name: str) -> Rows:
        arrow, parquet = _modules()
        with reading(name):
            file = parquet.ParquetFile(arrow.BufferReader(content))
            return self._rows(file.schema_arrow, name, file.read)

    @override
    def look(self, store: Store, name: str) -> Facts:
        arrow, parquet = _modules()
        url = store.url_of(name)
        with reading(url):
            footer = arrow.BufferReader(_MAGIC + _footer(store, name))
            metadata = parquet.read_metadata(footer)
            schema = metadata.schema.to_arrow_schema()
            x, y = self._rows(schema, url, schema.empty_table().select)
        return header_facts(metadata.num_rows, x, y)

    def _rows(self, schema: Any, url: str, read: Any) -> Rows:
        features, labels = chosen(schema.names, self.features, self.label, url)
        table = read([schema.names[i] for i in (*features, *labels)])
        columns = [_Column(table, i, url) for i in range(table.num_columns)]
        given = columns[: len(features)]
        for column in given:
            column.refuse_gaps()
        x = np.stack([column.numbers() for column in given], axis=1)
        y = None
        if labels:
            parts = [self._label(column) for column in columns[len(features) :]]
            single = isinstance(self.label, str | int)
            y = parts[0] if single else np.stack(parts, axis=1)
        return rows_of((x.astype(self.dtype), y), url)

    def _label(self, column: "_Column") -> np.ndarray:
        if self.classes is None:
            return column.numbers()
        return as_indices(column.texts(), self.classes, column.where)


class _Column:
    """One column of a table that was read."""

    def __init__(self, table: Any, index: int, url: str) -> None:
        self.where = f"the column {table.schema.names[index]!r} of {url}"
        self._values = table.column(index)

    def refuse_gaps(self) -> None:
        missing = self._values.null_count
        if missing:
            raise DataError(
                f"{self.where} has {missing} missing values; fill them in, or leave "
                "the rows out, before it is written"
            )

    def numbers(self) -> np.ndarray:
        arrow, _ = _modules()
        kind = self._values.type
        known = arrow.types
        if not (
            known.is_integer(kind) or known.is_floating(kind) or known.is_boolean(kind)
        ):
            raise DataError(
                f"{self.where} must hold numbers, got {kind}; leave it out with "
                "features=[...], or give classes=[...] if it is the label"
            )
        array: np.ndarray = self._values.to_numpy()
        return array

    def texts(self) -> list[str | None]:
        values = self._values.to_pylist()
        return [None if value is None else str(value) for value in values]


def _footer(store: Store, name: str) -> bytes:
    """The end of a file, which says what is in it."""
    size = store.size(name)
    tail = store.read(name, max(size - _TAIL_BYTES, 0), size)
    if tail[4:] != _MAGIC:
        raise ValueError("it does not end as a Parquet file does")
    length = int.from_bytes(tail[:4], "little")
    return store.read(name, max(size - _TAIL_BYTES - length, 0), size)


def _modules() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise OptionError(
            "Parquet files need pyarrow; install it with pip install daskdl[dataframe]"
        ) from error
    return pyarrow, parquet
