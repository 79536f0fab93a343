"""Which way updates go: over the scheduler (relay) or between replicas (mesh)."""

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from typing_extensions import override

from daskdl.channel import protocol
from daskdl.channel.connection import Connection, Gauge
from daskdl.channel.inbox import Inbox, Word
from daskdl.channel.protocol import (
    Answer,
    Message,
    MessageKind,
    PeerProgress,
    RouteBook,
    Routes,
)
from daskdl.channel.sender import Outbox, Pump, Ring, Unconfirmed
from daskdl.errors import DaskDLError
from daskdl.thresholds import Drained

logger = logging.getLogger(__name__)

BEAT_S = 1.0  # most time between two signs of life


class Backlog(NamedTuple):
    """What waits to be sent, for messages."""

    updates: int
    nbytes: int
    destination: str


class Carrier(ABC):
    """Carries what one replica publishes, and says to the scheduler that it lives.

    Attributes:
        progress: Steps completed, and the last lap done.
        sequence: Of the last update that was accepted, 0 if there is none.
        gauge: Of what leaves here.
    """

    progress: tuple[int, int]
    sequence: int
    gauge: Gauge

    def __init__(self) -> None:
        self.progress = (0, -1)
        self.sequence = 0
        self.gauge = Gauge()

    # ---- event loop

    @abstractmethod
    async def run(self) -> None:
        """Carry until cancelled. What makes it end is told to the connection."""

    @abstractmethod
    def end(self) -> None:
        """Send nothing more; `run` is cancelled too."""

    @abstractmethod
    def adopt(self, routes: Routes, workers: Mapping[int, str]) -> None:
        """The scheduler says who the members are now.

        Args:
            routes: Of a generation, perhaps not the latest one.
            workers: Address of each member's worker.
        """

    @abstractmethod
    def forward(self, item: Message) -> None:
        """Pass on what another replica sent, if it is this one's turn.

        Args:
            item: The first copy that came here of an update, or news of progress.
        """

    @abstractmethod
    def find(self, origin: int, sequences: Iterable[int]) -> list[Message]:
        """Updates that are kept for those who missed them, ascending."""

    @abstractmethod
    def keep(self, item: Message) -> None:
        """Keep an update of another replica for a while, see `find`."""

    # ---- training thread

    @abstractmethod
    def offer(self, item: Message, *, force: bool = False) -> bool:
        """Take an update to carry; False if there is no room.

        Args:
            item: Of this replica, the next in sequence.
            force: Take it whatever the bounds.
        """

    @abstractmethod
    def has_room(self) -> bool:
        """Whether an update may be taken now; if not, it surely is not."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether the next update is taken, whatever its size."""

    @abstractmethod
    def sent(self) -> bool:
        """Whether all updates of this replica have arrived where they go first."""

    @abstractmethod
    def wait_until_sent(self, timeout_s: float) -> bool:
        """Block until `sent`, whether the run was stopped or not; False on time-out."""

    @abstractmethod
    def backlog(self) -> Backlog:
        """What waits to be sent."""

    @abstractmethod
    def drained(self) -> Drained:
        """What has left since the last call."""

    @abstractmethod
    def complete(self, step: int, done: int) -> None:
        """Tell the others how far this replica is: `progress` is set from these."""


PACE_S = 0.005  # least time between two requests to the relay
# Updates that are kept though they fill more than an outbox. Who misses one asks for it
# a second later; as many dense ones of some MB take about that long to be sent.
RECENT = 16


class Relay(Carrier):
    """One queue, to the scheduler.

    Args:
        connection: Of this replica.
        inbox: Whoever waits there is woken when there may be room again.
    """

    def __init__(self, connection: Connection, inbox: Inbox) -> None:
        super().__init__()
        endpoint = connection.endpoint
        self._connection = connection
        self._replica = endpoint.replica
        self._outbox = Outbox(endpoint.outbox_bytes)
        self._outbox.on_drop = inbox.wake
        self._ring = Ring(endpoint.outbox_bytes)
        self._ring_most = endpoint.inbox_bytes
        self._last_step = 0

    # ---- event loop

    @override
    async def run(self) -> None:
        timeouts = self._connection.endpoint.timeouts
        pump = Pump(
            self._outbox,
            self._send,
            pace_s=PACE_S,
            beat_s=min(BEAT_S, timeouts.silence / 4),
            bound=timeouts.bound("request"),
            destination="the scheduler",
        )
        loop = self._connection.loop
        self._outbox.on_offer = lambda: loop.call_soon_threadsafe(pump.wake)
        try:
            await pump.run()
        except (DaskDLError, OSError) as error:
            self._connection.fail(error)

    async def _send(self, items: Sequence[Message]) -> int:
        # Progress beyond the batch would overtake the updates still waiting. It is
        # read first: what was queued before it was set is then counted as waiting.
        step, done = self.progress
        if len(items) != len(self._outbox):
            step, done = 0, -1
        with self.gauge.request(items):
            answer = await self._connection.tell_scheduler(
                protocol.PUBLISH,
                replica=self._replica,
                messages=[item.to_wire() for item in items],
                progress=PeerProgress(step, 0, done),
            )
        accepted = int(answer.get("accepted", 0))
        self.gauge.arrived(items[:accepted])
        return accepted

    @override
    def end(self) -> None:
        pass  # there is but one task

    @override
    def adopt(self, routes: Routes, workers: Mapping[int, str]) -> None:
        pass  # the relay knows

    @override
    def forward(self, item: Message) -> None:
        pass  # the relay sends to all

    @override
    def find(self, origin: int, sequences: Iterable[int]) -> list[Message]:
        return self._ring.find(origin, sequences)

    @override
    def keep(self, item: Message) -> None:
        pass  # its origin does

    # ---- training thread

    @override
    def offer(self, item: Message, *, force: bool = False) -> bool:
        if not self._outbox.offer(item, force=force):
            return False
        # Never less again: small ones may follow before it is asked for.
        wanted = min(RECENT * item.weight(), self._ring_most)
        self._ring.limit_bytes = max(self._ring.limit_bytes, wanted)
        self._ring.keep(item)
        self.sequence = item.sequence
        self._last_step = item.step
        return True

    @override
    def has_room(self) -> bool:
        outbox = self._outbox
        return len(outbox) == 0 or outbox.nbytes < outbox.limit_bytes

    @override
    def ready(self) -> bool:
        return self.sent()

    @override
    def sent(self) -> bool:
        return len(self._outbox) == 0

    @override
    def wait_until_sent(self, timeout_s: float) -> bool:
        return self._outbox.wait_for(lambda box: len(box) == 0, timeout_s)

    @override
    def backlog(self) -> Backlog:
        return Backlog(len(self._outbox), self._outbox.nbytes, "the scheduler")

    @override
    def drained(self) -> Drained:
        return self.gauge.take(copies=1)

    @override
    def complete(self, step: int, done: int) -> None:
        former = self.progress[1]
        self.progress = (step, max(done, former))
        # A published update of this step says the same, and has woken the pump.
        if done > former or step != self._last_step:
            self._outbox.on_offer()


NEIGHBOUR_PACE_S = 0.005  # least time between two requests to one neighbour
IDLE_S = 60.0  # between neighbours nothing is sent only to show a sign of life
RETRY_S = 1.0  # after a neighbour could not be reached


class Neighbour:
    """What waits for one neighbour, and its pump.

    A neighbour that cannot be reached holds nobody up: what waits for it is dropped,
    and it asks for that later if it lives. Who is lost, the scheduler decides.

    Args:
        replica: Its number.
        worker: Address of its worker.
        connection: Of the replica that sends.
        inbox: Whoever waits there is woken when there may be room again.
        gauge: Of what leaves the replica that sends.

    Attributes:
        worker: As given.
        forwarded_bytes: Of what waits here and is of other replicas.
    """

    worker: str
    forwarded_bytes: int

    def __init__(
        self,
        replica: int,
        worker: str,
        connection: Connection,
        inbox: Inbox,
        gauge: Gauge,
    ) -> None:
        self.worker = worker
        self.forwarded_bytes = 0
        self._replica = replica
        self._connection = connection
        self._gauge = gauge
        self._own = connection.endpoint.replica
        self._outbox = Outbox(connection.endpoint.outbox_bytes)
        self._outbox.on_drop = inbox.wake
        self._progress: dict[int, Message] = {}  # the latest of each origin
        self._telling = threading.Lock()
        self._offered = 0  # sequence of the last own update
        self._arrived = 0
        self._down = False
        self._pump = self._new_pump()
        loop = connection.loop
        self._outbox.on_offer = lambda: loop.call_soon_threadsafe(self._wake)
        self._carrying = asyncio.ensure_future(self._carry(), loop=loop)

    # ---- event loop

    def end(self) -> None:
        """It is a member no more: nothing waits for it, and nobody for it."""
        self._down = True
        self._discard()
        self._carrying.cancel()

    def forward(self, item: Message) -> None:
        """Queue an update of another replica; the caller has looked for room."""
        if self._down:
            return
        self.forwarded_bytes += item.weight()
        self._outbox.offer(item, force=True)

    def _wake(self) -> None:
        self._pump.wake()

    def _new_pump(self) -> Pump:
        return Pump(
            self._outbox,
            self._send,
            pace_s=NEIGHBOUR_PACE_S,
            beat_s=IDLE_S,
            bound=self._connection.endpoint.timeouts.bound("request"),
            destination=f"replica {self._replica} on {self.worker}",
        )

    async def _carry(self) -> None:
        while True:
            try:
                await self._pump.run()
            except (OSError, RuntimeError, DaskDLError) as error:
                # RuntimeError is what Dask's pool raises once a worker closes.
                logger.info("replica %s sends no more: %s", self._own, error)
            self._down = True
            self._discard()
            await asyncio.sleep(RETRY_S)
            self._down = False
            self._pump = self._new_pump()

    async def _send(self, items: Sequence[Message]) -> int:
        # Not before what was published earlier, or that would seem to be missing.
        last = len(items) == len(self._outbox)
        with self._telling:
            progress = list(self._progress.values()) if last else []
        if not items and not progress:
            return 0
        with self._gauge.request(items):
            answer = await self._connection.tell(
                self.worker,
                protocol.DELIVER,
                replica=self._replica,
                messages=[item.to_wire() for item in (*items, *progress)],
            )
        if not isinstance(answer, dict) or answer.get("status") != Answer.OK:
            raise OSError(f"{self.worker} answered {answer!r}")
        accepted = min(int(answer["accepted"]), len(items))
        if answer["accepted"] == len(items) + len(progress):
            self._said(progress)
        self._gauge.arrived(items[:accepted])
        self._count(items[:accepted])
        return accepted

    def _said(self, progress: Sequence[Message]) -> None:
        with self._telling:
            for item in progress:
                if self._progress.get(item.origin) is item:
                    del self._progress[item.origin]

    def _count(self, items: Sequence[Message]) -> None:
        for item in items:
            if item.origin == self._own:
                self._arrived = max(self._arrived, item.sequence)
            else:
                self.forwarded_bytes -= item.weight()

    def _discard(self) -> None:
        waiting = self._outbox.head(self._outbox.nbytes)
        self._count(waiting)
        self._outbox.drop(len(waiting))

    # ---- any thread

    def tell(self, item: Message) -> None:
        """Say how far a replica is; only the latest word of each is kept."""
        with self._telling:
            self._progress[item.origin] = item
        self._outbox.on_offer()

    # ---- training thread

    def offer(self, item: Message) -> None:
        """Queue an update of one's own; it is one of a bounded number."""
        if self._down:
            return
        self._offered = item.sequence
        self._outbox.offer(item, force=True)

    def sent(self) -> bool:
        """Whether all updates of one's own have arrived there."""
        return self._down or self._arrived >= self._offered

    def wait_until_sent(self, timeout_s: float) -> bool:
        """Block until `sent`; False on time-out."""
        return self._outbox.wait_for(lambda box: self.sent(), timeout_s)


BEAT_PACE_S = 0.05  # least time between two signs of life


class Mesh(Carrier):
    """One queue for each neighbour, and signs of life to the scheduler.

    What is of others is passed on while there is room; what is not passed on is
    counted, and asked for by who misses it. So nobody waits for anybody in a circle.

    Args:
        connection: Of this replica.
        inbox: Where what others send arrives.
        received: All updates up to this one were received, by origin.

    Attributes:
        forwards_dropped: Updates of others that were not passed on.
    """

    forwards_dropped: int

    def __init__(
        self,
        connection: Connection,
        inbox: Inbox,
        received: Callable[[], Mapping[int, int]],
    ) -> None:
        super().__init__()
        endpoint = connection.endpoint
        self.forwards_dropped = 0
        self._connection = connection
        self._inbox = inbox
        self._received = received
        self._replica = endpoint.replica
        self._own = Unconfirmed(endpoint.outbox_bytes)
        self._others = Ring(endpoint.inbox_bytes)
        self._book = RouteBook()
        self._adopted_at = 0  # last own update when the current routes came
        self._neighbours: dict[int, Neighbour] = {}  # replaced, never changed
        self._workers: Mapping[int, str] = {}
        self._routing = threading.Lock()  # an update is of one generation
        self._ended = False
        self._unreported: dict[int, int] = {}  # bytes by origin since the last beat
        self._beat = Pump(
            Outbox(0),
            self._live,
            pace_s=BEAT_PACE_S,
            beat_s=min(BEAT_S, endpoint.timeouts.silence / 4),
            bound=endpoint.timeouts.bound("request"),
            destination="the scheduler",
        )

    # ---- event loop

    @override
    async def run(self) -> None:
        try:
            await self._beat.run()
        except (DaskDLError, OSError) as error:
            self._connection.fail(error)

    async def _live(self, items: Sequence[Message]) -> int:
        self._unreported.clear()
        generation, adopted_at = self._book.current.generation, self._adopted_at
        step, done = self.progress
        answer = await self._connection.tell_scheduler(
            protocol.PUBLISH,
            replica=self._replica,
            messages=[],
            progress=PeerProgress(step, self.sequence, done),
            acknowledgement={
                "generation": generation,
                "adopted_at": adopted_at,
                "received": list(self._received().items()),
            },
        )
        self._learn(answer)
        return 0

    def _learn(self, answer: Mapping[str, Any]) -> None:
        self._inbox.hear(
            {
                replica: Word(sequence, step, interval)
                for replica, step, sequence, interval in answer.get("peers", ())
                if replica != self._replica
            }
        )
        if self._own.confirm(answer.get("received_by_all", 0)):
            self._inbox.wake()
        if self._own.pressed:
            self._beat.wake()

    @override
    def end(self) -> None:
        self._ended = True
        for neighbour in self._neighbours.values():
            neighbour.end()

    @override
    def adopt(self, routes: Routes, workers: Mapping[int, str]) -> None:
        with self._routing:
            if self._ended or not self._book.adopt(routes):
                return
            self._adopted_at = self.sequence
            self._workers = workers
            former = self._neighbours
            self._neighbours = {
                replica: former.get(replica) or self._connect(replica)
                for replica in routes.members
                if replica in former or replica in routes.neighbours(self._replica)
            }
        for replica in former.keys() - self._neighbours.keys():
            former[replica].end()
        self._beat.wake()  # a newcomer waits for this word
        self._inbox.wake()

    def _connect(self, replica: int) -> Neighbour:
        worker = self._workers[replica]
        return Neighbour(replica, worker, self._connection, self._inbox, self.gauge)

    @override
    def forward(self, item: Message) -> None:
        routes = self._book.for_generation(item.generation)
        for child in routes.children(item.origin, self._replica):
            neighbour = self._neighbour(child)
            if neighbour is None:
                continue
            if item.kind == MessageKind.PROGRESS:
                neighbour.tell(item)
            elif self._may_forward(item):
                neighbour.forward(item)
            else:
                self.forwards_dropped += 1

    def _neighbour(self, replica: int) -> Neighbour | None:
        """Also one that only an older generation makes a neighbour."""
        known = replica in self._workers and not self._ended
        if known and replica not in self._neighbours:
            more = {replica: self._connect(replica)}
            self._neighbours = {**self._neighbours, **more}
        return self._neighbours.get(replica)

    def _may_forward(self, item: Message) -> bool:
        waiting = sum(n.forwarded_bytes for n in self._neighbours.values())
        limit = self._connection.endpoint.inbox_bytes
        return not waiting or waiting + item.weight() <= limit

    @override
    def find(self, origin: int, sequences: Iterable[int]) -> list[Message]:
        if origin == self._replica:
            return self._own.find(sequences)
        return self._others.find(origin, sequences)

    @override
    def keep(self, item: Message) -> None:
        self._others.keep(item)
        more = self._unreported.get(item.origin, 0) + item.weight()
        self._unreported[item.origin] = more
        # Its origin can publish no more than so much before it hears of it.
        if more > self._connection.endpoint.outbox_bytes // 4:
            self._beat.wake()

    # ---- training thread

    @override
    def offer(self, item: Message, *, force: bool = False) -> bool:
        with self._routing:
            # What waits for a neighbour is not confirmed: this bounds that too.
            if not force and not self._own.has_room():
                return False
            routes = self._book.current
            item = item._replace(generation=routes.generation)
            self._own.keep(item)
            self.sequence = item.sequence
            for child in self._children(routes):
                child.offer(item)
        if self._own.pressed:
            self._wake_beat()
        return True

    def _children(self, routes: Routes) -> list[Neighbour]:
        neighbours = self._neighbours
        children = routes.children(self._replica, self._replica)
        return [neighbours[child] for child in children]

    def _wake_beat(self) -> None:
        self._connection.loop.call_soon_threadsafe(self._beat.wake)

    @override
    def has_room(self) -> bool:
        return self._own.has_room()

    @override
    def ready(self) -> bool:
        return self._own.has_room()

    @override
    def sent(self) -> bool:
        return all(neighbour.sent() for neighbour in self._neighbours.values())

    @override
    def wait_until_sent(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        return all(
            neighbour.wait_until_sent(deadline - time.monotonic())
            for neighbour in self._neighbours.values()
        )

    @override
    def backlog(self) -> Backlog:
        return Backlog(len(self._own), self._own.nbytes, "all others")

    @override
    def drained(self) -> Drained:
        # In a round of all, a replica sends as many frames as there are others: those
        # of its own that others pass on are as many as it passes on for them.
        return self.gauge.take(copies=max(len(self._book.current.members) - 1, 1))

    @override
    def complete(self, step: int, done: int) -> None:
        done = max(done, self.progress[1])
        self.progress = (step, done)
        with self._routing:
            routes = self._book.current
            children = self._children(routes)
            kind, generation = MessageKind.PROGRESS.value, routes.generation
            item = Message(
                kind, self._replica, self.sequence, step, 0, done, generation
            )
        for child in children:
            child.tell(item)
