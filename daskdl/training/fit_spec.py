"""The specifications of a fit and of its replicas, and the state between two fits.

A :class:`FitSpec` holds the options of one fit, checked before the fit starts. A
:class:`ReplicaSpec` adds the values that the client determines during preparation. A
:class:`FitState` is carried from fit to fit: optimizer, schedule, thresholds and
residuals; it decides which of them still apply when the user changes options.
"""

import inspect
import logging
import math
import random
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import nn
from torch.optim import Optimizer

from daskdl.callbacks import Callback, LayerMonitor
from daskdl.channel.protocol import ChannelSpec
from daskdl.config import (
    Timeouts,
    check_choice,
    check_flag,
    check_whole,
    instead_of_class,
    is_number,
    is_whole,
)
from daskdl.data.batching import Rows, Weighted, labels_of
from daskdl.data.checks import (
    LabelCheck,
    WeightedLoss,
    check_module,
    check_same_classes,
    of_validation,
    optimizer_of,
    preserved_random_state,
    trainable,
)
from daskdl.data.dask_collections import pair
from daskdl.data.inputs import (
    ReadOptions,
    prepared,
    scaling_of,
    split_rows,
    weighted_source,
)
from daskdl.data.named_columns import Columns
from daskdl.data.source import Source
from daskdl.data.tables import number_labels
from daskdl.errors import ModelError, OptionError, shown
from daskdl.keras.module import as_module
from daskdl.objective import Objective, OwnStep
from daskdl.process_settings import device_name
from daskdl.saving.checkpoints import CheckpointPlan
from daskdl.serialization import copied, created
from daskdl.training.base import TrainingMaster, checksum_of, evaluating_in
from daskdl.training.checkpointing import ResumePlan, parameters_of
from daskdl.training.epoch_control import (
    EvaluationPlan,
    LearningRate,
    Scheduling,
    hyperparameters,
)
from daskdl.training.optimizer_step import Stepping
from daskdl.training.state import UNSHARED, ReplicaState, State

logger = logging.getLogger(__name__)

Approach = Literal["direct", "export"]

# Options of torch's optimizers that change the step computation, not the state.
STATELESS = frozenset(
    {
        "capturable",
        "decoupled_weight_decay",
        "foreach",
        "fused",
        "maximize",
        "nesterov",
    }
)


class TrainedOptimizer(NamedTuple):
    """An optimizer after a fit, with its state and learning rate schedule.

    Attributes:
        optimizer: The optimizer, with state.
        rate: Its learning rate.
        scheduling: Options of the schedule.
        initial: Hyperparameters of each group as the trainer's function set them.
        parameters: Its parameters, from `parameters_of`.
    """

    optimizer: Optimizer
    rate: LearningRate
    scheduling: Scheduling
    initial: list[dict[str, Any]]
    parameters: dict[str, str]

    @classmethod
    def new(
        cls, optimizer: Optimizer, scheduling: Scheduling, model: nn.Module
    ) -> Self:
        """Wrap a new optimizer over a model's parameters."""
        initial = hyperparameters(optimizer)  # before a scheduler changes the rate
        rate = LearningRate(optimizer, scheduling)
        parameters = parameters_of(optimizer, model)
        return cls(optimizer, rate, scheduling, initial, parameters)

    def training_state(self, scheduling: Scheduling) -> State:
        """Return the state for the next fit; no schedule if it has other scheduling."""
        same = scheduling == self.scheduling
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.rate.carried() if same else None,
            "scaler": {},
        }

    def continued(
        self, optimizer: Optimizer, scheduling: Scheduling, model: nn.Module
    ) -> "TrainedOptimizer | None":
        """Carry the state over to the next fit; None if the state does not apply.

        The state is kept; hyperparameters that the user has changed take effect.
        """
        if type(optimizer) is not type(self.optimizer):
            _log_reset(f"optimizer is now of class {type(optimizer).__name__}")
            return None
        if parameters_of(optimizer, model) != self.parameters:
            _log_reset("optimizer has other parameters or groups than before")
            return None
        initial = hyperparameters(optimizer)
        changed = [
            {n: v for n, v in new.items() if n not in old or not _same(v, old[n])}
            for new, old in zip(initial, self.initial, strict=True)
        ]
        if not any(changed):
            return self
        if any(map(_needs_other_state, changed, self.initial)):
            _log_reset(f"optimizer needs other state for {changed}")
            return None
        logger.info("the optimizer continues with its state and %s", changed)
        state: dict[str, Any] = self.optimizer.state_dict()
        for group, new in zip(state["param_groups"], changed, strict=True):
            group.update(new)
        schedule = self.rate.carried() if scheduling == self.scheduling else None
        if any("lr" in group for group in changed):
            if schedule is not None:
                logger.warning("the learning rate is new: its schedule starts over")
            schedule = None
            for group, new in zip(state["param_groups"], initial, strict=True):
                group.pop("initial_lr", None)  # a new scheduler would start from it
                group["lr"] = new["lr"]
        if schedule is None:
            optimizer.load_state_dict(state)
            rate = LearningRate(optimizer, scheduling)
        else:
            rate = LearningRate(optimizer, scheduling)
            optimizer.load_state_dict(state)
            rate.restore_(schedule)
        return TrainedOptimizer(optimizer, rate, scheduling, initial, self.parameters)


@dataclass(frozen=True)
class FitState:
    """The state that a fit leaves to the next fit of its trainer, besides the model.

    Attributes:
        optimizer: Optimizer of the last fit, or None.
        carried: State of the exchanges, see `Exchange.carried`.
        checksum: Checksum of the parameters to which a residual in `carried` belongs.
        epochs: Number of epochs of all fits.
        class_count: Number of classes in the last fit; None without class labels.
        evaluating: Paths of the submodules that stayed in evaluation mode in the last
            fit; `model_` is all in evaluation mode.
        columns: Names of the columns of tables, in the order that the model was trained
            on; None before the first fit.
        scaled_by: Digests of the normalizers that the rows of the last fit went
            through; None before the first fit.
    """

    optimizer: TrainedOptimizer | None = None
    carried: State = field(default_factory=dict)
    checksum: int = 0
    epochs: int = 0
    class_count: int | None = None
    evaluating: Collection[str] = ()
    columns: Columns | None = None
    scaled_by: Sequence[str] | None = None

    def continued(
        self, model: nn.Module, optimizer: Optimizer, scheduling: Scheduling
    ) -> "FitState":
        """Drop state that does not apply to the next fit, with a log message."""
        trained = self.optimizer
        if trained is not None:
            trained = trained.continued(optimizer, scheduling, model)
        carried = self.carried_to(model)
        if carried.keys() != self.carried.keys():
            logger.warning(
                "the trainable parameters of model_ have changed since the last fit: "
                "unsent residuals are dropped"
            )
        evaluating = evaluating_in(model, self.evaluating)
        if evaluating:
            logger.info("submodules that stay in evaluation mode: %s", evaluating)
        return replace(self, optimizer=trained, carried=carried, evaluating=evaluating)

    def carried_to(self, model: nn.Module) -> State:
        """Return `carried`, with a residual only if it belongs to the model."""
        if "residual" not in self.carried or self.checksum == checksum_of(model):
            return self.carried
        return {name: self.carried[name] for name in ("steps_made", "sent")}

    def start(self, scheduling: Scheduling) -> ReplicaState | None:
        """Return the state that replicas start from; None: they have none."""
        trained = self.optimizer
        if trained is None and not self.carried:
            return None
        common = {"exchange": {"steps_made": 0, "sent": {}, **self.carried}}
        training_state = {} if trained is None else trained.training_state(scheduling)
        return ReplicaState({"kind": UNSHARED, "epoch": 0}, common, training_state)


def _same(new: Any, old: Any) -> bool:
    if isinstance(new, torch.Tensor) or isinstance(old, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(new), torch.as_tensor(old)))
    return bool(new == old)


def _needs_other_state(changed: dict[str, Any], old: dict[str, Any]) -> bool:
    """Whether the changed options may need another set of state tensors.

    Momentum that becomes nonzero needs a buffer; boolean options may need one, too.
    """
    return any(
        bool(new) != bool(old.get(name))
        for name, new in changed.items()
        if name == "momentum" or (type(new) is bool and name not in STATELESS)
    )


def _log_reset(reason: str) -> None:
    logger.warning("%s: its state and learning rate schedule start over", reason)


def starting_model(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """Copy or create the user's module; a Keras model becomes a torch module.

    Args:
        model: A module, which is not changed, or a function that returns one.
        seed: Seeds torch's and Python's generators while the function runs; their
            state is restored afterwards.
    """
    model = as_module(model)
    if isinstance(model, nn.Module) or not callable(model):
        check_module(model)
        return copied(model)
    function = model

    def seeded() -> Any:
        with preserved_random_state():
            torch.manual_seed(seed)
            random.seed(seed)  # the source of Keras' seeds for initializers
            return as_module(_called(function))

    return created(seeded)


def _called(function: Callable[[], Any]) -> Any:
    """Call the user's function; a class that needs arguments is a ModelError."""
    if isinstance(function, type):
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            name = function.__name__
            raise ModelError(
                f"model is the class {name}, which needs arguments: {error}; pass a "
                f"function, lambda: {name}(...)"
            ) from error
    return function()


MAX_NAME_LENGTH = 200  # of a fit, characters
SEED_BELOW = 2**63  # seed + replica number must fit torch's 64 bits


@dataclass(frozen=True)
class FitSpec:
    """All options of one fit, validated; see the arguments of `daskdl.Trainer`.

    Attributes:
        objective: The loss, or the user's own step.
        optimizer: Makes an optimizer, see `optimizer_of`.
        stepping: Options of an optimizer step.
        scheduling: Options of the learning rate schedule.
        metrics: Metrics of the validation data beside loss and accuracy, or None.
        read: Options for reading the data.
        name: Name of the fit; None: not chosen yet.
    """

    objective: Objective
    optimizer: Callable[..., Optimizer]
    master: TrainingMaster
    stepping: Stepping = field(default_factory=Stepping)
    scheduling: Scheduling = field(default_factory=Scheduling)
    device: str | torch.device = "auto"
    seed: int = 0
    callbacks: Sequence[Callback] = ()
    progress: bool | None = None
    telemetry_every: int | Literal["auto"] | None = "auto"
    max_loss_rise: float | None = 10.0
    metrics: Any = None
    read: ReadOptions = field(default_factory=lambda: ReadOptions(32))
    epochs: int = 1
    shuffle: bool = True
    drop_last: bool = False
    prefetch: int = 2
    approach: Approach = "direct"
    name: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.master, TrainingMaster):
            raise OptionError(
                f"master must be a daskdl.TrainingMaster, got {self.master!r}"
                f"{instead_of_class(self.master)}"
            )
        device_name(self.device)  # refuses others
        if not is_whole(self.seed) or not 0 <= self.seed < SEED_BELOW:
            raise OptionError(
                f"seed must be a whole number in [0, 2**63), got {self.seed!r}"
            )
        if not isinstance(self.callbacks, Sequence):
            raise OptionError(
                "callbacks must be a daskdl.Callback or a list of them, got "
                f"{self.callbacks!r}"
            )
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise OptionError(
                    f"callbacks must be daskdl.Callback, got {callback!r}"
                    f"{instead_of_class(callback)}"
                )
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
        for flag in ("shuffle", "drop_last"):
            check_flag(flag, getattr(self, flag))
        check_whole("prefetch", self.prefetch, 0)
        check_choice("approach", self.approach, ("direct", "export"))
        name = self.name
        if name is not None and not (
            isinstance(name, str)
            and name.isprintable()
            and 0 < len(name.strip()) <= len(name) <= MAX_NAME_LENGTH
        ):
            raise OptionError(
                f"name must be one line of 1 to {MAX_NAME_LENGTH} characters, got "
                f"{name!r:.300}"
            )

    def weighted(self) -> Self:
        """Return the same for data whose rows have weights, see `WeightedLoss`."""
        if self.approach == "export":
            raise OptionError(
                "sample_weight is for approach='direct', got approach='export'"
            )
        objective, read = WeightedLoss(self.objective), self.read.weighted()
        return replace(self, objective=objective, read=read)

    def optimizer_for(self, model: nn.Module) -> Optimizer:
        """Make the optimizer of a model."""
        return optimizer_of(self.optimizer, model)

    def described(self, model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
        """Describe the options for readers, by name, without credentials."""
        usual = {n: v for n, v in optimizer.defaults.items() if v not in (None, False)}
        size = sum(parameter.numel() for parameter in trainable(model))
        options = {f.name: getattr(self, f.name) for f in fields(FitSpec)}
        del options["name"]  # of the fit; the others may be those of many fits
        options |= vars(options.pop("stepping"))
        options["scheduler"] = options.pop("scheduling").make
        read = options.pop("read")
        return {
            "model": f"{display_name(model)}, {size:,} trainable parameters",
            "optimizer": f"{display_name(optimizer)}, "
            + ", ".join(f"{name}={value}" for name, value in usual.items()),
            "loss": display_name(options.pop("objective")),
            "batch_size": str(read.batch_size),
            "transform": display_name(read.transform),
            "on_bad_batch": read.on_bad_batch,
            # By class only: callbacks may contain URLs and credentials.
            "callbacks": display_name(options.pop("callbacks")) or "none",
            **{
                n: display_name(value)
                for n, value in options.items()
                if n != "optimizer"
            },
        }

    def sources(
        self, X: Any, y: Any, validation: Any, classes: Sequence[str] | None = None
    ) -> dict[str, Source]:
        """Make sources from the user's data, without any worker.

        Args:
            X: Inputs, or inputs and labels together.
            y: Labels, or None.
            validation: A pair (X, y), data that include labels, or None.
            classes: Names of the classes that the model was trained with, or None.

        Returns:
            Sources by phase: ``"train"`` and, with validation data, ``"validation"``.
        """
        EvaluationPlan.of(
            self.callbacks,
            self.epochs,
            validates=validation is not None,
            scheduling=self.scheduling,
        )
        read = self.read
        weighted = isinstance(self.objective, WeightedLoss)
        if weighted and isinstance(validation, tuple) and len(validation) == 3:
            validation = validation[0], Weighted(*validation[1:])
        if is_number(validation):
            X, y, read = prepared(X, y, read)
            classes = number_labels(labels_of(y), "y", classes)[1] or classes
            (X, y), validation = split_rows(X, y, validation, self.seed)
        labelled = not isinstance(self.objective, OwnStep)
        seed = self.seed if self.shuffle else None
        train = weighted_source(
            X,
            y,
            read,
            shuffle_seed=seed,
            labelled=labelled,
            accumulate=self.stepping.accumulate,
            classes=classes,
        )
        check_same_classes(train, classes)
        sources = {"train": train}
        if validation is not None:
            with of_validation():
                classes = train.classes
                x, y = pair(validation)
                columns = train.columns
                if columns is not None:
                    read = replace(read, columns={**(read.columns or {}), **columns})
                read = replace(read, scaled_by=scaling_of(train, read.transform))
                read = read if y is None else replace(read, label=None)
                source = weighted_source(x, y, read, labelled=labelled, classes=classes)
                check_same_classes(source, classes)
                sources["validation"] = source
        return sources


def display_name(value: Any) -> str:
    """Name functions and objects by their class; show plain values as they are."""
    if isinstance(value, str | int | float | TrainingMaster | torch.dtype | None):
        return shown(str(value), 500)
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(display_name, value))
    return str(getattr(value, "__qualname__", type(value).__name__))


# Concurrent loading of small remote files hides latency; a replica has one core.
MAX_LOAD_THREADS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplicaSpec(FitSpec):
    """The specification of a prepared fit, equal for all replicas of a run.

    `callbacks` holds only the callbacks that run on workers; `read` has neither loader
    nor collate function.

    Attributes:
        run: Id of the run, see `RunSpec`.
        model: The initial model, on the CPU.
        epochs_before: Epochs of earlier fits of the same trainer.
        evaluating: Paths of the submodules that stay in evaluation mode.
        columns: Names of the columns of the tables that the model is trained on.
        scaled_by: Digests of the normalizers that its rows go through.
        rows: Two rows of X and y for the warm-up.
        evaluation: Epochs in which the agreed model is scored, and the rule for early
            stopping.
        layers: Rule for the steps whose layers are sampled; None: no step.
        labels: Check for the labels of each part; None: labels are not checked.
        left_out: Number of unreadable examples excluded before the run.
        size: Number of trainable parameters of the model.
        grid: Initial grid of the run, parameter units.
        outbox_bytes: Bound of the queued outgoing updates.
        inbox_bytes: Bound of the pending updates.
        timeouts: Bounds on waiting.
        checkpoints: Plan for writing checkpoints; None: the run writes none.
        resume: The checkpoint that the run resumes; None: it starts from `model`.
        secret: Secret of the run, see `check_secret`.
        start: The state that belongs to `model`: of an earlier fit, or of this one, if
            an earlier run of it lost all its replicas. Its header has the first epoch
            to train. None: replicas start with `model` alone.
    """

    run: int
    model: nn.Module
    epochs_before: int = 0
    evaluating: Collection[str] = ()
    columns: Columns = field(default_factory=dict)
    scaled_by: Sequence[str] = ()
    rows: Rows
    evaluation: EvaluationPlan
    layers: LayerMonitor | None = None
    labels: LabelCheck | None = None
    left_out: int = 0
    size: int
    grid: float
    outbox_bytes: int
    inbox_bytes: int
    timeouts: Timeouts
    checkpoints: CheckpointPlan | None = None
    resume: ResumePlan | None = None
    secret: int = field(default_factory=lambda: secrets.randbits(63), repr=False)
    start: ReplicaState | None = None

    @property
    def first_epoch(self) -> int:
        """The first epoch to train, counted from 0."""
        if self.resume is not None:
            return self.resume.epoch
        return 0 if self.start is None else int(self.start.header["epoch"])

    @property
    def resumes_lost_run(self) -> bool:
        """Whether an earlier run of the fit has lost all its replicas."""
        return self.start is not None and self.start.header["epoch"] > 0

    @property
    def load_threads(self) -> int:
        """Number of parts that a replica loads concurrently."""
        return min(max(self.prefetch, 1), MAX_LOAD_THREADS)

    @property
    def step_rows(self) -> int:
        """Rows per optimizer step."""
        return self.read.batch_size * self.stepping.accumulate

    def channel_spec(self, replica: int, routing: str = "plain") -> ChannelSpec:
        """Return the specification of a replica's channel.

        Args:
            replica: Number of the replica.
            routing: Name of the routing.
        """
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
            self.master.synchronous,
            self.secret,
            secrets.randbits(63),
        )
