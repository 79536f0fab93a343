"""The user's data: arguments for reading, a `Source` for each type, and its metadata.

A new kind of data is a subclass of :class:`~daskdl.data.source.Source` and a line in
:func:`source_of`.
"""

import copy
import functools
import logging
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Literal, Self

import numpy as np
from dask.delayed import Delayed
from distributed import Client
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from daskdl.config import check_choice, check_count
from daskdl.data import batching, tables
from daskdl.data.batching import Batch, Transform, Tree, Weighted
from daskdl.data.checks import UNREADABLE, is_left_out, join_readable, load_each
from daskdl.data.dask_collections import (
    Share,
    columns,
    is_bag,
    is_dask_frame,
    is_future,
    is_lazy_list,
    paired,
    pairs,
    stack,
    unzipped,
    with_label,
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
)
from daskdl.data.source import Facts, Source, facts_of, is_known
from daskdl.data.storage import are_paths
from daskdl.data.tables import InMemory, is_dask_array, is_frame
from daskdl.data.torch_datasets import (
    CollatedDataset,
    Collation,
    IterableStyle,
    MapStyle,
    is_iterable_style,
    is_map_style,
    loader_options,
)
from daskdl.errors import DataError, ModelError, OptionError

logger = logging.getLogger(__name__)

OnBad = Literal["raise", "skip"]
Approach = Literal["direct", "export"]


@dataclass(frozen=True)
class ReadOptions:
    """The arguments that `fit`, `evaluate` and `predict` share, validated."""

    batch_size: int = 32
    transform: Transform | None = None
    on_bad_batch: OnBad = "raise"
    label: Any = None  # column or key of the labels; None: no labels, or they are y
    columns: Columns | None = None  # that the model was trained on; None: none yet
    # Digests of the normalizers of the rows that the model was trained on.
    scaled_by: Sequence[str] | None = None  # None: not trained, or nothing to compare

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_choice("on_bad_batch", self.on_bad_batch, ("raise", "skip"))
        if self.transform is not None and not callable(self.transform):
            raise OptionError(
                f"transform must be a function or None, got {self.transform!r}"
            )
        if isinstance(self.label, list | np.ndarray) or is_frame(self.label):
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
        """Return the data, the dataset of a `DataLoader`, and the options to score it.

        The batch size is that of a `DataLoader`, else 64.
        """
        X, batches = batch_options(X, {"batch_size": batch_size}, {"batch_size": 64})
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
        """Return the same for batches whose rows have weights."""
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


def batch_options(
    X: Any, given: Mapping[str, Any], usual: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Take batches as the user's arguments say, else as a `DataLoader` does.

    Args:
        X: Inputs, or inputs and labels together.
        given: Arguments by name; None: not given.
        usual: Defaults by name.

    Returns:
        The data, the dataset of a loader; and a value for each argument.

    Example:
        >>> loader = DataLoader([1.0, 2.0], batch_size=2)
        >>> batch_options(loader, {"batch_size": 4}, {})
        Traceback (most recent call last):
        daskdl.errors.OptionError: batch_size=4 contradicts the DataLoader, which has \
batch_size=2: leave it out, or give X.dataset
    """
    said: dict[str, Any] = {}
    if isinstance(X, DataLoader):
        said = loader_options(X)._asdict()
        X = said["dataset"]
        if said["collate_fn"] is not None:
            X = CollatedDataset(X, said["collate_fn"])
        if said["drop_last"] and "drop_last" not in given:
            raise OptionError(
                "a DataLoader with drop_last=True leaves rows out, and each row is "
                "scored: make it without, or give X.dataset"
            )
    chosen = {}
    for name, value in given.items():
        own = said.get(name)
        if value is not None and own is not None and value != own:
            raise OptionError(
                f"{name}={value!r} contradicts the DataLoader, which has {name}={own!r}"
                ": leave it out, or give X.dataset"
            )
        own = own if value is None else value
        chosen[name] = usual.get(name) if own is None else own
    return X, chosen


@dataclass(frozen=True)
class Compose:
    """Two transforms in sequence; picklable."""

    first: Transform
    then: Transform

    def __call__(self, batch: Batch) -> Batch:
        """Apply both to a batch."""
        return self.then(self.first(batch))


def compose(*transforms: Transform | None) -> Transform | None:
    """Combine transforms in this order; None if there are none."""
    given = [transform for transform in transforms if transform is not None]
    return functools.reduce(Compose, given) if given else None


def keeps_columns(transform: Transform | None) -> bool:
    """Whether the columns after a transform are those before it."""
    if isinstance(transform, Compose):
        return keeps_columns(transform.first) and keeps_columns(transform.then)
    return transform is None or isinstance(transform, FittedTransform)


def _fitted(transform: Transform | None) -> Iterator[FittedTransform]:
    """Yield the transforms that know the columns of their data."""
    if isinstance(transform, FittedTransform):
        yield transform
    elif isinstance(transform, KeepWeights):
        yield from _fitted(transform.transform)
    elif isinstance(transform, Compose):
        yield from _fitted(transform.first)
        yield from _fitted(transform.then)


def scaling_of(source: Source | None, transform: Transform | None) -> tuple[str, ...]:
    """Return the digests of the normalizers that rows go through, in order.

    Args:
        source: The rows; None: rows that no normalizer has changed.
        transform: Applied to them.
    """
    before = () if source is None else source.scaled_by
    return (*before, *(fitted.digest for fitted in _fitted(transform)))


def warn_of_scaling(scaled_by: Sequence[str], trained: Sequence[str] | None) -> None:
    """Warn of rows that are scaled twice, or otherwise than those of the training.

    Rows that are scaled before they are given, and never by a normalizer, are not
    known as such: so the training rows may lack a normalizer that others have.
    """
    if len({*scaled_by}) < len(scaled_by):
        warnings.warn(
            "rows are scaled twice by the same normalizer: give it only once, to "
            "daskdl.data.pack, to the Trainer or as transform= of its method",
            stacklevel=3,
        )
    if trained is None or not Counter(trained) - Counter(scaled_by):
        return
    other = "scaled by another one" if {*scaled_by} - {*trained} else "not scaled by it"
    warnings.warn(
        "the model is trained on rows that a normalizer scaled, in packed files or as "
        f"transform= of fit, and these rows are {other}: give the normalizer as "
        "transform= here too, or pack them with it; with Trainer(..., transform=) "
        "it scales the rows of all methods",
        stacklevel=3,
    )


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
        shuffle_seed: Seed of the order in which rows in memory and items are dealt to
            parts; None keeps the order.
        labelled: Whether labels are required.
        accumulate: Batches per step; parts of data in memory are whole steps.
        classes: Names of the classes of labels that are text; None: those found.

    Warns:
        UserWarning: If only the data, or only those that the model was trained on, have
            names of columns. If the rows are scaled twice, or otherwise than those that
            the model was trained on.
    """
    source = _unarranged(
        X, y, read, shuffle_seed, labelled, accumulate=accumulate, classes=classes
    )
    warn_of_scaling(scaling_of(source, read.transform), read.scaled_by)
    expected = read.expected_columns
    trained = None if read.columns is None else expected
    return matched(source, expected, trained, classes)


def matched(
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
        UserWarning: If only the data, or only those that the model was trained on, have
            names of columns. Where names are not known yet, the first look at the parts
            warns.
    """
    arranged = source.arranged(expected, classes)
    nameless_stream = source.sequential and source.columns == NO_COLUMNS
    if not expected and (trained is None or nameless_stream):
        return arranged  # without a look at the first rows, for which a stream is read
    if source.first is not None and source.columns is not None:
        rows = NamedRows.of(source.first, source.columns)
        rows.warn_of_positions(expected, trained)
    elif arranged.trained != trained:
        arranged = copy.copy(arranged)
        arranged.trained = trained
    return arranged


def _unarranged(
    X: Any,
    y: Any,
    read: ReadOptions,
    shuffle_seed: int | None,
    labelled: bool,
    *,
    accumulate: int,
    classes: Sequence[str] | None,
) -> Source:
    """Make a source from the user's data as they are."""
    X, y, read = unified(X, y, read)
    y, names = tables.number_labels(y, "y", classes)
    collate_fn = None
    if isinstance(X, CollatedDataset):
        X, collate_fn = X.dataset, X.collate_fn
        if isinstance(X, list):
            X, y = Items(X, y), None
    paths, dataset = are_paths(X), is_map_style(X) or is_iterable_style(X)
    lazy = is_bag(X) or is_lazy_list(X)
    if y is not None and (paths or dataset or isinstance(X, Source)):
        shown = f"a {type(X).__name__}, which brings its labels"
        if paths:
            shown = f"paths or URLs of files, which bring their labels; {tables.TEXT}"
        raise DataError(f"y must not be given with {shown}")
    if isinstance(X, Source):
        return X
    source: Source
    if dataset:
        collation = Collation(collate_fn, read.batch_size, labelled, read.label)
        if is_iterable_style(X):
            return IterableStyle(X, collation)
        source = MapStyle(X, collation, shuffle_seed, classes, read.skips)
        source.classes = names or source.classes
        return source
    if paths:
        return files(X)
    if lazy:
        return pairs(X)
    leaves = batching.named_both((X, y)).values()
    if any(is_dask_array(leaf) or is_dask_frame(leaf) for leaf in leaves):
        return columns(X, y)
    source = _in_memory(X, y, read.batch_size * accumulate, shuffle_seed)
    source.classes = names or source.classes
    return source


def unified(X: Any, y: Any, read: ReadOptions) -> tuple[Any, Any, ReadOptions]:
    """Bring the forms in which people have data to those that sources are made of.

    A `DataLoader` becomes its dataset; a Delayed object a list of one; two bags, or
    lists of Delayed, one of pairs; labels that are a column of X become y; and lists of
    examples arrays, unless there is a collate function. Other data are returned
    unchanged, and so are results of this function.
    """
    if isinstance(X, DataLoader):  # of validation, or of a pass over all rows
        X, _ = batch_options(X, {"batch_size": None}, {})
    if isinstance(X, Delayed) or is_future(X):
        X, y = [X], y if y is None else [y]
    if isinstance(X, Mapping) and any(is_map_style(one) for one in X.values()):
        raise DataError(
            f"X is a {type(X).__name__} with the datasets {few(list(X))}; give "
            f"one of them, X[{next(iter(X))!r}], and others as validation"
        )
    lazy = is_bag(X) or is_lazy_list(X)
    if lazy and y is not None:
        X, y = paired(X, y), None
    if read.label is not None:
        X, y, read = _label_apart(X, y, read)
    y = _stacked(y, "y")
    if lazy or are_paths(X):
        return X, y, read
    examples = X.dataset if isinstance(X, CollatedDataset) else X
    if examples is not X and is_lazy_list(examples):
        raise OptionError(
            "daskdl.data.dataset is for items in memory, got a list of Delayed objects "
            "and futures: collate the items in their tasks, and give the list itself"
        )
    if not isinstance(examples, list):
        return _stacked(X, "X"), y, read
    if y is not None and batching.is_leaf(y) and len(examples) != len(y):
        raise DataError(
            f"X and y must have the same length, got {len(examples)} and {len(y)}; a "
            "list has an item for each example, and several inputs are a tuple, "
            "tuple(X)"
        )
    if X is not examples:
        return X, y, read
    if y is None and X:
        X, y = unzipped(X, "X")
        y = _stacked(y, "y")
    return _stacked(X, "X"), y, read


def _label_apart(X: Any, y: Any, read: ReadOptions) -> tuple[Any, Any, ReadOptions]:
    """Split X into inputs and labels; items of datasets are split when collated."""
    label = read.label
    if y is not None:
        raise OptionError(f"label={label!r} and y both give labels; leave one out")
    if are_paths(X) or isinstance(X, Source):
        raise OptionError(
            f"label={label!r} is for tables, dicts and datasets; for files give "
            f"daskdl.data.files(X, loader=daskdl.data.Csv(label={label!r})), or "
            "Parquet, Npz, ..."
        )
    if isinstance(X, CollatedDataset) or is_map_style(X) or is_iterable_style(X):
        return X, y, read
    if is_bag(X) or is_lazy_list(X):
        X = with_label(X, label)
    elif not isinstance(X, list):
        X, y = tables.split_label(X, label)
    else:
        X = [tables.split_label(item, label) for item in X]
    return X, y, replace(read, label=None)


def _stacked(tree: Tree, name: str) -> Tree:
    """Make arrays of the lists of examples in a tree."""

    def array(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, list) or is_lazy_list(leaf):
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
    return batching.filled(tree, [array(*one) for one in batching.named(tree, name)])


class Items(Dataset[Any]):
    """A list of examples for a collate function, with or without labels apart."""

    def __init__(self, X: Sequence[Any], y: Any) -> None:
        self._x, self._y = X, y

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> Any:
        if self._y is None:
            return self._x[index]
        return self._x[index], batching.rows(self._y, index)


def _in_memory(X: Tree, y: Tree, step_rows: int, shuffle_seed: int | None) -> Source:
    classes = tables.check_columns(y, "y", label=True) if is_frame(y) else None
    arrays = []
    for name, leaf in batching.named_both((X, y)).items():
        array, label = leaf, name.startswith("y")
        if is_frame(leaf):
            array = tables.columns_of(leaf, name, classes if label else None, label)
        arrays.append(array)
    x, labels = batching.filled((X, y), arrays)
    tables.check_arrays(x, labels)
    source = InMemory(x, labels, step_rows, shuffle_seed, columns_in(X, y))
    source.classes = classes
    return source


def weighted_source(X: Any, y: Any, read: ReadOptions, **options: Any) -> Source:
    """Make a source like `source_of`; labels in memory may be `Weighted`."""
    if not isinstance(y, Weighted):
        return source_of(X, y, read, **options)
    weight = y.weight
    source = source_of(X, y.labels, read, **options)
    if not isinstance(source, InMemory) or source.whole[1] is None:
        raise DataError(
            "sample_weight is for X and y in memory; for other data, make the weights "
            "a part of X, X=(X, weight), and weigh the rows in a step"
        )
    x, labels = source.whole
    rows = batching.length(x)
    try:
        found = np.asarray(weight, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.zeros(0)
    if found.shape != (rows,):
        shape = getattr(weight, "shape", None) or type(weight).__name__
        raise DataError(
            f"sample_weight must have one number for each of {rows} rows, got {shape}"
        )
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if len(wrong) or not found.any():
        at = wrong[0] if len(wrong) else 0
        raise DataError(
            "sample_weight must be finite numbers >= 0, not all zero, got "
            f"sample_weight[{at}] = {found[at]}"
        )
    step_rows = read.batch_size * options.get("accumulate", 1)
    seed = options.get("shuffle_seed")
    weighted = InMemory(x, Weighted(labels, found), step_rows, seed)
    weighted.columns = source.columns
    weighted.classes = source.classes
    return weighted


def infer_metadata(
    source: Source, client: Client | Literal[False], *, skips: bool = False
) -> Source:
    """Return the source with the lengths of its parts and its first rows.

    If these are unknown, each part is loaded once. With `skips`, a part that cannot be
    read counts as empty.
    """
    if is_known(source):
        return source
    logger.info("the rows of %s parts are counted, once", source.parts)
    look = functools.partial(_look, skips=skips)
    found = sorted(map_parts(source, look, client), key=itemgetter(0))
    seen = [one for _, one in found]
    bad = [part for part, (facts, _) in found if facts is None or facts.first is None]
    if bad:
        logger.warning("%s parts cannot be read and are left out: %s", len(bad), bad)
    empty: Any = None
    facts = [Facts(0, empty) if one is None else one for one, _ in seen]
    rows = sum(fact.rows for fact in facts)
    if rows == 0 or all(fact.first is None for fact in facts):
        unread = f", of which {len(bad)} cannot be read" if bad else ""
        raise DataError(
            f"X must not be empty, got no rows in {source.parts} parts{unread}"
        )
    logger.info("there are %s rows in %s parts", rows, source.parts)
    known = source.known(facts)
    known.left_out = sum(left_out for _, left_out in seen)
    kinds = [
        batching.kinds(fact.first) if fact.rows and fact.first is not None else ()
        for fact in facts
    ]
    forms = [
        (kind, _sorted_names(fact)) for kind, fact in zip(kinds, facts, strict=True)
    ]
    ((form, _),) = Counter(form for form in forms if form[0]).most_common(1)
    usual_first = facts[forms.index(form)].first
    if source.first is None:
        known.first = usual_first
    if len({*kinds} - {()}) > 1:
        kept = known.parts == source.parts  # otherwise parts without rows are left out
        known.unlike = kinds if kept else [*filter(None, kinds)]
    assert usual_first is not None, "a part without rows has no kinds"
    usual_rows = NamedRows.of(usual_first)
    for part, fact in enumerate(facts):
        if fact.rows and fact.first is not None:
            rows_of_part = NamedRows.of(fact.first)
            # Parts with other names are skipped when they are loaded; numbers and
            # categories can only be told apart here.
            if not skips or (rows_of_part.classes is None) != (
                usual_rows.classes is None
            ):
                _check_alike(rows_of_part, usual_rows, source.name(part))
    known.classes = known.classes or usual_rows.classes
    columns = {**usual_rows.columns, **(source.columns or {})}
    if source.first is None:
        _warn_of_parts(source, facts, columns)
    return known.arranged(columns, known.classes)


def _warn_of_parts(source: Source, facts: Sequence[Facts], columns: Columns) -> None:
    """Warn where columns can only be matched by position, once for parts alike."""
    seen = set()
    for part, fact in enumerate(facts):
        if fact.rows and fact.first is not None:
            rows = NamedRows.of(fact.first)
            if (places := frozenset(rows.columns)) not in seen:
                seen.add(places)
                rows.warn_of_positions(columns, source.trained, source.name(part))


def _sorted_names(fact: Facts) -> Sequence[tuple[str, Sequence[str]]]:
    """Names of the columns of a part by place, in whatever order they are."""
    if fact.first is None:
        return ()
    columns = NamedRows.of(fact.first).columns
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
            if facts is not None and facts.rows and facts.first is not None:
                rows = NamedRows.of(facts.first)
                return source.arranged(rows.columns, rows.classes)
    return source


def _readable_facts(source: Source, part: int) -> Facts | None:
    try:
        return source.look(part)
    except UNREADABLE:  # the pass over all parts reports it
        return None


def _look(source: Source, part: int, skips: bool) -> tuple[Facts | None, int]:
    """Facts of a part, or None if it cannot be read; number of bad examples."""
    try:
        return source.look(part), 0
    except UNREADABLE as error:
        separate = source.separate(part) if skips else ()
        if not is_left_out(error, source.name(part), skips, separate):
            raise
        rows, files = join_readable(load_each(separate, skips=True))
        first = None if rows is None else facts_of(rows)
        if source.lengths is not None:
            # Examples that cannot be read keep their places, and are counted later.
            return Facts(source.lengths[part], first and first.first), 0
        return first, max(len(separate), 1) - files


# Small parts are merged while this many remain, so that replicas wait for 1/64 of an
# epoch at most, and while no part exceeds these rows and bytes: some milliseconds of
# training, and little memory.
LEAST_PARTS = 64
MERGED_ROWS = 1024
MERGED_BYTES = 2**20


def merge_small_parts(source: Source) -> Source:
    """Return the same rows in fewer parts, each of which costs a millisecond to lease.

    The result does not depend on the number of replicas. A source whose lengths or
    first rows are unknown is returned unchanged.
    """
    lengths, first = source.lengths, source.first
    if not source.given or lengths is None or first is None:
        return source
    row_bytes = max(batching.nbytes(first) // batching.length(first), 1)
    most = min(sum(lengths) // LEAST_PARTS, MERGED_ROWS, MERGED_BYTES // row_bytes)
    groups: list[list[int]] = []
    rows, kinds = most, None
    for part, own in enumerate(lengths):
        unlike = None if source.unlike is None else source.unlike[part]
        if own == 0:
            continue
        if rows + own > most or unlike != kinds:
            groups.append([])
            rows, kinds = 0, unlike
        groups[-1].append(part)
        rows += own
    if len(groups) == sum(own > 0 for own in lengths):
        return source
    logger.info("%s parts are put together to %s", source.parts, len(groups))
    return source.together(groups)


def split_rows(
    X: Any, y: Any, fraction: float, seed: int
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
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

    def parts_of(rows: int) -> tuple[np.ndarray, np.ndarray]:
        count = round(rows * fraction)
        if not 0 < count < rows:
            raise DataError(
                f"validation={fraction!r} of {rows} rows leaves {rows - count} rows to "
                f"train on and {count} to score; give more rows, or validation=(X, y)"
            )
        order = np.random.default_rng([seed, rows]).permutation(rows)
        return np.sort(order[count:]), np.sort(order[:count])

    if isinstance(X, CollatedDataset):
        (train_X, train_y), (held_X, held_y) = split_rows(X.dataset, y, fraction, seed)
        return (
            (replace(X, dataset=train_X), train_y),
            (replace(X, dataset=held_X), held_y),
        )
    if is_map_style(X) and hasattr(X, "__len__"):
        # Datasets of Hugging Face keep their columns and classes.
        own = type(X).__module__.partition(".")[0] == "datasets"
        take = X.select if own else functools.partial(Subset, X)
        rest, chosen = (take(which.tolist()) for which in parts_of(len(X)))
        return (rest, y), (chosen, y)
    leaves = batching.named_both((X, y))
    if leaves and all(map(is_dask_frame, leaves.values())):
        whole = columns(X, y)
        shares = (
            whole.finished(Share(whole.finish, fraction, seed, second))
            for second in (False, True)
        )
        rest, chosen = ((share, None) for share in shares)
        return rest, chosen
    for name, leaf in leaves.items():
        listed = isinstance(leaf, list) and not is_lazy_list(leaf)
        arrays = isinstance(leaf, np.ndarray | Tensor) or is_dask_array(leaf)
        if not (listed or arrays or is_frame(leaf)):
            raise DataError(
                f"validation={fraction!r} splits arrays, tensors, lists, tables, "
                "datasets with a length, Dask arrays and dataframes, but not "
                f"{name}, a {type(leaf).__name__}; split it yourself, and give "
                "validation=(X, y) or data that include labels"
            )
    lengths = {
        name: leaf.shape[0] if hasattr(leaf, "shape") else len(leaf)
        for name, leaf in leaves.items()
    }
    if any(map(math.isnan, lengths.values())):
        raise DataError(
            f"validation={fraction!r} needs the lengths of the chunks, which Dask does "
            "not know; call compute_chunk_sizes() first, or give validation=(X, y)"
        )
    tables.check_lengths(lengths)
    split = [
        [_taken(leaf, which) for leaf in leaves.values()]
        for which in parts_of(next(iter(lengths.values())))
    ]
    rest, chosen = (batching.filled((X, y), one) for one in split)
    return rest, chosen


def _taken(leaf: Any, which: np.ndarray) -> Any:
    if isinstance(leaf, list):
        return [leaf[i] for i in which]
    if is_frame(leaf):
        return leaf.iloc[which] if hasattr(leaf, "iloc") else leaf.take(which)
    return leaf[which]
