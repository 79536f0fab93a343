"""Zip and tar files in memory: made always the same, and where in them each file is.

Nothing is compressed, so that a file is a range of bytes. The same files in the same
order give the same bytes: no times, no owners.

Files in memory that loaders read like those of a folder.

Files by their relative paths, wherever they are: loose in a folder here.

Packed ones are in :mod:`daskdl.data.shards`. Nothing is decoded.

What is in the shards of a folder: a file that is written when all of them are there.

Its JSON:

========= ==================================================================
field     meaning
========= ==================================================================
format    "daskdl-shards"
version   1
archive   "zip" or "tar"
plan      what was to be packed, as a digest
shards    a list; of each shard its `name`, its `size` in bytes and `members`
members   a list of [relative path, first byte, size in bytes, CRC-32]
========= ==================================================================

Files in shards, read by their relative paths as if they were loose.

The files that are to be packed: which they are, and which of them go together.

Original files packed as they are into a few large ones, on the cluster.

An object store answers a request after tens of milliseconds, whatever its size. A shard
of a hundred small images comes in one of them. What is in the files is not looked at.

Shards as a source: each is a part, and a loader makes rows of the files in it.
"""

import copy
import hashlib
import io
import json
import logging
import os
import posixpath
import struct
import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Literal, NamedTuple, Self

import fsspec
import numpy as np
from typing_extensions import override

from daskdl.config import check_count
from daskdl.data import batching
from daskdl.data.batching import Rows
from daskdl.data.distribute import map_parts
from daskdl.data.files import loader_for
from daskdl.data.formats import FromBytes, FromPath, Loader, OneExample, loader_of
from daskdl.data.source import Facts, FileSource, Source
from daskdl.data.storage import (
    AnyPath,
    Place,
    Store,
    common_folder,
    is_path,
    listed,
    parted,
    store_of,
)
from daskdl.errors import DataError, OptionError, ShapeError

logger = logging.getLogger(__name__)

ARCHIVES = ("zip", "tar")

_LOCAL_HEADER = 30  # bytes before a file's name in a zip; the lengths are its last four
_READABLE = 0o644 << 16
_UNIX = 3


class Member(NamedTuple):
    """One file in an archive.

    Attributes:
        name: Its relative path.
        start: Where its content begins in the archive, bytes.
        size: Of its content, bytes.
        crc32: Of its content.
    """

    name: str
    start: int
    size: int
    crc32: int


def check_archive(archive: str) -> None:
    """Refuse a kind of archive that is not known.

    Raises:
        OptionError: If it is neither "zip" nor "tar".
    """
    if archive not in ARCHIVES:
        raise OptionError(f'format must be "zip" or "tar", got {archive!r}')


def archived(files: Iterable[tuple[str, bytes]], archive: str) -> bytes:
    """Put files into an archive.

    Args:
        files: Pairs (relative path, content), no path twice.
        archive: "zip" or "tar".

    Example:
        >>> content = archived([("a/b.txt", b"hello")], "zip")
        >>> [(m.name, m.size) for m in members_of(content, "zip", "x.zip")]
        [('a/b.txt', 5)]
    """
    target = io.BytesIO()
    {"zip": _zip, "tar": _tar}[archive](target, files)
    return target.getvalue()


def members_of(content: bytes, archive: str, url: str) -> tuple[Member, ...]:
    """Find the files in an archive.

    Args:
        content: Of the archive.
        archive: "zip" or "tar".
        url: Of the archive, for messages.

    Raises:
        DataError: If it is damaged.
    """
    ranges: Callable[[bytes], Iterator[tuple[str, int, int]]]
    ranges = {"zip": _zip_ranges, "tar": _tar_ranges}[archive]
    whole = memoryview(content)
    try:
        return tuple(
            Member(name, start, size, zlib.crc32(whole[start : start + size]))
            for name, start, size in ranges(content)
        )
    except (zipfile.BadZipFile, tarfile.TarError, struct.error, EOFError) as error:
        raise DataError(f"cannot read {url}: {error}") from error


def _zip(target: io.BytesIO, files: Iterable[tuple[str, bytes]]) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as made:
        for name, content in files:
            entry = zipfile.ZipInfo(name)  # of 1980, as a tar's is of 1970
            entry.external_attr, entry.create_system = _READABLE, _UNIX
            made.writestr(entry, content)


def _tar(target: io.BytesIO, files: Iterable[tuple[str, bytes]]) -> None:
    with tarfile.open(fileobj=target, mode="w:") as made:
        for name, content in files:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            made.addfile(entry, io.BytesIO(content))


def _zip_ranges(content: bytes) -> Iterator[tuple[str, int, int]]:
    with zipfile.ZipFile(io.BytesIO(content)) as found:
        for entry in found.infolist():
            header = entry.header_offset + _LOCAL_HEADER
            name, extra = struct.unpack("<HH", content[header - 4 : header])
            yield entry.filename, header + name + extra, entry.file_size


def _tar_ranges(content: bytes) -> Iterator[tuple[str, int, int]]:
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as found:
        for entry in found:
            yield entry.name, entry.offset_data, entry.size


@dataclass(frozen=True)
class Contents(Store):
    """The files of one archive.

    Attributes:
        archive: "zip" or "tar".
        files: Their contents by their paths in it.
    """

    archive: str = "zip"
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @override
    def read(
        self, name: str, start: int | None = None, stop: int | None = None
    ) -> bytes:
        if name not in self.files:
            raise DataError(f"cannot read {self.url_of(name)}: there is no such file")
        return self.files[name][start:stop]

    @override
    def exists(self, name: str) -> bool:
        return name in self.files

    @override
    def size(self, name: str) -> int:
        return len(self.read(name))

    @override
    def url_of(self, name: str) -> str:
        """The URL by which fsspec finds it in the archive."""
        return f"{self.archive}://{name}::{self.url}"

    @property
    @override
    def is_local(self) -> bool:
        return False


# Requests to an object store mostly wait; more than this many fill no link faster.
READERS = 8


class Folder(ABC):
    """Files which are read by their paths, relative to a root. It pickles."""

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """Relative paths, sorted; only those inside a folder if one is given."""

    @abstractmethod
    def folders(self, folder: str = "") -> list[str]:
        """Names of the folders that are directly in the root or in a folder of it."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is such a file."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Read a whole file.

        Raises:
            DataError: If it is not there, or cannot be read.
        """

    @abstractmethod
    def read_all(self, names: Sequence[str]) -> Iterator[bytes]:
        """Read some files that :meth:`groups` has put together, in order.

        Raises:
            DataError: If one is not there, or cannot be read.
        """

    @abstractmethod
    def groups(self, names: Sequence[str], at_most: int) -> list[list[str]]:
        """Put files together that are best read together.

        Args:
            names: Of the files.
            at_most: How many files a group may have, where that is open.
        """

    @abstractmethod
    def url_of(self, name: str) -> str:
        """The full URL of a file or folder, for messages and for fsspec."""


@dataclass(frozen=True)
class LooseFiles(Folder):
    """The files in a folder.

    Attributes:
        store: The folder.
    """

    store: Store

    @override
    def names(self, folder: str = "") -> list[str]:
        return self.store.names(f"{folder}/**" if folder else "**")

    @override
    def folders(self, folder: str = "") -> list[str]:
        return Store(self.store.url_of(folder), self.store.options).folders()

    @override
    def exists(self, name: str) -> bool:
        return self.store.exists(name)

    @override
    def read(self, name: str) -> bytes:
        return self.store.read(name)

    @override
    def read_all(self, names: Sequence[str]) -> Iterator[bytes]:
        if self.store.is_local:
            yield from map(self.read, names)
            return
        with ThreadPoolExecutor(min(READERS, len(names))) as pool:
            yield from pool.map(self.read, names)

    @override
    def groups(self, names: Sequence[str], at_most: int) -> list[list[str]]:
        return [list(names[i : i + at_most]) for i in range(0, len(names), at_most)]

    @override
    def url_of(self, name: str) -> str:
        return self.store.url_of(name)


INDEX = "index.json"
FORMAT = "daskdl-shards"
VERSION = 1


@dataclass(frozen=True)
class Shard:
    """One archive.

    Attributes:
        name: Relative to the index.
        size: In bytes.
        members: The files in it.
    """

    name: str
    size: int
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Index:
    """The shards of a folder.

    Attributes:
        archive: "zip" or "tar".
        plan: A digest of what was to be packed, and how.
        shards: In order.
    """

    archive: str
    plan: str
    shards: tuple[Shard, ...]

    @property
    def files(self) -> int:
        """How many files are in all shards."""
        return sum(len(shard.members) for shard in self.shards)

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size for shard in self.shards)

    def write(self, store: Store) -> None:
        """Write it beside the shards, at once.

        Raises:
            DataError: If it cannot be written.
        """
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        store.write(INDEX, json.dumps(content, separators=(",", ":")).encode())

    @classmethod
    def found(cls, store: Store) -> Self | None:
        """Read the index of a folder; None if it has none, or another kind of file.

        Raises:
            DataError: If this version cannot read it.
        """
        if not store.exists(INDEX):
            return None
        return cls.read(store) if FORMAT.encode() in store.read(INDEX) else None

    @classmethod
    def read(cls, store: Store) -> Self:
        """Read the index of a folder.

        Raises:
            DataError: If there is none, or if it is not one that this version reads.
        """
        url, content = store.url_of(INDEX), store.read(INDEX)
        try:
            found = json.loads(content)
            _check_kind(found, url)
            return cls(found["archive"], found["plan"], _shards(found["shards"]))
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"cannot read {url}: not an index of shards ({error})"
            ) from error


def _check_kind(found: Any, url: str) -> None:
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DataError(
            f"cannot read {url}: not an index of shards; "
            "daskdl.data.file_batches writes one"
        )
    if found["version"] != VERSION or found["archive"] not in ARCHIVES:
        raise DataError(
            f"cannot read {url}: version {found['version']!r} of {found['archive']!r} "
            f"shards; this daskdl reads version {VERSION} of {' and '.join(ARCHIVES)}"
        )


def _shards(found: Any) -> tuple[Shard, ...]:
    return tuple(
        Shard(shard["name"], shard["size"], tuple(Member(*m) for m in shard["members"]))
        for shard in found
    )


@dataclass(frozen=True)
class ShardedFiles(Folder):
    """The files in the shards of a folder, each checked when it is read.

    Attributes:
        store: The folder.
        index: What is in it.
    """

    store: Store
    index: Index

    @override
    def names(self, folder: str = "") -> list[str]:
        inside = f"{folder}/" if folder else ""
        return sorted(name for name in self._places if name.startswith(inside))

    @override
    def folders(self, folder: str = "") -> list[str]:
        start = len(folder) + 1 if folder else 0
        inner = [name[start:].partition("/") for name in self.names(folder)]
        return sorted({first for first, slash, _ in inner if slash})

    @override
    def exists(self, name: str) -> bool:
        return name in self._places

    @override
    def read(self, name: str) -> bytes:
        return next(self.read_all([name]))

    @override
    def read_all(self, names: Sequence[str]) -> Iterator[bytes]:
        for number, together in groupby(names, self._shard_of):
            shard = self.index.shards[number]
            members = [self._places[name][1] for name in together]
            yield from self._contents(shard, members)

    def read_shard(self, number: int) -> Iterator[tuple[str, bytes]]:
        """Read all files of one shard, with their relative paths.

        Raises:
            DataError: If the shard cannot be read, or is damaged.
        """
        shard = self.index.shards[number]
        names = [member.name for member in shard.members]
        return zip(names, self._contents(shard, shard.members), strict=True)

    @override
    def groups(self, names: Sequence[str], at_most: int) -> list[list[str]]:
        """Files of the same shard are together, in its order, however many."""
        wanted = set(names)
        found = [
            [member.name for member in shard.members if member.name in wanted]
            for shard in self.index.shards
        ]
        return [group for group in found if group]

    @override
    def url_of(self, name: str) -> str:
        if name not in self._places:
            return self.store.url_of(name)
        return self._inner_url(self.index.shards[self._shard_of(name)], name)

    @cached_property
    def _places(self) -> dict[str, tuple[int, Member]]:
        return {
            member.name: (number, member)
            for number, shard in enumerate(self.index.shards)
            for member in shard.members
        }

    def _shard_of(self, name: str) -> int:
        place = self._places.get(name)
        if place is None:
            raise DataError(f"cannot read {name}: no shard at {self.store.url} has it")
        return place[0]

    def _contents(self, shard: Shard, members: Sequence[Member]) -> Iterator[bytes]:
        """One request for all: what is between them is seldom much."""
        start = min(member.start for member in members)
        stop = max(member.start + member.size for member in members)
        read = memoryview(self._range(shard, start, stop))
        for member in members:
            first = member.start - start
            content = bytes(read[first : first + member.size])
            if len(content) != member.size or zlib.crc32(content) != member.crc32:
                raise DataError(
                    f"cannot read {self._inner_url(shard, member.name)}: it is damaged "
                    "(its CRC-32 is not that in the index); pack the files again"
                )
            yield content

    def _range(self, shard: Shard, start: int, stop: int) -> bytes:
        # Object stores refuse a range without bytes: of files which are all empty.
        return self.store.read(shard.name, start, stop) if stop > start else b""

    def _inner_url(self, shard: Shard, name: str) -> str:
        return f"{self.index.archive}://{name}::{self.store.url_of(shard.name)}"


_DIGITS = 8  # of a digest in a file's name: two plans in one folder seldom share it


@dataclass(frozen=True)
class Found:
    """Files with a common root.

    Attributes:
        store: The root.
        names: Their paths relative to it, in the order given, or sorted.
    """

    store: Store
    names: tuple[str, ...]


def found(
    paths: AnyPath | Sequence[AnyPath], root: AnyPath | None, options: Mapping[str, Any]
) -> Found:
    """Find the files that a user means.

    Args:
        paths: A folder, a file, a glob, or a list of files and globs.
        root: Their paths are relative to this folder. None: the folder; of a glob, the
            folder in front of its first wildcard; of a list, the deepest common one.
        options: Of the file system.

    Raises:
        DataError: If there are none, or one is given twice.
        OptionError: If one of them is not in the root, or paths are something else.

    Example:
        >>> found(["memory://x/a/1.png", "memory://x/b/1.png"], None, {})
        Found(store=Store(url='memory://x'), names=('a/1.png', 'b/1.png'))
    """
    if is_path(paths):
        whole = store_of(paths, options)
        names = whole.names()
        if names and root is None:
            return Found(whole, tuple(names))
        inside = [Place(whole, name) for name in names]
        places = inside or listed([paths], None, options)
        if len(places) == 1 and not whole.is_local and not _is_there(places[0]):
            raise DataError(f"there are no files at {whole.url}")
        common = places[0].store.url  # the same for all
    else:
        places = listed(paths, None, options)
        common = common_folder(parted(place.url).folder for place in places)
    if root is not None:
        common = store_of(root).url
    return Found(Store(common, options), _relative(places, common, options))


class Originals(Source):
    """Files cut into groups, each of which becomes one shard.

    Attributes:
        files: Where they are.
        archive: "zip" or "tar".
        plan: A digest of what is to be packed, and how.
    """

    lengths = None
    first = None

    def __init__(
        self, files: Found, per_batch: int, archive: str, seed: int | None
    ) -> None:
        self.files = LooseFiles(files.store)
        self.archive = archive
        names = list(files.names)
        if seed is not None:
            order = np.random.default_rng(seed).permutation(len(names))
            names = [names[i] for i in order]
        self._groups = self.files.groups(names, per_batch)
        self.parts = len(self._groups)
        self.plan = self._digest(self._groups)

    def shard_name(self, part: int) -> str:
        """Name of the file that becomes of a group; another one for other files."""
        digest = self._digest(self._groups[part])[:_DIGITS]
        return f"shard-{part:05d}-{digest}.{self.archive}"

    def members(self, part: int) -> list[str]:
        """Relative paths of the files of a group."""
        return self._groups[part]

    def contents(self, part: int) -> Iterator[tuple[str, bytes]]:
        """Read the files of a group, with their relative paths."""
        names = self._groups[part]
        return zip(names, self.files.read_all(names), strict=True)

    @override
    def load(self, part: int) -> Rows:
        raise NotImplementedError("original files are packed, not loaded")

    @override
    def name(self, part: int) -> str:
        return self.shard_name(part)

    def _digest(self, names: list[Any]) -> str:
        described = json.dumps([self.files.store.url, self.archive, names])
        return hashlib.sha256(described.encode()).hexdigest()


def _is_there(place: Place) -> bool:
    return place.store.exists(place.name)


def _relative(
    places: Sequence[Place], root: str, options: Mapping[str, Any]
) -> tuple[str, ...]:
    urls = [place.url for place in places]
    system, _ = fsspec.core.url_to_fs(root, **options)
    inside = posixpath.join(system._strip_protocol(root), "")
    paths = [system._strip_protocol(url) for url in urls]
    seen: set[str] = set()
    for url, path in zip(urls, paths, strict=True):
        if not path.startswith(inside):
            raise OptionError(f"{url} is not in the root {root}")
        if path in seen:
            raise DataError(f"{url} is in paths twice")
        seen.add(path)
    return tuple(path.removeprefix(inside).lstrip("/") for path in paths)


def file_batches(
    paths: AnyPath | Sequence[AnyPath],
    url: AnyPath,
    files_per_batch: int,
    *,
    root: AnyPath | None = None,
    format: Literal["zip", "tar"] = "zip",
    seed: int | None = 0,
    client: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Index:
    """Pack original files into uncompressed shards, with their relative paths.

    Shards appear whole or not at all, and the index when all are there. Calling it
    again goes on with what is missing, and does nothing when nothing is; files that
    were changed meanwhile under the same name are not noticed. The same files and the
    same seed give the same bytes, however many workers there are. A worker holds the
    files of one shard in memory for each of its threads.

    Args:
        paths: A folder, a file, a glob, or a list of files and globs; local or at
            URLs of one kind.
        url: Folder for the shards and their index, ``index.json``.
        files_per_batch: Folder in a shard, >= 1; the last may have fewer.
        root: The paths that are kept are relative to this folder. None: the folder
            given; of a glob, the one in front of its first wildcard; of a list, the
            deepest that has all.
        format: "zip" or "tar".
        seed: Of the order of the files; None: as listed, which would make shards of
            images of one class each.
        client: Of Dask. None: the default client, else this process, as False says.
        storage_options: Of both file systems, for fsspec.

    Returns:
        What is in the shards.

    Raises:
        DataError: If there are no files, one cannot be read, or a shard not written.
        OptionError: If an argument is not as described, or other files are packed
            there.

    Example:
        >>> Store("memory://daskdl-notes").write("a/1.txt", b"one")
        >>> index = file_batches("memory://daskdl-notes", "memory://daskdl-packed", 64)
        >>> [member.name for shard in index.shards for member in shard.members]
        ['a/1.txt']
    """
    check_archive(format)
    check_count("files_per_batch", files_per_batch)
    options = dict(storage_options or {})
    target = store_of(url, options)
    originals = Originals(found(paths, root, options), files_per_batch, format, seed)
    if is_path(paths):
        _check_apart(originals, target)
    done = _finished(originals, target)
    if done is not None:
        logger.info("%d files are in %s already", done.files, target.url)
        return done
    shards = dict(map_parts(originals, partial(_pack, target), client))
    ordered = tuple(shards[part] for part in range(originals.parts))
    index = Index(format, originals.plan, ordered)
    index.write(target)
    logger.info(
        "packed %d files into %d shards at %s", index.files, len(ordered), target.url
    )
    return index


def _pack(target: Store, source: Source, part: int) -> Shard:
    """What is done with each group of files, on a worker."""
    assert isinstance(source, Originals)
    name = source.shard_name(part)
    there = _adopted(source, part, target)
    if there is not None:
        return there
    content = archived(source.contents(part), source.archive)
    target.write(name, content)
    members = members_of(content, source.archive, target.url_of(name))
    return Shard(name, len(content), members)


def _adopted(originals: Originals, part: int, target: Store) -> Shard | None:
    """The shard that was written before, if it is what it should be."""
    name = originals.shard_name(part)
    if not target.exists(name):
        return None
    content = target.read(name)
    try:
        members = members_of(content, originals.archive, target.url_of(name))
    except DataError:
        return None
    files = [(m.name, content[m.start : m.start + m.size]) for m in members]
    whole = archived(files, originals.archive) == content  # they are made always alike
    same = [member.name for member in members] == originals.members(part)
    return Shard(name, len(content), members) if whole and same else None


def _finished(originals: Originals, target: Store) -> Index | None:
    """The index, if everything was packed before."""
    if not target.exists(INDEX):
        return None
    index = Index.read(target)
    if index.plan != originals.plan:
        raise OptionError(
            f"{target.url} has shards of other files, or in another order; delete "
            "them, or choose another url"
        )
    return index


def _check_apart(originals: Originals, target: Store) -> None:
    root = originals.files.store
    if f"{target.place}/".startswith(f"{root.place}/"):
        raise OptionError(
            f"url must not be in the root of the files, {root.url}, got {target.url}; "
            "the shards would be packed the next time"
        )


class Shards(FileSource):
    """Files that :func:`daskdl.data.file_batches` has packed.

    Args:
        url: Folder of the shards and their index.
        loader: Makes one row, or many, of the bytes of each file: a function, too,
            gets these, since a file in a shard has no path. None: by their extension.
        storage_options: Of the file system, for fsspec.

    Raises:
        DataError: If there is no index.
        OptionError: If the loader cannot be used.
    """

    given = True

    def __init__(
        self,
        url: str | os.PathLike[str],
        loader: Any = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        store = store_of(url, storage_options)
        self._files = ShardedFiles(store, Index.read(store))
        if loader is None:
            loader = loader_for(self.paths, store.url)
        self._loader = _of_bytes(loader_of(loader))
        self.parts = len(self._files.index.shards)
        self.classes = self._loader.classes
        self.lengths: Sequence[int] | None = None
        self.first: Rows | None = None
        if self._loader.single:
            shards = self._files.index.shards
            self.lengths = [len(shard.members) for shard in shards]
            self.first = self._first()

    @property
    def paths(self) -> list[str]:
        """Of the files, in the order in which they are read."""
        shards = self._files.index.shards
        return [member.name for shard in shards for member in shard.members]

    @override
    def load(self, part: int) -> Rows:
        contents = self._contents(part)
        loaded = [self._loader.load(contents, name) for name in contents.files]
        for name, rows in zip(contents.files, loaded, strict=True):
            self._check_alike(contents.url_of(name), rows, loaded[0])
        y = None if loaded[0][1] is None else batching.joined([y for _, y in loaded])
        return batching.joined([x for x, _ in loaded]), y

    @override
    def name(self, part: int) -> str:
        store = self._files.store
        return store.url_of(self._files.index.shards[part].name)

    def file_urls(self, part: int) -> list[str]:
        """The files that a part is made of, in their archive."""
        return [self._files.url_of(name) for name in self._names(part)]

    def load_file(self, part: int, file: int) -> Rows:
        """Load one of them, from 0."""
        return self._alone(part, self._names(part)[file])

    @override
    def look(self, part: int) -> Facts:
        contents = self._contents(part)
        facts = [self._loader.look(contents, name) for name in contents.files]
        some = next((f for f in facts if f.rows), facts[0])
        return Facts(sum(f.rows for f in facts), some.first)

    @override
    def known(self, facts: Sequence[Facts]) -> Self:
        source = copy.copy(self)
        source.lengths = [f.rows for f in facts]
        source.first = next((f.first for f in facts if f.rows), None)
        return source

    @staticmethod
    def _check_alike(url: str, rows: Rows, others: Rows) -> None:
        if _kind(rows) != _kind(others):
            raise ShapeError(
                f"{url} gives {_kind(rows)}, but the files before it "
                f"give {_kind(others)}; rows of all files must have the same shapes"
            )

    def _contents(self, part: int) -> Contents:
        index = self._files.index
        files = dict(self._files.read_shard(part))
        return Contents(self.name(part), {}, index.archive, files)

    def _names(self, part: int) -> list[str]:
        return [member.name for member in self._files.index.shards[part].members]

    def _first(self) -> Rows | None:
        """Of the first file, if it can be read; all are looked at otherwise."""
        try:
            return self._alone(0, self._names(0)[0])
        except DataError:
            return None

    def _alone(self, part: int, name: str) -> Rows:
        files = {name: self._files.read(name)}
        archive = self._files.index.archive
        return self._loader.load(Contents(self.name(part), {}, archive, files), name)


def is_shards(url: Any, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Whether a URL or path is a folder of shards.

    Example:
        >>> is_shards("memory://nothing-here")
        False
    """
    if not isinstance(url, str | os.PathLike):
        return False
    store = store_of(url, storage_options)
    return Index.found(store) is not None


def _kind(rows: Rows) -> str:
    """The shapes of one row.

    Example:
        >>> import numpy as np
        >>> _kind((np.zeros((5, 2, 3)), None))
        'x of shape (2, 3), no y'
    """
    leaves = batching.named_both(rows, ("x", "y"))
    shown = [f"{name} of shape {leaf.shape[1:]}" for name, leaf in leaves.items()]
    return ", ".join([*shown, "no y"] if rows[1] is None else shown)


def _of_bytes(loader: Loader) -> Loader:
    """A file in a shard has no path of its own: a function gets its bytes."""
    if isinstance(loader, FromPath):
        return _from_bytes(loader)
    if isinstance(loader, OneExample):
        inner = loader_of(loader.function)
        return OneExample(_from_bytes(inner)) if isinstance(inner, FromPath) else loader
    return loader


def _from_bytes(loader: FromPath) -> FromBytes:
    function: Callable[[Any], Any] = loader.function
    return FromBytes(function)
