"""What a model says to a lazy collection: a lazy one of the same kind.

One task for each partition, computed when it is asked for by whoever does that.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import dask.array
import numpy as np
from dask.delayed import Delayed, delayed
from dask.highlevelgraph import HighLevelGraph
from distributed import Client

from daskdl.data import trees
from daskdl.data.arrays import is_dask_array
from daskdl.data.collections import Collections, Finish, is_bag
from daskdl.data.futures import new_key, workers_of
from daskdl.data.scattering import scatter
from daskdl.data.trees import Rows, Tree
from daskdl.errors import ModelError
from daskdl.packed import Packed
from daskdl.timeouts import Timeouts

Ask = Callable[[Iterator[Rows]], Tree]  # of parts; the outputs of all their rows


def lazy_outputs(
    X: Any,
    source: Collections,
    ask: Ask,
    empty: Tree,
    client: Client | Literal[False],
) -> Any:
    """Make the outputs of a collection.

    Args:
        X: The collection, a tree of ``dask.array`` and ``dask.dataframe``, a bag, or a
            list of Delayed objects and futures.
        source: The same, as it is cut.
        ask: What the model says; travels once to each worker.
        empty: The outputs of no rows.
        client: Its cluster holds the model as long as the result lives; False: it goes
            with the tasks.

    Returns:
        For a bag a bag of the outputs of each example; for a list one of Delayed trees
        of arrays; else by the kind of the first collection, a ``dask.array`` or a
        ``dask.dataframe`` with its index, in a tree if the model gives such.

    Raises:
        ModelError: If outputs do not fit into a ``dask.dataframe``.
    """
    held: Any = Packed(ask, "model")
    if client is not False:
        held = _held(held, client)
    task, name = delayed(outputs_of, pure=False), new_key("predict")
    values = [list(part) for part in zip(*_partitions(X), strict=True)]
    parts = [
        task(held, source.finish, part, *own, dask_key_name=f"{name}-{part}")
        for part, own in enumerate(values)
    ]
    if isinstance(X, list):
        return [delayed(_tree, pure=False)(part, _shape(empty)) for part in parts]
    if is_bag(X):
        from dask.bag import from_delayed

        split = delayed(_examples, pure=False)
        return from_delayed([split(part, _shape(empty)) for part in parts])
    first = trees.leaves(X)[0]
    leaves = enumerate(trees.leaves(empty))
    if is_dask_array(first):
        rows = first.chunks[0]
        return trees.filled(empty, [_array(parts, i, x, rows) for i, x in leaves])
    tables = first.to_delayed()
    made = [_table(parts, i, x, tables, first) for i, x in leaves]
    return trees.filled(empty, made)


def _held(model: Packed[Ask], client: Client) -> Any:
    """A future of the model, which all workers have."""
    name, bound = new_key("model"), Timeouts.from_config().bound("data")
    what = f"the model ({model.payload.nbytes} bytes)"
    return scatter(client, {name: model}, workers_of(client), bound, what)[name]


def outputs_of(
    ask: Packed[Ask], finish: Finish, part: int, *values: Any
) -> list[np.ndarray]:
    """The outputs of one partition, leaf by leaf; the task behind it."""
    rows = finish(list(values), part)
    return trees.leaves(ask.shared()(iter([rows])))


def _partitions(X: Any) -> list[Sequence[Any]]:
    """Of each collection its partitions, Delayed or futures."""
    if isinstance(X, list):
        return [X]
    leaves = [X] if is_bag(X) else trees.leaves(X)
    first = leaves[0]
    if is_dask_array(first) and not math.isnan(first.shape[0]):
        rows = {0: first.chunks[0]}
        leaves = [own.rechunk(rows) if is_dask_array(own) else own for own in leaves]
    return [list(np.ravel(own.to_delayed())) for own in leaves]


def _array(
    parts: Sequence[Delayed], number: int, empty: np.ndarray, rows: Sequence[float]
) -> Any:
    """One array; an empty block stays one, which concatenate drops."""
    name = new_key("outputs")
    inner = (0,) * (empty.ndim - 1)
    take = delayed(list.__getitem__, pure=False)
    taken = [
        take(part, number, dask_key_name=f"{name}-{i}") for i, part in enumerate(parts)
    ]
    layer: dict[Any, Any] = {
        (name, i, *inner): part.key for i, part in enumerate(taken)
    }
    return dask.array.Array(
        HighLevelGraph.from_collections(name, layer, dependencies=taken),
        name,
        chunks=(tuple(rows), *((size,) for size in empty.shape[1:])),
        meta=empty,
    )


def _table(
    parts: Sequence[Delayed],
    number: int,
    empty: np.ndarray,
    tables: Sequence[Delayed],
    frame: Any,
) -> Any:
    """A dataframe or, of one number for each row, a series, with the same index."""
    import dask.dataframe

    if empty.ndim > 2:
        raise ModelError(
            f"model gives the shape {empty.shape[1:]} for each row, which does not fit "
            "into a dask.dataframe; use X.to_dask_array(lengths=True)"
        )
    meta = _indexed([empty], 0, frame._meta)
    make = delayed(_indexed, pure=False)
    made = [make(part, number, own) for part, own in zip(parts, tables, strict=True)]
    return dask.dataframe.from_delayed(
        made, meta=meta, divisions=frame.divisions, verify_meta=False
    )


def _indexed(leaves: list[np.ndarray], number: int, frame: Any) -> Any:
    import pandas

    own = leaves[number]
    kind = pandas.Series if own.ndim == 1 else pandas.DataFrame
    return kind(own, index=frame.index)


def _shape(empty: Tree) -> list[Tree]:
    """The structure of the outputs, in a list so that Dask takes it as it is."""
    return [trees.filled(empty, range(len(trees.leaves(empty))))]


def _tree(leaves: list[np.ndarray], shape: list[Tree]) -> Tree:
    return trees.mapped(lambda number: leaves[number], shape[0])


def _examples(leaves: list[np.ndarray], shape: list[Tree]) -> list[Tree]:
    outputs = _tree(leaves, shape)
    return [trees.rows(outputs, row) for row in range(trees.length(outputs))]
