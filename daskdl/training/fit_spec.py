"""What a fit is asked for, checked before anything starts, and what it leaves.

A :class:`FitSpec` holds all arguments; a :class:`FitState` what the next fit of the
same trainer goes on from.
"""

import functools
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from daskdl.callbacks import Callback
from daskdl.config import check_whole, is_number, is_whole
from daskdl.data.accuracy import has_accuracy
from daskdl.data.checks import (
    check_rows,
    check_same_classes,
    check_step,
    of_validation,
    rows_like,
)
from daskdl.data.checks import check_whole as check_all_labels
from daskdl.data.labels import LabelCheck
from daskdl.data.models import check_module, trainable
from daskdl.data.options import Approach, ReadOptions, check_choice
from daskdl.data.pairs import pair
from daskdl.data.rehearsal import random_state_left_alone
from daskdl.data.source import Source, rows_in
from daskdl.data.sources import source_of
from daskdl.errors import DataError, OptionError
from daskdl.keras.module import as_module
from daskdl.objective import Objective, OwnStep
from daskdl.saving.plain import Plain
from daskdl.serialization import copied, made
from daskdl.training.base import (
    CompressionState,
    KeptResidual,
    TrainingMaster,
    described,
)
from daskdl.training.epoch_control import Judging, LearningRate, Scheduling
from daskdl.training.optimizer_step import OptimizerState, Stepping, restore_

logger = logging.getLogger(__name__)

SEED_BELOW = 2**63  # with a replica's number added it still fits torch's 64 bits


class Findings(NamedTuple):
    """What trying model and data on a few rows has shown."""

    labels: LabelCheck | None  # which labels of parts are accepted; None: any
    class_count: int | None  # of the labels that the loss gets, if they are classes
    judging: Judging


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
        if self.telemetry_every not in ("auto", None):
            check_whole("telemetry_every", self.telemetry_every, 1, "or 'auto' or None")
        rise = self.max_loss_rise
        if rise is not None and not (is_number(rise) and 0 < rise < math.inf):
            raise OptionError(
                f"max_loss_rise must be a number > 0 or None, got {rise!r}"
            )
        check_whole("epochs", self.epochs, 1)
        for name in ("shuffle", "drop_last"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise OptionError(f"{name} must be True or False, got {value!r}")
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
        self._judging(validation is not None)
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

    def check(self, model: nn.Module, sources: Mapping[str, Source]) -> Findings:
        """Try everything out on a few rows; no worker is touched.

        Args:
            model: Not changed.
            sources: By phase; some rows of each are known.

        Raises:
            DaskDLError: Naming what does not fit together.
        """
        objective, transform, train = (
            self.objective,
            self.read.transform,
            sources["train"],
        )
        accepted = check_step(
            model, objective, self.optimizer, *rows_like(train), transform
        )
        labels = None if transform else LabelCheck(accepted)
        if labels is not None:
            check_all_labels(train, labels)
        self.stepping.check_model(model)
        self.scheduling.check(self.optimizer, model)
        validation, accuracy = sources.get("validation"), False
        if validation is not None:
            with of_validation():
                rows = rows_like(validation)
                check_rows(model, objective, *rows, transform)
                if labels is not None:
                    check_all_labels(validation, labels)
            accuracy = has_accuracy(model, objective, *rows, transform)
        judging = self._judging(validation is not None, accuracy)
        return Findings(labels, None if accepted is None else accepted.classes, judging)

    def check_rows(self, train: Source) -> None:
        """Refuse data of which nothing would be trained on.

        Raises:
            DataError: If `drop_last` would leave out all of it.
        """
        rows, size = rows_in(train), self.read.batch_size
        if self.drop_last and rows is not None and rows < size:
            raise DataError(
                f"drop_last=True leaves nothing to train on: batch_size={size}, and "
                f"the data have {rows} rows; take a batch_size of at most {rows}"
            )

    def check_saveable(self, model: nn.Module) -> None:
        """Refuse an optimizer or a scheduler that a checkpoint cannot hold.

        Args:
            model: Not changed.

        Raises:
            OptionError: Naming the state that cannot be written without code.
        """
        optimizer, plain = self.optimizer_for(copied(model)), Plain()
        plain.encode(optimizer.state_dict(), "the state of the optimizer")
        rate = LearningRate(optimizer, self.scheduling)
        plain.encode(rate.values(), "the state of the scheduler")

    def _judging(self, validates: bool, accuracy: bool | None = None) -> Judging:
        return Judging.of(
            self.callbacks, self.epochs, validates=validates, accuracy=accuracy
        )


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


# Options of torch's optimizers that change how a step is made, and not the state.
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
    """An optimizer with the state that a fit gave it, and its learning rate schedule.

    Attributes:
        optimizer: With state.
        rate: Its learning rate.
        scheduling: How the rate changes.
        made: Hyperparameters of each group as the trainer's function set them; None:
            unknown.
        parameters: The parameters of each group, as `parameters_of` names them; None:
            unknown.
    """

    optimizer: Optimizer
    rate: LearningRate
    scheduling: Scheduling
    made: list[dict[str, Any]] | None = None
    parameters: list[list[str]] | None = None

    def schedule(self, scheduling: Scheduling) -> bytes:
        """The state of the scheduler; empty if the next fit has another one."""
        return self.rate.state() if scheduling == self.scheduling else b""

    def continued(
        self, optimizer: Optimizer, scheduling: Scheduling, model: nn.Module
    ) -> "TrainedOptimizer | None":
        """Carry the state over to the next fit; None: its optimizer begins anew.

        The state stays; hyperparameters that the user has changed take effect.

        Args:
            optimizer: Just made for the next fit, over the model's parameters.
            scheduling: Of the next fit.
            model: The next fit starts from it.
        """
        if type(optimizer) is not type(self.optimizer):
            _log_anew(f"optimizer makes a {type(optimizer).__name__} now")
            return None
        parameters = parameters_of(optimizer, model)
        if self.parameters is not None and parameters != self.parameters:
            _log_anew("optimizer has other parameters or groups now")
            return None
        made = hyperparameters(optimizer)
        former = made if self.made is None else self.made
        changed = [
            {n: v for n, v in new.items() if n not in old or not _same(v, old[n])}
            for new, old in zip(made, former, strict=True)
        ]
        if not any(changed):
            return self
        if any(map(_needs_other_state, changed, former)):
            _log_anew(f"optimizer needs another state for {changed}")
            return None
        logger.info("optimizer goes on with its state and %s", changed)
        state: dict[str, Any] = self.optimizer.state_dict()
        for group, new in zip(state["param_groups"], changed, strict=True):
            group.update(new)
        position = self.rate.position() if scheduling == self.scheduling else None
        if any("lr" in group for group in changed):
            if position is not None:
                logger.warning(
                    "the learning rate is a new one: its schedule begins anew"
                )
            position = None
            for group, new in zip(state["param_groups"], made, strict=True):
                group.pop("initial_lr", None)  # or a scheduler would start from it
                group["lr"] = new["lr"]
        if position is None:
            optimizer.load_state_dict(state)
            rate = LearningRate(optimizer, scheduling)
        else:
            rate = LearningRate(optimizer, scheduling)
            optimizer.load_state_dict(state)
            rate.go_on_(*position)
        return TrainedOptimizer(optimizer, rate, scheduling, made, self.parameters)


@dataclass(frozen=True)
class FitState:
    """What the fits of a trainer so far leave to the next one, beside the model.

    Attributes:
        optimizer: Of the last fit, or None.
        compression: State of thresholds after the last fit that had any.
        epochs: Of all fits.
        class_count: Of the labels of the last fit, if they are classes; else None.
        residual: What the replicas of the last fit have not sent; None: nothing.
    """

    optimizer: TrainedOptimizer | None = None
    compression: CompressionState | None = None
    epochs: int = 0
    class_count: int | None = None
    residual: KeptResidual | None = None

    def continued(
        self, model: nn.Module, optimizer: Optimizer, scheduling: Scheduling
    ) -> "FitState":
        """Drop, with a line in the log, what does not fit the next fit.

        Args:
            model: The next fit starts from it; not changed.
            optimizer: Just made for it.
            scheduling: Of its learning rate.
        """
        trained = self.optimizer
        if trained is not None:
            trained = trained.continued(optimizer, scheduling, model)
        residual = self.residual
        if residual is not None and not residual.fits(model):
            logger.warning(
                "model_ has other trainable parameters, or other values in them, than "
                "at the end of the fit before: what its replicas had not sent yet is "
                "dropped"
            )
            residual = None
        return replace(self, optimizer=trained, residual=residual)


def trained_optimizer(
    optimizer: Optimizer,
    scheduling: Scheduling,
    state: OptimizerState | None,
    schedule: bytes,
    former: TrainedOptimizer | None,
) -> TrainedOptimizer:
    """Give a new optimizer, and its scheduler, the state that a run ended with.

    Args:
        optimizer: Over the model's parameters; changed in place.
        scheduling: Of the run.
        state: Of the optimizer; None if the run ended early: then the state before it
            counts.
        schedule: State of the scheduler at the end of the run.
        former: Optimizer of the fit before, if there was one.
    """
    made = hyperparameters(optimizer)
    rate = LearningRate(optimizer, scheduling)
    if state is not None:
        restore_(optimizer, state)
        rate.load_(schedule)
    elif former is not None:
        before: dict[str, Any] = former.optimizer.state_dict()
        optimizer.load_state_dict(before)
        rate.load_(former.schedule(scheduling))
    return TrainedOptimizer(optimizer, rate, scheduling, made)


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return what each group has beside its parameters."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def parameters_of(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """Name, dtype and shape of the parameters of each group.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> parameters_of(torch.optim.SGD([layer.bias]), layer)
        [['bias float32 (1,)']]
    """
    named = {id(p): f"{n} {described(p)}" for n, p in model.named_parameters()}
    groups = [group["params"] for group in optimizer.param_groups]
    return [[named.get(id(p), described(p)) for p in group] for group in groups]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    return bool(one == other)


def _needs_other_state(changed: dict[str, Any], old: dict[str, Any]) -> bool:
    """Whether the state may lack something now, or have too much.

    A momentum that was zero needs a buffer, and so does an option that was off.
    """
    return any(
        bool(new) != bool(old.get(name))
        for name, new in changed.items()
        if name == "momentum" or (type(new) is bool and name not in STATELESS)
    )


def _log_anew(why: str) -> None:
    logger.warning("%s: its state, and the schedule of its rate, begin anew", why)


def starting_model(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """Copy the user's module, or make it; a Keras model becomes a module of torch.

    Args:
        model: Not changed.
        seed: For the generators of torch and Python, which are left as they were.

    Raises:
        ModelError: If it is no module, or cannot be copied.
    """
    model = as_module(model)
    if isinstance(model, nn.Module) or not callable(model):
        check_module(model)
        return copied(model)
    return made(functools.partial(_made_from, model, seed))


def _made_from(function: Callable[[], Any], seed: int) -> Any:
    with random_state_left_alone():
        torch.manual_seed(seed)
        random.seed(seed)  # from it Keras draws a seed for each of its initialisers
        return as_module(function())
