"""JSON with a checksum of itself, which says what it is and in which version.

A number that changed on a disk is found when it is read.

What the rows look like: the trees of x and y, and shape and dtype of each array.

A row as one record of bytes, all its arrays one after the other, is how rows are kept
on the way to batch files: a stretch of rows is then a stretch of bytes.

One batch file: the arrays of some batches as safetensors, with a checksum outside.

The names in it are those of the arrays, ``x`` or ``x['image']``; how they make up the
trees of x and y is in the manifest, as is the checksum.

The manifest: what is in a folder of batch files, as JSON beside them.

It is written when everything else is there, so a folder without one has not been
finished. It has a checksum of itself: a number that changed on a disk is found when it
is read, not when a row is missing.

An export that has not been finished: what has been done, on disk beside the files.

In the folder ``.unfinished``: what the export is made from, the rows dealt out of each
part, and a record for each part and bucket that is done, written after its files. So
who runs the export again goes on where it stopped, and what was half done is done
again, into files of the same names.

Whoever ends an export deletes ``origin.json`` first. A task that outlives its export,
because its client was interrupted, looks for it after each file, and takes the file
away again: nothing comes back after the clean-up.

Batch files as data to train on; a part is a file.
"""

import json
import os
import socket
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Rows
from daskdl.data.source import SHOWN_ROWS, Source
from daskdl.data.storage import Store, store_of
from daskdl.data.tables import as_numpy, check_array
from daskdl.errors import DataError


class Seal(NamedTuple):
    """What the content of a file says about itself.

    Attributes:
        kind: What it is.
        version: Of its layout; raised by whoever changes that.
        maker: Who makes such a folder, for messages.
        remedy: What to do if it is damaged.
    """

    kind: str
    version: int
    maker: str
    remedy: str

    def closed(self, content: Mapping[str, Any]) -> bytes:
        """The bytes of a file with this content."""
        whole = {"kind": self.kind, "version": self.version, **content}
        whole["crc32"] = _checksum(whole)
        return json.dumps(whole, indent=1).encode()

    def opened(self, encoded: bytes, where: str) -> dict[str, Any]:
        """The content, if it is of this kind, undamaged, and not too new.

        Raises:
            DataError: If it is not; names where it was read.
        """
        try:
            content = json.loads(encoded)
        except ValueError as error:  # also of bytes that are not text
            raise DataError(f"{where} is damaged: {error}; {self.remedy}") from error
        if not isinstance(content, dict) or content.get("kind") != self.kind:
            raise DataError(f"{where} is not of {self.kind}; {self.maker}")
        version = content.get("version")
        if not isinstance(version, int) or version > self.version:
            raise DataError(
                f"{where} is of version {version}, but this daskdl reads up to "
                f"{self.version}; install a newer one"
            )
        if content.pop("crc32", None) != _checksum(content):
            raise DataError(f"{where} is damaged: its checksum is wrong; {self.remedy}")
        return content


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


_ARRAY = "array"  # in an outline, where an array is


@dataclass(frozen=True)
class Schema:
    """Structure, shapes and dtypes of the rows of an export.

    Attributes:
        x: Outline of x, as JSON: ``"array"``, ``["tuple", [outline, ...]]`` or
            ``["dict", [[key, outline], ...]]``.
        y: The same of y; None without labels.
        dtype: Of a record: a field for each array, named as the user would write it
            (``x``, ``x['image']``), with the shape of one row of it.
    """

    x: Any
    y: Any
    dtype: np.dtype

    @classmethod
    def of(cls, rows: Rows) -> "Schema":
        """The schema of some rows.

        Args:
            rows: Trees of numpy arrays, at least one row.

        Raises:
            DataError: If an array cannot be exported, or they differ in length.
        """
        x, y = rows
        arrays = dict(named_arrays(rows))
        lengths = {name: check_array(a, name) for name, a in arrays.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name} has {n}" for name, n in lengths.items())
            raise DataError(f"all arrays must have as many rows, but {shown}")
        fields = [(n, _native(a.dtype), a.shape[1:]) for n, a in arrays.items()]
        return cls(
            outline_of(x), None if y is None else outline_of(y), np.dtype(fields)
        )

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Schema":
        """Read what `to_json` made.

        Raises:
            ValueError: Or KeyError or TypeError, if it is something else.
        """
        fields = [
            (str(a["name"]), np.dtype(str(a["dtype"])), tuple(map(int, a["shape"])))
            for a in content["arrays"]
        ]
        schema = cls(content["x"], content["y"], np.dtype(fields))
        names = [
            name for name, _ in named_arrays(schema.rows(np.zeros(1, schema.dtype)))
        ]
        if names != [field[0] for field in fields]:
            raise ValueError(f"the outlines are of {names}")
        return schema

    def to_json(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        arrays = [
            {"name": name, "dtype": kind.base.name, "shape": list(kind.shape)}
            for name, kind in self._fields()
        ]
        return {"x": self.x, "y": self.y, "arrays": arrays}

    def records(self, rows: Rows, order: np.ndarray) -> np.ndarray:
        """Copy some rows into records, in that order.

        Raises:
            DataError: If the rows are not of this schema.
        """
        self.check(Schema.of(rows), "the rows")
        records = np.empty(len(order), self.dtype)
        for name, array in named_arrays(rows):
            records[name] = array[order]
        return records

    def rows(self, records: np.ndarray | Mapping[str, np.ndarray]) -> Rows:
        """The trees of x and y of some records, or of whole arrays by name."""
        names = iter(self.dtype.names or ())
        arrays = (np.ascontiguousarray(records[name]) for name in names)
        x = restored(self.x, arrays)
        return x, None if self.y is None else restored(self.y, arrays)

    def check(self, other: "Schema", where: str) -> None:
        """Refuse rows that look different.

        Args:
            other: How they look.
            where: Whose rows they are, for the message.

        Raises:
            DataError: With the first difference.
        """
        mine, others = dict(self._fields()), dict(other._fields())
        for name in mine.keys() | others.keys():
            if mine.get(name) != others.get(name):
                raise DataError(
                    f"{name} of {where} is {_shown(others.get(name))}, but of those "
                    f"before {_shown(mine.get(name))}; all rows must be alike"
                )
        if (self.x, self.y) != (other.x, other.y):
            raise DataError(
                f"x and y of {where} are {other.x} and {other.y}, but of those before "
                f"{self.x} and {self.y}; all rows must be alike"
            )

    def _fields(self) -> Iterator[tuple[str, np.dtype]]:
        for name in self.dtype.names or ():
            yield name, self.dtype[name]


def as_rows(batch: Rows) -> Rows:
    """A batch of tensors or arrays as numpy arrays; y may be None."""
    return batching.of_both(partial(batching.mapped, as_numpy), batch)


def joined(blocks: Sequence[Rows]) -> Rows:
    """Rows one after the other; all have labels or none."""
    xs, ys = zip(*blocks, strict=True)
    return batching.joined(xs), None if ys[0] is None else batching.joined(ys)


def named_arrays(rows: Rows) -> Iterator[tuple[str, Any]]:
    """The arrays of x, then of y, as the user would write them.

    Example:
        >>> list(named_arrays(({"image": 1}, 2)))
        [("x['image']", 1), ('y', 2)]
    """
    x, y = rows
    yield from batching.named(x, "x")
    if y is not None:
        yield from batching.named(y, "y")


def _native(dtype: np.dtype) -> np.dtype:
    return dtype.newbyteorder("=")


def outline_of(tree: Any) -> Any:
    """The structure of a tree, as plain values for JSON.

    Raises:
        DataError: If a key of a dict is no string or whole number.
    """
    if isinstance(tree, dict):
        for key in tree:
            if not isinstance(key, str | int):
                raise DataError(
                    f"keys of dicts must be strings or whole numbers to be exported, "
                    f"got {key!r}"
                )
        return ["dict", [[key, outline_of(child)] for key, child in tree.items()]]
    if isinstance(tree, tuple):
        return ["tuple", [outline_of(child) for child in tree]]
    return _ARRAY


def restored(outline: Any, arrays: Iterator[Any]) -> Any:
    """The tree of an outline with these in its places; a named tuple is a plain one."""
    if outline == _ARRAY:
        return next(arrays)
    kind, children = outline
    if kind == "dict":
        return {key: restored(child, arrays) for key, child in children}
    if kind == "tuple":
        return tuple(restored(child, arrays) for child in children)
    raise ValueError(f"an outline has {kind!r}")


def _shown(dtype: np.dtype | None) -> str:
    if dtype is None:
        return "missing"
    return f"{dtype.base.name} of shape (rows, {', '.join(map(str, dtype.shape))})"


@dataclass(frozen=True)
class BatchFile:
    """What is known of one batch file.

    Attributes:
        name: Below the folder of the export.
        rows: How many are in it.
        size_bytes: Of the file.
        crc32: Checksum of its bytes: finds damage, not forgery.
    """

    name: str
    rows: int
    size_bytes: int
    crc32: int

    @classmethod
    def from_json(cls, content: Any) -> "BatchFile":
        """Read what ``dataclasses.asdict`` made.

        Raises:
            ValueError: Or KeyError or TypeError, if it is something else.
        """
        numbers = (int(content[key]) for key in ("rows", "size_bytes", "crc32"))
        file = cls(str(content["name"]), *numbers)
        if file.rows < 1 or not file.name or "/" in file.name:
            raise ValueError(f"there cannot be a {file}")
        return file

    @classmethod
    def written(cls, store: Store, name: str, rows: Rows) -> "BatchFile":
        """Write a batch file, all at once.

        Args:
            store: Where to.
            name: Of the file; one that is there is replaced.
            rows: Trees of numpy arrays, at least one row.
        """
        # Of an array that is not contiguous, safetensors takes the wrong bytes.
        arrays = {n: np.ascontiguousarray(array) for n, array in named_arrays(rows)}
        content = safetensors.numpy.save(arrays)
        store.write(name, content)
        count = len(next(iter(arrays.values())))
        return cls(name, count, len(content), zlib.crc32(content))

    def read(self, store: Store, schema: Schema) -> Rows:
        """The rows in it.

        Args:
            store: Where it is.
            schema: What they must look like.

        Raises:
            DataError: If it cannot be read, is damaged, or has other rows; names its
                URL.
        """
        content = store.read(self.name)
        if not self._is_intact(content):
            raise DataError(
                f"{store.url_of(self.name)} is damaged: it has {len(content)} bytes "
                f"with the checksum {zlib.crc32(content):08x}, {self.size_bytes} with "
                f"{self.crc32:08x} were written; export again with overwrite=True"
            )
        rows = schema.rows(safetensors.numpy.load(content))
        schema.check(Schema.of(rows), store.url_of(self.name))
        return rows

    def is_there(self, store: Store) -> bool:
        """Whether its bytes are those that were written."""
        if not store.exists(self.name):
            return False
        return self._is_intact(store.read(self.name))

    def _is_intact(self, content: bytes) -> bool:
        return len(content) == self.size_bytes and zlib.crc32(content) == self.crc32


MANIFEST_NAME = "manifest.json"
_REMEDY = "export again with overwrite=True"
_SEAL = Seal(
    "daskdl batch files",
    1,
    "export to another URL, or give one that daskdl.data.export was given",
    _REMEDY,
)


@dataclass(frozen=True)
class Manifest:
    """What an export has made.

    Attributes:
        batch_size: Rows of a batch.
        files: Each of the batch files, in order.
        schema: What the rows look like.
        classes: Names of the labels 0, 1, ...; None: they have none.
        made_from: Which data and options the export was made from; see
            :mod:`daskdl.data.export`.
    """

    batch_size: int
    files: Sequence[BatchFile]
    schema: Schema
    classes: Sequence[str] | None
    made_from: Mapping[str, Any]

    @property
    def rows(self) -> int:
        """How many are in all files together."""
        return sum(file.rows for file in self.files)

    @classmethod
    def read(cls, store: Store) -> "Manifest":
        """Read the manifest in a folder.

        Raises:
            DataError: If there is none, or it is damaged, of something else, or of a
                newer version of daskdl.
        """
        where = store.url_of(MANIFEST_NAME)
        content = _SEAL.opened(store.read(MANIFEST_NAME), where)
        try:
            return cls._from_json(content)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError(f"{where} is damaged: {error!r}; {_REMEDY}") from error

    def write(self, store: Store) -> None:
        """Put it into a folder, where all of the files must be."""
        content = {
            "rows": self.rows,
            "batch_size": self.batch_size,
            "classes": self.classes if self.classes is None else list(self.classes),
            "schema": self.schema.to_json(),
            "made_from": dict(self.made_from),
            "files": [asdict(file) for file in self.files],
        }
        store.write(MANIFEST_NAME, _SEAL.closed(content))

    @classmethod
    def _from_json(cls, content: Mapping[str, Any]) -> "Manifest":
        manifest = cls(
            int(content["batch_size"]),
            tuple(BatchFile.from_json(file) for file in content["files"]),
            Schema.from_json(content["schema"]),
            None if content["classes"] is None else tuple(content["classes"]),
            dict(content["made_from"]),
        )
        if manifest.rows != content["rows"] or not manifest.files:
            raise ValueError(f"{manifest.rows} rows instead of {content['rows']}")
        return manifest


FOLDER = ".unfinished"
_READ_AT_A_TIME = 8  # each is a request that mostly waits


@dataclass(frozen=True)
class Progress:
    """The state of the export to a store; any process may look and add to it.

    Attributes:
        store: Where to.
        what: It is, for messages.
        folder: In the store, of this state.
    """

    store: Store
    what: str = "export"
    folder: str = FOLDER

    def begin(self, origin: Mapping[str, Any]) -> None:
        """Say what the export is made from."""
        self.store.write(self._origin, json.dumps(origin).encode())

    def origin(self) -> dict[str, Any] | None:
        """What the export is made from; None: there is no unfinished one."""
        if not self.store.exists(self._origin):
            return None
        return _parsed(self.store, self._origin)

    def done(self, kind: str) -> dict[int, dict[str, Any]]:
        """The records of this kind, by number."""
        names = self.store.names(f"{self.folder}/{kind}-*.json")
        with ThreadPoolExecutor(_READ_AT_A_TIME) as pool:
            records = pool.map(partial(_parsed, self.store), names)
            numbers = (name.rpartition("-")[2].removesuffix(".json") for name in names)
            return dict(zip(map(int, numbers), records, strict=True))

    def add(self, kind: str, number: int, record: Mapping[str, Any]) -> None:
        """Say that something is done; all its files must be there."""
        name = f"{self.folder}/{kind}-{number:06d}.json"
        self.write(name, json.dumps(record).encode())

    def write(self, name: str, content: bytes) -> None:
        """Write a file of the folder ``.unfinished``.

        Raises:
            DataError: If the export has been given up meanwhile.
        """
        self.check()
        self.store.write(name, content)
        if not self.store.exists(self._origin):
            self.store.delete([name])
            self.check()

    def keep(self, name: str) -> None:
        """Take a batch file that was just written away again, if it came too late.

        Raises:
            DataError: If the export has been given up meanwhile.
        """
        # Of a finished export, this is one that another task has written as well.
        if not self.store.exists(self._origin) and not self.store.exists(MANIFEST_NAME):
            self.store.delete([name])
            self.check()

    @property
    def _origin(self) -> str:
        return f"{self.folder}/origin.json"

    def check(self) -> None:
        """Refuse to go on with an export that is not there.

        Raises:
            DataError: If it was given up, or is not seen from this machine.
        """
        if not self.store.exists(self._origin):
            raise DataError(
                f"there is no unfinished {self.what} in {self.store.url} on "
                f"{socket.gethostname()}: either it was given up, or the URL is not "
                "the same place on all machines; use an object store or a network "
                "folder"
            )

    def end(self) -> None:
        """Delete all that is only needed until the export is finished."""
        self.store.delete([self._origin])
        self.store.delete(self.store.names(f"{self.folder}/*"))


def _parsed(store: Store, name: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(store.read(name))
    except ValueError as error:
        raise DataError(
            f"{store.url_of(name)} is damaged: {error}; export with overwrite=True"
        ) from error
    return content


class BatchFiles(Source):
    """What ``daskdl.data.export`` has written.

    Args:
        url: The folder.
        storage_options: For fsspec, such as credentials.

    Attributes:
        store: The folder.
        manifest: What is in it.

    Raises:
        DataError: If the export has not been finished, or there is none, or its
            manifest cannot be used.
    """

    store: Store
    manifest: Manifest

    given = True

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.store = store_of(url, storage_options)
        _check_finished(self.store)
        self.manifest = Manifest.read(self.store)
        self.parts = len(self.manifest.files)
        self.lengths = [file.rows for file in self.manifest.files]
        schema = self.manifest.schema
        self.first = schema.rows(np.zeros(SHOWN_ROWS, schema.dtype))
        self.classes = self.manifest.classes

    @override
    def load(self, part: int) -> Rows:
        return self.manifest.files[part].read(self.store, self.manifest.schema)

    @override
    def name(self, part: int) -> str:
        return self.store.url_of(self.manifest.files[part].name)


def is_export(value: Any, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Whether it is the URL or path of an export, finished or not.

    Args:
        value: Of any type.
        storage_options: For fsspec, such as credentials.

    Example:
        >>> is_export([1, 2]), is_export("memory://nothing-here")
        (False, False)
    """
    if not isinstance(value, str | os.PathLike):
        return False
    store = store_of(value, storage_options)
    return store.exists(MANIFEST_NAME) or Progress(store).origin() is not None


def _check_finished(store: Store) -> None:
    if store.exists(MANIFEST_NAME):
        return
    if Progress(store).origin() is not None:
        raise DataError(
            f"the export to {store.url} has not been finished; run it again, and it "
            "goes on where it stopped"
        )
    raise DataError(
        f"there is no {MANIFEST_NAME} in {store.url}; make batch files with "
        "daskdl.data.export"
    )
