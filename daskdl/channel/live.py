"""One run on the scheduler's event loop: its waiting and its sending.

What happens is decided by the record (`run.py`); here are the tasks that carry
it out: one relay for each replica, and one that watches for silence.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from distributed import Scheduler

from daskdl.channel.messages import Answer, Item
from daskdl.channel.pump import Pump
from daskdl.channel.run import RunRecord
from daskdl.errors import DaskDLError, WaitTimeoutError

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
    """

    record: RunRecord
    client: str

    def __init__(self, record: RunRecord, scheduler: Scheduler, client: str) -> None:
        self.record = record
        self.client = client
        self._scheduler = scheduler
        self._changed = asyncio.Condition()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._wakes: dict[int, Callable[[], None]] = {}
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
            waiting = self._changed.wait_for(lambda: not self.record.members)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiting, timeout_s)

    def relay_to(self, replica: int) -> None:
        """Begin to carry what others send to a replica; it has joined."""
        if replica in self.record.outboxes:  # a retried request
            return
        worker = self.record.plan.replicas[replica]
        outbox = self.record.join(replica, self.now())

        async def deliver(items: Sequence[Item]) -> int:
            answer = await self._scheduler.rpc(worker).daskdl_deliver(
                run=self.record.plan.run,
                replica=replica,
                items=[tuple(item) for item in items],
            )
            if not isinstance(answer, dict) or answer["status"] != Answer.OK:
                raise OSError(f"{worker} answered {answer!r}")
            return int(answer["accepted"])

        pump = Pump(
            outbox,
            deliver,
            pace_s=PACE_S,
            beat_s=self.record.timeouts.silence / 4,
            timeout_s=self.record.timeouts.request,
            destination=f"replica {replica} on {worker}",
        )
        outbox.on_offer = pump.wake
        self._wakes[replica] = pump.wake
        self._start(replica, self._relay(replica, pump))

    def leave(self, replica: int) -> None:
        """A replica has delivered everything and goes."""
        self.record.leave(replica)
        self._forget(replica)

    def removed(self, replica: int) -> None:
        """Dask has removed the worker of a replica: it was closed, or it died.

        A worker that closes still answers, and its replica has something to hand
        over; one that died is found out by the relay's next request.
        """
        self.record.events.post("removed", replica=replica)
        if replica in self.record.expected:
            self._start(_grace(replica), self._lose_later(replica))
            wake = self._wakes.get(replica)
            if wake is not None:
                wake()

    async def _lose_later(self, replica: int) -> None:
        await self.notify()
        await asyncio.sleep(GRACE_S)
        await self.lose(replica, "its worker is gone")

    async def lose(self, replica: int, why: str) -> None:
        """A replica is gone without a word; the run goes on with the others."""
        record = self.record
        if replica not in record.expected:
            return
        what = f"lost {record.describe(replica)}: {why}"
        logger.info("run %s %s", record.plan.run, what)
        record.lose(replica)
        record.events.post("lost", replica=replica, summary=what)
        self._forget(replica)
        if not record.expected:
            await self.stop(f"no replica is left; {what}")
        await self.notify()

    async def stop(self, reason: str) -> None:
        """Tell everybody to leave."""
        first = self.record.stopped is None
        self.record.stop(reason)
        if first:
            self.record.events.post("stopped", summary=reason)
        await self.notify()

    async def close(self) -> None:
        """End all tasks; whoever still waits is told that the run has stopped."""
        for name in list(self._tasks):
            self._end(name)
        await self.stop("the run was closed")

    def _start(self, name: int, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[name] = asyncio.ensure_future(work)

    def _forget(self, replica: int) -> None:
        self._wakes.pop(replica, None)
        self._end(replica)
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
        """End a run in which somebody is awaited who says nothing."""
        record, started = self.record, self.now()
        while record.stopped is None:
            await asyncio.sleep(WATCHDOG_S)
            now = self.now()
            late = record.absent if now - started > record.timeouts.join else []
            silent = record.silent(now)
            if late or silent:
                error = self._silence(late, silent)
                summary = str(error)
                kind = type(error).__name__
                record.events.post("failed", type=kind, summary=summary)
                await self.stop(summary)

    def _silence(self, late: list[int], silent: list[int]) -> WaitTimeoutError:
        timeouts = self.record.timeouts
        who = "; ".join(self.record.describe(replica) for replica in late or silent)
        if late:
            return WaitTimeoutError(
                f"not all replicas started within {timeouts.join:g} s "
                f"(daskdl.timeouts.join): {who}; is the worker busy with other tasks?"
            )
        return WaitTimeoutError(
            f"nothing was heard for {timeouts.silence:g} s "
            f"(daskdl.timeouts.silence) of {who}"
        )
