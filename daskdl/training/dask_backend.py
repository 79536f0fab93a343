"""Replicas as tasks of a Dask cluster: launched, watched, replaced and collected."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, NamedTuple

from distributed import Client, Future, Worker, get_worker, secede, wait
from typing_extensions import override

from daskdl.channel import protocol
from daskdl.channel.protocol import NAME, Answer
from daskdl.channel.remote import RemoteChannel
from daskdl.channel.scheduler import ChannelSchedulerPlugin
from daskdl.channel.worker import ChannelWorkerPlugin
from daskdl.cluster import OWN, REMEDY, arrivals, lacking
from daskdl.config import VERSION
from daskdl.data.futures import new_key
from daskdl.data.scattering import scatter
from daskdl.data.source import Source
from daskdl.data.supplies import Supply
from daskdl.errors import ChannelError, RunError, WaitTimeoutError
from daskdl.serialization import Packed
from daskdl.training.backend import (
    Event,
    Final,
    Kept,
    Safekeeping,
    Stage,
    extent_for,
    merge,
    plan_of,
    replicas_on,
)
from daskdl.training.base import ExchangeStats
from daskdl.training.data_feed import WorkerStore
from daskdl.training.replica import Replica, surroundings, warm_up
from daskdl.training.spec import Recipe, Result, TaskOptions

logger = logging.getLogger(__name__)


def train_replica(
    recipe: Packed[Recipe],
    sources: Mapping[str, Packed[Source]],
    options: TaskOptions,
    number: int,
    seats: int,
    *,
    founder: bool,
) -> Result:
    """Train one replica on this worker, from start to end.

    Args:
        recipe: The user's objects.
        sources: Of the data that each worker has as a whole, by phase.
        options: The same for all replicas.
        number: Of this replica in the run.
        seats: Replicas of this run on this worker.
        founder: It is there from the start; nobody trains before it joins.
    """
    # Frees the slot for other tasks, and keeps adaptive clusters from closing us.
    secede()
    worker = get_worker()
    own = recipe.unpack()
    channel = _open_channel(worker, options, number, own)
    store = WorkerStore(sources, channel, options.timeouts, options.load_threads)
    result = None
    try:
        threads = max(1, worker.state.nthreads // seats)
        with surroundings(options.device, threads) as device:
            replica = Replica(number, options, own, channel, device, store)
            if not founder:
                warm_up(own, options.master, options.stepping, device)
            result = replica.run()
            return result
    finally:
        store.close()
        finished = result is not None and result.finished
        channel.leave(retires=channel.closing and not finished)


def _open_channel(
    worker: Worker, options: TaskOptions, number: int, own: Recipe
) -> RemoteChannel:
    plugin = worker.extensions.get(NAME)
    if not isinstance(plugin, ChannelWorkerPlugin):
        raise ChannelError(
            f"the daskdl plugin is not set up on {worker.address}; see the worker's log"
        )
    return plugin.open(options.endpoint(number, own))


COLLECT_LOOK_S = 1.0  # between two looks whether a result was lost


def collect(
    client: Client, tasks: Mapping[str, Future], options: TaskOptions
) -> Final | None:
    """Wait for the tasks of a run to end, and join what they left.

    A result may be lost with its worker when it is there already; then the others
    are joined without it.

    Args:
        client: Synchronous, of the cluster.
        tasks: Of the replicas that have not been given up, by whose they are.
        options: Of the run.

    Returns:
        What the run ended with; None if no task has come to its end.

    Raises:
        WaitTimeoutError: If they were not joined in time.
    """
    futures = tasks.values()
    _wait_for(client, futures, options.timeouts.stop)
    bound = options.timeouts.bound("data")
    deadline = time.monotonic() + bound.seconds
    while results := [task for task in futures if task.status == "finished"]:
        packed = _join(client, results, options.run, deadline)
        if packed is not None:
            return packed.unpack()
        if time.monotonic() > deadline:
            whose = "; of ".join(f"{who}: {task.status}" for who, task in tasks.items())
            raise WaitTimeoutError(
                f"the replicas' results were not joined within {bound}; Dask says of "
                f"{whose}; was a worker lost at the very end, or are all busy with "
                "other tasks?"
            )
    return None


def _wait_for(client: Client, tasks: Collection[Future], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while live := [task for task in tasks if task.status == "pending"]:
        # One that Dask gives up meanwhile is not pending any more.
        with contextlib.suppress(CancelledError):
            try:
                with client.as_current():  # `wait` asks the default client
                    wait(live, timeout=max(deadline - time.monotonic(), 0.0))
            except TimeoutError:  # who they are is said in the end
                return


def _join(
    client: Client, results: Sequence[Future], run: int, deadline: float
) -> Packed[Final] | None:
    """Join results; None if one of them was lost, or it takes too long."""
    merged = client.submit(merge, list(results), key=new_key(f"merge-{run:x}"))

    async def fetch() -> Any:
        # Once: over a slow link it takes long, and would take longer every time.
        fetching = asyncio.ensure_future(client.gather(merged, asynchronous=True))
        while time.monotonic() < deadline:
            await asyncio.wait([fetching], timeout=COLLECT_LOOK_S)
            if fetching.done():
                return fetching.result()
            # Dask would train again what was lost, on a worker that is gone.
            if any(result.status != "finished" for result in results):
                break
        fetching.cancel()
        return None

    try:
        packed: Packed[Final] | None = client.sync(fetch)
    except CancelledError:
        return None  # as above
    finally:
        merged.release()
    return packed


MUCH_FROZEN = 64 * 2**20  # bytes that come to each replica when an epoch ends
LOOK_S = 0.5  # between two looks whether the connection is there still
NO_CONNECTION = "the connection to it is closed"


class Limits(NamedTuple):
    """Bounds of a run that its replicas do not see."""

    relay_bytes: int  # of the relay's queue for each replica
    most_replicas: int  # more would have nothing to do


class ClusterStage(Stage):
    """Tasks on the workers of a cluster, one for each replica.

    Args:
        client: Synchronous client of the cluster.
        options: Of the run.
        seats: Worker address of each founder.
        supplies: Of each phase.
        limits: Bounds of the run that its replicas do not see.
    """

    def __init__(
        self,
        client: Client,
        options: TaskOptions,
        seats: Mapping[int, str],
        supplies: Mapping[str, Supply],
        limits: Limits,
    ) -> None:
        self.seats = dict(seats)
        self._client = client
        routing = options.master.routing_for(len(set(seats.values())))
        self._options = dataclasses.replace(options, routing=routing)
        self._founders = set(seats)
        self._supplies = supplies
        self._limits = limits
        self._futures: dict[int, Future] = {}
        self._asked_again: dict[str, float] = {}  # when, by worker; monotonic clock
        self._heard_at = time.monotonic()  # of the scheduler's last answer
        self._address = client.scheduler.address
        self._scheduler_lost = self._warned = False
        bound = options.timeouts.bound("request")
        self._safekeeping = Safekeeping(client, options.run, bound)

    @override
    def open(self) -> None:
        self._client.register_plugin(ChannelSchedulerPlugin())
        try:
            self._client.register_plugin(arrivals(NAME))
        except OSError as error:
            # Dask tells all that are there, and does not wait for them once one of
            # them has gone, which `start` then leaves out.
            logger.warning("a worker has gone while the run began: %s", error)
            self._client.run(_set_up, on_error="return")
        extents = {
            phase: extent_for(
                self._options, phase, own.source, len(self.seats), own.keys
            )
            for phase, own in self._supplies.items()
        }
        plan = plan_of(self._options, self.seats, extents, self._limits.relay_bytes)
        answer = self._ask(protocol.OPEN, plan=vars(plan), client=self._client.id)
        if answer.get("version") != VERSION:
            self._ask(protocol.CLOSE)
            raise ChannelError(
                f"the scheduler has daskdl {answer.get('version')}, this client "
                f"{VERSION}; install the same version on all"
            )

    @override
    def start(self, recipe: Packed[Recipe]) -> None:
        self._recipe = recipe
        seats = dict(self.seats)
        while True:
            try:
                self._submit(seats)
            except OSError as error:
                there = set(self._client.nthreads())
                gone = [r for r, worker in seats.items() if worker not in there]
                if not gone:
                    raise
                if len(gone) == len(seats):
                    where = ", ".join(sorted(set(seats.values())))
                    raise RunError(
                        f"all workers that were to begin have gone: {where}; see their "
                        "logs, and fit again when there are others"
                    ) from error
                logger.warning("replicas %s are not started: %s", gone, error)
                self._dismiss(gone)
                seats = {r: w for r, w in seats.items() if r not in gone}
            else:
                return

    def _submit(self, seats: Mapping[int, str]) -> None:
        workers = sorted(set(seats.values()))
        name = f"daskdl-recipe-{self._options.run:x}-{min(seats)}"
        carried = {p: own.packed for p, own in self._supplies.items() if own.packed}
        values: dict[str, Packed[Any]] = {
            name: self._recipe,
            **{f"{name}-{p}": v for p, v in carried.items()},
        }
        founders = self._founders.issuperset(seats)
        # While one that comes later does not take it, the others' news wait.
        bound = self._options.timeouts.bound("join" if founders else "request")
        nbytes = sum(value.payload.nbytes for value in values.values())
        what = f"the model ({nbytes} bytes)"
        sent = scatter(self._client, values, workers, bound, what)
        sources = {phase: sent[f"{name}-{phase}"] for phase in carried}
        there = {*self._futures, *seats}
        per_worker = Counter(self.seats[replica] for replica in there)
        for replica, worker in seats.items():
            self._futures[replica] = self._client.submit(
                train_replica,
                sent[name],
                sources,
                self._options,
                replica,
                per_worker[worker],
                founder=replica in self._founders,
                key=f"daskdl-train-{self._options.run:x}-{replica}",
                workers=[worker],
                allow_other_workers=False,
                pure=False,
                retries=0,
            )

    @override
    def news(self, seen: int, timeout_s: float) -> Sequence[Event]:
        # Before the next news: those before say who is gone, and takes nothing.
        for event in (*self._due(), *self._lost_parts()):
            self.heed(event)
        answer = self._ask(protocol.WATCH, seen=seen, timeout_s=timeout_s)
        events: Sequence[Event] = answer["events"]
        return events

    def _due(self) -> Iterator[Event]:
        """Workers that did not take what a newcomer needs, and are asked again."""
        for worker, due in list(self._asked_again.items()):
            if time.monotonic() >= due:
                del self._asked_again[worker]
                yield {"kind": "worker", "worker": worker}

    def _lost_parts(self) -> Iterator[Event]:
        """What died with its worker: a replica that comes to it shall find it there."""
        lost = [(p, *part) for p, own in self._supplies.items() for part in own.lost()]
        there = self._workers() if lost else set()
        training = sorted(there.intersection(self.seats[r] for r in self._futures))
        for phase, part, key in lost if training else ():
            worker = training[part % len(training)]
            asked = {"phase": phase, "part": part, "key": key}
            yield {"kind": "missing", "worker": worker, "avoid": (), **asked}

    @override
    def heed(self, event: Event) -> None:
        act: dict[str, Callable[[Event], None]] = {
            # Pinned to a worker that is gone, the task would wait for ever.
            "removed": lambda event: self._cancel(event["replica"]),
            "lost": self._note_departure,
            "retired": self._note_departure,
            "joined": self._note_arrival,
            "not joined": self._note_failure,
            "worker": self._welcome,
            "missing": self._restore,
            "over": self._send_away,
            "gathered": self._end_epoch,
        }
        if event["kind"] in act:
            act[event["kind"]](event)

    def _end_epoch(self, event: Event) -> None:
        self._safekeeping.note(event["epoch"])
        notes = [note for _, note in event["notes"]]
        each = [ExchangeStats(*note["statistics"]).frozen_bytes for note in notes]
        if sum(each) <= MUCH_FROZEN or self._warned:
            return
        self._warned = True
        logger.warning(
            "frozen parameters that the model changes itself, %.1f MB of each of %s "
            "replicas, go through the scheduler to all of them at the end of each "
            "epoch: %.1f MB to each, in one message; ParameterAveraging adds them up "
            "from worker to worker instead, and with fewer replicas there are fewer",
            max(each) / 1e6,
            len(each),
            sum(each) / 1e6,
        )

    def _note_departure(self, event: Event) -> None:
        logger.warning("%s", event["summary"])
        self._cancel(event["replica"])

    def _note_arrival(self, event: Event) -> None:
        logger.info("replica %s trains on %s", event["replica"], event["worker"])

    def _note_failure(self, event: Event) -> None:
        worker = self.seats[event["replica"]]
        logger.warning("a newcomer on %s failed: %s", worker, event["summary"])

    def _send_away(self, event: Event) -> None:
        """Nobody is left to begin from: these came too late."""
        for replica in event["waiting"]:
            self._cancel(replica)

    def _welcome(self, event: Event) -> None:
        """A worker is there, or free again; it takes part if it has what is needed."""
        worker, found = event["worker"], event.get("found")
        wrong = "" if found is None else lacking(found)
        if wrong:
            logger.warning(
                "worker %s has come and takes no part: %s; %s; %s",
                worker,
                wrong,
                OWN,
                REMEDY,
            )
        else:
            self._seat(worker)

    def _seat(self, worker: str) -> None:
        """A worker is there, or free again: let it take part."""
        room = self._limits.most_replicas - len(self._futures)
        if room <= 0:
            return
        try:
            wanted = replicas_on(self._options.master, self._client, [worker])[worker]
        except OSError as error:
            self._try_later(worker, error)
            return
        answer = self._ask(protocol.SEAT, worker=worker, replicas=min(wanted, room))
        newcomers = dict.fromkeys(answer.get("replicas", ()), worker)
        self.seats |= newcomers
        if newcomers:
            try:
                self._submit(newcomers)
            except OSError as error:
                self._dismiss(newcomers)
                self._try_later(worker, error)

    def _try_later(self, worker: str, error: OSError) -> None:
        """A worker has gone again, or hangs."""
        logger.warning("no replica on %s: %s", worker, error)
        if worker in self._client.nthreads():
            # Not at once: to wait for it holds up the others' news.
            bound_s = self._options.timeouts.request
            self._asked_again[worker] = time.monotonic() + bound_s

    def _restore(self, event: Event) -> None:
        """Send a lost part again: where it is wanted, else to any that takes it."""
        phase, part = event["phase"], event["part"]
        there = self._workers() - set(event["avoid"])
        wanted = event["worker"]
        for home in sorted(there, key=lambda worker: (worker != wanted, worker)):
            try:
                key = self._supplies[phase].restore(part, event["key"], [home])
            except OSError as error:  # it has gone, or hangs
                logger.info("part %s is not put on %s: %s", part, home, error)
                continue
            self._ask(protocol.RESTORE, phase=phase, part=part, key=key)
            return

    @override
    def ended(self) -> bool:
        return all(future.done() for future in self._futures.values())

    @override
    def errors(self) -> Iterator[tuple[int, BaseException]]:
        for replica, future in list(self._futures.items()):
            if future.status == "cancelled":
                # Its worker is gone, or was before it came there.
                logger.info("Dask has given up the task of replica %s", replica)
                self._cancel(replica)
            elif future.status == "error":
                error = future.exception()
                if replica in self._founders:
                    yield replica, error
                else:
                    logger.warning("a newcomer did not start: %s", error)
                    self._dismiss([replica])

    @override
    def given_up(self) -> list[int]:
        return [r for r in self.seats if r not in self._futures]

    @override
    def stop(self, reason: str) -> None:
        if not self._scheduler_lost:
            self._ask(protocol.STOP, reason=reason)

    @override
    def collect(self) -> Final | None:
        if self._scheduler_lost:
            return None
        tasks = {
            f"replica {replica} on {self.seats[replica]}": future
            for replica, future in self._futures.items()
        }
        return collect(self._client, tasks, self._options)

    @override
    def kept(self) -> Kept | None:
        return self._safekeeping.kept

    def _dismiss(self, replicas: Iterable[int]) -> None:
        """These do not start: their seats are free for others."""
        for replica in replicas:
            self._cancel(replica)
            self._ask(protocol.UNSEAT, replica=replica)

    def _cancel(self, replica: int) -> None:
        future = self._futures.pop(replica, None)
        if future is not None:
            future.cancel()

    @override
    def close(self) -> None:
        self._safekeeping.close()
        if not self._connected:  # Dask has given up the futures
            self._futures.clear()
            return
        for replica in list(self._futures):
            self._cancel(replica)
        if self._scheduler_lost:
            self._client.loop.add_callback(self._say_farewell)
            return
        still_here = self._ask(protocol.CLOSE).get("still_here")
        if still_here:
            bound = self._options.timeouts.bound("stop")
            logger.warning("after %s these have not left: %s", bound, still_here)

    async def _say_farewell(self) -> None:
        """It does not answer, but may hear it."""
        with contextlib.suppress(OSError):
            await self._client.scheduler.daskdl_close(run=self._options.run)

    def _ask(self, operation: str, **fields: Any) -> dict[str, Any]:
        if operation != protocol.OPEN:
            fields["run"] = self._options.run
        answer = self._answer(operation, **fields)
        if not isinstance(answer, dict) or answer["status"] == Answer.REFUSED:
            raise ChannelError(f"the scheduler answered {answer!r} to {operation}")
        return answer

    def _answer(self, operation: str, **fields: Any) -> Any:
        """Ask the scheduler; that it is lost is noticed once, as soon as can be.

        Raises:
            ChannelError: If the connection is lost: Dask gives up all that belongs to
                a client then, even if it can connect again.
            WaitTimeoutError: If the connection is there, and no answer comes.
        """

        async def ask() -> Any:
            if not self._connected:
                raise ConnectionError(NO_CONNECTION)
            request = getattr(self._client.scheduler, operation)
            asking = asyncio.ensure_future(request(**fields))
            deadline = time.monotonic() + bound.seconds
            try:
                while not asking.done():
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        raise TimeoutError
                    await asyncio.wait([asking], timeout=min(left_s, LOOK_S))
                    if not asking.done() and not self._connected:
                        raise ConnectionError(NO_CONNECTION)
                return asking.result()
            finally:
                asking.cancel()

        bound = self._options.timeouts.bound("request")
        try:
            answer = self._client.sync(ask)
        except TimeoutError as error:
            self._scheduler_lost = True
            raise WaitTimeoutError(
                f"the scheduler at {self._address} did not answer within {bound}; "
                f"{self._last_answer()}; does it hang, or is it cut off?"
            ) from error
        except OSError as error:
            self._scheduler_lost = True
            raise ChannelError(
                f"the scheduler at {self._address} was lost: {error}; "
                f"{self._last_answer()}"
            ) from error
        self._heard_at = time.monotonic()
        return answer

    @property
    def _connected(self) -> bool:
        return bool(self._client.status == "running")

    def _last_answer(self) -> str:
        return f"it last answered {time.monotonic() - self._heard_at:.1f} s ago"

    def _workers(self) -> set[str]:
        return set(self._answer("ncores", workers=None))


async def _set_up(dask_worker: Worker) -> None:
    """Let a worker take part that Dask has not told of it yet."""
    if NAME not in dask_worker.plugins:
        await dask_worker.plugin_add(arrivals(NAME), NAME, catch_errors=False)
