"""What one fit sends to each of its replicas."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from daskdl.callbacks import Callback, FailureInjection
from daskdl.channel.protocol import Endpoint
from daskdl.checkpoints import CheckpointPlan, ResumePlan
from daskdl.config import Timeouts
from daskdl.data.batches import Transform
from daskdl.data.labels import LabelCheck
from daskdl.data.trees import Rows
from daskdl.objective import Objective
from daskdl.serialization import Packed
from daskdl.training.base import (
    CompressionState,
    KeptResidual,
    Parameters,
    TrainingMaster,
)
from daskdl.training.data_feed import Reading
from daskdl.training.epoch_control import Judging, Scheduling
from daskdl.training.optimizer_step import OptimizerState, Stepping

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
