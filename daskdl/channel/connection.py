"""What a replica's event loop sends and reads: requests, frames, the link meter."""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import (
    Callable,
    Iterator,
    Sequence,
)
from typing import Any

from distributed import Worker

from daskdl import codec
from daskdl.channel.inbox import Inbox
from daskdl.channel.protocol import (
    Answer,
    Endpoint,
    Message,
    unwrap,
)
from daskdl.compression.replica_vector import count_of
from daskdl.errors import (
    ChannelError,
    CodecError,
    DaskDLError,
)
from daskdl.thresholds import Drained

logger = logging.getLogger(__name__)


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
    def request(self, items: Sequence[Message]) -> Iterator[None]:
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

    def arrived(self, items: Sequence[Message]) -> None:
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


INLINE_BYTES = 2**20  # larger frames are decoded beside the event loop


# What foreign bytes may raise.
UNREADABLE = (CodecError, TypeError, ValueError, LookupError)


class SharedFrame:
    """A frame that came for several replicas of a run: decoded once.

    Args:
        payload: As it came.
    """

    def __init__(self, payload: Any) -> None:
        self._payload = payload
        self._update: codec.Update | None = None

    @property
    def frame(self) -> Any:
        """Its bytes, as the sender had them."""
        return unwrap(self._payload)

    def decode(self, run: int, size: int) -> codec.Update:
        """The update, which nobody changes; see :func:`daskdl.codec.decode`."""
        if self._update is None:
            self._update = codec.decode(self.frame, run=run, size=size)
        return self._update


class Reader:
    """Decodes what arrives for one replica.

    Args:
        endpoint: Which replica it is.
        inbox: Knows the grid of the run, and counts what is refused.
    """

    def __init__(self, endpoint: Endpoint, inbox: Inbox) -> None:
        self._endpoint = endpoint
        self._inbox = inbox

    async def read(self, item: Message) -> codec.Update:
        """Decode an update.

        Raises:
            CodecError, TypeError, ValueError, LookupError: If it cannot be read.
        """
        payload = item.payload
        shared = payload if isinstance(payload, SharedFrame) else SharedFrame(payload)
        if memoryview(shared.frame).nbytes > INLINE_BYTES:
            return await asyncio.to_thread(self.read_now, item, shared)
        return self.read_now(item, shared)

    def read_now(self, item: Message, shared: SharedFrame) -> codec.Update:
        """The same, here and now."""
        update = shared.decode(self._endpoint.run, self._endpoint.size)
        if update.stamp[1:3] != (item.origin, item.sequence):
            raise CodecError(f"sent as {item[1:3]}, stamped {update.stamp[1:3]}")
        if isinstance(update, codec.SparseUpdate):
            count_of(update.threshold, self._inbox.grid)
        elif update.grid != self._inbox.grid:
            raise CodecError(f"grid must be {self._inbox.grid}, got {update.grid}")
        return update

    def refuse(self, item: Message, error: Exception) -> None:
        """Count and log an update that could not be read; it is dropped."""
        self._inbox.refuse()
        logger.warning(
            "replica %s refused update %s of replica %s: %s",
            self._endpoint.replica,
            item.sequence,
            item.origin,
            error,
        )


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
