"""Files as data to train on: loose files, shards, or batch files.

A part is a file, or several that are read together: files of one example each, or the
members of a shard, a zip or tar archive of original files from `pack_files`. An object
store answers a request after tens of milliseconds, whatever its size; a shard of a
hundred small images takes a single request. A shard is read whole and unpacked in
memory: 1,000 images of 3 kB take 26 ms from a zip and 51 ms from a tar; with fsspec's
own archives 82 ms and 1.4 s.
"""

import copy
import functools
import hashlib
import io
import json
import logging
import tarfile
import zipfile
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Literal, Self, TypeVar

import numpy as np
from typing_extensions import override

from daskdl.config import check_choice, check_count
from daskdl.data import batching, formats, storage
from daskdl.data.batch_files import BatchFiles, is_export
from daskdl.data.batching import Rows
from daskdl.data.distribute import map_parts
from daskdl.data.formats import Loader, Reader
from daskdl.data.manifest import File, Kind, Manifest, naming_damage
from daskdl.data.named_columns import NO_COLUMNS, NamedRows
from daskdl.data.source import SHOWN_ROWS, Facts, Source, facts_of
from daskdl.data.storage import AnyPath, Store, is_local, is_path, store_of
from daskdl.errors import DataError, OptionError, ShapeError

logger = logging.getLogger(__name__)

T = TypeVar("T")

KIND = Kind(
    "daskdl shards",
    1,
    "shards.json",
    "daskdl.data.pack_files writes shards",
    "delete the folder, and pack the files again",
)
_DIGITS = 16  # of each digest in a shard's name: of its files' names, and its bytes
_READABLE = 0o644 << 16
_UNIX = 3


@dataclass(frozen=True)
class Group:
    """Files that are read together: loose ones, or members of a shard."""

    names: Sequence[str]  # URLs of loose files; paths of members in the shard
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    archive: str = ""  # URL of the shard; "": loose files
    # Reads the shard: the content of each member by name; None: loose files.
    read: Callable[[], Mapping[str, bytes]] | None = field(default=None, repr=False)

    def url(self, number: int) -> str:
        """Return the URL of a file, for fsspec: ``zip://a/1.png::s3://x/shard.zip``."""
        name, archive = self.names[number], self.archive
        return f"{archive[-3:]}://{name}::{archive}" if archive else name

    def opener(self, header: bool = False) -> Callable[[int], BinaryIO]:
        """Return a function that opens a file by its number; a shard is read once."""
        if self.read is None:
            return lambda number: storage.opened(
                self.names[number], self.options, header
            )
        contents = functools.cache(self.read)
        return lambda number: storage.OpenBytes(
            contents()[self.names[number]], self.url(number)
        )

    def each(
        self,
        function: Callable[[int, BinaryIO], T],
        most: int | None = None,
        header: bool = False,
    ) -> list[T]:
        """Call a function of the number and the open file of each file, in order.

        Several threads call it at a time if files are not local. `most` is the largest
        number of files; with `header`, files are read by ranges; see `opened`.
        """
        open_file = self.opener(header)

        def call(number: int) -> T:
            with open_file(number) as file:
                return function(number, file)

        numbers = range(len(self.names))[:most]
        if self.read is not None or len(numbers) == 1 or is_local(self.names[0]):
            return [call(number) for number in numbers]
        return storage.at_once(call, numbers)


def loose_groups(
    urls: Sequence[str], size: int, options: Mapping[str, Any]
) -> list[Group]:
    """Loose files, in groups of a given size."""
    starts = range(0, len(urls), size)
    return [Group(urls[start : start + size], options) for start in starts]


def shards_in(store: Store) -> list[Group] | None:
    """The shards in a folder; None if it has no manifest of shards."""
    if not store.exists(KIND.name):
        return None
    manifest, shards = Manifest.read(store, KIND), []
    with naming_damage(store.url_of(KIND.name), KIND.remedy):
        if not manifest.files:
            raise ValueError("it lists no shards")
        for file in manifest.files:
            names = file.details["members"]
            texts = isinstance(names, list) and all(isinstance(n, str) for n in names)
            if not texts or not 0 < len({*names}) == len(names):
                raise ValueError(f"members of {file.name} are {names!r:.80}")
            read = partial(
                _unpacked, store, replace(file, details={}), _digest_of(names)
            )
            shards.append(Group(names, archive=store.url_of(file.name), read=read))
    return shards


def _digest_of(names: Sequence[str]) -> bytes:
    """A digest instead of the names, which may be of files that no part has."""
    return hashlib.sha256(json.dumps(sorted(names)).encode()).digest()


def _unpacked(store: Store, file: File, digest: bytes) -> dict[str, bytes]:
    """The members of a shard by their relative paths; `digest` is that of the paths."""
    content = file.read(store, KIND.remedy)
    with naming_damage(store.url_of(file.name), KIND.remedy):
        if file.name.endswith(".zip"):
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                entries = archive.infolist()
                sizes = [(entry.filename, entry.file_size) for entry in entries]
                _check_members(sizes, digest, len(content))
                if any(entry.compress_type for entry in entries):
                    raise ValueError("its members are compressed")
                return {name: archive.read(name) for name, _ in sizes}
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            infos = tar.getmembers()
            sizes = [(info.name, info.size) for info in infos]
            _check_members(sizes, digest, len(content))
            files = ((info.name, tar.extractfile(info)) for info in infos)
            return {name: member.read() for name, member in files if member is not None}


def _check_members(sizes: Sequence[tuple[str, int]], digest: bytes, most: int) -> None:
    """Raise a ValueError unless an archive of `most` bytes stores the listed files."""
    names = [name for name, _ in sizes]
    if _digest_of(names) != digest:
        raise ValueError(f"its members differ from those listed: {names!r:.200}")
    if sum(size for _, size in sizes) > most:
        raise ValueError("its members are larger than the archive")


def _packed(format: str, files: Iterable[tuple[str, bytes]]) -> bytes:
    """Put files into an archive: the same files give the same bytes."""
    target = io.BytesIO()
    if format == "zip":
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
            for path, content in files:
                entry = zipfile.ZipInfo(path)  # of 1980, as a tar's is of 1970
                entry.external_attr, entry.create_system = _READABLE, _UNIX
                archive.writestr(entry, content)
        return target.getvalue()
    with tarfile.open(fileobj=target, mode="w:") as tar:
        for path, content in files:
            info = tarfile.TarInfo(path)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return target.getvalue()


def pack_files(
    paths: AnyPath | Sequence[AnyPath],
    *,
    url: AnyPath,
    files_per_shard: int,
    root: AnyPath | None = None,
    format: Literal["zip", "tar"] = "zip",
    seed: int | None = 0,
    client: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Pack original files into shards, uncompressed archives with their relative paths.

    Shards appear whole or not at all, and the manifest comes last. If the call is
    interrupted, call it again, and it packs the missing and damaged shards; it does not
    notice files that changed under the same name. The same files and the same seed give
    the same bytes, however many workers there are. A worker holds the files of one
    shard in memory for each of its threads.

    Args:
        paths: A folder, a file, a pattern, or a list of files and patterns; all local,
            or all on one file system.
        url: Folder for the shards and their manifest, ``shards.json``.
        files_per_shard: Files in a shard, >= 1; the last may have fewer.
        root: Paths in the shards are relative to this folder. None: the folder given;
            for a pattern, the folder before its first wildcard; for a list, the deepest
            folder that contains all files.
        format: "zip" or "tar".
        seed: Seed of the order of the files; None: as listed, so that a shard of
            images has those of one class.
        client: A Dask client. None: the default client, if there is one, else this
            process. False: this process.
        storage_options: fsspec options of both file systems, such as credentials; the
            workers use them too.

    Returns:
        URLs of the shards.

    Raises:
        DataError: If there are no files, or a file cannot be read or a shard written.
        OptionError: If an argument is not as described, or the folder has shards of
            other files.

    Example:
        >>> Store("memory://daskdl-notes").write("a/1.txt", b"one")
        >>> folder = "memory://daskdl-packed"
        >>> len(pack_files("memory://daskdl-notes", url=folder, files_per_shard=64))
        1
    """
    check_choice("format", format, ("zip", "tar"))
    check_count("files_per_shard", files_per_shard)
    target = store_of(url, storage_options)
    store, names = _originals(paths, root, storage_options)
    root_url, own_url = map(storage.resolved, (store.url, target.url_of(KIND.name)))
    if is_path(paths) and storage.path_in(root_url, own_url) is not None:
        raise OptionError(
            f"url must not be in the root of the files, {store.url}, got {target.url}; "
            "the shards would be packed the next time"
        )
    if seed is not None:
        order = np.random.default_rng(seed).permutation(len(names))
        names = [names[i] for i in order]
    groups = [
        names[i : i + files_per_shard] for i in range(0, len(names), files_per_shard)
    ]
    originals = _Originals(store, groups, format)
    plan = originals.digest(groups)
    if target.exists(KIND.name):
        manifest = Manifest.read(target, KIND)
        with naming_damage(target.url_of(KIND.name), KIND.remedy):
            former = manifest.content["plan"]
        if former != plan:
            raise OptionError(
                f"{target.url} has shards of other files, or in another order; delete "
                "them, or choose another url"
            )
    else:
        there = {name.rpartition("-")[0]: name for name in target.names("shard-*")}
        pack = partial(_pack, target=target, there=there)
        files = dict(map_parts(originals, pack, client))
        ordered = tuple(files[part] for part in range(originals.parts))
        manifest = Manifest(ordered, {"plan": plan})
        manifest.write(target, KIND)
    counts = len(names), len(manifest.files)
    logger.info("%d files are packed into %d shards at %s", *counts, target.url)
    return [target.url_of(file.name) for file in manifest.files]


class _Originals(Source):
    """Loose files in groups, each of which becomes one shard."""

    lengths = None
    first = None

    def __init__(
        self, store: Store, groups: Sequence[Sequence[str]], format: str
    ) -> None:
        self.store, self.groups, self.format = store, groups, format
        self.parts = len(groups)

    @override
    def load(self, part: int) -> Rows:
        raise NotImplementedError("original files are packed, not loaded")

    def digest(self, names: Sequence[Any]) -> str:
        """Identify files of these names in an archive."""
        described = json.dumps([self.store.url, self.format, names])
        return hashlib.sha256(described.encode()).hexdigest()


def _pack(source: Source, part: int, target: Store, there: Mapping[str, str]) -> File:
    """Write a shard unless it is there, whole: a task."""
    assert isinstance(source, _Originals)
    names = source.groups[part]
    stem = f"shard-{part:05d}-{source.digest(names)[:_DIGITS]}"

    def described(content: bytes) -> File:
        file = File.of("", content, members=list(names))
        name = f"{stem}-{file.sha256[:_DIGITS]}.{source.format}"
        return replace(file, name=name)

    if stem in there:
        file = described(target.read(there[stem]))
        if file.name == there[stem]:
            return file
        logger.info("%s is damaged, and packed anew", target.url_of(there[stem]))
    contents = storage.at_once(source.store.read, names)
    content = _packed(source.format, zip(names, contents, strict=True))
    file = described(content)
    target.write(file.name, content)
    return file


def _originals(
    paths: AnyPath | Sequence[AnyPath],
    root: AnyPath | None,
    options: Mapping[str, Any] | None,
) -> tuple[Store, list[str]]:
    """Return the root of the user's files, and their paths relative to it."""
    urls: Sequence[str] = ()
    common = None if root is None else store_of(root).url
    if is_path(paths):
        folder = store_of(paths, options)
        names = folder.names()  # of a folder, with its hidden files
        if names and common is None:
            return folder, names
        urls = [folder.url_of(name) for name in names]
        common = storage.folder_of(folder.url) if common is None else common
    urls = urls or storage.listed(paths, None, options)
    common = storage.common_folder(urls) if common is None else common
    found: dict[str, None] = {}
    for url in urls:
        name = storage.path_in(common, url)
        if name is None:
            raise OptionError(f"{url} is not in the root {common}")
        if name in found:
            raise DataError(f"{url} is in paths twice")
        found[name] = None
    return store_of(common, options), list(found)


_READERS: Mapping[str, Reader] = {
    ".npy": formats.Npy(),
    ".npz": formats.Npz(),
    ".csv": formats.Csv(),
    ".parquet": formats.Parquet(),
    ".safetensors": formats.Safetensors(),
}

# For files with one example each: enough rows that a part is worth a request, and few
# enough that images of a megabyte take little of a worker's memory.
FILES_PER_PART = 64


class GroupedFiles(Source):
    """A source whose parts are groups of files; each file becomes rows.

    Attributes:
        one_example: Whether each file has exactly one row.
    """

    one_example: bool

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.parts = len(groups)

    @abstractmethod
    def rows(self, part: int, number: int, file: BinaryIO) -> Rows:
        """Make rows from one open file of a part."""

    @override
    def load(self, part: int) -> Rows:
        return self._joined(part)

    @override
    def name(self, part: int) -> str:
        group = self.groups[part]
        others = len(group.names) - 1
        return f"{group.url(0)} and {others} more" if others else group.url(0)

    @override
    def separate(self, part: int) -> Sequence[tuple[str, Callable[[], Rows]]]:
        group = self.groups[part]
        numbers = range(len(group.names))
        if len(numbers) == 1:
            return ()
        open_file = group.opener()

        def load(number: int) -> Rows:
            with open_file(number) as file:
                return self.rows(part, number, file)

        return [(group.url(number), partial(load, number)) for number in numbers]

    def _joined(self, part: int, most: int | None = None) -> Rows:
        group = self.groups[part]
        loaded = group.each(partial(self.rows, part), most)
        shapes = [
            {name: leaf.shape[1:] for name, leaf in batching.named_both(one).items()}
            for one in loaded
        ]
        for number, own in enumerate(shapes):
            if own != shapes[0]:
                raise ShapeError(
                    f"rows of all files must have the same shapes, but "
                    f"{group.url(number)} has {own} and {group.url(0)} has "
                    f"{shapes[0]}"
                )
        if isinstance(loaded[0], NamedRows):
            columns = loaded[0].columns
            loaded = [
                NamedRows.of(rows).arranged(columns, group.url(number))
                for number, rows in enumerate(loaded)
            ]
            return NamedRows.of(batching.joined(loaded), columns)
        return batching.joined(loaded)


class LoadedFiles(GroupedFiles):
    """Files, and a loader that makes rows from each file."""

    given = True

    def __init__(
        self,
        groups: Sequence[Group],
        loader: Loader,
        one_example: bool,
        classes: Sequence[str] | None,
    ) -> None:
        super().__init__(groups)
        self._loader, self.one_example = loader, one_example
        self.classes = getattr(loader, "classes", None) if classes is None else classes
        self.lengths: Sequence[int] | None = None
        self.first: Rows | None = None
        if isinstance(loader, formats.Table):
            self.columns = None
        if one_example:
            self.lengths = [len(group.names) for group in groups]

    @override
    def rows(self, part: int, number: int, file: BinaryIO) -> Rows:
        with formats.reading(file.name):
            result = self._loader(file)
        rows = formats.rows_of(result, file.name, one_example=self.one_example)
        return NamedRows.of(rows).arranged(self.columns or NO_COLUMNS, file.name)

    @override
    def look(self, part: int) -> Facts:
        group = self.groups[part]
        if self.one_example:
            shown = facts_of(self._joined(part, SHOWN_ROWS))
            return shown._replace(rows=len(group.names))
        header = isinstance(self._loader, Reader) and self._loader.reads_headers
        facts = group.each(partial(self._facts, part), header=header)
        shown = next((some for some in facts if some.rows), facts[0])
        return shown._replace(rows=sum(some.rows for some in facts))

    def _facts(self, part: int, number: int, file: BinaryIO) -> Facts:
        if isinstance(self._loader, Reader):
            with formats.reading(file.name):
                facts = self._loader.look(file)
            if facts is not None and facts.first is not None:
                rows = NamedRows.of(facts.first)
                first = rows.arranged(self.columns or NO_COLUMNS, file.name)
                return facts._replace(first=first)
            file.seek(0)
        return facts_of(self.rows(part, number, file))

    @override
    def known(self, facts: Sequence[Facts]) -> Self:
        """The same source without the parts that have no rows."""
        full = [part for part, fact in enumerate(facts) if fact.rows]
        if not full:
            raise DataError(f"there are no rows in any file, as {self.name(0)}")
        other = copy.copy(self)
        other.groups = [self.groups[part] for part in full]
        other.parts = len(full)
        other.lengths = [facts[part].rows for part in full]
        firsts = (facts[part].first for part in full)
        other.first = next((rows for rows in firsts if rows is not None), None)
        return other


def files(
    url: AnyPath | Sequence[AnyPath],
    loader: Loader | None = None,
    *,
    pattern: str | None = None,
    one_example: bool = False,
    classes: Sequence[str] | None = None,
    files_per_part: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Source:
    """Take files anywhere fsspec reaches: loose files, shards or batch files.

    The call lists the files, and each file is read when it is needed. The workers must
    reach the files by the same paths or URLs. A folder written by `export` needs no
    loader; a folder written by `pack_files` is read a shard at a time, and the loader
    gets the packed files.

    Args:
        url: A folder, a file, a pattern such as ``s3://bucket/x/*.npy``, or a list of
            files and patterns; paths or URLs.
        loader: A function ``load(file) -> (x, y)`` of an open binary file, whose
            ``file.name`` is its path or URL; or ``Csv(...)``, ``Npy(...)``,
            ``Npz(...)``, ``Parquet(...)``, ``Safetensors(...)``. x and y are arrays or
            tensors with rows first, or tuples and dicts of them; x alone means that
            there are no labels. None: chosen by the extension, which all files must
            share; CSV and Parquet files then have no labels.
        pattern: Which files of a folder, for example ``**/*.png``. None: all files
            below the folder except hidden ones.
        one_example: Whether the loader returns one example, without an axis of rows; y
            may then be a number.
        classes: Names of the labels 0, 1, ...; None: the names in the loader, if any.
        files_per_part: Number of loose files that are loaded together, if each file is
            one example. None: 64.
        storage_options: For fsspec, such as credentials; the workers use them too.

    Returns:
        A source, for `Trainer.fit` and everything else that takes data.

    Raises:
        DataError: If a path or a pattern matches nothing, or if there is no loader
            for the files.
        OptionError: If an option cannot be used.

    Example:
        >>> import numpy as np
        >>> from daskdl.data.storage import Store
        >>> Store("memory://daskdl-files").write("a.txt", b"1 2")
        >>> source = files("memory://daskdl-files", lambda f: np.loadtxt(f, ndmin=2))
        >>> source.load(0)
        (array([[1., 2.]]), None)
    """
    if loader is not None:
        formats.check_loader(loader)
    if files_per_part is not None:
        check_count("files_per_part", files_per_part)
        if not one_example:
            raise OptionError(
                "files_per_part is for files of one example each, with "
                f"one_example=True, got {files_per_part}"
            )
    groups: Sequence[Group] | None = None
    if is_path(url) and pattern is None and not storage.is_glob(url):
        if loader is None and not one_example and is_export(url, storage_options):
            return BatchFiles(url, storage_options)
        groups = shards_in(store_of(url, storage_options))
    if groups is None:
        urls = storage.listed(url, pattern, storage_options)
        each = (files_per_part or FILES_PER_PART) if one_example else 1
        groups = loose_groups(urls, each, storage_options or {})
    if loader is None:
        loader = _reader_for(name for group in groups for name in group.names)
    return LoadedFiles(groups, loader, one_example, classes)


def _reader_for(urls: Iterable[str]) -> Reader:
    """The reader for the extension that all files share."""
    paths = [url.partition("::")[0] for url in urls]
    suffixes = sorted({PurePosixPath(path).suffix.lower() for path in paths})
    if len(suffixes) == 1 and suffixes[0] in _READERS:
        return _READERS[suffixes[0]]
    known, got = (", ".join(map(repr, one)) for one in (_READERS, suffixes[:10]))
    raise DataError(
        f"files without a loader must all be of one of {known}, got {got}, as "
        f"{paths[0]}; give a loader=, or a pattern="
    )
