"""The scheduler's end: the plugin, its handlers, and the loop that sends.

What a request means is decided in :mod:`daskdl.channel.run_state`. Here are the Dask
handlers, the watchdog over heartbeats, and the batches per worker that go out.
"""

import asyncio
import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypedDict

from distributed import Scheduler
from distributed.comm import get_address_host_port, parse_address
from distributed.diagnostics.plugin import SchedulerPlugin
from typing_extensions import override

from daskdl import errors
from daskdl.channel import protocol
from daskdl.channel.leasing import RunPlan
from daskdl.channel.protocol import (
    Answer,
    Barrier,
    FromMinusOne,
    Identity,
    Item,
    ItemKind,
    Whole,
    check,
    check_size,
    fields_of,
    hints_of,
)
from daskdl.channel.run_state import RunRecord, Standing
from daskdl.channel.sender import BATCH_BYTES, Pump
from daskdl.config import VERSION, Bound
from daskdl.errors import DaskDLError, shown
from daskdl.util import answered

logger = logging.getLogger(__name__)

LOG_S = 1.0  # least time between two lines about what was refused

Fields = dict[str, Any]
Handler = Callable[..., Awaitable[Fields]]
Refused = Callable[[Fields], object]


class GoneError(Exception):
    """Who is asked is not here, or who asks has left: it may have been in time."""


def check_present(replica: int, record: RunRecord) -> None:
    """Refuse who does not take part.

    Raises:
        GoneError: If the replica has taken part.
        ValueError: If it never did.
    """
    if replica in record.members.gone:
        raise GoneError(f"replica {replica} is not a member any more")
    if replica not in record.outboxes:
        raise ValueError(f"replica {replica} is not a member of this run")


def check_seated(replica: int, record: RunRecord) -> None:
    """Refuse a number that no replica of the run has had.

    Raises:
        ValueError: If there is none.
    """
    if replica not in record.members.seats:
        raise ValueError(f"there is no replica {replica} in this run")


def answer(record: RunRecord, **fields: Any) -> dict[str, Any]:
    """The fields of an answer, and the word to leave if the run was stopped."""
    if record.stopped is not None:
        return {"status": Answer.STOPPED.value, "reason": record.stopped, **fields}
    return {"status": Answer.OK.value, **fields}


class Guard:
    """Answers whatever comes to a handler of Dask's, and ends nothing.

    Dask logs a traceback for each request whose handler raises; here it is refused and
    counted. Fields have to be what the annotations of the handler say.

    Args:
        refused: Counts a message; called with its fields, which may be anything.
    """

    def __init__(self, refused: Refused) -> None:
        self._refused = refused
        self._logged_at = -LOG_S

    def of(self, handler: Handler) -> Handler:
        """A handler that answers always."""
        hints = {"run": Identity, **hints_of(handler)}

        @functools.wraps(handler)
        async def guarded(**fields: Any) -> Fields:
            async def handle() -> Fields:
                check(fields, hints)
                return await handler(**fields)

            def refuse(error: Exception) -> Fields:
                if isinstance(error, GoneError):
                    return {"status": Answer.UNKNOWN.value, "reason": str(error)}
                what = f"{type(error).__name__}: {error}"
                reason = shown(f"{handler.__name__}: {what}", 500)
                self._refused(fields)
                self._log(reason)
                return {"status": Answer.REFUSED.value, "reason": reason}

            return await answered(handle, refuse)

        return guarded

    def _log(self, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= LOG_S:
            self._logged_at = now
            logger.warning("refused a message: %s", reason)


PROBED = ("tcp", "tls")  # others do not say at once that nobody is there


async def is_listening(address: str, timeout_s: float) -> bool:
    """Ask the operating system of a worker's host, not the worker.

    Dask's own way to connect tries again for long when it is refused.

    Args:
        address: Of Dask's kind, with its scheme.
        timeout_s: A host that says nothing in this time counts as one where
            nobody listens, seconds.

    Returns:
        True also where that cannot be asked.
    """
    scheme, _ = parse_address(address)
    if scheme not in PROBED:
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


# The pumps of one worker answer to the same request and then pause alike; what is left
# between them are turns of the event loop, and less than a request takes.
TOGETHER_S = 0.002

Share = tuple[int, list[int]]  # a replica, and which of the items are for it
Ask = Callable[[list[Item], list[Share]], Awaitable[Any]]


class Load(NamedTuple):
    """What is to go to one replica."""

    replica: int
    items: Sequence[Item]
    accepted: asyncio.Future[int]


class Courier:
    """Carries what the pumps of one worker's replicas send, a request at a time.

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
        self._waiting: list[Load] = []
        self._carrying: asyncio.Task[None] | None = None

    async def deliver(self, replica: int, items: Sequence[Item]) -> int:
        """Deliver items to a replica, with what others of its worker are sent.

        Returns:
            How many were accepted.

        Raises:
            TimeoutError: If the worker did not answer.
            OSError: If it cannot be reached, or does not know the replica.
        """
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(Load(replica, items, accepted))
        if self._carrying is None or self._carrying.done():
            self._carrying = asyncio.ensure_future(self._carry())
        try:
            return await accepted
        finally:  # it may have been cancelled before it was carried
            self._waiting = [load for load in self._waiting if not load.accepted.done()]

    def end(self) -> None:
        """Carry nothing more; who still waits is cancelled."""
        if self._carrying is not None:
            self._carrying.cancel()
        for load in self._waiting:
            load.accepted.cancel()

    async def _carry(self) -> None:
        while self._waiting:
            if len(self._waiting) < len(self.replicas):
                await asyncio.sleep(TOGETHER_S)
            await self._carry_one(self._next())

    def _next(self) -> list[Load]:
        """The oldest loads, at least one, up to so many bytes together."""
        nbytes, seen = 0, set[int]()
        for count, load in enumerate(self._waiting):
            for item in load.items:
                nbytes += item.weight() if id(item) not in seen else 0
                seen.add(id(item))
            if count and nbytes > BATCH_BYTES:
                break
        else:
            count = len(self._waiting)
        loads, self._waiting = self._waiting[:count], self._waiting[count:]
        return loads

    async def _carry_one(self, loads: Sequence[Load]) -> None:
        try:
            async with asyncio.timeout(self._bound.seconds):
                answers = self._read(loads, await self._ask(*_shared(loads)))
        # What Dask's pool raises once the scheduler closes is a RuntimeError.
        except (OSError, RuntimeError) as error:  # a TimeoutError is an OSError
            answers = [error] * len(loads)
        except asyncio.CancelledError:
            for load in loads:
                load.accepted.cancel()
            raise
        for load, answer in zip(loads, answers, strict=True):
            _tell(load.accepted, answer)

    def _read(self, loads: Sequence[Load], answer: Any) -> Sequence[int | Exception]:
        if not isinstance(answer, dict) or answer.get("status") != Answer.OK:
            raise OSError(f"{self._worker} answered {answer!r}")
        answers = answer["answers"]
        if len(answers) != len(loads):
            raise OSError(f"{self._worker} answered {answers!r} to {len(loads)} loads")
        return [self._accepted(own) for own in answers]

    def _accepted(self, answer: Any) -> int | Exception:
        if not isinstance(answer, dict) or answer["status"] != Answer.OK:
            return OSError(f"{self._worker} answered {answer!r}")
        return int(answer["accepted"])


def _shared(loads: Sequence[Load]) -> tuple[list[Item], list[Share]]:
    """Each item once, and who gets which."""
    places: dict[int, int] = {}
    items: list[Item] = []
    shares: list[Share] = []
    for load in loads:
        for item in load.items:
            if id(item) not in places:
                places[id(item)] = len(items)
                items.append(item)
        shares.append((load.replica, [places[id(item)] for item in load.items]))
    return items, shares


def _tell(accepted: asyncio.Future[int], answer: int | Exception) -> None:
    if accepted.done():  # it did not wait so long
        return
    if isinstance(answer, Exception):
        accepted.set_exception(answer)
    else:
        accepted.set_result(answer)


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


MOST_REPLICAS = 1000  # of a worker
LONGEST_S = 3600.0  # that news are waited for; clients ask every few seconds


async def handle_watch(live: LiveRun, seen: Whole, timeout_s: float) -> dict[str, Any]:
    """A client asks what is new since the `seen` first events."""
    events = live.record.events
    if seen > len(events) or not 0 <= timeout_s <= LONGEST_S:
        raise ValueError(f"got seen={seen} of {len(events)}, timeout_s={timeout_s}")
    with contextlib.suppress(TimeoutError):
        await live.until(lambda: len(events) > seen, timeout_s)
    return {"status": Answer.OK.value, "events": events.since(seen)}


async def handle_stop(live: LiveRun, reason: str) -> dict[str, Any]:
    """A client wants every replica to leave."""
    await live.stop(reason)
    return {"status": Answer.OK.value}


async def handle_seat(live: LiveRun, worker: str, replicas: Whole) -> dict[str, Any]:
    """A client wants so many replicas on a worker; answered with the new ones."""
    if replicas > MOST_REPLICAS:
        raise ValueError(f"replicas must be <= {MOST_REPLICAS}, got {replicas}")
    members = live.record.members
    missing = replicas - len(members.seated_on(worker)) if live.has(worker) else 0
    return answer(live.record, replicas=[members.seat(worker) for _ in range(missing)])


async def handle_unseat(live: LiveRun, replica: Whole) -> dict[str, Any]:
    """A replica could not be started: its seat is free again."""
    check_seated(replica, live.record)
    if replica not in live.record.members.progress:
        await live.lose(replica, "it was not started")
    return {"status": Answer.OK.value}


async def handle_restore(
    live: LiveRun, phase: str, part: Whole, key: str
) -> dict[str, Any]:
    """A client has started a lost part again, under another key."""
    live.record.schedule.check_held(phase, part)
    live.record.schedule.replace(phase, part, key)
    await live.notify()
    return {"status": Answer.OK.value}


async def handle_agreed(
    live: LiveRun,
    epoch: Whole,
    part: Whole,
    avoid: Sequence[Whole],
    replica: Whole | None,
) -> dict[str, Any]:
    """A client wants a part of the newest state that all have agreed on.

    Args:
        live: The run.
        epoch: At the end of which, or of a later one; after the first part: that one.
        part: Counted from 0.
        avoid: Replicas that are not asked.
        replica: That is asked; None: any.
    """
    members = live.record.members
    if replica is None:
        there = [r for r in members.expected if r not in set(avoid)]
        replica = there[0] if there else None
    if replica is None:
        return {"status": Answer.OK.value, "replica": None}
    check_seated(replica, live.record)
    return {**await live.agreed(replica, epoch, part), "replica": replica}


# Of what a client can raise: nobody else's errors are known to it.
ERRORS = frozenset(
    name
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.DaskDLError)
)


class Told(TypedDict):
    """How a replica of a mesh stands, see `Standing`."""

    generation: Whole
    adopted_at: Whole
    sequence: Whole  # of its last update
    received: Sequence[tuple[Whole, Whole]]


class Finished(TypedDict):
    """A piece that a replica gives back."""

    piece: Whole
    examples: Whole
    loss: float  # mean of the epoch so far


class Failed(TypedDict):
    """What a replica tells of an exception that ends it."""

    type: Annotated[str, ERRORS]
    summary: str
    traceback: str
    step: Whole
    pickled: bytes


async def handle_join(live: LiveRun, replica: Whole, version: str) -> dict[str, Any]:
    """A replica is on its worker.

    It is answered when all founders are here. A newcomer then learns whose state to
    take over, and what that has to contain: everything that was passed on before now,
    since what comes later it is sent.
    """
    record, members = live.record, live.record.members
    if version != VERSION:
        raise ValueError(
            f"the worker has daskdl {version}, the scheduler {VERSION}; "
            "install the same version on all"
        )
    newcomer = replica not in record.plan.replicas
    if newcomer:  # no founder must take it for one
        await live.until(lambda: members.started, None)
    if replica not in members.seats or not members.here(replica):
        raise ValueError(f"no replica {replica} in this run")
    live.relay_to(replica)
    if newcomer:
        cut = await _cut(live, replica)
        donor = members.donor()
        return answer(
            record,
            members=[],
            routes=record.routes(),
            donor=donor,
            worker=None if donor is None else members.seats[donor],
            cut=list(cut.items()),
        )
    await live.notify()
    await live.until(lambda: members.started, None)
    present = [[r, 0] for r in members.present if r in members.expected]
    return answer(record, members=present, routes=record.routes(), donor=None)


async def _cut(live: LiveRun, newcomer: int) -> dict[int, int]:
    """What a newcomer's snapshot has to contain.

    The relay knows what it passed on. In a mesh each replica says up to which of
    its updates it did not know the newcomer; then the newcomer is told.
    """
    record, members = live.record, live.record.members
    if record.plan.routing == "plain":
        return record.cut()
    generation, progress = members.generation, members.progress[newcomer]
    progress.heard_at = math.inf  # it waits here, and can say nothing
    await live.until(
        lambda: not members.here(newcomer) or record.adopted(generation), None
    )
    check_present(newcomer, record)
    progress.heard_at = live.now()
    return record.exact_cut(newcomer)


async def handle_activate(live: LiveRun, replica: Whole, step: Whole) -> dict[str, Any]:
    """A newcomer has the common state; answered between two barriers."""
    record = live.record
    check_present(replica, record)
    await live.until(lambda: not record.holding, None)
    if replica not in record.members.expected:
        record.activate(replica, step)
        worker = record.members.seats[replica]
        record.events.post("joined", replica=replica, worker=worker)
        await live.notify()
    members = [[r, record.members.step_of(r)] for r in record.members.expected]
    where = {"epoch": record.epoch, "lap": record.lap}
    return answer(record, members=members, **where, report=record.report)


async def handle_publish(
    live: LiveRun,
    origin: Whole,
    items: Sequence[Sequence[Any]],
    step: Whole,
    done: FromMinusOne,
    standing: Told | None = None,
) -> dict[str, Any]:
    """A replica has updates for all others, or only a sign of life.

    In a mesh there are no updates, but how the replica stands. The answer says how
    the others do.
    """
    record = live.record
    check_present(origin, record)
    if standing is not None:
        record.members.progress[origin].heard_at = live.now()
        told = Standing(
            standing["generation"],
            standing["adopted_at"],
            dict(standing["received"]),
        )
        if record.hear(origin, step, done, standing["sequence"], told):
            await live.notify()
        stable, words = record.stable(origin), record.words()
        return answer(record, accepted=0, stable=stable, words=words)
    updates = [_update_of(origin, fields) for fields in items]
    record.members.progress[origin].heard_at = live.now()
    accepted = record.publish(origin, updates, step, done)
    return answer(record, accepted=accepted)


async def handle_lease(
    live: LiveRun,
    replica: Whole,
    phase: str,
    epoch: Whole,
    finished: Sequence[Finished],
    wait: bool,
    note: Any = None,
) -> dict[str, Any]:
    """A replica gives finished pieces back and takes the next one.

    If it waits, then until there is one, or nobody has anything left to do. With a
    note no round waits for it meanwhile.
    """
    record = live.record
    check_present(replica, record)
    if epoch > record.epoch:
        raise ValueError(f"epoch {epoch} has not begun, this is {record.epoch}")
    record.work.leases(phase, epoch)  # before anything is changed: there are such
    record.work.give_back(replica, phase, epoch, finished)
    record.work.look(live.now())
    if note is not None:
        record.barriers.stand_by(replica, note)
    if finished or note is not None:
        await live.notify()
    if wait:
        await live.until(lambda: record.work.settled(replica, phase, epoch), None)
        record.barriers.resume(replica)
        check_present(replica, record)
    worker = record.members.seats[replica]
    is_near = functools.partial(live.holds, worker)
    lease = record.work.lease(replica, phase, epoch, is_near)
    if lease is None:
        pause = record.work.pause(replica, phase, epoch)
        values = None if pause is None else pause.values()
        return answer(record, piece=None, pause=values)
    return answer(
        record,
        piece=lease.number,
        ranges=[list(one) for one in lease.ranges],
        keys=list(record.schedule.keys(phase, lease).items()),
        ahead=lease.ahead,
    )


async def handle_missing(
    live: LiveRun, replica: Whole, phase: str, part: Whole, key: str
) -> dict[str, Any]:
    """A part does not come. If it is lost, answered when the client has another."""
    check_present(replica, live.record)
    schedule = live.record.schedule
    schedule.check_held(phase, part)
    if schedule.key(phase, part) == key and not live.reachable(key):
        live.record.events.post(
            "missing",
            phase=phase,
            part=part,
            key=key,
            worker=live.record.members.seats[replica],
            avoid=sorted(live.hanging),
        )
        await live.notify()
        await live.until(lambda: schedule.key(phase, part) != key, None)
    return answer(live.record, key=schedule.key(phase, part))


async def handle_gather(
    live: LiveRun, replica: Whole, key: str, note: Any, told: bytes, kind: str
) -> dict[str, Any]:
    """A replica is at a barrier; answered with all notes when all are."""
    record = live.record
    check_present(replica, record)
    gathering = record.barriers.arrive(key, replica, note, told, Barrier(kind))
    await live.notify()

    await live.until(lambda: record.over(gathering), None)
    if record.stopped is None and record.complete(key, gathering):
        await live.notify()
    notes = [[r, gathering.notes[r]] for r in sorted(gathering.notes)]
    gone = [[r, sequence] for r, sequence in (gathering.gone or {}).items()]
    return answer(record, notes=notes, gone=gone, counted=dict(gathering.counted))


async def handle_fail(live: LiveRun, replica: Whole, failure: Failed) -> dict[str, Any]:
    """A replica cannot go on: the run ends, and the client learns why."""
    if replica in live.record.members.waiting:  # a newcomer ends nobody's run
        summary = shown(failure["summary"], 500)
        live.record.events.post("not joined", replica=replica, summary=summary)
        await live.notify()
        return {"status": Answer.OK.value}
    # One that was cut off and comes back must not end the others' run.
    check_present(replica, live.record)
    live.record.fail(replica, failure)
    await live.notify()
    return {"status": Answer.OK.value}


async def handle_leave(
    live: LiveRun, replica: Whole, retires: bool = False
) -> dict[str, Any]:
    """A replica has delivered everything and goes."""
    check_seated(replica, live.record)
    await live.leave(replica, retires=retires)
    return {"status": Answer.OK.value}


def _update_of(origin: int, fields: Sequence[Any]) -> Item:
    item = Item.of(fields)
    if item.kind != ItemKind.UPDATE or item.origin != origin:
        raise ValueError(f"replica {origin} must not publish {item[:3]}")
    check_size(item)
    return item


def of_a_run(runs: Mapping[int, LiveRun], handler: Handler) -> Handler:
    """A handler of requests of a run that looks the run up.

    Args:
        runs: That are open.
        handler: Called with the run and the fields of the message.
    """

    @functools.wraps(handler)
    async def of_run(run: int, **fields: Any) -> Fields:
        if run not in runs:
            raise GoneError(f"no run {run} here")
        return await handler(runs[run], **fields)

    return of_run


REQUESTS: Mapping[str, Handler] = {
    protocol.WATCH: handle_watch,
    protocol.STOP: handle_stop,
    protocol.SEAT: handle_seat,
    protocol.UNSEAT: handle_unseat,
    protocol.RESTORE: handle_restore,
    protocol.AGREED: handle_agreed,
    protocol.JOIN: handle_join,
    protocol.ACTIVATE: handle_activate,
    protocol.PUBLISH: handle_publish,
    protocol.LEASE: handle_lease,
    protocol.MISSING: handle_missing,
    protocol.GATHER: handle_gather,
    protocol.FAIL: handle_fail,
    protocol.LEAVE: handle_leave,
}


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
            protocol.OPEN: self.handle_open,
            protocol.CLOSE: self.handle_close,
            protocol.ARRIVE: self.handle_arrive,
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
