"""The pieces of a run: put on the workers, and kept there.

A piece is one Dask future whose value is a pair of numpy arrays, so tensors never
cross Dask. How data are cut is the business of :mod:`daskdl.data.sources`.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from distributed import Client

from daskdl.data.futures import new_key, release
from daskdl.data.sources import Source, source_of
from daskdl.errors import OptionError
from daskdl.timeouts import Bound, Timeouts

logger = logging.getLogger(__name__)


class Piece(NamedTuple):
    """A part of the data that one replica trains on at a time."""

    # mypy: a tuple has a method of that name, which no piece needs.
    index: int  # type: ignore[assignment]  # position in the order of the data, from 0
    examples: int  # rows in it, >= 1
    key: str  # of the Dask future whose value is (x, y), two numpy arrays


class Pieces:
    """The pieces of one run; owns their futures until :meth:`release`.

    Iterates over :class:`Piece` in the order of the data. Use it as a context
    manager, or release it, so that the workers can forget the data.

    Args:
        source: What the pieces are cut from; kept, to start lost pieces again.
        client: A synchronous client.
        workers: Addresses to spread the pieces over.
        bound: For a worker to take a piece that is sent to it.
    """

    examples: int  # rows in all pieces together
    _futures: dict[int, Any]  # Dask futures, by piece number

    def __init__(
        self,
        source: Source,
        client: Client,
        workers: Sequence[str],
        bound: Bound,
    ) -> None:
        self.examples = sum(source.lengths)
        self._source: Source | None = source
        self._client = client
        self._bound = bound
        self._futures = {}
        with contextlib.ExitStack() as unless_complete:
            unless_complete.callback(self.release)  # also after Ctrl-C
            self._start(range(len(source.lengths)), workers)
            unless_complete.pop_all()

    @property
    def futures(self) -> list[Any]:
        """The Dask futures in the order of the data; empty once released."""
        return [self._futures[index] for index in sorted(self._futures)]

    def lost(self) -> list[Piece]:
        """Those that died with the only worker that held them, as the client knows."""
        ends = ("lost", "cancelled")  # statuses of Dask's
        lost = [i for i, future in self._futures.items() if future.status in ends]
        return [self._piece(index) for index in sorted(lost)]

    def restore(self, index: int, key: str, workers: Sequence[str]) -> Piece:
        """Start a piece again that was lost with its worker.

        Dask recomputes what it has a recipe for, but scattered data die with the
        only worker that held them.

        Args:
            index: Of the piece.
            key: That was found lost. If it is not the piece's key any more, it has
                been started again already.
            workers: Addresses to choose from.

        Returns:
            The same index and rows, but a new key.
        """
        if self._piece(index).key == key:
            former = self._futures[index]
            self._start([index], workers)
            release([former])
        return self._piece(index)

    def release(self) -> None:
        """Let go of the futures and of the user's data; may be called again."""
        self._source = None
        release(self._futures.values())
        self._futures.clear()

    def _start(self, indices: Sequence[int], workers: Sequence[str]) -> None:
        if self._source is None:
            raise OptionError("the pieces have been released")
        if not workers:
            raise OptionError("workers must name at least one worker, got none")
        homes = _spread(indices, workers, self._source.homes(self._client))
        there = list(workers)
        for worker in dict.fromkeys(homes.values()):
            keys = {
                # A new name each time: the scheduler may still be forgetting the old.
                index: f"{new_key('piece')}-{index}"
                for index in indices
                if homes[index] == worker
            }
            try:
                self._futures |= self._source.start(
                    self._client, worker, keys, self._bound
                )
            except OSError as error:  # it has gone, or hangs: the others take them
                there.remove(worker)
                if not there:
                    raise
                logger.warning("no pieces on %s: %s", worker, error)
                self._start(list(keys), there)

    def _piece(self, index: int) -> Piece:
        if self._source is None:
            raise OptionError("the pieces have been released")
        return Piece(index, self._source.lengths[index], str(self._futures[index].key))

    def __iter__(self) -> Iterator[Piece]:
        return iter([self._piece(index) for index in sorted(self._futures)])

    def __len__(self) -> int:
        return len(self._futures)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def place(
    X: Any,
    y: Any,
    client: Client,
    workers: Sequence[str],
    *,
    batch_size: int,
    replicas: int,
    shuffle_seed: int | None,
) -> Pieces:
    """Cut data into pieces and put them on the workers, spread evenly.

    In memory, a piece is a whole number of batches, about eight pieces per replica;
    with a seed the rows are dealt out in a random order first, so that data sorted
    by label do no harm. A ``dask.array`` keeps its blocks: a piece is a block row,
    computed on the worker that will hold it; what is persisted stays where it is.

    Args:
        X: Examples: a numpy array, a torch tensor or a ``dask.array``.
        y: Their labels; a ``dask.array`` exactly if X is one. It is rechunked to
            the rows of X.
        client: A synchronous client.
        workers: Addresses of the workers to put pieces on, >= 1.
        batch_size: Rows per batch, >= 1.
        replicas: How many will share the pieces, >= 1.
        shuffle_seed: Seed of the order of rows in memory; None keeps the order.

    Raises:
        OSError: If a worker is gone, or does not take its pieces in time.
        DataError: If X and y cannot be trained on, see `check_data`.
        OptionError: If an option is outside what is allowed.
    """
    source = source_of(X, y, batch_size, replicas, shuffle_seed)
    bound = Timeouts.from_config().bound("request")
    return Pieces(source, client, workers, bound)


def _spread(
    indices: Sequence[int], workers: Sequence[str], homes: Mapping[int, str]
) -> dict[int, str]:
    """A worker per piece: where it is already, else the one with the fewest so far."""
    chosen = {i: homes[i] for i in indices if homes.get(i) in workers}
    pieces = dict.fromkeys(workers, 0)
    for worker in chosen.values():
        pieces[worker] += 1
    for index in indices:
        if index not in chosen:
            chosen[index] = min(workers, key=pieces.__getitem__)
            pieces[chosen[index]] += 1
    return chosen
