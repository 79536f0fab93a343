"""The channel's end on the scheduler: a plugin that relays and keeps the runs.

Runs on the scheduler's event loop. It never unpacks a payload and never sees a
tensor. Every handler is a request, and what one raises is an answer: foreign bytes
must not end a run.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, TypedDict

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from typing_extensions import override

from daskdl.channel import messages
from daskdl.channel.answers import Fields, Guard
from daskdl.channel.live import LiveRun
from daskdl.channel.messages import Answer
from daskdl.channel.plan import RunPlan
from daskdl.channel.requests import REQUESTS, of_a_run
from daskdl.channel.run import RunRecord
from daskdl.channel.shapes import Identity
from daskdl.errors import shown
from daskdl.version import VERSION

logger = logging.getLogger(__name__)

NAME = "daskdl-channel"


class Found(TypedDict):
    """Versions that a worker has, and why it has no more; empty where nothing."""

    daskdl: str
    torch: str
    error: str


class ChannelSchedulerPlugin(SchedulerPlugin):  # type: ignore[misc]  # Dask is untyped
    """Keep the runs of a cluster and answer their clients and replicas.

    Registered once per cluster, by name; registering again changes nothing.
    """

    name = NAME
    idempotent = True
    runs: dict[int, LiveRun]
    arrived: dict[str, Found]  # what was found on workers, by address

    def __init__(self) -> None:
        self.runs = {}
        self.arrived = {}
        self._abandoning: set[asyncio.Task[None]] = set()

    @override
    async def start(self, scheduler: Scheduler) -> None:
        # Two clients may register at once: the first one's state is everybody's.
        first = scheduler.extensions.setdefault(NAME, self)
        if first is not self:
            self.runs, self.arrived = first.runs, first.arrived
            return
        self._scheduler = scheduler
        guard = Guard(self._count)
        of_runs = {o: of_a_run(self.runs, handler) for o, handler in REQUESTS.items()}
        own = {
            messages.OPEN: self.handle_open,
            messages.CLOSE: self.handle_close,
            messages.ARRIVE: self.handle_arrive,
        }
        for operation, handler in {**of_runs, **own}.items():
            scheduler.handlers[operation] = guard.of(handler)

    def _count(self, fields: Fields) -> None:
        """What is of no run counts in all of them: their clients should know."""
        run: Any = fields.get("run")
        of_one = isinstance(run, int) and run in self.runs
        for live in [self.runs[run]] if of_one else self.runs.values():
            live.record.refused += 1

    # ---- requests of a client

    async def handle_open(self, plan: Mapping[str, Any], client: str) -> dict[str, Any]:
        """A client starts a run."""
        if client not in self._scheduler.clients:
            raise ValueError(f"{client!r} is no client of this cluster")
        record = RunRecord(RunPlan.of(plan))
        if record.plan.run in self.runs:
            raise ValueError(f"run {record.plan.run} is open already")
        self.runs[record.plan.run] = LiveRun(record, self._scheduler, client)
        # Some may have come after the client had chosen, or have no seat for want of
        # work; it knows which.
        for worker, found in self.arrived.items():
            if not record.members.seated_on(worker):
                record.events.post("worker", worker=worker, found=found)
        logger.info("run %s opens: %s", record.plan.run, record.plan.replicas)
        return {"status": Answer.OK.value, "version": VERSION}

    async def handle_close(self, run: Identity) -> dict[str, Any]:
        """A client is through with a run: nothing of it stays."""
        live = self.runs.pop(run, None)
        still_here = ""
        if live is not None:
            still_here = live.still_here()
            await live.close()
            logger.info("run %s is closed", run)
        return {"status": Answer.OK.value, "still_here": still_here}

    # ---- requests of a worker

    async def handle_arrive(self, worker: str, found: Found) -> dict[str, Any]:
        """A worker has imported what it needs, or cannot; clients judge what it has."""
        if worker not in self._scheduler.workers:
            raise ValueError(f"no worker {worker} in this cluster")
        told = Found(
            daskdl=shown(found["daskdl"]),
            torch=shown(found["torch"]),
            error=shown(found["error"]),
        )
        self.arrived[worker] = told
        for live in self.runs.values():
            if not live.record.members.seated_on(worker):
                live.record.events.post("worker", worker=worker, found=told)
                await live.notify()
        return {"status": Answer.OK.value}

    # ---- hooks of Dask

    @override
    def remove_worker(
        self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any
    ) -> None:
        self.arrived.pop(worker, None)
        for live in list(self.runs.values()):
            for replica in live.record.members.seated_on(worker):
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
        bound = live.record.timeouts.bound("stop")
        await live.emptied(bound.seconds)
        answer = await self.handle_close(run)
        if answer["still_here"]:
            logger.warning(
                "run %s: after %s these have not left: %s",
                run,
                bound,
                answer["still_here"],
            )
