"""The scheduler's side: the plugin, the request handlers of a run, and its send loops.

:mod:`daskdl.channel.run_state` makes the decisions. Here requests wait, send loops
deliver the relay's queues, and a watchdog removes replicas without a heartbeat.
"""

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from typing_extensions import override

from daskdl.channel.broadcast import SchedulerCopies
from daskdl.channel.dashboard import Announced, Dashboard, RunView
from daskdl.channel.leasing import Lease, RunSpec
from daskdl.channel.merging import merged
from daskdl.channel.protocol import (
    AGREED,
    DELIVER,
    DELIVER_BATCHES,
    DESCRIBE,
    MESSAGE_BYTES,
    NAME,
    OF_REPLICAS,
    UNSENT_BYTES,
    WORK,
    Acknowledgement,
    Answer,
    BarrierKind,
    Failure,
    Fields,
    FinishedLease,
    GoneError,
    Guard,
    Handler,
    LiveReport,
    Message,
    MessageKind,
    Natural,
    PeerProgress,
    RunId,
    Token,
    WorkerVersions,
    check_secret,
    handlers_of,
    nbytes_of,
    read,
    run_id,
    wrap,
)
from daskdl.channel.run_state import AT_FIRST, UPDATES, RunState
from daskdl.channel.transport import (
    BATCH_BYTES,
    Outbox,
    Pace,
    SchedulerOverDask,
    SchedulerTransport,
    SendLoop,
    run_reporting,
    time_limit,
)
from daskdl.config import VERSION, Bound
from daskdl.errors import shown

logger = logging.getLogger(__name__)

# Time to wait for batches of the other replicas on a worker. Their send loops wake
# almost together after a shared request; the wait is shorter than one request.
TOGETHER_S = 0.002


class Batch(NamedTuple):
    """Queued messages for one replica."""

    replica: int
    items: Sequence[Message]
    accepted: asyncio.Future[int]  # number of accepted items


class WorkerBatcher:
    """Sends the batches of one worker's replicas together, one request at a time.

    A message for several replicas travels once. With four replicas per worker and
    updates of 1 MB, workers took 40 % less CPU time than with a request per replica,
    and the scheduler a quarter less.
    """

    replicas: set[int]

    def __init__(
        self, worker: str, ask: Callable[..., Awaitable[Any]], bound: Bound
    ) -> None:
        self.replicas = set()
        self._worker = worker
        self._ask = ask
        self._bound = bound
        self._waiting: list[Batch] = []
        self._sending: asyncio.Task[None] | None = None

    async def deliver(self, replica: int, items: Sequence[Message]) -> int:
        """Deliver messages to a replica, with batches for others on its worker.

        Returns:
            Number of accepted messages.
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
                async with time_limit(self._bound.seconds):
                    answers = await self._request(batches)
            except OSError as error:  # a TimeoutError is one
                answers = [error] * len(batches)
            for batch, answer in zip(batches, answers, strict=True):
                if batch.accepted.done():  # its send loop was cancelled or timed out
                    continue
                if isinstance(answer, Exception):
                    batch.accepted.set_exception(answer)
                elif isinstance(answer, dict) and "accepted" in answer:
                    batch.accepted.set_result(answer["accepted"])
                else:
                    why = OSError(f"{self._worker} answered {answer!r}")
                    batch.accepted.set_exception(why)

    def _next(self) -> list[Batch]:
        """The oldest batches with a waiting send loop, up to `BATCH_BYTES`."""
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
        """Send batches; return one answer of the worker for each."""
        items = {id(item): item for batch in batches for item in batch.items}
        messages = [item.to_wire() for item in items.values()]
        if len(batches) == 1:
            (batch,) = batches
            return [await self._ask(DELIVER, replica=batch.replica, messages=messages)]
        places = {key: place for place, key in enumerate(items)}
        shares = [(b.replica, [places[id(i)] for i in b.items]) for b in batches]
        answer = await self._ask(DELIVER_BATCHES, messages=messages, shares=shares)
        answers = answer.get("answers", ()) if isinstance(answer, dict) else ()
        return answers if len(answers) == len(batches) else [answer] * len(batches)


# The relay is paced slower than replicas: its cost is requests, not bytes.
PACE_S = 0.010
# With more replicas than this for each worker to which the scheduler sends a sum, a sum
# may take more bytes than its updates, which the scheduler would send to all.
FEW_COPIES, TREE_EXCESS = 2, 2.0
INLINE_BYTES = 2**16  # more bytes of updates are merged in a thread
ARRIVAL_S = 0.5  # longest wait for earlier updates to arrive
WATCHDOG_S = 0.25
GRACE_S = 3.0  # for the replicas of a closing worker to flush, which waits 2 s at most
MAX_REPLICAS = 1000  # per worker
# A joining replica asks again after this time if all donors serve others. If it is a
# member already, updates are kept for it meanwhile, and dropped with each answer.
QUEUED_S = 1.0
DESCRIBE_S = 5.0  # longest time for a worker to say what its replicas do
FINISHED = "the run was closed"  # why a run stops that its client closes
MAX_WAIT_S = 3600.0  # longest wait of a client for events; usually a few seconds


class LiveRun:
    """A run with its send loops and waiting requests.

    A method ``handle_x`` answers the request ``daskdl_x`` of a client or replica,
    see `answer`.

    Attributes:
        state: State of the run.
        record: What the dashboard shows.
        hanging: Addresses of workers without a heartbeat that Dask has not removed.
        send_loops: Send loop of each replica.
    """

    state: RunState
    record: RunView
    client: str
    hanging: set[str]
    send_loops: dict[int, asyncio.Task[None]]

    def __init__(
        self,
        spec: RunSpec,
        transport: SchedulerTransport,
        client: str,
        dashboard: Dashboard,
    ) -> None:
        self._transport = transport
        self.state = RunState(spec, self.now())
        self.record = dashboard.open(self.state, self.now())
        self.client = client
        self.hanging = set()
        self.send_loops = {}
        self._changed = asyncio.Event()  # replaced after each change
        self._arrival_waits = 0  # requests whose updates still wait in a queue
        self._batchers: dict[str, WorkerBatcher] = {}
        self._removals: dict[int, asyncio.Task[None]] = {}  # of removed workers
        self._watchdog = asyncio.ensure_future(self._watch())
        self._merging: asyncio.Task[None] | None = None
        self._due = asyncio.Event()  # what waits to be merged waits no longer
        self.state.on_waiting, self.state.on_due = self._begin_merging, self._due.set

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """All background tasks."""
        return [self._watchdog, *self.send_loops.values(), *self._removals.values()]

    def now(self) -> float:
        """Time on the clock for heartbeats, seconds."""
        return self._transport.loop.time()

    def notify(self) -> None:
        """Let every waiting request check its condition again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _begin_merging(self) -> None:
        """Let updates wait for others, and send their sum."""

        def failed(error: Exception) -> None:
            logger.error("updates could not be merged", exc_info=error)
            self.state.send_waiting()

        if self._merging is None or self._merging.done():
            self._merging = asyncio.ensure_future(run_reporting(self._merge, failed))

    async def _merge(self) -> None:
        state, began_at = self.state, self.now()
        while state.waiting:
            latest = began_at + state.spec.merge_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(latest):
                    while not state.due and not state.crowded:
                        self._due.clear()
                        await self._due.wait()
            sends = state.due or self.now() >= latest
            began_at = self.now() if sends else began_at  # others come meanwhile
            waiting, oldest = state.waiting, state.next_waiting()
            updates = [m for m in oldest if m.kind in UPDATES]
            together = await self._merged(updates)
            if state.waiting is not waiting:  # they have been sent one by one
                continue
            if sends or len(together) > 1:  # what cannot be merged does not wait
                state.send_waiting(together, len(oldest))
            else:
                state.keep_sum(together[0], len(oldest))

    async def _merged(self, updates: Sequence[Message]) -> list[Message]:
        spec = self.state.spec
        goes_far = len(self.state.outboxes) > FEW_COPIES * spec.sum_fan_out
        excess = TREE_EXCESS if goes_far else 1.0
        merge = functools.partial(merged, updates, spec.run, excess)
        if sum(update.nbytes for update in updates) > INLINE_BYTES:
            return await asyncio.to_thread(merge)
        return merge()

    async def until(
        self, ready: Callable[[], bool], timeout_s: float | None = None
    ) -> None:
        """Wait until ready or stopped; check after each `notify`.

        Raises:
            TimeoutError: After `timeout_s` seconds.
        """
        async with asyncio.timeout(timeout_s):
            while self.state.stopped is None and not ready():
                await self._changed.wait()

    def answer(self, fields: Fields) -> Fields:
        """The answer to a request, with the reason if the run was stopped."""
        if self.state.stopped is not None:
            stopped = {"status": Answer.STOPPED.value, "reason": self.state.stopped}
            return {**stopped, **fields}
        return {"status": Answer.OK.value, **fields}

    async def describe(self) -> Fields:
        """Describe the run, with what the training thread of each replica does.

        Returns:
            The fields of `RunState.describe` and the client. Each replica also has
            ``"doing"``, the cause and seconds of its wait, its stack and the module
            that it imports, see `ChannelWorkerPlugin.handle_describe`; None if its
            worker does not answer.
        """
        description = self.state.describe(self.now())
        replicas = description["replicas"]
        workers = {r["worker"] for r in replicas if r["phase"] != "gone"}
        answers = await asyncio.gather(*map(self._doing, sorted(workers)))
        doing = {number: activity for answer in answers for number, *activity in answer}
        for replica in replicas:
            replica["doing"] = doing.get(replica["replica"])
        return {**description, "client": self.client}

    async def _doing(self, worker: str) -> Sequence[Sequence[Any]]:
        try:
            async with asyncio.timeout(DESCRIBE_S):
                answer = await self._ask(worker, DESCRIBE)
        except OSError:  # a TimeoutError is one
            return ()
        return answer.get("replicas", ()) if isinstance(answer, dict) else ()

    async def _ask(self, worker: str, operation: str, **fields: Any) -> Any:
        """Send a worker a request about the run."""
        spec = self.state.spec
        fields |= {"run": spec.run, "secret": spec.secret}
        return await self._transport.ask(worker, operation, **fields)

    # ---- requests of a client

    async def handle_watch(
        self, timeout_s: float, rows: Sequence[Mapping[str, Any]] = ()
    ) -> Fields:
        """Return new events to the client; wait if there are none.

        Args:
            timeout_s: Longest wait, seconds.
            rows: New rows of the client's history, for the dashboard.

        Returns:
            ``events``; ``has_enough``: whether replicas train, or may train.
        """
        for row in rows:
            self.record.add_row(row)
        if not 0 <= timeout_s <= MAX_WAIT_S:
            raise ValueError(f"timeout_s must be in 0 .. {MAX_WAIT_S}, got {timeout_s}")
        with contextlib.suppress(TimeoutError):
            await self.until(lambda: bool(self.state.events), timeout_s)
        has_enough = self.state.has_enough
        return {"events": self.state.take_events(), "has_enough": has_enough}

    async def handle_stop(self, reason: str) -> Fields:
        """Stop the run for the client."""
        self.state.stop(reason)
        self.notify()
        return {}

    async def handle_assign(self, worker: str, replicas: Natural) -> Fields:
        """Raise the number of replicas on a worker; return the new replicas."""
        if replicas > MAX_REPLICAS:
            raise ValueError(f"replicas must be <= {MAX_REPLICAS}, got {replicas}")
        members = self.state.members
        is_connected = self._transport.has_worker(worker)
        missing = replicas - len(members.assigned_to(worker)) if is_connected else 0
        return {"replicas": [members.assign(worker) for _ in range(missing)]}

    async def handle_unassign(self, replica: Natural) -> Fields:
        """Remove a replica that could not be started."""
        if not self.state.members.replicas[replica].joined:
            self.lose(replica, "it was not started")
        return {}

    async def handle_restore(self, phase: str, part: Natural, key: str) -> Fields:
        """Set the new key of a lost part, which the client computes again."""
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
        """Fetch a part of the newest agreed state for the client.

        Args:
            epoch: Epoch at whose end the state was agreed on; part 0 may be of a later
                epoch.
            part: Counted from 0.
            avoid: Replicas that must not be chosen.
            replica: Replica to fetch from; None: any.
        """
        members = self.state.members
        if replica is None:
            replica = next((r for r in members.expected if r not in avoid), None)
        if replica is None:
            return {"replica": None}
        worker = members.replicas[replica].worker
        try:
            async with time_limit(self.state.timeouts.request):
                answer = await self._ask(
                    worker, AGREED, replica=replica, epoch=epoch, part=part
                )
        except OSError as error:  # a TimeoutError is one
            answer = {"status": Answer.UNKNOWN.value, "reason": str(error)}
        return {**answer, "replica": replica}

    # ---- requests of a replica

    async def handle_join(self, replica: Natural, version: str) -> Fields:
        """Let a replica join; answer once all initial replicas have joined.

        The answer to a joining replica names the donor of its snapshot, its worker and
        the updates that the snapshot must contain; all later updates are sent to the
        replica, by a relay once it subscribes. No worker: no snapshot can be made now,
        so it has to ask again. No donor: all of them serve others, or, if nobody
        trains, none is left. Only the first of these answers has the topology.
        ``queued``: all donors serve others, and the replica is not a member yet, so it
        is sent nothing; it asks again.
        """
        state, members = self.state, self.state.members
        if version != VERSION:
            raise ValueError(
                f"the worker has daskdl {version}, the scheduler {VERSION}; "
                "install the same version on all"
            )
        initial = replica in state.spec.replicas
        if not initial:  # not one of the members that start together
            await self.until(lambda: members.started)
        if not members.is_here(replica):
            raise ValueError(f"no replica {replica} in this run")
        if not initial:
            return await self._join_later(replica)
        if replica not in state.outboxes:  # else the request is a retry
            self._add_member(replica)
        self.notify()
        await self.until(lambda: members.started)
        present = [[r, *AT_FIRST] for r in members.training]
        return {
            "members": present,
            "gone": sorted(members.gone),
            "topology": state.topology(),
        }

    async def _join_later(self, replica: int) -> Fields:
        """Let a replica join that is not one of the initial ones; see `handle_join`."""
        state, members = self.state, self.state.members
        member = members.replicas[replica]

        def has_donor() -> bool:
            is_served = members.donor_of(replica) is not None
            return is_served or member.gone or not members.training

        asks_again = replica in state.outboxes
        if not asks_again:
            # All updates would be kept for a member until a donor is free.
            with contextlib.suppress(TimeoutError):
                await self.until(has_donor, QUEUED_S)
            if not members.is_here(replica):
                raise GoneError(f"replica {replica} is no longer a member of this run")
            member.donor = members.donor_of(replica)
            if member.donor is None and members.training:
                return {"queued": True}
            self._add_member(replica)
        generation = members.generation
        member.heartbeat_at = math.inf  # no heartbeat while it waits here

        def ready() -> bool:
            # Replicas that met before this one joined may change the grid until they
            # report.
            return member.gone or (state.can_cut(generation) and not state.holding)

        if asks_again:
            member.donor = None
        with contextlib.suppress(TimeoutError):  # it asks again
            await self.until(ready, state.timeouts.request)
            await self.until(has_donor, QUEUED_S)
        members.taking_part(replica).heartbeat_at = self.now()
        donor, cut, worker = members.donor_of(replica), {}, None
        if members.training and ready():
            cut = state.cut(replica)  # if it is queued, to drop what is kept for it
            if donor is not None:
                member.donor, worker = donor, members.replicas[donor].worker
        return {
            "members": [],
            "gone": sorted(members.gone),
            # A replica that asks again knows it, and many may ask at once.
            "topology": None if asks_again else state.topology(),
            "donor": donor,
            "training": bool(members.training),
            "worker": worker,
            "cut": list(cut.items()),
        }

    def _add_member(self, replica: int) -> None:
        """Add a replica to the members and start its send loop."""
        state, worker = self.state, self.state.members.replicas[replica].worker
        bound = state.timeouts.bound("request")
        if worker not in self._batchers:
            ask = functools.partial(self._ask, worker)
            self._batchers[worker] = WorkerBatcher(worker, ask, bound)
        self._batchers[worker].replicas.add(replica)
        outbox = Outbox(state.spec.queue_bytes)
        loop = SendLoop(
            outbox,
            functools.partial(self._batchers[worker].deliver, replica),
            pace_s=PACE_S,
            beat_s=state.timeouts.silence / 4,
            bound=bound,
            destination=f"replica {replica} on {worker}",
        )
        outbox.on_append = loop.wake
        outbox.on_drop = self._on_arrival
        state.join(replica, self.now(), outbox)

        def failed(error: Exception) -> None:
            if isinstance(error, OSError):  # a closing worker, not yet removed by Dask
                self.lose(replica, str(error))
                return
            logger.error("the relay to replica %s failed", replica, exc_info=error)
            self.lose(replica, f"its relay failed: {error!r}")

        self.send_loops[replica] = asyncio.ensure_future(
            run_reporting(loop.run, failed)
        )

    async def handle_subscribe(
        self, replica: Natural, contained: Sequence[tuple[Natural, Natural]]
    ) -> Fields:
        """Send updates to a joining replica; see `RunState.subscribe`."""
        self.state.members.taking_part(replica)
        self.state.subscribe(replica, dict(contained))
        return {}

    async def handle_activate(self, replica: Natural, step: Natural) -> Fields:
        """Activate a replica that has the common state, once no updates are held."""
        state, members = self.state, self.state.members
        members.taking_part(replica)
        await self.until(lambda: not state.holding)
        state.activate(replica, step)
        self.notify()
        reached = [[r, *members.replicas[r].progress] for r in members.expected]
        return {
            "members": reached,
            "epoch": state.epoch,
            "interval": state.interval,
            "report": state.report,
        }

    async def handle_publish(
        self,
        replica: Natural,
        messages: Sequence[Message],
        progress: PeerProgress,
        acknowledgement: Acknowledgement | None = None,
        live: LiveReport | None = None,
        leaves: bool = False,
        fetching: bool = False,
        steps: Natural = 0,
        needed_step: Natural = 0,
    ) -> Fields:
        """Accept a replica's updates for all others, or only a heartbeat.

        In a mesh there is an acknowledgement, updates only from a replica that leaves,
        and the answer contains the progress of all replicas that train. With `leaves`,
        the last updates of the replica are accepted even if a queue is full. With
        `fetching`, a sum is on its way to it, perhaps over a slow link. `steps`
        are those that the replica has taken, which messages about it name. With a
        `needed_step`, it waits until all others have reached that. The answer contains
        `RunState.moved`: a replica that finds no room waits as long as others move.
        """
        state = self.state
        member = state.members.taking_part(replica)
        state.fetching += fetching
        for update in messages:
            if update.kind != MessageKind.UPDATE or update.origin != replica:
                raise ValueError(
                    f"replica {replica} sent a {update.kind} of replica {update.origin}"
                )
            update.check_size()
        member.heartbeat_at = self.now()
        member.steps = max(member.steps, steps)
        if live is not None:
            self.record.report(replica, live, self.now())
        accepted = 0
        if messages or acknowledgement is None:
            accepted = state.publish(
                replica, messages, progress, leaves=leaves, needed_step=needed_step
            )
        if acknowledgement is None:
            if accepted and not (leaves or state.spec.synchronous or state.spec.merges):
                await self._wait_for_arrival(replica, messages[:accepted])
            return {"accepted": accepted, "moved": state.moved}
        received = dict(acknowledgement["received"])
        generation = acknowledgement["generation"]
        adopted_at = acknowledgement["adopted_at"]
        if state.acknowledge(replica, progress, generation, adopted_at, received):
            self.notify()
        return {
            "accepted": accepted,
            "moved": state.moved,
            "received_by_all": state.received_by_all(replica),
            "peers": [(peer, *reached) for peer, reached in state.training_progress()],
        }

    def _on_arrival(self) -> None:
        if self._arrival_waits:
            self.notify()
        self.state.relieve()

    async def _wait_for_arrival(self, origin: int, newest: Sequence[Message]) -> None:
        """Wait until a replica's updates before the newest have arrived, or a moment.

        Until a replica has the answer, it counts these updates as unsent. So a replica
        with a fast link sends no more than the links of the others carry. Otherwise a
        long queue would delay each update, and replicas would wait for each other.
        """
        nbytes = UNSENT_BYTES + sum(m.nbytes + MESSAGE_BYTES for m in newest)

        def arrived() -> bool:
            boxes = self.state.outboxes.values()
            return all(box.bytes_of(origin) <= nbytes for box in boxes)

        if arrived():
            return
        timeouts = self.state.timeouts
        longest_s = min(ARRIVAL_S, timeouts.request / 2, timeouts.silence / 4)
        self._arrival_waits += 1
        try:
            with contextlib.suppress(TimeoutError):
                await self.until(arrived, longest_s)
        finally:
            self._arrival_waits -= 1

    async def handle_fetch_sum(self, replica: Natural, number: Natural) -> Fields:
        """Return a sum to a replica that could not fetch it from another worker."""
        self.state.members.taking_part(replica)
        return {"frame": wrap(self.state.queued_sum(replica, number).payload)}

    async def handle_lease(
        self,
        replica: Natural,
        phase: str,
        epoch: Natural,
        finished: Sequence[FinishedLease],
        wait: bool,
        work: Any = None,
        idle_payload: Any = None,
    ) -> Fields:
        """Take back a replica's finished leases and lease the next rows to it.

        With `wait`, answer once there is a lease or sync point, or all rows are
        finished. With an idle payload, ``ROUND`` barriers do not wait for the replica.
        """
        state, members = self.state, self.state.members
        worker = members.taking_part(replica).worker
        self._check_size(work, idle_payload)
        if work is not None:
            read(work, WORK[phase])
        now = self.now()
        state.give_back(replica, phase, epoch, finished, now, work, idle_payload)
        self.notify()  # rows may be free for others, or the interval may be over
        if wait:
            await self.until(lambda: state.can_lease(replica, phase, epoch))
            members.taking_part(replica)
        lease = state.lease(
            replica, phase, epoch, lambda key: self._is_held(key, worker)
        )
        if isinstance(lease, Lease):
            return {
                "lease": lease.number,
                "ranges": lease.ranges,
                "keys": list(lease.keys.items()),
                "ahead": lease.ahead,
            }
        return {"lease": None, "sync_point": lease}

    def _check_size(self, *payloads: Any) -> None:
        """Check the size of payloads, which are kept until all replicas have met."""
        nbytes, most = nbytes_of(payloads), self.state.spec.payload_bytes
        if nbytes > most:
            raise ValueError(f"payloads must have at most {most} bytes, got {nbytes}")

    async def handle_missing(
        self, replica: Natural, phase: str, part: Natural, key: str
    ) -> Fields:
        """Return the key of a part; if the part is lost, wait until its key changes."""
        state = self.state
        member, leases = state.members.taking_part(replica), state.leases[phase]
        if leases.held_key(part) == key and self._is_lost(key):
            state.post(
                "missing",
                phase=phase,
                part=part,
                key=key,
                worker=member.worker,
                avoid=sorted(self.hanging),
            )
            self.notify()
            await self.until(lambda: leases.held_key(part) != key)
        return {"key": leases.held_key(part)}

    def _is_held(self, key: str, worker: str) -> bool:
        """Whether a worker holds the result of a task."""
        places = self._transport.places(key)
        return places is not None and worker in places.holding

    def _is_lost(self, key: str) -> bool:
        """Whether a task is unknown, or only hanging workers hold or compute it."""
        places = self._transport.places(key)
        if places is None:
            return True
        there = places.holding | places.computing
        return bool(there) and there <= self.hanging

    async def handle_barrier(
        self,
        replica: Natural,
        key: str,
        payload: Any,
        client_payload: bytes,
        kind: str,
        live: LiveReport | None = None,
    ) -> Fields:
        """Register a replica at a barrier; answer once the barrier is complete."""
        state, kind = self.state, BarrierKind(kind)
        state.members.taking_part(replica)
        self._check_size(payload, client_payload)
        if live is not None:
            self.record.report(replica, live, self.now())
        barrier = state.arrive(key, replica, payload, client_payload, kind)
        self.notify()
        await self.until(lambda: barrier.complete)
        return {
            "payloads": sorted(barrier.payloads.items(), key=itemgetter(0)),
            "gone": list((barrier.gone or {}).items()),
            "passed_on": barrier.passed_on,
            "counted": dict(barrier.counted),
        }

    async def handle_fail(self, replica: Natural, failure: Failure) -> Fields:
        """Report a replica's failure; end the run unless the replica is joining."""
        members = self.state.members
        if replica not in members.not_active:
            # A removed replica that returns must not end the run of the others.
            members.taking_part(replica)
        self.state.fail(replica, failure)
        self.notify()
        return {}

    async def handle_leave(self, replica: Natural, retires: bool = False) -> Fields:
        """Remove a replica whose task ends; see `RunState.leave`."""
        members = self.state.members
        self.hanging.discard(members.replicas[replica].worker)
        self.state.leave(replica, self.now(), retires=retires)
        self._forget(replica)
        self.notify()
        return {}

    # ---- replicas that fail

    def worker_removed(self, replica: int) -> None:
        """Handle a replica whose worker closed or died, and was removed by Dask.

        A closing worker still listens, so its replica gets time to flush; a dead worker
        does not listen. The event is posted even for a replica that has left, because
        its result may not have reached Dask.
        """
        state = self.state
        worker = state.members.replicas[replica].worker
        self.hanging.discard(worker)
        state.post("removed", replica=replica)
        self.notify()
        if not state.members.is_here(replica):
            return

        async def lose_later() -> None:
            if await self._transport.is_listening(worker, GRACE_S):
                await asyncio.sleep(GRACE_S)  # the worker closes
            self.lose(replica, "its worker is gone")

        self._removals[replica] = asyncio.ensure_future(lose_later())
        if replica in state.outboxes:
            state.outboxes[replica].on_append()  # wakes the loop, whose request fails

    def lose(self, replica: int, why: str) -> None:
        """Remove a failed replica; the run continues with the others."""
        if not self.state.members.is_here(replica):
            return
        # The client reports the failure to its user.
        label = self.state.spec.label
        logger.info("run %s lost replica %s: %s", label, replica, why)
        self.state.lose(replica, why, self.now())
        self._forget(replica)
        self.notify()

    def _forget(self, replica: int) -> None:
        for tasks in (self.send_loops, self._removals):
            task = tasks.pop(replica, None)
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        for batcher in self._batchers.values():
            batcher.replicas.discard(replica)

    async def _watch(self) -> None:
        """Remove replicas without a heartbeat; give up the run at its deadlines.

        After a pause of the event loop, for example while the process was stopped,
        messages that arrived meanwhile are read after this timer. So the pause counts
        neither as silence of the replicas nor towards other deadlines.
        """
        state, bound = self.state, self.state.timeouts.bound("silence")
        checked_at = self.now()
        while state.stopped is None:
            await asyncio.sleep(WATCHDOG_S)
            paused_s = self.now() - checked_at - WATCHDOG_S
            checked_at = self.now()
            if paused_s > WATCHDOG_S:
                state.postpone_deadlines(paused_s)
                continue
            for replica in state.check_deadlines(self.now()):
                self.hanging.add(state.members.replicas[replica].worker)
                self.lose(replica, f"no heartbeat for {bound}")
            for replica in state.stuck(self.now()):
                why = f"its queue is full and has not moved for {bound}: slow link?"
                self.lose(replica, why)
        self.notify()

    # ---- the end

    async def close(self, reason: str, wait_s: float = 0.0) -> str:
        """Stop the run and end all tasks.

        Returns:
            Description of the replicas that have not left; empty if there are none.
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
        if self._merging is not None:
            self._merging.cancel()
        for batcher in self._batchers.values():
            batcher.end()
        return members.describe(members.present, self.now())


class ChannelSchedulerPlugin(SchedulerPlugin):  # type: ignore[misc]  # Dask is untyped
    """Keeps the runs of a cluster and answers their clients, replicas and workers.

    Registered once per cluster, by name; a second registration changes nothing.
    """

    name = NAME
    idempotent = True
    runs: dict[int, LiveRun]
    arrived: dict[str, WorkerVersions]  # by address
    copies: SchedulerCopies
    dashboard: Dashboard

    def __init__(self) -> None:
        self.runs = {}
        self.dashboard = Dashboard()
        self.arrived = {}
        self._abandoning: set[asyncio.Task[None]] = set()
        self._pace: Pace | None = None  # None: not started on a Dask scheduler

    @override
    async def start(self, scheduler: Scheduler) -> None:
        # Two clients may register at once: both plugins use the state of the first.
        earliest = scheduler.extensions.setdefault(NAME, self)
        if earliest is not self:
            self.runs, self.arrived = earliest.runs, earliest.arrived
            self.dashboard, self.copies = earliest.dashboard, earliest.copies
            return
        self.attach(SchedulerOverDask(scheduler))
        self._pace = Pace(scheduler)
        # Replica tasks secede, so Dask sees no demand while they train.
        of_tasks = scheduler.handlers["adaptive_target"]

        def adaptive_target(target_duration: str | None = None) -> int:
            wanted: int = sum(r.state.workers_wanted for r in self.runs.values())
            return max(wanted, int(of_tasks(target_duration=target_duration)))

        scheduler.handlers["adaptive_target"] = adaptive_target
        self.dashboard.connect(scheduler)

    def attach(self, transport: SchedulerTransport) -> None:
        """Answer the requests to a server."""
        self._transport = transport
        self.copies = SchedulerCopies(transport)
        guard = Guard(self._count)
        of_runs = handlers_of(LiveRun)
        handlers = {
            name: self._of_run(name, method) for name, method in of_runs.items()
        }
        handlers |= {**handlers_of(self), **handlers_of(self.copies)}
        for operation, handler in handlers.items():
            transport.handlers[operation] = guard.of(handler)

    def _of_run(self, operation: str, method: Handler) -> Handler:
        """Let a method of a run answer only requests with the secret of the run."""

        @functools.wraps(method)
        async def handler(run: int, secret: int | None = None, **fields: Any) -> Fields:
            if run not in self.runs:
                raise GoneError(f"no run {run_id(run)} here")
            live = self.runs[run]
            is_replica = operation in OF_REPLICAS
            if is_replica and live.state.is_former(fields["replica"]):
                raise GoneError(f"run {run_id(run)} has lost this replica")
            check_secret(secret, live.state.spec.secret)
            if is_replica:
                token = fields.pop("token")
                live.state.members.authenticate(fields["replica"], token)
            return live.answer(await method(live, **fields))

        return handler

    def _count(self, fields: Fields) -> None:
        """Count a refused message in its run; a message without a run in all runs."""
        run: Any = fields.get("run")
        is_known = isinstance(run, int) and run in self.runs
        for live in [self.runs[run]] if is_known else self.runs.values():
            live.state.refused += 1

    # ---- requests of a client

    def announce(
        self, run: int, client: str, name: str, title: str, state: str | None
    ) -> None:
        """Show a run that opens soon; None: it does not any more."""
        if state is None or not self._transport.has_client(client):
            self.dashboard.announced.pop(run, None)
        elif run not in self.dashboard.runs:
            self.dashboard.announced[run] = Announced(
                client, shown(name), shown(title), shown(state)
            )

    async def handle_open(self, spec: Mapping[str, Any], client: str) -> Fields:
        """Open a run for a client."""
        if not self._transport.has_client(client):
            raise ValueError(f"{client!r} is not a client of this cluster")
        run_spec = RunSpec.from_wire(spec)
        run = run_spec.run
        if run in self.runs:
            raise ValueError(f"run {run_id(run)} is already open")
        live = LiveRun(run_spec, self._transport, client, self.dashboard)
        self.runs[run] = live
        self.copies.release((run, run_spec.secret))
        # Workers without a replica: some arrived after the client's choice, others had
        # no work left. The client tells them apart.
        for worker, versions in self.arrived.items():
            if not live.state.members.assigned_to(worker):
                live.state.post("worker", worker=worker, versions=versions)
        self._set_pace()
        logger.info("run %s opens: %s", run_spec.label, run_spec.replicas)
        return {"status": Answer.OK.value}

    async def handle_close(self, run: RunId, secret: Token | None = None) -> Fields:
        """Close a run for its client and remove its state."""
        if run in self.runs:
            check_secret(secret, self.runs[run].state.spec.secret)
        still_here = await self._close(run, FINISHED)
        if secret is not None:  # the run may not have opened
            self.copies.drop(run, secret)
        return {"status": Answer.OK.value, "still_here": still_here}

    async def _close(self, run: int, reason: str, wait_s: float = 0.0) -> str:
        """Close a run if it is open; see `LiveRun.close`."""
        if run not in self.runs:
            return ""
        live = self.runs[run]
        finished = live.state.stopped is None and reason == FINISHED
        still_here = await live.close(reason, wait_s)
        if self.runs.get(run) is live:  # else it was closed twice
            del self.runs[run]
            self.copies.drop(run, live.state.spec.secret)
            self._set_pace()
            self.dashboard.end(run, self._transport.loop, finished=finished)
            logger.info("run %s: %s", live.state.spec.label, live.state.stopped)
        return still_here

    async def handle_describe(self) -> Fields:
        """Describe all runs; see `LiveRun.describe`."""
        runs = await asyncio.gather(*(live.describe() for live in self.runs.values()))
        return {"status": Answer.OK.value, "runs": runs}

    def _set_pace(self) -> None:
        if self._pace is not None:
            self._pace.set_training(bool(self.runs))

    # ---- requests of a worker

    async def handle_arrive(self, worker: str, versions: WorkerVersions) -> Fields:
        """Record the versions, or the import error, of a worker for all clients."""
        if not self._transport.has_worker(worker):
            raise ValueError(f"no worker {worker} in this cluster")
        versions = WorkerVersions(
            daskdl=shown(versions["daskdl"]),
            torch=shown(versions["torch"]),
            error=shown(versions["error"]),
        )
        self.arrived[worker] = versions
        for live in self.runs.values():
            if not live.state.members.assigned_to(worker):
                live.state.post("worker", worker=worker, versions=versions)
                live.notify()
        return {"status": Answer.OK.value}

    # ---- hooks of Dask

    @override
    def remove_worker(
        self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any
    ) -> None:
        self.worker_removed(worker)

    def worker_removed(self, worker: str) -> None:
        """Handle a worker that closed or died, and was removed by Dask."""
        self.arrived.pop(worker, None)
        self.copies.worker_removed(worker)
        for live in list(self.runs.values()):
            for replica, member in list(live.state.members.replicas.items()):
                if member.worker == worker:
                    live.worker_removed(replica)

    @override
    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        self.client_removed(client)

    def client_removed(self, client: str) -> None:
        """Stop the runs of a client that is gone."""
        announced = self.dashboard.announced
        for run in [r for r, coming in announced.items() if coming.client == client]:
            del announced[run]
        self.copies.client_removed(client, self.runs)
        for run, live in list(self.runs.items()):
            if live.client == client:
                task = asyncio.ensure_future(self._abandon(run, live))
                self._abandoning.add(task)
                task.add_done_callback(self._abandoning.discard)

    @override
    async def before_close(self) -> None:
        for run in list(self.runs):
            await self._close(run, "the scheduler closes")
        self.dashboard.forget()

    async def _abandon(self, run: int, live: LiveRun) -> None:
        bound = live.state.timeouts.bound("stop")
        still_here = await self._close(run, "its client is gone", bound.seconds)
        if still_here:
            logger.warning(
                "run %s: replicas that have not left after %s: %s",
                live.state.spec.label,
                bound,
                still_here,
            )


async def dask_setup(scheduler: Scheduler) -> None:
    """Prepare for fits when a scheduler starts, if it preloads this module.

    Otherwise the first fit does: it registers the plugin, without which the dashboard
    has no page of daskdl, and waits seconds for the modules that each process needs.
    """
    from daskdl.util import version_finder  # needs torch, unlike the plugin

    await scheduler.register_scheduler_plugin(ChannelSchedulerPlugin(), idempotent=True)
    versions = await version_finder()()
    if versions["error"]:
        logger.warning("no fit can use this scheduler: %s", versions["error"])
