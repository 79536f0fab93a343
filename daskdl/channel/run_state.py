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
    BarrierKind,
    GoneError,
    Message,
    MessageKind,
    PeerProgress,
)
from daskdl.channel.sender import Outbox
from daskdl.config import Bound, Timeouts
from daskdl.errors import DaskDLError, RunError, WaitTimeoutError, shown

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
        heartbeat_at: When it was last seen of, seconds on the clock of the scheduler.
        progress: How far it is, as far as the scheduler knows.
        generation: Of the membership by which it sends to others; -1: none yet.
        adopted_at: Its last own update when it adopted that membership, or later.
        received: By origin, up to which update it has all, or needs none.
    """

    worker: str
    active: bool
    joined: bool = False
    gone: bool = False
    heartbeat_at: float = 0.0
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
        """Note up to which update of each origin it has all."""
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

    def taking_part(self, replica: int) -> Member:
        """A replica that joined and has not gone.

        Raises:
            GoneError: If it has gone.
            ValueError: If it never took part.
        """
        member = self.replicas.get(replica)
        if member is not None and member.gone:
            raise GoneError(f"replica {replica} is not a member any more")
        if member is None or not member.joined:
            raise ValueError(f"replica {replica} is not a member of this run")
        return member

    def timed_out(self, bound: float) -> list[int]:
        """Replicas without a heartbeat since; nobody before the start."""
        if not self.started:
            return []
        return [r for r in self.present if self.replicas[r].heartbeat_at < bound]

    def donor(self) -> int | None:
        """The replica whose state a joining one takes: the farthest that trains."""
        return max(
            self.training, key=lambda r: self.replicas[r].progress.step, default=None
        )

    def describe(self, replicas: Iterable[int], now: float) -> str:
        """Who, where, and how far at the last heartbeat, and when; may be empty."""
        described = []
        for replica in replicas:
            member = self.replicas[replica]
            said = "which has not joined"
            if member.joined:
                said = (
                    f"last seen at step {member.progress.step}, update "
                    f"{member.progress.sequence}, "
                    f"{max(now - member.heartbeat_at, 0.0):.1f} s ago"
                )
            described.append(f"replica {replica} on {member.worker}, {said}")
        return "; ".join(described)


@dataclass
class OpenBarrier:
    """A barrier at which some replicas have arrived.

    A replica that fails after it arrived keeps its payload: what it had sent, all
    survivors have. Nobody waits for one that failed before.

    Attributes:
        payloads: What each has to say to the others, by replica.
        client_payloads: What each has to say to the client alone.
        kinds: What they have come for.
        gone: Last update of each replica that left or failed before the barrier was
            complete: everybody has to read the same. None: it is not complete.
        counted: What the run counted, by name; see `BarrierResult`.
    """

    payloads: dict[int, Any] = field(default_factory=dict)
    client_payloads: dict[int, bytes] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    gone: Mapping[int, int] | None = None
    counted: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What all have come for; if they have not come for the same, it is a round."""
        return next(iter(self.kinds)) if len(self.kinds) == 1 else BarrierKind.ROUND

    @property
    def complete(self) -> bool:
        """Whether nobody is waited for any more; stays true."""
        return self.gone is not None


MOST_NAMED = 8  # of those that are gone: a message fits a screen


class RunState:
    """State of one run; changed only by the methods here.

    Args:
        spec: What was asked for.
        now: Seconds on the clock that all methods are given.

    Attributes:
        timeouts: The bounds on waiting that the client chose.
        members: Who takes part.
        outboxes: What waits for each present replica.
        events: For the client, oldest first; see `post` and `take_events`.
        leases: Who trains on which rows, by phase ("train", "validation").
        barriers: Open ones, by key, which may be used again for the next one.
        stopped: Why the run was stopped; None while it runs.
        refused: Messages that were not understood.
        epoch: That runs now, counted from 0.
        interval: That runs now, counted from 0 over all epochs.
        report: Payloads of the last epoch's end, ``[replica, payload]`` each.
        holding: Whether updates have to wait, see `_complete`.
    """

    spec: RunSpec
    timeouts: Timeouts
    members: Membership
    outboxes: dict[int, Outbox]
    events: list[dict[str, Any]]
    leases: Mapping[str, Leasing]
    barriers: dict[str, OpenBarrier]
    stopped: str | None
    refused: int
    epoch: int
    interval: int
    report: Sequence[Any]
    holding: bool

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
        self.refused = 0
        self.epoch = spec.first_epoch
        self.interval = 0
        self.report = ()
        self.holding = False
        self._opened_at = self._enough_at = now
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
        self._ended = False  # a replica has come to the end of the run

    @property
    def has_enough(self) -> bool:
        """Whether as many replicas take part as were asked for at least."""
        return len(self.members.expected) >= self.spec.min_replicas

    # ---- events for the client

    def post(self, kind: str, **fields: Any) -> None:
        """Let the client know of something."""
        self.events.append({"kind": kind, **fields})

    def take_events(self) -> list[dict[str, Any]]:
        """What was posted since the last call."""
        events, self.events = self.events, []
        return events

    # ---- membership

    def join(self, replica: int, now: float) -> Outbox:
        """A replica takes part from now on; returns the queue of what it is sent."""
        members = self.members
        member, started = members.replicas[replica], members.started
        if started:
            # It needs no update from before, but within a snapshot.
            member.acknowledge(self._passed_on())
        else:
            # Those who wait for it at the start send nothing meanwhile.
            for one in members.replicas.values():
                one.heartbeat_at = now
        members.generation += 1
        member.joined, member.heartbeat_at = True, now
        self.outboxes[replica] = Outbox(self.spec.relay_bytes)
        if members.started:
            self._send_topology()
        return self.outboxes[replica]

    def topology(self) -> tuple[int, list[tuple[int, str]]]:
        """The generation, and all present replicas with their workers."""
        replicas = self.members.replicas
        present = [(r, replicas[r].worker) for r in self.members.present]
        return self.members.generation, present

    def activate(self, replica: int, step: int) -> None:
        """A joining replica has the common state: it trains from now on."""
        member = self.members.replicas[replica]
        if member.active:  # it asks again
            return
        member.active = True
        member.progress = member.progress._replace(step=step)
        self._send(Message(MessageKind.JOINED.value, replica, 0, step, 0), but=replica)
        self.post("joined", replica=replica, worker=member.worker)

    def lose(self, replica: int, why: str, now: float) -> None:
        """A replica has failed; the client learns why."""
        what = f"{self.members.describe([replica], now)}: {why}"
        if replica in self.members.expected:
            self._departed[replica] = what
            self._all_retired = False
        self.post("lost", replica=replica, summary=f"lost {what}")
        self.remove(replica)
        self._give_up_if_deserted()

    def leave(self, replica: int, now: float, *, retires: bool = False) -> None:
        """A replica has handed over what it had, or nobody wants it.

        Args:
            replica: Its number.
            now: Seconds.
            retires: Its worker closes, and it had not come to the end of the run.
        """
        members = self.members
        trained = replica in members.expected
        if not members.is_here(replica):  # given up before: its worker is free again
            self.post("worker", worker=members.replicas[replica].worker)
        elif retires:
            what = f"{members.describe([replica], now)}: it retired with its worker"
            if trained:
                self._departed[replica] = what
            self.post("retired", replica=replica, summary=what)
        else:
            self._ended |= trained
        self.remove(replica)
        if members.started and not members.expected:
            self.post("over", waiting=members.joining)
            self._give_up_if_deserted()

    def remove(self, replica: int) -> None:
        """A replica has gone: what it held is free, and no barrier waits for it."""
        if not self.members.is_here(replica):
            return
        member = self.members.replicas[replica]
        member.gone = True
        self.members.generation += 1
        self.outboxes.pop(replica, None)
        for leases in self.leases.values():
            leases.lose(replica)
        self._idle.pop(replica, None)
        self._send(
            Message(MessageKind.FAILED.value, replica, 0, member.progress.step, 0)
        )
        self._send_topology()
        self._complete_barriers()

    def _send(self, message: Message, but: int | None = None) -> None:
        for replica, box in self.outboxes.items():
            if replica != but:
                box.offer(message, force=True)

    def _send_topology(self) -> None:
        self._send(Message(MessageKind.MEMBERS.value, 0, 0, 0, 0, self.topology()))

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
        """The update of an origin up to which all others have its updates."""
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
        return self.spec.relayed or all(
            replicas[r].generation >= generation for r in self.members.training
        )

    def cut(self, replica: int) -> dict[int, int]:
        """Last update of each origin that the snapshot of a joining one has to contain.

        All later ones it is sent.
        """
        if self.spec.relayed:
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
        self._complete_barriers()
        return barrier

    def _complete_barriers(self) -> None:
        """Complete those at which nobody is waited for any more."""
        members = self.members.expected
        for key, barrier in list(self.barriers.items()):
            awaited = members - barrier.payloads.keys()
            if barrier.kind == BarrierKind.ROUND:
                awaited -= self._idle.keys()
            if members and not awaited and self.stopped is None:
                self._complete(key, barrier)

    def _complete(self, key: str, barrier: OpenBarrier) -> None:
        """Fix what everybody reads at a barrier.

        After an ``AGREE`` updates are held here until the next barrier is complete.
        Only replicas that leave have any then, one each, and what some survivors took
        in before they compare, all of them must.
        """
        del self.barriers[key]
        kind, payloads = barrier.kind, barrier.payloads
        gone = barrier.gone = self.members.gone
        self.holding = kind == BarrierKind.AGREE
        if not self.holding:
            for message in self._held:
                self._send(message, but=message.origin)
            self._held.clear()
        if kind == BarrierKind.ROUND:
            payloads.update({**self._idle, **payloads})
        elif kind == BarrierKind.AGREE:
            barrier.counted = {"present": len(self.members.present)}
        elif kind == BarrierKind.SYNC:
            departed = self._trained_by_departed(payloads.keys() - gone.keys())
            barrier.counted = {"departed": departed}
        elif kind == BarrierKind.REPORT:
            self._end_epoch(key, barrier)
        if kind in (BarrierKind.REPORT, BarrierKind.SYNC):
            self.interval += 1
            self._interval_began_at = None
            self.leases["train"].begin_interval()

    def _end_epoch(self, key: str, barrier: OpenBarrier) -> None:
        barrier.counted = {
            "refused": self.refused - self._refused_before,
            "repeated": self.leases["train"].repeated,
            "departed": self._trained_by_departed(barrier.payloads),
        }
        self.report = [[r, payload] for r, payload in sorted(barrier.payloads.items())]
        self.post(
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
        idle_payload: Any = None,
    ) -> None:
        """A replica has finished leases; an interval that has taken long enough ends.

        Args:
            replica: Who asks.
            phase: Of the data.
            epoch: Counted from 0.
            finished: Its leases.
            now: Seconds.
            idle_payload: Not None: it waits for a lease, and rounds take this as its
                payload meanwhile.

        Raises:
            ValueError: If the epoch is over, or has not begun.
        """
        leases = self._leases(phase, epoch)
        for lease in finished:
            own = leases.finish(replica, lease["lease"])
            if phase == "train":
                self.post("progress", epoch=epoch, **lease)
                before, _ = self._trained.get(replica, (0, 0.0))
                examples = before + (lease["examples"] if own else 0)
                self._trained[replica] = examples, lease.get("loss", 0.0)
        if self._interval_began_at is None:
            self._interval_began_at = now
        bound_s = self.spec.intervals.seconds
        if bound_s is not None and now - self._interval_began_at >= bound_s:
            self.leases["train"].end_interval()
        if idle_payload is not None:
            self._idle[replica] = idle_payload
            self._complete_barriers()

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
        if epoch > self.epoch:
            raise ValueError(f"epoch {epoch} has not begun, this is {self.epoch}")
        leases = self.leases[phase]
        leases.open(epoch, self.members.expected)
        return leases

    # ---- the end

    def check_deadlines(self, now: float) -> list[int]:
        """Give up a run that waits for too many for too long.

        Returns:
            Replicas without a heartbeat for too long, which have failed.
        """
        timeouts, members = self.timeouts, self.members
        if members.absent and now - self._opened_at > timeouts.join:
            self.give_up_late(timeouts.bound("join"), now)
        if self.has_enough:
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

    def _give_up_if_deserted(self) -> None:
        """Nobody is left to train, and nobody came to the end."""
        if self.members.expected or self._ended:
            return
        gone = sorted(self._departed)
        more = f" and {len(gone) - MOST_NAMED} more" if len(gone) > MOST_NAMED else ""
        if self._all_retired:
            replicas = self.members.replicas
            workers = [*dict.fromkeys(replicas[r].worker for r in gone)]
            error: DaskDLError = RunError(
                f"all workers have retired: {', '.join(workers[:MOST_NAMED])}{more}; "
                "nobody is left to train; fit again, on workers that stay longer, to "
                "go on"
            )
        else:
            who = "; ".join(self._departed[r] for r in gone[:MOST_NAMED])
            error = WaitTimeoutError(f"no replica is left: lost {who}{more}")
        self.give_up(error)

    def give_up(self, error: DaskDLError) -> None:
        """The run cannot go on, and no replica's code is the reason."""
        if self.stopped is None:
            kind, summary = type(error).__name__, str(error)
            self.post("failed", type=kind, summary=summary)
            self.stop(summary)

    def fail(self, replica: int, failure: Mapping[str, Any]) -> None:
        """A replica cannot go on: the run ends, and the client learns why."""
        summary = failure["summary"]
        if replica in self.members.joining:  # it ends nobody's run
            self.post("not joined", replica=replica, summary=shown(summary, 500))
            return
        worker = self.members.replicas[replica].worker
        self.post("failed", replica=replica, worker=worker, **failure)
        self.stop(f"replica {replica} failed: {summary}")

    def stop(self, reason: str) -> None:
        """Tell every replica to leave; the first reason stays."""
        if self.stopped is None:
            self.stopped = reason
            self._send(Message(MessageKind.STOP.value, 0, 0, 0, len(reason), reason))
            self.post("stopped", summary=reason)
