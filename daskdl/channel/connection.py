"""A replica's requests: to the scheduler, and to other workers."""

import asyncio
import concurrent.futures
import time
from collections.abc import Callable
from typing import Any

from distributed import Worker

from daskdl.channel.endpoint import Endpoint
from daskdl.channel.inbox import Inbox
from daskdl.channel.messages import Answer
from daskdl.errors import ChannelError, DaskDLError


class Connection:
    """Over Dask's own connections: no port, no address of its own.

    Args:
        worker: Where the replica trains.
        endpoint: Which replica it is, and the bounds.
        inbox: Whose waits end when the connection fails, or the run was stopped.

    Attributes:
        endpoint: As given.
        failure: Why the connection does not work any more, or None.
        loop: The event loop of the worker.
    """

    endpoint: Endpoint
    failure: DaskDLError | None
    loop: asyncio.AbstractEventLoop

    def __init__(self, worker: Worker, endpoint: Endpoint, inbox: Inbox) -> None:
        self.endpoint = endpoint
        self.failure = None
        self.loop = worker.loop.asyncio_loop
        self._worker = worker
        self._inbox = inbox
        self._heard_at = time.monotonic()  # of the scheduler's last answer

    # ---- event loop

    async def tell_scheduler(self, operation: str, **fields: Any) -> dict[str, Any]:
        """Send a request to the scheduler and understand its answer."""
        request = getattr(self._worker.scheduler, operation)
        return self.understand(await request(run=self.endpoint.run, **fields))

    async def tell(self, worker: str, operation: str, **fields: Any) -> Any:
        """Send a request to another worker; returns its answer, whatever it is.

        Raises:
            OSError: If it cannot be reached.
        """
        request = getattr(self._worker.rpc(worker), operation)
        return await request(run=self.endpoint.run, **fields)

    def fail(self, error: DaskDLError | OSError) -> None:
        """Nothing works without the scheduler: end every wait."""
        if not isinstance(error, DaskDLError):
            error = ChannelError(f"the scheduler cannot be reached: {error}")
        self.failure = error
        self._inbox.stop(str(error))

    # ---- any thread

    def silent_s(self) -> float:
        """Seconds since the scheduler's last answer, or since the beginning."""
        return time.monotonic() - self._heard_at

    def understand(self, answer: Any) -> dict[str, Any]:
        """Look at the status of an answer of the scheduler.

        Raises:
            ChannelError: If there is no plugin there, or it refused the message.
        """
        if not isinstance(answer, dict):
            raise ChannelError(
                f"the scheduler answered {answer!r}: is daskdl installed there?"
            )
        self._heard_at = time.monotonic()
        if answer["status"] == Answer.STOPPED or answer["status"] == Answer.UNKNOWN:
            self._inbox.stop(answer["reason"])
        elif answer["status"] == Answer.REFUSED:
            raise ChannelError(f"the scheduler refused: {answer['reason']}")
        return answer

    # ---- training thread

    def request(
        self, operation: str, on_answer: Callable[[], None], **fields: Any
    ) -> concurrent.futures.Future[Any]:
        """Send a request for this replica to the scheduler.

        Args:
            operation: Its name.
            on_answer: Called on the event loop when the answer is there.
            **fields: Of the message, beside the run.
        """
        return self._request(self._worker.scheduler, operation, on_answer, fields)

    def request_of(
        self,
        worker: str,
        operation: str,
        on_answer: Callable[[], None],
        **fields: Any,
    ) -> concurrent.futures.Future[Any]:
        """Send a request to another worker; arguments as of :meth:`request`."""
        return self._request(self._worker.rpc(worker), operation, on_answer, fields)

    def _request(
        self,
        peer: Any,
        operation: str,
        on_answer: Callable[[], None],
        fields: dict[str, Any],
    ) -> concurrent.futures.Future[Any]:
        async def ask() -> Any:
            return await getattr(peer, operation)(run=self.endpoint.run, **fields)

        future = asyncio.run_coroutine_threadsafe(ask(), self.loop)
        future.add_done_callback(lambda _: on_answer())
        return future
