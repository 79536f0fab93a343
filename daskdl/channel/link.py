"""The event loop's end of one replica: where its messages arrive and leave."""

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import (
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple

from distributed import Worker

from daskdl.channel.connection import UNREADABLE, Connection, Reader, SharedFrame
from daskdl.channel.inbox import Early, Inbox, Received, Word
from daskdl.channel.protocol import (
    Arrays,
    Endpoint,
    Message,
    MessageKind,
    Parcel,
    Routes,
    owned,
    wrap,
)
from daskdl.channel.recovery import Repairs
from daskdl.channel.routing import Carrier, Mesh, Relay
from daskdl.channel.sender import BATCH_BYTES
from daskdl.errors import (
    WaitTimeoutError,
)

logger = logging.getLogger(__name__)


class Shelf:
    """Parcels by name. Whoever comes before one is there waits for it.

    Args:
        loop: Of the worker.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parcels: dict[str, asyncio.Future[Parcel]] = {}
        self._sent_bytes = 0

    # ---- event loop

    async def answer(self, name: str, part: int, timeout_s: float) -> dict[str, Any]:
        """One part of a parcel, as it is sent.

        Args:
            name: Of the parcel.
            part: Counted from 0.
            timeout_s: How long to wait for it, seconds.

        Raises:
            TimeoutError: If it did not come.
        """
        parcel = await asyncio.wait_for(asyncio.shield(self._named(name)), timeout_s)
        content = parcel.part(part)
        self._sent_bytes += content.nbytes
        return {
            "forms": parcel.forms if part == 0 else [],
            "parts": parcel.parts,
            "bytes": wrap(content),
        }

    def _named(self, name: str) -> asyncio.Future[Parcel]:
        if name not in self._parcels:
            self._parcels[name] = self._loop.create_future()
        return self._parcels[name]

    def _put(self, name: str, parcel: Parcel) -> None:
        future = self._named(name)
        if not future.done():
            future.set_result(parcel)

    def _clear(self, but: str) -> None:
        # Who waits for what is not there yet goes on waiting.
        for name, future in list(self._parcels.items()):
            if future.done() and name != but:
                del self._parcels[name]

    # ---- training thread

    def put(self, name: str, parcel: Parcel) -> None:
        """Let others fetch it; a second one of the same name changes nothing."""
        self._loop.call_soon_threadsafe(self._put, name, parcel)

    def count_off(self) -> int:
        """Bytes that others have fetched since the last call."""
        sent_bytes, self._sent_bytes = self._sent_bytes, 0
        return sent_bytes

    def clear(self, but: str) -> None:
        """Keep nothing of what is there, but what has this name."""
        self._loop.call_soon_threadsafe(self._clear, but)


class Newest:
    """The newest state of a replica that all agreed on, for the client.

    Nothing is made of it before the first part is asked for. What the parts are cut
    from stays until the last of them has gone: that is one copy at most.

    Args:
        loop: Of the worker.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoch = -1
        self._make: Callable[[], Arrays] | None = None
        self._came = asyncio.Condition()
        self._cut: tuple[int, Parcel] | None = None  # with its epoch

    # ---- event loop

    async def answer(self, epoch: int, part: int, timeout_s: float) -> dict[str, Any]:
        """One part of it, as it is sent.

        Args:
            epoch: At the end of which it was agreed on; for the first part, that one
                or a later one.
            part: Counted from 0.
            timeout_s: How long to wait for the first part, seconds.

        Raises:
            TimeoutError: If it did not come.
            ValueError: If this is not what is being fetched.
        """
        if part == 0:
            epoch, make = await asyncio.wait_for(self._there(epoch), timeout_s)
            self._cut = epoch, Parcel(await asyncio.to_thread(make))
        if self._cut is None or self._cut[0] != epoch:
            raise ValueError(f"epoch {epoch} is not being fetched")
        parcel = self._cut[1]
        content = parcel.part(part)
        if part == parcel.parts - 1:
            self._cut = None
        return {
            "epoch": epoch,
            "forms": parcel.forms if part == 0 else [],
            "parts": parcel.parts,
            "bytes": wrap(content),
        }

    async def _there(self, epoch: int) -> tuple[int, Callable[[], Arrays]]:
        async with self._came:
            while self._make is None or self._epoch < epoch:
                await self._came.wait()
            return self._epoch, self._make

    async def _keep(self, epoch: int, make: Callable[[], Arrays] | None) -> None:
        async with self._came:
            self._epoch, self._make = epoch, make
            self._came.notify_all()

    # ---- training thread

    def keep(self, epoch: int, make: Callable[[], Arrays] | None) -> None:
        """Let the client fetch this, and what was before only if it is under way.

        Args:
            epoch: That has ended.
            make: Makes it; None: not yet.
        """
        asyncio.run_coroutine_threadsafe(self._keep(epoch, make), self._loop)


class Wanted(NamedTuple):
    """A newcomer waits for this replica's state."""

    cut: dict[int, int]  # updates that it has to contain, by origin
    answer: asyncio.Future[dict[str, Any]]


class Link:
    """One replica's connection to the others.

    Args:
        worker: Where the replica trains.
        endpoint: Which replica it is, and the bounds.

    Attributes:
        inbox: What has arrived.
        connection: To the scheduler and to other workers.
        carrier: Of what is to be sent.
        repairs: Ask for what did not come.
        closing: The worker closes; the replica should hand over and leave.
        shelf: What this replica lets others fetch.
        newest: What it lets the client fetch.
        wanted: Newcomers that wait for a snapshot; the training thread serves them.
    """

    inbox: Inbox
    connection: Connection
    carrier: Carrier
    repairs: Repairs
    closing: bool
    shelf: Shelf
    newest: Newest
    wanted: list["Wanted"]

    def __init__(self, worker: Worker, endpoint: Endpoint) -> None:
        mesh = endpoint.routing == "mesh"
        self.inbox = Inbox(
            endpoint.size,
            endpoint.grid,
            endpoint.inbox_bytes,
            in_order=not mesh and not endpoint.drops,
            in_step=endpoint.in_step,
        )
        self.connection = Connection(worker, endpoint, self.inbox)
        self.carrier = (
            Mesh(self.connection, self.inbox, self._complete)
            if mesh
            else Relay(self.connection, self.inbox)
        )
        self.repairs = Repairs(self.connection, self.inbox, self._put)
        self.closing = False
        self.shelf = Shelf(self.connection.loop)
        self.newest = Newest(self.connection.loop)
        self.wanted = []
        self._reader = Reader(endpoint, self.inbox)
        self._early: Early | None = None
        self._routed = False  # the members are known, at least of one generation
        self._endpoint = endpoint
        self._left = asyncio.Event()
        self._running: list[concurrent.futures.Future[None]] = []

    # ---- event loop

    async def deliver(self, item: Message) -> bool:
        """An item has arrived; what cannot be read is counted and dropped.

        Returns:
            False if there is no room for it: it has to be sent again.
        """
        if item.kind == MessageKind.ROUTES:
            self.adopt(item.payload)
            return True
        if item.kind != MessageKind.UPDATE:
            if self.inbox.note(item) and item.kind == MessageKind.PROGRESS:
                self.carrier.forward(item)
            return True
        if self._dropped(item):
            return True
        return await self._deliver_update(self._owned(item))

    def _dropped(self, item: Message) -> bool:
        """Whether it gets lost here on purpose; the sender takes it for delivered."""
        own, origin, number = self._endpoint.replica, item.origin, item.sequence
        if not any(d.strikes(origin, number, own) for d in self._endpoint.drops):
            return False
        # That there is one is known: through a relay nothing else might say so.
        self.inbox.hear({origin: Word(number, item.step)})
        return True

    async def _deliver_update(self, item: Message) -> bool:
        if self._early is not None:
            first = self._early.keep(item, self._endpoint.inbox_bytes)
            if first and self._routed:
                self.carrier.forward(item)
            return first is not None
        if self.inbox.holds_back(item):
            return False
        if await self._put(item):
            self.carrier.forward(item)
            return True
        return not self.inbox.holds_back(item)  # it may since it was read

    def _owned(self, item: Message) -> Message:
        """The item with memory of its own: what it came in is as large as a batch."""
        if self._endpoint.routing != "mesh" and self._early is None:
            return item  # it is read, and not kept
        shared = item.payload if isinstance(item.payload, SharedFrame) else None
        payload = item.payload if shared is None else shared.frame
        try:
            return item._replace(payload=owned(payload))
        except (TypeError, ValueError):  # no bytes: whoever reads it says so
            return item

    async def _put(self, item: Message) -> bool:
        try:
            update = await self._reader.read(item)
        except UNREADABLE as error:
            self._reader.refuse(item, error)
            return False
        if not self.inbox.put(item, update):
            return False
        self.carrier.keep(item)
        return True

    async def _put_early(self) -> None:
        early, self._early = self._early, None
        for item in early.items if early is not None else ():
            await self._put(item)

    def _complete(self) -> dict[int, int]:
        if self._early is not None:  # nothing is here that could be counted on
            return {}
        return {origin: all_[0] for origin, all_ in self.inbox.received().items()}

    def adopt(self, payload: Any) -> None:
        """Take over what the scheduler says of the members: generation, who, where."""
        generation, members = payload
        workers = dict(members)
        routes = Routes(generation, tuple(sorted(workers)), self._endpoint.fan_out)
        self.carrier.adopt(routes, workers)
        self.repairs.workers = workers
        if not self._routed and self._early is not None:
            for item in self._early.items:
                self.carrier.forward(item)
        self._routed = True

    def find(self, origin: int, sequences: Iterable[int]) -> list[Message]:
        """What is here of what another replica misses, as much as fits a request."""
        found: list[Message] = []
        nbytes = 0
        for item in self.carrier.find(origin, sequences):
            nbytes += item.weight()
            if found and nbytes > BATCH_BYTES:
                break
            found.append(item)
        return found

    async def snapshot(self, cut: dict[int, int]) -> dict[str, Any]:
        """A newcomer asks for this replica's state; answered between two steps."""
        wanted = Wanted(cut, self.connection.loop.create_future())
        self.wanted.append(wanted)
        self.inbox.wake()
        try:
            bound = self._endpoint.timeouts.request
            return await asyncio.wait_for(wanted.answer, bound)
        finally:
            self._unwant(wanted)

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
        """Begin to send, and to look for what is missing."""
        for work in (self.carrier.run(), self.repairs.run()):
            future = asyncio.run_coroutine_threadsafe(work, self.connection.loop)
            self._running.append(future)

    def wait_for_snapshot(self) -> None:
        """Keep updates as they come; what they change is not here yet."""
        self._early = Early()
        self.repairs.paused = True

    def enter(self, payload: Any) -> None:
        """Know the members before anything is published; see `adopt`."""

        async def enter() -> None:
            self.adopt(payload)

        self._now(enter())

    def begin(self, received: Mapping[int, Received], grid: float) -> None:
        """The snapshot is here: updates that it does not contain may follow it."""
        self.inbox.begin(received, grid)
        self._now(self._put_early())
        self.repairs.paused = False

    def pull(
        self, helper: int, origin: int, sequences: Sequence[int]
    ) -> concurrent.futures.Future[int]:
        """Ask a replica for updates of an origin; done when what it has is here."""
        asking = self.repairs.ask(helper, origin, sequences)
        future = asyncio.run_coroutine_threadsafe(asking, self.connection.loop)
        future.add_done_callback(lambda _: self.inbox.wake())
        return future

    def _now(self, work: Coroutine[Any, Any, None]) -> None:
        future = asyncio.run_coroutine_threadsafe(work, self.connection.loop)
        bound = self._endpoint.timeouts.bound("request")
        try:
            future.result(bound.seconds)
        except TimeoutError as error:
            future.cancel()
            raise WaitTimeoutError(
                f"replica {self._endpoint.replica} waited {bound} for the event loop "
                "of its own worker; is it busy, or closed?"
            ) from error

    def _unwant(self, wanted: Wanted) -> None:
        with contextlib.suppress(ValueError):  # it may have been served meanwhile
            self.wanted.remove(wanted)

    def serve(self, wanted: Wanted, snapshot: dict[str, Any]) -> None:
        """Give a newcomer what it waits for, once."""
        self._unwant(wanted)

        def answer() -> None:
            if not wanted.answer.done():  # it may not have waited
                wanted.answer.set_result(snapshot)

        self.connection.loop.call_soon_threadsafe(answer)

    def stop_sending(self) -> None:
        """Send nothing more, not even a sign of life."""
        for future in self._running:
            future.cancel()
        self.connection.loop.call_soon_threadsafe(self.carrier.end)

    def end(self) -> None:
        """Whoever waits for the replica to leave may go on."""
        self.connection.loop.call_soon_threadsafe(self._left.set)
