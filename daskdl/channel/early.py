"""What a newcomer is sent before it has the state that this changes."""

from daskdl.channel.messages import Item
from daskdl.channel.positions import Positions


class Early:
    """Items that wait for a snapshot; bounded, first copies only."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.nbytes = 0
        self._positions = Positions()

    def keep(self, item: Item, limit_bytes: int) -> bool | None:
        """Keep a first copy; whether it is one, None if there is no room for it."""
        # Not folded, as a full inbox is: the snapshot may contain it.
        if self.items and self.nbytes >= limit_bytes:
            return None
        if not self._positions.accept(item.origin, item.sequence):
            return False
        self.items.append(item)
        self.nbytes += item.weight()
        return True
