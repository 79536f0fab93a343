"""Trying again when a connection was dropped, and naming the URL when it stays so.

Here is decided which errors may pass by themselves. What is done is up to the caller:
it must be harmless when it is done twice.

How a file comes into being at once, on each kind of file system.

URLs and local paths of files as text: folders, names, patterns.

No file system is asked. Of a chain as ``zip://a/b.npy::s3://bucket/x.zip`` the first
URL has the path of the file.

A folder at any fsspec URL: its files are read whole and written at once.

Bytes only; what they mean is in :mod:`daskdl.data.formats`. Nothing is kept open, and
no file system is held: fsspec keeps one for each set of options and each process.

Which files a user means: a folder, a pattern, one path or a list of them.
"""

import errno
import itertools
import logging
import math
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

import fsspec
from fsspec.core import strip_protocol
from fsspec.utils import get_protocol, glob_translate

from daskdl.data.tables import TEXT
from daskdl.errors import DataError, OptionError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds before each further attempt. Most drops are over at once; a server that is
# away for longer is a matter for who runs it, and a run must not hang on one file.
WAITS_S = (0.1, 0.4, 1.6)

# No further attempt begins after so many seconds: s3fs and botocore try again too, and
# by default spend half a minute on it, which must not be multiplied by ours.
ENOUGH_S = 20.0

# What file systems raise besides OSError. Their modules are looked up, not imported:
# an error can only have come if its module is there.
_FOREIGN = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("aiohttp", "ClientError"),
    ("urllib3.exceptions", "HTTPError"),
    ("http.client", "HTTPException"),
    ("gcsfs.retry", "HttpError"),
    ("azure.core.exceptions", "AzureError"),
)
# Of these, those that say that a connection failed.
_DROPPED = (
    ("botocore.exceptions", "HTTPClientError"),
    ("botocore.exceptions", "ConnectionError"),
    ("aiohttp", "ClientError"),
    ("urllib3.exceptions", "HTTPError"),
    ("http.client", "HTTPException"),
    ("azure.core.exceptions", "ServiceRequestError"),
    ("azure.core.exceptions", "ServiceResponseError"),
)
_LASTING = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    FileExistsError,
)
_LASTING_NUMBERS = {
    errno.EINVAL,  # s3fs: the request itself is wrong
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.ENOSYS,
    errno.ENOTEMPTY,
    errno.EPERM,
    errno.EROFS,
}
_TOO_MANY_REQUESTS = 429
_SERVER_ERRORS = 500


def attempt(action: Callable[[], T], what: str) -> T:
    """Do something, and again after each of `WAITS_S` while its connection drops.

    After `ENOUGH_S` it is not tried again, however often it has been.

    Args:
        action: What to do; harmless when done twice.
        what: What it does to which URL, for the message: ``read s3://bucket/x``.

    Returns:
        What the action returned.

    Raises:
        FileNotFoundError: As it came; what that means is for the caller to say.
        DataError: If it failed otherwise, or was dropped at every attempt.

    Example:
        >>> attempt(lambda: 7, "read memory://x")
        7
    """
    began = time.monotonic()
    for times, wait_s in enumerate((*WAITS_S, math.inf), 1):
        try:
            return action()
        except FileNotFoundError:
            raise
        except _failures() as error:
            dropped = is_dropped(error)
            if not dropped or time.monotonic() - began + wait_s > ENOUGH_S:
                shown = f"{type(error).__name__}: {error}".removesuffix(": ")
                count = f" (attempts: {times})" if dropped else ""
                raise DataError(f"cannot {what}: {shown}{count}") from error
            logger.debug("attempt to %s failed, again in %s s", what, wait_s)
        time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def is_dropped(error: BaseException) -> bool:
    """Whether an error may be gone at the next attempt.

    Example:
        >>> is_dropped(ConnectionResetError()), is_dropped(PermissionError())
        (True, False)
    """
    if isinstance(error, OSError) and not isinstance(error, _loaded(_DROPPED)):
        lasting = isinstance(error, _LASTING) or error.errno in _LASTING_NUMBERS
        return not lasting
    status = getattr(error, "status", _SERVER_ERRORS)
    passing = status >= _SERVER_ERRORS or status == _TOO_MANY_REQUESTS
    return isinstance(error, _loaded(_DROPPED)) and passing


def _failures() -> tuple[type[Exception], ...]:
    return OSError, *_loaded(_FOREIGN)


def _loaded(names: tuple[tuple[str, str], ...]) -> tuple[type[Exception], ...]:
    """The classes of those modules that somebody has imported."""
    return tuple(_present(names))


def _present(names: tuple[tuple[str, str], ...]) -> Iterator[type[Exception]]:
    for module, name in names:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None:
            yield kind


# Ends the name of a file that is being written; such files are in no listing.
TEMPORARY = ".daskdl-part"
LOCAL = frozenset({"file", "local"})
# Here one request puts a whole file, and folders need not be made.
_PUT_WHOLE = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "memory"}
)


def put(system: Any, path: str, content: bytes | memoryview) -> None:
    """Write a file; who reads meanwhile sees all of it or what was there before.

    Locally a temporary file beside it is renamed, an object store gets one put;
    elsewhere a temporary file is moved, by whatever the file system has for it.

    Args:
        system: A fsspec file system.
        path: On it; missing folders are made.
        content: All of the file.

    Raises:
        OSError: What the file system raises, and whatever else it does.
    """
    kinds = _protocols(system)
    if kinds & LOCAL:
        _rename(Path(path), content)
    elif kinds & _PUT_WHOLE:
        system.pipe_file(path, bytes(content))
    else:
        _move(system, path, bytes(content))


def _protocols(system: Any) -> set[str]:
    kinds = system.protocol
    return {kinds} if isinstance(kinds, str) else set(kinds)


def _rename(final: Path, content: bytes | memoryview) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{uuid.uuid4().hex}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or a crash could leave the name without bytes
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)


def _move(system: Any, path: str, content: bytes) -> None:
    folder = path.rpartition("/")[0]
    temporary = f"{folder}/.{uuid.uuid4().hex}{TEMPORARY}"
    system.makedirs(folder, exist_ok=True)
    system.pipe_file(temporary, content)
    system.mv(temporary, path)


_MAGIC = re.compile(r"[*?\[]")


class Parts(NamedTuple):
    """A folder, and what is in it."""

    folder: str
    name: str


class _Cut(NamedTuple):
    """A URL, with the path in it by itself."""

    before: str  # with the slashes of its protocol
    path: str
    after: str


def is_url(value: Any) -> bool:
    """Whether it is a string with a protocol in front.

    Example:
        >>> is_url("s3://bucket/x"), is_url("/local/path"), is_url(7)
        (True, False, False)
    """
    return isinstance(value, str) and ("://" in value or "::" in value)


def is_local(url: str) -> bool:
    """Whether a URL or path is on the disks of this machine.

    Example:
        >>> is_local("file:///x"), is_local("/x"), is_local("memory://x")
        (True, True, False)
    """
    return get_protocol(url) in LOCAL


def is_pattern(url: str) -> bool:
    """Whether it has a wildcard.

    Example:
        >>> is_pattern("memory://x/*.npy"), is_pattern("memory://x/1.npy")
        (True, False)
    """
    return _MAGIC.search(_cut(url).path) is not None


def joined(folder: str, name: str) -> str:
    """The URL of a file or folder in a folder.

    Example:
        >>> joined("s3://bucket/a/", "b.npy"), joined("memory://", "b.npy")
        ('s3://bucket/a/b.npy', 'memory://b.npy')
    """
    before, path, after = _cut(folder)
    base = path.rstrip("/")
    inside = f"{base}/" if base or not before else path
    return f"{before}{inside}{name}{after}"


def parted(url: str) -> Parts:
    """The folder and the name of a file.

    Example:
        >>> parted("s3://bucket/a/b.npy")
        Parts(folder='s3://bucket/a', name='b.npy')
        >>> parted("memory://b.npy")
        Parts(folder='memory://', name='b.npy')
    """
    cut = _cut(url)
    return _parted(cut, cut.path.rfind("/"))


def parted_pattern(url: str) -> Parts:
    """The last folder that has no wildcard, and the pattern in it.

    Example:
        >>> parted_pattern("s3://bucket/a/*/b.npy")
        Parts(folder='s3://bucket/a', name='*/b.npy')
    """
    cut = _cut(url)
    first = _MAGIC.search(cut.path)
    end = None if first is None else first.start()
    return _parted(cut, cut.path.rfind("/", 0, end))


def common_folder(folders: Iterable[str]) -> str:
    """The deepest folder that has all of them.

    Args:
        folders: At least one.

    Raises:
        OptionError: If they are on several file systems.

    Example:
        >>> common_folder(["s3://bucket/a/b", "s3://bucket/a/bc"])
        's3://bucket/a'
        >>> common_folder(["memory://", "memory://a"])
        'memory://'
    """
    given = list(folders)
    if len({is_url(one) for one in given}) > 1 and all(map(is_local, given)):
        given = [str(strip_protocol(one)) for one in given]
    cuts = [_cut(folder) for folder in given]
    before, _, after = cuts[0]
    other = next((c for c in cuts if (c.before, c.after) != (before, after)), None)
    if other is not None:
        raise OptionError(
            f"paths must be on one file system, got {given[0]} and "
            f"{given[cuts.index(other)]}; take the files of each by themselves"
        )
    columns = zip(*(cut.path.split("/") for cut in cuts), strict=False)
    same = itertools.takewhile(lambda names: len(set(names)) == 1, columns)
    path = "/".join(names[0] for names in same)
    absolute = cuts[0].path.startswith("/")
    return f"{before}{path or '/' * absolute}{after}"


def _parted(cut: _Cut, slash: int) -> Parts:
    folder = "" if slash < 0 else cut.path[:slash] or "/"
    return Parts(f"{cut.before}{folder}{cut.after}", cut.path[slash + 1 :])


def _cut(url: str) -> _Cut:
    """What is before the path, the path, and what is after it."""
    sign = url.find("://")
    if sign < 0:
        return _Cut("", url, "")
    start = sign + len("://")
    end = url.find("::", start)
    end = len(url) if end < 0 else end
    return _Cut(url[:start], url[start:end], url[end:])


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


def store_of(
    url_or_path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
) -> Store:
    """The store at a URL or a local path; a relative one is made absolute.

    Example:
        >>> store_of("memory://x").url
        'memory://x'
    """
    url = os.fspath(url_or_path)
    if not is_url(url):
        url = str(Path(url).expanduser().absolute())
    return Store(url, dict(storage_options or {}))


def _matcher(pattern: str) -> Callable[[str], Any]:
    return re.compile(glob_translate(pattern)).fullmatch


AnyPath = str | os.PathLike[str]

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


def is_path(value: Any) -> TypeGuard[AnyPath]:
    """Whether it is a path or a URL.

    Example:
        >>> is_path("s3://bucket/x"), is_path(["x"])
        (True, False)
    """
    return isinstance(value, str | os.PathLike)


def are_paths(value: Any) -> TypeGuard[AnyPath | list[AnyPath]]:
    """Whether it is a path or a URL, or a list of nothing else.

    Example:
        >>> are_paths(["a.npy", "b.npy"]), are_paths([1.0]), are_paths([])
        (True, False, False)
    """
    several = isinstance(value, list) and bool(value)
    return is_path(value) or (several and all(is_path(one) for one in value))


def listed(
    given: AnyPath | Sequence[AnyPath], pattern: str | None, options: Mapping[str, Any]
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


def _store(path: AnyPath, options: Mapping[str, Any]) -> Store:
    return store_of(path, options)


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
    path: AnyPath, options: Mapping[str, Any], stores: dict[str, Store]
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


def is_glob(path: AnyPath) -> bool:
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
