"""Updates that have arrived and are not applied yet: bounded, deduplicated.

Filled on the event loop, emptied by the training thread.
"""

import threading
from collections.abc import Callable, Iterable, Mapping

from daskdl.channel.heard import Heard, Word
from daskdl.channel.messages import Item, ItemKind
from daskdl.channel.pile import Arrived, Pile
from daskdl.channel.positions import Positions, Received
from daskdl.channel.repair import Fence
from daskdl.codec import Update


class Inbox:
    """What one replica has received.

    Args:
        size: Parameters of the model.
        grid: Of the run, parameter units.
        limit_bytes: Bytes of waiting updates beyond which they are folded.
        in_order: Updates of one origin never overtake each other or what it says
            of itself. If they may, a step counts once its updates are here.
        in_step: Replicas go in step; see :class:`Pile`.
        changed: Of whoever else has to know, and guards more than this; None: its own.
    """

    received_bytes: int  # of frames, since they were counted off
    refused: int  # frames that could not be read, likewise
    stopped: str | None  # why the replica has to leave

    def __init__(
        self,
        size: int,
        grid: float,
        limit_bytes: int,
        *,
        in_order: bool = True,
        in_step: bool = False,
        changed: threading.Condition | None = None,
    ) -> None:
        self.received_bytes = 0
        self.refused = 0
        self.stopped = None
        self._in_order = in_order
        self._positions = Positions()
        self._fence = Fence()
        self._heard = Heard()
        self._pile = Pile(size, grid, limit_bytes, in_step=in_step)
        self._changed = threading.Condition() if changed is None else changed

    @property
    def grid(self) -> float:
        """Of the run, parameter units."""
        return self._pile.grid

    # ---- event loop

    def put(self, item: Item, update: Update) -> bool:
        """Keep an update to be applied, once.

        Returns:
            False if it was received before, or must not be taken in, see
            `holds_back`.
        """
        with self._changed:
            if not self._fence.admits(item.origin, item.sequence):
                return False
            if not self._positions.accept(item.origin, item.sequence):
                return False
            self._pile.add(update)
            self.received_bytes += item.nbytes
            self._hear(item.origin, Word(item.sequence, item.step))
            self._heard.catch_up(item.origin, self._complete(item.origin))
            self._changed.notify_all()
            return True

    def holds_back(self, item: Item) -> bool:
        """Whether an update has to come again later, when the barrier is over."""
        with self._changed:
            key = item.origin, item.sequence
            here = self._positions.has(*key) or self._fence.admits(*key)
            return self._fence.holding and not here

    def note(self, item: Item) -> bool:
        """Keep what a control item says; whether that is news of its origin."""
        news = True
        with self._changed:
            if item.kind == ItemKind.STOP:
                self.stopped = self.stopped or str(item.payload)
            elif item.kind == ItemKind.LOST:
                self._heard.lose(item.origin)
            else:
                done = int(item.payload) if item.kind == ItemKind.PROGRESS else -1
                word = Word(item.sequence, item.step, done)
                news = self._hear(item.origin, word)
            self._changed.notify_all()
        return news

    def hear(self, words: Mapping[int, Word]) -> None:
        """Keep what the scheduler says of the others."""
        with self._changed:
            for origin, word in words.items():
                self._hear(origin, word)
            self._changed.notify_all()

    def refuse(self) -> None:
        """Count a frame that could not be read."""
        with self._changed:
            self.refused += 1

    def stop(self, reason: str) -> None:
        """Make every wait here end."""
        with self._changed:
            self.stopped = self.stopped or reason
            self._changed.notify_all()

    def _hear(self, origin: int, word: Word) -> bool:
        complete = None if self._in_order else self._complete(origin)
        return self._heard.hear(origin, word, complete)

    def _complete(self, origin: int) -> int:
        return self._positions.complete(origin)

    def gaps(self, most: int) -> dict[int, list[int]]:
        """What those that are here have published, as they said, and is not here.

        Args:
            most: How far to look beyond the first gap of each.
        """
        with self._changed:
            last = {
                origin: min(last, self._complete(origin) + most)
                for origin, last in self._heard.last().items()
            }
            return self._positions.behind(last)

    def received(self) -> dict[int, Received]:
        """What exactly was received of each origin."""
        with self._changed:
            return dict(self._positions.received())

    # ---- training thread

    def begin(self, received: Mapping[int, Received], grid: float) -> None:
        """Take over what another replica had applied, with its snapshot."""
        with self._changed:
            self._pile.grid = grid
            self._pile.clear()
            self._positions = Positions(received)
            for origin in self._heard.last():
                self._heard.catch_up(origin, self._complete(origin))

    def hold(self, lost: Iterable[int]) -> dict[int, Received]:
        """Take nothing in from now on; say what was received until now.

        Args:
            lost: Replicas of which nothing is taken in afterwards either.
        """
        with self._changed:
            self._fence.close(lost)
            self._fence.hold()
            return dict(self._positions.received())

    def open(self, target: Mapping[int, Received]) -> None:
        """Take in what all have settled on, until the next `hold`."""
        with self._changed:
            self._fence.open(target)

    def release(self) -> None:
        """The barrier is over: take in what comes."""
        with self._changed:
            self._fence.release()

    def align(self, replicas: Iterable[int], step: int, grid: float) -> None:
        """All replicas have met.

        Args:
            replicas: The others.
            step: Steps each has made.
            grid: Of the run, from now on.
        """
        with self._changed:
            self._pile.grid = grid
            for replica in replicas:
                self._heard.hear(replica, Word(0, step))

    def meet(self, steps: Mapping[int, int]) -> None:
        """Get to know other replicas, and the steps they have made."""
        with self._changed:
            for replica, step in steps.items():
                self._heard.hear(replica, Word(0, step))

    def others(self) -> list[int]:
        """The other replicas that train, ascending, as far as known."""
        with self._changed:
            return self._heard.others()

    def lost(self) -> set[int]:
        """Replicas that are gone, as far as known."""
        with self._changed:
            return set(self._heard.lost)

    def take_all(self) -> tuple[Arrived, Mapping[int, Received]]:
        """Take what waits, and say what then has been taken in all."""
        with self._changed:
            return self.take(), self._positions.received()

    def take(self, up_to_step: int | None = None) -> Arrived:
        """Take what waits, all of it or only what was sent up to a step.

        Args:
            up_to_step: For runs in step, in which an update from a replica's next
                step must not be applied before one's own.
        """
        with self._changed:
            return self._pile.take(up_to_step)

    def slowest(self, lap: int) -> int | None:
        """Steps completed by the slowest other replica not done with a lap."""
        with self._changed:
            return self._heard.slowest(lap)

    def steps(self) -> dict[int, int]:
        """Steps completed by each other replica, as far as known."""
        with self._changed:
            return self._heard.steps()

    def last_words(self) -> list[str]:
        """What each other replica said last, and when, for messages."""
        with self._changed:
            return self._heard.described()

    def count_off(self) -> tuple[int, int, int]:
        """Bytes received, frames refused and folds since the last call."""
        with self._changed:
            counted = (self.received_bytes, self.refused, self._pile.folds)
            self.received_bytes = self.refused = self._pile.folds = 0
        return counted

    def reached(self, target: Mapping[int, int]) -> bool:
        """Whether all has been received of what others have sent up to a target."""
        with self._changed:
            return self._positions.reached(target)

    def behind(self, target: Mapping[int, int]) -> dict[int, list[int]]:
        """What has not been received of what others have sent."""
        with self._changed:
            return self._positions.behind(target)

    def wait_for(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Block until ready or stopped; False on time-out.

        Args:
            ready: Checked after each change; may call the methods above.
            timeout_s: Seconds; None: no bound.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: self.stopped is not None or ready(), timeout_s
            )

    def wake(self) -> None:
        """Let whoever waits look again, because something else changed."""
        with self._changed:
            self._changed.notify_all()
