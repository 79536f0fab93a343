"""Who trains on what in a run, and when all have to come together. No I/O."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from daskdl.channel.events import EventLog
from daskdl.channel.leases import Done, Lease, Leases
from daskdl.channel.members import Members
from daskdl.channel.pause import Pause
from daskdl.channel.plan import RunPlan
from daskdl.channel.schedule import Schedule


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
