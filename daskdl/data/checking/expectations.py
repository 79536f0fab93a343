"""What x and y are to be like, said by the user, in one form for all ways to say it."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from daskdl.data import batching
from daskdl.errors import OptionError

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
