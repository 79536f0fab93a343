"""Which files a user means: a folder, a pattern, one path or a list of them."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from fsspec.core import strip_protocol
from fsspec.utils import get_protocol

from daskdl.data.remedies import TEXT
from daskdl.data.stores.puts import LOCAL
from daskdl.data.stores.store import Store, store_of
from daskdl.data.stores.urls import is_local, is_pattern, parted, parted_pattern
from daskdl.errors import DataError, OptionError

Path = str | os.PathLike[str]

# Elsewhere what follows the protocol is the name of a host or a bucket.
_FILES_AT_ROOT = frozenset({"memory", "tar", "zip", *LOCAL})


class Place(NamedTuple):
    """A file."""

    store: Store
    name: str

    @property
    def url(self) -> str:
        """Its full URL or local path."""
        return self.store.url_of(self.name)


def is_path(value: Any) -> TypeGuard[Path]:
    """Whether it is a path or a URL.

    Example:
        >>> is_path("s3://bucket/x"), is_path(["x"])
        (True, False)
    """
    return isinstance(value, str | os.PathLike)


def are_paths(value: Any) -> TypeGuard[Path | list[Path]]:
    """Whether it is a path or a URL, or a list of nothing else.

    Example:
        >>> are_paths(["a.npy", "b.npy"]), are_paths([1.0]), are_paths([])
        (True, False, False)
    """
    several = isinstance(value, list) and bool(value)
    return is_path(value) or (several and all(is_path(one) for one in value))


def listed(
    given: Path | Sequence[Path], pattern: str | None, options: Mapping[str, Any]
) -> list[Place]:
    """All files that are meant, in the order of the list, or sorted by name.

    Args:
        given: A folder, a file, a pattern such as ``s3://bucket/x/*.npy``, or a list
            of files and patterns.
        pattern: Which files of a folder, as ``**/*.png``. None: all below it but those
            with a name that begins with a dot or an underscore, or that are in a folder
            whose name begins with a dot.
        options: Of the file system.

    Returns:
        At least one.

    Raises:
        DataError: If a path, a pattern or a local file of a list matches nothing.
        OptionError: If it is none of these, or there is a pattern besides a list.
    """
    if is_path(given):
        return _below(_store(given, options), pattern)
    entries = given if isinstance(given, list | tuple) else []
    if not entries or not all(is_path(path) for path in entries):
        raise OptionError(
            f"paths must be a path, a URL or a list of them, got {given!r:.80}"
        )
    if pattern is not None:
        raise OptionError(
            f"pattern is for a folder, got a list of paths and {pattern!r}; write the "
            "patterns into the list"
        )
    stores: dict[str, Store] = {}  # one for each folder, not for each file
    return [place for path in entries for place in _one(path, options, stores)]


def _store(path: Path, options: Mapping[str, Any]) -> Store:
    return Store(store_of(path).url, options)


def _below(store: Store, pattern: str | None) -> list[Place]:
    """What one path or URL stands for."""
    if pattern is None and (is_glob(store.url) or _is_file(store)):
        return _one(store.url, store.options, {})
    names = store.names("**" if pattern is None else pattern)
    if pattern is None:
        names = [name for name in names if not _is_hidden(name)]
    if not names:
        shown = _taken(store.url) if pattern is None else f" that match {pattern!r}"
        raise DataError(f"there are no files at {store.url}{shown}")
    return [Place(store, name) for name in names]


def _one(
    path: Path, options: Mapping[str, Any], stores: dict[str, Store]
) -> list[Place]:
    """One entry of a list: a file or a pattern."""
    url = store_of(path).url
    if is_glob(url):
        return _matching(url, options)
    folder, name = parted(url)
    store = stores.setdefault(folder, Store(folder, options))
    if is_local(url) and not os.path.isfile(strip_protocol(url)):
        raise DataError(f"there is no file at {url}{_taken(url)}")
    return [Place(store, name)]


def _matching(url: str, options: Mapping[str, Any]) -> list[Place]:
    """The files of a pattern, seen from the last folder that has none of it."""
    folder, pattern = parted_pattern(url)
    store = Store(folder, options)
    names = store.names(pattern)
    if not names:
        raise DataError(f"there are no files that match {url}")
    return [Place(store, name) for name in names]


def is_glob(path: Path) -> bool:
    """Whether it is a pattern; a local path with a bracket in its name is not one."""
    url = store_of(path).url
    there = is_local(url) and os.path.exists(strip_protocol(url))
    return is_pattern(url) and not there


def _taken(url: str) -> str:
    """The remedy for what is rather text than a path."""
    text = " " in parted(url).name
    return f": a str is the path or URL of files; {TEXT}" if text else ""


def _is_file(store: Store) -> bool:
    folder, name = parted(store.url)
    if folder.endswith("://") and get_protocol(folder) not in _FILES_AT_ROOT:
        return False
    return bool(name) and Store(folder, store.options).exists(name)


def _is_hidden(name: str) -> bool:
    *folders, last = name.split("/")
    return last.startswith((".", "_")) or any(f.startswith(".") for f in folders)
