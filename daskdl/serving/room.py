"""How many rows may wait, from any thread."""

import threading
from concurrent.futures import Future

from daskdl.errors import BusyError


class Room:
    """Counts the rows that wait for a replica, and lets no more in than a limit.

    Args:
        limit: Rows.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rows = 0
        self._calls = 0
        self._freed: Future[None] = Future()
        self._lock = threading.Lock()

    def enter(self, rows: int) -> None:
        """The rows of a call begin to wait.

        Raises:
            BusyError: If there is no room for them.
        """
        with self._lock:
            if self._rows + rows > self.limit:
                raise BusyError(
                    f"the predictor is busy: {self._calls} calls wait with "
                    f"{self._rows} rows, {rows} more are over "
                    f"queue_limit={self.limit}; call again later, give a timeout to "
                    "wait for room, or use more replicas"
                )
            self._rows += rows
            self._calls += 1

    def leave(self, rows: int) -> None:
        """The rows of a call wait no longer."""
        with self._lock:
            self._rows -= rows
            self._calls -= 1
            freed, self._freed = self._freed, Future()
        freed.set_result(None)

    def freed(self) -> Future[None]:
        """Done when rows leave for the next time; shared, so nobody may cancel it."""
        with self._lock:
            return self._freed
