"""Replicas as tasks of a Dask cluster.

:class:`DaskBackend` chooses workers, submits and cancels tasks, replaces failed
replicas and lost parts, and fetches agreed states and results.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import (
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import CancelledError
from typing import Any

import dask
import numpy as np
import torch
from distributed import Client, Future, Worker, get_worker, secede, wait
from numpy.typing import NDArray
from typing_extensions import override

from daskdl.channel import protocol
from daskdl.channel.broadcast import parts_of, send
from daskdl.channel.protocol import NAME, Answer, join, unwrap
from daskdl.channel.remote import RemoteChannel
from daskdl.channel.routing import ROUTINGS
from daskdl.channel.scheduler import ChannelSchedulerPlugin
from daskdl.channel.transport import awaited, time_limit
from daskdl.channel.worker import ChannelWorkerPlugin
from daskdl.config import Bound
from daskdl.data.distribute import (
    DataPlacement,
    answers_of,
    check_annotations,
    new_key,
    responsive,
    workers_of,
)
from daskdl.data.source import Source
from daskdl.errors import ChannelError, WaitTimeoutError
from daskdl.observe.tables import Row
from daskdl.process_settings import is_divided, process_environment
from daskdl.serialization import Packed
from daskdl.training.backend import (
    POLL_S,
    Backend,
    EpochEnded,
    Event,
    ReplicaFailed,
    ReplicaGone,
    TaskFailed,
    event_of,
    in_pairs,
    limit_replicas,
    merge,
    most_replicas,
    run_spec_of,
)
from daskdl.training.base import Parameters, TrainingMaster
from daskdl.training.data_feed import WorkerStore
from daskdl.training.fit_spec import ReplicaSpec
from daskdl.training.replica import FitResult, Replica, failure_of, warm_up
from daskdl.training.state import ReplicaState, decoded
from daskdl.util import CLIENT_VERSIONS, REMEDY, arrival_plugin, mismatch

logger = logging.getLogger(__name__)


MODEL = "model"  # the packed `ReplicaSpec`, beside sources by phase


def packed_argument(name: str, payload: NDArray[np.uint8]) -> Packed[Any]:
    """Return a value that was sent, with the user's argument that it comes from."""
    return Packed.of(payload, "trainer" if name == MODEL else "X")


def train_replica(
    run: int,
    secret: int,
    bound: Bound,
    number: int,
    on_worker: int,
    routing: str,
    *,
    initial: bool,
) -> Packed[FitResult]:
    """Train one replica on this worker, from start to end.

    Args:
        run: Id of the run.
        secret: Secret of the run.
        bound: Longest wait for the model, if it is not on this worker yet.
        number: Number of the replica.
        on_worker: Number of replicas on this worker.
        routing: Name of the routing.
        initial: Whether the replica starts the run with others.

    Returns:
        The replica's result, packed so that Dask serializes no tensor.
    """
    # Frees the slot for other tasks, and keeps adaptive clusters from closing it.
    secede()
    worker = get_worker()
    plugin = worker.extensions.get(NAME)
    if not isinstance(plugin, ChannelWorkerPlugin):
        raise ChannelError(f"worker {worker.address} has no daskdl plugin; see its log")
    # Sources of which every worker has a full copy are beside the model, by phase.
    try:
        packed = plugin.copies.values(
            run, secret, worker.address, bound, packed_argument
        )
    except (ChannelError, WaitTimeoutError) as error:
        if initial:
            raise
        # The others train on, so Dask must not log that a task has failed.
        logger.info("replica %s does not join: %s", number, error)
        failure = failure_of(error, step=0)
        plugin.decline(run, secret, number, failure, bound.seconds)
        result = FitResult(Parameters(), has_agreed=False, finished=False)
        return Packed(result, "result")
    sources = {phase: source for phase, source in packed.items() if phase != MODEL}
    spec: ReplicaSpec = packed[MODEL].unpack()
    channel = RemoteChannel(plugin, spec.channel_spec(number, routing))
    store = WorkerStore(sources, channel, spec.timeouts, spec.load_threads)
    finished = False
    try:
        threads = max(1, worker.state.nthreads // on_worker)
        with process_environment(str(spec.device), threads) as device:
            if not initial:
                warm_up(spec, device)
            result = Replica(number, spec, channel, device, store).run()
            finished = result.finished
            return Packed(result, "result")
    finally:
        store.close()
        channel.leave(retires=channel.closing and not finished)


def announcer(
    client: Client, run: int, name: str, title: str
) -> Callable[[str | None], None]:
    """Let the dashboard show a run before it opens, if the scheduler has one already.

    Args:
        client: Client of the cluster.
        run: Id of the run.
        name: Name of the run.
        title: Describes the model.

    Returns:
        A function that says, without waiting, what the run does before it opens; None:
        it will not open. Any thread.
    """
    in_order = asyncio.Lock()

    # Pickled by value: the scheduler may lack daskdl, and must not import torch.
    def announce(state: str | None, client_id: str, dask_scheduler: Any = None) -> None:
        plugin = dask_scheduler.extensions.get(NAME)
        if hasattr(plugin, "announce"):
            plugin.announce(run, client_id, name, title, state)

    async def send(state: str | None) -> None:
        async with in_order:
            # A lost scheduler is reported by the next request.
            with contextlib.suppress(OSError):
                if client.status == "running":
                    await client.run_on_scheduler(announce, state, client.id)

    def say(state: str | None) -> None:
        client.loop.add_callback(send, state)

    return say


def merge_packed(results: Sequence[Packed[FitResult]]) -> Packed[FitResult]:
    """Merge the packed results of replicas, on a worker."""
    return Packed(merge([result.unpack() for result in results]), "result")


def collect(
    client: Client, tasks: Mapping[str, Future], spec: ReplicaSpec
) -> FitResult | None:
    """Wait for the tasks of a run to end, and merge their results.

    A finished result may still be lost with its worker; the other results are then
    merged without it.
    """
    futures = tasks.values()
    deadline = time.monotonic() + spec.timeouts.stop
    while live := [task for task in futures if task.status == "pending"]:
        # A task that Dask cancels in the meantime is no longer pending.
        with contextlib.suppress(CancelledError):
            try:
                with client.as_current():  # `wait` uses the default client
                    wait(live, timeout=max(deadline - time.monotonic(), 0.0))
            except TimeoutError:  # their status is reported below
                break
    bound = spec.timeouts.bound("data")
    deadline = time.monotonic() + bound.seconds
    while results := [task for task in futures if task.status == "finished"]:
        packed = _merge(client, results, spec.run, deadline)
        if packed is not None:
            return packed.unpack()
        if time.monotonic() > deadline:
            states = ", ".join(f"{who} is {task.status}" for who, task in tasks.items())
            raise WaitTimeoutError(
                f"the replicas' results were not merged within {bound}; in Dask, "
                f"{states}; perhaps a worker was lost at the end, or all workers are "
                "busy with other tasks"
            )
    return None


def _merge(
    client: Client, results: Sequence[Future], run: int, deadline: float
) -> Packed[FitResult] | None:
    """Merge results; None if a result was lost, or the deadline has passed."""

    def merge_some(some: Sequence[Future]) -> Future:
        key = new_key(f"merge-{protocol.run_id(run)}")
        return client.submit(merge_packed, list(some), key=key)

    merged = in_pairs(merge_some, results)

    def check() -> None:
        # Dask would recompute a lost result by training again.
        if any(result.status != "finished" for result in results):
            raise CancelledError

    async def fetch() -> Any:
        # No retries: over a slow link each transfer takes long.
        gathered = client.gather(merged, asynchronous=True)
        try:
            return await awaited(gathered, deadline - time.monotonic(), check)
        except (CancelledError, TimeoutError):
            return None  # its traceback would keep the results in a reference cycle

    try:
        packed: Packed[FitResult] | None = client.sync(fetch)
    finally:
        merged.release()
    return packed


RELAY_BYTES = 8 * 2**20  # bound of the relay's queue for each replica
# Updates usually wait for less time to be merged, see `RunState.due`.
MERGE_S = 10.0
MUCH_FROZEN = 64 * 2**20  # frozen bytes received per replica and epoch: warn above
TRANSIENT_ERRORS = (
    "ChannelError",
    "WaitTimeoutError",
)  # after these, joining may succeed later


def assign_workers(
    master: TrainingMaster,
    device: str | torch.device,
    client: Client,
    most: int,
    first_replica: int = 0,
) -> dict[int, str]:
    """Choose the workers of the initial replicas, numbered from `first_replica`."""
    check_annotations()
    workers = workers_of(client)
    try:
        each = replicas_on(master, device, client, workers)
    except OSError as error:
        there = responsive(client, workers)
        if not there or there.issuperset(workers):
            raise
        gone = sorted({*workers} - there)
        logger.warning("no replica on %s: %s", ", ".join(gone), error)
        workers = sorted(there)
        each = replicas_on(master, device, client, workers)
    # Round robin, so that truncation leaves the load balanced.
    places = [w for i in range(max(each.values())) for w in workers if i < each[w]]
    return dict(enumerate(places[: limit_replicas(len(places), most)], first_replica))


def replicas_on(
    master: TrainingMaster,
    device: str | torch.device,
    client: Client,
    workers: Sequence[str],
) -> dict[str, int]:
    """Return the number of replicas for each of these workers."""
    if master.replicas_per_worker != "auto":
        return dict.fromkeys(workers, int(master.replicas_per_worker))
    if not is_divided(device):
        return dict.fromkeys(workers, 1)
    bound = master.timeouts().bound("request")
    what = "how many CUDA devices they have"
    devices = answers_of(client, workers, torch.cuda.device_count, bound, what)
    return {worker: max(1, devices[worker]) for worker in workers}


PAUSE_FACTOR = 30.0  # pause after a fetch / its duration: leaves time for training


class AgreedStateFetcher:
    """Fetches agreed states to the client; its methods run on the event loop.

    Attributes:
        state: The newest state that has arrived completely, or None.
    """

    state: ReplicaState | None

    def __init__(self, client: Client, spec: ReplicaSpec) -> None:
        self.state = None
        self._client = client
        self._spec = spec
        self._bound = spec.timeouts.bound("request")
        self._wanted = -1  # the last epoch that ended
        self._fetching: asyncio.Task[None] | None = None
        self._closed = False

    def fetch(self, epoch: int) -> None:
        """Fetch the state at the end of an epoch, or a later one."""
        self._wanted = epoch
        idle = self._fetching is None or self._fetching.done()
        if idle and not self._closed:
            self._fetching = asyncio.ensure_future(self._fetch_newest())

    def close(self) -> None:
        """Fetch nothing more; `state` stays."""
        self._closed = True
        if self._fetching is not None:
            self._fetching.cancel()

    async def _fetch_newest(self) -> None:
        now = asyncio.get_running_loop().time
        # The epoch in a header is the next one.
        while self.state is None or self.state.header["epoch"] <= self._wanted:
            began_at = now()
            try:
                state = await self._newest()
            except OSError as error:  # the backend's requests raise this error
                logger.info("the agreed state was not fetched: %s", error)
                return
            if state is None:
                return
            self.state = state
            await asyncio.sleep(PAUSE_FACTOR * (now() - began_at))

    async def _newest(self) -> ReplicaState | None:
        """Request the state from one replica after another; None if all fail."""
        avoid: list[int] = []
        while True:
            opening = answer = await self._ask(self._wanted, 0, avoid)
            if opening.get("replica") is None:
                return None
            payloads = []
            while answer["status"] == Answer.OK:
                payloads.append(np.frombuffer(unwrap(answer["bytes"]), np.uint8))
                if len(payloads) == opening["parts"]:
                    arrays = join(opening["forms"], payloads)
                    return await asyncio.to_thread(decoded, arrays)
                answer = await self._ask(
                    opening["epoch"], len(payloads), (), opening["replica"]
                )
            avoid.append(opening["replica"])

    async def _ask(
        self, epoch: int, part: int, avoid: Any, replica: int | None = None
    ) -> dict[str, Any]:
        asking: Awaitable[Any] = self._client.scheduler.daskdl_agreed(
            run=self._spec.run,
            secret=self._spec.secret,
            epoch=epoch,
            part=part,
            avoid=list(avoid),
            replica=replica,
        )
        async with time_limit(self._bound.seconds):
            answer = await asking
        assert isinstance(answer, dict)
        return answer


class DaskBackend(Backend):
    """Runs each replica as a task on a worker of a cluster."""

    def __init__(
        self,
        client: Client,
        spec: ReplicaSpec,
        packed: Packed[ReplicaSpec],
        workers: Mapping[int, str],
        supplies: Mapping[str, DataPlacement],
        most_replicas: int,
    ) -> None:
        self.workers = dict(workers)
        self._client = client
        self._spec = spec
        present = len(set(workers.values()))
        awaited_workers = math.ceil(spec.master.min_replicas * present / len(workers))
        self._routing = spec.master.routing_for(max(present, awaited_workers))
        self._initial = set(workers)
        self._supplies = supplies
        self._most_replicas = most_replicas
        self._futures: dict[int, Future] = {}  # by replica; cancelled ones are removed
        arrays = {MODEL: packed.payload} | {
            phase: placement.packed.payload
            for phase, placement in supplies.items()
            if placement.packed
        }
        self._sent = parts_of(arrays)
        self._unsent = list(range(self._sent.parts))  # the scheduler has no such parts
        self._rows: list[Row] = []  # of the history, not sent to the scheduler yet
        self._retry_at: dict[str, float] = {}  # by worker; monotonic time
        self._answered_at = time.monotonic()  # last response of the scheduler
        self._address = client.scheduler.address
        self._scheduler_lost = self._warned = False
        self._fetcher = AgreedStateFetcher(client, spec)
        # As often as Dask retries a task whose worker has died.
        failures = dask.config.get("distributed.scheduler.allowed-failures")
        self.allowed_losses = int(failures)

    @override
    def start(self) -> bool:
        self._register_plugins()
        self._send_first()
        self._open()
        there = set(self._client.nthreads())
        gone = [r for r, worker in self.workers.items() if worker not in there]
        if gone:
            logger.warning("replicas %s do not start: their workers have left", gone)
            self._unassign(gone)
        replicas = {r: w for r, w in self.workers.items() if r not in gone}
        self._submit(replicas)
        return bool(replicas)

    def _send_first(self) -> None:
        """Send the model to the initial workers, except for those that hang.

        Called before the run is open: after that, replicas must join within a bound.
        """
        thawed = False
        while True:
            try:
                self._send(sorted(set(self.workers.values())))
            except OSError as error:
                there = responsive(self._client, set(self.workers.values()))
                silent = {r: w for r, w in self.workers.items() if w not in there}
                if not there:
                    if set(silent.values()).isdisjoint(self._client.nthreads()):
                        return  # all have left
                    raise
                # If all respond now, a worker hung for a while: retry once.
                if not silent and (thawed or not isinstance(error, WaitTimeoutError)):
                    raise
                thawed = not silent
                for replica in silent:
                    del self.workers[replica]
                self._initial -= silent.keys()
                for worker in set(silent.values()):
                    self._retry_later(worker, error)
            else:
                return

    def _register_plugins(self) -> None:
        """Set up the plugins on the scheduler and on the workers."""
        self._client.register_plugin(ChannelSchedulerPlugin())
        try:
            self._client.register_plugin(arrival_plugin(NAME))
        except OSError as error:
            # Dask registers with all workers concurrently, and stops waiting when a
            # worker fails; `start` leaves out that worker.
            logger.warning("a worker has left at the start of the run: %s", error)
            self._client.run(_set_up, on_error="return")

    def _open(self) -> None:
        """Open the run on the scheduler."""
        routing = ROUTINGS[self._routing]
        run = run_spec_of(
            self._spec,
            self.workers,
            {phase: placement.source for phase, placement in self._supplies.items()},
            {phase: placement.keys for phase, placement in self._supplies.items()},
            routing.relayed,
            RELAY_BYTES,
            MERGE_S if routing.merges else 0.0,
        )
        self._ask(protocol.OPEN, spec=vars(run), client=self._client.id)

    def _send(self, workers: Sequence[str]) -> None:
        """Send the model, and sources that workers need in full, to these workers.

        Raises:
            OSError: If a worker has left, or does not take them in time.
        """
        bound = self._spec.timeouts.bound("join")
        identity = {"run": self._spec.run, "secret": self._spec.secret}

        def ask(operation: str, **fields: Any) -> Awaitable[Any]:
            asking = getattr(self._client.scheduler, operation)
            answer: Awaitable[Any] = asking(**identity, **fields)
            return answer

        async def send_all() -> Mapping[str, str]:
            try:
                async with time_limit(bound.seconds):
                    return await send(
                        ask,
                        self._sent,
                        self._unsent,
                        workers,
                        client=self._client.id,
                        timeout_s=self._spec.timeouts.request,
                    )
            except TimeoutError as error:
                raise WaitTimeoutError(
                    f"the model ({self._sent.nbytes} bytes) could not be sent to "
                    f"{', '.join(workers)} within {bound}; is the network slow, or a "
                    "worker busy?"
                ) from error

        failures = self._client.sync(send_all)
        if failures:
            reasons = "; ".join(f"{worker}: {why}" for worker, why in failures.items())
            raise OSError(f"the model was not sent to all workers: {reasons}")

    def _submit(self, replicas: Mapping[int, str]) -> None:
        """Submit one task for each replica."""
        there = {*self._futures, *replicas}
        per_worker = Counter(self.workers[replica] for replica in there)
        for replica, worker in replicas.items():
            with dask.annotate(retries=0):  # overrides an enclosing annotation
                self._futures[replica] = self._client.submit(
                    train_replica,
                    self._spec.run,
                    self._spec.secret,
                    self._spec.timeouts.bound("data"),
                    replica,
                    per_worker[worker],
                    self._routing,
                    initial=replica in self._initial,
                    key=protocol.task_key(self._spec.run, replica),
                    workers=[worker],
                    allow_other_workers=False,
                    pure=False,
                )

    def _unassign(self, replicas: Iterable[int]) -> None:
        """Cancel replicas that do not start, and free their numbers."""
        for replica in replicas:
            self._cancel(replica)
            self._ask(protocol.UNASSIGN, replica=replica)

    def _cancel(self, replica: int) -> None:
        future = self._futures.pop(replica, None)
        if future is not None:
            future.cancel()

    # ---- events

    @override
    def poll_events(self) -> Iterator[Event]:
        posted: Sequence[Mapping[str, Any]] = ()
        ended, bound = False, None
        while posted or not ended:
            ended = all(future.done() for future in self._futures.values())
            for worker, at in list(self._retry_at.items()):
                if time.monotonic() >= at:
                    del self._retry_at[worker]
                    self._assign_more(worker)
            # Before the next poll: earlier events have reported the failed workers.
            self._restore_lost_parts()
            timeout_s = 0 if ended else POLL_S
            rows, self._rows = self._rows, []
            answer = self._ask(
                protocol.WATCH, bound=bound, timeout_s=timeout_s, rows=rows
            )
            posted = answer["events"]
            # With too few replicas, nobody trains until others join.
            rejoin = self._spec.timeouts.bound("rejoin")
            bound = None if answer["has_enough"] else rejoin
            for fields in posted:
                event = event_of(fields)
                self._handle(fields, event)
                if event is not None:
                    yield event
            for replica, future in list(self._futures.items()):
                if future.status == "cancelled":
                    # Its worker has left, perhaps before it received the task.
                    logger.info("Dask has cancelled the task of replica %s", replica)
                    self._cancel(replica)
                    yield ReplicaGone(replica, "Dask has cancelled its task")
                elif future.status == "error" and replica in self._initial:
                    yield TaskFailed(replica, future.exception())
                elif future.status == "error":
                    error = future.exception()
                    self._unassign([replica])
                    if isinstance(error, ChannelError | WaitTimeoutError):  # no model
                        self._retry_later(self.workers[replica], str(error))
                    else:
                        logger.warning("replica %s cannot join: %s", replica, error)
        if not self._futures:
            # The scheduler may still wait for messages of closing workers.
            where = ", ".join(sorted(set(self.workers.values())))
            summary = f"no replica is left: all workers have left: {where}"
            yield ReplicaFailed("WaitTimeoutError", summary, deserted=True)

    def _handle(self, posted: Mapping[str, Any], event: Event | None) -> None:
        """Handle events of workers and of missing parts."""
        match posted:
            case {"kind": "removed", "replica": replica}:
                # A task that is pinned to a worker that has left never runs. A
                # finished result may be on other workers.
                future = self._futures.get(replica)
                if future is not None and not future.done():
                    self._cancel(replica)
            case {"kind": "lost" | "retired", "replica": replica, "summary": summary}:
                logger.warning("%s", summary)
                self._cancel(replica)
            case {"kind": "joined", "replica": replica, "worker": worker}:
                logger.info("replica %s trains on %s", replica, worker)
            case {"kind": "not joined", "replica": replica, "summary": summary}:
                self._cancel(replica)
                passes = posted["type"] in TRANSIENT_ERRORS
                self._retry_later(self.workers[replica], summary, passes=passes)
            case {"kind": "worker", "worker": worker}:
                installed = posted.get("versions")  # None if it took part before
                differing = "" if installed is None else mismatch(installed)
                if differing:
                    logger.warning(
                        "worker %s has joined the cluster, but is not used: %s; %s; %s",
                        worker,
                        differing,
                        CLIENT_VERSIONS,
                        REMEDY,
                    )
                else:
                    self._assign_more(worker)
            case {"kind": "missing", "phase": phase, "part": part, "key": key}:
                # `avoid` lists workers that hang.
                self._restore(phase, part, key, posted["worker"], posted["avoid"])
            case {"kind": "over", "waiting": waiting}:
                for replica in waiting:
                    self._cancel(replica)
        if isinstance(event, EpochEnded):
            self._client.loop.add_callback(self._fetcher.fetch, event.epoch)
            self._warn_of_frozen(event)

    def _assign_more(self, worker: str) -> None:
        """Assign replicas to a worker that has joined or is idle again."""
        room = self._most_replicas - len(self._futures)
        if room <= 0:
            return
        try:
            spec = self._spec
            each = replicas_on(spec.master, spec.device, self._client, [worker])
        except OSError as error:
            self._retry_later(worker, error)
            return
        answer = self._ask(
            protocol.ASSIGN, worker=worker, replicas=min(each[worker], room)
        )
        joining = dict.fromkeys(answer.get("replicas", ()), worker)
        self.workers |= joining
        self._submit(joining)

    def _retry_later(
        self, worker: str, error: OSError | str, *, passes: bool = True
    ) -> None:
        """Log an error; if it may pass and the worker is connected, retry later."""
        logger.warning("no replica on %s: %s", worker, error)
        if passes and worker in self._client.nthreads():
            # Later, as no event is handled while waiting for the worker.
            bound_s = self._spec.timeouts.request
            self._retry_at[worker] = time.monotonic() + bound_s

    def _restore_lost_parts(self) -> None:
        """Restore parts lost with their worker, before a replica needs them."""
        lost = [
            (phase, part, key)
            for phase, placement in self._supplies.items()
            for part, key in placement.lost()
        ]
        there = self._workers() if lost else set()
        training = sorted(there.intersection(self.workers[r] for r in self._futures))
        for phase, part, key in lost if training else ():
            worker = training[part % len(training)]
            self._restore(phase, part, key, worker)

    def _restore(
        self, phase: str, part: int, key: str, worker: str, avoid: Iterable[str] = ()
    ) -> None:
        """Send a part again, to the worker that needs it if possible."""
        there = self._workers().difference(avoid)
        for address in sorted(there, key=lambda address: (address != worker, address)):
            try:
                new = self._supplies[phase].restore(part, key, [address])
            except OSError as error:  # the worker has left, or hangs
                logger.info("part %s cannot be sent to %s: %s", part, address, error)
                continue
            self._ask(protocol.RESTORE, phase=phase, part=part, key=new)
            return

    def _warn_of_frozen(self, event: EpochEnded) -> None:
        each = [r.exchange.frozen_bytes for r in event.reports if r.present]
        if sum(each) <= MUCH_FROZEN or self._warned:
            return
        self._warned = True
        logger.warning(
            "the model changes frozen parameters, up to %.1f MB on each of %s "
            "replicas; at the end of each epoch, the scheduler sends %.1f MB to each "
            "replica in one message; use ParameterAveraging, which sums them between "
            "workers, or fewer replicas",
            max(each) / 1e6,
            len(each),
            sum(each) / 1e6,
        )

    # ---- the end

    @override
    def wait_for_workers(self, bound: Bound) -> bool:
        deadline = time.monotonic() + bound.seconds
        while (left_s := deadline - time.monotonic()) > 0:
            # The answer may come as late as a worker: nothing else waits for it.
            left = bound._replace(seconds=left_s)
            identity = self._answer("identity", bound=left, n_workers=-1)
            there = identity["workers"].values()
            if any(worker["status"] == "running" for worker in there):
                return True
            time.sleep(POLL_S)
        return False

    @override
    def stop(self, reason: str) -> None:
        if not self._scheduler_lost:
            self._ask(protocol.STOP, reason=reason)

    @override
    def collect(self) -> FitResult | None:
        if self._scheduler_lost:
            return None
        tasks = {
            f"replica {replica} on {self.workers[replica]}": future
            for replica, future in self._futures.items()
        }
        return collect(self._client, tasks, self._spec)

    @override
    def show(self, row: Row) -> None:
        numbers = {n: v for n, v in row.items() if isinstance(v, int | float)}
        self._rows.append({**numbers, "waits": row["waits"]})

    @property
    @override
    def agreed(self) -> ReplicaState | None:
        return self._fetcher.state

    @override
    def close(self) -> None:
        self._client.loop.add_callback(self._fetcher.close)
        if not self._connected:  # Dask has cancelled the futures
            self._futures.clear()
            return
        for replica in list(self._futures):
            self._cancel(replica)
        if self._scheduler_lost:
            self._client.loop.add_callback(self._request_close)
            return
        still_here = self._ask(protocol.CLOSE).get("still_here")
        if still_here:
            bound = self._spec.timeouts.bound("stop")
            logger.warning("not all replicas left within %s: %s", bound, still_here)

    async def _request_close(self) -> None:
        """Send a close request to a scheduler that no longer responds."""
        with contextlib.suppress(OSError):
            await self._client.scheduler.daskdl_close(
                run=self._spec.run, secret=self._spec.secret
            )

    def _ask(self, operation: str, **fields: Any) -> dict[str, Any]:
        if operation != protocol.OPEN:
            fields |= {"run": self._spec.run, "secret": self._spec.secret}
        answer = self._answer(operation, **fields)
        if not isinstance(answer, dict) or answer["status"] == Answer.REFUSED:
            raise ChannelError(f"the scheduler answered {answer!r} to {operation}")
        return answer

    def _answer(
        self, operation: str, *, bound: Bound | None = None, **fields: Any
    ) -> Any:
        """Send a request to the scheduler; detect a lost connection promptly.

        Args:
            operation: Name of the operation.
            bound: Longest wait for the answer; None: that of a request.
            **fields: Fields of the message.

        Raises:
            ChannelError: If the connection is lost: Dask then releases all keys of the
                client, even if the client reconnects.
            WaitTimeoutError: If the connection is open and no response arrives.
        """
        longest = bound or self._spec.timeouts.bound("request")

        def check() -> None:
            if not self._connected:
                raise ConnectionError("the connection is closed")

        async def ask() -> Any:
            check()
            asking = getattr(self._client.scheduler, operation)(**fields)
            return await awaited(asking, longest.seconds, check)

        try:
            answer = self._client.sync(ask)
        except OSError as error:  # a TimeoutError is one
            self._scheduler_lost = True
            last = f"it last answered {time.monotonic() - self._answered_at:.1f} s ago"
            if isinstance(error, TimeoutError):
                raise WaitTimeoutError(
                    f"the scheduler at {self._address} did not answer within "
                    f"{longest}; {last}; perhaps it hangs, or the network is down"
                ) from error
            raise ChannelError(
                f"the scheduler at {self._address} was lost: {error}; {last}"
            ) from error
        self._answered_at = time.monotonic()
        return answer

    @property
    def _connected(self) -> bool:
        return bool(self._client.status == "running")

    def _workers(self) -> set[str]:
        return set(self._answer("ncores", workers=None))


@contextlib.contextmanager
def dask_backend(
    client: Client,
    spec: ReplicaSpec,
    sources: Mapping[str, Source],
    first_replica: int = 0,
) -> Iterator[DaskBackend]:
    """Choose the workers of a run, and place the data on them.

    The initial replicas are numbered from `first_replica`.
    """
    packed = Packed(spec, "trainer")
    most = most_replicas(sources["train"], spec)
    assigned = assign_workers(spec.master, spec.device, client, most, first_replica)
    workers = sorted(set(assigned.values()))
    bound = spec.timeouts.bound("request")
    with contextlib.ExitStack() as stack:
        supplies = {
            phase: stack.enter_context(
                DataPlacement(source.divided(len(assigned)), client, workers, bound)
            )
            for phase, source in sources.items()
        }
        yield DaskBackend(client, spec, packed, assigned, supplies, most)


async def _set_up(dask_worker: Worker) -> None:
    """Register the plugin on a worker that Dask has not reached yet."""
    if NAME not in dask_worker.plugins:
        await dask_worker.plugin_add(arrival_plugin(NAME), NAME, catch_errors=False)
