"""Files as data to train on: loose ones, shards, or batch files, whichever are there.

A part is a file, or several that are read together: files of one example each, or those
in a shard. A loader makes rows of each, where the part is needed.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Protocol, Self, TypeVar

from typing_extensions import override

from daskdl.config import check_count
from daskdl.data import batching, shards
from daskdl.data.batch_files import BatchFiles, is_export
from daskdl.data.batching import Rows
from daskdl.data.formats import (
    Csv,
    Loader,
    Npy,
    Npz,
    Parquet,
    Reader,
    Safetensors,
    check_loader,
    reading,
    rows_of,
)
from daskdl.data.source import SHOWN_ROWS, Facts, Source, facts_of
from daskdl.data.storage import (
    AnyPath,
    is_glob,
    is_local,
    is_path,
    listed,
    opened,
    store_of,
)
from daskdl.errors import DataError, OptionError, ShapeError

T = TypeVar("T")

_READERS: Mapping[str, Reader] = {
    ".npy": Npy(),
    ".npz": Npz(),
    ".csv": Csv(),
    ".parquet": Parquet(),
    ".safetensors": Safetensors(),
}

# Of files with one example each: enough rows that a part is worth a request, few
# enough that images of a megabyte stay far below a worker's memory.
FILES_PER_PART = 64

_READ_AT_A_TIME = 8  # where each mostly waits for a server


class Group(Protocol):
    """Files that are read together: `Loose`, or a `daskdl.data.shards.Shard`."""

    @property
    def urls(self) -> Sequence[str]: ...

    def some(self, which: slice) -> Self: ...

    def each(
        self, function: Callable[[int, BinaryIO], T], header: bool = False
    ) -> list[T]: ...

    def held(self) -> Self: ...


@dataclass(frozen=True)
class Loose:
    """Files by themselves.

    Attributes:
        urls: Of each.
        options: Of their file systems.
    """

    urls: Sequence[str]
    options: Mapping[str, Any] = field(repr=False)

    def some(self, which: slice) -> "Loose":
        """Some of the files."""
        return replace(self, urls=self.urls[which])

    def each(
        self, function: Callable[[int, BinaryIO], T], header: bool = False
    ) -> list[T]:
        """Call a function of each file's number and the open file, in order."""

        def one(number: int) -> T:
            with opened(self.urls[number], self.options, header) as file:
                return function(number, file)

        numbers = range(len(self.urls))
        if len(self.urls) == 1 or is_local(self.urls[0]):
            return [one(number) for number in numbers]
        with ThreadPoolExecutor(_READ_AT_A_TIME) as pool:
            return list(pool.map(one, numbers))

    def held(self) -> "Loose":
        """The same, for whoever reads the files one by one."""
        return self


class GroupedFiles(Source):
    """A source whose parts are groups of files, each of which becomes rows.

    Attributes:
        groups: The files of each part.
    """

    groups: Sequence[Group]

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.parts = len(groups)

    @abstractmethod
    def rows(self, part: int, number: int, file: BinaryIO) -> Rows:
        """Make rows of one file of a part, which is open."""

    @override
    def load(self, part: int) -> Rows:
        return self._joined(part, self.groups[part])

    @override
    def name(self, part: int) -> str:
        first, *others = self.groups[part].urls
        return f"{first} and {len(others)} more" if others else first

    @override
    def separate(self, part: int) -> Sequence[tuple[str, Callable[[], Rows]]]:
        group = self.groups[part].held()
        if len(group.urls) == 1:
            return ()
        return [
            (url, partial(self._alone, part, group, number))
            for number, url in enumerate(group.urls)
        ]

    def _alone(self, part: int, group: Group, number: int) -> Rows:
        one = group.some(slice(number, number + 1))
        (rows,) = one.each(lambda _, file: self.rows(part, number, file))
        return rows

    def _joined(self, part: int, group: Group) -> Rows:
        loaded = group.each(lambda number, file: self.rows(part, number, file))
        shapes = [_shapes(rows) for rows in loaded]
        for number, own in enumerate(shapes):
            if own != shapes[0]:
                raise ShapeError(
                    f"rows of all files must have the same shapes, but "
                    f"{group.urls[number]} has {own} and {group.urls[0]} has "
                    f"{shapes[0]}"
                )
        return batching.joined_rows(loaded)


def _shapes(rows: Rows) -> dict[str, tuple[int, ...]]:
    """Of one row, by name."""
    leaves = batching.named_both(rows, ("x", "y"))
    return {name: leaf.shape[1:] for name, leaf in leaves.items()}


class LoadedFiles(GroupedFiles):
    """Files and a loader that makes rows of each."""

    given = True

    def __init__(
        self,
        groups: Sequence[Group],
        loader: Loader,
        one_example: bool,
        classes: Sequence[str] | None,
    ) -> None:
        super().__init__(groups)
        self._loader, self._one_example = loader, one_example
        self.classes = getattr(loader, "classes", None) if classes is None else classes
        self.lengths: Sequence[int] | None = None
        self.first: Rows | None = None
        if one_example:
            self.lengths = [len(group.urls) for group in groups]

    @override
    def rows(self, part: int, number: int, file: BinaryIO) -> Rows:
        with reading(file.name):
            result = self._loader(file)
        return rows_of(result, file.name, one_example=self._one_example)

    @override
    def look(self, part: int) -> Facts:
        group = self.groups[part]
        if self._one_example:
            shown = self._joined(part, group.some(slice(SHOWN_ROWS)))
            return Facts(len(group.urls), shown)
        header = isinstance(self._loader, Reader) and self._loader.reads_headers
        facts = group.each(partial(self._facts, part), header)
        first = next((one.first for one in facts if one.rows), facts[0].first)
        return Facts(sum(one.rows for one in facts), first)

    def _facts(self, part: int, number: int, file: BinaryIO) -> Facts:
        if isinstance(self._loader, Reader):
            with reading(file.name):
                facts = self._loader.look(file)
            if facts is not None:
                return facts
            file.seek(0)
        return facts_of(self.rows(part, number, file))

    @override
    def known(self, facts: Sequence[Facts]) -> Self:
        """The same source; parts without rows are passed over from now on."""
        full = [part for part, fact in enumerate(facts) if fact.rows]
        if not full:
            raise DataError(f"there are no rows in any file, as {self.name(0)}")
        other = copy.copy(self)
        other.groups = [self.groups[part] for part in full]
        other.parts = len(full)
        other.lengths = [facts[part].rows for part in full]
        other.first = facts[full[0]].first
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
    """Take files anywhere fsspec reaches: loose ones, shards or batch files.

    They are listed here and now; none is read before it is needed. The workers must
    reach them by the same paths or URLs. A folder that `export` has written needs no
    loader; of one that `pack_files` has written the packed files are read, a shard at a
    time.

    Args:
        url: A folder, a file, a pattern such as ``s3://bucket/x/*.npy``, or a list of
            files and patterns; paths or URLs.
        loader: A function ``load(file) -> (x, y)`` of an open binary file, whose
            ``file.name`` is its path or URL; or ``Csv(...)``, ``Npy(...)``,
            ``Npz(...)``, ``Parquet(...)``, ``Safetensors(...)``. x and y are arrays or
            tensors with rows first, or tuples and dicts of them; x alone means that
            there are no labels. None: by the extension, which all files must share; CSV
            and Parquet are then without labels.
        pattern: Which files of a folder, as ``**/*.png``. None: all below it but hidden
            ones.
        one_example: Whether the loader returns one example, without an axis of rows; y
            may then be a number.
        classes: Names of the labels 0, 1, ...; None: those of the loader, if any.
        files_per_part: If each file is one example, how many loose files are loaded
            together. None: 64.
        storage_options: For fsspec, such as credentials; the workers use them too.

    Returns:
        A source, for `Trainer.fit` and whatever else takes data.

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
        check_loader(loader)
    if files_per_part is not None:
        check_count("files_per_part", files_per_part)
        if not one_example:
            raise OptionError(
                "files_per_part is for files of one example each, with "
                f"one_example=True, got {files_per_part}"
            )
    groups: Sequence[Group] | None = None
    if is_path(url) and pattern is None and not is_glob(url):
        if loader is None and not one_example and is_export(url, storage_options):
            return BatchFiles(url, storage_options)
        groups = shards.shards_in(store_of(url, storage_options))
    if groups is None:
        urls = listed(url, pattern, storage_options)
        each = (files_per_part or FILES_PER_PART) if one_example else 1
        options = dict(storage_options or {})
        starts = range(0, len(urls), each)
        groups = [Loose(urls[start : start + each], options) for start in starts]
    if loader is None:
        loader = _reader_for(name for group in groups for name in group.urls)
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
