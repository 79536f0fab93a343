"""Datasets of torch, and streams, as sources.

Of a map-style dataset a part is a range of items; of an iterable one, what one worker
of a ``DataLoader`` would see. Items that random transforms change are drawn anew in
each epoch from the process's random states: such a run is not repeatable from its seed.
"""

import contextlib
import copy
import functools
import itertools
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from dask.utils import SerializableLock
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data._utils import worker
from torch.utils.data._utils.collate import collate, default_collate_fn_map
from typing_extensions import override

from daskdl.config import check_whole
from daskdl.data import batching
from daskdl.data.batching import Rows, Tree
from daskdl.data.source import SHOWN_ROWS, Source
from daskdl.data.tables import as_numpy, check_array
from daskdl.errors import DataError, OptionError

PAIR = "for several inputs ((x1, x2), y), or use a collate_fn that returns (x, y)"


@dataclass(frozen=True)
class Collation:
    """How items become rows.

    The rule for the user's own function: it gets `batch_size` items at a time (the
    last time what is left), and what it returns has one row for each of them. It may
    pad to the longest item, so rows of two calls go into one batch only if all their
    axes but the first are equal.

    Attributes:
        function: The user's ``collate_fn``; None: torch's default one.
        batch_size: How many items the user's function gets; torch's gets any number.
        labelled: Whether items must be pairs (x, y). If not, a pair still is one,
            and anything else is x alone.

    Example:
        >>> Collation().rows([([1.0, 2.0], 0), ([3.0, 4.0], 1)])
        ((array([1., 3.]), array([2., 4.])), array([0, 1]))
    """

    function: Callable[[list[Any]], Any] | None = None
    batch_size: int = 1
    labelled: bool = True

    def rows(self, items: list[Any]) -> Rows:
        """Put items together, at least one."""
        if self.function is None:
            return self.pair(_collated(items))
        rows = self.pair(self.function(items))
        _check_rows(rows, len(items))
        return rows

    def pair(self, batch: Any) -> Rows:
        """Split what a collation has made into x and y, as trees of numpy arrays."""
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return _tree(batch[0], "x"), _tree(batch[1], "y")
        if self.labelled:
            raise DataError(
                f"a dataset must give pairs (x, y), got {_outline(batch)}; {PAIR}"
            )
        if isinstance(batch, tuple | list) and len(batch) == 1:
            batch = batch[0]  # of a TensorDataset with one tensor
        return _tree(batch, "x"), None


def _collated(items: list[Any]) -> Any:
    functions = {**default_collate_fn_map, Tensor: _stacked}
    try:
        return collate(items, collate_fn_map=functions)
    except (RuntimeError, TypeError, KeyError) as error:
        raise DataError(
            "items of the dataset cannot be put together: "
            f"{type(error).__name__}: {error}; make them arrays and numbers of equal "
            "shapes in tuples and dicts, or use a collate_fn"
        ) from error


def _stacked(batch: Sequence[Tensor], *, collate_fn_map: Any = None) -> Tensor:
    """As torch's, but never into shared memory.

    Torch takes that where ``get_worker_info()`` is not None, as it may be here while
    another thread goes through an iterable dataset.
    """
    return torch.stack(list(batch))


def _tree(value: Any, name: str) -> Tree:
    if isinstance(value, Tensor | np.ndarray):
        check_array(value, name)
        return as_numpy(value)
    children = dict(_children(value))
    if not children:
        raise DataError(
            f"{name} of a dataset's items must be made of tensors, arrays and numbers "
            f"in tuples and dicts, got {_outline(value)}; convert it in the dataset, "
            "or use a collate_fn"
        )
    inner = {key: _tree(child, f"{name}[{key!r}]") for key, child in children.items()}
    if isinstance(value, Mapping):
        return inner
    if hasattr(value, "_fields"):
        return type(value)(*inner.values())
    return tuple(inner.values())


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    """Of a dict, a tuple or a list; of anything else none."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, tuple | list):
        yield from enumerate(value)


def _outline(value: Any) -> str:
    """What the user gave, without what is in it."""
    if isinstance(value, Mapping):
        return f"a dict with the keys {list(value)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _check_rows(rows: Rows, items: int) -> None:
    for tree, argument in zip(rows, ("x", "y"), strict=True):
        if tree is None:
            continue
        for name, leaf in batching.named(tree, argument):
            if len(leaf) != items:
                raise DataError(
                    f"collate_fn must return one row for each item, got {len(leaf)} "
                    f"rows of {name} for {items} items; leave bad items out in the "
                    "dataset, and keep the items along the first axis"
                )


_one_at_a_time = threading.Lock()
_END = object()


class _Noticing:
    """A worker's info that notes whether anything about the worker is read from it.

    Args:
        told: The info; torch's own, which cannot be derived from in all its versions.
        noted: Called when something is read.
    """

    def __init__(self, told: worker.WorkerInfo, noted: Callable[[], None]) -> None:
        self._told = told
        self._noted = noted

    def __getattr__(self, name: str) -> Any:
        if name in ("id", "num_workers", "seed"):
            self._noted()
        return getattr(self._told, name)


class LoaderWorkers:
    """What each worker of a ``DataLoader`` would see of a dataset.

    Each pass goes through a shallow copy, so that attributes a dataset sets while it
    is gone through are its own.

    Args:
        dataset: To be gone through; not changed.

    Attributes:
        asked: Whether the dataset has read in any pass, in this process, which worker
            it is on. One that never does gives all its items to each.
    """

    asked: bool
    _passes: Counter[int]  # that have begun in this process, by part

    def __init__(self, dataset: IterableDataset[Any]) -> None:
        self._dataset = dataset
        self.asked = False
        self._passes = Counter()

    def __call__(self, part: int, parts: int) -> Iterator[Any]:
        """Yield the items of a part; every pass has another ``seed``."""
        dataset = copy.copy(self._dataset)
        seed = self._passes[part] * parts + part
        self._passes[part] += 1
        info = worker.WorkerInfo(id=part, num_workers=parts, seed=seed, dataset=dataset)
        told = _Noticing(info, self._note)
        with worker_info(told):
            items = iter(dataset)
        while True:
            with worker_info(told):
                item = next(items, _END)
            if item is _END:
                return
            yield item

    def _note(self) -> None:
        self.asked = True


@contextlib.contextmanager
def worker_info(told: Any) -> Iterator[None]:
    """Answer ``get_worker_info()`` in this process, for a moment."""
    with _one_at_a_time:
        former = worker._worker_info
        worker._worker_info = told
        try:
            yield
        finally:
            worker._worker_info = former


@dataclass(frozen=True)
class Stream:
    """Items in parts, each made by a function of yours where it is trained on.

    Unlike a ``torch.utils.data.IterableDataset``, parts of one process are gone
    through at the same time.

    Attributes:
        function: ``function(part, parts)`` gives an iterable of the items (x, y) of
            part 0, 1, ..., a new one each time; cloudpickle takes it to the workers.
        parts: How many there are; None: as many as there are replicas.

    Raises:
        OptionError: If one of them cannot be used.

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
    """Parts of a dataset, gone through in order.

    Args:
        dataset: Of pairs (x, y), or of x alone if `collation` allows it. One of
            torch's must look at ``torch.utils.data.get_worker_info()``, as for a
            ``DataLoader``: a part is what one of its workers would give.
        parts: How many, if `dataset` does not say it.
        collation: How items become rows.

    Attributes:
        fixed: Whether the user has said how many parts there are.

    Raises:
        OptionError: If `parts` is not a whole number of at least 1.
    """

    fixed: bool

    sequential = True
    lengths = None

    def __init__(
        self,
        dataset: IterableDataset[Any] | Stream,
        parts: int = 1,
        collation: Collation = Collation(),
    ) -> None:
        self._function: Callable[[int, int], Iterable[Any]]
        if isinstance(dataset, Stream):
            self._function = dataset.function
            parts = dataset.parts or parts
        else:
            self._function = LoaderWorkers(dataset)
        check_whole("parts", parts, 1)
        self.fixed = isinstance(dataset, Stream) and dataset.parts is not None
        self.parts = parts
        self._collation = collation

    @functools.cached_property
    def first(self) -> Rows:  # type: ignore[override]
        """Rows from the beginning of the first part that has any."""
        there = self._beginnings(1)
        if not there:
            raise DataError(
                f"the dataset is empty: none of its {self.parts} parts has an item"
            )
        return there[0]

    def warn_if_alike(self) -> None:
        """Look whether each part has all items, as far as can be seen.

        Warns:
            UserWarning: If two parts begin with the same items, or if a dataset of
                torch gives items without asking which worker it is on.
        """
        there = self._beginnings(2)
        if len(there) < 2:
            return
        careless = (
            isinstance(self._function, LoaderWorkers) and not self._function.asked
        )
        if not careless and not _equal(*there):
            return
        seen = (
            "does not ask torch.utils.data.get_worker_info() which part it is"
            if careless
            else "begins in 2 of them with the same items"
        )
        warnings.warn(
            f"the dataset is gone through in {self.parts} parts, one for each "
            f"replica or worker, and {seen}: its items are then used "
            f"{self.parts} times; give only every num_workers-th item, from the id-th "
            "on, of torch.utils.data.get_worker_info() in __iter__, or use "
            "daskdl.data.Stream",
            stacklevel=2,
        )

    def _beginnings(self, most: int) -> list[Rows]:
        """Of the first parts that have any items; so many parts."""
        begun = (self._begin(part) for part in range(self.parts))
        return list(itertools.islice(filter(None, begun), most))

    def in_parts(self, parts: int) -> Self:
        """The same dataset in so many parts."""
        other = copy.copy(self)
        other.parts = parts
        other.__dict__.pop("first", None)
        return other

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

    def _begin(self, part: int) -> Rows | None:
        items = itertools.islice(self._function(part, self.parts), SHOWN_ROWS)
        some = list(items)
        return self._collation.rows(some) if some else None


def split_stream(source: Source, parts: int) -> Source:
    """A source in so many parts, if it is in parts and the user did not say how many.

    Warns:
        UserWarning: If it seems that each part has all items.
    """
    if not isinstance(source, IterableStyle):
        return source
    own = source if source.fixed else source.in_parts(parts)
    own.warn_if_alike()
    return own


def is_iterable_style(value: Any) -> bool:
    """Whether it is a dataset that is gone through from the beginning.

    Example:
        >>> is_iterable_style([1, 2]), is_iterable_style(Stream(lambda k, n: [], 2))
        (False, True)
    """
    return isinstance(value, IterableDataset | Stream)


def _equal(one: Rows, other: Rows) -> bool:
    pairs = zip(batching.leaves(one[0]), batching.leaves(other[0]), strict=False)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)


PARTS = 64  # wanted: an epoch ends within 1/64 of the data of being even
LEAST_ITEMS = 64  # fewer are not worth a request to the scheduler
# A part should load in well under a second: an item takes 10 to 100 us, or 10 ms if it
# is an image to be decoded, whose 600 kB make parts of 50.
MOST_ITEMS = 4096
MOST_BYTES = 32 * 2**20


class MapStyle(Source):
    """A dataset with ``__getitem__`` and ``__len__``, as ``torch.utils.data`` has them.

    Its items are asked for by one thread at a time in each process: a dataset made
    for the processes of a ``DataLoader`` never had to stand more.

    Args:
        dataset: Of pairs (x, y); of x alone if `collation` allows it.
        collation: How items become rows. With a function of the user's own, a part
            is the items of one call.
        shuffle_seed: Draws which items are in a part, once for all epochs; None: in
            order, for a dataset whose neighbours are not alike or cheaper together.

    Raises:
        DataError: If the dataset is empty or has no length, or if its first items
            cannot be used. What the dataset raises comes out as it is.
    """

    lengths: list[int]
    first: Rows

    def __init__(
        self,
        dataset: Any,
        collation: Collation = Collation(),
        shuffle_seed: int | None = None,
    ) -> None:
        self._dataset = dataset
        self._collation = collation
        self._seed = shuffle_seed
        self._lock = SerializableLock()
        self._items = length_of(dataset)
        self.first = self._rows(range(min(SHOWN_ROWS, self._items)))
        self._size = self._part_size(self.first)
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

    def _part_size(self, first: Rows) -> int:
        if self._collation.function is not None:
            return self._collation.batch_size
        row_bytes: int = sum(
            leaf.nbytes // len(leaf)
            for tree in first
            if tree is not None
            for leaf in batching.leaves(tree)
        )
        most = min(MOST_ITEMS, max(1, MOST_BYTES // max(row_bytes, 1)))
        return min(max(-(-self._items // PARTS), LEAST_ITEMS), most)

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
        with self._lock:
            items = _items_of(self._dataset, indices)
        return self._collation.rows(items)


def is_map_style(value: Any) -> bool:
    """Whether it is a dataset with indices: torch's, or one with ``__getitems__``.

    Example:
        >>> is_map_style([1, 2]), is_map_style(TensorDataset(Tensor([1.0])))
        (False, True)
    """
    if isinstance(value, IterableDataset):
        return False
    return isinstance(value, Dataset) or hasattr(value, "__getitems__")


def length_of(dataset: Any) -> int:
    """How many items there are."""
    if not hasattr(dataset, "__len__"):
        raise DataError(
            f"a map-style dataset must have __len__, {type(dataset).__name__} has "
            "none; make it a torch.utils.data.IterableDataset if it has no length"
        )
    items: int = len(dataset)
    if items < 1:
        raise DataError(f"the dataset is empty: len({type(dataset).__name__}) is 0")
    return items


def _items_of(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """As a ``DataLoader`` asks for them."""
    if getattr(dataset, "__getitems__", None):
        return list(dataset.__getitems__(list(indices)))
    return [dataset[index] for index in indices]


def _tensors_of(dataset: Any, indices: Sequence[int]) -> tuple[Tensor, ...] | None:
    """What items make together if they are rows of tensors in memory; else None."""
    while type(dataset) is Subset:
        indices = [dataset.indices[index] for index in indices]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset:
        return None
    if isinstance(indices, range):
        return tuple(tensor[indices.start : indices.stop] for tensor in dataset.tensors)
    return tuple(tensor[indices] for tensor in dataset.tensors)
