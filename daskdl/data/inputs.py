"""The user's data: arguments for reading, a `Source` for each type, and its metadata.

A new kind of data is a subclass of :class:`~daskdl.data.source.Source` and a line in
:func:`source_of`.
"""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

from distributed import Client
from torch.utils.data import DataLoader

from daskdl.config import check_choice, check_count
from daskdl.data import batching
from daskdl.data.batching import Batch, Transform, Tree
from daskdl.data.checks import UNREADABLE, is_left_out, join_readable, load_each
from daskdl.data.dask_collections import (
    columns,
    is_bag,
    is_dask_frame,
    is_lazy_list,
    pairs,
)
from daskdl.data.distribute import map_parts
from daskdl.data.files import files
from daskdl.data.formats import Loader, check_loader
from daskdl.data.source import Facts, Source, facts_of, is_known
from daskdl.data.storage import are_paths
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
class ReadOptions:
    """The arguments that `fit`, `evaluate` and `predict` share, validated.

    Attributes:
        batch_size: Rows per batch.
        transform: Applied to each batch, or None.
        loader: Reads (x, y) from a file, or None.
        collate_fn: Makes a batch from a list of a dataset's items, or None.
        on_bad_batch: Treatment of parts that cannot be read.
        storage_options: fsspec options for paths and URLs, such as credentials.

    Raises:
        OptionError: Names the option, its value and the allowed values.

    Example:
        >>> ReadOptions(32, on_bad_batch="ignore")
        Traceback (most recent call last):
        daskdl.errors.OptionError: on_bad_batch must be 'raise' or 'skip', got 'ignore'
    """

    batch_size: int = 32
    transform: Transform | None = None
    loader: Loader | Callable[..., Any] | None = None
    collate_fn: Callable[..., Any] | None = None
    on_bad_batch: OnBad = "raise"
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_choice("on_bad_batch", self.on_bad_batch, ("raise", "skip"))
        if self.loader is not None:
            check_loader(self.loader)
        for name in ("transform", "collate_fn"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise OptionError(f"{name} must be a function or None, got {value!r}")
        if not isinstance(self.storage_options, Mapping | None):
            kind = type(self.storage_options).__name__  # it may hold credentials
            raise OptionError(f"storage_options must be a dict or None, got a {kind}")

    @property
    def skips(self) -> bool:
        """Whether parts that cannot be read are left out."""
        return self.on_bad_batch == "skip"


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


def source_of(
    X: Any,
    y: Any = None,
    read: ReadOptions = ReadOptions(),
    *,
    shuffle_seed: int | None = None,
    labelled: bool = True,
    accumulate: int = 1,
) -> Source:
    """Make a source from the user's data.

    Args:
        X: Inputs, or inputs and labels together.
        y: Labels, or None.
        read: Arguments for reading.
        shuffle_seed: Seed of the order in which rows in memory and items are dealt to
            parts; None keeps the order.
        labelled: Whether labels are required.
        accumulate: Batches per step; parts of data in memory are whole steps.

    Raises:
        DataError: If the data cannot be used, or their type is not supported.
        OptionError: If an option does not apply to the type.
    """
    if isinstance(X, DataLoader):
        raise DataError(
            "X must not be a DataLoader, whose batches are of one process; give its "
            "dataset, X.dataset, and its batch_size, shuffle and collate_fn"
        )
    paths, dataset = are_paths(X), is_map_style(X) or is_iterable_style(X)
    lazy = is_bag(X) or is_lazy_list(X)
    if y is not None and (paths or dataset or lazy or isinstance(X, Source)):
        shown = f"a {type(X).__name__}, which brings its labels"
        if paths:
            shown = f"paths or URLs of files, which bring their labels; {TEXT}"
        raise DataError(f"y must not be given with {shown}")
    if not dataset and read.collate_fn is not None:
        raise OptionError("collate_fn is for a torch Dataset, got other data")
    if not paths and read.loader is not None:
        raise OptionError("loader is for paths and URLs, got other data")
    if isinstance(X, Source):
        return X
    if dataset:
        collation = Collation(read.collate_fn, read.batch_size, labelled)
        if is_iterable_style(X):
            return IterableStyle(X, collation)
        return MapStyle(X, collation, shuffle_seed)
    if paths:
        return files(X, read.loader, storage_options=read.storage_options)
    if lazy:
        return pairs(X)
    leaves = batching.named_both((X, y)).values()
    if any(is_dask_array(leaf) or is_dask_frame(leaf) for leaf in leaves):
        return columns(X, y)
    return _in_memory(X, y, read.batch_size * accumulate, shuffle_seed)


def _in_memory(X: Tree, y: Tree, step_rows: int, shuffle_seed: int | None) -> Source:
    classes = check_columns(y, "y", label=True) if is_frame(y) else None

    def array(name: str, leaf: Any) -> Any:
        if not is_frame(leaf):
            return leaf
        label = name.startswith("y")
        return columns_of(leaf, name, classes if label else None, label)

    arrays = [array(*one) for one in batching.named_both((X, y)).items()]
    x, y = batching.filled_both((X, y), arrays)
    check_arrays(x, y)
    source = InMemory(x, y, step_rows, shuffle_seed)
    source.classes = classes
    return source


def infer_metadata(
    source: Source, client: Client | Literal[False], *, skips: bool = False
) -> Source:
    """Return the source with the lengths of its parts and its first rows.

    Args:
        source: If lengths or first rows are unknown, each part is loaded once.
        client: Synchronous; its workers load the parts. False: this process does.
        skips: Whether a part that cannot be read counts as empty.

    Raises:
        DataError: If there are no rows. Errors of loading are passed on.
    """
    if is_known(source):
        return source
    logger.info("the rows of %s parts are counted, once", source.parts)
    look = functools.partial(_look, skips=skips)
    found = sorted(map_parts(source, look, client), key=itemgetter(0))
    seen = [one for _, one in found]
    bad = [part for part, (facts, _) in found if facts is None]
    if bad:
        logger.warning("%s parts cannot be read and are left out: %s", len(bad), bad)
    empty: Any = None
    facts = [Facts(0, empty) if one is None else one for one, _ in seen]
    rows = sum(fact.rows for fact in facts)
    if rows == 0:
        unread = f", of which {len(bad)} cannot be read" if bad else ""
        raise DataError(
            f"X must not be empty, got no rows in {source.parts} parts{unread}"
        )
    logger.info("there are %s rows in %s parts", rows, source.parts)
    known = source.known(facts)
    known.left_out = sum(left_out for _, left_out in seen)
    kinds = [batching.kinds(fact.first) if fact.rows else () for fact in facts]
    ((usual, _),) = Counter(filter(None, kinds)).most_common(1)
    if source.first is None:
        known.first = facts[kinds.index(usual)].first
    if len({*kinds} - {()}) > 1:
        kept = known.parts == source.parts  # otherwise parts without rows are left out
        known.unlike = kinds if kept else [*filter(None, kinds)]
    return known


def _look(source: Source, part: int, skips: bool) -> tuple[Facts | None, int]:
    """Facts of a part, or None if it cannot be read; number of bad examples."""
    try:
        return source.look(part), 0
    except UNREADABLE as error:
        if not is_left_out(error, source.name(part), skips):
            raise
        separate = source.separate(part)
        rows, files = join_readable(load_each(separate, skips=True))
        left_out = max(len(separate), 1) - files
        return None if rows is None else facts_of(rows), left_out


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
    row_bytes = max(batching.nbytes(first) // batching.length(first[0]), 1)
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
