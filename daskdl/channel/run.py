"""What the scheduler knows of one run, and what follows from it. No I/O.

The record decides; the plugin around it sends. Two numbers identify
everything: `run`, one fit, and `generation`, bumped by every join and loss.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from daskdl.channel.events import EventLog
from daskdl.channel.gathering import Gathering
from daskdl.channel.leases import Leases, piece_order
from daskdl.channel.messages import Item, ItemKind
from daskdl.channel.outbox import Outbox
from daskdl.timeouts import Timeouts


@dataclass(frozen=True)
class RunPlan:
    """What a client asks for when it opens a run; plain values, sent as a dict.

    Attributes:
        run: Identity of the run, a random unsigned 64-bit integer.
        replicas: Worker address of each replica.
        pieces: For each phase ("train", "validation"), the Dask keys of its pieces.
        seed: Of the order of the training pieces; None keeps their order.
        epochs_before: Of earlier fits, so that each has an order of its own.
        synchronous: Fixed shares instead of first come, first served.
        relay_bytes: Bound of the relay's queue for each replica.
        timeouts: Bounds on waiting, seconds, by name.
    """

    run: int
    replicas: Mapping[int, str]
    pieces: Mapping[str, tuple[str, ...]]
    seed: int | None
    epochs_before: int
    synchronous: bool
    relay_bytes: int
    timeouts: Mapping[str, float]


@dataclass
class Progress:
    """The last that was heard of a replica."""

    heard_at: float = 0.0  # the plugin's clock, seconds
    sequence: int = 0  # of its last update that was relayed
    step: int = 0  # completed
    done: int = -1  # the last epoch it is done with


@dataclass
class RunRecord:
    """State of one run; changed only by the methods here.

    Attributes:
        plan: What was asked for.
        generation: Bumped by every join and loss.
        outboxes: What waits for each present replica.
        progress: The last that was heard of each replica.
        events: What the client is told, in order.
        stopped: Why the run was stopped; None while it runs.
        refused: Messages that were not understood.
        _gone: Last update of each replica that left or was lost.
        _holding: Whether updates have to wait, see `complete`.
        _held: Those that wait.
    """

    plan: RunPlan
    generation: int = 0
    outboxes: dict[int, Outbox] = field(default_factory=dict)
    progress: dict[int, Progress] = field(default_factory=dict)
    events: EventLog = field(default_factory=EventLog)
    stopped: str | None = None
    refused: int = 0
    _gone: dict[int, int] = field(default_factory=dict)
    _holding: bool = False
    _held: list[Item] = field(default_factory=list)
    _gatherings: dict[str, Gathering] = field(default_factory=dict)
    _leases: dict[str, tuple[int, Leases]] = field(default_factory=dict)

    @property
    def timeouts(self) -> Timeouts:
        """The bounds on waiting that the client chose."""
        return Timeouts(**self.plan.timeouts)

    @property
    def members(self) -> list[int]:
        """Replicas that joined and are present, ascending."""
        return sorted(self.outboxes)

    @property
    def expected(self) -> list[int]:
        """Replicas that are present or still to come, ascending."""
        return [r for r in self.plan.replicas if r not in self._gone]

    @property
    def absent(self) -> list[int]:
        """Replicas that are still to come, ascending."""
        return sorted(set(self.expected) - set(self.outboxes))

    def join(self, replica: int, now: float) -> Outbox:
        """A replica takes part from now on; returns the queue of what it is sent."""
        self.generation += 1
        self.progress[replica] = Progress()
        # Those who wait for it at the start say nothing meanwhile.
        for progress in self.progress.values():
            progress.heard_at = now
        self.outboxes[replica] = Outbox(self.plan.relay_bytes)
        return self.outboxes[replica]

    def publish(self, origin: int, items: Iterable[Item], step: int, done: int) -> int:
        """Queue a replica's items for all others, in order, while they have room.

        Args:
            origin: Who sends.
            items: Updates, oldest first.
            step: Steps it has completed, if all items are accepted.
            done: The last epoch it is done with, -1 at first.

        Returns:
            How many items were accepted; the rest has to be sent again.
        """
        others = [self.outboxes[r] for r in self.members if r != origin]
        progress = self.progress[origin]
        accepted = 0
        for item in items:
            if self._holding:
                self._held.append(item)
            elif all(box.has_room(item.weight()) for box in others):
                self._pass_on(item)
            else:
                return accepted
            progress.sequence = max(progress.sequence, item.sequence)
            progress.step = max(progress.step, item.step)
            accepted += 1
        self._advance(origin, step, done)
        return accepted

    def _pass_on(self, item: Item) -> None:
        for replica, box in self.outboxes.items():
            if replica != item.origin:
                box.offer(item, force=True)

    def _advance(self, origin: int, step: int, done: int) -> None:
        progress = self.progress[origin]
        if step > progress.step or done > progress.done:
            progress.step = max(progress.step, step)
            progress.done = max(progress.done, done)
            item = Item(ItemKind.PROGRESS.value, origin, 0, step, 0, progress.done)
            self._tell(item, but=origin)

    def _tell(self, item: Item, but: int | None = None) -> None:
        for replica, box in self.outboxes.items():
            if replica != but:
                box.offer(item, force=True)

    def lease(
        self, replica: int, phase: str, epoch: int, is_near: Callable[[str], bool]
    ) -> int | None:
        """Lease a piece to a replica; None if this epoch has none left for it."""
        keys = self.plan.pieces[phase]
        leases = self._leases_of(phase, epoch)
        return leases.take(replica, lambda piece: is_near(keys[piece]))

    def finish(self, replica: int, phase: str, epoch: int, piece: int) -> bool:
        """A replica is through with a piece it had leased."""
        return self._leases_of(phase, epoch).finish(replica, piece)

    def _leases_of(self, phase: str, epoch: int) -> Leases:
        current = self._leases[phase][0] if phase in self._leases else -1
        if epoch < current:
            raise ValueError(f"epoch {epoch} of {phase} is over, this is {current}")
        if epoch > current:
            seed = self.plan.seed if phase == "train" else None
            turn = self.plan.epochs_before + epoch
            order = piece_order(len(self.plan.pieces[phase]), turn, seed)
            shares = self.expected if self.plan.synchronous else None
            self._leases[phase] = (epoch, Leases(order, shares))
        return self._leases[phase][1]

    def arrive(self, key: str, replica: int, note: Any) -> Gathering:
        """A replica is at a barrier."""
        gathering = self._gatherings.setdefault(key, Gathering())
        gathering.arrive(replica, note)
        return gathering

    def complete(self, key: str, gathering: Gathering, *, hold: bool) -> bool:
        """All are at a barrier; the first to notice settles what they read there.

        Args:
            key: Of the barrier.
            gathering: That has nobody to wait for any more.
            hold: Whether updates are kept here from now until the next barrier is
                complete. Only replicas that leave have any then, one each, and what
                some survivors took in before they compare, all of them must.

        Returns:
            Whether this call was the first.
        """
        if gathering.gone is not None:
            return False
        gathering.gone = dict(self._gone)
        self._holding = hold
        if not hold:
            for item in self._held:
                self._pass_on(item)
            self._held.clear()
        self._gatherings.pop(key, None)
        return True

    @property
    def gone(self) -> dict[int, int]:
        """Replicas that left or were lost, and the last update of each."""
        return dict(self._gone)

    @property
    def repeated(self) -> int:
        """Training pieces handed out again because their replica was lost."""
        return self._leases["train"][1].repeated if "train" in self._leases else 0

    def lose(self, replica: int) -> None:
        """A replica is gone without a word; what it held is free again."""
        self._remove(replica)

    def leave(self, replica: int) -> None:
        """A replica has delivered everything and goes."""
        self._remove(replica)

    def _remove(self, replica: int) -> None:
        self.generation += 1
        self._gone[replica] = self.progress.get(replica, Progress()).sequence
        self.outboxes.pop(replica, None)
        for _, leases in self._leases.values():
            leases.lose(replica)
        step = self.progress.get(replica, Progress()).step
        self._tell(Item(ItemKind.LOST.value, replica, 0, step, 0))

    def stop(self, reason: str) -> None:
        """Tell every replica to leave; the first reason stays."""
        if self.stopped is None:
            self.stopped = reason
            self._tell(Item(ItemKind.STOP.value, 0, 0, 0, len(reason), reason))

    def silent(self, now: float) -> list[int]:
        """Members nothing was heard of for longer than the time-out.

        Before all have joined nobody says anything: that wait has its own bound.
        """
        if self.absent:
            return []
        bound = now - self.timeouts.silence
        return [r for r in self.members if self.progress[r].heard_at < bound]

    def describe(self, replica: int) -> str:
        """A replica in words: who, where, and what was last heard."""
        progress = self.progress.get(replica)
        where = f"replica {replica} on {self.plan.replicas[replica]}"
        if progress is None:
            return f"{where}, which has not joined"
        return (
            f"{where}, last heard at step {progress.step}, update {progress.sequence}"
        )

    def announce(self, key: str, gathering: Gathering) -> None:
        """Tell the client what all members said at a barrier."""
        self.events.post(
            "gathered",
            key=key,
            notes=[[r, gathering.notes[r]] for r in sorted(gathering.notes)],
            refused=self.refused,
            repeated=self.repeated,
        )
