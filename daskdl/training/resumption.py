"""What a fit goes on from, and how it writes checkpoints itself; on the client."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from daskdl.callbacks.base import Callback
from daskdl.callbacks.checkpoint import Checkpoint
from daskdl.channel.leasing import Pause
from daskdl.checkpoints.parts import COMMON
from daskdl.checkpoints.plan import CheckpointPlan, ResumePlan
from daskdl.checkpoints.series import Series, Whole, whole_at
from daskdl.data.models import trainable
from daskdl.errors import OptionError, SaveError
from daskdl.training.adoption import Standing
from daskdl.training.base import TrainingMaster
from daskdl.training.judging import Verdict, only
from daskdl.training.likeness import Likeness
from daskdl.training.method import Method
from daskdl.training.states import restoring

# Columns of a history that are, other ones are only shown.
LOOKED_AT = ("epoch", "loss", "examples", "density", "threshold", "clipped")


@dataclass(frozen=True)
class Resumption:
    """A checkpoint that a fit goes on from.

    Attributes:
        plan: For the replicas.
        rows: Of the history so far.
        verdict: Of early stopping, on the last of them.
        epochs_before: Of earlier fits of the trainer.
        ordinal: Of the checkpoint in its fit, from 1.
        kind: Of the replicas' exchanges.
        likeness: What the fit is made of.
    """

    plan: ResumePlan
    rows: Sequence[Mapping[str, Any]]
    verdict: Verdict
    epochs_before: int
    ordinal: int
    kind: str
    likeness: Likeness

    @classmethod
    def of(cls, found: Whole) -> "Resumption":
        """Read what a checkpoint says.

        Raises:
            SaveError: If that is not what one says.
        """
        said, members = found.said, tuple(found.members)
        with restoring(found.store.url_of(f"{COMMON}.json")):
            _check_said(said)
            return cls(
                ResumePlan(
                    found.store.url,
                    found.stamp,
                    members,
                    said["epoch"],
                    _pause_of(said["pause"]),
                ),
                said["rows"],
                Verdict.of(said["verdict"]),
                said["epochs_before"],
                said["count"],
                said["kind"],
                Likeness.from_values(said["likeness"]),
            )

    @property
    def standing(self) -> Standing:
        """What the fit goes on from, beside what the replicas read."""
        return Standing(epochs=self.epochs_before)

    def check(self, master: TrainingMaster, method: Method, model: nn.Module) -> None:
        """Refuse to go on with something else.

        Args:
            master: Of the fit.
            method: Likewise.
            model: At its start.

        Raises:
            OptionError: If the checkpoint is of another way of training, model,
                optimizer or scheduler.
        """
        if self.kind not in master.resumes:
            raise OptionError(
                f"{self.plan.url} is of replicas of another way of training than "
                f"{type(master).__name__}; resume with the same master"
            )
        optimizer = method.optimizer(trainable(model))
        own = Likeness.of(model, optimizer, method.scheduling.of(optimizer))
        own.check(self.likeness, self.plan.url)


def resumption_of(resume: Any, callbacks: Sequence[Callback]) -> Resumption | None:
    """What a fit goes on from.

    Args:
        resume: The argument of `Trainer.fit`.
        callbacks: Of the trainer.

    Returns:
        None: It begins anew.

    Raises:
        OptionError: If it is no URL, or True without a :class:`~daskdl.Checkpoint`.
        SaveError: If there is no checkpoint at the URL, or it is damaged.
    """
    if resume is None or resume is False:
        return None
    if resume is not True:
        found = whole_at(Series.at(resume).store) or Series.at(resume).newest()
        if found is None:
            raise SaveError(f"there is no checkpoint in {Series.at(resume).store.url}")
        return Resumption.of(found)
    rule: Checkpoint | None = only(Checkpoint, callbacks)
    if rule is None:
        raise OptionError(
            "resume=True needs a Checkpoint among the callbacks, got none; give the "
            "URL of the checkpoints"
        )
    newest = Series.at(rule.url).newest()
    return None if newest is None else Resumption.of(newest)


def checkpoints_of(
    callbacks: Sequence[Callback], resumed: Resumption | None
) -> CheckpointPlan | None:
    """How a fit writes checkpoints; None: it does not.

    Args:
        callbacks: Of the trainer.
        resumed: What it goes on from.

    Raises:
        OptionError: If there is more than one :class:`~daskdl.Checkpoint`.
        SaveError: If the folder cannot be listed.
    """
    rule: Checkpoint | None = only(Checkpoint, callbacks)
    if rule is None:
        return None
    series, run = Series.at(rule.url), secrets.token_hex(8)
    first = max(series.numbers(), default=0) + 1
    if resumed is None:
        return CheckpointPlan(series.store.url, rule, run, run, first)
    origin, before = resumed.plan.stamp.origin, resumed.ordinal
    return CheckpointPlan(series.store.url, rule, origin, run, first, before)


def _check_said(said: Mapping[str, Any]) -> None:
    """Refuse what no checkpoint says.

    Raises:
        LookupError: If something is missing.
        ValueError: If something cannot be.
    """
    epoch, before, rows = said["epoch"], said["epochs_before"], said["rows"]
    # Replicas that came later, and alone are left, may not know all rows.
    if type(epoch) is not int or epoch < len(rows):
        raise ValueError(f"{epoch!r:.80} epochs, and {len(rows)} rows")
    if type(before) is not int or before < 0:
        raise ValueError(f"{before!r:.80} epochs before")
    numbers = [row[name] for row in rows for name in LOOKED_AT]
    wrong = [number for number in numbers if type(number) not in (int, float)]
    if wrong or not isinstance(said["kind"], str):
        raise ValueError(f"{wrong!r:.80}, {said['kind']!r:.80}")


def _pause_of(fields: Any) -> Pause | None:
    """Read one that somebody may have written by hand.

    Raises:
        TypeError: If it is none, or a ValueError.
    """
    if fields is None:
        return None
    pause = Pause.of(fields)
    ranges = [one for left in pause.left for one in left.ranges]
    numbers = [number for one in ranges for number in one]
    numbers += [pause.order, *(left.replica for left in pause.left)]
    numbers += [done.examples for done in pause.departed]
    whole = all(type(number) is int for number in numbers)
    whole &= all(type(done.loss_sum) in (int, float) for done in pause.departed)
    ordered = (min(part, start) >= 0 for part, start, _ in ranges)
    ends = (one.is_whole or one.start <= one.stop for one in ranges)
    if not (whole and all(ordered) and all(ends)):
        raise ValueError(f"{fields!r:.80} is left")
    return pause
