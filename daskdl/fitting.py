"""One fit: what the user chose and gave, and what follows from it."""

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from daskdl.compression.flat import FlatParameters, grid_for
from daskdl.data.checks import check_same_classes, of_validation
from daskdl.data.labels import LabelCheck
from daskdl.data.models import trainable
from daskdl.data.pairs import pair
from daskdl.data.source import Source, rows_in
from daskdl.data.sources import source_of
from daskdl.errors import DataError
from daskdl.objective import OwnStep
from daskdl.packed import Packed, copied
from daskdl.training.adoption import Standing
from daskdl.training.judging import Judging
from daskdl.training.method import Method
from daskdl.training.options import FitOptions, TrainerOptions
from daskdl.training.resumption import Resumption, checkpoints_of
from daskdl.training.task import Recipe, TaskOptions

logger = logging.getLogger(__name__)

OUTBOX_BYTES = 2**20  # more would only grow old; the residual is the better queue
INBOX_BYTES = 64 * 2**20  # of decoded entries; beyond it they are folded


class Checked(NamedTuple):
    """What was found out by checking that all goes together."""

    labels: LabelCheck | None  # what labels of parts are held to
    class_count: int | None  # of the labels, if they are classes
    judging: Judging


@dataclass(frozen=True)
class Fitting:
    """What one fit is made with.

    Attributes:
        method: How steps are made.
        trainer: Options of the trainer.
        fit: Options of this fit.
        standing: What it goes on from.
        resumed: The checkpoint it goes on from, or None.
    """

    method: Method
    trainer: TrainerOptions
    fit: FitOptions
    standing: Standing
    resumed: Resumption | None = None

    def sources(self, X: Any, y: Any, validation: Any) -> dict[str, Source]:
        """Find out what the user gave; no worker is touched.

        Args:
            X: Inputs, or inputs and labels together.
            y: Labels, or None.
            validation: Both, or None.

        Returns:
            By phase, ``"train"`` and, if there is such, ``"validation"``.

        Raises:
            DataError: If it is of no kind that can be trained on.
            OptionError: If a callback needs validation data, and there are none.
        """
        self._judging(validation is not None)
        labelled = not isinstance(self.method.objective, OwnStep)
        seed = self.trainer.seed if self.fit.shuffle else None
        accumulate = self.method.stepping.accumulate
        options = self.fit.read.source(seed, labelled, accumulate)
        sources = {"train": source_of(X, y, options)}
        if validation is not None:
            with of_validation():
                own = self.fit.read.source(None, labelled)
                sources["validation"] = source_of(*pair(validation), own)
                check_same_classes(sources["validation"], sources["train"].classes)
        return sources

    def _judging(self, validates: bool, accuracy: bool | None = None) -> Judging:
        callbacks, epochs = self.trainer.callbacks, self.fit.epochs
        return Judging.of(callbacks, epochs, validates=validates, accuracy=accuracy)

    def check(self, model: nn.Module, sources: Mapping[str, Source]) -> Checked:
        """Refuse what does not go together; see `Method.check`."""
        accepted = self.method.check(model, sources)
        accuracy = self.method.has_accuracy(model, sources)
        return Checked(*accepted, self._judging("validation" in sources, accuracy))

    def check_rows(self, train: Source) -> None:
        """Refuse data of which nothing would be trained on.

        Raises:
            DataError: If all of it would be left out as what fills no batch.
        """
        rows, size = rows_in(train), self.fit.read.batch_size
        if self.fit.drop_last and rows is not None and rows < size:
            raise DataError(
                f"drop_last=True leaves nothing to train on: batch_size={size}, and "
                f"the data have {rows} rows; take a batch_size of at most {rows}"
            )

    def going_on(self, model: nn.Module) -> "Fitting":
        """The same, with what still fits of earlier fits.

        Args:
            model: At its start; `check` has accepted it.
        """
        optimizer = self.method.optimizer(trainable(model))
        scheduling = self.method.scheduling
        standing = self.standing.going_on(model, optimizer, scheduling)
        return replace(self, standing=standing)

    def recipe(self, model: nn.Module, train: Source, *, here: bool) -> Packed[Recipe]:
        """What each replica needs of the user's objects; see `Method.recipe`."""
        callbacks = self.trainer.callbacks
        return self.method.recipe(model, self.standing, callbacks, train, here=here)

    def task(
        self, model: nn.Module, checked: Checked, left_out: int = 0
    ) -> TaskOptions:
        """The options of the run, the same for all its replicas.

        Args:
            model: Not changed.
            checked: What is known of the data and the labels.
            left_out: Examples that cannot be read and are in no part any more.
        """
        trainer, fit = self.trainer, self.fit
        flat = FlatParameters(copied(model))
        trainer.master.check(flat)
        resumed = self.resumed
        if resumed is not None:
            resumed.check(trainer.master, self.method, model)
        checkpoints = checkpoints_of(trainer.callbacks, resumed)
        if checkpoints is not None:
            self.method.check_written(model)
        return TaskOptions(
            run=secrets.randbits(63),
            master=trainer.master,
            epochs=fit.epochs,
            epochs_before=self.standing.epochs,
            batch_size=fit.read.batch_size,
            seed=trainer.seed,
            shuffle=fit.shuffle,
            device=str(trainer.device),
            judging=checked.judging,
            labels=checked.labels,
            size=flat.size,
            grid=grid_for(flat),
            last=self.standing.sent,
            outbox_bytes=OUTBOX_BYTES,
            inbox_bytes=INBOX_BYTES,
            timeouts=trainer.master.timeouts(),
            stepping=self.method.stepping,
            oversight=self.method.oversight,
            prefetch=fit.prefetch,
            skips_bad=fit.read.skips,
            drop_last=fit.drop_last,
            left_out=left_out,
            checkpoints=checkpoints,
            resume=None if resumed is None else resumed.plan,
        )
