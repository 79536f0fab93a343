"""The tasks of Dask collections, taken apart: for each part those that make it.

Parts that Dask's tasks make: what all kinds of collections have in common.

Lazy or persisted, or lazy on top of what is persisted.

``dask.array`` and ``dask.dataframe`` as inputs and labels, cut alike.

``dask.bag`` of examples, and lists of Delayed objects and futures of parts.
"""

import copy
import functools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, Self

import numpy as np
from dask._task_spec import GraphNode, Task, TaskRef
from dask.delayed import Delayed
from dask.optimization import cull
from torch import Tensor
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Rows, Tree
from daskdl.data.source import Facts, Joined, Member, PartGraph, Source
from daskdl.data.tables import (
    as_numpy,
    check_array,
    check_columns,
    check_dtype,
    check_kind,
    check_structure,
    columns_of,
    is_dask_array,
    is_frame,
)
from daskdl.errors import DataError


class Tasks:
    """What there is to compute.

    Args:
        graph: Tasks by key; futures among them are results.
        done: Futures of Dask's by key: results that are on the cluster, or will be.

    Attributes:
        done: Likewise; as long as this is there, so are they.
    """

    done: Mapping[Any, Any]

    def __init__(self, graph: Mapping[Any, Any], done: Mapping[Any, Any]) -> None:
        self.done = {**done, **_futures(graph)}
        self._graph = {**graph, **dict.fromkeys(self.done)}

    def part(
        self, keys: Sequence[Any], finish: Callable[[list[Any]], Rows], name: str = ""
    ) -> PartGraph:
        """The tasks of one part, and which results they begin with.

        Args:
            keys: Of what makes the part.
            finish: Makes rows of their values.
            name: Of the part, for messages.
        """
        own, _ = cull(self._graph, [key for key in keys if key in self._graph])
        done = [key for key in own if key in self.done]
        graph = {
            key: _without_futures(own[key], done) for key in own if key not in self.done
        }
        asked = {key for task in graph.values() for key in _dependencies(task)}
        # Of what is persisted, `to_delayed` leaves nothing but its key.
        elsewhere = sorted((asked | set(keys)) - own.keys(), key=str)
        needs = (*done, *elsewhere)
        return PartGraph(graph, tuple(keys), needs, finish, name)

    def result(self, key: Any) -> Any:
        """What is on the cluster under this key, fetched to this process.

        Raises:
            DataError: If only the cluster knows it.
        """
        if key not in self.done:
            raise DataError(
                f"{key} is a result on a cluster and not in the graph; train there, "
                "with client=, or use to_delayed(optimize_graph=False)"
            )
        return self.done[key].result()

    def __or__(self, other: "Tasks") -> "Tasks":
        """All tasks of both."""
        return Tasks({**self._graph, **other._graph}, {**self.done, **other.done})


def tasks_of(collection: Any) -> tuple[Tasks, list[Any]]:
    """The tasks of a collection, optimised, and the key of each of its partitions.

    Args:
        collection: A ``dask.array`` with one block for each row of blocks, a
            ``dask.dataframe``, a ``dask.bag``, or a list of Delayed objects and
            futures.
    """
    if isinstance(collection, list):
        graph = _together(p.__dask_graph__() for p in collection if not is_future(p))
        done = {part.key: part for part in collection if is_future(part)}
        return Tasks(graph, done), [part.key for part in collection]
    parts = list(np.ravel(collection.to_delayed()))
    # What is persisted is gone from the optimised graph.
    done = _futures(collection.__dask_graph__())
    return Tasks(dict(parts[0].__dask_graph__()), done), [part.key for part in parts]


def _together(graphs: Iterable[Any]) -> dict[Any, Any]:
    """One graph of several. Parts of one collection have its layers in common."""
    layers: dict[Any, Mapping[Any, Any]] = {}
    for graph in graphs:
        layers |= getattr(graph, "layers", None) or {id(graph): graph}
    return {key: task for layer in layers.values() for key, task in layer.items()}


def _dependencies(task: Any) -> frozenset[Any]:
    return task.dependencies if isinstance(task, GraphNode) else frozenset()


def is_future(value: Any) -> bool:
    """Whether it is a future of a Dask client, without importing distributed."""
    return type(value).__module__ == "distributed.client"


def _futures(graph: Mapping[Any, Any]) -> dict[Any, Any]:
    """Results on a cluster: tasks themselves, wrapped as data, or their arguments."""
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
    elif isinstance(task, list | tuple | set | frozenset):
        for value in task:
            yield from _inside(value)
    elif isinstance(task, dict):
        yield from _inside(list(task.values()))


def _without_futures(task: Any, keys: Iterable[Any]) -> Any:
    """A task that names results by their keys alone."""
    if not isinstance(task, GraphNode):
        return task
    return task.substitute({key: TaskRef(key) for key in keys})


def is_dask_frame(value: Any) -> bool:
    """Whether it is a ``dask.dataframe`` or a column of one; Dask is not imported."""
    module = sys.modules.get("dask.dataframe")
    return module is not None and isinstance(value, module.DataFrame | module.Series)


def is_bag(value: Any) -> bool:
    """Whether it is a ``dask.bag``; Dask is not imported."""
    module = sys.modules.get("dask.bag")
    return module is not None and isinstance(value, module.Bag)


def is_lazy_list(value: Any) -> bool:
    """Whether it is a list of Delayed objects and futures."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(part, Delayed) or is_future(part) for part in value)
    )


def is_lazy(value: Any) -> bool:
    """Whether what a model makes of it is lazy: it is a collection, or of such."""
    if is_bag(value) or is_lazy_list(value):
        return True
    leaves = batching.leaves(value) if isinstance(value, tuple | dict) else [value]
    return any(is_dask_array(leaf) or is_dask_frame(leaf) for leaf in leaves)


class Finish(ABC):
    """Makes rows of the values that tasks have computed for a part; picklable."""

    @abstractmethod
    def __call__(self, values: list[Any], part: int) -> Rows:
        """Make rows, and refuse what cannot be used.

        Args:
            values: Of the keys of the part.
            part: Its number, for messages.
        """


class Collections(Source):
    """Parts that tasks make.

    Args:
        tasks: Of all parts.
        keys: For each part, of the values that it is made of.
        finish: Makes rows of these.
        lengths: Rows of each part, if known.
        first: Rows like all others, if known.

    Attributes:
        finish: Likewise.
    """

    finish: Finish
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
        self._tasks = tasks
        self._keys = keys
        self.finish = finish
        self._graphs: dict[int, PartGraph] = {}
        self._seen: Sequence[int] | None = None  # rows of each key, when looked at
        self._groups: Sequence[Sequence[int]] = [[part] for part in range(len(keys))]

    @override
    def packed(self, part: int) -> PartGraph:
        if part not in self._graphs:
            members = [self._member(own) for own in self._groups[part]]
            keys = [key for own in self._groups[part] for key in self._keys[own]]
            finish: Any = Joined(members) if len(members) > 1 else members[0].finish
            self._graphs[part] = self._tasks.part(keys, finish, self.name(part))
        return self._graphs[part]

    def _member(self, part: int) -> Member:
        finish: Any = functools.partial(self.finish, part=part)
        if self._seen is not None:
            finish = _AsSeen(finish, part, self._seen[part])
        return Member(f"part {part}", len(self._keys[part]), finish)

    @override
    def together(self, groups: Sequence[Sequence[int]]) -> Self:
        assert self.lengths is not None, "small parts are known ones"
        fewer = copy.copy(self)
        fewer.parts = len(groups)
        fewer.lengths = [sum(self.lengths[own] for own in group) for group in groups]
        fewer._groups, fewer._graphs = groups, {}
        return fewer

    @override
    def separate(self, part: int) -> Sequence[tuple[str, Callable[[], Rows]]]:
        graph = self.packed(part)
        return graph.separate({key: self._tasks.result(key) for key in graph.needs})

    @override
    def name(self, part: int) -> str:
        first, *others = self._groups[part]
        return f"parts {first} to {others[-1]}" if others else f"part {first}"

    @override
    def needs(self, part: int) -> tuple[Any, ...]:
        return self.packed(part).needs

    @override
    def load(self, part: int) -> Rows:
        graph = self.packed(part)
        return graph.rows({key: self._tasks.result(key) for key in graph.needs})

    @override
    def known(self, facts: Sequence[Facts]) -> Self:
        whole = copy.copy(self)
        whole.lengths = whole._seen = [fact.rows for fact in facts]
        whole._graphs = {}
        if self.first is None:  # labels of one part may be floats, if some are missing
            whole.first = next((fact.first for fact in facts if fact.rows), None)
        return whole


@dataclass(frozen=True)
class _AsSeen:
    """Refuses a part that is not the same each time it is computed.

    Attributes:
        finish: Makes rows of values.
        part: Its number.
        rows: How many it had when it was looked at.
    """

    finish: Callable[[list[Any]], Rows]
    part: int
    rows: int

    def __call__(self, values: list[Any]) -> Rows:
        made = self.finish(values)
        if batching.length(made[0]) != self.rows:
            raise DataError(
                f"part {self.part} has {batching.length(made[0])} rows, and had "
                f"{self.rows} when it was computed before; it must be the same each "
                "time: persist() it, or export it"
            )
        return made


def plain(
    value: Any, name: str, classes: Sequence[str] | None = None, label: bool = False
) -> np.ndarray:
    """One array of a part, as numpy, whatever tasks made of it.

    Args:
        value: An array, a tensor, or a table.
        name: For messages.
        classes: Of a table of labels: names that become their numbers.
        label: Whether it holds labels, of which some may be missing.

    Raises:
        DataError: If it is none of these, or cannot be used.
    """
    if is_frame(value):
        return columns_of(value, name, classes, label)
    check_kind(value, name)
    if value.ndim == 0:
        raise DataError(
            f"{name} must have examples along its first axis, got one value"
        )
    check_dtype(value, name)
    return as_numpy(value)


def checked(rows: Rows, part: int, promised: int | None) -> Rows:
    """Refuse rows that are not as many as they should be.

    Args:
        rows: Of a part.
        part: Its number, for messages.
        promised: How many there should be, or None.
    """
    lengths = {name: len(leaf) for name, leaf in batching.named_both(rows).items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{count} of {name}" for name, count in lengths.items())
        raise DataError(
            f"part {part} has rows that do not go together: {shown}; partition X and y "
            "alike"
        )
    found = batching.length(rows[0])
    if promised is not None and found != promised:
        raise DataError(
            f"part {part} has {found} rows, but the chunks promise "
            f"{promised}; call compute_chunk_sizes()"
        )
    return rows


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
    first = None
    if all(row is not None for row in zeros):
        first = batching.filled_both((x, y), zeros)
    source = Collections(
        reduce(or_, (tasks for tasks, _ in taken)),
        list(zip(*(keys for _, keys in taken), strict=True)),
        _Columns(*batching.filled_both((x, y), places), lengths),
        lengths,
        first,
    )
    source.classes = classes.get("y")
    return source


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


@dataclass(frozen=True)
class _Pair(Finish):
    """The one value is (x, y), or x alone.

    Attributes:
        examples: Of a bag: the value is a list of such.
    """

    examples: bool

    @override
    def __call__(self, values: list[Any], part: int) -> Rows:
        (value,) = values
        if self.examples:
            return checked(stacked(list(value), f"part {part}"), part, None)
        rows = batching.of_both(lambda tree: tree, pair(value))
        x, y = rows
        labels = None if y is None else _plain(y, "y", f"part {part}")
        return checked((_plain(x, "X", f"part {part}"), labels), part, None)


def pairs(parts: Any) -> Collections:
    """Take a bag, or a list of Delayed objects and futures, for one data set.

    Args:
        parts: Of pairs (x, y), or of x alone; in a bag of single examples, in a list
            of several rows each.
    """
    tasks, keys = tasks_of(parts)
    return Collections(tasks, [(key,) for key in keys], _Pair(is_bag(parts)))


def pair(value: Any) -> tuple[Tree, Tree]:
    """An example or a part as x and y: a tuple of two is both, all else is x alone.

    Example:
        >>> pair((1, 2)), pair([1, 2])
        ((1, 2), ([1, 2], None))
    """
    if isinstance(value, tuple) and len(value) == 2 and not hasattr(value, "_fields"):
        return value
    return value, None


def stacked(examples: Sequence[Any], name: str) -> Rows:
    """Put single examples into one array for each place in their trees.

    Args:
        examples: Pairs (x, y), or x alone, of numbers, arrays and tensors.
        name: Of the part, for messages.

    Raises:
        DataError: If they are not of one shape and structure.
    """
    if not examples:
        return np.zeros(0), None  # as much as can be known of none
    xs, ys = zip(*(pair(example) for example in examples), strict=True)
    unlabelled = sum(y is None for y in ys)
    if 0 < unlabelled < len(ys):
        raise DataError(
            f"the examples of {name} must all be pairs (x, y), or all x alone, got "
            f"{unlabelled} of {len(ys)} without y"
        )
    return _stacked(xs, "X", name), None if unlabelled else _stacked(ys, "y", name)


def _stacked(examples: Sequence[Tree], argument: str, part: str) -> Tree:
    def stack(*leaves: Any) -> np.ndarray:
        arrays = [
            as_numpy(x) if isinstance(x, Tensor) else np.asarray(x) for x in leaves
        ]
        return np.stack(arrays)

    try:
        together = batching.mapped(stack, *examples)
    except ValueError as error:
        raise DataError(
            f"the examples of {part} must all have one shape for {argument}: {error}"
        ) from error
    return _plain(together, argument, part)


def _plain(tree: Tree, argument: str, part: str) -> Tree:
    label = argument == "y"
    named = batching.named(tree, argument)
    made = [plain(leaf, f"{name} of {part}", label=label) for name, leaf in named]
    return batching.filled(tree, made)
