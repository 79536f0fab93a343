"""Parts that cannot be read: the errors that data cause, and the rows that are left.

With ``on_bad_batch="skip"``, an unreadable part is left out, except for its readable
pieces.
"""

import logging
import lzma
import pickle
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from daskdl.data import batching
from daskdl.data.batching import Rows
from daskdl.data.formats import DAMAGED
from daskdl.data.source import Pieces, Source
from daskdl.errors import DaskDLError, DataError, LostPieceError

logger = logging.getLogger(__name__)

# Exceptions raised by user code that does not fit the data. Other exceptions have
# another cause, and keep their name and traceback.
USER_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    UserWarning,
)

# Exceptions raised by reading. Other exceptions say nothing about the data.
UNREADABLE: tuple[type[Exception], ...] = (
    *USER_ERRORS,
    *DAMAGED,
    lzma.LZMAError,
    pickle.UnpicklingError,
    tarfile.TarError,
)


def blames_data(error: BaseException) -> bool:
    """Whether an error is caused by bad data, not by another mistake."""
    if isinstance(error, DaskDLError):
        return isinstance(error, DataError) and not isinstance(error, LostPieceError)
    return True


def is_left_out(
    error: BaseException, name: str, skips: bool, pieces: Pieces = ()
) -> bool:
    """Return whether an unreadable part is left out; log it, or annotate the error.

    A part is left out if `skips` is true and the data cause the error. Otherwise the
    name of the part is added to the error. If the part has `pieces`, the caller
    loads them one by one, and only the bad pieces are logged.
    """
    if not skips or not blames_data(error):
        if not getattr(error, "__notes__", None):  # a piece of this part may be named
            error.add_note(f"in {name}")
        return False
    if not pieces:
        logger.warning("%s is left out: %s", name, error)
    return True


def load_each(pieces: Pieces, skips: bool) -> Iterator[tuple[str, Rows]]:
    """Load the pieces of a part, as of `Source.pieces`; yield names and rows."""
    for name, load in pieces:
        try:
            rows = load()
        except UNREADABLE as error:
            if not is_left_out(error, name, skips):
                raise
            continue
        yield name, rows


def consistent_pieces(
    files: Iterable[tuple[str, Rows]], check: Callable[[Rows, str], None] | None = None
) -> list[tuple[str, Rows]]:
    """Return the files whose rows pass a check and have the most frequent shapes.

    Args:
        files: Names and rows of readable files.
        check: Raises one of `UNREADABLE` if rows cannot be used.
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
        return []
    ((most, _),) = Counter(batching.row_spec(rows) for _, rows in good).most_common(1)
    for url, rows in good:
        if batching.row_spec(rows) != most:
            logger.warning("%s is left out: its rows have other shapes", url)
    return [(url, rows) for url, rows in good if batching.row_spec(rows) == most]


def join_readable(
    files: Iterable[tuple[str, Rows]], check: Callable[[Rows, str], None] | None = None
) -> tuple[Rows | None, int]:
    """Join the rows of consistent files; return them or None, and the file count."""
    alike = [rows for _, rows in consistent_pieces(files, check)]
    return batching.joined(alike) if alike else None, len(alike)


def stream_readable(
    source: Source,
    part: int,
    rows: int,
    check: Callable[[Rows, str], None],
    skips: bool,
) -> Iterator[Rows]:
    """Stream a part as `Source.stream` does, and check its rows.

    With `skips`, a part that fails yields its readable pieces, see `join_readable`; a
    stream that fails ends with the rows before the error.
    """
    name = source.name(part)
    try:
        for some in source.stream(part, rows):
            check(some, name)
            yield some
    except UNREADABLE as error:
        pieces = source.pieces(part) if skips else ()
        if not is_left_out(error, name, skips, pieces):
            raise
        left, _ = join_readable(load_each(pieces, skips=True), check)
        if left is not None:
            yield left
