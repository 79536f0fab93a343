"""Zip and tar files in memory: made always the same, and where in them each file is.

Nothing is compressed, so that a file is a range of bytes. The same files in the same
order give the same bytes: no times, no owners.
"""

import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from daskdl.errors import DataError, OptionError

ARCHIVES = ("zip", "tar")

_LOCAL_HEADER = 30  # bytes before a file's name in a zip; the lengths are its last four
_READABLE = 0o644 << 16
_UNIX = 3


class Member(NamedTuple):
    """One file in an archive.

    Attributes:
        name: Its relative path.
        start: Where its content begins in the archive, bytes.
        size: Of its content, bytes.
        crc32: Of its content.
    """

    name: str
    start: int
    size: int
    crc32: int


def check_archive(archive: str) -> None:
    """Refuse a kind of archive that is not known.

    Raises:
        OptionError: If it is neither "zip" nor "tar".
    """
    if archive not in ARCHIVES:
        raise OptionError(f'format must be "zip" or "tar", got {archive!r}')


def archived(files: Iterable[tuple[str, bytes]], archive: str) -> bytes:
    """Put files into an archive.

    Args:
        files: Pairs (relative path, content), no path twice.
        archive: "zip" or "tar".

    Example:
        >>> content = archived([("a/b.txt", b"hello")], "zip")
        >>> [(m.name, m.size) for m in members_of(content, "zip", "x.zip")]
        [('a/b.txt', 5)]
    """
    target = io.BytesIO()
    {"zip": _zip, "tar": _tar}[archive](target, files)
    return target.getvalue()


def members_of(content: bytes, archive: str, url: str) -> tuple[Member, ...]:
    """Find the files in an archive.

    Args:
        content: Of the archive.
        archive: "zip" or "tar".
        url: Of the archive, for messages.

    Raises:
        DataError: If it is damaged.
    """
    ranges: Callable[[bytes], Iterator[tuple[str, int, int]]]
    ranges = {"zip": _zip_ranges, "tar": _tar_ranges}[archive]
    whole = memoryview(content)
    try:
        return tuple(
            Member(name, start, size, zlib.crc32(whole[start : start + size]))
            for name, start, size in ranges(content)
        )
    except (zipfile.BadZipFile, tarfile.TarError, struct.error, EOFError) as error:
        raise DataError(f"cannot read {url}: {error}") from error


def _zip(target: io.BytesIO, files: Iterable[tuple[str, bytes]]) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as made:
        for name, content in files:
            entry = zipfile.ZipInfo(name)  # of 1980, as a tar's is of 1970
            entry.external_attr, entry.create_system = _READABLE, _UNIX
            made.writestr(entry, content)


def _tar(target: io.BytesIO, files: Iterable[tuple[str, bytes]]) -> None:
    with tarfile.open(fileobj=target, mode="w:") as made:
        for name, content in files:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            made.addfile(entry, io.BytesIO(content))


def _zip_ranges(content: bytes) -> Iterator[tuple[str, int, int]]:
    with zipfile.ZipFile(io.BytesIO(content)) as found:
        for entry in found.infolist():
            header = entry.header_offset + _LOCAL_HEADER
            name, extra = struct.unpack("<HH", content[header - 4 : header])
            yield entry.filename, header + name + extra, entry.file_size


def _tar_ranges(content: bytes) -> Iterator[tuple[str, int, int]]:
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as found:
        for entry in found:
            yield entry.name, entry.offset_data, entry.size
