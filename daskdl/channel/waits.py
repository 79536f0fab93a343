"""Where a training thread waits for others: with a bound, and counted by cause."""

import time
from collections.abc import Callable
from typing import Any

from daskdl.channel.base import Stopped
from daskdl.channel.endpoint import Endpoint
from daskdl.channel.inbox import Inbox
from daskdl.errors import WaitTimeoutError
from daskdl.timeouts import Bound


class Waits:
    """The waits of one replica's training thread.

    Args:
        inbox: Woken by whatever may end a wait.
        endpoint: Which replica it is, and the bounds.

    Attributes:
        patience: For what others do.
        waited_s: Seconds waited since the last `count_off`, by cause.
    """

    patience: Bound
    waited_s: dict[str, float]

    def __init__(self, inbox: Inbox, endpoint: Endpoint) -> None:
        self.waited_s = {}
        # The longest that a piece and a step of another may take.
        self.patience = endpoint.timeouts.bound("data", "silence")
        self._inbox = inbox
        self._timeouts = endpoint.timeouts
        self._replica = endpoint.replica

    def check(self) -> None:
        """Raise if the run was stopped."""
        if self._inbox.stopped is not None:
            raise Stopped(self._inbox.stopped)

    def until(
        self, cause: str, ready: Callable[[], bool], state: Callable[[], Any]
    ) -> None:
        """Wait for what others do.

        Args:
            cause: For messages and counters.
            ready: Checked whenever something arrives.
            state: By replica, for the message.

        Raises:
            WaitTimeoutError: If it takes too long. Where there is a scheduler it gives
                up who is silent; the bound is for one that says nothing either.
        """
        if not self.until_true(cause, ready, self.patience.seconds):
            raise WaitTimeoutError(
                f"replica {self._replica} waited {self.patience} for {cause}; by "
                f"replica: {state()}; last heard: {self.last_heard()}"
            )

    def until_done(self, cause: str, future: Any, timeout_s: float) -> bool:
        """Wait for a future that wakes the inbox; returns whether it is done."""
        self.until_true(cause, future.done, timeout_s)
        return bool(future.done())

    def until_true(
        self, cause: str, ready: Callable[[], bool], timeout_s: float | None
    ) -> bool:
        """Wait, leave if the run is stopped, and say whether it was in time.

        Args:
            cause: For counters.
            ready: Checked whenever something arrives.
            timeout_s: Seconds. None: others have to do something first.
        """
        came = self._wait(cause, ready, timeout_s)
        self.check()
        return came

    def last_heard(self) -> str:
        """Of the other replicas, for messages."""
        return "; ".join(self._inbox.last_words())

    def count_off(self) -> dict[str, float]:
        """Seconds waited since the last call, by cause."""
        waited_s, self.waited_s = self.waited_s, {}
        return waited_s

    def _wait(
        self, cause: str, ready: Callable[[], bool], timeout_s: float | None
    ) -> bool:
        started = time.perf_counter()
        came = self._until(ready, timeout_s)
        more = time.perf_counter() - started
        self.waited_s[cause] = self.waited_s.get(cause, 0.0) + more
        return came

    def _until(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        return self._inbox.wait_for(ready, timeout_s)
