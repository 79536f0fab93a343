"""What came out of one file: checked, and named by the file where it is wrong."""

import contextlib
import struct
import sys
import threading
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from daskdl.data import batching
from daskdl.data.arrays import as_numpy, check_array
from daskdl.data.batching import Rows, Tree
from daskdl.data.source import SHOWN_ROWS, Facts
from daskdl.errors import DataError, OptionError

# What a damaged file makes readers raise; Pillow even a SyntaxError. All else is a
# mistake in a program, and comes out as it is.
_DAMAGED = (
    OSError,
    ValueError,
    EOFError,
    LookupError,
    SyntaxError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
)

# Python 3.11 counts how deep its parser is for all threads together, and raises a
# SystemError if two parse at a time, as numpy does with the header of each array.
one_parses: contextlib.AbstractContextManager[Any] = (
    threading.Lock() if sys.version_info < (3, 12) else contextlib.nullcontext()
)


@contextlib.contextmanager
def reading(url: str) -> Iterator[None]:
    """Name a file in what is raised because of its content.

    Args:
        url: Of the file.

    Raises:
        DataError: Instead of what a damaged file makes readers raise.

    Example:
        >>> with reading("memory://x/a.npy"):
        ...     int("7b")
        Traceback (most recent call last):
        daskdl.errors.DataError: cannot read memory://x/a.npy: ValueError: invalid \
literal for int() with base 10: '7b'
    """
    try:
        yield
    except OptionError:  # a ValueError too, and its message says all
        raise
    except _DAMAGED as error:
        shown = f"{type(error).__name__}: {error}"
        raise DataError(f"cannot read {url}: {shown}") from error


def rows_of(result: Any, url: str) -> Rows:
    """Take over what a reader returned.

    Args:
        result: A tuple of two is (x, y); anything else is x alone. Both are arrays or
            tensors with rows along the first axis, or trees of them; y may be None.
        url: Of the file, for messages.

    Returns:
        Trees of numpy arrays of the same length, which may be 0.

    Raises:
        DataError: If it is anything else, or if lengths differ.

    Example:
        >>> rows_of((np.zeros((2, 3)), np.array([0, 1])), "a.npz")[1]
        array([0, 1])
    """
    x, y = _pair(result)
    leaves = [*_named("x", x, url), *(() if y is None else _named("y", y, url))]
    lengths = {name: _checked(leaf, f"{name} of {url}") for name, leaf in leaves}
    if len(set(lengths.values())) != 1:
        shown = ", ".join(f"{name} has {n}" for name, n in lengths.items())
        raise DataError(f"all arrays of {url} must have as many rows, but {shown}")
    return batching.mapped(as_numpy, x), None if y is None else batching.mapped(
        as_numpy, y
    )


def row_of(result: Any, url: str) -> Rows:
    """The same for one example: all arrays get a first axis, and y may be a number.

    Example:
        >>> row_of((np.zeros(3), 7), "a.png")
        (array([[0., 0., 0.]]), array([7]))
    """
    x, y = _pair(result)
    return rows_of((_as_row(x), None if y is None else _as_row(y)), url)


def header_facts(rows: int, x: Tree, y: Tree) -> Facts:
    """What is known when only the header of a file was read.

    Args:
        rows: How many the file has.
        x: Arrays of any length; their shapes of a row and their dtypes count.
        y: Also; or None.

    Example:
        >>> header_facts(9, np.empty((0, 2)), None).first[0].shape
        (2, 2)
    """
    shown = min(rows, SHOWN_ROWS)

    def zeros(leaf: np.ndarray) -> np.ndarray:
        return np.zeros((shown, *leaf.shape[1:]), leaf.dtype)

    labels = None if y is None else batching.mapped(zeros, y)
    return Facts(rows, (batching.mapped(zeros, x), labels))


def _pair(result: Any) -> tuple[Any, Any]:
    if isinstance(result, tuple) and len(result) == 2:
        return result
    return result, None


def _named(argument: str, tree: Tree, url: str) -> list[tuple[str, Any]]:
    found = list(batching.named(tree, argument))
    if not found:
        raise DataError(f"{argument} of {url} must not be empty, got {tree!r}")
    return found


def _checked(leaf: Any, name: str) -> int:
    """Its length. No rows are fine: collections in files have such parts."""
    if isinstance(leaf, np.ndarray | Tensor) and leaf.ndim and len(leaf) == 0:
        return 0
    return len(leaf) if check_array(leaf, name) else 0


def _as_row(tree: Tree) -> Tree:
    def one(leaf: Any) -> Any:
        if isinstance(leaf, bool | int | float | np.generic):
            leaf = np.asarray(leaf)
        # What is no array is refused when it is checked.
        return leaf[None] if isinstance(leaf, np.ndarray | Tensor) else leaf

    return batching.mapped(one, tree)
