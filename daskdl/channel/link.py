"""The event loop's half of a replica's channel: what is sent and what arrives.

The training thread's half is in `relayed.py`. The two meet in the inbox, in the
outbox, and in the few plain values that are named here.
"""

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from distributed import Worker

from daskdl import codec
from daskdl.accumulator import count_of
from daskdl.channel.endpoint import Endpoint
from daskdl.channel.inbox import Inbox
from daskdl.channel.messages import Answer, Item, ItemKind
from daskdl.channel.outbox import Outbox
from daskdl.channel.payloads import unwrap
from daskdl.channel.positions import Received
from daskdl.channel.pump import Pump
from daskdl.errors import ChannelError, CodecError, DaskDLError

logger = logging.getLogger(__name__)

PACE_S = 0.005  # least time between two requests to the relay
BEAT_S = 1.0  # most time between two signs of life
INLINE_BYTES = 2**20  # larger frames are decoded beside the event loop


class Wanted(NamedTuple):
    """A newcomer waits for this replica's state."""

    cut: dict[int, int]  # updates that it has to contain, by origin
    answer: asyncio.Future[dict[str, Any]]


class Link:
    """One replica's connection to the relay.

    Args:
        worker: Where the replica trains.
        endpoint: Which replica it is, and the bounds.

    Attributes:
        inbox: What has arrived.
        outbox: What is to be sent.
        progress: Steps completed, and the last epoch done.
        closing: The worker closes; the replica should hand over and leave.
        wanted: Newcomers that wait for a snapshot; the training thread serves them.
        failure: Why the link does not work any more, or None.
    """

    inbox: Inbox
    outbox: Outbox
    progress: tuple[int, int]
    closing: bool
    wanted: list["Wanted"]
    failure: DaskDLError | None

    def __init__(self, worker: Worker, endpoint: Endpoint) -> None:
        self.inbox = Inbox(endpoint.size, endpoint.grid, endpoint.inbox_bytes)
        self.outbox = Outbox(endpoint.outbox_bytes)
        self.progress = (0, -1)
        self.closing = False
        self.wanted = []
        self.failure = None
        self._early: list[Item] | None = None
        self._early_bytes = 0
        self._worker = worker
        self._endpoint = endpoint
        self._loop: asyncio.AbstractEventLoop = worker.loop.asyncio_loop
        self._left = asyncio.Event()
        self._pumping: concurrent.futures.Future[None] | None = None

    # ---- event loop

    async def deliver(self, item: Item) -> bool:
        """An item has arrived; what cannot be read is counted and dropped.

        Returns:
            False if there is no room for it: it has to be sent again.
        """
        if item.kind != ItemKind.UPDATE:
            self.inbox.note(item)
        elif self._early is not None:
            return self._keep_early(item)
        else:
            await self._put(item)
        return True

    async def _put(self, item: Item) -> None:
        try:
            update = await self._decode(item)
        except (CodecError, TypeError, ValueError, LookupError) as error:
            self.inbox.refuse()
            logger.warning(
                "replica %s refused update %s of replica %s: %s",
                self._endpoint.replica,
                item.sequence,
                item.origin,
                error,
            )
            return
        self.inbox.put(item, update)

    def _keep_early(self, item: Item) -> bool:
        # Not folded, as a full inbox is: the snapshot may contain it.
        assert self._early is not None
        if self._early and self._early_bytes >= self._endpoint.inbox_bytes:
            return False
        self._early.append(item)
        self._early_bytes += item.weight()
        return True

    async def _put_early(self) -> None:
        early, self._early = self._early or [], None
        for item in early:
            await self._put(item)

    async def snapshot(self, cut: dict[int, int]) -> dict[str, Any]:
        """A newcomer asks for this replica's state; answered between two steps."""
        wanted = Wanted(cut, self._loop.create_future())
        self.wanted.append(wanted)
        self.inbox.wake()
        try:
            bound = self._endpoint.timeouts.request
            return await asyncio.wait_for(wanted.answer, bound)
        finally:
            self.wanted.remove(wanted)

    async def _decode(self, item: Item) -> codec.Update:
        frame = unwrap(item.payload)
        if memoryview(frame).nbytes > INLINE_BYTES:
            return await asyncio.to_thread(self._decode_now, item, frame)
        return self._decode_now(item, frame)

    def _decode_now(self, item: Item, frame: Any) -> codec.Update:
        update = codec.decode(frame, run=self._endpoint.run, size=self._endpoint.size)
        if update.stamp[1:3] != (item.origin, item.sequence):
            raise CodecError(f"sent as {item[1:3]}, stamped {update.stamp[1:3]}")
        if isinstance(update, codec.SparseUpdate):
            count_of(update.threshold, self.inbox.grid)
        elif update.grid != self.inbox.grid:
            raise CodecError(f"grid must be {self.inbox.grid}, got {update.grid}")
        return update

    def close_soon(self) -> None:
        """The worker closes; the training thread leaves at its next step."""
        self.closing = True
        self.inbox.stop("its worker closes")
        self.outbox.wake()

    async def left(self, timeout_s: float) -> None:
        """Wait until the replica has left, but not for long."""
        try:
            await asyncio.wait_for(self._left.wait(), timeout_s)
        except TimeoutError:
            logger.warning(
                "replica %s did not leave within %s s",
                self._endpoint.replica,
                timeout_s,
            )

    async def _pump(self) -> None:
        timeouts = self._endpoint.timeouts
        pump = Pump(
            self.outbox,
            self._send,
            pace_s=PACE_S,
            beat_s=min(BEAT_S, timeouts.silence / 4),
            timeout_s=timeouts.request,
            destination="the scheduler",
        )
        self.outbox.on_offer = lambda: self._loop.call_soon_threadsafe(pump.wake)
        try:
            await pump.run()
        except DaskDLError as error:
            self._fail(error)
        except OSError as error:
            self._fail(ChannelError(f"the scheduler cannot be reached: {error}"))

    async def _send(self, items: Sequence[Item]) -> int:
        # Progress beyond the batch would overtake the updates still waiting. It is
        # read first: what was queued before it was set is then counted as waiting.
        step, done = self.progress
        if len(items) != len(self.outbox):
            step, done = 0, -1
        answer = await self._worker.scheduler.daskdl_publish(
            run=self._endpoint.run,
            origin=self._endpoint.replica,
            items=[tuple(item) for item in items],
            step=step,
            done=done,
        )
        return int(self.understand(answer).get("accepted", 0))

    def _fail(self, error: DaskDLError) -> None:
        self.failure = error
        self.inbox.stop(str(error))
        self.outbox.wake()

    # ---- any thread

    def understand(self, answer: Any) -> dict[str, Any]:
        """Look at the status of an answer of the scheduler.

        Raises:
            ChannelError: If there is no plugin there, or it refused the message.
        """
        if not isinstance(answer, dict):
            raise ChannelError(
                f"the scheduler answered {answer!r}: is daskdl installed there?"
            )
        if answer["status"] == Answer.STOPPED or answer["status"] == Answer.UNKNOWN:
            self.inbox.stop(answer["reason"])
        elif answer["status"] == Answer.REFUSED:
            raise ChannelError(f"the scheduler refused: {answer['reason']}")
        return answer

    # ---- training thread

    def start(self) -> None:
        """Begin to send."""
        self._pumping = asyncio.run_coroutine_threadsafe(self._pump(), self._loop)

    def wait_for_snapshot(self) -> None:
        """Keep updates as they come; what they change is not here yet."""
        self._early = []

    def begin(self, received: Mapping[int, Received], grid: float) -> None:
        """The snapshot is here: updates that it does not contain may follow it."""
        self.inbox.begin(received, grid)
        asyncio.run_coroutine_threadsafe(self._put_early(), self._loop).result()

    def serve(self, wanted: Wanted, snapshot: dict[str, Any]) -> None:
        """Give a newcomer what it waits for."""

        def answer() -> None:
            if not wanted.answer.done():  # it may not have waited
                wanted.answer.set_result(snapshot)

        self._loop.call_soon_threadsafe(answer)

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
            return await getattr(peer, operation)(run=self._endpoint.run, **fields)

        future = asyncio.run_coroutine_threadsafe(ask(), self._loop)
        future.add_done_callback(lambda _: on_answer())
        return future

    def stop_sending(self) -> None:
        """Send nothing more, not even a sign of life."""
        if self._pumping is not None:
            self._pumping.cancel()

    def end(self) -> None:
        """Whoever waits for the replica to leave may go on."""
        self._loop.call_soon_threadsafe(self._left.set)
