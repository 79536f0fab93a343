"""What a kind of predictions needs to be written, and to be read back.

Arrays of predictions: a file of safetensors for each block.

Predictions for single examples, with keys or without: a file for each partition.

A file of safetensors has for each shape of outputs ``0/y``, ``1/y`` ... with a row for
each example, and in ``0/rows``, ``1/rows`` ... the places of these examples. ``keys``
are the bytes of JSON, see :mod:`daskdl.inference.lazy`.

One file of predictions: what came out for one part of the data.

Tables of predictions: a Parquet file for each partition, with its index.

What is in a folder of predictions, as JSON beside them.

Its name begins with an underscore: readers of folders of Parquet files pass it over. It
is written when everything else is there.

What predictions are made from: enough to tell others at the same URL.

Predictions that have been written, to be read back.

Where predictions are written to, and what has been written there already.

Predictions written by the workers that make them, part by part.

A part is made by one task, which writes its file and returns what is known of it: no
output goes through the client. The manifest comes last, see
:mod:`daskdl.inference.predictions`.
"""

import base64
import hashlib
import io
import logging
import os
import re
import types
import zlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

import dask
import numpy as np
import safetensors.numpy
import torch
from dask.delayed import Delayed, delayed
from distributed import Client, as_completed
from torch import Tensor, nn
from typing_extensions import override

from daskdl.data import batch_files as exports
from daskdl.data import batching
from daskdl.data.batch_files import Progress, Seal, outline_of, restored
from daskdl.data.batching import Tree
from daskdl.data.dask_collections import Collections
from daskdl.data.distribute import each_part, new_key, release
from daskdl.data.export import differences, origin_of, token_of
from daskdl.data.source import Source
from daskdl.data.storage import Store, store_of
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.inference import lazy
from daskdl.inference.lazy import Ask, lazy_array, lazy_outputs, lazy_parts, tables_of
from daskdl.serialization import MAKER

logger = logging.getLogger(__name__)


class Encoded(NamedTuple):
    """What came out for a part, as bytes."""

    rows: int
    content: bytes


class Format(ABC):
    """How parts of one kind become files; picklable.

    Attributes:
        kind: In the manifest.
        suffix: Of the files.
    """

    kind: ClassVar[str]
    suffix: ClassVar[str]

    @abstractmethod
    def encoded(self, value: Any) -> Encoded:
        """What came out for a part, as the bytes of a file."""

    @abstractmethod
    def decoded(self, content: bytes) -> Any:
        """What came out for a part, from the bytes of its file."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """What else is to be known to read, as plain values."""

    @classmethod
    @abstractmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Read what `to_json` made."""

    @abstractmethod
    def whole(self, values: Sequence[Any]) -> Any:
        """All parts together, in memory."""

    @abstractmethod
    def lazy(self, parts: Sequence[Delayed], rows: Sequence[int]) -> Any:
        """All parts as a lazy collection.

        Args:
            parts: What was decoded, Delayed.
            rows: Of each.
        """


@dataclass(frozen=True)
class Arrays(Format):
    """A tree of arrays; each is called ``y``, ``y['name']`` and so on in the files.

    Attributes:
        outline: Of the tree, as plain values.
        leaves: dtype and shape of a row of each array.
    """

    outline: Any
    leaves: tuple[tuple[str, tuple[int, ...]], ...]

    kind = "arrays"
    suffix = "safetensors"

    @classmethod
    def of(cls, empty: Tree) -> "Arrays":
        """The format of outputs, of which these are those of no rows."""
        leaves = tuple((x.dtype.name, x.shape[1:]) for x in batching.leaves(empty))
        return cls(outline_of(empty), leaves)

    @override
    def encoded(self, value: Any) -> Encoded:
        # Of an array that is not contiguous, safetensors takes the wrong bytes.
        named = dict(zip(self._names(), map(np.ascontiguousarray, value), strict=True))
        return Encoded(len(value[0]), safetensors.numpy.save(named))

    @override
    def decoded(self, content: bytes) -> Any:
        arrays = safetensors.numpy.load(content)
        return [arrays[name] for name in self._names()]

    @override
    def to_json(self) -> dict[str, Any]:
        return {"outline": self.outline, "leaves": self.leaves}

    @override
    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Arrays":
        leaves = ((str(d), tuple(map(int, s))) for d, s in content["leaves"])
        return cls(content["outline"], tuple(leaves))

    @override
    def whole(self, values: Sequence[Any]) -> Any:
        joined = [np.concatenate(leaves) for leaves in zip(*values, strict=True)]
        return restored(self.outline, iter(joined))

    @override
    def lazy(self, parts: Sequence[Delayed], rows: Sequence[int]) -> Any:
        empty = [np.zeros((0, *shape), dtype) for dtype, shape in self.leaves]
        made = [lazy_array(parts, i, leaf, rows) for i, leaf in enumerate(empty)]
        return restored(self.outline, iter(made))

    def _names(self) -> list[str]:
        tree = restored(self.outline, iter(range(len(self.leaves))))
        return [name for name, _ in batching.named(tree, "y")]


_ROWS = "rows"
_KEYS = "keys"


@dataclass(frozen=True)
class Examples(Format):
    """Outputs of examples, in their order, or of rows where a list has such parts.

    Attributes:
        outline: Of the tree of an output, as plain values.
        keyed: Whether examples have keys.
        collection: What the parts are put together to.
    """

    outline: Any
    keyed: bool
    collection: Literal["bag", "list"]

    kind = "examples"
    suffix = "safetensors"

    @override
    def encoded(self, value: Any) -> Encoded:
        if not isinstance(value, list):
            named = {n: np.ascontiguousarray(x) for n, x in batching.named(value, "y")}
            return Encoded(batching.length(value), safetensors.numpy.save(named))
        arrays: dict[str, np.ndarray] = {_ROWS: np.array([len(value)])}
        outputs = value
        if self.keyed:
            own, outputs = lazy.split(value, "the outputs")
            arrays[_KEYS] = np.frombuffer(lazy.written(own), np.uint8)
        arrays |= dict(_grouped(outputs))
        return Encoded(len(value), safetensors.numpy.save(arrays))

    @override
    def decoded(self, content: bytes) -> Any:
        arrays = safetensors.numpy.load(content)
        if _ROWS not in arrays:
            return self._tree(arrays, "")
        outputs: list[Any] = [None] * int(arrays[_ROWS][0])
        for name in [name for name in arrays if name.endswith(f"/{_ROWS}")]:
            tree = self._tree(arrays, name.removesuffix(_ROWS))
            for row, place in enumerate(arrays[name]):
                outputs[place] = batching.rows(tree, row)
        if not self.keyed:
            return outputs
        own = lazy.read(arrays[_KEYS].tobytes())
        return list(zip(own, outputs, strict=True))

    @override
    def to_json(self) -> dict[str, Any]:
        return {
            "outline": self.outline,
            "keyed": self.keyed,
            "collection": self.collection,
        }

    @override
    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Examples":
        collection: Literal["bag", "list"] = (
            "bag" if content["collection"] == "bag" else "list"
        )
        return cls(content["outline"], bool(content["keyed"]), collection)

    @override
    def whole(self, values: Sequence[Any]) -> Any:
        if self.collection == "list":
            return list(values)
        return [one for value in values for one in value]

    @override
    def lazy(self, parts: Sequence[Delayed], rows: Sequence[int]) -> Any:
        if self.collection == "list":
            return list(parts)
        from dask.bag import from_delayed

        return from_delayed(list(parts))

    def _tree(self, arrays: Mapping[str, np.ndarray], before: str) -> Tree:
        places = restored(self.outline, iter(range(len(arrays))))
        named = batching.named(places, f"{before}y")
        return restored(self.outline, iter([arrays[name] for name, _ in named]))


def _grouped(outputs: Sequence[Tree]) -> Iterator[tuple[str, np.ndarray]]:
    """Outputs of one shape as one array for each place in their tree, by name."""
    places: defaultdict[Any, list[int]] = defaultdict(list)
    for place, output in enumerate(outputs):
        kinds = [(leaf.dtype.name, leaf.shape) for leaf in batching.leaves(output)]
        places[tuple(kinds)].append(place)
    for group, chosen in enumerate(places.values()):
        yield f"{group}/{_ROWS}", np.array(chosen)
        together = batching.mapped(
            lambda *leaves: np.stack(leaves), *(outputs[place] for place in chosen)
        )
        yield from batching.named(together, f"{group}/y")


@dataclass(frozen=True)
class PartFile:
    """What is known of one file.

    Attributes:
        name: Below the folder.
        rows: How many are in it; there may be none.
        size_bytes: Of the file.
        crc32: Checksum of its bytes: finds damage, not forgery.
    """

    name: str
    rows: int
    size_bytes: int
    crc32: int

    @classmethod
    def of(cls, content: bytes, rows: int, part: int, suffix: str) -> "PartFile":
        """The file of some bytes, of a name that no other bytes have.

        Two workers may have made the same part, if one was believed to be dead.
        """
        crc32 = zlib.crc32(content)
        name = f"part-{part:06d}-{crc32:08x}.{suffix}"
        return cls(name, rows, len(content), crc32)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "PartFile":
        """Read what `to_json` made.

        Raises:
            ValueError: Or KeyError or TypeError, if it is something else.
        """
        numbers = (int(content[key]) for key in ("rows", "size_bytes", "crc32"))
        file = cls(str(content["name"]), *numbers)
        if file.rows < 0 or not file.name or "/" in file.name:
            raise ValueError(f"there cannot be a {file}")
        return file

    def to_json(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)

    def is_there(self, store: Store) -> bool:
        """Whether there is a file of this size; files are written at once."""
        return store.exists(self.name) and store.size(self.name) == self.size_bytes

    def read(self, store: Store) -> bytes:
        """The bytes that were written.

        Raises:
            DataError: If they are not there, or are others; names its URL.
        """
        content = store.read(self.name)
        if len(content) != self.size_bytes or zlib.crc32(content) != self.crc32:
            raise DataError(
                f"{store.url_of(self.name)} is damaged: it has {len(content)} bytes "
                f"with the checksum {zlib.crc32(content):08x}, {self.size_bytes} with "
                f"{self.crc32:08x} were written; predict to another URL"
            )
        return content


_NAME = "prediction"  # of the column of a series, which Parquet needs


@dataclass(frozen=True)
class Tables(Format):
    """A ``dask.dataframe``, or a series of one.

    Attributes:
        empty: The bytes of a Parquet file without rows.
        divisions: The bytes of one whose index has the divisions; None: not known.
        series: Whether it is a series.
        names: Whether the columns have names; else they are 0, 1, ...
    """

    empty: bytes
    divisions: bytes | None
    series: bool
    names: bool

    kind = "tables"
    suffix = "parquet"

    @classmethod
    def of(cls, frame: Any) -> "Tables":
        """The format of the partitions of a ``dask.dataframe`` or a series.

        Raises:
            ModelError: If its columns could not be told when it is read back.
        """
        import pandas

        meta = frame._meta
        divisions = None
        if frame.known_divisions:
            index = pandas.Index(frame.divisions, name=meta.index.name)
            divisions = _parquet(pandas.DataFrame(index=index))
        names = meta.ndim == 1 or all(isinstance(name, str) for name in meta.columns)
        if not names and list(meta.columns) != list(range(len(meta.columns))):
            raise ModelError(
                "columns must have text as names to be written to Parquet, got "
                f"{list(meta.columns)}; give a postprocess that names them so"
            )
        return cls(_parquet(_framed(meta)), divisions, meta.ndim == 1, names)

    @override
    def encoded(self, value: Any) -> Encoded:
        return Encoded(len(value), _parquet(_framed(value)))

    @override
    def decoded(self, content: bytes) -> Any:
        import pandas

        frame = pandas.read_parquet(io.BytesIO(content))
        if self.series:
            return frame[_NAME].rename(None)
        if not self.names:
            frame.columns = pandas.RangeIndex(len(frame.columns))
        return frame

    @override
    def to_json(self) -> dict[str, Any]:
        return {
            "empty": base64.b64encode(self.empty).decode(),
            "divisions": (
                None
                if self.divisions is None
                else base64.b64encode(self.divisions).decode()
            ),
            "series": self.series,
            "names": self.names,
        }

    @override
    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Tables":
        divisions = content["divisions"]
        return cls(
            base64.b64decode(content["empty"]),
            None if divisions is None else base64.b64decode(divisions),
            bool(content["series"]),
            bool(content["names"]),
        )

    @override
    def whole(self, values: Sequence[Any]) -> Any:
        import pandas

        return pandas.concat([v for v in values if len(v)] or values[:1])

    @override
    def lazy(self, parts: Sequence[Delayed], rows: Sequence[int]) -> Any:
        import dask.dataframe
        import pandas

        divisions = None
        if self.divisions is not None:
            divisions = tuple(pandas.read_parquet(io.BytesIO(self.divisions)).index)
        return dask.dataframe.from_delayed(
            list(parts),
            meta=self.decoded(self.empty),
            divisions=divisions,
            verify_meta=False,
        )


def _framed(table: Any) -> Any:
    """A frame whose columns have names, as Parquet needs them."""
    if table.ndim == 1:
        return table.to_frame(_NAME)
    return table.rename(columns=str)


def _parquet(frame: Any) -> bytes:
    content = io.BytesIO()
    frame.to_parquet(content)
    return content.getvalue()


NAME = "_predictions.json"
_REMEDY = "predict to another URL"
_SEAL = Seal("daskdl predictions", 1, _REMEDY, _REMEDY)
_FORMATS: Sequence[type[Format]] = (Arrays, Examples, Tables)


@dataclass(frozen=True)
class Manifest:
    """What `predict` has written.

    Attributes:
        format: How to read it.
        files: One for each part of the data, in order.
        made_from: Which model, data and options.
    """

    format: Format
    files: Sequence[PartFile]
    made_from: Mapping[str, Any]

    @classmethod
    def read(cls, store: Store) -> "Manifest":
        """Read the manifest in a folder.

        Raises:
            DataError: If there is none, or it is damaged, of something else, or of a
                newer version of daskdl.
        """
        where = store.url_of(NAME)
        content = _SEAL.opened(store.read(NAME), where)
        try:
            (kind,) = [one for one in _FORMATS if one.kind == content["format"]]
            return cls(
                kind.from_json(content["reading"]),
                tuple(map(PartFile.from_json, content["files"])),
                dict(content["made_from"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{where} is damaged: {error!r}; {_REMEDY}") from error

    def write(self, store: Store) -> None:
        """Put it into a folder, where all of the files must be."""
        content = {
            "format": self.format.kind,
            "reading": self.format.to_json(),
            "rows": sum(file.rows for file in self.files),
            "made_from": dict(self.made_from),
            "files": [file.to_json() for file in self.files],
        }
        store.write(NAME, _SEAL.closed(content))


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Its mode, what is looked at otherwise, and who made it.
_OF_ALL = frozenset({*vars(nn.Module()), MAKER})
_TELLING = (
    *(int, float, complex, str, bytes, type(None), type, torch.dtype),
    *(Tensor, np.ndarray, np.generic),
    *(types.FunctionType, types.BuiltinFunctionType),
)


def origin_of_predictions(
    model: nn.Module, source: Source, X: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe predictions, as plain values for JSON.

    Args:
        model: Of which; see `fingerprint`.
        source: The parts of the data.
        X: The data, which are told as those of an export are.
        options: Plain values, which decide what comes out.
    """
    return {"model": fingerprint(model), **origin_of(source, (X, None), options)}


def fingerprint(model: nn.Module) -> str:
    """What tells a model from others: its class, its layers, and all of its numbers.

    Numbers, text, arrays and functions count wherever they are attributes of a layer,
    in lists and dicts too. It is the same in every session. What the code of a class
    does is not looked at, nor objects of other classes.

    Example:
        >>> one = nn.Linear(2, 1)
        >>> fingerprint(one) == fingerprint(nn.Linear(2, 1))
        False
    """
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    found = hashlib.sha256(f"{kind} {_ADDRESS.sub('', repr(model))}".encode())
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        found.update(f" {name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(_bytes_of(tensor))
    for name, value in _attributes(model):
        found.update(f" {name} {token_of(_telling(value))} ".encode())
    return found.hexdigest()[:32]


def _attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """What layers have beside parameters, buffers and other layers, by name."""
    for layer, module in model.named_modules():
        for name, value in sorted(vars(module).items()):
            if name not in _OF_ALL:
                yield f"{layer}.{name}", value


def _telling(value: Any) -> Any:
    """Of objects that may look different in each session nothing but the class."""
    if isinstance(value, dict):
        return {str(key): _telling(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_telling(item) for item in value]
    if isinstance(value, set | frozenset):
        return [_telling(item) for item in sorted(value, key=str)]
    return value if isinstance(value, _TELLING) else type(value).__qualname__


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


class Predictions:
    """What `predict` has written to a URL, a file for each part of the data.

    Predictions for a ``dask.dataframe`` are Parquet files, which others can read too;
    all else are files of safetensors.

    Args:
        url: The folder that was given as ``output``.
        storage_options: For fsspec, such as credentials.

    Attributes:
        url: The folder.
        rows: In each part.

    Raises:
        DataError: If they have not been finished, or there are none, or the manifest
            cannot be used.

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
        if not self._store.exists(NAME):
            raise DataError(
                f"there are no finished predictions in {self.url}; run predict again "
                "with this output, and it goes on where it stopped"
            )
        self._manifest = Manifest.read(self._store)
        self.rows = tuple(file.rows for file in self._manifest.files)

    def load(self) -> Any:
        """Read all of them into memory, in the order of the data.

        Returns:
            Of tables a pandas frame or series; of a bag a list of the outputs of its
            examples, or of pairs (key, output); of a list one of what each part has;
            else numpy arrays, in a tree if there are several outputs.

        Raises:
            DataError: If a file is missing or damaged.
        """
        form = self._manifest.format
        files = self._manifest.files
        return form.whole([_read(self._store, form, file) for file in files])

    def to_dask(self) -> Any:
        """Read them lazily, where they are needed, in the parts of the data.

        Returns:
            What `predict` would return without a URL; of what is not lazy, a
            ``dask.array``.
        """
        form, name = self._manifest.format, new_key("predictions")
        read = delayed(_read, pure=False)
        parts = [
            read(self._store, form, file, dask_key_name=(name, part))
            for part, file in enumerate(self._manifest.files)
        ]
        return form.lazy(parts, self.rows)

    @override
    def __repr__(self) -> str:
        count = f"{sum(self.rows)} rows in {len(self.rows)} parts"
        return f"Predictions({self.url!r}: {count})"


def _read(store: Store, form: Format, file: PartFile) -> Any:
    return form.decoded(file.read(store))


_FOLDER = ".predicting"
_KIND = "part"  # of a record of progress
_LOOKED_AT_AT_A_TIME = 8  # each is a request that mostly waits


@dataclass(frozen=True)
class Target:
    """A folder, for predictions of one model, of one data set.

    Attributes:
        store: The folder.
        made_from: What tells these from other predictions.
    """

    store: Store
    made_from: Mapping[str, Any]

    def finished(self) -> Predictions | None:
        """What is there, if it is finished.

        Raises:
            OptionError: If there is something else.
        """
        if self.store.exists(exports.MANIFEST_NAME):
            raise OptionError(
                f"there are batch files in {self.store.url}; give another URL"
            )
        done = self.store.exists(NAME)
        before = (
            Manifest.read(self.store).made_from if done else self._progress.origin()
        )
        differing = "" if before is None else differences(before, self.made_from)
        if differing:
            what = "are predictions" if done else "are unfinished predictions"
            raise OptionError(
                f"there {what} of another model, other data or other options in "
                f"{self.store.url}: {differing}; give another URL, or delete the folder"
            )
        if not done:
            return None
        logger.info("predictions are in %s already", self.store.url)
        return Predictions(self.store.url, self.store.options)

    def begin(self) -> dict[int, PartFile]:
        """Begin, or go on: the files that are there, by the number of their part."""
        if self._progress.origin() is None:
            self._progress.begin(self.made_from)
            return {}
        records = self._progress.done(_KIND)
        files = {part: PartFile.from_json(record) for part, record in records.items()}
        with ThreadPoolExecutor(_LOOKED_AT_AT_A_TIME) as pool:
            there = list(
                pool.map(lambda file: file.is_there(self.store), files.values())
            )
        return {part: files[part] for part, ok in zip(files, there, strict=True) if ok}

    def write(self, form: Format, part: int, value: Any) -> PartFile:
        """Write what came out for a part, on whatever worker that is.

        Raises:
            DataError: If it cannot be written, or the run is over, or this is not the
                same place as that of the client.
        """
        self._progress.check()
        rows, content = form.encoded(value)
        file = PartFile.of(content, rows, part, form.suffix)
        self.store.write(file.name, content)
        try:
            self._progress.add(_KIND, part, file.to_json())
        except DataError:  # it was believed to be dead, and is not needed any more
            if not self._has(file):
                self.store.delete([file.name])
            raise
        return file

    def finish(self, form: Format, files: Mapping[int, PartFile]) -> Predictions:
        """Say that all is there, and delete what was only needed until then."""
        in_order = tuple(files[part] for part in sorted(files))
        Manifest(form, in_order, self.made_from).write(self.store)
        self._progress.end()
        names = {file.name for file in in_order}
        found = self.store.names(f"{_KIND}-*.{form.suffix}")
        self.store.delete([name for name in found if name not in names])
        logger.info("predictions are in %s", self.store.url)
        return Predictions(self.store.url, self.store.options)

    @property
    def _progress(self) -> Progress:
        return Progress(self.store, "prediction", _FOLDER)

    def _has(self, file: PartFile) -> bool:
        finished = self.store.exists(NAME)
        return finished and file in Manifest.read(self.store).files


@dataclass(frozen=True)
class LazyBlocks:
    """What is asked about a collection, to be written.

    Attributes:
        X: The collection.
        source: The same, as it is cut.
        ask: What comes out for rows.
        empty: The outputs of no rows.
        names: For the columns of a table, if there are as many.
    """

    X: Any
    source: Collections
    ask: Ask
    empty: Tree
    names: Sequence[Any] | None

    def blocks(
        self, client: Client | Literal[False]
    ) -> tuple[Format, Sequence[Delayed]]:
        """How the partitions are written, and what comes out for each."""
        if isinstance(self.source, lazy.Examples):
            kind, values = lazy_parts(self.X, self.source, self.ask, client)
            keyed = bool(self.source.reading.keyed)
            collection: Literal["bag", "list"] = "bag" if kind == "bag" else "list"
            return Examples(outline_of(self.empty), keyed, collection), values
        first = batching.leaves(self.X)[0]
        if not hasattr(first, "divisions"):
            kind, values = lazy_parts(self.X, self.source, self.ask, client)
            return Arrays.of(self.empty), values
        if not isinstance(tables_of(self.empty, self.names), list):
            raise ModelError(
                "outputs must make one table to be written for a dask.dataframe, got "
                f"{batching.outline(self.empty)}; give a postprocess that returns a "
                "dict of outputs with one number for each row"
            )
        made = lazy_outputs(
            self.X, self.source, self.ask, self.empty, client, names=self.names
        )
        return Tables.of(made), made.to_delayed()


def write_lazy(
    asked: LazyBlocks, target: Target, client: Client | Literal[False]
) -> Predictions:
    """Write what comes out for a collection, or go on where that was interrupted.

    Args:
        asked: What is asked about it.
        target: Where to.
        client: Of the cluster that computes; False: this process does.
    """
    form, blocks = asked.blocks(client)
    files = target.begin()
    write = delayed(_write, pure=False)
    writes = {
        part: write(target, form, part, block)
        for part, block in enumerate(blocks)
        if part not in files
    }
    files |= dict(_computed(writes, client))
    return target.finish(form, files)


def write_parts(
    source: Source,
    ask: Callable[[Source, int], Tree],
    empty: Tree,
    target: Target,
    client: Client | Literal[False],
) -> Predictions:
    """Write what comes out for what is no collection, likewise.

    Args:
        source: The parts.
        ask: What comes out for one.
        empty: The outputs of no rows.
        target: Where to.
        client: As of `write_lazy`.
    """
    form = Arrays.of(empty)
    files = target.begin()
    missing = [part for part in range(source.parts) if part not in files]
    write = _Writing(ask, target, form)
    if missing:
        files |= dict(each_part(source, write, client, parts=missing, send=True))
    return target.finish(form, files)


@dataclass(frozen=True)
class _Writing:
    """Writes what comes out for a part; picklable."""

    ask: Callable[[Source, int], Tree]
    target: Target
    form: Format

    def __call__(self, source: Source, part: int) -> PartFile:
        outputs = batching.leaves(self.ask(source, part))
        return self.target.write(self.form, part, outputs)


def _write(target: Target, form: Format, part: int, value: Any) -> PartFile:
    """The task of a partition."""
    return target.write(form, part, value)


def _computed(
    writes: Mapping[int, Delayed], client: Client | Literal[False]
) -> Iterator[tuple[int, PartFile]]:
    if client is False:
        done = dask.compute(*writes.values(), scheduler="sync")
        yield from zip(writes, done, strict=True)
        return
    futures = client.compute(list(writes.values()))
    parts = dict(zip(futures, writes, strict=True))
    try:
        for future in as_completed(futures, loop=client.loop):
            yield parts[future], future.result()
    finally:
        release(futures)
