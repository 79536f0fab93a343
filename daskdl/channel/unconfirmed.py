"""What a replica has published and not all others have. No I/O."""

import threading
from collections import OrderedDict
from collections.abc import Iterable

from daskdl.channel.messages import Item


class Unconfirmed:
    """A replica's own updates, kept until everybody has them.

    Unlike a :class:`~daskdl.channel.ring.Ring` it forgets nothing at its bound: it
    has no room then, and its owner publishes nothing. So no update of a replica that
    is alive is ever out of reach. Below its bound it takes an update of any size.

    All methods may be called from any thread.

    Args:
        limit_bytes: Most bytes kept, counted by `Item.weight`.

    Example:
        >>> unconfirmed = Unconfirmed(limit_bytes=800)
        >>> for sequence in (1, 2):
        ...     unconfirmed.keep(Item("update", 0, sequence, 0, nbytes=150))
        >>> unconfirmed.has_room(), unconfirmed.confirm(1), unconfirmed.has_room()
        (False, True, True)
    """

    nbytes: int

    def __init__(self, limit_bytes: int) -> None:
        self.nbytes = 0
        self._limit_bytes = limit_bytes
        self._items: OrderedDict[int, Item] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def pressed(self) -> bool:
        """Whether it is half full, so that it is time to ask what is confirmed."""
        return self.nbytes > self._limit_bytes // 2

    def has_room(self) -> bool:
        """Whether one more update may be kept."""
        return not self._items or self.nbytes < self._limit_bytes

    def keep(self, item: Item) -> None:
        """Keep an update, in ascending order, whether there is room or not."""
        with self._lock:
            if item.sequence in self._items:
                return
            self._items[item.sequence] = item
            self.nbytes += item.weight()

    def confirm(self, sequence: int) -> bool:
        """Everybody has all up to this one; whether anything was forgotten."""
        with self._lock:
            before = len(self._items)
            while self._items and next(iter(self._items)) <= sequence:
                _, item = self._items.popitem(last=False)
                self.nbytes -= item.weight()
            return len(self._items) < before

    def find(self, sequences: Iterable[int]) -> list[Item]:
        """Those that are still kept, ascending."""
        wanted = sorted(set(sequences))
        with self._lock:
            return [self._items[s] for s in wanted if s in self._items]
