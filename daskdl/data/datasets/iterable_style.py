"""Datasets that are gone through from the beginning: a part is a shard.

Nothing here is shuffled, and how many items there are is not known before their end.
A shard that never ends is an epoch that never does.
"""

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from torch.utils.data import IterableDataset
from typing_extensions import override

from daskdl.config import check_whole
from daskdl.data import batching
from daskdl.data.batching import Rows
from daskdl.data.datasets.collation import Collation
from daskdl.data.datasets.worker_info import WorkerShards
from daskdl.data.source import SHOWN_ROWS, Source
from daskdl.errors import DataError, OptionError


@dataclass(frozen=True)
class Sharded:
    """Items in shards, each made by a function of yours where it is trained on.

    Unlike a ``torch.utils.data.IterableDataset``, shards of one process are gone
    through at the same time.

    Attributes:
        function: ``function(shard, shards)`` gives an iterable of the items (x, y) of
            shard 0, 1, ..., a new one each time; cloudpickle takes it to the workers.
        shards: How many there are; None: as many as there are replicas.

    Raises:
        OptionError: If one of them cannot be used.

    Example:
        >>> def squares(shard, shards):
        ...     return ((float(i), float(i * i)) for i in range(shard, 10, shards))
        >>> list(Sharded(squares).function(1, 4))
        [(1.0, 1.0), (5.0, 25.0), (9.0, 81.0)]
    """

    function: Callable[[int, int], Iterable[Any]]
    shards: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise OptionError(
                "function must be callable as function(shard, shards), got "
                f"{self.function!r}"
            )
        if self.shards is not None:
            check_whole("shards", self.shards, 1)


class IterableStyle(Source):
    """Shards of a dataset, gone through in order.

    Args:
        dataset: Of pairs (x, y), or of x alone if `collation` allows it. One of
            torch's must look at ``torch.utils.data.get_worker_info()``, as for a
            ``DataLoader``: a shard is what one of its workers would give.
        shards: How many, if `dataset` does not say it.
        collation: How items become rows.

    Attributes:
        fixed: Whether the user has said how many shards there are.

    Raises:
        OptionError: If `shards` is not a whole number of at least 1.
    """

    fixed: bool

    sequential = True
    lengths = None

    def __init__(
        self,
        dataset: IterableDataset[Any] | Sharded,
        shards: int = 1,
        collation: Collation = Collation(),  # noqa: B008, frozen
    ) -> None:
        self._function: Callable[[int, int], Iterable[Any]]
        if isinstance(dataset, Sharded):
            self._function = dataset.function
            shards = dataset.shards or shards
        else:
            self._function = WorkerShards(dataset)
        check_whole("shards", shards, 1)
        self.fixed = isinstance(dataset, Sharded) and dataset.shards is not None
        self.parts = shards
        self._collation = collation

    @functools.cached_property
    def first(self) -> Rows:  # type: ignore[override]
        """Rows from the beginning of the first shard that has any.

        Raises:
            DataError: If there are none at all, or if they cannot be used.
        """
        there = self._beginnings(1)
        if not there:
            raise DataError(
                f"the dataset is empty: none of its {self.parts} shards has an item"
            )
        return there[0]

    def warn_if_alike(self) -> None:
        """Look whether each shard has all items, as far as can be seen.

        Warns:
            UserWarning: If two shards begin with the same items, or if a dataset of
                torch gives items without asking which worker it is on.
        """
        there = self._beginnings(2)
        if len(there) < 2:
            return
        careless = isinstance(self._function, WorkerShards) and not self._function.asked
        if not careless and not _equal(*there):
            return
        seen = (
            "does not ask torch.utils.data.get_worker_info() which shard it is"
            if careless
            else "begins in 2 of them with the same items"
        )
        warnings.warn(
            f"the dataset is gone through in {self.parts} shards, one for each "
            f"replica or worker, and {seen}: its items are then used "
            f"{self.parts} times; give only every num_workers-th item, from the id-th "
            "on, of torch.utils.data.get_worker_info() in __iter__, or use "
            "daskdl.data.Sharded",
            stacklevel=2,
        )

    def _beginnings(self, most: int) -> list[Rows]:
        """Of the first shards that have any items; so many shards."""
        begun = (self._begin(part) for part in range(self.parts))
        return list(itertools.islice(filter(None, begun), most))

    def in_shards(self, shards: int) -> Self:
        """The same dataset in so many shards."""
        other = copy.copy(self)
        other.parts = shards
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
        return f"shard {part} of {self.parts}"

    def _begin(self, part: int) -> Rows | None:
        items = itertools.islice(self._function(part, self.parts), SHOWN_ROWS)
        some = list(items)
        return self._collation.rows(some) if some else None


def sharded(source: Source, shards: int) -> Source:
    """A source in so many shards, if it is in shards and the user did not say how many.

    Args:
        source: Of any kind.
        shards: As many as there are replicas, >= 1.

    Warns:
        UserWarning: If it seems that each shard has all items.
    """
    if not isinstance(source, IterableStyle):
        return source
    own = source if source.fixed else source.in_shards(shards)
    own.warn_if_alike()
    return own


def is_iterable_style(value: Any) -> bool:
    """Whether it is a dataset that is gone through from the beginning.

    Example:
        >>> is_iterable_style([1, 2]), is_iterable_style(Sharded(lambda k, n: [], 2))
        (False, True)
    """
    return isinstance(value, IterableDataset | Sharded)


def _equal(one: Rows, other: Rows) -> bool:
    pairs = zip(batching.leaves(one[0]), batching.leaves(other[0]), strict=False)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)
