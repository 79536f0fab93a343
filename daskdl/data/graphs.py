"""The tasks of Dask collections, taken apart: for each part those that make it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from dask._task_spec import GraphNode, Task, TaskRef
from dask.optimization import cull

from daskdl.data.batching import Rows
from daskdl.data.part_graph import PartGraph
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
