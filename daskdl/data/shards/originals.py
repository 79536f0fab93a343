"""The files that are to be packed: which they are, and which of them go together."""

import hashlib
import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
from typing_extensions import override

from daskdl.data.batching import Rows
from daskdl.data.shards.folder import LooseFiles
from daskdl.data.source import Source
from daskdl.data.stores.listing import Path, Place, is_path, listed
from daskdl.data.stores.store import Store, store_of
from daskdl.data.stores.urls import common_folder, parted
from daskdl.errors import DataError, OptionError

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
    paths: Path | Sequence[Path], root: Path | None, options: Mapping[str, Any]
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
        whole = Store(store_of(paths).url, options)
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
