"""The latest updates a replica can still hand to one that missed them. No I/O."""

import threading
from collections import deque
from collections.abc import Iterable

from daskdl.channel.messages import Item
from daskdl.errors import OptionError


class Ring:
    """Updates published or received, by origin and sequence, within a bound.

    At the bound the oldest are forgotten, whatever their origin; whoever asks for
    those takes a snapshot instead. Payloads are shared, not copied: nobody may
    write to them, and they have to be compact: a view keeps alive what it is a view of.

    What a replica of a mesh has published itself must not be forgotten like that: it
    belongs in an :class:`~daskdl.channel.unconfirmed.Unconfirmed`.

    All methods may be called from any thread.

    Args:
        limit_bytes: Most bytes kept, counted by `Item.weight`, >= 0. An item that
            is larger is not kept at all, and displaces nothing.

    Attributes:
        limit_bytes: As given.
        nbytes: Bytes kept now.

    Raises:
        OptionError: If the bound is negative.

    Example:
        >>> ring = Ring(limit_bytes=1000)
        >>> for sequence in (1, 2, 3):
        ...     ring.keep(Item("update", 7, sequence, 0, nbytes=150))
        >>> [item.sequence for item in ring.find(7, [3, 2, 1])], ring.nbytes
        ([2, 3], 908)
    """

    limit_bytes: int
    nbytes: int

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 0:
            raise OptionError(f"limit_bytes must be >= 0, got {limit_bytes}")
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._items: deque[Item] = deque()  # oldest first
        self._found: dict[int, dict[int, Item]] = {}  # the same by origin and sequence
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def keep(self, item: Item) -> None:
        """Keep an update as the latest one; one that is here stays where it is."""
        weight = item.weight()
        with self._lock:
            of_origin = self._found.setdefault(item.origin, {})
            if weight > self.limit_bytes or item.sequence in of_origin:
                return
            self._items.append(item)
            of_origin[item.sequence] = item
            self.nbytes += weight
            while self.nbytes > self.limit_bytes:
                oldest = self._items.popleft()
                del self._found[oldest.origin][oldest.sequence]
                self.nbytes -= oldest.weight()

    def find(self, origin: int, sequences: Iterable[int]) -> list[Item]:
        """Those of an origin's updates that are still here, ascending."""
        wanted = sorted(set(sequences))
        with self._lock:
            of_origin = self._found.get(origin, {})
            return [of_origin[sequence] for sequence in wanted if sequence in of_origin]
