"""Sending: requests over Dask, bounded queues, paced send loops, retransmission.

Routings and endpoints build on these. No class here chooses a destination.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from distributed import Worker

from daskdl.channel.protocol import MESSAGE_BYTES, Answer, ChannelSpec, Message
from daskdl.config import Bound
from daskdl.errors import ChannelError, DaskDLError, WaitTimeoutError

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def awaited(work: Awaitable[None], failed: Callable[[Exception], None]) -> None:
    """Await a task that nobody else awaits; pass an exception to `failed`."""
    try:
        await work
    except Exception as error:
        failed(error)


class Connection:
    """Sends a replica's requests over the connections of its Dask worker."""

    spec: ChannelSpec
    failure: DaskDLError | None
    loop: asyncio.AbstractEventLoop

    def __init__(
        self, worker: Worker, spec: ChannelSpec, stop: Callable[[str], object]
    ) -> None:
        self.spec = spec
        self.failure = None
        self.loop = worker.loop.asyncio_loop
        self._worker = worker
        self._stop = stop
        self._answered_at = time.monotonic()  # time of the scheduler's last answer

    # ---- event loop

    async def ask(self, worker: str | None, operation: str, **fields: Any) -> Any:
        """Send a request to a worker, or None: to the scheduler; return the answer."""
        peer = self._worker.scheduler if worker is None else self._worker.rpc(worker)
        try:
            return await getattr(peer, operation)(run=self.spec.run, **fields)
        except RuntimeError as error:  # from Dask's connection pool, once it closes
            raise OSError(f"the worker closes: {error}") from error

    def guard(self, work: Awaitable[None]) -> Coroutine[Any, Any, None]:
        """Await a task of the channel; an error ends every wait of the replica."""

        def failed(error: Exception) -> None:
            if isinstance(error, DaskDLError):
                self.failure = error
            elif isinstance(error, OSError):
                self.failure = ChannelError(f"the scheduler cannot be reached: {error}")
            else:
                replica = self.spec.replica
                logger.error("a task of replica %s failed", replica, exc_info=error)
                self.failure = ChannelError(f"a task of the channel failed: {error!r}")
            self._stop(str(self.failure))

        return awaited(work, failed)

    # ---- any thread

    def since_answer_s(self) -> float:
        """Return the seconds since the scheduler's last answer, or since the start."""
        return time.monotonic() - self._answered_at

    def checked(self, answer: Any) -> dict[str, Any]:
        """Return an answer of the scheduler; end every wait if the run has stopped."""
        if not isinstance(answer, dict):
            raise ChannelError(
                f"the scheduler answered {answer!r}: is daskdl installed there?"
            )
        self._answered_at = time.monotonic()
        if answer["status"] == Answer.STOPPED or answer["status"] == Answer.UNKNOWN:
            self._stop(answer["reason"])
        elif answer["status"] == Answer.REFUSED:
            raise ChannelError(f"the scheduler refused: {answer['reason']}")
        return answer

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)


class Outbox:
    """A queue for one destination with a bound in bytes.

    At the bound, offers are refused and nothing changes: on a replica the update then
    stays in the residual, in the relay the publisher keeps it. An empty queue accepts
    one message of any size, so that no update is too large to send.

    Args:
        limit_bytes: Bound on `nbytes`.

    Attributes:
        nbytes: Bytes of the queued messages, each with `MESSAGE_BYTES` of overhead.
        on_offer: Called after each accepted message, in the offering thread.
        on_drop: Called after messages have arrived, in the dropping thread.
    """

    limit_bytes: float
    nbytes: int
    on_offer: Callable[[], object]
    on_drop: Callable[[], object]

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self.on_offer = self.on_drop = lambda: None
        self._messages: deque[Message] = deque()
        self._bytes_of: Counter[int] = Counter()  # by origin
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._messages)

    def has_room(self, nbytes: float) -> bool:
        """Whether `nbytes` more bytes would be accepted now."""
        return not self._messages or self.nbytes + nbytes <= self.limit_bytes

    def bytes_of(self, origin: int) -> int:
        """Return the bytes of queued messages of one origin."""
        return self._bytes_of[origin]

    def offer(self, message: Message, *, force: bool = False) -> bool:
        """Append a message if there is room; return whether it was accepted."""
        nbytes = message.nbytes + MESSAGE_BYTES
        with self._lock:
            full = self._messages and self.nbytes + nbytes > self.limit_bytes
            if full and not force:
                return False
            self._messages.append(message)
            self._bytes_of[message.origin] += nbytes
            self.nbytes += nbytes
        self.on_offer()
        return True

    def head(self, limit_bytes: int) -> list[Message]:
        """Return the oldest messages, up to a number of bytes but at least one."""
        with self._lock:
            batch: list[Message] = []
            total = 0
            for message in self._messages:
                total += message.nbytes + MESSAGE_BYTES
                if batch and total > limit_bytes:
                    break
                batch.append(message)
            return batch

    def drop(self, count: int) -> None:
        """Remove the oldest messages, which have arrived."""
        with self._lock:
            for _ in range(min(count, len(self._messages))):
                message = self._messages.popleft()
                nbytes = message.nbytes + MESSAGE_BYTES
                self._bytes_of[message.origin] -= nbytes
                self.nbytes -= nbytes
        self.on_drop()


class RetransmitBuffer:
    """Published or received updates that other replicas may request again.

    Payloads are shared, not copied: they must not be changed, and must not be views of
    larger buffers, which a view keeps alive. All methods may be called from any thread.

    Args:
        limit_bytes: Bound on `nbytes`.
        evicts: At the bound, evict the oldest updates; an update above the bound is not
            kept. A replica that lacks an evicted update takes a snapshot instead. If
            False, an update is kept until all others have acknowledged it, and at the
            bound `has_room` is False, so no update of a live replica is lost.

    Attributes:
        limit_bytes: As given; may be raised.
        nbytes: Bytes of the kept messages, each with `MESSAGE_BYTES` of overhead.

    Example:
        >>> recent = RetransmitBuffer(limit_bytes=1000)
        >>> unacked = RetransmitBuffer(limit_bytes=1000, evicts=False)
        >>> for sequence in (1, 2, 3):
        ...     recent.keep(Message("update", 7, sequence, 0, nbytes=150))
        ...     unacked.keep(Message("update", 7, sequence, 0, nbytes=150))
        >>> [message.sequence for message in recent.find(7, [3, 2, 1])], recent.nbytes
        ([2, 3], 908)
        >>> unacked.has_room(), unacked.acknowledge(1), unacked.has_room()
        (False, True, True)
    """

    limit_bytes: int
    nbytes: int

    def __init__(self, limit_bytes: int, *, evicts: bool = True) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._evicts = evicts
        self._messages: deque[Message] = deque()  # oldest first
        self._found: dict[int, dict[int, Message]] = {}  # by origin, sequence
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._messages)

    def has_room(self) -> bool:
        """Whether one more update of any size may be kept."""
        return self._evicts or not self._messages or self.nbytes < self.limit_bytes

    def keep(self, message: Message) -> None:
        """Append an update; a duplicate changes nothing."""
        nbytes = message.nbytes + MESSAGE_BYTES
        with self._lock:
            of_origin = self._found.setdefault(message.origin, {})
            too_large = self._evicts and nbytes > self.limit_bytes
            if too_large or message.sequence in of_origin:
                return
            self._messages.append(message)
            of_origin[message.sequence] = message
            self.nbytes += nbytes
            while self._evicts and self.nbytes > self.limit_bytes:
                self._forget_oldest()

    def acknowledge(self, sequence: int) -> bool:
        """Drop updates up to a sequence number; return whether there were any.

        All kept updates must be of one origin.
        """
        with self._lock:
            before = len(self._messages)
            while self._messages and self._messages[0].sequence <= sequence:
                self._forget_oldest()
            return len(self._messages) < before

    def _forget_oldest(self) -> None:
        oldest = self._messages.popleft()
        del self._found[oldest.origin][oldest.sequence]
        self.nbytes -= oldest.nbytes + MESSAGE_BYTES

    def find(self, origin: int, sequences: Iterable[int]) -> list[Message]:
        """Return the requested updates that are still kept, ascending."""
        wanted = sorted(set(sequences))
        with self._lock:
            of_origin = self._found.get(origin, {})
            return [of_origin[sequence] for sequence in wanted if sequence in of_origin]


BATCH_BYTES = 4 * 2**20  # below Dask's 10 MiB offload to its one helper thread
ATTEMPTS = 2  # a request without an answer is sent again: receivers drop duplicates

BACK_OFF = 16  # most times the pace between two requests to a full destination

Send = Callable[[Sequence[Message]], Awaitable[int]]


class SendLoop:
    """Sends the messages of an outbox in order.

    Args:
        outbox: The outbox.
        send: Sends a batch and returns the number of accepted messages. An empty batch
            is a heartbeat.
        pace_s: Least time between two requests, seconds.
        beat_s: Most time between two requests, seconds.
        bound: Timeout of a request.
        destination: For messages, for example ``"the scheduler"``.
    """

    def __init__(
        self,
        outbox: Outbox,
        send: Send,
        *,
        pace_s: float,
        beat_s: float,
        bound: Bound,
        destination: str,
    ) -> None:
        self._outbox = outbox
        self._send = send
        self._pace_s = pace_s
        self._beat_s = beat_s
        self._bound = bound
        self._destination = destination
        self._more = asyncio.Event()
        self._answered_at: float | None = None  # time of the last answer, loop's clock

    def wake(self) -> None:
        """Send soon. Event loop."""
        self._more.set()

    async def run(self) -> None:
        """Send messages until cancelled."""
        pause_s = self._pace_s
        while True:
            with contextlib.suppress(TimeoutError):
                # Not `wait_for`, which before Python 3.12 loses a cancellation that
                # arrives together with the wake-up.
                async with asyncio.timeout(self._beat_s):
                    await self._more.wait()
            self._more.clear()
            batch = self._outbox.head(BATCH_BYTES)
            accepted = await self._send_surely(batch)
            self._outbox.drop(accepted)
            if len(self._outbox):
                self._more.set()
            # Refused messages are sent again, so back off while all are refused.
            full = batch and not accepted
            longest_s = BACK_OFF * self._pace_s
            pause_s = min(2 * pause_s, longest_s) if full else self._pace_s
            await asyncio.sleep(pause_s)

    async def _send_surely(self, batch: Sequence[Message]) -> int:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with asyncio.timeout(self._bound.seconds):
                    accepted = await self._send(batch)
            except TimeoutError:
                if attempt == ATTEMPTS:
                    raise self._unanswered(len(batch)) from None
            except OSError:
                if attempt == ATTEMPTS:
                    raise
            else:
                self._answered_at = asyncio.get_running_loop().time()
                return accepted
        raise AssertionError("every attempt returns or raises")

    def _unanswered(self, items: int) -> WaitTimeoutError:
        now = asyncio.get_running_loop().time()
        last = (
            "it never answered before"
            if self._answered_at is None
            else f"its last answer was {now - self._answered_at:.1f} s ago"
        )
        return WaitTimeoutError(
            f"{self._destination} did not answer within {self._bound}, {ATTEMPTS} "
            f"times, to {items} items ({self._outbox.nbytes} bytes waiting); {last}"
        )
