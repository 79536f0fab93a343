"""The cells of a table in a text file: numbers, or labels that are names."""

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from daskdl.data.formats.classes import as_indices
from daskdl.errors import DataError

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
