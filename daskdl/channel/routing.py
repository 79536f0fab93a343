"""Which way updates go: over the scheduler (relay) or between replicas (mesh).

A routing is one class and one entry of `ROUTINGS`. It says where a replica's own
updates go and what it passes on for others; what all routings do alike lies in
`Routing`.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from typing_extensions import override

from daskdl.channel import protocol
from daskdl.channel.inbox import Inbox
from daskdl.channel.protocol import (
    MESSAGE_BYTES,
    Answer,
    MeshTopology,
    Message,
    MessageKind,
    PeerProgress,
)
from daskdl.channel.sender import Connection, Outbox, RetransmitBuffer, SendLoop
from daskdl.errors import DaskDLError
from daskdl.thresholds import Drained

logger = logging.getLogger(__name__)

BEAT_S = 1.0  # most time between two signs of life
PACE_S = 0.005  # least time between two requests to one destination
BEAT_PACE_S = 0.05  # least time between two signs of life without updates
IDLE_S = 60.0  # between neighbours nothing is sent only to show a sign of life
RETRY_S = 1.0  # after a neighbour could not be reached


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
    def request(self, messages: Sequence[Message]) -> Iterator[None]:
        """Count the time of a request that carries these."""
        counts = bool(messages)
        self._count_time(counts)
        try:
            yield
        finally:
            self._count_time(-counts)

    def _count_time(self, begun: int) -> None:
        with self._lock:
            now = time.perf_counter()
            if self._under_way:
                busy_s = self._drained.busy_s + now - self._since
                self._drained = self._drained._replace(busy_s=busy_s)
            self._since = now
            self._under_way += begun

    def arrived(self, messages: Sequence[Message]) -> None:
        """Count a request that was answered, and the messages it accepted."""
        if not messages:
            return
        with self._lock:
            former = self._drained
            self._drained = former._replace(
                nbytes=former.nbytes + sum(message.nbytes for message in messages),
                frames=former.frames + len(messages),
                requests=former.requests + 1,
            )

    # ---- training thread

    def take(self, copies: int) -> Drained:
        """Counts since the last call.

        Args:
            copies: Of one published frame that leave this replica.
        """
        with self._lock:
            drained, self._drained = self._drained, Drained()
        return drained._replace(copies=copies)


class Destination(ABC):
    """A queue of one replica to one place, and the loop that sends it.

    Args:
        routing: Of the replica.
        name: Of the place, for messages.
        limit_bytes: Of the queue.
        pace_s: Least time between two requests, seconds.
        beat_s: Most time between two requests, seconds.

    Attributes:
        outbox: The queue.
    """

    outbox: Outbox

    def __init__(
        self,
        routing: "Routing",
        name: str,
        *,
        limit_bytes: float,
        pace_s: float,
        beat_s: float,
    ) -> None:
        self._routing = routing
        self._connection = routing.connection
        self.outbox = Outbox(limit_bytes)
        self.outbox.on_offer, self.outbox.on_drop = self.wake, routing.inbox.wake
        self._loop = SendLoop(
            self.outbox,
            self._send,
            pace_s=pace_s,
            beat_s=beat_s,
            bound=routing.connection.spec.timeouts.bound("request"),
            destination=name,
        )

    @abstractmethod
    async def _send(self, messages: Sequence[Message]) -> int:
        """Send a batch; return how many of its messages were accepted."""

    @abstractmethod
    def announce(self, progress: Message) -> None:
        """Send the progress of a replica soon; of each replica only the latest."""

    def offer(self, message: Message) -> None:
        """Queue an update; the routing has looked for room."""
        self.outbox.offer(message, force=True)

    def wake(self) -> None:
        """There is something to send. Any thread."""
        self._connection.loop.call_soon_threadsafe(self._loop.wake)

    def sent(self) -> bool:
        """Whether all updates of this replica have arrived there."""
        return not self.outbox.bytes_of(self._connection.spec.replica)


class ToScheduler(Destination):
    """Shows the scheduler that the replica lives, and how far it is.

    It carries updates if the scheduler passes them on; without it nothing works.
    """

    async def run(self) -> None:
        """Send until cancelled."""
        try:
            await self._loop.run()
        except (DaskDLError, OSError) as error:
            self._connection.fail(error)

    @override
    def announce(self, progress: Message) -> None:
        self.wake()

    @override
    async def _send(self, messages: Sequence[Message]) -> int:
        # Progress beyond the batch would overtake the updates still waiting. It is
        # read first: what was queued before it was set is then counted as waiting.
        routing = self._routing
        progress, more = routing.inbox.own, routing.acknowledgement()
        if len(messages) != len(self.outbox):
            progress = PeerProgress()
        with routing.meter.request(messages):
            answer = await self._connection.ask_scheduler(
                protocol.PUBLISH,
                replica=self._connection.spec.replica,
                messages=[message.to_wire() for message in messages],
                progress=progress,
                **more,
            )
        accepted = int(answer.get("accepted", 0))
        routing.meter.arrived(messages[:accepted])
        routing.on_answer(answer)
        return accepted


class Neighbour(Destination):
    """Sends to another replica.

    One that cannot be reached holds nobody up: its queue is dropped, and it requests
    those updates later if it lives. The scheduler decides who has failed. The queue has
    no bound of its own: what waits there of this replica is not acknowledged, and the
    routing bounds what it passes on.

    Args:
        routing: Of the replica that sends.
        replica: Its number.
        worker: Address of its worker.
    """

    def __init__(self, routing: "Routing", replica: int, worker: str) -> None:
        name = f"replica {replica} on {worker}"
        super().__init__(
            routing, name, limit_bytes=math.inf, pace_s=PACE_S, beat_s=IDLE_S
        )
        self._replica = replica
        self._worker = worker
        self._progress: dict[int, Message] = {}  # the latest of each origin
        self._announced: dict[int, Message] = {}  # the last that has arrived
        self._down = False
        self._sending = asyncio.run_coroutine_threadsafe(
            self._run(), self._connection.loop
        )

    def end(self) -> None:
        """It is a member no more: nothing waits for it, and nobody for it."""
        self._down = True
        self.outbox.drop(len(self.outbox))
        self._sending.cancel()

    async def _run(self) -> None:
        while True:
            try:
                await self._loop.run()
            except (OSError, DaskDLError) as error:
                own = self._connection.spec.replica
                logger.info("replica %s sends no more: %s", own, error)
            self._down = True
            self.outbox.drop(len(self.outbox))
            await asyncio.sleep(RETRY_S)
            self._down = False

    @override
    async def _send(self, messages: Sequence[Message]) -> int:
        # Not before what was published earlier, or that would seem to be missing.
        progress = [
            latest
            for latest in list(self._progress.values())
            if self._announced.get(latest.origin) is not latest
        ]
        if len(messages) != len(self.outbox):
            progress = []
        if not messages and not progress:
            return 0
        meter = self._routing.meter
        with meter.request(messages):
            answer = await self._connection.ask(
                self._worker,
                protocol.DELIVER,
                replica=self._replica,
                messages=[message.to_wire() for message in (*messages, *progress)],
            )
        if not isinstance(answer, dict) or answer.get("status") != Answer.OK:
            raise OSError(f"{self._worker} answered {answer!r}")
        accepted = min(int(answer["accepted"]), len(messages))
        if answer["accepted"] == len(messages) + len(progress):
            self._announced.update((latest.origin, latest) for latest in progress)
        meter.arrived(messages[:accepted])
        return accepted

    @override
    def announce(self, progress: Message) -> None:
        self._progress[progress.origin] = progress
        self.wake()

    @override
    def offer(self, message: Message) -> None:
        if not self._down:
            super().offer(message)

    @override
    def sent(self) -> bool:
        return self._down or super().sent()


class Routing(ABC):
    """Where one replica's updates go, and what it does for the updates of others.

    A routing decides where its own updates go (`destinations`) and what it passes on
    (`on_message`); `relayed` says whether the scheduler does that. If it does not,
    updates are kept until all others have acknowledged them, and the queues to other
    replicas are made as they are needed (`neighbour`).

    Args:
        connection: Of this replica.
        inbox: Where updates of others arrive; woken when there may be room again.

    Attributes:
        relayed: Whether the scheduler passes updates on: they arrive in order then,
            and those of a failed replica reach all or nobody.
        generation: Of the membership; 0 until the first is known.
        workers: Address of the worker of each member.
        own: Updates of this replica that others may request again.
        others: Those of others, where the scheduler does not pass them on.
        meter: Counts what leaves.
        to_scheduler: Shows that the replica lives, whatever the routing.
    """

    relayed: ClassVar[bool]
    generation: int
    workers: Mapping[int, str]
    own: RetransmitBuffer
    others: RetransmitBuffer
    meter: LinkMeter
    to_scheduler: ToScheduler

    def __init__(self, connection: Connection, inbox: Inbox) -> None:
        spec = connection.spec
        self.connection = connection
        self.inbox = inbox
        self.generation = 0
        self.workers = {}
        self.own = RetransmitBuffer(spec.outbox_bytes, evicts=self.relayed)
        self.others = RetransmitBuffer(spec.inbox_bytes)
        self.meter = LinkMeter()
        self.to_scheduler = ToScheduler(
            self,
            "the scheduler",
            limit_bytes=spec.outbox_bytes,
            pace_s=PACE_S if self.relayed else BEAT_PACE_S,
            beat_s=min(BEAT_S, spec.timeouts.silence / 4),
        )
        self._replica = spec.replica
        self._lock = threading.RLock()  # an update is of one generation
        self._neighbours: dict[int, Neighbour] = {}
        self._ended = False
        self._adopted_at = 0  # last own update when the current generation came
        self._published_step = -1
        self._unreported: dict[int, int] = {}  # bytes by origin since the last beat

    # ---- what a routing decides

    @abstractmethod
    def destinations(self) -> Sequence[Destination]:
        """Where the next update of this replica goes. Any thread."""

    def on_message(self, message: Message) -> None:  # noqa: B027
        """Pass on what another replica sent, if this one has to. Event loop.

        Args:
            message: The first copy of an update, or news of progress.
        """

    def on_members(self, generation: int, workers: Mapping[int, str]) -> None:
        """The members are now these, each on its worker. Event loop.

        Args:
            generation: Of the membership; not always later than the former one.
            workers: Address of each member's worker.
        """
        with self._lock:
            if self._ended or generation <= self.generation:
                return
            self.generation, self.workers = generation, workers
            self._adopted_at = self.inbox.own.sequence
            gone = self._neighbours.keys() - workers.keys()
            former = [self._neighbours.pop(replica) for replica in gone]
        for neighbour in former:
            neighbour.end()
        if not self.relayed:
            self.to_scheduler.wake()  # a joining replica waits for this
            self.inbox.wake()

    def lookup(self, origin: int, sequences: Iterable[int]) -> list[Message]:
        """Kept updates, for replicas that miss them; ascending. Event loop."""
        kept = self.own if origin == self._replica else self.others
        return kept.find(origin, sequences)

    # ---- any thread

    def neighbour(self, replica: int) -> Neighbour | None:
        """The queue to another member, made when it is first needed."""
        with self._lock:
            known = replica in self.workers and not self._ended
            if known and replica not in self._neighbours:
                worker = self.workers[replica]
                self._neighbours[replica] = Neighbour(self, replica, worker)
            return self._neighbours.get(replica)

    def sent(self) -> bool:
        """Whether all updates of this replica have arrived where they go first."""
        neighbours = list(self._neighbours.values())
        return self.to_scheduler.sent() and all(one.sent() for one in neighbours)

    # ---- training thread

    def has_room(self, nbytes: float = 1) -> bool:
        """Whether an update of so many bytes may be published now."""
        if self.relayed:
            return self.to_scheduler.outbox.has_room(nbytes)
        # What waits for a neighbour is not acknowledged: this bounds that too.
        return self.own.has_room()

    def publish(self, message: Message, *, force: bool = False) -> bool:
        """Queue an update for its destinations; False if there is no room.

        Args:
            message: Of this replica, the next in sequence.
            force: Queue it whatever the bounds.
        """
        with self._lock:
            if not (force or self.has_room(message.nbytes + MESSAGE_BYTES)):
                return False
            message = message._replace(generation=self.generation)
            self.own.keep(message)
            self.inbox.own = self.inbox.own._replace(sequence=message.sequence)
            self._published_step = message.step
            for destination in self.destinations():
                destination.offer(message)
        if not self.relayed and self.own.nbytes > self.own.limit_bytes // 2:
            self.to_scheduler.wake()  # its answer says what is acknowledged
        return True

    def announce(self, progress: PeerProgress) -> None:
        """Announce how far this replica is."""
        former, self.inbox.own = self.inbox.own, progress
        step, sequence, interval = progress
        # A published update of this step says the same.
        if interval > former.interval or step != self._published_step:
            kind = MessageKind.PROGRESS.value
            with self._lock:
                message = Message(
                    kind, self._replica, sequence, step, 0, interval, self.generation
                )
                for destination in self.destinations():
                    destination.announce(message)

    def backlog(self) -> str:
        """What waits to be sent, for messages."""
        queue = self.to_scheduler.outbox if self.relayed else self.own
        destination = "the scheduler" if self.relayed else "all others"
        return (
            f"{len(queue)} updates ({queue.nbytes} bytes) could not be passed to "
            f"{destination}"
        )

    @property
    def copies(self) -> int:
        """Of one published frame that leave this replica.

        In a round of all, a replica of a mesh sends as many frames as there are others:
        those of its own that others pass on are as many as it passes on for them.
        """
        return 1 if self.relayed else max(len(self.workers) - 1, 1)

    # ---- event loop

    def keep(self, message: Message) -> None:
        """Keep an update of another replica that was delivered, unless relayed."""
        if self.relayed:
            return
        self.others.keep(message)
        more = self._unreported.get(message.origin, 0) + message.nbytes + MESSAGE_BYTES
        self._unreported[message.origin] = more
        # Its origin can publish no more than so much before this is acknowledged.
        if more > self.connection.spec.outbox_bytes // 4:
            self.to_scheduler.wake()

    def acknowledgement(self) -> Mapping[str, Any]:
        """Fields of a request to the scheduler, besides progress."""
        if self.relayed:
            return {}
        self._unreported.clear()
        with self.inbox.changed:
            received = {} if self.inbox.joining else self.inbox.received.by_origin()
        return {
            "acknowledgement": {
                "generation": self.generation,
                "adopted_at": self._adopted_at,
                "received": [(origin, upto) for origin, (upto, _) in received.items()],
            }
        }

    def on_answer(self, answer: Mapping[str, Any]) -> None:
        """Take in what the scheduler says of the others."""
        if self.relayed:
            return
        for replica, *progress in answer.get("peers", ()):
            if replica != self._replica:
                self.inbox.announce(replica, PeerProgress(*progress))
        if self.own.acknowledge(answer.get("received_by_all", 0)):
            self.inbox.wake()
        if self.own.nbytes > self.own.limit_bytes // 2:
            self.to_scheduler.wake()

    def end(self) -> None:
        """Send nothing more."""
        self._ended = True
        for neighbour in list(self._neighbours.values()):
            neighbour.end()


# Updates that are kept though they fill more than an outbox. Who misses one asks for it
# a second later; as many dense ones of some MB take about that long to be sent.
RECENT = 16


class RelayRouting(Routing):
    """One destination: the scheduler, which passes updates on to all others."""

    relayed = True

    @override
    def destinations(self) -> Sequence[Destination]:
        return [self.to_scheduler]

    @override
    def publish(self, message: Message, *, force: bool = False) -> bool:
        # Never less again: small ones may follow before it is asked for.
        wanted = RECENT * (message.nbytes + MESSAGE_BYTES)
        most = min(wanted, self.connection.spec.inbox_bytes)
        self.own.limit_bytes = max(self.own.limit_bytes, most)
        return super().publish(message, force=force)


# Scaling up by 32 workers is 32 generations within a second, in which frames of
# the first are still on their way. One of 128 members takes 1 KB.
GENERATIONS_KEPT = 32


class TopologyHistory:
    """The topologies of the latest generations, as far as one replica knows.

    An update carries the generation in which its origin sent it, and goes along
    that generation's tree to the end: whoever was a member then gets it, once,
    although those on its way may know a later generation. Before the
    first generation there is nobody to send to.

    All methods belong to the event loop; `current` may be read from any thread.

    Args:
        kept: How many generations are kept, >= 1; older ones are forgotten.

    Attributes:
        current: That of the highest generation known.

    Example:
        >>> book = TopologyHistory()
        >>> book.adopt(MeshTopology(1, (0, 1)))
        True
        >>> book.adopt(MeshTopology(2, (0, 1, 2)))
        True
        >>> book.for_generation(1).members, book.for_generation(9).members
        ((0, 1), (0, 1, 2))
    """

    current: MeshTopology

    def __init__(self, kept: int = GENERATIONS_KEPT) -> None:
        self.current = MeshTopology(0, ())
        self._kept = kept
        self._known: dict[int, MeshTopology] = {}

    def adopt(self, routes: MeshTopology) -> bool:
        """Note the routes of a generation; whether they are the current ones now.

        Membership messages may arrive out of order: an older generation is kept for
        the frames stamped with it, and changes nothing else. The first message about
        a generation counts.
        """
        self._known.setdefault(routes.generation, routes)
        while len(self._known) > self._kept:
            del self._known[min(self._known)]
        newer = routes.generation > self.current.generation
        if newer:
            self.current = routes
        return newer

    def for_generation(self, generation: int) -> MeshTopology:
        """The routes along which to forward what is stamped with a generation.

        One that is too old, or not known yet, falls back to the current one.
        The update may then reach somebody twice or not at all. Both are safe:
        positions know duplicates, and a gap is repaired by asking. It also ends:
        **only the first copy of an update may be forwarded**, so each replica
        forwards it once; with every copy it could circle between two that go by
        different trees.
        """
        return self._known.get(generation, self.current)


class MeshRouting(Routing):
    """Replicas send to each other along one tree per origin, see `MeshTopology`.

    Updates of others are passed on while there is room; those that are not are counted,
    and requested by the replicas that miss them. So nobody waits in a circle.

    Attributes:
        forwards_dropped: Updates of others that were not passed on.
    """

    relayed = False
    forwards_dropped: int

    def __init__(self, connection: Connection, inbox: Inbox) -> None:
        super().__init__(connection, inbox)
        self.forwards_dropped = 0
        self._topologies = TopologyHistory()

    @override
    def destinations(self) -> Sequence[Destination]:
        children = self._topologies.current.children(self._replica, self._replica)
        return [n for child in children if (n := self.neighbour(child)) is not None]

    @override
    def on_members(self, generation: int, workers: Mapping[int, str]) -> None:
        fan_out = self.connection.spec.fan_out
        topology = MeshTopology(generation, tuple(sorted(workers)), fan_out)
        with self._lock:
            self._topologies.adopt(topology)
            super().on_members(generation, workers)

    @override
    def on_message(self, message: Message) -> None:
        topology = self._topologies.for_generation(message.generation)
        for child in topology.children(message.origin, self._replica):
            neighbour = self.neighbour(child)
            if neighbour is None:
                continue
            if message.kind == MessageKind.PROGRESS:
                neighbour.announce(message)
            elif self._may_forward(message):
                neighbour.offer(message)
            else:
                self.forwards_dropped += 1

    def _may_forward(self, message: Message) -> bool:
        queues = [neighbour.outbox for neighbour in list(self._neighbours.values())]
        waiting = sum(queue.nbytes - queue.bytes_of(self._replica) for queue in queues)
        limit = self.connection.spec.inbox_bytes
        return not waiting or waiting + message.nbytes + MESSAGE_BYTES <= limit


# The routings of a run, by the name that its options have for them.
ROUTINGS: dict[str, type[Routing]] = {"plain": RelayRouting, "mesh": MeshRouting}
