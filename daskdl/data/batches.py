"""From parts to batches: cut, join, move. No Dask, no threads, no state kept.

Every batch has memory of its own, at the price of one copy of its rows: the arrays of a
part may stay in the worker's store, and a model whose first layer works in place would
otherwise change what the next epoch, or the user's own array, has to say.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from daskdl.data import trees
from daskdl.data.trees import Rows, Tree

Batch = tuple[Tree, Tree]  # x and y, trees of tensors; y None without labels
Transform = Callable[[Batch], Batch]


class Chunk(NamedTuple):
    """Some rows of a part, in the order in which they are trained on."""

    rows: Rows  # of the whole part; read only
    chosen: slice | np.ndarray  # which; a slice has both ends

    @property
    def length(self) -> int:
        """How many rows were chosen."""
        if isinstance(self.chosen, slice):
            return int(self.chosen.stop - self.chosen.start)
        return len(self.chosen)

    def between(self, start: int, stop: int) -> Rows:
        """Those from one position to another among the chosen rows."""
        which = self.chosen
        if isinstance(which, slice):
            which = slice(which.start + start, which.start + stop)
        else:
            which = which[start:stop]
        x, y = self.rows
        return trees.rows(x, which), None if y is None else trees.rows(y, which)


def batches(chunks: Iterable[Chunk], batch_size: int) -> Iterator[Batch]:
    """Yield batches of exactly ``batch_size`` rows, cut across the chunks.

    What the last chunk leaves over comes last, as a smaller batch; so does what is
    before a chunk whose rows have another shape, padded to another length for one. The
    next chunk is asked for only when the batch at hand cannot be filled without it.

    Args:
        chunks: Those without rows are passed over.
        batch_size: Rows per batch, >= 1.

    Yields:
        Trees of tensors (x, y) in the chunks' dtypes, in memory of their own, on the
        CPU.

    Example:
        >>> rows = np.arange(5), np.arange(5)
        >>> chunks = [Chunk(rows, slice(0, 3)), Chunk(rows, slice(3, 5))]
        >>> [x.tolist() for x, _ in batches(chunks, batch_size=2)]
        [[0, 1], [2, 3], [4]]
    """
    waiting: list[Rows] = []
    missing = batch_size
    for chunk in chunks:
        start = 0
        if waiting and chunk.length and not _alike(waiting[-1], chunk.rows):
            yield _joined(waiting)
            waiting, missing = [], batch_size
        while start < chunk.length:
            stop = min(start + missing, chunk.length)
            waiting.append(chunk.between(start, stop))
            missing -= stop - start
            start = stop
            if missing == 0:
                yield _joined(waiting)
                waiting, missing = [], batch_size
        del chunk  # a part that is done with need not be there for the next
    if waiting:
        yield _joined(waiting)


def whole(rows: Rows) -> Chunk:
    """All rows of a part, in their order."""
    return Chunk(rows, slice(0, trees.length(rows[0])))


def rows_in(batch: Batch) -> int:
    """How many rows a batch has.

    Example:
        >>> rows_in(({"a": torch.zeros(3, 2)}, None))
        3
    """
    return trees.length(batch[0])


def to_device(
    x: Tree, y: Tree, device: torch.device | str, dtype: torch.dtype
) -> Batch:
    """Return the batch on ``device`` in the dtypes that a model and a loss expect.

    Floating inputs and labels take the model's floating dtype. Integer labels become
    int64, as torch's losses want their class indices. Integer inputs, indices into
    an embedding, stay as they are, and so does bool.

    Args:
        x: Inputs of a batch, a tree of tensors.
        y: Labels of the same batch, or None.
        device: Where the model is.
        dtype: The model's floating dtype, see :func:`floating_dtype`.

    Example:
        >>> x, y = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int8)
        >>> [t.dtype for t in to_device(x, y, "cpu", torch.float32)]
        [torch.float32, torch.int64]
    """

    def labels(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point() and leaf.dtype != torch.bool:
            return leaf.to(device, torch.int64, non_blocking=True)
        return _moved(leaf, device, dtype)

    inputs = inputs_to_device(x, device, dtype)
    return inputs, None if y is None else trees.mapped(labels, y)


def inputs_to_device(x: Tree, device: torch.device | str, dtype: torch.dtype) -> Tree:
    """Return ``x`` on ``device``, what is floating in ``dtype``; see `to_device`."""
    return trees.mapped(lambda leaf: _moved(leaf, device, dtype), x)


def _moved(leaf: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    wanted = dtype if leaf.is_floating_point() else leaf.dtype
    return leaf.to(device, wanted, non_blocking=True)


def floating_dtype(module: nn.Module) -> torch.dtype:
    """The dtype in which a model computes: that of its first floating parameter.

    A model without one is taken at its first floating buffer, then at torch's default.

    Example:
        >>> floating_dtype(nn.Linear(1, 1).double())
        torch.float64
    """
    for tensors in (module.parameters(), module.buffers()):
        for tensor in tensors:
            if tensor.is_floating_point():
                return tensor.dtype
    return torch.get_default_dtype()


def auto_device() -> torch.device:
    """CUDA if this process can use one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def tensors(rows: Rows) -> Batch:
    """The rows as tensors in memory of their own."""
    return _joined([whole(rows).between(0, trees.length(rows[0]))])


def _alike(one: Rows, other: Rows) -> bool:
    """Whether rows of both go into one batch."""
    return _shapes(one) == _shapes(other)


def _shapes(rows: Rows) -> list[tuple[int, ...]]:
    return [leaf.shape[1:] for leaf in trees.named_both(rows).values()]


def _joined(parts: Sequence[Rows]) -> Batch:
    x = trees.mapped(_tensor, *(part[0] for part in parts))
    y = None if parts[0][1] is None else trees.mapped(_tensor, *(p[1] for p in parts))
    return x, y


def _tensor(*parts: np.ndarray) -> Tensor:
    """The rows in memory of their own; shuffled ones have it already.

    Row by row, as a table of columns is not: sums of floats depend on the order.
    """
    rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
    if rows.flags.owndata and rows.flags.c_contiguous:
        return torch.from_numpy(rows)
    return torch.from_numpy(np.array(rows, order="C"))
