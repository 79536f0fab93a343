"""Files at any fsspec URL: read, written atomically and listed, with retries.

fsspec opens the file systems. This module adds atomic writes, retries after transient
errors, and messages that name the URL, and also the worker and the remedy where
credentials are missing.
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

# Seconds before each retry. Most drops are short; a run must not hang on one file while
# a server is unreachable for longer.
WAITS_S = (0.1, 0.4, 1.6)

# No retry begins after this many seconds: s3fs and botocore retry too, by default for
# half a minute, which must not be multiplied.
ENOUGH_S = 20.0

# The libraries below fsspec's file systems, whose errors need not be OSErrors.
_LIBRARIES = frozenset(
    {"aiohttp", "azure", "botocore", "gcsfs", "google", "http", "urllib3"}
)
# Their errors that mean that a connection failed, by module and name,
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
# and the errors that mean that credentials are missing or wrong.
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
    """Call a function, and again after each of `WAITS_S` while connections drop.

    Raises:
        FileNotFoundError: Unchanged; the caller knows its meaning.
        DataError: If another error occurs, or the connection drops each time.
    """
    began = time.monotonic()
    for times, wait_s in enumerate((*WAITS_S, math.inf), 1):
        try:
            return action()
        except FileNotFoundError:
            raise
        except Exception as error:
            names = {f"{one.__module__}.{one.__name__}" for one in type(error).__mro__}
            libraries = {name.partition(".")[0] for name in names}
            if not isinstance(error, OSError) and not libraries & _LIBRARIES:
                raise
            refused = not names.isdisjoint(_REFUSED) or _status(error) in _UNAUTHORIZED
            dropped = not refused and _is_dropped(error, names)
            if not dropped or time.monotonic() - began + wait_s > ENOUGH_S:
                shown = f"{type(error).__name__}: {error}".removesuffix(": ")
                where = f"cannot {verb} {url}"
                if refused and not is_local(url):
                    where, shown = f"{where} on {_here()}", f"{shown}; {_CREDENTIALS}"
                count = f" (attempts: {times})" if dropped else ""
                raise DataError(f"{where}: {shown}{count}") from error
            logger.debug("attempt to %s %s failed, again in %s s", verb, url, wait_s)
        time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def _status(error: Exception) -> Any:
    """The HTTP status of an error of aiohttp, whose `code` warns, or gcsfs; or None."""
    name = "status" if hasattr(error, "status") else "code"
    return getattr(error, name, None)


def _is_dropped(error: Exception, names: Set[str]) -> bool:
    """Whether an error may be transient."""
    if not names.isdisjoint(_DROPPED):
        status = getattr(error, "status", _SERVER_ERRORS)
        return bool(status >= _SERVER_ERRORS or status == _TOO_MANY_REQUESTS)
    lasting = isinstance(error, _LASTING) or (
        isinstance(error, OSError) and error.errno in _LASTING_NUMBERS
    )
    return isinstance(error, OSError) and not lasting


def _here() -> str:
    """The Dask worker of this process if there is one, else the process."""
    distributed = sys.modules.get("distributed")
    # Private in distributed: `get_worker` knows the worker only within a task.
    workers = list(distributed.Worker._instances) if distributed else []
    if len(workers) == 1:
        return f"the worker {workers[0].address}"
    return f"process {os.getpid()} of {socket.gethostname()}"


# Suffix of a file that is being written; listings omit such files.
TEMPORARY = ".daskdl-part"
LOCAL = frozenset({"file", "local"})
# Here one request puts a whole file, and folders need not be created.
_PUT_WHOLE = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "memory"}
)


def put(system: Any, path: str, content: bytes | memoryview) -> None:
    """Write a file atomically, and make missing folders.

    On a local disk, a temporary file beside the target is renamed (fsspec's
    transactions move a file from another disk, which is not atomic). An object store
    gets one put. On other file systems, a temporary file is moved by their own
    operation; where that does not replace a file, the old file is deleted first, and
    the replacement is not atomic.
    """
    kinds = {system.protocol} if isinstance(system.protocol, str) else system.protocol
    if _PUT_WHOLE.intersection(kinds):
        system.pipe_file(path, bytes(content))
        return
    folder = path.rpartition("/")[0]
    temporary = f"{folder}/.{uuid.uuid4().hex}{TEMPORARY}"
    system.makedirs(folder, exist_ok=True)
    if not LOCAL.intersection(kinds):
        try:
            system.pipe_file(temporary, bytes(content))
            _replace(system, temporary, path)
        finally:
            with contextlib.suppress(Exception):  # after a move there is none
                system.rm_file(temporary)
        return
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or a crash could leave the name without bytes
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _replace(system: Any, temporary: str, path: str) -> None:
    """Move a file, also where a rename onto an existing file fails or does nothing."""
    try:
        _move(system, temporary, path)
    except (ConnectionError, TimeoutError, PermissionError):
        raise  # the file at the path is not the reason
    except (OSError, RuntimeError):  # the latter of WebHDFS
        if _info(system, temporary) is None or _info(system, path) is None:
            raise
        system.rm_file(path)
        _move(system, temporary, path)


def _move(system: Any, temporary: str, path: str) -> None:
    system.mv(temporary, path)
    if _info(system, temporary) is not None:  # WebHDFS returns false, fsspec nothing
        raise OSError(f"{temporary} could not be renamed")


_MAGIC = re.compile(r"[*?\[]")
# Three parts of a URL: protocol with its slashes, path, and the archive after it.
_PARTS = re.compile(r"(.*?://)?(.*?)(::.*)?", re.DOTALL)


def _parts(url: str) -> Sequence[str]:
    match = _PARTS.fullmatch(url)
    assert match is not None, "the path may be anything"
    return match.groups("")


def is_url(value: Any) -> bool:
    """Whether a value is a string with a protocol in front."""
    return isinstance(value, str) and ("://" in value or "::" in value)


def is_local(url: str) -> bool:
    """Whether a URL or path is on the disks of this machine."""
    return get_protocol(url) in LOCAL


def is_path(value: Any) -> TypeGuard[AnyPath]:
    """Whether a value is a path or a URL."""
    return isinstance(value, str | os.PathLike)


def are_paths(value: Any) -> TypeGuard[AnyPath | list[AnyPath]]:
    """Whether a value is a path or a URL, or a list of them."""
    several = isinstance(value, list) and bool(value)
    return is_path(value) or (several and all(is_path(one) for one in value))


def is_glob(path: AnyPath) -> bool:
    """Whether a path has wildcards; an existing local file or folder has none."""
    url = store_of(path).url
    there = is_local(url) and os.path.exists(strip_protocol(url))
    return _MAGIC.search(_parts(url)[1]) is not None and not there


def joined(folder: str, name: str) -> str:
    """The URL of a file or folder in a folder.

    Example:
        >>> joined("s3://bucket/a/", "b.npy"), joined("memory://", "b.npy")
        ('s3://bucket/a/b.npy', 'memory://b.npy')
    """
    before, path, after = _parts(folder)
    base = path.rstrip("/")
    inside = f"{base}/" if base or not before else path
    return f"{before}{inside}{name}{after}"


def folder_of(url: str) -> str:
    """The folder of a file; for a pattern, the last one without a wildcard.

    Example:
        >>> folder_of("s3://bucket/a/*/b.npy"), folder_of("memory://b.npy")
        ('s3://bucket/a', 'memory://')
    """
    before, path, after = _parts(url)
    folder = _MAGIC.split(path, maxsplit=1)[0].rpartition("/")[0]
    return f"{before}{folder or '/' * path.startswith('/')}{after}"


def common_folder(urls: Iterable[str]) -> str:
    """The deepest folder that contains all of these files.

    Example:
        >>> common_folder(["s3://bucket/a/b/1", "s3://bucket/a/bc/2"])
        's3://bucket/a'
    """
    files = [_parts(_plain(url)) for url in urls]
    before, _, after = files[0]
    for other in files:
        if (other[0], other[2]) != (before, after):
            shown = f"{''.join(files[0])} and {''.join(other)}"
            raise OptionError(
                f"paths must be on one file system, got {shown}; take the files of "
                "each by themselves"
            )
    # Behind a protocol, a slash in front means nothing.
    paths = [path.lstrip("/") if before else path for _, path, _ in files]
    common = posixpath.commonpath([posixpath.dirname(path) for path in paths])
    return f"{before}{common}{after}"


def path_in(folder: str, url: str) -> str | None:
    """The path of a file relative to a folder; None if it is elsewhere.

    Example:
        >>> path_in("s3://bucket/a", "s3://bucket/a/b/c.png")
        'b/c.png'
    """
    before, above, after = _parts(_plain(folder))
    own_before, own, own_after = _parts(_plain(url))
    inside, path = posixpath.join(above, "").lstrip("/"), own.lstrip("/")
    same = (before, after) == (own_before, own_after)
    return path.removeprefix(inside) if same and path.startswith(inside) else None


def resolved(url: str) -> str:
    """Return a local path without links, and any other URL as it is."""
    return os.path.realpath(strip_protocol(url)) if is_local(url) else url


def _plain(url: str) -> str:
    """Without the protocol of local files, and normalised."""
    return os.path.normpath(str(strip_protocol(url))) if is_local(url) else url


class OpenBytes(io.BytesIO):
    """The content of a file, open like the file itself; `name` is its URL."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name: str = name

    @override
    def __repr__(self) -> str:
        return self.name  # in messages of Pillow


class _Ranges(io.RawIOBase):
    """A file that is read by ranges, with retries for each range."""

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
            found = _found(self.name, self._options)
            if found is None:
                raise DataError(f"cannot read {self.name}: there is no such file")
            self._size = self._position = found["size"]
        elif whence == io.SEEK_SET:
            self._position = 0
        self._position += offset
        return self._position

    @override
    def readinto(self, buffer: Any) -> int:
        start, wanted = self._position, len(buffer)
        if start >= self._size:  # object stores refuse a range without bytes
            return 0
        content = read(self.name, self._options, start, start + wanted)
        buffer[: len(content)] = content
        self._position += len(content)
        if len(content) < wanted:
            self._size = self._position
        return len(content)


_HEADER_BYTES = 2**13  # read at a time from a file whose header alone is needed


def opened(url: str, options: Mapping[str, Any], header: bool = False) -> BinaryIO:
    """Open a file, whose ``name`` is then its local path or URL.

    A remote file is read whole, in one request; with `header`, by ranges.
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
    """Read a file, or the bytes from start up to stop as in a slice."""
    if start is None and stop is None and is_local(url):
        # Without fsspec, which takes twice as long for a small file.
        return _on_file(Path(strip_protocol(url)).read_bytes, "read", url)
    system, path = _system(url, options)
    content: bytes = _on_file(
        lambda: system.cat_file(path, start=start, end=stop), "read", url
    )
    return content


def _system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system of a URL, and the path on it without a slash at its end."""
    try:
        system, path = fsspec.core.url_to_fs(url, **options)
    except (ValueError, ImportError, TypeError) as error:
        raise OptionError(f"cannot open {url}: {error}") from error
    except OSError as error:  # an archive that has the file
        raise DataError(f"cannot open {url}: {error!r}") from error
    return system, str(path).rstrip("/")


_AT_A_TIME = 8  # each is a request that mostly waits


def at_once(function: Callable[..., T], *arguments: Iterable[Any]) -> list[T]:
    """Call a function as `map` does, in several threads, and return the results."""
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return list(pool.map(function, *arguments))


def _on_file(action: Callable[[], T], verb: str, url: str) -> T:
    try:
        return attempt(action, verb, url)
    except FileNotFoundError as error:
        reason = "file" if verb == "read" else f"folder or bucket: {error}"
        raise DataError(f"cannot {verb} {url}: there is no such {reason}") from error


@dataclass(frozen=True)
class Store:
    """A folder at a fsspec URL. It pickles; any thread may use it.

    After a dropped connection, requests are repeated a few times (`WAITS_S`). If all
    fail, a DataError names the URL of the file.

    Attributes:
        url: ``s3://bucket/x``, ``memory://x``, ``/local/path``, ``file:///...``.
        options: fsspec's ``storage_options`` of the file system; never shown.

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
        """Read a file, or the bytes from start up to stop as in a slice."""
        return read(self.url_of(name), self.options, start, stop)

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Write a file atomically; see `put`."""
        url = self.url_of(name)
        system, path = _system(url, self.options)
        _on_file(lambda: put(system, path, content), "write", url)

    def exists(self, name: str) -> bool:
        """Whether the file exists; False for a folder."""
        return _found(self.url_of(name), self.options) is not None

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if it does not exist."""
        found = _found(self.url_of(name), self.options)
        return None if found is None else found["size"]

    def names(self, pattern: str = "**") -> list[str]:
        """Names of the files that are in the folder now, sorted."""
        matches = re.compile(glob_translate(pattern)).fullmatch
        return [
            n for n in self._all(pattern) if not n.endswith(TEMPORARY) and matches(n)
        ]

    def folders(self) -> list[str]:
        """Names of the direct subfolders, sorted."""
        system, root = _system(self.url, self.options)

        def listed() -> list[Mapping[str, Any]]:
            system.invalidate_cache()
            found: list[Mapping[str, Any]] = system.ls(root, detail=True)
            return found

        entries: list[Mapping[str, Any]] = []
        with contextlib.suppress(FileNotFoundError):
            entries = attempt(listed, "list", self.url)
        paths = [e["name"].rstrip("/") for e in entries if e["type"] == "directory"]
        return sorted(path.rpartition("/")[2] for path in paths)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; missing files are ignored."""

        def delete(url: str) -> None:
            system, path = _system(url, self.options)
            with contextlib.suppress(FileNotFoundError):
                attempt(lambda: system.rm_file(path), "delete", url)

        at_once(delete, map(self.url_of, names))

    def delete_all(self) -> None:
        """Delete every file below the folder, and the folder itself on a local disk."""
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
        system, root = _system(self.url, self.options)
        more: dict[str, Any] = {}
        if is_local(self.url):
            depth = None if "**" in pattern else pattern.count("/") + 1
            more = {"on_error": "raise", "maxdepth": depth}

        def listed() -> list[str]:
            system.invalidate_cache()
            return [str(path) for path in system.find(root, **more)]

        paths: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            paths = attempt(listed, "list", self.url)
        inside = f"{root}/".lstrip("/")
        found = (path.lstrip("/") for path in paths)
        return sorted(p.removeprefix(inside) for p in found if p.startswith(inside))


def _found(url: str, options: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Look for a file at a URL, with retries; see `_info`."""
    system, path = _system(url, options)
    return attempt(lambda: _info(system, path), "read", url)


def _info(system: Any, path: str) -> Mapping[str, Any] | None:
    """Look for a file; None if there is none. fsspec's `exists` would hide errors."""
    system.invalidate_cache()
    try:
        found: Mapping[str, Any] = system.info(path)
    except (FileNotFoundError, NotADirectoryError):  # the folder may be a file
        return None
    return found if found["type"] == "file" else None


def store_of(
    url_or_path: AnyPath, storage_options: Mapping[str, Any] | None = None
) -> Store:
    """The store at a URL or a local path; a relative one is made absolute."""
    url = os.fspath(url_or_path)
    if not is_url(url):
        url = str(Path(url).expanduser().absolute())
    return Store(url, dict(storage_options or {}))


def listed(
    given: AnyPath | Sequence[AnyPath],
    pattern: str | None,
    options: Mapping[str, Any] | None,
) -> list[str]:
    """Return URLs of the user's files, in the order of the list, or sorted by name.

    Args:
        given: A folder, a file, a pattern such as ``s3://bucket/x/*.npy``, or a list
            of files and patterns.
        pattern: Which files of a folder, for example ``**/*.png``. None: all files
            below the folder, except files whose name begins with a dot or an
            underscore, and files in a folder whose name begins with a dot.
        options: Of the file system.
    """
    if not is_path(given):
        entries = given if isinstance(given, list | tuple) else []
        if not entries or not all(is_path(path) for path in entries):
            raise OptionError(
                f"paths must be a path, a URL or a list of them, got {given!r:.80}"
            )
        if pattern is not None:
            raise OptionError(
                f"pattern is for a folder, got a list of paths and {pattern!r}; write "
                "the patterns into the list"
            )
        return [url for path in entries for url in _entry(path, options)]
    store = store_of(given, options)
    if pattern is None and (is_glob(given) or _found(store.url, store.options)):
        return _entry(given, options)
    names = store.names("**" if pattern is None else pattern)
    if pattern is None:
        names = [name for name in names if not _is_hidden(name)]
    if not names:
        shown = _taken(store.url) if pattern is None else f" that match {pattern!r}"
        raise DataError(f"there are no files at {store.url}{shown}")
    return [store.url_of(name) for name in names]


def _entry(path: AnyPath, options: Mapping[str, Any] | None) -> list[str]:
    """The files of a path, or of a pattern relative to its last plain folder."""
    url = store_of(path).url
    if is_glob(path):
        folder = store_of(folder_of(url), options)
        names = folder.names(path_in(folder.url, url) or "")
        if not names:
            raise DataError(f"there are no files that match {url}")
        return [folder.url_of(name) for name in names]
    if is_local(url) and not os.path.isfile(strip_protocol(url)):
        raise DataError(f"there is no file at {url}{_taken(url)}")
    return [url]


def _taken(url: str) -> str:
    """The remedy if the user may have meant text, not a path."""
    text = " " in _parts(url)[1].rpartition("/")[2]
    return f": a str is the path or URL of files; {TEXT}" if text else ""


def _is_hidden(name: str) -> bool:
    *folders, last = name.split("/")
    return last.startswith((".", "_")) or any(f.startswith(".") for f in folders)
