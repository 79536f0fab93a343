"""The channel's end on a worker: the plugin, and the event loop's end of each replica.

The plugin answers requests of the scheduler and of other workers. Behind it each
replica has an endpoint on the event loop, where its messages arrive and leave.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import gc
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin
from typing_extensions import override

from daskdl.channel.base import Received
from daskdl.channel.inbox import (
    UNREADABLE,
    Inbox,
    PreSnapshotBuffer,
    SharedFrame,
    decoded,
    refuse,
)
from daskdl.channel.protocol import (
    MESSAGE_BYTES,
    NAME,
    Answer,
    Arrays,
    Endpoint,
    Fields,
    GoneError,
    Guard,
    Identity,
    Message,
    MessageKind,
    Parcel,
    PeerProgress,
    Whole,
    handlers_of,
    owned,
)
from daskdl.channel.recovery import Repairs
from daskdl.channel.routing import ROUTINGS, Routing
from daskdl.channel.sender import BATCH_BYTES, Connection
from daskdl.errors import ChannelError, WaitTimeoutError

logger = logging.getLogger(__name__)

T = TypeVar("T")

INLINE_BYTES = 2**20  # larger frames are decoded beside the event loop


class BlobServer:
    """Arrays of a replica for others to fetch, part by part, on the event loop.

    Blobs have names. Besides them there is the newest state that all replicas agreed
    on, for the client; nothing is made of it before its first part is fetched, and what
    the parts are cut from stays until the last of them has gone: one copy at most.

    Attributes:
        sent_bytes: Of blobs that others have fetched.
    """

    sent_bytes: int

    def __init__(self) -> None:
        self.sent_bytes = 0
        self._blobs: dict[str, Parcel] = {}
        # At the end of which epoch it was agreed on, and what makes it.
        self._state: tuple[int, Callable[[], Arrays]] | None = None
        self._cut: tuple[int, Parcel] | None = None  # with its epoch
        self._changed = asyncio.Condition()

    async def publish(self, name: str, blob: Parcel) -> None:
        """Let others fetch a blob; a second one of the same name changes nothing."""
        async with self._changed:
            self._blobs.setdefault(name, blob)
            self._changed.notify_all()

    async def drop(self, keep: str) -> None:
        """Drop all blobs but the one of this name."""
        async with self._changed:
            self._blobs = {n: one for n, one in self._blobs.items() if n == keep}

    async def keep_state(self, epoch: int, make: Callable[[], Arrays] | None) -> None:
        """Let the client fetch the state of an epoch's end; None: not yet."""
        async with self._changed:
            self._state = None if make is None else (epoch, make)
            self._changed.notify_all()

    async def blob(self, name: str, part: int, timeout_s: float) -> dict[str, Any]:
        """One part of a blob, as it is sent; waits until there is such a blob.

        Raises:
            TimeoutError: If there is none in time.
        """
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: name in self._blobs)
            blob = self._blobs[name]
        self.sent_bytes += blob.part(part).nbytes
        return blob.to_wire(part)

    async def state(self, epoch: int, part: int, timeout_s: float) -> dict[str, Any]:
        """One part of the agreed state, as it is sent.

        Args:
            epoch: At the end of which it was agreed on; for the first part, that one
                or a later one, for which this waits.
            part: Counted from 0.
            timeout_s: How long to wait for it, seconds; making it is not counted.

        Raises:
            TimeoutError: If there is none in time.
            ValueError: If this is not what is being fetched.
        """
        if part == 0:
            async with asyncio.timeout(timeout_s), self._changed:
                while self._state is None or self._state[0] < epoch:
                    await self._changed.wait()
                epoch, make = self._state
            self._cut = epoch, Parcel(await asyncio.to_thread(make))
        if self._cut is None or self._cut[0] != epoch:
            raise ValueError(f"epoch {epoch} is not being fetched")
        parcel = self._cut[1]
        if part == parcel.parts - 1:
            self._cut = None
        return {"epoch": epoch, **parcel.to_wire(part)}


class SnapshotRequest(NamedTuple):
    """A joining replica waits for this replica's state."""

    cut: dict[int, int]  # updates that it has to contain, by origin
    answer: asyncio.Future[dict[str, Any]]


class ReplicaEndpoint:
    """Where the messages of one replica arrive, on its worker's event loop.

    Args:
        worker: Where the replica trains.
        endpoint: Which replica it is, and the bounds.

    Attributes:
        inbox: What has arrived.
        connection: To the scheduler and to other workers.
        routing: Where updates go.
        repairs: Requests missing updates again.
        closing: The worker closes; the replica should hand over and leave.
        blobs: What other replicas and the client may fetch.
        snapshot_requests: Of joining replicas; the training thread answers them.
    """

    inbox: Inbox
    connection: Connection
    routing: Routing
    repairs: Repairs
    closing: bool
    blobs: BlobServer
    snapshot_requests: list[SnapshotRequest]

    def __init__(self, worker: Worker, endpoint: Endpoint) -> None:
        routing = ROUTINGS[endpoint.routing]
        self.inbox = Inbox(
            endpoint.size,
            endpoint.grid,
            endpoint.inbox_bytes,
            in_order=routing.relayed and not endpoint.drops,
            in_step=endpoint.in_step,
        )
        self.connection = Connection(worker, endpoint, self.inbox.stop)
        self.routing = routing(self.connection, self.inbox)
        self.repairs = Repairs(self.routing, self._put)
        self.closing = False
        self.blobs = BlobServer()
        self.snapshot_requests = []
        self._before_snapshot: PreSnapshotBuffer | None = None
        self._endpoint = endpoint
        self._left = asyncio.Event()
        self._running: list[concurrent.futures.Future[None]] = []

    # ---- event loop

    async def deliver(self, item: Message) -> bool:
        """Take in an item; one that cannot be read is counted and dropped.

        Returns:
            False if there is no room for it: it has to be sent again.
        """
        if item.kind == MessageKind.ROUTES:
            self.on_members(item.payload)
            return True
        if item.kind != MessageKind.UPDATE:
            if self.inbox.note(item) and item.kind == MessageKind.PROGRESS:
                self.routing.on_message(item)
            return True
        if self._dropped(item):
            return True
        item = self._owned(item)
        if self._before_snapshot is not None:
            limit_bytes = self._endpoint.inbox_bytes
            first = self._before_snapshot.keep(item, limit_bytes)
            if first and self.routing.generation:
                self.routing.on_message(item)
            return first is not None
        if self.inbox.barrier.holding and self.inbox.holds_back(item):
            return False
        if await self._put(item):
            self.routing.on_message(item)
            return True
        return not self.inbox.holds_back(item)  # it may since it was decoded

    def _dropped(self, item: Message) -> bool:
        """Whether it gets lost here on purpose; the sender takes it for delivered."""
        own, origin, number = self._endpoint.replica, item.origin, item.sequence
        if not any(d.strikes(origin, number, own) for d in self._endpoint.drops):
            return False
        # That there is one is known: through a relay nothing else might say so.
        self.inbox.announce(origin, PeerProgress(item.step, number))
        return True

    def _owned(self, item: Message) -> Message:
        """The item with memory of its own: what it came in is as large as a batch."""
        if self.routing.relayed and self._before_snapshot is None:
            return item  # it is decoded, and not kept
        shared = item.payload if isinstance(item.payload, SharedFrame) else None
        payload = item.payload if shared is None else shared.frame
        try:
            return item._replace(payload=owned(payload))
        except (TypeError, ValueError):  # no bytes: `decoded` refuses it
            return item

    async def _put(self, item: Message) -> bool:
        payload = item.payload
        shared = payload if isinstance(payload, SharedFrame) else SharedFrame(payload)
        arguments = item, shared, self._endpoint, self.inbox.pending.grid
        try:
            if memoryview(shared.frame).nbytes > INLINE_BYTES:
                update = await asyncio.to_thread(decoded, *arguments)
            else:
                update = decoded(*arguments)
        except UNREADABLE as error:
            refuse(item, error, self._endpoint, self.inbox)
            return False
        if not self.inbox.put(item, update):
            return False
        self.routing.keep(item)
        return True

    def on_members(self, payload: Any) -> None:
        """Take in the membership: its generation, and the worker of each member."""
        generation, members = payload
        first = not self.routing.generation
        self.routing.on_members(generation, dict(members))
        if first and self._before_snapshot is not None:
            for item in self._before_snapshot.items:
                self.routing.on_message(item)

    def lookup(self, origin: int, sequences: Iterable[int]) -> list[Message]:
        """Updates that another replica misses, as many as fit a request."""
        found: list[Message] = []
        nbytes = 0
        for item in self.routing.lookup(origin, sequences):
            nbytes += item.nbytes + MESSAGE_BYTES
            if found and nbytes > BATCH_BYTES:
                break
            found.append(item)
        return found

    async def snapshot(self, cut: dict[int, int]) -> dict[str, Any]:
        """The state of this replica for a joining one, made between two steps.

        Raises:
            TimeoutError: If it was not made in time.
        """
        request = SnapshotRequest(cut, self.connection.loop.create_future())
        self.snapshot_requests.append(request)
        self.inbox.wake()
        try:
            bound_s = self._endpoint.timeouts.request
            return await asyncio.wait_for(request.answer, bound_s)
        finally:
            self._forget(request)

    def close_soon(self) -> None:
        """The worker closes; the training thread leaves at its next step."""
        self.closing = True
        self.inbox.stop("its worker closes")

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

    # ---- training thread

    def start(self) -> None:
        """Begin to send, and to request what is missing."""
        for work in (self.routing.to_scheduler.run(), self.repairs.run()):
            self._running.append(self.on_loop(work))

    def wait_for_snapshot(self) -> None:
        """Keep updates as they come; the state that they change is not here yet."""
        self._before_snapshot = PreSnapshotBuffer()
        self.inbox.joining = True

    def enter(self, payload: Any) -> None:
        """Know the members before anything is published; see `on_members`."""

        async def enter() -> None:
            self.on_members(payload)

        self._now(enter())

    def begin(self, received: Mapping[int, Received], grid: float) -> None:
        """The snapshot is here: deliver the updates that it does not contain."""

        async def deliver() -> None:
            kept, self._before_snapshot = self._before_snapshot, None
            for item in kept.items if kept is not None else ():
                await self._put(item)
            self.inbox.joining = False

        self.inbox.begin(received, grid)
        self._now(deliver())

    def pull(
        self, helper: int, origin: int, sequences: Sequence[int]
    ) -> concurrent.futures.Future[int]:
        """Request updates of an origin; done once those of the helper are here."""
        asking = self.repairs.ask(helper, origin, sequences)
        future = self.on_loop(asking)
        future.add_done_callback(lambda _: self.inbox.wake())
        return future

    def on_loop(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin what runs on the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.connection.loop)

    def _now(self, work: Coroutine[Any, Any, None]) -> None:
        future = self.on_loop(work)
        bound = self._endpoint.timeouts.bound("request")
        try:
            future.result(bound.seconds)
        except TimeoutError as error:
            future.cancel()
            raise WaitTimeoutError(
                f"replica {self._endpoint.replica} waited {bound} for the event loop "
                "of its own worker; is it busy, or closed?"
            ) from error

    def _forget(self, request: SnapshotRequest) -> None:
        with contextlib.suppress(ValueError):  # it may have been answered meanwhile
            self.snapshot_requests.remove(request)

    def serve(self, request: SnapshotRequest, snapshot: dict[str, Any]) -> None:
        """Answer a joining replica, once."""
        self._forget(request)

        def answer() -> None:
            if not request.answer.done():  # it may not have waited
                request.answer.set_result(snapshot)

        self.connection.loop.call_soon_threadsafe(answer)

    def stop_sending(self) -> None:
        """Send nothing more, not even a sign of life."""
        for future in self._running:
            future.cancel()
        self.connection.loop.call_soon_threadsafe(self.routing.end)

    def end(self) -> None:
        """Whoever waits for the replica to leave may go on."""
        self.connection.loop.call_soon_threadsafe(self._left.set)


WAIT_S = 1.0  # for what is not there yet; then who wants it asks again
LEAVE_S = 2.0  # batch systems kill soon after they ask a worker to close


class ChannelWorkerPlugin(WorkerPlugin):  # type: ignore[misc]  # Dask is untyped
    """Deliver arriving messages to the channels of the replicas on this worker."""

    name = NAME
    idempotent = True
    links: dict[tuple[int, int], ReplicaEndpoint]
    refused: int  # messages for no replica of this worker, or not understood

    def __init__(self) -> None:
        self.links = {}
        self.refused = 0
        self._guard = Guard(self._count)

    @override
    def setup(self, worker: Worker) -> None:
        # Dask may set a plugin up twice; live channels then go on.
        former = worker.extensions.get(NAME)
        if former is not None:
            self.links = former.links
        worker.extensions[NAME] = self
        for operation, handler in handlers_of(self).items():
            worker.handlers[operation] = self._guard.of(handler)
        self._worker = worker
        if worker.nanny:
            # Its process is there for it alone. To look for cycles in all that torch
            # leaves takes over a second of the four that a nanny waits for its end.
            atexit.unregister(gc.freeze)
            atexit.register(gc.freeze)

    @override
    async def teardown(self, worker: Worker) -> None:
        """The worker closes: its replicas leave, what they had done is delivered."""
        if worker.extensions.get(NAME) is not self:
            return
        links = list(self.links.values())
        for link in links:
            link.close_soon()
        await asyncio.gather(*(link.left(LEAVE_S) for link in links))

    async def handle_deliver(
        self, run: Identity, replica: Whole, messages: Sequence[Any]
    ) -> Fields:
        """The relay, or another replica, has messages for a replica here."""
        link = self._link(run, replica)
        return await _deliver(link, [Message.from_wire(one) for one in messages])

    async def handle_deliver_batches(
        self,
        run: Identity,
        messages: Sequence[Any],
        shares: Sequence[tuple[Whole, Sequence[Whole]]],
    ) -> Fields:
        """The relay has messages for several replicas here, each of them once."""
        unpacked = [_shareable(fields) for fields in messages]
        own = {r: [unpacked[i] for i in places] for r, places in shares}
        shared = self._guard.of(self._share)  # each replica's answer is its own
        answers = [
            await shared(run=run, replica=replica, messages=for_it)
            for replica, for_it in own.items()
        ]
        return {"status": Answer.OK.value, "answers": answers}

    async def _share(
        self, run: Identity, replica: Whole, messages: Sequence[Any]
    ) -> Fields:
        link = self._link(run, replica)
        for message in messages:
            if isinstance(message, Exception):
                raise message
        return await _deliver(link, messages)

    async def handle_snapshot(
        self, run: Identity, replica: Whole, cut: Sequence[tuple[Whole, Whole]]
    ) -> Fields:
        """A newcomer elsewhere wants the state of a replica here."""
        link = self._link(run, replica)
        try:
            snapshot = await link.snapshot(dict(cut))
        except TimeoutError:
            return _not_yet("it was not ready in time")
        return {"status": Answer.OK.value, "snapshot": snapshot}

    async def handle_repair(
        self, run: Identity, replica: Whole, origin: Whole, sequences: Sequence[Whole]
    ) -> Fields:
        """A replica elsewhere asks one here for updates that it missed."""
        found = self._link(run, replica).lookup(origin, sequences)
        return {"status": Answer.OK.value, "messages": [one.to_wire() for one in found]}

    async def handle_fetch(
        self, run: Identity, replica: Whole, name: str, part: Whole
    ) -> Fields:
        """A replica elsewhere fetches what one here has on its shelf, or will have."""
        link = self._link(run, replica)
        try:
            answer = await link.blobs.blob(name, part, WAIT_S)
        except TimeoutError:
            return _not_yet("it is not there yet")
        return {"status": Answer.OK.value, **answer}

    async def handle_agreed(
        self, run: Identity, replica: Whole, epoch: Whole, part: Whole
    ) -> Fields:
        """The client fetches what all have agreed on, through the scheduler."""
        link = self._link(run, replica)
        try:
            answer = await link.blobs.state(epoch, part, WAIT_S)
        except TimeoutError:
            return _not_yet("it is not there yet")
        return {"status": Answer.OK.value, **answer}

    def _count(self, fields: Fields) -> None:
        """Count what was refused, for the replica that it was for if there is one."""
        run, replica = fields.get("run"), fields.get("replica")
        if not isinstance(replica, int):
            replica = None
        for (of_run, number), link in self.links.items():
            if isinstance(run, int) and of_run == run and replica in (None, number):
                with link.inbox.changed:
                    link.inbox.refused += 1
                return
        self.refused += 1

    def _link(self, run: int, replica: int) -> ReplicaEndpoint:
        """The link of a replica here.

        Raises:
            GoneError: If it is not here; counted.
        """
        link = self.links.get((run, replica))
        if link is None:
            self.refused += 1
            raise GoneError(f"no replica {replica} of run {run} here")
        return link

    def open(self, endpoint: Endpoint) -> ReplicaEndpoint:
        """Make the end of a replica; messages for it are kept from now on.

        Raises:
            ChannelError: If the replica is on this worker already.
        """
        key = (endpoint.run, endpoint.replica)
        if key in self.links:
            raise ChannelError(f"replica {key[1]} of run {key[0]} is here already")
        self.links[key] = ReplicaEndpoint(self._worker, endpoint)
        return self.links[key]

    def forget(self, endpoint: Endpoint) -> None:
        """A replica has left: whoever waits for that may go on."""
        link = self.links.pop((endpoint.run, endpoint.replica), None)
        if link is not None:
            link.end()


def set_up(worker: Worker) -> None:
    """Set the channel's end up on a worker."""
    ChannelWorkerPlugin().setup(worker)


def _not_yet(reason: str) -> Fields:
    """It was understood; who asks may ask again."""
    return {"status": Answer.REFUSED.value, "reason": reason}


def _shareable(fields: Any) -> Message | Exception:
    """A message whose frame is decoded once, or why it is none."""
    try:
        message = Message.from_wire(fields)
    except (TypeError, ValueError) as error:
        return error
    if message.kind != MessageKind.UPDATE:
        return message
    return message._replace(payload=SharedFrame(message.payload))


async def _deliver(link: ReplicaEndpoint, messages: Sequence[Message]) -> Fields:
    """Give a replica messages, in order, until it takes no more."""
    accepted = 0
    for message in messages:
        if not await link.deliver(message):
            break
        accepted += 1
    return {"status": Answer.OK.value, "accepted": accepted}
