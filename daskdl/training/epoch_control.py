"""Decisions between epochs: learning rate, evaluation schedule, early stopping.

Replicas and the client decide independently but from the same reports, so they agree.
No I/O.
"""

import difflib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, get_args

import numpy as np
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from daskdl.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    Evaluate,
    check_monitored,
)
from daskdl.config import check_choice
from daskdl.data.checks import optimizer_of
from daskdl.data.unreadable import USER_ERRORS
from daskdl.errors import OptionError, count_of
from daskdl.observe.history import COLUMNS, NOT_AGREED, Reason
from daskdl.serialization import Packed, copied
from daskdl.training.base import Parameters
from daskdl.training.state import check_like
from daskdl.training.telemetry import (
    BestScore,
    Reports,
    columns_of,
)

if TYPE_CHECKING:  # torchmetrics loads SciPy and matplotlib
    from daskdl.evaluation.metric_state import MetricSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scheduling:
    """The options `scheduler`, `scheduler_every` and `scheduler_monitor` of a trainer.

    Example:
        >>> Scheduling(None, "batch")
        Traceback (most recent call last):
        daskdl.errors.OptionError: scheduler_every must be 'epoch' or 'step', got \
'batch'
    """

    make: Callable[[Optimizer], LRScheduler] | None = None
    every: Literal["epoch", "step"] = "epoch"
    monitor: str | None = None

    def __post_init__(self) -> None:
        if self.make is not None and not callable(self.make):
            raise OptionError(
                "scheduler must be a function that makes one from an optimizer, such "
                "as lambda optimizer: StepLR(optimizer, step_size=10), or None; got "
                f"{self.make!r}"
            )
        check_choice("scheduler_every", self.every, ("epoch", "step"))
        if self.make is None and self.every == "step":
            raise OptionError("scheduler_every='step' needs a scheduler, got None")
        if self.monitor is not None:
            check_monitored("scheduler_monitor", self.monitor, "min")
            if self.make is None:
                raise OptionError(
                    f"scheduler_monitor={self.monitor!r} needs a scheduler, got None"
                )

    def of(self, optimizer: Optimizer) -> LRScheduler | None:
        """Create the scheduler of an optimizer, or None if `make` is None."""
        if self.make is None:
            return None
        try:
            scheduler = self.make(optimizer)
        except USER_ERRORS as error:
            kind = type(optimizer).__name__
            name = getattr(self.make, "__name__", "")
            remedy = (
                f"; write lambda optimizer: {name}(optimizer, ...)"
                if isinstance(self.make, type)
                else ""
            )
            raise OptionError(
                f"scheduler failed on a {kind}: {error}{remedy}"
            ) from error
        if not isinstance(scheduler, LRScheduler):
            raise OptionError(
                "scheduler must return a torch.optim.lr_scheduler.LRScheduler, got "
                f"{scheduler!r}"
            )
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise OptionError(
                "scheduler must use the optimizer passed to it, got a scheduler of "
                "another optimizer, which would not change the learning rate"
            )
        if self.every == "step" and isinstance(scheduler, ReduceLROnPlateau):
            raise OptionError(
                "scheduler_every must be 'epoch' for ReduceLROnPlateau, which needs "
                "the loss of an epoch, got 'step'"
            )
        if self.monitor is not None and not isinstance(scheduler, ReduceLROnPlateau):
            raise OptionError(
                f"scheduler_monitor={self.monitor!r} is for ReduceLROnPlateau, which "
                f"needs a score, got a {type(scheduler).__name__}; leave it out"
            )
        # torch warns once per process if the scheduler steps before the optimizer, as
        # in a replica that had no data in an epoch. Private in torch 2.7 to 2.13.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return scheduler

    def check(self, optimizer: Callable[..., Optimizer], model: nn.Module) -> None:
        """Dry run: create a scheduler for a copy of a model, and pickle its state."""
        if self.make is not None:
            copy = copied(model)
            LearningRate(optimizer_of(optimizer, copy), self).state()


class LearningRate:
    """The learning rate of one optimizer, with or without a scheduler.

    Attributes:
        scheduler: The scheduler, or None.
        per_step: Whether `step_` must follow each optimizer step.
    """

    scheduler: LRScheduler | None
    per_step: bool

    def __init__(
        self,
        optimizer: Optimizer,
        scheduling: Scheduling,
        epochs: int = 1,
    ) -> None:
        self._optimizer = optimizer
        self._monitor = scheduling.monitor
        self.per_step = scheduling.every == "step"
        self.scheduler = scheduling.of(optimizer)
        self._count = self._count_before = 0  # steps over all fits
        self._held = 0  # steps after the last step of OneCycleLR
        self._epochs = epochs

    def state(self) -> bytes:
        """Return the packed state, for replicas and fits; empty without a scheduler."""
        if self.scheduler is None:
            return b""
        # Some schedulers derive the next rate from the last; some change momentum too.
        groups = hyperparameters(self._optimizer)
        return Packed((self.values(), groups), "scheduler").payload.tobytes()

    def load_(self, state: bytes) -> None:
        """Continue from a packed state; do nothing if it is empty."""
        if self.scheduler is None or not state:
            return
        packed: Packed[Any] = Packed.of(np.frombuffer(state, np.uint8), "scheduler")
        values, groups = packed.unpack()
        self.restore_(values)
        for group, saved in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(saved)

    def carried(self) -> dict[str, Any] | None:
        """Return `values` for the next fit; the steps so far belong to earlier fits."""
        values = self.values()
        return values and {**values, "before": self._count}

    def values(self) -> dict[str, Any] | None:
        """Return the state within a fit as plain values; None without a scheduler."""
        if self.scheduler is None:
            return None
        return {
            "count": self._count,
            "before": self._count_before,
            "state": self.scheduler.state_dict(),
        }

    def restore_(self, values: Mapping[str, Any] | None) -> None:
        """Restore the result of `values`; the optimizer has been restored before."""
        if self.scheduler is not None and values is not None:
            check_like(self.values(), values, "it", loose=True)
            self._count, self._count_before = values["count"], values["before"]
            self.scheduler.load_state_dict(values["state"])

    @property
    def value(self) -> float:
        """Learning rate of the first parameter group; NaN if it has none."""
        return float(self._optimizer.param_groups[0].get("lr", math.nan))

    def report(self) -> dict[str, Any]:
        """Return fields of an :class:`~daskdl.training.telemetry.EpochReport`."""
        return {
            "scheduled": self._count,
            "learning_rate": self.value,
            "schedule": self.state(),
        }

    def end_epoch(self, reports: Reports, *, scored: bool = True) -> None:
        """Continue from the replica with the most scheduler steps, and step if due."""
        if self.scheduler is None:
            return
        farthest = max(reports, key=lambda report: report.scheduled)
        if farthest.scheduled > self._count:
            self.load_(farthest.schedule)
        if self.per_step:
            return
        columns = columns_of(reports)
        name = self._monitor or ("val_loss" if "val_loss" in columns else "loss")
        needed = self._monitor is None or name.startswith("val_")
        if scored or not self._is_plateau or not needed:
            self.step_(columns.get(name, math.nan))

    def catch_up_(self, epoch: int) -> None:
        """Step up to the epoch in which a joining replica starts.

        ReduceLROnPlateau is not stepped, because the losses in between are unknown
        here. At the end of the epoch it continues from the other replicas.
        """
        if self.scheduler is None or self.per_step:
            return
        while not self._is_plateau and self._count < self._count_before + epoch:
            self.step_()

    @property
    def _is_plateau(self) -> bool:
        return isinstance(self.scheduler, ReduceLROnPlateau)

    def step_(self, loss: float = math.nan) -> None:
        """Step the scheduler; ReduceLROnPlateau needs the loss of an epoch."""
        self._count += 1
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)
        elif isinstance(self.scheduler, OneCycleLR):
            self._step_of_cycle(self.scheduler)
        elif self.scheduler is not None:
            self.scheduler.step()

    def _step_of_cycle(self, scheduler: OneCycleLR) -> None:
        total = scheduler.total_steps
        if self.per_step and scheduler.last_epoch + 1 >= total:
            # The cycle has as many rates as steps; torch would extrapolate, then fail.
            self._held += 1
            if self._held == 2:  # a replica may be faster than expected
                logger.warning(
                    "OneCycleLR has reached its end, total_steps=%s, before the fit "
                    "has: the learning rate stays at %.3g; Trainer.steps returns how "
                    "many steps a replica makes, and a fast one makes more",
                    total,
                    self.value,
                )
            return
        try:
            scheduler.step()
        except ValueError as error:
            needed = self._count_before + self._epochs
            raise OptionError(
                f"OneCycleLR has reached its end, total_steps={total}, before the fit "
                f"has; give it total_steps={needed} or more, one for each epoch"
            ) from error


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group, without its parameters."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


class StoppingDecision(NamedTuple):
    """The early-stopping decision at the end of an epoch."""

    best: BestScore = BestScore()
    score: float | None = None  # score of the epoch; None: not checked
    reason: Reason | None = None  # why the fit ends here; None: it continues
    details: str = ""

    def values(self) -> list[Any]:
        """Return the decision as plain values."""
        return [list(self.best), self.score, self.reason, self.details]

    @classmethod
    def of(cls, fields: Sequence[Any]) -> Self:
        """Create from the result of `values`."""
        match fields:
            case [[*best], float() | int() | None as score, reason, str(details)]:
                numbers = all(type(number) in (int, float) for number in best)
                named = reason is None or reason in get_args(Reason)
                if numbers and named and len(best) == len(BestScore()):
                    return cls(BestScore(*best), score, reason, details)
        raise ValueError(f"{fields!r:.80} is no early-stopping decision")


@dataclass(frozen=True)
class EvaluationPlan:
    """Decides in which epochs the agreed model is scored, and when a fit ends early.

    Attributes:
        epochs: Most epochs of the fit.
        validates: Whether there are validation data.
        accuracy: Whether accuracy on them is also computed.
        logs: Names of what a step logs.
        specs: Metrics that are also measured, or None.
        measured: Names of their numbers.
        evaluate: Rule for the epochs with a score; None: see `scored`.
        stopping: Rule for ending the fit early; None: never.
    """

    epochs: int
    validates: bool = False
    accuracy: bool = False
    logs: Sequence[str] = ()
    specs: "Packed[tuple[MetricSpec, ...]] | None" = None
    measured: Sequence[str] = ()
    evaluate: Evaluate | None = None
    stopping: EarlyStopping | None = None

    @classmethod
    def of(
        cls,
        callbacks: Sequence[Callback],
        epochs: int,
        *,
        validates: bool,
        scheduling: Scheduling = Scheduling(),
        accuracy: bool | None = None,
        logs: Sequence[str] | None = None,
        specs: "Packed[tuple[MetricSpec, ...]] | None" = None,
        measured: Sequence[str] = (),
    ) -> Self:
        """Create the plan from the callbacks of a trainer.

        Args:
            callbacks: Of the trainer.
            epochs: Most epochs of the fit.
            validates: Whether there are validation data.
            scheduling: Of the trainer; its `monitor` is checked.
            accuracy: Whether there is an accuracy; None: unknown before the dry run.
            logs: Names of what a step logs; None: unknown before the dry run.
            specs: Metrics of the validation data.
            measured: Names of their numbers.
        """
        evaluate = only(Evaluate, callbacks)
        stopping = only(EarlyStopping, callbacks)
        if evaluate is not None and not validates:
            raise OptionError(
                f"{evaluate} needs validation data, got none; give fit(validation=...)"
            )
        checkpoint = only(Checkpoint, callbacks)
        plan = cls(
            epochs,
            validates,
            bool(accuracy),
            logs or (),
            specs,
            measured,
            evaluate,
            stopping,
        )
        for option, name in {
            "monitor": None if stopping is None else stopping.monitor,
            "keep_best": None if checkpoint is None else checkpoint.keep_best,
            "scheduler_monitor": scheduling.monitor,
        }.items():
            if name is not None:
                plan._check_monitor(option, name, accuracy, known=logs is not None)
        return plan

    def _check_monitor(
        self, option: str, name: str, accuracy: bool | None, *, known: bool
    ) -> None:
        if name.startswith("val_") and not self.validates:
            raise OptionError(
                f"{option}={name!r} needs validation data, got none; give "
                f"fit(validation=...), or {option}='loss'"
            )
        if name == "val_accuracy" and accuracy is False:
            raise OptionError(
                f"{option}='val_accuracy' needs labels that are class indices and one "
                "output for each class, or labels 0 and 1 and a loss such as "
                "BCEWithLogitsLoss, which model, loss and validation data do not have; "
                f"take {option}='val_loss'"
            )
        columns = ["loss", *self.logs, *self.columns]
        if name in NOT_AGREED or (known and name not in (*COLUMNS, *columns)):
            remedy = "replicas do not agree on this column"
            if name not in NOT_AGREED:
                logged = name.removeprefix("val_")
                remedy = f"to log it, a step returns loss, {{{logged!r}: ...}}"
                full_names = {column.removeprefix("val_"): column for column in columns}
                for close in difflib.get_close_matches(logged, full_names, 1, 0.5):
                    remedy = f"did you mean {full_names[close]!r}? Or {remedy}"
            raise OptionError(
                f"{option} must be one of {', '.join(map(repr, columns))} or another "
                f"column of the history, got {name!r}; {remedy}"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the score columns in a row of the history."""
        if not self.validates:
            return ()
        accuracy = ["accuracy"] if self.accuracy else []
        names = [*accuracy, *self.logs, *self.measured]
        return ("val_loss", *dict.fromkeys(f"val_{name}" for name in names))

    def scored(self, epoch: int) -> bool:
        """Whether the agreed model is scored at the end of an epoch.

        No epoch is scored without validation data; with them, always the last epoch,
        and every epoch if no rule selects epochs.
        """
        if not self.validates or self._is_last(epoch):
            return self.validates
        rules: list[Evaluate | EarlyStopping] = []
        if self.evaluate is not None:
            rules.append(self.evaluate)
        if self.stopping is not None and self.stopping.needs_validation:
            rules.append(self.stopping)
        return not rules or any(rule.due(epoch) for rule in rules)

    def scores(self, rows: Iterable[Mapping[str, Any]]) -> dict[int, float]:
        """Return the scores that early stopping has checked, by epoch."""
        rule = self.stopping
        if rule is None:
            return {}
        looked = (r for r in rows if rule.due(r["epoch"]) or self._is_last(r["epoch"]))
        # An earlier run of the fit may have had no validation data.
        scored = (row for row in looked if rule.monitor in row)
        return {row["epoch"]: row[rule.monitor] for row in scored}

    def _is_last(self, epoch: int) -> bool:
        return epoch + 1 == self.epochs

    def decide(self, epoch: int, reports: Reports) -> StoppingDecision:
        """Decide at the end of an epoch whether the fit continues.

        Replicas and the client reach the same decision from the same reports.
        """
        rule = self.stopping
        stops = (report.totals.stop for report in reports)
        stop = next(filter(None, stops), "")
        if rule is None:
            return StoppingDecision(reason="stopped" if stop else None, details=stop)
        best, score = reports[0].best, None  # equal in all reports
        if rule.due(epoch) or self._is_last(epoch):
            score = float(columns_of(reports).get(rule.monitor, math.nan))
            best = _updated(rule, best, epoch, score)
        decision = StoppingDecision(best, score)
        if stop:
            return decision._replace(reason="stopped", details=stop)
        elapsed_s = max(report.elapsed_s for report in reports)
        return self.conclude(epoch, decision, elapsed_s)

    def conclude(
        self, epoch: int, decision: StoppingDecision, elapsed_s: float
    ) -> StoppingDecision:
        """Apply the rule to a score; a resumed fit may have another rule."""
        rule, decision = self.stopping, StoppingDecision(*decision[:2])
        if rule is None or self._is_last(epoch):
            return decision
        for reason, details in _reasons(rule, epoch, decision, elapsed_s).items():
            if details:
                return decision._replace(reason=reason, details=details)
        return decision


def _updated(
    rule: EarlyStopping, record: BestScore, epoch: int, score: float
) -> BestScore:
    if not math.isfinite(score):
        return record
    if rule.is_better(score, record.best_score):
        record = record._replace(best_epoch=epoch, best_score=score)
    if rule.improves(score, record.counted_score):
        record = record._replace(counted_epoch=epoch, counted_score=score)
    return record


def _reasons(
    rule: EarlyStopping, epoch: int, decision: StoppingDecision, elapsed_s: float
) -> dict[Reason, str]:
    """Return all reasons to end the fit, most important first, with details."""
    reasons: dict[Reason, str] = {}
    name, score, best = rule.monitor, decision.score, decision.best
    if score is not None:
        finite = math.isfinite(score)
        if rule.check_finite and not finite:
            reasons["not_finite"] = f"{name} became {score}"
        if finite and rule.is_enough(score):
            reasons["target"] = f"{name} is {score:.6g}, the target {rule.target:.6g}"
        since = epoch - best.counted_epoch
        if rule.patience is not None and since >= rule.patience:
            reasons["patience"] = _no_better(name, since, score, best)
    if rule.max_seconds is not None and elapsed_s >= rule.max_seconds:
        reasons["max_seconds"] = (
            f"{elapsed_s:.1f} s have passed, max_seconds is {rule.max_seconds:g}"
        )
    return reasons


def _no_better(name: str, epochs: int, score: float, best: BestScore) -> str:
    duration = count_of(epochs, "epoch")
    if best.best_epoch < 0:
        return f"{name} has not been finite for {duration}: it is {score}"
    return (
        f"{name} has not improved for {duration}: it is {score:.6g}, the best was "
        f"{best.best_score:.6g} in epoch {best.best_epoch}"
    )


def only(kind: type[Any], callbacks: Sequence[Callback]) -> Any:
    """Return the callback of a kind, or None."""
    matching = [callback for callback in callbacks if isinstance(callback, kind)]
    if len(matching) > 1:
        raise OptionError(
            f"callbacks must have at most one {kind.__name__}, got {matching}"
        )
    return matching[0] if matching else None


class EarlyStopper:
    """Early stopping in one replica, created when the replica has joined.

    Attributes:
        decision: Decision at the end of the last epoch.
    """

    decision: StoppingDecision

    def __init__(
        self,
        plan: EvaluationPlan,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.decision = StoppingDecision()
        self._plan = plan
        self._best: Parameters | None = None
        self._best_epoch = -1
        self._now = now
        self._began_at = now()
        rule = plan.stopping
        self._monitor = None if rule is None else rule.monitor
        self._keeps_best = rule is not None and rule.restore_best

    @property
    def over(self) -> bool:
        """Whether the fit ends before its last epoch."""
        return self.decision.reason is not None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the fit began, including those before it was resumed."""
        return self._now() - self._began_at

    def values(self) -> dict[str, Any]:
        """Return plain values and tensors, for joining replicas and resuming."""
        return {
            "decision": self.decision.values(),
            "monitor": self._monitor,
            "elapsed_s": self.elapsed_s,
            "best_epoch": self._best_epoch,
            "best": None if self._best is None else self._best.values(),
        }

    def restore_(self, values: Mapping[str, Any], epoch: int | None) -> None:
        """Continue from `values`; use only the elapsed time if the monitor differs.

        Args:
            values: Result of `values`.
            epoch: The next epoch, if another rule may be in force now; None: the
                decision stays.
        """
        self._began_at = self._now() - values["elapsed_s"]
        if values["monitor"] != self._monitor:
            return
        self.decision = StoppingDecision.of(values["decision"])
        if self.over and epoch is not None:  # a rule with more patience may continue
            self.decision = self._plan.conclude(
                epoch - 1, self.decision, values["elapsed_s"]
            )
        if values["best"] is not None:
            self._best_epoch = values["best_epoch"]
            self._best = Parameters.from_values(values["best"])

    def report(self) -> dict[str, Any]:
        """Return fields of an :class:`~daskdl.training.telemetry.EpochReport`."""
        return {"best": self.decision.best, "elapsed_s": self.elapsed_s}

    def end_epoch(
        self, epoch: int, reports: Reports, agreed: Parameters | None
    ) -> None:
        """Decide whether the fit continues, and keep the model if it is the best."""
        self.decision = self._plan.decide(epoch, reports)
        if self._keeps_best and agreed and self.decision.best.best_epoch == epoch:
            self._best_epoch, self._best = epoch, agreed

    def best(self) -> Parameters | None:
        """Return the agreed model of the best epoch, or None.

        None if the model is not to be restored, or this replica joined after the best
        epoch and does not have it.
        """
        known = self._best_epoch == self.decision.best.best_epoch
        return self._best if known else None
