"""Routing ``plain``: updates go to the scheduler, which relays them to the others."""

from collections.abc import Iterable, Mapping, Sequence

from typing_extensions import override

from daskdl.channel import messages
from daskdl.channel.carrier import BEAT_S, Backlog, Carrier
from daskdl.channel.connection import Connection
from daskdl.channel.inbox import Inbox
from daskdl.channel.messages import Item
from daskdl.channel.outbox import Outbox
from daskdl.channel.payloads import fields_of
from daskdl.channel.pump import Pump
from daskdl.channel.ring import Ring
from daskdl.channel.routes import Routes
from daskdl.errors import DaskDLError
from daskdl.thresholds import Drained

PACE_S = 0.005  # least time between two requests to the relay
# Updates that are kept though they fill more than an outbox. Who misses one asks for it
# a second later; as many dense ones of some MB take about that long to be sent.
RECENT = 16


class Relay(Carrier):
    """One queue, to the scheduler.

    Args:
        connection: Of this replica.
        inbox: Whoever waits there is woken when there may be room again.
    """

    def __init__(self, connection: Connection, inbox: Inbox) -> None:
        super().__init__()
        endpoint = connection.endpoint
        self._connection = connection
        self._replica = endpoint.replica
        self._outbox = Outbox(endpoint.outbox_bytes)
        self._outbox.on_drop = inbox.wake
        self._ring = Ring(endpoint.outbox_bytes)
        self._ring_most = endpoint.inbox_bytes
        self._last_step = 0

    # ---- event loop

    @override
    async def run(self) -> None:
        timeouts = self._connection.endpoint.timeouts
        pump = Pump(
            self._outbox,
            self._send,
            pace_s=PACE_S,
            beat_s=min(BEAT_S, timeouts.silence / 4),
            bound=timeouts.bound("request"),
            destination="the scheduler",
        )
        loop = self._connection.loop
        self._outbox.on_offer = lambda: loop.call_soon_threadsafe(pump.wake)
        try:
            await pump.run()
        except (DaskDLError, OSError) as error:
            self._connection.fail(error)

    async def _send(self, items: Sequence[Item]) -> int:
        # Progress beyond the batch would overtake the updates still waiting. It is
        # read first: what was queued before it was set is then counted as waiting.
        step, done = self.progress
        if len(items) != len(self._outbox):
            step, done = 0, -1
        with self.gauge.request(items):
            answer = await self._connection.tell_scheduler(
                messages.PUBLISH,
                origin=self._replica,
                items=[fields_of(item) for item in items],
                step=step,
                done=done,
            )
        accepted = int(answer.get("accepted", 0))
        self.gauge.arrived(items[:accepted])
        return accepted

    @override
    def end(self) -> None:
        pass  # there is but one task

    @override
    def adopt(self, routes: Routes, workers: Mapping[int, str]) -> None:
        pass  # the relay knows

    @override
    def forward(self, item: Item) -> None:
        pass  # the relay sends to all

    @override
    def find(self, origin: int, sequences: Iterable[int]) -> list[Item]:
        return self._ring.find(origin, sequences)

    @override
    def keep(self, item: Item) -> None:
        pass  # its origin does

    # ---- training thread

    @override
    def offer(self, item: Item, *, force: bool = False) -> bool:
        if not self._outbox.offer(item, force=force):
            return False
        # Never less again: small ones may follow before it is asked for.
        wanted = min(RECENT * item.weight(), self._ring_most)
        self._ring.limit_bytes = max(self._ring.limit_bytes, wanted)
        self._ring.keep(item)
        self.sequence = item.sequence
        self._last_step = item.step
        return True

    @override
    def has_room(self) -> bool:
        outbox = self._outbox
        return len(outbox) == 0 or outbox.nbytes < outbox.limit_bytes

    @override
    def ready(self) -> bool:
        return self.sent()

    @override
    def sent(self) -> bool:
        return len(self._outbox) == 0

    @override
    def wait_until_sent(self, timeout_s: float) -> bool:
        return self._outbox.wait_for(lambda box: len(box) == 0, timeout_s)

    @override
    def backlog(self) -> Backlog:
        return Backlog(len(self._outbox), self._outbox.nbytes, "the scheduler")

    @override
    def drained(self) -> Drained:
        return self.gauge.take(copies=1)

    @override
    def complete(self, step: int, done: int) -> None:
        former = self.progress[1]
        self.progress = (step, max(done, former))
        # A published update of this step says the same, and has woken the pump.
        if done > former or step != self._last_step:
            self._outbox.on_offer()
