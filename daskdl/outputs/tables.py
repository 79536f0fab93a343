"""Outputs as tables of pandas and ``dask.dataframe``, with the index of the rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from dask.delayed import Delayed, delayed

from daskdl.data import batching
from daskdl.data.batching import Tree
from daskdl.errors import ModelError


@dataclass(frozen=True)
class Table:
    """How some of the outputs make a table; picklable.

    Attributes:
        leaves: Numbers of the outputs in it.
        columns: Their names: one for each output, or for each column of the only one;
            None: 0, 1, ...
        series: Whether it is a series rather than a frame.
    """

    leaves: tuple[int, ...]
    columns: tuple[Any, ...] | None
    series: bool

    def made(self, leaves: Sequence[np.ndarray], index: Any) -> Any:
        """The pandas object of one partition.

        Args:
            leaves: All outputs.
            index: Of the rows.
        """
        import pandas

        own = [leaves[number] for number in self.leaves]
        if self.series:
            return pandas.Series(own[0], index=index)
        if len(own) == 1 and own[0].ndim == 2:
            return pandas.DataFrame(own[0], index=index, columns=self.columns)
        named = dict(zip(self.columns or (), own, strict=True))
        return pandas.DataFrame(named, index=index)


def tables_of(empty: Tree, names: Sequence[Any] | None) -> Tree:
    """How outputs make tables: a tree of lists of one `Table`.

    A dict of outputs with one number for each row is one table with these columns. Else
    each output is a table of its own: a series if it has one number for each row.

    Args:
        empty: The outputs of no rows.
        names: For the columns of the only output, if there are as many.

    Raises:
        ModelError: If an output has more than one axis for each row.

    Example:
        >>> zero = np.zeros(0)
        >>> tables_of({"a": zero, "b": zero}, None)
        [Table(leaves=(0, 1), columns=('a', 'b'), series=False)]
    """
    leaves = batching.leaves(empty)
    for leaf in leaves:
        if leaf.ndim > 2:
            raise ModelError(
                f"model gives the shape {leaf.shape[1:]} for each row, which does not "
                "fit into a dask.dataframe; use X.to_dask_array(lengths=True), or give "
                "a postprocess that returns fewer numbers"
            )
    if isinstance(empty, dict) and all(
        isinstance(leaf, np.ndarray) and leaf.ndim == 1 for leaf in empty.values()
    ):
        return [Table(tuple(range(len(leaves))), tuple(empty), series=False)]
    if isinstance(empty, np.ndarray) and empty.ndim == 2 and names is not None:
        fit = len(names) == empty.shape[1]
        return [Table((0,), tuple(names) if fit else None, series=False)]
    made = [[Table((i,), None, leaf.ndim == 1)] for i, leaf in enumerate(leaves)]
    return batching.filled(empty, made)


def lazy_table(
    table: Table,
    parts: Sequence[Delayed],
    empty: Tree,
    frame: Any,
    partitions: Sequence[Delayed],
) -> Any:
    """A dataframe or a series with the index and the divisions of another.

    Args:
        table: What it is of.
        parts: The outputs of each partition, as a list of all.
        empty: The outputs of no rows.
        frame: The other one.
        partitions: Of that.
    """
    import dask.dataframe

    make = delayed(_made, pure=False)
    made = [make(table, *both) for both in zip(parts, partitions, strict=True)]
    return dask.dataframe.from_delayed(
        made,
        meta=table.made(batching.leaves(empty), frame._meta.index),
        divisions=frame.divisions,
        verify_meta=False,
    )


def _made(table: Table, leaves: Sequence[np.ndarray], partition: Any) -> Any:
    return table.made(leaves, partition.index)
