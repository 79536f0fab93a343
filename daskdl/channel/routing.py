"""Which way updates go: over the scheduler (relay) or between replicas (mesh).

A routing is one class and one entry of `ROUTINGS`. It says where a replica's own
updates go, what it passes on for others, and which updates it can send again.
"""

import asyncio
import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from typing_extensions import override

from daskdl.channel import protocol
from daskdl.channel.inbox import Inbox
from daskdl.channel.protocol import (
    RELAYED,
    Answer,
    MeshTopology,
    Message,
    MessageKind,
    PeerProgress,
    TopologyHistory,
)
from daskdl.channel.sender import (
    Connection,
    Outbox,
    RetransmitBuffer,
    SendLoop,
    UnackedBuffer,
)
from daskdl.errors import DaskDLError
from daskdl.thresholds import Drained

logger = logging.getLogger(__name__)

BEAT_S = 1.0  # most time between two signs of life
PACE_S = 0.005  # least time between two requests to one destination
BEAT_PACE_S = 0.05  # least time between two signs of life without updates


class LinkMeter:
    """Counts what leaves one replica, over all its destinations.

    Time counts once where requests are under way side by side: they share the link.
    The pause between two requests is not counted, nor is a request without frames.
    """

    def __init__(self) -> None:
        self._drained = Drained()
        self._under_way = 0
        self._since = 0.0  # until then the time is counted
        self._lock = threading.Lock()

    # ---- event loop

    @contextlib.contextmanager
    def request(self, items: Sequence[Message]) -> Iterator[None]:
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

    def arrived(self, items: Sequence[Message]) -> None:
        """Count a request that was answered, and the items it accepted."""
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
            copies: Of one published frame that leave this replica.
        """
        with self._lock:
            drained, self._drained = self._drained, Drained()
        return drained._replace(copies=copies)


class Backlog(NamedTuple):
    """Updates that wait to be sent, for messages."""

    updates: int
    nbytes: int
    destination: str


class Routing(ABC):
    """Where one replica's updates go, and what it does for the updates of others.

    Every replica has a loop to the scheduler. It shows that the replica lives and how
    far it is, and carries updates if the scheduler is their destination.

    Args:
        connection: Of this replica.
        inbox: Where updates of others arrive; woken when there may be room again.

    Attributes:
        relayed: Whether the scheduler passes updates on: they arrive in order then,
            and those of a failed replica reach all or nobody.
        pace_s: Least time between two requests to the scheduler.
        meter: Counts what leaves.
        to_scheduler: Queue of the loop to the scheduler.
    """

    relayed: bool
    pace_s: ClassVar[float]
    meter: LinkMeter
    to_scheduler: Outbox

    def __init__(self, connection: Connection, inbox: Inbox) -> None:
        endpoint = connection.endpoint
        self.relayed = RELAYED[endpoint.routing]
        self.meter = LinkMeter()
        self.to_scheduler = Outbox(endpoint.outbox_bytes)
        self.to_scheduler.on_drop = inbox.wake
        self._connection = connection
        self._inbox = inbox
        self._replica = endpoint.replica
        self._loop = SendLoop(
            self.to_scheduler,
            self._send,
            pace_s=self.pace_s,
            beat_s=min(BEAT_S, endpoint.timeouts.silence / 4),
            bound=endpoint.timeouts.bound("request"),
            destination="the scheduler",
        )
        self.to_scheduler.on_offer = self.wake

    # ---- what a routing decides

    @abstractmethod
    def destinations(self) -> Sequence["Destination"]:
        """Where the next update of this replica goes. Training thread."""

    @abstractmethod
    def lookup(self, origin: int, sequences: Iterable[int]) -> list[Message]:
        """Kept updates, for replicas that miss them; ascending. Event loop."""

    def on_members(self, generation: int, workers: Mapping[int, str]) -> None:  # noqa: B027
        """The members are now these, each on its worker. Event loop.

        Args:
            generation: Of the membership; not always later than the former one.
            workers: Address of each member's worker.
        """

    def on_message(self, item: Message) -> None:  # noqa: B027
        """Pass on what another replica sent, if this one has to. Event loop.

        Args:
            item: The first copy of an update, or news of progress.
        """

    def on_update(self, item: Message) -> None:  # noqa: B027
        """Keep an update of another replica that was delivered. Event loop."""

    def on_answer(self, answer: Mapping[str, Any]) -> None:  # noqa: B027
        """Take in what the scheduler says of the others. Event loop."""

    def acknowledgement(self) -> Mapping[str, Any]:
        """Fields of a request to the scheduler, besides progress. Event loop."""
        return {}

    @abstractmethod
    def publish(self, item: Message, *, force: bool = False) -> bool:
        """Queue an update for its destinations; False if there is no room.

        Args:
            item: Of this replica, the next in sequence.
            force: Queue it whatever the bounds.
        """

    @abstractmethod
    def announce(self, progress: PeerProgress) -> None:
        """Announce how far this replica is."""

    @abstractmethod
    def has_room(self, *, for_any: bool = False) -> bool:
        """Whether an update may be published now; with `for_any`, of whatever size."""

    @abstractmethod
    def backlog(self) -> Backlog:
        """What waits to be sent."""

    @property
    def copies(self) -> int:
        """Of one published frame that leave this replica."""
        return 1

    # ---- the same for all

    async def run(self) -> None:
        """Send to the scheduler until cancelled; without it nothing works."""
        try:
            await self._loop.run()
        except (DaskDLError, OSError) as error:
            self._connection.fail(error)

    def end(self) -> None:  # noqa: B027
        """Send nothing more; `run` is cancelled too. Event loop."""

    def wake(self) -> None:
        """There is something to say to the scheduler. Any thread."""
        self._connection.loop.call_soon_threadsafe(self._loop.wake)

    async def _send(self, items: Sequence[Message]) -> int:
        # Progress beyond the batch would overtake the updates still waiting. It is
        # read first: what was queued before it was set is then counted as waiting.
        progress, more = self._inbox.own, self.acknowledgement()
        if len(items) != len(self.to_scheduler):
            progress = PeerProgress()
        with self.meter.request(items):
            answer = await self._connection.ask_scheduler(
                protocol.PUBLISH,
                replica=self._replica,
                messages=[item.to_wire() for item in items],
                progress=progress,
                **more,
            )
        accepted = int(answer.get("accepted", 0))
        self.meter.arrived(items[:accepted])
        self.on_answer(answer)
        return accepted

    def sent(self) -> bool:
        """Whether all updates of this replica have arrived where they go first."""
        return all(destination.sent() for destination in self._all())

    def wait_until_sent(self, timeout_s: float) -> bool:
        """Block until `sent`, whether the run was stopped or not; False on time-out."""
        deadline = time.monotonic() + timeout_s
        return all(
            destination.wait_until_sent(deadline - time.monotonic())
            for destination in self._all()
        )

    def _all(self) -> Iterable["Destination"]:
        """Destinations that may still have updates of this replica to deliver."""
        return self.destinations()


# Updates that are kept though they fill more than an outbox. Who misses one asks for it
# a second later; as many dense ones of some MB take about that long to be sent.
RECENT = 16


class RelayRouting(Routing):
    """One destination: the scheduler, which passes updates on to all others."""

    pace_s = PACE_S

    def __init__(self, connection: Connection, inbox: Inbox) -> None:
        super().__init__(connection, inbox)
        self._kept = RetransmitBuffer(connection.endpoint.outbox_bytes)
        self._most_kept = connection.endpoint.inbox_bytes
        self._last_step = 0

    @override
    def destinations(self) -> Sequence["Destination"]:
        return [self.to_scheduler]

    @override
    def lookup(self, origin: int, sequences: Iterable[int]) -> list[Message]:
        return self._kept.find(origin, sequences)

    @override
    def publish(self, item: Message, *, force: bool = False) -> bool:
        if not self.to_scheduler.offer(item, force=force):
            return False
        # Never less again: small ones may follow before it is asked for.
        wanted = min(RECENT * item.weight(), self._most_kept)
        self._kept.limit_bytes = max(self._kept.limit_bytes, wanted)
        self._kept.keep(item)
        self._inbox.own = self._inbox.own._replace(sequence=item.sequence)
        self._last_step = item.step
        return True

    @override
    def announce(self, progress: PeerProgress) -> None:
        former, self._inbox.own = self._inbox.own, progress
        # A published update of this step says the same, and has woken the loop.
        if progress.interval > former.interval or progress.step != self._last_step:
            self.wake()

    @override
    def has_room(self, *, for_any: bool = False) -> bool:
        return self.sent() if for_any else self.to_scheduler.has_room(1)

    @override
    def backlog(self) -> Backlog:
        queue = self.to_scheduler
        return Backlog(len(queue), queue.nbytes, "the scheduler")


IDLE_S = 60.0  # between neighbours nothing is sent only to show a sign of life
RETRY_S = 1.0  # after a neighbour could not be reached


class Neighbour:
    """The queue to one neighbour of a mesh, and the loop that sends it.

    A neighbour that cannot be reached holds nobody up: its queue is dropped, and it
    requests those updates later if it lives. The scheduler decides who has failed.

    Args:
        replica: Its number.
        worker: Address of its worker.
        connection: Of the replica that sends.
        inbox: Woken when there may be room again.
        meter: Counts what leaves the replica that sends.

    Attributes:
        forwarded_bytes: Of queued updates of other replicas.
    """

    forwarded_bytes: int

    def __init__(
        self,
        replica: int,
        worker: str,
        connection: Connection,
        inbox: Inbox,
        meter: LinkMeter,
    ) -> None:
        self.forwarded_bytes = 0
        self._replica = replica
        self._worker = worker
        self._connection = connection
        self._meter = meter
        self._own = connection.endpoint.replica
        self._outbox = Outbox(connection.endpoint.outbox_bytes)
        self._outbox.on_drop = inbox.wake
        self._progress: dict[int, Message] = {}  # the latest of each origin
        self._announcing = threading.Lock()
        self._offered = 0  # sequence of the last own update
        self._arrived = 0
        self._down = False
        self._loop = self._new_loop()
        loop = connection.loop
        self._outbox.on_offer = lambda: loop.call_soon_threadsafe(
            lambda: self._loop.wake()
        )
        self._sending = asyncio.ensure_future(self._run(), loop=loop)

    # ---- event loop

    def end(self) -> None:
        """It is a member no more: nothing waits for it, and nobody for it."""
        self._down = True
        self._discard()
        self._sending.cancel()

    def forward(self, item: Message) -> None:
        """Queue an update of another replica; the caller has checked for room."""
        if self._down:
            return
        self.forwarded_bytes += item.weight()
        self._outbox.offer(item, force=True)

    def _new_loop(self) -> SendLoop:
        return SendLoop(
            self._outbox,
            self._send,
            pace_s=PACE_S,
            beat_s=IDLE_S,
            bound=self._connection.endpoint.timeouts.bound("request"),
            destination=f"replica {self._replica} on {self._worker}",
        )

    async def _run(self) -> None:
        while True:
            try:
                await self._loop.run()
            except (OSError, RuntimeError, DaskDLError) as error:
                # RuntimeError is what Dask's pool raises once a worker closes.
                logger.info("replica %s sends no more: %s", self._own, error)
            self._down = True
            self._discard()
            await asyncio.sleep(RETRY_S)
            self._down = False
            self._loop = self._new_loop()

    async def _send(self, items: Sequence[Message]) -> int:
        # Not before what was published earlier, or that would seem to be missing.
        last = len(items) == len(self._outbox)
        with self._announcing:
            progress = list(self._progress.values()) if last else []
        if not items and not progress:
            return 0
        with self._meter.request(items):
            answer = await self._connection.ask(
                self._worker,
                protocol.DELIVER,
                replica=self._replica,
                messages=[item.to_wire() for item in (*items, *progress)],
            )
        if not isinstance(answer, dict) or answer.get("status") != Answer.OK:
            raise OSError(f"{self._worker} answered {answer!r}")
        accepted = min(int(answer["accepted"]), len(items))
        if answer["accepted"] == len(items) + len(progress):
            self._announced(progress)
        self._meter.arrived(items[:accepted])
        self._count(items[:accepted])
        return accepted

    def _announced(self, progress: Sequence[Message]) -> None:
        with self._announcing:
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

    def announce(self, item: Message) -> None:
        """Send the progress of a replica; only the latest of each is kept."""
        with self._announcing:
            self._progress[item.origin] = item
        self._outbox.on_offer()

    # ---- training thread

    def offer(self, item: Message, *, force: bool = True) -> bool:
        """Queue an update of this replica; unacknowledged ones are bounded."""
        if not self._down:
            self._offered = item.sequence
            self._outbox.offer(item, force=force)
        return True

    def sent(self) -> bool:
        """Whether all updates of this replica have arrived there."""
        return self._down or self._arrived >= self._offered

    def wait_until_sent(self, timeout_s: float) -> bool:
        """Block until `sent`; False on time-out."""
        return self._outbox.wait_for(self.sent, timeout_s)


class MeshRouting(Routing):
    """Replicas send to each other along one tree per origin, see `MeshTopology`.

    Updates of others are passed on while there is room; those that are not are counted,
    and requested by the replicas that miss them. So nobody waits in a circle.

    Attributes:
        forwards_dropped: Updates of others that were not passed on.
    """

    pace_s = BEAT_PACE_S
    forwards_dropped: int

    def __init__(self, connection: Connection, inbox: Inbox) -> None:
        super().__init__(connection, inbox)
        endpoint = connection.endpoint
        self.forwards_dropped = 0
        self._own = UnackedBuffer(endpoint.outbox_bytes)
        self._others = RetransmitBuffer(endpoint.inbox_bytes)
        self._book = TopologyHistory()
        self._adopted_at = 0  # last own update when the current routes came
        self._neighbours: dict[int, Neighbour] = {}  # replaced, never changed
        self._workers: Mapping[int, str] = {}
        self._lock = threading.Lock()  # an update is of one generation
        self._ended = False
        self._unreported: dict[int, int] = {}  # bytes by origin since the last beat

    # ---- event loop

    @override
    def acknowledgement(self) -> Mapping[str, Any]:
        self._unreported.clear()
        with self._inbox.changed:
            received = self._inbox.received.by_origin()
        return {
            "acknowledgement": {
                "generation": self._book.current.generation,
                "adopted_at": self._adopted_at,
                "received": [
                    (origin, complete)
                    for origin, (complete, _) in received.items()
                    if not self._inbox.joining
                ],
            }
        }

    @override
    def on_answer(self, answer: Mapping[str, Any]) -> None:
        for replica, *progress in answer.get("peers", ()):
            if replica != self._replica:
                self._inbox.announce(replica, PeerProgress(*progress))
        if self._own.acknowledge(answer.get("received_by_all", 0)):
            self._inbox.wake()
        if self._own.pressed:
            self._loop.wake()

    @override
    def end(self) -> None:
        self._ended = True
        for neighbour in self._neighbours.values():
            neighbour.end()

    @override
    def on_members(self, generation: int, workers: Mapping[int, str]) -> None:
        fan_out = self._connection.endpoint.fan_out
        routes = MeshTopology(generation, tuple(sorted(workers)), fan_out)
        with self._lock:
            if self._ended or not self._book.adopt(routes):
                return
            self._adopted_at = self._inbox.own.sequence
            self._workers = workers
            former = self._neighbours
            self._neighbours = {
                replica: former.get(replica) or self._connect(replica)
                for replica in routes.members
                if replica in former or replica in routes.neighbours(self._replica)
            }
        for replica in former.keys() - self._neighbours.keys():
            former[replica].end()
        self._loop.wake()  # a joining replica waits for this
        self._inbox.wake()

    def _connect(self, replica: int) -> Neighbour:
        worker = self._workers[replica]
        return Neighbour(replica, worker, self._connection, self._inbox, self.meter)

    @override
    def on_message(self, item: Message) -> None:
        routes = self._book.for_generation(item.generation)
        for child in routes.children(item.origin, self._replica):
            neighbour = self._neighbour(child)
            if neighbour is None:
                continue
            if item.kind == MessageKind.PROGRESS:
                neighbour.announce(item)
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
    def lookup(self, origin: int, sequences: Iterable[int]) -> list[Message]:
        if origin == self._replica:
            return self._own.find(sequences)
        return self._others.find(origin, sequences)

    @override
    def on_update(self, item: Message) -> None:
        self._others.keep(item)
        more = self._unreported.get(item.origin, 0) + item.weight()
        self._unreported[item.origin] = more
        # Its origin can publish no more than so much before this is acknowledged.
        if more > self._connection.endpoint.outbox_bytes // 4:
            self._loop.wake()

    # ---- training thread

    @override
    def destinations(self) -> Sequence[Neighbour]:
        children = self._book.current.children(self._replica, self._replica)
        neighbours = self._neighbours
        return [neighbours[child] for child in children]

    @override
    def _all(self) -> Iterable[Neighbour]:
        return self._neighbours.values()

    @override
    def publish(self, item: Message, *, force: bool = False) -> bool:
        with self._lock:
            # What waits for a neighbour is not acknowledged: this bounds that too.
            if not force and not self._own.has_room():
                return False
            item = item._replace(generation=self._book.current.generation)
            self._own.keep(item)
            self._inbox.own = self._inbox.own._replace(sequence=item.sequence)
            for child in self.destinations():
                child.offer(item)
        if self._own.pressed:
            self.wake()
        return True

    @override
    def announce(self, progress: PeerProgress) -> None:
        self._inbox.own = progress
        with self._lock:
            kind, generation = MessageKind.PROGRESS.value, self._book.current.generation
            children = self.destinations()
        step, sequence, interval = progress
        item = Message(kind, self._replica, sequence, step, 0, interval, generation)
        for child in children:
            child.announce(item)

    @override
    def has_room(self, *, for_any: bool = False) -> bool:
        return self._own.has_room()

    @override
    def backlog(self) -> Backlog:
        return Backlog(len(self._own), self._own.nbytes, "all others")

    @property
    @override
    def copies(self) -> int:
        # In a round of all, a replica sends as many frames as there are others: those
        # of its own that others pass on are as many as it passes on for them.
        return max(len(self._book.current.members) - 1, 1)


Destination = Outbox | Neighbour
ROUTINGS: Mapping[str, type[Routing]] = {"plain": RelayRouting, "mesh": MeshRouting}
