"""Tables in Parquet files; needs pyarrow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from daskdl.data.batching import Rows
from daskdl.data.formats.classes import as_indices
from daskdl.data.formats.columns import Column, chosen
from daskdl.data.formats.loaders import Format
from daskdl.data.formats.results import header_facts, reading, rows_of
from daskdl.data.source import Facts
from daskdl.data.stores.store import Store
from daskdl.errors import DataError, OptionError

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
