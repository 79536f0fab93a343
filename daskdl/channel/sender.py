"""The way out: requests over Dask, a bounded queue, a paced loop, retransmission."""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from distributed import Worker

from daskdl.channel.protocol import Answer, Endpoint, Message
from daskdl.config import Bound
from daskdl.errors import (
    ChannelError,
    DaskDLError,
    OptionError,
    WaitTimeoutError,
)

logger = logging.getLogger(__name__)


class Connection:
    """Requests over Dask's own connections: no port, no address of its own.

    Args:
        worker: Where the replica trains.
        endpoint: Which replica it is, and the bounds.
        stop: Ends every wait of the replica, for a reason.

    Attributes:
        endpoint: As given.
        failure: Why the connection does not work any more, or None.
        loop: The event loop of the worker.
    """

    endpoint: Endpoint
    failure: DaskDLError | None
    loop: asyncio.AbstractEventLoop

    def __init__(
        self, worker: Worker, endpoint: Endpoint, stop: Callable[[str], object]
    ) -> None:
        self.endpoint = endpoint
        self.failure = None
        self.loop = worker.loop.asyncio_loop
        self._worker = worker
        self._stop = stop
        self._heard_at = time.monotonic()  # of the scheduler's last answer

    # ---- event loop

    async def ask(self, worker: str | None, operation: str, **fields: Any) -> Any:
        """Send a request to another worker, or to the scheduler; return its answer.

        Raises:
            OSError: If it cannot be reached.
        """
        peer = self._worker.scheduler if worker is None else self._worker.rpc(worker)
        return await getattr(peer, operation)(run=self.endpoint.run, **fields)

    async def ask_scheduler(self, operation: str, **fields: Any) -> dict[str, Any]:
        """Send a request to the scheduler; return its answer, see `checked`."""
        return self.checked(await self.ask(None, operation, **fields))

    def fail(self, error: DaskDLError | OSError) -> None:
        """End every wait: nothing works without the scheduler."""
        if not isinstance(error, DaskDLError):
            error = ChannelError(f"the scheduler cannot be reached: {error}")
        self.failure = error
        self._stop(str(error))

    # ---- any thread

    def silent_s(self) -> float:
        """Seconds since the scheduler's last answer, or since the beginning."""
        return time.monotonic() - self._heard_at

    def checked(self, answer: Any) -> dict[str, Any]:
        """Return an answer of the scheduler; stop if the run was stopped.

        Raises:
            ChannelError: If there is no plugin there, or it refused the request.
        """
        if not isinstance(answer, dict):
            raise ChannelError(
                f"the scheduler answered {answer!r}: is daskdl installed there?"
            )
        self._heard_at = time.monotonic()
        if answer["status"] == Answer.STOPPED or answer["status"] == Answer.UNKNOWN:
            self._stop(answer["reason"])
        elif answer["status"] == Answer.REFUSED:
            raise ChannelError(f"the scheduler refused: {answer['reason']}")
        return answer

    def submit(
        self,
        worker: str | None,
        operation: str,
        on_answer: Callable[[], object],
        **fields: Any,
    ) -> concurrent.futures.Future[Any]:
        """Send a request, as `ask` does, from another thread.

        Args:
            worker: Its address; None: the scheduler.
            operation: Its name.
            on_answer: Called on the event loop when the answer has come.
            **fields: Of the message, beside the run.
        """
        asking = self.ask(worker, operation, **fields)
        future = asyncio.run_coroutine_threadsafe(asking, self.loop)
        future.add_done_callback(lambda _: on_answer())
        return future


class RetransmitBuffer:
    """Updates published or received, by origin and sequence, within a bound.

    At the bound the oldest are forgotten, whatever their origin; whoever asks for
    those takes a snapshot instead. Payloads are shared, not copied: nobody may
    write to them, and they have to be compact: a view keeps alive what it is a view of.

    What a replica of a mesh has published itself must not be forgotten like that: it
    belongs in an :class:`~daskdl.channel.sender.UnackedBuffer`.

    All methods may be called from any thread.

    Args:
        limit_bytes: Most bytes kept, counted by `Message.weight`, >= 0. An item that
            is larger is not kept at all, and displaces nothing.

    Attributes:
        limit_bytes: As given.
        nbytes: Bytes kept now.

    Raises:
        OptionError: If the bound is negative.

    Example:
        >>> ring = RetransmitBuffer(limit_bytes=1000)
        >>> for sequence in (1, 2, 3):
        ...     ring.keep(Message("update", 7, sequence, 0, nbytes=150))
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
        self._items: deque[Message] = deque()  # oldest first
        self._found: dict[int, dict[int, Message]] = {}  # by origin, sequence
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def keep(self, item: Message) -> None:
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

    def find(self, origin: int, sequences: Iterable[int]) -> list[Message]:
        """Those of an origin's updates that are still here, ascending."""
        wanted = sorted(set(sequences))
        with self._lock:
            of_origin = self._found.get(origin, {})
            return [of_origin[sequence] for sequence in wanted if sequence in of_origin]


class UnackedBuffer:
    """A replica's own updates, kept until all others have acknowledged them.

    At its bound it has no room, and its owner publishes nothing; a `RetransmitBuffer`
    would forget the oldest. So no update of a replica that is alive is ever out of
    reach. Below its bound it takes an update of any size.

    All methods may be called from any thread.

    Args:
        limit_bytes: Most bytes kept, counted by `Message.weight`.

    Example:
        >>> unacked = UnackedBuffer(limit_bytes=800)
        >>> for sequence in (1, 2):
        ...     unacked.keep(Message("update", 0, sequence, 0, nbytes=150))
        >>> unacked.has_room(), unacked.acknowledge(1), unacked.has_room()
        (False, True, True)
    """

    nbytes: int

    def __init__(self, limit_bytes: int) -> None:
        self.nbytes = 0
        self._limit_bytes = limit_bytes
        self._items: OrderedDict[int, Message] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def pressed(self) -> bool:
        """Whether it is half full, so that it is time to ask what is acknowledged."""
        return self.nbytes > self._limit_bytes // 2

    def has_room(self) -> bool:
        """Whether one more update may be kept."""
        return not self._items or self.nbytes < self._limit_bytes

    def keep(self, item: Message) -> None:
        """Keep an update, in ascending order, whether there is room or not."""
        with self._lock:
            if item.sequence in self._items:
                return
            self._items[item.sequence] = item
            self.nbytes += item.weight()

    def acknowledge(self, sequence: int) -> bool:
        """Everybody has all up to this one; whether anything was forgotten."""
        with self._lock:
            before = len(self._items)
            while self._items and next(iter(self._items)) <= sequence:
                _, item = self._items.popitem(last=False)
                self.nbytes -= item.weight()
            return len(self._items) < before

    def find(self, sequences: Iterable[int]) -> list[Message]:
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
            loop that empties the queue sets it.
        on_drop: Called after items have arrived, from the dropping thread.
    """

    limit_bytes: int
    nbytes: int
    on_offer: Callable[[], object]
    on_drop: Callable[[], object]

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._items: deque[Message] = deque()
        self.on_offer = self.on_drop = lambda: None
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._items)

    def has_room(self, nbytes: int) -> bool:
        """Whether an item of this weight would be accepted now."""
        return not self._items or self.nbytes + nbytes <= self.limit_bytes

    def offer(self, item: Message, *, force: bool = False) -> bool:
        """Append the item if there is room; say whether it was accepted.

        Args:
            item: What to append.
            force: Accept beyond the bound: for the few control items of a run.
        """
        with self._changed:
            nbytes = self.nbytes + item.weight()
            if self._items and nbytes > self.limit_bytes and not force:
                return False
            self._items.append(item)
            self.nbytes = nbytes
        self.on_offer()
        return True

    def head(self, limit_bytes: int) -> list[Message]:
        """The oldest items, at least one if any, up to so many bytes together."""
        with self._changed:
            batch: list[Message] = []
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

    def wait_for(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Block until `ready()`, checked after each drop; False on time-out."""
        with self._changed:
            return self._changed.wait_for(ready, timeout_s)

    def sent(self) -> bool:
        """Whether all items have arrived."""
        return not self._items

    def wait_until_sent(self, timeout_s: float) -> bool:
        """Block until `sent`; False on time-out."""
        return self.wait_for(self.sent, timeout_s)


BATCH_BYTES = 4 * 2**20  # below Dask's 10 MiB offload to its one helper thread
ATTEMPTS = 2  # a lost answer is asked for once more: receivers know duplicates

BACK_OFF = 16  # most times the pace between two requests to a full destination

Send = Callable[[Sequence[Message]], Awaitable[int]]


class SendLoop:
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
