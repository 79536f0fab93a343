"""Predictions in a folder: a file per part, written by the workers, and a manifest.

Hides the files: Parquet for dataframes, safetensors for everything else. Outputs bypass
the client, and the manifest is written last.
"""

import base64
import datetime
import functools
import io
import itertools
import json
import logging
import os
import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any, ClassVar, Literal

import dask
import numpy as np
import safetensors.numpy
from dask.delayed import Delayed, delayed
from distributed import Client
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batch_files import is_export, outline_of, restored
from daskdl.data.batching import Tree
from daskdl.data.dask_collections import Collections, is_bag
from daskdl.data.distribute import map_parts, new_key, release
from daskdl.data.manifest import File, Kind, Manifest
from daskdl.data.source import STREAMED_ROWS, Source
from daskdl.data.storage import Store, store_of
from daskdl.data.tables import is_dask_array
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.inference import lazy
from daskdl.inference.lazy import Ask, Examples

logger = logging.getLogger(__name__)

REMEDY = "predict again with overwrite=True, or to another URL"
# The name begins with an underscore: readers of folders of Parquet files skip it.
KIND = Kind("daskdl predictions", 1, "_predictions.json", REMEDY, REMEDY)
_PARTS = "part-??????-????????.*"  # number of the part, and checksum


# ---- formats of the files


class Format(ABC):
    """Converts parts to files and back; a dataclass of plain values for JSON."""

    kind: ClassVar[str]  # in the manifest
    suffix: ClassVar[str] = "safetensors"

    @abstractmethod
    def encode(self, value: Any) -> tuple[int, bytes]:
        """Return the number of rows of a part, and its file."""

    @abstractmethod
    def decode(self, content: bytes) -> Any: ...

    @abstractmethod
    def join(self, values: Sequence[Any]) -> Any:
        """Return all parts together, in memory."""

    @abstractmethod
    def to_dask(self, parts: list[Delayed], rows: Sequence[int]) -> Any:
        """Return decoded parts, of so many rows each, as a collection."""


@dataclass(frozen=True)
class ArrayFormat(Format):
    """Trees of arrays, each of which is called ``y``, ``y['name']`` and so on."""

    outline: Any
    leaves: Sequence[tuple[str, Sequence[int]]]

    kind = "arrays"

    @classmethod
    def of(cls, empty: Tree) -> "ArrayFormat":
        """Return the format of outputs, given the outputs for no rows."""
        leaves = [(x.dtype.name, x.shape[1:]) for x in batching.leaves(empty)]
        return cls(outline_of(empty), leaves)

    @override
    def encode(self, value: Any) -> tuple[int, bytes]:
        tree = restored(self.outline, iter(value))
        return len(value[0]), _encoded(batching.named(tree, "y"))

    @override
    def decode(self, content: bytes) -> Any:
        return batching.leaves(_tree(self.outline, safetensors.numpy.load(content)))

    @override
    def join(self, values: Sequence[Any]) -> Any:
        joined = [np.concatenate(leaves) for leaves in zip(*values, strict=True)]
        return restored(self.outline, iter(joined))

    @override
    def to_dask(self, parts: list[Delayed], rows: Sequence[int]) -> Any:
        empty = (np.zeros((0, *shape), dtype) for dtype, shape in self.leaves)
        return lazy.collection_of_arrays(parts, restored(self.outline, empty), rows)


_ROWS = "rows"
_KEYS = "keys"


@dataclass(frozen=True)
class ExampleFormat(Format):
    """Outputs of examples in order, with keys or without; a list may have rows, too.

    A file has ``0/y``, ``1/y`` ... for each shape of outputs, with a row per example,
    the positions of these examples in ``0/rows``, ``1/rows`` ..., and ``keys`` as JSON.
    """

    outline: Any
    keyed: bool
    bag: bool

    kind = "examples"

    @override
    def encode(self, value: Any) -> tuple[int, bytes]:
        if not isinstance(value, list):
            return batching.length(value), _encoded(batching.named(value, "y"))
        arrays: dict[str, np.ndarray] = {_ROWS: np.array([len(value)])}
        outputs = value
        if self.keyed:
            keys, outputs = lazy.split_keys(value, "the outputs")
            plain = json.dumps([_plain(key) for key in keys])
            arrays[_KEYS] = np.frombuffer(plain.encode(), np.uint8)
        kinds = (
            tuple((leaf.dtype.name, leaf.shape) for leaf in batching.leaves(output))
            for output in outputs
        )
        for group, chosen in enumerate(lazy.grouped(kinds)):
            alike = [outputs[place] for place in chosen]
            stacked = batching.mapped(lambda *leaves: np.stack(leaves), *alike)
            arrays[f"{group}/{_ROWS}"] = np.array(chosen)
            arrays |= batching.named(stacked, f"{group}/y")
        return len(value), _encoded(arrays.items())

    @override
    def decode(self, content: bytes) -> Any:
        arrays = safetensors.numpy.load(content)
        if _ROWS not in arrays:
            return _tree(self.outline, arrays)
        outputs: list[Any] = [None] * int(arrays[_ROWS][0])
        for name in [name for name in arrays if name.endswith(f"/{_ROWS}")]:
            tree = _tree(self.outline, arrays, name.removesuffix(_ROWS))
            for row, place in enumerate(arrays[name]):
                outputs[place] = batching.rows(tree, row)
        if not self.keyed:
            return outputs
        keys = map(_key, json.loads(arrays[_KEYS].tobytes()))
        return list(zip(keys, outputs, strict=True))

    @override
    def join(self, values: Sequence[Any]) -> Any:
        return [one for value in values for one in value] if self.bag else list(values)

    @override
    def to_dask(self, parts: list[Delayed], rows: Sequence[int]) -> Any:
        return lazy.collection_of_examples(parts, bag=self.bag)


_SERIES = "prediction"  # column of a series, which Parquet needs


@dataclass(frozen=True)
class TableFormat(Format):
    """Partitions of a ``dask.dataframe``, or of a series."""

    empty: str  # Parquet file without rows, in base64
    divisions: str  # one whose index has the divisions; empty: unknown divisions
    series: bool
    named: bool  # columns have names; else they are 0, 1, ...

    kind, suffix = "tables", "parquet"

    @classmethod
    def of(cls, frame: Any) -> "TableFormat":
        """Return the format of a dataframe or a series, if Parquet can hold it."""
        import pandas

        meta, divisions = frame._meta, ""
        if frame.known_divisions:
            index = pandas.Index(frame.divisions, name=meta.index.name)
            divisions = _as_text(_parquet(pandas.DataFrame(index=index)))
        named = meta.ndim == 1 or all(isinstance(name, str) for name in meta.columns)
        if not named and list(meta.columns) != list(range(len(meta.columns))):
            raise ModelError(
                "columns must have text as names to be written to Parquet, got "
                f"{list(meta.columns)}; give a postprocess that names them so"
            )
        return cls(_as_text(_parquet(meta)), divisions, meta.ndim == 1, named)

    @override
    def encode(self, value: Any) -> tuple[int, bytes]:
        return len(value), _parquet(value)

    @override
    def decode(self, content: bytes) -> Any:
        import pandas

        frame = pandas.read_parquet(io.BytesIO(content))
        if self.series:
            return frame[_SERIES].rename(None)
        if not self.named:
            frame.columns = pandas.RangeIndex(len(frame.columns))
        return frame

    @override
    def join(self, values: Sequence[Any]) -> Any:
        import pandas

        return pandas.concat([v for v in values if len(v)] or values[:1])

    @override
    def to_dask(self, parts: list[Delayed], rows: Sequence[int]) -> Any:
        import dask.dataframe
        import pandas

        divisions = None
        if self.divisions:
            content = io.BytesIO(base64.b64decode(self.divisions))
            divisions = tuple(pandas.read_parquet(content).index)
        return dask.dataframe.from_delayed(
            parts,
            meta=self.decode(base64.b64decode(self.empty)),
            divisions=divisions,
            verify_meta=False,
        )


_FORMATS = {own.kind: own for own in (ArrayFormat, ExampleFormat, TableFormat)}


def _encoded(named: Iterable[tuple[str, np.ndarray]]) -> bytes:
    # For an array that is not contiguous, safetensors would write the wrong bytes.
    return safetensors.numpy.save({n: np.ascontiguousarray(x) for n, x in named})


def _tree(outline: Any, arrays: Mapping[str, np.ndarray], prefix: str = "") -> Tree:
    """Return a tree of the arrays that are called ``y``, ``y['name']`` and so on."""
    names = batching.named(restored(outline, itertools.count()), f"{prefix}y")
    return restored(outline, iter([arrays[name] for name, _ in names]))


def _parquet(table: Any) -> bytes:
    named = table.to_frame(_SERIES) if table.ndim == 1 else table.rename(columns=str)
    content = io.BytesIO()
    named.to_parquet(content)
    return content.getvalue()


def _as_text(content: bytes) -> str:
    return base64.b64encode(content).decode()


# ---- keys as JSON


# Types that JSON lacks, how they become plain values, and back.
_PLAIN: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytes": (bytes, _as_text, base64.b64decode),
    "uuid": (uuid.UUID, str, uuid.UUID),
    "datetime": (datetime.datetime, str, datetime.datetime.fromisoformat),
    "date": (datetime.date, str, datetime.date.fromisoformat),
    "tuple": (
        tuple,
        lambda key: [_plain(part) for part in key],
        lambda content: tuple(_key(part) for part in content),
    ),
    "numpy": (
        np.generic,
        lambda key: [np.array([key]).dtype.str, _as_text(np.array([key]).tobytes())],
        lambda content: np.frombuffer(base64.b64decode(content[1]), content[0])[0],
    ),
}


def _plain(key: Any) -> Any:
    if type(key) in (str, int, bool, float):
        return key
    for kind, (own, plain, _) in _PLAIN.items():
        if type(key) is own or (own is np.generic and isinstance(key, own)):
            return {kind: plain(key)}
    raise DataError(
        "keys must be str, bytes, int, UUID, date, datetime or a tuple of these to be "
        f"written, got {key!r}, a {type(key).__name__}"
    )


def _key(plain: Any) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    return _PLAIN[kind][2](content)


# ---- reading


class Predictions:
    """Predictions that `predict` has written to a URL, a file per part of the data.

    Predictions for a ``dask.dataframe`` are Parquet files, readable by other tools; all
    others are safetensors files.

    Args:
        url: The folder that was given as ``output``.
        storage_options: For fsspec, such as credentials.

    Attributes:
        url: The folder.
        rows: Number of rows of each part.

    Raises:
        DataError: If there are no finished predictions, or the manifest is damaged.

    Example:
        >>> import numpy, tempfile, torch
        >>> from daskdl import predict
        >>> X, url = numpy.ones((2, 3), numpy.float32), tempfile.mkdtemp()
        >>> written = predict(torch.nn.Identity(), X, client=False, output=url)
        >>> written.load().shape, Predictions(url).to_dask().shape
        ((2, 3), (2, 3))
    """

    url: str
    rows: tuple[int, ...]

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._store = store_of(url, storage_options)
        self.url = self._store.url
        if not self._store.exists(KIND.name):
            raise DataError(f"there are no finished predictions in {self.url}")
        manifest = Manifest.read(self._store, KIND)
        kind = _FORMATS[manifest.content["format"]]
        self._format: Format = kind(**manifest.content["reading"])
        self._files = manifest.files
        self.rows = tuple(file.details["rows"] for file in manifest.files)

    def load(self) -> Any:
        """Read all predictions into memory, in the order of the data.

        Returns:
            A pandas frame or series for tables; a list of outputs, or of pairs
            (key, output), for a bag; a list with the outputs of each part for a list;
            else numpy arrays, in a tree if there are several outputs.

        Raises:
            DataError: If a file is missing or damaged.
        """
        own = self._store, self._format
        return self._format.join([_read(*own, file) for file in self._files])

    def to_dask(self) -> Any:
        """Read the predictions lazily, in the parts of the data.

        Returns:
            The result of `predict` without ``output``; a ``dask.array`` for data that
            are not lazy.
        """
        read, name = delayed(_read, pure=False), new_key("predictions")
        parts = [
            read(self._store, self._format, file, dask_key_name=(name, part))
            for part, file in enumerate(self._files)
        ]
        return self._format.to_dask(parts, self.rows)

    @override
    def __repr__(self) -> str:
        count = f"{sum(self.rows)} rows in {len(self.rows)} parts"
        return f"Predictions({self.url!r}: {count})"


def _read(store: Store, form: Format, file: File) -> Any:
    return form.decode(file.read(store, REMEDY))


# ---- writing


def write_predictions(
    X: Any,
    source: Source,
    ask: Ask,
    empty: Tree,
    store: Store,
    client: Client | Literal[False],
    *,
    names: Sequence[Any] | None,
    overwrite: bool,
) -> Predictions:
    """Write the outputs of all parts, each on the worker that computes it.

    See `lazy_outputs` for the arguments. Raises an OptionError for former
    predictions, unless `overwrite`.
    """
    form: Format
    parts: Sequence[Delayed] | None = None
    if isinstance(source, Examples):
        keyed = bool(source.reader.keyed)
        form = ExampleFormat(outline_of(empty), keyed, is_bag(X))
        parts = lazy.partition_outputs(source, ask, client)
    elif isinstance(source, Collections) and not is_dask_array(batching.leaves(X)[0]):
        table = lazy.lazy_outputs(X, source, ask, empty, client, names=names)
        if isinstance(table, dict | tuple):
            raise ModelError(
                "outputs must make one table to be written for a dask.dataframe, got "
                f"{batching.outline(empty)}; give a postprocess that returns a "
                "dict of outputs with one number for each row"
            )
        form, parts = TableFormat.of(table), table.to_delayed()
    else:
        form = ArrayFormat.of(empty)
        if isinstance(source, Collections):
            parts = lazy.partition_outputs(source, ask, client)
    _empty_folder(store, overwrite)
    if parts is None:
        work = functools.partial(_compute_and_write, ask, store, form)
        written = map_parts(source, work, client, send=True)
        files = [file for _, file in sorted(written, key=itemgetter(0))]
    else:
        write = delayed(_write, pure=False)
        writes = [write(store, form, part, value) for part, value in enumerate(parts)]
        if client is False:
            files = list(dask.compute(*writes, scheduler="sync"))
        else:
            futures = client.compute(writes)
            try:
                files = list(client.gather(futures))
            finally:
                release(futures)
    content = {"format": form.kind, "reading": asdict(form)}
    Manifest(tuple(files), content).write(store, KIND)
    wanted = {file.name for file in files}
    store.delete(name for name in store.names(_PARTS) if name not in wanted)
    logger.info("predictions are in %s", store.url)
    return Predictions(store.url, store.options)


def _empty_folder(store: Store, overwrite: bool) -> None:
    """Delete former predictions, finished or not, if allowed; other files stay."""
    if is_export(store.url, store.options):
        raise OptionError(f"there are batch files in {store.url}; give another URL")
    former = store.names(_PARTS)
    if not former and not store.exists(KIND.name):
        return
    if not overwrite:
        raise OptionError(
            f"there are predictions in {store.url}; give overwrite=True to replace "
            "them, or another URL"
        )
    store.delete([KIND.name])  # first, so that no reader starts
    store.delete(former)


def _compute_and_write(
    ask: Ask, store: Store, form: Format, source: Source, part: int
) -> File:
    """Write the outputs of a part of a source that is no collection."""
    with lazy.error_context(f"in {source.name(part)}"):
        outputs = ask(source.stream(part, STREAMED_ROWS))
    return _write(store, form, part, batching.leaves(outputs))


def _write(store: Store, form: Format, part: int, value: Any) -> File:
    """Write a file, whose name has a checksum.

    If Dask computes a part twice, neither file damages the other. `Predictions` ignores
    files that the manifest does not list, such as those of a worker believed dead.
    """
    rows, content = form.encode(value)
    name = f"part-{part:06d}-{zlib.crc32(content):08x}.{form.suffix}"
    store.write(name, content)
    return File.of(name, content, rows=rows)
