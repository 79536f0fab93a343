"""Where a training thread waits on a cluster, for others and for answers.

A newcomer that wants this replica's state gets it wherever the thread waits.
"""

import concurrent.futures
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import override

from daskdl.channel.base import Serve
from daskdl.channel.endpoint import Endpoint
from daskdl.channel.link import Link, Wanted
from daskdl.channel.payloads import wrap_note
from daskdl.channel.waits import Waits
from daskdl.errors import ChannelError, WaitTimeoutError
from daskdl.timeouts import Bound

logger = logging.getLogger(__name__)


class RemoteWaits(Waits):
    """The waits and the requests of one replica's training thread.

    Args:
        link: Its event loop's half.
        endpoint: Which replica it is, and the bounds.

    Attributes:
        make: Makes a snapshot for a newcomer; None: not now.
    """

    make: Serve | None

    def __init__(self, link: Link, endpoint: Endpoint) -> None:
        super().__init__(link.inbox, endpoint)
        self.make = None
        self._link = link
        self._carrier = link.carrier
        self._connection = link.connection
        self._mesh = endpoint.routing == "mesh"

    @override
    def check(self) -> None:
        """Raise if the run was stopped, or the link is broken; else serve newcomers."""
        if self._inbox.stopped is None:
            if self._link.wanted:
                self._serve()
            return
        if self._connection.failure is not None:
            raise self._connection.failure
        super().check()

    def until_sent(self, cause: str, ready: Callable[[], bool]) -> None:
        """Wait until enough of what was published has gone.

        Args:
            cause: For messages and counters.
            ready: Of the carrier.

        Raises:
            WaitTimeoutError: If it takes too long.
        """
        # In a mesh it may be for one who is silent, and then given up by then.
        names = ("silence", "request") if self._mesh else ("silence",)
        bound = self._timeouts.bound(*names)
        if not self.until_true(cause, ready, bound.seconds):
            updates, nbytes, destination = self._carrier.backlog()
            raise WaitTimeoutError(
                f"replica {self._replica} waited {bound} for {cause}: "
                f"{updates} updates ({nbytes} bytes) could not be passed to "
                f"{destination}; last heard: {self.last_heard()}"
            )

    def ask(self, operation: str, bound: Bound | None, **fields: Any) -> dict[str, Any]:
        """Send the scheduler a request and wait for the answer.

        Args:
            operation: Its name.
            bound: How long. None: it is answered when others have done something;
                the scheduler gives up who is silent meanwhile, and a scheduler that
                is silent is noticed by the link.
            **fields: Of the message.

        Raises:
            WaitTimeoutError: If it takes too long.
            ChannelError: If the scheduler cannot be reached, or refuses.
        """
        future = self._connection.request(
            operation, self._inbox.wake, replica=self._replica, **fields
        )
        bound_s = None if bound is None else bound.seconds
        self._wait(operation.removeprefix("daskdl_"), future.done, bound_s)
        if not future.done():
            future.cancel()
            self.check()
            raise WaitTimeoutError(
                f"the scheduler did not answer {operation} of replica {self._replica} "
                f"within {bound}; last heard: {self.last_heard()}"
            )
        try:
            answer = self._connection.understand(future.result())
        except OSError as error:
            raise ChannelError(f"the scheduler cannot be reached: {error}") from error
        self.check()
        return answer

    def ask_worker(
        self, worker: str, operation: str, **fields: Any
    ) -> Mapping[str, Any] | None:
        """Send another worker a request; None if it does not answer."""
        future = self._connection.request_of(
            worker, operation, self._inbox.wake, **fields
        )
        bound = self._timeouts.bound("request")
        self.until_true(operation.removeprefix("daskdl_"), future.done, bound.seconds)
        if not future.done():
            future.cancel()
            logger.info("%s: %s did not answer within %s", operation, worker, bound)
            return None
        try:
            answer: Any = future.result()
        except OSError as error:
            logger.info("%s of %s: %s", operation, worker, error)
            return None
        return answer if isinstance(answer, dict) else None

    def tell(self, operation: str, **fields: Any) -> None:
        """Send the scheduler a last word, whether the run goes on or not."""
        future = self._connection.request(
            operation, lambda: None, replica=self._replica, **fields
        )
        try:
            future.result(self._timeouts.request)
        except (OSError, TimeoutError, concurrent.futures.CancelledError) as error:
            logger.info("%s of replica %s: %s", operation, self._replica, error)

    @override
    def last_heard(self) -> str:
        said = f"the scheduler {self._connection.silent_s():.1f} s ago"
        return "; ".join(filter(None, [said, super().last_heard()]))

    @override
    def _until(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            came = self._inbox.wait_for(lambda: ready() or bool(self._servable()), left)
            self._serve()
            # A newcomer that has given up meanwhile is no reason to stop waiting.
            if not came or self._inbox.stopped is not None or ready():
                return came

    def _serve(self) -> None:
        """Give newcomers this replica's state if it has all they need."""
        for wanted in self._servable():
            assert self.make is not None
            self._link.serve(wanted, wrap_note(self.make()))

    def _servable(self) -> list[Wanted]:
        if self.make is None or self._inbox.stopped is not None:
            return []
        return [wanted for wanted in list(self._link.wanted) if self._has(wanted)]

    def _has(self, wanted: Wanted) -> bool:
        # What a lost one had sent may have reached nobody, unless a relay has it.
        without = {self._replica} | (self._inbox.lost() if self._mesh else set())
        others = {o: s for o, s in wanted.cut.items() if o not in without}
        return self._inbox.reached(others)
