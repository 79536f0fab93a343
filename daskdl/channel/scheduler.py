"""The scheduler's end: the plugin, the handlers of a run's requests, and what it sends.

What a request means is decided in :mod:`daskdl.channel.run_state`. Here requests wait,
send loops carry the relay's queues, one request per worker at a time, and a watchdog
gives up replicas that send no heartbeat.
"""

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from distributed import Scheduler
from distributed.comm import get_address_host_port, parse_address
from distributed.diagnostics.plugin import SchedulerPlugin
from typing_extensions import override

from daskdl.channel.leasing import Lease, RunSpec
from daskdl.channel.protocol import (
    MESSAGE_BYTES,
    NAME,
    Acknowledgement,
    Answer,
    BarrierKind,
    Failure,
    Fields,
    FinishedLease,
    GoneError,
    Guard,
    Handler,
    Message,
    MessageKind,
    Natural,
    PeerProgress,
    RunId,
    WorkerVersions,
    handlers_of,
)
from daskdl.channel.run_state import RunState
from daskdl.channel.sender import BATCH_BYTES, SendLoop
from daskdl.config import VERSION, Bound
from daskdl.errors import shown

logger = logging.getLogger(__name__)

CHECKABLE = ("tcp", "tls")  # others do not say at once that nobody is there


async def is_listening(address: str, timeout_s: float) -> bool:
    """Ask the operating system of a worker's host, not the worker.

    Dask's own way to connect tries again for long when it is refused.

    Args:
        address: Of Dask's kind, with its scheme.
        timeout_s: A host that does not answer in this time counts as one where
            nobody listens, seconds.

    Returns:
        True also where that cannot be asked.
    """
    scheme, _ = parse_address(address)
    if scheme not in CHECKABLE:
        return True
    host, port = get_address_host_port(address)
    try:
        _, writer = await asyncio.wait_for(
            asyncio.open_connection(host, port), timeout_s
        )
    except OSError:
        return False
    writer.close()
    return True


# The send loops of one worker answer to the same request and then pause alike; what is
# left between them are turns of the event loop, and less than a request takes.
TOGETHER_S = 0.002


class Batch(NamedTuple):
    """What is to go to one replica."""

    replica: int
    items: Sequence[Message]
    accepted: asyncio.Future[int]  # how many of them


class WorkerBatcher:
    """Sends the batches of one worker's replicas together, a request at a time.

    A message for several of them travels once.

    Args:
        scheduler: Whose connections carry the messages.
        worker: Address of the worker.
        run: RunId of the run.
        bound: How long a request may take.

    Attributes:
        replicas: Those that it delivers to.
    """

    replicas: set[int]

    def __init__(
        self, scheduler: Scheduler, worker: str, run: int, bound: Bound
    ) -> None:
        self.replicas = set()
        self._peer = scheduler.rpc(worker)
        self._worker = worker
        self._run = run
        self._bound = bound
        self._waiting: list[Batch] = []
        self._sending: asyncio.Task[None] | None = None

    async def deliver(self, replica: int, items: Sequence[Message]) -> int:
        """Deliver messages to a replica, with what others of its worker are sent.

        Returns:
            How many were accepted.

        Raises:
            TimeoutError: If the worker did not answer.
            OSError: If it cannot be reached, or does not know the replica.
        """
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(Batch(replica, items, accepted))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self._send_all())
        return await accepted

    def end(self) -> None:
        """Send nothing more."""
        if self._sending is not None:
            self._sending.cancel()

    async def _send_all(self) -> None:
        while self._waiting:
            if len(self._waiting) < len(self.replicas):
                await asyncio.sleep(TOGETHER_S)
            batches = self._next()
            answers: Sequence[Any]
            try:
                async with asyncio.timeout(self._bound.seconds):
                    answers = await self._request(batches)
            # What Dask's pool raises once the scheduler closes is a RuntimeError.
            except (OSError, RuntimeError) as error:  # a TimeoutError is an OSError
                answers = [error] * len(batches)
            for batch, answer in zip(batches, answers, strict=True):
                if batch.accepted.done():  # it did not wait so long
                    continue
                if isinstance(answer, Exception):
                    batch.accepted.set_exception(answer)
                elif isinstance(answer, dict) and "accepted" in answer:
                    batch.accepted.set_result(answer["accepted"])
                else:
                    why = OSError(f"{self._worker} answered {answer!r}")
                    batch.accepted.set_exception(why)

    def _next(self) -> list[Batch]:
        """The oldest batches that are waited for, up to so many bytes together."""
        waiting = [batch for batch in self._waiting if not batch.accepted.done()]
        nbytes, seen, count = 0, set[int](), 0
        for batch in waiting:
            new = {id(item): item.nbytes + MESSAGE_BYTES for item in batch.items}
            nbytes += sum(weight for key, weight in new.items() if key not in seen)
            seen |= new.keys()
            if count and nbytes > BATCH_BYTES:
                break
            count += 1
        self._waiting = waiting[count:]
        return waiting[:count]

    async def _request(self, batches: Sequence[Batch]) -> Sequence[Any]:
        """Send batches; the worker answers to each of them."""
        items = {id(item): item for batch in batches for item in batch.items}
        messages = [item.to_wire() for item in items.values()]
        if len(batches) == 1:
            own = {"replica": batches[0].replica, "messages": messages}
            return [await self._peer.daskdl_deliver(run=self._run, **own)]
        places = {key: place for place, key in enumerate(items)}
        shares = [(b.replica, [places[id(i)] for i in b.items]) for b in batches]
        answer = await self._peer.daskdl_deliver_batches(
            run=self._run, messages=messages, shares=shares
        )
        answers = answer.get("answers", ()) if isinstance(answer, dict) else ()
        return answers if len(answers) == len(batches) else [answer] * len(batches)


# The relay paces itself slower than replicas do: its cost is requests, not bytes.
PACE_S = 0.010
WATCHDOG_S = 0.25
GRACE_S = 3.0  # for a closing worker to hand over; it takes 2 s itself at most
MOST_REPLICAS = 1000  # of a worker
LONGEST_S = 3600.0  # that a client waits for events; it asks every few seconds


class LiveRun:
    """A run with its send loops, and the requests that wait in it.

    A method ``handle_x`` answers the request ``daskdl_x``, see `answer`.

    Args:
        spec: What the client asks for.
        scheduler: Whose connections carry the messages.
        client: Id of the client that opened it.

    Attributes:
        state: What is known of the run.
        hanging: Addresses of workers that Dask has, and that send no heartbeat.
        relays: The send loop of each replica.
    """

    state: RunState
    client: str
    hanging: set[str]
    relays: dict[int, asyncio.Task[None]]

    def __init__(self, spec: RunSpec, scheduler: Scheduler, client: str) -> None:
        self.state = RunState(spec, self.now())
        self.client = client
        self.hanging = set()
        self.relays = {}
        self._scheduler = scheduler
        self._changed = asyncio.Event()  # another one after each change
        self._batchers: dict[str, WorkerBatcher] = {}
        self._removals: dict[int, asyncio.Task[None]] = {}  # of removed workers
        self._watchdog = asyncio.ensure_future(self._watch())

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """All that run in the background."""
        return [self._watchdog, *self.relays.values(), *self._removals.values()]

    def now(self) -> float:
        """The clock for heartbeats, seconds."""
        return asyncio.get_running_loop().time()

    def notify(self) -> None:
        """Let every waiting request look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(
        self, ready: Callable[[], bool], timeout_s: float | None = None
    ) -> None:
        """Wait until ready or stopped, looking after each `notify`.

        Raises:
            TimeoutError: If it did not become ready in time.
        """
        async with asyncio.timeout(timeout_s):
            while self.state.stopped is None and not ready():
                await self._changed.wait()

    def answer(self, fields: Fields) -> Fields:
        """The answer to a request, with the reason to leave if the run was stopped."""
        if self.state.stopped is not None:
            stopped = {"status": Answer.STOPPED.value, "reason": self.state.stopped}
            return {**stopped, **fields}
        return {"status": Answer.OK.value, **fields}

    # ---- requests of a client

    async def handle_watch(self, timeout_s: float) -> Fields:
        """A client asks for new events, and waits for one."""
        if not 0 <= timeout_s <= LONGEST_S:
            raise ValueError(f"timeout_s must be in 0 .. {LONGEST_S}, got {timeout_s}")
        with contextlib.suppress(TimeoutError):
            await self.until(lambda: bool(self.state.events), timeout_s)
        return {"events": self.state.take_events()}

    async def handle_stop(self, reason: str) -> Fields:
        """A client wants every replica to leave."""
        self.state.stop(reason)
        self.notify()
        return {}

    async def handle_assign(self, worker: str, replicas: Natural) -> Fields:
        """A client wants so many replicas on a worker; answered with the new ones."""
        if replicas > MOST_REPLICAS:
            raise ValueError(f"replicas must be <= {MOST_REPLICAS}, got {replicas}")
        members = self.state.members
        there = worker in self._scheduler.workers
        missing = replicas - len(members.assigned_to(worker)) if there else 0
        return {"replicas": [members.assign(worker) for _ in range(missing)]}

    async def handle_unassign(self, replica: Natural) -> Fields:
        """A replica could not be started."""
        if not self.state.members.replicas[replica].joined:
            self.lose(replica, "it was not started")
        return {}

    async def handle_restore(self, phase: str, part: Natural, key: str) -> Fields:
        """A client has computed a lost part again, under another key."""
        self.state.leases[phase].replace_key(part, key)
        self.notify()
        return {}

    async def handle_agreed(
        self,
        epoch: Natural,
        part: Natural,
        avoid: Sequence[Natural],
        replica: Natural | None,
    ) -> Fields:
        """A client wants a part of the newest state that all have agreed on.

        Args:
            epoch: At the end of which, or of a later one; after the first part: that.
            part: Counted from 0.
            avoid: Replicas that are not asked.
            replica: That is asked; None: any.
        """
        members = self.state.members
        if replica is None:
            replica = next((r for r in members.expected if r not in avoid), None)
        if replica is None:
            return {"replica": None}
        peer = self._scheduler.rpc(members.replicas[replica].worker)
        own = {"run": self.state.spec.run, "replica": replica}
        try:
            async with asyncio.timeout(self.state.timeouts.request):
                answer = await peer.daskdl_agreed(epoch=epoch, part=part, **own)
        except OSError as error:  # a TimeoutError is one
            answer = {"status": Answer.UNKNOWN.value, "reason": str(error)}
        return {**answer, "replica": replica}

    # ---- requests of a replica

    async def handle_join(self, replica: Natural, version: str) -> Fields:
        """A replica's task runs; answered once all initial ones have joined.

        One that joins later then learns whose state to take, and which updates that
        has to contain: all later ones it is sent.
        """
        state, members = self.state, self.state.members
        if version != VERSION:
            raise ValueError(
                f"the worker has daskdl {version}, the scheduler {VERSION}; "
                "install the same version on all"
            )
        initial = replica in state.spec.replicas
        if not initial:  # no initial replica must take it for one
            await self.until(lambda: members.started)
        if not members.is_here(replica):
            raise ValueError(f"no replica {replica} in this run")
        if replica not in state.outboxes:  # else it is a retried request
            self._relay_to(replica)
        if initial:
            self.notify()
            await self.until(lambda: members.started)
            present = [[r, 0] for r in members.training]
            return {"members": present, "topology": state.topology(), "donor": None}
        generation, member = members.generation, members.replicas[replica]
        member.heartbeat_at = math.inf  # it waits here, and sends nothing
        await self.until(lambda: member.gone or state.can_cut(generation))
        members.taking_part(replica).heartbeat_at = self.now()
        cut, donor = state.cut(replica), members.donor()
        return {
            "members": [],
            "topology": state.topology(),
            "donor": donor,
            "worker": None if donor is None else members.replicas[donor].worker,
            "cut": list(cut.items()),
        }

    def _relay_to(self, replica: int) -> None:
        """Begin to carry what others send to a replica; it has joined."""
        state, worker = self.state, self.state.members.replicas[replica].worker
        bound = state.timeouts.bound("request")
        if worker not in self._batchers:
            own = self._scheduler, worker, state.spec.run, bound
            self._batchers[worker] = WorkerBatcher(*own)
        self._batchers[worker].replicas.add(replica)
        outbox = state.join(replica, self.now())
        loop = SendLoop(
            outbox,
            functools.partial(self._batchers[worker].deliver, replica),
            pace_s=PACE_S,
            beat_s=state.timeouts.silence / 4,
            bound=bound,
            destination=f"replica {replica} on {worker}",
        )
        outbox.on_offer = loop.wake
        loop.wake()  # who the members are waits already

        async def relay() -> None:
            try:
                await loop.run()
            except (OSError, RuntimeError) as error:
                # A closing worker refuses before Dask reports it gone: both end here.
                # RuntimeError is what Dask's pool raises once the scheduler closes.
                self.lose(replica, str(error))

        self.relays[replica] = asyncio.ensure_future(relay())

    async def handle_activate(self, replica: Natural, step: Natural) -> Fields:
        """A joining replica has the common state; answered between two barriers."""
        state, members = self.state, self.state.members
        members.taking_part(replica)
        await self.until(lambda: not state.holding)
        state.activate(replica, step)
        self.notify()
        steps = [[r, members.replicas[r].progress.step] for r in members.expected]
        own = {"epoch": state.epoch, "interval": state.interval, "report": state.report}
        return {"members": steps, **own}

    async def handle_publish(
        self,
        replica: Natural,
        messages: Sequence[Sequence[Any]],
        progress: PeerProgress,
        acknowledgement: Acknowledgement | None = None,
    ) -> Fields:
        """A replica has updates for all others, or only a heartbeat.

        Where replicas send to each other there is an acknowledgement instead of
        updates. The answer says how far the others are.
        """
        state = self.state
        member = state.members.taking_part(replica)
        updates = [Message.from_wire(fields) for fields in messages]
        for update in updates:
            if update.kind != MessageKind.UPDATE or update.origin != replica:
                raise ValueError(f"replica {replica} must not publish {update[:3]}")
            update.check_size()
        member.heartbeat_at = self.now()
        reached = PeerProgress(*progress)
        if acknowledgement is None:
            return {"accepted": state.publish(replica, updates, reached)}
        received = dict(acknowledgement["received"])
        generation = acknowledgement["generation"]
        adopted_at = acknowledgement["adopted_at"]
        if state.acknowledge(replica, reached, generation, adopted_at, received):
            self.notify()
        return {
            "accepted": 0,
            "received_by_all": state.received_by_all(replica),
            "peers": [(r, *progress) for r, progress in state.progress()],
        }

    async def handle_lease(
        self,
        replica: Natural,
        phase: str,
        epoch: Natural,
        finished: Sequence[FinishedLease],
        wait: bool,
        idle_payload: Any = None,
    ) -> Fields:
        """A replica gives finished leases back and takes the next one.

        If it waits, then until there is one, or nobody has anything left to do. With an
        idle payload no round waits for it meanwhile.
        """
        state, members = self.state, self.state.members
        worker = members.taking_part(replica).worker
        state.give_back(replica, phase, epoch, finished, self.now(), idle_payload)
        self.notify()  # others may get what is free, or be at the end of an interval
        if wait:
            await self.until(lambda: state.can_lease(replica, phase, epoch))
            members.taking_part(replica)
        lease = state.lease(
            replica, phase, epoch, lambda key: worker in self._holders(key)
        )
        if isinstance(lease, Lease):
            number, ranges, keys, ahead = lease
            own = {"ranges": ranges, "keys": list(keys.items()), "ahead": ahead}
            return {"lease": number, **own}
        return {"lease": None, "sync_point": lease}

    def _holders(self, key: str) -> set[str]:
        """The workers that have the result of a task."""
        task = self._scheduler.tasks.get(key)
        return set() if task is None else {w.address for w in task.who_has or ()}

    async def handle_missing(
        self, replica: Natural, phase: str, part: Natural, key: str
    ) -> Fields:
        """A part does not arrive; if it is lost, answered once it has another key."""
        state = self.state
        member, leases = state.members.taking_part(replica), state.leases[phase]
        if leases.held_key(part) == key and self._is_lost(key):
            lost = {"phase": phase, "part": part, "key": key, "worker": member.worker}
            state.post("missing", **lost, avoid=sorted(self.hanging))
            self.notify()
            await self.until(lambda: leases.held_key(part) != key)
        return {"key": leases.held_key(part)}

    def _is_lost(self, key: str) -> bool:
        """Whether no worker that answers has the result of a task, or computes it."""
        task = self._scheduler.tasks.get(key)
        if task is None:
            return True
        there = self._holders(key)
        if task.processing_on is not None:
            there.add(task.processing_on.address)
        return bool(there) and there <= self.hanging

    async def handle_barrier(
        self,
        replica: Natural,
        key: str,
        payload: Any,
        client_payload: bytes,
        kind: str,
    ) -> Fields:
        """A replica is at a barrier; answered with all payloads when all are."""
        state, kind = self.state, BarrierKind(kind)
        state.members.taking_part(replica)
        barrier = state.arrive(key, replica, payload, client_payload, kind)
        self.notify()
        await self.until(lambda: barrier.complete)
        return {
            "payloads": [[r, own] for r, own in sorted(barrier.payloads.items())],
            "gone": [[r, sequence] for r, sequence in (barrier.gone or {}).items()],
            "counted": dict(barrier.counted),
        }

    async def handle_fail(self, replica: Natural, failure: Failure) -> Fields:
        """A replica cannot go on: the run ends, unless it was about to join."""
        members = self.state.members
        if replica not in members.joining:
            # One that was given up and comes back must not end the others' run.
            members.taking_part(replica)
        self.state.fail(replica, failure)
        self.notify()
        return {}

    async def handle_leave(self, replica: Natural, retires: bool = False) -> Fields:
        """A replica's task ends; see `RunState.leave`."""
        self.hanging.discard(self.state.members.replicas[replica].worker)
        self.state.leave(replica, self.now(), retires=retires)
        self._forget(replica)
        self.notify()
        return {}

    # ---- replicas that fail

    def worker_removed(self, replica: int) -> None:
        """Dask has removed the worker of a replica: it was closed, or it died.

        A worker that closes still answers, and its replica has something to hand
        over; where one died, nobody listens any more.
        """
        state = self.state
        worker = state.members.replicas[replica].worker
        self.hanging.discard(worker)
        state.post("removed", replica=replica)
        self.notify()
        if not state.members.is_here(replica):
            return

        async def lose_later() -> None:
            if await is_listening(worker, GRACE_S):
                await asyncio.sleep(GRACE_S)  # it closes
            self.lose(replica, "its worker is gone")

        self._removals[replica] = asyncio.ensure_future(lose_later())
        if replica in state.outboxes:
            state.outboxes[replica].on_offer()  # the next request fails

    def lose(self, replica: int, why: str) -> None:
        """A replica has failed; the run goes on with the others."""
        if not self.state.members.is_here(replica):
            return
        # The client says it where its user looks.
        logger.info("run %s lost replica %s: %s", self.state.spec.run, replica, why)
        self.state.lose(replica, why, self.now())
        self._forget(replica)
        self.notify()

    def _forget(self, replica: int) -> None:
        for tasks in (self.relays, self._removals):
            task = tasks.pop(replica, None)
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        for batcher in self._batchers.values():
            batcher.replicas.discard(replica)

    async def _watch(self) -> None:
        """Give up replicas without a heartbeat, and a run that waits for too long."""
        state, bound = self.state, self.state.timeouts.bound("silence")
        while state.stopped is None:
            await asyncio.sleep(WATCHDOG_S)
            for replica in state.check_deadlines(self.now()):
                self.hanging.add(state.members.replicas[replica].worker)
                self.lose(replica, f"no heartbeat for {bound}")
        self.notify()

    # ---- the end

    async def close(self, reason: str, wait_s: float = 0.0) -> str:
        """Stop the run, and end all tasks.

        Args:
            reason: For replicas, and for requests that still wait.
            wait_s: So long replicas have to leave, seconds.

        Returns:
            Who has not left, and what was last heard of each; empty if nobody.
        """
        members = self.state.members
        self.state.stop(reason)
        self.notify()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while wait_s and members.present:
                    await self._changed.wait()
        for task in self.tasks:
            task.cancel()
        for batcher in self._batchers.values():
            batcher.end()
        return members.describe(members.present, self.now())


class ChannelSchedulerPlugin(SchedulerPlugin):  # type: ignore[misc]  # Dask is untyped
    """Keep the runs of a cluster and answer their clients and replicas.

    Registered once per cluster, by name; registering again changes nothing.
    """

    name = NAME
    idempotent = True
    runs: dict[int, LiveRun]
    arrived: dict[str, WorkerVersions]  # by address

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
        of_runs = handlers_of(LiveRun)
        handlers = {name: self._of_run(one) for name, one in of_runs.items()}
        for operation, handler in {**handlers, **handlers_of(self)}.items():
            scheduler.handlers[operation] = guard.of(handler)

    def _of_run(self, method: Handler) -> Handler:
        @functools.wraps(method)
        async def handler(run: int, **fields: Any) -> Fields:
            if run not in self.runs:
                raise GoneError(f"no run {run} here")
            live = self.runs[run]
            return live.answer(await method(live, **fields))

        return handler

    def _count(self, fields: Fields) -> None:
        """What is of no run counts in all of them: their clients should know."""
        run: Any = fields.get("run")
        of_one = isinstance(run, int) and run in self.runs
        for live in [self.runs[run]] if of_one else self.runs.values():
            live.state.refused += 1

    # ---- requests of a client

    async def handle_open(self, spec: Mapping[str, Any], client: str) -> Fields:
        """A client starts a run."""
        if client not in self._scheduler.clients:
            raise ValueError(f"{client!r} is no client of this cluster")
        own = RunSpec.from_wire(spec)
        if own.run in self.runs:
            raise ValueError(f"run {own.run} is open already")
        live = self.runs[own.run] = LiveRun(own, self._scheduler, client)
        # Some may have come after the client had chosen, or have no replica for want
        # of work; it knows which.
        for worker, found in self.arrived.items():
            if not live.state.members.assigned_to(worker):
                live.state.post("worker", worker=worker, found=found)
        logger.info("run %s opens: %s", own.run, own.replicas)
        return {"status": Answer.OK.value, "version": VERSION}

    async def handle_close(self, run: RunId) -> Fields:
        """A client is through with a run: nothing of it stays."""
        still_here = await self._close(run, "the run was closed")
        return {"status": Answer.OK.value, "still_here": still_here}

    async def _close(self, run: int, reason: str, wait_s: float = 0.0) -> str:
        """Close a run if it is here; see `LiveRun.close`."""
        if run not in self.runs:
            return ""
        still_here = await self.runs[run].close(reason, wait_s)
        self.runs.pop(run, None)
        logger.info("run %s is closed", run)
        return still_here

    # ---- requests of a worker

    async def handle_arrive(self, worker: str, found: WorkerVersions) -> Fields:
        """A worker has imported what it needs, or cannot; clients judge what it has."""
        if worker not in self._scheduler.workers:
            raise ValueError(f"no worker {worker} in this cluster")
        told = WorkerVersions(
            daskdl=shown(found["daskdl"]),
            torch=shown(found["torch"]),
            error=shown(found["error"]),
        )
        self.arrived[worker] = told
        for live in self.runs.values():
            if not live.state.members.assigned_to(worker):
                live.state.post("worker", worker=worker, found=told)
                live.notify()
        return {"status": Answer.OK.value}

    # ---- hooks of Dask

    @override
    def remove_worker(
        self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any
    ) -> None:
        self.arrived.pop(worker, None)
        for live in list(self.runs.values()):
            for replica in live.state.members.assigned_to(worker):
                live.worker_removed(replica)

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
        bound = live.state.timeouts.bound("stop")
        still_here = await self._close(run, "its client is gone", bound.seconds)
        if still_here:
            logger.warning(
                "run %s: after %s these have not left: %s", run, bound, still_here
            )
