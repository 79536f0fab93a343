"""The channel's end on the scheduler: a plugin that relays and keeps the runs.

Runs on the scheduler's event loop. It never unpacks a payload and never sees a
tensor. Every handler is a request; one that raises is an error for its caller
only.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from typing_extensions import override

from daskdl.channel import messages
from daskdl.channel.live import LiveRun
from daskdl.channel.messages import Answer, Barrier, Item, ItemKind
from daskdl.channel.run import RunPlan, RunRecord
from daskdl.version import VERSION

logger = logging.getLogger(__name__)

NAME = "daskdl-channel"

Handler = Callable[..., Awaitable[dict[str, Any]]]


def of_a_run(handler: Handler) -> Handler:
    """Look the run up; answer what cannot be understood instead of raising.

    Foreign bytes on this operation are counted and logged; they must not end a
    run, and an exception would fill the scheduler's log with tracebacks.
    """

    @functools.wraps(handler)
    async def guarded(
        self: "ChannelSchedulerPlugin", run: Any = None, **fields: Any
    ) -> dict[str, Any]:
        live = self.runs.get(run) if isinstance(run, int) else None
        if live is None:
            return {"status": Answer.UNKNOWN.value, "reason": f"no run {run!r} here"}
        try:
            return await handler(self, live, **fields)
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            live.record.refused += 1
            reason = f"{handler.__name__}: {type(error).__name__}: {error}"
            logger.warning("run %s refused a message: %s", run, reason)
            return {"status": Answer.REFUSED.value, "reason": reason}

    return guarded


class ChannelSchedulerPlugin(SchedulerPlugin):  # type: ignore[misc]  # Dask is untyped
    """Keep the runs of a cluster and answer their clients and replicas.

    Registered once per cluster, by name; registering again changes nothing.
    """

    name = NAME
    idempotent = True
    runs: dict[int, LiveRun]

    def __init__(self) -> None:
        self.runs = {}
        self._abandoning: set[asyncio.Task[None]] = set()

    @override
    async def start(self, scheduler: Scheduler) -> None:
        # Two clients may register at once: the first one's state is everybody's.
        first = scheduler.extensions.setdefault(NAME, self)
        if first is not self:
            self.runs = first.runs
            return
        self._scheduler = scheduler
        scheduler.handlers.update(
            {
                messages.OPEN: self.handle_open,
                messages.WATCH: self.handle_watch,
                messages.STOP: self.handle_stop,
                messages.CLOSE: self.handle_close,
                messages.JOIN: self.handle_join,
                messages.PUBLISH: self.handle_publish,
                messages.LEASE: self.handle_lease,
                messages.GATHER: self.handle_gather,
                messages.FAIL: self.handle_fail,
                messages.LEAVE: self.handle_leave,
            }
        )

    # ---- requests of a client

    async def handle_open(self, plan: Mapping[str, Any], client: str) -> dict[str, Any]:
        """A client starts a run."""
        record = RunRecord(RunPlan(**plan))
        self.runs[record.plan.run] = LiveRun(record, self._scheduler, client)
        logger.info("run %s opens: %s", record.plan.run, record.plan.replicas)
        return {"status": Answer.OK.value, "version": VERSION}

    @of_a_run
    async def handle_watch(
        self, live: LiveRun, seen: int, timeout_s: float
    ) -> dict[str, Any]:
        """A client asks what is new since the `seen` first events."""
        events = live.record.events
        with contextlib.suppress(TimeoutError):
            await live.until(lambda: len(events) > seen, timeout_s)
        return {"status": Answer.OK.value, "events": events.since(seen)}

    @of_a_run
    async def handle_stop(self, live: LiveRun, reason: str) -> dict[str, Any]:
        """A client wants every replica to leave."""
        await live.stop(reason)
        return {"status": Answer.OK.value}

    async def handle_close(self, run: int) -> dict[str, Any]:
        """A client is through with a run: nothing of it stays."""
        live = self.runs.pop(run, None)
        if live is not None:
            await live.close()
            logger.info("run %s is closed", run)
        return {"status": Answer.OK.value}

    # ---- requests of a replica

    @of_a_run
    async def handle_join(
        self, live: LiveRun, replica: int, version: str
    ) -> dict[str, Any]:
        """A replica is on its worker; answered when all of the run are."""
        record = live.record
        if version != VERSION:
            raise ValueError(
                f"the worker has daskdl {version}, the scheduler {VERSION}; "
                "install the same version on all"
            )
        if replica not in record.plan.replicas:
            raise ValueError(f"no replica {replica} in this run")
        live.relay_to(replica)
        await live.notify()
        await live.until(lambda: not record.absent, None)
        return _answer(record, members=record.members)

    @of_a_run
    async def handle_publish(
        self,
        live: LiveRun,
        origin: int,
        items: Sequence[Sequence[Any]],
        step: int,
        done: int,
    ) -> dict[str, Any]:
        """A replica has updates for all others, or only a sign of life."""
        record = live.record
        _check_present(origin, record.plan.replicas)
        if origin not in record.outboxes:  # it has left, or was given up
            return {"status": Answer.UNKNOWN.value, "reason": "not a member any more"}
        updates = [_update_of(origin, fields) for fields in items]
        record.progress[origin].heard_at = live.now()
        accepted = record.publish(origin, updates, int(step), int(done))
        return _answer(record, accepted=accepted)

    @of_a_run
    async def handle_lease(
        self,
        live: LiveRun,
        replica: int,
        phase: str,
        epoch: int,
        finished: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """A replica gives a finished piece back, if any, and takes the next."""
        record = live.record
        _check_present(replica, record.outboxes)
        if finished is not None:
            record.finish(replica, phase, epoch, finished["piece"])
            if phase == "train":
                record.events.post("progress", epoch=epoch, **finished)
                await live.notify()
        worker = record.plan.replicas[replica]
        is_near = functools.partial(self._holds, worker)
        return _answer(record, piece=record.lease(replica, phase, epoch, is_near))

    @of_a_run
    async def handle_gather(
        self, live: LiveRun, replica: int, key: str, note: Any, kind: str
    ) -> dict[str, Any]:
        """A replica is at a barrier; answered with all notes when all are."""
        record = live.record
        _check_present(replica, record.outboxes)
        gathering = record.arrive(key, replica, note)
        await live.notify()
        await live.until(lambda: not gathering.awaited(record.expected), None)
        if record.stopped is None:
            first = record.complete(key, gathering, hold=kind == Barrier.AGREE)
            if first and kind == Barrier.REPORT:
                record.announce(key, gathering)
                await live.notify()
        notes = [[r, gathering.notes[r]] for r in sorted(gathering.notes)]
        gone = [[r, sequence] for r, sequence in (gathering.gone or {}).items()]
        return _answer(record, notes=notes, gone=gone)

    @of_a_run
    async def handle_fail(
        self, live: LiveRun, replica: int, failure: dict[str, Any]
    ) -> dict[str, Any]:
        """A replica cannot go on: the run ends, and the client learns why."""
        # One that was cut off and comes back must not end the others' run.
        _check_present(replica, live.record.expected)
        worker = live.record.plan.replicas[replica]
        live.record.events.post("failed", replica=replica, worker=worker, **failure)
        await live.stop(f"replica {replica} failed: {failure['summary']}")
        return {"status": Answer.OK.value}

    @of_a_run
    async def handle_leave(self, live: LiveRun, replica: int) -> dict[str, Any]:
        """A replica has delivered everything and goes."""
        live.leave(replica)
        await live.notify()
        return {"status": Answer.OK.value}

    # ---- hooks of Dask

    @override
    def remove_worker(
        self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any
    ) -> None:
        for live in list(self.runs.values()):
            for replica, address in live.record.plan.replicas.items():
                if address == worker:
                    live.removed(replica)

    @override
    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        for run, live in list(self.runs.items()):
            if live.client == client:
                task = asyncio.ensure_future(self._abandon(run, live))
                self._abandoning.add(task)
                task.add_done_callback(self._abandoning.discard)

    @override
    async def before_close(self) -> None:
        for run in list(self.runs):
            await self.handle_close(run)

    async def _abandon(self, run: int, live: LiveRun) -> None:
        """The client is gone: nobody would take the result."""
        await live.stop("its client is gone")
        await live.emptied(live.record.timeouts.stop)
        await self.handle_close(run)

    def _holds(self, worker: str, key: str) -> bool:
        task = self._scheduler.tasks.get(key)
        return task is not None and any(
            w.address == worker
            for w in task.who_has or ()  # None: nobody
        )


def _check_present(replica: Any, present: Collection[int]) -> None:
    if replica not in present:
        raise ValueError(f"replica {replica!r} is not a member of this run")


def _update_of(origin: int, fields: Sequence[Any]) -> Item:
    item = Item.of(fields)
    if item.kind != ItemKind.UPDATE or item.origin != origin:
        raise ValueError(f"replica {origin} must not publish {item[:3]}")
    return item


def _answer(record: RunRecord, **fields: Any) -> dict[str, Any]:
    if record.stopped is not None:
        return {"status": Answer.STOPPED.value, "reason": record.stopped, **fields}
    return {"status": Answer.OK.value, **fields}
