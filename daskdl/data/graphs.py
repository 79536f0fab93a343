"""The tasks of Dask collections, taken apart: for each part those that make it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from dask.optimization import cull

from daskdl.data.part_graph import PartGraph
from daskdl.data.trees import Rows


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
        self.done = {**done, **_futures(graph), **_inside(graph)}
        self._graph = {**graph, **dict.fromkeys(self.done)}

    def part(
        self, keys: Sequence[Any], finish: Callable[[list[Any]], Rows]
    ) -> PartGraph:
        """The tasks of one part, and which results they begin with.

        Args:
            keys: Of what makes the part.
            finish: Makes rows of their values.
        """
        own, _ = cull(self._graph, list(keys))
        needs = tuple(key for key in own if key in self.done)
        graph = {key: own[key] for key in own if key not in self.done}
        return PartGraph(graph, tuple(keys), needs, finish)

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
    done = _futures(collection.__dask_graph__()) | _operands(collection)
    return Tasks(dict(parts[0].__dask_graph__()), done), [part.key for part in parts]


def is_future(value: Any) -> bool:
    """Whether it is a future of a Dask client, without importing distributed."""
    return type(value).__module__ == "distributed.client"


def _futures(graph: Mapping[Any, Any]) -> dict[Any, Any]:
    """Results on a cluster; Dask has them as they are, or wrapped as data."""
    found = {key: getattr(task, "value", task) for key, task in graph.items()}
    return {key: value for key, value in found.items() if is_future(value)}


def _inside(graph: Mapping[Any, Any]) -> dict[Any, Any]:
    """Futures that are arguments of tasks, for which Dask has no key in the graph."""
    found: dict[Any, Any] = {}
    for task in graph.values():
        needed: Iterable[Any] = getattr(task, "dependencies", ())
        if any(key not in graph for key in needed):
            found |= {future.key: future for future in _arguments(task)}
    return found


def _arguments(task: Any) -> Iterator[Any]:
    """Futures among the arguments of a task, and in lists and dicts of them."""
    positional, named = getattr(task, "args", None), getattr(task, "kwargs", None)
    for value in (*(positional or ()), *(named or {}).values()):
        if is_future(value):
            yield value
        elif hasattr(value, "dependencies"):
            yield from _arguments(value)


def _operands(collection: Any) -> dict[Any, Any]:
    """Futures that a ``dask.dataframe`` was made from: its graph has their keys."""
    walk = getattr(getattr(collection, "expr", None), "walk", tuple)
    operands = (operand for node in walk() for operand in node.operands)
    return {future.key: future for future in operands if is_future(future)}


def _together(graphs: Iterable[Any]) -> dict[Any, Any]:
    """One graph of several. Parts of one collection have its layers in common."""
    layers: dict[Any, Mapping[Any, Any]] = {}
    for graph in graphs:
        layers |= getattr(graph, "layers", None) or {id(graph): graph}
    return {key: task for layer in layers.values() for key, task in layer.items()}
