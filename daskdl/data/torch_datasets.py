"""Datasets of torch and of Hugging Face, and streams, as sources.

A part of a map-style dataset is a range of items; of an iterable one, the items that
one worker of a ``DataLoader`` would see. Random transforms of items use the process's
random states, so the seed of a run does not repeat them.
"""

import contextlib
import copy
import functools
import itertools
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from dask.utils import SerializableLock
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

# Private in torch 2.7 to 2.13: nothing public sets `get_worker_info`.
from torch.utils.data._utils import worker

# Torch 2.7 to 2.13 document `collate` and its map under this private name alone.
from torch.utils.data._utils.collate import collate, default_collate_fn_map
from typing_extensions import override

from daskdl.config import check_whole
from daskdl.data import batching
from daskdl.data.batching import Rows, Tree
from daskdl.data.source import SHOWN_ROWS, Pieces, Source
from daskdl.data.tables import as_numpy, check_array, number_labels, split_label
from daskdl.data.unreadable import UNREADABLE, blames_data
from daskdl.errors import DataError, OptionError

PAIR = (
    "for several inputs ((x1, x2), y), or use daskdl.data.dataset(X, collate_fn=...) "
    "with a function that returns (x, y)"
)
LABEL = (
    "say which key has the labels, label=...; a model that returns its own loss needs "
    "none: Trainer(loss=None)"
)


@dataclass(frozen=True)
class Collation:
    """Makes rows from items.

    The user's function gets `batch_size` items at a time, or the rest in its last call,
    and returns one row for each item. It may pad to the longest item: rows of two calls
    go into one batch only if all their axes but the first are equal.
    """

    function: Callable[[list[Any]], Any] | None = None  # None: torch's default
    batch_size: int = 1
    labelled: bool = True  # whether items must be pairs; if not, others are x alone
    label: Any = None  # key of the labels, if collated items are dicts

    def rows(self, items: list[Any]) -> Rows:
        """Collate items, at least one."""
        if self.function is None:
            return self.pair(_collated(items))
        rows = self.pair(self.function(items))
        for name, leaf in batching.leaves_by_name(rows, ("x", "y")).items():
            if len(leaf) != len(items):
                raise DataError(
                    f"collate_fn must return one row for each item, got {len(leaf)} "
                    f"rows of {name} for {len(items)} items; leave bad items out in "
                    "the dataset, and keep the items along the first axis"
                )
        return rows

    def pair(self, batch: Any) -> Rows:
        """Split collated items into x and y, as trees of numpy arrays."""
        if self.label is not None:
            batch = split_label(batch, self.label)
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return _tree_of(batch[0], "x"), _tree_of(batch[1], "y")
        if self.labelled:
            remedy = LABEL if isinstance(batch, Mapping) else PAIR
            raise DataError(
                f"a dataset must give pairs (x, y), got {_outline(batch)}; {remedy}"
            )
        if isinstance(batch, tuple | list) and len(batch) == 1:
            batch = batch[0]  # of a TensorDataset with one tensor
        return _tree_of(batch, "x"), None


def _collated(items: list[Any]) -> Any:
    functions = {**default_collate_fn_map, Tensor: _stacked_in_process}
    try:
        return collate(items, collate_fn_map=functions)
    except (RuntimeError, TypeError, KeyError) as error:
        raise DataError(
            f"items of the dataset cannot be collated: {type(error).__name__}: {error}"
            "; make them arrays and numbers of equal shapes in tuples and dicts, or "
            "use daskdl.data.dataset(X, collate_fn=...)"
        ) from error


def _stacked_in_process(
    batch: Sequence[Tensor], *, collate_fn_map: Any = None
) -> Tensor:
    """Stack like torch, but never in shared memory.

    Torch uses shared memory where ``get_worker_info()`` is not None, as it may be here
    while another thread iterates over a dataset.
    """
    return torch.stack(list(batch))


def _tree_of(value: Any, name: str) -> Tree:
    if isinstance(value, Tensor | np.ndarray):
        check_array(value, name)
        return as_numpy(value)
    if isinstance(value, tuple | list) and value and isinstance(value[0], str):
        remedy = "number the classes" if name.startswith("y") else "make numbers of it"
        raise DataError(
            f"{name} of a dataset's items is text, such as {str(value[0])!r}; {remedy} "
            "in the dataset"
        )
    if not isinstance(value, Mapping | tuple | list) or not value:
        raise DataError(
            f"{name} of a dataset's items must be made of tensors, arrays and numbers "
            f"in tuples and dicts, got {_outline(value)}; convert it in the dataset, "
            "or use daskdl.data.dataset(X, collate_fn=...)"
        )
    children = value.items() if isinstance(value, Mapping) else enumerate(value)
    inner = {key: _tree_of(child, f"{name}[{key!r}]") for key, child in children}
    if isinstance(value, Mapping):
        return inner
    if hasattr(value, "_fields"):
        return type(value)(*inner.values())
    return tuple(inner.values())


def _outline(value: Any) -> str:
    """The type of a value and its size, for messages."""
    if isinstance(value, Mapping):
        return f"a dict with the keys {list(value)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


_worker_info_lock = threading.Lock()
_END = object()


class _ObservedInfo:
    """A worker's info that records whether the dataset asks which worker it is on.

    Not a subclass of torch's own info, which some versions of torch do not allow.
    """

    def __init__(self, info: worker.WorkerInfo, workers: "LoaderWorkers") -> None:
        self._info = info
        self._workers = workers

    def __getattr__(self, name: str) -> Any:
        if name in ("id", "num_workers", "seed"):
            self._workers.asked = True
        return getattr(self._info, name)


class LoaderWorkers:
    """The items of a dataset that each worker of a ``DataLoader`` would see.

    Each pass iterates over a shallow copy of its own, since a dataset may set
    attributes while it iterates.

    Attributes:
        asked: Whether the dataset has asked, in this process, which worker it is on. If
            it never asks, each worker gets all items.
    """

    def __init__(self, dataset: IterableDataset[Any]) -> None:
        self._dataset = dataset
        self.asked = False
        self._passes = Counter[int]()  # started in this process, by part

    def __call__(self, part: int, parts: int) -> Iterator[Any]:
        """Yield the items of a part; every pass has its own ``seed``."""
        dataset = copy.copy(self._dataset)
        seed = self._passes[part] * parts + part
        self._passes[part] += 1
        info = worker.WorkerInfo(id=part, num_workers=parts, seed=seed, dataset=dataset)
        observed = _ObservedInfo(info, self)
        with worker_info(observed):
            items = iter(dataset)
        while True:
            with worker_info(observed):
                item = next(items, _END)
            if item is _END:
                return
            yield item


@contextlib.contextmanager
def worker_info(info: Any) -> Iterator[None]:
    """Set the result of ``get_worker_info()`` in this process."""
    # Torch sets its variable only in the processes of a `DataLoader`; replicas are
    # threads.
    with _worker_info_lock:
        former = worker._worker_info
        worker._worker_info = info
        try:
            yield
        finally:
            worker._worker_info = former


@dataclass(frozen=True)
class Stream:
    """Items in parts; a function makes each part where it is trained on.

    Unlike a ``torch.utils.data.IterableDataset``, one process may iterate over several
    parts at the same time.

    Attributes:
        function: ``function(part, parts)`` returns a new iterable of the items (x, y)
            of part 0, 1, ... at each call; pickled to the workers.
        parts: Number of parts; None: one for each replica, and one for `predict`.

    Raises:
        OptionError: If an argument cannot be used.

    Example:
        >>> def squares(part, parts):
        ...     return ((float(i), float(i * i)) for i in range(part, 10, parts))
        >>> list(Stream(squares).function(1, 4))
        [(1.0, 1.0), (5.0, 25.0), (9.0, 81.0)]
    """

    function: Callable[[int, int], Iterable[Any]]
    parts: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise OptionError(
                "function must be callable as function(part, parts), got "
                f"{self.function!r}"
            )
        if self.parts is not None:
            check_whole("parts", self.parts, 1)


class IterableStyle(Source):
    """Parts of a stream, read in order.

    A torch dataset must read ``torch.utils.data.get_worker_info()``, as for a
    ``DataLoader``: a part has the items of one worker.

    Attributes:
        fixed: Whether the user has chosen the number of parts.
    """

    sequential = True
    has_part_names = False
    lengths = None

    def __init__(
        self, dataset: IterableDataset[Any] | Stream, collation: Collation = Collation()
    ) -> None:
        self._function: Callable[[int, int], Iterable[Any]]
        self.parts, self.fixed = 1, False
        if isinstance(dataset, Stream):
            self._function = dataset.function
            self.parts, self.fixed = dataset.parts or 1, dataset.parts is not None
        else:
            self._function = LoaderWorkers(dataset)
        self._collation = collation

    @functools.cached_property
    def first_rows(self) -> Rows:  # type: ignore[override]
        """First rows of the first part that has rows."""
        there = self._beginnings(1)
        if not there:
            raise DataError(
                f"the dataset is empty: none of its {self.parts} parts has an item"
            )
        return there[0]

    def _warn_if_alike(self) -> None:
        """Warn if two parts begin alike, or a torch dataset ignores its worker's id."""
        there = self._beginnings(2)
        if len(there) < 2:
            return
        careless = (
            isinstance(self._function, LoaderWorkers) and not self._function.asked
        )
        pairs = zip(*(batching.leaves(x) for x, _ in there), strict=False)
        same = all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)
        if not careless and not same:
            return
        seen = (
            "does not ask torch.utils.data.get_worker_info() which part it is"
            if careless
            else "begins in 2 of them with the same items"
        )
        warnings.warn(
            f"the dataset is read in {self.parts} parts, one for each replica or "
            f"worker, and {seen}: each item is then used {self.parts} times; in "
            "__iter__, yield only every num_workers-th item, starting at id, of "
            "torch.utils.data.get_worker_info(), or use daskdl.data.Stream",
            stacklevel=2,
        )

    def _beginnings(self, most: int) -> list[Rows]:
        """First rows of each of the first parts that have rows."""
        begun = (
            list(itertools.islice(self._function(part, self.parts), SHOWN_ROWS))
            for part in range(self.parts)
        )
        few = itertools.islice(filter(None, begun), most)
        return [self._collation.rows(items) for items in few]

    @override
    def divided(self, parts: int) -> Self:
        divided = copy.copy(self)
        if not self.fixed:
            divided.parts = parts
            divided.__dict__.pop("first_rows", None)
        divided._warn_if_alike()
        return divided

    @override
    def load(self, part: int) -> Rows:
        raise NotImplementedError(f"{type(self).__name__} is sequential; use stream")

    @override
    def stream(self, part: int, rows: int) -> Iterator[Rows]:
        if self._collation.function is not None:
            rows = self._collation.batch_size
        items = iter(self._function(part, self.parts))
        while some := list(itertools.islice(items, rows)):
            yield self._collation.rows(some)

    @override
    def name(self, part: int) -> str:
        return f"part {part} of {self.parts}"


@dataclass(frozen=True)
class CollatedDataset:
    """A dataset, or a list of examples, whose items a function collates."""

    dataset: Any
    collate_fn: Callable[[list[Any]], Any] | None  # None: torch's default


PARTS = 64  # desired: at the end of an epoch, replicas wait for 1/64 of it at most
MIN_ITEMS = 64  # fewer are not worth a request to the scheduler
# A part should load in well under a second. An item takes 10 to 100 us. An image takes
# 10 ms to decode; at 600 kB per image, `MAX_BYTES` gives parts of about 50 images.
MAX_ITEMS = 4096
MAX_BYTES = 32 * 2**20


class MapStyle(Source):
    """A dataset with ``__getitem__`` and ``__len__``, as in ``torch.utils.data``.

    At most one thread of a process reads items at a time, because a dataset that was
    written for the processes of a ``DataLoader`` need not be thread-safe.

    Args:
        dataset: Its items are pairs (x, y), or x alone if `collation` allows that.
        collation: Makes rows from items. With a collate function, a part has the items
            of one call of the function.
        shuffle_seed: Seed of the random assignment of items to parts, which is the same
            in all epochs; None: in order.
        classes: Names of the classes, if a column of text has the labels; None: the
            labels found, sorted.
        skips: Whether items that cannot be read are left out.
    """

    lengths: list[int]
    first_rows: Rows
    has_part_names = False

    def __init__(
        self,
        dataset: Any,
        collation: Collation = Collation(),
        shuffle_seed: int | None = None,
        classes: Sequence[str] | None = None,
        skips: bool = False,
    ) -> None:
        # Without a collate function, columns are read at once; the function gets items.
        self._arrow = is_arrow(dataset) and collation.function is None
        self._arrow &= not (self._arrow and dataset.format["type"] == "custom")
        if self._arrow:
            self.classes = _class_names(dataset, collation.label, classes)
            dataset = dataset.with_format("numpy", dataset.format["columns"])
        self._dataset = dataset
        self._collation = collation
        self._seed = shuffle_seed
        self._lock = SerializableLock()
        kind = type(dataset).__name__
        if not hasattr(dataset, "__len__"):
            raise DataError(
                f"a map-style dataset must have __len__, {kind} has none; make it a "
                "torch.utils.data.IterableDataset if it has no length"
            )
        self._items = len(dataset)
        if self._items < 1:
            raise DataError(f"the dataset is empty: len({kind}) is 0")
        self.first_rows = self._first_rows(skips)
        self._size = self._part_size(self.first_rows)
        self.parts = -(-self._items // self._size)
        last = self._items - (self.parts - 1) * self._size
        self.lengths = [self._size] * (self.parts - 1) + [last]

    @override
    def load(self, part: int) -> Rows:
        return self._rows(self._indices(part))

    @override
    def name(self, part: int) -> str:
        start = part * self._size
        stop = start + self.lengths[part] - 1
        shuffled = "" if self._seed is None else "shuffled "
        return f"items {start} to {stop} of the {shuffled}dataset"

    @override
    def pieces(self, part: int) -> Pieces:
        indices = self._indices(part)
        if len(indices) == 1:
            return ()
        rows: Callable[[int], Rows] = self._row
        if self._collation.function is not None:
            rows = _Collated(self._rows, indices).row
        return [(self._item(i), functools.partial(rows, i)) for i in indices]

    def _item(self, index: int) -> str:
        """The name of an item, by its index in the dataset of subsets."""
        dataset = self._dataset
        while type(dataset) is Subset:
            index, dataset = int(dataset.indices[index]), dataset.dataset
        return f"item {index} of the dataset"

    def _dataset_item(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except UNREADABLE as error:
            error.add_note(f"in {self._item(index)}")
            raise

    def _row(self, index: int) -> Rows:
        return self._rows([index])

    def _first_rows(self, skips: bool) -> Rows:
        """The rows of the first items; with `skips`, of the first readable one."""
        try:
            return self._rows(range(min(SHOWN_ROWS, self._items)))
        except UNREADABLE as error:
            if not skips or not blames_data(error):
                raise
            for index in range(self._items):
                with contextlib.suppress(*UNREADABLE):
                    return self._row(index)
            raise

    def _part_size(self, first_rows: Rows) -> int:
        if self._collation.function is not None:
            return self._collation.batch_size
        most = min(MAX_ITEMS, max(1, MAX_BYTES // batching.row_bytes(first_rows)))
        return min(max(-(-self._items // PARTS), MIN_ITEMS), most)

    def _indices(self, part: int) -> Sequence[int]:
        start = part * self._size
        stop = start + self.lengths[part]
        if self._seed is None:
            return range(start, stop)
        return [int(i) for i in self._order[start:stop]]

    @functools.cached_property
    def _order(self) -> np.ndarray:
        return np.random.default_rng(self._seed).permutation(self._items)

    def _rows(self, indices: Sequence[int]) -> Rows:
        if self._collation.function is None:
            tensors = _tensors_of(self._dataset, indices)
            if tensors is not None:
                return self._collation.pair(tensors)
        if self._arrow:
            with self._lock:
                columns = self._dataset[list(indices)]
            return self._of_columns(columns)
        with self._lock:
            if getattr(self._dataset, "__getitems__", None):  # as a `DataLoader` does
                items = list(self._dataset.__getitems__(list(indices)))
            else:
                items = [self._dataset_item(index) for index in indices]
        if len(items) != len(indices):
            raise DataError(
                f"__getitems__ of a dataset must return an item for each index, got "
                f"{len(items)} items for {len(indices)} indices"
            )
        return self._collation.rows(items)

    def _of_columns(self, columns: dict[str, np.ndarray]) -> Rows:
        label = self._collation.label
        if label in columns and columns[label].dtype.kind in "OUT":
            columns[label], _ = number_labels(columns[label], label, self.classes)
        for name, column in columns.items():
            kind = column.dtype.kind if isinstance(column, np.ndarray) else "V"
            if kind == "O" and isinstance(column[0], np.ndarray):
                raise DataError(
                    f"rows of the column {name!r} of X differ in length: pad them, or "
                    "use daskdl.data.dataset(X, collate_fn=...) with a function that "
                    "pads, such as DataCollatorWithPadding"
                )
            if kind not in "biuf":
                wrong = "a structure"
                if kind != "V":
                    wrong = f"values such as {str(column[0])!r}"
                raise DataError(
                    f"column {name!r} of X must hold numbers, got {wrong}: convert the "
                    f"column, or remove it with X.remove_columns({name!r})"
                )
        return self._collation.pair(columns)


class _Collated:
    """Rows of the good items of a part, which the user's function collates together.

    Rows that are collated item by item may be padded to different lengths.
    """

    def __init__(
        self, rows: Callable[[Sequence[int]], Rows], indices: Sequence[int]
    ) -> None:
        self._rows, self._indices = rows, indices

    def row(self, index: int) -> Rows:
        """Return the row of an item; raise its error if it cannot be used."""
        alone = self._alone[index]
        if isinstance(alone, Exception):
            raise alone
        if self._together is None:
            return alone
        rows, places = self._together
        return batching.rows(rows, slice(places[index], places[index] + 1))

    @functools.cached_property
    def _alone(self) -> dict[int, Rows | Exception]:
        """The row of each item, collated alone, or why the item cannot be used."""
        alone: dict[int, Rows | Exception] = {}
        for index in self._indices:
            try:
                alone[index] = self._rows([index])
            except UNREADABLE as error:
                alone[index] = error
        return alone

    @functools.cached_property
    def _together(self) -> tuple[Rows, dict[int, int]] | None:
        """The rows of the good items, and their places; None: collating them fails."""
        good = [i for i, rows in self._alone.items() if not isinstance(rows, Exception)]
        try:
            return self._rows(good), {index: i for i, index in enumerate(good)}
        except UNREADABLE:
            return None


def is_arrow(value: Any) -> bool:
    """Whether a value is a ``datasets.Dataset`` of Hugging Face."""
    module = sys.modules.get("datasets.arrow_dataset")
    return module is not None and isinstance(value, module.Dataset)


def _class_names(
    dataset: Any, label: Any, classes: Sequence[str] | None
) -> Sequence[str] | None:
    """Names of the classes in a column; None if it has numbers without names."""
    feature = dataset.features.get(label)
    names: Sequence[str] | None = getattr(feature, "names", None)
    if names is None and str(getattr(feature, "dtype", "")).endswith("string"):
        if classes is not None:
            return classes
        labels = dataset.unique(label)
        if None in labels:
            raise DataError(f"column {label!r} of X has missing labels; drop the rows")
        names = sorted(labels)
    return names


def _tensors_of(dataset: Any, indices: Sequence[int]) -> tuple[Tensor, ...] | None:
    """The items as slices of a `TensorDataset`; None for other datasets."""
    while type(dataset) is Subset:
        indices = [int(dataset.indices[index]) for index in indices]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset:
        return None
    if isinstance(indices, range):
        return tuple(tensor[indices.start : indices.stop] for tensor in dataset.tensors)
    return tuple(tensor[indices] for tensor in dataset.tensors)


class LoaderArguments(NamedTuple):
    """The arguments of a `DataLoader` that choose its items and batches."""

    dataset: Any
    batch_size: int
    collate_fn: Callable[..., Any] | None  # None: torch's default
    shuffle: bool | None  # None: the items of a stream have their own order
    drop_last: bool


def arguments_of(loader: "DataLoader[Any]") -> LoaderArguments:
    """Return the arguments of a `DataLoader`, without its processes and pinned memory.

    Raises:
        DataError: If replicas cannot reproduce what the loader does.
    """
    batches = loader.batch_sampler
    kind, sampler = type(batches).__name__, getattr(batches, "sampler", None)
    for what, present, remedy in (
        (
            f"__iter__ of {type(loader).__name__}, a subclass,",
            type(loader).__iter__ is not DataLoader.__iter__,
            "give a torch Dataset, or a daskdl.data.Stream",
        ),
        (
            "worker_init_fn",
            loader.worker_init_fn is not None,
            "let the dataset prepare what its items need",
        ),
        (
            "batch_size=None",
            batches is None,
            "let each item be one example, and give a batch_size",
        ),
        (
            f"batch_sampler, a {kind},",
            type(batches) is not BatchSampler,
            "give a batch_size, and shuffle=True or False",
        ),
        (
            "generator",
            (loader.generator or getattr(sampler, "generator", None)) is not None,
            "leave it out: the order follows from Trainer(seed=...)",
        ),
    ):
        if present:
            raise DataError(f"{what} of a DataLoader cannot be distributed; {remedy}")
    assert isinstance(batches, BatchSampler)
    dataset, shuffle = _sampled(loader.dataset, batches.sampler)
    collate_fn = loader.collate_fn
    return LoaderArguments(
        dataset,
        batches.batch_size,
        None if collate_fn is default_collate else collate_fn,
        shuffle,
        batches.drop_last,
    )


def _sampled(dataset: Any, sampler: Any) -> tuple[Any, bool | None]:
    """Return the items that a sampler selects, and whether it shuffles them."""
    if isinstance(dataset, IterableDataset | Stream):
        return dataset, None
    if not isinstance(dataset, Dataset) and not hasattr(dataset, "__getitems__"):
        dataset = Subset(dataset, range(len(dataset)))  # a list, or an own class
    kind = type(sampler)
    if kind is SequentialSampler:
        return dataset, False
    permutes = kind is RandomSampler and not sampler.replacement
    if permutes and sampler.num_samples == len(dataset):
        return dataset, True
    chosen = sampler.indices if kind is SubsetRandomSampler else sampler
    if isinstance(chosen, list | tuple | range | np.ndarray | Tensor):
        items = [int(i) for i in chosen]
        chosen_items = (
            dataset.select(items) if is_arrow(dataset) else Subset(dataset, items)
        )
        return chosen_items, kind is SubsetRandomSampler
    remedy = (
        "give the items that it chooses, torch.utils.data.Subset(X.dataset, "
        "list(X.sampler))"
    )
    if isinstance(sampler, DistributedSampler):
        remedy = "leave it out: replicas share the items, and shuffle=True mixes them"
    raise DataError(
        f"sampler, a {kind.__name__}, of a DataLoader cannot be distributed; {remedy}"
    )
