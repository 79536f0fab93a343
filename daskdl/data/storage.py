"""Files at any fsspec URL: reads, atomic writes and listings, with retries.

fsspec provides the file systems. This module adds atomic writes, retries after
transient errors, and error messages that name the URL; where credentials are missing,
they also name the worker and the remedy.
"""

import contextlib
import errno
import io
import logging
import math
import os
import posixpath
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard, TypeVar

import fsspec
from fsspec.core import strip_protocol
from fsspec.utils import get_protocol, glob_translate
from typing_extensions import override

from daskdl.data.tables import TEXT
from daskdl.errors import DataError, OptionError

logger = logging.getLogger(__name__)

T = TypeVar("T")
AnyPath = str | os.PathLike[str]

# Seconds before each retry. Most dropped connections recover quickly; a run must not
# hang on one file while a server is unreachable for longer.
WAITS_S = (0.1, 0.4, 1.6)

# No retry starts after this many seconds: s3fs and botocore retry as well, by default
# for half a minute, and the delays would multiply.
ENOUGH_S = 20.0

# Libraries that fsspec's file systems are built on; their errors need not be OSErrors.
_LIBRARIES = frozenset(
    {"aiohttp", "azure", "botocore", "gcsfs", "google", "http", "urllib3"}
)
# Errors that mean a failed connection, by module and name.
_DROPPED = frozenset(
    {
        "botocore.exceptions.HTTPClientError",
        "botocore.exceptions.ConnectionError",
        "aiohttp.client_exceptions.ClientError",
        "urllib3.exceptions.HTTPError",
        "http.client.HTTPException",
        "azure.core.exceptions.ServiceRequestError",
        "azure.core.exceptions.ServiceResponseError",
    }
)
# Errors that mean missing or wrong credentials, by module and name.
_REFUSED = frozenset(
    {
        "builtins.PermissionError",
        "botocore.exceptions.NoCredentialsError",
        "botocore.exceptions.PartialCredentialsError",
        "botocore.exceptions.CredentialRetrievalError",
        "google.auth.exceptions.GoogleAuthError",
        "azure.core.exceptions.ClientAuthenticationError",
    }
)
_LASTING = (IsADirectoryError, NotADirectoryError, FileExistsError)
_LASTING_NUMBERS = {
    errno.EINVAL,  # s3fs: the request itself is wrong
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.ENOSYS,
    errno.ENOTEMPTY,
    errno.EPERM,
    errno.EROFS,
}
_CREDENTIALS = (
    "give credentials that the workers can use with storage_options=..., or configure "
    "fsspec on the workers"
)
_UNAUTHORIZED = (401, 403)
_TOO_MANY_REQUESTS = 429
_SERVER_ERRORS = 500


def attempt(action: Callable[[], T], verb: str, url: str) -> T:
    """Call a function; retry after each of `WAITS_S` while connections drop.

    Raises:
        FileNotFoundError: Unchanged; the caller knows what it means.
        DataError: If the file system fails otherwise, or the connection drops each
            time.
    """
    started = time.monotonic()
    for attempts, wait_s in enumerate((*WAITS_S, math.inf), 1):
        try:
            return action()
        except FileNotFoundError:
            raise
        except Exception as error:
            names = {f"{c.__module__}.{c.__name__}" for c in type(error).__mro__}
            libraries = {name.partition(".")[0] for name in names}
            if not isinstance(error, OSError) and not libraries & _LIBRARIES:
                raise
            refused = not names.isdisjoint(_REFUSED) or _status(error) in _UNAUTHORIZED
            dropped = not refused and _is_dropped(error, names)
            if not dropped or time.monotonic() - started + wait_s > ENOUGH_S:
                reason = f"{type(error).__name__}: {error}".removesuffix(": ")
                where = ""
                if dropped:
                    reason = f"{reason} (attempts: {attempts})"
                elif refused and not is_local(url):
                    where, reason = (
                        f" on {_process_name()}",
                        f"{reason}; {_CREDENTIALS}",
                    )
                raise DataError(f"cannot {verb} {url}{where}: {reason}") from error
            logger.debug("cannot %s %s, retrying in %s s", verb, url, wait_s)
        time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def _status(error: Exception) -> Any:
    """The HTTP status of an error of aiohttp or gcsfs; None for other errors."""
    # Reading `code` of aiohttp's errors emits a DeprecationWarning.
    name = "status" if hasattr(error, "status") else "code"
    return getattr(error, name, None)


def _is_dropped(error: Exception, names: Set[str]) -> bool:
    """Whether an error may be transient."""
    if not names.isdisjoint(_DROPPED):
        status = getattr(error, "status", _SERVER_ERRORS)
        return bool(status >= _SERVER_ERRORS or status == _TOO_MANY_REQUESTS)
    lasting = isinstance(error, _LASTING)
    return isinstance(error, OSError) and not (
        lasting or error.errno in _LASTING_NUMBERS
    )


def _process_name() -> str:
    """The Dask worker of this process if there is exactly one, else the process."""
    distributed = sys.modules.get("distributed")
    # The public get_worker() works in tasks alone; daskdl reads data in other threads.
    # Private in distributed 2025.5 to 2026.8, a set of weak references.
    workers = list(distributed.Worker._instances) if distributed else []
    if len(workers) == 1:
        return f"the worker {workers[0].address}"
    return f"process {os.getpid()} of {socket.gethostname()}"


# Suffix of files that are being written; listings omit them.
TEMPORARY = ".daskdl-part"
LOCAL = frozenset({"file", "local"})
# Object stores: one request writes a complete file, and folders need not exist.
_OBJECT_STORES = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "memory"}
)


def put(system: Any, path: str, content: bytes | memoryview) -> None:
    """Write a file atomically; create missing folders.

    On a local disk, a temporary file next to the target is renamed (fsspec's
    transactions move a file from another disk, which is not atomic). On an object
    store, one request writes the file. Other file systems move a temporary file; where
    a move does not replace an existing file, the existing file is deleted first, so the
    replacement is not atomic.
    """
    protocol = system.protocol
    protocols = {protocol} if isinstance(protocol, str) else {*protocol}
    if protocols & _OBJECT_STORES:
        system.pipe_file(path, bytes(content))
        return
    folder = path.rpartition("/")[0]
    temporary = f"{folder}/.{uuid.uuid4().hex}{TEMPORARY}"
    system.makedirs(folder, exist_ok=True)
    if not protocols & LOCAL:
        try:
            system.pipe_file(temporary, bytes(content))
            _replace(system, temporary, path)
        finally:
            with contextlib.suppress(Exception):  # no longer there after a move
                system.rm_file(temporary)
        return
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # a crash after the rename must not lose content
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _replace(system: Any, temporary: str, path: str) -> None:
    """Move a file, even where moving onto an existing file fails or does nothing."""
    try:
        _move(system, temporary, path)
    except (ConnectionError, TimeoutError, PermissionError):
        raise  # the existing file is not the cause
    except (OSError, RuntimeError):  # WebHDFS raises RuntimeError
        if _info(system, temporary) is None or _info(system, path) is None:
            raise
        system.rm_file(path)
        _move(system, temporary, path)


def _move(system: Any, temporary: str, path: str) -> None:
    system.mv(temporary, path)
    if _info(system, temporary) is not None:  # fsspec drops the result of WebHDFS
        raise OSError(f"{temporary} could not be renamed")


_MAGIC = re.compile(r"[*?\[]")
# Three parts of a URL: protocol with its slashes, path, and the archive that has it.
_PARTS = re.compile(r"(.*?://)?(.*?)(::.*)?", re.DOTALL)


def _parts(url: str) -> Sequence[str]:
    match = _PARTS.fullmatch(url)
    assert match is not None, "the path may be anything"
    return match.groups("")


def is_local(url: str) -> bool:
    """Whether a URL or path refers to the local file system."""
    return get_protocol(url) in LOCAL


def is_path(value: Any) -> TypeGuard[AnyPath]:
    """Whether a value is a path or a URL."""
    return isinstance(value, str | os.PathLike)


def are_paths(value: Any) -> TypeGuard[AnyPath | list[AnyPath]]:
    """Whether a value is a path or a URL, or a list of them."""
    return is_path(value) or (
        isinstance(value, list) and bool(value) and all(map(is_path, value))
    )


def is_glob(path: AnyPath) -> bool:
    """Whether a path has wildcards and is not the name of an existing local file."""
    url = store_of(path).url
    if is_local(url) and os.path.exists(strip_protocol(url)):
        return False
    return _MAGIC.search(_parts(url)[1]) is not None


def joined(folder: str, name: str) -> str:
    """Return the URL of a file or folder in a folder.

    Example:
        >>> joined("s3://bucket/a/", "b.npy"), joined("memory://", "b.npy")
        ('s3://bucket/a/b.npy', 'memory://b.npy')
    """
    before, path, after = _parts(folder)
    base = path.rstrip("/")
    inside = f"{base}/" if base or not before else path
    return f"{before}{inside}{name}{after}"


def folder_of(url: str) -> str:
    """Return the folder of a file; of a pattern, the deepest one without a wildcard.

    Example:
        >>> folder_of("s3://bucket/a/*/b.npy"), folder_of("memory://b.npy")
        ('s3://bucket/a', 'memory://')
    """
    before, path, after = _parts(url)
    folder = _MAGIC.split(path, maxsplit=1)[0].rpartition("/")[0]
    return f"{before}{folder or '/' * path.startswith('/')}{after}"


def common_folder(urls: Iterable[str]) -> str:
    """Return the deepest folder that contains all files.

    Example:
        >>> common_folder(["s3://bucket/a/b/1", "s3://bucket/a/bc/2"])
        's3://bucket/a'
    """
    normalized = list(map(_normalized, urls))
    files = list(map(_parts, normalized))
    before, _, after = files[0]
    for url, (protocol, _, archive) in zip(normalized, files, strict=True):
        if (protocol, archive) != (before, after):
            raise OptionError(
                f"all paths must be on one file system, got {normalized[0]} and {url}; "
                "pass the files of each file system in a separate call"
            )
    # After a protocol, a leading slash has no meaning.
    paths = [path.lstrip("/") if before else path for _, path, _ in files]
    common = posixpath.commonpath([posixpath.dirname(path) for path in paths])
    return f"{before}{common}{after}"


def path_in(folder: str, url: str) -> str | None:
    """Return the path of a file relative to a folder; None if it is not below it.

    Example:
        >>> path_in("s3://bucket/a", "s3://bucket/a/b/c.png")
        'b/c.png'
    """
    folder_protocol, folder_path, folder_archive = _parts(_normalized(folder))
    protocol, path, archive = _parts(_normalized(url))
    if (protocol, archive) != (folder_protocol, folder_archive):
        return None
    prefix, path = posixpath.join(folder_path, "").lstrip("/"), path.lstrip("/")
    return path.removeprefix(prefix) if path.startswith(prefix) else None


def resolved(url: str) -> str:
    """Return a local path without symbolic links; any other URL unchanged."""
    return os.path.realpath(strip_protocol(url)) if is_local(url) else url


def _normalized(url: str) -> str:
    """A local path without its protocol, normalized; any other URL unchanged."""
    return os.path.normpath(str(strip_protocol(url))) if is_local(url) else url


class OpenBytes(io.BytesIO):
    """The content of a file as an open binary file; `name` is its URL."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name: str = name

    @override
    def __repr__(self) -> str:
        return self.name  # Pillow quotes it in error messages


class _Ranges(io.RawIOBase):
    """A remote file that is read by ranges, with retries for each range."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.name, self._options = url, options
        self._position = 0
        self._size: float = math.inf

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            size = _size(self.name, self._options)
            if size is None:
                raise DataError(f"cannot read {self.name}: there is no such file")
            self._size = self._position = size
        elif whence == io.SEEK_SET:
            self._position = 0
        self._position += offset
        return self._position

    @override
    def readinto(self, buffer: Any) -> int:
        start, wanted = self._position, len(buffer)
        if start >= self._size:  # object stores refuse empty ranges
            return 0
        content = read(self.name, self._options, start, start + wanted)
        buffer[: len(content)] = content
        self._position += len(content)
        if len(content) < wanted:
            self._size = self._position
        return len(content)


_HEADER_BYTES = 2**13  # size of a read, where only the header of a file is needed


def opened(url: str, options: Mapping[str, Any], header: bool = False) -> BinaryIO:
    """Open a file for reading; its ``name`` is its local path or URL.

    One request reads a complete remote file; with `header`, it is read by ranges.
    """
    if is_local(url):
        path = str(strip_protocol(url))
        return _on_file(lambda: open(path, "rb"), "read", url)
    if header:
        return io.BufferedReader(_Ranges(url, options), _HEADER_BYTES)
    return OpenBytes(read(url, options), url)


def read(
    url: str,
    options: Mapping[str, Any],
    start: int | None = None,
    stop: int | None = None,
) -> bytes:
    """Read a file, or the bytes from `start` to `stop`, as in a slice."""
    if start is None and stop is None and is_local(url):
        # fsspec takes twice as long for a small file.
        return _on_file(Path(strip_protocol(url)).read_bytes, "read", url)
    system, path = _system(url, options)
    content: bytes = _on_file(
        lambda: system.cat_file(path, start=start, end=stop), "read", url
    )
    return content


def _system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system of a URL, and the path on it without a trailing slash."""
    try:
        system, path = fsspec.core.url_to_fs(url, **options)
    except (ValueError, ImportError, TypeError) as error:
        raise OptionError(f"cannot open {url}: {error}") from error
    except OSError as error:  # from opening an archive
        raise DataError(f"cannot open {url}: {error!r}") from error
    return system, str(path).rstrip("/")


_THREADS = 8  # each waits for a response most of the time


def at_once(function: Callable[..., T], *arguments: Iterable[Any]) -> list[T]:
    """Call a function like `map` does, in several threads; return the results."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(function, *arguments))


def _on_file(action: Callable[[], T], verb: str, url: str) -> T:
    try:
        return attempt(action, verb, url)
    except FileNotFoundError as error:
        reason = "file" if verb == "read" else f"folder or bucket: {error}"
        raise DataError(f"cannot {verb} {url}: there is no such {reason}") from error


@dataclass(frozen=True)
class Store:
    """A folder at an fsspec URL; picklable and thread-safe.

    Requests are retried after a dropped connection (`WAITS_S`). If every attempt fails,
    a DataError names the URL of the file.

    Attributes:
        url: ``s3://bucket/x``, ``memory://x``, ``/local/path``, ``file:///...``.
        options: The file system's ``storage_options``; never shown.

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
        """Read a file, or the bytes from `start` to `stop`, as in a slice."""
        return read(self.url_of(name), self.options, start, stop)

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Write a file atomically; see `put`."""
        url = self.url_of(name)
        system, path = _system(url, self.options)
        _on_file(lambda: put(system, path, content), "write", url)

    def exists(self, name: str) -> bool:
        """Whether the file exists; False for a folder."""
        return self.size(name) is not None

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None if it does not exist."""
        return _size(self.url_of(name), self.options)

    def names(self, pattern: str = "**") -> list[str]:
        """Names of the files in the folder that match a pattern, sorted."""
        matches = re.compile(glob_translate(pattern)).fullmatch
        return [
            n for n in self._all(pattern) if not n.endswith(TEMPORARY) and matches(n)
        ]

    def folders(self) -> list[str]:
        """Names of the direct subfolders, sorted."""
        entries = self._listed("ls", detail=True)
        folders = (e["name"] for e in entries if e["type"] == "directory")
        return sorted(posixpath.basename(path.rstrip("/")) for path in folders)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; ignore missing ones."""

        def delete(url: str) -> None:
            system, path = _system(url, self.options)
            with contextlib.suppress(FileNotFoundError):
                attempt(lambda: system.rm_file(path), "delete", url)

        at_once(delete, map(self.url_of, names))

    def delete_all(self) -> None:
        """Delete all files below the folder; on a local disk, also the folder."""
        if not is_local(self.url):
            self.delete(self._all("**"))
            return
        root = strip_protocol(self.url)
        with contextlib.suppress(FileNotFoundError):
            attempt(lambda: shutil.rmtree(root), "delete", self.url)

    def url_of(self, name: str) -> str:
        """The full URL or local path of a file."""
        return joined(self.url, name)

    def _all(self, pattern: str) -> list[str]:
        options: dict[str, Any] = {}
        if is_local(self.url):
            depth = None if "**" in pattern else pattern.count("/") + 1
            options = {"on_error": "raise", "maxdepth": depth}
        prefix = f"{_system(self.url, self.options)[1]}/".lstrip("/")
        paths = (path.lstrip("/") for path in self._listed("find", **options))
        return sorted(p.removeprefix(prefix) for p in paths if p.startswith(prefix))

    def _listed(self, method: str, **options: Any) -> list[Any]:
        """Call a listing method of the file system, bypassing caches."""
        system, root = _system(self.url, self.options)

        def entries() -> list[Any]:
            system.invalidate_cache()
            return list(getattr(system, method)(root, **options))

        try:
            return attempt(entries, "list", self.url)
        except FileNotFoundError:
            return []


def _size(url: str, options: Mapping[str, Any]) -> int | None:
    """Return the size of a file in bytes, with retries; None if it does not exist."""
    system, path = _system(url, options)
    info = attempt(lambda: _info(system, path), "read", url)
    return None if info is None else info["size"]


def _info(system: Any, path: str) -> Mapping[str, Any] | None:
    """Look for a file; None if there is none. fsspec's `exists` would hide errors."""
    system.invalidate_cache()
    try:
        info: Mapping[str, Any] = system.info(path)
    except (FileNotFoundError, NotADirectoryError):  # the folder may be a file
        return None
    return info if info["type"] == "file" else None


def store_of(
    url_or_path: AnyPath, storage_options: Mapping[str, Any] | None = None
) -> Store:
    """Return the store at a URL or a local path, which is made absolute."""
    url = os.fspath(url_or_path)
    if "://" not in url and "::" not in url:
        url = str(Path(url).expanduser().absolute())
    return Store(url, dict(storage_options or {}))


def listed(
    paths: AnyPath | Sequence[AnyPath],
    pattern: str | None,
    options: Mapping[str, Any] | None,
) -> list[str]:
    """Return the URLs of the user's files, in the order of the list or sorted by name.

    Args:
        paths: A folder, a file, a pattern such as ``s3://bucket/x/*.npy``, or a list of
            files and patterns.
        pattern: Selects files of a folder, for example ``**/*.png``. None: all files
            below the folder except hidden ones: files whose name begins with a dot or
            an underscore, and files in a folder whose name begins with a dot.
        options: fsspec's ``storage_options``.
    """
    if not is_path(paths):
        entries = paths if isinstance(paths, list | tuple) else []
        if not entries or not all(map(is_path, entries)):
            raise OptionError(
                f"paths must be a path, a URL or a list of them, got {paths!r:.80}"
            )
        if pattern is not None:
            raise OptionError(
                f"pattern is for a folder, got a list of paths and {pattern!r}; write "
                "the patterns into the list"
            )
        return [url for path in entries for url in _matches(path, options)]
    store = store_of(paths, options)
    if pattern is not None:
        names, reason = store.names(pattern), f" that match {pattern!r}"
    elif is_glob(paths) or _size(store.url, store.options) is not None:
        return _matches(paths, options)
    else:
        names = [name for name in store.names() if not _is_hidden(name)]
        reason = _hint_for_text(store.url)
    if not names:
        raise DataError(f"there are no files at {store.url}{reason}")
    return [store.url_of(name) for name in names]


def _matches(path: AnyPath, options: Mapping[str, Any] | None) -> list[str]:
    """The URLs of a file, or of the files that match a pattern."""
    url = store_of(path).url
    if is_glob(path):
        folder = store_of(folder_of(url), options)
        names = folder.names(path_in(folder.url, url) or "")
        if not names:
            raise DataError(f"there are no files that match {url}")
        return [folder.url_of(name) for name in names]
    if is_local(url) and not os.path.isfile(strip_protocol(url)):
        raise DataError(f"there is no file at {url}{_hint_for_text(url)}")
    return [url]


def _hint_for_text(url: str) -> str:
    """The remedy if the user may have passed text, not a path."""
    is_text = " " in posixpath.basename(_parts(url)[1])
    return f": a str is the path or URL of files; {TEXT}" if is_text else ""


def _is_hidden(name: str) -> bool:
    *folders, last = name.split("/")
    return last.startswith((".", "_")) or any(f.startswith(".") for f in folders)
