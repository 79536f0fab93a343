"""What is decided at the end of each epoch, from what the replicas told each other.

Whoever asks with the same notes gets the same answer: each replica, and the client. No
clock, no channel, and no state but what is in the notes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, get_args

from daskdl.callbacks.base import Callback
from daskdl.callbacks.checkpoint import Checkpoint
from daskdl.callbacks.early_stopping import EarlyStopping
from daskdl.callbacks.evaluate import Evaluate
from daskdl.errors import OptionError
from daskdl.stopping import Reason
from daskdl.training.rows import training_loss, validation

Note = Mapping[str, Any]


class Record(NamedTuple):
    """How far early stopping has come; plain numbers, which travel in every note."""

    best_epoch: int = -1  # none yet
    best_score: float = math.nan
    counted_epoch: int = -1  # the last that improved by what counts
    counted_score: float = math.nan


class Verdict(NamedTuple):
    """What early stopping makes of an epoch."""

    record: Record = Record()
    score: float | None = None  # None: it was not looked at
    reason: Reason | None = None  # why the fit ends here; None: it goes on
    details: str = ""

    def values(self) -> list[Any]:
        """The same as plain values."""
        return [list(self.record), self.score, self.reason, self.details]

    @classmethod
    def of(cls, fields: Sequence[Any]) -> Self:
        """Read what `values` made.

        Raises:
            ValueError: If it did not make them.
        """
        match fields:
            case [[*record], float() | int() | None as score, reason, str(details)]:
                numbers = all(type(number) in (int, float) for number in record)
                named = reason is None or reason in get_args(Reason)
                if numbers and named and len(record) == len(Record()):
                    return cls(Record(*record), score, reason, details)
        raise ValueError(f"{fields!r:.80} is no verdict")


@dataclass(frozen=True)
class Judging:
    """In which epochs the agreed model is scored, and when a fit ends early.

    Attributes:
        epochs: Of the fit, at most.
        validates: Whether there are validation data.
        accuracy: Whether they are scored by accuracy too.
        evaluate: In which epochs; None: in all of them.
        stopping: When the fit ends early; None: never.
    """

    epochs: int
    validates: bool = False
    accuracy: bool = False
    evaluate: Evaluate | None = None
    stopping: EarlyStopping | None = None

    @classmethod
    def of(
        cls,
        callbacks: Sequence[Callback],
        epochs: int,
        *,
        validates: bool,
        accuracy: bool | None = None,
    ) -> Self:
        """What the callbacks of a trainer say of it.

        Args:
            callbacks: All of them.
            epochs: Of the fit, at most.
            validates: Whether there are validation data.
            accuracy: Whether they are scored by accuracy too; None: not known yet.

        Raises:
            OptionError: If two of a kind are there, or scores are asked for that there
                will not be.
        """
        evaluate = only(Evaluate, callbacks)
        stopping = only(EarlyStopping, callbacks)
        if evaluate is not None and not validates:
            raise OptionError(
                f"{evaluate} needs validation data, got none; give fit(validation=...)"
            )
        if stopping is not None and stopping.needs_validation:
            _check_monitor("monitor", stopping.monitor, validates, accuracy)
        checkpoint = only(Checkpoint, callbacks)
        if checkpoint is not None and checkpoint.keep_best not in (None, "loss"):
            _check_monitor("keep_best", checkpoint.keep_best, validates, accuracy)
        return cls(epochs, validates, bool(accuracy), evaluate, stopping)

    @property
    def columns(self) -> tuple[str, ...]:
        """Of the scores, in a row of the history."""
        if not self.validates:
            return ()
        return ("val_loss", "val_accuracy") if self.accuracy else ("val_loss",)

    def scored(self, epoch: int) -> bool:
        """Whether the agreed model is scored at the end of an epoch."""
        if not self.validates or self._is_last(epoch):
            return self.validates
        rules: list[Evaluate | EarlyStopping] = []
        if self.evaluate is not None:
            rules.append(self.evaluate)
        if self.stopping is not None and self.stopping.needs_validation:
            rules.append(self.stopping)
        return not rules or any(rule.due(epoch) for rule in rules)

    def scores(self, rows: Iterable[Note]) -> dict[int, float]:
        """The scores that early stopping has looked at, by epoch.

        Args:
            rows: Of the history.
        """
        rule = self.stopping
        if rule is None:
            return {}
        looked = (r for r in rows if rule.due(r["epoch"]) or self._is_last(r["epoch"]))
        # An earlier run of the fit may have had no validation data.
        scored = (row for row in looked if rule.monitor in row)
        return {row["epoch"]: row[rule.monitor] for row in scored}

    def _is_last(self, epoch: int) -> bool:
        return epoch + 1 == self.epochs

    def judge(self, epoch: int, notes: Sequence[Note]) -> Verdict:
        """What follows from an epoch.

        Args:
            epoch: Counted from 0.
            notes: What all replicas reported at its end, in an order that is the same
                for all.
        """
        rule = self.stopping
        if rule is None:
            return Verdict()
        record = Record(*notes[0]["record"])  # they have all seen the same
        score = None
        if rule.due(epoch) or self._is_last(epoch):
            score = {"loss": training_loss(notes), **validation(notes)}[rule.monitor]
            record = _updated(rule, record, epoch, score)
        verdict = Verdict(record, score)
        return self._concluded(epoch, verdict, max(n["elapsed_s"] for n in notes))

    def reconsidered(self, epoch: int, verdict: Verdict, elapsed_s: float) -> Verdict:
        """What the rule makes of an epoch of which another one may have judged.

        Args:
            epoch: Counted from 0.
            verdict: At its end; of one with the same monitor.
            elapsed_s: Seconds since the fit began.
        """
        former = verdict._replace(reason=None, details="")
        return self._concluded(epoch, former, elapsed_s)

    def _concluded(self, epoch: int, verdict: Verdict, elapsed_s: float) -> Verdict:
        rule = self.stopping
        if rule is None or self._is_last(epoch):
            return verdict
        for reason, details in _reasons(rule, epoch, verdict, elapsed_s).items():
            if details:
                return verdict._replace(reason=reason, details=details)
        return verdict


def _updated(rule: EarlyStopping, record: Record, epoch: int, score: float) -> Record:
    if not math.isfinite(score):
        return record
    if rule.is_better(score, record.best_score):
        record = record._replace(best_epoch=epoch, best_score=score)
    if rule.improves(score, record.counted_score):
        record = record._replace(counted_epoch=epoch, counted_score=score)
    return record


def _reasons(
    rule: EarlyStopping, epoch: int, verdict: Verdict, elapsed_s: float
) -> dict[Reason, str]:
    """All that could end a fit, the most telling first; empty where it does not."""
    reasons: dict[Reason, str] = {}
    name, score, record = rule.monitor, verdict.score, verdict.record
    if score is not None:
        finite = math.isfinite(score)
        if rule.check_finite and not finite:
            reasons["not_finite"] = f"{name} became {score}"
        if finite and rule.is_enough(score):
            reasons["target"] = f"{name} is {score:.6g}, the target {rule.target:.6g}"
        since = epoch - record.counted_epoch
        if rule.patience is not None and since >= rule.patience:
            reasons["patience"] = _no_better(name, since, score, record)
    if rule.max_seconds is not None and elapsed_s >= rule.max_seconds:
        reasons["max_seconds"] = (
            f"{elapsed_s:.1f} s have passed, max_seconds is {rule.max_seconds:g}"
        )
    return reasons


def _no_better(name: str, epochs: int, score: float, record: Record) -> str:
    if record.best_epoch < 0:
        return f"{name} has not been finite for {_epochs(epochs)}: it is {score}"
    return (
        f"{name} has not improved for {_epochs(epochs)}: it is {score:.6g}, the best "
        f"was {record.best_score:.6g} in epoch {record.best_epoch}"
    )


def _epochs(count: int) -> str:
    return "1 epoch" if count == 1 else f"{count} epochs"


def only(kind: type[Any], callbacks: Sequence[Callback]) -> Any:
    """The callback of a kind, or None.

    Raises:
        OptionError: If there are several.
    """
    found = [callback for callback in callbacks if isinstance(callback, kind)]
    if len(found) > 1:
        raise OptionError(
            f"callbacks must have at most one {kind.__name__}, got {found}"
        )
    return found[0] if found else None


def _check_monitor(
    option: str, monitor: str, validates: bool, accuracy: bool | None
) -> None:
    if not validates:
        raise OptionError(
            f"{option}={monitor!r} needs validation data, got none; give "
            f"fit(validation=...), or {option}='loss'"
        )
    if monitor == "val_accuracy" and accuracy is False:
        raise OptionError(
            f"{option}='val_accuracy' needs labels that are class indices and one "
            "output for each class, which model, loss and validation data do not "
            f"have; take {option}='val_loss'"
        )
