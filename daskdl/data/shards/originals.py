"""The files that are to be packed: which they are, and which of them go together."""

import hashlib
import itertools
import json
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
from typing_extensions import override

from daskdl.data.shards.files import LooseFiles
from daskdl.data.source import Source
from daskdl.data.stores.store import Store, store_of
from daskdl.data.trees import Rows
from daskdl.errors import DataError, OptionError

_MAGIC = frozenset("*?[")
_DIGITS = 8  # of a digest in a file's name: two plans in one folder seldom share it

Path = str | os.PathLike[str]


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
        paths: A folder, a glob, or a list of files.
        root: Their paths are relative to this folder. None: the folder; of a glob, the
            folder in front of its first wildcard; of a list, the deepest common one.
        options: Of the file system.

    Raises:
        DataError: If there are none, or one is given twice.
        OptionError: If one of them is not in the root.

    Example:
        >>> found(["memory://x/a/1.png", "memory://x/b/1.png"], None, {})
        Found(store=Store(url='memory://x'), names=('a/1.png', 'b/1.png'))
    """
    if isinstance(paths, str | os.PathLike):
        return _listed(paths, root, options)
    if not paths:
        raise DataError("paths must have at least one file, got an empty list")
    urls = [store_of(path).url for path in paths]
    common = _common(urls) if root is None else store_of(root).url
    return Found(Store(common, options), _relative(urls, common, options))


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


def _listed(path: Path, root: Path | None, options: Mapping[str, Any]) -> Found:
    url = store_of(path).url
    folder, pattern = _without_wildcards(url)
    store = Store(folder, options)
    if pattern is None:
        names = store.names()
        if not names:
            folder, _, pattern = folder.rpartition("/")  # perhaps it is one file
    if pattern is not None:
        store = Store(folder, options)
        names = (
            store.names(pattern) if _MAGIC & set(pattern) else _single(store, pattern)
        )
    if not names:
        raise DataError(f"{os.fspath(path)} matches no files")
    if root is None:
        return Found(store, tuple(names))
    urls = [store.url_of(name) for name in names]
    common = store_of(root).url
    return Found(Store(common, options), _relative(urls, common, options))


def _single(store: Store, name: str) -> list[str]:
    return [name] if store.exists(name) else []


def _without_wildcards(url: str) -> tuple[str, str | None]:
    """The folder in front of the first wildcard, and the rest if there is one.

    Example:
        >>> _without_wildcards("s3://bucket/x/*/1.png")
        ('s3://bucket/x', '*/1.png')
    """
    parts = url.rstrip("/").split("/")
    for i, part in enumerate(parts):
        if _MAGIC & set(part):
            return "/".join(parts[:i]), "/".join(parts[i:])
    return "/".join(parts), None


def _common(urls: Sequence[str]) -> str:
    """The deepest folder that has all of them."""
    if len({fsspec.utils.get_protocol(url) for url in urls}) > 1:
        raise OptionError(
            f"paths must be on one file system, got {urls[0]} and others; pack the "
            "files of each into a folder of its own"
        )
    folders = zip(*(url.split("/")[:-1] for url in urls), strict=False)
    same = itertools.takewhile(lambda names: len(set(names)) == 1, folders)
    return "/".join(names[0] for names in same)


def _relative(
    urls: Sequence[str], root: str, options: Mapping[str, Any]
) -> tuple[str, ...]:
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
    return tuple(path.removeprefix(inside) for path in paths)
