"""One pass over all data, on the cluster, that says what is wrong with them."""

import functools
import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Rows
from daskdl.data.checks import UNREADABLE, blames_data
from daskdl.data.distribute import map_parts
from daskdl.data.files import GroupedFiles
from daskdl.data.inputs import ReadOptions, source_of
from daskdl.data.source import STREAMED_ROWS, Source, rows_of_part
from daskdl.data.tables import InMemory
from daskdl.errors import DataError, OptionError, ShapeError

Shape = tuple[int | None, ...]  # of a row; None: any length
Labels = range | frozenset[Any]
Arrays = Mapping[str, np.ndarray]

# What may be wrong with a whole part, or with a file of it, and with a row.
OF_PARTS = ("missing", "unreadable", "wrong shape", "wrong dtype")
OF_ROWS = ("missing label", "invalid label", "non-finite")
KINDS = (*OF_PARTS, *OF_ROWS)

SHOWN = 100  # offenders: enough to see what is wrong, few enough to be read
_SHOWN_LABELS = 10
_NUMBER_KINDS = "biuf"


class Offender(NamedTuple):
    """One thing that is wrong."""

    part: str  # its name; of a file the URL
    row: int | None  # counted from 0 within the part or file; None: all of it
    kind: str  # one of `KINDS`
    message: str


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
    """

    parts: int
    files: int | None
    rows: int
    counts: Mapping[str, int]
    offenders: Sequence[Offender] = ()

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
        files = "" if self.files is None else f"{_counted(self.files, 'file')} in "
        first = f"{files}{_counted(self.parts, 'part')}, {_counted(self.rows, 'row')}"
        if self.ok:
            return f"{first}\nnothing is wrong"
        whole = "part" if self.files is None else "file"
        counts = [
            (kind, _counted(count, "row" if kind in OF_ROWS else whole))
            for kind, count in self.counts.items()
        ]
        offenders = [
            (o.part, "" if o.row is None else str(o.row), o.kind, o.message)
            for o in self.offenders
        ]
        more = sum(self.counts.values()) > len(offenders)
        last = [f"... and more, {len(offenders)} shown"] if more else []
        table = _aligned([Offender._fields, *offenders])
        return "\n".join([first, *_aligned(counts), "", *table, *last])

    def to_pandas(self) -> Any:
        """The offenders as a ``pandas.DataFrame``, one in a row."""
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
    """What arrays are to be like, by name: ``x``, ``x['image']``, ``y[0]``.

    Attributes:
        shapes: Of a row.
        dtypes: In native byte order.
        labels: Values that are allowed; under ``y`` for all arrays of y.
    """

    shapes: Mapping[str, Shape] = field(default_factory=dict)
    dtypes: Mapping[str, np.dtype[Any]] = field(default_factory=dict)
    labels: Mapping[str, Labels] = field(default_factory=dict)

    @classmethod
    def of(cls, shapes: Any, dtypes: Any, labels: Any) -> "Expectations":
        """Read what the user gave; see `validate`.

        Example:
            >>> Expectations.of((3, -1), {"y": "int64"}, 2)
            Expectations(shapes={'x': (3, None)}, dtypes={'y': dtype('int64')}, \
labels={'y': range(0, 2)})
        """
        return cls(
            dict(pair for side, own in _sides(shapes) for pair in _shapes(own, side)),
            dict(pair for side, own in _sides(dtypes) for pair in _dtypes(own, side)),
            {} if labels is None else dict(_labels(labels)),
        )

    @property
    def labeled(self) -> bool:
        """Whether there must be labels at all."""
        own = (*self.shapes, *self.dtypes)
        return bool(self.labels) or any(name.startswith("y") for name in own)


def _sides(given: Any) -> list[tuple[str, Any]]:
    if given is None:
        return []
    if isinstance(given, dict) and given and given.keys() <= {"x", "y"}:
        return list(given.items())
    return [("x", given)]


def _shapes(tree: Any, name: str) -> Iterator[tuple[str, Shape]]:
    """As `batching.named`, but a tuple of numbers is a shape."""
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield from _shapes(child, f"{name}[{key!r}]")
    elif isinstance(tree, tuple | list) and all(map(_is_length, tree)):
        yield name, tuple(None if n in (None, -1) else int(n) for n in tree)
    elif isinstance(tree, tuple):
        for i, child in enumerate(tree):
            yield from _shapes(child, f"{name}[{i}]")
    else:
        raise OptionError(
            "shapes must have the shape of a row for each array, such as "
            f'(3, None, None) or {{"x": (3, 32, 32), "y": ()}}, got {tree!r} for {name}'
        )


def _is_length(value: Any) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return value is None or (whole and value >= -1)


def _dtypes(tree: Any, name: str) -> Iterator[tuple[str, np.dtype[Any]]]:
    for own, given in batching.named(tree, name):
        if given is None:
            continue
        plain = str(given).removeprefix("torch.")
        try:
            dtype = np.dtype(plain if isinstance(given, torch.dtype) else given)
        except TypeError as error:
            raise OptionError(
                f"dtypes must be dtypes of numpy, got {given!r} for {own}: {error}"
            ) from error
        yield own, dtype.newbyteorder("=")


def _labels(tree: Any) -> Iterator[tuple[str, Labels]]:
    for name, given in batching.named(tree, "y"):
        allowed: Any = given
        if isinstance(given, int | np.integer) and not isinstance(given, bool):
            allowed = range(given)
        elif isinstance(given, np.ndarray):
            allowed = given.ravel().tolist()
        some = isinstance(allowed, Collection) and len(allowed) > 0
        shown = () if isinstance(allowed, range) else allowed
        if not some or not all(isinstance(v, int | float | np.number) for v in shown):
            raise OptionError(
                "labels must be a number of classes, a range or a set of numbers, with "
                f"at least one label, got {given!r}"
            )
        yield name, allowed if isinstance(allowed, range) else frozenset(allowed)


def _are_allowed(values: np.ndarray, labels: Labels) -> np.ndarray:
    if not isinstance(labels, range):
        return np.isin(values, list(labels))
    rising = labels if labels.step > 0 else labels[::-1]
    wide = values.astype(np.float64)
    with np.errstate(invalid="ignore"):  # of infinity there is no remainder
        whole = (wide - rising.start) % rising.step == 0
    inside: np.ndarray = (wide >= rising.start) & (wide < rising.stop) & whole
    return inside


def _shown(labels: Labels) -> str:
    if isinstance(labels, range) and labels.step == 1:
        return f"{labels[0]} to {labels[-1]}"
    few = sorted(labels)
    more = ", ..." if len(few) > _SHOWN_LABELS else ""
    return ", ".join(str(label) for label in few[:_SHOWN_LABELS]) + more


@dataclass
class Findings:
    """What is wrong with a part, or with a file of it.

    Attributes:
        rows: That could be read.
        files: How many there are.
        counts: By kind; see `Report`.
        offenders: The first ones, in order.
    """

    rows: int = 0
    files: int = 1
    counts: Counter[str] = field(default_factory=Counter)
    offenders: list[Offender] = field(default_factory=list)

    @classmethod
    def of_part(cls, source: Source, part: int, expected: Expectations) -> "Findings":
        """Load a part and look at all of it; file by file if something is wrong."""
        loaded = rows_of_part(source, part, STREAMED_ROWS)
        found = cls._of(source.name(part), loaded, expected)
        separate = source.separate(part)
        if found.counts and separate:
            found = cls()
            for name, load in separate:
                loaded = (load() for load in [load])
                own = cls._of(name, loaded, expected)
                found.rows += own.rows
                found.counts += own.counts
                found.offenders = (found.offenders + own.offenders)[:SHOWN]
        found.files = max(len(separate), 1)
        return found

    @classmethod
    def _of(
        cls, name: str, loaded: Iterable[Rows], expected: Expectations
    ) -> "Findings":
        found = cls()
        try:
            for rows in loaded:
                found._examine(name, rows, expected)
        except UNREADABLE as error:
            if not blames_data(error):
                raise  # it says what the caller has to change
            kind = "missing" if _says_missing(error) else "unreadable"
            kind = "wrong shape" if isinstance(error, ShapeError) else kind
            shown = f"{type(error).__name__}: {error}".removesuffix(": ")
            message = str(error) if isinstance(error, DataError) else shown
            found._add(name, kind, [(None, message)])
        return found

    def _examine(self, name: str, rows: Rows, expected: Expectations) -> None:
        """Compare some rows with what is expected of them."""
        x = dict(batching.named(rows[0], "x"))
        y = {} if rows[1] is None else dict(batching.named(rows[1], "y"))
        shapes = "; ".join(_wrong_shapes({**x, **y}, expected, labeled=bool(y)))
        dtypes = "; ".join(_wrong_dtypes({**x, **y}, expected))
        for kind, message in (("wrong shape", shapes), ("wrong dtype", dtypes)):
            if message and not self.counts[kind]:
                self._add(name, kind, [(None, message)])
        length = next((len(leaf) for leaf in x.values() if leaf.ndim), 0)
        if rows[1] is None and expected.labeled and length:
            first = [] if self.counts["missing label"] else [(None, "it has no labels")]
            self._add(name, "missing label", first, length)
        x, y = _numbers(x), _numbers(y)
        if all(len(leaf) == length for leaf in (*x.values(), *y.values())):
            for kind, arrays, wrong in (
                ("non-finite", x, {n: ~np.isfinite(leaf) for n, leaf in x.items()}),
                ("missing label", y, {n: np.isnan(leaf) for n, leaf in y.items()}),
                ("invalid label", y, {n: _invalid(n, y[n], expected) for n in y}),
            ):
                count, few = _wrong_rows(arrays, wrong)
                if kind == "invalid label":
                    few = [(row, n, f"{v}{_remedy(n, expected)}") for row, n, v in few]
                messages = [(self.rows + row, f"{n} is {v}") for row, n, v in few]
                self._add(name, kind, messages, count)
        self.rows += length

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
                lambda one: (-1 if one.row is None else one.row, one.kind),
            )


def _says_missing(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, FileNotFoundError):
            return True
        error = error.__cause__
    return False


def _numbers(arrays: Arrays) -> dict[str, np.ndarray]:
    return {
        name: leaf
        for name, leaf in arrays.items()
        if leaf.ndim and leaf.dtype.kind in _NUMBER_KINDS
    }


def _wrong_shapes(
    arrays: Arrays, expected: Expectations, *, labeled: bool
) -> Iterator[str]:
    for side in ("x", "y") if labeled else ("x",):
        own = {name for name in arrays if name.startswith(side)}
        wanted = {name for name in expected.shapes if name.startswith(side)}
        if wanted and own != wanted:
            shown = [", ".join(sorted(names)) or "nothing" for names in (own, wanted)]
            yield f"it has {shown[0]}, expected {shown[1]}"
    for name, leaf in arrays.items():
        shape = expected.shapes.get(name)
        if not leaf.ndim:
            yield f"{name} has no rows"
        elif shape is not None and not _fits(leaf.shape[1:], shape):
            wanted_shape = ", ".join("any" if n is None else str(n) for n in shape)
            got = f"rows of {name} have the shape {leaf.shape[1:]}"
            yield f"{got}, expected ({wanted_shape})"
    counts = {name: len(leaf) for name, leaf in arrays.items() if leaf.ndim}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} of {name}" for name, count in counts.items())
        yield f"it has rows of different numbers: {listed}"


def _wrong_dtypes(arrays: Arrays, expected: Expectations) -> Iterator[str]:
    for name, leaf in arrays.items():
        wanted = expected.dtypes.get(name)
        if wanted is not None and leaf.dtype.newbyteorder("=") != wanted:
            yield f"{name} is {leaf.dtype}, expected {wanted}"
        elif leaf.dtype.kind not in _NUMBER_KINDS:
            yield f"{name} is {leaf.dtype}, expected real numbers"


def _fits(shape: tuple[int, ...], expected: Shape) -> bool:
    return len(shape) == len(expected) and all(
        wanted in (None, size) for size, wanted in zip(shape, expected, strict=True)
    )


def _allowed(name: str, expected: Expectations) -> Labels | None:
    return expected.labels.get(name, expected.labels.get("y"))


def _invalid(name: str, leaf: np.ndarray, expected: Expectations) -> np.ndarray:
    allowed = _allowed(name, expected)
    valid = np.isfinite(leaf) if allowed is None else _are_allowed(leaf, allowed)
    invalid: np.ndarray = ~(valid | np.isnan(leaf))  # those are missing
    return invalid


def _remedy(name: str, expected: Expectations) -> str:
    allowed = _allowed(name, expected)
    return f", allowed are {_shown(allowed)}" if allowed else ""


def _wrong_rows(
    arrays: Arrays, wrong: Arrays
) -> tuple[int, list[tuple[int, str, Any]]]:
    """How many rows are wrong in any array; the first ones, with array and value."""
    seen = np.zeros(len(next(iter(arrays.values()), ())), bool)
    few: list[tuple[int, str, Any]] = []
    for name, values in wrong.items():
        rows = np.asarray(values.any(axis=tuple(range(1, values.ndim)))) & ~seen
        seen |= rows
        for row in np.flatnonzero(rows)[:SHOWN].tolist():
            own = slice(row, row + 1)
            few.append((row, name, arrays[name][own][values[own]][0]))
    return int(seen.sum()), few


def validate(
    X: Any,
    y: Any = None,
    *,
    shapes: Any = None,
    dtypes: Any = None,
    labels: Any = None,
    loader: Callable[..., Any] | None = None,
    client: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Report:
    """Load all data once, each part where it is, and say what is wrong with them.

    Nothing is changed, and nothing is deleted.

    Args:
        X: Whatever `Trainer.fit` takes.
        y: Likewise.
        shapes: Of a row of each array, None or -1 for any length: ``(3, None, None)``
            for x; ``{"image": (3, 32, 32), "size": (2,)}`` for an x of this structure;
            ``{"x": (3, 32, 32), "y": ()}`` for both.
        dtypes: Likewise; whatever ``numpy.dtype`` takes, or a dtype of torch.
        labels: A number n of classes, 0 to n - 1; a range; or a set of numbers. For
            several outputs a tree like y.
        loader: As of `Trainer.fit`, for paths. If it raises, the part is unreadable.
        client: None: the default client, if there is one. False: no cluster.
        storage_options: For fsspec, such as credentials; the workers use them too.

    Returns:
        Counts and the first offenders; labels are missing where they are NaN, and
        where there are none although something is expected of them.

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
    read = ReadOptions(loader=loader, storage_options=storage_options)
    source = source_of(X, y, read, labelled=False)  # missing labels are counted
    if isinstance(source, InMemory):  # as one part: its rows are the user's
        source = InMemory(*source.whole, batch_size=sum(source.lengths))
    rows = files = 0
    counts = Counter[str]()
    first: list[tuple[int, int, Offender]] = []  # by part and place in it
    function = functools.partial(Findings.of_part, expected=expected)
    for part, found in map_parts(source, function, client):
        rows += found.rows
        files += found.files
        counts += found.counts
        new = [(part, i, one) for i, one in enumerate(found.offenders)]
        first = sorted([*first, *new])[:SHOWN] if new else first
    return Report(
        source.parts,
        files if isinstance(source, GroupedFiles) else None,
        rows,
        {kind: counts[kind] for kind in KINDS},
        tuple(one for _, _, one in first),
    )
