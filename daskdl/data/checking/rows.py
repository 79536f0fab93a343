"""What is wrong with rows that are here: their shapes, their labels, their values."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from daskdl.data import batching
from daskdl.data.batching import Rows
from daskdl.data.checking.expectations import (
    Expectations,
    Labels,
    Shape,
    are_allowed,
    shown_labels,
)
from daskdl.data.checking.report import SHOWN

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
