"""State and decisions of one run: membership, relay queues, barriers and leases.

A request is a method call; its effects are the messages in `RunState.outboxes` and the
events in `RunState.events`. No I/O, no clock, no thread.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from daskdl.channel.leasing import (
    DynamicLeasing,
    Finished,
    Lease,
    Leasing,
    RunSpec,
    StaticPartition,
    SyncPoint,
)
from daskdl.channel.merging import along_tree, fits_a_sum
from daskdl.channel.protocol import (
    INT64_MAX,
    MESSAGE_BYTES,
    UNSENT_BYTES,
    WORK,
    BarrierKind,
    GoneError,
    Message,
    MessageKind,
    PeerProgress,
    Work,
    read,
)
from daskdl.channel.transport import RECENT, Outbox
from daskdl.config import Bound, Timeouts
from daskdl.errors import DaskDLError, RunError, WaitTimeoutError, shown

AT_FIRST = PeerProgress()
# Replicas that load the state of one donor at the same time. With two, 64 replicas join
# one that trains in four rounds, as each that has joined is a donor itself.
MAX_READERS = 2


@dataclass
class MemberState:
    """One replica, from its assignment to a worker until the run closes.

    Attributes:
        worker: Address of its worker.
        active: Whether the replica trains, so that barriers wait for it: initial
            replicas from the beginning, joining ones after `activate`.
        joined: Whether the replica's task has reached the scheduler.
        gone: Whether the replica has left or failed, for good.
        heartbeat_at: Time of the last heartbeat, seconds on the scheduler's clock.
        progress: Last known progress.
        sent: Progress that the others have been sent.
        steps: Last known number of steps that it has taken.
        donor: While it joins, the replica whose state it loads; None: none yet.
        contained: While it joins, by origin, the last update in its snapshot; None: it
            has not said so yet.
        generation: In a mesh, membership that the replica has adopted; -1: none yet.
        adopted_at: Its last update when it adopted that membership, or a later one.
        received: By origin, the update up to which all are received or not needed.
        joined_at: Time at which it joined, seconds on the scheduler's clock.
        gone_at: Time at which it left or failed, on the same clock.
        why: Why it has gone, or is about to go.
        failed: Whether it was lost, or has raised an error.
        token: Sent with each request of the replica; None before the first request.
        needed_step: It waits until all others have reached this step; 0: it does not.
    """

    worker: str
    active: bool
    joined: bool = False
    gone: bool = False
    heartbeat_at: float = 0.0
    progress: PeerProgress = AT_FIRST
    sent: PeerProgress = AT_FIRST
    steps: int = 0
    donor: int | None = None
    contained: Mapping[int, int] | None = None
    generation: int = -1
    adopted_at: int = 0
    received: dict[int, int] = field(default_factory=dict)
    joined_at: float = math.nan
    gone_at: float = math.nan
    why: str = ""
    failed: bool = False
    token: int | None = None
    needed_step: int = 0

    def advance(self, *reached: int) -> None:
        """Raise the step, sequence and interval; late messages change nothing."""
        self.progress = PeerProgress(*map(max, self.progress, reached))

    def acknowledge(self, received: Mapping[int, int]) -> int:
        """Record the update of each origin up to which all are received.

        Returns:
            Number of updates that were not known to be received.
        """
        before = sum(self.received.values())
        for origin, sequence in received.items():
            self.received[origin] = max(self.received.get(origin, 0), sequence)
        return sum(self.received.values()) - before


class Membership:
    """The replicas of one run."""

    generation: int
    replicas: dict[int, MemberState]

    def __init__(self, workers: Mapping[int, str]) -> None:
        self.generation = 0
        self.replicas = {r: MemberState(w, active=True) for r, w in workers.items()}
        self._started = False

    def _those(self, chosen: Callable[[MemberState], bool]) -> list[int]:
        return sorted(r for r, member in self.replicas.items() if chosen(member))

    @property
    def present(self) -> list[int]:
        """Replicas that joined and have not gone, ascending."""
        return self._those(lambda member: member.joined and not member.gone)

    @property
    def expected(self) -> list[int]:
        """Replicas for which barriers wait, whether joined yet or not; ascending."""
        return self._those(lambda member: member.active and not member.gone)

    @property
    def training(self) -> list[int]:
        """Replicas that are both expected and present, ascending."""
        return self._those(
            lambda member: member.active and member.joined and not member.gone
        )

    @property
    def absent(self) -> list[int]:
        """Initial replicas that have not joined yet, ascending."""
        return self._those(
            lambda member: member.active and not member.joined and not member.gone
        )

    @property
    def not_active(self) -> list[int]:
        """Replicas that were assigned later and are not active yet, ascending."""
        return self._those(lambda member: not member.active and not member.gone)

    @property
    def gone(self) -> dict[int, int]:
        """Last update of each replica that left or failed."""
        members = self.replicas.items()
        return {r: member.progress.sequence for r, member in members if member.gone}

    @property
    def started(self) -> bool:
        """Whether all initial replicas have joined; stays true."""
        self._started = self._started or not self.absent
        return self._started

    def assign(self, worker: str) -> int:
        """Add a replica on a worker; return its number."""
        replica = max(self.replicas) + 1
        self.replicas[replica] = MemberState(worker, active=False)
        return replica

    def assigned_to(self, worker: str) -> list[int]:
        """Replicas of a worker that have not gone, ascending."""
        return self._those(lambda member: member.worker == worker and not member.gone)

    def is_here(self, replica: int) -> bool:
        """Whether the replica exists and has not gone."""
        return replica in self.replicas and not self.replicas[replica].gone

    def authenticate(self, replica: int, token: int) -> None:
        """Check the token of a request; the first request of a replica sets it.

        A task that Dask runs again, and anybody else, has another token.
        """
        member = self.replicas.get(replica)
        if member is None:
            raise ValueError(f"replica {replica} is not a member of this run")
        if member.token is None:
            member.token = token
        if member.token != token:
            raise ValueError(f"the request is not from replica {replica}")

    def taking_part(self, replica: int) -> MemberState:
        """Return a replica that joined and has not gone.

        Raises:
            GoneError: If the replica has left or failed.
            ValueError: If the replica has not joined.
        """
        member = self.replicas.get(replica)
        if member is not None and member.gone:
            raise GoneError(f"replica {replica} is no longer a member of this run")
        if member is None or not member.joined:
            raise ValueError(f"replica {replica} is not a member of this run")
        return member

    def timed_out(self, before: float) -> list[int]:
        """Replicas without a heartbeat since `before`; none before the start."""
        if not self.started:
            return []
        return [r for r in self.present if self.replicas[r].heartbeat_at < before]

    def donor_of(self, replica: int) -> int | None:
        """The donor for a joining replica; None while all serve `MAX_READERS` others.

        Of the replicas that train, it is the one with fewest readers, and among those
        the one with most steps.
        """
        readers = Counter(
            self.replicas[r].donor for r in self.not_active if r != replica
        )
        free = [r for r in self.training if readers[r] < MAX_READERS]
        progress = {r: self.replicas[r].progress.step for r in free}
        return min(free, key=lambda r: (readers[r], -progress[r]), default=None)

    def describe(self, replicas: Iterable[int], now: float) -> str:
        """Describe replicas: worker, progress, age of the heartbeat; may be empty."""
        described = []
        for replica in replicas:
            member = self.replicas[replica]
            progress = "which has not joined"
            if member.joined:
                progress = (
                    f"last seen at step {member.steps}, update "
                    f"{member.progress.sequence}, "
                    f"{max(now - member.heartbeat_at, 0.0):.1f} s ago"
                )
            described.append(f"replica {replica} on {member.worker}, {progress}")
        return "; ".join(described)


def _phase(member: MemberState) -> str:
    if member.gone:
        return "gone"
    if not member.joined:
        return "starting"
    return "training" if member.active else "joining"


def _nbytes(messages: Iterable[Message]) -> int:
    return sum(message.nbytes + MESSAGE_BYTES for message in messages)


def _nbytes_alone(messages: Iterable[Message]) -> int:
    """Bytes of the updates that no sum can contain."""
    return _nbytes(
        m for m in messages if m.kind == MessageKind.UPDATE and not fits_a_sum(m)
    )


def _by_origin(messages: Iterable[Message]) -> Counter[int]:
    return Counter(m.origin for m in messages if m.kind == MessageKind.UPDATE)


@dataclass
class BarrierState:
    """A barrier at which some replicas have arrived.

    The payload of a replica that fails after its arrival stays. The barrier does not
    wait for a replica that failed before.

    Attributes:
        payloads: Payloads for all replicas, by replica.
        client_payloads: Payloads for the client alone, by replica.
        kinds: Kinds with which the replicas arrived.
        gone: Last update of each replica that left or failed before the barrier was
            complete, the same for all readers. None: the barrier is not complete.
        passed_on: With ``AGREE`` in a relay, number of the message that follows all
            updates which are not held back.
        counted: Counters of the run, by name; see `BarrierResult`.
    """

    payloads: dict[int, Any] = field(default_factory=dict)
    client_payloads: dict[int, bytes] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    gone: Mapping[int, int] | None = None
    passed_on: int = 0
    counted: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The kind with which all replicas arrived; ``ROUND`` if the kinds differ.

        Replicas at a ``ROUND`` may meet others with ``AGREE``; no other kinds mix.
        """
        return next(iter(self.kinds)) if len(self.kinds) == 1 else BarrierKind.ROUND

    @property
    def complete(self) -> bool:
        """Whether the barrier waits for no more replicas; stays true."""
        return self.gone is not None


# What one replica may publish without room, or while updates are held back: this many
# updates of any size, and more up to this many bytes. A leaving replica sends its
# outbox, which is 1 MiB or one update of any size, and a last update of any size, each
# twice if an answer is lost. The bounds limit a replica that only claims to leave.
EXCESS_UPDATES = 4
EXCESS_BYTES = 16 * 2**20
UPDATES = MessageKind.UPDATE, MessageKind.SUM  # what can be merged
MERGEABLE = *UPDATES, MessageKind.PROGRESS  # what may wait for others
# What names a step that its origin has completed.
PROGRESSING = MessageKind.UPDATE, MessageKind.PROGRESS, MessageKind.JOINED
# What may be sent before updates that wait: none of it depends on them.
OVERTAKING = MessageKind.STOP, MessageKind.MEMBER, MessageKind.JOINED
MAX_NAMED = 8  # gone replicas in a message, which fits a screen


class RunState:
    """State of one run; changed only by the methods here.

    Attributes:
        timeouts: Bounds on waiting, chosen by the client.
        members: Replicas of the run.
        outboxes: Queue of messages to each present replica.
        events: Events for the client, oldest first; see `post` and `take_events`.
        leases: Leases of each phase ("train", "validation").
        barriers: Open barriers, by key; a key may be used again.
        stopped: Reason why the run was stopped; None while it runs.
        deserted: Whether it was stopped because no replica was left to train.
        failed: Whether it was stopped by an error.
        refused: Number of messages that could not be read.
        epoch: Current epoch, counted from 0.
        interval: Current sync interval, counted from 0 over all epochs.
        report: The last epoch's end: "payloads", each ``[replica, payload]``, and the
            work "departed"; empty before the first.
        holding: Whether updates are held back, see `_complete`.
        fetching: Number of heartbeats of replicas to which a sum was on its way.
        waiting: Updates and progress that wait for others, to be sent with them, and
            other messages that must not overtake these. The first may be a sum of
            earlier updates. Replaced by `send_waiting` and `keep_sum`.
        on_waiting: Called when the first of these begins to wait: `send_waiting` must
            be called in `RunSpec.merge_s` seconds.
        on_due: Called when they need not wait any longer, see `due`, and when they
            should be merged, see `crowded`.
    """

    spec: RunSpec
    timeouts: Timeouts
    members: Membership
    outboxes: dict[int, Outbox]
    events: list[dict[str, Any]]
    leases: Mapping[str, Leasing]
    barriers: dict[str, BarrierState]
    stopped: str | None
    deserted: bool
    failed: bool
    refused: int
    epoch: int
    interval: int
    report: Mapping[str, Any]
    holding: bool
    fetching: int
    waiting: list[Message]
    on_waiting: Callable[[], object]
    on_due: Callable[[], object]

    def __init__(self, spec: RunSpec, now: float = 0.0) -> None:
        self.spec = spec
        self.timeouts = Timeouts(**spec.timeouts)
        self.members = Membership(spec.replicas)
        self.outboxes = {}
        self.events = []
        kind = StaticPartition if spec.synchronous else DynamicLeasing
        trained = spec.seed, spec.epochs_before, spec.intervals
        self.leases = {
            phase: kind(sizes, *(trained if phase == "train" else ()))
            for phase, sizes in spec.sizes.items()
        }
        self.barriers = {}
        self.stopped = None
        self.deserted = self.failed = False
        self.refused = 0
        self.epoch = spec.first_epoch
        self.interval = 0
        self.report = {}
        self.holding = False
        self.fetching = 0
        self.on_waiting = self.on_due = lambda: None
        self.waiting = []
        self._unmerged_bytes = 0  # of what waits, apart from the sum
        self._alone_bytes = 0  # of the updates among it that no sum can contain
        # By origin, number of updates in the sum that waits, and the latest step.
        self._summed, self._summed_steps = Counter[int](), Counter[int]()
        self._urgent = 0  # so many messages of `waiting` need not wait any longer
        self._is_held_up = False  # what waits is due, but for messages on their way
        self._sums = 0  # sent so far
        # By replica, number of messages in its queue so far with each sum that has
        # updates of the replica itself, and the number of these updates.
        self._echoes: dict[int, deque[tuple[int, int]]] = {}
        # By joining replica, when its queue last moved or had room, and the number of
        # messages that had left it.
        self._moved: dict[int, tuple[float, int]] = {}
        self._acknowledged = 0  # updates, by each replica of a mesh
        self._agreements = 0  # completed ``AGREE`` barriers
        self._opened_at = self._enough_at = now
        self._held: list[Message] = []  # updates held back, of leaving replicas
        # By origin, number and bytes of updates accepted without room, since held ones
        # were passed on: all had received the earlier ones by then.
        self._excess: dict[int, tuple[int, int]] = {}
        self._idle: dict[int, Any] = {}  # payloads of replicas that wait for a lease
        self._interval_began_at: float | None = None
        # Work over finished leases of this epoch, by replica and phase.
        self._work: dict[int, dict[str, Work]] = {}
        resumed = spec.intervals.resumed
        self._departed_before = () if resumed is None else resumed.departed
        self._refused_before = 0  # before this epoch
        self._departed: dict[int, str] = {}  # gone replicas that trained, described
        self._all_retired = True
        self._ended = False  # a replica has completed the run

    def is_former(self, replica: int) -> bool:
        """Whether the run lost a replica before it opened again.

        Replicas are then numbered on from all earlier ones.
        """
        return replica < min(self.spec.replicas)

    @property
    def has_enough(self) -> bool:
        """Whether at least `min_replicas` replicas are expected to train."""
        return len(self.members.expected) >= self.spec.min_replicas

    @property
    def workers_wanted(self) -> int:
        """Workers that would have work: for as many replicas as an epoch has leases.

        The client of a deserted run waits for some, to continue on them.
        """
        if self._ended or (self.stopped is not None and not self.deserted):
            return 0
        sizes, initial = self.spec.sizes["train"], self.spec.replicas
        leases = sum(max(1, -(-rows // sizes.lease_rows)) for rows in sizes.rows)
        on_each = len(initial) / len(set(initial.values()))
        return math.ceil(leases / on_each)

    # ---- events for the client

    def post(self, kind: str, **fields: Any) -> None:
        """Queue an event for the client."""
        self.events.append({"kind": kind, **fields})

    def take_events(self) -> list[dict[str, Any]]:
        """Return and clear the events posted since the last call."""
        events, self.events = self.events, []
        return events

    # ---- membership

    def join(self, replica: int, now: float, outbox: Outbox) -> None:
        """Add a replica to the members, with an empty queue of messages to it.

        A relay withholds updates from a joining replica, see `subscribe`.
        """
        members = self.members
        member, started = members.replicas[replica], members.started
        if started:
            # The snapshot contains the earlier updates.
            member.acknowledge(self._passed_on())
        else:
            # Replicas that wait for the start send no heartbeat meanwhile.
            for initial in members.replicas.values():
                initial.heartbeat_at = now
        members.generation += 1
        member.joined, member.heartbeat_at, member.joined_at = True, now, now
        self.outboxes[replica] = outbox
        if started:
            if self.spec.relayed:
                outbox.withhold()
            outbox.append(self._membership())
            self._send_change(replica, member.worker)
        elif members.started:
            self._send(self._membership())

    def topology(self) -> tuple[int, list[tuple[int, str]]]:
        """The generation, and each present replica with its worker."""
        replicas = self.members.replicas
        present = [(r, replicas[r].worker) for r in self.members.present]
        return self.members.generation, present

    def activate(self, replica: int, step: int) -> None:
        """Let a joining replica train, once it has the common state."""
        member = self.members.replicas[replica]
        if member.active:  # a retried request
            return
        if self.outboxes[replica].withheld is not None:
            self._release(replica)
        member.active, member.contained = True, None
        self._moved.pop(replica, None)
        member.progress = member.progress._replace(step=step)
        self._send(Message.control(MessageKind.JOINED, replica, step=step), but=replica)
        self.post("joined", replica=replica, worker=member.worker)

    def lose(self, replica: int, why: str, now: float) -> None:
        """Remove a failed replica and report the reason to the client."""
        what = f"{self.members.describe([replica], now)}: {why}"
        if replica in self.members.expected:
            self._departed[replica] = what
            self._all_retired = False
        self.post("lost", replica=replica, summary=f"lost {what}")
        self.remove(replica, f"lost: {why}", now, failed=True)
        self._give_up_if_deserted()

    def leave(self, replica: int, now: float, *, retires: bool = False) -> None:
        """Remove a replica whose task ends."""
        members = self.members
        trained = replica in members.expected
        if not members.is_here(replica):  # failed before: its worker is free again
            self.post("worker", worker=members.replicas[replica].worker)
        elif retires:
            what = f"{members.describe([replica], now)}: it retired with its worker"
            if trained:
                self._departed[replica] = what
            self.post("retired", replica=replica, summary=what)
        else:
            self._ended |= trained
        why = "retired with its worker" if retires else "left: its task has ended"
        self.remove(replica, why, now)
        if members.started and not members.expected:
            self.post("over", waiting=members.not_active)
            self._give_up_if_deserted()

    def remove(
        self,
        replica: int,
        why: str,
        now: float,
        *,
        failed: bool = False,
    ) -> None:
        """Remove a replica: its leases are free, and no barrier waits for it."""
        if not self.members.is_here(replica):
            return
        member, started = self.members.replicas[replica], self.members.started
        member.gone, member.gone_at = True, now
        member.why = member.why or shown(why, 500)
        member.failed |= failed
        self.members.generation += 1
        self.outboxes.pop(replica, None)
        self._echoes.pop(replica, None)
        self._moved.pop(replica, None)
        for leases in self.leases.values():
            leases.lose(replica)
        self._idle.pop(replica, None)
        step = member.progress.step
        self._send(Message.control(MessageKind.FAILED, replica, step=step))
        if started:
            self._send_change(replica, None)
        else:
            self._send(self._membership())
        self._release_all()
        self._complete_barriers()

    def _send(self, message: Message, but: int | None = None) -> None:
        if message.kind in OVERTAKING:
            self._deliver(message, but)
            return
        # Those that were held back may be in steps of an earlier grid.
        merges = self.spec.merges and not self._held
        if merges and (self.waiting or message.kind in MERGEABLE):
            self.waiting.append(message)
            if message.kind == MessageKind.UPDATE:
                for box in self.outboxes.values():
                    if box.withheld is not None:
                        box.append(message)
            self._unmerged_bytes += message.nbytes + MESSAGE_BYTES
            self._alone_bytes += _nbytes_alone([message])
            if len(self.waiting) == 1:
                self.on_waiting()
            if message.kind not in MERGEABLE:
                self.on_due()
            return
        self.send_waiting()  # it must not overtake them
        self._deliver(message, but)

    def _deliver(self, message: Message, but: int | None) -> None:
        self._note_sent([message])
        for replica, box in self.outboxes.items():
            if replica != but:
                box.append(message)

    def _note_sent(self, messages: Iterable[Message]) -> None:
        """Note the progress in messages that the others are sent."""
        for message in messages:
            if message.kind in PROGRESSING:
                member = self.members.replicas[message.origin]
                has_interval = message.kind == MessageKind.PROGRESS
                interval = message.payload if has_interval else -1
                reached = message.step, message.sequence, interval
                member.sent = PeerProgress(*map(max, member.sent, reached))

    @property
    def due(self) -> bool:
        """Whether what waits should be sent now, as it waits in vain or is needed.

        That is the case if each replica that trains has an update in it, but for those
        that have completed the sync interval and send no more; if the wait of a replica
        for the slowest one would end; if it takes the room of another update; if a
        message must follow it; and if replicas have met at a barrier, or one joins. It
        is not while earlier messages to most replicas are on their way: it would only
        follow them, and what is published meanwhile can be merged with it.
        """
        self._is_held_up = False
        if not self.waiting or not self._may_go():
            return False
        self._is_held_up = self._is_congested()
        return not self._is_held_up

    def _is_congested(self) -> bool:
        """Whether messages to more than half of the replicas are on their way."""
        boxes = [box for box in self.outboxes.values() if box.withheld is None]
        return 2 * sum(box.nbytes > UNSENT_BYTES for box in boxes) > len(boxes)

    def relieve(self) -> None:
        """Note that messages have arrived."""
        if self._is_held_up and not self._is_congested():
            self._is_held_up = False
            self.on_due()

    def _may_go(self) -> bool:
        """Whether what waits is due, whatever is on its way; see `due`."""
        if self._urgent:
            return True
        kinds = {message.kind for message in self.waiting}
        origins = self._summed.keys() | _by_origin(self.waiting).keys()
        busy = {replica for replica, _ in self._busy()}
        return (
            not kinds.issubset(MERGEABLE)
            or (bool(busy) and busy <= origins)
            or self._ends_a_wait()
        )

    @property
    def crowded(self) -> bool:
        """Whether updates that wait should be merged now, and their sum wait instead.

        That is the case if they fill half of a queue, as much as a sum may take.
        """
        if 2 * self._unmerged_bytes < self.spec.queue_bytes:
            return False
        return sum(m.kind in UPDATES for m in self.next_waiting()) > 1

    def _busy(self) -> list[tuple[int, PeerProgress]]:
        """Progress of the replicas that have not completed the sync interval."""
        return [
            (replica, progress)
            for replica, progress in self.training_progress()
            if progress.interval < self.interval
        ]

    def _ends_a_wait(self) -> bool:
        """Whether the wait of a replica ends with what was published and not sent."""
        replicas = self.members.replicas
        members = replicas.values()
        needed = {m.needed_step for m in members if m.needed_step and not m.gone}
        if not needed:  # nearly always
            return False
        slowest = min((reached.step for _, reached in self._busy()), default=math.inf)
        sent = min(
            (
                replicas[r].sent.step
                for r in self.members.training
                if replicas[r].sent.interval < self.interval
            ),
            default=math.inf,
        )
        return any(sent < step <= slowest for step in needed)

    def next_waiting(self) -> list[Message]:
        """Return what of `waiting` can be sent at once: up to other messages."""
        sent = list(itertools.takewhile(lambda m: m.kind in MERGEABLE, self.waiting))
        return sent or self.waiting[:1]

    def keep_sum(self, total: Message, count: int) -> None:
        """Let a sum wait in place of the updates in it.

        Args:
            total: The sum of all updates among the first `count` of `waiting`.
            count: Number of messages, see `next_waiting`.
        """
        summed, later = self.waiting[:count], self.waiting[count:]
        self._summed += _by_origin(summed)
        for message in summed:
            if message.kind == MessageKind.UPDATE:
                self._summed_steps |= Counter({message.origin: message.step})
        progress = {m.origin: m for m in summed if m.kind == MessageKind.PROGRESS}
        unmerged = [*progress.values(), *later]
        self._unmerged_bytes = _nbytes(unmerged)
        self._alone_bytes = _nbytes_alone(unmerged)
        self.waiting = [total, *unmerged]
        self._urgent = len(self.waiting) if self._urgent else 0

    def send_waiting(self, together: Sequence[Message] = (), count: int = 0) -> None:
        """Send updates that wait for others, and what waits with them.

        Even the origins of its updates get the sum. Replicas from which updates are
        withheld do not: see `subscribe`.

        Args:
            together: The updates among the first `count` of `waiting`, merged. By
                default all that wait are sent one by one.
            count: Number of messages, see `next_waiting`.
        """
        if not self.waiting:
            return
        left = len(self.waiting) - count if count else 0
        while len(self.waiting) > left:
            sent = self.waiting[:count] if count else self.next_waiting()
            self.waiting = self.waiting[len(sent) :]
            self._urgent = max(self._urgent - len(sent), 0)
            if sent[0].kind in MERGEABLE:
                self._send_together(sent, together)
            else:
                self._deliver(sent[0], None)
        self._unmerged_bytes = _nbytes(self.waiting)
        self._alone_bytes = _nbytes_alone(self.waiting)
        if self.waiting:
            self.on_waiting()
        self._release_all()

    def _send_together(
        self, sent: Sequence[Message], together: Sequence[Message]
    ) -> None:
        updates = [m for m in sent if m.kind in UPDATES]
        together = together or updates
        by_origin = self._summed + _by_origin(sent)
        self._note_sent(sent)
        for origin, step in self._summed_steps.items():
            member = self.members.replicas[origin]
            member.sent = member.sent._replace(step=max(member.sent.step, step))
        self._summed, self._summed_steps = Counter(), Counter()
        progress = {m.origin: m for m in sent if m.kind == MessageKind.PROGRESS}
        sums = [self._along_tree(m) for m in together if m.kind == MessageKind.SUM]
        for replica, box in self.outboxes.items():
            chosen: list[Message] = []
            if box.withheld is None:
                worker = self.members.replicas[replica].worker
                singles = [m for m in together if m.kind != MessageKind.SUM]
                chosen = [total[worker] for total in sums] + singles
            for message in (*chosen, *progress.values()):
                is_sum = message.kind in (MessageKind.SUM, MessageKind.SUM_AT)
                if is_sum or message.origin != replica:
                    box.append(message)
            if sums and by_origin[replica]:
                echoes = self._echoes.setdefault(replica, deque(maxlen=RECENT))
                echoes.append((box.added, by_origin[replica]))

    def _along_tree(self, total: Message) -> dict[str, Message]:
        workers = dict[str, int]()
        for replica, box in sorted(self.outboxes.items()):
            if box.withheld is None:
                workers.setdefault(self.members.replicas[replica].worker, replica)
        self._sums += 1
        total = total._replace(sequence=self._sums)
        return along_tree(total, workers, self.spec.sum_fan_out)

    def queued_sum(self, replica: int, number: int) -> Message:
        """Return a sum that a replica has not got yet, and may fetch elsewhere.

        Raises:
            GoneError: If it is not in the queue of the replica.
        """
        for message in self.outboxes[replica].head(INT64_MAX):
            if message.kind == MessageKind.SUM_AT and message.sequence == number:
                return message
        raise GoneError(f"the sum {number} does not wait for replica {replica}")

    def _coming_back(self, origin: int) -> int:
        """Number of updates that wait, or that their origin has not got in a sum."""
        if origin not in self.outboxes or not self.spec.merges:
            return 0
        echoes, arrived = self._echoes.get(origin, ()), self.outboxes[origin].removed
        on_their_way = sum(count for added, count in echoes if added > arrived)
        waiting = self._summed[origin] + _by_origin(self.waiting)[origin]
        return on_their_way + waiting

    def _has_room(self, message: Message) -> bool:
        """Whether all queues have room for an update.

        A replica has to keep its updates until they have come back to it in sums, so
        there is room for few of them. What waits needs the room of one sum in a queue,
        and of each update that no sum can contain; one that withholds updates has each
        of them.
        """
        origin, nbytes = message.origin, message.nbytes + MESSAGE_BYTES
        if self._coming_back(origin) >= RECENT // 2:
            return False
        most = self.spec.queue_bytes
        sum_bytes = nbytes
        if self.waiting:
            single_bytes = nbytes + _nbytes(self.waiting)
            alone_bytes = self._alone_bytes + _nbytes_alone([message])
            sum_bytes = alone_bytes + min(single_bytes - alone_bytes, most // 2)
            if max(self._unmerged_bytes + nbytes, sum_bytes) > most:
                return False
        return all(
            box.has_room(sum_bytes if box.withheld is None else nbytes)
            for replica, box in self.outboxes.items()
            if replica != origin or self.spec.merges  # a sum goes to all
        )

    def _membership(self) -> Message:
        return Message.control(MessageKind.MEMBERS, payload=self.topology())

    def _send_change(self, replica: int, worker: str | None) -> None:
        """Tell all members that one has joined or gone.

        With the whole membership in each message, what the scheduler sends would grow
        with the cube of the number of replicas that join together.
        """
        number, kind = self.members.generation, MessageKind.MEMBER
        self._send(Message.control(kind, replica, sequence=number, payload=worker))

    # ---- updates and progress

    def publish(
        self,
        origin: int,
        messages: Iterable[Message],
        progress: PeerProgress,
        *,
        leaves: bool = False,
        needed_step: int = 0,
    ) -> int:
        """Queue a replica's updates for all others, in order, while there is room.

        An update is accepted for all other replicas or for none, so that it reaches all
        or none even if its origin fails now. One replica whose queue is full therefore
        holds up the updates of all the others.

        Args:
            origin: The replica.
            messages: Its next updates.
            progress: Its progress with these.
            leaves: The replica leaves: accept its last updates without room, up to
                `EXCESS_UPDATES` and, beyond these, up to `EXCESS_BYTES`.
            needed_step: The replica waits until all others have reached this step; 0:
                it does not wait.

        Returns:
            Number of accepted updates; the replica has to retransmit the rest.
        """
        messages = list(messages)
        accepted = self._accept(origin, messages, leaves=leaves)
        member = self.members.replicas[origin]
        member.needed_step = needed_step
        if accepted == len(messages):
            self._announce(origin, progress)
        if self.waiting:
            # If it is crowded, merging makes room.
            if accepted < len(messages) and not self.crowded:
                self._urgent = len(self.waiting)
            if self.due or self.crowded:
                self.on_due()
        self._release_all()
        return accepted

    def _accept(self, origin: int, messages: Sequence[Message], *, leaves: bool) -> int:
        """Accept updates of a replica while there is room; return their number."""
        member = self.members.replicas[origin]
        last = member.progress.sequence
        for message in messages if self.spec.relayed else ():
            if message.sequence > last + 1:  # a retransmitted one may be earlier
                raise ValueError(
                    f"replica {origin} sent update {message.sequence} after update "
                    f"{last}: updates are missing in between"
                )
            last = max(last, message.sequence)
        accepted = 0
        for message in messages:
            nbytes = message.nbytes + MESSAGE_BYTES
            if self.holding or not self._has_room(message):
                count, total = self._excess.get(origin, (0, 0))
                full = count >= EXCESS_UPDATES and total >= EXCESS_BYTES
                if full or not (self.holding or leaves):
                    return accepted
                self._excess[origin] = count + 1, total + nbytes
            if self.holding:
                self._held.append(message)
            else:
                self._send(message, but=origin)
            member.advance(message.step, message.sequence, -1)
            accepted += 1
        return accepted

    def _announce(self, origin: int, progress: PeerProgress) -> None:
        """Announce progress of a replica that no update has announced."""
        member = self.members.replicas[origin]
        before = member.progress
        member.advance(progress.step, 0, progress.interval)
        if member.progress != before:  # not announced by an update
            step, sequence, interval = member.progress
            announced = Message.control(
                MessageKind.PROGRESS,
                origin,
                sequence=sequence,
                step=step,
                payload=interval,
            )
            self._send(announced, but=origin)

    def acknowledge(
        self,
        origin: int,
        progress: PeerProgress,
        generation: int,
        adopted_at: int,
        received: Mapping[int, int],
    ) -> bool:
        """Record the progress and received updates of a replica in a mesh.

        Returns:
            Whether the replica has adopted a newer membership.
        """
        member = self.members.replicas[origin]
        member.advance(*progress)
        self._acknowledged += member.acknowledge(received)
        if generation <= member.generation:
            return False
        member.generation, member.adopted_at = generation, adopted_at
        return True

    def received_by_all(self, origin: int) -> int:
        """The update up to which all other replicas have an origin's updates."""
        replicas = self.members.replicas
        others = (r for r in self.members.present if r != origin)
        return min(
            (replicas[r].received.get(origin, 0) for r in others),
            default=replicas[origin].progress.sequence,
        )

    @property
    def moved(self) -> int:
        """What grows while messages arrive at other replicas.

        In a mesh it is the number of updates that were received; in a relay the number
        of messages that have left its queues, and of heartbeats with the note that a
        sum is on its way.
        """
        if not self.spec.relayed:
            return self._acknowledged
        return self.fetching + sum(box.removed for box in self.outboxes.values())

    def training_progress(self) -> list[tuple[int, PeerProgress]]:
        """Progress of each replica that trains."""
        return [(r, self.members.replicas[r].progress) for r in self.members.training]

    # ---- the snapshot of a joining replica

    def can_cut(self, generation: int) -> bool:
        """Whether `cut` is final for a replica that joined in this generation.

        In a mesh, all replicas that train first have to adopt the new membership, by
        which they send to the joining replica. A relay sends to it at once.
        """
        replicas = self.members.replicas
        return self.spec.relayed or all(
            replicas[r].generation >= generation for r in self.members.training
        )

    def cut(self, replica: int) -> dict[int, int]:
        """Last update of each origin that a joining replica's snapshot must contain.

        The joining replica receives all later updates as messages, in a relay once it
        has subscribed.
        """
        replicas = self.members.replicas
        if self.spec.relayed:
            replicas[replica].contained = None
            self.outboxes[replica].withhold()
            self._hurry()
            return self._passed_on()
        cut = {r: replicas[r].adopted_at for r in self.members.training}
        replicas[replica].acknowledge(cut)
        return cut

    def subscribe(self, replica: int, contained: Mapping[int, int]) -> None:
        """Send updates to a joining replica, which knows what its snapshot contains.

        It is sent the later ones that the others have got already, one by one, and from
        then on the same as the others. That begins once the others have got all that
        the snapshot contains, since the replica cannot subtract it from a sum. It
        begins at once if there are no sums. It does not wait for an update of the donor
        if the queue is full, as there would be no room for that update.

        Args:
            replica: The replica.
            contained: Last update of each origin in its snapshot.
        """
        self.members.replicas[replica].contained = contained
        self._release_all()

    def _release_all(self) -> None:
        """Send updates to all subscribers for which that can begin."""
        for replica, box in self.outboxes.items():
            if box.withheld is not None and self._can_release(replica):
                self._release(replica)

    def _can_release(self, replica: int) -> bool:
        """Whether sending updates to a joining replica can begin; see `subscribe`."""
        members, box = self.members.replicas, self.outboxes[replica]
        contained, withheld = members[replica].contained, box.withheld
        if contained is None or withheld is None:
            return False
        if not self.spec.merges:
            return True
        count = self._count_waiting()
        return (
            len(withheld) >= count  # else some are older than the snapshot
            and all(
                message.sequence > contained.get(message.origin, 0)
                for message in withheld[len(withheld) - count :]
            )
            and (
                2 * box.nbytes >= box.limit_bytes
                or all(
                    contained.get(origin, 0) <= member.progress.sequence or member.gone
                    for origin, member in members.items()
                )
            )
        )

    def _release(self, replica: int) -> None:
        """Queue the withheld updates that a snapshot lacks and that wait no longer."""
        box, member = self.outboxes[replica], self.members.replicas[replica]
        withheld, contained = box.withheld or [], member.contained or {}
        sent = withheld[: max(len(withheld) - self._count_waiting(), 0)]
        box.release(m for m in sent if m.sequence > contained.get(m.origin, 0))

    def _count_waiting(self) -> int:
        """Number of updates that wait, also in a sum: the last that were withheld."""
        waiting = sum(m.kind == MessageKind.UPDATE for m in self.waiting)
        return waiting + self._summed.total()

    def _hurry(self) -> None:
        """Let what waits be sent now."""
        if self.waiting:
            self._urgent = len(self.waiting)
            self.on_due()

    def _passed_on(self) -> dict[int, int]:
        members = self.members.replicas.items()
        return {
            r: member.progress.sequence
            for r, member in members
            if member.joined or member.gone
        }

    # ---- barriers

    def arrive(
        self, key: str, replica: int, payload: Any, client_payload: bytes, kind: str
    ) -> BarrierState:
        """Register a replica at a barrier; a second arrival changes nothing.

        An arrival after the barrier is complete opens the next barrier of this key. A
        replica waits at one barrier at a time, so their number is bounded.
        """
        for open_key, opened in self.barriers.items():
            if open_key != key and replica in opened.payloads:
                raise ValueError(
                    f"replica {replica} waits at the barrier {open_key!r:.80}, and "
                    f"cannot arrive at {key!r:.80}"
                )
        if kind == BarrierKind.RESUME:
            read(payload["work"], WORK["train"])
            self._work[replica] = {"train": payload["work"]}
        barrier = self.barriers.setdefault(key, BarrierState())
        barrier.kinds.add(kind)
        barrier.payloads.setdefault(replica, payload)
        barrier.client_payloads.setdefault(replica, client_payload)
        self._complete_barriers()
        return barrier

    def _complete_barriers(self) -> None:
        """Complete each barrier at which all awaited replicas have arrived."""
        for key, barrier in list(self.barriers.items()):
            awaited = self._awaited(barrier)
            if self.members.expected and not awaited and self.stopped is None:
                self._complete(key, barrier)

    def _awaited(self, barrier: BarrierState) -> set[int]:
        awaited = set(self.members.expected) - barrier.payloads.keys()
        if barrier.kind == BarrierKind.ROUND:
            awaited -= self._idle.keys()
        return awaited

    def _complete(self, key: str, barrier: BarrierState) -> None:
        """Fix the result of a barrier, the same for all replicas.

        After an ``AGREE`` barrier, updates are held back here until a barrier of
        another kind is complete. Only leaving replicas publish then. While survivors
        compare their updates, all of them or none must receive such an update.
        """
        del self.barriers[key]
        kind, payloads = barrier.kind, barrier.payloads
        gone = barrier.gone = self.members.gone
        self.holding = kind == BarrierKind.AGREE
        if not self.holding:
            for message in self._held:
                self._send(message, but=message.origin)
            self._held.clear()
            self._excess.clear()
        if kind == BarrierKind.ROUND:
            payloads.update({**self._idle, **payloads})
        elif kind == BarrierKind.AGREE:
            barrier.counted = {"present": len(self.members.present)}
            if self.spec.relayed:
                self._agreements += 1
                barrier.passed_on = number = self._agreements
                self._send(Message.control(MessageKind.PASSED_ON, sequence=number))
        elif kind == BarrierKind.SYNC:
            departed = self._work_of_departed(payloads.keys() - gone.keys())
            trained = [work["train"] for work in departed if "train" in work]
            barrier.counted = {"departed": trained}
        elif kind == BarrierKind.REPORT:
            self._end_epoch(key, barrier)
        if kind in (BarrierKind.REPORT, BarrierKind.SYNC):
            self.interval += 1
            self._interval_began_at = None
            self.leases["train"].begin_interval()
        self._hurry()

    def _end_epoch(self, key: str, barrier: BarrierState) -> None:
        barrier.counted = {
            "refused": self.refused - self._refused_before,
            "repeated": self.leases["train"].repeated,
            "departed": self._work_of_departed(barrier.payloads),
        }
        payloads = [[r, payload] for r, payload in sorted(barrier.payloads.items())]
        self.report = {"payloads": payloads, "departed": barrier.counted["departed"]}
        self.post(
            "report",
            key=key,
            epoch=self.epoch,
            payloads=payloads,
            client_payloads=[p for _, p in sorted(barrier.client_payloads.items())],
            **barrier.counted,
        )
        self.epoch += 1
        self._work.clear()
        self._departed_before = ()
        self._refused_before = self.refused

    def _work_of_departed(self, reported: Collection[int]) -> list[dict[str, Any]]:
        """Work of this epoch, by phase, of replicas that do not report it."""
        before = [{"train": work} for work in self._departed_before]
        return [
            *before,
            *(w for r, w in sorted(self._work.items()) if r not in reported),
        ]

    # ---- leases

    def give_back(
        self,
        replica: int,
        phase: str,
        epoch: int,
        finished: Finished,
        now: float,
        work: Work | None = None,
        idle_payload: Any = None,
    ) -> None:
        """Take back finished leases with the work over all leases finished so far.

        End a sync interval whose time is over, and the epoch if a callback has stopped
        the fit.
        """
        leases = self._leases(phase, epoch)
        for lease in finished:
            leases.finish(replica, lease["lease"])
            if phase == "train":
                self.post("progress", epoch=epoch, **lease)
        if work is not None:
            self._work.setdefault(replica, {})[phase] = work
            if work.get("stop"):
                leases.end_epoch()
        if self._interval_began_at is None:
            self._interval_began_at = now
        bound_s = self.spec.intervals.seconds
        if bound_s is not None and now - self._interval_began_at >= bound_s:
            self.leases["train"].end_interval()
        if idle_payload is not None:
            self._idle[replica] = idle_payload
            self._complete_barriers()

    def can_lease(self, replica: int, phase: str, epoch: int) -> bool:
        """Whether `lease` has a final answer: a lease, a sync point, or no more rows.

        Rows that another replica holds may become free, if that replica fails.
        """
        if not self.members.is_here(replica):
            return True
        leases = self._leases(phase, epoch)
        return self.has_enough and (
            leases.has_one_for(replica)
            or leases.interval_is_over(self.members.expected)
            or not leases.unfinished
        )

    def lease(
        self, replica: int, phase: str, epoch: int, is_near: Callable[[str], bool]
    ) -> Lease | SyncPoint | None:
        """Lease the next rows to a replica, which is no longer idle.

        Returns:
            A lease; a sync point if the interval is over and the epoch is not; None if
            no rows are free for this replica now.
        """
        self._idle.pop(replica, None)
        leases = self._leases(phase, epoch)
        if not self.has_enough or not self.members.is_here(replica):
            return None
        lease = leases.take(replica, is_near)
        if lease is not None:
            return lease
        over = leases.interval_is_over(self.members.expected)
        return SyncPoint(self.spec.order, leases.remaining()) if over else None

    def _leases(self, phase: str, epoch: int) -> Leasing:
        if epoch > self.epoch:
            raise ValueError(
                f"epoch {epoch} has not begun; the current epoch is {self.epoch}"
            )
        leases = self.leases[phase]
        leases.open(epoch, self.members.expected)
        return leases

    # ---- a look from outside

    def describe(self, now: float) -> dict[str, Any]:
        """Describe the run and its replicas in plain values, to find why it hangs.

        Each barrier is the replicas that have arrived, and those that it waits for.
        """
        members = self.members
        train = self.leases["train"]
        replicas = [
            {
                "replica": replica,
                "worker": member.worker,
                "phase": _phase(member),
                "step": member.progress.step,
                "steps": member.steps,
                "silent_s": max(now - member.heartbeat_at, 0.0)
                if member.joined
                else None,
                "rows": train.rows_held(replica),
            }
            for replica, member in sorted(members.replicas.items())
        ]
        barriers = [
            [sorted(barrier.payloads), sorted(self._awaited(barrier))]
            for barrier in self.barriers.values()
        ]
        return {
            "run": self.spec.label,
            "epoch": self.epoch,
            "epochs": self.spec.epochs,
            "rows": train.unfinished,
            "min_replicas": self.spec.min_replicas,
            "silence_s": self.timeouts.silence,
            "stopped": self.stopped,
            "replicas": replicas,
            "barriers": barriers,
        }

    # ---- the end

    def check_deadlines(self, now: float) -> list[int]:
        """Give up the run if too many replicas are missing for too long.

        Returns:
            Replicas whose heartbeat has timed out.
        """
        timeouts, members = self.timeouts, self.members
        if members.absent and now - self._opened_at > timeouts.join:
            self.give_up_late(timeouts.bound("join"), now)
        if self.has_enough or self._ended:
            self._enough_at = now
        elif now - self._enough_at > timeouts.rejoin:
            bound, gone = timeouts.bound("rejoin"), sorted(members.gone)
            error = WaitTimeoutError(
                f"fewer than min_replicas={self.spec.min_replicas} replicas for "
                f"{bound}: {len(members.expected)} left; gone: "
                f"{members.describe(gone, now)}"
            )
            self.give_up(error)
        return members.timed_out(now - timeouts.silence)

    def stuck(self, now: float) -> list[int]:
        """Joining replicas that hold up the others, with queues that do not move.

        Its link may be too slow for any update to arrive in time. The others would wait
        only a little longer for room.
        """
        joining = {r for r in self.members.not_active if r in self.outboxes}
        for replica in joining:
            box = self.outboxes[replica]
            _, removed = self._moved.get(replica, (now, -1))
            if box.removed != removed or 2 * box.nbytes < box.limit_bytes:
                self._moved[replica] = now, box.removed
        longest_s = self.timeouts.silence
        return [r for r in joining if now - self._moved[r][0] > longest_s]

    def postpone_deadlines(self, seconds: float) -> None:
        """Leave time out of account in which the scheduler could not hear replicas."""
        self._opened_at += seconds
        self._enough_at += seconds
        for member in self.members.replicas.values():
            member.heartbeat_at += seconds
        self._moved = {
            replica: (at + seconds, removed)
            for replica, (at, removed) in self._moved.items()
        }

    def give_up_late(self, bound: Bound, now: float) -> None:
        """Give up the run: not all initial replicas have joined within a bound."""
        members = self.members
        self.give_up(
            WaitTimeoutError(
                f"not all replicas started within {bound}: "
                f"{members.describe(members.absent, now)}; is the worker busy with "
                "other tasks, or paused by Dask for lack of memory?"
            )
        )

    def _give_up_if_deserted(self) -> None:
        """Give up the run if no replica is left to train and none has completed it."""
        if self.members.expected or self._ended:
            return
        gone = sorted(self._departed)
        unnamed = f" and {len(gone) - MAX_NAMED} more" if len(gone) > MAX_NAMED else ""
        if self._all_retired:
            replicas = self.members.replicas
            workers = [*dict.fromkeys(replicas[r].worker for r in gone)]
            error: DaskDLError = RunError(
                f"all workers have retired: {', '.join(workers[:MAX_NAMED])}{unnamed}"
            )
        else:
            who = "; ".join(self._departed[r] for r in gone[:MAX_NAMED])
            error = WaitTimeoutError(f"no replica is left: lost {who}{unnamed}")
        self.deserted = self.stopped is None
        self.give_up(error)

    def give_up(self, error: DaskDLError) -> None:
        """End the run with an error that no replica's code has caused."""
        if self.stopped is None:
            self.failed = True
            kind, summary = type(error).__name__, str(error)
            fields = {"deserted": True} if self.deserted else {}
            self.post("failed", type=kind, summary=summary, **fields)
            self.stop(summary)

    def fail(self, replica: int, failure: Mapping[str, Any]) -> None:
        """Report a replica's failure; end the run unless the replica is joining."""
        summary = failure["summary"]
        member = self.members.replicas[replica]
        member.why, member.failed = shown(f"failed: {summary}", 500), True
        if replica in self.members.not_active:  # the others can continue
            self.post(
                "not joined",
                replica=replica,
                type=failure["type"],
                summary=shown(summary, 500),
            )
            return
        self.failed = self.failed or self.stopped is None
        self.post("failed", replica=replica, worker=member.worker, **failure)
        self.stop(f"replica {replica} failed: {summary}")

    def stop(self, reason: str) -> None:
        """Stop the run: every replica has to leave. The first reason is kept."""
        if self.stopped is None:
            self.stopped = reason
            nbytes = len(reason)
            self._send(Message.control(MessageKind.STOP, nbytes=nbytes, payload=reason))
            self.post("stopped", summary=reason)
