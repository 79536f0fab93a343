"""What the rows look like: the trees of x and y, and shape and dtype of each array.

A row as one record of bytes, all its arrays one after the other, is how rows are kept
on the way to batch files: a stretch of rows is then a stretch of bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from daskdl.data import batching
from daskdl.data.arrays import as_numpy, check_array
from daskdl.data.batching import Rows
from daskdl.errors import DataError

_ARRAY = "array"  # in an outline, where an array is


@dataclass(frozen=True)
class Schema:
    """Structure, shapes and dtypes of the rows of an export.

    Attributes:
        x: Outline of x, as JSON: ``"array"``, ``["tuple", [outline, ...]]`` or
            ``["dict", [[key, outline], ...]]``.
        y: The same of y; None without labels.
        dtype: Of a record: a field for each array, named as the user would write it
            (``x``, ``x['image']``), with the shape of one row of it.
    """

    x: Any
    y: Any
    dtype: np.dtype

    @classmethod
    def of(cls, rows: Rows) -> "Schema":
        """The schema of some rows.

        Args:
            rows: Trees of numpy arrays, at least one row.

        Raises:
            DataError: If an array cannot be exported, or they differ in length.
        """
        x, y = rows
        arrays = dict(named_arrays(rows))
        lengths = {name: check_array(a, name) for name, a in arrays.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name} has {n}" for name, n in lengths.items())
            raise DataError(f"all arrays must have as many rows, but {shown}")
        fields = [(n, _native(a.dtype), a.shape[1:]) for n, a in arrays.items()]
        return cls(
            outline_of(x), None if y is None else outline_of(y), np.dtype(fields)
        )

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Schema":
        """Read what `to_json` made.

        Raises:
            ValueError: Or KeyError or TypeError, if it is something else.
        """
        fields = [
            (str(a["name"]), np.dtype(str(a["dtype"])), tuple(map(int, a["shape"])))
            for a in content["arrays"]
        ]
        schema = cls(content["x"], content["y"], np.dtype(fields))
        names = [
            name for name, _ in named_arrays(schema.rows(np.zeros(1, schema.dtype)))
        ]
        if names != [field[0] for field in fields]:
            raise ValueError(f"the outlines are of {names}")
        return schema

    def to_json(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        arrays = [
            {"name": name, "dtype": kind.base.name, "shape": list(kind.shape)}
            for name, kind in self._fields()
        ]
        return {"x": self.x, "y": self.y, "arrays": arrays}

    def records(self, rows: Rows, order: np.ndarray) -> np.ndarray:
        """Copy some rows into records, in that order.

        Raises:
            DataError: If the rows are not of this schema.
        """
        self.check(Schema.of(rows), "the rows")
        records = np.empty(len(order), self.dtype)
        for name, array in named_arrays(rows):
            records[name] = array[order]
        return records

    def rows(self, records: np.ndarray | Mapping[str, np.ndarray]) -> Rows:
        """The trees of x and y of some records, or of whole arrays by name."""
        names = iter(self.dtype.names or ())
        arrays = (np.ascontiguousarray(records[name]) for name in names)
        x = restored(self.x, arrays)
        return x, None if self.y is None else restored(self.y, arrays)

    def check(self, other: "Schema", where: str) -> None:
        """Refuse rows that look different.

        Args:
            other: How they look.
            where: Whose rows they are, for the message.

        Raises:
            DataError: With the first difference.
        """
        mine, others = dict(self._fields()), dict(other._fields())
        for name in mine.keys() | others.keys():
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

    def _fields(self) -> Iterator[tuple[str, np.dtype]]:
        for name in self.dtype.names or ():
            yield name, self.dtype[name]


def as_rows(batch: Rows) -> Rows:
    """A batch of tensors or arrays as numpy arrays; y may be None."""
    return batching.of_both(partial(batching.mapped, as_numpy), batch)


def joined(blocks: Sequence[Rows]) -> Rows:
    """Rows one after the other; all have labels or none."""
    xs, ys = zip(*blocks, strict=True)
    return batching.joined(xs), None if ys[0] is None else batching.joined(ys)


def named_arrays(rows: Rows) -> Iterator[tuple[str, Any]]:
    """The arrays of x, then of y, as the user would write them.

    Example:
        >>> list(named_arrays(({"image": 1}, 2)))
        [("x['image']", 1), ('y', 2)]
    """
    x, y = rows
    yield from batching.named(x, "x")
    if y is not None:
        yield from batching.named(y, "y")


def _native(dtype: np.dtype) -> np.dtype:
    return dtype.newbyteorder("=")


def outline_of(tree: Any) -> Any:
    """The structure of a tree, as plain values for JSON.

    Raises:
        DataError: If a key of a dict is no string or whole number.
    """
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
