"""What is wrong with one part: the task that is run where the part is."""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from daskdl.data.batching import Rows
from daskdl.data.checking.expectations import Expectations
from daskdl.data.checking.files import OfFiles
from daskdl.data.checking.report import OF_PARTS, SHOWN, Offender
from daskdl.data.checking.rows import Examined, Wrong, examine
from daskdl.data.faults import UNREADABLE, blames_data
from daskdl.data.source import STREAMED_ROWS, Source, rows_of_part
from daskdl.errors import DataError, ShapeError


@dataclass
class Findings:
    """What is wrong with one part.

    Attributes:
        rows: That could be read.
        files: It is made of; 0: it is not made of files.
        counts: By kind; see `Report`.
        offenders: The first ones, in order.
        wrong_files: Those that are there, and have something wrong with them.
    """

    rows: int = 0
    files: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    offenders: list[Offender] = field(default_factory=list)
    wrong_files: list[int] = field(default_factory=list)

    def add(self, name: str, found: Examined) -> None:
        """Add what was found in a file, or in all of it."""
        self.rows += found.rows
        self.counts += found.counts
        few = heapq.nsmallest(SHOWN - len(self.offenders), found.wrong, Wrong.place)
        self.offenders += [Offender(name, *one) for one in few]


def findings_of(source: Source, part: int, expectations: Expectations) -> Findings:
    """Load a part and look at all of it.

    Args:
        source: What it is a part of.
        part: Its number, from 0.
        expectations: What it is to be like.
    """
    found = Findings()
    urls = source.file_urls(part) if isinstance(source, OfFiles) else ()
    found.files = len(urls)
    for file, name in enumerate(urls or [source.name(part)]):
        own = file if len(urls) > 1 else None
        examined = _examined(_loaded(source, part, own), expectations)
        found.add(name, examined)
        if urls and examined.counts.total() > examined.counts["missing"]:
            found.wrong_files.append(file)
    return found


def _examined(loaded: Iterator[Rows], expectations: Expectations) -> Examined:
    """All that is loaded, one after the other, up to an error."""
    total = Examined(0, Counter(), [])
    while True:
        try:
            rows = next(loaded, None)
        except UNREADABLE as error:
            if not blames_data(error):
                raise  # it says what the caller has to change
            kind = _kind(error)
            wrong = Wrong(None, kind, _shown(error))
            return _together(total, Examined(0, Counter([kind]), [wrong]))
        if rows is None:
            return total
        total = _together(total, examine(rows, expectations, total.rows))


def _together(total: Examined, more: Examined) -> Examined:
    """With rows that come later; a wrong shape of theirs counts once."""
    counts = total.counts + more.counts
    counts.subtract(k for k in OF_PARTS if total.counts[k] and more.counts[k])
    new = [w for w in more.wrong if w.row is not None or not total.counts[w.kind]]
    wrong = heapq.nsmallest(SHOWN, [*total.wrong, *new], Wrong.place)
    return Examined(total.rows + more.rows, counts, wrong)


def _loaded(source: Source, part: int, file: int | None) -> Iterator[Rows]:
    """The part, or one of its files; errors come out of the iterator."""
    if file is not None and isinstance(source, OfFiles):
        yield source.load_file(part, file)
    else:
        yield from rows_of_part(source, part, STREAMED_ROWS)


def _kind(error: BaseException) -> str:
    if isinstance(error, ShapeError):
        return "wrong shape"
    return "missing" if _says_missing(error) else "unreadable"


def _says_missing(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, FileNotFoundError):
            return True
        error = error.__cause__
    return False


def _shown(error: Exception) -> str:
    if isinstance(error, DataError):
        return str(error)
    return f"{type(error).__name__}: {error}".removesuffix(": ")
