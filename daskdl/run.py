"""One fit that has been checked: it is trained, and leaves what it ended with."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from torch import nn

from daskdl.callbacks.base import FitBegin
from daskdl.data.models import trainable
from daskdl.data.source import Source, is_known, rows_in
from daskdl.errors import DaskDLError, RunError, SaveError
from daskdl.fitting import Fitting
from daskdl.history import History
from daskdl.packed import Packed, PackedModel
from daskdl.sites import Site
from daskdl.steps import unpack_rows
from daskdl.training.adoption import Standing, adopt, kept_residual, parameters_of
from daskdl.training.attendance import attended
from daskdl.training.driver import Driver
from daskdl.training.follow import NOTHING_YET, Before, Follower
from daskdl.training.merge import Final
from daskdl.training.parameters import Parameters
from daskdl.training.small_threshold import hint_at_small_threshold
from daskdl.training.stage import Stage
from daskdl.training.task import Recipe, TaskOptions

logger = logging.getLogger(__name__)


class Run:
    """A fit that is ready to begin; it is trained once.

    Args:
        fitting: How.
        stage: Where, with its data.
        recipe: The user's objects.
        model: At its start; not changed.
        train: What is trained on.
        options: Of the run.
        class_count: Of the labels, if it is known.

    Attributes:
        history: Gets a row after each epoch.
        classes: Names of the labels, if the data have such.
        final: What it ended with; None: nothing, or it has not ended.
    """

    history: History
    classes: Sequence[str] | None

    def __init__(
        self,
        fitting: Fitting,
        stage: Stage,
        recipe: Packed[Recipe],
        model: nn.Module,
        train: Source,
        options: TaskOptions,
        class_count: int | None,
    ) -> None:
        resumed = fitting.resumed
        self.history = History(() if resumed is None else resumed.rows)
        self.classes = train.classes
        self._fitting = fitting
        self._seats = len(stage.seats)
        self._driver = Driver(stage)
        self._recipe = recipe
        self._model = model
        self._rows = rows_in(train)
        self._options = options
        named = None if train.classes is None else len(train.classes)
        self._class_count = named if class_count is None else class_count

    @property
    def final(self) -> Final | None:
        """See the class."""
        driver = self._driver
        if driver.final is None and driver.begun and self._fitting.resumed is None:
            return Final(Parameters(), None, None, met=False)  # all agree on it
        return driver.final

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
            final = self._driver.final
            if final is None or self._driver.kept is not None:
                raise RunError("the run ended, and what it ended with was lost")
        except DaskDLError as error:
            self._note_model(error)
            self._note_checkpoint(error)
            raise
        finally:
            if self.final is not None:
                self.history.steps.extend(unpack_rows(self.final.steps))
        self._restored(final)
        trained = self._trained()
        if self._options.checkpoints is not None and trained:
            self._options.checkpoints.conclude()
        hint_at_small_threshold(self.history[-1])

    def _trained(self) -> bool:
        """Whether there was something left to train; then somebody has to have.

        Raises:
            RunError: If nobody has.
        """
        options, stopping = self._options, self.history.stopping
        rows = self.history[options.first_epoch :]
        # What is left of an epoch that a checkpoint was written in may be nothing.
        if any(row["examples"] or options.resume is not None for row in rows):
            return True
        stopped_before = stopping is not None and stopping.reason is not None
        if options.first_epoch < options.epochs and not stopped_before:
            raise RunError(
                "the run came to its end, and no replica has trained on anything; see "
                "the logs of the workers for what they were refused"
            )
        return False

    def settle_(self, model: nn.Module) -> Standing:
        """Leave what there is now, also if it ended early.

        Args:
            model: Gets the parameters and buffers; changed in place.

        Returns:
            What the next fit goes on from.
        """
        fitting, final = self._fitting, self.final
        before = fitting.standing
        epochs = before.epochs + self._epochs_done()
        if final is None:
            return replace(before, epochs=epochs)
        final.parameters.load_into(model)
        optimizer = fitting.method.optimizer(trainable(model))
        moved = adopt(optimizer, fitting.method.scheduling, final, before.moved)
        moved = moved._replace(parameters=parameters_of(optimizer, model))
        sent = final.outcome or before.sent
        residual = kept_residual(final, model, before.residual)
        return Standing(moved, sent, epochs, self._class_count, residual)

    def _epochs_done(self) -> int:
        """Of the fit, those before this run included."""
        return self.history[-1]["epoch"] + 1 if self.history else 0

    def _note_model(self, error: DaskDLError) -> None:
        """Say what `model_` is where it is not what the replicas have left."""
        driver = self._driver
        if driver.kept is not None:
            error.add_note(
                f"model_ is what all replicas had agreed on at the end of epoch "
                f"{driver.kept}, the newest such state that had reached the client"
            )
        elif driver.begun and not driver.final:
            when = "before" if self._fitting.resumed else "at the start of"
            error.add_note(
                "nothing that all replicas agreed on later had reached the client: "
                f"model_ is as it was {when} this fit"
            )

    def _note_checkpoint(self, error: DaskDLError) -> None:
        """Say where the last one is."""
        plan = self._options.checkpoints
        if plan is None:
            return
        try:
            newest = plan.series.newest()
        except SaveError as other:
            error.add_note(f"where the last checkpoint is cannot be said: {other}")
        else:
            own = newest is not None and newest.stamp.origin == plan.origin
            where = newest.store.url if newest and own else "not written yet"
            error.add_note(f"the last checkpoint, for fit(resume=...), is {where}")

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
        resumed = self._fitting.resumed
        examples = None if self._rows is None else self._rows * options.epochs
        return Follower(
            self.history,
            trainer.callbacks,
            options.size,
            examples,
            trainer.progress,
            options.judging,
            NOTHING_YET
            if resumed is None
            else Before(resumed.plan.epoch, resumed.verdict),
            options.left_out,
        )


@contextlib.contextmanager
def begun(
    fitting: Fitting, model: nn.Module, sources: Mapping[str, Source], site: Site
) -> Iterator[Run]:
    """Check all of it, and make the data and the replicas' places ready.

    Args:
        fitting: How.
        model: At its start; not changed.
        sources: By phase.
        site: Where to train.

    Yields:
        What can be trained; nothing of it is left afterwards.

    Raises:
        DaskDLError: If something does not go together; where that can be seen
            without loading data, no worker was touched.
    """
    site.check_device(str(fitting.trainer.device))
    here = site.client is False
    if not here:
        PackedModel(model)  # what cannot travel is refused before anything is done
    checked = None
    if all(is_known(source) for source in sources.values()):
        checked = fitting.check(model, sources)
    with site.ready(sources, fitting.fit, fitting.trainer.seed) as ready:
        checked = checked or fitting.check(model, ready)
        fitting.check_rows(ready["train"])
        fitting = fitting.going_on(model)
        recipe = fitting.recipe(model, ready["train"], here=here)
        options = fitting.task(model, checked, ready["train"].left_out)
        with site.stage(options, ready) as stage:
            train, count = ready["train"], checked.class_count
            run = Run(fitting, stage, recipe, model, train, options, count)
            with run.attended():
                yield run
