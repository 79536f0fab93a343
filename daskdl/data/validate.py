"""What x and y are to be like, said by the user, in one form for all ways to say it.

Parts that are made of files, so that a file can be named, and be moved away.

What was found wrong: counts, the first offenders, and what was moved away.

What is wrong with rows that are here: their shapes, their labels, their values.

What is wrong with one part: the task that is run where the part is.

Moving files away: copied first, deleted where they were only when that is done.

The pass over all parts that says what is wrong with them.
"""

import functools
import heapq
import os
import posixpath
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import fsspec
import numpy as np
import torch
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Rows
from daskdl.data.checks import UNREADABLE, blames_data
from daskdl.data.distribute import map_parts
from daskdl.data.inputs import ReadOptions, source_of
from daskdl.data.source import STREAMED_ROWS, Source, rows_of_part
from daskdl.data.storage import Store, common_folder, parted, store_of
from daskdl.data.tables import InMemory
from daskdl.errors import DataError, OptionError, ShapeError

Shape = tuple[int | None, ...]  # of a row; None: any length
Labels = range | frozenset[Any]

_SHOWN_LABELS = 10


@dataclass(frozen=True)
class Expectations:
    """By the names of arrays: ``x``, ``x['image']``, ``y[0]``.

    Attributes:
        shapes: Of a row.
        dtypes: In native byte order.
        labels: Values that are allowed; under ``y`` for all arrays of y.
    """

    shapes: Mapping[str, Shape] = field(default_factory=dict)
    dtypes: Mapping[str, np.dtype[Any]] = field(default_factory=dict)
    labels: Mapping[str, Labels] = field(default_factory=dict)

    @property
    def labelled(self) -> bool:
        """Whether there must be labels at all."""
        own = (*self.shapes, *self.dtypes)
        return bool(self.labels) or any(name.startswith("y") for name in own)


def expectations_of(shapes: Any, dtypes: Any, labels: Any) -> Expectations:
    """Read what the user gave; None: nothing is expected.

    Args:
        shapes: Of a row: a tuple of lengths, None or -1 for any, for each array; a
            tree like x, or ``{"x": ..., "y": ...}``.
        dtypes: Whatever ``numpy.dtype`` takes, or a dtype of torch; likewise.
        labels: A number of classes, a range, a set or list of values; a tree like y.

    Raises:
        OptionError: If one is something else.

    Example:
        >>> expectations_of((3, -1), {"y": "int64"}, 2)
        Expectations(shapes={'x': (3, None)}, dtypes={'y': dtype('int64')}, \
labels={'y': range(0, 2)})
    """
    return Expectations(
        dict(pair for side, own in _sides(shapes) for pair in _shapes(own, side)),
        dict(pair for side, own in _sides(dtypes) for pair in _dtypes(own, side)),
        {} if labels is None else dict(_all_labels(labels)),
    )


def are_allowed(values: np.ndarray, labels: Labels) -> np.ndarray:
    """Which of the values are among the labels; bool, of the same shape.

    Example:
        >>> are_allowed(np.array([0, 3, 1.5]), range(3))
        array([ True, False, False])
    """
    if not isinstance(labels, range):
        return np.isin(values, list(labels))
    rising = labels if labels.step > 0 else labels[::-1]
    wide = values.astype(np.float64)
    with np.errstate(invalid="ignore"):  # of infinity there is no remainder
        whole = (wide - rising.start) % rising.step == 0
    inside: np.ndarray = (wide >= rising.start) & (wide < rising.stop) & whole
    return inside


def shown_labels(labels: Labels) -> str:
    """The labels for a message.

    Example:
        >>> shown_labels(range(10)), shown_labels(frozenset({3, 1}))
        ('0 to 9', '1, 3')
    """
    if isinstance(labels, range) and labels.step == 1:
        return f"{labels[0]} to {labels[-1]}"
    few = sorted(labels)
    more = ", ..." if len(few) > _SHOWN_LABELS else ""
    return ", ".join(str(label) for label in few[:_SHOWN_LABELS]) + more


def _sides(given: Any) -> list[tuple[str, Any]]:
    if given is None:
        return []
    if isinstance(given, dict) and given and given.keys() <= {"x", "y"}:
        return list(given.items())
    return [("x", given)]


def _shapes(tree: Any, name: str) -> Iterator[tuple[str, Shape]]:
    """As `trees.named`, but a tuple of numbers is a shape."""
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


def _all_labels(tree: Any) -> Iterator[tuple[str, Labels]]:
    for name, given in batching.named(tree, "y"):
        if isinstance(given, int | np.integer) and not isinstance(given, bool):
            allowed: Any = range(given)
        else:
            allowed = given.ravel().tolist() if isinstance(given, np.ndarray) else given
        if not _are_labels(allowed):
            raise OptionError(
                "labels must be a number of classes, a range or a set of numbers, with "
                f"at least one label, got {given!r}"
            )
        yield name, allowed if isinstance(allowed, range) else frozenset(allowed)


def _are_labels(allowed: Any) -> bool:
    if isinstance(allowed, range):
        return len(allowed) > 0
    some = isinstance(allowed, Collection) and len(allowed) > 0
    return some and all(isinstance(v, int | float | np.number) for v in allowed)


@runtime_checkable
class OfFiles(Protocol):
    """What a source offers besides, whose parts are made of files."""

    def file_urls(self, part: int) -> Sequence[str]:
        """The files that a part is made of, each in one part only.

        Args:
            part: Its number, from 0.
        """

    def load_file(self, part: int, file: int) -> Rows:
        """Load one of several files of a part, like `load` of a part of this file.

        Args:
            part: Its number, from 0.
            file: Which of its `file_urls`, from 0.
        """


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


Arrays = Mapping[str, np.ndarray]

_NUMBER_KINDS = "biuf"


class Wrong(NamedTuple):
    """One thing that is wrong, with a row or with all of them."""

    row: int | None  # None: all
    kind: str
    message: str

    def place(self) -> tuple[int, str]:
        """What they are sorted by."""
        return (-1 if self.row is None else self.row), self.kind


class Examined(NamedTuple):
    """What there is, and what is wrong with it."""

    rows: int
    counts: Counter[str]  # see `Report.counts`
    wrong: list[Wrong]  # in any order, at least the first 100 of each kind


def examine(rows: Rows, expectations: Expectations, start: int = 0) -> Examined:
    """Compare rows with what is expected of them.

    Args:
        rows: Trees of numpy arrays, rows first; y None if there are no labels.
        expectations: What they are to be like.
        start: Number of the first row, for the messages.
    """
    x = dict(batching.named(rows[0], "x"))
    y = {} if rows[1] is None else dict(batching.named(rows[1], "y"))
    wrong = list(_wrong_forms(x, y, expectations))
    counts = Counter(one.kind for one in wrong)
    length = next((len(leaf) for leaf in x.values() if leaf.ndim), 0)
    numbers = {
        name: leaf
        for name, leaf in {**x, **y}.items()
        if leaf.ndim and leaf.dtype.kind in _NUMBER_KINDS
    }
    if any(len(leaf) != length for leaf in numbers.values()):
        return Examined(length, counts, wrong)
    for kind, found in _wrong_rows(numbers, expectations):
        counts[kind] += found.rows
        wrong += [Wrong(start + row, kind, message) for row, message in found.first]
    if rows[1] is None and expectations.labelled and length:
        counts["missing label"] += length
        wrong.append(Wrong(None, "missing label", "it has no labels"))
    return Examined(length, +counts, wrong)


def _wrong_forms(x: Arrays, y: Arrays, expected: Expectations) -> Iterator[Wrong]:
    """At most one of each kind."""
    arrays = {**x, **y}
    shapes = list(_wrong_shapes(arrays, expected.shapes, labelled=bool(y)))
    dtypes = list(_wrong_dtypes(arrays, expected))
    for kind, messages in (("wrong shape", shapes), ("wrong dtype", dtypes)):
        if messages:
            yield Wrong(None, kind, "; ".join(messages))


def _wrong_shapes(
    arrays: Arrays, expected: Mapping[str, Shape], *, labelled: bool
) -> Iterator[str]:
    for side in ("x", "y") if labelled else ("x",):
        own = {name for name in arrays if name.startswith(side)}
        wanted = {name for name in expected if name.startswith(side)}
        if wanted and own != wanted:
            yield f"it has {_listed(own)}, expected {_listed(wanted)}"
    for name, leaf in arrays.items():
        shape = expected.get(name)
        if not leaf.ndim:
            yield f"{name} has no rows"
        elif shape is not None and not _fits(leaf.shape[1:], shape):
            shown = ", ".join("any" if n is None else str(n) for n in shape)
            yield f"rows of {name} have the shape {leaf.shape[1:]}, expected ({shown})"
    lengths = {name: len(leaf) for name, leaf in arrays.items() if leaf.ndim}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{count} of {name}" for name, count in lengths.items())
        yield f"it has rows of different numbers: {shown}"


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


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


class _Found(NamedTuple):
    """Rows with something wrong."""

    rows: int
    first: list[tuple[int, str]]  # with what it is


def _wrong_rows(
    numbers: Arrays, expected: Expectations
) -> Iterator[tuple[str, _Found]]:
    x = {name: leaf for name, leaf in numbers.items() if name.startswith("x")}
    y = {name: leaf for name, leaf in numbers.items() if name.startswith("y")}
    default = expected.labels.get("y")
    allowed = {name: expected.labels.get(name, default) for name in y}
    yield "non-finite", _found(x, lambda _, leaf: ~np.isfinite(leaf))
    yield "missing label", _found(y, lambda _, leaf: np.isnan(leaf))
    yield (
        "invalid label",
        _found(
            y,
            lambda name, leaf: ~(_are_valid(leaf, allowed[name]) | np.isnan(leaf)),
            {
                n: f", allowed are {shown_labels(own)}"
                for n, own in allowed.items()
                if own
            },
        ),
    )


def _are_valid(leaf: np.ndarray, allowed: Labels | None) -> np.ndarray:
    return np.isfinite(leaf) if allowed is None else are_allowed(leaf, allowed)


def _found(
    arrays: Arrays,
    wrong: Callable[[str, np.ndarray], np.ndarray],
    remedies: Mapping[str, str] = MappingProxyType({}),
) -> _Found:
    """Rows of which a value is wrong in any of the arrays; each counts once."""
    seen = np.zeros(len(next(iter(arrays.values()), ())), bool)
    few: list[tuple[int, str]] = []
    for name, leaf in arrays.items():
        values = wrong(name, leaf)
        rows = np.asarray(values.any(axis=tuple(range(1, values.ndim)))) & ~seen
        seen |= rows
        remedy = remedies.get(name, "")
        for row in np.flatnonzero(rows)[:SHOWN].tolist():
            value = leaf[row : row + 1][values[row : row + 1]][0]
            few.append((row, f"{name} is {value}{remedy}"))
    return _Found(int(seen.sum()), few)


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


@dataclass(frozen=True)
class Quarantine:
    """A folder that files are moved to, by their paths below a root.

    Attributes:
        store: The folder.
        root: The deepest folder that has all files of a source.
    """

    store: Store
    root: Store

    @classmethod
    def of(
        cls, url: str | os.PathLike[str], source: Source, options: Mapping[str, Any]
    ) -> Self:
        """Check that files of a source can be moved to a folder.

        Args:
            url: Of the folder; it need not be there.
            source: Whose files they are.
            options: Of the file systems of both.

        Raises:
            OptionError: If the source is not made of files, or has some in there.
        """
        if not isinstance(source, OfFiles):
            raise OptionError(
                "quarantine is for data that are files, which can be moved; got "
                f"{type(source).__name__}"
            )
        urls = [u for part in range(source.parts) for u in source.file_urls(part)]
        store = store_of(url, options)
        inside = posixpath.join(store.place, "")
        folders = {parted(url).folder for url in urls if not _is_packed(url)}
        for one in folders:
            if posixpath.join(Store(one, options).place, "").startswith(inside):
                raise OptionError(
                    f"quarantine must be outside of the data, got {store.url}, "
                    f"which has {one}"
                )
        root = common_folder(folders) if folders else store.url
        return cls(store, Store(root, options))

    def take(
        self, source: Source, part: int, files: Mapping[int, Sequence[int]]
    ) -> list[Moved]:
        """Move some files of a part; it may be done twice.

        Args:
            source: Made of files.
            part: Its number.
            files: Which of its files, for each part.

        Returns:
            What became of each.
        """
        assert isinstance(source, OfFiles)
        urls = source.file_urls(part)
        return [self._move(urls[file]) for file in files[part]]

    def _move(self, url: str) -> Moved:
        if _is_packed(url):
            return Moved(url, None, "it is packed with others")
        options = self.root.options
        root = _path(self.root.url, options)
        name = _path(url, options).removeprefix(root).lstrip("/")
        to = self.store.url_of(name)
        try:
            if not self.root.exists(name) and self.store.exists(name):
                return Moved(url, to)  # by a task that was lost after it
            content = self.root.read(name)
            if self.store.exists(name):
                reason = self._reason_against(url, name, content)
                if reason:
                    return Moved(url, None, reason)
            else:
                self.store.write(name, content)
            self.root.delete([name])
        except DataError as error:
            return Moved(url, None, str(error))
        return Moved(url, to)

    def _reason_against(self, url: str, name: str, content: bytes) -> str:
        """Why a file may not take the place of one that is there; "": it may."""
        to = self.store.url_of(name)
        if self.store.is_local and self.root.is_local:
            paths = (_path(url, self.root.options), _path(to, self.store.options))
            if os.path.samefile(*paths):  # over a link
                return f"{to} is the same file"
        return "" if self.store.read(name) == content else f"{to} is another file"


def _is_packed(url: str) -> bool:
    return "::" in url


def _path(url: str, options: Mapping[str, Any]) -> str:
    _, path = fsspec.core.url_to_fs(url, **options)
    return str(path)


def validate(
    source: Any,
    *,
    y: Any = None,
    shapes: Any = None,
    dtypes: Any = None,
    labels: Any = None,
    loader: Callable[..., Any] | None = None,
    quarantine: str | os.PathLike[str] | None = None,
    client: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Report:
    """Load all data once, each part where it is, and say what is wrong with them.

    Nothing is changed, and nothing is deleted. With `quarantine`, files that something
    is wrong with are moved; look at the report first, since a wrong expectation would
    move all of them.

    Args:
        source: Whatever `Trainer.fit` takes as X.
        y: Likewise.
        shapes: Of a row of each array, None or -1 for any length: ``(3, None, None)``
            for x; ``{"image": (3, 32, 32), "size": (2,)}`` for an x of this structure;
            ``{"x": (3, 32, 32), "y": ()}`` for both.
        dtypes: Likewise.
        labels: A number n of classes, 0 to n - 1; a range; or a set of numbers. For
            several outputs a tree like y.
        loader: As of `Trainer.fit`, for paths. If it raises, the part is unreadable.
        quarantine: A folder outside of the data, on any fsspec URL.
        client: None: the default client, if there is one. False: no cluster.
        storage_options: As fsspec's, of the file systems of paths and of quarantine.

    Returns:
        Counts and the first offenders; labels are missing where they are NaN, and
        where there are none although something is expected of them.

    Raises:
        OptionError: If an argument cannot be used, or quarantine is given for data
            that are not files.

    Example:
        >>> import numpy as np
        >>> X, y = np.array([[1.0], [np.nan]]), np.array([0, 2])
        >>> print(validate(X, y=y, labels=2, client=False))
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
    expectations = expectations_of(shapes, dtypes, labels)
    options = dict(storage_options or {})
    read = ReadOptions(loader=loader, storage_options=storage_options)
    # Not labelled: missing labels are counted.
    chosen = _whole(source_of(source, y, read, labelled=False))
    away = None if quarantine is None else Quarantine.of(quarantine, chosen, options)
    function = functools.partial(findings_of, expectations=expectations)
    totals = _Totals()
    for part, found in map_parts(chosen, function, client):
        totals.add(part, found)
    moved = [] if away is None else _moved(away, chosen, totals.wrong_files, client)
    return totals.report(chosen, moved)


def _whole(source: Source) -> Source:
    """What is in memory as one part: its rows have the numbers that the user knows."""
    if isinstance(source, InMemory):
        return InMemory(*source.whole, batch_size=sum(source.lengths))
    return source


class _Totals:
    """What has been found so far, whatever the order the parts come in."""

    def __init__(self) -> None:
        self.rows = 0
        self.files = 0
        self.counts = Counter[str]()
        self.wrong_files: dict[int, list[int]] = {}
        self._first: list[tuple[int, int, Offender]] = []  # by part and place in it

    def add(self, part: int, found: Findings) -> None:
        """Add a part."""
        self.rows += found.rows
        self.files += found.files
        self.counts += found.counts
        if found.wrong_files:
            self.wrong_files[part] = found.wrong_files
        if found.offenders:
            self._first += [(part, i, one) for i, one in enumerate(found.offenders)]
            self._first = sorted(self._first)[:SHOWN]

    def report(self, source: Source, moved: list[Moved]) -> Report:
        """All of it."""
        return Report(
            source.parts,
            self.files if isinstance(source, OfFiles) else None,
            self.rows,
            {kind: self.counts[kind] for kind in KINDS},
            tuple(one for _, _, one in self._first),
            tuple(moved),
        )


def _moved(
    quarantine: Quarantine,
    source: Source,
    files: Mapping[int, list[int]],
    client: Any,
) -> list[Moved]:
    """Move files, where their parts are; what became of each, in order."""
    if not files:
        return []
    function = functools.partial(quarantine.take, files=files)
    results = dict(map_parts(source, function, client, parts=sorted(files)))
    return [move for part in sorted(results) for move in results[part]]
