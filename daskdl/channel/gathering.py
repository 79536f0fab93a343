"""A barrier at which every member leaves a note and reads all of them. No I/O."""

from collections.abc import Collection
from typing import Any


class Gathering:
    """Complete once every present member has arrived.

    A member lost after it arrived keeps its note: what it had sent, all
    survivors have. A member lost before is not waited for.
    """

    notes: dict[int, Any]
    told: dict[int, bytes]  # for the client alone
    gone: dict[int, int] | None  # set once: everybody has to read the same

    def __init__(self) -> None:
        self.notes, self.told = {}, {}
        self.gone = None

    def arrive(self, replica: int, note: Any, told: bytes = b"") -> None:
        """A member is here; arriving again (a retried request) changes nothing."""
        self.notes.setdefault(replica, note)
        self.told.setdefault(replica, told)

    def awaited(self, members: Collection[int]) -> list[int]:
        """Present members that have not arrived yet, ascending."""
        return sorted(set(members) - set(self.notes))

    def over(self, members: Collection[int]) -> bool:
        """Whether it is complete; for good, as whoever becomes a member comes later."""
        return self.gone is not None or not self.awaited(members)
