"""Which class knows the kind of data that the user gave.

A new kind is a subclass of :class:`~daskdl.data.source.Source` in a file of its own,
and a line in :func:`source_of`.
"""

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from daskdl.data import batching
from daskdl.data.arrays import is_dask_array
from daskdl.data.batching import Tree
from daskdl.data.checks import check_arrays
from daskdl.data.collections import is_bag, is_dask_frame, is_lazy_list
from daskdl.data.columns import columns
from daskdl.data.datasets.collation import Collation
from daskdl.data.datasets.iterable_style import IterableStyle, is_iterable_style
from daskdl.data.datasets.map_style import MapStyle, is_map_style
from daskdl.data.exports.source import BatchFiles, is_export
from daskdl.data.files import Files
from daskdl.data.frames.columns import check_columns, columns_of, is_frame
from daskdl.data.in_memory import InMemory
from daskdl.data.options import SourceOptions
from daskdl.data.pairs import pairs
from daskdl.data.remedies import TEXT
from daskdl.data.shards.source import Shards, is_shards
from daskdl.data.source import Source
from daskdl.data.stores.listing import are_paths, is_glob, is_path
from daskdl.errors import DataError, OptionError

DEFAULT = SourceOptions()


def source_of(X: Any, y: Any = None, options: SourceOptions = DEFAULT) -> Source:
    """Choose the class that knows this kind of data.

    Args:
        X: Inputs, or something that has inputs and labels.
        y: Labels, or None.
        options: How data are to be read.

    Raises:
        DataError: If the kind is not known, or the data cannot be used.
        OptionError: If an option does not go with the kind.
    """
    if isinstance(X, DataLoader):
        raise DataError(
            "X must not be a DataLoader, whose batches are of one process; give its "
            "dataset, X.dataset, and its batch_size, shuffle and collate_fn"
        )
    if y is None:
        whole = _whole(X, options)
        if whole is not None:
            return whole
    elif _brings_labels(X):
        shown = f"a {type(X).__name__}, which brings its labels"
        if are_paths(X):
            shown = f"paths or URLs of files, which bring their labels; {TEXT}"
        raise DataError(f"y must not be given with {shown}")
    _refuse(options, collate_fn="a torch Dataset", loader="paths and URLs")
    leaves = batching.named_both((X, y)).values()
    if any(is_dask_array(leaf) or is_dask_frame(leaf) for leaf in leaves):
        return columns(X, y)
    return _in_memory(X, y, options)


def _whole(X: Any, options: SourceOptions) -> Source | None:
    """The source of what has inputs and labels together; None if it is no such."""
    if isinstance(X, Source):
        _refuse(options, collate_fn="a torch Dataset", loader="paths and URLs")
        return X
    if is_map_style(X) or is_iterable_style(X):
        _refuse(options, loader="paths and URLs")
        return _dataset(X, options)
    if are_paths(X):
        _refuse(options, collate_fn="a torch Dataset")
        return _files(X, options.loader, options.storage_options)
    if is_bag(X) or is_lazy_list(X):
        _refuse(options, collate_fn="a torch Dataset", loader="paths and URLs")
        return pairs(X)
    return None


def _brings_labels(X: Any) -> bool:
    kinds = (are_paths, is_map_style, is_iterable_style, is_bag, is_lazy_list)
    return isinstance(X, Source) or any(is_kind(X) for is_kind in kinds)


def _files(X: Any, loader: Any, storage: Mapping[str, Any] | None) -> Source:
    """What `export` or `file_batches` has written; else the files as they are."""
    folder = is_path(X) and not is_glob(X)
    if folder and loader is None and is_export(X, storage):
        return BatchFiles(X, storage)
    if folder and is_shards(X, storage):
        return Shards(X, loader, storage)
    return Files(X, loader, storage_options=storage)


def _dataset(X: Any, options: SourceOptions) -> Source:
    collation = Collation(options.collate_fn, options.batch_size, options.labelled)
    if is_iterable_style(X):
        return IterableStyle(X, collation=collation)
    return MapStyle(X, collation, options.shuffle_seed)


def _in_memory(X: Tree, y: Tree, options: SourceOptions) -> Source:
    labels = None if y is None or not is_frame(y) else check_columns(y, "y", label=True)
    x = _without_tables(X, "X", None)
    y = None if y is None else _without_tables(y, "y", labels)
    check_arrays(x, y)
    step_rows = options.batch_size * options.accumulate
    source = InMemory(x, y, step_rows, options.shuffle_seed)
    source.classes = labels
    return source


def _without_tables(tree: Tree, argument: str, classes: Any) -> Tree:
    named = batching.named(tree, argument)
    label = argument == "y"
    return batching.filled(tree, [_array(x, name, classes, label) for name, x in named])


def _array(leaf: Any, name: str, classes: Any, label: bool) -> Any:
    return columns_of(leaf, name, classes, label) if is_frame(leaf) else leaf


def _refuse(options: SourceOptions, **kinds: str) -> None:
    """Refuse options that do not go with the kind of data."""
    for name, kind in kinds.items():
        if getattr(options, name) is not None:
            raise OptionError(f"{name} is for {kind}, got other data")
