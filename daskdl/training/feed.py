"""What one replica trains on in an epoch: leased pieces, cut into batches."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from daskdl.channel.base import Channel, Piece
from daskdl.data.arrays import check_labels
from daskdl.data.batches import batches
from daskdl.data.sources import Rows
from daskdl.objective import Batch
from daskdl.training.stepping import Group, rows_of
from daskdl.training.stores import Store
from daskdl.training.task import TaskOptions


class Feed:
    """Batches of one phase of one epoch, until nobody has anything left to do.

    They come in groups, one for each step of the optimizer. A piece is given back when
    the steps with all its rows have been made, so that nothing of it is left out if
    this replica is lost before. Whoever comes to the end first waits for the others:
    what a lost one held is then trained on here.

    Args:
        channel: Leases the pieces.
        options: Of the run.
        phase: ``"train"`` or ``"validation"``.
        epoch: Counted from 0.
        store: Has the rows of the pieces.

    Attributes:
        loss: Mean loss of this epoch so far, for the client's bar.
    """

    loss: float

    def __init__(
        self,
        channel: Channel,
        options: TaskOptions,
        phase: str,
        epoch: int,
        store: Store,
    ) -> None:
        self._store = store
        self._channel = channel
        self._options = options
        self._phase = phase
        self._epoch = epoch
        self._given = self._done = 0  # rows: passed to the batches, and trained on
        self._held: deque[tuple[Piece, int, int]] = deque()  # rows, and `_given` after
        self._loaded: tuple[int, Rows] | None = None  # the last part, and its rows
        self.loss = 0.0

    def batches(self) -> Iterator[Batch]:
        """Yield batches; the one before is done with when the next is asked for."""
        for group in self.groups(lambda: None, size=1):
            yield from group

    def groups(self, rest: Callable[[], None], size: int) -> Iterator[Group]:
        """Yield groups; the one before has been trained on when the next is asked for.

        Args:
            rest: Called before waiting for others; nothing is begun and not done then.
            size: Batches of a group. The last before a wait may have fewer.

        Yields:
            Pairs (x, y), see :func:`daskdl.data.batches.batches`.
        """
        piece = self._lease(wait=False)
        while True:
            rows = batches(self._rows(piece), self._options.batch_size)
            while group := list(itertools.islice(rows, size)):
                yield group
                self._done += rows_of(group)
            rest()
            piece = self._lease(wait=True)
            if piece is None:
                return

    def _lease(self, *, wait: bool) -> Piece | None:
        finished = []
        while self._held and self._held[0][2] <= self._done:
            piece, examples, _ = self._held.popleft()
            finished.append(
                {"piece": piece.number, "examples": examples, "loss": self.loss}
            )
        return self._channel.lease(self._phase, self._epoch, finished, wait=wait)

    def _rows(self, piece: Piece | None) -> Iterator[Rows]:
        while piece is not None:
            self._given += sum(one.rows for one in piece.ranges)
            self._held.append((piece, sum(r.rows for r in piece.ranges), self._given))
            for part, start, stop in piece.ranges:
                x, y = self._load(part, piece.keys[part])
                yield x[start:stop], y[start:stop]
            piece = self._lease(wait=False)

    def _load(self, part: int, key: str) -> Rows:
        if self._loaded is None or self._loaded[0] != part:
            self._loaded = (part, self._shuffled(part, key))
        return self._loaded[1]

    def _shuffled(self, part: int, key: str) -> Rows:
        labels = self._options.labels
        x, y = self._store.rows(self._phase, part, key)
        if labels is not None:
            where = f"y of piece {part} of the {self._phase} data"
            check_labels(y, labels.classes, where, labels.ignore_index)
        if self._phase == "train" and self._options.shuffle:
            # The same rows in the same order, whoever trains on the part.
            turn = self._options.epochs_before + self._epoch
            order = np.random.default_rng([self._options.seed, turn, part])
            rows = order.permutation(len(x))
            x, y = x[rows], y[rows]
        return x, y
