"""One replica's channel over the relay of the scheduler plugin.

The event loop receives and sends; the training thread encodes and applies. The
two meet in the inbox and the outbox only.
"""

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from distributed import Worker
from distributed.protocol import (
    Serialize,
    Serialized,
    deserialize,
    serialize,
    to_serialize,
)
from numpy.typing import NDArray
from typing_extensions import override

from daskdl import codec
from daskdl.accumulator import count_of
from daskdl.channel.base import Channel, Gathered, Stopped, Traffic
from daskdl.channel.inbox import Arrived, Inbox
from daskdl.channel.messages import Answer, Item, ItemKind
from daskdl.channel.outbox import Outbox
from daskdl.channel.pump import Pump
from daskdl.errors import ChannelError, CodecError, DaskDLError, WaitTimeoutError
from daskdl.timeouts import Timeouts
from daskdl.version import VERSION

logger = logging.getLogger(__name__)

PACE_S = 0.005  # least time between two requests to the relay
BEAT_S = 1.0  # most time between two signs of life
INLINE_BYTES = 2**20  # larger frames are decoded beside the event loop


@dataclass(frozen=True)
class Endpoint:
    """Which replica of which run, and the bounds of its channel.

    Attributes:
        run: Identity of the run.
        replica: Number of the replica.
        size: Parameters of the model.
        grid: Of the run, parameter units.
        outbox_bytes: Bound of what waits to be sent.
        inbox_bytes: Bound of what waits to be applied.
        timeouts: Bounds on waiting.
    """

    run: int
    replica: int
    size: int
    grid: float
    outbox_bytes: int
    inbox_bytes: int
    timeouts: Timeouts


def unwrap(payload: Any) -> Any:
    """A payload as its sender wrapped it, whatever the comm made of it."""
    if isinstance(payload, Serialized):
        return deserialize(payload.header, payload.frames)
    if isinstance(payload, Serialize):
        return payload.data
    return payload


class WorkerChannel(Channel):
    """The channel of one replica, over the relay of the scheduler plugin.

    Args:
        worker: Where the replica trains.
        endpoint: Which replica it is, and the bounds.
        forget: Called when the replica has left.
    """

    inbox: Inbox
    outbox: Outbox

    def __init__(
        self, worker: Worker, endpoint: Endpoint, forget: Callable[[], object]
    ) -> None:
        self.inbox = Inbox(endpoint.size, endpoint.grid, endpoint.inbox_bytes)
        self.outbox = Outbox(endpoint.outbox_bytes)
        self.closing = False
        self._forget = forget
        self._worker = worker
        self._endpoint = endpoint
        self._loop: asyncio.AbstractEventLoop = worker.loop.asyncio_loop
        self._left = asyncio.Event()
        self._failure: DaskDLError | None = None
        self._sequence = 0
        self._published_step = 0
        self._progress = (0, -1)  # steps completed, last epoch done
        self._traffic = Traffic()
        self._pump_task: concurrent.futures.Future[None] | None = None

    # ---- event loop

    async def deliver(self, item: Item) -> None:
        """An item has arrived; what cannot be read is counted and dropped."""
        if item.kind != ItemKind.UPDATE:
            self.inbox.note(item)
            return
        try:
            update = await self._decode(unwrap(item.payload))
        except (CodecError, TypeError, ValueError) as error:
            self.inbox.refuse()
            logger.warning(
                "replica %s refused update %s of replica %s: %s",
                self._endpoint.replica,
                item.sequence,
                item.origin,
                error,
            )
            return
        if update.stamp[1:3] != (item.origin, item.sequence):
            self.inbox.refuse()
            logger.warning("an update is stamped %s, sent as %s", update.stamp, item[:4])
            return
        self.inbox.put(item, update)

    async def _decode(self, frame: Any) -> codec.Update:
        if memoryview(frame).nbytes > INLINE_BYTES:
            return await asyncio.to_thread(self._decode_now, frame)
        return self._decode_now(frame)

    def _decode_now(self, frame: Any) -> codec.Update:
        update = codec.decode(frame, run=self._endpoint.run, size=self._endpoint.size)
        if isinstance(update, codec.SparseUpdate):
            count_of(update.threshold, self.inbox.grid)
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
                "replica %s did not leave within %s s", self._endpoint.replica, timeout_s
            )

    async def _send(self, items: Sequence[Item]) -> int:
        # Progress beyond the batch would overtake the updates still waiting.
        all_of_it = len(items) == len(self.outbox)
        step, done = self._progress if all_of_it else (0, -1)
        answer = await self._worker.scheduler.daskdl_publish(
            run=self._endpoint.run,
            origin=self._endpoint.replica,
            items=[tuple(item) for item in items],
            step=step,
            done=done,
        )
        answer = self._understand(answer)
        return int(answer.get("accepted", 0))

    def _understand(self, answer: Any) -> dict[str, Any]:
        if not isinstance(answer, dict):
            raise ChannelError(
                f"the scheduler answered {answer!r}: is daskdl installed there?"
            )
        if answer["status"] == Answer.STOPPED:
            self.inbox.stop(answer["reason"])
        elif answer["status"] == Answer.UNKNOWN:
            self.inbox.stop("the scheduler does not know the run any more")
        elif answer["status"] == Answer.REFUSED:
            raise ChannelError(f"the scheduler refused: {answer['reason']}")
        return answer

    async def _run_pump(self, pump: Pump) -> None:
        try:
            await pump.run()
        except DaskDLError as error:
            self._fail(error)
        except OSError as error:
            self._fail(ChannelError(f"the scheduler cannot be reached: {error}"))

    def _fail(self, error: DaskDLError) -> None:
        self._failure = error
        self.inbox.stop(str(error))
        self.outbox.wake()

    # ---- training thread

    @override
    def join(self) -> Sequence[int]:
        answer = self._ask(
            self._worker.scheduler.daskdl_join(
                run=self._endpoint.run, replica=self._endpoint.replica, version=VERSION
            ),
            "join",
            self._endpoint.timeouts.join + self._endpoint.timeouts.request,
        )
        self._others = [r for r in answer["members"] if r != self._endpoint.replica]
        self.inbox.align(self._others, 0, self.inbox.grid)
        self._start_pump()
        return sorted(answer["members"])

    def _start_pump(self) -> None:
        async def start() -> None:
            pump = Pump(
                self.outbox,
                self._send,
                pace_s=PACE_S,
                beat_s=BEAT_S,
                timeout_s=self._endpoint.timeouts.request,
                destination="the scheduler",
            )
            self.outbox.on_offer = lambda: self._loop.call_soon_threadsafe(pump.wake)
            await self._run_pump(pump)

        self._pump_task = asyncio.run_coroutine_threadsafe(start(), self._loop)

    @override
    def next_stamp(self, step: int) -> codec.Stamp:
        return codec.Stamp(
            self._endpoint.run, self._endpoint.replica, self._sequence + 1, step
        )

    @override
    def has_room(self) -> bool:
        room = len(self.outbox) == 0 or self.outbox.nbytes < self.outbox.limit_bytes
        self._traffic.withheld += not room
        return room

    @override
    def publish(self, stamp: codec.Stamp, frame: NDArray[np.uint8]) -> bool:
        return self._publish(stamp, frame, force=False)

    @override
    def publish_last(self, stamp: codec.Stamp, frame: NDArray[np.uint8]) -> None:
        self._publish(stamp, frame, force=True)
        self.outbox.wait_for(lambda box: len(box) == 0, self._endpoint.timeouts.stop)

    def _publish(
        self, stamp: codec.Stamp, frame: NDArray[np.uint8], *, force: bool
    ) -> bool:
        # Serialised here, so that Dask does not try to compress it again.
        payload = Serialized(*serialize(frame))
        kind = ItemKind.UPDATE.value
        item = Item(kind, *stamp[1:], frame.nbytes, payload)
        self._published_step = stamp.step
        if not self.outbox.offer(item, force=force):
            self._traffic.withheld += 1
            return False
        self._sequence = stamp.sequence
        self._traffic.sent_bytes += frame.nbytes
        self._traffic.frames += 1
        return True

    @override
    def published(self) -> int:
        return self._sequence

    @override
    def complete(self, step: int, done: int = -1) -> None:
        former = self._progress
        self._progress = (step, max(done, former[1]))
        # A published update of this step says the same, and has woken the pump.
        if self._progress[1] > former[1] or step != self._published_step:
            self.outbox.on_offer()

    @override
    def align(self, step: int, grid: float) -> None:
        self._progress = (step, self._progress[1])
        self.inbox.align(self._others, step, grid)

    @override
    def lead(self, step: int, epoch: int) -> int:
        slowest = self.inbox.slowest(epoch)
        return 0 if slowest is None else max(0, step - slowest)

    @override
    def receive(self, up_to_step: int | None = None) -> Arrived:
        return self.inbox.take(up_to_step)

    @override
    def wait_for_others(self, step: int, epoch: int, max_staleness: int) -> None:
        def near_enough() -> bool:
            slowest = self.inbox.slowest(epoch)
            return slowest is None or step - slowest <= max_staleness

        self._wait("staleness", near_enough, lambda: f"steps {self.inbox.steps()}")

    @override
    def wait_for_room(self) -> None:
        self._wait_outbox("room", lambda box: len(box) == 0)

    @override
    def wait_for_updates(self, target: Mapping[int, int]) -> None:
        mine = {o: s for o, s in target.items() if o != self._endpoint.replica}
        self._wait(
            "updates",
            lambda: not self.inbox.behind(mine),
            lambda: f"missing updates by replica {self.inbox.behind(mine)}",
        )

    @override
    def lease(
        self, phase: str, epoch: int, finished: Mapping[str, Any] | None
    ) -> int | None:
        answer = self._ask(
            self._worker.scheduler.daskdl_lease(
                run=self._endpoint.run,
                replica=self._endpoint.replica,
                phase=phase,
                epoch=epoch,
                finished=None if finished is None else dict(finished),
            ),
            "lease",
            self._endpoint.timeouts.request,
        )
        piece = answer["piece"]
        return None if piece is None else int(piece)

    @override
    def gather(self, key: str, note: Any, *, announce: bool = False) -> Gathered:
        # No bound of its own: whoever is awaited and silent ends the run at the
        # scheduler, which also knows who that is.
        answer = self._ask(
            self._worker.scheduler.daskdl_gather(
                run=self._endpoint.run,
                replica=self._endpoint.replica,
                key=key,
                note=_wrap_all(note),
                announce=announce,
            ),
            "barrier",
            None,
        )
        notes = {r: _unwrap_all(note) for r, note in answer["notes"]}
        return Gathered(notes, {r: sequence for r, sequence in answer["lost"]})

    @override
    def traffic(self) -> Traffic:
        now, self._traffic = self._traffic, Traffic()
        inbox = self.inbox
        now.received_bytes, inbox.received_bytes = inbox.received_bytes, 0
        now.refused, inbox.refused = inbox.refused, 0
        now.folds, inbox.folds = inbox.folds, 0
        return now

    @override
    def check(self) -> None:
        if self.inbox.stopped is not None:
            self._raise_stopped()

    def fail(self, failure: Mapping[str, Any]) -> None:
        """Tell the scheduler that this replica cannot go on."""
        self._ask_anyway(
            self._worker.scheduler.daskdl_fail(
                run=self._endpoint.run,
                replica=self._endpoint.replica,
                failure=dict(failure),
            )
        )

    def leave(self) -> None:
        """Be a member no more; nothing of this replica stays on the worker."""
        if self._pump_task is not None:
            self._pump_task.cancel()
        self._ask_anyway(
            self._worker.scheduler.daskdl_leave(
                run=self._endpoint.run, replica=self._endpoint.replica
            )
        )
        self._forget()
        self._loop.call_soon_threadsafe(self._left.set)

    # ---- waiting, training thread

    def _raise_stopped(self) -> None:
        if self._failure is not None:
            raise self._failure
        raise Stopped(self.inbox.stopped)

    def _wait(self, cause: str, ready: Any, state: Any) -> None:
        started = time.perf_counter()
        # The scheduler ends a run in which somebody is silent; this bound is for
        # a scheduler that says nothing either.
        bound = self._endpoint.timeouts.silence + self._endpoint.timeouts.request
        came = self.inbox.wait_for(ready, bound)
        self._count_wait(cause, started)
        self.check()
        if not came:
            raise WaitTimeoutError(
                f"replica {self._endpoint.replica} waited {bound:g} s for {cause}; "
                f"{state()}"
            )

    def _wait_outbox(self, cause: str, ready: Any) -> None:
        started = time.perf_counter()
        bound = self._endpoint.timeouts.silence
        came = self.outbox.wait_for(
            lambda box: self.inbox.stopped is not None or ready(box), bound
        )
        self._count_wait(cause, started)
        self.check()
        if not came:
            raise WaitTimeoutError(
                f"replica {self._endpoint.replica} waited {bound:g} s for {cause}: "
                f"{len(self.outbox)} updates ({self.outbox.nbytes} bytes) could not "
                "be passed to the scheduler"
            )

    def _count_wait(self, cause: str, started: float) -> None:
        waits = self._traffic.waits_s
        waits[cause] = waits.get(cause, 0.0) + time.perf_counter() - started

    def _ask(
        self, request: Awaitable[Any], cause: str, timeout_s: float | None
    ) -> dict[str, Any]:
        started = time.perf_counter()
        future = self._submit(request)
        future.add_done_callback(lambda _: self.inbox.wake())
        self.inbox.wait_for(future.done, timeout_s)
        self._count_wait(cause, started)
        if not future.done():
            future.cancel()
            self.check()
            raise WaitTimeoutError(
                f"the scheduler did not answer to {cause} of replica "
                f"{self._endpoint.replica} within {timeout_s} s"
            )
        try:
            answer = self._understand(future.result())
        except OSError as error:
            raise ChannelError(f"the scheduler cannot be reached: {error}") from error
        self.check()
        return answer

    def _ask_anyway(self, request: Awaitable[Any]) -> None:
        """A last word, whether the run goes on or not."""
        future = self._submit(request)
        try:
            future.result(self._endpoint.timeouts.request)
        except (OSError, TimeoutError, concurrent.futures.CancelledError) as error:
            logger.info("replica %s: no answer: %s", self._endpoint.replica, error)

    def _submit(self, request: Awaitable[Any]) -> concurrent.futures.Future[Any]:
        async def ask() -> Any:
            return await request

        return asyncio.run_coroutine_threadsafe(ask(), self._loop)


def _wrap_all(note: Any) -> Any:
    if not isinstance(note, dict):
        return note
    return {
        key: to_serialize(value) if isinstance(value, np.ndarray) else value
        for key, value in note.items()
    }


def _unwrap_all(note: Any) -> Any:
    if isinstance(note, dict):
        return {key: unwrap(value) for key, value in note.items()}
    return unwrap(note)
