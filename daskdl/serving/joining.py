"""Which calls leave together, and when. No clock, no event loop, no arrays."""

from collections import deque
from collections.abc import Hashable, Iterator, Sequence

from daskdl.serving.calls import Call


class Joining:
    """Calls that wait, in one line for each kind, oldest first.

    A batch is the beginning of a line, with at most `batch_limit` rows, so that no
    call is overtaken by one of its own kind. It is due when no more fits in, or when
    its first call has waited for `wait_s`; the oldest that is due leaves first.

    Args:
        batch_limit: Rows of a batch, >= those of any call.
        wait_s: How long a call waits for others, >= 0.
    """

    _lines: dict[Hashable, deque[Call]]  # none of them is empty

    def __init__(self, batch_limit: int, wait_s: float) -> None:
        self._limit = batch_limit
        self._wait_s = wait_s
        self._lines = {}

    def __len__(self) -> int:
        """How many calls wait."""
        return sum(len(line) for line in self._lines.values())

    def add(self, call: Call) -> None:
        """A call has come: it is the last of its line."""
        self._lines.setdefault(call.kind, deque()).append(call)

    def put_back(self, calls: Sequence[Call]) -> None:
        """Calls that had left come back, in the same order: they are the first."""
        for call in reversed(calls):
            self._lines.setdefault(call.kind, deque()).appendleft(call)

    def withdraw(self, call: Call) -> bool:
        """Nobody wants it any more; whether it was waiting."""
        line = self._lines.get(call.kind, deque())
        if call not in line:
            return False
        line.remove(call)
        if not line:
            del self._lines[call.kind]
        return True

    def take(self, now: float, *, hurry: bool) -> list[Call]:
        """The calls of the next batch, which leave.

        Args:
            now: On the clock that says when calls came.
            hurry: Whether no call is to wait for others.

        Returns:
            They are >= 1, or none is due.
        """
        due = [
            line
            for line in self._lines.values()
            if hurry or self._due_in(line, now) <= 0
        ]
        if not due:
            return []
        line = min(due, key=lambda line: line[0].came)
        calls = list(self._batch(line))
        for _ in calls:
            line.popleft()
        if not line:
            del self._lines[calls[0].kind]
        return calls

    def due_in(self, now: float) -> float | None:
        """Seconds until the next batch is due, 0 if it is; None if no call waits."""
        waits = (self._due_in(line, now) for line in self._lines.values())
        return min(waits, default=None)

    def clear(self) -> list[Call]:
        """All calls leave, and nobody takes them."""
        calls = [call for line in self._lines.values() for call in line]
        self._lines.clear()
        return calls

    def _due_in(self, line: deque[Call], now: float) -> float:
        first = line[0]
        batch = list(self._batch(line))
        full = len(batch) < len(line) or sum(c.rows for c in batch) == self._limit
        if full or first.alone or first.losses:
            return 0.0
        return max(0.0, first.came + self._wait_s - now)

    def _batch(self, line: deque[Call]) -> Iterator[Call]:
        room = self._limit
        for number, call in enumerate(line):
            room -= call.rows
            if room < 0 or (number and call.alone):
                return
            yield call
            if call.alone:
                return
