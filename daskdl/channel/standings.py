"""What each replica of a mesh has adopted and received, as it told. No I/O.

Updates go from replica to replica, so nobody central sees them. From what the
replicas tell follow two things: where a newcomer's snapshot has to reach, and what
may be forgotten because all have it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass
class Standing:
    """What one replica told of itself.

    Attributes:
        generation: Of the routes it goes by; -1 until it told.
        adopted_at: Its last own update when it took these up, or later.
        received: All updates of an origin up to this one are there, by origin.
    """

    generation: int = -1
    adopted_at: int = 0
    received: dict[int, int] = field(default_factory=dict)


class Standings:
    """Of all replicas that are present.

    Example:
        >>> standings = Standings()
        >>> standings.join(0, {})
        >>> standings.join(1, {})
        >>> standings.tell(0, Standing(generation=2, adopted_at=5))
        True
        >>> standings.tell(1, Standing(generation=2, received={0: 3}))
        True
        >>> standings.cut([0, 1]), standings.stable(0, [0, 1], default=5)
        ({0: 5, 1: 0}, 3)
    """

    def __init__(self) -> None:
        self._standings: dict[int, Standing] = {}

    def join(self, replica: int, floor: Mapping[int, int]) -> None:
        """A replica is present.

        Args:
            replica: Its number.
            floor: It will need nothing up to here, by origin.
        """
        self._standings[replica] = Standing(received=dict(floor))

    def leave(self, replica: int) -> None:
        """A replica is gone."""
        self._standings.pop(replica, None)

    def tell(self, replica: int, told: Standing) -> bool:
        """A replica says how it stands; whether it goes by other routes now."""
        standing = self._standings[replica]
        changed = told.generation > standing.generation
        if changed:
            standing.generation = told.generation
            standing.adopted_at = told.adopted_at
        self.raise_floor(replica, told.received)
        return changed

    def raise_floor(self, replica: int, received: Mapping[int, int]) -> None:
        """A replica has more, or needs less."""
        known = self._standings[replica].received
        for origin, sequence in received.items():
            known[origin] = max(known.get(origin, 0), sequence)

    def adopted(self, replicas: Collection[int], generation: int) -> bool:
        """Whether all of these go by the routes of a generation, or by later ones."""
        return all(self._standings[r].generation >= generation for r in replicas)

    def cut(self, replicas: Collection[int]) -> dict[int, int]:
        """Last own update of each before it sent by the routes that it goes by."""
        return {r: self._standings[r].adopted_at for r in replicas}

    def stable(self, origin: int, replicas: Collection[int], default: int) -> int:
        """Up to where all others of these have an origin's updates.

        Args:
            origin: Whose updates.
            replicas: That have to have them.
            default: If there are no others.
        """
        others = [self._standings[r].received for r in replicas if r != origin]
        return min((received.get(origin, 0) for received in others), default=default)
