"""Which class knows the kind of data that the user gave.

A new kind is a subclass of :class:`~daskdl.data.source.Source` in a file of its own,
and a line in :func:`source_of`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from daskdl.data import trees
from daskdl.data.arrays import check_array, check_labels, is_dask_array
from daskdl.data.collections import is_bag, is_dask_frame, is_lazy_list
from daskdl.data.columns import columns
from daskdl.data.in_memory import InMemory
from daskdl.data.pairs import pairs
from daskdl.data.source import Source
from daskdl.data.trees import Tree
from daskdl.errors import DataError, OptionError


@dataclass(frozen=True)
class SourceOptions:
    """How data are to be read.

    Attributes:
        batch_size: Rows of a step; parts of data in memory are whole numbers of it.
        shuffle_seed: Of the order in which data in memory are dealt out, or None.
        loader: Makes (x, y) of a file; see `daskdl.data.Files`.
        collate_fn: Makes a batch of a list of a dataset's items.
        shards: Into how many a dataset that is only iterable is split.
    """

    batch_size: int = 32
    shuffle_seed: int | None = None
    loader: Callable[..., Any] | None = None
    collate_fn: Callable[..., Any] | None = None
    shards: int = 1


def source_of(X: Any, y: Any = None, options: SourceOptions = SourceOptions()) -> Source:
    """Choose the class that knows this kind of data.

    Args:
        X: Inputs, or something that has inputs and labels.
        y: Labels, or None.
        options: How data are to be read.

    Raises:
        DataError: If the kind is not known, or the data cannot be used.
        OptionError: If an option does not go with the kind.
    """
    return InMemory(X, y, options.batch_size, options.shuffle_seed)
