"""The sending half of a replica's channel, whatever way updates go."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from daskdl.channel.gauge import Gauge
from daskdl.channel.messages import Item
from daskdl.channel.routes import Routes
from daskdl.thresholds import Drained

BEAT_S = 1.0  # most time between two signs of life


class Backlog(NamedTuple):
    """What waits to be sent, for messages."""

    updates: int
    nbytes: int
    destination: str


class Carrier(ABC):
    """Carries what one replica publishes, and says to the scheduler that it lives.

    Attributes:
        progress: Steps completed, and the last lap done.
        sequence: Of the last update that was accepted, 0 if there is none.
        gauge: Of what leaves here.
    """

    progress: tuple[int, int]
    sequence: int
    gauge: Gauge

    def __init__(self) -> None:
        self.progress = (0, -1)
        self.sequence = 0
        self.gauge = Gauge()

    # ---- event loop

    @abstractmethod
    async def run(self) -> None:
        """Carry until cancelled. What makes it end is told to the connection."""

    @abstractmethod
    def end(self) -> None:
        """Send nothing more; `run` is cancelled too."""

    @abstractmethod
    def adopt(self, routes: Routes, workers: Mapping[int, str]) -> None:
        """The scheduler says who the members are now.

        Args:
            routes: Of a generation, perhaps not the latest one.
            workers: Address of each member's worker.
        """

    @abstractmethod
    def forward(self, item: Item) -> None:
        """Pass on what another replica sent, if it is this one's turn.

        Args:
            item: The first copy that came here of an update, or news of progress.
        """

    @abstractmethod
    def find(self, origin: int, sequences: Iterable[int]) -> list[Item]:
        """Updates that are kept for those who missed them, ascending."""

    @abstractmethod
    def keep(self, item: Item) -> None:
        """Keep an update of another replica for a while, see `find`."""

    # ---- training thread

    @abstractmethod
    def offer(self, item: Item, *, force: bool = False) -> bool:
        """Take an update to carry; False if there is no room.

        Args:
            item: Of this replica, the next in sequence.
            force: Take it whatever the bounds.
        """

    @abstractmethod
    def has_room(self) -> bool:
        """Whether an update may be taken now; if not, it surely is not."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether the next update is taken, whatever its size."""

    @abstractmethod
    def sent(self) -> bool:
        """Whether all updates of this replica have arrived where they go first."""

    @abstractmethod
    def wait_until_sent(self, timeout_s: float) -> bool:
        """Block until `sent`, whether the run was stopped or not; False on time-out."""

    @abstractmethod
    def backlog(self) -> Backlog:
        """What waits to be sent."""

    @abstractmethod
    def drained(self) -> Drained:
        """What has left since the last call."""

    @abstractmethod
    def complete(self, step: int, done: int) -> None:
        """Tell the others how far this replica is: `progress` is set from these."""
