"""Arrays, tensors and tables in the memory of the process that calls `fit`."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from daskdl.data import batching
from daskdl.data.arrays import as_numpy
from daskdl.data.batching import Rows, Tree
from daskdl.data.source import SHOWN_ROWS, Source

# Fine enough to be shared among some replicas, coarse enough that a part is worth a
# message. Not by the number of replicas: the order of rows shall not depend on it.
PARTS = 64
PART_BYTES = 32 * 2**20  # at most about so many, so that none takes long on its way


class InMemory(Source):
    """Rows in memory; nothing is copied before a part is loaded or sent.

    Args:
        x: Tree of numpy arrays and torch tensors of equal length.
        y: The same, or None.
        batch_size: A part is a whole number of batches, >= 1.
        shuffle_seed: Rows are dealt out in an order of this seed, so that data sorted
            by label do no harm; None keeps the order.
    """

    lengths: Sequence[int]
    first: Rows
    here = True
    apart = True

    def __init__(
        self, x: Tree, y: Tree, batch_size: int, shuffle_seed: int | None = None
    ) -> None:
        self._rows = batching.of_both(
            lambda tree: batching.mapped(as_numpy, tree), (x, y)
        )
        rows = batching.length(self._rows[0])
        self._batch_size = batch_size
        self._cut(PARTS)
        few = slice(SHOWN_ROWS)
        self.first = batching.of_both(lambda tree: batching.rows(tree, few), self._rows)
        self._order: np.ndarray | None = None
        if shuffle_seed is not None:
            self._order = np.random.default_rng(shuffle_seed).permutation(rows)

    def _cut(self, parts: int) -> None:
        rows = batching.length(self._rows[0])
        most = max(parts, -(-batching.nbytes(self._rows) // PART_BYTES))
        self._bounds = cut(rows, self._batch_size, most)
        self.parts = len(self._bounds)
        self.lengths = [stop - start for start, stop in self._bounds]

    def in_parts(self, parts: int) -> "InMemory":
        """The same rows in about so many parts, in more if these would be too large.

        Example:
            >>> InMemory(np.zeros((10, 1)), None, batch_size=2).in_parts(2).lengths
            [4, 6]
        """
        other = copy.copy(self)
        other._cut(parts)
        return other

    @property
    def whole(self) -> Rows:
        """All rows in the order they were given."""
        return self._rows

    @override
    def load(self, part: int) -> Rows:
        rows = slice(*self._bounds[part])
        if self._order is not None:
            order = self._order[rows]
            return batching.of_both(lambda tree: batching.rows(tree, order), self._rows)

        def cut_out(tree: Tree) -> Tree:
            # Contiguous, because Dask would otherwise pickle them.
            return batching.mapped(lambda leaf: np.ascontiguousarray(leaf[rows]), tree)

        return batching.of_both(cut_out, self._rows)

    @override
    def packed(self, part: int) -> Any:
        return self.load(part)


def cut(examples: int, batch_size: int, parts: int) -> list[tuple[int, int]]:
    """Bounds of at most ``parts`` parts, each a whole number of batches.

    Only the last may end with a smaller batch; none is empty.

    Example:
        >>> cut(10, batch_size=2, parts=2)
        [(0, 4), (4, 10)]
    """
    batches = -(-examples // batch_size)
    count = min(batches, parts)
    edges = [batches * i // count * batch_size for i in range(count)]
    return list(zip(edges, [*edges[1:], examples], strict=True))
