"""The base class of callbacks, and the built-in callbacks.

`Evaluate`, `EarlyStopping`, `Checkpoint` and `LayerMonitor` are plain rules that the
training loop applies; the other callbacks implement hooks.
"""

import functools
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple, TextIO

from dask.utils import parse_timedelta
from tqdm import tqdm
from typing_extensions import override

from daskdl.config import check_choice, check_flag, check_whole, is_number
from daskdl.errors import OptionError, count_of, epoch_of
from daskdl.observe.history import COLUMNS, History


class FitBegin(NamedTuple):
    """A fit that is about to begin; all options and data have been checked."""

    replicas: int  # initial replicas; others may join, and replicas may leave
    epochs: int  # largest number of epochs of this fit
    epochs_before: int  # epochs of earlier fits of the trainer
    batch_size: int  # rows per batch of each replica
    examples: int | None  # examples in one epoch; None: unknown
    parameters: int  # trainable parameters of the model
    name: str = ""  # name of the fit
    run: str = ""  # its id in logs, on the dashboard and in metrics


class EpochBegin(NamedTuple):
    """An epoch that a replica is about to begin."""

    replica: int
    epoch: int  # from 0
    replicas: int  # replicas training now, including this one, as far as it knows
    learning_rate: float  # rate of the first parameter group; NaN without one


class _StepFields(NamedTuple):
    replica: int
    epoch: int
    number: int
    loss: float
    examples: int
    learning_rate: float


class Step(_StepFields):
    """An optimizer step that a replica has just completed; a named tuple.

    Attributes:
        replica: Number of the replica.
        epoch: Counted from 0.
        number: Number of the step in this replica, from 1.
        loss: Mean over the labels of this step that count; 0 if none counts.
        examples: Rows of this step, over all accumulated batches.
        learning_rate: Rate of the first parameter group in this step, or NaN.
        stopped: Reason passed to :meth:`stop`; None if it was not called.
    """

    stopped: str | None = None

    def stop(self, reason: str = "") -> None:
        """End the fit softly, for all replicas.

        This replica takes no further step, and the others finish their leased rows, at
        most an eighth of their share of an epoch. The epoch then ends like any other:
        the replicas agree, validate and write a checkpoint, which another fit can
        resume. `fit` returns as usual, and `history.stopping` has the reason.

        Args:
            reason: Added to ``history.stopping.details``; beyond 500 characters, the
                middle of the text is replaced.

        Raises:
            OptionError: If the reason is not a string.
        """
        if not isinstance(reason, str):
            raise OptionError(f"reason of step.stop must be a string, got {reason!r}")
        self.stopped = reason


def run_hook(hook: Callable[[Any], object], moment: Any) -> None:
    """Call a hook; refuse True and False, which stop a fit in other libraries.

    Example:
        >>> class SmallLoss(Callback):
        ...     def on_step_end(self, step):
        ...         return step.loss < 0.1
        >>> run_hook(SmallLoss().on_step_end, Step(0, 0, 1, 0.5, 32, 0.01))
        Traceback (most recent call last):
        daskdl.errors.OptionError: SmallLoss.on_step_end returned False, but the \
result of a hook does not stop a fit: call step.stop() in on_step_end, or use \
daskdl.EarlyStopping
    """
    returned = hook(moment)
    if isinstance(returned, bool):
        raise OptionError(
            f"{hook.__qualname__} returned {returned}, but the result of a hook does "
            "not stop a fit: call step.stop() in on_step_end, or use "
            "daskdl.EarlyStopping"
        )


class FitEnd(NamedTuple):
    """A fit that has ended, early or not."""

    history: History
    error: BaseException | None  # error that ended the fit and that `fit` raises


class Callback:
    """Base class of callbacks; override the hooks you need, the defaults do nothing.

    ==================  ======================================================
    hook                where, and when
    ==================  ======================================================
    `on_fit_begin`      on the client, once, before training starts
    `on_epoch_begin`    on the workers, in each replica, before its first step
    `on_step_end`       on the workers, in each replica, after each step
    `on_epoch_end`      on the client, when all replicas have ended an epoch
    `on_fit_end`        on the client, once, also when the fit ended early
    ==================  ======================================================

    Hooks return nothing; True and False, which stop a fit in other libraries, raise an
    error.

    An instance that overrides a hook of the workers is pickled once, when the fit
    begins, and each replica has its own copy: attributes set by these hooks stay on
    the worker, attributes set by other hooks stay on the client. Other instances are
    not pickled.

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
        kind = type(self)
        return (
            kind.on_epoch_begin is not Callback.on_epoch_begin
            or kind.on_step_end is not Callback.on_step_end
        )

    def on_fit_begin(self, fit: FitBegin) -> None:
        """Run on the client, after all checks and before the replicas begin.

        `fit` raises an exception of this hook, and no training takes place. Changes to
        this instance do not reach the copies on the workers.
        """

    def on_epoch_begin(self, epoch: EpochBegin) -> None:
        """Run on a worker, in the training thread, before a replica begins an epoch.

        For a replica that joins in mid-epoch, the hook runs when it joins. An exception
        ends the run like an exception in the model.
        """

    def on_step_end(self, step: Step) -> None:
        """Run on a worker, in the training thread, after each step.

        The step is shared afterwards, including changes that the hook makes to the
        model's parameters. ``step.stop()`` ends the fit, see :meth:`Step.stop`; an
        exception ends the run like an exception in the model.
        """

    def on_epoch_end(self, row: Mapping[str, Any]) -> None:
        """Run on the client after each epoch, with its row of the history.

        The replicas continue meanwhile. An exception stops the run, and `fit` raises
        it.
        """

    def on_fit_end(self, end: FitEnd) -> None:
        """Run on the client when the replicas have left and `model_` is set.

        The hook runs if `on_fit_begin` has returned, in reverse order of the callbacks.
        `fit` raises an exception of this hook; if the fit has already failed with an
        error, `fit` raises that error, with a note about the exception.
        """


@dataclass(frozen=True)
class Evaluate(Callback):
    """Evaluate the validation data in every n-th epoch and in the last one of a fit.

    An :class:`~daskdl.EarlyStopping` that monitors a validation score adds evaluations
    in the epochs that it checks. Without either callback, every epoch is evaluated. In
    epochs without an evaluation, the columns ``val_loss`` and ``val_accuracy`` of the
    history are NaN, and `ReduceLROnPlateau` is not stepped.

    Args:
        every: Epochs from one evaluation to the next, counted from the start of the
            fit.

    Raises:
        OptionError: If `every` is not a whole number >= 1.

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


PATIENCE = 5  # epochs; default without any other criterion


def check_monitored(option: str, name: Any, mode: Any) -> None:
    """Refuse a name that is not a column, or for which `mode` is ambiguous."""
    if not isinstance(name, str) or not name:
        raise OptionError(
            f"{option} must be the name of a column of the history, such as 'val_loss',"
            f" got {name!r}"
        )
    check_choice("mode", mode, ("min", "max", "auto"))
    if mode == "auto" and not ("loss" in name or "accuracy" in name):
        raise OptionError(
            f"mode must be 'min' or 'max' with {option}={name!r}, got 'auto', which "
            "knows only names with 'loss' or 'accuracy', such as 'val_accuracy'"
        )


def largest_is_best(name: str, mode: str) -> bool:
    """Whether `mode` is ``"max"``, or ``"auto"`` with an accuracy."""
    return "accuracy" in name if mode == "auto" else mode == "max"


@dataclass(frozen=True)
class EarlyStopping(Callback):
    """End a fit that no longer improves, and restore the best model.

    At the barrier at the end of an epoch, replicas decide independently but
    deterministically from identical reports, so they agree without a request to the
    client, and no replica begins an extra epoch. ``Trainer.history_.stopping`` records
    the reason and the best epoch; see :class:`~daskdl.Stopping`.

    A fit ends with the first epoch in which one of these conditions holds:

    - the score is not finite, unless `check_finite` is off,
    - the score is at least as good as `target`,
    - `patience` epochs have passed since the score improved by `min_delta` or more,
    - `max_seconds` have passed.

    Args:
        monitor: The score, a column of the history: ``"val_loss"`` or
            ``"val_accuracy"`` of the validation data, ``"loss"``, the mean training
            loss of an epoch, what a step logs as ``"NAME"``, ``"val_NAME"`` on the
            validation data, or another column that does not depend on the time.
        patience: Epochs without an improvement; None: any number, or 5 without `target`
            and `max_seconds`.
        min_delta: Smallest improvement that resets `patience`, >= 0, measured from the
            last score that did. The best epoch has the best score, by any margin.
        mode: Whether the smallest or the largest score is the best; ``"auto"``: the
            largest accuracy and the smallest loss; not for other scores.
        target: Score at which the fit ends; None: no target.
        max_seconds: Time limit, measured from the moment when all replicas have joined;
            the current epoch is completed. None: no limit.
        every: Check the score in every n-th epoch of the fit, and in the last one.
            Validation scores, if monitored, are computed only in these epochs and in
            those of an :class:`~daskdl.Evaluate`.
        check_finite: Whether a NaN or infinite score ends the fit; if not, it does not
            count as an improvement.
        restore_best: Whether the fit returns the model that all replicas agreed on at
            the end of the best epoch. Each replica keeps a copy: 4 bytes per parameter.
            Optimizer and schedule keep their final state.

    Raises:
        OptionError: If an argument is out of range; when the fit begins, if the score
            does not exist.

    Example:
        >>> EarlyStopping().patience
        5
        >>> rule = EarlyStopping("val_accuracy", patience=3, min_delta=0.01)
        >>> rule.improves(0.905, on=0.9), rule.improves(0.92, on=0.9)
        (False, True)
    """

    monitor: str = "val_loss"
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
        check_monitored("monitor", self.monitor, self.mode)
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
        """Whether the monitored score needs validation data."""
        return self.monitor.startswith("val_")

    def due(self, epoch: int) -> bool:
        """Whether to check the score at the end of an epoch, counted from 0."""
        return (epoch + 1) % self.every == 0

    def improves(self, score: float, on: float) -> bool:
        """Whether a finite score is better than another by `min_delta` or more.

        Args:
            score: Score of an epoch.
            on: Score of another epoch; any score improves on NaN.
        """
        return self.is_better(score, on) and not abs(score - on) < self.min_delta

    def is_better(self, score: float, than: float) -> bool:
        """Whether a finite score is better than another; every score beats NaN."""
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
        """Whether a larger score is better."""
        return largest_is_best(self.monitor, self.mode)


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


_STEPS = re.compile(r"(\d+) steps?")


@dataclass(frozen=True)
class Checkpoint(Callback):
    """Write the state of a running fit, so that another fit can resume it.

    At a barrier each replica copies its state and continues training, while a thread
    writes the copy. A checkpoint is complete once all of its parts are written: if a
    process is killed meanwhile, the previous checkpoint remains complete.
    ``Trainer.fit(..., resume=url)`` resumes the newest checkpoint.

    Args:
        url: A folder: a path or an fsspec URL, such as ``s3://bucket/run-17``, that all
            workers and the client share.
        every: ``"epoch"``, a number of epochs, a number of steps of each replica, such
            as ``"500 steps"``, or a time, such as ``"10 minutes"``. With steps or a
            time, replicas also meet at barriers in mid-epoch, that many steps or that
            long after the last one. The end of a fit always writes a checkpoint.
        keep_last: Number of newest checkpoints to keep, >= 1; None: all.
        keep_every: Also keep every n-th checkpoint of the fit; None: keep no others.
        keep_best: Also keep the checkpoint with the best value in this column of the
            history, see `monitor` of :class:`EarlyStopping`; None: keep no others.
        mode: See :class:`EarlyStopping`.
        storage_options: fsspec options of `url`, such as credentials, also for the
            workers. They are saved neither in checkpoints nor with a trainer.

    Raises:
        OptionError: If an argument is out of range; when the fit begins, if the score
            does not exist.

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
    keep_best: str | None = None
    mode: Literal["min", "max", "auto"] = "auto"
    storage_options: Mapping[str, Any] | None = field(
        default=None, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.url, str | os.PathLike) or not os.fspath(self.url):
            raise OptionError(
                f"url must be the URL or path of a folder, got {self.url!r}"
            )
        # A string, so that a trainer with this callback can be saved.
        object.__setattr__(self, "url", os.fspath(self.url))
        if isinstance(self.every, str):
            self._check_interval(self.every)
        else:
            check_whole("every", self.every, 1)
        for name in ("keep_last", "keep_every"):
            check_whole(name, getattr(self, name), 1, None)
        if self.keep_best is not None:
            check_monitored("keep_best", self.keep_best, self.mode)
        elif self.mode != "auto":
            raise OptionError(
                f"mode={self.mode!r} has no effect without keep_best; leave it out"
            )
        if not isinstance(self.storage_options, Mapping | None):
            kind = type(self.storage_options).__name__
            raise OptionError(f"storage_options must be a dict or None, got a {kind}")

    def _check_interval(self, every: str) -> None:
        if every == "epoch" or (self.steps is not None and self.steps >= 1):
            return
        try:
            seconds = parse_timedelta(every, default=False)
        except (ValueError, LookupError):
            seconds = math.nan
        if self.steps is not None or not 0 < seconds < math.inf:
            raise OptionError(
                "every must be 'epoch', a whole number of epochs >= 1, steps such as "
                f"'500 steps', or a time such as '10 minutes', got {every!r}"
            )

    def due(self, epoch: int) -> bool:
        """Whether to write a checkpoint at the end of an epoch, counted from 0."""
        return isinstance(self.every, str) or (epoch + 1) % self.every == 0

    @property
    def steps(self) -> int | None:
        """Steps of each replica between two checkpoints; None: not by steps."""
        match = _STEPS.fullmatch(str(self.every))
        return None if match is None else int(match[1])

    @property
    def seconds(self) -> float | None:
        """Seconds between two checkpoints; None: not by time."""
        every = self.every
        if not isinstance(every, str) or every == "epoch" or self.steps is not None:
            return None
        return float(parse_timedelta(every))


@dataclass(frozen=True)
class LayerMonitor(Callback):
    """Sample every trainable parameter tensor, its gradient and its update.

    ``history.layers`` gets the samples, see :class:`~daskdl.LayerTable`: norms, the
    ratio of update to parameter, and histograms. ``history.report`` and
    :class:`~daskdl.TensorBoard` show them. A sampled step copies the parameters and
    reads parameters, gradients and updates a few times; other steps cost nothing.

    Args:
        every: Steps of a replica between two samples: the steps whose number, counted
            from 1, is divisible by `every`. A replica with more than 512 rows to report
            drops every second sample, and samples half as often from then on.

    Raises:
        OptionError: If `every` is not a whole number >= 1.

    Example:
        >>> [step for step in range(1, 10) if LayerMonitor(every=3).due(step)]
        [3, 6, 9]
    """

    every: int = 100

    def __post_init__(self) -> None:
        check_whole("every", self.every, 1)

    def due(self, step: int) -> bool:
        """Whether to sample a step of a replica, counted from 1."""
        return step % self.every == 0


class PrintProgress(Callback):
    """Print a line for each epoch, and another one if the fit ends early.

    The line has the loss, the logs of a step, and the scores of the validation data if
    the epoch has any. The callback runs on the client.

    Args:
        stream: Text stream to write to; None: the current standard output.

    Example:
        >>> progress = PrintProgress()
        >>> progress.on_fit_begin(FitBegin(2, 3, 0, 32, 1000, 650))
        >>> row = {"epoch": 0, "loss": 0.5, "val_loss": 0.625}
        >>> progress.on_epoch_end({**row, "seconds": 1.25, "replicas": 2})
        epoch 0 (1 of 3): loss 0.5000, val_loss 0.6250, 1.2 s, 2 replicas
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
            f"{name} {value:.4f}"
            for name, value in row.items()
            if (name == "loss" or name not in COLUMNS) and not math.isnan(value)
        ]
        replicas = count_of(row["replicas"], "replica")
        parts = [*scores, f"{row['seconds']:.1f} s", replicas]
        self._write(f"{epoch_of(row['epoch'], self._epochs)}: {', '.join(parts)}")

    @override
    def on_fit_end(self, end: FitEnd) -> None:
        epochs, stopping = len(end.history), end.history.stopping
        total = count_of(self._epochs, "epoch")
        if end.error is not None:
            kind = type(end.error).__name__
            self._write(f"ended after {epochs} of {total}: {kind}")
        elif stopping is not None and stopping.reason is not None:
            why = stopping.details
            self._write(f"stopped after {epochs} of {total}: {why}")

    def _write(self, line: str) -> None:
        stream = sys.stdout if self._stream is None else self._stream
        with tqdm.external_write_mode(file=stream):  # not in the line of a bar
            stream.write(line + "\n")
            stream.flush()


class TensorBoard(Callback):
    """Write the history for TensorBoard, which ``tensorboard --logdir FOLDER`` shows.

    The callback runs on the client. After each epoch, it writes the numbers of the
    epoch's row as ``epoch/NAME``. At the end of a fit, it writes the sampled steps of
    each replica as ``steps/NAME/replica N``, the options as text, and, with
    :class:`~daskdl.LayerMonitor`, norms and ratios as ``layers/NAME/PARAMETER``, as
    means over the replicas. Further fits with this instance continue the curves.

    Args:
        folder: Folder of the event files. Use a separate folder for each training;
            TensorBoard compares those with a common parent.

    Raises:
        OptionError: If the package tensorboard is missing.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise OptionError(
                f"TensorBoard needs the package tensorboard: {error}; install it with "
                "pip install 'daskdl[tensorboard]'"
            ) from error
        self._open: Callable[[], Any] = functools.partial(
            SummaryWriter, os.fspath(folder)
        )
        self._writer: Any = None  # while a fit runs
        self._epochs = 0  # of earlier fits
        self._steps = 0  # of earlier fits, in the replica with the most steps

    @override
    def on_fit_begin(self, fit: FitBegin) -> None:
        self._epochs = fit.epochs_before
        self._writer = self._open()

    @override
    def on_epoch_end(self, row: Mapping[str, Any]) -> None:
        waits = {f"waits/{cause}": seconds for cause, seconds in row["waits"].items()}
        self._add("epoch", {**row, **waits}, self._epochs + row["epoch"])
        self._writer.flush()

    @override
    def on_fit_end(self, end: FitEnd) -> None:
        last_step = 0
        for row in end.history.steps:
            last_step = max(last_step, row["step"])
            suffix = f"/replica {row['replica']}"
            self._add("steps", row, self._steps + row["step"], suffix)
        for name, steps in end.history.layers.means().items():
            for step, norms in steps.items():
                last_step = max(last_step, step)
                self._add("layers", norms, self._steps + step, f"/{name}")
        self._steps += last_step
        run = end.history.run
        named = {"name": run.name, "run": run.id, **run.options, **run.versions}
        lines = [f"    {name}: {value}" for name, value in named.items()]
        self._writer.add_text("options", "\n".join(lines), self._epochs)
        self._writer.close()

    def _add(
        self, prefix: str, values: Mapping[str, Any], step: int, suffix: str = ""
    ) -> None:
        for name in values.keys() - {"epoch", "replica", "step"}:
            value = values[name]
            if isinstance(value, int | float) and not math.isnan(value):
                self._writer.add_scalar(f"{prefix}/{name}{suffix}", value, step)
