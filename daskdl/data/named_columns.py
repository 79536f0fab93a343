"""Column names of tables, by which later tables are matched with the first table.

A model and a normalizer know columns by position. The names of the first tables are
kept, in a :class:`~daskdl.Trainer`, in saves and checkpoints, in normalizers and in
packed files, and the columns of any later table are put into their order. An array has
no names: its columns are taken by position.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from daskdl.data import batching
from daskdl.data.batching import Tree
from daskdl.errors import DataError

# Names of the columns of each table, by its place in the user's call: "X", "X['a']".
Columns = Mapping[str, tuple[str, ...]]
NO_COLUMNS: Columns = {}

SHOWN_NAMES = 5  # most names in a message


def few(names: Any, most: int = SHOWN_NAMES) -> str:
    """The first of some names, for messages.

    Example:
        >>> few(["a", "b"]), few(range(9)), few(None)
        ("'a', 'b'", '0, 1, 2, 3, 4 and 4 more', 'none')
    """
    if names is None or not len(names):
        return "none"
    shown = ", ".join(repr(name) for name in names[:most])
    hidden = len(names) - most
    return f"{shown} and {hidden} more" if hidden > 0 else shown


class FittedTransform(ABC):
    """A transform that was fitted on data with these columns."""

    columns: Columns

    @property
    @abstractmethod
    def digest(self) -> str:
        """A string that is equal for transforms that give the same results."""


def names_of(table: Any) -> list[Any] | None:
    """Return the names of the columns of a table of pandas, pyarrow, Dask or xarray.

    None for anything else, and for a single column without an axis of columns. A
    DataArray is a table if the coordinate of its second and last dimension is strings.
    """
    if hasattr(table, "dims") and hasattr(table, "indexes"):
        labels = table.indexes.get(table.dims[1], ()) if table.ndim == 2 else ()
        names = [name for name in labels if isinstance(name, str)]
        return names if names and len(names) == len(labels) else None
    if is_pyarrow(table):
        return list(table.schema.names) if hasattr(table, "schema") else None
    if getattr(table, "ndim", 0) == 2 and hasattr(table, "columns"):
        return list(table.columns)
    return None


def is_pyarrow(value: Any) -> bool:
    """Whether a value is a table or an array of pyarrow."""
    return type(value).__module__.startswith("pyarrow")


def columns_in(x: Tree, y: Tree) -> Columns:
    """Return the names of the columns of the tables in x and y.

    The only column of a table of labels may have any name, so it is left out.
    """
    named = {
        place: tuple(map(str, names))
        for place, leaf in batching.leaves_by_name((x, y)).items()
        if (names := names_of(leaf)) is not None
    }
    return {
        place: names
        for place, names in named.items()
        if len(names) > 1 or not place.startswith("y")
    }


class NamedRows(tuple[Tree, Tree]):
    """Rows (x, y), and the names of the columns of their tables.

    Attributes:
        columns: Names along the last axis of the arrays that come from tables. Other
            arrays have no entry; their columns are matched by position.
        classes: Names of the labels 0, 1, ..., if a categorical column has them.

    Example:
        >>> rows = NamedRows.of((np.array([[1, 2]]), None), {"X": ("a", "b")})
        >>> rows.arranged({"X": ("b", "a")})
        (array([[2, 1]]), None)
    """

    columns: Columns
    classes: Sequence[str] | None

    @classmethod
    def of(
        cls,
        rows: tuple[Tree, Tree],
        columns: Columns = NO_COLUMNS,
        classes: Sequence[str] | None = None,
    ) -> Self:
        """Name the columns of rows; rows that have names keep them."""
        if isinstance(rows, cls):
            return rows
        named = cls(rows)
        named.columns, named.classes = columns, classes
        return named

    def arranged(self, wanted: Columns, where: str = "") -> Self:
        """Return the rows with the columns of each table in the wanted order.

        Args:
            wanted: Names in order; a table that has none here does not change.
            where: The part or the file of the rows, for messages.

        Raises:
            DataError: If a table has other columns than are wanted, or an array has
                another number of columns.
        """
        if wanted == self.columns or not wanted:
            return self
        arrays = []
        for place, array in batching.leaves_by_name(self).items():
            if place in wanted:
                label = f"{place} of {where}" if where else place
                array = _arranged(array, label, self.columns.get(place), wanted[place])
            arrays.append(array)
        rows = batching.with_leaves((self[0], self[1]), arrays)
        columns = {p: wanted.get(p, names) for p, names in self.columns.items()}
        return self.of(rows, columns, self.classes)

    def warn_of_positions(
        self, wanted: Columns, trained: Columns | None, where: str = ""
    ) -> None:
        """Warn where columns can only be matched by position.

        Args:
            wanted: Names that are expected.
            trained: Names of the data that a model was trained on; None: not trained.
            where: The part of the rows, for messages.
        """
        for place in batching.leaves_by_name(self):
            label = f"{place} of {where}" if where else place
            names = self.columns.get(place)
            if names is not None and trained is not None and place not in trained:
                warnings.warn(
                    f"{label} has the column names {few(names)}, but the training data "
                    "of the model have none: columns are matched by position",
                    stacklevel=3,
                )
            elif names is None and place in wanted:
                warnings.warn(
                    f"{label} has no column names, but the training data of the model "
                    f"have the columns {few(wanted[place])}: columns are matched by "
                    "position",
                    stacklevel=3,
                )


def _arranged(
    array: Any, label: str, names: tuple[str, ...] | None, wanted: tuple[str, ...]
) -> Any:
    if names is None:
        if array.ndim < 2 or array.shape[-1] != len(wanted):
            raise DataError(
                f"{label} must have {len(wanted)} columns, {few(wanted)}, like the "
                f"data before it, got rows of shape {tuple(array.shape[1:])}"
            )
        return array
    if names == wanted:
        return array
    missing = [name for name in wanted if name not in names]
    extra = [name for name in names if name not in wanted]
    if missing or extra:
        raise DataError(
            f"{label} must have the same columns as the data before it, "
            f"{few(wanted)}; missing: {few(missing)}; unexpected: {few(extra)}; "
            f"{_remedy(label, missing, extra)}"
        )
    if len(set(names)) < len(names) or len(set(wanted)) < len(wanted):
        raise DataError(
            f"{label} has the columns {few(names)}, and the data before it "
            f"{few(wanted)}: columns of the same name cannot be told apart; give "
            "each column its own name"
        )
    order = [names.index(name) for name in wanted]
    return np.ascontiguousarray(array[..., order])


def _remedy(label: str, missing: Sequence[str], extra: Sequence[str]) -> str:
    if missing and extra:
        return "rename the columns"
    if missing:
        return "add the columns, or train a new Trainer without them"
    remedy = f"leave them out, for example with {label.partition(' of ')[0]}.drop(...)"
    if len(extra) == 1 and label.startswith("X"):
        remedy += f", or give label={extra[0]!r} if they are the labels"
    return remedy
