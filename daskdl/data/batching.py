"""Trees of arrays, and batches cut from the rows of parts.

A tree is an array, or a tuple (also a named one), a dict or another mapping of trees.
Rows are a pair (x, y) of trees; y is None without labels. Functions that return a tree
map None to None. Batches do not share memory with parts, because a part may be in a
worker's store and a model may change its input in place.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

T = TypeVar("T")  # a tree, and one of the same structure
Tree = Any
Rows = tuple[Tree, Tree]  # x and y, trees of arrays with rows along the first axis
Batch = tuple[Tree, Tree]  # x and y, trees of tensors
Transform = Callable[[Batch], Batch]
RowSpec = tuple[tuple[str, tuple[int, ...], str], ...]  # see `row_spec`
# Nearly every tree is a single array; functions that run several times per step test
# for these types first.
ARRAYS = (Tensor, np.ndarray)


def is_leaf(tree: Tree) -> bool:
    """Whether a tree is an array, and has no children."""
    return isinstance(tree, ARRAYS) or not isinstance(tree, Mapping | tuple)


class Weighted(NamedTuple):
    """Labels, and the weight of each row in loss and accuracy."""

    labels: Tree
    weight: Any  # (B,), floating, >= 0


def labels_of(y: Tree) -> Tree:
    """Return labels without their weights, if they have any."""
    return y.labels if isinstance(y, Weighted) else y


def named_leaves(tree: Tree, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each array with its name in the user's code, in order.

    Example:
        >>> list(named_leaves({"image": 1, "size": (2, 3)}, "X"))
        [("X['image']", 1), ("X['size'][0]", 2), ("X['size'][1]", 3)]
    """
    for key, child in _children(tree):
        if key is None:
            yield name, child
        else:
            yield from named_leaves(child, f"{name}[{key!r}]")


def leaves_by_name(both: Rows, names: tuple[str, str] = ("X", "y")) -> dict[str, Any]:
    """Return the arrays of x and, if present, y by name, in order."""
    (x, y), (x_name, y_name) = both, names
    labels = [] if y is None else named_leaves(y, y_name)
    return dict([*named_leaves(x, x_name), *labels])


def leaves(tree: Tree) -> list[Any]:
    """Return all arrays, in order."""
    return [leaf for _, leaf in named_leaves(tree, "")]


def tree_map(function: Callable[..., Any], tree: T, *others: Tree) -> T:
    """Apply a function to each array and the arrays in the same places of other trees.

    Mappings become dicts. None stays None, whatever the other trees have there.

    Example:
        >>> tree_map(lambda a, b: a + b, {"a": 1, "b": (2,)}, {"a": 10, "b": (20,)})
        {'a': 11, 'b': (22,)}
    """
    if tree is None:
        return tree
    alone = isinstance(tree, ARRAYS) and not others
    if alone or all(map(is_leaf, (tree, *others))):
        result: T = function(tree, *others)
        return result
    parts = [dict(_children(tree)), *(dict(_children(tree)) for tree in others)]
    if any(part.keys() != parts[0].keys() for part in parts):
        shown = ", ".join(outline(structure) for structure in (tree, *others))
        raise ValueError(f"trees must have the same structure, got {shown}")
    inner: Any = {key: tree_map(function, *(p[key] for p in parts)) for key in parts[0]}
    if isinstance(tree, tuple):
        kind: Any = type(tree)
        values = inner.values()
        inner = kind(*values) if hasattr(tree, "_fields") else tuple(values)
    same: T = inner
    return same


def with_leaves(tree: T, values: Iterable[Any]) -> T:
    """Return the same structure with other values, in order.

    Example:
        >>> with_leaves(({"a": 0, "b": (0, 0)}, None), [1, 2, 3])
        ({'a': 1, 'b': (2, 3)}, None)
    """
    following = iter(values)
    return tree_map(lambda _: next(following), tree)


def outline(tree: Tree) -> str:
    """Describe the structure, for messages.

    Example:
        >>> outline({"a": 1, "b": (2, 3)})
        "{'a': ., 'b': (., .)}"
    """
    children = list(_children(tree))
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{k!r}: {outline(v)}" for k, v in children) + "}"
    if isinstance(tree, tuple):
        return "(" + ", ".join(outline(v) for _, v in children) + ")"
    return "."


def length(tree: Tree) -> int:
    """Return the number of rows: the length of the first array."""
    return len(tree if isinstance(tree, ARRAYS) else leaves(tree)[0])


def nbytes(both: Rows) -> int:
    return sum(int(leaf.nbytes) for leaf in leaves_by_name(both).values())


def row_bytes(rows: Rows) -> int:
    """Return the average size of a row, at least 1; there must be a row."""
    return max(nbytes(rows) // length(rows), 1)


def rows(tree: T, which: Any) -> T:
    """Select rows of each array by a slice or indices."""
    if isinstance(tree, ARRAYS):
        array: Any = tree
        chosen: T = array[which]
        return chosen
    return tree_map(lambda leaf: leaf[which], tree)


def row_spec(both: Rows) -> RowSpec:
    """Return name, shape of a row and kind of dtype of each array of x and y.

    Example:
        >>> row_spec((np.zeros((3, 2), np.float32), np.array([0, 1, 0])))
        (('x', (2,), 'f'), ('y', (), 'i'))
    """
    leaves = leaves_by_name(both, ("x", "y"))
    return tuple((name, x.shape[1:], x.dtype.kind) for name, x in leaves.items())


def joined(trees: Sequence[T]) -> T:
    """Concatenate trees of numpy arrays along the first axis."""
    if len(trees) == 1:
        return trees[0]
    return tree_map(lambda *parts: np.concatenate(parts), *trees)


def _children(tree: Tree) -> Iterator[tuple[Any, Any]]:
    """Yield children with their keys; for an array, None and the array."""
    if isinstance(tree, Mapping):
        yield from tree.items()
    elif isinstance(tree, tuple):
        yield from enumerate(tree)
    else:
        yield None, tree


class Chunk(NamedTuple):
    """Chosen rows of a part, in the order in which they are trained on."""

    rows: Rows  # of the whole part; read only
    chosen: slice | np.ndarray  # a slice has both ends

    @property
    def length(self) -> int:
        """Number of chosen rows."""
        if isinstance(self.chosen, slice):
            return int(self.chosen.stop - self.chosen.start)
        return len(self.chosen)

    def between(self, start: int, stop: int) -> Rows:
        """Return the chosen rows from one position to another."""
        which = self.chosen
        if isinstance(which, slice):
            which = slice(which.start + start, which.start + stop)
        else:
            which = which[start:stop]
        x, y = self.rows  # separately, in half the time, as in `_joined`
        return rows(x, which), rows(y, which)


def batches(chunks: Iterable[Chunk], batch_size: int) -> Iterator[Batch]:
    """Yield batches of exactly ``batch_size`` rows, cut across the chunks.

    A batch is smaller only at the end, and before a chunk whose rows have another
    shape, for example another padded length. The next chunk is requested only when the
    current batch cannot be filled without it.

    Args:
        chunks: Chunks without rows are skipped.
        batch_size: Rows per batch, >= 1.

    Yields:
        Trees of tensors (x, y) in the chunks' dtypes, in their own memory, on the CPU.

    Example:
        >>> rows = np.arange(5), np.arange(5)
        >>> chunks = [Chunk(rows, slice(0, 3)), Chunk(rows, slice(3, 5))]
        >>> [x.tolist() for x, _ in batches(chunks, batch_size=2)]
        [[0, 1], [2, 3], [4]]
    """
    waiting: list[Rows] = []
    missing = batch_size
    for chunk in chunks:
        start, end = 0, chunk.length
        if waiting and end and _shapes(waiting[-1]) != _shapes(chunk.rows):
            yield _joined(waiting)
            waiting, missing = [], batch_size
        while start < end:
            stop = min(start + missing, end)
            waiting.append(chunk.between(start, stop))
            missing -= stop - start
            start = stop
            if missing == 0:
                yield _joined(waiting)
                waiting, missing = [], batch_size
        del chunk  # frees a finished part before the next is loaded
    if waiting:
        yield _joined(waiting)


def with_lone_rows_joined(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield batches; a batch of a single row is joined to the batch before it.

    Batch norm cannot train on a single row. A batch is yielded when the next one is
    known.

    Example:
        >>> cut = [(torch.arange(n), None) for n in (2, 2, 1)]
        >>> [len(x) for x, _ in with_lone_rows_joined(cut)]
        [2, 3]
    """
    held: Batch | None = None
    for batch in batches:
        if held is None:
            held = batch
        elif length(batch[0]) == 1 and _shapes(held) == _shapes(batch):
            held = tree_map(_concatenated, held, batch)
        else:
            yield held
            held = batch
    if held is not None:
        yield held


def _concatenated(*parts: Tensor) -> Tensor:
    return torch.cat(parts)


def all_rows(rows: Rows) -> Chunk:
    """Return all rows of a part, in order."""
    return Chunk(rows, slice(0, length(rows)))


def to_device(
    x: Tree, y: Tree, device: torch.device | str, dtype: torch.dtype
) -> Batch:
    """Return the batch on ``device`` in the dtypes that a model and a loss expect.

    Floating inputs and labels take the model's floating dtype. Integer labels become
    int64, as torch's losses want their class indices. Integer inputs, indices into
    an embedding, stay as they are, and so does bool.

    Example:
        >>> x, y = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int8)
        >>> [t.dtype for t in to_device(x, y, "cpu", torch.float32)]
        [torch.float32, torch.int64]
    """

    def moved(leaf: Tensor) -> Tensor:
        kept = leaf.dtype == torch.bool
        target = dtype if leaf.is_floating_point() else torch.int64
        return _moved(leaf, device, leaf.dtype if kept else target)

    return inputs_to_device(x, device, dtype), tree_map(moved, y)


def inputs_to_device(x: Tree, device: torch.device | str, dtype: torch.dtype) -> Tree:
    """Return ``x`` on ``device``, floating tensors in ``dtype``; see `to_device`."""

    def moved(leaf: Tensor) -> Tensor:
        target = dtype if leaf.is_floating_point() else leaf.dtype
        return _moved(leaf, device, target)

    return tree_map(moved, x)


def _moved(leaf: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    # What a transform has put on an accelerator is read here, so it has to arrive.
    to_accelerator = torch.device(device).type != "cpu"
    return leaf.to(device, dtype, non_blocking=to_accelerator)


def floating_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype in which a model computes: that of its first floating parameter.

    Without such a parameter, that of the first floating buffer, or torch's default.

    Example:
        >>> floating_dtype(nn.Linear(1, 1).double())
        torch.float64
    """
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if tensor.is_floating_point():
            return tensor.dtype
    return torch.get_default_dtype()


def tensors(rows: Rows) -> Batch:
    """Return rows as tensors in their own memory."""
    return tree_map(lambda leaf: torch.from_numpy(np.array(leaf, order="C")), rows)


def _shapes(rows: Rows) -> list[tuple[int, ...]]:
    return [leaf.shape[1:] for leaf in leaves_by_name(rows).values()]


def _joined(parts: Sequence[Rows]) -> Batch:
    xs, ys = zip(*parts, strict=True)
    return tree_map(_tensor, *xs), tree_map(_tensor, *ys)


def _tensor(*parts: np.ndarray) -> Tensor:
    """Concatenate rows into a tensor with its own memory, in C order.

    Rows that were selected by indices have their own memory already. The memory order
    matters, because it changes the rounding of sums.
    """
    rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
    if rows.flags.owndata and rows.flags.c_contiguous:
        return torch.from_numpy(rows)
    return torch.from_numpy(np.array(rows, order="C"))
