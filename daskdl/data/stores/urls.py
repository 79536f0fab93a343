"""URLs and local paths of files as text: folders, names, patterns.

No file system is asked. Of a chain as ``zip://a/b.npy::s3://bucket/x.zip`` the first
URL has the path of the file.
"""

import itertools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from fsspec.core import strip_protocol
from fsspec.utils import get_protocol

from daskdl.data.stores.puts import LOCAL
from daskdl.errors import OptionError

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
