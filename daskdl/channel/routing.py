"""Routing of updates: through the scheduler (relay) or between replicas (mesh).

Each routing is a class and an entry of `ROUTINGS`; it chooses the destinations of a
replica's own updates and the updates of others to forward. `Routing` does the rest.
"""

import asyncio
import contextlib
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from typing_extensions import override

from daskdl.channel import protocol
from daskdl.channel.inbox import Inbox
from daskdl.channel.protocol import (
    MESSAGE_BYTES,
    Answer,
    LiveReport,
    MeshTopology,
    Message,
    MessageKind,
    PeerProgress,
)
from daskdl.channel.transport import (
    RECENT,
    Connection,
    Outbox,
    RetransmitBuffer,
    SendLoop,
)
from daskdl.config import Bound, Timeouts
from daskdl.errors import DaskDLError

logger = logging.getLogger(__name__)

BEAT_S = 1.0  # longest time between two heartbeats
PACE_S = 0.005  # shortest time between two requests to one destination
# Most heartbeats per second of all replicas of a mesh. The scheduler's answer to each
# names all replicas, so its work would grow with the square of their number otherwise.
BEATS_PER_S = 64
BEAT_PACE_S = 0.05  # shortest time between two heartbeats without updates
IDLE_S = 60.0  # neighbors exchange no heartbeats, so an idle loop rarely wakes
RETRY_S = 1.0  # pause after a neighbor could not be reached


def beat_s(replicas: int, timeouts: Timeouts) -> float:
    """Return the longest time between two heartbeats of a replica of a mesh, seconds.

    Example:
        >>> from daskdl.config import Timeouts
        >>> [beat_s(replicas, Timeouts.from_config()) for replicas in (2, 64, 256)]
        [1.0, 1.0, 4.0]
    """
    return min(max(BEAT_S, replicas / BEATS_PER_S), timeouts.silence / 4)


class Destination(ABC):
    """The queue from a replica to one destination, and its send loop.

    Args:
        routing: Routing of the replica.
        name: Name of the destination, for messages.
        limit_bytes: Bound of the queue, bytes.
        pace_s: Shortest time between two requests, seconds.
        beat_s: Longest time between two requests, seconds.
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
        self.outbox.on_append, self.outbox.on_drop = self.wake, routing.inbox.wake
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
        """Send the progress of a replica soon; later progress replaces it."""

    def offer(self, message: Message) -> None:
        """Queue an update; the routing has checked for room."""
        self.outbox.append(message)

    def wake(self) -> None:
        """Wake the send loop. Any thread."""
        self._connection.loop.call_soon_threadsafe(self._loop.wake)

    def all_sent(self) -> bool:
        """Whether all updates of this replica have arrived at the destination."""
        return not self.outbox.bytes_of(self._connection.spec.replica)


class ToScheduler(Destination):
    """Sends heartbeats and progress to the scheduler, and updates in a relay.

    If the scheduler cannot be reached, the replica stops.

    Attributes:
        moved: Messages that had arrived elsewhere at the last answer.
    """

    moved = 0

    async def run(self) -> None:
        """Send until cancelled."""
        await self._loop.run()

    def pace_for(self, replicas: int) -> None:
        """Send heartbeats less often if there are many replicas."""
        self._loop.beat_s = beat_s(replicas, self._connection.spec.timeouts)

    @contextlib.contextmanager
    def patient(self, bound: Bound) -> Iterator[None]:
        """Allow the scheduler another bound for the answer to each request."""
        former, self._loop.bound = self._loop.bound, bound
        try:
            yield
        finally:
            self._loop.bound = former

    @override
    def announce(self, progress: Message) -> None:
        self.wake()

    @override
    async def _send(self, messages: Sequence[Message]) -> int:
        # Progress beyond the batch would overtake queued updates. It is read before
        # the queue's length, which then counts every update queued before it was set.
        routing = self._routing
        progress, acknowledgement = routing.inbox.progress, routing.acknowledgement()
        if len(messages) != len(self.outbox):
            progress = PeerProgress()
        step = routing.needed_step
        needed = {"needed_step": step} if step else {}
        answer = await self._connection.ask(
            None,
            protocol.PUBLISH,
            replica=self._connection.spec.replica,
            messages=[message.to_wire() for message in messages],
            progress=progress,
            steps=routing.inbox.steps,
            leaves=routing.leaving,
            fetching=routing.fetching,
            **needed,
            **acknowledgement,
            **routing.take_live(),
        )
        answer = self._connection.checked(answer)
        accepted = int(answer.get("accepted", 0))
        self.moved = answer.get("moved", 0)
        routing.on_answer(answer)
        return accepted


class Neighbor(Destination):
    """Sends to another replica.

    An unreachable replica blocks no other: its queue is dropped, and if it is alive, it
    requests the dropped updates later. The scheduler decides which replicas have
    failed. The queue has no bound of its own: the retransmit buffer bounds this
    replica's own updates, and the routing bounds forwarded updates.
    """

    def __init__(self, routing: "Routing", replica: int, worker: str) -> None:
        name = f"replica {replica} on {worker}"
        super().__init__(
            routing, name, limit_bytes=math.inf, pace_s=PACE_S, beat_s=IDLE_S
        )
        self._replica = replica
        self._worker = worker
        self._progress: dict[int, Message] = {}  # the latest of each origin
        self._announced: dict[int, Message] = {}  # the last delivered, by origin
        self._down = False
        sending = self._connection.guard(self._run)
        self._sending = self._connection.start(sending)

    def end(self) -> None:
        """Drop the queue and stop sending: the replica is no longer a member."""
        self._down = True
        self.outbox.drop(len(self.outbox))
        self._sending.cancel()

    async def _run(self) -> None:
        while True:
            try:
                await self._loop.run()
            except (OSError, DaskDLError) as error:
                logger.info(
                    "replica %s cannot reach replica %s: %s",
                    self._connection.spec.replica,
                    self._replica,
                    error,
                )
            self._down = True
            self.outbox.drop(len(self.outbox))
            await asyncio.sleep(RETRY_S)
            self._down = False

    @override
    async def _send(self, messages: Sequence[Message]) -> int:
        # Progress must not overtake earlier updates, which would then seem missing.
        progress = [
            latest
            for latest in list(self._progress.values())
            if self._announced.get(latest.origin) is not latest
        ]
        if len(messages) != len(self.outbox):
            progress = []
        if not messages and not progress:
            return 0
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
    def all_sent(self) -> bool:
        return self._down or super().all_sent()


class Routing(ABC):
    """Routes one replica's updates, and forwards updates of other replicas.

    A subclass chooses the destinations of the replica's own updates (`destinations`)
    and forwards updates of others (`on_message`). If the scheduler does not relay
    updates (`relayed`), own updates are kept until all other replicas have acknowledged
    them, and queues to other replicas are made on first use (`neighbor`).

    Args:
        connection: Connection of this replica.
        inbox: Inbox of this replica; woken when there may be room again.

    Attributes:
        relayed: Whether the scheduler relays updates: they then arrive in order, unless
            it `merges` them, and an update of a failed replica reaches all replicas or
            none.
        merges: Whether the scheduler sends sums of updates.
        generation: Generation of the membership; 0 before the first membership.
        workers: Address of the worker of each member.
        own_kept: Updates of this replica that others may request again.
        others_kept: Updates of others, if the scheduler does not relay them.
        to_scheduler: Sends heartbeats, whatever the routing.
        leaving: Whether this replica has published its last update; the scheduler
            accepts it even if a queue is full.
        fetching: Whether a sum is on its way to this replica.
        needed_step: This replica waits until all others have reached this step, of
            which a relay that merges updates has to know; 0: it does not wait.
        live: The newest report for the dashboard, until it is sent.
    """

    relayed: ClassVar[bool]
    merges: ClassVar[bool] = False
    generation: int
    workers: Mapping[int, str]
    own_kept: RetransmitBuffer
    others_kept: RetransmitBuffer
    to_scheduler: ToScheduler
    leaving: bool
    fetching: bool
    needed_step: int
    live: deque[LiveReport]

    def __init__(self, connection: Connection, inbox: Inbox) -> None:
        spec = connection.spec
        self.connection = connection
        self.inbox = inbox
        self.generation = 0
        self.workers = {}
        self.own_kept = RetransmitBuffer(spec.outbox_bytes, evicts=self.relayed)
        self.others_kept = RetransmitBuffer(spec.inbox_bytes)
        self.leaving = self.fetching = False
        self.needed_step = 0
        self.live = deque(maxlen=1)
        self.to_scheduler = ToScheduler(
            self,
            "the scheduler",
            limit_bytes=spec.outbox_bytes,
            pace_s=PACE_S if self.relayed else BEAT_PACE_S,
            beat_s=beat_s(1, spec.timeouts),
        )
        self._replica = spec.replica
        self._lock = threading.RLock()  # an update belongs to one generation
        self._neighbors: dict[int, Neighbor] = {}
        self._ended = False
        self._adopted_at = 0  # last own update when the generation was adopted
        self._unreported: Counter[int] = Counter()  # bytes since the last heartbeat

    # ---- for subclasses

    @abstractmethod
    def destinations(self) -> Sequence[Destination]:
        """Return the destinations of this replica's next update. Any thread."""

    def on_message(self, message: Message) -> None:  # noqa: B027
        """Forward a message of another replica, if the routing does so. Event loop.

        Args:
            message: The first copy of an update, or new progress.
        """

    def on_members(self, generation: int, workers: Mapping[int, str]) -> None:
        """Adopt a membership. Event loop.

        Args:
            generation: Generation of the membership; may be an older one.
            workers: Address of each member's worker.
        """
        with self._lock:
            if self._ended or generation <= self.generation:
                return
            self.generation, self.workers = generation, workers
            self._adopted_at = self.inbox.progress.sequence
            gone = self._neighbors.keys() - workers.keys()
            former = [self._neighbors.pop(replica) for replica in gone]
        for neighbor in former:
            neighbor.end()
        if not self.relayed:
            self.to_scheduler.pace_for(len(workers))
            self.to_scheduler.wake()  # a joining replica waits for the acknowledgement
        self.inbox.wake()

    def lookup(self, origin: int, sequences: Iterable[int]) -> list[Message]:
        """Return kept updates for a replica that lacks them, ascending. Event loop."""
        kept = self.own_kept if origin == self._replica else self.others_kept
        return kept.find(origin, sequences)

    # ---- any thread

    def neighbor(self, replica: int) -> Neighbor | None:
        """Return the queue to another member, made on first use; None if no member."""
        with self._lock:
            known = replica in self.workers and not self._ended
            if known and replica not in self._neighbors:
                worker = self.workers[replica]
                self._neighbors[replica] = Neighbor(self, replica, worker)
            return self._neighbors.get(replica)

    def all_sent(self) -> bool:
        """Whether all updates of this replica have arrived at their destinations."""
        destinations = [self.to_scheduler, *self._neighbors.values()]
        return all(destination.all_sent() for destination in destinations)

    def take_live(self) -> Mapping[str, LiveReport]:
        """Return the field of a request that carries the newest report, if any."""
        with contextlib.suppress(IndexError):
            return {"live": self.live.popleft()}
        return {}

    # ---- training thread

    def has_room(self, nbytes: float = 1) -> bool:
        """Whether an update of `nbytes` bytes may be published now."""
        if self.relayed:
            return self.to_scheduler.outbox.has_room(nbytes)
        # Updates queued for a neighbor are not acknowledged: this bounds them too.
        return self.own_kept.has_room()

    def unsent(self) -> int:
        """Return the bytes of own updates that wait for the slowest destination."""
        origin = self.connection.spec.replica
        return max((d.outbox.bytes_of(origin) for d in self.destinations()), default=0)

    def publish(self, message: Message, *, force: bool = False) -> bool:
        """Queue an update for its destinations; False if there is no room.

        Args:
            message: This replica's next update in sequence.
            force: Ignore the bounds and send the update through the scheduler: the
                replica leaves, and others may hold updates back until it has left.
        """
        with self._lock:
            self.leaving |= force
            if not (force or self.has_room(message.nbytes + MESSAGE_BYTES)):
                return False
            message = message._replace(generation=self.generation)
            self.own_kept.keep(message)
            for destination in [self.to_scheduler] if force else self.destinations():
                destination.offer(message)
            self.inbox.advance(message)  # last: heartbeats must not overtake the update
        if not self.relayed and self.own_kept.nbytes > self.own_kept.limit_bytes // 2:
            self.to_scheduler.wake()  # its answer has the acknowledgements
        return True

    def announce(self, progress: PeerProgress) -> None:
        """Announce the progress of this replica."""
        self.inbox.progress = progress
        step, sequence, interval = progress
        message = Message.control(
            MessageKind.PROGRESS,
            self._replica,
            sequence=sequence,
            step=step,
            payload=interval,
        )
        with self._lock:
            message = message._replace(generation=self.generation)
            for destination in self.destinations():
                destination.announce(message)

    @property
    def queue(self) -> Outbox | RetransmitBuffer:
        """Updates that have not reached the scheduler, or in a mesh all replicas."""
        return self.to_scheduler.outbox if self.relayed else self.own_kept

    def backlog(self) -> str:
        """Describe the unsent updates, for error messages."""
        destination = "the scheduler" if self.relayed else "all others"
        return (
            f"{len(self.queue)} updates ({self.queue.nbytes} bytes) have not reached "
            f"{destination}"
        )

    # ---- event loop

    def keep(self, message: Message) -> None:
        """Keep a delivered update of another replica, unless it was relayed."""
        if self.relayed:
            return
        self.others_kept.keep(message)
        self._unreported[message.origin] += message.nbytes + MESSAGE_BYTES
        # The origin can publish `outbox_bytes` at most without an acknowledgement.
        if self._unreported[message.origin] > self.connection.spec.outbox_bytes // 4:
            self.to_scheduler.wake()

    def acknowledgement(self) -> Mapping[str, Any]:
        """Return the fields of a request to the scheduler, besides progress."""
        if self.relayed:
            return {}
        self._unreported.clear()
        with self.inbox.changed:
            received = (
                {} if self.inbox.awaits_snapshot else self.inbox.received.all_complete()
            )
        return {
            "acknowledgement": {
                "generation": self.generation,
                "adopted_at": self._adopted_at,
                "received": list(received.items()),
            }
        }

    def on_answer(self, answer: Mapping[str, Any]) -> None:
        """Process progress and acknowledgements of other replicas in an answer."""
        if self.relayed:
            return
        for replica, *progress in answer.get("peers", ()):
            if replica != self._replica:
                self.inbox.record_progress(replica, PeerProgress(*progress))
        if self.own_kept.acknowledge(answer.get("received_by_all", 0)):
            self.inbox.wake()
        if self.own_kept.nbytes > self.own_kept.limit_bytes // 2:
            self.to_scheduler.wake()

    def end(self) -> None:
        """Send nothing more."""
        self._ended = True
        for neighbor in list(self._neighbors.values()):
            neighbor.end()


class RelayRouting(Routing):
    """Routes updates to the scheduler, which relays them to all other replicas.

    This is the option ``routing="plain"``. One replica with a full queue at the
    scheduler holds up the updates of all replicas, see `RunState.publish`.
    """

    relayed = True

    @override
    def destinations(self) -> Sequence[Destination]:
        return [self.to_scheduler]

    @override
    def publish(self, message: Message, *, force: bool = False) -> bool:
        # Never lowered: small updates may follow before a large update is requested.
        recent_bytes = RECENT * (message.nbytes + MESSAGE_BYTES)
        spec = self.connection.spec
        limit_bytes = spec.outbox_bytes + min(recent_bytes, spec.inbox_bytes)
        self.own_kept.limit_bytes = max(self.own_kept.limit_bytes, limit_bytes)
        return super().publish(message, force=force)


class MergedRouting(RelayRouting):
    """Routes updates to the scheduler, which sends their sums to all replicas."""

    merges = True


# Scaling up by 32 workers makes 32 generations within a second, while frames of the
# earliest are still in flight. A generation of 128 members takes 1 KB.
GENERATIONS_KEPT = 32


class TopologyHistory:
    """The topologies of the latest generations that one replica has received.

    An update carries the generation in which its origin sent it, and follows that
    generation's tree to the end: each member of that generation gets the update once,
    even if forwarding replicas have adopted a later generation. Before the first
    generation there are no members to send to.

    All methods belong to the event loop; `current` may be read from any thread.

    Attributes:
        current: Topology of the highest generation received.

    Example:
        >>> topologies = TopologyHistory()
        >>> topologies.adopt(MeshTopology(1, (0, 1)))
        >>> topologies.adopt(MeshTopology(2, (0, 1, 2)))
        >>> topologies.for_generation(1).members, topologies.for_generation(9).members
        ((0, 1), (0, 1, 2))
    """

    current: MeshTopology

    def __init__(self) -> None:
        self.current = MeshTopology(0, ())
        self._known: dict[int, MeshTopology] = {}

    def adopt(self, topology: MeshTopology) -> None:
        """Add the topology of a generation.

        Membership messages may arrive out of order: an older generation is kept for
        frames that carry it and changes nothing else. Only the first topology of a
        generation counts.
        """
        self._known.setdefault(topology.generation, topology)
        while len(self._known) > GENERATIONS_KEPT:
            del self._known[min(self._known)]
        if topology.generation > self.current.generation:
            self.current = topology

    def for_generation(self, generation: int) -> MeshTopology:
        """Return the topology along which to forward updates of a generation.

        A generation that is too old, or not received yet, falls back to the current
        one. An update may then reach a replica twice or not at all. Both are safe:
        receivers drop duplicates and request missing updates. Forwarding also ends:
        **only the first copy of an update may be forwarded**, so each replica forwards
        it once; otherwise an update could circle between two replicas that follow
        different trees.
        """
        return self._known.get(generation, self.current)


class MeshRouting(Routing):
    """Routes updates between replicas along one tree per origin, see `MeshTopology`.

    Updates of others are forwarded while there is room and dropped otherwise; replicas
    request missing updates later. Thus replicas never wait for each other in a cycle.

    Attributes:
        forwards_dropped: Updates of others that were not forwarded.
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
        return [n for child in children if (n := self.neighbor(child)) is not None]

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
            neighbor = self.neighbor(child)
            if neighbor is None:
                continue
            if message.kind == MessageKind.PROGRESS:
                neighbor.announce(message)
            elif self._may_forward(message):
                neighbor.offer(message)
            else:
                self.forwards_dropped += 1

    def _may_forward(self, message: Message) -> bool:
        queues = [neighbor.outbox for neighbor in list(self._neighbors.values())]
        waiting = sum(queue.nbytes - queue.bytes_of(self._replica) for queue in queues)
        limit = self.connection.spec.inbox_bytes
        return not waiting or waiting + message.nbytes + MESSAGE_BYTES <= limit


# Routings by the name of the option.
ROUTINGS: dict[str, type[Routing]] = {
    "plain": RelayRouting,
    "merged": MergedRouting,
    "mesh": MeshRouting,
}
