"""One pass over all data, on the cluster, that finds bad parts and rows.

The rows of a source are compared with the user's expectations. If a part has several
files, each bad file is named.
"""

import functools
import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from daskdl.config import is_integral
from daskdl.data import batching
from daskdl.data.batching import Rows
from daskdl.data.distribute import map_parts
from daskdl.data.files import GroupedFiles
from daskdl.data.inputs import source_of, with_columns
from daskdl.data.source import STREAMED_ROWS, Source
from daskdl.data.unreadable import UNREADABLE, blames_data
from daskdl.errors import DataError, OptionError, ShapeError, short_tracebacks

Shape = tuple[int | None, ...]  # of a row; None: any length
Arrays = Mapping[str, np.ndarray]
Labels = np.ndarray | range  # a range is not written out: it may be of billions

# Kinds of faults: of a whole part or one of its files, and of a row.
OF_PARTS = ("missing", "unreadable", "wrong shape", "wrong dtype")
OF_ROWS = ("missing label", "invalid label", "non-finite")
KINDS = (*OF_PARTS, *OF_ROWS)

SHOWN = 100  # offenders: enough to see what is wrong, few enough to be read
_SHOWN_LABELS = 10
_NUMBER_KINDS = "biuf"


class Offender(NamedTuple):
    """One fault."""

    part: str  # name of the part; URL of a file
    row: int | None  # counted from 0 within the part or file; None: all of it
    kind: str  # one of `KINDS`
    message: str


@dataclass(frozen=True)
class Report:
    """The result of `validate`; printed, it is a table.

    Attributes:
        parts: Number of parts.
        files: Number of files in the parts; None: the data are not files.
        rows: Number of rows that could be read.
        counts: Number of faults of each kind, also beyond the listed offenders: parts
            or files that are "missing", "unreadable", of "wrong shape", of "wrong
            dtype"; rows with a "missing label", an "invalid label", or a "non-finite"
            value.
        offenders: The first 100, in the order of the parts and their rows.
    """

    parts: int
    files: int | None
    rows: int
    counts: Mapping[str, int]
    offenders: Sequence[Offender] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no fault."""
        return not any(self.counts.values())

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
        files = "" if self.files is None else f"{_counted(self.files, 'file')} in "
        heading = f"{files}{_counted(self.parts, 'part')}, {_counted(self.rows, 'row')}"
        if self.ok:
            return f"{heading}\nnothing is wrong"
        unit = "part" if self.files is None else "file"
        counts = [
            (kind, _counted(count, "row" if kind in OF_ROWS else unit))
            for kind, count in self.counts.items()
        ]
        shown = [
            tuple("" if cell is None else str(cell) for cell in offender)
            for offender in self.offenders
        ]
        hidden = sum(self.counts.values()) > len(shown)
        last = [f"... and more, {len(shown)} shown"] if hidden else []
        table = _aligned([Offender._fields, *shown])
        return "\n".join([heading, *_aligned(counts), "", *table, *last])

    __str__ = summary

    def to_pandas(self) -> Any:
        """The offenders as a ``pandas.DataFrame``, one per row."""
        import pandas as pd

        return pd.DataFrame(list(self.offenders), columns=list(Offender._fields))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(cells).rstrip()


@dataclass(frozen=True)
class Expectations:
    """Expectations of arrays, by name: ``x``, ``x['image']``, ``y[0]``."""

    shapes: Mapping[str, Shape]  # of a row
    dtypes: Mapping[str, np.dtype[Any]]  # in native byte order
    labels: Mapping[str, Labels]  # allowed values, sorted; "y" applies to all of y

    @classmethod
    def of(cls, shapes: Any, dtypes: Any, labels: Any) -> "Expectations":
        """Read the arguments of `validate`.

        Example:
            >>> Expectations.of((3, -1), {"y": "int64"}, 2)
            Expectations(shapes={'x': (3, None)}, dtypes={'y': dtype('int64')}, \
labels={'y': range(0, 2)})
        """
        return cls(
            dict(pair for side, tree in _sides(shapes) for pair in _shapes(tree, side)),
            dict(pair for side, tree in _sides(dtypes) for pair in _dtypes(tree, side)),
            {} if labels is None else dict(_labels(labels)),
        )

    @property
    def labeled(self) -> bool:
        """Whether labels are expected."""
        names = (*self.shapes, *self.dtypes)
        return bool(self.labels) or any(name.startswith("y") for name in names)


def _sides(tree: Any) -> list[tuple[str, Any]]:
    if tree is None:
        return []
    if isinstance(tree, dict) and tree and tree.keys() <= {"x", "y"}:
        return list(tree.items())
    return [("x", tree)]


def _shapes(tree: Any, name: str) -> Iterator[tuple[str, Shape]]:
    """As `batching.named_leaves`, but a tuple of numbers is a shape."""
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield from _shapes(child, f"{name}[{key!r}]")
    elif isinstance(tree, tuple | list) and all(
        n is None or (is_integral(n) and n >= -1) for n in tree
    ):
        yield name, tuple(None if n in (None, -1) else int(n) for n in tree)
    elif isinstance(tree, tuple):
        for i, child in enumerate(tree):
            yield from _shapes(child, f"{name}[{i}]")
    else:
        raise OptionError(
            "shapes must have the shape of a row for each array, such as "
            f'(3, None, None) or {{"x": (3, 32, 32), "y": ()}}, got {tree!r} for {name}'
        )


def _dtypes(tree: Any, name: str) -> Iterator[tuple[str, np.dtype[Any]]]:
    for array, expected in batching.named_leaves(tree, name):
        if expected is None:
            continue
        plain = str(expected).removeprefix("torch.")
        try:
            dtype = np.dtype(plain if isinstance(expected, torch.dtype) else expected)
        except TypeError as error:
            raise OptionError(
                f"dtypes must be dtypes of numpy, got {expected!r} for {array}: {error}"
            ) from error
        yield array, dtype.newbyteorder("=")


def _labels(tree: Any) -> Iterator[tuple[str, Labels]]:
    for name, labels in batching.named_leaves(tree, "y"):
        some: Any = range(int(labels)) if is_integral(labels) else labels
        if isinstance(some, range) and some and abs(some.step) == 1:
            yield name, some[:: some.step]
            continue
        if isinstance(labels, np.ndarray):
            some = np.ravel(labels)
        try:
            allowed = np.asarray(list(some) if isinstance(some, Collection) else [])
        except (TypeError, ValueError):  # nested, of different lengths
            allowed = np.empty(0)
        if (
            not allowed.size
            or allowed.ndim != 1
            or allowed.dtype.kind not in _NUMBER_KINDS
        ):
            raise OptionError(
                "labels must be a number of classes, a range or a set of numbers, with "
                f"at least one label, got {labels!r}"
            )
        yield name, np.unique(allowed)


def _is_allowed(leaf: np.ndarray, allowed: Labels) -> np.ndarray:
    if not isinstance(allowed, range):
        return np.isin(leaf, allowed)
    if leaf.dtype.kind == "f":
        leaf = leaf.astype(np.float64)  # limits above 65,504 are infinite in float16
    inside = (leaf >= allowed[0]) & (leaf <= allowed[-1])
    return inside & (leaf == np.floor(leaf)) if leaf.dtype.kind == "f" else inside


def _shown(labels: Labels) -> str:
    """Labels for a message: '0 to 2', '0', or '0, 3'."""
    least, most = labels[0], labels[-1]
    if isinstance(labels, range):
        return f"{least} to {most}" if least < most else f"{least}"
    integers = labels.dtype.kind in "iu"
    if integers and len(labels) > 1 and int(most) - int(least) + 1 == len(labels):
        return f"{least} to {most}"
    ellipsis = ", ..." if len(labels) > _SHOWN_LABELS else ""
    return ", ".join(str(label) for label in labels[:_SHOWN_LABELS]) + ellipsis


@dataclass
class Findings:
    """The faults of a part, or of one of its files; see `Report`."""

    rows: int = 0
    files: int = 1
    counts: Counter[str] = field(default_factory=Counter)
    offenders: list[Offender] = field(default_factory=list)

    @classmethod
    def of_part(cls, source: Source, part: int, expected: Expectations) -> "Findings":
        """Load and examine a part; file by file if something is wrong."""
        findings = cls()
        findings._read(source.name(part), source.stream(part, STREAMED_ROWS), expected)
        pieces = source.pieces(part)
        if findings.counts and pieces:
            findings = cls()
            for name, load in pieces:
                of_file = cls()
                # A generator, so that `_read` handles the errors of loading.
                of_file._read(name, (read() for read in [load]), expected)
                findings.rows += of_file.rows
                findings.counts += of_file.counts
                findings.offenders += of_file.offenders
            findings.offenders = findings.offenders[:SHOWN]
        findings.files = max(len(pieces), 1)
        return findings

    def _read(self, name: str, loaded: Iterable[Rows], expected: Expectations) -> None:
        try:
            for rows in loaded:
                self._examine(name, rows, expected)
        except UNREADABLE as error:
            if not blames_data(error):
                raise  # its message is for the caller
            kind = "wrong shape" if isinstance(error, ShapeError) else "unreadable"
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, FileNotFoundError):
                    kind = "missing"
                cause = cause.__cause__
            shown = f"{type(error).__name__}: {error}".removesuffix(": ")
            message = str(error) if isinstance(error, DataError) else shown
            self._add(name, kind, [(None, message)])

    def _examine(self, name: str, rows: Rows, expected: Expectations) -> None:
        """Compare rows with the expectations."""
        arrays = batching.leaves_by_name(rows, ("x", "y"))
        faults = {
            "wrong shape": "; ".join(_wrong_shapes(arrays, expected)),
            "wrong dtype": "; ".join(_wrong_dtypes(arrays, expected)),
        }
        for kind, message in faults.items():
            if message and not self.counts[kind]:
                self._add(name, kind, [(None, message)])
        lengths = {len(leaf) for leaf in arrays.values() if leaf.ndim} or {0}
        length = max(lengths)
        if rows[1] is None and expected.labeled and length:
            unreported = not self.counts["missing label"]
            messages = [(None, "it has no labels")] if unreported else []
            self._add(name, "missing label", messages, length)
        if len(lengths) == 1:
            self._examine_values(name, arrays, expected)
        self.rows += length

    def _examine_values(
        self, name: str, arrays: Arrays, expected: Expectations
    ) -> None:
        seen: dict[str, np.ndarray] = {}  # rows with a fault of this kind
        few: dict[str, list[tuple[int, str]]] = {}
        for array, leaf in arrays.items():
            if not leaf.ndim or leaf.dtype.kind not in _NUMBER_KINDS:
                continue
            allowed = expected.labels.get(array, expected.labels.get("y"))
            faults = {"non-finite": ~np.isfinite(leaf)}
            remedy = ""
            if array.startswith("y"):
                missing, invalid = np.isnan(leaf), ~np.isfinite(leaf)
                if allowed is not None:
                    invalid = ~_is_allowed(leaf, allowed)
                    remedy = f", allowed are {_shown(allowed)}"
                faults = {"missing label": missing, "invalid label": invalid & ~missing}
            for kind, wrong in faults.items():
                bad = np.asarray(wrong.any(axis=tuple(range(1, wrong.ndim))))
                new = np.flatnonzero(bad & ~seen.get(kind, np.zeros_like(bad)))
                seen[kind] = bad | seen.get(kind, bad)
                for row in new[:SHOWN].tolist():
                    value = leaf[row][wrong[row]]
                    shown = f"{array} is {np.ravel(value)[0]}"
                    shown += remedy if kind == "invalid label" else ""
                    few.setdefault(kind, []).append((self.rows + row, shown))
        for kind, bad in seen.items():
            self._add(name, kind, few.get(kind, ()), int(bad.sum()))

    def _add(
        self,
        name: str,
        kind: str,
        messages: Sequence[tuple[int | None, str]],
        count: int = 1,
    ) -> None:
        if count:
            self.counts[kind] += count
            new = [Offender(name, row, kind, message) for row, message in messages]
            self.offenders = heapq.nsmallest(
                SHOWN,
                [*self.offenders, *new],
                lambda fault: (-1 if fault.row is None else fault.row, fault.kind),
            )


def _wrong_shapes(arrays: Arrays, expected: Expectations) -> Iterator[str]:
    for side in sorted({name[0] for name in arrays}):
        present = {name for name in arrays if name.startswith(side)}
        wanted = {name for name in expected.shapes if name.startswith(side)}
        if wanted and present != wanted:
            shown = [", ".join(sorted(names)) for names in (present, wanted)]
            yield f"it has {shown[0]}, expected {shown[1]}"
    for name, leaf in arrays.items():
        shape = expected.shapes.get(name)
        if not leaf.ndim:
            yield f"{name} has no rows"
        elif shape is not None and not (
            len(shape) == leaf.ndim - 1
            and all(
                n in (None, got) for n, got in zip(shape, leaf.shape[1:], strict=True)
            )
        ):
            wanted_shape = ", ".join("any" if n is None else str(n) for n in shape)
            got = f"rows of {name} have the shape {leaf.shape[1:]}"
            yield f"{got}, expected ({wanted_shape})"
    counts = {name: len(leaf) for name, leaf in arrays.items() if leaf.ndim}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} of {name}" for name, count in counts.items())
        yield f"its arrays have different numbers of rows: {listed}"


def _wrong_dtypes(arrays: Arrays, expected: Expectations) -> Iterator[str]:
    for name, leaf in arrays.items():
        wanted = expected.dtypes.get(name)
        if wanted is not None and leaf.dtype.newbyteorder("=") != wanted:
            yield f"{name} is {leaf.dtype}, expected {wanted}"
        elif leaf.dtype.kind not in _NUMBER_KINDS:
            yield f"{name} is {leaf.dtype}, expected real numbers"


@short_tracebacks
def validate(
    X: Any,
    y: Any = None,
    *,
    shapes: Any = None,
    dtypes: Any = None,
    labels: Any = None,
    client: Any = None,
) -> Report:
    """Load all data once, on the cluster, and find bad parts and rows.

    Nothing is changed.

    Args:
        X: Inputs, or inputs and labels, as in `Trainer.fit`.
        y: Labels, or None.
        shapes: Of a row of each array, None or -1 for any length: ``(3, None, None)``
            for x; ``{"image": (3, 32, 32), "size": (2,)}`` for an x of this structure;
            ``{"x": (3, 32, 32), "y": ()}`` for both.
        dtypes: Likewise; as ``numpy.dtype`` takes them, or dtypes of torch.
        labels: A number n of classes, 0 to n - 1; a range; or a set of numbers. For
            several outputs a tree like y.
        client: None: the default client, if there is one. False: no cluster.

    Returns:
        Counts and the first offenders. Labels are missing if they are NaN, or if there
        are none although the arguments expect some.

    Raises:
        OptionError: If an argument cannot be used.

    Example:
        >>> import numpy as np
        >>> X, y = np.array([[1.0], [np.nan]]), np.array([0, 2])
        >>> print(validate(X, y, labels=2, client=False))
        1 part, 2 rows
        missing        0 parts
        unreadable     0 parts
        wrong shape    0 parts
        wrong dtype    0 parts
        missing label  0 rows
        invalid label  1 row
        non-finite     1 row
        <BLANKLINE>
        part    row  kind           message
        part 0  1    invalid label  y is 2, allowed are 0 to 1
        part 0  1    non-finite     x is nan
    """
    expected = Expectations.of(shapes, dtypes, labels)
    source = source_of(X, y, labelled=False)  # missing labels are counted
    # As one part in memory, whose rows are numbered as in X.
    source = with_columns(source, client).in_one_part()
    rows = files = 0
    counts = Counter[str]()
    offenders: list[tuple[int, int, Offender]] = []  # by part and place in it
    function = functools.partial(Findings.of_part, expected=expected)
    for part, findings in map_parts(source, function, client):
        rows += findings.rows
        files += findings.files
        counts += findings.counts
        new = [(part, i, offender) for i, offender in enumerate(findings.offenders)]
        offenders = sorted([*offenders, *new])[:SHOWN] if new else offenders
    return Report(
        source.parts,
        files if isinstance(source, GroupedFiles) else None,
        rows,
        {kind: counts[kind] for kind in KINDS},
        tuple(offender for _, _, offender in offenders),
    )
