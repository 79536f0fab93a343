"""What a client is told about its run, in order, kept until it has been read."""

from typing import Any


class EventLog:
    """Numbered events; those a reader has confirmed are dropped."""

    def __init__(self) -> None:
        self._first = 0
        self._events: list[dict[str, Any]] = []

    def __len__(self) -> int:
        """How many were posted in all."""
        return self._first + len(self._events)

    def post(self, kind: str, **fields: Any) -> None:
        """Append an event."""
        self._events.append({"kind": kind, **fields})

    def since(self, seen: int) -> list[dict[str, Any]]:
        """Events after the `seen` first ones, which are confirmed by asking."""
        confirmed = min(max(seen - self._first, 0), len(self._events))
        del self._events[:confirmed]
        self._first += confirmed
        return list(self._events)
