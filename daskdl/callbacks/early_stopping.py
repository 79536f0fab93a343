"""When a fit ends before its last epoch."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from daskdl.callbacks.base import Callback
from daskdl.callbacks.evaluate import check_every
from daskdl.errors import OptionError

MONITORS = ("val_loss", "val_accuracy", "loss")
MODES = ("min", "max", "auto")
PATIENCE = 5  # epochs, where nothing was given to stop at


@dataclass(frozen=True)
class EarlyStopping(Callback):
    """End a fit when going on does not pay, and go back to the best model.

    At the end of an epoch, when all replicas have met, each of them comes to the same
    decision from what all have told each other. So none begins an epoch too many, and
    the client need not be asked. `Trainer.history_` says in ``stopping`` why the fit
    ended, and which epoch was the best; see :class:`~daskdl.Stopping`.

    A fit ends with the first epoch in which one of these holds:

    - the score is not finite, unless `check_finite` is off,
    - the score is at least as good as `target`,
    - `patience` epochs have passed since the score improved by `min_delta` or more,
    - `max_seconds` have passed.

    Args:
        monitor: The score: ``"val_loss"`` or ``"val_accuracy"`` of the validation
            data, or ``"loss"``, the mean training loss of an epoch.
        patience: Epochs without an improvement; None: any number, or 5 where there is
            neither `target` nor `max_seconds`.
        min_delta: The least improvement that counts for `patience`, >= 0. It is
            measured from the last score that counted. The best epoch is that of the
            best score, by however little.
        mode: Whether the least or the largest score is the best; ``"auto"``: the
            largest accuracy, the least loss.
        target: A score that is good enough; None: none is.
        max_seconds: Since all replicas were there; the epoch that runs is not broken
            off.
        every: Look at the score in each so many-th epoch of the fit, and in the last.
            A score of the validation data is then computed in these only.
        check_finite: Whether a score that is NaN or infinite ends the fit. Else it
            counts as no improvement.
        restore_best: Whether the model of the best epoch, on which all replicas had
            agreed, is what comes of the fit. Each replica keeps it: 4 bytes for each
            parameter. Optimizer and schedule are as they were in the end.

    Raises:
        OptionError: If an argument is outside what is allowed. When the fit begins, if
            there is no such score.

    Example:
        >>> EarlyStopping().patience
        5
        >>> rule = EarlyStopping("val_accuracy", patience=3, min_delta=0.01)
        >>> rule.improves(0.905, on=0.9), rule.improves(0.92, on=0.9)
        (False, True)
    """

    monitor: Literal["val_loss", "val_accuracy", "loss"] = "val_loss"
    _: KW_ONLY
    patience: int | None = None
    min_delta: float = 0.0
    mode: Literal["min", "max", "auto"] = "auto"
    target: float | None = None
    max_seconds: float | None = None
    every: int = 1
    check_finite: bool = True
    restore_best: bool = True

    def __post_init__(self) -> None:
        _check_choice("monitor", self.monitor, MONITORS)
        _check_choice("mode", self.mode, MODES)
        check_every(self.every)
        patience = self.patience
        if patience is not None and not (_is_whole(patience) and patience >= 1):
            raise OptionError(
                f"patience must be a whole number >= 1 or None, got {patience!r}"
            )
        if not _is_finite(self.min_delta) or self.min_delta < 0:
            raise OptionError(
                f"min_delta must be a number >= 0, got {self.min_delta!r}"
            )
        if self.target is not None and not _is_finite(self.target):
            raise OptionError(f"target must be a number or None, got {self.target!r}")
        seconds = self.max_seconds
        if seconds is not None and not (_is_finite(seconds) and seconds > 0):
            raise OptionError(f"max_seconds must be > 0 or None, got {seconds!r}")
        for name in ("check_finite", "restore_best"):
            if not isinstance(getattr(self, name), bool):
                got = getattr(self, name)
                raise OptionError(f"{name} must be True or False, got {got!r}")
        if patience is None and self.target is None and seconds is None:
            object.__setattr__(self, "patience", PATIENCE)

    @property
    def needs_validation(self) -> bool:
        """Whether it looks at a score of the validation data."""
        return self.monitor != "loss"

    def due(self, epoch: int) -> bool:
        """Whether it looks at the score at the end of an epoch, counted from 0."""
        return (epoch + 1) % self.every == 0

    def improves(self, score: float, on: float) -> bool:
        """Whether a finite score is better than another by what counts.

        Args:
            score: Of an epoch.
            on: Of another epoch; NaN: there was none.
        """
        return self.is_better(score, on) and not abs(score - on) < self.min_delta

    def is_better(self, score: float, than: float) -> bool:
        """Whether a finite score is better than another, or there is no other."""
        if math.isnan(than):
            return True
        return score > than if self.largest_is_best else score < than

    def is_enough(self, score: float) -> bool:
        """Whether a score is as good as the target."""
        return self.target is not None and (
            score == self.target or self.is_better(score, self.target)
        )

    @property
    def largest_is_best(self) -> bool:
        """Whether `mode` is ``"max"``, or stands for it."""
        if self.mode == "auto":
            return self.monitor == "val_accuracy"
        return self.mode == "max"


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(map(repr, allowed))
        raise OptionError(f"{name} must be one of {choices}, got {value!r}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)
