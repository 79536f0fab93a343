"""Write data of any kind into shuffled batch files, once, for many runs.

Each part is written into pieces, files of shuffled rows; then each shuffle bucket, some
rows of every piece, into batch files; the manifest comes last. So no process holds more
than a part or a bucket. The folder ``.unfinished`` records the progress, from which an
interrupted export continues. A task that outlives its export finds no record of it in
that folder, and deletes its own file.
"""

import contextlib
import json
import logging
import shutil
import socket
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import dask.config
import numpy as np
import safetensors.numpy
import torch
from dask.base import tokenize
from dask.delayed import Delayed
from dask.tokenize import TokenizationError
from torch import Tensor
from typing_extensions import override

from daskdl.config import Timeouts, check_whole
from daskdl.data import batching
from daskdl.data.batch_files import KIND, ORIGIN, BatchFiles, Schema, named_arrays
from daskdl.data.batching import Rows
from daskdl.data.checks import LabelCheck, stream_readable
from daskdl.data.distribute import answers_of, map_parts, workers_of
from daskdl.data.inputs import ReadOptions, keeps_columns, source_of, with_columns
from daskdl.data.manifest import File, Manifest, is_count, naming_damage
from daskdl.data.source import STREAMED_ROWS, Source, rows_in
from daskdl.data.storage import AnyPath, Store, at_once, store_of
from daskdl.data.tables import as_numpy
from daskdl.errors import DataError, OptionError

logger = logging.getLogger(__name__)

# Large enough to make the cost of a request negligible, and small compared with a
# worker's memory. A bucket needs twice its bytes.
PIECE_BYTES = 64 * 2**20
BUCKET_BYTES = 64 * 2**20

_FOLDER = ORIGIN.partition("/")[0]
_PREFIX = "daskdl-export-"


@dataclass(frozen=True)
class ExportOptions:
    """Sizes, order and contents of batch files; see `export`."""

    batch_size: int
    batches_per_file: int = 1
    seed: int | None = 0  # None: rows keep their order
    transform: Callable[[Rows], Rows] | None = None
    classes: Sequence[str] | None = None
    labels: LabelCheck | None = None  # None: not checked
    skips: bool = False  # leave out what cannot be read

    def __post_init__(self) -> None:
        check_whole("batches_per_file", self.batches_per_file, 1)
        if self.seed is not None:
            check_whole("seed", self.seed, 0)
        if self.transform is not None and not callable(self.transform):
            raise OptionError(
                "transform must be a function of a batch, or None, got "
                f"{self.transform!r}"
            )

    def fingerprint(self, source: Source, data: Any) -> dict[str, Any]:
        """Return the data and options of an export as plain values for JSON.

        Data without a token (objects that are created anew in every session) are
        identified only by the number of their parts and rows.
        """
        lengths, transform = source.lengths, self.transform
        return {
            "data": token_of(data),
            "parts": source.parts,
            "rows": None if lengths is None else int(sum(lengths)),
            "batch_size": int(self.batch_size),
            "batches_per_file": int(self.batches_per_file),
            "seed": self.seed,
            "classes": None if self.classes is None else [*map(str, self.classes)],
            "transform": None if transform is None else token_of(transform),
        }


def token_of(value: Any) -> str | None:
    """Dask's token of a value if it is the same in every session, else None."""
    try:
        token: str = tokenize(_plain(value), ensure_deterministic=True)
    except TokenizationError:
        return None
    return token


def _plain(value: Any) -> Any:
    """Replace values whose tokens differ from session to session."""
    if isinstance(value, Tensor):
        return as_numpy(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Delayed) or type(value).__module__ == "distributed.client":
        return type(value).__name__  # its key is random
    return value


# Uses of a random generator, beside the user's seed.
_ORDER, _BUCKET, _PIECE = 0, 1, 2


class Span(NamedTuple):
    """Consecutive rows of one piece."""

    piece: int
    start: int
    stop: int


class ShufflePlan:
    """Plan which rows of each piece go into which batch file; numbers only.

    A bucket takes a span of consecutive rows of each piece, so that it can be read
    without the others. For shuffling, the rows of each piece are in random order, and
    the pieces are dealt in random order, row by row to one bucket after the other: each
    bucket gets about the same share of every piece. The plan follows from the lengths
    and the seed, not from who does the work.

    Args:
        lengths: Rows of each piece.
        file_rows: Rows of a batch file; the last may have fewer.
        bucket_rows: Most rows of a bucket of several files.
        seed: Seed of the shuffling; None: rows keep their order.
    """

    def __init__(
        self, lengths: Sequence[int], file_rows: int, bucket_rows: int, seed: int | None
    ) -> None:
        self._lengths = np.asarray(lengths, np.int64)
        self._file_rows, self._seed = file_rows, seed
        self.rows = int(self._lengths.sum())
        self.files = -(-self.rows // file_rows)
        self.buckets = -(-self.files // max(bucket_rows // file_rows, 1))
        self._order = _permutation(len(self._lengths), seed, _ORDER)
        numbers = (self._lengths.tolist(), file_rows, self.buckets, seed)
        self.checksum = zlib.crc32(repr(numbers).encode())

    def files_of(self, bucket: int) -> range:
        """The numbers of the batch files of a bucket.

        Buckets differ by one file at most; those with more come first.
        """
        few, more = divmod(self.files, self.buckets)
        first = bucket * few + min(bucket, more)
        return range(first, first + few + (bucket < more))

    def spans(self, bucket: int) -> list[Span]:
        """The rows of a bucket, in the order of the pieces."""
        ends = np.cumsum(self._lengths[self._order])
        begins = ends - self._lengths[self._order]
        start, stop = (
            self._below(ends, edge) - self._below(begins, edge)
            for edge in (bucket, bucket + 1)
        )
        taken = np.flatnonzero(stop > start)
        columns = (self._order[taken], start[taken], stop[taken])
        found = (Span(*map(int, row)) for row in zip(*columns, strict=True))
        return sorted(found)

    def cuts(self, bucket: int) -> Iterator[tuple[int, np.ndarray]]:
        """The number of each file of a bucket, and its rows within the bucket."""
        files, size = self.files_of(bucket), self._file_rows
        order = _permutation(self._rows_in(files), self._seed, _BUCKET, bucket)
        for i, file in enumerate(files):
            yield file, order[i * size : (i + 1) * size]

    def _rows_in(self, files: range) -> int:
        rows = self._file_rows
        return min(files.stop * rows, self.rows) - min(files.start * rows, self.rows)

    def _below(self, rows: np.ndarray, bucket: int) -> np.ndarray:
        """Count those of the first `rows` rows that are in earlier buckets."""
        if self._seed is None:
            before = self._rows_in(range(self.files_of(bucket).start))
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
        """Rows are dealt in rounds, one to each of the first so many buckets."""
        last = self._rows_in(self.files_of(self.buckets - 1))
        few, longer = divmod(self.files, self.buckets)
        phases = (
            (last, self.buckets),
            (few * self._file_rows - last, self.buckets - 1),
            (self._file_rows, longer),
        )
        yield from (phase for phase in phases if phase[1])


def _permutation(rows: int, seed: int | None, *use: int) -> np.ndarray:
    if seed is None:
        return np.arange(rows)
    return np.random.default_rng((seed, *use)).permutation(rows)


@dataclass(frozen=True)
class Progress:
    """The records of an unfinished export in its folder, for any process."""

    store: Store

    def made_from(self) -> dict[str, Any] | None:
        """Fingerprint of the unfinished export; None: there is none."""
        return self._read(ORIGIN) if self.store.exists(ORIGIN) else None

    def done(
        self, kind: str, check: Callable[[int, Mapping[str, Any]], None]
    ) -> dict[int, dict[str, Any]]:
        """The records of this kind by number, after `check` of number and record."""

        def checked(name: str) -> tuple[int, dict[str, Any]]:
            record = self._read(name)
            with naming_damage(self.store.url_of(name), KIND.remedy):
                number = int(name.rpartition("-")[2].removesuffix(".json"))
                check(number, record)
                return number, record

        return dict(at_once(checked, self.store.names(f"{_FOLDER}/{kind}-*.json")))

    def add(self, kind: str, number: int, record: Mapping[str, Any]) -> None:
        """Record something as done; all its files must have been written."""
        name = f"{_FOLDER}/{kind}-{number:06d}.json"
        self.write(name, json.dumps(record).encode())

    def write(self, name: str, content: bytes, stays: bool = False) -> None:
        """Write a file, and delete it again if the export is over by now."""
        self.check()
        self.store.write(name, content)
        finished = stays and self.store.exists(KIND.name)
        if not finished and not self.store.exists(ORIGIN):
            self.store.delete([name])
            self.check()

    def check(self) -> None:
        """Refuse an export that was abandoned, or is not visible on this machine."""
        if not self.store.exists(ORIGIN):
            raise DataError(
                f"there is no unfinished export in {self.store.url} on "
                f"{socket.gethostname()}: either it was given up, or the URL is not "
                "the same place on all machines; use an object store or a network "
                "folder"
            )

    def end(self) -> None:
        """Delete everything that only an unfinished export needs."""
        self.store.delete([ORIGIN])  # first, so that nothing comes back
        self.store.delete(self.store.names(f"{_FOLDER}/*"))

    def _read(self, name: str) -> dict[str, Any]:
        encoded = self.store.read(name)
        with naming_damage(self.store.url_of(name), KIND.remedy):
            return dict(json.loads(encoded))


def _check_part(store: Store, part: int, record: Mapping[str, Any]) -> None:
    """Refuse a record that `_write_part` cannot have made."""
    if not all(is_count(rows, least=1) for rows in record["rows"]):
        raise ValueError(f"its rows are {record['rows']!r:.80}")
    if not record["rows"]:
        if record["schema"] is not None:
            raise ValueError("it has a schema, but no rows")
        return
    row_bytes = Schema.from_json(record["schema"]).dtype.itemsize
    for index, rows in enumerate(record["rows"]):
        name, wanted = _piece(part, index), rows * row_bytes
        size = store.size(name)
        if size is not None and size != wanted:
            raise DataError(
                f"{store.url_of(name)} is damaged: it has {size} bytes instead of "
                f"{wanted}; {KIND.remedy}"
            )


def _check_bucket(bucket: int, record: Mapping[str, Any]) -> None:
    """Refuse a record that `_write_bucket` cannot have made."""
    Schema.from_json(record["schema"])
    for entry in record["files"]:
        rows = File.from_json(entry).details["rows"]
        if not is_count(rows, least=1) or not is_count(record["plan"]):
            raise ValueError(f"its files are {record['files']!r:.80}")


def _piece(part: int, index: int) -> str:
    """The file name of one piece of a part."""
    return f"{_FOLDER}/part-{part:06d}-{index:04d}.rows"


def _write_part(
    source: Source, part: int, progress: Progress, options: ExportOptions
) -> dict[str, Any]:
    """Write a part into pieces: a task. Returns their ``rows``, and the ``schema``."""

    def check(rows: Rows, name: str) -> None:
        if options.labels is not None:
            options.labels.check(rows[1], name)

    progress.check()
    rows: list[int] = []
    schema: Schema | None = None
    loaded = stream_readable(source, part, STREAMED_ROWS, check, options.skips)
    for index, block in enumerate(_blocks(loaded)):
        try:
            schema = Schema.of(block).agreeing(schema, "a later block")
        except DataError as error:
            raise DataError(f"{source.name(part)}: {error}") from error
        order = _permutation(batching.length(block), options.seed, _PIECE, part, index)
        step = max(PIECE_BYTES // schema.dtype.itemsize, 1)
        for start in range(0, len(order), step):
            records = schema.records(block, order[start : start + step])
            progress.write(_piece(part, len(rows)), records.tobytes())
            rows.append(len(records))
    record = {"rows": rows, "schema": None if schema is None else schema.to_json()}
    progress.add("part", part, record)
    return record


def _blocks(loaded: Iterable[Rows]) -> Iterator[Rows]:
    """The rows that are shuffled together: a part, or some rows of a stream."""
    waiting: list[Rows] = []
    size = 0
    for some in loaded:
        rows = batching.mapped(as_numpy, some)
        if any(map(len, named_arrays(rows).values())):
            waiting.append(rows)
            size += batching.nbytes(rows)
        if size >= PIECE_BYTES:
            yield batching.joined(waiting)
            waiting, size = [], 0
    if waiting:
        yield batching.joined(waiting)


class Buckets(Source):
    """The rows of all pieces as buckets of a plan, one in each part."""

    lengths = None
    first = None

    def __init__(
        self, store: Store, pieces: Sequence[str], schema: Schema, plan: ShufflePlan
    ) -> None:
        self.store, self.pieces, self.schema, self.plan = store, pieces, schema, plan
        self.parts = plan.buckets

    @override
    def load(self, part: int) -> Rows:
        found = at_once(self._read, self.plan.spans(part))
        return self.schema.rows(np.concatenate(found))

    def _read(self, span: Span) -> np.ndarray:
        dtype, name = self.schema.dtype, self.pieces[span.piece]
        start, stop = span.start * dtype.itemsize, span.stop * dtype.itemsize
        try:
            content = self.store.read(name, start, stop)
        except DataError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise DataError(f"{error}; {KIND.remedy}") from error
            raise
        if len(content) != stop - start:
            raise DataError(
                f"{self.store.url_of(name)} is damaged: bytes {start} to {stop} are "
                f"not all there; {KIND.remedy}"
            )
        return np.frombuffer(content, dtype)


def _write_bucket(
    buckets: Source,
    bucket: int,
    options: ExportOptions,
    done: Mapping[int, Mapping[str, Any]],
) -> Mapping[str, Any]:
    """Write a bucket into batch files, or find that it was done: a task.

    Returns their manifest and schema.
    """
    assert isinstance(buckets, Buckets)
    store, plan = buckets.store, buckets.plan
    before = done.get(bucket, {})
    written = [File.from_json(entry) for entry in before.get("files", ())]
    as_planned = before.get("plan") == plan.checksum and (
        len(written) == len(plan.files_of(bucket))
    )
    if as_planned and all(file.is_intact(store) for file in written):
        return before
    progress = Progress(store)
    progress.check()
    rows = buckets.load(bucket)
    schema: Schema | None = None
    files = []
    for number, indices in plan.cuts(bucket):
        own = _transformed(batching.rows(rows, indices), options)
        schema = Schema.of(own).agreeing(schema, f"batch file {number}")
        # For an array that is not contiguous, safetensors would write the wrong bytes.
        arrays = {n: np.ascontiguousarray(a) for n, a in named_arrays(own).items()}
        name = f"batch-{number:06d}.safetensors"
        content = safetensors.numpy.save(arrays)
        progress.write(name, content, stays=True)
        files.append(File.of(name, content, rows=len(indices)).to_json())
    assert schema is not None, "a bucket has at least one file"
    record = {"plan": plan.checksum, "schema": schema.to_json(), "files": files}
    progress.add("bucket", bucket, record)
    return record


def _transformed(rows: Rows, options: ExportOptions) -> Rows:
    if options.transform is None:
        return rows
    size, count = options.batch_size, batching.length(rows)
    done = []
    for start in range(0, count, size):
        few = batching.rows(rows, np.arange(start, min(start + size, count)))
        tensors = batching.mapped(torch.from_numpy, few)
        x, y = options.transform(tensors)
        batch = batching.mapped(as_numpy, (x, y))
        got, want = batching.length(batch), batching.length(few)
        if got != want:
            raise DataError(
                f"transform must keep the rows of a batch, got {got} of {want}"
            )
        done.append(batch)
    return batching.joined(done)


def _export(
    source: Source,
    store: Store,
    options: ExportOptions,
    client: Any,
    made_from: Mapping[str, Any],
) -> int:
    """Write batch files of a source, or continue an interrupted export.

    Returns the number of rows left out, 0 for a source of unknown lengths.
    """
    progress = Progress(store)
    if progress.made_from() is None:
        store.write(ORIGIN, json.dumps(made_from).encode())
    if source.here:
        client = False

    write_part = partial(_write_part, progress=progress, options=options)
    schema: Schema | None = None
    lengths: dict[tuple[int, int], int] = {}
    done = progress.done("part", partial(_check_part, store))
    left = [part for part in range(source.parts) if part not in done]
    logger.info("export to %s: %d parts to read", store.url, len(left))
    written = map_parts(source, write_part, client, parts=left) if left else ()
    for part, record in chain(done.items(), written):
        lengths |= {(part, i): rows for i, rows in enumerate(record["rows"])}
        if record["schema"] is not None:
            found = Schema.from_json(record["schema"])
            schema = found.agreeing(schema, source.name(part))
    if schema is None:
        which = " that can be read" if options.skips else ""
        raise DataError(f"there is nothing to export: X has no rows{which}")

    pieces = sorted(lengths)
    plan = ShufflePlan(
        [lengths[piece] for piece in pieces],
        int(options.batch_size) * int(options.batches_per_file),
        BUCKET_BYTES // schema.dtype.itemsize,
        options.seed,
    )
    buckets = Buckets(store, [_piece(*piece) for piece in pieces], schema, plan)
    done = progress.done("bucket", _check_bucket)
    write_bucket = partial(_write_bucket, options=options, done=done)
    records = dict(map_parts(buckets, write_bucket, client))
    schema = None
    files: list[File] = []
    for bucket in range(plan.buckets):
        found = Schema.from_json(records[bucket]["schema"])
        schema = found.agreeing(schema, f"bucket {bucket}")
        files += map(File.from_json, records[bucket]["files"])
    assert schema is not None, "there is at least one bucket"

    classes = source.classes if options.classes is None else options.classes
    content = {
        "batch_size": int(options.batch_size),
        "classes": None if classes is None else [*map(str, classes)],
        "schema": schema.to_json(),
        "columns": dict(source.columns or {})
        if keeps_columns(options.transform)
        else {},
        "made_from": dict(made_from),
    }
    Manifest(tuple(files), content).write(store, KIND)
    progress.end()
    logger.info("exported %d rows in %d files to %s", plan.rows, plan.files, store.url)
    rows = rows_in(source)
    return max(rows - plan.rows, 0) if options.skips and rows is not None else 0


def export(
    X: Any,
    y: Any = None,
    *,
    url: AnyPath,
    batch_size: int,
    shuffle: bool = True,
    seed: int = 0,
    transform: Callable[[Rows], Rows] | None = None,
    batches_per_file: int = 1,
    classes: Sequence[str] | None = None,
    client: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> BatchFiles:
    """Write data into shuffled batch files, from which ``trainer.fit(url)`` trains.

    The workers write the files, within the memory that a part of the data takes. If an
    export is interrupted, run it again, and it continues where it stopped; a finished
    export is returned unchanged.

    Args:
        X: Inputs, or inputs and labels, as in ``trainer.fit``.
        y: Labels, or None.
        url: Folder to write into, on any file system that fsspec knows; the same place
            for this process and all workers. Other files in it are left alone.
        batch_size: Rows of a batch, >= 1. The last batch may be smaller.
        shuffle: Whether rows of all parts are mixed; otherwise they keep their order.
        seed: Seed of the shuffling. The files do not depend on the number of workers.
        transform: Applied to each batch before it is written, as in ``trainer.fit``;
            must keep the number of rows.
        batches_per_file: Batches in a file, >= 1; use more if batches are small.
        classes: Names of the labels 0, 1, ...; None: those that the data have.
        client: Of the cluster; None: the default client, if there is one, else this
            process. False: this process, where data in memory are exported anyway.
        storage_options: For fsspec, such as credentials, of ``url`` and of paths in X;
            the workers use them too.
        overwrite: Whether an export of other data or options is deleted first.

    Returns:
        The batch files, a source to train from.

    Raises:
        OptionError: If there is an export of other data or options.
        DataError: If the data cannot be exported, or a file cannot be read or written.

    Example:
        >>> import numpy as np
        >>> X, y = np.arange(10.0).reshape(10, 1), np.arange(10)
        >>> export(X, y, url="memory://daskdl-export", batch_size=4).lengths
        [4, 4, 2]
    """
    options = ExportOptions(
        batch_size, batches_per_file, seed if shuffle else None, transform, classes
    )
    read = ReadOptions(batch_size, storage_options=storage_options)
    source = source_of(X, y, read, labelled=False)
    store = store_of(url, storage_options)
    progress = Progress(store)
    made_from = options.fingerprint(source, (X, y))
    if overwrite:
        store.delete([KIND.name])  # first, so that no reader starts
        progress.end()
        store.delete(store.names("batch-*.safetensors"))
    finished = BatchFiles(url, storage_options) if store.exists(KIND.name) else None
    before = progress.made_from() if finished is None else finished.made_from
    if before is not None and before != made_from:
        differing = ", ".join(
            f"{key} was {before.get(key)!r} and is {made_from.get(key)!r}"
            for key in sorted(before.keys() | made_from.keys())
            if before.get(key) != made_from.get(key)
        )
        what = "an unfinished export" if finished is None else "an export"
        raise OptionError(
            f"there is {what} of other data or options in {store.url}: {differing}; "
            "export to another URL, or with overwrite=True"
        )
    if finished is not None:
        progress.end()  # the last run may have been interrupted before that
        logger.info("%s has been exported before: %d rows", store.url, finished.rows)
        return finished
    source = with_columns(source, client)
    _export(source, store, options, client, made_from)
    return BatchFiles(url, storage_options)


@contextlib.contextmanager
def temporary_batches(
    source: Source, options: ExportOptions, client: Any
) -> Iterator[BatchFiles]:
    """Export a source into a new folder, which is deleted at the end in any case.

    ``daskdl.export.url`` and ``daskdl.export.storage_options`` in Dask's configuration
    determine the place. Without a URL it is a temporary folder of this machine, which
    all workers must be able to read.
    """
    url = dask.config.get("daskdl.export.url", None)
    with contextlib.ExitStack() as ending:
        if url is None:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
            ending.callback(shutil.rmtree, folder, ignore_errors=True)
            _check_seen(folder, client)
            store = Store(str(folder))
        else:
            storage = dask.config.get("daskdl.export.storage_options", None)
            own = store_of(url).url_of(f"{_PREFIX}{uuid.uuid4().hex}")
            store = store_of(own, storage)
        ending.callback(store.delete_all)
        # The record goes first: a task that still writes then deletes its file.
        ending.callback(Progress(store).end)
        left_out = _export(source, store, options, client, {})
        batches = BatchFiles(store.url, store.options)
        batches.left_out = source.left_out + left_out
        yield batches


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
