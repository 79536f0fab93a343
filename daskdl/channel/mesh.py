"""Routing ``mesh``: updates go from worker to worker, along one tree per origin."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from daskdl.channel import messages
from daskdl.channel.carrier import BEAT_S, Backlog, Carrier
from daskdl.channel.connection import Connection
from daskdl.channel.heard import Word
from daskdl.channel.inbox import Inbox
from daskdl.channel.messages import Item, ItemKind
from daskdl.channel.neighbour import Neighbour
from daskdl.channel.outbox import Outbox
from daskdl.channel.pump import Pump
from daskdl.channel.ring import Ring
from daskdl.channel.routes import RouteBook, Routes
from daskdl.channel.unconfirmed import Unconfirmed
from daskdl.errors import DaskDLError
from daskdl.thresholds import Drained

BEAT_PACE_S = 0.05  # least time between two signs of life


class Mesh(Carrier):
    """One queue for each neighbour, and signs of life to the scheduler.

    What is of others is passed on while there is room; what is not passed on is
    counted, and asked for by who misses it. So nobody waits for anybody in a circle.

    Args:
        connection: Of this replica.
        inbox: Where what others send arrives.
        received: All updates up to this one were received, by origin.

    Attributes:
        forwards_dropped: Updates of others that were not passed on.
    """

    forwards_dropped: int

    def __init__(
        self,
        connection: Connection,
        inbox: Inbox,
        received: Callable[[], Mapping[int, int]],
    ) -> None:
        super().__init__()
        endpoint = connection.endpoint
        self.forwards_dropped = 0
        self._connection = connection
        self._inbox = inbox
        self._received = received
        self._replica = endpoint.replica
        self._own = Unconfirmed(endpoint.outbox_bytes)
        self._others = Ring(endpoint.inbox_bytes)
        self._book = RouteBook()
        self._adopted_at = 0  # last own update when the current routes came
        self._neighbours: dict[int, Neighbour] = {}  # replaced, never changed
        self._workers: Mapping[int, str] = {}
        self._routing = threading.Lock()  # an update is of one generation
        self._ended = False
        self._unreported: dict[int, int] = {}  # bytes by origin since the last beat
        self._beat = Pump(
            Outbox(0),
            self._live,
            pace_s=BEAT_PACE_S,
            beat_s=min(BEAT_S, endpoint.timeouts.silence / 4),
            bound=endpoint.timeouts.bound("request"),
            destination="the scheduler",
        )

    # ---- event loop

    @override
    async def run(self) -> None:
        try:
            await self._beat.run()
        except (DaskDLError, OSError) as error:
            self._connection.fail(error)

    async def _live(self, items: Sequence[Item]) -> int:
        self._unreported.clear()
        generation, adopted_at = self._book.current.generation, self._adopted_at
        step, done = self.progress
        answer = await self._connection.tell_scheduler(
            messages.PUBLISH,
            origin=self._replica,
            items=[],
            step=step,
            done=done,
            standing={
                "generation": generation,
                "adopted_at": adopted_at,
                "sequence": self.sequence,
                "received": list(self._received().items()),
            },
        )
        self._learn(answer)
        return 0

    def _learn(self, answer: Mapping[str, Any]) -> None:
        self._inbox.hear(
            {
                o: Word(*word)
                for o, *word in answer.get("words", ())
                if o != self._replica
            }
        )
        if self._own.confirm(answer.get("stable", 0)):
            self._inbox.wake()
        if self._own.pressed:
            self._beat.wake()

    @override
    def end(self) -> None:
        self._ended = True
        for neighbour in self._neighbours.values():
            neighbour.end()

    @override
    def adopt(self, routes: Routes, workers: Mapping[int, str]) -> None:
        with self._routing:
            if self._ended or not self._book.adopt(routes):
                return
            self._adopted_at = self.sequence
            self._workers = workers
            former = self._neighbours
            self._neighbours = {
                replica: former.get(replica) or self._connect(replica)
                for replica in routes.members
                if replica in former or replica in routes.neighbours(self._replica)
            }
        for replica in former.keys() - self._neighbours.keys():
            former[replica].end()
        self._beat.wake()  # a newcomer waits for this word
        self._inbox.wake()

    def _connect(self, replica: int) -> Neighbour:
        worker = self._workers[replica]
        return Neighbour(replica, worker, self._connection, self._inbox, self.gauge)

    @override
    def forward(self, item: Item) -> None:
        routes = self._book.for_generation(item.generation)
        for child in routes.children(item.origin, self._replica):
            neighbour = self._neighbour(child)
            if neighbour is None:
                continue
            if item.kind == ItemKind.PROGRESS:
                neighbour.tell(item)
            elif self._may_forward(item):
                neighbour.forward(item)
            else:
                self.forwards_dropped += 1

    def _neighbour(self, replica: int) -> Neighbour | None:
        """Also one that only an older generation makes a neighbour."""
        known = replica in self._workers and not self._ended
        if known and replica not in self._neighbours:
            more = {replica: self._connect(replica)}
            self._neighbours = {**self._neighbours, **more}
        return self._neighbours.get(replica)

    def _may_forward(self, item: Item) -> bool:
        waiting = sum(n.forwarded_bytes for n in self._neighbours.values())
        limit = self._connection.endpoint.inbox_bytes
        return not waiting or waiting + item.weight() <= limit

    @override
    def find(self, origin: int, sequences: Iterable[int]) -> list[Item]:
        if origin == self._replica:
            return self._own.find(sequences)
        return self._others.find(origin, sequences)

    @override
    def keep(self, item: Item) -> None:
        self._others.keep(item)
        more = self._unreported.get(item.origin, 0) + item.weight()
        self._unreported[item.origin] = more
        # Its origin can publish no more than so much before it hears of it.
        if more > self._connection.endpoint.outbox_bytes // 4:
            self._beat.wake()

    # ---- training thread

    @override
    def offer(self, item: Item, *, force: bool = False) -> bool:
        with self._routing:
            # What waits for a neighbour is not confirmed: this bounds that too.
            if not force and not self._own.has_room():
                return False
            routes = self._book.current
            item = item._replace(generation=routes.generation)
            self._own.keep(item)
            self.sequence = item.sequence
            for child in self._children(routes):
                child.offer(item)
        if self._own.pressed:
            self._wake_beat()
        return True

    def _children(self, routes: Routes) -> list[Neighbour]:
        neighbours = self._neighbours
        children = routes.children(self._replica, self._replica)
        return [neighbours[child] for child in children]

    def _wake_beat(self) -> None:
        self._connection.loop.call_soon_threadsafe(self._beat.wake)

    @override
    def has_room(self) -> bool:
        return self._own.has_room()

    @override
    def ready(self) -> bool:
        return self._own.has_room()

    @override
    def sent(self) -> bool:
        return all(neighbour.sent() for neighbour in self._neighbours.values())

    @override
    def wait_until_sent(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        return all(
            neighbour.wait_until_sent(deadline - time.monotonic())
            for neighbour in self._neighbours.values()
        )

    @override
    def backlog(self) -> Backlog:
        return Backlog(len(self._own), self._own.nbytes, "all others")

    @override
    def drained(self) -> Drained:
        # In a round of all, a replica sends as many frames as there are others: those
        # of its own that others pass on are as many as it passes on for them.
        return self.gauge.take(copies=max(len(self._book.current.members) - 1, 1))

    @override
    def complete(self, step: int, done: int) -> None:
        done = max(done, self.progress[1])
        self.progress = (step, done)
        with self._routing:
            routes = self._book.current
            children = self._children(routes)
            kind, generation = ItemKind.PROGRESS.value, routes.generation
            item = Item(kind, self._replica, self.sequence, step, 0, done, generation)
        for child in children:
            child.tell(item)
