"""One fit: from what the user chose and gave to a run that can begin."""

import contextlib
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from daskdl.callbacks.base import FitBegin
from daskdl.data.checks import of_validation
from daskdl.data.labels import LabelCheck
from daskdl.data.models import trainable
from daskdl.data.pairs import pair
from daskdl.data.source import Source, is_known, rows_in
from daskdl.data.sources import source_of
from daskdl.errors import RunError
from daskdl.history import History
from daskdl.objective import OwnStep
from daskdl.packed import Packed, PackedModel
from daskdl.sites import Site
from daskdl.steps import unpack_rows
from daskdl.training.adoption import Standing, adopt
from daskdl.training.attendance import attended
from daskdl.training.driver import Driver
from daskdl.training.follow import Follower
from daskdl.training.judging import Judging
from daskdl.training.merge import Final
from daskdl.training.method import Method
from daskdl.training.options import FitOptions, TrainerOptions
from daskdl.training.small_threshold import hint_at_small_threshold
from daskdl.training.stage import Stage
from daskdl.training.task import Recipe, TaskOptions
from daskdl.vectors import FlatParameters, grid_for

logger = logging.getLogger(__name__)

OUTBOX_BYTES = 2**20  # more would only grow old; the residual is the better queue
INBOX_BYTES = 64 * 2**20  # of decoded entries; beyond it they are folded


class Checked(NamedTuple):
    """What was found out by checking that all goes together."""

    labels: LabelCheck | None  # what labels of parts are held to
    judging: Judging


class Run:
    """A fit that is ready to begin; it is trained once.

    Args:
        fitting: How.
        stage: Where, with its data.
        recipe: The user's objects.
        model: At its start; not changed.
        train: What is trained on.
        options: Of the run.

    Attributes:
        history: Gets a row after each epoch.
        classes: Names of the labels, if the data have such.
        final: What it ended with; None: nothing, or it has not ended.
    """

    history: History
    classes: Sequence[str] | None

    def __init__(
        self,
        fitting: "Fitting",
        stage: Stage,
        recipe: Packed[Recipe],
        model: nn.Module,
        train: Source,
        options: TaskOptions,
    ) -> None:
        self.history = History()
        self.classes = train.classes
        self._fitting = fitting
        self._seats = len(stage.seats)
        self._driver = Driver(stage)
        self._recipe = recipe
        self._model = model
        self._rows = rows_in(train)
        self._options = options

    @property
    def final(self) -> Final | None:
        """See the class."""
        return self._driver.final

    def train(self) -> None:
        """Train to the end.

        Raises:
            DaskDLError: Why it ended early; `final` is then what was agreed on last.
        """
        fitting = self._fitting
        if fitting.trainer.master.averages:
            fitting.method.warn(self._model, self._seats)
        try:
            with self._follower() as follower:
                self._driver.run(self._recipe, follower.follow)
        finally:
            if self.final is not None:
                self.history.steps.extend(unpack_rows(self.final.steps))
        if self.final is None:
            raise RunError("the run ended without a result")
        self._restored(self.final)
        hint_at_small_threshold(self.history[-1])

    def settle_(self, model: nn.Module) -> Standing:
        """Leave what there is now, also if it ended early.

        Args:
            model: Gets the parameters and buffers; changed in place.

        Returns:
            What the next fit goes on from.
        """
        fitting, final = self._fitting, self.final
        before = fitting.standing
        epochs = before.epochs + len(self.history)
        if final is None:
            return replace(before, epochs=epochs)
        final.parameters.load_into(model)
        optimizer = fitting.method.optimizer(trainable(model))
        moved = adopt(optimizer, fitting.method.scheduling, final, before.moved)
        sent = final.outcome or before.sent
        return Standing(moved, sent, epochs, self._class_count())

    def _class_count(self) -> int | None:
        labels = self._options.labels
        if labels is not None and labels.accepted is not None:
            return labels.accepted.classes
        return None if self.classes is None else len(self.classes)

    def _restored(self, final: Final) -> None:
        stopping, rule = self.history.stopping, self._options.judging.stopping
        if stopping is None or rule is None:
            return
        self.history.stopping = replace(stopping, restored=final.restored)
        lost = rule.restore_best and not final.restored
        if lost and stopping.best_epoch is not None:
            logger.warning(
                "all replicas that had the model of epoch %s, the best, were lost, and "
                "model_ is that of the last epoch; restore_best needs one that stays",
                stopping.best_epoch,
            )

    def attended(self) -> AbstractContextManager[None]:
        """Tell the callbacks that it begins, and on the way out that it has ended."""
        fitting = self._fitting
        begin = FitBegin(
            replicas=self._seats,
            epochs=fitting.fit.epochs,
            epochs_before=fitting.standing.epochs,
            batch_size=fitting.fit.read.batch_size,
            examples=self._rows,
            parameters=self._options.size,
        )
        return attended(fitting.trainer.callbacks, begin, self.history)

    def _follower(self) -> Follower:
        trainer, options = self._fitting.trainer, self._options
        examples = None if self._rows is None else self._rows * options.epochs
        return Follower(
            self.history,
            trainer.callbacks,
            options.size,
            examples,
            trainer.progress,
            options.judging,
        )


@dataclass(frozen=True)
class Fitting:
    """What one fit is made with.

    Attributes:
        method: How steps are made.
        trainer: Options of the trainer.
        fit: Options of this fit.
        standing: What it goes on from.
    """

    method: Method
    trainer: TrainerOptions
    fit: FitOptions
    standing: Standing

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
        return sources

    @contextlib.contextmanager
    def begun(
        self, model: nn.Module, sources: Mapping[str, Source], site: Site
    ) -> Iterator[Run]:
        """Check all of it, and make the data and the replicas' places ready.

        Args:
            model: At its start; not changed.
            sources: By phase.
            site: Where to train.

        Yields:
            What can be trained; nothing of it is left afterwards.

        Raises:
            DaskDLError: If something does not go together; where that can be seen
                without loading data, no worker was touched.
        """
        checked = None
        if all(is_known(source) for source in sources.values()):
            checked = self._check(model, sources)
        with site.ready(sources, self.fit, self.trainer.seed) as ready:
            checked = checked or self._check(model, ready)
            train = ready["train"]
            recipe = self.method.recipe(
                model, self.standing.moved, self.trainer.callbacks, train
            )
            options = self._task(model, checked)
            with site.stage(options, ready) as stage:
                run = Run(self, stage, recipe, model, train, options)
                with run.attended():
                    yield run

    def _judging(self, validates: bool, accuracy: bool | None = None) -> Judging:
        callbacks, epochs = self.trainer.callbacks, self.fit.epochs
        return Judging.of(callbacks, epochs, validates=validates, accuracy=accuracy)

    def _check(self, model: nn.Module, sources: Mapping[str, Source]) -> Checked:
        labels = self.method.check(model, sources)
        accuracy = self.method.has_accuracy(model, sources)
        return Checked(labels, self._judging("validation" in sources, accuracy))

    def _task(self, model: nn.Module, checked: Checked) -> TaskOptions:
        trainer, fit = self.trainer, self.fit
        flat = FlatParameters(PackedModel(model).unpack())
        trainer.master.check(flat)
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
        )
