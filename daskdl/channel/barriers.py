"""Where the replicas of a run meet, as the scheduler keeps it. No I/O."""

from collections.abc import Collection, Mapping
from typing import Any

from daskdl.channel.gathering import Gathering
from daskdl.channel.messages import Barrier


class Barriers:
    """Open gatherings, and what those have said that wait for a lease meanwhile.

    A key may be used again and again: whoever comes after a gathering is settled is
    the first of the next one.

    Attributes:
        open: Gatherings that are not settled, by key.
    """

    open: dict[str, Gathering]

    def __init__(self) -> None:
        self.open = {}
        self._standing_by: dict[int, Any] = {}

    def arrive(
        self,
        key: str,
        replica: int,
        note: Any,
        told: bytes = b"",
        kind: str = Barrier.MEET,
    ) -> Gathering:
        """A replica is at a barrier."""
        gathering = self.open.setdefault(key, Gathering())
        gathering.arrive(replica, note, told, kind)
        return gathering

    def stand_by(self, replica: int, note: Any) -> None:
        """A replica waits for a lease: rounds take this for its note meanwhile."""
        self._standing_by[replica] = note

    def resume(self, replica: int) -> None:
        """It waits no longer, or is gone."""
        self._standing_by.pop(replica, None)

    def over(self, gathering: Gathering, members: Collection[int]) -> bool:
        """Whether nobody has to be waited for any more.

        Args:
            gathering: To look at.
            members: All that train.
        """
        if gathering.kind == Barrier.ROUND:
            members = set(members) - self._standing_by.keys()
        return gathering.over(members)

    def settle(self, key: str, gathering: Gathering, gone: Mapping[int, int]) -> None:
        """All are there that are waited for: what they read is written down.

        Args:
            key: Of the gathering.
            gathering: That is over.
            gone: Last update of those that left or were lost.
        """
        gathering.gone = dict(gone)
        if gathering.kind == Barrier.ROUND:
            for replica, note in self._standing_by.items():
                gathering.notes.setdefault(replica, note)
        self.open.pop(key, None)
