"""Several arrays with names in each file, as ``numpy.savez`` writes them."""

import io
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.batching import Rows, Tree
from daskdl.data.formats.loaders import Format
from daskdl.data.formats.results import one_parses, reading, rows_of
from daskdl.errors import DataError


@dataclass(frozen=True)
class Npz(Format):
    """The arrays of an ``.npz`` file that have these names.

    Attributes:
        x: A name; or a tuple or dict of names for several inputs.
        y: Also; None: there are no labels.
    """

    x: Tree = "x"
    y: Tree = "y"

    @override
    def __call__(self, content: bytes, name: str) -> Rows:
        with reading(name), one_parses:
            loaded = np.load(io.BytesIO(content), allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise DataError(f"{name} must be an .npz file, got one array; use Npy")
            with loaded as arrays:
                return named_rows(self.x, self.y, arrays, name)


def named_rows(x: Tree, y: Tree, arrays: Mapping[str, Any], url: str) -> Rows:
    """The rows of a file that has arrays with names.

    Args:
        x: Names, as a tree.
        y: Likewise; None: there are no labels.
        arrays: What the file has.
        url: Of the file.

    Raises:
        DataError: If a name is not there, or what it has cannot be used.

    Example:
        >>> named_rows("a", None, {"a": np.zeros(2)}, "x.npz")
        (array([0., 0.]), None)
    """
    check_names((x, y), arrays, url)
    return rows_of((picked(x, arrays), picked(y, arrays)), url)


def check_names(wanted: tuple[Tree, Tree], there: Collection[str], url: str) -> None:
    """Refuse names of arrays that a file has not.

    Args:
        wanted: Names for x and for y, as trees; y may be None.
        there: What the file has.
        url: Of the file.

    Raises:
        DataError: With the name and those that are there.
    """
    missing = [name for name in wanted_names(wanted) if name not in there]
    if missing:
        raise DataError(
            f"{url} must have an array named {missing[0]!r}, but has "
            f"{sorted(there)}; name them with x=... and y=..., y=None without labels"
        )


def wanted_names(wanted: tuple[Tree, Tree]) -> list[str]:
    """All names of x and y; y may be None.

    Example:
        >>> wanted_names((("a", "b"), None))
        ['a', 'b']
    """
    return list(batching.named_both(wanted).values())


def picked(names: Tree, arrays: Mapping[str, Any]) -> Tree:
    """Arrays in the places of their names; None stays.

    Example:
        >>> picked({"image": "a", "size": "b"}, {"a": 1, "b": 2})
        {'image': 1, 'size': 2}
    """
    if names is None:
        return None
    return batching.mapped(lambda name: arrays[name], names)
