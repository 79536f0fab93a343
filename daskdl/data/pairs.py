"""``dask.bag`` of examples, and lists of Delayed objects and futures of parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.arrays import as_numpy
from daskdl.data.batching import Rows, Tree
from daskdl.data.collections import Collections, Finish, checked, is_bag, plain
from daskdl.data.graphs import tasks_of
from daskdl.errors import DataError


@dataclass(frozen=True)
class _Pair(Finish):
    """The one value is (x, y), or x alone.

    Attributes:
        examples: Of a bag: the value is a list of such.
    """

    examples: bool

    @override
    def __call__(self, values: list[Any], part: int) -> Rows:
        (value,) = values
        if self.examples:
            return checked(stacked(list(value), f"part {part}"), part, None)
        rows = batching.of_both(lambda tree: tree, pair(value))
        x, y = rows
        labels = None if y is None else _plain(y, "y", f"part {part}")
        return checked((_plain(x, "X", f"part {part}"), labels), part, None)


def pairs(parts: Any) -> Collections:
    """Take a bag, or a list of Delayed objects and futures, for one data set.

    Args:
        parts: Of pairs (x, y), or of x alone; in a bag of single examples, in a list
            of several rows each.
    """
    tasks, keys = tasks_of(parts)
    return Collections(tasks, [(key,) for key in keys], _Pair(is_bag(parts)))


def pair(value: Any) -> tuple[Tree, Tree]:
    """An example or a part as x and y: a tuple of two is both, all else is x alone.

    Example:
        >>> pair((1, 2)), pair([1, 2])
        ((1, 2), ([1, 2], None))
    """
    if isinstance(value, tuple) and len(value) == 2 and not hasattr(value, "_fields"):
        return value
    return value, None


def stacked(examples: Sequence[Any], name: str) -> Rows:
    """Put single examples into one array for each place in their trees.

    Args:
        examples: Pairs (x, y), or x alone, of numbers, arrays and tensors.
        name: Of the part, for messages.

    Raises:
        DataError: If they are not of one shape and structure.
    """
    if not examples:
        return np.zeros(0), None  # as much as can be known of none
    xs, ys = zip(*(pair(example) for example in examples), strict=True)
    unlabelled = sum(y is None for y in ys)
    if 0 < unlabelled < len(ys):
        raise DataError(
            f"the examples of {name} must all be pairs (x, y), or all x alone, got "
            f"{unlabelled} of {len(ys)} without y"
        )
    return _stacked(xs, "X", name), None if unlabelled else _stacked(ys, "y", name)


def _stacked(examples: Sequence[Tree], argument: str, part: str) -> Tree:
    def stack(*leaves: Any) -> np.ndarray:
        arrays = [
            as_numpy(x) if isinstance(x, Tensor) else np.asarray(x) for x in leaves
        ]
        return np.stack(arrays)

    try:
        together = batching.mapped(stack, *examples)
    except ValueError as error:
        raise DataError(
            f"the examples of {part} must all have one shape for {argument}: {error}"
        ) from error
    return _plain(together, argument, part)


def _plain(tree: Tree, argument: str, part: str) -> Tree:
    label = argument == "y"
    named = batching.named(tree, argument)
    made = [plain(leaf, f"{name} of {part}", label=label) for name, leaf in named]
    return batching.filled(tree, made)
