"""Pack rows, or original files, into a few large files, once for many runs.

Original files are copied in groups, one for each packed file. Rows take two passes. The
first pass shuffles each part and writes it as pieces, which are files of rows. The
second pass reads buckets: a bucket has a span of rows of each piece, and becomes one or
more packed files. No process holds more than a part or a bucket. The manifest is
written last.

The folder ``.unfinished`` records the progress; an interrupted call resumes from it. A
task that outlives its call finds no record there and deletes the file that it wrote.
"""

import contextlib
import hashlib
import json
import logging
import shutil
import socket
import tempfile
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

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
from daskdl.data import batching, storage
from daskdl.data.batching import Rows
from daskdl.data.checks import LabelCheck
from daskdl.data.distribute import answers_of, map_parts, workers_of
from daskdl.data.inputs import (
    ReadOptions,
    keeps_columns,
    scaling_of,
    source_of,
    with_columns,
)
from daskdl.data.manifest import File, Manifest, is_count, naming_damage
from daskdl.data.packed import (
    FORMAT,
    ORIGIN,
    PackedRows,
    Schema,
    arrays_of_files,
    check_files,
    named_arrays,
)
from daskdl.data.shuffle_plan import PIECE, ShufflePlan, Span, permutation
from daskdl.data.source import STREAMED_ROWS, Source, rows_in
from daskdl.data.storage import AnyPath, Store, are_paths, at_once, is_path, store_of
from daskdl.data.tables import as_numpy, is_future
from daskdl.data.unreadable import stream_readable
from daskdl.errors import DataError, OptionError, short_tracebacks

logger = logging.getLogger(__name__)

# Large enough that the latency of a request is negligible, and small compared with the
# memory of a worker. A bucket takes twice its size.
PIECE_BYTES = 64 * 2**20
BUCKET_BYTES = 64 * 2**20

_FOLDER = ORIGIN.partition("/")[0]
_PREFIX = "daskdl-export-"


@dataclass(frozen=True)
class PackOptions:
    """Sizes, order and contents of packed rows; see `pack`."""

    per_file: int
    seed: int | None = 0  # None: rows keep their order
    transform: Callable[[Rows], Rows] | None = None
    classes: Sequence[str] | None = None
    labels: LabelCheck | None = None  # None: not checked
    skips: bool = False  # whether unreadable data are left out

    def __post_init__(self) -> None:
        check_whole("per_file", self.per_file, 1)
        if self.seed is not None:
            check_whole("seed", self.seed, 0)
        if self.transform is not None and not callable(self.transform):
            raise OptionError(
                f"transform must be a function of rows, or None, got {self.transform!r}"
            )

    def fingerprint(self, source: Source, data: Any) -> dict[str, Any]:
        """Return a description of the data and options for JSON.

        Data without a deterministic token are identified only by their number of parts
        and rows.
        """
        lengths, transform = source.lengths, self.transform
        return {
            "data": token_of(data),
            "parts": source.parts,
            "rows": None if lengths is None else int(sum(lengths)),
            "per_file": int(self.per_file),
            "seed": self.seed,
            "classes": None if self.classes is None else [*map(str, self.classes)],
            "transform": None if transform is None else token_of(transform),
        }


def token_of(value: Any) -> str | None:
    """Return Dask's token of a value; None if it is not deterministic."""
    try:
        token: str = tokenize(_repeatable(value), ensure_deterministic=True)
    except TokenizationError:
        return None
    return token


def _repeatable(value: Any) -> Any:
    """Replace values whose tokens differ between sessions."""
    if isinstance(value, Tensor):
        return as_numpy(value)
    if isinstance(value, Mapping):
        return {key: _repeatable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_repeatable(item) for item in value]
    if isinstance(value, Delayed) or is_future(value):
        return type(value).__name__  # the key is random
    return value


@dataclass(frozen=True)
class Progress:
    """The records of unfinished packing in its folder, shared by all processes."""

    store: Store

    def made_from(self) -> dict[str, Any] | None:
        """Return the fingerprint of unfinished packing; None if there is none."""
        return self._read(ORIGIN) if self.store.exists(ORIGIN) else None

    def done(
        self, kind: str, check: Callable[[int, Mapping[str, Any]], None]
    ) -> dict[int, dict[str, Any]]:
        """Return the records of a kind by number; `check` validates each of them."""

        def checked(name: str) -> tuple[int, dict[str, Any]]:
            record = self._read(name)
            with naming_damage(self.store.url_of(name), FORMAT.remedy):
                number = int(name.rpartition("-")[2].removesuffix(".json"))
                check(number, record)
                return number, record

        return dict(at_once(checked, self.store.names(f"{_FOLDER}/{kind}-*.json")))

    def add(self, kind: str, number: int, record: Mapping[str, Any]) -> None:
        """Record a finished part or bucket, whose files have all been written."""
        name = f"{_FOLDER}/{kind}-{number:06d}.json"
        self.write(name, json.dumps(record).encode())

    def write(self, name: str, content: bytes, stays: bool = False) -> None:
        """Write a file; delete it again if packing has ended meanwhile.

        A file that `stays` is kept if packing has finished.
        """
        self.check()
        self.store.write(name, content)
        finished = stays and self.store.exists(FORMAT.file_name)
        if not finished and not self.store.exists(ORIGIN):
            self.store.delete([name])
            self.check()

    def check(self) -> None:
        """Raise a DataError if packing was abandoned, or is not visible here."""
        if not self.store.exists(ORIGIN):
            raise DataError(
                f"{self.store.url} has no record of unfinished packing on "
                f"{socket.gethostname()}: either packing was abandoned, or the URL is "
                "not the same folder on all machines; use an object store or a network "
                "folder"
            )

    def end(self) -> None:
        """Delete all files that only unfinished packing needs."""
        self.store.delete([ORIGIN])  # first, so that no task writes another file
        self.store.delete(self.store.names(f"{_FOLDER}/*"))

    def _read(self, name: str) -> dict[str, Any]:
        encoded = self.store.read(name)
        with naming_damage(self.store.url_of(name), FORMAT.remedy):
            return dict(json.loads(encoded))


# ---- packed files


# Schema, arrays and details of a packed file; None as schema: original files.
Content = tuple[Schema | None, Mapping[str, np.ndarray], Mapping[str, Any]]


class Contents(Source):
    """The content of packed files, for `map_parts`: a task for each part writes files.

    The parts are not loaded as rows.

    Attributes:
        checksum: Checksum of the assignment of rows to packed files.
    """

    lengths = None
    first_rows = None
    checksum = 0

    @abstractmethod
    def numbers(self, part: int) -> range:
        """The numbers of the packed files of a part."""

    @abstractmethod
    def files(self, part: int) -> Iterator[Content]:
        """Yield the content of each packed file of a part, in order."""

    @override
    def load(self, part: int) -> Rows:
        raise NotImplementedError(f"{type(self).__name__} are packed, not loaded")


def _write_files(
    contents: Source,
    part: int,
    progress: Progress,
    done: Mapping[int, Mapping[str, Any]],
) -> Mapping[str, Any]:
    """Write the packed files of a part, unless they exist and are intact; a task.

    Returns the record of the part: ``plan``, ``schema`` and ``files``.
    """
    assert isinstance(contents, Contents)
    names = [f"packed-{number:06d}.safetensors" for number in contents.numbers(part)]
    before = done.get(part, {})
    written = [File.from_json(entry) for entry in before.get("files", ())]
    as_planned = before.get("plan") == contents.checksum and (
        [file.name for file in written] == names
    )
    if as_planned and all(file.is_intact(progress.store) for file in written):
        return before
    progress.check()
    schema: Schema | None = None
    files = []
    for name, (kind, arrays, details) in zip(names, contents.files(part), strict=True):
        if kind is not None:
            schema = kind.agreeing(schema, name)
        content = safetensors.numpy.save(dict(arrays))
        progress.write(name, content, stays=True)
        files.append(File.of(name, content, **details).to_json())
    record = {
        "plan": contents.checksum,
        "schema": None if schema is None else schema.to_json(),
        "files": files,
    }
    progress.add("bucket", part, record)
    return record


def _check_record(part: int, record: Mapping[str, Any]) -> None:
    """Reject a record that `_write_files` cannot have written."""
    schema = record["schema"]
    files = [File.from_json(entry) for entry in record["files"]]
    check_files(files, None if schema is None else Schema.from_json(schema))
    if not is_count(record["plan"]):
        raise ValueError(f"its plan is {record['plan']!r:.80}")


def _pack(
    contents: Contents, progress: Progress, client: Any, details: Mapping[str, Any]
) -> Manifest:
    """Write missing packed files, and a manifest with these details."""
    done = progress.done("bucket", _check_record)
    write = partial(_write_files, progress=progress, done=done)
    records = dict(map_parts(contents, write, client))
    schema: Schema | None = None
    files: list[File] = []
    for part in range(contents.parts):
        record = records[part]
        if record["schema"] is not None:
            kind = Schema.from_json(record["schema"])
            schema = kind.agreeing(schema, f"bucket {part}")
        files += map(File.from_json, record["files"])
    content = {"schema": None if schema is None else schema.to_json(), **details}
    manifest = Manifest(tuple(files), content)
    manifest.write(progress.store, FORMAT)
    progress.end()
    return manifest


# ---- rows


def _check_part(store: Store, part: int, record: Mapping[str, Any]) -> None:
    """Reject a record that `_write_part` cannot have written."""
    if not all(is_count(rows, least=1) for rows in record["rows"]):
        raise ValueError(f"its rows are {record['rows']!r:.80}")
    if not record["rows"]:
        if record["schema"] is not None:
            raise ValueError("it has a schema, but no rows")
        return
    row_bytes = Schema.from_json(record["schema"]).record.itemsize
    for index, rows in enumerate(record["rows"]):
        name = _piece(part, index)
        size = store.size(name)
        if size is not None and size != rows * row_bytes:
            raise DataError(
                f"{store.url_of(name)} is damaged: it has {size} bytes instead of "
                f"{rows * row_bytes}; {FORMAT.remedy}"
            )


def _piece(part: int, index: int) -> str:
    """The file name of a piece of a part."""
    return f"{_FOLDER}/part-{part:06d}-{index:04d}.rows"


def _write_part(
    source: Source, part: int, progress: Progress, options: PackOptions
) -> dict[str, Any]:
    """Write a part as pieces; a task. Returns their ``rows`` and the ``schema``."""

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
        order = permutation(batching.length(block), options.seed, PIECE, part, index)
        step = max(PIECE_BYTES // schema.record.itemsize, 1)
        for start in range(0, len(order), step):
            records = schema.records(block, order[start : start + step])
            progress.write(_piece(part, len(rows)), records.tobytes())
            rows.append(len(records))
    record = {"rows": rows, "schema": None if schema is None else schema.to_json()}
    progress.add("part", part, record)
    return record


def _blocks(loaded: Iterable[Rows]) -> Iterator[Rows]:
    """Yield rows that are shuffled together: a part, or some rows of a stream."""
    waiting: list[Rows] = []
    size = 0
    for loaded_rows in loaded:
        rows = batching.tree_map(as_numpy, loaded_rows)
        if any(map(len, named_arrays(rows).values())):
            waiting.append(rows)
            size += batching.nbytes(rows)
        if size >= PIECE_BYTES:
            yield batching.joined(waiting)
            waiting, size = [], 0
    if waiting:
        yield batching.joined(waiting)


class Buckets(Contents):
    """The rows of all pieces in the buckets of a plan; a part is a bucket."""

    def __init__(
        self,
        store: Store,
        pieces: Sequence[str],
        schema: Schema,
        plan: ShufflePlan,
        transform: Callable[[Rows], Rows] | None,
    ) -> None:
        self._store, self._pieces, self._schema = store, pieces, schema
        self._plan, self._transform = plan, transform
        self.parts, self.checksum = plan.buckets, plan.checksum

    @override
    def numbers(self, part: int) -> range:
        return self._plan.files_of(part)

    @override
    def files(self, part: int) -> Iterator[Content]:
        records = at_once(self._read, self._plan.spans(part))
        rows = self._schema.rows(np.concatenate(records))
        for indices in self._plan.cuts(part):
            chosen = self._transformed(batching.rows(rows, indices))
            # safetensors writes wrong bytes of an array that is not contiguous.
            arrays = {
                name: np.ascontiguousarray(array)
                for name, array in named_arrays(chosen).items()
            }
            yield Schema.of(chosen), arrays, {"rows": len(indices)}

    def _read(self, span: Span) -> np.ndarray:
        dtype, name = self._schema.record, self._pieces[span.piece]
        start, stop = span.start * dtype.itemsize, span.stop * dtype.itemsize
        try:
            content = self._store.read(name, start, stop)
        except DataError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise DataError(f"{error}; {FORMAT.remedy}") from error
            raise
        if len(content) != stop - start:
            raise DataError(
                f"{self._store.url_of(name)} is damaged: some of the bytes {start} to "
                f"{stop} are missing; {FORMAT.remedy}"
            )
        return np.frombuffer(content, dtype)

    def _transformed(self, rows: Rows) -> Rows:
        if self._transform is None:
            return rows
        x, y = self._transform(batching.tree_map(torch.from_numpy, rows))
        transformed = batching.tree_map(as_numpy, (x, y))
        got, expected = batching.length(transformed), batching.length(rows)
        if got != expected:
            raise DataError(
                f"transform must keep the number of rows, got {got} of {expected}"
            )
        return transformed


def _pack_rows(
    source: Source,
    store: Store,
    options: PackOptions,
    client: Any,
    made_from: Mapping[str, Any],
) -> Manifest:
    """Pack the rows of a source, or resume an interrupted call."""
    progress = Progress(store)
    if source.in_memory:
        client = False
    write_part = partial(_write_part, progress=progress, options=options)
    schema: Schema | None = None
    lengths: dict[tuple[int, int], int] = {}
    done = progress.done("part", partial(_check_part, store))
    unread = [part for part in range(source.parts) if part not in done]
    logger.info("packing to %s: %d parts to read", store.url, len(unread))
    written = map_parts(source, write_part, client, parts=unread) if unread else ()
    for part, record in chain(done.items(), written):
        lengths |= {(part, i): rows for i, rows in enumerate(record["rows"])}
        if record["schema"] is not None:
            kind = Schema.from_json(record["schema"])
            schema = kind.agreeing(schema, source.name(part))
    if schema is None:
        which = " that can be read" if options.skips else ""
        raise DataError(f"there is nothing to pack: X has no rows{which}")

    pieces = sorted(lengths)
    plan = ShufflePlan(
        [lengths[piece] for piece in pieces],
        int(options.per_file),
        BUCKET_BYTES // schema.record.itemsize,
        options.seed,
    )
    names = [_piece(*piece) for piece in pieces]
    buckets = Buckets(store, names, schema, plan, options.transform)
    classes = source.classes if options.classes is None else options.classes
    columns = source.columns if keeps_columns(options.transform) else None
    details = {
        "classes": None if classes is None else [*map(str, classes)],
        "columns": dict(columns or {}),
        "scaled_by": [*scaling_of(source, options.transform)],
        "made_from": made_from,
    }
    return _pack(buckets, progress, client, details)


# ---- original files


class OriginalFiles(Contents):
    """Original files in groups, one for each packed file."""

    def __init__(self, store: Store, names: Sequence[str], per_file: int) -> None:
        self._store, self._names, self._per_file = store, names, per_file
        self.parts = -(-len(names) // per_file)

    @override
    def numbers(self, part: int) -> range:
        return range(part, part + 1)

    @override
    def files(self, part: int) -> Iterator[Content]:
        names = self._names[part * self._per_file :][: self._per_file]
        contents = dict(zip(names, at_once(self._store.read, names), strict=True))
        yield None, arrays_of_files(contents), {"names": list(names)}


def _originals(
    paths: AnyPath | Sequence[AnyPath],
    root: AnyPath | None,
    options: Mapping[str, Any],
) -> tuple[Store, list[str]]:
    """Return the root of the user's files, and the paths relative to it."""
    if is_path(paths):
        folder = store_of(paths, options)
        names = folder.names()  # of a folder, including hidden files
        if names and root is None:
            return folder, names
        urls = [folder.url_of(name) for name in names]
        urls = urls or storage.listed(paths, None, options)
        root = storage.folder_of(folder.url) if root is None else root
    else:
        urls = storage.listed(paths, None, options)
        root = storage.common_folder(urls) if root is None else root
    store = store_of(root, options)
    relative: dict[str, None] = {}
    for url in urls:
        name = storage.path_in(store.url, url)
        if name is None:
            raise OptionError(f"{url} is not in the root {store.url}")
        if name in relative:
            raise DataError(f"{url} is in X twice")
        relative[name] = None
    return store, list(relative)


# ---- entry points


def _begin(
    store: Store, made_from: Mapping[str, Any], overwrite: bool = False
) -> Manifest | None:
    """Start or resume packing; return the manifest if packing has finished before."""
    progress = Progress(store)
    if overwrite:
        store.delete([FORMAT.file_name])  # first, so that no reader starts
        progress.end()
        store.delete(store.names("packed-*.safetensors"))
    manifest, before = None, progress.made_from()
    if store.exists(FORMAT.file_name):
        manifest = Manifest.read(store, FORMAT)
        with naming_damage(store.url_of(FORMAT.file_name), FORMAT.remedy):
            before = dict(manifest.content["made_from"])
    if before is None:
        store.write(ORIGIN, json.dumps(made_from).encode())
    elif before != made_from:
        differing = ", ".join(
            f"{key} was {before.get(key)!r} and is {made_from.get(key)!r}"
            for key in sorted(before.keys() | made_from.keys())
            if before.get(key) != made_from.get(key)
        )
        state = "unfinished packed files" if manifest is None else "packed files"
        raise OptionError(
            f"there are {state} of other data or options in {store.url}: {differing}; "
            "pack to another URL, or with overwrite=True"
        )
    if manifest is not None:
        progress.end()  # an earlier run may have been interrupted before this
        logger.info("%s is packed already", store.url)
    return manifest


def _pack_originals(
    X: Any, root: Any, store: Store, options: PackOptions, client: Any, overwrite: bool
) -> Manifest:
    """Pack the files at the user's paths, or resume an interrupted call."""
    folder, names = _originals(X, root, store.options)
    folder_url, target = map(
        storage.resolved, (folder.url, store.url_of(FORMAT.file_name))
    )
    if is_path(X) and storage.path_in(folder_url, target) is not None:
        raise OptionError(
            f"url must not be in the root of the files, {folder.url}, got {store.url}: "
            "the next call would pack the packed files"
        )
    names = [names[i] for i in permutation(len(names), options.seed)]
    identity = json.dumps([folder.url, names]).encode()
    made_from = {
        "data": hashlib.sha256(identity).hexdigest(),
        "per_file": int(options.per_file),
        "seed": options.seed,
    }
    if manifest := _begin(store, made_from, overwrite):
        return manifest
    originals = OriginalFiles(folder, names, int(options.per_file))
    details: dict[str, Any] = {
        "classes": None,
        "columns": {},
        "scaled_by": [],
        "made_from": made_from,
    }
    return _pack(originals, Progress(store), client, details)


@short_tracebacks
def pack(
    X: Any,
    y: Any = None,
    *,
    url: AnyPath,
    per_file: int,
    shuffle: bool = True,
    seed: int = 0,
    transform: Callable[[Rows], Rows] | None = None,
    classes: Sequence[str] | None = None,
    root: AnyPath | None = None,
    client: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Pack rows, or small files, into a few large files to train on.

    If X is a path or a list of paths, the files are packed unchanged:
    ``daskdl.data.files(url, loader)`` and ``image_folder(url)`` read them like the
    original folder. Any other data are packed as rows that are ready to train on with
    ``trainer.fit(url)``; to pack the rows of files, pass ``daskdl.data.files(...)`` as
    X.

    The workers write the files. Each needs memory for a part of the data or a packed
    file. The result does not depend on the number of workers. The manifest,
    ``packed.json``, is written last. To resume an interrupted call, repeat it. A
    finished folder is left unchanged.

    Args:
        X: Inputs, or inputs and labels, as in ``trainer.fit``; or a folder, a file, a
            pattern, or a list of files and patterns, all on one file system.
        y: Labels, or None.
        url: Folder to write to, on any file system that fsspec supports; this process
            and all workers must share it. Other files in it are left unchanged.
        per_file: Rows, or original files, in a packed file, >= 1; the last packed file
            may have fewer.
        shuffle: Whether rows are shuffled across all parts, or files across the folder;
            otherwise they keep their order, so that a packed file of images holds
            images of one class.
        seed: Seed of the shuffling.
        transform: For rows: a function as in ``trainer.fit``, applied to the rows of
            each packed file before it is written; it must keep their number.
        classes: For rows: names of the labels 0, 1, ...; None: those of the data.
        root: For files: their paths are stored relative to this folder. None: the given
            folder; for a pattern, the folder before its first wildcard; for a list, the
            deepest folder that contains all files.
        client: A `distributed.Client`. None: the default client, if there is one,
            otherwise this process. False: this process. Rows in memory are always
            packed in this process.
        storage_options: Options for fsspec, such as credentials, for ``url`` and paths
            in X; also used on the workers.
        overwrite: Whether packed files of other data or options are deleted first.
            Without it, changes inside an original file are not detected.

    Returns:
        URLs of the packed files.

    Raises:
        OptionError: If an argument is invalid, or the folder has packed files of other
            data or options.
        DataError: If the data cannot be packed, or a file cannot be read or written.

    Example:
        >>> import numpy as np
        >>> X, y = np.arange(10.0).reshape(10, 1), np.arange(10)
        >>> len(pack(X, y, url="memory://daskdl-rows", per_file=4))
        3
        >>> Store("memory://daskdl-notes").write("a/1.txt", b"one")
        >>> pack("memory://daskdl-notes", url="memory://daskdl-packed", per_file=64)
        ['memory://daskdl-packed/packed-000000.safetensors']
    """
    store = store_of(url, storage_options)
    options = PackOptions(per_file, seed if shuffle else None, transform, classes)
    if are_paths(X):
        for name, value in (("y", y), ("transform", transform), ("classes", classes)):
            if value is not None:
                raise OptionError(
                    f"{name} is for rows, but X are files, which are packed unchanged; "
                    "for their rows, pass X=daskdl.data.files(...)"
                )
        manifest = _pack_originals(X, root, store, options, client, overwrite)
    elif root is not None:
        raise OptionError(f"root is for paths of files, got {root!r} and other data")
    else:
        read = ReadOptions(per_file)
        source = source_of(X, y, read, labelled=False)
        made_from = options.fingerprint(source, (X, y))
        manifest = _begin(store, made_from, overwrite) or _pack_rows(
            with_columns(source, client), store, options, client, made_from
        )
    logger.info("%s has %d packed files", store.url, len(manifest.files))
    return [store.url_of(file.name) for file in manifest.files]


@contextlib.contextmanager
def temporarily_packed(
    source: Source, options: PackOptions, client: Any
) -> Iterator[PackedRows]:
    """Pack the rows of a source into a new folder, which is deleted at the end.

    ``daskdl.export.url`` and ``daskdl.export.storage_options`` in Dask's configuration
    determine the folder. Without a URL it is a temporary folder of this machine, which
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
            access = dask.config.get("daskdl.export.storage_options", None)
            store = store_of(
                store_of(url).url_of(f"{_PREFIX}{uuid.uuid4().hex}"), access
            )
        ending.callback(store.delete_all)
        # The record is deleted first: a task that still writes then deletes its file.
        ending.callback(Progress(store).end)
        _begin(store, {})
        packed = PackedRows(store, _pack_rows(source, store, options, client, {}))
        packed.left_out, rows = source.left_out, rows_in(source)
        if options.skips and rows is not None:
            packed.left_out += max(rows - packed.rows, 0)
        yield packed


def _check_seen(folder: Path, client: Any) -> None:
    if client is False:
        return
    timeout_s = Timeouts.from_config().bound("request")
    question = f"whether they see {folder}"
    seen = answers_of(client, workers_of(client), folder.exists, timeout_s, question)
    blind = sorted(worker for worker, sees in seen.items() if not sees)
    if blind:
        raise OptionError(
            f'approach="export" needs a folder that all workers share, but {folder} of '
            f"this machine is not seen by {', '.join(blind)}; set daskdl.export.url in "
            "Dask's configuration to a URL of an object store or a network folder"
        )
