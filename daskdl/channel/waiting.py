"""Where a training thread waits: with a bound, counted by cause, never idle for others.

A newcomer that wants this replica's state gets it wherever the thread waits.
"""

import concurrent.futures
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from daskdl.channel.base import Serve, Stopped
from daskdl.channel.endpoint import Endpoint
from daskdl.channel.link import Link, Wanted
from daskdl.channel.payloads import wrap_note
from daskdl.errors import ChannelError, WaitTimeoutError
from daskdl.timeouts import Bound

logger = logging.getLogger(__name__)


class Waiting:
    """The waits and the requests of one replica's training thread.

    Args:
        link: Its event loop's half.
        endpoint: Which replica it is, and the bounds.

    Attributes:
        make: Makes a snapshot for a newcomer; None: not now.
        waited_s: Seconds waited since the last `count_off`, by cause.
    """

    make: Serve | None
    waited_s: dict[str, float]

    def __init__(self, link: Link, endpoint: Endpoint) -> None:
        self.make = None
        self.waited_s = {}
        self._link = link
        self._inbox = link.inbox
        self._carrier = link.carrier
        self._connection = link.connection
        self._timeouts = endpoint.timeouts
        self._replica = endpoint.replica
        self._mesh = endpoint.routing == "mesh"

    def check(self) -> None:
        """Raise if the run was stopped, or the link is broken; else serve newcomers."""
        if self._inbox.stopped is None:
            if self._link.wanted:
                self._serve()
            return
        if self._connection.failure is not None:
            raise self._connection.failure
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
            WaitTimeoutError: If it takes too long. The scheduler gives up who is
                silent; this bound is for a scheduler that says nothing either.
        """
        started = time.perf_counter()
        bound = self._timeouts.bound("silence", "request")
        came = self._until(ready, bound.seconds)
        self._count(cause, started)
        self.check()
        if not came:
            raise WaitTimeoutError(
                f"replica {self._replica} waited {bound} for {cause}; by replica: "
                f"{state()}; last heard: {self.last_heard()}"
            )

    def until_done(self, cause: str, future: Any, timeout_s: float) -> bool:
        """Wait for a future that wakes the inbox; returns whether it is done."""
        started = time.perf_counter()
        self._until(future.done, timeout_s)
        self._count(cause, started)
        self.check()
        return bool(future.done())

    def until_sent(self, cause: str, ready: Callable[[], bool]) -> None:
        """Wait until enough of what was published has gone.

        Args:
            cause: For messages and counters.
            ready: Of the carrier.

        Raises:
            WaitTimeoutError: If it takes too long.
        """
        started = time.perf_counter()
        # In a mesh it may be for one who is silent, and then given up by then.
        names = ("silence", "request") if self._mesh else ("silence",)
        bound = self._timeouts.bound(*names)
        came = self._until(ready, bound.seconds)
        self._count(cause, started)
        self.check()
        if not came:
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
        started = time.perf_counter()
        future = self._connection.request(
            operation, self._inbox.wake, replica=self._replica, **fields
        )
        self._until(future.done, None if bound is None else bound.seconds)
        self._count(operation.removeprefix("daskdl_"), started)
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
        started = time.perf_counter()
        future = self._connection.request_of(
            worker, operation, self._inbox.wake, **fields
        )
        self._until(future.done, self._timeouts.request)
        self._count(operation.removeprefix("daskdl_"), started)
        self.check()
        if not future.done():
            future.cancel()
            bound = self._timeouts.bound("request")
            logger.info("%s: %s did not answer within %s", operation, worker, bound)
            return None
        try:
            answer: Any = future.result()
        except OSError as error:
            logger.info("%s of %s: %s", operation, worker, error)
            return None
        return answer if isinstance(answer, dict) else None

    def result(self, cause: str, future: concurrent.futures.Future[Any]) -> None:
        """Wait for work on the event loop, which wakes the inbox at its end."""
        started = time.perf_counter()
        self._until(future.done, None)
        self._count(cause, started)
        self.check()

    def tell(self, operation: str, **fields: Any) -> None:
        """Send the scheduler a last word, whether the run goes on or not."""
        future = self._connection.request(
            operation, lambda: None, replica=self._replica, **fields
        )
        try:
            future.result(self._timeouts.request)
        except (OSError, TimeoutError, concurrent.futures.CancelledError) as error:
            logger.info("%s of replica %s: %s", operation, self._replica, error)

    def last_heard(self) -> str:
        """Of the scheduler and of the other replicas, for messages."""
        words = [f"the scheduler {self._connection.silent_s():.1f} s ago"]
        return "; ".join([*words, *self._inbox.last_words()])

    def count_off(self) -> dict[str, float]:
        """Seconds waited since the last call, by cause."""
        waited_s, self.waited_s = self.waited_s, {}
        return waited_s

    def _until(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            came = self._inbox.wait_for(lambda: ready() or bool(self._servable()), left)
            if not self._serve():
                return came

    def _serve(self) -> bool:
        """Give newcomers this replica's state if it has all they need."""
        served = False
        for wanted in self._servable():
            assert self.make is not None
            self._link.serve(wanted, wrap_note(self.make()))
            served = True
        return served

    def _servable(self) -> list[Wanted]:
        if self.make is None or self._inbox.stopped is not None:
            return []
        return [wanted for wanted in list(self._link.wanted) if self._has(wanted)]

    def _has(self, wanted: Wanted) -> bool:
        # What a lost one had sent may have reached nobody, unless a relay has it.
        without = {self._replica} | (self._inbox.lost() if self._mesh else set())
        others = {o: s for o, s in wanted.cut.items() if o not in without}
        return not wanted.answer.done() and not self._inbox.behind(others)

    def _count(self, cause: str, started: float) -> None:
        more = time.perf_counter() - started
        self.waited_s[cause] = self.waited_s.get(cause, 0.0) + more
