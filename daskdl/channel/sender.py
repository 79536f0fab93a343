"""A replica's way out: a bounded queue, a paced loop, retransmission, a link meter."""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

from distributed import Worker

from daskdl import codec
from daskdl.channel.inbox import Inbox
from daskdl.channel.protocol import Answer, Endpoint, Item, unwrap
from daskdl.compression.replica_vector import count_of
from daskdl.errors import (
    ChannelError,
    CodecError,
    DaskDLError,
    OptionError,
    WaitTimeoutError,
)
from daskdl.thresholds import Drained
from daskdl.timeouts import Bound

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


class Ring:
    """Updates published or received, by origin and sequence, within a bound.

    At the bound the oldest are forgotten, whatever their origin; whoever asks for
    those takes a snapshot instead. Payloads are shared, not copied: nobody may
    write to them, and they have to be compact: a view keeps alive what it is a view of.

    What a replica of a mesh has published itself must not be forgotten like that: it
    belongs in an :class:`~daskdl.channel.sender.Unconfirmed`.

    All methods may be called from any thread.

    Args:
        limit_bytes: Most bytes kept, counted by `Item.weight`, >= 0. An item that
            is larger is not kept at all, and displaces nothing.

    Attributes:
        limit_bytes: As given.
        nbytes: Bytes kept now.

    Raises:
        OptionError: If the bound is negative.

    Example:
        >>> ring = Ring(limit_bytes=1000)
        >>> for sequence in (1, 2, 3):
        ...     ring.keep(Item("update", 7, sequence, 0, nbytes=150))
        >>> [item.sequence for item in ring.find(7, [3, 2, 1])], ring.nbytes
        ([2, 3], 908)
    """

    limit_bytes: int
    nbytes: int

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 0:
            raise OptionError(f"limit_bytes must be >= 0, got {limit_bytes}")
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._items: deque[Item] = deque()  # oldest first
        self._found: dict[int, dict[int, Item]] = {}  # the same by origin and sequence
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def keep(self, item: Item) -> None:
        """Keep an update as the latest one; one that is here stays where it is."""
        weight = item.weight()
        with self._lock:
            of_origin = self._found.setdefault(item.origin, {})
            if weight > self.limit_bytes or item.sequence in of_origin:
                return
            self._items.append(item)
            of_origin[item.sequence] = item
            self.nbytes += weight
            while self.nbytes > self.limit_bytes:
                oldest = self._items.popleft()
                del self._found[oldest.origin][oldest.sequence]
                self.nbytes -= oldest.weight()

    def find(self, origin: int, sequences: Iterable[int]) -> list[Item]:
        """Those of an origin's updates that are still here, ascending."""
        wanted = sorted(set(sequences))
        with self._lock:
            of_origin = self._found.get(origin, {})
            return [of_origin[sequence] for sequence in wanted if sequence in of_origin]


class Unconfirmed:
    """A replica's own updates, kept until everybody has them.

    Unlike a :class:`~daskdl.channel.sender.Ring` it forgets nothing at its bound: it
    has no room then, and its owner publishes nothing. So no update of a replica that
    is alive is ever out of reach. Below its bound it takes an update of any size.

    All methods may be called from any thread.

    Args:
        limit_bytes: Most bytes kept, counted by `Item.weight`.

    Example:
        >>> unconfirmed = Unconfirmed(limit_bytes=800)
        >>> for sequence in (1, 2):
        ...     unconfirmed.keep(Item("update", 0, sequence, 0, nbytes=150))
        >>> unconfirmed.has_room(), unconfirmed.confirm(1), unconfirmed.has_room()
        (False, True, True)
    """

    nbytes: int

    def __init__(self, limit_bytes: int) -> None:
        self.nbytes = 0
        self._limit_bytes = limit_bytes
        self._items: OrderedDict[int, Item] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def pressed(self) -> bool:
        """Whether it is half full, so that it is time to ask what is confirmed."""
        return self.nbytes > self._limit_bytes // 2

    def has_room(self) -> bool:
        """Whether one more update may be kept."""
        return not self._items or self.nbytes < self._limit_bytes

    def keep(self, item: Item) -> None:
        """Keep an update, in ascending order, whether there is room or not."""
        with self._lock:
            if item.sequence in self._items:
                return
            self._items[item.sequence] = item
            self.nbytes += item.weight()

    def confirm(self, sequence: int) -> bool:
        """Everybody has all up to this one; whether anything was forgotten."""
        with self._lock:
            before = len(self._items)
            while self._items and next(iter(self._items)) <= sequence:
                _, item = self._items.popitem(last=False)
                self.nbytes -= item.weight()
            return len(self._items) < before

    def find(self, sequences: Iterable[int]) -> list[Item]:
        """Those that are still kept, ascending."""
        wanted = sorted(set(sequences))
        with self._lock:
            return [self._items[s] for s in wanted if s in self._items]


class Outbox:
    """A queue for one destination with a bound in bytes.

    At the bound an offer is refused and nothing changes: on a replica the
    update then stays in the residual, in the relay the publisher keeps it.
    An empty queue takes one item of any size, so that no update is too large
    to be sent at all.

    Args:
        limit_bytes: Bytes that may wait here.

    Attributes:
        nbytes: Bytes waiting now.
        on_offer: Called after each accepted item, from the offering thread; the
            pump that empties the queue sets it.
        on_drop: Called after items have arrived, from the dropping thread.
    """

    limit_bytes: int
    nbytes: int
    on_offer: Callable[[], object]
    on_drop: Callable[[], object]

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._items: deque[Item] = deque()
        self.on_offer = self.on_drop = lambda: None
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._items)

    def has_room(self, nbytes: int) -> bool:
        """Whether an item of this weight would be accepted now."""
        return not self._items or self.nbytes + nbytes <= self.limit_bytes

    def offer(self, item: Item, *, force: bool = False) -> bool:
        """Append the item if there is room; say whether it was accepted.

        Args:
            item: What to append.
            force: Accept beyond the bound: for the few control items of a run.
        """
        with self._changed:
            if not force and not self.has_room(item.weight()):
                return False
            self._items.append(item)
            self.nbytes += item.weight()
        self.on_offer()
        return True

    def head(self, limit_bytes: int) -> list[Item]:
        """The oldest items, at least one if any, up to so many bytes together."""
        with self._changed:
            batch: list[Item] = []
            total = 0
            for item in self._items:
                total += item.weight()
                if batch and total > limit_bytes:
                    break
                batch.append(item)
            return batch

    def drop(self, count: int) -> None:
        """Forget the oldest items: they have arrived."""
        with self._changed:
            for _ in range(count):
                self.nbytes -= self._items.popleft().weight()
            self._changed.notify_all()
        self.on_drop()

    def wait_for(self, ready: Callable[["Outbox"], bool], timeout_s: float) -> bool:
        """Block until `ready(self)`, checked after each drop; False on time-out."""
        with self._changed:
            return self._changed.wait_for(lambda: ready(self), timeout_s)


BATCH_BYTES = 4 * 2**20  # below Dask's 10 MiB offload to its one helper thread
ATTEMPTS = 2  # a lost answer is asked for once more: receivers know duplicates

BACK_OFF = 16  # most times the pace between two requests to a full destination

Send = Callable[[Sequence[Item]], Awaitable[int]]


class Pump:
    """Carry one outbox to its destination, in order, until cancelled.

    Args:
        outbox: What to carry.
        send: Sends a batch and returns how many of its items were accepted.
            Called with an empty batch as a sign of life.
        pace_s: Least time between two requests, seconds.
        beat_s: Most time between two requests, seconds.
        bound: How long one request may take.
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
        self._heard_at: float | None = None  # of the last answer, the loop's clock

    def wake(self) -> None:
        """There is something to send. Call from the event loop."""
        self._more.set()

    async def run(self) -> None:
        """Carry items until cancelled.

        Raises:
            WaitTimeoutError: If a request was not answered in time, twice.
            OSError: If the destination cannot be reached, twice.
        """
        pause_s = self._pace_s
        while True:
            with contextlib.suppress(TimeoutError):
                # Not `wait_for`: of what is woken and cancelled at once, before
                # Python 3.12 it forgets that it was cancelled.
                async with asyncio.timeout(self._beat_s):
                    await self._more.wait()
            self._more.clear()
            batch = self._outbox.head(BATCH_BYTES)
            accepted = await self._send_surely(batch)
            self._outbox.drop(accepted)
            if len(self._outbox):
                self._more.set()
            # All that was refused goes again, so ask less often while it is.
            full = batch and not accepted
            longest_s = BACK_OFF * self._pace_s
            pause_s = min(2 * pause_s, longest_s) if full else self._pace_s
            await asyncio.sleep(pause_s)

    async def _send_surely(self, batch: Sequence[Item]) -> int:
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
                self._heard_at = asyncio.get_running_loop().time()
                return accepted
        raise AssertionError("every attempt returns or raises")

    def _unanswered(self, items: int) -> WaitTimeoutError:
        now = asyncio.get_running_loop().time()
        last = (
            "it never answered before"
            if self._heard_at is None
            else f"its last answer was {now - self._heard_at:.1f} s ago"
        )
        return WaitTimeoutError(
            f"{self._destination} did not answer within {self._bound}, {ATTEMPTS} "
            f"times, to {items} items ({self._outbox.nbytes} bytes waiting); {last}"
        )


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

    async def read(self, item: Item) -> codec.Update:
        """Decode an update.

        Raises:
            CodecError, TypeError, ValueError, LookupError: If it cannot be read.
        """
        payload = item.payload
        shared = payload if isinstance(payload, SharedFrame) else SharedFrame(payload)
        if memoryview(shared.frame).nbytes > INLINE_BYTES:
            return await asyncio.to_thread(self.read_now, item, shared)
        return self.read_now(item, shared)

    def read_now(self, item: Item, shared: SharedFrame) -> codec.Update:
        """The same, here and now."""
        update = shared.decode(self._endpoint.run, self._endpoint.size)
        if update.stamp[1:3] != (item.origin, item.sequence):
            raise CodecError(f"sent as {item[1:3]}, stamped {update.stamp[1:3]}")
        if isinstance(update, codec.SparseUpdate):
            count_of(update.threshold, self._inbox.grid)
        elif update.grid != self._inbox.grid:
            raise CodecError(f"grid must be {self._inbox.grid}, got {update.grid}")
        return update

    def refuse(self, item: Item, error: Exception) -> None:
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
