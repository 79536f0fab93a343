"""Parts that cannot be read: which errors say so, and what is done about such a part.

Whoever loads parts asks here, so that all leave out the same ones.
"""

import csv
import logging
import lzma
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from daskdl.data import batching
from daskdl.data.batching import Rows
from daskdl.data.rehearsal import MISFITS
from daskdl.errors import DaskDLError, DataError, LostPieceError

logger = logging.getLogger(__name__)

# What reading raises, whoever does it. Not Exception: what is none of these says
# nothing about the data, and should be seen under its own name.
UNREADABLE = (
    *MISFITS,
    OSError,
    EOFError,
    SyntaxError,  # Pillow's, of a damaged PNG
    csv.Error,
    lzma.LZMAError,
    pickle.UnpicklingError,
    struct.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
)


def blames_data(error: BaseException) -> bool:
    """Whether it says that the data are bad, rather than what else is to be changed.

    Example:
        >>> blames_data(ValueError("torn")), blames_data(DataError("torn"))
        (True, True)
        >>> from daskdl.errors import OptionError
        >>> blames_data(OptionError("images are decoded with Pillow; install it"))
        False
    """
    if isinstance(error, DaskDLError):
        return isinstance(error, DataError) and not isinstance(error, LostPieceError)
    return True


def is_left_out(error: BaseException, name: str, skips: bool) -> bool:
    """Whether a part is done without; the log says so, else the error names it.

    Args:
        error: One of `UNREADABLE`; gets a note if it is to be raised again.
        name: Of the part.
        skips: Whether parts that cannot be read are left out.
    """
    if not skips or not blames_data(error):
        if not getattr(error, "__notes__", None):  # else it is in a part of this part
            error.add_note(f"in {name}")
        return False
    logger.warning("%s is left out: %s", name, error)
    return True


def separated(
    separate: Sequence[tuple[str, Callable[[], Rows]]], skips: bool
) -> Iterator[tuple[str, Rows]]:
    """Yield name and rows of each of the things that a part is made of.

    Args:
        separate: See `Source.separate`.
        skips: Whether those that cannot be read are left out; else the error names it.
    """
    for name, load in separate:
        try:
            rows = load()
        except UNREADABLE as error:
            if not is_left_out(error, name, skips):
                raise
            continue
        yield name, rows


def joined_files(
    files: Iterator[tuple[str, Rows]], check: Callable[[Rows, str], None] | None = None
) -> tuple[Rows | None, int]:
    """Put what is left of a part together.

    Args:
        files: Name and rows of each thing in it that can be read.
        check: Raises one of `UNREADABLE` if rows cannot be used.

    Returns:
        The rows, None if there are none, and of how many things. All have the shapes
        that most of them have; the log has the others, too.
    """
    good: list[tuple[str, Rows]] = []
    for url, rows in files:
        try:
            if check is not None:
                check(rows, url)
        except UNREADABLE as error:
            if not is_left_out(error, url, skips=True):
                raise
            continue
        good.append((url, rows))
    if not good:
        return None, 0
    ((most, _),) = Counter(batching.kinds(rows) for _, rows in good).most_common(1)
    for url, rows in good:
        if batching.kinds(rows) != most:
            logger.warning("%s is left out: its rows have other shapes", url)
    alike = [rows for _, rows in good if batching.kinds(rows) == most]
    return batching.joined_rows(alike), len(alike)
