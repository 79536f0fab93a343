"""Dask collections as sources: arrays, dataframes, bags, lists of Delayed and futures.

A part is a graph of tasks, which may depend on results held by the cluster.
"""

import contextlib
import copy
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Self

import dask
import distributed
import numpy as np

# Private in dask 2025.5 to 2026.8: nothing public creates tasks of a graph.
from dask._task_spec import GraphNode, Task, TaskRef
from dask.core import flatten
from dask.delayed import Delayed, delayed
from dask.highlevelgraph import HighLevelGraph
from dask.tokenize import tokenize
from distributed import Client

# Private in distributed 2025.5 to 2026.8: only dask.dataframe has public shuffles.
from distributed.shuffle._core import P2PBarrierTask
from distributed.shuffle._shuffle import DataFrameShuffleSpec
from torch import Tensor
from typing_extensions import override

from daskdl.config import Timeouts
from daskdl.data import batching, tables
from daskdl.data.batching import Rows, Tree, Weighted
from daskdl.data.distribute import check_annotations
from daskdl.data.named_columns import Columns, NamedRows, columns_in, few
from daskdl.data.source import Facts, GraphPart, PartGraph, Source, culled
from daskdl.data.tables import as_numpy, is_dask_array, is_future
from daskdl.errors import DataError

logger = logging.getLogger(__name__)

MAX_WAIT_S = 5.0  # between two checks that workers can run the awaited tasks

Finish = Callable[..., Rows]  # takes the values of a part, and its number `part`


def is_dask_frame(collection: Any) -> bool:
    """Whether a collection is a ``dask.dataframe``, or a column of one."""
    return hasattr(type(collection), "divisions")


def is_partitioned(value: Any) -> bool:
    """Whether a value is a ``dask.array``, or a DataArray of one, or a dataframe."""
    return is_dask_array(tables.plain_array(value)) or is_dask_frame(value)


def _partitions_of(value: Any) -> int:
    return int(value.numblocks[0] if is_dask_array(value) else value.npartitions)


def _blocks_of(array: np.ndarray, lengths: Sequence[int]) -> Any:
    """Return an array in memory as a ``dask.array`` with blocks of these lengths.

    A block is a view of its rows, so only these are sent to a worker.
    """
    import dask.array

    chunks = (tuple(lengths), *array.shape[1:])
    return dask.array.from_array(array, chunks, name=False)


# ---- one graph


class Planned(NamedTuple):
    """The optimized graph of all parts."""

    tasks: Mapping[Any, Any]  # and futures, by key
    keys: Sequence[Any]  # of the parts
    futures: Mapping[Any, Any]  # results on a cluster, which they keep alive, by key


class Partitions:
    """The partitions of several collections, computed from one graph.

    The graph is optimized for all collections together: tasks that they share run once
    for a part, so rows belong together even if a task is random. The parts are the
    partitions that the user sees; Dask alone would fuse small partitions of Parquet
    files, depending on the columns.

    The graph is created when a part is needed, because Dask shuffles dataframes
    differently on a cluster and in a process. A graph that cannot be cut into parts,
    such as that of a peer-to-peer shuffle, is computed on the cluster, which holds the
    results as long as this object exists.

    Args:
        collections: ``dask.array`` and ``dask.dataframe`` with equally many partitions;
            or a single bag, or a single list of Delayed objects and futures.
    """

    def __init__(self, *collections: Any) -> None:
        self.collections = collections
        self.parts = _number_of_partitions(collections[0])
        self._lock = threading.Lock()
        self._planned: Planned | None = None
        self._tasks: Mapping[Any, Any] = {}  # with None for results on a cluster

    def place(self, client: Any) -> None:
        """Create the graph, and compute it on the cluster if it cannot be cut.

        Args:
            client: False: parts are computed in this process.

        Raises:
            DataError: If only a cluster can compute the graph.
        """
        with self._lock:
            planned = self._plan(client)
            barrier = next(filter(_is_barrier, planned.tasks.values()), None)
            if barrier is None:
                return
            if client is False:
                raise DataError(
                    f"the data depend on the peer-to-peer task {barrier.key!r}, which "
                    "only a cluster can compute; pass its client, or persist() the data"
                )
            check_annotations()
            logger.info(
                "the tasks of the data cannot be divided among %s parts: the cluster "
                "computes all parts now and holds them",
                self.parts,
            )
            self._set(_computed(_delayed(planned), client))

    def delayed(self, client: Any) -> list[Any]:
        """Return, for each part, the list of its partitions for a function of Dask's.

        It is a Delayed list, or a list with a Delayed object.
        """
        with self._lock:
            parts = _delayed(self._plan(client))
        return parts if self._several else [[part] for part in parts]

    def graph_of(
        self, part: int, finish: Finish, name: str, rows: int | None
    ) -> PartGraph:
        """Return the tasks of a part, and the keys of the results that they need."""
        if self._planned is None:
            self.place(False)
        planned = self._planned
        assert planned is not None
        key = planned.keys[part]
        needed = culled(self._tasks, [key])
        held = {key: TaskRef(key) for key in needed if key in planned.futures}
        # Tasks name results by their keys alone.
        graph = {
            key: task.substitute(held) if isinstance(task, GraphNode) else task
            for key, task in needed.items()
            if key not in held
        }
        asked = {
            k for task in graph.values() for k in getattr(task, "dependencies", ())
        }
        # `to_delayed` keeps only the keys of persisted results.
        elsewhere = sorted((asked | {key}) - needed.keys(), key=str)
        finish = functools.partial(finish, part=part)
        if self._several:
            finish = functools.partial(_apply_to_list, finish)
        member = GraphPart(name, (key,), finish, rows)
        return PartGraph(name, graph, (*held, *elsewhere), (member,))

    def result(self, key: Any) -> Any:
        """Fetch a result on a cluster to this process."""
        planned = self._planned
        if planned is None or key not in planned.futures:
            raise DataError(
                f"{key} is a result on a cluster and not in the graph; train there, "
                "with client=, or use to_delayed(optimize_graph=False)"
            )
        return planned.futures[key].result()

    @property
    def _several(self) -> bool:
        """Whether the value of a part is a list of partitions."""
        return len(self.collections) > 1

    def _plan(self, client: Any) -> Planned:
        if self._planned is None:
            with _methods_of(client):
                self._set(_planned(self.collections))
        assert self._planned is not None
        return self._planned

    def _set(self, planned: Planned) -> None:
        if len(planned.keys) != self.parts:
            raise DataError(
                f"the data have {self.parts} partitions, of which Dask's optimizer "
                f"makes {len(planned.keys)}; persist() the data"
            )
        self._planned = planned
        self._tasks = {**planned.tasks, **dict.fromkeys(planned.futures)}


def _number_of_partitions(collection: Any) -> int:
    # An array is chunked along its first axis alone.
    listed = isinstance(collection, list)
    return len(collection) if listed else int(collection.npartitions)


def _apply_to_list(finish: Callable[[Any], Rows], values: list[Any]) -> Rows:
    (partitions,) = values
    return finish(partitions)


def _is_barrier(task: Any) -> bool:
    # Dask has no public way to tell that a task belongs to a peer-to-peer shuffle.
    return isinstance(task, P2PBarrierTask)


@contextlib.contextmanager
def _methods_of(client: Any) -> Iterator[None]:
    """Let Dask choose its shuffle method, which is peer-to-peer only on a cluster."""
    if client is not False:
        with client.as_current():
            yield
        return
    setting = "dataframe.shuffle.method"
    with dask.config.set({setting: dask.config.get(setting, None) or "disk"}):
        yield


def _delayed(planned: Planned) -> list[Delayed]:
    layer = f"parts-{tokenize(planned.keys)}"
    graph = HighLevelGraph.from_collections(layer, planned.tasks, dependencies=())
    return [Delayed(key, graph, layer=layer) for key in planned.keys]


def _computed(parts: Sequence[Delayed], client: Any) -> Planned:
    """Compute parts on a cluster, and wait for them."""
    futures = client.compute(parts)
    _wait(futures, client)
    for future in futures:
        if future.status != "finished":
            future.result()  # raises
    held = {future.key: future for future in futures}
    return Planned(held, list(held), held)


def _wait(futures: Sequence[Any], client: Any) -> None:
    """Wait for futures as long as workers can run the tasks that they depend on."""
    bound = Timeouts.from_config().bound("silence")
    keys = [future.key for future in futures]
    halted_since = None
    while True:
        with client.as_current(), contextlib.suppress(TimeoutError):
            distributed.wait(futures, timeout=min(bound.seconds, MAX_WAIT_S))
            return
        halted = client.run_on_scheduler(_halted, keys=keys)
        if not halted:
            halted_since = None
        elif halted_since is None:
            halted_since = time.monotonic()
        elif time.monotonic() - halted_since > bound.seconds:
            raise DataError(
                f"no worker can run {few(halted)}, on which the data depend, for "
                f"{bound}: start workers that the tasks may run on, or compute the "
                "data without resources and workers, as of dask.annotate"
            )


def _halted(dask_scheduler: Any, keys: Sequence[Any]) -> list[str]:
    """Return the tasks without a worker that these tasks depend on, by key."""
    waiting = [dask_scheduler.tasks.get(key) for key in keys]
    seen = set(waiting)
    halted = []
    while waiting:
        task = waiting.pop()
        if task is None or task.state not in ("waiting", "no-worker"):
            continue
        if task.state == "no-worker":
            halted.append(str(task.key))
        waiting.extend(task.dependencies - seen)
        seen |= task.dependencies
    return sorted(halted)


def _planned(collections: Sequence[Any]) -> Planned:
    if len(collections) > 1:
        return _planned_columns(collections)
    (collection,) = collections
    if isinstance(collection, list):
        return _planned_list(collection)
    if is_dask_frame(collection):
        return _planned_frame(collection)
    graph = collection.__dask_graph__()
    keys = list(flatten(collection.__dask_keys__()))
    tasks = dict(collection.__dask_optimize__(graph, keys))
    # The optimized graph lacks the futures of persisted results.
    return Planned(tasks, keys, _futures(graph))


def _planned_list(parts: Sequence[Any]) -> Planned:
    layers: dict[Any, Mapping[Any, Any]] = {}  # that Delayed objects may share
    for part in parts:
        if not is_future(part):
            graph = part.__dask_graph__()
            layers |= getattr(graph, "layers", None) or {id(graph): graph}
    tasks = {key: task for layer in layers.values() for key, task in layer.items()}
    tasks |= {part.key: part for part in parts if is_future(part)}
    keys = [part.key for part in parts]
    return Planned(culled(tasks, keys), keys, _futures(tasks))


def _planned_frame(frame: Any) -> Planned:
    """Optimize a dataframe as Dask does, without fusing its partitions."""
    # The stages of `frame.optimize` without "tune", which fuses small partitions of
    # Parquet files.
    optimized = frame.expr.simplify().lower_completely().simplify().fuse()
    tasks = dict(optimized.__dask_graph__())
    keys = list(optimized.__dask_keys__())
    return Planned(tasks, keys, _futures(frame.__dask_graph__()))


def _planned_columns(collections: Sequence[Any]) -> Planned:
    """Plan several arrays and dataframes; a part is the list of their partitions."""
    frames = [data for data in collections if is_dask_frame(data)]
    arrays = [data for data in collections if is_dask_array(data)]
    tables = Planned({}, [], {})
    if frames:
        import dask.dataframe

        # As one expression: Dask optimizes expressions one by one.
        together = dask.dataframe.map_partitions(
            _listed,
            *frames,
            meta=frames[0]._meta,
            enforce_metadata=False,
            align_dataframes=False,
        )
        tables = _planned_frame(together)
    if not arrays:
        return tables
    graph = HighLevelGraph.merge(*(array.__dask_graph__() for array in arrays))
    blocks = [list(flatten(array.__dask_keys__())) for array in arrays]
    tasks = {
        **tables.tasks,
        **arrays[0].__dask_optimize__(graph, list(flatten(blocks))),
    }
    columns = [tables.keys, *blocks] if frames else blocks
    _check_shuffled_together(tasks, columns)
    name = f"part-{tokenize(columns)}"
    places = sorted(
        range(len(collections)), key=lambda i: is_dask_array(collections[i])
    )
    keys = []
    for part, values in enumerate(zip(*columns, strict=True)):
        keys.append((name, part))
        references = [TaskRef(value) for value in values]
        tables_, *blocks_ = references if frames else [[], *references]
        tasks[keys[-1]] = Task(keys[-1], _in_user_order, places, tables_, *blocks_)
    return Planned(tasks, keys, {**tables.futures, **_futures(graph)})


def _check_shuffled_together(
    tasks: Mapping[Any, Any], columns: Sequence[Sequence[Any]]
) -> None:
    """Refuse rows of different peer-to-peer shuffles, which arrive in any order.

    A dataframe is optimized when it becomes an array or Delayed objects, so two arrays
    of a shuffled dataframe have two shuffles.
    """
    # Only shuffles of dataframes change the order of rows; a peer-to-peer rechunk of an
    # array keeps it. The private specification is all that tells them apart.
    barriers = {
        key
        for key, task in tasks.items()
        if _is_barrier(task) and isinstance(task.spec, DataFrameShuffleSpec)
    }
    if not barriers:
        return
    used = [barriers & culled(tasks, keys).keys() for keys in columns]
    if any(some != used[0] for some in used):
        raise DataError(
            "X and y come from different peer-to-peer shuffles, whose rows arrive in "
            "any order; persist() the dataframe before you make arrays or Delayed "
            "objects of it, or use its columns, fit(df[features], df[label])"
        )


def _listed(*values: Any) -> list[Any]:
    return list(values)


def _in_user_order(places: Sequence[int], tables: list[Any], *blocks: Any) -> list[Any]:
    """Put tables and blocks in the order of the collections that they come from."""
    values = zip(places, [*tables, *blocks], strict=True)
    return [value for _, value in sorted(values, key=itemgetter(0))]


def _futures(graph: Mapping[Any, Any]) -> dict[Any, Any]:
    """Futures by key: tasks themselves, wrapped as data, or arguments of tasks."""
    futures = {}
    for key, task in graph.items():
        value = getattr(task, "value", task)
        if is_future(value):
            futures[key] = value
        elif any(need not in graph for need in getattr(task, "dependencies", ())):
            futures |= {future.key: future for future in _inside(task)}
    return futures


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
    """A source of Dask collections; `finish` converts partitions of a part to rows."""

    sent_by_part = True
    mergeable = True
    lazy = True
    has_part_names = False

    def __init__(
        self,
        partitions: Partitions,
        finish: Finish,
        lengths: Sequence[int] | None = None,
        first_rows: Rows | None = None,
    ) -> None:
        self.partitions = partitions
        self.parts = partitions.parts
        collection = partitions.collections[0]
        self.block_lengths = collection.chunks[0] if is_dask_array(collection) else None
        self.lengths = lengths
        self.first_rows = first_rows
        self.finish = finish
        self._graphs: dict[int, PartGraph] = {}
        self._counted: Sequence[int | None] = [None] * self.parts

    @override
    def prepare(self, client: Client | Literal[False]) -> None:
        self.partitions.place(client)

    @override
    def content(self, part: int) -> PartGraph:
        if part not in self._graphs:
            self._graphs[part] = self.partitions.graph_of(
                part, self.finish, self.name(part), self._counted[part]
            )
        return self._graphs[part]

    @override
    def needs(self, part: int) -> tuple[Any, ...]:
        return self.content(part).needs

    @override
    def load(self, part: int) -> Rows:
        graph = self.content(part)
        return graph.rows({key: self.partitions.result(key) for key in graph.needs})

    @override
    def _arrange_(
        self, known: Columns, columns: Columns, classes: Sequence[str] | None
    ) -> None:
        self.finish = _arranged(self.finish, columns, classes)
        self._graphs = {}

    @override
    def with_facts(self, facts: Sequence[Facts]) -> Self:
        counted = super().with_facts(facts)
        counted._counted = [fact.rows for fact in facts]
        counted._graphs = {}
        return counted

    def finished(self, finish: Finish) -> Self:
        """Return the same parts, from which another function makes rows."""
        finished = copy.copy(self)
        finished.finish = finish
        finished._graphs = {}
        return finished

    def beside(self, keys: Any) -> Self:
        """Return the same rows, computed together with a collection of their keys."""
        return self._beside(keys, KeysBeside(self.finish))

    @override
    def weighted(self, weight: Any) -> Self:
        weight = tables.plain_array(weight)
        unlabelled = self.first_rows is not None and self.first_rows[1] is None
        if unlabelled or not all(map(is_partitioned, self.partitions.collections)):
            return super().weighted(weight)
        if not is_partitioned(weight) or weight.ndim != 1:
            rows = None if self.lengths is None else sum(self.lengths)
            weight = tables.checked_weights(weight, rows)
        weights = self.aligned(weight, "sample_weight")
        weighted = self._beside(weights, WeightsBeside(self.finish))
        if self.first_rows is not None:
            x, y = self.first_rows
            weighted.first_rows = x, Weighted(y, np.ones(batching.length(x)))
        return weighted

    def _beside(self, values: Any, finish: Finish) -> Self:
        beside = self.finished(finish)
        beside.partitions = Partitions(*self.partitions.collections, values)
        return beside

    def aligned(self, values: Any, name: str) -> Any:
        """Return values, one for each row, as a collection with the same partitions.

        Args:
            values: A numpy array, a ``dask.array`` or a column of a ``dask.dataframe``.
            name: The argument of the user, for messages.

        Raises:
            DataError: If their number differs from that of the rows, or there are other
                partitions of unknown lengths.
        """
        counted = None
        if isinstance(values, np.ndarray):
            counted = len(values)
        elif is_dask_array(values) and not math.isnan(values.shape[0]):
            counted = int(values.shape[0])
        if counted is not None and self.lengths is not None:
            tables.check_lengths({"X": sum(self.lengths), name: counted})
            if isinstance(values, np.ndarray):
                return _blocks_of(values, self.lengths)
            # By tasks: a peer-to-peer rechunk could not be cut into parts.
            return values.rechunk({0: self.lengths}, method="tasks")
        if isinstance(values, np.ndarray):
            raise _in_memory(name, {"X": self.partitions.collections[0]})
        if _partitions_of(values) != self.parts:
            raise DataError(
                f"if the lengths of partitions are unknown, {name} must have as many "
                f"as X, got {_partitions_of(values)} for {self.parts}"
            )
        return values


def _in_memory(name: str, others: Mapping[str, Any]) -> DataError:
    """The error that an array cannot be cut, as no partitions have known lengths."""
    arrays = (place for place, value in others.items() if is_dask_array(value))
    reference = next(arrays, None)
    remedy = f"call {reference}.compute_chunk_sizes() first"
    if reference is None:
        reference = next(iter(others))
        remedy = f"pass {reference}.to_dask_array(lengths=True)"
        if reference.startswith("X"):
            named = " that label= names" if name.startswith("y") else ""
            remedy = f"make it a column of the dataframe{named}, or {remedy}"
    return DataError(
        f"{name} is in memory, and is divided like the partitions of {reference}, but "
        f"Dask does not know their lengths: {remedy}"
    )


@dataclass(frozen=True)
class RowShare:
    """Makes one of two shares of the rows of each part, which are drawn at random."""

    finish: Finish  # makes all rows of a part
    fraction: float  # of the rows that are in the second share
    seed: int
    second: bool

    def __call__(self, values: list[Any], part: int) -> Rows:
        """Return the share of a part; rows keep their order."""
        rows = self.finish(values, part=part)
        generator = np.random.default_rng([self.seed, part])
        drawn = generator.random(batching.length(rows)) < self.fraction
        share = batching.rows(rows, drawn if self.second else ~drawn)
        named = NamedRows.of(rows)
        return NamedRows.of(share, named.columns, named.classes)


@dataclass(frozen=True)
class KeysBeside:
    """Makes rows from partitions of which the last has the keys of the rows."""

    finish: Finish  # makes rows from the others

    def __call__(self, values: list[Any], part: int) -> Rows:
        """Return the rows, as many as there are keys."""
        *others, keys = values
        rows = self.finish(others, part=part)
        if len(keys) != batching.length(rows):
            raise DataError(
                f"part {part} has {batching.length(rows)} rows and {len(keys)} keys; "
                "take key from the same collection as X, or partition it like X"
            )
        return rows


@dataclass(frozen=True)
class WeightsBeside:
    """Makes rows from partitions of which the last has the weights of the rows."""

    finish: Finish  # makes rows from the others

    def __call__(self, values: list[Any], part: int) -> Rows:
        """Return the rows, with `Weighted` labels."""
        *others, weight = values
        rows = NamedRows.of(self.finish(others, part=part))
        x, labels = rows
        where = f" of part {part}"
        weights = tables.checked_weights(weight, batching.length(x), where)
        weighted = x, Weighted(labels, weights)
        return NamedRows.of(weighted, rows.columns, rows.classes)


@dataclass(frozen=True)
class Arranged:
    """Makes rows with another function, then puts their columns into a fixed order.

    Picklable.
    """

    finish: Finish
    columns: Columns  # those expected; see `NamedRows.arranged`
    classes: Sequence[str] | None = None  # names of the labels; None: any

    def __call__(self, values: list[Any], part: int, **options: Any) -> Rows:
        """Return the rows of a part, with the columns of tables in this order."""
        rows = NamedRows.of(self.finish(values, part=part, **options))
        if self.classes is not None and rows.classes is not None:
            tables.check_classes(rows.classes, self.classes, f"y of part {part}")
        return rows.arranged(self.columns, f"part {part}")


def _arranged(
    finish: Finish, columns: Columns, classes: Sequence[str] | None
) -> Finish:
    if isinstance(finish, KeysBeside | WeightsBeside):  # which are no columns
        return type(finish)(_arranged(finish.finish, columns, classes))
    return Arranged(finish, columns, classes)


def _as_array(
    value: Any, name: str, classes: Sequence[str] | None = None, label: bool = False
) -> np.ndarray:
    array = tables.array_of(value, name, classes, label)
    tables.check_values(array, name)
    return as_numpy(array)


def _same_length(rows: Rows, part: int) -> Rows:
    lengths = {name: len(leaf) for name, leaf in batching.leaves_by_name(rows).items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{count} of {name}" for name, count in lengths.items())
        raise DataError(
            f"arrays of part {part} must have equally many rows, got {shown}; give X "
            "and y the same partitions"
        )
    return rows


# ---- arrays and dataframes


@dataclass(frozen=True)
class _ArrayRows:
    """Makes rows from values, each of which is one array or table."""

    names: Rows  # trees of the names of arrays
    classes: Mapping[str, Sequence[str] | None]  # names of labels, for each array
    lengths: Sequence[int] | None  # according to the chunks
    coordinates: Columns  # the columns of arrays, which do not bring them

    def __call__(self, values: list[Any], part: int) -> Rows:
        arrays = [
            _as_array(value, f"{name} of part {part}", classes, name.startswith("y"))
            for value, (name, classes) in zip(values, self.classes.items(), strict=True)
        ]
        x, y = batching.with_leaves(self.names, values)
        names = {**self.coordinates, **columns_in(x, y)}
        rows = NamedRows.of(batching.with_leaves((x, y), arrays), names)
        length = batching.length(_same_length(rows, part))
        if self.lengths is not None and length != self.lengths[part]:
            raise DataError(
                f"part {part} has {length} rows, but the chunks promise "
                f"{self.lengths[part]}; call compute_chunk_sizes()"
            )
        return rows


def source_of_collections(x: Tree, y: Tree) -> Collections:
    """Make a source of trees of ``dask.array``, DataArrays and ``dask.dataframe``.

    Arrays and tables in memory are cut like the partitions of the collections.
    """
    tables.check_structure(x, y)
    names = columns_in(x, y)
    frames = {
        name for name, v in batching.leaves_by_name((x, y)).items() if is_dask_frame(v)
    }
    coordinates = {name: names[name] for name in names.keys() - frames}
    x, y = batching.tree_map(tables.plain_array, (x, y))
    named = batching.leaves_by_name((x, y))
    classes: dict[str, tuple[str, ...] | None] = {}
    zeros: list[np.ndarray | None] = []  # one row each, of the right shape and dtype
    for name, value in named.items():
        if not is_partitioned(value):
            classes[name], named[name] = _checked_array(value, name)
            zeros.append(np.zeros_like(named[name][:1]))
            continue
        classes[name], row = _checked(value, name)
        zeros.append(row)
    aligned, lengths = _aligned(named)
    first_rows = None
    if all(row is not None for row in zeros):
        first_rows = batching.with_leaves((x, y), zeros)
    source = Collections(
        Partitions(*aligned),
        # The columns of a partition may be in another order than its metadata say.
        Arranged(
            _ArrayRows(
                batching.with_leaves((x, y), named), classes, lengths, coordinates
            ),
            names,
        ),
        lengths,
        first_rows,
    )
    source.classes = classes.get("y")
    source.columns = names
    return source


def _checked(value: Any, name: str) -> tuple[tuple[str, ...] | None, np.ndarray | None]:
    """Names of labels, or None; and a row of zeros, or None if its shape is unknown."""
    if is_dask_frame(value):
        classes = tables.check_columns(value._meta, name, name.startswith("y"))
        meta = tables.columns_of(value._meta, name, classes)
        return classes, np.zeros((1, *meta.shape[1:]), meta.dtype)
    tables.check_array(value, name)
    if any(math.isnan(size) for size in value.shape[1:]):
        return None, None
    return None, np.zeros((1, *map(int, value.shape[1:])), value.dtype)


def _checked_array(value: Any, name: str) -> tuple[tuple[str, ...] | None, np.ndarray]:
    """Names of labels, or None; and the numbers of an array or a table in memory."""
    label = name.startswith("y")
    classes = tables.label_classes(value, name) if label else None
    array = tables.array_of(value, name, classes, label)
    tables.check_array(array, name)
    return classes, as_numpy(array)


def _aligned(named: Mapping[str, Any]) -> tuple[Sequence[Any], tuple[int, ...] | None]:
    """Collections with equal partitions, and the lengths of these, or None."""
    chunks = {
        name: tuple(map(int, value.chunks[0]))
        for name, value in named.items()
        if is_dask_array(value) and not any(map(math.isnan, value.chunks[0]))
    }
    arrays = {name: v for name, v in named.items() if isinstance(v, np.ndarray)}
    counted = {name: sum(rows) for name, rows in chunks.items()}
    counted |= {name: len(array) for name, array in arrays.items()}
    tables.check_lengths({name: counted[name] for name in named if name in counted})
    lengths = next(iter(chunks.values()), None)
    if arrays:
        if lengths is None:
            lazy = {name: v for name, v in named.items() if name not in arrays}
            raise _in_memory(next(iter(arrays)), lazy)
        blocks = {name: _blocks_of(array, lengths) for name, array in arrays.items()}
        named = {**named, **blocks}
        chunks |= dict.fromkeys(blocks, lengths)
    if len(chunks) == len(named):
        # By tasks: a peer-to-peer rechunk could not be cut into parts.
        rechunked = [
            value.rechunk({0: lengths}, method="tasks") for value in named.values()
        ]
        return rechunked, lengths
    counts = {name: _partitions_of(value) for name, value in named.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{count} of {name}" for name, count in counts.items())
        raise DataError(
            "Dask collections of unknown length must have equally many partitions, got "
            f"{shown} partitions; take X and y from one collection, or repartition them"
        )
    return list(named.values()), lengths


# ---- bags and lists


@dataclass(frozen=True)
class _ExampleRows:
    """Makes rows from a value that is (x, y), or x alone."""

    examples: bool  # whether values are lists of examples, as in a bag

    def __call__(self, values: list[Any], part: int) -> Rows:
        (value,) = values
        if self.examples:
            return _same_length(stacked(list(value), f"part {part}"), part)
        x, y = pair(value)
        where = f"part {part}"
        classes = tables.label_classes(y, f"y of {where}")
        labels = None if y is None else _arrays(y, "y", where, classes)
        rows = _arrays(x, "X", where), labels
        return NamedRows.of(_same_length(rows, part), columns_in(x, y), classes)


class ExampleCollection(Collections):
    """Parts of a bag of examples, or of a list of Delayed objects and futures of rows.

    Examples and rows are pairs (x, y), or x alone.

    Attributes:
        bag: Whether parts are lists of examples, as in a bag.
    """

    columns = None  # parts may be tables
    keyable = True

    def __init__(self, collection: Any, *, bag: bool) -> None:
        super().__init__(Partitions(collection), _ExampleRows(bag))
        self.bag = bag


def paired_bags(X: Any, y: Any) -> Any:
    """Make a bag of pairs of two bags with the same partitions."""
    _check_paired(X.npartitions, y.npartitions)
    return X.map_partitions(_zipped, y)


def paired_lists(X: Sequence[Any], y: Sequence[Any]) -> list[Delayed]:
    """Make a list of Delayed pairs of two lists of Delayed objects and futures."""
    _check_paired(len(X), len(y))
    planned = _planned_list(X), _planned_list(y)
    tasks = {key: task for side in planned for key, task in side.tasks.items()}
    _check_shuffled_together(tasks, [side.keys for side in planned])
    both = delayed(_both, pure=False)
    return [both(x, labels) for x, labels in zip(X, y, strict=True)]


def _check_paired(parts_of_x: int, parts_of_y: int) -> None:
    if parts_of_x != parts_of_y:
        raise DataError(
            f"X and y must have the same partitions, got {parts_of_x} and {parts_of_y}"
            "; take them from one collection, or repartition them"
        )


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


def is_pair(value: Any) -> bool:
    """Whether a value is a tuple of two, but not a named one."""
    return (
        isinstance(value, tuple) and len(value) == 2 and not hasattr(value, "_fields")
    )


def pair(value: Any) -> tuple[Tree, Tree]:
    """Split a tuple of two into x and y; anything else is x alone.

    Example:
        >>> pair((1, 2)), pair([1, 2])
        ((1, 2), ([1, 2], None))
    """
    return value if is_pair(value) else (value, None)


def stacked(examples: Sequence[Any], name: str) -> Rows:
    """Stack the arrays of single examples, pairs (x, y) or x alone, of a named part."""
    if not examples:
        return np.zeros(0), None
    xs, ys = unzipped(examples, name)
    return _stacked_part(xs, "X", name), None if ys is None else _stacked_part(
        ys, "y", name
    )


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


def _stacked_part(examples: Sequence[Tree], argument: str, part: str) -> Tree:
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
    if any(leaf is None for example in examples for leaf in batching.leaves(example)):
        raise ValueError("a value is None")
    tables.check_no_tables(examples)

    def stacked(*leaves: Any) -> np.ndarray:
        return np.stack(
            [as_numpy(x) if isinstance(x, Tensor) else np.asarray(x) for x in leaves]
        )

    return batching.tree_map(stacked, *examples)


def _arrays(
    tree: Tree, argument: str, part: str, classes: Sequence[str] | None = None
) -> Tree:
    label = argument == "y"
    arrays = [
        _as_array(leaf, f"{name} of {part}", classes, label)
        for name, leaf in batching.named_leaves(tree, argument)
    ]
    return batching.with_leaves(tree, arrays)
