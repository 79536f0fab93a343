"""A barrier at which every member leaves a note and reads all of them. No I/O."""

from collections.abc import Collection, Mapping
from typing import Any

from daskdl.channel.messages import Barrier


class Gathering:
    """Complete once every present member has arrived.

    A member lost after it arrived keeps its note: what it had sent, all
    survivors have. A member lost before is not waited for.
    """

    notes: dict[int, Any]
    told: dict[int, bytes]  # for the client alone
    gone: dict[int, int] | None  # set once: everybody has to read the same
    counted: Mapping[str, Any]  # likewise, see `Gathered`

    def __init__(self) -> None:
        self.notes, self.told = {}, {}
        self.gone = None
        self.counted = {}
        self._kinds: set[str] = set()

    @property
    def kind(self) -> str:
        """What all have come for; if not all for the same, it is a round."""
        return next(iter(self._kinds)) if len(self._kinds) == 1 else Barrier.ROUND

    def arrive(
        self, replica: int, note: Any, told: bytes = b"", kind: str = Barrier.MEET
    ) -> None:
        """A member is here; arriving again (a retried request) changes nothing."""
        self._kinds.add(kind)
        self.notes.setdefault(replica, note)
        self.told.setdefault(replica, told)

    def awaited(self, members: Collection[int]) -> list[int]:
        """Present members that have not arrived yet, ascending."""
        return sorted(set(members) - set(self.notes))

    def over(self, members: Collection[int]) -> bool:
        """Whether it is complete; for good, as whoever becomes a member comes later."""
        return self.gone is not None or not self.awaited(members)
