"""Several inputs or outputs: arrays in tuples and dicts, nested as the user likes.

A tree is an array, or a tuple (also a named one) or a dict of trees. What an array is,
is up to the caller: numpy's, torch's and Dask's are all used here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

Tree = Any
Rows = tuple[Tree, Tree]  # x and y; y is None where there are no labels
Kinds = tuple[tuple[str, tuple[int, ...], str], ...]  # see `kinds`


def named(tree: Tree, name: str) -> Iterator[tuple[str, Any]]:
    """Each array with the name that a user would write for it, in order.

    Example:
        >>> list(named({"image": 1, "size": (2, 3)}, "X"))
        [("X['image']", 1), ("X['size'][0]", 2), ("X['size'][1]", 3)]
    """
    for key, child in _children(tree):
        if key is None:
            yield name, child
        else:
            yield from named(child, f"{name}[{key!r}]")


def named_both(both: Rows, names: tuple[str, str] = ("X", "y")) -> dict[str, Any]:
    """Each array of x and, if there is one, of y by its name, in order.

    Example:
        >>> named_both(({"a": 1}, 2)), named_both((1, None))
        ({"X['a']": 1, 'y': 2}, {'X': 1})
    """
    (x, y), (x_name, y_name) = both, names
    return dict([*named(x, x_name), *(named(y, y_name) if y is not None else [])])


def leaves(tree: Tree) -> list[Any]:
    """All arrays, in order.

    Example:
        >>> leaves(({"a": 1}, 2))
        [1, 2]
    """
    return [leaf for _, leaf in named(tree, "")]


def mapped(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply a function to each array, and to those of others in the same places.

    Args:
        function: Of as many arrays as there are trees.
        tree: Says what the result looks like.
        others: Of the same structure.

    Raises:
        ValueError: If another one has another structure.

    Example:
        >>> mapped(lambda a, b: a + b, {"a": 1, "b": (2,)}, {"a": 10, "b": (20,)})
        {'a': 11, 'b': (22,)}
    """
    if not any(isinstance(one, dict | tuple) for one in (tree, *others)):
        return function(tree, *others)  # nearly always, and several times a step
    parts = [dict(_children(tree)), *(dict(_children(other)) for other in others)]
    if any(part.keys() != parts[0].keys() for part in parts):
        shown = ", ".join(outline(other) for other in (tree, *others))
        raise ValueError(f"trees must have the same structure, got {shown}")
    if None in parts[0]:
        return function(tree, *others)
    inner = {key: mapped(function, *(p[key] for p in parts)) for key in parts[0]}
    if isinstance(tree, dict):
        return inner
    if hasattr(tree, "_fields"):
        return type(tree)(*inner.values())
    return tuple(inner.values())


def filled(tree: Tree, values: Iterable[Any]) -> Tree:
    """The same structure with other values in its places, in order.

    Example:
        >>> filled({"a": 0, "b": (0, 0)}, [1, 2, 3])
        {'a': 1, 'b': (2, 3)}
    """
    following = iter(values)
    return mapped(lambda _: next(following), tree)


def of_both(function: Callable[[Tree], Tree], rows: Rows) -> Rows:
    """Apply a function to x and, if there is one, to y.

    Example:
        >>> of_both(len, ([1, 2], None))
        (2, None)
    """
    x, y = rows
    return function(x), None if y is None else function(y)


def outline(tree: Tree) -> str:
    """The structure without what is in it, for messages.

    Example:
        >>> outline({"a": 1, "b": (2, 3)})
        "{'a': ., 'b': (., .)}"
    """
    children = list(_children(tree))
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{k!r}: {outline(v)}" for k, v in children) + "}"
    if isinstance(tree, tuple):
        return "(" + ", ".join(outline(v) for _, v in children) + ")"
    return "."


def length(tree: Tree) -> int:
    """Rows: the length of the first array.

    Example:
        >>> length({"a": np.zeros((3, 2))})
        3
    """
    return len(tree) if not isinstance(tree, dict | tuple) else len(leaves(tree)[0])


def nbytes(both: Rows) -> int:
    """Bytes of all arrays of x and y together.

    Example:
        >>> nbytes(({"a": np.zeros(3)}, None))
        24
    """
    return sum(int(leaf.nbytes) for leaf in named_both(both).values())


def rows(tree: Tree, which: Any) -> Tree:
    """Some rows of each array: a slice, or indices.

    Example:
        >>> rows((np.arange(4),), slice(1, 3))
        (array([1, 2]),)
    """
    if not isinstance(tree, dict | tuple):
        return tree[which]  # nearly always, and several times a step
    return mapped(lambda leaf: leaf[which], tree)


def kinds(both: Rows) -> Kinds:
    """Name, shape of a row and kind of dtype of each array of x and y.

    Example:
        >>> kinds((np.zeros((3, 2), np.float32), np.array([0, 1, 0])))
        (('x', (2,), 'f'), ('y', (), 'i'))
    """
    leaves = named_both(both, ("x", "y"))
    return tuple((name, x.shape[1:], x.dtype.kind) for name, x in leaves.items())


def joined(trees: Sequence[Tree]) -> Tree:
    """Numpy arrays one after the other, along the first axis.

    Example:
        >>> joined([{"a": np.array([1])}, {"a": np.array([2, 3])}])
        {'a': array([1, 2, 3])}
    """
    if len(trees) == 1:
        return trees[0]
    return mapped(lambda *parts: np.concatenate(parts), *trees)


def joined_rows(rows: Sequence[Rows]) -> Rows:
    """The same of x and, if there is one, of y.

    Example:
        >>> joined_rows([(np.array([1]), None), (np.array([2]), None)])
        (array([1, 2]), None)
    """
    y = None if rows[0][1] is None else joined([y for _, y in rows])
    return joined([x for x, _ in rows]), y


def _children(tree: Tree) -> Iterator[tuple[Any, Any]]:
    """Parts with their keys; of an array itself, with None."""
    if isinstance(tree, dict):
        yield from tree.items()
    elif isinstance(tree, tuple):
        yield from enumerate(tree)
    else:
        yield None, tree
