"""One replica that another one sends to directly: a queue, and what empties it."""

import asyncio
import logging
import threading
from collections.abc import Sequence

from daskdl.channel import messages
from daskdl.channel.connection import Connection
from daskdl.channel.gauge import Gauge
from daskdl.channel.inbox import Inbox
from daskdl.channel.messages import Answer, Item
from daskdl.channel.outbox import Outbox
from daskdl.channel.payloads import fields_of
from daskdl.channel.pump import Pump
from daskdl.errors import DaskDLError

logger = logging.getLogger(__name__)

PACE_S = 0.005  # least time between two requests to one neighbour
IDLE_S = 60.0  # between neighbours nothing is sent only to show a sign of life
RETRY_S = 1.0  # after a neighbour could not be reached


class Neighbour:
    """What waits for one neighbour, and its pump.

    A neighbour that cannot be reached holds nobody up: what waits for it is dropped,
    and it asks for that later if it lives. Who is lost, the scheduler decides.

    Args:
        replica: Its number.
        worker: Address of its worker.
        connection: Of the replica that sends.
        inbox: Whoever waits there is woken when there may be room again.
        gauge: Of what leaves the replica that sends.

    Attributes:
        worker: As given.
        forwarded_bytes: Of what waits here and is of other replicas.
    """

    worker: str
    forwarded_bytes: int

    def __init__(
        self,
        replica: int,
        worker: str,
        connection: Connection,
        inbox: Inbox,
        gauge: Gauge,
    ) -> None:
        self.worker = worker
        self.forwarded_bytes = 0
        self._replica = replica
        self._connection = connection
        self._gauge = gauge
        self._own = connection.endpoint.replica
        self._outbox = Outbox(connection.endpoint.outbox_bytes)
        self._outbox.on_drop = inbox.wake
        self._progress: dict[int, Item] = {}  # the latest of each origin
        self._telling = threading.Lock()
        self._offered = 0  # sequence of the last own update
        self._arrived = 0
        self._down = False
        self._pump = self._new_pump()
        loop = connection.loop
        self._outbox.on_offer = lambda: loop.call_soon_threadsafe(self._wake)
        self._carrying = asyncio.ensure_future(self._carry(), loop=loop)

    # ---- event loop

    def end(self) -> None:
        """It is a member no more: nothing waits for it, and nobody for it."""
        self._down = True
        self._discard()
        self._carrying.cancel()

    def forward(self, item: Item) -> None:
        """Queue an update of another replica; the caller has looked for room."""
        if self._down:
            return
        self.forwarded_bytes += item.weight()
        self._outbox.offer(item, force=True)

    def _wake(self) -> None:
        self._pump.wake()

    def _new_pump(self) -> Pump:
        return Pump(
            self._outbox,
            self._send,
            pace_s=PACE_S,
            beat_s=IDLE_S,
            bound=self._connection.endpoint.timeouts.bound("request"),
            destination=f"replica {self._replica} on {self.worker}",
        )

    async def _carry(self) -> None:
        while True:
            try:
                await self._pump.run()
            except (OSError, RuntimeError, DaskDLError) as error:
                # RuntimeError is what Dask's pool raises once a worker closes.
                logger.info("replica %s sends no more: %s", self._own, error)
            self._down = True
            self._discard()
            await asyncio.sleep(RETRY_S)
            self._down = False
            self._pump = self._new_pump()

    async def _send(self, items: Sequence[Item]) -> int:
        # Not before what was published earlier, or that would seem to be missing.
        last = len(items) == len(self._outbox)
        with self._telling:
            progress = list(self._progress.values()) if last else []
        if not items and not progress:
            return 0
        with self._gauge.request(items):
            answer = await self._connection.tell(
                self.worker,
                messages.DELIVER,
                replica=self._replica,
                items=[fields_of(item) for item in (*items, *progress)],
            )
        if not isinstance(answer, dict) or answer.get("status") != Answer.OK:
            raise OSError(f"{self.worker} answered {answer!r}")
        accepted = min(int(answer["accepted"]), len(items))
        if answer["accepted"] == len(items) + len(progress):
            self._said(progress)
        self._gauge.arrived(items[:accepted])
        self._count(items[:accepted])
        return accepted

    def _said(self, progress: Sequence[Item]) -> None:
        with self._telling:
            for item in progress:
                if self._progress.get(item.origin) is item:
                    del self._progress[item.origin]

    def _count(self, items: Sequence[Item]) -> None:
        for item in items:
            if item.origin == self._own:
                self._arrived = max(self._arrived, item.sequence)
            else:
                self.forwarded_bytes -= item.weight()

    def _discard(self) -> None:
        waiting = self._outbox.head(self._outbox.nbytes)
        self._count(waiting)
        self._outbox.drop(len(waiting))

    # ---- any thread

    def tell(self, item: Item) -> None:
        """Say how far a replica is; only the latest word of each is kept."""
        with self._telling:
            self._progress[item.origin] = item
        self._outbox.on_offer()

    # ---- training thread

    def offer(self, item: Item) -> None:
        """Queue an update of one's own; it is one of a bounded number."""
        if self._down:
            return
        self._offered = item.sequence
        self._outbox.offer(item, force=True)

    def sent(self) -> bool:
        """Whether all updates of one's own have arrived there."""
        return self._down or self._arrived >= self._offered

    def wait_until_sent(self, timeout_s: float) -> bool:
        """Block until `sent`; False on time-out."""
        return self._outbox.wait_for(lambda box: self.sent(), timeout_s)
