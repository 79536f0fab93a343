"""Files at any fsspec URL: read, written at once, listed, and tried again.

fsspec opens the file systems. Here is what it leaves to its callers: a write that is
all or nothing, which errors may pass, and messages that name the URL, and the worker
and the remedy where credentials are missing. What is in the files is not looked at.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard, TypeVar

import fsspec
from fsspec.core import strip_protocol
from fsspec.utils import get_protocol, glob_translate
from typing_extensions import override

from daskdl.data.tables import TEXT
from daskdl.errors import DataError, OptionError

logger = logging.getLogger(__name__)

T = TypeVar("T")
AnyPath = str | os.PathLike[str]

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
    ("google.auth.exceptions", "GoogleAuthError"),
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
# And those that say that credentials are missing or wrong.
_REFUSED = (
    ("botocore.exceptions", "NoCredentialsError"),
    ("botocore.exceptions", "PartialCredentialsError"),
    ("botocore.exceptions", "CredentialRetrievalError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("azure.core.exceptions", "ClientAuthenticationError"),
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
_CREDENTIALS = (
    "give credentials that the workers can use with storage_options=..., or configure "
    "fsspec on the workers"
)
_UNAUTHORIZED = (401, 403)
_TOO_MANY_REQUESTS = 429
_SERVER_ERRORS = 500


def attempt(action: Callable[[], T], verb: str, url: str) -> T:
    """Do something to a URL, and again after each of `WAITS_S` while connections drop.

    Args:
        action: What to do; harmless when done twice.
        verb: What it is, for the message: ``"read"``.
        url: Also for the message.

    Raises:
        FileNotFoundError: As it came; what that means is for the caller to say.
        DataError: If it failed otherwise, or was dropped at every attempt.

    Example:
        >>> attempt(lambda: 7, "read", "memory://x")
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
                what = f"cannot {verb} {url}"
                if _is_refused(error) and not is_local(url):
                    what = f"{what} on {_here()}"
                    shown = f"{shown}; {_CREDENTIALS}"
                raise DataError(f"{what}: {shown}{count}") from error
            logger.debug("attempt to %s %s failed, again in %s s", verb, url, wait_s)
        time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def is_dropped(error: BaseException) -> bool:
    """Whether an error may be gone at the next attempt.

    Example:
        >>> is_dropped(ConnectionResetError()), is_dropped(PermissionError())
        (True, False)
    """
    if _is_refused(error):
        return False
    if isinstance(error, OSError) and not isinstance(error, _loaded(_DROPPED)):
        lasting = isinstance(error, _LASTING) or error.errno in _LASTING_NUMBERS
        return not lasting
    status = getattr(error, "status", _SERVER_ERRORS)
    passing = status >= _SERVER_ERRORS or status == _TOO_MANY_REQUESTS
    return isinstance(error, _loaded(_DROPPED)) and passing


def _is_refused(error: BaseException) -> bool:
    """Whether credentials are missing or wrong."""
    name = "status" if hasattr(error, "status") else "code"  # aiohttp, gcsfs
    status = getattr(error, name, None)
    kinds: tuple[type[Exception], ...] = (PermissionError, *_loaded(_REFUSED))
    return isinstance(error, kinds) or status in _UNAUTHORIZED


def _here() -> str:
    """The Dask worker that runs this, else the process."""
    distributed = sys.modules.get("distributed")
    if distributed is not None:
        with contextlib.suppress(ValueError):  # in a thread of our own
            return f"the worker {distributed.get_worker().address}"
        workers = list(distributed.Worker._instances)
        if len(workers) == 1:
            return f"the worker {workers[0].address}"
    return f"process {os.getpid()} of {socket.gethostname()}"


def _failures() -> tuple[type[Exception], ...]:
    return OSError, *_loaded(_FOREIGN)


def _loaded(names: Iterable[tuple[str, str]]) -> tuple[type[Exception], ...]:
    """The classes of those modules that somebody has imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in names)
    return tuple(kind for kind in found if kind is not None)


# Ends the name of a file that is being written; such files are in no listing.
TEMPORARY = ".daskdl-part"
LOCAL = frozenset({"file", "local"})
# Here one request puts a whole file, and folders need not be made.
_PUT_WHOLE = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "memory"}
)


def put(system: Any, path: str, content: bytes | memoryview) -> None:
    """Write a file; who reads meanwhile sees all of it or what was there before.

    Locally a temporary file beside it is renamed (fsspec's transactions move one from
    another disk, which is not done at once), an object store gets one put; elsewhere a
    temporary file is moved, by whatever the file system has for it.

    Args:
        system: A fsspec file system.
        path: On it; missing folders are made.
        content: All of the file.

    Raises:
        OSError: What the file system raises, and whatever else it does.
    """
    kinds = {system.protocol} if isinstance(system.protocol, str) else system.protocol
    if _PUT_WHOLE.intersection(kinds):
        system.pipe_file(path, bytes(content))
        return
    folder = path.rpartition("/")[0]
    temporary = f"{folder}/.{uuid.uuid4().hex}{TEMPORARY}"
    system.makedirs(folder, exist_ok=True)
    if not LOCAL.intersection(kinds):
        system.pipe_file(temporary, bytes(content))
        system.mv(temporary, path)
        return
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or a crash could leave the name without bytes
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


_MAGIC = re.compile(r"[*?\[]")
# A URL in three: the path, what is before it, and the archive after it.
_PARTS = re.compile(r"(?:(.*?://)(.*?)(::.*)?|(.*))", re.DOTALL)


class _Parts(NamedTuple):
    before: str  # with the slashes of its protocol
    path: str
    after: str


def _parts(url: str) -> _Parts:
    match = _PARTS.fullmatch(url)
    assert match is not None, "one alternative takes everything"
    before, path, after, local = match.groups()
    return _Parts(before or "", path if local is None else local, after or "")


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


def is_path(value: Any) -> TypeGuard[AnyPath]:
    """Whether it is a path or a URL."""
    return isinstance(value, str | os.PathLike)


def are_paths(value: Any) -> TypeGuard[AnyPath | list[AnyPath]]:
    """Whether it is a path or a URL, or a list of nothing else.

    Example:
        >>> are_paths(["a.npy", "b.npy"]), are_paths([1.0]), are_paths([])
        (True, False, False)
    """
    several = isinstance(value, list) and bool(value)
    return is_path(value) or (several and all(is_path(one) for one in value))


def is_glob(path: AnyPath) -> bool:
    """Whether it has wildcards; a local path with a bracket in its name has none."""
    url = store_of(path).url
    there = is_local(url) and os.path.exists(strip_protocol(url))
    return _MAGIC.search(_parts(url).path) is not None and not there


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
    """The folder of a file; of a pattern, the last one that has no wildcard.

    Example:
        >>> folder_of("s3://bucket/a/*/b.npy"), folder_of("memory://b.npy")
        ('s3://bucket/a', 'memory://')
    """
    before, path, after = _parts(url)
    folder = _MAGIC.split(path, maxsplit=1)[0].rpartition("/")[0]
    return f"{before}{folder or '/' * path.startswith('/')}{after}"


def common_folder(urls: Iterable[str]) -> str:
    """The deepest folder that has all of these files.

    Example:
        >>> common_folder(["s3://bucket/a/b/1", "s3://bucket/a/bc/2"])
        's3://bucket/a'
    """
    given = [_parts(_plain(url)) for url in urls]
    before, _, after = given[0]
    for other in given:
        if (other.before, other.after) != (before, after):
            shown = f"{''.join(given[0])} and {''.join(other)}"
            raise OptionError(
                f"paths must be on one file system, got {shown}; take the files of "
                "each by themselves"
            )
    paths = [one.path.lstrip("/") if before else one.path for one in given]
    top = "" if before else "/"
    common = posixpath.commonpath([path.rpartition("/")[0] or top for path in paths])
    return f"{before}{common}{after}"


def path_in(folder: str, url: str) -> str | None:
    """The path of a file relative to a folder; None if it is not in there.

    Example:
        >>> path_in("s3://bucket/a", "s3://bucket/a/b/c.png")
        'b/c.png'
    """
    above, own = _parts(_plain(folder)), _parts(_plain(url))
    inside = posixpath.join(above.path, "").lstrip("/")
    path = own.path.lstrip("/")
    same = (above.before, above.after) == (own.before, own.after)
    return path.removeprefix(inside) if same and path.startswith(inside) else None


def _plain(url: str) -> str:
    """Without the protocol of local files."""
    return str(strip_protocol(url)) if is_local(url) else url


class OpenBytes(io.BytesIO):
    """The content of a file, open for reading like the file itself.

    Attributes:
        name: The URL of the file.
    """

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name

    @override
    def __repr__(self) -> str:
        return self.name  # in messages of Pillow


class _Ranges(io.RawIOBase):
    """A file that is read by ranges, each tried again like a whole one."""

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
            size = size_of(self.name, self._options)
            self._size, offset = size, offset + size
        self._position = offset + (self._position if whence == io.SEEK_CUR else 0)
        return self._position

    @override
    def tell(self) -> int:
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


_HEADER_BYTES = 2**13  # at a time, of a file of which only the header is read


def opened(url: str, options: Mapping[str, Any], header: bool = False) -> BinaryIO:
    """Open a file; what is not local is read whole, in one request.

    Args:
        url: Of the file.
        options: Of the file system.
        header: Whether it is to be read by ranges instead.

    Returns:
        A binary file whose ``name`` is the local path, or the URL.

    Raises:
        DataError: If it is not there, or cannot be read.
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


def _on_file(action: Callable[[], T], verb: str, url: str) -> T:
    try:
        return attempt(action, verb, url)
    except FileNotFoundError as error:
        reason = "file" if verb == "read" else f"folder or bucket: {error}"
        raise DataError(f"cannot {verb} {url}: there is no such {reason}") from error


_DELETED_AT_A_TIME = 8  # each is a request that mostly waits


@dataclass(frozen=True)
class Store:
    """A folder at a fsspec URL. It pickles; any thread may use it.

    A dropped connection is tried again a few times (`WAITS_S`). What fails then raises
    a DataError that names the URL of the file.

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
        """Read a file, or the bytes from start up to stop as in a slice."""
        return read(self.url_of(name), self.options, start, stop)

    def write(self, name: str, content: bytes | memoryview) -> None:
        """Write a file at once; see `put`."""
        url = self.url_of(name)
        system, path = _system(url, self.options)
        _on_file(lambda: put(system, path, content), "write", url)

    def exists(self, name: str) -> bool:
        """Whether there is such a file; of a folder False."""
        return _found(self.url_of(name), self.options) is not None

    def is_file(self) -> bool:
        """Whether there is a file where the folder would be."""
        return _found(self.url, self.options) is not None

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return size_of(self.url_of(name), self.options)

    def names(self, pattern: str = "**") -> list[str]:
        """Files in the folder as it is now, relative to it and sorted."""
        matches = re.compile(glob_translate(pattern)).fullmatch
        return [
            n for n in self._all(pattern) if not n.endswith(TEMPORARY) and matches(n)
        ]

    def folders(self) -> list[str]:
        """Names of the folders that are directly in it, sorted."""
        system, root = _system(self.url, self.options)
        entries: list[Mapping[str, Any]] = []
        with contextlib.suppress(FileNotFoundError):
            entries = attempt(lambda: system.ls(root, detail=True), "list", self.url)
        paths = [e["name"].rstrip("/") for e in entries if e["type"] == "directory"]
        return sorted(path.rpartition("/")[2] for path in paths)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; those that are not there are passed over."""

        def delete(url: str) -> None:
            system, path = _system(url, self.options)
            with contextlib.suppress(FileNotFoundError):
                attempt(lambda: system.rm_file(path), "delete", url)

        with ThreadPoolExecutor(_DELETED_AT_A_TIME) as pool:
            list(pool.map(delete, map(self.url_of, names)))

    def delete_all(self) -> None:
        """Delete every file below the folder; locally the folder too."""
        if not self.is_local:
            self.delete(self._all("**"))
            return
        root = strip_protocol(self.url)
        with contextlib.suppress(FileNotFoundError):
            attempt(lambda: shutil.rmtree(root), "delete", self.url)

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
        system, root = _system(self.url, self.options)
        path = os.path.realpath(root) if self.is_local else root
        return str(system.unstrip_protocol(path)).rstrip("/")

    def _all(self, pattern: str) -> list[str]:
        system, root = _system(self.url, self.options)
        more: dict[str, Any] = {}
        if self.is_local:
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
    """What the file system says about a file; not `exists`, which hides errors."""
    system, path = _system(url, options)

    def looked() -> Mapping[str, Any] | None:
        system.invalidate_cache()
        try:
            found: Mapping[str, Any] = system.info(path)
        except NotADirectoryError:  # the folder is a file
            return None
        return found if found["type"] == "file" else None

    try:
        return attempt(looked, "read", url)
    except FileNotFoundError:
        return None


def size_of(url: str, options: Mapping[str, Any]) -> int:
    """Bytes of a file."""
    found = _found(url, options)
    if found is None:
        raise DataError(f"cannot read {url}: there is no such file")
    return int(found["size"])


def store_of(
    url_or_path: AnyPath, storage_options: Mapping[str, Any] | None = None
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


def listed(
    given: AnyPath | Sequence[AnyPath],
    pattern: str | None,
    options: Mapping[str, Any] | None,
) -> list[str]:
    """URLs of all files that are meant, in the order of the list, or sorted by name.

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
    if pattern is None and (is_glob(given) or store.is_file()):
        return _entry(given, options)
    names = store.names("**" if pattern is None else pattern)
    if pattern is None:
        names = [name for name in names if not _is_hidden(name)]
    if not names:
        shown = _taken(store.url) if pattern is None else f" that match {pattern!r}"
        raise DataError(f"there are no files at {store.url}{shown}")
    return [store.url_of(name) for name in names]


def _entry(path: AnyPath, options: Mapping[str, Any] | None) -> list[str]:
    """One entry of a list: a file, or a pattern seen from the folder in front of it."""
    url = store_of(path).url
    if is_glob(path):
        folder = store_of(folder_of(url), options)
        inside = _parts(url).path.removeprefix(_parts(folder.url).path).lstrip("/")
        names = folder.names(inside)
        if not names:
            raise DataError(f"there are no files that match {url}")
        return [folder.url_of(name) for name in names]
    if is_local(url) and not os.path.isfile(strip_protocol(url)):
        raise DataError(f"there is no file at {url}{_taken(url)}")
    return [url]


def _taken(url: str) -> str:
    """The remedy for what is rather text than a path."""
    text = " " in _parts(url).path.rpartition("/")[2]
    return f": a str is the path or URL of files; {TEXT}" if text else ""


def _is_hidden(name: str) -> bool:
    *folders, last = name.split("/")
    return last.startswith((".", "_")) or any(f.startswith(".") for f in folders)
