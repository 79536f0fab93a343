"""One run on the scheduler's event loop: its waiting and its sending.

What happens is decided by the record (`run.py`); here are the tasks that carry
it out: one relay for each replica, and one that watches for silence.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from distributed import Scheduler

from daskdl.channel.courier import Courier, Share
from daskdl.channel.messages import Answer, Item
from daskdl.channel.payloads import fields_of
from daskdl.channel.probe import is_listening
from daskdl.channel.pump import Pump
from daskdl.channel.run import RunRecord
from daskdl.errors import DaskDLError

logger = logging.getLogger(__name__)

# The relay paces itself slower than replicas do: its cost is requests, not bytes.
PACE_S = 0.010
WATCHDOG_S = 0.25
WATCHDOG = -1  # where relays are kept by replica
GRACE_S = 3.0  # for a closing worker to hand over; it takes 2 s itself at most


def _grace(replica: int) -> int:
    """Where the task that gives a removed replica up is kept."""
    return -2 - replica


class LiveRun:
    """A run, its relays, and those who wait for something in it.

    Args:
        record: What is known of the run.
        scheduler: Whose connections carry the items.
        client: Id of the client that opened it.

    Attributes:
        hanging: Addresses of workers that Dask has, and that say nothing.
    """

    record: RunRecord
    client: str
    hanging: set[str]

    def __init__(self, record: RunRecord, scheduler: Scheduler, client: str) -> None:
        self.record = record
        self.client = client
        self.hanging = set()
        self._scheduler = scheduler
        self._changed = asyncio.Condition()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._wakes: dict[int, Callable[[], None]] = {}
        self._couriers: dict[str, Courier] = {}
        self._start(WATCHDOG, self._watch())

    def now(self) -> float:
        """The clock by which replicas are heard of, seconds."""
        return asyncio.get_running_loop().time()

    async def notify(self) -> None:
        """Let everybody who waits look again."""
        async with self._changed:
            self._changed.notify_all()

    async def until(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait until ready or stopped, looking after each `notify`.

        Raises:
            TimeoutError: If it did not become ready in time.
        """

        def ready_or_stopped() -> bool:
            return self.record.stopped is not None or ready()

        async with self._changed:
            waiting = self._changed.wait_for(ready_or_stopped)
            await asyncio.wait_for(waiting, timeout_s)

    async def emptied(self, timeout_s: float) -> None:
        """Wait until every replica has left, but not longer than this."""
        async with self._changed:
            waiting = self._changed.wait_for(lambda: not self.record.members.present)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiting, timeout_s)

    def has(self, worker: str) -> bool:
        """Whether a worker is in the cluster."""
        return worker in self._scheduler.workers

    def holds(self, worker: str, key: str) -> bool:
        """Whether a worker has the result of a task of Dask's."""
        task = self._scheduler.tasks.get(key)
        return task is not None and any(
            w.address == worker
            for w in task.who_has or ()  # None: nobody
        )

    def reachable(self, key: str) -> bool:
        """Whether the result of a task is, or will be, on a worker that answers."""
        task = self._scheduler.tasks.get(key)
        if task is None:
            return False
        there = {w.address for w in task.who_has or ()}
        if task.processing_on is not None:
            there.add(task.processing_on.address)
        return not there or bool(there - self.hanging)

    def relay_to(self, replica: int) -> None:
        """Begin to carry what others send to a replica; it has joined."""
        if replica in self.record.outboxes:  # a retried request
            return
        worker = self.record.members.seats[replica]
        outbox = self.record.join(replica, self.now())

        courier = self._courier(worker)
        courier.replicas.add(replica)
        pump = Pump(
            outbox,
            functools.partial(courier.deliver, replica),
            pace_s=PACE_S,
            beat_s=self.record.timeouts.silence / 4,
            bound=self.record.timeouts.bound("request"),
            destination=f"replica {replica} on {worker}",
        )
        outbox.on_offer = pump.wake
        self._wakes[replica] = pump.wake
        pump.wake()  # who the members are waits already
        self._start(replica, self._relay(replica, pump))

    def _courier(self, worker: str) -> Courier:
        """Of a worker, for all its replicas."""
        run, peer = self.record.plan.run, self._scheduler.rpc(worker)

        async def ask(items: Sequence[Item], shares: Sequence[Share]) -> Any:
            fields = [fields_of(item) for item in items]
            if len(shares) > 1:
                return await peer.daskdl_share(run=run, items=fields, shares=shares)
            ((replica, _),) = shares
            own = await peer.daskdl_deliver(run=run, replica=replica, items=fields)
            return {"status": Answer.OK.value, "answers": [own]}

        if worker not in self._couriers:
            bound = self.record.timeouts.bound("request")
            self._couriers[worker] = Courier(worker, ask, bound)
        return self._couriers[worker]

    async def agreed(self, replica: int, epoch: int, part: int) -> dict[str, Any]:
        """Ask a replica's worker for a part of its agreed state, see `Newest`."""
        worker, run = self.record.members.seats[replica], self.record.plan.run
        peer, bound_s = self._scheduler.rpc(worker), self.record.timeouts.request
        try:
            answer = await asyncio.wait_for(
                peer.daskdl_agreed(run=run, replica=replica, epoch=epoch, part=part),
                bound_s,
            )
        except OSError as error:  # a TimeoutError is one
            return {"status": Answer.UNKNOWN.value, "reason": str(error)}
        return dict(answer)

    async def leave(self, replica: int, *, retires: bool = False) -> None:
        """A replica's task ends: everything it had is delivered, or not wanted.

        Args:
            replica: Its number.
            retires: Its worker closes, and it had not come to the end of the run.
        """
        record, members = self.record, self.record.members
        if not members.here(replica):  # given up before: its worker is free again
            self.hanging.discard(members.seats[replica])
            record.events.post("worker", worker=members.seats[replica])
        elif retires:
            record.retire(replica, self.now())
        else:
            record.ended |= replica in members.expected
            record.remove(replica)
        self._forget(replica)
        if members.started and not members.expected:
            record.events.post("over", waiting=members.waiting)
            record.give_up_if_deserted()
        await self.notify()

    def removed(self, replica: int) -> None:
        """Dask has removed the worker of a replica: it was closed, or it died.

        A worker that closes still answers, and its replica has something to hand
        over; where one died, nobody listens any more.
        """
        self.hanging.discard(self.record.members.seats[replica])
        self.record.events.post("removed", replica=replica)
        if self.record.members.here(replica):
            self._start(_grace(replica), self._lose_later(replica))
            wake = self._wakes.get(replica)
            if wake is not None:
                wake()

    async def _lose_later(self, replica: int) -> None:
        await self.notify()
        if await is_listening(self.record.members.seats[replica], GRACE_S):
            await asyncio.sleep(GRACE_S)  # it closes
        await self.lose(replica, "its worker is gone")

    async def lose(self, replica: int, why: str) -> None:
        """A replica is gone without a word; the run goes on with the others."""
        record = self.record
        if not record.members.here(replica):
            return
        # The client says it where its user looks.
        logger.info("run %s lost replica %s: %s", record.plan.run, replica, why)
        trained = replica in record.members.expected
        record.lose(replica, why, self.now())
        self._forget(replica)
        # Else it came too late, and the others may have come to the end meanwhile.
        if trained:
            record.give_up_if_deserted()
        await self.notify()

    async def fail(self, error: DaskDLError) -> None:
        """The run cannot go on, for a reason that is nobody's failure."""
        self.record.give_up(error)
        await self.notify()

    async def stop(self, reason: str) -> None:
        """Tell everybody to leave."""
        self.record.stop(reason)
        await self.notify()

    async def close(self) -> None:
        """End all tasks; whoever still waits is told that the run has stopped."""
        for name in list(self._tasks):
            self._end(name)
        for courier in self._couriers.values():
            courier.end()
        await self.stop("the run was closed")

    def _start(self, name: int, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[name] = asyncio.ensure_future(work)

    def _forget(self, replica: int) -> None:
        self._wakes.pop(replica, None)
        self._end(replica)
        for courier in self._couriers.values():
            courier.replicas.discard(replica)
        self._end(_grace(replica))

    def _end(self, name: int) -> None:
        task = self._tasks.pop(name, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def _relay(self, replica: int, pump: Pump) -> None:
        try:
            await pump.run()
        except (OSError, RuntimeError, DaskDLError) as error:
            # A closing worker refuses before Dask reports it gone: both end here.
            # RuntimeError is what Dask's pool raises once the scheduler closes.
            await self.lose(replica, str(error))

    async def _watch(self) -> None:
        """Give up whom nothing is heard of, and a run that has too few left."""
        record, started = self.record, self.now()
        enough_at = started
        while record.stopped is None:
            await asyncio.sleep(WATCHDOG_S)
            now, timeouts = self.now(), record.timeouts
            if record.members.absent and now - started > timeouts.join:
                await self.fail(record.members.late(timeouts.bound("join"), now))
            for replica in record.members.silent_since(now - timeouts.silence):
                self.hanging.add(record.members.seats[replica])
                await self.lose(
                    replica,
                    f"nothing was heard for {timeouts.bound('silence')}",
                )
            if record.work.enough:
                enough_at = now
            elif now - enough_at > timeouts.rejoin:
                least, bound = record.plan.min_replicas, timeouts.bound("rejoin")
                await self.fail(record.members.too_few(least, bound, now))

    def still_here(self) -> str:
        """Who has not left, and what was last heard of each; empty if nobody."""
        members = self.record.members
        return members.describe_all(members.present, self.now())
