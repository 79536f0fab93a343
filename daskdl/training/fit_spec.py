"""What a fit is asked for, and what each of its replicas is sent.

A :class:`FitSpec` holds the options of one fit, checked before anything starts. A
:class:`ReplicaSpec` adds what the client finds when it prepares the fit.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from daskdl.callbacks import Callback, FailureInjection
from daskdl.channel.protocol import ChannelSpec
from daskdl.config import (
    Timeouts,
    check_choice,
    check_flag,
    check_whole,
    is_number,
    is_whole,
)
from daskdl.data.batching import Rows
from daskdl.data.checks import check_same_classes, of_validation
from daskdl.data.labels import LabelCheck
from daskdl.data.models import trainable
from daskdl.data.options import Approach, ReadOptions
from daskdl.data.pairs import pair
from daskdl.data.source import Source
from daskdl.data.sources import source_of
from daskdl.errors import OptionError
from daskdl.objective import Objective, OwnStep
from daskdl.saving.checkpoints import CheckpointPlan
from daskdl.training.base import CompressionState, KeptResidual, TrainingMaster
from daskdl.training.checkpointing import ResumePlan
from daskdl.training.data_feed import Reading
from daskdl.training.epoch_control import EvaluationPlan, Scheduling
from daskdl.training.optimizer_step import Stepping

SEED_BELOW = 2**63  # with a replica's number added it still fits torch's 64 bits


@dataclass(frozen=True)
class FitSpec:
    """All options of one fit; wrong ones are refused here.

    Attributes:
        objective: The loss, or the user's own step.
        optimizer: Makes an optimizer from parameters.
        master: The way of training.
        stepping: How an optimizer step is made.
        scheduling: How the learning rate changes.
        device: ``"auto"`` or a torch device.
        seed: Of the model's start, of shuffling and of torch's generators.
        callbacks: Run on workers or on the client.
        progress: Whether to show a bar; None: if standard error is a terminal.
        telemetry_every: Steps of a replica from one row of `history.steps` to the next;
            ``"auto"``, or None for no rows.
        max_loss_rise: How far above its first value the loss may stay; None: any.
        read: How the data are read.
        epochs: How many times to go through them.
        shuffle: Whether in a new order each time.
        drop_last: Whether batches of fewer rows are left out.
        prefetch: Parts with rows of so many batches are loaded ahead.
        approach: Whether batch files are written first.

    Raises:
        OptionError: Naming the option, what was given and what is allowed.
    """

    objective: Objective
    optimizer: Callable[[Any], Optimizer]
    master: TrainingMaster
    stepping: Stepping = field(default_factory=Stepping)
    scheduling: Scheduling = field(default_factory=Scheduling)
    device: str | torch.device = "auto"
    seed: int = 0
    callbacks: Sequence[Callback] = ()
    progress: bool | None = None
    telemetry_every: int | Literal["auto"] | None = "auto"
    max_loss_rise: float | None = 10.0
    read: ReadOptions = field(default_factory=lambda: ReadOptions(32))
    epochs: int = 1
    shuffle: bool = True
    drop_last: bool = False
    prefetch: int = 2
    approach: Approach = "direct"

    def __post_init__(self) -> None:
        if self.optimizer is None:
            raise OptionError(
                "optimizer must be a function that makes one from parameters, such as "
                "lambda params: torch.optim.SGD(params, lr=0.1), got None"
            )
        if not isinstance(self.master, TrainingMaster):
            raise OptionError(
                f"master must be a daskdl.TrainingMaster, got {self.master!r}"
            )
        _check_device(self.device)
        if not is_whole(self.seed) or not 0 <= self.seed < SEED_BELOW:
            raise OptionError(
                f"seed must be a whole number in [0, 2**63), got {self.seed!r}"
            )
        _check_callbacks(self.callbacks)
        if not isinstance(self.progress, bool | None):
            raise OptionError(
                f"progress must be True, False or None, got {self.progress!r}"
            )
        check_whole("telemetry_every", self.telemetry_every, 1, "auto", None)
        rise = self.max_loss_rise
        if rise is not None and not (is_number(rise) and 0 < rise < math.inf):
            raise OptionError(
                f"max_loss_rise must be a number > 0 or None, got {rise!r}"
            )
        check_whole("epochs", self.epochs, 1)
        for name in ("shuffle", "drop_last"):
            check_flag(name, getattr(self, name))
        check_whole("prefetch", self.prefetch, 0)
        check_choice("approach", self.approach, ("direct", "export"))

    def optimizer_for(self, model: nn.Module) -> Optimizer:
        """Make an optimizer over the trainable parameters of a model."""
        return self.optimizer(trainable(model))

    def sources(self, X: Any, y: Any, validation: Any) -> dict[str, Source]:
        """Recognise the user's data; no worker is touched.

        Args:
            X: Inputs, or inputs and labels together.
            y: Labels, or None.
            validation: Both, or None.

        Returns:
            By phase, ``"train"`` and, if there is any, ``"validation"``.

        Raises:
            DataError: If it is of no kind that can be trained on.
            OptionError: If a callback needs validation data, and there are none.
        """
        EvaluationPlan.of(self.callbacks, self.epochs, validates=validation is not None)
        labelled = not isinstance(self.objective, OwnStep)
        seed = self.seed if self.shuffle else None
        options = self.read.source(seed, labelled, self.stepping.accumulate)
        sources = {"train": source_of(X, y, options)}
        if validation is not None:
            with of_validation():
                own = self.read.source(None, labelled)
                sources["validation"] = source_of(*pair(validation), own)
                check_same_classes(sources["validation"], sources["train"].classes)
        return sources


def _check_callbacks(callbacks: Any) -> None:
    if not isinstance(callbacks, Sequence):
        raise OptionError(
            f"callbacks must be a list of daskdl.Callback, got {callbacks!r}"
        )
    wrong = [c for c in callbacks if not isinstance(c, Callback)]
    if wrong:
        raise OptionError(f"callbacks must be daskdl.Callback, got {wrong[0]!r}")


def _check_device(device: Any) -> None:
    # No bare number: what torch makes of it depends on the machine.
    if not isinstance(device, str | torch.device):
        raise OptionError(f"device must be 'auto' or a torch device, got {device!r}")
    try:
        if device != "auto":
            torch.device(device)
    except RuntimeError as error:
        raise OptionError(
            f"device must be 'auto' or a torch device, got {device!r}"
        ) from error


# Small files on a far store come sooner several at a time; a replica has one core.
MOST_LOAD_THREADS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaSpec(FitSpec):
    """What each replica of a run is sent, the same for all: a fit, prepared.

    `callbacks` are those that run on workers, and `read` has no loader.

    Attributes:
        run: Identity of the run.
        model: At its start, on the CPU.
        optimizer_state: A state dict to begin with, or None.
        schedule: State of the scheduler after earlier fits; empty: at its start.
        compression: State of thresholds that an earlier fit left, or None.
        residual: What the replicas of an earlier fit have not sent, or None.
        epochs_before: Epochs of earlier fits of the same trainer.
        rows: Two rows of X and y, to warm up with.
        evaluation: In which epochs the agreed model is scored, and when the fit ends
            early.
        labels: What labels of parts are held to; None: they are not looked at.
        left_out: Examples that were found to be bad before, and are in no part.
        size: Trainable parameters of the model.
        grid: Of the run at its start, parameter units.
        outbox_bytes: Bound of what waits to be sent.
        inbox_bytes: Bound of what waits to be applied.
        timeouts: Bounds on waiting.
        checkpoints: How they are written; None: they are not.
        resume: The checkpoint that the run resumes; None: it starts from `model`.
    """

    run: int
    model: nn.Module
    optimizer_state: dict[str, Any] | None = None
    schedule: bytes = b""
    compression: CompressionState | None = None
    residual: KeptResidual | None = None
    epochs_before: int = 0
    rows: Rows
    evaluation: EvaluationPlan
    labels: LabelCheck | None = None
    left_out: int = 0
    size: int
    grid: float
    outbox_bytes: int
    inbox_bytes: int
    timeouts: Timeouts
    checkpoints: CheckpointPlan | None = None
    resume: ResumePlan | None = None

    @property
    def first_epoch(self) -> int:
        """The first epoch to train, counted from 0."""
        return 0 if self.resume is None else self.resume.epoch

    @property
    def load_threads(self) -> int:
        """Parts that a replica loads at the same time."""
        return min(max(self.prefetch, 1), MOST_LOAD_THREADS)

    @property
    def step_rows(self) -> int:
        """Rows per optimizer step."""
        return self.read.batch_size * self.stepping.accumulate

    def reading(self, phase: str, epoch: int) -> Reading:
        """How the parts of a phase are read.

        Args:
            phase: ``"train"`` or ``"validation"``.
            epoch: Counted from 0.
        """
        trains = phase == "train"
        shuffled = trains and self.shuffle
        return Reading(
            phase,
            (self.seed, self.epochs_before + epoch) if shuffled else None,
            self.read.batch_size,
            self.prefetch,
            self.labels,
            self.read.skips,
            drop_last=self.drop_last and trains,
        )

    def spec(self, replica: int, routing: str = "plain") -> ChannelSpec:
        """What the channel of a replica needs.

        Args:
            replica: Its number.
            routing: ``"plain"`` or ``"mesh"``.
        """
        injected = [c for c in self.callbacks if isinstance(c, FailureInjection)]
        return ChannelSpec(
            self.run,
            replica,
            self.size,
            self.grid,
            self.outbox_bytes,
            self.inbox_bytes,
            self.timeouts,
            routing,
            self.master.fan_out,
            [failure for failure in injected if failure.kind == "drop"],
            self.master.synchronous,
        )
