"""Shards as a source: each is a part, and a loader makes rows of the files in it."""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Rows
from daskdl.data.formats.extensions import loader_for
from daskdl.data.formats.loaders import (
    FromBytes,
    FromPath,
    Loader,
    OneExample,
    loader_of,
)
from daskdl.data.shards.contents import Contents
from daskdl.data.shards.index import Index
from daskdl.data.shards.sharded_files import ShardedFiles
from daskdl.data.source import Facts, FileSource
from daskdl.data.stores.store import Store, store_of
from daskdl.errors import DataError, ShapeError


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
        store = Store(store_of(url).url, dict(storage_options or {}))
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
    store = Store(store_of(url).url, dict(storage_options or {}))
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
