"""What the scheduler knows of one run, and what it decides.

Membership, the relay's queues, acknowledgements of replicas that send to each other,
barriers, leases, and how the run ends. A request is a call; what is to be sent lies in
`RunState.outboxes` and `RunState.events` afterwards. No I/O, no clock, no thread.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from daskdl.channel.leasing import (
    Done,
    DynamicLeasing,
    Finished,
    Lease,
    Leasing,
    RunSpec,
    StaticPartition,
    SyncPoint,
)
from daskdl.channel.protocol import (
    MESSAGE_BYTES,
    Barrier,
    Message,
    MessageKind,
    PeerProgress,
)
from daskdl.channel.routing import ROUTINGS
from daskdl.channel.sender import Outbox
from daskdl.config import Bound, Timeouts
from daskdl.errors import DaskDLError, RunError, WaitTimeoutError


class EventLog:
    """Numbered events for the client; those that it has confirmed are dropped."""

    def __init__(self) -> None:
        self._first = 0
        self._events: list[dict[str, Any]] = []

    def __len__(self) -> int:
        """Number of events posted so far, confirmed ones included."""
        return self._first + len(self._events)

    def post(self, kind: str, **fields: Any) -> None:
        """Append an event."""
        self._events.append({"kind": kind, **fields})

    def since(self, seen: int) -> list[dict[str, Any]]:
        """Events after the first `seen` ones; asking confirms those."""
        confirmed = min(max(seen - self._first, 0), len(self._events))
        del self._events[:confirmed]
        self._first += confirmed
        return list(self._events)


AT_FIRST = PeerProgress()


@dataclass
class Member:
    """One replica, from its assignment to a worker until the run closes.

    Attributes:
        worker: Address of its worker.
        active: Whether it trains, so that barriers wait for it: initial replicas do
            from the beginning, joining ones once they have the common state.
        joined: Whether its task has reached the scheduler.
        gone: Whether it has left or failed, for good.
        heard_at: Last sign of life, seconds on the clock of the scheduler.
        progress: How far it is, as far as the scheduler knows.
        generation: Of the membership by which it sends to others; -1: none yet.
        adopted_at: Its last own update when it adopted that membership, or later.
        received: Last update by origin up to which it needs nothing any more.
    """

    worker: str
    active: bool
    joined: bool = False
    gone: bool = False
    heard_at: float = 0.0
    progress: PeerProgress = AT_FIRST
    generation: int = -1
    adopted_at: int = 0
    received: dict[int, int] = field(default_factory=dict)

    def advance(self, step: int, sequence: int, interval: int) -> None:
        """Raise what it has reached; late messages change nothing."""
        own = self.progress
        self.progress = PeerProgress(
            max(own.step, step),
            max(own.sequence, sequence),
            max(own.interval, interval),
        )

    def acknowledge(self, received: Mapping[int, int]) -> None:
        """Note up to which update of each origin it needs nothing any more."""
        for origin, sequence in received.items():
            self.received[origin] = max(self.received.get(origin, 0), sequence)


class Membership:
    """The replicas of one run.

    Args:
        workers: Address of the worker of each initial replica.

    Attributes:
        generation: Grows with every join, departure and failure.
        replicas: All that have ever been assigned to a worker, by number.
    """

    generation: int
    replicas: dict[int, Member]

    def __init__(self, workers: Mapping[int, str]) -> None:
        self.generation = 0
        self.replicas = {r: Member(w, active=True) for r, w in workers.items()}
        self._started = False

    def _those(self, chosen: Callable[[Member], bool]) -> list[int]:
        return sorted(r for r, one in self.replicas.items() if chosen(one))

    @property
    def present(self) -> list[int]:
        """Replicas that joined and have not gone, ascending."""
        return self._those(lambda one: one.joined and not one.gone)

    @property
    def expected(self) -> list[int]:
        """Replicas for which barriers wait, whether joined yet or not; ascending."""
        return self._those(lambda one: one.active and not one.gone)

    @property
    def training(self) -> list[int]:
        """Replicas that are both expected and present, ascending."""
        return self._those(lambda one: one.active and one.joined and not one.gone)

    @property
    def absent(self) -> list[int]:
        """Initial replicas that have not joined yet, ascending; all wait for them."""
        return self._those(lambda one: one.active and not one.joined and not one.gone)

    @property
    def joining(self) -> list[int]:
        """Replicas that were added later and are not active yet, ascending."""
        return self._those(lambda one: not one.active and not one.gone)

    @property
    def gone(self) -> dict[int, int]:
        """Last update of each replica that left or failed."""
        members = self.replicas.items()
        return {r: one.progress.sequence for r, one in members if one.gone}

    @property
    def started(self) -> bool:
        """Whether all initial replicas have joined; stays true."""
        self._started = self._started or not self.absent
        return self._started

    def assign(self, worker: str) -> int:
        """Add a replica on a worker; return its number."""
        replica = max(self.replicas) + 1
        self.replicas[replica] = Member(worker, active=False)
        return replica

    def assigned_to(self, worker: str) -> list[int]:
        """Replicas of a worker that have not gone, ascending."""
        return self._those(lambda one: one.worker == worker and not one.gone)

    def is_here(self, replica: int) -> bool:
        """Whether a number is that of a replica that has not gone."""
        return replica in self.replicas and not self.replicas[replica].gone

    def silent_since(self, bound: float) -> list[int]:
        """Replicas without a sign of life since; nobody before the start."""
        if not self.started:
            return []
        return [r for r in self.present if self.replicas[r].heard_at < bound]

    def donor(self) -> int | None:
        """The replica whose state a joining one takes: the farthest that trains."""
        return max(
            self.training, key=lambda r: self.replicas[r].progress.step, default=None
        )

    def describe(self, replicas: Iterable[int], now: float) -> str:
        """Who, where, and what was last heard of them, and when; may be empty."""
        return "; ".join(self._describe(replica, now) for replica in replicas)

    def _describe(self, replica: int, now: float) -> str:
        member = self.replicas[replica]
        where = f"replica {replica} on {member.worker}"
        if not member.joined:
            return f"{where}, which has not joined"
        return (
            f"{where}, last heard at step {member.progress.step}, update "
            f"{member.progress.sequence}, {max(now - member.heard_at, 0.0):.1f} s ago"
        )


@dataclass
class OpenBarrier:
    """A barrier at which some replicas have arrived.

    A replica that fails after it arrived keeps its payload: what it had sent, all
    survivors have. Nobody waits for one that failed before.

    Attributes:
        payloads: What each has to say to the others, by replica.
        client_payloads: What each has to say to the client alone.
        kinds: What they have come for.
        gone: Last update of each replica that left or failed. Set once, when all have
            arrived: everybody has to read the same.
        counted: Set once too; see `RunState.complete`.
    """

    payloads: dict[int, Any] = field(default_factory=dict)
    client_payloads: dict[int, bytes] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    gone: Mapping[int, int] | None = None
    counted: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What all have come for; if they have not come for the same, it is a round."""
        return next(iter(self.kinds)) if len(self.kinds) == 1 else Barrier.ROUND


MOST_NAMED = 8  # of those that are gone: a message fits a screen


class RunState:
    """State of one run; changed only by the methods here.

    Args:
        spec: What was asked for.

    Attributes:
        members: Who takes part.
        outboxes: What waits for each present replica.
        events: For the client, in order.
        leases: Who trains on which rows, by phase ("train", "validation").
        barriers: Open ones, by key. A key may be used again once all have arrived.
        stopped: Why the run was stopped; None while it runs.
        refused: Messages that were not understood.
        epoch: That runs now, counted from 0.
        interval: That runs now, counted from 0 over all epochs.
        report: Payloads of the last epoch's end, ``[replica, payload]`` each.
        holding: Whether updates have to wait, see `complete`.
        ended: Whether a replica has come to the end of the run.
    """

    spec: RunSpec
    members: Membership
    outboxes: dict[int, Outbox]
    events: EventLog
    leases: Mapping[str, Leasing]
    barriers: dict[str, OpenBarrier]
    stopped: str | None
    refused: int
    epoch: int
    interval: int
    report: Sequence[Any]
    holding: bool
    ended: bool

    def __init__(self, spec: RunSpec) -> None:
        if spec.routing not in ROUTINGS:
            known = " or ".join(ROUTINGS)
            raise ValueError(f"routing must be {known}, got {spec.routing!r}")
        self.spec = spec
        self.members = Membership(spec.replicas)
        self.outboxes = {}
        self.events = EventLog()
        kind = StaticPartition if spec.synchronous else DynamicLeasing
        trained = spec.seed, spec.epochs_before, spec.intervals
        self.leases = {
            phase: kind(sizes, *(trained if phase == "train" else ()))
            for phase, sizes in spec.sizes.items()
        }
        self.barriers = {}
        self.stopped = None
        self.refused = 0
        self.epoch = spec.first_epoch
        self.interval = 0
        self.report = ()
        self.holding = False
        self.ended = False
        self._held: list[Message] = []  # updates that wait, one of each that leaves
        self._idle: dict[int, Any] = {}  # payloads of those that wait for a lease
        self._interval_began_at: float | None = None
        # Of this epoch, by replica: examples of finished leases, mean loss.
        self._trained: dict[int, tuple[int, float]] = {}
        resumed = spec.intervals.resumed
        self._departed_before = () if resumed is None else resumed.departed
        self._refused_before = 0  # this epoch
        self._departed: dict[int, str] = {}  # those that trained, in words
        self._all_retired = True

    @property
    def timeouts(self) -> Timeouts:
        """The bounds on waiting that the client chose."""
        return Timeouts(**self.spec.timeouts)

    @property
    def has_enough(self) -> bool:
        """Whether as many replicas take part as were asked for at least."""
        return len(self.members.expected) >= self.spec.min_replicas

    # ---- membership

    def join(self, replica: int, now: float) -> Outbox:
        """A replica takes part from now on; returns the queue of what it is sent."""
        members = self.members
        member = members.replicas[replica]
        if members.started:
            # It needs no update from before, but within a snapshot.
            member.acknowledge(self._passed_on())
        members.generation += 1
        if not members.started:
            # Those who wait for it at the start send nothing meanwhile.
            for one in members.replicas.values():
                one.heard_at = now
        member.joined, member.heard_at = True, now
        self.outboxes[replica] = Outbox(self.spec.relay_bytes)
        if members.started:
            self._send_members()
        return self.outboxes[replica]

    def topology(self) -> tuple[int, list[tuple[int, str]]]:
        """The generation, and all present replicas with their workers."""
        replicas = self.members.replicas
        present = [(r, replicas[r].worker) for r in self.members.present]
        return self.members.generation, present

    def activate(self, replica: int, step: int) -> None:
        """A joining replica has the common state: it trains from now on."""
        member = self.members.replicas[replica]
        member.active = True
        member.progress = member.progress._replace(step=step)
        self._send(Message(MessageKind.JOINED.value, replica, 0, step, 0), but=replica)

    def remove(self, replica: int) -> None:
        """A replica has left or failed; what it held is free again."""
        if not self.members.is_here(replica):
            return
        member = self.members.replicas[replica]
        member.gone = True
        self.members.generation += 1
        self.outboxes.pop(replica, None)
        for leases in self.leases.values():
            leases.lose(replica)
        self._idle.pop(replica, None)
        self._send(Message(MessageKind.LOST.value, replica, 0, member.progress.step, 0))
        self._send_members()

    def lose(self, replica: int, why: str, now: float) -> None:
        """A replica has failed; the client learns why."""
        what = f"{self.members.describe([replica], now)}: {why}"
        if replica in self.members.expected:
            self._departed[replica] = what
            self._all_retired = False
        self.remove(replica)
        self.events.post("lost", replica=replica, summary=f"lost {what}")

    def retire(self, replica: int, now: float) -> None:
        """A replica has handed over and leaves before the end, with its worker."""
        what = f"{self.members.describe([replica], now)}: it retired with its worker"
        if replica in self.members.expected:
            self._departed[replica] = what
        self.remove(replica)
        self.events.post("retired", replica=replica, summary=what)

    def _send(self, message: Message, but: int | None = None) -> None:
        for replica, box in self.outboxes.items():
            if replica != but:
                box.offer(message, force=True)

    def _send_members(self) -> None:
        self._send(Message(MessageKind.ROUTES.value, 0, 0, 0, 0, self.topology()))

    # ---- updates and progress

    def publish(
        self, origin: int, messages: Iterable[Message], progress: PeerProgress
    ) -> int:
        """Queue a replica's updates for all others, in order, while they have room.

        Args:
            origin: Who sends.
            messages: Updates, oldest first.
            progress: How far it is, if all updates are accepted.

        Returns:
            How many updates were accepted; the rest has to be sent again.
        """
        others = [box for replica, box in self.outboxes.items() if replica != origin]
        member = self.members.replicas[origin]
        accepted = 0
        for message in messages:
            if self.holding:
                self._held.append(message)
            elif all(box.has_room(message.nbytes + MESSAGE_BYTES) for box in others):
                self._send(message, but=origin)
            else:
                return accepted
            member.advance(message.step, message.sequence, -1)
            accepted += 1
        before = member.progress
        member.advance(progress.step, 0, progress.interval)
        if member.progress != before:  # no update says it
            step, sequence, interval = member.progress
            kind = MessageKind.PROGRESS.value
            self._send(Message(kind, origin, sequence, step, 0, interval), but=origin)
        return accepted

    def acknowledge(
        self,
        origin: int,
        progress: PeerProgress,
        generation: int,
        adopted_at: int,
        received: Mapping[int, int],
    ) -> bool:
        """A replica that sends to the others itself says what it has sent and received.

        Args:
            origin: Who says it.
            progress: How far it is.
            generation: Of the membership by which it sends.
            adopted_at: Its last update when it adopted that, or later.
            received: Last update by origin up to which it has all.

        Returns:
            Whether it has adopted a newer membership.
        """
        member = self.members.replicas[origin]
        member.advance(*progress)
        member.acknowledge(received)
        if generation <= member.generation:
            return False
        member.generation, member.adopted_at = generation, adopted_at
        return True

    def received_by_all(self, origin: int) -> int:
        """The update of an origin up to which all others need nothing any more."""
        replicas = self.members.replicas
        others = (r for r in self.members.present if r != origin)
        return min(
            (replicas[r].received.get(origin, 0) for r in others),
            default=replicas[origin].progress.sequence,
        )

    def progress(self) -> list[tuple[int, PeerProgress]]:
        """How far each replica that trains is."""
        return [(r, self.members.replicas[r].progress) for r in self.members.training]

    # ---- the snapshot of a joining replica

    def can_cut(self, generation: int) -> bool:
        """Whether `cut` is known for one that joined in this generation.

        A relay knows what it has passed on. Replicas that send to each other have to
        adopt the membership first: from then on they send to the joining one.
        """
        replicas = self.members.replicas
        return ROUTINGS[self.spec.routing].relayed or all(
            replicas[r].generation >= generation for r in self.members.training
        )

    def cut(self, replica: int) -> dict[int, int]:
        """Last update of each origin that the snapshot of a joining one has to contain.

        All later ones it is sent.
        """
        if ROUTINGS[self.spec.routing].relayed:
            return self._passed_on()
        replicas = self.members.replicas
        cut = {r: replicas[r].adopted_at for r in self.members.training}
        replicas[replica].acknowledge(cut)
        return cut

    def _passed_on(self) -> dict[int, int]:
        members = self.members.replicas.items()
        return {
            r: one.progress.sequence for r, one in members if one.joined or one.gone
        }

    # ---- barriers

    def arrive(
        self, key: str, replica: int, payload: Any, client_payload: bytes, kind: str
    ) -> OpenBarrier:
        """A replica is at a barrier; arriving again, on a retry, changes nothing.

        Whoever comes once a barrier is complete is the first at the next one.
        """
        barrier = self.barriers.setdefault(key, OpenBarrier())
        barrier.kinds.add(kind)
        barrier.payloads.setdefault(replica, payload)
        barrier.client_payloads.setdefault(replica, client_payload)
        return barrier

    def all_arrived(self, barrier: OpenBarrier) -> bool:
        """Whether a barrier has to wait for nobody; stays true once `complete`."""
        awaited = self.members.expected - barrier.payloads.keys()
        if barrier.kind == Barrier.ROUND:
            awaited -= self._idle.keys()
        return barrier.gone is not None or not awaited

    def complete(self, key: str, barrier: OpenBarrier) -> bool:
        """All have arrived at a barrier: fix what everybody reads there.

        After an ``AGREE`` updates are held here until the next barrier is complete.
        Only replicas that leave have any then, one each, and what some survivors took
        in before they compare, all of them must.

        Args:
            key: Of the barrier.
            barrier: Where all have arrived.

        Returns:
            Whether this call was the first.
        """
        if barrier.gone is not None:
            return False
        kind, payloads = barrier.kind, barrier.payloads
        barrier.gone = self.members.gone
        if kind == Barrier.ROUND:
            payloads.update({**self._idle, **payloads})
        self.barriers.pop(key, None)
        self.holding = kind == Barrier.AGREE
        if not self.holding:
            for message in self._held:
                self._send(message, but=message.origin)
            self._held.clear()
        if kind == Barrier.AGREE:
            barrier.counted = {"present": len(self.members.present)}
        if kind == Barrier.SYNC:
            here = payloads.keys() - barrier.gone.keys()
            barrier.counted = {"departed": self._trained_by_departed(here)}
        if kind == Barrier.REPORT:
            self._end_epoch(key, barrier)
        if kind in (Barrier.REPORT, Barrier.SYNC):
            self.interval += 1
            self._interval_began_at = None
            self.leases["train"].begin_interval()
        return True

    def _end_epoch(self, key: str, barrier: OpenBarrier) -> None:
        barrier.counted = {
            "refused": self.refused - self._refused_before,
            "repeated": self.leases["train"].repeated,
            "departed": self._trained_by_departed(barrier.payloads),
        }
        self.report = [[r, payload] for r, payload in sorted(barrier.payloads.items())]
        self.events.post(
            "report",
            key=key,
            epoch=self.epoch,
            payloads=self.report,
            client_payloads=[own for _, own in sorted(barrier.client_payloads.items())],
            **barrier.counted,
        )
        self.epoch += 1
        self._trained.clear()
        self._departed_before = ()
        self._refused_before = self.refused

    def _trained_by_departed(self, reported: Collection[int]) -> list[Done]:
        """What those did in this epoch that do not report it themselves."""
        counted = [own for r, own in sorted(self._trained.items()) if r not in reported]
        here = [Done(loss * examples, examples) for examples, loss in counted]
        return [*self._departed_before, *here]

    # ---- leases

    def give_back(
        self,
        replica: int,
        phase: str,
        epoch: int,
        finished: Finished,
        now: float,
    ) -> None:
        """A replica has finished leases; an interval that has taken long enough ends.

        Raises:
            ValueError: If the epoch is over.
        """
        leases = self._leases(phase, epoch)
        for lease in finished:
            own = leases.finish(replica, lease["lease"])
            if phase == "train":
                self.events.post("progress", epoch=epoch, **lease)
                before, _ = self._trained.get(replica, (0, 0.0))
                examples = before + (lease["examples"] if own else 0)
                self._trained[replica] = examples, lease.get("loss", 0.0)
        if self._interval_began_at is None:
            self._interval_began_at = now
        bound_s = self.spec.intervals.seconds
        if bound_s is not None and now - self._interval_began_at >= bound_s:
            self.leases["train"].end_interval()

    def set_idle(self, replica: int, payload: Any) -> None:
        """A replica waits for a lease: rounds take this as its payload meanwhile."""
        self._idle[replica] = payload

    def can_lease(self, replica: int, phase: str, epoch: int) -> bool:
        """Whether `lease` has an answer that stays: a lease, or none any more.

        There may be one yet as long as another replica holds one and can fail.
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
        """Lease the next rows to a replica, which is idle no more.

        Args:
            replica: Who asks.
            phase: Of the data.
            epoch: Counted from 0.
            is_near: Whether its worker holds the part with a key.

        Returns:
            None if there is none for it now; a sync point if the interval is over and
            the epoch is not.
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
        leases = self.leases[phase]
        leases.open(epoch, self.members.expected)
        return leases

    # ---- the end

    def give_up_if_deserted(self) -> None:
        """Nobody is left to go on, and nobody came to the end: the client learns who.

        Nothing happens while somebody trains.
        """
        if self.members.expected or self.ended:
            return
        gone = sorted(self._departed)
        more = f" and {len(gone) - MOST_NAMED} more" if len(gone) > MOST_NAMED else ""
        if self._all_retired:
            replicas = self.members.replicas
            seats = dict.fromkeys(replicas[r].worker for r in gone)
            workers = f"{', '.join([*seats][:MOST_NAMED])}{more}"
            error: DaskDLError = RunError(
                f"all workers have retired: {workers}; nobody is left to train; fit "
                "again, on workers that stay longer, to go on"
            )
        else:
            who = "; ".join(self._departed[r] for r in gone[:MOST_NAMED])
            error = WaitTimeoutError(f"no replica is left: lost {who}{more}")
        self.give_up(error)

    def give_up_late(self, bound: Bound, now: float) -> None:
        """Not all initial replicas have joined within a bound."""
        members = self.members
        self.give_up(
            WaitTimeoutError(
                f"not all replicas started within {bound}: "
                f"{members.describe(members.absent, now)}; is the worker busy with "
                "other tasks?"
            )
        )

    def give_up_too_few(self, bound: Bound, now: float) -> None:
        """For longer than a bound there were fewer replicas than asked for."""
        members = self.members
        self.give_up(
            WaitTimeoutError(
                f"fewer than min_replicas={self.spec.min_replicas} replicas for "
                f"{bound}: {len(members.expected)} left; "
                f"gone: {members.describe(sorted(members.gone), now)}"
            )
        )

    def give_up(self, error: DaskDLError) -> None:
        """The run cannot go on, and no replica's code is the reason."""
        if self.stopped is None:
            kind, summary = type(error).__name__, str(error)
            self.events.post("failed", type=kind, summary=summary)
            self.stop(summary)

    def fail(self, replica: int, failure: Mapping[str, Any]) -> None:
        """A replica cannot go on: the run ends, and the client learns why."""
        worker = self.members.replicas[replica].worker
        self.events.post("failed", replica=replica, worker=worker, **failure)
        self.stop(f"replica {replica} failed: {failure['summary']}")

    def stop(self, reason: str) -> None:
        """Tell every replica to leave; the first reason stays."""
        if self.stopped is None:
            self.stopped = reason
            self._send(Message(MessageKind.STOP.value, 0, 0, 0, len(reason), reason))
            self.events.post("stopped", summary=reason)
