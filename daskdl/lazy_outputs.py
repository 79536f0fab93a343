"""What is asked about a lazy collection: a lazy one of the same kind.

One task for each partition, computed when it is asked for by whoever does that.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from dask.delayed import Delayed, delayed
from distributed import Client

from daskdl.data import batching
from daskdl.data.arrays import is_dask_array
from daskdl.data.batching import Tree
from daskdl.data.collections import Collections, Finish, is_bag
from daskdl.data.futures import new_key
from daskdl.outputs.arrays import lazy_array
from daskdl.outputs.examples import Ask, Examples, Reading
from daskdl.outputs.held import held
from daskdl.outputs.notes import Noted
from daskdl.outputs.tables import Table, lazy_table, tables_of
from daskdl.serialization import Packed


class LazyParts(NamedTuple):
    """What comes out, partition by partition.

    Attributes:
        kind: What they are put together to: ``"array"``, ``"table"``, ``"bag"`` or
            ``"list"``.
        values: Of arrays and tables Delayed lists of all outputs; of bags and lists
            Delayed outputs of the examples.
    """

    kind: Literal["array", "table", "bag", "list"]
    values: list[Delayed]


def lazy_outputs(
    X: Any,
    source: Collections,
    ask: Ask,
    empty: Tree,
    client: Client | Literal[False],
    y: Any = None,
    names: Sequence[Any] | None = None,
) -> Any:
    """Make the outputs of a collection.

    Args:
        X: The collection, a tree of ``dask.array`` and ``dask.dataframe``, a bag, or a
            list of Delayed objects and futures.
        source: The same, as it is cut; of bags and lists `Examples`.
        ask: What comes out for rows, a row for each; travels once to each worker.
        empty: The outputs of no rows.
        client: Its cluster holds what is asked as long as the result lives, wherever
            that is; False: it goes with the tasks.
        y: Labels, if they are collections of their own; in `source`, too.
        names: For the columns of a single table, if there are as many.

    Returns:
        For a bag a bag of the outputs of each example, or of pairs (key, output); for a
        list one of Delayed objects; else by the kind of the first collection, a
        ``dask.array`` or a ``dask.dataframe`` with its index, in a tree if there are
        several outputs.

    Raises:
        ModelError: If outputs do not fit into a ``dask.dataframe``.
    """
    kind, values = lazy_parts(X, source, ask, client, y)
    if kind == "list":
        return values
    if kind == "bag":
        from dask.bag import from_delayed

        return from_delayed(values)
    first = batching.leaves(X)[0]
    if kind == "array":
        rows = first.chunks[0]
        leaves = enumerate(batching.leaves(empty))
        return batching.filled(
            empty, [lazy_array(values, i, x, rows) for i, x in leaves]
        )
    partitions = first.to_delayed()

    def frame(boxed: list[Table]) -> Any:
        return lazy_table(boxed[0], values, empty, first, partitions)

    return batching.mapped(frame, tables_of(empty, names))


def lazy_parts(
    X: Any,
    source: Collections,
    ask: Ask,
    client: Client | Literal[False],
    y: Any = None,
) -> LazyParts:
    """The outputs of a collection in parts, see `lazy_outputs`."""
    shared, name = held(Packed(ask, "model"), client), new_key("predict")
    values = zip(*_partitions(X, y), strict=True)
    if isinstance(source, Examples):
        answer = delayed(answers_of, pure=False)
        made = [
            answer(shared, source.reading, part, value, dask_key_name=(name, part))
            for part, (value,) in enumerate(values)
        ]
        return LazyParts("bag" if is_bag(X) else "list", made)
    task = delayed(outputs_of, pure=False)
    made = [
        task(shared, source.finish, part, *own, dask_key_name=(name, part))
        for part, own in enumerate(values)
    ]
    return LazyParts("array" if is_dask_array(batching.leaves(X)[0]) else "table", made)


def outputs_of(
    ask: Packed[Ask], finish: Finish, part: int, *values: Any
) -> list[np.ndarray]:
    """The outputs of one partition, leaf by leaf; the task behind it."""
    with Noted(f"in part {part}"):
        rows = finish(list(values), part)
        return batching.leaves(ask.shared()(iter([rows])))


def answers_of(ask: Packed[Ask], reading: Reading, part: int, value: Any) -> Any:
    """The outputs of a partition of a bag, or of one of a list."""
    with Noted(f"in part {part}"):
        return reading.answers(ask.shared(), value, part)


def _partitions(X: Any, y: Any) -> list[Sequence[Any]]:
    """Of each collection its partitions, Delayed or futures."""
    if isinstance(X, list):
        return [X]
    if is_bag(X):
        return [X.to_delayed()]
    leaves = list(batching.named_both((X, y)).values())
    first = leaves[0]
    if is_dask_array(first) and not math.isnan(first.shape[0]):
        rows = {0: first.chunks[0]}
        leaves = [own.rechunk(rows) if is_dask_array(own) else own for own in leaves]
    return [list(np.ravel(own.to_delayed())) for own in leaves]
