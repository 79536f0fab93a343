"""Dask collections as sources: arrays, dataframes, bags, lists of Delayed and futures.

A part is a graph of tasks, which may depend on results held by the cluster.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from dask._task_spec import GraphNode, Task, TaskRef
from dask.delayed import Delayed, delayed
from torch import Tensor
from typing_extensions import override

from daskdl.data import batching, tables
from daskdl.data.batching import Rows, Tree
from daskdl.data.source import Facts, Member, PartGraph, Source, culled
from daskdl.data.tables import as_numpy, is_dask_array, is_frame
from daskdl.errors import DataError

Finish = Callable[..., Rows]  # takes the values of a part, and its number `part`


# ---- kinds, without importing a collection


def is_future(value: Any) -> bool:
    """Whether a value is a future of a Dask client."""
    return type(value).__module__ == "distributed.client"


def is_dask_frame(value: Any) -> bool:
    """Whether a value is a ``dask.dataframe``, or a column of one."""
    module = sys.modules.get("dask.dataframe")
    return module is not None and isinstance(value, module.DataFrame | module.Series)


def is_bag(value: Any) -> bool:
    """Whether a value is a ``dask.bag``."""
    module = sys.modules.get("dask.bag")
    return module is not None and isinstance(value, module.Bag)


def is_lazy_list(value: Any) -> bool:
    """Whether a value is a list of Delayed objects and futures."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(part, Delayed) or is_future(part) for part in value)
    )


def is_lazy(value: Any) -> bool:
    """Whether a value is a collection, or a tree with one: outputs are then lazy."""
    if is_bag(value) or is_lazy_list(value):
        return True
    return any(is_dask_array(x) or is_dask_frame(x) for x in batching.leaves(value))


# ---- tasks


class Tasks:
    """The graph of a collection, and the results on a cluster that it depends on.

    Attributes:
        done: All futures by key, which keep the results alive.
    """

    def __init__(self, graph: Mapping[Any, Any], done: Mapping[Any, Any]) -> None:
        self.done = {**done, **_futures(graph)}
        self._graph = {**graph, **dict.fromkeys(self.done)}

    def graph_of(self, member: Member) -> PartGraph:
        """Return the tasks of one part, and the results that they depend on."""
        keys = member.keys
        own = culled(self._graph, keys)
        done = {key: TaskRef(key) for key in own if key in self.done}
        # Tasks name results by their keys alone.
        graph = {
            key: task.substitute(done) if isinstance(task, GraphNode) else task
            for key, task in own.items()
            if key not in done
        }
        asked = {
            k for task in graph.values() for k in getattr(task, "dependencies", ())
        }
        # `to_delayed` keeps only the keys of persisted results.
        elsewhere = sorted((asked | set(keys)) - own.keys(), key=str)
        return PartGraph(member.name, graph, (*done, *elsewhere), (member,))

    def result(self, key: Any) -> Any:
        """Fetch a result to this process."""
        if key not in self.done:
            raise DataError(
                f"{key} is a result on a cluster and not in the graph; train there, "
                "with client=, or use to_delayed(optimize_graph=False)"
            )
        return self.done[key].result()

    def __or__(self, other: "Tasks") -> "Tasks":
        return Tasks({**self._graph, **other._graph}, {**self.done, **other.done})


def tasks_of(collection: Any) -> tuple[Tasks, list[Any]]:
    """Return the optimized tasks of a collection, and the key of each partition.

    A ``dask.array`` has one block per row of blocks.
    """
    if isinstance(collection, list):
        layers: dict[Any, Mapping[Any, Any]] = {}  # that Delayed objects may share
        for part in collection:
            if not is_future(part):
                graph = part.__dask_graph__()
                layers |= getattr(graph, "layers", None) or {id(graph): graph}
        tasks = {key: task for layer in layers.values() for key, task in layer.items()}
        done = {part.key: part for part in collection if is_future(part)}
        return Tasks(tasks, done), [part.key for part in collection]
    parts = list(np.ravel(collection.to_delayed()))
    # The optimized graph lacks the futures of persisted results.
    done = _futures(collection.__dask_graph__())
    return Tasks(dict(parts[0].__dask_graph__()), done), [part.key for part in parts]


def _futures(graph: Mapping[Any, Any]) -> dict[Any, Any]:
    """Futures by key: tasks themselves, wrapped as data, or arguments of tasks."""
    found = {}
    for key, task in graph.items():
        value = getattr(task, "value", task)
        if is_future(value):
            found[key] = value
        elif any(need not in graph for need in getattr(task, "dependencies", ())):
            found |= {future.key: future for future in _inside(task)}
    return found


def _inside(task: Any) -> Iterator[Any]:
    """Futures among the arguments of a task, at any depth."""
    if is_future(task):
        yield task
    elif isinstance(task, Task):
        yield from _inside([*task.args, *task.kwargs.values()])
    elif isinstance(task, dict):
        yield from _inside(list(task.values()))
    elif isinstance(task, list | tuple | set | frozenset):
        for value in task:
            yield from _inside(value)


# ---- the source


class Collections(Source):
    """Parts computed by tasks: `finish` makes rows from the values of a part's keys."""

    apart = True
    given = True

    def __init__(
        self,
        tasks: Tasks,
        keys: Sequence[tuple[Any, ...]],
        finish: Finish,
        lengths: Sequence[int] | None = None,
        first: Rows | None = None,
    ) -> None:
        self.parts = len(keys)
        self.lengths = lengths
        self.first = first
        self.finish = finish
        self._tasks = tasks
        self._keys = keys
        self._graphs: dict[int, PartGraph] = {}
        self._counted: Sequence[int | None] = [None] * len(keys)

    @override
    def packed(self, part: int) -> PartGraph:
        if part not in self._graphs:
            finish = functools.partial(self.finish, part=part)
            name, rows = self.name(part), self._counted[part]
            member = Member(name, self._keys[part], finish, rows)
            self._graphs[part] = self._tasks.graph_of(member)
        return self._graphs[part]

    @override
    def needs(self, part: int) -> tuple[Any, ...]:
        return self.packed(part).needs

    @override
    def load(self, part: int) -> Rows:
        graph = self.packed(part)
        return graph.rows({key: self._tasks.result(key) for key in graph.needs})

    @override
    def known(self, facts: Sequence[Facts]) -> Self:
        whole = super().known(facts)
        whole._counted = [fact.rows for fact in facts]
        whole._graphs = {}
        return whole


def _as_array(
    value: Any, name: str, classes: Sequence[str] | None = None, label: bool = False
) -> np.ndarray:
    if is_frame(value):
        return tables.columns_of(value, name, classes, label)
    tables.check_values(value, name)
    return as_numpy(value)


def _same_length(rows: Rows, part: int) -> Rows:
    lengths = {name: len(leaf) for name, leaf in batching.named_both(rows).items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{count} of {name}" for name, count in lengths.items())
        raise DataError(
            f"part {part} has rows that do not go together: {shown}; partition X and y "
            "alike"
        )
    return rows


# ---- arrays and dataframes


@dataclass(frozen=True)
class _Columns:
    """Makes rows from values, each of which is one array or table."""

    names: Rows  # trees of the names of arrays
    classes: Mapping[str, Sequence[str] | None]  # names of labels, for each array
    lengths: Sequence[int] | None  # according to the chunks

    def __call__(self, values: list[Any], part: int) -> Rows:
        arrays = [
            _as_array(value, f"{name} of part {part}", classes, name.startswith("y"))
            for value, (name, classes) in zip(values, self.classes.items(), strict=True)
        ]
        rows: Rows = batching.filled(self.names, arrays)
        found = batching.length(_same_length(rows, part))
        if self.lengths is not None and found != self.lengths[part]:
            raise DataError(
                f"part {part} has {found} rows, but the chunks promise "
                f"{self.lengths[part]}; call compute_chunk_sizes()"
            )
        return rows


def columns(x: Tree, y: Tree) -> Collections:
    """Make a source of trees of ``dask.array`` and ``dask.dataframe``."""
    tables.check_structure(x, y)
    named = batching.named_both((x, y))
    classes: dict[str, tuple[str, ...] | None] = {}
    zeros: list[np.ndarray | None] = []  # one row each, of the right shape and dtype
    for name, value in named.items():
        classes[name], row = _checked(value, name)
        zeros.append(row)
    aligned, lengths = _aligned(named)
    tasks, keys = zip(*map(tasks_of, aligned), strict=True)
    first = None
    if all(row is not None for row in zeros):
        first = batching.filled((x, y), zeros)
    source = Collections(
        functools.reduce(Tasks.__or__, tasks),
        list(zip(*keys, strict=True)),
        _Columns(batching.filled((x, y), named), classes, lengths),
        lengths,
        first,
    )
    source.classes = classes.get("y")
    return source


def _checked(value: Any, name: str) -> tuple[tuple[str, ...] | None, np.ndarray | None]:
    """Names of labels, or None; and a row of zeros, or None if its shape is unknown."""
    if is_dask_frame(value):
        classes = tables.check_columns(value._meta, name, name.startswith("y"))
        meta = tables.columns_of(value._meta, name, classes)
        return classes, np.zeros((1, *meta.shape[1:]), meta.dtype)
    if not is_dask_array(value):
        raise DataError(
            f"{name} is in memory and the other data are Dask's; use "
            f"dask.array.from_array({name}, chunks=...) with the chunks of the others, "
            "or compute() the others"
        )
    tables.check_array(value, name)
    if any(math.isnan(size) for size in value.shape[1:]):
        return None, None
    return None, np.zeros((1, *map(int, value.shape[1:])), value.dtype)


def _aligned(named: Mapping[str, Any]) -> tuple[Sequence[Any], tuple[int, ...] | None]:
    """Collections with equal partitions, and the lengths of these, or None."""
    chunks = {
        name: tuple(map(int, value.chunks[0]))
        for name, value in named.items()
        if is_dask_array(value) and not any(map(math.isnan, value.chunks[0]))
    }
    tables.check_lengths({name: sum(rows) for name, rows in chunks.items()})
    lengths = next(iter(chunks.values()), None)
    if len(chunks) == len(named):
        return [value.rechunk({0: lengths}) for value in named.values()], lengths
    counts = {
        name: int(value.numblocks[0] if is_dask_array(value) else value.npartitions)
        for name, value in named.items()
    }
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{count} of {name}" for name, count in counts.items())
        raise DataError(
            "Dask's data whose lengths are not known must be partitioned alike, got "
            f"{shown} partitions; take X and y from one collection, or repartition them"
        )
    return list(named.values()), lengths


# ---- bags and lists


@dataclass(frozen=True)
class _Pairs:
    """Makes rows from a value that is (x, y), or x alone."""

    examples: bool  # whether values are lists of examples, as in a bag

    def __call__(self, values: list[Any], part: int) -> Rows:
        (value,) = values
        if self.examples:
            return _same_length(stacked(list(value), f"part {part}"), part)
        x, y = pair(value)
        labels = None if y is None else _arrays(y, "y", f"part {part}")
        return _same_length((_arrays(x, "X", f"part {part}"), labels), part)


def pairs(parts: Any) -> Collections:
    """Make a source of a bag of examples, or of a list of Delayed and futures of rows.

    Examples and rows are pairs (x, y), or x alone.
    """
    tasks, keys = tasks_of(parts)
    return Collections(tasks, [(key,) for key in keys], _Pairs(is_bag(parts)))


def paired(X: Any, y: Any) -> Any:
    """Make one collection of pairs of two bags, or lists of Delayed and futures."""
    if is_bag(X) and is_bag(y):
        parts = X.npartitions, y.npartitions
    elif is_lazy_list(X) and is_lazy_list(y):
        parts = len(X), len(y)
    else:
        kind = "bag" if is_bag(X) else "list of Delayed objects and futures"
        raise DataError(
            f"y must be a {kind}, partitioned as X is, got a {type(y).__name__}; or "
            "let X have pairs (x, y), and leave y out"
        )
    if parts[0] != parts[1]:
        raise DataError(
            f"X and y must have the same partitions, got {parts[0]} and {parts[1]}; "
            "take them from one collection, or repartition them"
        )
    if is_bag(X):
        return X.map_partitions(_zipped, y)
    return [delayed(_both, pure=False)(*one) for one in zip(X, y, strict=True)]


def _both(x: Any, y: Any) -> tuple[Any, Any]:
    return x, y


def _zipped(xs: Any, ys: Any) -> list[tuple[Any, Any]]:
    xs, ys = list(xs), list(ys)
    if len(xs) != len(ys):
        raise DataError(
            "X and y must have the same number of examples in each partition, got "
            f"{len(xs)} and {len(ys)}"
        )
    return list(zip(xs, ys, strict=True))


def with_label(X: Any, label: Any) -> Any:
    """Turn a bag of dicts, or Delayed tables and dicts, into pairs (x, y)."""
    if is_bag(X):
        return X.map(tables.split_label, label)
    return [delayed(tables.split_label, pure=False)(part, label) for part in X]


def pair(value: Any) -> tuple[Tree, Tree]:
    """Split a tuple of two into x and y; anything else is x alone.

    Example:
        >>> pair((1, 2)), pair([1, 2])
        ((1, 2), ([1, 2], None))
    """
    if isinstance(value, tuple) and len(value) == 2 and not hasattr(value, "_fields"):
        return value
    return value, None


def stacked(examples: Sequence[Any], name: str) -> Rows:
    """Stack the arrays of single examples, pairs (x, y) or x alone, of a named part."""
    if not examples:
        return np.zeros(0), None
    xs, ys = unzipped(examples, name)
    return _stacked(xs, "X", name), None if ys is None else _stacked(ys, "y", name)


def unzipped(
    examples: Sequence[Any], name: str
) -> tuple[Sequence[Tree], Sequence[Tree] | None]:
    """Return the x and the y of examples, at least one; y may be None for all."""
    xs, ys = zip(*map(pair, examples), strict=True)
    unlabelled = sum(y is None for y in ys)
    if 0 < unlabelled < len(ys):
        raise DataError(
            f"the examples of {name} must all be pairs (x, y), or all x alone, got "
            f"{unlabelled} of {len(ys)} without y"
        )
    return list(xs), None if unlabelled else list(ys)


def _stacked(examples: Sequence[Tree], argument: str, part: str) -> Tree:
    try:
        return _arrays(stack(examples), argument, part)
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"the examples of {part} must all have one shape for {argument}: {error}"
        ) from error


def stack(examples: Sequence[Tree]) -> Tree:
    """Stack the arrays, tensors, numbers and texts of examples.

    Raises:
        ValueError: If their shapes or structures differ, or a value is None.

    Example:
        >>> stack([{"a": 1}, {"a": 2}])
        {'a': array([1, 2])}
    """
    if isinstance(examples[0], int | float | str | list | np.generic):
        return np.asarray(examples)  # faster
    if any(leaf is None for one in examples for leaf in batching.leaves(one)):
        raise ValueError("a value is None")

    def stacked(*leaves: Any) -> np.ndarray:
        return np.stack(
            [as_numpy(x) if isinstance(x, Tensor) else np.asarray(x) for x in leaves]
        )

    return batching.mapped(stacked, *examples)


def _arrays(tree: Tree, argument: str, part: str) -> Tree:
    label = argument == "y"
    named = batching.named(tree, argument)
    made = [_as_array(leaf, f"{name} of {part}", label=label) for name, leaf in named]
    return batching.filled(tree, made)
