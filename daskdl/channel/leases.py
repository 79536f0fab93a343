"""Who trains on what in one epoch. No I/O, no clock."""

from collections.abc import Callable, Sequence

import numpy as np


def piece_order(pieces: int, epoch: int, seed: int | None) -> list[int]:
    """The order in which an epoch goes through the pieces.

    Args:
        pieces: How many there are.
        epoch: Counted from 0; each has its own order.
        seed: None keeps the order of the data.
    """
    if seed is None:
        return list(range(pieces))
    return [int(i) for i in np.random.default_rng([seed, epoch]).permutation(pieces)]


class Leases:
    """Pieces of one epoch, handed out one at a time.

    Whoever asks gets a piece that is near, else the next one, so that fast
    replicas take more and a slow one delays nobody by more than one piece.
    Fixed shares (`share_among`) are for synchronous runs, which must be
    repeatable: there the i-th of k replicas gets every k-th piece.

    Args:
        order: Piece numbers in the order to hand them out.
        share_among: Replicas with a fixed share each, or None for first come.
    """

    repeated: int  # pieces handed out again because their replica was lost

    def __init__(
        self, order: Sequence[int], share_among: Sequence[int] | None = None
    ) -> None:
        self.repeated = 0
        self._free = list(order)
        self._held: dict[int, set[int]] = {}
        self._again: set[int] = set()
        self._owner: dict[int, int] = {}
        if share_among is not None:
            replicas = sorted(share_among)
            self._owner = {
                piece: replicas[i % len(replicas)] for i, piece in enumerate(order)
            }

    def take(
        self, replica: int, is_near: Callable[[int], bool] = lambda piece: False
    ) -> int | None:
        """Lease a piece to a replica; None if there is none left for it."""
        allowed = self._allowed(replica)
        if not allowed:
            return None
        # Where copies happen to be must not change a run that is to be repeatable.
        near = (p for p in allowed if is_near(p)) if not self._owner else iter(())
        piece = next(near, allowed[0])
        self._free.remove(piece)
        self._held.setdefault(replica, set()).add(piece)
        if piece in self._again:
            self.repeated += 1
        return piece

    def has_one_for(self, replica: int) -> bool:
        """Whether `take` would lease this replica a piece now."""
        return bool(self._allowed(replica))

    def _allowed(self, replica: int) -> list[int]:
        return [p for p in self._free if self._owner.get(p, replica) == replica]

    def finish(self, replica: int, piece: int) -> bool:
        """A replica has trained on its piece; False if the lease was not its own."""
        held = self._held.get(replica, set())
        if piece not in held:
            return False
        held.remove(piece)
        return True

    def lose(self, replica: int) -> None:
        """Free what a lost replica held or would have got."""
        held = self._held.pop(replica, set())
        self._again |= held
        self._free.extend(sorted(held))
        self._owner = {p: r for p, r in self._owner.items() if r != replica}

    def unfinished(self) -> int:
        """Pieces nobody has finished yet."""
        return len(self._free) + sum(len(held) for held in self._held.values())
