"""Items on their way to one destination: bounded, in order, between threads."""

import threading
from collections import deque
from collections.abc import Callable

from daskdl.channel.messages import Item


class Outbox:
    """A queue for one destination with a bound in bytes.

    At the bound an offer is refused and nothing changes: on a replica the
    update then stays in the residual, in the relay the publisher keeps it.
    An empty queue takes one item of any size, so that no update is too large
    to be sent at all.

    Args:
        limit_bytes: Bytes that may wait here.

    Attributes:
        nbytes: Bytes waiting now.
        on_offer: Called after each accepted item, from the offering thread; the
            pump that empties the queue sets it.
        on_drop: Called after items have arrived, from the dropping thread.
    """

    limit_bytes: int
    nbytes: int
    on_offer: Callable[[], object]
    on_drop: Callable[[], object]

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._items: deque[Item] = deque()
        self.on_offer = self.on_drop = lambda: None
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._items)

    def has_room(self, nbytes: int) -> bool:
        """Whether an item of this weight would be accepted now."""
        return not self._items or self.nbytes + nbytes <= self.limit_bytes

    def offer(self, item: Item, *, force: bool = False) -> bool:
        """Append the item if there is room; say whether it was accepted.

        Args:
            item: What to append.
            force: Accept beyond the bound: for the few control items of a run.
        """
        with self._changed:
            if not force and not self.has_room(item.weight()):
                return False
            self._items.append(item)
            self.nbytes += item.weight()
        self.on_offer()
        return True

    def head(self, limit_bytes: int) -> list[Item]:
        """The oldest items, at least one if any, up to so many bytes together."""
        with self._changed:
            batch: list[Item] = []
            total = 0
            for item in self._items:
                total += item.weight()
                if batch and total > limit_bytes:
                    break
                batch.append(item)
            return batch

    def drop(self, count: int) -> None:
        """Forget the oldest items: they have arrived."""
        with self._changed:
            for _ in range(count):
                self.nbytes -= self._items.popleft().weight()
            self._changed.notify_all()
        self.on_drop()

    def wait_for(self, ready: Callable[["Outbox"], bool], timeout_s: float) -> bool:
        """Block until `ready(self)`, checked after each drop; False on time-out."""
        with self._changed:
            return self._changed.wait_for(lambda: ready(self), timeout_s)
