"""What a fit is asked for: the arguments of Trainer and of Trainer.fit, checked.

A wrong value is refused when the :class:`FitSpec` is made. What has to fit together,
model, loss, optimizer, data and callbacks, is tried out on a few rows by
:meth:`FitSpec.check`, before any worker is touched where the data allow it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from daskdl.data.models import trainable
from daskdl.data.options import Approach, ReadOptions, check_choice
from daskdl.data.pairs import pair
from daskdl.data.source import Source, rows_in
from daskdl.data.sources import source_of
from daskdl.errors import DataError, OptionError
from daskdl.objective import Objective, OwnStep
from daskdl.saving.plain import Plain
from daskdl.serialization import copied
from daskdl.training.base import TrainingMaster
from daskdl.training.epoch_control import Judging, LearningRate, Scheduling
from daskdl.training.optimizer_step import Stepping

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
