"""The channel on a worker: the plugin, and the endpoint of each replica.

The plugin answers requests of the scheduler and of other workers. Each replica has an
endpoint on the worker's event loop, which receives and sends its messages.
"""

import asyncio
import atexit
import concurrent.futures
import functools
import gc
import itertools
import logging
import math
import secrets
import sys
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.profile import call_stack
from typing_extensions import override

from daskdl import codec
from daskdl.channel.broadcast import WorkerCopies
from daskdl.channel.inbox import (
    Inbox,
    PreSnapshotBuffer,
    Received,
    SharedFrame,
    decode_all,
    refuse,
    sum_on_grid,
    undecoded_bytes,
)
from daskdl.channel.merging import UNREADABLE
from daskdl.channel.protocol import (
    FAIL,
    FETCH_SUM,
    LEAVE,
    MESSAGE_BYTES,
    NAME,
    Arrays,
    BlobParts,
    ChannelSpec,
    Fields,
    GoneError,
    Guard,
    Handler,
    Message,
    MessageKind,
    Natural,
    RunId,
    check_secret,
    copied,
    handlers_of,
    run_id,
    task_key,
    unwrap,
    wrap,
)
from daskdl.channel.recovery import Repairs
from daskdl.channel.routing import ROUTINGS, Routing
from daskdl.channel.transport import (
    BATCH_BYTES,
    Connection,
    Pace,
    Transport,
    WorkerOverDask,
    time_limit,
)
from daskdl.codec import Stamp, Summand, SumUpdate, Update
from daskdl.errors import ChannelError, CodecError, WaitTimeoutError

logger = logging.getLogger(__name__)

T = TypeVar("T")

INLINE_BYTES = 2**20  # more bytes of frames are decoded in a thread
BUFFERED = 16  # updates that are decoded together when the snapshot has arrived


SNAPSHOT = "snapshot "  # begins the names of snapshots, and of no other blobs
# Snapshots kept for one reader: an abandoned request may be answered after the next
# request of its reader, and must not evict the newer snapshot.
SNAPSHOTS_KEPT = 2


class BlobServer:
    """Serves arrays of a replica in parts, on the event loop.

    Other replicas fetch blobs by name. A snapshot is a blob for one replica, and the
    newest `SNAPSHOTS_KEPT` for that replica are kept. The client fetches the newest
    agreed state, which is made when its first part is fetched and released after the
    last part.
    """

    sent_bytes: int

    def __init__(self) -> None:
        self.sent_bytes = 0
        self._blobs: dict[str, BlobParts] = {}
        self._readers: dict[str, int] = {}  # by name of the snapshot
        self._numbers = itertools.count()  # of snapshots
        # Epoch at whose end the state was agreed on, and the function that makes it.
        self._state: tuple[int, Callable[[], Arrays]] | None = None
        self._fetched_state: tuple[int, BlobParts] | None = (
            None  # epoch, state being fetched
        )
        self._changed = asyncio.Condition()

    async def publish(self, name: str, blob: BlobParts) -> None:
        """Let other replicas fetch a blob; a name that is in use is ignored."""
        async with self._changed:
            self._blobs.setdefault(name, blob)
            self._changed.notify_all()

    async def drop(self, keep: str) -> None:
        """Drop all blobs except one, and snapshots."""
        async with self._changed:
            kept = {keep, *self._readers}
            self._blobs = {n: blob for n, blob in self._blobs.items() if n in kept}

    async def publish_snapshot(self, reader: int, arrays: Arrays) -> str:
        """Let a replica fetch the arrays of a snapshot; return the name of the blob."""
        name = f"{SNAPSHOT}{next(self._numbers)}"
        await self.publish(name, BlobParts(arrays))
        self._readers[name] = reader
        published = [n for n, of in self._readers.items() if of == reader]
        for former in published[:-SNAPSHOTS_KEPT]:
            del self._readers[former], self._blobs[former]
        return name

    @property
    def has_snapshots(self) -> bool:
        """Whether there are snapshots. Any thread."""
        return bool(self._readers)

    async def drop_snapshots(self, readers: Collection[int]) -> None:
        """Drop the snapshots for these replicas."""
        async with self._changed:
            for name in [n for n, of in self._readers.items() if of in readers]:
                del self._readers[name], self._blobs[name]

    async def keep_state(self, epoch: int, make: Callable[[], Arrays] | None) -> None:
        """Let the client fetch the state at the end of an epoch; None: no state."""
        async with self._changed:
            self._state = None if make is None else (epoch, make)
            self._changed.notify_all()

    async def blob(self, name: str, part: int, timeout_s: float) -> dict[str, Any]:
        """Return a part of a blob, for the wire; wait until the blob is published.

        Raises:
            GoneError: If it is a snapshot that is not kept any more.
        """
        if name.startswith(SNAPSHOT) and name not in self._readers:
            raise GoneError(f"{name!r} is no longer kept")
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: name in self._blobs)
            blob = self._blobs[name]
        self.sent_bytes += blob.part(part).nbytes
        return blob.to_wire(part)

    async def state(self, epoch: int, part: int, timeout_s: float) -> dict[str, Any]:
        """Return a part of the agreed state, for the wire.

        Args:
            epoch: Epoch at whose end the state was agreed on. For the first part, wait
                for the state of this or a later epoch.
            part: Number of the part, from 0.
            timeout_s: Bound on the wait, seconds, without the time to make the state.
        """
        if part == 0:
            async with asyncio.timeout(timeout_s), self._changed:
                while self._state is None or self._state[0] < epoch:
                    await self._changed.wait()
                epoch, make = self._state
            self._fetched_state = epoch, BlobParts(await asyncio.to_thread(make))
        if self._fetched_state is None or self._fetched_state[0] != epoch:
            raise ValueError(f"epoch {epoch} is not being fetched")
        blob = self._fetched_state[1]
        if part == blob.parts - 1:
            self._fetched_state = None
        return {"epoch": epoch, **blob.to_wire(part)}


SUMS_KEPT = 4  # on a worker; an older sum comes from the scheduler
# A worker that has not answered is asked for no sum for so many times the timeout of a
# request. Asking in vain delays a sum by a third of that timeout.
AVOIDED_REQUESTS = 4


Fetched = tuple[Any, SumUpdate]  # the frame of a sum, and what it holds


class KeptSums:
    """The latest sums that a worker has received; others fetch them from it.

    Belongs to the event loop, and to all replicas of a run on the worker.

    Args:
        limit_bytes: Bound of their bytes, but for the latest one.
        request_s: Timeout of a request, seconds.

    Attributes:
        fetching: Held while one is fetched, so that one replica does it for all.
        coming: Sums that are on their way, by number.
        nbytes: Bytes of all.
    """

    fetching: asyncio.Lock
    coming: "dict[int, asyncio.Task[Fetched | None]]"

    def __init__(self, limit_bytes: int, request_s: float) -> None:
        self.fetching = asyncio.Lock()
        self.coming = {}
        self._limit_bytes = limit_bytes
        self._avoided_s = AVOIDED_REQUESTS * request_s
        self._avoided: dict[str, float] = {}  # until when, by address of the worker
        self._frames: dict[int, Any] = {}  # by number, oldest first
        self._changed = asyncio.Condition()

    @property
    def nbytes(self) -> int:
        return sum(memoryview(frame).nbytes for frame in self._frames.values())

    def find(self, number: int) -> Any:
        """Return a sum; None if it is not here."""
        return self._frames.get(number)

    async def keep(self, number: int, frame: Any) -> None:
        """Keep a sum, and forget the oldest."""
        async with self._changed:
            self._frames[number] = frame
            while len(self._frames) > SUMS_KEPT or (
                self.nbytes > self._limit_bytes and len(self._frames) > 1
            ):
                del self._frames[next(iter(self._frames))]
            self._changed.notify_all()

    def avoid(self, worker: str, now: float) -> None:
        """Do not fetch sums from a worker for a while; `now` is the loop's time."""
        self._avoided = {w: end for w, end in self._avoided.items() if end > now}
        self._avoided[worker] = now + self._avoided_s

    def avoids(self, worker: str, now: float) -> bool:
        """Whether sums come from the scheduler instead of this worker."""
        return self._avoided.get(worker, -math.inf) > now

    async def wait_for(self, number: int, timeout_s: float) -> Any:
        """Return a sum once it is here.

        Raises:
            GoneError: If later ones have come, and this one is not kept.
        """
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(
                lambda: number <= max(self._frames, default=-1)
            )
        if number not in self._frames:
            raise GoneError(f"the sum {number} is no longer kept")
        return self._frames[number]


class Snapshot(NamedTuple):
    """The state of a replica between two steps."""

    values: dict[str, Any]  # plain ones, "received" and "grid" among them
    arrays: Arrays


class SnapshotRequest(NamedTuple):
    """Another replica's request for this state, to join or to agree."""

    cut: dict[int, int]  # by origin, last update that the state must contain
    answer: concurrent.futures.Future[Snapshot]


class ReplicaEndpoint:
    """Receives and sends the messages of one replica, on its worker's event loop.

    Attributes:
        inbox: Received updates and progress.
        connection: Connection to the scheduler and to other workers.
        routing: Sends and forwards updates.
        repairs: Requests missing updates.
        closing: Whether the worker closes; the replica should hand over and leave.
        blobs: Arrays that other replicas and the client may fetch.
        sums: Sums that other workers may fetch.
        snapshot_requests: Requests for snapshots, which the training thread serves.
    """

    inbox: Inbox
    connection: Connection
    routing: Routing
    repairs: Repairs
    closing: bool
    blobs: BlobServer
    sums: KeptSums
    snapshot_requests: list[SnapshotRequest]

    def __init__(self, transport: Transport, spec: ChannelSpec, sums: KeptSums) -> None:
        routing = ROUTINGS[spec.routing]
        self.inbox = Inbox(
            spec.size,
            spec.grid,
            spec.inbox_bytes,
            in_order=routing.relayed and not routing.merges,
            in_step=spec.in_step,
            clock=transport.clock,
            replica=spec.replica,
        )
        self.inbox.awaits_snapshot = (
            True  # updates may arrive before the answer to the join
        )
        self.connection = Connection(transport, spec, self.inbox.stop)
        self.routing = routing(self.connection, self.inbox)
        self.repairs = Repairs(self.routing, self._put)
        self.closing = False
        self.blobs = BlobServer()
        self.sums = sums
        self.snapshot_requests = []
        self._before_snapshot = PreSnapshotBuffer()
        self._spec = spec
        self._left = asyncio.Event()
        self._running: list[concurrent.futures.Future[None]] = []
        self._unfetched = 0  # number of the last sum that did not arrive
        # The latest that this replica has begun to fetch.
        self._coming = deque[asyncio.Task[Fetched | None]](maxlen=SUMS_KEPT)

    # ---- event loop

    async def deliver(self, messages: Sequence[Message], asked_at: float) -> int:
        """Process messages in order; unreadable updates are counted and dropped.

        Updates that follow each other are decoded in one call.

        Args:
            messages: The messages.
            asked_at: When the request came that has them, on the loop's clock. It may
                have others for other replicas here.

        Returns:
            The number of messages before the first that must be sent again, because
            there is no room for it or a barrier holds it back.
        """
        accepted = 0
        for is_update, group in itertools.groupby(messages, _is_update):
            batch = list(group)
            if is_update:
                count = await self._deliver_updates(batch)
            else:
                count = await self._deliver_others(batch, asked_at)
            accepted += count
            if count < len(batch):
                break
        return accepted

    async def _deliver_others(self, batch: Sequence[Message], asked_at: float) -> int:
        """Deliver sums and control messages; see `deliver`."""
        for place, message in enumerate(batch):
            if message.kind == MessageKind.SUM_AT:
                delivered = await self._deliver_fetched(message, asked_at)
            elif message.kind == MessageKind.SUM:
                delivered = await self._deliver_sum(message)
            else:
                self._process_control(message)
                continue
            if not delivered:
                return place
        return len(batch)

    def _process_control(self, message: Message) -> None:
        if message.kind == MessageKind.MEMBERS:
            self.on_members(message.payload)
            return
        if message.kind == MessageKind.MEMBER:
            self._on_change(message)
            return
        is_new = self.inbox.process_control(message)
        if is_new and message.kind == MessageKind.PROGRESS:
            self.routing.on_message(message)

    async def _deliver_updates(self, batch: Sequence[Message]) -> int:
        """Deliver updates; see `deliver`."""
        batch = [self._owned(message) for message in batch]
        inbox = self.inbox
        if inbox.awaits_snapshot:
            for place, message in enumerate(batch):
                limit_bytes = self._spec.inbox_bytes
                is_kept = self._before_snapshot.keep(message, limit_bytes)
                if is_kept is None:
                    return place
                if is_kept and self.routing.generation:
                    self.routing.on_message(message)
            return len(batch)
        if inbox.barrier.holding:
            held = [inbox.holds_back(message) for message in batch]
            batch = batch[: [*held, True].index(True)]
        taken = await self._put(batch)
        for message in itertools.compress(batch, taken):
            self.routing.on_message(message)
        held = [  # a barrier may have begun meanwhile
            not is_taken and inbox.holds_back(message)
            for message, is_taken in zip(batch, taken, strict=True)
        ]
        return [*held, True].index(True)

    def _owned(self, message: Message) -> Message:
        """Copy the frame of a message out of its buffer, which may hold a batch."""
        if self.routing.relayed and not self.inbox.awaits_snapshot:
            return message  # decoded at once, not kept
        payload = message.payload
        if isinstance(payload, SharedFrame):
            payload = payload.payload
        try:
            return message._replace(payload=copied(payload))
        except (TypeError, ValueError):  # not bytes: refused later
            return message

    async def _put(self, messages: Sequence[Message]) -> list[bool]:
        """Put updates into the inbox; return which of them it has taken."""
        decode = functools.partial(
            decode_all, messages, self._spec, self.inbox.pending.grid
        )
        if undecoded_bytes(messages) > INLINE_BYTES:
            updates = await asyncio.to_thread(decode)
        else:
            updates = decode()
        taken: list[bool] = []
        with self.inbox.changed:  # wakes the training thread once
            for message, update in zip(messages, updates, strict=True):
                if isinstance(update, CodecError):
                    refuse(message, update, self._spec, self.inbox)
                    taken.append(False)
                else:
                    taken.append(self.inbox.put(message, update))
        for message in itertools.compress(messages, taken):
            self.routing.keep(message)
        return taken

    async def _deliver_fetched(self, message: Message, asked_at: float) -> bool:
        """Fetch a sum and process it, as `deliver` an update.

        Over a slow link, it may arrive later than the scheduler waits for the answer.
        It comes on then, until the scheduler asks again.
        """
        sums, number = self.sums, message.sequence
        async with sums.fetching:
            frame, total = sums.find(number), None
            if frame is None:
                if number not in sums.coming:
                    coming = asyncio.ensure_future(self._fetch_sum(message))
                    sums.coming[number] = coming
                    self._coming.append(coming)
                    self.routing.fetching = number != self._unfetched
                coming = sums.coming[number]
                answered_at = asked_at + self._spec.timeouts.request * 5 / 6
                left_s = max(answered_at - self.connection.loop.time(), 0.0)
                await asyncio.wait({coming}, timeout=left_s)
                if not coming.done():
                    return False
                self.routing.fetching = False
                sums.coming.pop(number, None)
                fetched = None if coming.cancelled() else coming.result()
                if fetched is None:
                    self._unfetched = number
                    return False
                frame, total = fetched
                await sums.keep(number, frame)
        if total is None:  # another replica here has fetched it
            total = self._read_sum(frame)
        return await self._take_sum(message._replace(kind=MessageKind.SUM), total)

    async def _fetch_sum(self, message: Message) -> Fetched | None:
        """Fetch a sum from a worker that has it, or else from the scheduler.

        Returns:
            The frame and what it holds; None if there was no answer that could be read.
        """
        sums, loop = self.sums, self.connection.loop
        timeouts = self._spec.timeouts
        worker = self.routing.workers.get(message.origin)
        places: list[tuple[str | None, int, float]] = []
        if worker is not None and not sums.avoids(worker, loop.time()):
            # Longer than the worker itself waits for the sum before it refuses.
            places.append((worker, message.origin, timeouts.request / 3))
        longest_s = timeouts.bound("data", "silence").seconds
        places.append((None, self._spec.replica, longest_s))
        for address, replica, longest_s in places:
            asking = self.connection.ask(
                address, FETCH_SUM, replica=replica, number=message.sequence
            )
            try:
                async with time_limit(longest_s):
                    answer = await asking
                frame = copied(answer["frame"])
                return frame, self._read_sum(frame)
            except (OSError, *UNREADABLE) as error:  # a TimeoutError is an OSError
                logger.info("sum %s from %s: %s", message.sequence, address, error)
                if address is not None and isinstance(error, OSError):
                    sums.avoid(address, loop.time())
        return None

    def _read_sum(self, frame: Any) -> SumUpdate:
        return codec.decode_sum(frame, run=self._spec.run, size=self._spec.size)

    async def _deliver_sum(self, message: Message) -> bool:
        """Process the sum of several updates, as `deliver` an update."""
        try:
            frame = unwrap(message.payload)
            total = self._read_sum(frame)
        except UNREADABLE as error:
            self._refuse_sum(error)
            return True
        if message.sequence:
            await self.sums.keep(message.sequence, copied(frame))
        return await self._take_sum(message, total)

    async def _take_sum(self, message: Message, total: SumUpdate) -> bool:
        """Put a sum into the inbox, or keep it for the snapshot; see `deliver`."""
        if self.inbox.awaits_snapshot:
            names = [summand[:2] for summand in total.summands]
            kept = message._replace(payload=total)
            limit_bytes = self._spec.inbox_bytes
            return self._before_snapshot.keep(kept, limit_bytes, names) is not None
        return await self._put_sum(message, total)

    def _refuse_sum(self, error: Exception) -> None:
        """Count a sum that could not be read; its updates are missing from now on."""
        with self.inbox.changed:
            self.inbox.refused += 1
        logger.warning("replica %s refused a sum: %s", self._spec.replica, error)

    async def _put_sum(self, message: Message, total: SumUpdate) -> bool:
        """Add the new updates of a sum to the inbox; False if it must be sent again.

        What was received before is subtracted. If no copy of that is kept here, the new
        updates are requested again, one by one.
        """
        inbox = self.inbox
        while True:
            new, received = inbox.divide(total.summands)
            if not new:
                return True
            if not inbox.admits(new):
                return False
            try:
                originals = [self.original(*name) for name in received]
                make = functools.partial(
                    sum_on_grid, total, originals, inbox.pending.grid
                )
                if 4 * total.size > INLINE_BYTES:
                    update = await asyncio.to_thread(make)
                else:
                    update = make()
            except (CodecError, LookupError) as error:
                self._request_singly(new, error)
                return True
            if inbox.put_sum(new, update, message.nbytes):
                return True

    def original(self, origin: int, sequence: int) -> Update:
        """Return an update that is kept here; raise LookupError if it is not."""
        kept = self.routing.lookup(origin, [sequence])
        if not kept:
            raise LookupError(f"update {sequence} of replica {origin} is not kept")
        return codec.decode(unwrap(kept[0].payload), size=self._spec.size)

    def _request_singly(self, new: Sequence[Summand], error: Exception) -> None:
        """Request updates of a sum again, as unreadable ones."""
        logger.info("replica %s cannot use a sum: %s", self._spec.replica, error)
        for origin, sequence, step in new:
            stamp = Stamp(self._spec.run, origin, sequence, step)
            self.inbox.add_unreadable(Message.update(stamp, step, 0))

    def on_members(self, payload: Any) -> None:
        """Adopt a membership: its generation, and the worker of each member."""
        generation, members = payload
        is_earliest = not self.routing.generation
        self.routing.on_members(generation, dict(members))
        if is_earliest:
            for message in self._before_snapshot.messages:
                self.routing.on_message(message)

    def _on_change(self, change: Message) -> None:
        """Adopt a membership that differs from the last one in one replica."""
        routing, generation = self.routing, change.sequence
        if generation == routing.generation + 1:  # else it is known
            workers = {**routing.workers, change.origin: change.payload}
            if change.payload is None:
                del workers[change.origin]
            routing.on_members(generation, workers)

    def lookup(self, origin: int, sequences: Iterable[int]) -> list[Message]:
        """Return updates that another replica lacks, as many as fit one answer."""
        batch: list[Message] = []
        nbytes = 0
        for message in self.routing.lookup(origin, sequences):
            nbytes += message.nbytes + MESSAGE_BYTES
            if batch and nbytes > BATCH_BYTES:
                break
            batch.append(message)
        return batch

    async def snapshot(self, cut: dict[int, int]) -> Snapshot:
        """Return this replica's state for another replica, made between two steps."""
        request = SnapshotRequest(cut, concurrent.futures.Future())
        self.snapshot_requests.append(request)
        self.inbox.wake()
        try:
            async with asyncio.timeout(self._spec.timeouts.request):
                return await asyncio.wrap_future(request.answer)
        finally:
            self.snapshot_requests.remove(request)

    def close_soon(self) -> None:
        """Make the training thread leave at its next step: the worker closes."""
        self.closing = True
        self.inbox.stop("its worker closes")

    async def left(self, timeout_s: float) -> None:
        """Wait until the replica has left; log a warning on timeout."""
        try:
            await asyncio.wait_for(self._left.wait(), timeout_s)
        except TimeoutError:
            logger.warning(
                "replica %s did not leave within %s s",
                self._spec.replica,
                timeout_s,
            )

    # ---- training thread

    def start(self) -> None:
        """Start sending, and requesting missing updates."""
        for work in (self.routing.to_scheduler.run, self.repairs.run):
            sending = self.connection.start(self.connection.guard(work))
            self._running.append(sending)

    def enter(self, payload: Any) -> None:
        """Adopt the membership before the first update; see `on_members`."""

        async def enter() -> None:
            self.on_members(payload)

        self._run_on_loop(enter())

    def buffer_again(self) -> dict[int, int]:
        """Buffer updates until the next snapshot, as before the initial one.

        Returns:
            By origin, the last update that the next snapshot must contain: others no
            longer keep updates that this replica has acknowledged.
        """
        with self.inbox.changed:
            if self.inbox.awaits_snapshot:
                return {}
            self.inbox.awaits_snapshot = True
            return self.inbox.received.all_complete()

    def drop_early(self, cut: Mapping[int, int]) -> None:
        """Drop buffered updates that the next snapshot has to contain."""
        self.connection.loop.call_soon_threadsafe(self._before_snapshot.drop, cut)

    def start_from_snapshot(
        self, received: Mapping[int, Received], grid: float, cut: Mapping[int, int]
    ) -> None:
        """Start from a snapshot; deliver buffered updates that it does not contain."""

        async def deliver() -> None:
            begin = 0
            while batch := self._before_snapshot.messages[begin : begin + BUFFERED]:
                for is_update, group in itertools.groupby(batch, _is_update):
                    if is_update:
                        await self._put(list(group))
                        continue
                    for message in group:
                        await self._put_sum(message, message.payload)
                begin += len(batch)  # more may have arrived
            self.inbox.awaits_snapshot = False
            self._before_snapshot = PreSnapshotBuffer()

        self.inbox.begin(received, grid, cut)
        self._run_on_loop(deliver())

    def complete(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Wait for a coroutine on the event loop, even if the run was stopped."""
        future = self.connection.start(work)
        future.add_done_callback(lambda _: self.inbox.wake())
        if not self.inbox.wait_for(future.done, timeout_s, even_if_stopped=True):
            future.cancel()
            raise TimeoutError("no answer")
        return future.result()

    def _run_on_loop(self, work: Coroutine[Any, Any, None]) -> None:
        bound = self._spec.timeouts.bound("request")
        try:
            self.complete(work, bound.seconds)
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"replica {self._spec.replica} waited {bound} for the event loop "
                "of its own worker; is it busy, or closed?"
            ) from error

    def stop_sending(self) -> None:
        """Stop sending, heartbeats included."""
        for future in self._running:
            future.cancel()
        self.connection.loop.call_soon_threadsafe(self.routing.end)
        self.connection.loop.call_soon_threadsafe(self._fetch_no_more)

    def _fetch_no_more(self) -> None:
        for coming in self._coming:
            coming.cancel()

    def mark_left(self) -> None:
        """End the wait for the replica to leave."""
        self.connection.loop.call_soon_threadsafe(self._left.set)


def _frames_by_key(worker: Worker) -> dict[Any, FrameType]:
    """Return the innermost frame of each running task."""
    with worker.active_threads_lock:
        frames = sys._current_frames()
        return {
            key: frames[thread]
            for thread, key in worker.active_threads.items()
            if thread in frames
        }


def _imported_module(frame: FrameType | None) -> str:
    """Return the name of the module that is being imported, empty if none is."""
    while frame is not None:
        code = frame.f_code
        if (code.co_name, code.co_filename) == IMPORT:
            return str(frame.f_locals["name"])
        frame = frame.f_back
    return ""


IMPORT = "_find_and_load", "<frozen importlib._bootstrap>"  # has the module's name

WAIT_S = 1.0  # longest wait for a blob or state; the requester then retries
LEAVE_S = 2.0  # batch systems kill a worker soon after its close request


class ChannelWorkerPlugin(WorkerPlugin):  # type: ignore[misc]  # Dask is untyped
    """Handles requests to the replicas on a worker."""

    name = NAME
    idempotent = True
    copies: WorkerCopies
    endpoints: dict[tuple[int, int], ReplicaEndpoint]
    refused: int  # unreadable messages, and messages to replicas not on this worker

    def __init__(self) -> None:
        self.endpoints = {}
        self.refused = 0
        self._worker: Worker | None = None  # None: not set up on a Dask worker
        self._pace: Pace | None = None  # likewise
        self._guard = Guard(self._count)

    @override
    def setup(self, worker: Worker) -> None:
        # Dask may set a plugin up twice; endpoints in use are kept.
        former = worker.extensions.get(NAME)
        if former is None:
            self._pace = Pace(worker)
        else:
            self.endpoints, self._pace = former.endpoints, former._pace
        worker.extensions[NAME] = self
        self._worker = worker
        self.attach(WorkerOverDask(worker), None if former is None else former.copies)
        if worker.nanny:
            # The process runs only this worker. A search for cycles among the objects
            # of torch at exit takes over a second of the four that a nanny waits.
            atexit.unregister(gc.freeze)
            atexit.register(gc.freeze)

    def attach(self, transport: Transport, copies: WorkerCopies | None = None) -> None:
        """Answer the requests to a server, which may have copies already."""
        self._transport = transport
        self.copies = WorkerCopies(transport) if copies is None else copies
        for operation, handler in handlers_of(self.copies).items():
            transport.handlers[operation] = self._guard.of(handler)
        # Not in `__init__`: Dask pickles the plugin, and a guarded handler has types.
        self._shared = self._guard.of(self._share)
        for operation, handler in handlers_of(self).items():
            transport.handlers[operation] = self._guard.of(self._of_members(handler))

    def _of_members(self, handler: Handler) -> Handler:
        """Let a handler answer only requests with the secret of their run."""

        @functools.wraps(handler)
        async def answer(run: int, secret: int | None = None, **fields: Any) -> Fields:
            for (of_run, _), endpoint in list(self.endpoints.items()):
                if of_run == run:
                    check_secret(secret, endpoint.connection.spec.secret)
            return await handler(run=run, **fields)

        return answer

    @override
    async def teardown(self, worker: Worker) -> None:
        if worker.extensions.get(NAME) is self:
            await self.retire()

    async def retire(self) -> None:
        """Let the replicas hand over their work and leave before the worker closes."""
        endpoints = list(self.endpoints.values())
        for endpoint in endpoints:
            endpoint.close_soon()
        await asyncio.gather(*(endpoint.left(LEAVE_S) for endpoint in endpoints))

    async def handle_deliver(
        self, run: RunId, replica: Natural, messages: Sequence[Any]
    ) -> Fields:
        """Deliver messages of the relay or of another replica to a replica here."""
        endpoint = self._endpoint_of(run, replica)
        batch = [Message.from_wire(fields) for fields in messages]
        asked_at = asyncio.get_running_loop().time()
        return {"accepted": await endpoint.deliver(batch, asked_at)}

    async def handle_deliver_batches(
        self,
        run: RunId,
        messages: Sequence[Any],
        shares: Sequence[tuple[Natural, Sequence[Natural]]],
    ) -> Fields:
        """Deliver messages of the relay to several replicas, each message sent once."""
        unpacked = [_shareable(fields) for fields in messages]
        batches = [
            (replica, [unpacked[i] for i in places]) for replica, places in shares
        ]
        asked_at = asyncio.get_running_loop().time()
        answers = [
            await self._shared(
                run=run, replica=replica, messages=batch, asked_at=asked_at
            )
            for replica, batch in batches
        ]
        return {"answers": answers}

    async def _share(
        self, run: RunId, replica: Natural, messages: Sequence[Any], asked_at: float
    ) -> Fields:
        endpoint = self._endpoint_of(run, replica)
        for message in messages:
            if isinstance(message, Exception):
                raise message
        return {"accepted": await endpoint.deliver(messages, asked_at)}

    async def handle_snapshot(
        self,
        run: RunId,
        replica: Natural,
        cut: Sequence[tuple[Natural, Natural]],
        reader: Natural,
    ) -> Fields:
        """Return the state of a replica here to another replica, without its arrays.

        Returns:
            ``values``: the plain values; ``name``: the blob with the arrays.
        """
        endpoint = self._endpoint_of(run, replica)
        values, arrays = await endpoint.snapshot(dict(cut))
        name = await endpoint.blobs.publish_snapshot(reader, arrays)
        return {"values": values, "name": name}

    async def handle_repair(
        self,
        run: RunId,
        replica: Natural,
        origin: Natural,
        sequences: Sequence[Natural],
    ) -> Fields:
        """Return updates to a replica that lacks them."""
        updates = self._endpoint_of(run, replica).lookup(origin, sequences)
        return {"messages": [update.to_wire() for update in updates]}

    async def handle_fetch_sum(
        self, run: RunId, replica: Natural, number: Natural
    ) -> Fields:
        """Return a sum to a replica on another worker, once it is here."""
        endpoint = self._endpoint_of(run, replica)
        timeout_s = endpoint.connection.spec.timeouts.request / 4
        frame = await endpoint.sums.wait_for(number, timeout_s)
        return {"frame": wrap(np.frombuffer(frame, np.uint8))}

    async def handle_fetch(
        self, run: RunId, replica: Natural, name: str, part: Natural
    ) -> Fields:
        """Return a part of a blob to another replica, once it is published."""
        return await self._endpoint_of(run, replica).blobs.blob(name, part, WAIT_S)

    async def handle_agreed(
        self,
        run: RunId,
        replica: Natural,
        epoch: Natural,
        part: Natural,
    ) -> Fields:
        """Return a part of the agreed state to the client, through the scheduler."""
        return await self._endpoint_of(run, replica).blobs.state(epoch, part, WAIT_S)

    async def handle_describe(self, run: RunId) -> Fields:
        """Describe what the training thread of each replica of a run here does.

        Returns:
            ``replicas``: for each replica its number, the cause of its wait, "" if it
            computes, the seconds waited, the frames of its stack, outermost first, and
            the module that it imports, "" if none.
        """
        now, replicas = self._transport.clock.now(), []
        frames = {} if self._worker is None else _frames_by_key(self._worker)
        for (of_run, replica), endpoint in list(self.endpoints.items()):
            if of_run == run:
                cause, began_at = endpoint.inbox.waiting or ("", now)
                frame = frames.get(task_key(run, replica))
                stack = [] if frame is None else call_stack(frame)
                module = _imported_module(frame)
                replicas.append([replica, cause, now - began_at, stack, module])
        return {"replicas": replicas}

    def _count(self, fields: Fields) -> None:
        """Count a refused message, at the endpoint of its replica if there is one."""
        run, replica = fields.get("run"), fields.get("replica")
        if not isinstance(replica, int):
            replica = None
        for (of_run, number), endpoint in self.endpoints.items():
            if isinstance(run, int) and of_run == run and replica in (None, number):
                with endpoint.inbox.changed:
                    endpoint.inbox.refused += 1
                return
        self.refused += 1

    def _endpoint_of(self, run: int, replica: int) -> ReplicaEndpoint:
        """Return the endpoint of a replica."""
        endpoint = self.endpoints.get((run, replica))
        if endpoint is None:
            self.refused += 1
            raise GoneError(f"no replica {replica} of run {run_id(run)} here")
        return endpoint

    def open(self, spec: ChannelSpec) -> ReplicaEndpoint:
        """Make the endpoint of a replica, which accepts messages from now on."""
        key = (spec.run, spec.replica)
        if key in self.endpoints:
            raise ChannelError(
                f"replica {spec.replica} of run {run_id(spec.run)} is already open"
            )
        sums = KeptSums(spec.inbox_bytes, spec.timeouts.request)
        for (run, _), endpoint in list(self.endpoints.items()):
            # A run that opens again after all replicas were lost has another secret.
            if run == spec.run and endpoint.connection.spec.secret == spec.secret:
                sums = endpoint.sums
        self.endpoints[key] = ReplicaEndpoint(self._transport, spec, sums)
        if self._pace is not None:
            self._pace.set_training(bool(self.endpoints))
        return self.endpoints[key]

    def forget(self, spec: ChannelSpec) -> None:
        """Remove the endpoint of a replica that has left, and end waits for that."""
        endpoint = self.endpoints.pop((spec.run, spec.replica), None)
        if endpoint is not None:
            endpoint.mark_left()
        if self._pace is not None:
            self._pace.set_training(bool(self.endpoints))

    def decline(
        self,
        run: int,
        secret: int,
        replica: int,
        failure: Mapping[str, Any],
        timeout_s: float,
    ) -> None:
        """Report that a replica was assigned to this worker and does not join.

        Called in the thread of its task.
        """
        token = secrets.randbits(63)
        fields = {"run": run, "secret": secret, "replica": replica, "token": token}

        async def tell() -> None:
            await self._transport.ask(None, FAIL, failure=dict(failure), **fields)
            await self._transport.ask(None, LEAVE, **fields)

        telling = asyncio.run_coroutine_threadsafe(tell(), self._transport.loop)
        try:
            telling.result(timeout_s)
        except OSError as error:  # a TimeoutError is one
            telling.cancel()
            logger.info("replica %s of run %s: %s", replica, run_id(run), error)


def set_up(worker: Worker) -> None:
    """Set up the plugin on a worker."""
    ChannelWorkerPlugin().setup(worker)


def _shareable(fields: Any) -> Message | Exception:
    """Return a message whose frame is decoded once, or the error of reading it."""
    try:
        message = Message.from_wire(fields)
    except (TypeError, ValueError) as error:
        return error
    if message.kind != MessageKind.UPDATE:
        return message
    return message._replace(payload=SharedFrame(message.payload))


def _is_update(message: Message) -> bool:
    return message.kind == MessageKind.UPDATE
