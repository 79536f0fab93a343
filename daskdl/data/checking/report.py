"""What was found wrong: counts, the first offenders, and what was moved away."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from typing_extensions import override

# What may be wrong with a whole part, or with a file of it, and with a row.
OF_PARTS = ("missing", "unreadable", "wrong shape", "wrong dtype")
OF_ROWS = ("missing label", "invalid label", "non-finite")
KINDS = (*OF_PARTS, *OF_ROWS)

SHOWN = 100  # offenders: enough to see what is wrong, few enough to be read


class Offender(NamedTuple):
    """One thing that is wrong."""

    part: str  # its name; of a file the URL
    row: int | None  # counted from 0 within the part or file; None: all of it
    kind: str  # one of `KINDS`
    message: str


class Moved(NamedTuple):
    """A file that was to be moved away."""

    url: str  # where it was
    to: str | None  # where it is now; None: still where it was
    reason: str = ""  # why it is still there


@dataclass(frozen=True)
class Report:
    """What `validate` found; printed, it is a table.

    Attributes:
        parts: How many there are.
        files: How many files these are made of; None: they are not made of files.
        rows: Of all parts that could be read.
        counts: How often each kind of thing is wrong, also beyond the offenders that
            are listed: parts or files that are "missing", "unreadable", of "wrong
            shape", of "wrong dtype"; rows with a "missing label", an "invalid label",
            or a "non-finite" value.
        offenders: The first 100, in the order of the parts and their rows.
        moved: Files that went to quarantine, or could not, in the same order; all.
    """

    parts: int
    files: int | None
    rows: int
    counts: Mapping[str, int]
    offenders: Sequence[Offender] = ()
    moved: Sequence[Moved] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not any(self.counts.values())

    @override
    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """A table to read.

        Example:
            >>> counts = {"unreadable": 1, "non-finite": 3}
            >>> offender = Offender("part 1", 7, "non-finite", "x is nan")
            >>> print(Report(2, None, 10, counts, [offender]).summary())
            2 parts, 10 rows
            unreadable  1 part
            non-finite  3 rows
            <BLANKLINE>
            part    row  kind        message
            part 1  7    non-finite  x is nan
            ... and more, 1 shown
        """
        return "\n".join(self._lines())

    def to_pandas(self) -> Any:
        """The offenders as a ``pandas.DataFrame``, one in a row."""
        import pandas as pd

        return pd.DataFrame(list(self.offenders), columns=list(Offender._fields))

    def _lines(self) -> Iterator[str]:
        files = "" if self.files is None else f"{_counted(self.files, 'file')} in "
        rows = _counted(self.rows, "row")
        yield f"{files}{_counted(self.parts, 'part')}, {rows}"
        if self.ok:
            yield "nothing is wrong"
            return
        whole = "part" if self.files is None else "file"
        yield from _aligned(
            [
                (kind, _counted(count, "row" if kind in OF_ROWS else whole))
                for kind, count in self.counts.items()
            ]
        )
        yield ""
        shown = [
            (o.part, "" if o.row is None else str(o.row), o.kind, o.message)
            for o in self.offenders
        ]
        yield from _aligned([Offender._fields, *shown])
        if sum(self.counts.values()) > len(shown):
            yield f"... and more, {len(shown)} shown"
        yield from self._moves()

    def _moves(self) -> Iterator[str]:
        if not self.moved:
            return
        yield ""
        gone = sum(move.to is not None for move in self.moved)
        yield f"{_counted(gone, 'file')} moved to quarantine"
        left = [move for move in self.moved if move.to is None]
        yield from (f"not moved: {move.url}: {move.reason}" for move in left[:SHOWN])


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(cells).rstrip()
