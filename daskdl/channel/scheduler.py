"""The channel's end on the scheduler: a plugin that relays and keeps the runs.

Runs on the scheduler's event loop. It never unpacks a payload and never sees a
tensor. Every handler is a request; one that raises is an error for its caller
only.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from typing_extensions import override

from daskdl.channel import messages
from daskdl.channel.messages import Answer, Item
from daskdl.channel.pump import Pump
from daskdl.channel.run import RunPlan, RunRecord
from daskdl.errors import DaskDLError, WaitTimeoutError
from daskdl.version import VERSION

logger = logging.getLogger(__name__)

NAME = "daskdl-channel"
# The relay paces itself slower than replicas do: its cost is requests, not bytes.
RELAY_PACE_S = 0.010
WATCHDOG_S = 0.25


Handler = Callable[..., Awaitable[dict[str, Any]]]


def refuses(handler: Handler) -> Handler:
    """Answer a message that cannot be understood instead of raising.

    Foreign bytes on this operation are counted and logged; they must not end a
    run, and an exception would also fill the scheduler's log with tracebacks.
    """

    @functools.wraps(handler)
    async def guarded(
        self: "ChannelSchedulerPlugin", run: Any = None, **fields: Any
    ) -> dict[str, Any]:
        record = self.runs.get(run) if isinstance(run, int) else None
        if record is None:
            return {"status": Answer.UNKNOWN.value, "reason": f"no run {run!r} here"}
        try:
            return await handler(self, record, **fields)
        except (TypeError, ValueError, KeyError) as error:
            record.refused += 1
            reason = f"{handler.__name__}: {type(error).__name__}: {error}"
            logger.warning("run %s refused a message: %s", run, reason)
            return {"status": Answer.REFUSED.value, "reason": reason}

    return guarded


class ChannelSchedulerPlugin(SchedulerPlugin):  # type: ignore[misc]  # Dask is untyped
    """Keep the runs of a cluster and relay their updates.

    Registered once per cluster, by name; registering again changes nothing.
    What it knows of a run is in its record (`run.py`); here are only the
    waiting and the sending.
    """

    name = NAME
    idempotent = True
    runs: dict[int, RunRecord]

    def __init__(self) -> None:
        self.runs = {}

    @override
    async def start(self, scheduler: Scheduler) -> None:
        # Two clients may register at once: the first one's state is everybody's.
        first = scheduler.extensions.setdefault(NAME, self)
        if first is not self:
            return
        self._scheduler = scheduler
        self._clients: dict[int, str] = {}
        self._tasks: dict[int, dict[object, asyncio.Task[None]]] = {}
        self._changed: dict[int, asyncio.Condition] = {}
        for operation, handler in (
            (messages.OPEN, self.handle_open),
            (messages.WATCH, self.handle_watch),
            (messages.STOP, self.handle_stop),
            (messages.CLOSE, self.handle_close),
            (messages.JOIN, self.handle_join),
            (messages.PUBLISH, self.handle_publish),
            (messages.LEASE, self.handle_lease),
            (messages.GATHER, self.handle_gather),
            (messages.FAIL, self.handle_fail),
            (messages.LEAVE, self.handle_leave),
        ):
            scheduler.handlers[operation] = handler

    # ---- requests of a client

    async def handle_open(self, plan: dict[str, Any], client: str) -> dict[str, Any]:
        """A client starts a run."""
        record = RunRecord(RunPlan(**plan))
        run = record.plan.run
        self.runs[run] = record
        self._clients[run] = client
        self._tasks[run] = {}
        self._changed[run] = asyncio.Condition()
        self._start_task(run, "watchdog", self._watch_over(record))
        logger.info("run %s of %s replicas starts", run, len(record.plan.replicas))
        return {"status": Answer.OK.value, "version": VERSION}

    @refuses
    async def handle_watch(
        self, record: RunRecord, seen: int, timeout_s: float
    ) -> dict[str, Any]:
        """A client asks what is new since the `seen` first events."""
        with contextlib.suppress(TimeoutError):
            await self._until(record, lambda: len(record.events) > seen, timeout_s)
        return {"status": Answer.OK.value, "events": record.events.since(seen)}

    @refuses
    async def handle_stop(self, record: RunRecord, reason: str) -> dict[str, Any]:
        """A client wants every replica to leave."""
        await self._stop(record, reason)
        return {"status": Answer.OK.value}

    async def handle_close(self, run: int) -> dict[str, Any]:
        """A client is through with a run: nothing of it stays."""
        record = self.runs.pop(run, None)
        if record is None:
            return {"status": Answer.UNKNOWN.value}
        self._clients.pop(run)
        tasks = self._tasks.pop(run).values()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        record.stop("the run was closed")
        changed = self._changed.pop(run)
        async with changed:
            changed.notify_all()
        logger.info("run %s is closed", run)
        return {"status": Answer.OK.value}

    # ---- requests of a replica

    @refuses
    async def handle_join(
        self, record: RunRecord, replica: int, version: str
    ) -> dict[str, Any]:
        """A replica is on its worker; answered when all of the run are."""
        if version != VERSION:
            raise ValueError(
                f"the worker has daskdl {version}, the scheduler {VERSION}; "
                "install the same version on all"
            )
        if replica not in record.plan.replicas:
            raise ValueError(f"no replica {replica} in this run")
        self._start_relay(record, replica)
        await self._notify(record)
        await self._until(
            record,
            lambda: (
                record.stopped is not None or set(record.members) >= set(record.expected)
            ),
            None,
        )
        return self._answer(record, members=record.members)

    @refuses
    async def handle_publish(
        self,
        record: RunRecord,
        origin: int,
        items: Sequence[Sequence[Any]],
        step: int,
        done: int,
    ) -> dict[str, Any]:
        """A replica has updates for all others, or only a sign of life."""
        if origin not in record.outboxes:
            raise ValueError(f"replica {origin!r} is not a member of this run")
        updates = [Item(*item) for item in items]
        record.progress[origin].heard_at = self._now()
        accepted = record.publish(origin, updates, int(step), int(done))
        return self._answer(record, accepted=accepted)

    @refuses
    async def handle_lease(
        self,
        record: RunRecord,
        replica: int,
        phase: str,
        epoch: int,
        finished: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """A replica gives a finished piece back, if any, and takes the next."""
        if finished is not None:
            record.finish(replica, phase, epoch, finished["piece"])
            if phase == "train":
                record.events.post("progress", replica=replica, epoch=epoch, **finished)
                await self._notify(record)
        worker = record.plan.replicas[replica]
        piece = record.lease(
            replica, phase, epoch, functools.partial(self._holds, worker)
        )
        return self._answer(record, piece=piece)

    @refuses
    async def handle_gather(
        self, record: RunRecord, replica: int, key: str, note: Any, announce: bool
    ) -> dict[str, Any]:
        """A replica is at a barrier; answered with all notes when all are."""
        gathering = record.arrive(key, replica, note)
        await self._notify(record)
        await self._until(
            record,
            lambda: record.stopped is not None or not gathering.awaited(record.expected),
            None,
        )
        record.forget_gathering(key)
        if announce and not gathering.announced and record.stopped is None:
            gathering.announced = True
            record.announce(key, gathering)
            await self._notify(record)
        notes = [[r, gathering.notes[r]] for r in sorted(gathering.notes)]
        lost = [[r, sequence] for r, sequence in record.lost.items()]
        return self._answer(record, notes=notes, lost=lost)

    @refuses
    async def handle_fail(
        self, record: RunRecord, replica: int, failure: dict[str, Any]
    ) -> dict[str, Any]:
        """A replica cannot go on: the run ends, and the client learns why."""
        worker = record.plan.replicas[replica]
        record.events.post("failed", replica=replica, worker=worker, **failure)
        await self._stop(record, f"replica {replica} failed: {failure['summary']}")
        return {"status": Answer.OK.value}

    @refuses
    async def handle_leave(self, record: RunRecord, replica: int) -> dict[str, Any]:
        """A replica has delivered everything and goes."""
        record.leave(replica)
        self._stop_task(record.plan.run, replica)
        await self._notify(record)
        return {"status": Answer.OK.value}

    # ---- hooks of Dask

    @override
    async def remove_worker(
        self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any
    ) -> None:
        for record in list(self.runs.values()):
            for replica, address in record.plan.replicas.items():
                if address == worker and replica in record.expected:
                    await self._lose(record, replica, "its worker is gone")

    @override
    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        for run, owner in list(self._clients.items()):
            if owner == client:
                asyncio.ensure_future(self._abandon(run))

    # ---- inside

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _answer(self, record: RunRecord, **fields: Any) -> dict[str, Any]:
        if record.stopped is not None:
            return {"status": Answer.STOPPED.value, "reason": record.stopped, **fields}
        return {"status": Answer.OK.value, **fields}

    def _holds(self, worker: str, key: str) -> bool:
        task = self._scheduler.tasks.get(key)
        return task is not None and any(w.address == worker for w in task.who_has)

    async def _notify(self, record: RunRecord) -> None:
        changed = self._changed[record.plan.run]
        async with changed:
            changed.notify_all()

    async def _until(
        self, record: RunRecord, ready: Callable[[], bool], timeout_s: float | None
    ) -> None:
        changed = self._changed[record.plan.run]
        async with changed:
            await asyncio.wait_for(changed.wait_for(ready), timeout_s)

    def _start_task(self, run: int, name: object, work: Any) -> None:
        self._tasks[run][name] = asyncio.ensure_future(work)

    def _stop_task(self, run: int, name: object) -> None:
        task = self._tasks[run].pop(name, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def _start_relay(self, record: RunRecord, replica: int) -> None:
        if replica in record.outboxes:  # a retried request
            return
        run, worker = record.plan.run, record.plan.replicas[replica]
        outbox = record.join(replica, self._now())

        async def deliver(items: Sequence[Item]) -> int:
            answer = await self._scheduler.rpc(worker).daskdl_deliver(
                run=run, replica=replica, items=[tuple(item) for item in items]
            )
            if not isinstance(answer, dict) or answer["status"] != Answer.OK:
                raise OSError(f"{worker} answered {answer!r}")
            return int(answer["accepted"])

        pump = Pump(
            outbox,
            deliver,
            pace_s=RELAY_PACE_S,
            beat_s=record.timeouts.silence / 4,
            timeout_s=record.timeouts.request,
            destination=f"replica {replica} on {worker}",
        )
        outbox.on_offer = pump.wake
        self._start_task(run, replica, self._relay(record, replica, pump))

    async def _relay(self, record: RunRecord, replica: int, pump: Pump) -> None:
        try:
            await pump.run()
        except (OSError, DaskDLError) as error:
            # A closing worker refuses before Dask reports it gone: both end here.
            await self._lose(record, replica, str(error))

    async def _lose(self, record: RunRecord, replica: int, why: str) -> None:
        if replica not in record.expected:
            return
        what = f"lost {record.describe(replica)}: {why}"
        logger.info("run %s %s", record.plan.run, what)
        record.lose(replica)
        record.events.post("lost", replica=replica, summary=what)
        self._stop_task(record.plan.run, replica)
        if not record.expected:
            await self._stop(record, f"no replica is left; {what}")
        await self._notify(record)

    async def _stop(self, record: RunRecord, reason: str) -> None:
        record.stop(reason)
        record.events.post("stopped", summary=record.stopped)
        await self._notify(record)

    async def _abandon(self, run: int) -> None:
        """The client is gone: nobody would take the result."""
        record = self.runs.get(run)
        if record is None:
            return
        await self._stop(record, "its client is gone")
        with contextlib.suppress(TimeoutError):
            await self._until(
                record, lambda: not record.members, record.timeouts.stop
            )
        await self.handle_close(run)

    async def _watch_over(self, record: RunRecord) -> None:
        """End a run in which somebody is awaited who says nothing."""
        timeouts = record.timeouts
        started = self._now()
        while record.stopped is None:
            await asyncio.sleep(WATCHDOG_S)
            waited = self._now() - started
            absent = sorted(set(record.expected) - set(record.members))
            late = absent if waited > timeouts.join else []
            silent = record.silent(self._now())
            if late or silent:
                error = self._silence(record, late, silent)
                record.events.post(
                    "failed", type=type(error).__name__, summary=str(error)
                )
                await self._stop(record, str(error))

    def _silence(
        self, record: RunRecord, late: list[int], silent: list[int]
    ) -> WaitTimeoutError:
        timeouts = record.timeouts
        if late:
            who = "; ".join(record.describe(replica) for replica in late)
            return WaitTimeoutError(
                f"not all replicas started within {timeouts.join:g} s "
                f"(daskdl.timeouts.join): {who}; is the worker busy with other tasks?"
            )
        who = "; ".join(record.describe(replica) for replica in silent)
        return WaitTimeoutError(
            f"nothing was heard for {timeouts.silence:g} s "
            f"(daskdl.timeouts.silence) of {who}"
        )
