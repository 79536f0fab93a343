"""The scheduler's end: the plugin, the handlers of a run's requests, and what it sends.

What a request means is decided in :mod:`daskdl.channel.run_state`. Here requests wait,
send loops carry the relay's queues, one request per worker at a time, and a watchdog
gives up replicas that are silent.
"""

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from distributed import Scheduler
from distributed.comm import get_address_host_port, parse_address
from distributed.diagnostics.plugin import SchedulerPlugin
from typing_extensions import override

from daskdl.channel.leasing import RunSpec, SyncPoint
from daskdl.channel.protocol import (
    MESSAGE_BYTES,
    NAME,
    Acknowledgement,
    Answer,
    Barrier,
    Failure,
    Fields,
    FinishedLease,
    GoneError,
    Guard,
    Handler,
    Identity,
    Message,
    MessageKind,
    PeerProgress,
    Whole,
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

Share = tuple[int, list[int]]  # a replica, and which of the items are for it
Ask = Callable[[list[Message], list[Share]], Awaitable[Any]]


class Batch(NamedTuple):
    """What is to go to one replica."""

    replica: int
    items: Sequence[Message]
    accepted: asyncio.Future[int]


class WorkerBatcher:
    """Sends the batches of one worker's replicas together, a request at a time.

    An item for several of them travels once.

    Args:
        worker: Its address, for messages.
        ask: Sends items with the shares of replicas in them, and returns the answer.
        bound: How long that may take.

    Attributes:
        replicas: Those that it delivers to.
    """

    replicas: set[int]

    def __init__(self, worker: str, ask: Ask, bound: Bound) -> None:
        self.replicas = set()
        self._worker = worker
        self._ask = ask
        self._bound = bound
        self._waiting: list[Batch] = []
        self._sending: asyncio.Task[None] | None = None

    async def deliver(self, replica: int, items: Sequence[Message]) -> int:
        """Deliver items to a replica, with what others of its worker are sent.

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
        try:
            return await accepted
        finally:  # it may have been cancelled before it was sent
            self._waiting = [one for one in self._waiting if not one.accepted.done()]

    def end(self) -> None:
        """Send nothing more; whoever still waits is cancelled."""
        if self._sending is not None:
            self._sending.cancel()
        for batch in self._waiting:
            batch.accepted.cancel()

    async def _send_all(self) -> None:
        while self._waiting:
            if len(self._waiting) < len(self.replicas):
                await asyncio.sleep(TOGETHER_S)
            await self._send(self._take())

    def _take(self) -> list[Batch]:
        """The oldest batches, at least one, up to so many bytes together."""
        nbytes, seen = 0, set[int]()
        for count, batch in enumerate(self._waiting):
            for item in batch.items:
                nbytes += 0 if id(item) in seen else item.nbytes + MESSAGE_BYTES
                seen.add(id(item))
            if count and nbytes > BATCH_BYTES:
                break
        else:
            count = len(self._waiting)
        batches, self._waiting = self._waiting[:count], self._waiting[count:]
        return batches

    async def _send(self, batches: Sequence[Batch]) -> None:
        items = {id(item): item for batch in batches for item in batch.items}
        places = {key: place for place, key in enumerate(items)}
        shares = [(b.replica, [places[id(i)] for i in b.items]) for b in batches]
        try:
            async with asyncio.timeout(self._bound.seconds):
                answer = await self._ask([*items.values()], shares)
            answers = self._read(answer, len(batches))
        # What Dask's pool raises once the scheduler closes is a RuntimeError.
        except (OSError, RuntimeError) as error:  # a TimeoutError is an OSError
            answers = [error] * len(batches)
        except asyncio.CancelledError:
            for batch in batches:
                batch.accepted.cancel()
            raise
        for batch, accepted in zip(batches, answers, strict=True):
            if batch.accepted.done():  # it did not wait so long
                continue
            if isinstance(accepted, Exception):
                batch.accepted.set_exception(accepted)
            else:
                batch.accepted.set_result(accepted)

    def _read(self, answer: Any, batches: int) -> Sequence[int | Exception]:
        """How many items of each batch were accepted, or why none were."""
        wrong = OSError(f"{self._worker} answered {answer!r}")
        if not isinstance(answer, dict) or answer.get("status") != Answer.OK:
            raise wrong
        answers = answer["answers"]
        if len(answers) != batches:
            raise OSError(f"{self._worker} answered {answers!r} to {batches} batches")
        return [
            int(own["accepted"])
            if isinstance(own, dict) and own["status"] == Answer.OK
            else OSError(f"{self._worker} answered {own!r}")
            for own in answers
        ]


# The relay paces itself slower than replicas do: its cost is requests, not bytes.
PACE_S = 0.010
WATCHDOG_S = 0.25
GRACE_S = 3.0  # for a closing worker to hand over; it takes 2 s itself at most
MOST_REPLICAS = 1000  # of a worker
LONGEST_S = 3600.0  # that a client waits for events; it asks every few seconds


class LiveRun:
    """A run with its send loops, and the requests that wait in it.

    A method ``handle_x`` answers the request ``daskdl_x``; `run` is looked up before.

    Args:
        state: What is known of the run.
        scheduler: Whose connections carry the items.
        client: Id of the client that opened it.

    Attributes:
        hanging: Addresses of workers that Dask has, and that are silent.
        relays: The send loop of each replica.
    """

    state: RunState
    client: str
    hanging: set[str]
    relays: dict[int, asyncio.Task[None]]

    def __init__(self, state: RunState, scheduler: Scheduler, client: str) -> None:
        self.state = state
        self.client = client
        self.hanging = set()
        self.relays = {}
        self._scheduler = scheduler
        self._changed = asyncio.Condition()
        self._batchers: dict[str, WorkerBatcher] = {}
        self._removals: dict[int, asyncio.Task[None]] = {}  # of removed workers
        self._watchdog = asyncio.ensure_future(self._watch())

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """All that run in the background."""
        return [self._watchdog, *self.relays.values(), *self._removals.values()]

    def now(self) -> float:
        """The clock for signs of life, seconds."""
        return asyncio.get_running_loop().time()

    async def notify(self) -> None:
        """Let every waiting request look again."""
        async with self._changed:
            self._changed.notify_all()

    async def until(
        self, ready: Callable[[], bool], timeout_s: float | None = None
    ) -> None:
        """Wait until ready or stopped, looking after each `notify`.

        Raises:
            TimeoutError: If it did not become ready in time.
        """
        async with self._changed:
            waiting = self._changed.wait_for(
                lambda: self.state.stopped is not None or ready()
            )
            await asyncio.wait_for(waiting, timeout_s)

    def answer(self, **fields: Any) -> Fields:
        """An answer to a replica, with the reason to leave if the run was stopped."""
        if self.state.stopped is not None:
            stopped = {"status": Answer.STOPPED.value, "reason": self.state.stopped}
            return {**stopped, **fields}
        return {"status": Answer.OK.value, **fields}

    def check_present(self, replica: int) -> None:
        """Refuse whoever does not take part.

        Raises:
            GoneError: If the replica has taken part.
            ValueError: If it never did.
        """
        if replica in self.state.members.gone:
            raise GoneError(f"replica {replica} is not a member any more")
        if replica not in self.state.outboxes:
            raise ValueError(f"replica {replica} is not a member of this run")

    def check_assigned(self, replica: int) -> None:
        """Refuse a number that no replica of the run has had.

        Raises:
            ValueError: If there is none.
        """
        if replica not in self.state.members.replicas:
            raise ValueError(f"there is no replica {replica} in this run")

    # ---- requests of a client

    async def handle_watch(self, seen: Whole, timeout_s: float) -> Fields:
        """A client asks for events after the first `seen` ones."""
        events = self.state.events
        if seen > len(events) or not 0 <= timeout_s <= LONGEST_S:
            raise ValueError(f"got seen={seen} of {len(events)}, timeout_s={timeout_s}")
        with contextlib.suppress(TimeoutError):
            await self.until(lambda: len(events) > seen, timeout_s)
        return {"status": Answer.OK.value, "events": events.since(seen)}

    async def handle_stop(self, reason: str) -> Fields:
        """A client wants every replica to leave."""
        self.state.stop(reason)
        await self.notify()
        return {"status": Answer.OK.value}

    async def handle_assign(self, worker: str, replicas: Whole) -> Fields:
        """A client wants so many replicas on a worker; answered with the new ones."""
        if replicas > MOST_REPLICAS:
            raise ValueError(f"replicas must be <= {MOST_REPLICAS}, got {replicas}")
        members = self.state.members
        there = worker in self._scheduler.workers
        missing = replicas - len(members.assigned_to(worker)) if there else 0
        return self.answer(replicas=[members.assign(worker) for _ in range(missing)])

    async def handle_unassign(self, replica: Whole) -> Fields:
        """A replica could not be started."""
        self.check_assigned(replica)
        if not self.state.members.replicas[replica].joined:
            await self.lose(replica, "it was not started")
        return {"status": Answer.OK.value}

    async def handle_restore(self, phase: str, part: Whole, key: str) -> Fields:
        """A client has computed a lost part again, under another key."""
        self.state.leases[phase].replace_key(part, key)
        await self.notify()
        return {"status": Answer.OK.value}

    async def handle_agreed(
        self,
        epoch: Whole,
        part: Whole,
        avoid: Sequence[Whole],
        replica: Whole | None,
    ) -> Fields:
        """A client wants a part of the newest state that all have agreed on.

        Args:
            epoch: At the end of which, or of a later one; after the first part: that.
            part: Counted from 0.
            avoid: Replicas that are not asked.
            replica: That is asked; None: any.
        """
        if replica is None:
            others = (r for r in self.state.members.expected if r not in set(avoid))
            replica = next(others, None)
        if replica is None:
            return {"status": Answer.OK.value, "replica": None}
        self.check_assigned(replica)
        peer = self._scheduler.rpc(self.state.members.replicas[replica].worker)
        own = {"run": self.state.spec.run, "replica": replica}
        try:
            answer = await asyncio.wait_for(
                peer.daskdl_agreed(epoch=epoch, part=part, **own),
                self.state.timeouts.request,
            )
        except OSError as error:  # a TimeoutError is one
            answer = {"status": Answer.UNKNOWN.value, "reason": str(error)}
        return {**answer, "replica": replica}

    # ---- requests of a replica

    async def handle_join(self, replica: Whole, version: str) -> Fields:
        """A replica's task runs; answered once all initial ones have joined.

        One that joins later then learns whose state to take, and the cut that this
        state has to contain: later updates it is sent.
        """
        state, members = self.state, self.state.members
        if version != VERSION:
            raise ValueError(
                f"the worker has daskdl {version}, the scheduler {VERSION}; "
                "install the same version on all"
            )
        later = replica not in state.spec.replicas
        if later:  # no initial replica must take it for one
            await self.until(lambda: members.started)
        if not members.is_here(replica):
            raise ValueError(f"no replica {replica} in this run")
        if replica not in state.outboxes:  # else it is a retried request
            self._relay_to(replica)
        if later:
            return await self._answer_joining(replica)
        await self.notify()
        await self.until(lambda: members.started)
        present = [[r, 0] for r in members.training]
        return self.answer(members=present, topology=state.topology(), donor=None)

    async def _answer_joining(self, replica: int) -> Fields:
        state, members = self.state, self.state.members
        generation, member = members.generation, members.replicas[replica]
        member.heard_at = math.inf  # it waits here, and sends nothing
        await self.until(lambda: member.gone or state.can_cut(generation))
        self.check_present(replica)
        member.heard_at = self.now()
        cut, donor = state.cut(replica), members.donor()
        return self.answer(
            members=[],
            topology=state.topology(),
            donor=donor,
            worker=None if donor is None else members.replicas[donor].worker,
            cut=list(cut.items()),
        )

    def _relay_to(self, replica: int) -> None:
        """Begin to carry what others send to a replica; it has joined."""
        state, worker = self.state, self.state.members.replicas[replica].worker
        bound = state.timeouts.bound("request")
        if worker not in self._batchers:
            run, peer = state.spec.run, self._scheduler.rpc(worker)

            async def ask(items: Sequence[Message], shares: Sequence[Share]) -> Any:
                messages = [item.to_wire() for item in items]
                if len(shares) > 1:
                    return await peer.daskdl_deliver_batches(
                        run=run, messages=messages, shares=shares
                    )
                ((only, _),) = shares
                fields = {"run": run, "replica": only, "messages": messages}
                own = await peer.daskdl_deliver(**fields)
                return {"status": Answer.OK.value, "answers": [own]}

            self._batchers[worker] = WorkerBatcher(worker, ask, bound)
        self._batchers[worker].replicas.add(replica)
        outbox = state.join(replica, self.now())
        pump = SendLoop(
            outbox,
            functools.partial(self._batchers[worker].deliver, replica),
            pace_s=PACE_S,
            beat_s=state.timeouts.silence / 4,
            bound=bound,
            destination=f"replica {replica} on {worker}",
        )
        outbox.on_offer = pump.wake
        pump.wake()  # who the members are waits already

        async def relay() -> None:
            try:
                await pump.run()
            except (OSError, RuntimeError) as error:
                # A closing worker refuses before Dask reports it gone: both end here.
                # RuntimeError is what Dask's pool raises once the scheduler closes.
                await self.lose(replica, str(error))

        self.relays[replica] = asyncio.ensure_future(relay())

    async def handle_activate(self, replica: Whole, step: Whole) -> Fields:
        """A joining replica has the common state; answered between two barriers."""
        state, members = self.state, self.state.members
        self.check_present(replica)
        await self.until(lambda: not state.holding)
        if replica not in members.expected:
            state.activate(replica, step)
            worker = members.replicas[replica].worker
            state.events.post("joined", replica=replica, worker=worker)
            await self.notify()
        return self.answer(
            members=[[r, members.replicas[r].progress.step] for r in members.expected],
            epoch=state.epoch,
            interval=state.interval,
            report=state.report,
        )

    async def handle_publish(
        self,
        replica: Whole,
        messages: Sequence[Sequence[Any]],
        progress: PeerProgress,
        acknowledgement: Acknowledgement | None = None,
    ) -> Fields:
        """A replica has updates for all others, or only a sign of life.

        Where replicas send to each other there is an acknowledgement instead of
        updates. The answer says how far the others are.
        """
        state = self.state
        self.check_present(replica)
        updates = [Message.from_wire(fields) for fields in messages]
        for update in updates:
            if update.kind != MessageKind.UPDATE or update.origin != replica:
                raise ValueError(f"replica {replica} must not publish {update[:3]}")
            update.check_size()
        state.members.replicas[replica].heard_at = self.now()
        now = PeerProgress(*progress)
        if acknowledgement is None:
            return self.answer(accepted=state.publish(replica, updates, now))
        received = dict(acknowledgement["received"])
        generation = acknowledgement["generation"]
        adopted_at = acknowledgement["adopted_at"]
        if state.acknowledge(replica, now, generation, adopted_at, received):
            await self.notify()
        return self.answer(
            accepted=0,
            received_by_all=state.received_by_all(replica),
            peers=[(r, *progress) for r, progress in state.progress()],
        )

    async def handle_lease(
        self,
        replica: Whole,
        phase: str,
        epoch: Whole,
        finished: Sequence[FinishedLease],
        wait: bool,
        idle_payload: Any = None,
    ) -> Fields:
        """A replica gives finished leases back and takes the next one.

        If it waits, then until there is one, or nobody has anything left to do. With an
        idle payload no round waits for it meanwhile.
        """
        state = self.state
        self.check_present(replica)
        if epoch > state.epoch:
            raise ValueError(f"epoch {epoch} has not begun, this is {state.epoch}")
        state.give_back(replica, phase, epoch, finished, self.now())
        if idle_payload is not None:
            state.set_idle(replica, idle_payload)
        if finished or idle_payload is not None:
            await self.notify()
        if wait:
            await self.until(lambda: state.can_lease(replica, phase, epoch))
            self.check_present(replica)
        worker = state.members.replicas[replica].worker
        lease = state.lease(
            replica, phase, epoch, lambda key: worker in self._holders(key)
        )
        if lease is None or isinstance(lease, SyncPoint):
            sync_point = None if lease is None else lease.to_wire()
            return self.answer(lease=None, sync_point=sync_point)
        return self.answer(
            lease=lease.number,
            ranges=[list(one) for one in lease.ranges],
            keys=list(lease.keys.items()),
            ahead=lease.ahead,
        )

    def _holders(self, key: str) -> set[str]:
        """The workers that have the result of a task."""
        task = self._scheduler.tasks.get(key)
        return set() if task is None else {w.address for w in task.who_has or ()}

    async def handle_missing(
        self, replica: Whole, phase: str, part: Whole, key: str
    ) -> Fields:
        """A part does not arrive; if it is lost, answered once it has another key."""
        state = self.state
        self.check_present(replica)
        leases = state.leases[phase]
        if leases.held_key(part) == key and self._is_lost(key):
            state.events.post(
                "missing",
                phase=phase,
                part=part,
                key=key,
                worker=state.members.replicas[replica].worker,
                avoid=sorted(self.hanging),
            )
            await self.notify()
            await self.until(lambda: leases.held_key(part) != key)
        return self.answer(key=leases.held_key(part))

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
        replica: Whole,
        key: str,
        payload: Any,
        client_payload: bytes,
        kind: str,
    ) -> Fields:
        """A replica is at a barrier; answered with all payloads when all are."""
        state = self.state
        self.check_present(replica)
        kind = Barrier(kind)
        barrier = state.arrive(key, replica, payload, client_payload, kind)
        await self.notify()
        await self.until(lambda: state.all_arrived(barrier))
        if state.stopped is None and state.complete(key, barrier):
            await self.notify()
        return self.answer(
            payloads=[[r, own] for r, own in sorted(barrier.payloads.items())],
            gone=[[r, sequence] for r, sequence in (barrier.gone or {}).items()],
            counted=dict(barrier.counted),
        )

    async def handle_fail(self, replica: Whole, failure: Failure) -> Fields:
        """A replica cannot go on: the run ends, and the client learns why."""
        if replica in self.state.members.joining:  # it ends nobody's run
            summary = shown(failure["summary"], 500)
            self.state.events.post("not joined", replica=replica, summary=summary)
        else:
            # One that was given up and comes back must not end the others' run.
            self.check_present(replica)
            self.state.fail(replica, failure)
        await self.notify()
        return {"status": Answer.OK.value}

    async def handle_leave(self, replica: Whole, retires: bool = False) -> Fields:
        """A replica's task ends: everything it had is delivered, or not wanted.

        Args:
            replica: Its number.
            retires: Its worker closes, and it had not come to the end of the run.
        """
        self.check_assigned(replica)
        state, members = self.state, self.state.members
        worker = members.replicas[replica].worker
        if not members.is_here(replica):  # given up before: its worker is free again
            self.hanging.discard(worker)
            state.events.post("worker", worker=worker)
        elif retires:
            state.retire(replica, self.now())
        else:
            state.ended |= replica in members.expected
            state.remove(replica)
        self._forget(replica)
        if members.started and not members.expected:
            state.events.post("over", waiting=members.joining)
            state.give_up_if_deserted()
        await self.notify()
        return {"status": Answer.OK.value}

    # ---- replicas that fail

    def worker_removed(self, replica: int) -> None:
        """Dask has removed the worker of a replica: it was closed, or it died.

        A worker that closes still answers, and its replica has something to hand
        over; where one died, nobody listens any more.
        """
        state = self.state
        worker = state.members.replicas[replica].worker
        self.hanging.discard(worker)
        state.events.post("removed", replica=replica)
        if not state.members.is_here(replica):
            return

        async def lose_later() -> None:
            await self.notify()
            if await is_listening(worker, GRACE_S):
                await asyncio.sleep(GRACE_S)  # it closes
            await self.lose(replica, "its worker is gone")

        self._removals[replica] = asyncio.ensure_future(lose_later())
        if replica in state.outboxes:
            state.outboxes[replica].on_offer()  # the next request fails

    async def lose(self, replica: int, why: str) -> None:
        """A replica has failed; the run goes on with the others."""
        state = self.state
        if not state.members.is_here(replica):
            return
        # The client says it where its user looks.
        logger.info("run %s lost replica %s: %s", state.spec.run, replica, why)
        trained = replica in state.members.expected
        state.lose(replica, why, self.now())
        self._forget(replica)
        # Else it came too late, and the others may have come to the end meanwhile.
        if trained:
            state.give_up_if_deserted()
        await self.notify()

    def _forget(self, replica: int) -> None:
        for tasks in (self.relays, self._removals):
            task = tasks.pop(replica, None)
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        for batcher in self._batchers.values():
            batcher.replicas.discard(replica)

    async def _watch(self) -> None:
        """Give up replicas that are silent, and a run that has too few left."""
        state, members, started = self.state, self.state.members, self.now()
        enough_at = started
        while state.stopped is None:
            await asyncio.sleep(WATCHDOG_S)
            now, timeouts = self.now(), state.timeouts
            if members.absent and now - started > timeouts.join:
                state.give_up_late(timeouts.bound("join"), now)
            for replica in members.silent_since(now - timeouts.silence):
                self.hanging.add(members.replicas[replica].worker)
                bound = timeouts.bound("silence")
                await self.lose(replica, f"nothing was heard for {bound}")
            if state.has_enough:
                enough_at = now
            elif now - enough_at > timeouts.rejoin:
                state.give_up_too_few(timeouts.bound("rejoin"), now)
            if state.stopped is not None:
                await self.notify()

    # ---- the end

    async def abandon(self) -> None:
        """The client is gone, nobody takes the result: wait until all have left."""
        self.state.stop("its client is gone")
        await self.notify()
        async with self._changed:
            left = self._changed.wait_for(lambda: not self.state.members.present)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(left, self.state.timeouts.stop)

    async def close(self) -> str:
        """End all tasks; requests that still wait learn that the run has stopped.

        Returns:
            Who has not left, and what was last heard of each; empty if nobody.
        """
        still_here = self.state.members.describe(self.state.members.present, self.now())
        for task in self.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for batcher in self._batchers.values():
            batcher.end()
        self.state.stop("the run was closed")
        await self.notify()
        return still_here


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
            return await method(self.runs[run], **fields)

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
        state = RunState(RunSpec.from_wire(spec))
        if state.spec.run in self.runs:
            raise ValueError(f"run {state.spec.run} is open already")
        self.runs[state.spec.run] = LiveRun(state, self._scheduler, client)
        # Some may have come after the client had chosen, or have no replica for want
        # of work; it knows which.
        for worker, found in self.arrived.items():
            if not state.members.assigned_to(worker):
                state.events.post("worker", worker=worker, found=found)
        logger.info("run %s opens: %s", state.spec.run, state.spec.replicas)
        return {"status": Answer.OK.value, "version": VERSION}

    async def handle_close(self, run: Identity) -> Fields:
        """A client is through with a run: nothing of it stays."""
        live = self.runs.pop(run, None)
        still_here = "" if live is None else await live.close()
        if live is not None:
            logger.info("run %s is closed", run)
        return {"status": Answer.OK.value, "still_here": still_here}

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
                live.state.events.post("worker", worker=worker, found=told)
                await live.notify()
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
        await live.abandon()
        answer = await self.handle_close(run)
        if answer["still_here"]:
            logger.warning(
                "run %s: after %s these have not left: %s",
                run,
                live.state.timeouts.bound("stop"),
                answer["still_here"],
            )
