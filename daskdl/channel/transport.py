"""The seams to Dask and to time, and what is built on them: queues and send loops.

The channel reads time and blocks threads by a :class:`Clock`, and reaches other servers
by a :class:`Transport`. Routings and endpoints build on the queues and send loops here.
No class here chooses a destination.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    MutableMapping,
    Sequence,
)
from typing import Any, NamedTuple, TypeVar

from distributed import Scheduler, Worker
from distributed.comm import get_address_host_port, parse_address
from distributed.core import Server
from typing_extensions import override

from daskdl.channel.protocol import (
    MESSAGE_BYTES,
    Answer,
    ChannelSpec,
    Handler,
    Message,
    MessageKind,
)
from daskdl.config import Bound
from daskdl.errors import ChannelError, DaskDLError, WaitTimeoutError

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def run_reporting(
    work: Callable[[], Awaitable[None]], failed: Callable[[Exception], None]
) -> None:
    """Run a background task; pass an exception to `failed`.

    The coroutine is created here, as the task may be cancelled before it begins.
    """
    try:
        await work()
    except Exception as error:
        failed(error)


# ---- the ends of waits

LATE_S = 0.1  # a wait that ends so late was not in time for what arrived meanwhile
THAW_S = 1.0  # to process what has arrived


def extended(deadline: float, now: float) -> float:
    """Return the end of a wait, for a process that can look at it again only now.

    If it looks too late, it was suspended, or busy: what has arrived meanwhile gets
    `THAW_S` to be processed.

    Args:
        deadline: The end so far.
        now: The present, on the same clock.

    Example:
        >>> extended(30.0, now=29.0), extended(30.0, now=500.0)
        (30.0, 501.0)
    """
    return now + THAW_S if now - deadline > LATE_S else deadline


@contextlib.asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Bound a block as `asyncio.timeout` does; the end is `extended` if it is late."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    async with asyncio.timeout(None) as limit:
        timer = loop.call_at(
            deadline, lambda: limit.reschedule(extended(deadline, loop.time()))
        )
        try:
            yield
        finally:
            timer.cancel()


CHECK_S = 0.5  # interval of the checks in `awaited`


async def awaited(
    awaitable: Awaitable[T], timeout_s: float, check: Callable[[], None]
) -> T:
    """Await a result with a timeout; call `check`, which may raise, periodically.

    Args:
        awaitable: Cancelled when the wait ends.
        timeout_s: Longest wait, seconds.
        check: Ends the wait by an exception.

    Raises:
        TimeoutError: If there is no result in time.
    """
    deadline = time.monotonic() + timeout_s
    task = asyncio.ensure_future(awaitable)
    try:
        while not task.done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            await asyncio.wait([task], timeout=min(left_s, CHECK_S))
            deadline = extended(deadline, time.monotonic())
            if not task.done():
                check()
        return task.result()
    finally:
        task.cancel()


# ---- the seams


class Clock:
    """The time of this process, and conditions on which its threads wait.

    Attributes:
        now: Returns the seconds since some moment; never goes back.
    """

    now: Callable[[], float] = staticmethod(time.monotonic)

    def condition(self) -> threading.Condition:
        """Make a reentrant condition whose timeouts follow this clock."""
        return threading.Condition()


CLOCK = Clock()


class Transport(ABC):
    """The part of a Dask server that the channel uses.

    Attributes:
        loop: Event loop of the server; its time runs like `clock`.
        clock: Clock of the server's process.
        handlers: Handlers of requests to the server, by operation.
    """

    loop: asyncio.AbstractEventLoop
    clock: Clock
    handlers: MutableMapping[str, Handler]

    @abstractmethod
    async def ask(self, address: str | None, operation: str, **fields: Any) -> Any:
        """Send a request, and return the answer; there is no timeout.

        Args:
            address: Address of a worker; None: the scheduler.
            operation: Name of the operation.
            **fields: Fields of the request.

        Raises:
            OSError: If the connection is lost, or none can be made.
        """

    async def is_listening(self, address: str, timeout_s: float) -> bool:
        """Whether a process listens at an address, see the function of this name."""
        return await is_listening(address, timeout_s)


class TaskPlaces(NamedTuple):
    """Addresses of the workers that hold the result of a Dask task, or compute it."""

    holding: set[str]
    computing: set[str]


class SchedulerTransport(Transport):
    """The part of a Dask scheduler that the channel uses."""

    @abstractmethod
    def has_worker(self, address: str) -> bool:
        """Whether a worker is connected."""

    @abstractmethod
    def has_client(self, client: str) -> bool:
        """Whether a client is connected."""

    @abstractmethod
    def places(self, key: str) -> TaskPlaces | None:
        """Return the places of a task; None if the task is unknown."""


class WorkerOverDask(Transport):
    """The transport of a Dask worker."""

    def __init__(self, worker: Worker) -> None:
        self.loop = worker.loop.asyncio_loop
        self.clock = CLOCK
        self.handlers = worker.handlers
        self._worker = worker

    @override
    async def ask(self, address: str | None, operation: str, **fields: Any) -> Any:
        worker = self._worker
        peer = worker.scheduler if address is None else worker.rpc(address)
        try:
            return await getattr(peer, operation)(**fields)
        except RuntimeError as error:  # from Dask's connection pool, once it closes
            raise OSError(f"the worker closes: {error}") from error


class SchedulerOverDask(SchedulerTransport):
    """The transport of a Dask scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.loop = scheduler.loop.asyncio_loop
        self.clock = CLOCK
        self.handlers = scheduler.handlers
        self._scheduler = scheduler

    @override
    async def ask(self, address: str | None, operation: str, **fields: Any) -> Any:
        try:
            return await getattr(self._scheduler.rpc(address), operation)(**fields)
        except RuntimeError as error:  # from Dask's connection pool, once it closes
            raise OSError(f"the scheduler closes: {error}") from error

    @override
    def has_worker(self, address: str) -> bool:
        return address in self._scheduler.workers

    @override
    def has_client(self, client: str) -> bool:
        return client in self._scheduler.clients

    @override
    def places(self, key: str) -> TaskPlaces | None:
        task = self._scheduler.tasks.get(key)
        if task is None:
            return None
        computing = () if task.processing_on is None else (task.processing_on,)
        return TaskPlaces(
            {worker.address for worker in task.who_has or ()},
            {worker.address for worker in computing},
        )


# Shortest intervals of a Dask server's periodic callbacks while replicas train, ms. At
# Dask's defaults, 10, 20, 100 and 500 ms, an idle cluster of two workers on one machine
# takes an eighth of a core, and each wake-up takes the interpreter's lock.
MIN_PERIODS_MS = {"profile": 100, "tick": 500, "memory_monitor": 500, "monitor": 2000}
_pacing = threading.Lock()  # several workers may share a process


class Pace:
    """Lets a Dask server wake up less often while replicas train."""

    def __init__(self, server: Server) -> None:
        self._callbacks = server.periodic_callbacks
        self._configured: dict[str, float] = {}  # milliseconds

    def set_training(self, training: bool) -> None:
        """Lengthen the intervals; False: restore those of Dask's configuration."""
        with _pacing:
            for name in MIN_PERIODS_MS.keys() & self._callbacks.keys():
                callback = self._callbacks[name]
                configured = self._configured.setdefault(name, callback.callback_time)
                least = MIN_PERIODS_MS[name] if training else 0
                callback.callback_time = max(configured, least)


CHECKABLE_PROTOCOLS = (
    "tcp",
    "tls",
)  # protocols that refuse a connection to a closed port


async def is_listening(address: str, timeout_s: float) -> bool:
    """Whether a process listens at an address, according to its operating system.

    Dask's own connect retries a refused connection for a long time.

    Args:
        address: Dask address with its scheme.
        timeout_s: Seconds; a host without an answer in time counts as not listening.

    Returns:
        True also for protocols that cannot be checked.
    """
    scheme, _ = parse_address(address)
    if scheme not in CHECKABLE_PROTOCOLS:
        return True
    host, port = get_address_host_port(address)
    try:
        _, writer = await asyncio.wait_for(
            asyncio.open_connection(host, port), timeout_s
        )
    except OSError:
        return False
    writer.close()
    return True


# ---- a replica's requests


class Connection:
    """Sends a replica's requests by the transport of its worker."""

    spec: ChannelSpec
    failure: DaskDLError | None
    loop: asyncio.AbstractEventLoop
    clock: Clock

    def __init__(
        self, transport: Transport, spec: ChannelSpec, stop: Callable[[str], object]
    ) -> None:
        self.spec = spec
        self.failure = None
        self.loop, self.clock = transport.loop, transport.clock
        self._transport = transport
        self._stop = stop
        self._answered_at = self.clock.now()  # time of the scheduler's last answer

    # ---- event loop

    async def ask(self, worker: str | None, operation: str, **fields: Any) -> Any:
        """Send a request to a worker, or None: to the scheduler; return the answer."""
        fields |= {"run": self.spec.run, "secret": self.spec.secret}
        if worker is None:
            fields["token"] = self.spec.token
        return await self._transport.ask(worker, operation, **fields)

    def guard(self, work: Callable[[], Awaitable[None]]) -> Coroutine[Any, Any, None]:
        """Run a task of the channel; an error ends every wait of the replica."""

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

        return run_reporting(work, failed)

    # ---- any thread

    def since_answer_s(self) -> float:
        """Return the seconds since the scheduler's last answer, or since the start."""
        return self.clock.now() - self._answered_at

    def checked(self, answer: Any) -> dict[str, Any]:
        """Return an answer of the scheduler; end every wait if the run has stopped."""
        if not isinstance(answer, dict):
            raise ChannelError(
                f"the scheduler answered {answer!r}: is daskdl installed there?"
            )
        self._answered_at = self.clock.now()
        if answer["status"] == Answer.STOPPED or answer["status"] == Answer.UNKNOWN:
            self._stop(answer["reason"])
        elif answer["status"] == Answer.REFUSED:
            raise ChannelError(f"the scheduler refused: {answer['reason']}")
        return answer

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)


# ---- queues and send loops


class Outbox:
    """A queue for one destination with a bound in bytes.

    At the bound, `has_room` is False: a replica then keeps the update in its residual,
    the relay leaves it with the publisher. An empty queue has room for one message of
    any size, so that no update is too large to send.

    A queue that withholds updates keeps them until `release`, and sends the rest.

    Args:
        limit_bytes: Bound on `nbytes`; callers of `append` check it with `has_room`.

    Attributes:
        nbytes: Bytes of the queued messages and of withheld ones, each with
            `MESSAGE_BYTES` of overhead.
        withheld: Updates that are withheld, oldest first; None: it withholds none.
        added: Number of messages appended so far.
        removed: Number of messages that have arrived.
        on_append: Called after each appended message, in the appending thread.
        on_drop: Called after messages have arrived, in the dropping thread.
    """

    limit_bytes: float
    nbytes: int
    withheld: list[Message] | None
    added: int
    removed: int
    on_append: Callable[[], object]
    on_drop: Callable[[], object]

    def __init__(self, limit_bytes: float) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = self.added = self.removed = 0
        self.withheld = None
        self.on_append = self.on_drop = lambda: None
        self._messages: deque[Message] = deque()
        self._bytes_of: Counter[int] = Counter()  # by origin
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._messages)

    def has_room(self, nbytes: float) -> bool:
        """Whether a message of `nbytes` bytes, with its overhead, keeps the bound."""
        return not self.nbytes or self.nbytes + nbytes <= self.limit_bytes

    def bytes_of(self, origin: int) -> int:
        """Return the bytes of queued messages of one origin."""
        return self._bytes_of[origin]

    def append(self, message: Message) -> None:
        """Append a message, whether there is room or not."""
        nbytes = message.nbytes + MESSAGE_BYTES
        with self._lock:
            self.nbytes += nbytes
            if self.withheld is not None and message.kind == MessageKind.UPDATE:
                self.withheld.append(message)
                return
            self._messages.append(message)
            self._bytes_of[message.origin] += nbytes
            self.added += 1
        self.on_append()

    def withhold(self) -> None:
        """Withhold updates from now on; drop those that are withheld already."""
        self.release(())
        self.withheld = []

    def release(self, messages: Iterable[Message]) -> None:
        """Withhold nothing from now on; queue messages in place of what is withheld."""
        with self._lock:
            withheld, self.withheld = self.withheld or (), None
            self.nbytes -= sum(m.nbytes + MESSAGE_BYTES for m in withheld)
        for message in messages:
            self.append(message)

    def head(self, limit_bytes: float) -> list[Message]:
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
                self.removed += 1
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
            kept. A replica that lacks an evicted update loads a state at the next
            agreement. If False, an update is kept until all others have acknowledged
            it, and at the bound `has_room` is False, so no update of a live replica is
            lost.

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
        self._kept: dict[int, dict[int, Message]] = {}  # by origin, sequence
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
            of_origin = self._kept.setdefault(message.origin, {})
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
        del self._kept[oldest.origin][oldest.sequence]
        self.nbytes -= oldest.nbytes + MESSAGE_BYTES

    def find(self, origin: int, sequences: Iterable[int]) -> list[Message]:
        """Return the requested updates that are still kept, ascending."""
        wanted = sorted(set(sequences))
        with self._lock:
            of_origin = self._kept.get(origin, {})
            return [of_origin[sequence] for sequence in wanted if sequence in of_origin]


# Number of own updates that a replica keeps beside those in its outbox. A replica
# requests a missing update after a second; sending this many dense updates of some MB
# takes about as long. A replica also subtracts its own updates from sums, see
# `RunState.send_waiting`.
RECENT = 16

BATCH_BYTES = 4 * 2**20  # below Dask's 10 MiB offload to its one helper thread
# Part of the timeout of a request for which its answer is prompt. Several senders may
# share a slow link.
PROMPT = 0.25
ATTEMPTS = 2  # a request without an answer is sent again: receivers drop duplicates

BACK_OFF = 16  # longest pause between requests to a full destination, in paces

Send = Callable[[Sequence[Message]], Awaitable[int]]


class SendLoop:
    """Sends the messages of an outbox in order.

    Batches are as large as the link carries in a part of the timeout of a request: the
    first has one message, each prompt answer doubles the size of the next one, up to
    `BATCH_BYTES`, and a late answer reduces it.

    Args:
        outbox: The outbox.
        send: Sends a batch and returns the number of accepted messages. An empty batch
            is a heartbeat.
        pace_s: Shortest time between two requests, seconds.
        beat_s: Longest time between two requests, seconds.
        bound: Timeout of a request.
        destination: For messages, for example ``"the scheduler"``.

    Attributes:
        bound: Timeout of the next requests.
        beat_s: Longest time between the next requests, seconds.
    """

    bound: Bound
    beat_s: float

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
        self.beat_s = beat_s
        self.bound = bound
        self._destination = destination
        self._wake = asyncio.Event()
        self._batch_bytes = 0.0  # a batch has at least one message
        self._answered_at: float | None = None  # time of the last answer, loop's clock

    def wake(self) -> None:
        """Send soon. Event loop."""
        self._wake.set()

    async def run(self) -> None:
        """Send messages until cancelled."""
        pause_s = self._pace_s
        while True:
            with contextlib.suppress(TimeoutError):
                # Not `wait_for`, which before Python 3.12 loses a cancellation that
                # arrives together with the wake-up.
                async with asyncio.timeout(self.beat_s):
                    await self._wake.wait()
            self._wake.clear()
            batch, accepted = await self._send_batch()
            self._outbox.drop(accepted)
            if len(self._outbox):
                self._wake.set()
            # Refused messages are sent again, so back off while all are refused.
            full = batch and not accepted
            longest_s = BACK_OFF * self._pace_s
            pause_s = min(2 * pause_s, longest_s) if full else self._pace_s
            await asyncio.sleep(pause_s)

    async def _send_batch(self) -> tuple[Sequence[Message], int]:
        """Send the oldest messages; return them, and how many were accepted."""
        bound = self.bound
        now = asyncio.get_running_loop().time
        for attempt in range(1, ATTEMPTS + 1):
            batch, began_at = self._outbox.head(self._batch_bytes), now()
            try:
                async with time_limit(bound.seconds):
                    accepted = await self._send(batch)
            except TimeoutError:
                if attempt == ATTEMPTS:
                    raise self._unanswered(bound) from None
                self._batch_bytes = 0.0
            except OSError:
                if attempt == ATTEMPTS:
                    raise
            else:
                self._answered_at = now()
                if batch:
                    self._resize(batch, self._answered_at - began_at)
                return batch, accepted
        raise AssertionError("every attempt returns or raises")

    def _resize(self, batch: Sequence[Message], took_s: float) -> None:
        """Adapt the size of the next batch to the time that the last one took."""
        sent_bytes = sum(message.nbytes + MESSAGE_BYTES for message in batch)
        prompt_s = PROMPT * self.bound.seconds
        if took_s > prompt_s:
            most = sent_bytes * prompt_s / took_s
        else:
            most = 2 * max(self._batch_bytes, sent_bytes)
        self._batch_bytes = min(most, BATCH_BYTES)

    def _unanswered(self, bound: Bound) -> WaitTimeoutError:
        now = asyncio.get_running_loop().time()
        items = len(self._outbox)
        last = (
            "it never answered before"
            if self._answered_at is None
            else f"its last answer was {now - self._answered_at:.1f} s ago"
        )
        return WaitTimeoutError(
            f"{self._destination} did not answer within {bound}, {ATTEMPTS} times; "
            f"{items} messages ({self._outbox.nbytes} bytes) are queued; {last}"
        )
