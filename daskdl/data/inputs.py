"""How data are to be read, as the arguments of `fit`, `evaluate` and `predict` say.

Which class knows the kind of data that the user gave.

A new kind is a subclass of :class:`~daskdl.data.source.Source` in a file of its own,
and a line in :func:`source_of`.

What has to be known of data before anybody trains on them, and is not.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from distributed import Client
from torch.utils.data import DataLoader

from daskdl.config import check_choice, check_count
from daskdl.data import batching
from daskdl.data.batch_files import BatchFiles, is_export
from daskdl.data.batching import Batch, Kinds, Transform, Tree
from daskdl.data.checks import (
    UNREADABLE,
    is_left_out,
    join_readable,
    load_each,
)
from daskdl.data.dask_collections import (
    columns,
    is_bag,
    is_dask_frame,
    is_lazy_list,
    pairs,
)
from daskdl.data.distribute import map_parts
from daskdl.data.files import Files
from daskdl.data.formats import Loader, loader_of
from daskdl.data.shards import Shards, is_shards
from daskdl.data.source import Facts, Source, facts_of, is_known
from daskdl.data.storage import are_paths, is_glob, is_path
from daskdl.data.tables import (
    TEXT,
    InMemory,
    check_arrays,
    check_columns,
    columns_of,
    is_dask_array,
    is_frame,
)
from daskdl.data.torch_datasets import (
    Collation,
    IterableStyle,
    MapStyle,
    is_iterable_style,
    is_map_style,
)
from daskdl.errors import DataError, OptionError

logger = logging.getLogger(__name__)

OnBad = Literal["raise", "skip"]
Approach = Literal["direct", "export"]


@dataclass(frozen=True)
class SourceOptions:
    """How parts are made of what the user gave.

    Attributes:
        batch_size: Rows per batch.
        shuffle_seed: Of the order in which data in memory are dealt out, or None.
        loader: Makes (x, y) of a file.
        collate_fn: Makes a batch of a list of a dataset's items.
        labelled: Whether labels are needed.
        accumulate: Batches of a step; parts of data in memory are whole steps.
        storage_options: Of the file systems of paths, for fsspec.
    """

    batch_size: int = 32
    shuffle_seed: int | None = None
    loader: Loader | Callable[..., Any] | None = None
    collate_fn: Callable[..., Any] | None = None
    labelled: bool = True
    accumulate: int = 1
    storage_options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ReadOptions:
    """The arguments that all three have in common; refused here if they are wrong.

    Attributes:
        batch_size: Rows per batch.
        transform: What is made of each batch, or None.
        loader: See `SourceOptions`, as `collate_fn`.
        on_bad_batch: What to do about a part that cannot be read.
        storage_options: fsspec options for paths and URLs, such as credentials.

    Raises:
        OptionError: Naming the option, what was given and what is allowed.

    Example:
        >>> ReadOptions(32, on_bad_batch="ignore")
        Traceback (most recent call last):
        daskdl.errors.OptionError: on_bad_batch must be 'raise' or 'skip', got 'ignore'
    """

    batch_size: int
    transform: Transform | None = None
    loader: Loader | Callable[..., Any] | None = None
    collate_fn: Callable[..., Any] | None = None
    on_bad_batch: OnBad = "raise"
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_choice("on_bad_batch", self.on_bad_batch, ("raise", "skip"))
        if self.loader is not None:
            loader_of(self.loader)
        for name in ("transform", "collate_fn"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise OptionError(f"{name} must be a function or None, got {value!r}")
        if not isinstance(self.storage_options, Mapping | None):
            kind = type(self.storage_options).__name__  # it may hold credentials
            raise OptionError(f"storage_options must be a dict or None, got a {kind}")

    def source(
        self, shuffle_seed: int | None, labelled: bool, accumulate: int = 1
    ) -> SourceOptions:
        """How parts are made of the data.

        Args:
            shuffle_seed: Of the order in which data in memory are dealt out, or None.
            labelled: Whether labels are needed.
            accumulate: Batches of a step.
        """
        return SourceOptions(
            self.batch_size,
            shuffle_seed,
            self.loader,
            self.collate_fn,
            labelled=labelled,
            accumulate=accumulate,
            storage_options=self.storage_options,
        )

    @property
    def skips(self) -> bool:
        """Whether parts that cannot be read are left out."""
        return self.on_bad_batch == "skip"


@dataclass(frozen=True)
class Both:
    """One transform after another; picklable.

    Attributes:
        first: What is done first.
        then: What is done with what that returns.
    """

    first: Transform
    then: Transform

    def __call__(self, batch: Batch) -> Batch:
        """Transform a batch."""
        return self.then(self.first(batch))


def one_of(*transforms: Transform | None) -> Transform | None:
    """All transforms in one, in this order; None of none."""
    made: Transform | None = None
    for transform in transforms:
        if transform is not None:
            made = transform if made is None else Both(made, transform)
    return made


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


# Small parts are put together as long as so many are left, so that an epoch ends within
# 1/64 of the data of being even, and as long as one has no more rows and bytes.
# To train on so many takes some milliseconds, and to hold them little memory.
LEAST_PARTS = 64
TOGETHER_ROWS = 1024
TOGETHER_BYTES = 2**20


def infer_metadata(
    source: Source, client: Client | Literal[False], *, skips: bool = False
) -> Source:
    """The same source, with the rows of each part known; once, and the log says so.

    Args:
        source: Any.
        client: Synchronous: its workers look; False: this process does.
        skips: Whether a part that cannot be read has no rows, instead of an error.

    Raises:
        DataError: If there are no rows at all. What loading raises comes out.
    """
    if is_known(source):
        return source
    logger.info("the rows of %s parts are counted, once", source.parts)
    look = _Skipping(skips)
    seen: dict[int, _Seen] = dict(map_parts(source, look, client))
    bad = sorted(part for part, one in seen.items() if one.facts.first[0] is None)
    if bad:
        logger.warning("%s parts cannot be read and are left out: %s", len(bad), bad)
    in_order = [seen[part].facts for part in sorted(seen)]
    rows = sum(fact.rows for fact in in_order)
    if rows == 0:
        unread = f", of which {len(bad)} cannot be read" if bad else ""
        raise DataError(
            f"X must not be empty, got no rows in {source.parts} parts{unread}"
        )
    logger.info("there are %s rows in %s parts", rows, source.parts)
    known = source.known(in_order)
    known.left_out = sum(one.left_out for one in seen.values())
    firsts = [fact.first for fact in in_order if fact.rows]
    kinds = [batching.kinds(first) for first in firsts]
    ((usual, _),) = Counter(kinds).most_common(1)
    if known.first is not None and source.first is None:
        known.first = firsts[kinds.index(usual)]
    if len(set(kinds)) > 1:
        known.unlike = _of_parts(known, kinds)
    return known


def _of_parts(source: Source, kinds: Sequence[Kinds]) -> Sequence[Kinds]:
    """The same, with something for each part without rows."""
    following = iter(kinds)
    return [next(following) if rows else () for rows in source.lengths or ()]


class _Seen(NamedTuple):
    """What was learnt of a part."""

    facts: Facts  # no rows at all, not even empty ones, if it cannot be read
    left_out: int  # examples


def merge_small_parts(source: Source) -> Source:
    """The same rows, with small parts put together with those that come after them.

    To lease a part, to ask for it and to compute it takes a millisecond or so, whatever
    it has. How parts are put together does not depend on who trains on them.

    Args:
        source: Of which enough is known.
    """
    lengths, first = source.lengths, source.first
    if not source.given or lengths is None or first is None:
        return source
    row_bytes = max(batching.nbytes(first) // batching.length(first[0]), 1)
    most = min(sum(lengths) // LEAST_PARTS, TOGETHER_ROWS, TOGETHER_BYTES // row_bytes)
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


@dataclasses.dataclass(frozen=True)
class _Skipping:
    """Looks at a part, and leaves out what of it cannot be read, if that may be."""

    skips: bool

    def __call__(self, source: Source, part: int) -> _Seen:
        try:
            return _Seen(source.look(part), 0)
        except UNREADABLE as error:
            if not is_left_out(error, source.name(part), self.skips):
                raise
            separate = source.separate(part)
            rows, files = join_readable(load_each(separate, skips=True))
            nothing: Any = None
            facts = Facts(0, (nothing, nothing)) if rows is None else facts_of(rows)
            return _Seen(facts, max(len(separate), 1) - files)
