"""Convert the user's data to a `Source`, and determine the metadata of a source.

To add a kind of data, write a subclass of :class:`~daskdl.data.source.Source` and add a
row to the table `_KINDS`; :func:`source_of` uses the first row that matches X.
"""

import copy
import functools
import itertools
import logging
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Literal, NamedTuple, NoReturn, Self

import numpy as np
from dask.delayed import Delayed, delayed
from distributed import Client
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from daskdl.config import check_choice, check_count
from daskdl.data import batching, tables
from daskdl.data.batching import Batch, Transform, Tree, Weighted
from daskdl.data.dask_collections import (
    ExampleCollection,
    RowShare,
    is_dask_frame,
    is_partitioned,
    paired_bags,
    paired_lists,
    source_of_collections,
    stack,
    unzipped,
)
from daskdl.data.distribute import map_parts
from daskdl.data.files import files
from daskdl.data.named_columns import (
    NO_COLUMNS,
    Columns,
    FittedTransform,
    NamedRows,
    columns_in,
    few,
    names_of,
)
from daskdl.data.source import Facts, Source, facts_of, is_known
from daskdl.data.storage import are_paths
from daskdl.data.tables import InMemory, is_future
from daskdl.data.torch_datasets import (
    CollatedDataset,
    Collation,
    IterableStyle,
    MapStyle,
    Stream,
    arguments_of,
    is_arrow,
)
from daskdl.data.unreadable import UNREADABLE, is_left_out, join_readable, load_each
from daskdl.errors import DataError, ModelError, OptionError

logger = logging.getLogger(__name__)

OnBad = Literal["raise", "skip"]


@dataclass(frozen=True)
class ReadOptions:
    """The arguments that `fit`, `evaluate` and `predict` share, validated."""

    batch_size: int = 32
    transform: Transform | None = None
    on_bad_batch: OnBad = "raise"
    label: Any = None  # column or key of the labels; None: y has the labels, if any
    columns: Columns | None = None  # of the training data; None: untrained model
    # Digests of the normalizers that scaled the training rows; None: the model is
    # untrained, or there is nothing to compare.
    scaled_by: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_choice("on_bad_batch", self.on_bad_batch, ("raise", "skip"))
        if self.transform is not None and not callable(self.transform):
            raise OptionError(
                f"transform must be a function or None, got {self.transform!r}"
            )
        if isinstance(self.label, Sized) and not isinstance(
            self.label, str | bytes | tuple
        ):
            raise OptionError(
                "label must be the name of one column, got a "
                f"{type(self.label).__name__}; give several labels, or their values, "
                "as y"
            )

    @classmethod
    def scoring(
        cls,
        X: Any,
        batch_size: int | None,
        transform: Transform | None,
        label: Any,
        on_bad_batch: OnBad = "raise",
    ) -> tuple[Any, Self]:
        """Return the data, or the dataset of a `DataLoader`, and the scoring options.

        The batch size defaults to that of the `DataLoader`, otherwise to 64.
        """
        X, batches = loader_arguments(X, {"batch_size": batch_size}, {"batch_size": 64})
        return X, cls(batches["batch_size"], transform, on_bad_batch, label)

    @property
    def expected_columns(self) -> Columns:
        """The columns that the model was trained on, and normalizers were fitted on."""
        expected = dict(self.columns or {})
        for fitted in _fitted(self.transform):
            for place, names in fitted.columns.items():
                if expected.setdefault(place, names) != names:
                    raise DataError(
                        f"transform was fitted on the columns {few(names)} of {place}, "
                        f"and the model, or another transform, on "
                        f"{few(expected[place])}: fit it again, on a table with the "
                        "columns in this order"
                    )
        return expected

    @property
    def skips(self) -> bool:
        """Whether parts that cannot be read are left out."""
        return self.on_bad_batch == "skip"

    def weighted(self) -> "ReadOptions":
        """Return the options with a transform that also accepts weighted rows."""
        if self.transform is None:
            return self
        return replace(self, transform=KeepWeights(self.transform))


@dataclass(frozen=True)
class KeepWeights:
    """A transform that passes on the weights of the rows; picklable."""

    transform: Transform

    def __call__(self, batch: Batch) -> Batch:
        """Apply it to x and the labels."""
        x, y = batch
        if not isinstance(y, Weighted):
            return self.transform(batch)
        x, labels = self.transform((x, y.labels))
        if batching.length(x) != len(y.weight):
            raise ModelError(
                "transform must keep the rows of a batch, as they have weights, got "
                f"{batching.length(x)} rows for {len(y.weight)}"
            )
        return x, Weighted(labels, y.weight)


def loader_arguments(
    X: Any, arguments: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Fill in arguments that are None from a `DataLoader`, then from defaults.

    Args:
        X: Inputs, or inputs and labels together.
        arguments: Arguments of the user, by their names in `DataLoader`; None: not set.
        defaults: Defaults by name.

    Returns:
        The data, or the dataset of a `DataLoader`; and a value for each argument.

    Raises:
        OptionError: If an argument contradicts the loader.

    Example:
        >>> loader = DataLoader([1.0, 2.0], batch_size=2)
        >>> loader_arguments(loader, {"batch_size": 4}, {})
        Traceback (most recent call last):
        daskdl.errors.OptionError: batch_size=4 contradicts the DataLoader, which has \
batch_size=2: leave it out, or give X.dataset
    """
    loader: dict[str, Any] = {}
    if isinstance(X, DataLoader):
        loader = arguments_of(X)._asdict()
        X = loader["dataset"]
        if loader["collate_fn"] is not None:
            X = CollatedDataset(X, loader["collate_fn"])
        if loader["drop_last"] and "drop_last" not in arguments:
            raise OptionError(
                "every row is scored, but this DataLoader drops the last batch: use "
                "drop_last=False, or pass X.dataset"
            )
    chosen = {}
    for name, value in arguments.items():
        of_loader = loader.get(name)
        if None not in (value, of_loader) and value != of_loader:
            raise OptionError(
                f"{name}={value!r} contradicts the DataLoader, which has "
                f"{name}={of_loader!r}: leave it out, or give X.dataset"
            )
        if value is None:
            value = defaults.get(name) if of_loader is None else of_loader
        chosen[name] = value
    return X, chosen


@dataclass(frozen=True)
class Compose:
    """Two transforms in sequence; picklable."""

    before: Transform
    after: Transform

    def __call__(self, batch: Batch) -> Batch:
        """Apply both to a batch."""
        return self.after(self.before(batch))


def compose(*transforms: Transform | None) -> Transform | None:
    """Combine transforms in this order; None if there are none."""
    present = [transform for transform in transforms if transform is not None]
    return functools.reduce(Compose, present) if present else None


def keeps_columns(transform: Transform | None) -> bool:
    """Whether the columns after a transform are those before it."""
    if isinstance(transform, Compose):
        return keeps_columns(transform.before) and keeps_columns(transform.after)
    return transform is None or isinstance(transform, FittedTransform)


def _fitted(transform: Transform | None) -> Iterator[FittedTransform]:
    """Yield the transforms that know the columns of their data."""
    if isinstance(transform, FittedTransform):
        yield transform
    elif isinstance(transform, KeepWeights):
        yield from _fitted(transform.transform)
    elif isinstance(transform, Compose):
        yield from _fitted(transform.before)
        yield from _fitted(transform.after)


def scaling_of(source: Source | None, transform: Transform | None) -> tuple[str, ...]:
    """Return the digests of the normalizers that rows go through, in order.

    Args:
        source: The rows; None: rows that no normalizer has changed.
        transform: Applied to them.
    """
    before = () if source is None else source.scaled_by
    return (*before, *(fitted.digest for fitted in _fitted(transform)))


def warn_of_scaling(scaled_by: Sequence[str], trained: Sequence[str] | None) -> None:
    """Warn if rows are scaled twice, or differently from the training rows.

    Only the normalizers of daskdl are compared. Training rows that the user scaled in
    another way have no digest, so other rows may have more digests without a warning.
    """
    if len({*scaled_by}) < len(scaled_by):
        warnings.warn(
            "rows are scaled twice by the same normalizer: pass the normalizer only "
            "once, to daskdl.data.pack, to the Trainer, or as transform= of a method",
            stacklevel=3,
        )
    if trained is None or not Counter(trained) - Counter(scaled_by):
        return
    difference = "not scaled by it"
    if {*scaled_by} - {*trained}:
        difference = "scaled by another normalizer"
    warnings.warn(
        "the model was trained on rows scaled by a normalizer, in packed files or with "
        f"fit(transform=...), but these rows are {difference}: pass the same "
        "normalizer as transform= here, or pack the rows with it; "
        "Trainer(..., transform=...) applies the normalizer in all methods",
        stacklevel=3,
    )


# ---- the kinds of data


def _is_dataset(X: Any) -> bool:
    torch_style = isinstance(X, Dataset | Stream)  # an IterableDataset is a Dataset
    return torch_style or hasattr(X, "__getitems__")


def _is_bag(X: Any) -> bool:
    bag = sys.modules.get("dask.bag")
    return bag is not None and isinstance(X, bag.Bag)


def _is_lazy_list(X: Any) -> bool:
    return (
        isinstance(X, list)
        and bool(X)
        and all(isinstance(part, Delayed) or is_future(part) for part in X)
    )


def _has_datasets(X: Any) -> bool:
    return isinstance(X, Mapping) and any(map(_is_dataset, X.values()))


class _SourceOptions(NamedTuple):
    """The arguments of `source_of` that the constructors of sources need."""

    read: ReadOptions
    labelled: bool
    shuffle_seed: int | None
    step_rows: int
    classes: Sequence[str] | None


# What y was meant for, where X includes the labels.
_MEANT = "pass validation data as validation=..., the name of labels as label=..."


def _without_y(X: Any, y: Any) -> tuple[Any, Any]:
    if y is not None:
        raise DataError(
            f"y must be None for {tables.with_article(type(X).__name__)}, which "
            f"includes its labels; {_MEANT}"
        )
    return X, None


def _paths_without_y(X: Any, y: Any) -> tuple[Any, Any]:
    if y is not None:
        raise DataError(
            "y must be None for paths or URLs of files, which include their labels; "
            f"{_MEANT}; {tables.TEXT}"
        )
    return X, None


def _prepare_collated(X: CollatedDataset, y: Any) -> tuple[Any, Any]:
    if not isinstance(X.dataset, list):
        return X, _without_y(X.dataset, y)[1]
    y = _stacked_examples(y, "y")
    _check_items(X.dataset, y)
    return X, y


def _refuse_several_datasets(X: Any, y: Any) -> NoReturn:
    raise DataError(
        f"X is a {type(X).__name__} with the datasets {few(list(X))}; give one of "
        f"them, X[{next(iter(X))!r}], and others as validation"
    )


def _bag_of_pairs(X: Any, y: Any) -> tuple[Any, Any]:
    if y is None:
        return X, None
    if not _is_bag(y):
        raise DataError(_UNPAIRED.format("bag", type(y).__name__))
    return paired_bags(X, y), None


def _list_of_pairs(X: Any, y: Any) -> tuple[Any, Any]:
    if y is None:
        return X, None
    if not _is_lazy_list(y):
        kind = "list of Delayed objects and futures"
        raise DataError(_UNPAIRED.format(kind, type(y).__name__))
    return paired_lists(X, y), None


_UNPAIRED = (
    "y must be a {} with the same partitions as X, got a {}; or make X a collection of "
    "pairs (x, y) and omit y"
)


def _prepare_examples(X: Any, y: Any) -> tuple[Any, Any]:
    y = _stacked_examples(y, "y")
    _check_items(X, y)
    if y is None and X:
        X, y = unzipped(X, "X")
        y = _stacked_examples(y, "y")
    return _stacked_examples(X, "X"), y


def _check_items(items: Sequence[Any], y: Any) -> None:
    if y is not None and batching.is_leaf(y) and len(items) != len(y):
        raise DataError(
            f"X and y must have the same length, got {len(items)} and {len(y)}; an "
            "item of a list is an example: pass several inputs as a tuple, tuple(X)"
        )


def _prepare_arrays(X: Any, y: Any) -> tuple[Any, Any]:
    return _stacked_examples(X, "X"), _stacked_examples(y, "y")


def _refuse_label_of_files(X: Any, label: Any) -> NoReturn:
    raise OptionError(
        f"label={label!r} is for tables, dicts and datasets; for files give "
        f"daskdl.data.files(X, loader=daskdl.data.Csv(label={label!r})), or Parquet, "
        "Npz, ..."
    )


def _label_of_bag(X: Any, label: Any) -> tuple[Any, Any]:
    return X.map(tables.split_label, label), None


def _label_of_parts(X: Any, label: Any) -> tuple[Any, Any]:
    split = delayed(tables.split_label, pure=False)
    return [split(part, label) for part in X], None


def _label_of_items(X: Any, label: Any) -> tuple[Any, Any]:
    return [tables.split_label(item, label) for item in X], None


def _source_of_dataset(X: Any, y: Any, options: _SourceOptions) -> Source:
    collate_fn = None
    if isinstance(X, CollatedDataset):
        X, collate_fn = X.dataset, X.collate_fn
        X = Items(X, y) if isinstance(X, list) else X
    read = options.read
    collation = Collation(collate_fn, read.batch_size, options.labelled, read.label)
    if isinstance(X, IterableDataset | Stream):
        return IterableStyle(X, collation)
    return MapStyle(X, collation, options.shuffle_seed, options.classes, read.skips)


def _source_of_arrays(X: Tree, y: Tree, options: _SourceOptions) -> Source:
    leaves = batching.leaves_by_name((X, y)).values()
    if any(is_partitioned(leaf) for leaf in leaves):
        return source_of_collections(X, y)
    classes = tables.label_classes(y, "y")
    arrays = [
        tables.array_of(leaf, name, *((classes, True) if name.startswith("y") else ()))
        for name, leaf in batching.leaves_by_name((X, y)).items()
    ]
    x, labels = batching.with_leaves((X, y), arrays)
    tables.check_arrays(x, labels)
    names = columns_in(X, y)
    return InMemory(x, labels, options.step_rows, options.shuffle_seed, names, classes)


class _RandomSplit(NamedTuple):
    """A random split of rows, see `split_rows`."""

    fraction: float
    seed: int

    def rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the rows to train on, and of those to score."""
        held = round(count * self.fraction)
        if not 0 < held < count:
            raise DataError(
                f"validation={self.fraction!r} of {count} rows leaves {count - held} "
                f"rows to train on and {held} to score; give more rows, or "
                "validation=(X, y)"
            )
        order = np.random.default_rng([self.seed, count]).permutation(count)
        return np.sort(order[held:]), np.sort(order[:held])


Halves = tuple[tuple[Any, Any], tuple[Any, Any]]  # (X, y) to train on and to score


def _split_collated(X: CollatedDataset, y: Any, how: _RandomSplit) -> Halves:
    train, held = _kind_of(X.dataset).split(X.dataset, y, how)
    return (
        (replace(X, dataset=train[0]), train[1]),
        (replace(X, dataset=held[0]), held[1]),
    )


def _split_dataset(X: Any, y: Any, how: _RandomSplit) -> Halves:
    if not hasattr(X, "__len__"):
        return _split_arrays(X, y, how)
    # Datasets of Hugging Face keep their columns and classes.
    take = X.select if is_arrow(X) else functools.partial(Subset, X)
    train, held = (take(rows.tolist()) for rows in how.rows(len(X)))
    return (train, y), (held, y)


def _split_arrays(X: Any, y: Any, how: _RandomSplit) -> Halves:
    fraction = how.fraction
    leaves = batching.leaves_by_name((X, y))
    labels = batching.labels_of(y)
    rows = batching.leaves_by_name((X, labels)).values()
    if any(map(is_dask_frame, leaves.values())) and any(map(is_partitioned, rows)):
        source = source_of_collections(X, labels)
        if isinstance(y, Weighted):
            source = source.weighted(y.weight)
        train_share, held_share = (
            source.finished(RowShare(source.finish, fraction, how.seed, second))
            for second in (False, True)
        )
        return (train_share, None), (held_share, None)
    lengths = {}
    for name, leaf in leaves.items():
        length = None if _is_lazy_list(leaf) else tables.row_count(leaf)
        if length is None:
            raise DataError(
                f"validation={fraction!r} splits arrays, tensors, lists, tables, "
                "datasets with a length, Dask arrays and dataframes, but not "
                f"{name}, a {type(leaf).__name__}; split it yourself, and give "
                "validation=(X, y) or data that include labels"
            )
        lengths[name] = length
    if any(map(math.isnan, lengths.values())):
        raise DataError(
            f"validation={fraction!r} needs the lengths of the chunks, which Dask does "
            "not know; call compute_chunk_sizes() first, or give validation=(X, y)"
        )
    tables.check_lengths(lengths)
    train, held = (
        batching.with_leaves(
            (X, y), [tables.take(leaf, rows) for leaf in leaves.values()]
        )
        for rows in how.rows(next(iter(lengths.values())))
    )
    return train, held


class _Kind(NamedTuple):
    """A kind of data, a row of the table `_KINDS`.

    Attributes:
        holds: Whether X is of this kind.
        prepare: Converts X and y (None without labels) to the arguments of `source`;
            idempotent. Raises a DataError if this kind of data takes no y.
        split_label: Splits the label column or key from X, and returns X and y. None:
            the collation of the items splits it.
        source: Makes the source of prepared data.
        split: Splits the rows at random, see `split_rows`; raises a DataError if it
            cannot.
    """

    holds: Callable[[Any], bool]
    prepare: Callable[[Any, Any], tuple[Any, Any]]
    split_label: Callable[[Any, Any], tuple[Any, Any]] | None
    source: Callable[[Any, Any, _SourceOptions], Source]
    split: Callable[[Any, Any, _RandomSplit], Halves] = _split_arrays


# The order matters: `_kind_of` returns the first kind whose `holds` is true.
_KINDS = (
    _Kind(
        lambda X: isinstance(X, Source),
        _without_y,
        _refuse_label_of_files,
        lambda X, y, options: X,
    ),
    _Kind(
        are_paths,
        _paths_without_y,
        _refuse_label_of_files,
        lambda X, y, options: files(X),
    ),
    _Kind(
        lambda X: isinstance(X, CollatedDataset),
        _prepare_collated,
        None,
        _source_of_dataset,
        _split_collated,
    ),
    _Kind(_is_dataset, _without_y, None, _source_of_dataset, _split_dataset),
    _Kind(_has_datasets, _refuse_several_datasets, None, _source_of_dataset),
    _Kind(
        _is_bag,
        _bag_of_pairs,
        _label_of_bag,
        lambda X, y, options: ExampleCollection(X, bag=True),
    ),
    _Kind(
        _is_lazy_list,
        _list_of_pairs,
        _label_of_parts,
        lambda X, y, options: ExampleCollection(X, bag=False),
    ),
    _Kind(
        lambda X: isinstance(X, list),
        _prepare_examples,
        _label_of_items,
        _source_of_arrays,
    ),
    _Kind(lambda X: True, _prepare_arrays, tables.split_label, _source_of_arrays),
)


def _kind_of(X: Any) -> _Kind:
    return next(kind for kind in _KINDS if kind.holds(X))


def prepared(X: Any, y: Any, read: ReadOptions) -> tuple[Any, Any, ReadOptions]:
    """Normalize X and y to the forms that the constructors of sources accept.

    This function replaces a `DataLoader` by its dataset, a Delayed object by a list of
    one, and two bags or lists of Delayed objects by one of pairs. It splits a label
    column from X, and stacks lists of examples unless they have a collate function. It
    makes arrays of zarr lazy. Other data are returned unchanged, and `Weighted` labels
    keep their weights. The function is idempotent.
    """
    if isinstance(y, Weighted):
        weight = _lazy(y.weight)
        X, y, read = prepared(X, y.labels, read)
        return X, Weighted(y, weight), read
    if isinstance(X, DataLoader):  # of validation, or of a pass over all rows
        X, _ = loader_arguments(X, {"batch_size": None}, {})
    if isinstance(X, Delayed) or is_future(X):
        X, y = [X], y if y is None else [y]
    X, y = _lazy(X), _lazy(y)
    kind = _kind_of(X)
    if read.label is not None:
        if y is not None:
            raise OptionError(
                f"label={read.label!r} and y both give labels; leave one out"
            )
        if kind.split_label is not None:
            X, y = kind.split_label(X, read.label)
            read = replace(read, label=None)
    elif _names_columns(y, X):
        raise DataError(f"y must hold the labels, got {y!r}; write label={y!r}")
    X, y = kind.prepare(X, y)
    _check_dimensions(batching.leaves_by_name((X, y)))
    return X, y, read


def _lazy(tree: Tree) -> Tree:
    """Replace each array of zarr by a ``dask.array`` of whole rows."""
    zarr = sys.modules.get("zarr")
    if zarr is None or not any(
        isinstance(a, zarr.Array) for a in batching.leaves(tree)
    ):
        return tree
    import dask.array as da

    def lazy(leaf: Any) -> Any:
        if not isinstance(leaf, zarr.Array):
            return leaf
        rows = (getattr(leaf, "shards", None) or leaf.chunks)[0]
        return da.from_array(leaf, chunks=(rows, *leaf.shape[1:]))

    return batching.tree_map(lazy, tree)


def _check_dimensions(named: Mapping[str, Any]) -> None:
    """Refuse DataArrays whose rows are not the same, or are not whole.

    xarray aligns arrays by the labels of their dimensions, so rows that only have the
    same position must not be paired.
    """
    arrays = {
        name: leaf
        for name, leaf in named.items()
        if tables.is_data_array(leaf) and leaf.ndim
    }
    for (reference, expected), (name, array) in itertools.combinations(
        arrays.items(), 2
    ):
        rows = expected.dims[0]
        if array.dims[0] != rows:
            raise DataError(
                f"the first dimension is that of the examples, but {reference} "
                f"has {rows!r} and {name} {array.dims[0]!r}: transpose or rename one, "
                "leave it out, or pass .data to pair rows by position"
            )
        labels, others = (a.indexes.get(rows) for a in (expected, array))
        if labels is not None and others is not None and not labels.equals(others):
            raise DataError(
                f"{reference} and {name} differ in the coordinates of {rows!r}: align "
                "them with xarray.align, or pass .data to pair rows by position"
            )
    for name, array in arrays.items():
        split = [d for d in array.dims[1:] if len(array.chunksizes.get(d, ())) > 1]
        if split:
            raise DataError(
                f"{name} must be chunked along its first dimension only: write "
                f"{name}.chunk({dict.fromkeys(split, -1)})"
            )


def _names_columns(y: Any, X: Any) -> bool:
    """Whether y is a name, or a list of columns of X, instead of labels."""
    columns = names_of(X)
    if columns is None or isinstance(y, str):
        return columns is not None
    return isinstance(y, list) and bool(y) and set(map(str, y)) <= {*map(str, columns)}


def _stacked_examples(tree: Tree, name: str) -> Tree:
    """Make arrays of the lists of examples in a tree."""

    def array(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, list) or _is_lazy_list(leaf):
            return leaf
        if not leaf:
            raise DataError(f"{name} must not be empty, got an empty list")
        try:
            return stack(leaf)
        except DataError:
            raise
        except ValueError as error:
            raise DataError(
                f"the items of {name} must all have one shape: {error}; pad them to "
                f"one, or give daskdl.data.dataset({name}, collate_fn=...); several "
                "inputs are a tuple, tuple(X)"
            ) from error

    if batching.is_leaf(tree) and not isinstance(tree, list):
        return tree
    return batching.with_leaves(
        tree, [array(place, leaf) for place, leaf in batching.named_leaves(tree, name)]
    )


class Items(Dataset[Any]):
    """A dataset of a list of examples and, if given, their separate labels."""

    def __init__(self, X: Sequence[Any], y: Any) -> None:
        self._x, self._y = X, y

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> Any:
        if self._y is None:
            return self._x[index]
        return self._x[index], batching.rows(self._y, index)


def dataset(
    dataset: Any, collate_fn: Callable[[list[Any]], Any] | None = None
) -> CollatedDataset:
    """Combine a dataset, or a list of examples, with a collate function.

    Pass a `DataLoader`, or a dataset that needs no collate function, to `Trainer.fit`
    directly.

    Args:
        dataset: A torch dataset, map-style or iterable; a dataset of Hugging Face; a
            `daskdl.data.Stream`; or a list with an item for each example, whose labels
            may be given as y.
        collate_fn: Makes (x, y), or x alone, from a list of `batch_size` items, with
            one row for each item; it runs on the workers. None: torch's default.

    Returns:
        Data for `Trainer.fit` and everything else that takes data.

    Raises:
        OptionError: If an argument cannot be used.

    Example:
        >>> import torch
        >>> def padded(items):
        ...     rows, labels = zip(*items)
        ...     x = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
        ...     return x, torch.tensor(labels)
        >>> texts = [(torch.ones(2), 0), (torch.ones(3), 1)]
        >>> dataset(texts, collate_fn=padded).collate_fn(texts)[0].shape
        torch.Size([2, 3])
    """
    if isinstance(dataset, DataLoader):
        raise OptionError(
            "a DataLoader has its own collate_fn: give the DataLoader itself, or "
            "daskdl.data.dataset(loader.dataset, collate_fn=...)"
        )
    if _is_lazy_list(dataset):
        raise OptionError(
            "dataset must have its items in memory, got a list of Delayed objects and "
            "futures: collate the items in their tasks, and give the list itself"
        )
    if not (isinstance(dataset, list) or _is_dataset(dataset)):
        raise OptionError(
            "dataset must be a torch Dataset or a list of examples, got a "
            f"{type(dataset).__name__}"
        )
    if collate_fn is not None and not callable(collate_fn):
        raise OptionError(f"collate_fn must be a function or None, got {collate_fn!r}")
    return CollatedDataset(dataset, collate_fn)


def source_of(
    X: Any,
    y: Any = None,
    read: ReadOptions = ReadOptions(),
    *,
    shuffle_seed: int | None = None,
    labelled: bool = True,
    accumulate: int = 1,
    classes: Sequence[str] | None = None,
) -> Source:
    """Make a source from the user's data, its columns in the expected order.

    Args:
        X: Inputs, or inputs and labels together.
        y: Labels, or None.
        read: Arguments for reading.
        shuffle_seed: Seed of the random assignment of rows in memory, or of items of a
            dataset, to parts; None: in order.
        labelled: Whether labels are required.
        accumulate: Batches per step; a part in memory is a whole number of steps.
        classes: Names of the classes of labels that are text; None: those found.

    Warns:
        UserWarning: If either these data or the training data have column names, but
            not both. If rows are scaled twice, or differently from the training rows.
    """
    X, y, read = prepared(X, y, read)
    y, label_names = tables.number_labels(y, "y", classes)
    step_rows = read.batch_size * accumulate
    options = _SourceOptions(read, labelled, shuffle_seed, step_rows, classes)
    source = _kind_of(X).source(X, y, options)
    source.classes = label_names or source.classes
    warn_of_scaling(scaling_of(source, read.transform), read.scaled_by)
    expected = read.expected_columns
    trained = None if read.columns is None else expected
    return with_expected_columns(source, expected, trained, classes)


def with_expected_columns(
    source: Source,
    expected: Columns,
    trained: Columns | None,
    classes: Sequence[str] | None = None,
) -> Source:
    """Return the source with its columns in the expected order.

    Args:
        source: Rows of any kind.
        expected: Names of the columns, by place.
        trained: Those that a model was trained on; None: it has not been trained.
        classes: See `Source.arranged`.

    Warns:
        UserWarning: If either these data or the training data have column names, but
            not both. If the names are not known yet, a pass over the parts warns.
    """
    arranged = source.arranged(expected, classes)
    nameless_stream = source.sequential and source.columns == NO_COLUMNS
    if not expected and (trained is None or nameless_stream):
        return arranged  # without a look at the first rows, for which a stream is read
    if source.first_rows is not None and source.columns is not None:
        rows = NamedRows.of(source.first_rows, source.columns)
        rows.warn_of_positions(expected, trained)
    elif arranged.training_columns != trained:
        arranged = copy.copy(arranged)
        arranged.training_columns = trained
    return arranged


def weighted_source(X: Any, y: Any, read: ReadOptions, **options: Any) -> Source:
    """Make a source like `source_of`; labels may be `Weighted`."""
    if not isinstance(y, Weighted):
        return source_of(X, y, read, **options)
    names = ("X", "sample_weight")
    _check_dimensions(batching.leaves_by_name((X, y.weight), names))
    return source_of(X, y.labels, read, **options).weighted(_lazy(y.weight))


def infer_metadata(
    source: Source, client: Client | Literal[False], *, skips: bool = False
) -> Source:
    """Return the source with the lengths of its parts and its first rows.

    If they are unknown, one pass over all parts determines them, from file headers
    where possible. With `skips`, a part that cannot be read counts as empty.
    """
    if is_known(source):
        return source
    logger.info("counting the rows of %s parts", source.parts)
    facts_of_part = functools.partial(_facts_and_left_out, skips=skips)
    counted = sorted(map_parts(source, facts_of_part, client), key=itemgetter(0))
    bad = [
        part for part, (fact, _) in counted if fact is None or fact.first_rows is None
    ]
    if bad:
        logger.warning("%s parts cannot be read and are left out: %s", len(bad), bad)
    empty: Any = None
    facts = [fact or Facts(0, empty) for _, (fact, _) in counted]
    rows = sum(fact.rows for fact in facts)
    if rows == 0 or all(fact.first_rows is None for fact in facts):
        unread = f", of which {len(bad)} cannot be read" if bad else ""
        raise DataError(
            f"X must not be empty, got no rows in {source.parts} parts{unread}"
        )
    logger.info("there are %s rows in %s parts", rows, source.parts)
    known = source.with_facts(facts)
    known.left_out = sum(left_out for _, (_, left_out) in counted)
    specs = [
        batching.row_spec(fact.first_rows)
        if fact.rows and fact.first_rows is not None
        else ()
        for fact in facts
    ]
    forms = [
        (spec, _sorted_names(fact)) for spec, fact in zip(specs, facts, strict=True)
    ]
    ((form, _),) = Counter(form for form in forms if form[0]).most_common(1)
    usual_first = facts[forms.index(form)].first_rows
    if source.first_rows is None:
        known.first_rows = usual_first
    if len({*specs} - {()}) > 1:
        kept = known.parts == source.parts  # otherwise parts without rows are left out
        known.part_specs = specs if kept else [*filter(None, specs)]
    assert usual_first is not None, "a part without rows has no spec"
    usual_rows = NamedRows.of(usual_first)
    for part, fact in enumerate(facts):
        if fact.rows and fact.first_rows is not None:
            rows_of_part = NamedRows.of(fact.first_rows)
            # Parts with other names are skipped when they are loaded; numbers and
            # categories can only be told apart here.
            if not skips or (rows_of_part.classes is None) != (
                usual_rows.classes is None
            ):
                _check_alike(rows_of_part, usual_rows, source.name(part))
    known.classes = known.classes or usual_rows.classes
    columns = {**usual_rows.columns, **(source.columns or {})}
    if source.first_rows is None:
        _warn_of_parts(source, facts, columns)
    return known.arranged(columns, known.classes)


def _warn_of_parts(source: Source, facts: Sequence[Facts], columns: Columns) -> None:
    """Warn if columns are matched by position, once per set of named tables."""
    seen = set()
    for part, fact in enumerate(facts):
        if fact.rows and fact.first_rows is not None:
            rows = NamedRows.of(fact.first_rows)
            if (places := frozenset(rows.columns)) not in seen:
                seen.add(places)
                name = source.name(part)
                rows.warn_of_positions(columns, source.training_columns, name)


def _sorted_names(fact: Facts) -> Sequence[tuple[str, Sequence[str]]]:
    """Return the sorted column names of each table of a part, for comparison."""
    if fact.first_rows is None:
        return ()
    columns = NamedRows.of(fact.first_rows).columns
    return tuple((place, tuple(sorted(columns[place]))) for place in sorted(columns))


def _check_alike(rows: NamedRows, usual: NamedRows, name: str) -> None:
    """Refuse a part whose tables have other columns, or whose labels other classes."""
    rows.arranged(usual.columns, name)
    if rows.classes != usual.classes:
        tables.check_classes(rows.classes, usual.classes or (), f"y of {name}")


def with_columns(source: Source, client: Any) -> Source:
    """Return the source with the names of its columns, those of its first rows.

    If these are unknown, parts are loaded, one after the other, until one has rows.
    """
    if source.columns is not None:
        return source
    for part in range(source.parts):
        for _, facts in map_parts(source, _readable_facts, client, parts=[part]):
            if facts is not None and facts.rows and facts.first_rows is not None:
                rows = NamedRows.of(facts.first_rows)
                return source.arranged(rows.columns, rows.classes)
    return source


def _readable_facts(source: Source, part: int) -> Facts | None:
    try:
        return source.facts(part)
    except UNREADABLE:  # the pass over all parts reports it
        return None


def _facts_and_left_out(
    source: Source, part: int, skips: bool
) -> tuple[Facts | None, int]:
    """Return the facts of a part, or None, and the number of left out examples."""
    try:
        return source.facts(part), 0
    except UNREADABLE as error:
        pieces = source.pieces(part) if skips else ()
        if not is_left_out(error, source.name(part), skips, pieces):
            raise
        rows, files = join_readable(load_each(pieces, skips=True))
        facts = None if rows is None else facts_of(rows)
        if source.lengths is not None:
            # Examples that cannot be read keep their places, and are counted later.
            return Facts(source.lengths[part], facts and facts.first_rows), 0
        return facts, max(len(pieces), 1) - files


# Small parts are merged as long as at least this many parts remain, so that replicas
# wait for at most 1/64 of an epoch at its end, and as long as no merged part exceeds
# these rows and bytes, which take milliseconds to train on and little memory.
MIN_PARTS = 64
MERGED_ROWS = 1024
MERGED_BYTES = 2**20


def merge_small_parts(source: Source) -> Source:
    """Return the same rows in fewer parts, each of which costs a millisecond to lease.

    The result does not depend on the number of replicas. A source whose lengths or
    first rows are unknown is returned unchanged.
    """
    lengths, first_rows = source.lengths, source.first_rows
    if not source.mergeable or lengths is None or first_rows is None:
        return source
    most_of_bytes = MERGED_BYTES // batching.row_bytes(first_rows)
    most = min(sum(lengths) // MIN_PARTS, MERGED_ROWS, most_of_bytes)
    groups: list[list[int]] = []
    rows, group_spec = most, None
    for part, length in enumerate(lengths):
        spec = None if source.part_specs is None else source.part_specs[part]
        if length == 0:
            continue
        if rows + length > most or spec != group_spec:
            groups.append([])
            rows, group_spec = 0, spec
        groups[-1].append(part)
        rows += length
    if len(groups) == sum(length > 0 for length in lengths):
        return source
    logger.info("%s parts are merged into %s", source.parts, len(groups))
    return source.merged(groups)


def split_rows(X: Any, y: Any, fraction: float, seed: int) -> Halves:
    """Split rows at random; the same seed and number of rows give the same split.

    X and y are arrays, tensors, tables, Dask arrays and dataframes in tuples and dicts,
    or X is a dataset with a length. The result is two pairs (x, y) of the same types;
    rows keep their order, and `fraction` of them are in the second. Dask dataframes
    become sources of the same partitions, whose rows are split when they are computed.

    Example:
        >>> rest, chosen = split_rows(np.arange(4), None, 0.25, seed=0)
        >>> len(rest[0]), len(chosen[0])
        (3, 1)
    """
    if not 0 < fraction < 1:
        raise OptionError(
            "validation must be (X, y), data, or a fraction of the rows in (0, 1), got "
            f"{fraction!r}"
        )
    return _kind_of(X).split(X, y, _RandomSplit(fraction, seed))
