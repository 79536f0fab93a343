"""Which loader is for files that have none given: their extension says it.

The user's own files as they are: a part is a file, or some files of one row each.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from pathlib import PurePosixPath
from typing import Any, Self

import numpy as np
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Rows
from daskdl.data.formats import Loader, Npy, Npz, Safetensors, loader_of
from daskdl.data.source import SHOWN_ROWS, Facts, FileSource
from daskdl.data.storage import AnyPath, Place, listed
from daskdl.data.tabular_formats import Csv, Parquet, quoted
from daskdl.errors import DataError, OptionError, ShapeError

_BY_SUFFIX: Mapping[str, Loader] = {
    ".npy": Npy(),
    ".npz": Npz(),
    ".csv": Csv(),
    ".parquet": Parquet(),
    ".safetensors": Safetensors(),
}


def loader_for(names: Iterable[str], url: str) -> Loader:
    """Choose a loader by the extension that all files share.

    Args:
        names: Of the files.
        url: Of one of them, for the message.

    Raises:
        DataError: If there is none, or they have several.

    Example:
        >>> loader_for(["a/b.npy", "c.NPY"], "a/b.npy")
        Npy(label_column=None)
    """
    suffixes = sorted({PurePosixPath(name).suffix.lower() for name in names})
    if len(suffixes) == 1 and suffixes[0] in _BY_SUFFIX:
        return _BY_SUFFIX[suffixes[0]]
    raise DataError(
        f"files without a loader must all be of one of {quoted(_BY_SUFFIX)}, got "
        f"{quoted(suffixes)}, as {url}; give a loader=, or a pattern="
    )


# Of files with one example each: enough rows that a part is worth a request, few
# enough that images of a megabyte stay far below a worker's memory.
FILES_PER_PART = 64

# How many of them are fetched at a time where each mostly waits for a server.
_FETCHED_AT_A_TIME = 8


class Files(FileSource):
    """Files anywhere fsspec reaches, and a loader that makes rows of each.

    They are listed here and now; none is read before it is needed. The workers must
    reach them by the same paths or URLs.
    """

    given = True

    def __init__(
        self,
        paths: AnyPath | Sequence[AnyPath],
        loader: Any = None,
        *,
        pattern: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        files_per_part: int | None = None,
    ) -> None:
        """List the files.

        Args:
            paths: A folder, a file, a pattern such as ``s3://bucket/x/*.npy``, or a
                list of files and patterns; paths or URLs.
            loader: ``Csv(...)``, ``Npy(...)``, ``Npz(...)``, ``Parquet(...)`` or
                ``Safetensors(...)``; a function that gets the local path, or the URL of
                what is not local; ``FromBytes(function)``; ``OneExample(...)`` of
                either. None: by the extension, which all files must share; CSV and
                Parquet are then without labels.
            pattern: Which files of a folder, as ``**/*.png``. None: all below it but
                hidden ones.
            storage_options: Of fsspec's file system, such as credentials.
            files_per_part: If each file is one example, how many are loaded together.
                None: 64.

        Raises:
            DataError: If a path or a pattern matches nothing, or if there is no loader
                for the files.
            OptionError: If an option cannot be used.
        """
        self._places = listed(paths, pattern, storage_options or {})
        self._loader = (
            loader_for([place.name for place in self._places], self._places[0].url)
            if loader is None
            else loader_of(loader)
        )
        self._each = _checked_size(files_per_part, self._loader)
        self._bounds = list(range(0, len(self._places), self._each))
        self.parts = len(self._bounds)
        self.lengths = None
        self.first = None
        self.classes = self._loader.classes
        if self._loader.single:
            ends = [*self._bounds[1:], len(self._places)]
            self.lengths = list(np.subtract(ends, self._bounds).tolist())

    @override
    def load(self, part: int) -> Rows:
        return self._joined(self._files(part))

    @override
    def name(self, part: int) -> str:
        places = self._files(part)
        if len(places) == 1:
            return places[0].url
        return f"{places[0].url} and {len(places) - 1} more"

    def file_urls(self, part: int) -> list[str]:
        """The files that a part is made of."""
        return [place.url for place in self._files(part)]

    def load_file(self, part: int, file: int) -> Rows:
        """Load one of them, from 0."""
        return self._loader.load(*self._files(part)[file])

    @override
    def look(self, part: int) -> Facts:
        places = self._files(part)
        if not self._loader.single:
            return self._loader.look(*places[0])
        return Facts(len(places), self._joined(places[:SHOWN_ROWS]))

    @override
    def known(self, facts: Sequence[Facts]) -> Self:
        """The same source; files without rows are passed over from now on.

        Raises:
            DataError: If no file has rows.
        """
        full = [part for part, fact in enumerate(facts) if fact.rows]
        if not full:
            raise DataError(f"there are no rows in any file, as {self.name(0)}")
        other = copy(self)
        other._places = [place for part in full for place in self._files(part)]
        other._bounds = list(range(0, len(other._places), self._each))
        other.parts = len(full)
        other.lengths = [facts[part].rows for part in full]
        other.first = facts[full[0]].first
        return other

    def _files(self, part: int) -> list[Place]:
        begin = self._bounds[part]
        return self._places[begin : begin + self._each]

    def _joined(self, places: list[Place]) -> Rows:
        loaded = self._loaded(places)
        _check_same_shapes(loaded, places)
        x = batching.joined([rows[0] for rows in loaded])
        y = (
            None
            if loaded[0][1] is None
            else batching.joined([rows[1] for rows in loaded])
        )
        return x, y

    def _loaded(self, places: list[Place]) -> list[Rows]:
        if len(places) == 1 or places[0].store.is_local:
            return [self._loader.load(*place) for place in places]
        with ThreadPoolExecutor(_FETCHED_AT_A_TIME) as pool:
            return list(pool.map(lambda place: self._loader.load(*place), places))


def _checked_size(files_per_part: int | None, loader: Loader) -> int:
    if files_per_part is None:
        return FILES_PER_PART if loader.single else 1
    if not loader.single:
        raise OptionError(
            "files_per_part is for files of one example each, with "
            f"OneExample(...), got {files_per_part} and {loader!r}"
        )
    if files_per_part < 1:
        raise OptionError(f"files_per_part must be >= 1, got {files_per_part}")
    return files_per_part


def _check_same_shapes(loaded: list[Rows], places: list[Place]) -> None:
    """Refuse examples that cannot be in one batch, by the file."""
    first, *others = [_shapes(rows) for rows in loaded]
    for place, shapes in zip(places[1:], others, strict=True):
        if shapes != first:
            raise ShapeError(
                f"all examples must have the same shapes, but {place.url} has "
                f"{shapes} and {places[0].url} has {first}"
            )


def _shapes(rows: Rows) -> dict[str, tuple[int, ...]]:
    """Of one row, by name."""
    leaves = batching.named_both(rows, ("x", "y"))
    return {name: leaf.shape[1:] for name, leaf in leaves.items()}
