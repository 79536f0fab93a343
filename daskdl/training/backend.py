"""The interface between a fit and the workers or threads that run its replicas.

A :class:`Backend` assigns replicas to workers, yields typed events while they train,
and collects a :class:`FitResult`. :class:`LocalBackend` runs a fixed number of replicas
as threads of this process, with neither Dask nor a scheduler.
"""

import concurrent.futures
import functools
import logging
import math
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from typing_extensions import override

from daskdl.channel.leasing import (
    TO_ITS_END,
    RunSpec,
    SyncIntervals,
    SyncPoint,
    partition_sizes,
)
from daskdl.channel.local import LocalChannel, LocalRun
from daskdl.compression.thresholds import Outcome, average_outcome
from daskdl.config import Bound
from daskdl.data.source import Source, rows_in
from daskdl.errors import OptionError, SaveError
from daskdl.observe.tables import Row
from daskdl.process_settings import is_divided, process_environment
from daskdl.serialization import Packed
from daskdl.training.base import TrainingMaster
from daskdl.training.data_feed import LocalStore
from daskdl.training.fit_spec import ReplicaSpec
from daskdl.training.replica import FitResult, Replica
from daskdl.training.state import ReplicaState, State
from daskdl.training.telemetry import Reports, reports_of
from daskdl.training.tree_reduce import total_of
from daskdl.util import settle

logger = logging.getLogger(__name__)

POLL_S = 0.5  # longest wait for an event


@dataclass(frozen=True)
class StepProgress:
    """A replica has trained on more examples."""

    epoch: int
    examples: int
    loss: float


@dataclass(frozen=True)
class EpochEnded:
    """All replicas have reached the barrier at the end of an epoch."""

    epoch: int
    report: Mapping[str, Any]  # payloads by replica, packed step rows, counters

    @functools.cached_property
    def reports(self) -> Reports:
        """Reports of all replicas."""
        return reports_of(dict(self.report["payloads"]), self.report["departed"])


@dataclass(frozen=True)
class ReplicaFailed:
    """A replica, or the run as a whole, cannot continue."""

    type: str  # name of a class in daskdl.errors
    summary: str
    replica: int | None = None  # None: the run as a whole
    worker: str = ""
    notes: Sequence[str] = ()  # see `BaseException.add_note`
    traceback: str = ""
    error: str = ""  # name of the exception's class, with its module
    deserted: bool = False  # no replica is left to train


@dataclass(frozen=True)
class TaskFailed:
    """The task of a replica ended with an error that the replica did not report."""

    replica: int
    error: BaseException


@dataclass(frozen=True)
class ReplicaJoined:
    """A replica that was assigned later has begun to train."""

    replica: int
    worker: str


@dataclass(frozen=True)
class ReplicaGone:
    """A replica was lost or has retired; the run continues without it."""

    replica: int
    reason: str


@dataclass(frozen=True)
class RunStopped:
    """The run was stopped before its end."""

    summary: str


Event = (
    StepProgress
    | EpochEnded
    | ReplicaFailed
    | TaskFailed
    | ReplicaJoined
    | ReplicaGone
    | RunStopped
)


def event_of(posted: Mapping[str, Any]) -> Event | None:
    """Convert an event that the run state posted; None if only the backend handles it.

    Example:
        >>> event_of({"kind": "removed", "replica": 3})
        ReplicaGone(replica=3, reason='its worker has left')
    """
    match posted:
        case {"kind": "progress", "epoch": epoch, "examples": count, "loss": loss}:
            return StepProgress(epoch, count, loss)
        case {"kind": "report", "epoch": epoch}:
            return EpochEnded(epoch, posted)
        case {"kind": "failed", **fields}:
            names = ReplicaFailed.__dataclass_fields__.keys() & fields.keys()
            return ReplicaFailed(**{name: fields[name] for name in names})
        case {"kind": "joined", "replica": replica, "worker": worker}:
            return ReplicaJoined(replica, worker)
        case {"kind": "removed" | "lost" | "retired", "replica": replica}:
            return ReplicaGone(replica, posted.get("summary", "its worker has left"))
        case {"kind": "stopped", "summary": summary}:
            return RunStopped(summary)
    return None


class Backend(ABC):
    """Runs the replicas of one run. Not thread-safe.

    Attributes:
        workers: Worker of each replica, present or past, by replica number.
        allowed_losses: How often a fit resumes the same state after a loss of all
            replicas.
    """

    workers: dict[int, str]
    allowed_losses: int = 0

    @abstractmethod
    def start(self) -> bool:
        """Start the initial replicas; the caller must call `close` afterwards.

        Returns:
            Whether any replica was started; False: all their workers have left.
        """

    @abstractmethod
    def poll_events(self) -> Iterator[Event]:
        """Yield events until every replica has ended; handle events about workers."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """Stop the run: every replica leaves."""

    @abstractmethod
    def collect(self) -> "FitResult | None":
        """Wait until the replicas have left; merge their results, or return None.

        Raises:
            WaitTimeoutError: If the results were not merged in time.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything that the run holds."""

    def wait_for_workers(self, bound: Bound) -> bool:
        """Wait for a worker after the loss of all; return whether one has joined."""
        return False

    def show(self, row: Row) -> None:  # noqa: B027
        """Show a row of the history on the cluster's dashboard, if there is one."""

    @property
    def agreed(self) -> ReplicaState | None:
        """The latest agreed state that the client received."""
        return None


T = TypeVar("T")


def in_pairs(merge_pair: Callable[[Sequence[T]], T], results: Sequence[T]) -> T:
    """Merge results in pairs, and what was merged again, until one is left.

    A result may have several times the bytes of the model, so no worker has room for
    those of many replicas, and its link would carry them one after another.

    Example:
        >>> in_pairs("({0[0]} {0[1]})".format, ["a", "b", "c", "d", "e"])
        '(((a b) (c d)) e)'
    """
    while len(results) > 2:
        pairs = [results[begin : begin + 2] for begin in range(0, len(results), 2)]
        results = [merge_pair(pair) if len(pair) > 1 else pair[0] for pair in pairs]
    return merge_pair(results)


def merge(results: Sequence[FitResult]) -> FitResult:
    """Merge results of replicas, or merged ones.

    The parameters are those of the last agreed state, which was validated. The
    residuals of the replicas that finished are summed as integer multiples of the grid,
    so their order does not matter. Replicas that restore the best epoch have equal
    results, and the first one is used. If no replica finished, the first agreed state
    is used.
    """
    ended = [result for result in results if result.finished]
    restored = [result for result in ended if result.restored][:1]
    # Replicas that failed at the start have no parameters.
    agreed = [result for result in results if result.parameters][:1]
    used = restored or ended or agreed or results[:1]
    states = [result.optimizer for result in ended if result.optimizer is not None]
    residuals = [r.carried for r in used if "residual" in r.carried]
    carried, senders = _merge_carried([r for r in results if r.carried], residuals)
    return FitResult(
        used[0].parameters,
        (total_of([arrays for arrays, _ in states]), states[0][1]) if states else None,
        carried,
        ended[0].schedule if ended else b"",  # equal on all replicas
        [packed for result in results for packed in result.telemetry],
        bool(restored),
        used[0].has_agreed,
        bool(ended),
        senders,
    )


def _merge_carried(
    results: Sequence[FitResult], residuals: Sequence[State]
) -> tuple[State, Mapping[str, int]]:
    """Merge what replicas carry to the next fit, see `Exchange.carried`.

    For each pattern the mean over the replicas that sent updates of it, the largest
    number of steps, and the sum of some replicas' residuals.
    """
    if not results:
        return {}, {}
    outcomes: dict[str, list[Outcome]] = {}
    for result in results:
        for pattern, outcome in result.carried["sent"].items():
            count = result.senders.get(pattern, 1)
            outcomes.setdefault(pattern, []).extend([Outcome(*outcome)] * count)
    sent = {}
    for pattern, of_replicas in outcomes.items():
        mean = average_outcome(of_replicas)
        assert mean is not None
        sent[pattern] = mean.threshold, mean.density
    merged = {"steps_made": max(r.carried["steps_made"] for r in results), "sent": sent}
    if residuals:
        total_N = sum(state["residual"].long() for state in residuals)
        assert isinstance(total_N, torch.Tensor), "there is a residual"
        bounds = torch.iinfo(torch.int32)
        counts_N = total_N.clamp(bounds.min, bounds.max).int()
        if counts_N.any():
            merged |= {"residual": counts_N, "grid": residuals[0]["grid"]}
    return merged, {pattern: len(those) for pattern, those in outcomes.items()}


def most_replicas(source: Source, spec: ReplicaSpec) -> int:
    """Return the largest useful number of replicas: one for each step of an epoch."""
    rows = rows_in(source)
    return sys.maxsize if rows is None else math.ceil(rows / spec.step_rows)


def limit_replicas(wanted: int, most: int) -> int:
    """Return the smaller of two numbers of replicas; log a reduction."""
    if wanted > most:
        logger.info(
            "an epoch has %s steps: %s of %s replicas are used", most, most, wanted
        )
    return min(wanted, most)


REPORT_BYTES = 2**26  # more than a report with telemetry and states of metrics takes


def run_spec_of(
    spec: ReplicaSpec,
    workers: Mapping[int, str],
    sources: Mapping[str, Source],
    keys: Mapping[str, Sequence[str]] | None = None,
    relayed: bool = True,
    relay_bytes: int = 0,
    merge_s: float = 0.0,
) -> RunSpec:
    """Make the specification of a run for the run state; log the lease sizes."""
    sizes = {}
    for phase, source in sources.items():
        # Leases are multiples of a step, so that few steps cross lease boundaries.
        step_rows = spec.step_rows if phase == "train" else spec.read.batch_size
        lengths = source.lengths
        sizes[phase] = partition_sizes(
            [-1] * source.parts if lengths is None else lengths,
            step_rows,
            len(workers),
            None if keys is None else keys[phase],
        )
        if lengths is not None:
            lease_rows = sizes[phase].lease_rows
            logger.info(
                "the %s data have %s parts of %s to %s rows and are leased in pieces "
                "of %s: %s smaller parts are combined, %s larger ones are split",
                phase,
                source.parts,
                min(lengths),
                max(lengths),
                lease_rows,
                sum(0 < rows < lease_rows for rows in lengths),
                sum(rows > lease_rows for rows in lengths),
            )
    # Buffers and frozen parameters that change travel at barriers, beside reports.
    tensors = chain(spec.model.parameters(), spec.model.buffers())
    model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    rule = None if spec.checkpoints is None else spec.checkpoints.rule
    steps = None if rule is None else rule.steps
    if steps is not None and min(sizes["train"].rows) < 0:
        raise OptionError(
            f"{rule} needs data of known length; write a checkpoint every epoch, or "
            "after a time such as '10 minutes'"
        )
    resume = spec.resume
    point = None if resume is None else resume.sync_point
    run = RunSpec(
        run=spec.run,
        replicas=dict(workers),
        sizes=sizes,
        seed=spec.seed if spec.shuffle else None,
        epochs_before=spec.epochs_before,
        synchronous=spec.master.synchronous,
        relay_bytes=relay_bytes,
        min_replicas=spec.master.min_replicas,
        timeouts=vars(spec.timeouts),
        relayed=relayed,
        merge_s=merge_s,
        parameters=spec.size,
        first_epoch=spec.first_epoch,
        intervals=SyncIntervals(
            replicas=len(workers),
            rows=None if steps is None else steps * spec.step_rows,
            seconds=None if rule is None else rule.seconds,
            resumed=point,
        ),
        epochs=spec.epochs,
        name=spec.name or "",
        title=f"{type(spec.model).__name__}, {spec.size:,} parameters",
        payload_bytes=REPORT_BYTES + 4 * model_bytes,
        secret=spec.secret,
    )
    if resume is not None and point is not None:
        _check_sync_point(point, run, resume.store.url)
    return run


def _check_sync_point(point: SyncPoint, run: RunSpec, url: str) -> None:
    """Refuse to resume in mid-epoch with other data."""
    if point.order != run.order:
        raise OptionError(
            f"{url} was written in the middle of an epoch, but the data, their "
            "partitioning, seed or shuffle have changed; restore them, or resume a "
            "checkpoint of the end of an epoch"
        )
    rows = run.sizes["train"].rows
    for piece in chain.from_iterable(work.ranges for work in point.remaining):
        part, start, stop = piece
        known = rows[part] if part < len(rows) else 0
        if not (stop == known == TO_ITS_END or start <= stop <= known):
            raise SaveError(f"{url} is damaged: the data have no rows {piece}")


HERE = "this machine"  # location of the replicas in messages


def replicas_here(master: TrainingMaster, device: str | torch.device, most: int) -> int:
    """Choose the number of replicas in this process."""
    each = master.replicas_per_worker
    devices = torch.cuda.device_count() if is_divided(device) else 1
    wanted = max(1, devices) if each == "auto" else int(each)
    replicas = limit_replicas(wanted, most)
    if master.min_replicas > replicas:
        raise OptionError(
            f"min_replicas must be at most {replicas}, the number of replicas in this "
            f"process, got {master.min_replicas}; without a cluster no replicas join "
            "later: increase replicas_per_worker"
        )
    return replicas


class LocalBackend(Backend):
    """Runs each replica in a thread of this process."""

    def __init__(self, spec: ReplicaSpec, sources: Mapping[str, Source]) -> None:
        self._packed = Packed(spec, "trainer", here=True)
        most = most_replicas(sources["train"], spec)
        replicas = replicas_here(spec.master, spec.device, most)
        self.workers = dict.fromkeys(range(replicas), HERE)
        self._spec = spec
        self._sources = {
            phase: source.divided(replicas) for phase, source in sources.items()
        }
        # The thread that fills a relay queue also empties it, so it needs no bound.
        self._run = LocalRun(run_spec_of(spec, self.workers, self._sources))
        self._results: dict[int, concurrent.futures.Future[FitResult]] = {
            replica: concurrent.futures.Future() for replica in self.workers
        }
        self._threads: list[threading.Thread] = []

    @override
    def start(self) -> bool:
        threads = max(1, torch.get_num_threads() // len(self.workers))
        for replica in self.workers:
            thread = threading.Thread(
                target=self._run_into_future,
                args=(replica, threads),
                name=f"daskdl-replica-{replica}",
                # A thread that hangs in user code must not keep Python from exiting.
                daemon=True,
            )
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()
        return True

    def _run_into_future(self, replica: int, threads: int) -> None:
        train = functools.partial(self._train, replica, threads)
        settle(self._results[replica], train)
        with self._run.changed:
            self._run.changed.notify_all()

    def _train(self, number: int, threads: int) -> FitResult:
        spec = self._packed.unpack()
        channel = LocalChannel(self._run, spec.channel_spec(number))
        store = LocalStore(self._sources, channel, spec.timeouts, spec.load_threads)
        try:
            with process_environment(str(spec.device), threads) as device:
                return Replica(number, spec, channel, device, store).run()
        finally:
            store.close()
            channel.leave()

    def _ended(self) -> bool:
        return all(result.done() for result in self._results.values())

    @override
    def poll_events(self) -> Iterator[Event]:
        posted: Sequence[Mapping[str, Any]] = ()
        ended = False
        while posted or not ended:
            ended = self._ended()
            posted = self._run.watch(POLL_S, self._ended)
            yield from filter(None, map(event_of, posted))
            for replica, result in self._results.items():
                error = result.exception() if result.done() else None
                if error is not None:
                    yield TaskFailed(replica, error)

    @override
    def stop(self, reason: str) -> None:
        self._run.stop(reason)

    @override
    def collect(self) -> FitResult | None:
        deadline = time.monotonic() + self._spec.timeouts.stop
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        results = []
        for replica, result in self._results.items():
            if not result.done():
                bound = self._spec.timeouts.bound("stop")
                who = self._run.describe(replica)
                logger.warning("a replica has not ended within %s: %s", bound, who)
            elif result.exception() is None:
                results.append(result.result())
        return in_pairs(merge, results) if results else None

    @override
    def close(self) -> None:
        self._run.stop("the run was closed")
