"""Callbacks: the base class, those that come with daskdl, and failure injection."""

import math
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple, TextIO

from dask.utils import parse_timedelta
from typing_extensions import override

from daskdl.config import (
    check_choice,
    check_flag,
    check_whole,
    is_number,
    is_whole,
)
from daskdl.errors import OptionError
from daskdl.history import History


class FitBegin(NamedTuple):
    """A fit that is about to begin; all of it has been checked."""

    replicas: int  # at the start; others may join, and some may leave
    epochs: int  # of this fit, at most
    epochs_before: int  # of earlier fits of the trainer
    batch_size: int  # rows per batch of each replica
    examples: int | None  # in one epoch; None: unknown
    parameters: int  # trainable ones of the model


class EpochBegin(NamedTuple):
    """An epoch that a replica is about to begin."""

    replica: int
    epoch: int  # from 0
    replicas: int  # that train now, as far as this one knows, including itself
    learning_rate: float  # of the first parameter group; NaN: it has none


class Step(NamedTuple):
    """An optimizer step that a replica has just made."""

    replica: int
    epoch: int  # from 0
    number: int  # steps this replica has made, from 1
    loss: float  # mean over the rows of this step
    examples: int  # in the batch of this step, or in all accumulated batches
    learning_rate: float  # of the first parameter group, in this step; NaN: it has none


class FitEnd(NamedTuple):
    """A fit that has ended, early or not."""

    history: History
    error: BaseException | None  # that ended it early, and comes out of `fit`


class Callback:
    """Base class of callbacks; override the hooks you need, they do nothing here.

    ==================  ======================================================
    hook                where, and when
    ==================  ======================================================
    `on_fit_begin`      on the client, once, before anything is trained
    `on_epoch_begin`    on the workers, in each replica, before its first step
    `on_step_end`       on the workers, in each replica, after each step
    `on_epoch_end`      on the client, when all replicas have ended an epoch
    `on_fit_end`        on the client, once, also when the fit ended early
    ==================  ======================================================

    An instance that overrides a hook of the workers is pickled once, when the fit
    begins, and each replica has its own copy: attributes set there stay on the worker,
    attributes set by other hooks stay on the client. Other instances are not pickled.

    Example:
        >>> class Print(Callback):
        ...     def on_epoch_end(self, row):
        ...         print(f"{row['epoch']}: {row['loss']:.2f}")
        >>> Print().on_epoch_end({"epoch": 0, "loss": 0.5})
        0: 0.50
    """

    @property
    def runs_on_workers(self) -> bool:
        """Whether `on_epoch_begin` or `on_step_end` is overridden."""
        own = type(self)
        return (
            own.on_epoch_begin is not Callback.on_epoch_begin
            or own.on_step_end is not Callback.on_step_end
        )

    def on_fit_begin(self, fit: FitBegin) -> None:
        """Run on the client, after all checks and before the replicas begin.

        An exception comes out of `fit`, and nothing is trained. Changes to this
        instance do not reach the copies on the workers.
        """

    def on_epoch_begin(self, epoch: EpochBegin) -> None:
        """Run on a worker, in the training thread, before a replica begins an epoch.

        A replica that joins in the middle of an epoch begins it then. An exception ends
        the run like one in the model.
        """

    def on_step_end(self, step: Step) -> None:
        """Run on a worker, in the training thread, after each step.

        The step is shared afterwards, with what the hook changes in the model's
        parameters. An exception ends the run like one in the model.
        """

    def on_epoch_end(self, row: Mapping[str, Any]) -> None:
        """Run on the client after each epoch, with its row of the history.

        The replicas go on meanwhile. An exception stops the run and comes out of `fit`.
        """

    def on_fit_end(self, end: FitEnd) -> None:
        """Run on the client when the replicas have left and `model_` is there.

        It runs if `on_fit_begin` has returned, whatever happened since, in reverse
        order of the callbacks. An exception comes out of `fit`; if the fit has ended
        with an error, that error comes out, with a note of the exception.
        """


@dataclass(frozen=True)
class Evaluate(Callback):
    """Evaluate `validation` in every n-th epoch, and in the last one of the fit.

    Without this callback it is evaluated in every epoch. In other epochs the columns
    ``val_loss`` and ``val_accuracy`` of the history are NaN, and `ReduceLROnPlateau`
    waits. An :class:`~daskdl.EarlyStopping` that monitors one of them has it evaluated
    in the epochs it checks as well.

    Args:
        every: Epochs from one evaluation to the next, counted from the start of the
            fit.

    Raises:
        OptionError: If it is not a whole number >= 1.

    Example:
        >>> [epoch for epoch in range(9) if Evaluate(every=3).due(epoch)]
        [2, 5, 8]
    """

    every: int = 1

    def __post_init__(self) -> None:
        check_whole("every", self.every, 1)

    def due(self, epoch: int) -> bool:
        """Whether to evaluate at the end of an epoch, counted from 0."""
        return (epoch + 1) % self.every == 0


MONITORS = ("val_loss", "val_accuracy", "loss")
PATIENCE = 5  # epochs, if no criterion is given


@dataclass(frozen=True)
class EarlyStopping(Callback):
    """End a fit that no longer improves, and restore the best model.

    At the barrier at the end of an epoch replicas decide independently but
    deterministically from identical reports, so they agree: none begins an epoch too
    many, and the client need not be asked. `Trainer.history_` says in ``stopping`` why
    the fit ended and which epoch was the best; see :class:`~daskdl.Stopping`.

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
        max_seconds: Since all replicas had joined; the current epoch is completed.
        every: Check the score in every n-th epoch of the fit, and in the last one. A
            score of the validation data is then computed in these only.
        check_finite: Whether a score that is NaN or infinite ends the fit. Else it
            counts as no improvement.
        restore_best: Whether the fit returns the model that all replicas agreed on at
            the end of the best epoch. Each replica keeps it: 4 bytes per parameter.
            Optimizer and schedule stay as they were at the end.

    Raises:
        OptionError: If an argument is out of range. When the fit begins, if there is no
            such score.

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
        check_choice("monitor", self.monitor, MONITORS)
        check_choice("mode", self.mode, ("min", "max", "auto"))
        check_whole("every", self.every, 1)
        check_whole("patience", self.patience, 1, None)
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
            check_flag(name, getattr(self, name))
        if self.patience is None and self.target is None and seconds is None:
            object.__setattr__(self, "patience", PATIENCE)

    @property
    def needs_validation(self) -> bool:
        """Whether it monitors a score of the validation data."""
        return self.monitor != "loss"

    def due(self, epoch: int) -> bool:
        """Whether it checks the score at the end of an epoch, counted from 0."""
        return (epoch + 1) % self.every == 0

    def improves(self, score: float, on: float) -> bool:
        """Whether a finite score is better than another by `min_delta` or more.

        Args:
            score: Of an epoch.
            on: Of another epoch; NaN: none.
        """
        return self.is_better(score, on) and not abs(score - on) < self.min_delta

    def is_better(self, score: float, than: float) -> bool:
        """Whether a finite score is better than another; NaN: there is no other."""
        if math.isnan(than):
            return True
        return score > than if self.largest_is_best else score < than

    def is_enough(self, score: float) -> bool:
        """Whether a score reaches the target."""
        return self.target is not None and (
            score == self.target or self.is_better(score, self.target)
        )

    @property
    def largest_is_best(self) -> bool:
        """Whether `mode` is ``"max"``, or stands for it."""
        if self.mode == "auto":
            return self.monitor == "val_accuracy"
        return self.mode == "max"


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


_STEPS = re.compile(r"(\d+) steps?")


@dataclass(frozen=True)
class Checkpoint(Callback):
    """Write the state of a running fit, so that another fit can resume it.

    At a barrier each replica copies its state and trains on, while a thread writes the
    copy. A checkpoint counts once all of its parts are there: if a process is killed
    meanwhile, the one before is still complete. ``Trainer.fit(..., resume=url)``
    resumes the newest.

    Args:
        url: A folder: a path or a URL of fsspec, such as ``s3://bucket/run-17``, which
            is the same place for all workers and for the client.
        every: ``"epoch"``, or so many epochs. Or ``"500 steps"``, so many of each
            replica, or a time, ``"10 minutes"``: in the middle of an epoch replicas
            then meet too, after as many steps or as long since they met before. The
            end of a fit always has one.
        keep_last: How many of the newest are kept, >= 1; None: all.
        keep_every: Every n-th is kept in any case, counted from the first of the fit;
            None: none.
        keep_best: Also keep the checkpoint with the best ``"val_loss"``,
            ``"val_accuracy"`` or ``"loss"``, the mean training loss of the epoch; None:
            do not.

    Raises:
        OptionError: If an argument is out of range. When the fit begins, if there is no
            such score.

    Example:
        >>> rule = Checkpoint("s3://bucket/run-17", every=2, keep_last=1)
        >>> [epoch for epoch in range(6) if rule.due(epoch)]
        [1, 3, 5]
        >>> Checkpoint("s3://bucket/run-17", every="10 minutes").seconds
        600.0
    """

    url: str | os.PathLike[str]
    every: str | int = "epoch"
    _: KW_ONLY
    keep_last: int | None = 3
    keep_every: int | None = None
    keep_best: Literal["val_loss", "val_accuracy", "loss"] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.url, str | os.PathLike) or not os.fspath(self.url):
            raise OptionError(
                f"url must be a URL or a path of a folder, got {self.url!r}"
            )
        # As text, so that a trainer that has it can be saved.
        object.__setattr__(self, "url", os.fspath(self.url))
        if isinstance(self.every, str):
            self._check_text(self.every)
        else:
            check_whole("every", self.every, 1)
        for name in ("keep_last", "keep_every"):
            check_whole(name, getattr(self, name), 1, None)
        if self.keep_best is not None and self.keep_best not in MONITORS:
            choices = ", ".join(map(repr, MONITORS))
            raise OptionError(
                f"keep_best must be one of {choices} or None, got {self.keep_best!r}"
            )

    def _check_text(self, every: str) -> None:
        if every == "epoch" or (self.steps is not None and self.steps >= 1):
            return
        try:
            seconds = parse_timedelta(every, default=False)
            good = self.steps is None and 0 < seconds < math.inf
        except (ValueError, LookupError):
            good = False
        if not good:
            raise OptionError(
                "every must be 'epoch', a whole number of epochs >= 1, steps such as "
                f"'500 steps', or a time such as '10 minutes', got {every!r}"
            )

    def due(self, epoch: int) -> bool:
        """Whether to write one at the end of an epoch, counted from 0."""
        return isinstance(self.every, str) or (epoch + 1) % self.every == 0

    @property
    def steps(self) -> int | None:
        """Steps of each replica between two checkpoints; None: not by steps."""
        found = _STEPS.fullmatch(str(self.every))
        return None if found is None else int(found[1])

    @property
    def seconds(self) -> float | None:
        """Seconds between two checkpoints; None: not by time."""
        if (
            self.steps is not None
            or self.every == "epoch"
            or not isinstance(self.every, str)
        ):
            return None
        return float(parse_timedelta(self.every))


class Rate(NamedTuple):
    """A learning rate, of a step of a replica or of all at the end of an epoch."""

    epoch: int  # from 0, over all fits
    learning_rate: float  # of the first parameter group
    replica: int | None = None
    step: int | None = None  # of this replica in this fit, from 1


class LearningRateMonitor(Callback):
    """Record the learning rates of all fits that an instance is used for.

    A schedule goes on from fit to fit, while a history belongs to one fit. It runs on
    the client, from what the replicas report anyway.

    Args:
        every: ``"epoch"``, or ``"step"``: those steps of each replica that
            ``history.steps`` has, see `telemetry_every` of a trainer.

    Attributes:
        rates: By epoch, or by replica and step of each epoch, over all fits. Those of
            steps come when a fit ends.

    Raises:
        OptionError: If `every` is neither.

    Example:
        >>> monitor = LearningRateMonitor()
        >>> for epochs_before in (0, 1):
        ...     monitor.on_fit_begin(FitBegin(2, 1, epochs_before, 32, 1000, 650))
        ...     monitor.on_epoch_end({"epoch": 0, "learning_rate": 0.1})
        >>> [(rate.epoch, rate.learning_rate) for rate in monitor.rates]
        [(0, 0.1), (1, 0.1)]
    """

    rates: list[Rate]

    def __init__(self, every: Literal["epoch", "step"] = "epoch") -> None:
        check_choice("every", every, ("epoch", "step"))
        self.rates = []
        self._every = every
        self._before = 0

    @override
    def on_fit_begin(self, fit: FitBegin) -> None:
        self._before = fit.epochs_before

    @override
    def on_epoch_end(self, row: Mapping[str, Any]) -> None:
        if self._every == "epoch":
            self.rates.append(Rate(self._before + row["epoch"], row["learning_rate"]))

    @override
    def on_fit_end(self, end: FitEnd) -> None:
        if self._every == "step":
            self.rates.extend(
                Rate(
                    self._before + row["epoch"],
                    row["learning_rate"],
                    row["replica"],
                    row["step"],
                )
                for row in end.history.steps
            )

    def to_pandas(self) -> Any:
        """The rates as a `pandas.DataFrame`; needs pandas."""
        import pandas as pd

        columns = (
            list(Rate._fields) if self._every == "step" else list(Rate._fields[:2])
        )
        return pd.DataFrame(self.rates, columns=list(Rate._fields))[columns]


SCORES = ("loss", "val_loss", "val_accuracy")


class PrintProgress(Callback):
    """Print a line for each epoch, and one at the end if the fit ended early.

    It runs on the client. Scores that an epoch lacks are left out.

    Args:
        stream: Where to write; None: standard output at that time.

    Example:
        >>> progress = PrintProgress()
        >>> progress.on_fit_begin(FitBegin(2, 3, 0, 32, 1000, 650))
        >>> row = {"epoch": 0, "loss": 0.5, "val_loss": 0.625, "val_accuracy": 0.75}
        >>> progress.on_epoch_end({**row, "seconds": 1.25, "replicas": 2})
        epoch 1/3: loss 0.5000, val_loss 0.6250, val_accuracy 0.7500, 1.2 s, 2 replicas
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._epochs = 0

    @override
    def on_fit_begin(self, fit: FitBegin) -> None:
        self._epochs = fit.epochs

    @override
    def on_epoch_end(self, row: Mapping[str, Any]) -> None:
        scores = [
            f"{name} {row[name]:.4f}"
            for name in SCORES
            if not math.isnan(row.get(name, math.nan))
        ]
        count = row["replicas"]
        replicas = "1 replica" if count == 1 else f"{count} replicas"
        parts = [*scores, f"{row['seconds']:.1f} s", replicas]
        self._write(f"epoch {row['epoch'] + 1}/{self._epochs}: {', '.join(parts)}")

    @override
    def on_fit_end(self, end: FitEnd) -> None:
        epochs, stopping = len(end.history), end.history.stopping
        if end.error is not None:
            kind = type(end.error).__name__
            self._write(f"ended after {epochs} of {self._epochs} epochs: {kind}")
        elif stopping is not None and stopping.reason is not None:
            why = stopping.details
            self._write(f"stopped after {epochs} of {self._epochs} epochs: {why}")

    def _write(self, line: str) -> None:
        stream = sys.stdout if self._stream is None else self._stream
        stream.write(line + "\n")
        stream.flush()


KINDS = ("raise", "exit", "sleep", "freeze", "drop")
EXIT_CODE = 1

# Run by another process, since a frozen one cannot wake itself.
WAKE = """
import os, signal, sys, time
pid, seconds = int(sys.argv[1]), float(sys.argv[2])
time.sleep(seconds)
if os.getppid() == pid:
    os.kill(pid, signal.SIGCONT)
"""


def _home() -> tuple[str, int]:
    return platform.node(), os.getpid()


@dataclass(frozen=True)
class FailureInjection(Callback):
    """Make chosen replicas fail at chosen steps, or at random.

    ========  ==========================================================
    kind      what happens in the replica
    ========  ==========================================================
    raise     a `RuntimeError`, as if the user's own code had raised it
    exit      its process ends at once, as if it had been killed
    sleep     it does nothing for `seconds`, but its worker answers
    freeze    its process stops (SIGSTOP; not on Windows), for `seconds` or
              until somebody continues it
    drop      an update of it does not arrive at another replica
    ========  ==========================================================

    A failure follows its step. Randomness depends on `seed`, the replica's number and
    the step alone, so it is the same in every run. A replica on a restarted worker has
    a new number.

    A dropped update is retransmitted on request. With the routing ``"plain"`` only its
    origin has it: if the origin is lost meanwhile, the run cannot go on.

    Args:
        kind: What happens.
        replicas: Numbers of those that fail; None: all.
        steps: Numbers of the steps, from 1, as in :class:`Step`; for ``"drop"`` of
            the replica's updates, from 1. None: all.
        probability: With which each of these fails, in (0, 1]; for ``"drop"`` drawn
            for each other replica that it goes to.
        times: How often each replica fails at most; for ``"drop"``, how many updates
            of each replica do not arrive at each other one. None: no bound.
        seconds: For ``"sleep"``, and for ``"freeze"`` if it ends.
        seed: Of the chance.

    Raises:
        OptionError: If an argument is out of range; while it trains, if ``"exit"`` or
            ``"freeze"`` would hit the client's own process, and for ``"drop"`` with
            ``client=False``, where no message can get lost.

    Example:
        >>> rule = FailureInjection("raise", replicas=[1], probability=0.5, times=2)
        >>> [number for number in range(1, 20) if rule.strikes(1, number)]
        [1, 4]
    """

    kind: Literal["raise", "exit", "sleep", "freeze", "drop"]
    _: KW_ONLY
    replicas: Collection[int] | None = None
    steps: Collection[int] | None = None
    probability: float = 1.0
    times: int | None = None
    seconds: float | None = None
    seed: int = 0
    _made_in: tuple[str, int] = field(
        default_factory=_home, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        _check_numbers("replicas", self.replicas, 0)
        _check_numbers("steps", self.steps, 1)
        if not is_number(self.probability) or not 0 < self.probability <= 1:
            raise OptionError(
                f"probability must be in (0, 1], got {self.probability!r}; to spare "
                "some replicas or steps, name the others"
            )
        check_whole("times", self.times, 1, None)
        check_whole("seed", self.seed, 0)
        self._check_seconds()

    def _check_seconds(self) -> None:
        seconds = self.seconds
        if self.kind not in ("sleep", "freeze"):
            if seconds is not None:
                raise OptionError(
                    f"seconds is for 'sleep' and 'freeze' only, got {seconds!r} with "
                    f"{self.kind!r}; leave it out"
                )
            return
        if seconds is None and self.kind == "freeze":
            return
        if not is_number(seconds) or not 0 < float(seconds or 0) < float("inf"):
            other = "" if self.kind == "sleep" else " or None"
            raise OptionError(f"seconds must be a number > 0{other}, got {seconds!r}")

    def strikes(self, replica: int, number: int, receiver: int | None = None) -> bool:
        """Whether a replica fails at a step.

        Args:
            replica: Its number.
            number: Of the step; with a receiver, of the update.
            receiver: The replica that does not get the update.
        """
        if self.replicas is not None and replica not in self.replicas:
            return False
        if not self._chosen(replica, number, receiver):
            return False
        if self.times is None:
            return True
        # Recounted each time: a counter would make this more than a plain value.
        earlier = 0
        for other in range(1, number):
            earlier += self._chosen(replica, other, receiver)
            if earlier == self.times:
                return False
        return True

    def _chosen(self, replica: int, number: int, receiver: int | None) -> bool:
        if self.steps is not None and number not in self.steps:
            return False
        if self.probability == 1:
            return True
        drawn = random.Random(f"{self.seed} {replica} {number} {receiver}").random()
        return drawn < self.probability

    @override
    def on_step_end(self, step: Step) -> None:
        if self.kind != "drop" and self.strikes(step.replica, step.number):
            self._fail(step)

    def _fail(self, step: Step) -> None:
        if self.kind == "raise":
            raise RuntimeError(
                f"replica {step.replica} fails at step {step.number}, as {self} says"
            )
        if self.kind == "sleep":
            assert self.seconds is not None
            time.sleep(self.seconds)
            return
        if self._made_in == _home():
            raise OptionError(
                f"kind={self.kind!r} would hit the client's own process, in which the "
                "workers are threads; take workers that are processes, as in "
                "LocalCluster(processes=True)"
            )
        if self.kind == "exit":
            os._exit(EXIT_CODE)
        freeze(self.seconds)


def freeze(seconds: float | None) -> None:
    """Stop this process; another one continues it after `seconds`; None: none does."""
    waker = None
    if seconds is not None:
        waker = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WAKE, str(os.getpid()), str(seconds)]
        )
    os.kill(os.getpid(), signal.SIGSTOP)
    if waker is not None:
        waker.wait()


def _check_numbers(name: str, value: Any, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, Collection) or isinstance(value, str | bytes):
        one = is_whole(value) and int(value) >= least
        remedy = f"; write [{value!r}]" if one else ""
        raise OptionError(
            f"{name} must be a list of whole numbers >= {least} or None, got "
            f"{value!r}{remedy}"
        )
    if not value:
        raise OptionError(f"{name} must not be empty; for all of them give None")
    wrong = [number for number in value if not is_whole(number) or number < least]
    if wrong:
        raise OptionError(
            f"{name} must be whole numbers >= {least}, got {wrong[0]!r} among them"
        )
