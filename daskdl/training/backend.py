"""What a replica is sent, where replicas run, and what comes back from them.

A :class:`ReplicaSpec` and the user's objects go to each replica. A :class:`Backend`
assigns them to workers, reports typed events while they train, and collects a
:class:`FitResult`.
"""

import functools
import logging
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from daskdl.callbacks import Callback, FailureInjection
from daskdl.channel.leasing import (
    PartitionSizes,
    RunSpec,
    SyncIntervals,
    partition_sizes,
)
from daskdl.channel.protocol import Arrays, Endpoint
from daskdl.config import Timeouts
from daskdl.data.batching import Rows, Transform
from daskdl.data.labels import LabelCheck
from daskdl.data.source import Source, rows_in
from daskdl.errors import OptionError
from daskdl.objective import Objective
from daskdl.saving.checkpoints import CheckpointPlan, ResumePlan
from daskdl.serialization import Packed
from daskdl.thresholds import average_sent
from daskdl.training.base import (
    CompressionState,
    KeptResidual,
    Parameters,
    TrainingMaster,
)
from daskdl.training.data_feed import Reading
from daskdl.training.epoch_control import Judging, Scheduling
from daskdl.training.optimizer_step import OptimizerState, Stepping, add
from daskdl.training.telemetry import Reports, reports_of

logger = logging.getLogger(__name__)

# Small files on a far store come sooner several at a time; a replica has one core.
MOST_LOAD_THREADS = 4


@dataclass
class UserObjects:
    """The user's objects, which each replica unpacks; packed once for all.

    Attributes:
        model: At its start, on the CPU.
        objective: What to make small.
        optimizer: Makes an optimizer from an iterable of parameters.
        optimizer_state: A state dict to begin with, or None.
        callbacks: Those that run on workers.
        rows: Two rows of X and y, to warm up with.
        scheduling: Makes the scheduler of an optimizer.
        schedule: Where its earlier fits have left it; empty: at its start.
        transform: What is made of each batch before, or None.
        residual: That its earlier fits have kept, or None.
    """

    model: nn.Module
    objective: Objective
    optimizer: Callable[[Any], Optimizer]
    optimizer_state: dict[str, Any] | None
    callbacks: Sequence[Callback]
    rows: Rows
    scheduling: Scheduling = field(default_factory=Scheduling)
    schedule: bytes = b""
    transform: Transform | None = None
    residual: KeptResidual | None = None


@dataclass(frozen=True)
class ReplicaSpec:
    """What each replica of a run is told: plain values, the same for all.

    Attributes:
        run: Identity of the run.
        master: The way of training.
        epochs: How many times to go through the data, at most.
        epochs_before: Of earlier fits of the same trainer.
        batch_size: Rows per batch.
        seed: Of shuffling and of torch's generator.
        shuffle: Whether rows are shuffled within their leases.
        device: ``"auto"`` or a torch device.
        judging: In which epochs the agreed model is scored, and when the fit ends
            early.
        labels: What labels of parts are held to; None: they are not looked at.
        size: Trainable parameters of the model.
        grid: Of the run at its start, parameter units.
        last: What an earlier fit left, or None.
        outbox_bytes: Bound of what waits to be sent.
        inbox_bytes: Bound of what waits to be applied.
        timeouts: Bounds on waiting.
        routing: ``"plain"`` or ``"mesh"``.
        stepping: How an optimizer step is made.
        telemetry_every: Steps from one row of `history.steps` to the next; ``"auto"``,
            or None for no rows.
        max_loss_rise: How far above its first value the loss may stay; None: any.
        prefetch: Parts with rows of so many batches are loaded meanwhile.
        skips_bad: Whether parts that cannot be read are left out.
        drop_last: Whether batches of fewer rows are not trained on.
        left_out: Examples that were found to be bad before, and are in no part.
        checkpoints: How they are written; None: they are not.
        resume: Where the run goes on from; None: from the user's model.
    """

    run: int
    master: TrainingMaster
    epochs: int
    epochs_before: int
    batch_size: int
    seed: int
    shuffle: bool
    device: str
    judging: Judging
    labels: LabelCheck | None
    size: int
    grid: float
    last: CompressionState | None
    outbox_bytes: int
    inbox_bytes: int
    timeouts: Timeouts
    routing: str = "plain"
    stepping: Stepping = field(default_factory=Stepping)
    telemetry_every: int | Literal["auto"] | None = "auto"
    max_loss_rise: float | None = 10.0
    prefetch: int = 2
    skips_bad: bool = False
    drop_last: bool = False
    left_out: int = 0
    checkpoints: CheckpointPlan | None = None
    resume: ResumePlan | None = None

    @property
    def first_epoch(self) -> int:
        """That is trained, counted from 0."""
        return 0 if self.resume is None else self.resume.epoch

    @property
    def load_threads(self) -> int:
        """Parts that a replica loads at the same time."""
        return min(max(self.prefetch, 1), MOST_LOAD_THREADS)

    def reading(self, phase: str, epoch: int) -> Reading:
        """How the parts of a phase are read.

        Args:
            phase: ``"train"`` or ``"validation"``.
            epoch: Counted from 0.
        """
        seed = None
        if phase == "train" and self.shuffle:
            seed = (self.seed, self.epochs_before + epoch)
        return Reading(
            phase,
            seed,
            self.batch_size,
            self.prefetch,
            self.labels,
            self.skips_bad,
            drop_last=self.drop_last and phase == "train",
        )

    @property
    def step_rows(self) -> int:
        """Rows per optimizer step."""
        return self.batch_size * self.stepping.accumulate

    def lease_rows(self, phase: str) -> int:
        """Leases are multiples of so many rows, so that few steps cross their edges."""
        return self.step_rows if phase == "train" else self.batch_size

    @property
    def shuffle_seed(self) -> int | None:
        """Of the order of rows and leases; None keeps it."""
        return self.seed if self.shuffle else None

    def endpoint(self, replica: int, objects: UserObjects) -> Endpoint:
        """What the channel of a replica has to know.

        Args:
            replica: Its number.
            objects: Says which updates are to be dropped on purpose.
        """
        injected = [c for c in objects.callbacks if isinstance(c, FailureInjection)]
        return Endpoint(
            self.run,
            replica,
            self.size,
            self.grid,
            self.outbox_bytes,
            self.inbox_bytes,
            self.timeouts,
            self.routing,
            self.master.fan_out,
            [failure for failure in injected if failure.kind == "drop"],
            self.master.synchronous,
        )


@dataclass
class Result:
    """What a replica leaves behind; stays on its worker until it is merged.

    Attributes:
        replica: Its number.
        finished: Whether it came to the end; else the rest is of the last epoch
            on which all agreed.
        parameters: As a pack, so that Dask never serialises a tensor.
        optimizer: The replica's weighted share, or None.
        outcome: What it leaves to the next fit, or None.
        schedule: Where it stands, the same for all that finished.
        steps: Rows of steps that it has not reported, packed.
        restored: Whether the parameters are those of the best epoch.
        met: Whether it has agreed with the others, after the start of the run.
    """

    replica: int
    finished: bool
    parameters: Packed[Parameters]
    optimizer: Packed[OptimizerState] | None = None
    outcome: CompressionState | None = None
    schedule: bytes = b""
    steps: bytes = b""
    restored: bool = False
    met: bool = True


INT32 = np.iinfo(np.int32)


@dataclass(frozen=True)
class StepProgress:
    """A replica has trained on some rows."""

    epoch: int
    examples: int
    loss: float


@dataclass(frozen=True)
class EpochEnded:
    """All replicas have met at the end of an epoch."""

    epoch: int
    report: Mapping[str, Any]  # notes and rows of steps by replica, and counters

    @functools.cached_property
    def reports(self) -> Reports:
        """Reports of all replicas."""
        return reports_of(dict(self.report["payloads"]))


@dataclass(frozen=True)
class ReplicaFailed:
    """A replica, or the run as a whole, cannot go on."""

    type: str  # a class of daskdl.errors
    summary: str
    replica: int | None = None  # None: it is nobody's failure
    worker: str = ""
    traceback: str = ""
    pickled: bytes = b""  # the exception, if it can be


@dataclass(frozen=True)
class TaskFailed:
    """The task of a replica ended with an error that no replica has reported."""

    replica: int
    error: BaseException


@dataclass(frozen=True)
class ReplicaRemoved:
    """Dask has removed the worker of a replica."""

    replica: int


@dataclass(frozen=True)
class ReplicaLost:
    """A replica takes no part any more: it was lost, or retired with its worker."""

    replica: int
    summary: str


@dataclass(frozen=True)
class ReplicaJoined:
    """A replica that came later trains now."""

    replica: int
    worker: str


@dataclass(frozen=True)
class JoinFailed:
    """A replica that came later could not begin."""

    replica: int
    summary: str


@dataclass(frozen=True)
class WorkerArrived:
    """A worker has come, or is free again."""

    worker: str
    found: Mapping[str, str] | None = None  # versions; None: it has taken part before


@dataclass(frozen=True)
class PartMissing:
    """A part of the data is not on the worker that leased it."""

    phase: str
    part: int
    key: str
    worker: str
    avoid: Sequence[str] = ()  # workers that hang


@dataclass(frozen=True)
class NobodyLeft:
    """All replicas have ended; those that were about to join have nobody to join."""

    waiting: Sequence[int]


@dataclass(frozen=True)
class RunStopped:
    """The run was stopped before its end."""

    summary: str


@dataclass(frozen=True)
class RunEnded:
    """Every replica has ended, and no event is left."""


Event = (
    StepProgress
    | EpochEnded
    | ReplicaFailed
    | TaskFailed
    | ReplicaRemoved
    | ReplicaLost
    | ReplicaJoined
    | JoinFailed
    | WorkerArrived
    | PartMissing
    | NobodyLeft
    | RunStopped
    | RunEnded
)

_KINDS: Mapping[str, type[Event]] = {
    "progress": StepProgress,
    "failed": ReplicaFailed,
    "removed": ReplicaRemoved,
    "lost": ReplicaLost,
    "retired": ReplicaLost,
    "joined": ReplicaJoined,
    "not joined": JoinFailed,
    "worker": WorkerArrived,
    "missing": PartMissing,
    "over": NobodyLeft,
    "stopped": RunStopped,
}


def event_of(posted: Mapping[str, Any]) -> Event:
    """Make an event of what the run state has posted."""
    fields = {name: value for name, value in posted.items() if name != "kind"}
    if posted["kind"] == "report":
        return EpochEnded(fields["epoch"], fields)
    kind = _KINDS[posted["kind"]]
    known = kind.__dataclass_fields__.keys() & fields.keys()
    return kind(**{name: fields[name] for name in known})


class Backend(ABC):
    """A cluster, or this process, for the time of one run. One thread uses it.

    Attributes:
        workers: Where each replica is, or was, by its number.
    """

    workers: dict[int, str]

    @abstractmethod
    def open(self) -> None:
        """Open the run; `close` has to follow."""

    @abstractmethod
    def assign(self, objects: Packed[UserObjects]) -> None:
        """Start the initial replicas on their workers.

        Args:
            objects: The user's objects.
        """

    @abstractmethod
    def poll_events(self, timeout_s: float) -> Iterator[Event]:
        """Yield new events, reacting to those that concern workers; wait for one.

        Args:
            timeout_s: How long to wait if there is none.
        """

    @abstractmethod
    def stop(self, reason: str) -> None:
        """Tell every replica to leave."""

    @abstractmethod
    def collect(self) -> "FitResult | None":
        """Wait until the replicas have left, and merge what they leave; None: nothing.

        Raises:
            WaitTimeoutError: If it takes too long.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave nothing of the run."""

    def lost(self) -> Sequence[int]:
        """Replicas that nothing is expected of any more, ascending."""
        return ()

    def agreed(self) -> "AgreedState | None":
        """Return the newest state that all agreed on and that the client has."""
        return None


@dataclass
class FitResult:
    """What a run ends with.

    Attributes:
        parameters: All replicas agree on them; with the sum of all residuals.
        optimizer: Averaged state; None if the run did not come to its end.
        compression: State of the compression; None if no replica left any.
        schedule: State of the scheduler; empty without scheduler or optimizer.
        steps: Packed rows of steps that were not reported before.
        restored: Whether the parameters are those of the best epoch.
        met: Whether the parameters are of an epoch; else they are those of the start.
    """

    parameters: Parameters
    optimizer: OptimizerState | None
    compression: CompressionState | None
    schedule: bytes = b""
    steps: bytes = b""
    restored: bool = False
    met: bool = True


def merge(results: Sequence[Result]) -> Packed[FitResult]:
    """Merge what the replicas left behind.

    The parameters are those that all agreed on last, and that were validated. Replicas
    that came to the end add their residuals: whole steps of the grid, so that the sum
    does not depend on its order. Replicas that restore the best epoch are all alike:
    the first one counts. If no replica came to the end, the first agreed state counts.

    Args:
        results: In ascending order of replica, at least one.
    """
    ended = [result for result in results if result.finished]
    restored = [result for result in ended if result.restored][:1]
    used = restored or ended or _agreed(results)
    parts = [result.parameters.unpack() for result in used]
    states = [r.optimizer.unpack() for r in ended if r.optimizer is not None]
    final = FitResult(
        _sum(parts),
        add(states) if states else None,
        average_compression([result.outcome for result in results]),
        ended[0].schedule if ended else b"",  # there all have agreed
        b"".join(result.steps for result in results),
        bool(restored),
        used[0].met,
    )
    return Packed(final, "result")


def average_compression(
    outcomes: Iterable[CompressionState | None],
) -> CompressionState | None:
    """Average the compression states of replicas, for the next fit.

    Args:
        outcomes: One per replica; None if it did not start.

    Returns:
        The mean of each pattern over the replicas that have sent, and the largest
        number of steps; None if there is no state.
    """
    used = [outcome for outcome in outcomes if outcome is not None]
    if not used:
        return None
    patterns = dict.fromkeys(p for outcome in used for p in outcome.sent)
    means = {p: average_sent([o.sent.get(p) for o in used]) for p in patterns}
    sent = {p: mean for p, mean in means.items() if mean is not None}
    return CompressionState(sent, max(outcome.steps for outcome in used))


def _agreed(results: Sequence[Result]) -> Sequence[Result]:
    for result in results:
        parameters = result.parameters.unpack()
        if parameters:
            return [result]
    return results[:1]  # those that failed at their start have nothing


def _sum(parts: Sequence[Parameters]) -> Parameters:
    first = parts[0]
    if first.shared_N is None:
        return first
    total_N: NDArray[np.int64] = np.zeros(first.shared_N.shape, np.int64)
    for part in parts:
        if part.residual_N is not None:
            total_N += part.residual_N
    residual_N = np.clip(total_N, INT32.min, INT32.max).astype(np.int32)
    left = residual_N if residual_N.any() else None
    return replace(first, residual_N=left)


def most_replicas(source: Source, options: ReplicaSpec) -> int:
    """One replica for each step of an epoch; more would have nothing to do."""
    rows = rows_in(source)
    return sys.maxsize if rows is None else math.ceil(rows / options.step_rows)


def useful(wanted: int, most: int) -> int:
    """At most so many replicas; the log says if that is fewer than asked for."""
    if wanted > most:
        logger.info("%s batches only: %s of %s replicas", most, most, wanted)
    return min(wanted, most)


SHARED, REST = ".shared", ".rest"  # no tensor of a module has such a name
REST_TIMES = 4.0  # as long as the last one took: most of the network is for updates


class AgreedState(NamedTuple):
    """A state on which all replicas agreed."""

    epoch: int  # at the end of which, counted from 0
    arrays: Arrays

    @property
    def parameters(self) -> Parameters:
        """As the replicas had them."""
        pack: Packed[Parameters] = Packed.of(np.asarray(self.arrays[REST]), "model_")
        parameters = pack.unpack()
        if SHARED in self.arrays:
            return replace(parameters, shared_N=self.arrays[SHARED])
        exact = dict(parameters.exact or {})
        for name, like in exact.items():
            if name in self.arrays:
                flat = torch.from_numpy(self.arrays[name].copy())
                exact[name] = flat.view(like.dtype).reshape(like.shape)
        return replace(parameters, exact=exact)


def arrays_of(parameters: Parameters) -> Arrays:
    """What a replica offers the client to fetch; large arrays are not copied."""
    if parameters.shared_N is not None:
        rest = replace(parameters, shared_N=None)
        return {REST: Packed(rest, "model_").payload, SHARED: parameters.shared_N}
    exact = dict(parameters.exact or {})
    arrays = {}
    for name, tensor in exact.items():
        dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if dense and tensor.numel():
            arrays[name] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            exact[name] = torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
    rest = replace(parameters, exact=exact)
    return {**arrays, REST: Packed(rest, "model_").payload}


def sizes_of(
    options: ReplicaSpec,
    phase: str,
    source: Source,
    replicas: int,
    keys: Sequence[str] | None = None,
) -> PartitionSizes:
    """The sizes of the partitions and leases of a phase, which the log shows.

    Args:
        options: Of the run.
        phase: ``"train"`` or ``"validation"``.
        source: Its lengths are known, if it is not sequential.
        replicas: How many initial replicas there are.
        keys: Dask key of each part that a worker holds; None: no worker holds any.
    """
    step = options.lease_rows(phase)
    if source.lengths is None:
        return partition_sizes([-1] * source.parts, step, replicas, keys)
    sizes = partition_sizes(source.lengths, step, replicas, keys)
    lease = sizes.lease_rows
    small = sum(0 < rows < lease for rows in source.lengths)
    large = sum(rows > lease for rows in source.lengths)
    logger.info(
        "the %s data have %s parts of %s to %s rows and are leased in pieces of %s: %s "
        "smaller parts are put together, %s larger ones are split",
        phase,
        source.parts,
        min(source.lengths),
        max(source.lengths),
        lease,
        small,
        large,
    )
    return sizes


def run_spec_of(
    options: ReplicaSpec,
    workers: Mapping[int, str],
    sizes: Mapping[str, PartitionSizes],
    relay_bytes: int,
) -> RunSpec:
    """Describe a run to the run state.

    Args:
        options: Of the run.
        workers: Where each initial replica is.
        sizes: Of the partitions of each phase.
        relay_bytes: Bound of the relay's queue for each replica.

    Raises:
        OptionError: If the data do not allow the checkpoints to write, or differ from
            those of the checkpoint to resume.
    """
    checkpoints, resume = options.checkpoints, options.resume
    rule = None if checkpoints is None else checkpoints.rule
    steps = None if rule is None else rule.steps
    if steps is not None and min(sizes["train"].rows) < 0:
        raise OptionError(
            f"{rule} needs data of a known length, which this has not; write one every "
            "epoch, or every so many minutes"
        )
    point = None if resume is None else resume.sync_point
    where = "" if resume is None else resume.url
    intervals = SyncIntervals(
        replicas=len(workers),
        rows=None if steps is None else steps * options.step_rows,
        seconds=None if rule is None else rule.seconds,
        resumed=point,
    )
    plan = RunSpec(
        run=options.run,
        replicas=dict(workers),
        sizes=sizes,
        seed=options.shuffle_seed,
        epochs_before=options.epochs_before,
        synchronous=options.master.synchronous,
        relay_bytes=relay_bytes,
        min_replicas=options.master.min_replicas,
        timeouts=vars(options.timeouts),
        routing=options.routing,
        first_epoch=options.first_epoch,
        intervals=intervals,
    )
    if point is not None and point.order != plan.order:
        raise OptionError(
            f"{where} was written in the middle of an epoch, and the data, their "
            "parts, seed or shuffle are other ones now; resume with the same, or from "
            "a checkpoint of the end of an epoch"
        )
    return plan
