"""A folder at any fsspec URL: its files are read whole and written at once.

Bytes only; what they mean is in :mod:`daskdl.data.formats`. Nothing is kept open, and
no file system is held: fsspec keeps one for each set of options and each process.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.core import strip_protocol
from fsspec.utils import glob_translate

from daskdl.data.stores.attempts import attempt
from daskdl.data.stores.puts import TEMPORARY, put
from daskdl.data.stores.urls import is_local, is_url, joined
from daskdl.errors import DataError, OptionError

T = TypeVar("T")

_DELETED_AT_A_TIME = 8  # each is a request that mostly waits


@dataclass(frozen=True)
class Store:
    """A folder at a fsspec URL. It pickles; any thread may use it.

    A dropped connection is tried again a few times (`attempts.WAITS_S`). What fails
    then raises a DataError that names the URL of the file.

    Attributes:
        url: ``s3://bucket/x``, ``memory://x``, ``/local/path``, ``file:///...``.
        options: Of the file system, as fsspec's ``storage_options``; not shown.

    Example:
        >>> store = Store("memory://daskdl-example")
        >>> store.write("a/b.txt", b"hello")
        >>> store.read("a/b.txt", 1, 3), store.names("**/*.txt")
        (b'el', ['a/b.txt'])
        >>> store.delete_all()
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False)

    def read(
        self, name: str, start: int | None = None, stop: int | None = None
    ) -> bytes:
        """Read a file, or the bytes from start up to stop as in a slice.

        Raises:
            DataError: If it is not there, or cannot be read.
        """
        if self.is_local and start is None and stop is None:
            # Without fsspec, which takes twice as long for a small file.
            path = Path(strip_protocol(self.url), name)
            return self._on_file(path.read_bytes, "read", name)
        system, root = self._opened()
        content: bytes = self._on_file(
            lambda: system.cat_file(f"{root}/{name}", start=start, end=stop),
            "read",
            name,
        )
        return content

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Write a file; who reads meanwhile sees all of it or what was there before.

        Locally a temporary file beside it is renamed, an object store gets one put;
        elsewhere a temporary file is moved, by whatever the file system has for it.

        Raises:
            DataError: If it cannot be written.
        """
        system, root = self._opened()
        path = f"{root}/{name}"
        self._on_file(lambda: put(system, path, content), "write", name)

    def exists(self, name: str) -> bool:
        """Whether there is such a file; of a folder False."""
        return self._found(name) is not None

    def size(self, name: str) -> int:
        """Bytes of a file.

        Raises:
            DataError: If it is not there.
        """
        found = self._found(name)
        if found is None:
            raise DataError(f"cannot read {self.url_of(name)}: there is no such file")
        return int(found["size"])

    def names(self, pattern: str = "**") -> list[str]:
        """Files in the folder as it is now, relative to it and sorted.

        Args:
            pattern: As in a shell; ``*`` ends at a slash, ``**`` does not.

        Returns:
            None if the folder is not there: the list is empty.
        """
        matches = _matcher(pattern)
        return [
            n for n in self._all(pattern) if not n.endswith(TEMPORARY) and matches(n)
        ]

    def folders(self) -> list[str]:
        """Names of the folders that are directly in it, sorted."""
        system, root = self._opened()

        def listed() -> list[Mapping[str, Any]]:
            return list(system.ls(root, detail=True))

        nothing: list[Mapping[str, Any]] = []
        entries = self._tried(listed, f"list {self.url}", nothing)
        paths = [e["name"].rstrip("/") for e in entries if e["type"] == "directory"]
        return sorted(path.rpartition("/")[2] for path in paths)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; those that are not there are passed over."""
        with ThreadPoolExecutor(_DELETED_AT_A_TIME) as pool:
            list(pool.map(self._delete, names))

    def delete_all(self) -> None:
        """Delete every file below the folder; locally the folder too."""
        if self.is_local:
            _, root = self._opened()
            self._tried(lambda: shutil.rmtree(root), f"delete {self.url}", None)
        else:
            self.delete(self._all("**"))

    def url_of(self, name: str) -> str:
        """The full URL or local path of a file."""
        return joined(self.url, name)

    @property
    def is_local(self) -> bool:
        """Whether it is a folder on the disks of this machine."""
        return is_local(self.url)

    @property
    def place(self) -> str:
        """The same URL without a slash at its end, whichever way it was written."""
        system, root = self._opened()
        path = os.path.realpath(root) if self.is_local else root
        return str(system.unstrip_protocol(path)).rstrip("/")

    def _opened(self) -> tuple[Any, str]:
        """The file system, and the folder's path on it without a slash at its end."""
        try:
            system, root = fsspec.core.url_to_fs(self.url, **self.options)
        except (ValueError, ImportError, TypeError) as error:
            raise OptionError(f"cannot open {self.url}: {error}") from error
        except OSError as error:  # an archive that has the folder
            raise DataError(f"cannot open {self.url}: {error!r}") from error
        return system, str(root).rstrip("/")

    def _all(self, pattern: str) -> list[str]:
        system, root = self._opened()
        more: dict[str, Any] = {}
        if self.is_local:
            depth = None if "**" in pattern else pattern.count("/") + 1
            more = {"on_error": "raise", "maxdepth": depth}

        def listed() -> list[str]:
            system.invalidate_cache()
            return [str(path) for path in system.find(root, **more)]

        nothing: list[str] = []
        paths = self._tried(listed, f"list {self.url}", nothing)
        inside = f"{root}/".lstrip("/")
        found = (path.lstrip("/") for path in paths)
        return sorted(p.removeprefix(inside) for p in found if p.startswith(inside))

    def _found(self, name: str) -> Mapping[str, Any] | None:
        """What the file system says about a file; not `exists`, which hides errors."""
        system, root = self._opened()

        def looked() -> Mapping[str, Any] | None:
            system.invalidate_cache()
            try:
                found: Mapping[str, Any] = system.info(f"{root}/{name}")
            except NotADirectoryError:  # the folder is a file
                return None
            return found if found["type"] == "file" else None

        return self._tried(looked, f"read {self.url_of(name)}", None)

    def _delete(self, name: str) -> None:
        system, root = self._opened()
        what = f"delete {self.url_of(name)}"
        self._tried(lambda: system.rm_file(f"{root}/{name}"), what, None)

    def _tried(self, action: Callable[[], T], what: str, missing: T) -> T:
        try:
            return attempt(action, what)
        except FileNotFoundError:
            return missing

    def _on_file(self, action: Callable[[], T], verb: str, name: str) -> T:
        what = f"{verb} {self.url_of(name)}"
        try:
            return attempt(action, what)
        except FileNotFoundError as error:
            reason = "file" if verb == "read" else f"folder or bucket: {error}"
            raise DataError(f"cannot {what}: there is no such {reason}") from error


def store_of(url_or_path: str | os.PathLike[str]) -> Store:
    """The store at a URL or a local path; a relative one is made absolute.

    Example:
        >>> store_of("memory://x").url
        'memory://x'
    """
    given = os.fspath(url_or_path)
    return Store(given if is_url(given) else str(Path(given).expanduser().absolute()))


def _matcher(pattern: str) -> Callable[[str], Any]:
    return re.compile(glob_translate(pattern)).fullmatch
