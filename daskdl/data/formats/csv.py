"""Tables as text: a row in each line, numbers between delimiters."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from daskdl.data.batching import Rows
from daskdl.data.formats.cells import Cells
from daskdl.data.formats.columns import Chosen, Column, chosen
from daskdl.data.formats.loaders import Format
from daskdl.data.formats.results import reading, rows_of
from daskdl.data.source import Facts
from daskdl.data.stores.store import Store
from daskdl.errors import DataError


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
