"""What the scheduler knows of a run: members, barriers, queues, acknowledgements, work.

A request goes in, and what is to be sent comes out. No I/O, no clock, no thread, so
that every case can be tested by calling it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from daskdl.channel.leasing import Done, Lease, Leases, Pause, RunPlan, Schedule
from daskdl.channel.protocol import Barrier, Item, ItemKind
from daskdl.channel.sender import Outbox
from daskdl.config import Bound, Timeouts
from daskdl.errors import DaskDLError, RunError, WaitTimeoutError


class EventLog:
    """Numbered events; those a reader has confirmed are dropped."""

    def __init__(self) -> None:
        self._first = 0
        self._events: list[dict[str, Any]] = []

    def __len__(self) -> int:
        """How many were posted in all."""
        return self._first + len(self._events)

    def post(self, kind: str, **fields: Any) -> None:
        """Append an event."""
        self._events.append({"kind": kind, **fields})

    def since(self, seen: int) -> list[dict[str, Any]]:
        """Events after the `seen` first ones, which are confirmed by asking."""
        confirmed = min(max(seen - self._first, 0), len(self._events))
        del self._events[:confirmed]
        self._first += confirmed
        return list(self._events)


class Gathering:
    """Complete once every present member has arrived.

    A member lost after it arrived keeps its note: what it had sent, all
    survivors have. A member lost before is not waited for.
    """

    notes: dict[int, Any]
    told: dict[int, bytes]  # for the client alone
    gone: dict[int, int] | None  # set once: everybody has to read the same
    counted: Mapping[str, Any]  # likewise, see `Gathered`

    def __init__(self) -> None:
        self.notes, self.told = {}, {}
        self.gone = None
        self.counted = {}
        self._kinds: set[str] = set()

    @property
    def kind(self) -> str:
        """What all have come for; if not all for the same, it is a round."""
        return next(iter(self._kinds)) if len(self._kinds) == 1 else Barrier.ROUND

    def arrive(
        self, replica: int, note: Any, told: bytes = b"", kind: str = Barrier.MEET
    ) -> None:
        """A member is here; arriving again (a retried request) changes nothing."""
        self._kinds.add(kind)
        self.notes.setdefault(replica, note)
        self.told.setdefault(replica, told)

    def awaited(self, members: Collection[int]) -> list[int]:
        """Present members that have not arrived yet, ascending."""
        return sorted(set(members) - set(self.notes))

    def over(self, members: Collection[int]) -> bool:
        """Whether it is complete; for good, as whoever becomes a member comes later."""
        return self.gone is not None or not self.awaited(members)


class Barriers:
    """Open gatherings, and what those have said that wait for a lease meanwhile.

    A key may be used again and again: whoever comes after a gathering is settled is
    the first of the next one.

    Attributes:
        open: Gatherings that are not settled, by key.
    """

    open: dict[str, Gathering]

    def __init__(self) -> None:
        self.open = {}
        self._standing_by: dict[int, Any] = {}

    def arrive(
        self,
        key: str,
        replica: int,
        note: Any,
        told: bytes = b"",
        kind: str = Barrier.MEET,
    ) -> Gathering:
        """A replica is at a barrier."""
        gathering = self.open.setdefault(key, Gathering())
        gathering.arrive(replica, note, told, kind)
        return gathering

    def stand_by(self, replica: int, note: Any) -> None:
        """A replica waits for a lease: rounds take this for its note meanwhile."""
        self._standing_by[replica] = note

    def resume(self, replica: int) -> None:
        """It waits no longer, or is gone."""
        self._standing_by.pop(replica, None)

    def over(self, gathering: Gathering, members: Collection[int]) -> bool:
        """Whether nobody has to be waited for any more.

        Args:
            gathering: To look at.
            members: All that train.
        """
        if gathering.kind == Barrier.ROUND:
            members = set(members) - self._standing_by.keys()
        return gathering.over(members)

    def settle(self, key: str, gathering: Gathering, gone: Mapping[int, int]) -> None:
        """All are there that are waited for: what they read is written down.

        Args:
            key: Of the gathering.
            gathering: That is over.
            gone: Last update of those that left or were lost.
        """
        gathering.gone = dict(gone)
        if gathering.kind == Barrier.ROUND:
            for replica, note in self._standing_by.items():
                gathering.notes.setdefault(replica, note)
        self.open.pop(key, None)


@dataclass
class Progress:
    """The last that was heard of a replica."""

    heard_at: float = 0.0  # the plugin's clock, seconds
    sequence: int = 0  # of its last update that was relayed
    step: int = 0  # completed
    done: int = -1  # the last lap it is done with


class Members:
    """The replicas of one run.

    Args:
        seats: Worker address of each founder.

    Attributes:
        generation: Bumped by every join and loss.
        seats: Worker address of each replica there ever was.
        progress: The last that was heard of each replica that joined.
        gone: Last update of each replica that left or was lost.
    """

    generation: int
    seats: dict[int, str]
    progress: dict[int, Progress]
    gone: dict[int, int]

    def __init__(self, seats: Mapping[int, str]) -> None:
        self.generation = 0
        self.seats = dict(seats)
        self.progress = {}
        self.gone = {}
        self._active = set(seats)
        self._started = False

    @property
    def present(self) -> list[int]:
        """Replicas that joined and have not gone, ascending."""
        return sorted(self.progress.keys() - self.gone.keys())

    @property
    def expected(self) -> list[int]:
        """Whom barriers wait for: founders, and whoever is active; ascending."""
        return sorted(self._active - self.gone.keys())

    @property
    def absent(self) -> list[int]:
        """Founders that have not joined yet, ascending; nobody trains before."""
        return sorted(set(self.expected) - self.progress.keys())

    @property
    def started(self) -> bool:
        """Whether all founders have joined, so that whoever comes is a newcomer."""
        self._started = self._started or not self.absent
        return self._started

    @property
    def waiting(self) -> list[int]:
        """Newcomers that are not active yet, ascending."""
        return sorted(self.seats.keys() - self._active - self.gone.keys())

    def seat(self, worker: str) -> int:
        """Make room for one more replica, on this worker; return its number."""
        replica = max(self.seats) + 1
        self.seats[replica] = worker
        return replica

    def seated_on(self, worker: str) -> list[int]:
        """Replicas of a worker that have not gone, ascending."""
        return sorted(r for r, w in self.seats.items() if w == worker and self.here(r))

    def here(self, replica: int) -> bool:
        """Whether a replica has not gone."""
        return replica not in self.gone

    def join(self, replica: int, now: float) -> None:
        """A replica's task runs on its worker."""
        self.generation += 1
        if not self.started:
            # Those who wait for it at the start say nothing meanwhile.
            for progress in self.progress.values():
                progress.heard_at = now
        self.progress[replica] = Progress(heard_at=now)

    def activate(self, replica: int, step: int) -> None:
        """A newcomer has the common state, as of a step."""
        self._active.add(replica)
        self.progress[replica].step = step

    def remove(self, replica: int) -> None:
        """A replica has left, or was lost."""
        self.generation += 1
        self.gone[replica] = self.progress.get(replica, Progress()).sequence

    def step_of(self, replica: int) -> int:
        """Steps that a replica is known to have made."""
        progress = self.progress.get(replica)
        return 0 if progress is None else progress.step

    def silent_since(self, bound: float) -> list[int]:
        """Replicas of which nothing was heard since; nobody before the start."""
        if not self.started:
            return []
        return [r for r in self.present if self.progress[r].heard_at < bound]

    def donor(self) -> int | None:
        """Whose state a newcomer takes over: of the active, who is farthest."""
        there = [r for r in self.expected if r in self.progress]
        return max(there, key=lambda r: self.progress[r].step, default=None)

    def describe(self, replica: int, now: float) -> str:
        """A replica in words: who, where, and what was last heard, and when."""
        where = f"replica {replica} on {self.seats[replica]}"
        progress = self.progress.get(replica)
        if progress is None:
            return f"{where}, which has not joined"
        ago_s = max(now - progress.heard_at, 0.0)
        return (
            f"{where}, last heard at step {progress.step}, update "
            f"{progress.sequence}, {ago_s:.1f} s ago"
        )

    def describe_all(self, replicas: Iterable[int], now: float) -> str:
        """Some replicas in words; empty if there are none."""
        return "; ".join(self.describe(replica, now) for replica in replicas)

    def late(self, bound: Bound, now: float) -> WaitTimeoutError:
        """Say which founders did not join within a bound."""
        return WaitTimeoutError(
            f"not all replicas started within {bound}: "
            f"{self.describe_all(self.absent, now)}; is the worker busy with other "
            "tasks?"
        )

    def too_few(self, least: int, bound: Bound, now: float) -> WaitTimeoutError:
        """Say that there were fewer active ones for longer than a bound."""
        return WaitTimeoutError(
            f"fewer than min_replicas={least} replicas for {bound}: "
            f"{len(self.expected)} left; "
            f"gone: {self.describe_all(sorted(self.gone), now)}"
        )


@dataclass
class Standing:
    """What one replica told of itself.

    Attributes:
        generation: Of the routes it goes by; -1 until it told.
        adopted_at: Its last own update when it took these up, or later.
        received: All updates of an origin up to this one are there, by origin.
    """

    generation: int = -1
    adopted_at: int = 0
    received: dict[int, int] = field(default_factory=dict)


class Standings:
    """Of all replicas that are present.

    Example:
        >>> standings = Standings()
        >>> standings.join(0, {})
        >>> standings.join(1, {})
        >>> standings.tell(0, Standing(generation=2, adopted_at=5))
        True
        >>> standings.tell(1, Standing(generation=2, received={0: 3}))
        True
        >>> standings.cut([0, 1]), standings.stable(0, [0, 1], default=5)
        ({0: 5, 1: 0}, 3)
    """

    def __init__(self) -> None:
        self._standings: dict[int, Standing] = {}

    def join(self, replica: int, floor: Mapping[int, int]) -> None:
        """A replica is present.

        Args:
            replica: Its number.
            floor: It will need nothing up to here, by origin.
        """
        self._standings[replica] = Standing(received=dict(floor))

    def leave(self, replica: int) -> None:
        """A replica is gone."""
        self._standings.pop(replica, None)

    def tell(self, replica: int, told: Standing) -> bool:
        """A replica says how it stands; whether it goes by other routes now."""
        standing = self._standings[replica]
        changed = told.generation > standing.generation
        if changed:
            standing.generation = told.generation
            standing.adopted_at = told.adopted_at
        self.raise_floor(replica, told.received)
        return changed

    def raise_floor(self, replica: int, received: Mapping[int, int]) -> None:
        """A replica has more, or needs less."""
        known = self._standings[replica].received
        for origin, sequence in received.items():
            known[origin] = max(known.get(origin, 0), sequence)

    def adopted(self, replicas: Collection[int], generation: int) -> bool:
        """Whether all of these go by the routes of a generation, or by later ones."""
        return all(self._standings[r].generation >= generation for r in replicas)

    def cut(self, replicas: Collection[int]) -> dict[int, int]:
        """Last own update of each before it sent by the routes that it goes by."""
        return {r: self._standings[r].adopted_at for r in replicas}

    def stable(self, origin: int, replicas: Collection[int], default: int) -> int:
        """Up to where all others of these have an origin's updates.

        Args:
            origin: Whose updates.
            replicas: That have to have them.
            default: If there are no others.
        """
        others = [self._standings[r].received for r in replicas if r != origin]
        return min((received.get(origin, 0) for received in others), default=default)


class Work:
    """What replicas ask for, get, and give back.

    Args:
        plan: Of the run.
        members: Who takes part.
        schedule: What there is to train on.
        events: What the client is told.
    """

    def __init__(
        self, plan: RunPlan, members: Members, schedule: Schedule, events: EventLog
    ) -> None:
        self._plan = plan
        self._members = members
        self._schedule = schedule
        self._events = events
        self._lap_began_at: float | None = None
        # Of the epoch that runs, by replica: examples of finished pieces, mean loss.
        self._finished: dict[int, tuple[int, float]] = {}
        self._departed_before = plan.laps.departed

    @property
    def enough(self) -> bool:
        """Whether there are as many active replicas as were asked for."""
        return len(self._members.expected) >= self._plan.min_replicas

    def lease(
        self, replica: int, phase: str, epoch: int, is_near: Callable[[str], bool]
    ) -> Lease | None:
        """Lease a piece to a replica; None if it cannot have one now."""
        if not self.enough:
            return None
        near = self._schedule.nearest(phase, is_near)
        return self.leases(phase, epoch).take(replica, near)

    def look(self, now: float) -> None:
        """The clock says so much: a lap ends when it has taken long enough."""
        if self._lap_began_at is None:
            self._lap_began_at = now
        bound_s = self._plan.laps.seconds
        if bound_s is not None and now - self._lap_began_at >= bound_s:
            self._schedule.end_lap()

    def pause(self, replica: int, phase: str, epoch: int) -> Pause | None:
        """What one that gets no piece learns, if the lap is over and not the epoch."""
        leases = self.leases(phase, epoch)
        if not self.enough or not self._members.here(replica):
            return None
        over = leases.lap_is_over(self._members.expected)
        return Pause(self._plan.order, leases.left()) if over else None

    def give_back(
        self,
        replica: int,
        phase: str,
        epoch: int,
        finished: Sequence[Mapping[str, Any]],
    ) -> None:
        """A replica is through with pieces it had leased; the client learns of it."""
        for piece in finished:
            own = self.leases(phase, epoch).finish(replica, piece["piece"])
            if phase == "train":
                self._events.post("progress", epoch=epoch, **piece)
                before, _ = self._finished.get(replica, (0, 0.0))
                examples = before + (piece["examples"] if own else 0)
                self._finished[replica] = examples, piece.get("loss", 0.0)

    def departed(self, told: Collection[int]) -> list[Done]:
        """What those did in this epoch who have left or were lost in it.

        Args:
            told: Replicas that say themselves what they did.

        Returns:
            Of each of the others, as far as it finished pieces.
        """
        counted = [own for r, own in sorted(self._finished.items()) if r not in told]
        here = [Done(loss * examples, examples) for examples, loss in counted]
        return [*self._departed_before, *here]

    def end_epoch(self, told: Collection[int]) -> list[Done]:
        """Begin to count the next epoch; see `departed`, of this one."""
        departed = self.departed(told)
        self._finished.clear()
        self._departed_before = ()
        return departed

    def settled(self, replica: int, phase: str, epoch: int) -> bool:
        """Whether one that waits for a piece gets an answer: one, or none any more."""
        to_do = self.to_do(replica, phase, epoch)
        gone = not self._members.here(replica)
        return gone or (self.enough and to_do is not None)

    def to_do(self, replica: int, phase: str, epoch: int) -> bool | None:
        """Whether there is a piece for a replica; None if there may be one yet.

        There may, as long as somebody else holds one and can be lost.
        """
        leases = self.leases(phase, epoch)
        if leases.has_one_for(replica):
            return True
        if leases.lap_is_over(self._members.expected):
            return False
        return None if leases.unfinished() else False

    def leases(self, phase: str, epoch: int) -> Leases:
        """Of an epoch that is not over; see `Schedule.open`."""
        shares = self._members.expected if self._plan.synchronous else None
        return self._schedule.open(phase, epoch, shares)

    def begin_lap(self) -> None:
        """All have come together: go on."""
        self._lap_began_at = None
        self._schedule.begin_lap()


MOST_NAMED = 8  # of those that are gone: a message fits a screen


class RunRecord:
    """State of one run; changed only by the methods here.

    Args:
        plan: What was asked for.

    Attributes:
        members: Who takes part.
        schedule: What there is to train on.
        work: Who trains on what.
        outboxes: What waits for each present replica.
        events: What the client is told, in order.
        stopped: Why the run was stopped; None while it runs.
        refused: Messages that were not understood.
        epoch: That runs now, counted from 0.
        lap: That runs now, counted from 0 over all epochs.
        report: The notes of the epoch before, ``[replica, note]`` each.
        holding: Whether updates have to wait, see `complete`.
        standings: How replicas stand that send to each other.
        barriers: Where replicas meet.
        ended: Whether a replica has left that was not told to: at the run's end.
    """

    plan: RunPlan
    members: Members
    schedule: Schedule
    work: Work
    outboxes: dict[int, Outbox]
    events: EventLog
    stopped: str | None
    refused: int
    epoch: int
    report: Sequence[Any]
    holding: bool
    standings: Standings
    barriers: Barriers
    ended: bool

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.members = Members(plan.replicas)
        self.schedule = Schedule(plan.extents, plan.seed, plan.epochs_before, plan.laps)
        self.outboxes = {}
        self.events = EventLog()
        self.work = Work(plan, self.members, self.schedule, self.events)
        self.stopped = None
        self.refused = 0
        self.epoch = plan.first_epoch
        self.lap = 0
        self.report = ()
        self.holding = False
        self._held: list[Item] = []  # updates that wait, one of each that leaves
        self.standings = Standings()
        self.barriers = Barriers()
        self.ended = False
        self._refused_before = 0  # the epoch that runs
        self._departed: dict[int, str] = {}  # what became of those that trained
        self._all_retired = True

    @property
    def timeouts(self) -> Timeouts:
        """The bounds on waiting that the client chose."""
        return Timeouts(**self.plan.timeouts)

    def join(self, replica: int, now: float) -> Outbox:
        """A replica takes part from now on; returns the queue of what it is sent."""
        # Whoever joins needs no update that was there before, but in a snapshot.
        self.standings.join(replica, self.cut() if self.members.started else {})
        self.members.join(replica, now)
        self.outboxes[replica] = Outbox(self.plan.relay_bytes)
        if self.members.started:
            self._tell_routes()
        return self.outboxes[replica]

    def routes(self) -> tuple[int, list[tuple[int, str]]]:
        """Who sends to whom follows from this: the generation, and who is where."""
        members = self.members
        return members.generation, [(r, members.seats[r]) for r in members.present]

    def _tell_routes(self) -> None:
        self._tell(Item(ItemKind.ROUTES.value, 0, 0, 0, 0, self.routes()))

    def activate(self, replica: int, step: int) -> None:
        """A newcomer has the common state: it trains, and barriers wait for it."""
        self.members.activate(replica, step)
        self._tell(Item(ItemKind.JOINED.value, replica, 0, step, 0), but=replica)

    def cut(self) -> dict[int, int]:
        """Last update of each replica that was passed on.

        Whatever is later, one that joins now is sent; what is not, its donor has
        to have applied.
        """
        here = {r: p.sequence for r, p in self.members.progress.items()}
        return {**here, **self.members.gone}

    def adopted(self, generation: int) -> bool:
        """Whether all who train send by these routes, or by later ones."""
        training = set(self.members.expected) & set(self.members.present)
        return self.standings.adopted(training, generation)

    def exact_cut(self, newcomer: int) -> dict[int, int]:
        """Last update of each that trains that this newcomer is not sent.

        Only for routes that all have adopted; from then on nobody keeps for the
        newcomer what its snapshot will contain.
        """
        training = set(self.members.expected) & set(self.members.present)
        cut = self.standings.cut(sorted(training))
        self.standings.raise_floor(newcomer, cut)
        return cut

    def hear(
        self, origin: int, step: int, done: int, sequence: int, standing: Standing
    ) -> bool:
        """A replica of a mesh says how it stands; whether it took up other routes."""
        progress = self.members.progress[origin]
        progress.step = max(progress.step, step)
        progress.done = max(progress.done, done)
        progress.sequence = max(progress.sequence, sequence)
        return self.standings.tell(origin, standing)

    def stable(self, origin: int) -> int:
        """Up to where all others have an origin's updates."""
        sequence = self.members.progress[origin].sequence
        return self.standings.stable(origin, self.members.present, sequence)

    def words(self) -> list[tuple[int, int, int, int]]:
        """How far those that train are: number, last update, step, lap done."""
        said = ((r, self.members.progress.get(r)) for r in self.members.expected)
        return [(r, p.sequence, p.step, p.done) for r, p in said if p is not None]

    def publish(self, origin: int, items: Iterable[Item], step: int, done: int) -> int:
        """Queue a replica's items for all others, in order, while they have room.

        Args:
            origin: Who sends.
            items: Updates, oldest first.
            step: Steps it has completed, if all items are accepted.
            done: The last lap it is done with, -1 at first.

        Returns:
            How many items were accepted; the rest has to be sent again.
        """
        others = [box for replica, box in self.outboxes.items() if replica != origin]
        progress = self.members.progress[origin]
        accepted = 0
        for item in items:
            if self.holding:
                self._held.append(item)
            elif all(box.has_room(item.weight()) for box in others):
                self._tell(item, but=origin)
            else:
                return accepted
            progress.sequence = max(progress.sequence, item.sequence)
            progress.step = max(progress.step, item.step)
            accepted += 1
        self._advance(origin, step, done)
        return accepted

    def _advance(self, origin: int, step: int, done: int) -> None:
        progress = self.members.progress[origin]
        if step > progress.step or done > progress.done:
            progress.step = max(progress.step, step)
            progress.done = max(progress.done, done)
            kind, sequence = ItemKind.PROGRESS.value, progress.sequence
            item = Item(kind, origin, sequence, step, 0, progress.done)
            self._tell(item, but=origin)

    def _tell(self, item: Item, but: int | None = None) -> None:
        for replica, box in self.outboxes.items():
            if replica != but:
                box.offer(item, force=True)

    def over(self, gathering: Gathering) -> bool:
        """Whether nobody has to be waited for at a barrier."""
        return self.barriers.over(gathering, self.members.expected)

    def complete(self, key: str, gathering: Gathering) -> bool:
        """All are at a barrier; the first to notice settles what they read there.

        From an ``AGREE`` on updates are kept here until the next barrier is complete.
        Only replicas that leave have any then, one each, and what some survivors took
        in before they compare, all of them must.

        Args:
            key: Of the barrier.
            gathering: That is over.

        Returns:
            Whether this call was the first.
        """
        if gathering.gone is not None:
            return False
        self.barriers.settle(key, gathering, self.members.gone)
        self.holding = gathering.kind == Barrier.AGREE
        if not self.holding:
            for item in self._held:
                self._tell(item, but=item.origin)
            self._held.clear()
        if gathering.kind == Barrier.AGREE:
            gathering.counted = {"present": len(self.members.present)}
        if gathering.kind == Barrier.PAUSE:
            here = gathering.notes.keys() - self.members.gone.keys()
            gathering.counted = {"departed": self.work.departed(here)}
        if gathering.kind == Barrier.REPORT:
            notes = [[r, gathering.notes[r]] for r in sorted(gathering.notes)]
            told = [gathering.told[r] for r in sorted(gathering.told)]
            counted = {
                "refused": self.refused - self._refused_before,
                "repeated": self.schedule.repeated,
                "departed": self.work.end_epoch(gathering.notes),
            }
            self._refused_before = self.refused
            gathering.counted = counted
            about = {"key": key, "epoch": self.epoch}
            self.events.post("gathered", **about, notes=notes, told=told, **counted)
            self.report = notes
            self.epoch += 1
        if gathering.kind in (Barrier.REPORT, Barrier.PAUSE):
            self.lap += 1
            self.work.begin_lap()
        return True

    def remove(self, replica: int) -> None:
        """A replica has left, or was lost; what it held is free again."""
        if not self.members.here(replica):
            return
        self.members.remove(replica)
        self.standings.leave(replica)
        self.outboxes.pop(replica, None)
        self.schedule.lose(replica)
        self.barriers.resume(replica)
        step = self.members.step_of(replica)
        self._tell(Item(ItemKind.LOST.value, replica, 0, step, 0))
        self._tell_routes()

    def lose(self, replica: int, why: str, now: float) -> None:
        """A replica is gone without a word; the client learns why."""
        what = f"{self.members.describe(replica, now)}: {why}"
        if replica in self.members.expected:
            self._departed[replica] = what
            self._all_retired = False
        self.remove(replica)
        self.events.post("lost", replica=replica, summary=f"lost {what}")

    def retire(self, replica: int, now: float) -> None:
        """A replica has handed over and leaves before the end, with its worker."""
        what = f"{self.members.describe(replica, now)}: it retired with its worker"
        if replica in self.members.expected:
            self._departed[replica] = what
        self.remove(replica)
        self.events.post("retired", replica=replica, summary=what)

    def give_up_if_deserted(self) -> None:
        """Nobody is left to go on, and nobody came to the end: the client learns who.

        Nothing happens while somebody trains.
        """
        if self.members.expected or self.ended:
            return
        gone = sorted(self._departed)
        more = f" and {len(gone) - MOST_NAMED} more" if len(gone) > MOST_NAMED else ""
        if self._all_retired:
            seats = dict.fromkeys(self.members.seats[r] for r in gone)
            workers = f"{', '.join([*seats][:MOST_NAMED])}{more}"
            error: DaskDLError = RunError(
                f"all workers have retired: {workers}; nobody is left to train; fit "
                "again, on workers that stay longer, to go on"
            )
        else:
            who = "; ".join(self._departed[r] for r in gone[:MOST_NAMED])
            error = WaitTimeoutError(f"no replica is left: lost {who}{more}")
        self.give_up(error)

    def stop(self, reason: str) -> None:
        """Tell every replica to leave; the first reason stays."""
        if self.stopped is None:
            self.stopped = reason
            self._tell(Item(ItemKind.STOP.value, 0, 0, 0, len(reason), reason))
            self.events.post("stopped", summary=reason)

    def fail(self, replica: int, failure: Mapping[str, Any]) -> None:
        """A replica cannot go on: the run ends, and the client learns why."""
        worker = self.members.seats[replica]
        self.events.post("failed", replica=replica, worker=worker, **failure)
        self.stop(f"replica {replica} failed: {failure['summary']}")

    def give_up(self, error: DaskDLError) -> None:
        """The run cannot go on, for a reason that is nobody's failure."""
        if self.stopped is None:
            kind, summary = type(error).__name__, str(error)
            self.events.post("failed", type=kind, summary=summary)
            self.stop(summary)
