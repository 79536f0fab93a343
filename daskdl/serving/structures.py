"""Trees on their way between processes: what they are made of, without the arrays."""

from collections.abc import Sequence
from typing import Any

import cloudpickle

from daskdl.data import trees
from daskdl.data.trees import Tree

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
    numbered = trees.filled(tree, range(len(trees.leaves(tree))))
    structure: bytes = cloudpickle.dumps(numbered)
    return structure


def tree_of(structure: bytes, leaves: Sequence[Any]) -> Tree:
    """The tree with its arrays, in order."""
    if structure == ONE_LEAF:
        return leaves[0]
    return trees.mapped(lambda number: leaves[number], cloudpickle.loads(structure))
