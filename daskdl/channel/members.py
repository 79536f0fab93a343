"""Who takes part in a run, and what was last heard of each. No I/O, no clock.

A replica is *seated* on a worker, *joins* when its task runs there, and is
*active* once it has the common state. Those a run begins with, its founders,
have it from the start: they are active as soon as all of them have joined. Later
ones join, take over the state of an active one, and are active then. Every join
and every loss is a new generation.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from daskdl.errors import WaitTimeoutError
from daskdl.timeouts import Bound


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
