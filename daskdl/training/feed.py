"""What one replica trains on in an epoch: leased pieces, cut into batches."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator

from daskdl.channel.base import Channel
from daskdl.channel.leasing import Pause, Piece
from daskdl.data.batches import Batch, Chunk, Transform, batches, rows_in
from daskdl.training.reader import Reader, Reading
from daskdl.training.stepping import Group, rows_of
from daskdl.training.stores import Store


class Feed:
    """Batches of one phase of one epoch, until nobody has anything left to do.

    They come in groups, one for each step of the optimizer. A piece is given back when
    the steps with all its rows have been made, so that nothing of it is left out if
    this replica is lost before. Whoever comes to the end first waits for the others:
    what a lost one held is then trained on here.

    Args:
        channel: Leases the pieces.
        epoch: Counted from 0.
        store: Has the parts.
        reading: How they are read.
        transform: What is made of each batch before it is trained on, or None.

    Attributes:
        loss: Mean loss of this epoch so far, for the client's bar.
        dropped: Rows that filled no batch, and were left out for that.
        pause: What is left of the epoch, if the last groups ended with a lap; else
            None. When all have met, `groups` goes on.
    """

    loss: float
    dropped: int
    pause: Pause | None

    def __init__(
        self,
        channel: Channel,
        epoch: int,
        store: Store,
        reading: Reading,
        transform: Transform | None = None,
    ) -> None:
        self._channel = channel
        self._epoch = epoch
        self._reading = reading
        self._reader = Reader(store, reading)
        self._transform = transform
        self._given = self._done = 0  # rows: passed to the batches, and done with
        self._held: deque[tuple[Piece, int, int]] = deque()  # rows, and `_given` after
        self.loss = 0.0
        self.dropped = 0
        self.pause = None

    @property
    def skipped(self) -> int:
        """Rows that could not be read, or not be used."""
        return self._reader.skipped

    @property
    def reason(self) -> str:
        """Why the first of them was left out; "" if none was."""
        return self._reader.reason

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
        self.pause = None
        piece = self._lease(wait=False)
        while True:
            made = self._batches(piece)
            while group := list(itertools.islice(made, size)):
                rows = rows_of(group)
                yield self._transformed(group)
                self._done += rows
            rest()
            piece = self._lease(wait=True)
            if piece is None:
                return

    def _batches(self, piece: Piece | None) -> Iterator[Batch]:
        size = self._reading.batch_size
        for batch in batches(self._chunks(piece), size):
            rows = rows_in(batch)
            if self._reading.drop_last and rows < size:
                self._done += rows
                self.dropped += rows
            else:
                yield batch

    def _transformed(self, group: Group) -> Group:
        if self._transform is None:
            return group
        return [self._transform(batch) for batch in group]

    def _lease(self, *, wait: bool) -> Piece | None:
        finished = []
        while self._held and self._held[0][2] <= self._done:
            piece, examples, _ = self._held.popleft()
            finished.append(
                {"piece": piece.number, "examples": examples, "loss": self.loss}
            )
        phase = self._reading.phase
        leased = self._channel.lease(phase, self._epoch, finished, wait=wait)
        if isinstance(leased, Pause):
            self.pause = leased
            return None
        return leased

    def _chunks(self, piece: Piece | None) -> Iterator[Chunk]:
        while piece is not None:
            before = self._given
            for chunk in self._reader.chunks(piece):
                self._given += chunk.length
                yield chunk
                del chunk  # as in the reader
            self._held.append((piece, self._given - before, self._given))
            piece = self._lease(wait=False)
