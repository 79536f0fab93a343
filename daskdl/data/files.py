"""Sources of files, loose or packed.

A part is one file, or several that are read together: files with one example each, or
the original files in a packed file.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Self, TypeVar

from typing_extensions import override

from daskdl.config import check_count
from daskdl.data import batching, formats, storage
from daskdl.data.batching import Rows
from daskdl.data.formats import Loader, Reader
from daskdl.data.named_columns import NO_COLUMNS, NamedRows
from daskdl.data.packed import PackedFiles, PackedRows, packed_in
from daskdl.data.source import SHOWN_ROWS, Facts, Pieces, Source, facts_of
from daskdl.data.storage import AnyPath, is_local, is_path, store_of
from daskdl.errors import DataError, OptionError, ShapeError

T = TypeVar("T")


@dataclass(frozen=True)
class LooseFiles:
    """Loose files that are read together."""

    names: Sequence[str]  # URLs
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def url(self, number: int) -> str:
        """Return the URL of a file."""
        return self.names[number]

    def opener(self, header: bool = False) -> Callable[[int], BinaryIO]:
        """Return a function that opens a file by its number; see `storage.opened`."""
        return lambda number: storage.opened(self.names[number], self.options, header)


Group = LooseFiles | PackedFiles


def each_file(
    group: Group,
    function: Callable[[int, BinaryIO], T],
    most: int | None = None,
    header: bool = False,
) -> list[T]:
    """Call a function with the number and the open file of each file, in order.

    Several threads call it if the files are remote and loose. `most` limits the number
    of files; with `header`, loose files are read by ranges.
    """
    open_file = group.opener(header)

    def call(number: int) -> T:
        with open_file(number) as file:
            return function(number, file)

    numbers = range(len(group.names))[:most]
    loose = isinstance(group, LooseFiles) and not is_local(group.names[0])
    if loose and len(numbers) > 1:
        return storage.at_once(call, numbers)
    return [call(number) for number in numbers]


def grouped_files(
    urls: Sequence[str], size: int, options: Mapping[str, Any]
) -> list[LooseFiles]:
    """Divide loose files into groups of a size."""
    starts = range(0, len(urls), size)
    return [LooseFiles(urls[start : start + size], options) for start in starts]


_READERS: Mapping[str, Reader] = {
    ".npy": formats.Npy(),
    ".npz": formats.Npz(),
    ".csv": formats.Csv(),
    ".parquet": formats.Parquet(),
    ".safetensors": formats.Safetensors(),
}

# For files with one example each: enough rows to justify a request for each part, and
# few enough that images of a megabyte take little of a worker's memory.
FILES_PER_PART = 64


class GroupedFiles(Source):
    """A source whose parts are groups of files; each file becomes rows."""

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
    def pieces(self, part: int) -> Pieces:
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
        loaded = each_file(group, partial(self.rows, part), most)
        shapes = [
            {
                name: leaf.shape[1:]
                for name, leaf in batching.leaves_by_name(rows).items()
            }
            for rows in loaded
        ]
        for number, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise ShapeError(
                    f"rows of all files must have the same shapes, but "
                    f"{group.url(number)} has {shape} and {group.url(0)} has "
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
    """Files with a loader, which returns the rows of a file."""

    mergeable = True

    def __init__(
        self,
        groups: Sequence[Group],
        loader: Loader,
        one_example: bool,
        classes: Sequence[str] | None,
    ) -> None:
        super().__init__(groups)
        self._loader = loader
        self.one_example = one_example
        self.classes = getattr(loader, "classes", None) if classes is None else classes
        self.lengths: Sequence[int] | None = None
        self.first_rows: Rows | None = None
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
    def facts(self, part: int) -> Facts:
        group = self.groups[part]
        if self.one_example:
            shown = facts_of(self._joined(part, SHOWN_ROWS))
            return shown._replace(rows=len(group.names))
        header = isinstance(self._loader, Reader) and self._loader.reads_headers
        facts = each_file(group, partial(self._facts_of_file, part), header=header)
        shown = next((fact for fact in facts if fact.rows), facts[0])
        return shown._replace(rows=sum(fact.rows for fact in facts))

    def _facts_of_file(self, part: int, number: int, file: BinaryIO) -> Facts:
        if isinstance(self._loader, Reader):
            with formats.reading(file.name):
                facts = self._loader.facts(file)
            if facts is not None and facts.first_rows is not None:
                rows = NamedRows.of(facts.first_rows)
                rows = rows.arranged(self.columns or NO_COLUMNS, file.name)
                return facts._replace(first_rows=rows)
            file.seek(0)
        return facts_of(self.rows(part, number, file))

    @override
    def with_facts(self, facts: Sequence[Facts]) -> Self:
        nonempty = [part for part, fact in enumerate(facts) if fact.rows]
        source = copy.copy(self)
        source.groups = [self.groups[part] for part in nonempty]
        source.parts = len(nonempty)
        source.lengths = [facts[part].rows for part in nonempty]
        return source


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
    """Read files from any file system that fsspec supports, loose or packed.

    The call lists the files; each file is read when it is needed. The workers must
    reach the files at the same paths or URLs. A folder of rows that `pack` wrote needs
    no loader. Of original files that `pack` wrote, each packed file is a part, and the
    loader gets the original files.

    Args:
        url: A folder, a file, a pattern such as ``s3://bucket/x/*.npy``, or a list of
            files and patterns; paths or URLs.
        loader: A function ``load(file) -> (x, y)`` of an open binary file, whose
            ``file.name`` is its path or URL; or ``Csv(...)``, ``Npy(...)``,
            ``Npz(...)``, ``Parquet(...)``, ``Safetensors(...)``. x and y are arrays or
            tensors with rows along the first axis, or tuples and dicts of them; x alone
            means no labels. None: the extension, which all files must share, selects
            the loader; CSV and Parquet files then have no labels.
        pattern: Selects files of a folder, for example ``**/*.png``. None: all files
            below the folder except hidden ones.
        one_example: Whether the loader returns a single example, without an axis of
            rows; y may then be a number.
        classes: Names of the labels 0, 1, ...; None: those of the loader, if any.
        files_per_part: Number of loose files that are loaded together, with
            ``one_example=True``. None: 64.
        storage_options: Options for fsspec, such as credentials; also used on the
            workers.

    Returns:
        A source, for `Trainer.fit` and all other functions that take data.

    Raises:
        DataError: If a path or a pattern matches no file, or no loader is known for the
            extension.
        OptionError: If an option is invalid.

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
    if not isinstance(storage_options, Mapping | None):
        kind = type(storage_options).__name__  # the value may hold credentials
        raise OptionError(f"storage_options must be a dict or None, got a {kind}")
    if files_per_part is not None:
        check_count("files_per_part", files_per_part)
        if not one_example:
            raise OptionError(
                "files_per_part is for files of one example each, with "
                f"one_example=True, got {files_per_part}"
            )
    groups: Sequence[Group] | None = None
    if is_path(url) and pattern is None and not storage.is_glob(url):
        packed = packed_in(store_of(url, storage_options))
        if isinstance(packed, PackedRows):
            if loader is not None or one_example:
                raise OptionError(
                    f"loader and one_example are for files, and {url} has packed rows; "
                    "leave them out"
                )
            packed.classes = packed.classes if classes is None else classes
            return packed
        groups = packed
    if groups is None:
        urls = storage.listed(url, pattern, storage_options)
        size = (files_per_part or FILES_PER_PART) if one_example else 1
        groups = grouped_files(urls, size, storage_options or {})
    if loader is None:
        loader = _reader_for(name for group in groups for name in group.names)
    return LoadedFiles(groups, loader, one_example, classes)


def _reader_for(urls: Iterable[str]) -> Reader:
    """The reader for the extension that all files share."""
    paths = [url.partition("::")[0] for url in urls]
    suffixes = sorted({PurePosixPath(path).suffix.lower() for path in paths})
    if len(suffixes) == 1 and suffixes[0] in _READERS:
        return _READERS[suffixes[0]]
    known, got = ", ".join(map(repr, _READERS)), ", ".join(map(repr, suffixes[:10]))
    raise DataError(
        "without a loader, all files must have the same extension, one of "
        f"{known}, got {got}, for example {paths[0]}; use "
        "daskdl.data.files(X, loader=...), or pattern=..."
    )
