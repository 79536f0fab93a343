"""What leaves a replica, and how long requests with frames are under way."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

from daskdl.channel.messages import Item
from daskdl.thresholds import Drained


class Gauge:
    """Counts for one replica, over all its destinations.

    Time counts once where requests are under way side by side: they share the way out.
    The pause between two requests is not counted, nor is a request without frames.
    """

    def __init__(self) -> None:
        self._drained = Drained()
        self._under_way = 0
        self._since = 0.0  # until then the time is counted
        self._lock = threading.Lock()

    # ---- event loop

    @contextlib.contextmanager
    def request(self, items: Sequence[Item]) -> Iterator[None]:
        """Count the time of a request that carries these."""
        if not items:
            yield
            return
        with self._lock:
            self._count_time()
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._count_time()
                self._under_way -= 1

    def arrived(self, items: Sequence[Item]) -> None:
        """A request was answered: these were accepted."""
        if not items:
            return
        with self._lock:
            former = self._drained
            self._drained = former._replace(
                nbytes=former.nbytes + sum(item.nbytes for item in items),
                frames=former.frames + len(items),
                requests=former.requests + 1,
            )

    def _count_time(self) -> None:
        now = time.perf_counter()
        if self._under_way:
            busy_s = self._drained.busy_s + now - self._since
            self._drained = self._drained._replace(busy_s=busy_s)
        self._since = now

    # ---- training thread

    def take(self, copies: int) -> Drained:
        """Counts since the last call.

        Args:
            copies: Of one published frame that go out from here.
        """
        with self._lock:
            drained, self._drained = self._drained, Drained()
        return drained._replace(copies=copies)
