"""What the user gave, cut into pieces; one class for each kind of data.

Which class knows a kind is chosen in :func:`source_of` alone. A new kind is a
subclass of :class:`Source` and a line there. Clients are passed in.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from dask.delayed import Delayed, delayed
from typing_extensions import override

from daskdl.data.arrays import (
    as_numpy,
    check_batch_size,
    check_labels,
    is_dask_array,
)
from daskdl.data.checks import check_data
from daskdl.data.scattering import scatter
from daskdl.errors import DataError, OptionError
from daskdl.timeouts import Bound

# Fine enough that a replica twice as slow as the others delays them by an eighth of
# its share at the end of an epoch, coarse enough that a piece is worth a request.
PIECES_PER_REPLICA = 8

Rows = tuple[np.ndarray, np.ndarray]


class Source(ABC):
    """One kind of data, cut into pieces that are not on the workers yet."""

    lengths: Sequence[int]  # rows of each piece

    @abstractmethod
    def start(
        self, client: Any, worker: str, keys: Mapping[int, str], bound: Bound
    ) -> dict[int, Any]:
        """Put pieces on a worker, or begin to compute them there.

        Args:
            client: A synchronous client.
            worker: Address of the worker they should be on.
            keys: The future key for each piece to start, by piece number.
            bound: For each piece that is sent.

        Returns:
            The future of each piece, by piece number.
        """

    @abstractmethod
    def rows(self, index: int) -> Rows:
        """A piece, cut or computed here and now, in the calling thread."""

    def homes(self, client: Any) -> dict[int, str]:
        """The worker that already has a piece, for those that are somewhere."""
        return {}


def source_of(
    X: Any, y: Any, batch_size: int, replicas: int, shuffle_seed: int | None
) -> Source:
    """Choose the class that knows this kind of data; the arguments are `place`'s."""
    check_data(X, y)
    check_batch_size(batch_size)
    if replicas < 1:
        raise OptionError(f"replicas must be >= 1, got {replicas}")
    if is_dask_array(X):
        return DaskBlocks(X, y)
    return InMemory(X, y, batch_size, replicas, shuffle_seed)


class InMemory(Source):
    """Numpy arrays and torch tensors; a piece is copied when it is sent, not before."""

    def __init__(
        self, X: Any, y: Any, batch_size: int, replicas: int, shuffle_seed: int | None
    ) -> None:
        self._x, self._y = as_numpy(X), as_numpy(y)
        self._bounds = cut(len(self._x), batch_size, PIECES_PER_REPLICA * replicas)
        self.lengths = [stop - start for start, stop in self._bounds]
        self._order: np.ndarray | None = None
        if shuffle_seed is not None:
            rng = np.random.default_rng(shuffle_seed)
            self._order = rng.permutation(len(self._x))

    @override
    def start(
        self,
        client: Any,
        worker: str,
        keys: Mapping[int, str],
        bound: Bound,
    ) -> dict[int, Any]:
        # One call per piece: they go through the scheduler, which holds one at a time.
        return {
            index: self._send(client, worker, index, key, bound)
            for index, key in keys.items()
        }

    def _send(
        self, client: Any, worker: str, index: int, key: str, bound: Bound
    ) -> Any:
        rows = self.rows(index)
        what = f"piece {index} ({sum(part.nbytes for part in rows)} bytes)"
        return scatter(client, {key: rows}, [worker], bound, what)[key]

    @override
    def rows(self, index: int) -> Rows:
        rows = slice(*self._bounds[index])
        if self._order is None:
            # Contiguous, because Dask would otherwise pickle them.
            return (
                np.ascontiguousarray(self._x[rows]),
                np.ascontiguousarray(self._y[rows]),
            )
        order = self._order[rows]
        return self._x[order], self._y[order]


class DaskBlocks(Source):
    """A ``dask.array`` each for X and y; blocks without rows are passed over."""

    def __init__(self, X: Any, y: Any) -> None:
        rows = X.chunks[0]
        self._x = X
        self._blocks = [i for i, length in enumerate(rows) if length]
        self.lengths = [rows[i] for i in self._blocks]
        # One block per row of blocks: `check_data` has seen to that.
        columns = [a.to_delayed().reshape(-1) for a in (X, y.rechunk({0: rows}))]
        self._pairs = [tuple(column[i] for column in columns) for i in self._blocks]

    def delayed(self, index: int, key: str | None = None) -> Delayed:
        """The pair (x, y) of one piece, still to be computed; ``key`` names it."""
        task = delayed(as_piece, pure=False)
        pair: Delayed = task(
            *self._pairs[index], index, self.lengths[index], dask_key_name=key
        )
        return pair

    @override
    def rows(self, index: int) -> Rows:
        # Not the scheduler of whatever client there may be.
        rows: Rows = self.delayed(index).compute(scheduler="synchronous")
        return rows

    @override
    def homes(self, client: Any) -> dict[int, str]:
        futures = client.futures_of(self._x)
        holders = client.who_has(futures) if futures else {}
        inner = (0,) * (self._x.ndim - 1)
        firsts = [(self._x.name, i, *inner) for i in self._blocks]
        return {i: holders[k][0] for i, k in enumerate(firsts) if holders.get(k)}

    @override
    def start(
        self, client: Any, worker: str, keys: Mapping[int, str], bound: Bound
    ) -> dict[int, Any]:
        pairs = [self.delayed(index, key) for index, key in keys.items()]
        # Loose, so that Dask computes them elsewhere when this worker is lost.
        futures = client.compute(pairs, workers=[worker], allow_other_workers=True)
        return dict(zip(keys, futures, strict=True))


def as_piece(x: Any, y: Any, index: int, rows: int) -> Rows:
    """Check one block row on the worker that computed it; the task of a piece.

    Raises:
        DataError: If its chunks promised another number of rows, or a label is NaN.
    """
    if not len(x) == len(y) == rows:
        raise DataError(
            f"piece {index} has {len(x)} rows of X and {len(y)} of y, but the chunks "
            f"promise {rows}; call compute_chunk_sizes() on both"
        )
    labels = as_numpy(y)
    check_labels(labels, None, f"y of piece {index}")
    return as_numpy(x), labels


def cut(examples: int, batch_size: int, pieces: int) -> list[tuple[int, int]]:
    """Bounds of at most ``pieces`` parts, each a whole number of batches.

    Only the last may end with a smaller batch; none is empty.

    Example:
        >>> cut(10, batch_size=2, pieces=2)
        [(0, 4), (4, 10)]
    """
    batches = -(-examples // batch_size)
    count = min(batches, pieces)
    edges = [batches * i // count * batch_size for i in range(count)]
    return list(zip(edges, [*edges[1:], examples], strict=True))
