"""What users may hang into a run, and what it is told. Nothing here computes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from daskdl.history import History


class FitBegin(NamedTuple):
    """A fit that is about to begin; all of it has been checked."""

    replicas: int  # that it begins with; others may come, and some may go
    epochs: int  # of this fit, at most
    epochs_before: int  # of earlier fits of the trainer
    batch_size: int  # rows per batch of each replica
    examples: int | None  # in one epoch; None: not known
    parameters: int  # trainable ones of the model


class EpochBegin(NamedTuple):
    """An epoch that one replica is about to begin."""

    replica: int
    epoch: int  # from 0
    replicas: int  # that train now, as far as this one knows, itself included
    learning_rate: float  # of the first parameter group; NaN: it has none


class Step(NamedTuple):
    """One optimizer step of one replica, just made."""

    replica: int
    epoch: int  # from 0
    number: int  # steps this replica has made, from 1
    loss: float  # over this step's rows
    examples: int  # in this step's batch, or in all it was accumulated over
    learning_rate: float  # of the first parameter group, in this step; NaN: it has none


class FitEnd(NamedTuple):
    """A fit that has ended, whether it came to its end or not."""

    history: History
    error: BaseException | None  # what ended it early, and comes out of `fit`


class Callback:
    """Override what is of interest; by itself each of these does nothing.

    ==================  ======================================================
    hook                where, and when
    ==================  ======================================================
    `on_fit_begin`      on the client, once, before anything is trained
    `on_epoch_begin`    on the workers, in each replica, before its first step
    `on_step_end`       on the workers, in each replica, after each step
    `on_epoch_end`      on the client, when all replicas have ended an epoch
    `on_fit_end`        on the client, once, also when the fit ended early
    ==================  ======================================================

    An instance that overrides one of the workers' hooks is pickled, once, when the fit
    begins, and each replica has a copy of its own: what the copy keeps stays on the
    worker, and what the other hooks keep stays on the client. One that overrides none
    of them is not pickled.

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

        What it raises comes out of `fit`, and nothing is trained. What it changes in
        this instance does not reach the copies on the workers.
        """

    def on_epoch_begin(self, epoch: EpochBegin) -> None:
        """Run on a worker, in the training thread, before a replica begins an epoch.

        A replica that comes in the middle of an epoch begins it then. What it raises
        ends the run like an exception in the model.
        """

    def on_step_end(self, step: Step) -> None:
        """Run on a worker, in the training thread, after each step.

        What it raises ends the run like an exception in the model.
        """

    def on_epoch_end(self, row: Mapping[str, Any]) -> None:
        """Run on the client after each epoch, with its row of the history.

        The replicas go on meanwhile. What it raises stops the run and comes out of
        `fit`.
        """

    def on_fit_end(self, end: FitEnd) -> None:
        """Run on the client when the replicas have left and `model_` is there.

        It is run if `on_fit_begin` has been, without an error, and whatever happened
        since. Callbacks have their turn in reverse order. What it raises comes out of
        `fit`, but for when the fit has ended with an error: that one comes out, with
        a note of the other.
        """
