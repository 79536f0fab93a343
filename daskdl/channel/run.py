"""What the scheduler knows of one run, and what follows from it. No I/O.

The record decides; the plugin around it sends. Two numbers identify
everything: `run`, one fit, and `generation`, bumped by every join and loss.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from daskdl.channel.barriers import Barriers
from daskdl.channel.events import EventLog
from daskdl.channel.gathering import Gathering
from daskdl.channel.members import Members
from daskdl.channel.messages import Barrier, Item, ItemKind
from daskdl.channel.outbox import Outbox
from daskdl.channel.plan import RunPlan
from daskdl.channel.schedule import Schedule
from daskdl.channel.standings import Standing, Standings
from daskdl.channel.work import Work
from daskdl.errors import DaskDLError, RunError, WaitTimeoutError
from daskdl.timeouts import Timeouts

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
