"""Datasets whose items have an index: a part is a range of indices.

The dataset travels to each worker once. Items that differ each time they are asked
for, because of random transforms, are drawn anew in each epoch; they come from the
random states of the worker's process, so such a run is not repeatable from its seed.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from dask.utils import SerializableLock
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Rows
from daskdl.data.datasets.collation import Collation
from daskdl.data.source import SHOWN_ROWS, Source
from daskdl.errors import DataError

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
        collation: Collation = Collation(),  # noqa: B008, frozen
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
    """How many items there are.

    Raises:
        DataError: If there is none, or if the dataset does not say.
    """
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
