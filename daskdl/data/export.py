"""What an export is made from: enough to tell another one, without going through it.

Data are told by the token that Dask gives them where it always gives the same one:
names of lazy collections, contents of what is in memory. Where it cannot (objects
that are made anew in every session), by the number of parts and rows alone.

How batch files are to be made.

Which rows of which piece go into which batch file; numbers only.

Rows lie in *pieces*, files of rows as they came; they are dealt into *buckets*, each as
many rows as one task can hold, and a bucket is cut into batch files. A bucket takes a
stretch of consecutive rows of each piece, so that it can be read without the others.
When shuffling, the rows of a piece are in random order before, the pieces are dealt
one after the other in random order, and row by row to one bucket after the other: each
bucket gets about the same share of every piece. Everything follows from the lengths
and the seed alone, not from who does the work.

The first pass of an export: each part of the data into files of rows, shuffled.

A part becomes one *piece* or several, so that no more than a part and twice
`PIECE_BYTES` are in memory. A piece is the records of its rows (see
:mod:`daskdl.data.batch_files`) and nothing else.

The second pass of an export: each bucket of rows into batch files.

Batch files of a source, made in two passes over the cluster.

First each part is written into pieces, then each bucket of rows, some from every
piece, into batch files, see :mod:`daskdl.data.export`; nobody holds more than
a part or a bucket. The manifest comes last.

Data of any kind into batch files, once, for many runs to train from.

Batch files for one run: written before it, deleted after it.
"""

import contextlib
import logging
import os
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import dask.config
import numpy as np
import torch
from dask.base import tokenize
from dask.delayed import Delayed
from dask.tokenize import TokenizationError
from torch import Tensor
from typing_extensions import override

from daskdl.config import Timeouts, check_count, check_whole
from daskdl.data import batch_files, batching
from daskdl.data.batch_files import (
    FOLDER,
    BatchFile,
    BatchFiles,
    Manifest,
    Progress,
    Schema,
    as_rows,
    joined,
    named_arrays,
)
from daskdl.data.batching import Rows
from daskdl.data.distribute import answers_of, map_parts, workers_of
from daskdl.data.inputs import ReadOptions, source_of
from daskdl.data.source import STREAMED_ROWS, Source, rows_of_part
from daskdl.data.storage import Store, store_of
from daskdl.data.tables import as_numpy
from daskdl.errors import DataError, OptionError

logger = logging.getLogger(__name__)


def token_of(value: Any) -> str | None:
    """What tells a value from others, also in another session; None: nothing does.

    Example:
        >>> import numpy as np
        >>> token_of((np.arange(3), None)) == token_of((np.arange(3), None))
        True
        >>> token_of(object()) is None
        True
    """
    try:
        token: str = tokenize(_plain(value), ensure_deterministic=True)
    except TokenizationError:
        return None
    return token


def origin_of(source: Source, data: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Describe an export, as plain values for JSON.

    Args:
        source: Its parts.
        data: What the user gave, to be told by its token.
        options: Plain values, which decide what the files look like.
    """
    lengths = source.lengths
    return {
        "data": token_of(data),
        "parts": source.parts,
        "rows": None if lengths is None else int(sum(lengths)),
        **options,
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What makes two exports different, for a message; empty if nothing does.

    Example:
        >>> differences({"seed": 0, "parts": 3}, {"seed": 1, "parts": 3})
        'seed was 0 and is 1'
    """
    keys = sorted(old.keys() | new.keys())
    return ", ".join(
        f"{key} was {old.get(key)!r} and is {new.get(key)!r}"
        for key in keys
        if old.get(key) != new.get(key)
    )


def _plain(value: Any) -> Any:
    """Without what has another token in each session although it is the same."""
    if isinstance(value, Tensor):
        return as_numpy(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Delayed) or type(value).__module__ == "distributed.client":
        return type(value).__name__  # its key is another one each time
    return value


@dataclass(frozen=True)
class ExportOptions:
    """Sizes, order and contents of batch files.

    Attributes:
        batch_size: Rows of a batch, >= 1.
        batches_per_file: >= 1.
        seed: Of the shuffling, >= 0; None: rows keep their order.
        transform: What to do with each batch before it is written, on the worker;
            None: nothing. It gets and returns (x, y) of CPU tensors, y None without
            labels, and keeps the number of rows.
        classes: Names of the labels 0, 1, ...; None: those that the data have.
    """

    batch_size: int
    batches_per_file: int = 1
    seed: int | None = 0
    transform: Callable[[Rows], Rows] | None = None
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        check_whole("batches_per_file", self.batches_per_file, 1)
        if self.seed is not None:
            check_whole("seed", self.seed, 0)
        if self.transform is not None and not callable(self.transform):
            raise OptionError(
                "transform must be a function of a batch, or None, got "
                f"{self.transform!r}"
            )

    @property
    def file_rows(self) -> int:
        """Rows of each batch file but the last."""
        return int(self.batch_size) * int(self.batches_per_file)

    def to_json(self) -> Mapping[str, Any]:
        """What tells these options from others, as plain values."""
        transform = self.transform
        return {
            "batch_size": int(self.batch_size),
            "batches_per_file": int(self.batches_per_file),
            "seed": self.seed,
            "classes": None if self.classes is None else [str(c) for c in self.classes],
            "transform": None if transform is None else token_of(transform),
        }


# Of a random generator's seed, behind the user's: which use of it this is.
_ORDER, _BUCKET, _PIECE = 0, 1, 2


class Stretch(NamedTuple):
    """Consecutive rows of one piece."""

    piece: int
    start: int
    stop: int


class Deal:
    """Where the rows of pieces go.

    Args:
        lengths: Rows of each piece, at least one row in all.
        file_rows: Rows of each batch file but the last, >= 1.
        bucket_rows: About as many may a bucket have; at least one file is in each.
        seed: Of the shuffling; None: rows keep their order.

    Attributes:
        rows: All together.
        files: How many batch files there will be.
        buckets: How many buckets.
    """

    rows: int
    files: int
    buckets: int

    def __init__(
        self,
        lengths: Sequence[int],
        file_rows: int,
        bucket_rows: int,
        seed: int | None,
    ) -> None:
        self._lengths = np.asarray(lengths, np.int64)
        self._file_rows, self._seed = file_rows, seed
        self.rows = int(self._lengths.sum())
        self.files = -(-self.rows // file_rows)
        self.buckets = -(-self.files // max(bucket_rows // file_rows, 1))
        self._order = np.arange(len(self._lengths))
        if seed is not None:
            self._order = np.random.default_rng((seed, _ORDER)).permutation(self._order)

    @property
    def checksum(self) -> int:
        """Tells this deal from others."""
        told = (self._lengths.tolist(), self._file_rows, self.buckets, self._seed)
        return zlib.crc32(repr(told).encode())

    def files_of(self, bucket: int) -> range:
        """The numbers of the batch files cut from a bucket.

        Buckets differ by one file at most; those with more come first.

        Example:
            >>> deal = Deal([10], file_rows=2, bucket_rows=4, seed=None)
            >>> [list(deal.files_of(bucket)) for bucket in range(deal.buckets)]
            [[0, 1], [2, 3], [4]]
        """
        few, more = divmod(self.files, self.buckets)
        first = bucket * few + min(bucket, more)
        return range(first, first + few + (bucket < more))

    def rows_of(self, files: range) -> int:
        """How many rows some consecutive files have together."""
        rows = self._file_rows
        return min(files.stop * rows, self.rows) - min(files.start * rows, self.rows)

    def stretches(self, bucket: int) -> list[Stretch]:
        """The rows of a bucket, as far as there are any, in the order of the pieces.

        Example:
            >>> Deal([3, 4], file_rows=2, bucket_rows=4, seed=None).stretches(0)
            [Stretch(piece=0, start=0, stop=3), Stretch(piece=1, start=0, stop=1)]
        """
        ends = np.cumsum(self._lengths[self._order])
        begins = ends - self._lengths[self._order]
        start, stop = (
            self._below(ends, edge) - self._below(begins, edge)
            for edge in (bucket, bucket + 1)
        )
        taken = np.flatnonzero(stop > start)
        columns = (self._order[taken], start[taken], stop[taken])
        found = (Stretch(*(int(n) for n in row)) for row in zip(*columns, strict=True))
        return sorted(found)

    def cuts(self, bucket: int) -> Iterator[tuple[int, np.ndarray]]:
        """The number of each file of a bucket, and which of the bucket's rows it has.

        Yields:
            Pairs (file, indices); those of a bucket are each of its rows once.
        """
        files = self.files_of(bucket)
        order = np.arange(self.rows_of(files))
        if self._seed is not None:
            rng = np.random.default_rng((self._seed, _BUCKET, bucket))
            order = rng.permutation(order)
        for i, file in enumerate(files):
            yield file, order[i * self._file_rows : (i + 1) * self._file_rows]

    def _below(self, rows: np.ndarray, bucket: int) -> np.ndarray:
        """How many of the first so many rows are in the buckets before this one."""
        if self._seed is None:
            before = self.rows_of(range(self.files_of(bucket).start))
            capped: np.ndarray = np.minimum(rows, before)
            return capped
        below = np.zeros_like(rows)
        left = rows
        for rounds, buckets in self._rounds():
            dealt = np.minimum(left, rounds * buckets)
            full, more = np.divmod(dealt, buckets)
            first = min(bucket, buckets)
            below += full * first + np.minimum(more, first)
            left = left - dealt
        return below

    def _rounds(self) -> Iterator[tuple[int, int]]:
        """Dealing goes round by round: one row to each of the first so many buckets.

        Yields:
            Pairs (rounds, buckets), in order: buckets with fewer rows drop out.
        """
        last = self.rows_of(self.files_of(self.buckets - 1))
        few, longer = divmod(self.files, self.buckets)
        phases = (
            (last, self.buckets),
            (few * self._file_rows - last, self.buckets - 1),
            (self._file_rows, longer),
        )
        yield from (phase for phase in phases if phase[1])


def row_order(rows: int, seed: int | None, part: int, block: int) -> np.ndarray:
    """The order in which rows are put into pieces.

    Args:
        rows: How many.
        seed: Of the shuffling; None: as they came.
        part: The part of the data they are from.
        block: Which block of that part they are, if it comes in several.

    Example:
        >>> row_order(3, None, part=0, block=0)
        array([0, 1, 2])
    """
    if seed is None:
        return np.arange(rows)
    return np.random.default_rng((seed, _PIECE, part, block)).permutation(rows)


PIECES_KIND = "part"  # of a record of progress

# Large enough that a request costs little beside it, small beside a worker's memory.
PIECE_BYTES = 64 * 2**20


class Pieces(NamedTuple):
    """What has been made of the parts, all together.

    Attributes:
        names: Of the files, in the order of the parts.
        lengths: Rows of each.
        schema: What the rows look like.
    """

    names: list[str]
    lengths: list[int]
    schema: Schema


def write_pieces(
    source: Source, part: int, progress: Progress, seed: int | None
) -> dict[str, Any]:
    """Write one part into pieces, here and now.

    Args:
        source: What it is a part of.
        part: Its number.
        progress: Of the export.
        seed: Of the shuffling; None: rows keep their order.

    Returns:
        The record of the part: ``rows`` of each piece, and their ``schema``; None if
        there are no rows.

    Raises:
        DataError: Naming the part, if it cannot be exported.
    """
    progress.check()
    rows: list[int] = []
    schema: Schema | None = None
    for index, block in enumerate(_blocks(source, part)):
        try:
            found = Schema.of(block)
            (schema or found).check(found, "later rows")
        except DataError as error:
            raise DataError(f"{source.name(part)}: {error}") from error
        schema = found
        order = row_order(batching.length(block[0]), seed, part, index)
        step = max(PIECE_BYTES // schema.dtype.itemsize, 1)
        for start in range(0, len(order), step):
            records = schema.records(block, order[start : start + step])
            progress.write(piece_name(part, len(rows)), records.tobytes())
            rows.append(len(records))
    record = {"rows": rows, "schema": None if schema is None else schema.to_json()}
    progress.add(PIECES_KIND, part, record)
    return record


def piece_name(part: int, index: int) -> str:
    """The file of one piece of a part."""
    return f"{FOLDER}/{PIECES_KIND}-{part:06d}-{index:04d}.rows"


def pieces_of(
    records: Iterable[tuple[int, Mapping[str, Any]]], source: Source
) -> Pieces:
    """Put the records of all parts together, as they come.

    Args:
        records: Pairs of a part's number and its record, in any order.
        source: Names the parts in messages.

    Raises:
        DataError: If the rows of two parts do not look alike, or there are none.
    """
    rows: dict[int, list[int]] = {}
    schema: Schema | None = None
    for part, record in records:
        rows[part] = record["rows"]
        if record["schema"] is not None:
            found = Schema.from_json(record["schema"])
            schema = schema or found
            schema.check(found, source.name(part))
    if schema is None:
        raise DataError("there is nothing to export: X has no rows")
    found_at = [(part, i) for part in sorted(rows) for i in range(len(rows[part]))]
    return Pieces(
        [piece_name(*place) for place in found_at],
        [rows[part][i] for part, i in found_at],
        schema,
    )


def _blocks(source: Source, part: int) -> Iterator[Rows]:
    """What is shuffled at a time: a part, or some of it if it comes as a stream."""
    waiting: list[Rows] = []
    size = 0
    for rows in map(as_rows, rows_of_part(source, part, STREAMED_ROWS)):
        if any(len(array) for _, array in named_arrays(rows)):
            waiting.append(rows)
            size += batching.nbytes(rows)
        if size >= PIECE_BYTES:
            yield joined(waiting)
            waiting, size = [], 0
    if waiting:
        yield joined(waiting)


BUCKETS_KIND = "bucket"  # of a record of progress
_READ_AT_A_TIME = 8  # each is a request that mostly waits


class Buckets(Source):
    """The rows of all pieces, dealt out; a part is a bucket.

    Args:
        store: Where the pieces are.
        pieces: All of them.
        deal: Of their lengths.
        here: Whether to stay in this process.
    """

    def __init__(self, store: Store, pieces: Pieces, deal: Deal, here: bool) -> None:
        self.store, self.pieces, self.deal, self.here = store, pieces, deal, here
        self.parts, self.lengths, self.first = deal.buckets, None, None

    @override
    def load(self, part: int) -> Rows:
        schema = self.pieces.schema
        with ThreadPoolExecutor(_READ_AT_A_TIME) as pool:
            found = list(pool.map(self._read, self.deal.stretches(part)))
        return schema.rows(np.concatenate(found))

    def _read(self, stretch: Stretch) -> np.ndarray:
        dtype = self.pieces.schema.dtype
        name = self.pieces.names[stretch.piece]
        start, stop = (edge * dtype.itemsize for edge in stretch[1:])
        content = self.store.read(name, start, stop)
        if len(content) != stop - start:
            raise DataError(
                f"{self.store.url_of(name)} is damaged: bytes {start} to {stop} are "
                "not all there; export with overwrite=True"
            )
        return np.frombuffer(content, dtype)


def write_bucket(
    buckets: Buckets,
    bucket: int,
    options: ExportOptions,
    done: Mapping[int, Mapping[str, Any]],
) -> dict[str, Any]:
    """Write one bucket into batch files, here and now, or find that it was done.

    Args:
        buckets: All of them.
        bucket: Its number.
        options: Of the export.
        done: Records of what was done before the export was interrupted.

    Returns:
        The record of the bucket: its ``files``, the ``schema`` of the rows in them,
        and the ``deal`` it is part of.

    Raises:
        DataError: If it cannot be read or written, or if ``transform`` returns what
            cannot be exported.
    """
    before = done.get(bucket)
    if before is not None and _is_there(before, buckets):
        return dict(before)
    progress = Progress(buckets.store)
    progress.check()
    rows = buckets.load(bucket)
    schema: Schema | None = None
    files = []
    for number, indices in buckets.deal.cuts(bucket):
        batches = _transformed(_taken(rows, indices), options)
        schema = schema or Schema.of(batches)
        schema.check(Schema.of(batches), f"batch file {number}")
        name = f"batch-{number:06d}.safetensors"
        files.append(BatchFile.written(buckets.store, name, batches))
        progress.keep(name)
    assert schema is not None  # a bucket has at least one file
    record = {
        "deal": buckets.deal.checksum,
        "schema": schema.to_json(),
        "files": [asdict(file) for file in files],
    }
    progress.add(BUCKETS_KIND, bucket, record)
    return record


def _is_there(record: Mapping[str, Any], buckets: Buckets) -> bool:
    files = map(BatchFile.from_json, record["files"])
    same = record["deal"] == buckets.deal.checksum
    return same and all(file.is_there(buckets.store) for file in files)


def _taken(rows: Rows, indices: np.ndarray) -> Rows:
    return batching.of_both(lambda tree: batching.rows(tree, indices), rows)


def _transformed(rows: Rows, options: ExportOptions) -> Rows:
    if options.transform is None:
        return rows
    size, count = options.batch_size, batching.length(rows[0])
    done = []
    for start in range(0, count, size):
        few = _taken(rows, np.arange(start, min(start + size, count)))
        batch = as_rows(options.transform(batching.of_both(_tensors, few)))
        got, want = batching.length(batch[0]), batching.length(few[0])
        if got != want:
            raise DataError(
                f"transform must keep the rows of a batch, got {got} of {want}"
            )
        done.append(batch)
    return joined(done)


def _tensors(tree: Any) -> Any:
    return batching.mapped(torch.from_numpy, tree)


# Rows of one task of the second pass; it needs twice as much memory.
BUCKET_BYTES = 64 * 2**20


def export_source(
    source: Source,
    store: Store,
    options: ExportOptions,
    client: Any = None,
    made_from: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write batch files of a source into a store, or go on where that was interrupted.

    Args:
        source: What to export.
        store: Where to; the client and all workers must see the same files in it.
        options: Sizes, order and contents.
        client: As of `map_parts`.
        made_from: What tells this export from others; None: there are no others.

    Returns:
        What is there then.
    """
    progress = Progress(store)
    origin = dict(made_from or {})
    if progress.origin() is None:
        progress.begin(origin)
    written = _write_pieces(source, progress, options, client)
    itemsize = written.schema.dtype.itemsize
    deal = Deal(
        written.lengths, options.file_rows, BUCKET_BYTES // itemsize, options.seed
    )
    dealt = Buckets(store, written, deal, source.here)
    schema, files = _write_buckets(dealt, options, client)
    classes = source.classes if options.classes is None else options.classes
    made = Manifest(
        options.batch_size,
        tuple(files),
        schema,
        None if classes is None else tuple(classes),
        origin,
    )
    made.write(store)
    progress.end()
    logger.info("exported %d rows in %d files to %s", made.rows, deal.files, store.url)
    return made


def _write_pieces(
    source: Source, progress: Progress, options: ExportOptions, client: Any
) -> Pieces:
    done = progress.done(PIECES_KIND)
    left = [part for part in range(source.parts) if part not in done]
    logger.info("export to %s: %d parts to read", progress.store.url, len(left))
    write = partial(write_pieces, progress=progress, seed=options.seed)
    records = map_parts(source, write, client, parts=left) if left else ()
    return pieces_of(chain(done.items(), records), source)


def _write_buckets(
    dealt: Buckets, options: ExportOptions, client: Any
) -> tuple[Schema, list[BatchFile]]:
    done = Progress(dealt.store).done(BUCKETS_KIND)
    write = partial(write_bucket, options=options, done=done)
    schema: Schema | None = None
    files: dict[int, list[BatchFile]] = {}
    for bucket, record in map_parts(dealt, write, client):
        found = Schema.from_json(record["schema"])
        schema = schema or found
        schema.check(found, f"bucket {bucket}")
        files[bucket] = [BatchFile.from_json(file) for file in record["files"]]
    assert schema is not None  # there is at least one bucket
    return schema, [file for bucket in sorted(files) for file in files[bucket]]


def export(
    X: Any,
    url: str | os.PathLike[str],
    batch_size: int,
    *,
    y: Any = None,
    shuffle: bool = True,
    seed: int = 0,
    transform: Callable[[Rows], Rows] | None = None,
    batches_per_file: int = 1,
    classes: Sequence[str] | None = None,
    client: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write data into shuffled batch files, from which ``trainer.fit(url)`` trains.

    It is done on the cluster, and within the memory that a part of the data takes. A
    folder can be trained from once the export is finished; one that was interrupted
    goes on where it stopped when it is run again, and one that is finished is returned
    as it is.

    Args:
        X: Inputs, or inputs and labels: all that ``trainer.fit`` takes. A tuple is
            several inputs, as there.
        url: Folder to write into, any that fsspec knows; the same place for this
            process and all workers. Other files in it are left alone.
        batch_size: Rows of a batch, >= 1. The last batch may be smaller.
        y: Labels, or None.
        shuffle: Whether rows of all parts are mixed; otherwise they keep their order.
        seed: Of the shuffling: the same files whatever the number of workers.
        transform: What to do with each batch before it is written, as in
            ``trainer.fit``; it keeps the number of rows.
        batches_per_file: >= 1; more, where batches are small.
        classes: Names of the labels 0, 1, ...; None: those that the data have.
        client: Of the cluster; None: the default client, if there is one, else this
            process. False: this process, where data in memory are exported anyway.
        storage_options: For fsspec, such as credentials.
        overwrite: Whether an export of other data or options is deleted first.

    Returns:
        The manifest: what has been written.

    Raises:
        OptionError: If there is an export of other data or options.
        DataError: If the data cannot be exported, or a file not be read or written.

    Example:
        >>> import numpy as np
        >>> X, y = np.arange(10.0).reshape(10, 1), np.arange(10)
        >>> made = export(X, "memory://daskdl-export", 4, y=y)
        >>> [file.rows for file in made.files]
        [4, 4, 2]
    """
    options = ExportOptions(
        batch_size, batches_per_file, seed if shuffle else None, transform, classes
    )
    source = source_of(X, y, ReadOptions(batch_size), labelled=False)
    store = store_of(url, storage_options)
    made_from = origin_of(source, (X, y), options.to_json())
    if overwrite:
        clear(store)
    found = _found(store, made_from)
    return found or export_source(source, store, options, client, made_from)


def clear(store: Store) -> None:
    """Delete an export, finished or not; other files stay."""
    store.delete([batch_files.MANIFEST_NAME])  # so that nobody begins to read
    Progress(store).end()
    store.delete(store.names("batch-*.safetensors"))


def _found(store: Store, made_from: Mapping[str, Any]) -> Manifest | None:
    """The finished export that is there, if there is one; None: it is to be made."""
    progress = Progress(store)
    finished = Manifest.read(store) if store.exists(batch_files.MANIFEST_NAME) else None
    before = progress.origin() if finished is None else finished.made_from
    differing = "" if before is None else differences(before, made_from)
    if differing:
        what = "an unfinished export" if finished is None else "an export"
        raise OptionError(
            f"there is {what} of other data or options in {store.url}: {differing}; "
            "export to another URL, or with overwrite=True"
        )
    if finished is not None:
        progress.end()  # the last run may not have come to it
        logger.info("%s has been exported before: %d rows", store.url, finished.rows)
    return finished


_PREFIX = "daskdl-export-"


@contextlib.contextmanager
def temporary_batches(
    source: Source, options: ExportOptions, client: Any
) -> Iterator[BatchFiles]:
    """Export a source into a new folder, which is deleted at the end in any case.

    The folder is made below the URL that ``daskdl.export.url`` says in Dask's
    configuration, with ``daskdl.export.storage_options``. Without one it is a temporary
    folder of this machine, which all workers must see.

    Args:
        source: What to export.
        options: Sizes, order and contents.
        client: Of the workers that write and read them; False: only this process.

    Yields:
        The batch files.

    Raises:
        OptionError: If no URL is configured, and a worker is on another machine.
        OSError: If one is gone, or does not say whether it is; the latter is a
            WaitTimeoutError.
    """
    url = dask.config.get("daskdl.export.url", None)
    with contextlib.ExitStack() as ending:
        if url is None:
            store = Store(str(ending.enter_context(_folder_here(client))))
        else:
            storage = dask.config.get("daskdl.export.storage_options", None) or {}
            below = store_of(url).url.rstrip("/")
            store = Store(f"{below}/{_PREFIX}{uuid.uuid4().hex}", dict(storage))
        ending.callback(_give_up, store)
        export_source(source, store, options, client)
        yield BatchFiles(store.url, store.options)


def _give_up(store: Store) -> None:
    """Delete everything; a task that still writes sees it, and cleans up itself."""
    Progress(store).end()
    store.delete_all()


@contextlib.contextmanager
def _folder_here(client: Any) -> Iterator[Path]:
    """A temporary folder that all workers see."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        _check_seen(folder, client)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_seen(folder: Path, client: Any) -> None:
    if client is False:
        return
    bound = Timeouts.from_config().bound("request")
    what = f"whether they see {folder}"
    seen = answers_of(client, workers_of(client), folder.exists, bound, what)
    blind = sorted(worker for worker, sees in seen.items() if not sees)
    if blind:
        raise OptionError(
            f'approach="export" needs a place that all workers see, but {folder} of '
            f"this machine is not seen by {', '.join(blind)}; set daskdl.export.url in "
            "Dask's configuration to a URL of an object store or a network folder"
        )
