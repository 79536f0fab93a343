"""Trees on their way between processes: what they are made of, without the arrays."""

from collections.abc import Sequence
from typing import Any

import cloudpickle

from daskdl.data import batching
from daskdl.data.batching import Tree

ONE_LEAF: bytes = cloudpickle.dumps(0)


def structure_of(tree: Tree) -> bytes:
    """A tree whose arrays are numbered instead; equal for equal structures.

    Example:
        >>> import numpy as np
        >>> tree_of(structure_of({"a": np.zeros(1), "b": (np.zeros(2),)}), "xy")
        {'a': 'x', 'b': ('y',)}
    """
    if not isinstance(tree, tuple | dict):
        return ONE_LEAF
    numbered = batching.filled(tree, range(len(batching.leaves(tree))))
    structure: bytes = cloudpickle.dumps(numbered)
    return structure


def tree_of(structure: bytes, leaves: Sequence[Any]) -> Tree:
    """The tree with its arrays, in order."""
    if structure == ONE_LEAF:
        return leaves[0]
    return batching.mapped(lambda number: leaves[number], cloudpickle.loads(structure))
