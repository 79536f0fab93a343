"""``dask.array`` and ``dask.dataframe`` as inputs and labels, cut alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.arrays import check_array, check_structure, is_dask_array
from daskdl.data.batching import Rows, Tree
from daskdl.data.collections import Collections, Finish, checked, is_dask_frame, plain
from daskdl.data.frames.columns import check_columns, columns_of
from daskdl.data.graphs import tasks_of
from daskdl.errors import DataError


class _Place(NamedTuple):
    number: int  # among the values of a part
    name: str  # for messages
    classes: Sequence[str] | None  # of labels that are names
    label: bool  # whether values may be missing


@dataclass(frozen=True)
class _Columns(Finish):
    """Each value is one array, or one table.

    Attributes:
        x: Tree of places, each in a list: a tuple would be a tree.
        y: The same, or None.
        lengths: Rows that each part promises, if they are known.
    """

    x: Tree
    y: Tree
    lengths: Sequence[int] | None

    @override
    def __call__(self, values: list[Any], part: int) -> Rows:
        def rows_at(place: list[_Place]) -> np.ndarray:
            ((number, name, classes, label),) = place
            return plain(values[number], f"{name} of part {part}", classes, label)

        rows = batching.of_both(
            lambda tree: batching.mapped(rows_at, tree), (self.x, self.y)
        )
        return checked(rows, part, None if self.lengths is None else self.lengths[part])


def columns(x: Tree, y: Tree) -> Collections:
    """Take trees of ``dask.array`` and ``dask.dataframe`` for one data set.

    Args:
        x: The inputs.
        y: The labels, or None.

    Raises:
        DataError: Naming the argument, if one cannot be used, or they do not go
            together.
    """
    check_structure(x, y)
    labels = {} if y is None else dict(batching.named(y, "y"))
    named = [*batching.named(x, "X"), *labels.items()]
    classes = {name: _check(value, name, name in labels) for name, value in named}
    aligned = _aligned(named)
    taken = [tasks_of(value) for value in aligned]
    lengths = _lengths(aligned)
    places = [[_Place(i, n, classes[n], n in labels)] for i, (n, _) in enumerate(named)]
    zeros = [_zeros(value, name, classes[name]) for name, value in named]
    source = Collections(
        reduce(or_, (tasks for tasks, _ in taken)),
        list(zip(*(keys for _, keys in taken), strict=True)),
        _Columns(*_filled((x, y), places), lengths),
        lengths,
        None if any(row is None for row in zeros) else _filled((x, y), zeros),
    )
    source.classes = classes.get("y")
    return source


def _filled(rows: Rows, values: Sequence[Any]) -> Rows:
    """Trees of the same structure with these values in their places."""
    following = iter(values)
    return batching.of_both(lambda tree: batching.filled(tree, following), rows)


def _check(value: Any, name: str, label: bool) -> tuple[str, ...] | None:
    """Refuse what cannot be used; the names of labels that have such."""
    if is_dask_frame(value):
        return check_columns(value._meta, name, label)
    if is_dask_array(value):
        check_array(value, name)
        return None
    raise DataError(
        f"{name} is in memory and the other data are Dask's; use "
        f"dask.array.from_array({name}, chunks=...) with the chunks of the others, or "
        "compute() the others"
    )


def _aligned(named: Sequence[tuple[str, Any]]) -> list[Any]:
    """The collections, arrays rechunked to the rows of the first.

    Raises:
        DataError: If they are of different lengths, or partitioned differently.
    """
    known = [(name, value) for name, value in named if _rows(value) is not None]
    totals = {name: sum(_rows(value) or ()) for name, value in known}
    if len(set(totals.values())) > 1:
        shown = " and ".join(str(total) for total in totals.values())
        raise DataError(
            f"{' and '.join(totals)} must have the same length, got {shown}"
        )
    aligned = [value for _, value in named]
    if len(known) == len(named):
        rows = aligned[0].chunks[0]
        aligned = [value.rechunk({0: rows}) for value in aligned]
    counts = {n: _parts(value) for (n, _), value in zip(named, aligned, strict=True)}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{count} of {name}" for name, count in counts.items())
        raise DataError(
            "Dask's data whose lengths are not known must be partitioned alike, got "
            f"{shown} partitions; take X and y from one collection, or repartition them"
        )
    return aligned


def _parts(value: Any) -> int:
    return int(value.numblocks[0] if is_dask_array(value) else value.npartitions)


def _rows(value: Any) -> tuple[int, ...] | None:
    """Rows of each partition, if Dask knows them."""
    if not is_dask_array(value) or any(math.isnan(rows) for rows in value.chunks[0]):
        return None
    return tuple(int(rows) for rows in value.chunks[0])


def _lengths(collections: Sequence[Any]) -> tuple[int, ...] | None:
    return next((rows for c in collections if (rows := _rows(c)) is not None), None)


def _zeros(value: Any, name: str, classes: Sequence[str] | None) -> np.ndarray | None:
    """One row of the right shape and dtype; None if the shape is not known."""
    if is_dask_frame(value):
        meta = columns_of(value._meta, name, classes)
        return np.zeros((1, *meta.shape[1:]), meta.dtype)
    if any(math.isnan(size) for size in value.shape[1:]):
        return None
    return np.zeros((1, *map(int, value.shape[1:])), value.dtype)
