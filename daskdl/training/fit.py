"""One fit on the client, from the user's arguments to the trained model."""

import contextlib
import functools
import logging
import math
import random
import secrets
import sys
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import cloudpickle
import torch
from distributed import Client
from torch import nn
from torch.optim import Optimizer
from tqdm.auto import tqdm
from typing_extensions import override

from daskdl import errors, evaluation
from daskdl.callbacks import Callback, Checkpoint, FitBegin, FitEnd
from daskdl.channel.leasing import SyncPoint
from daskdl.checkpoints import (
    COMMON,
    CheckpointPlan,
    ResumePlan,
    Series,
    Whole,
    whole_at,
)
from daskdl.cluster import check_installed, client_of
from daskdl.compression.flat import FlatParameters, grid_for
from daskdl.config import Timeouts, check_whole, is_whole
from daskdl.data import trees
from daskdl.data.accuracy import has_accuracy
from daskdl.data.batches import Transform
from daskdl.data.checks import (
    check_rows,
    check_same_classes,
    check_step,
    of_validation,
    rows_like,
)
from daskdl.data.checks import (
    check_whole as check_whole_labels,
)
from daskdl.data.datasets.iterable_style import sharded
from daskdl.data.exports.options import ExportOptions
from daskdl.data.exports.temporary import temporary_batches
from daskdl.data.labels import LabelCheck
from daskdl.data.looking import looked_at, small_together
from daskdl.data.models import check_module, trainable
from daskdl.data.options import Approach, ReadOptions, check_choice
from daskdl.data.pairs import pair
from daskdl.data.rehearsal import random_state_left_alone
from daskdl.data.source import Source, is_known, rows_in, shown_rows
from daskdl.data.sources import source_of
from daskdl.data.supplies import supply_of
from daskdl.errors import (
    DaskDLError,
    DataError,
    OptionError,
    ReplicaError,
    RunError,
    SaveError,
)
from daskdl.history import History, Row, Stopping, unpack_rows
from daskdl.inference.options import OutputOptions
from daskdl.inference.prediction import predict
from daskdl.keras.module import as_module
from daskdl.metrics.evaluation import Evaluation
from daskdl.metrics.wanted import Wanted
from daskdl.objective import Objective, OwnStep
from daskdl.saving.plain import Plain
from daskdl.serialization import Packed, PackedModel, copied, made
from daskdl.training.backend import (
    Event,
    Final,
    Stage,
    most_replicas,
    replicas_here,
    seats_of,
)
from daskdl.training.base import (
    CompressionState,
    KeptResidual,
    Parameters,
    TrainingMaster,
    described,
    restoring,
)
from daskdl.training.checkpointing import Likeness
from daskdl.training.dask_backend import ClusterStage, Limits
from daskdl.training.epoch_control import (
    Judging,
    LearningRate,
    Scheduling,
    Verdict,
    only,
)
from daskdl.training.local_backend import LocalStage
from daskdl.training.optimizer_step import Stepping, restore_
from daskdl.training.replica import check_device
from daskdl.training.spec import Oversight, Recipe, TaskOptions
from daskdl.training.telemetry import row_of
from daskdl.util import guarded

logger = logging.getLogger(__name__)

# Of torch's optimizers: they change how a step is made, and no state that it needs.
STATELESS = frozenset(
    {
        "capturable",
        "decoupled_weight_decay",
        "foreach",
        "fused",
        "maximize",
        "nesterov",
    }
)


class Moved(NamedTuple):
    """What a run changes beside the parameters.

    Attributes:
        optimizer: With state.
        rate: Of the optimizer.
        scheduling: That the rate follows.
        made: Hyperparameters of each group as the trainer's function made them; None:
            not known.
        parameters: Of each group, as `parameters_of` says; None: not known.
    """

    optimizer: Optimizer
    rate: LearningRate
    scheduling: Scheduling
    made: list[dict[str, Any]] | None = None
    parameters: list[list[str]] | None = None

    def schedule(self, scheduling: Scheduling) -> bytes:
        """Where the scheduler stands; empty if another one is to begin."""
        return self.rate.state() if scheduling == self.scheduling else b""

    def going_on(
        self, optimizer: Optimizer, scheduling: Scheduling, model: nn.Module
    ) -> "Moved | None":
        """Go on with what a trainer's function makes now; None: begin anew.

        The state stays, with the hyperparameters that have become other ones.

        Args:
            optimizer: Just made, over the model's parameters.
            scheduling: Of the next fit.
            model: That it starts from.
        """
        parameters = parameters_of(optimizer, model)
        if type(optimizer) is not type(self.optimizer):
            _log_anew(f"optimizer makes a {type(optimizer).__name__} now")
            return None
        if self.parameters is not None and parameters != self.parameters:
            _log_anew("optimizer has other parameters or groups now")
            return None
        made = hyperparameters(optimizer)
        former = made if self.made is None else self.made
        pairs = zip(made, former, strict=True)
        changed = [_changed(new, old) for new, old in pairs]
        if not any(changed):
            return self
        if any(_switched(*pair) for pair in zip(changed, former, strict=True)):
            _log_anew(f"optimizer needs another state for {changed}")
            return None
        return self._changed(optimizer, scheduling, made, changed)

    def _changed(
        self,
        optimizer: Optimizer,
        scheduling: Scheduling,
        made: list[dict[str, Any]],
        changed: list[dict[str, Any]],
    ) -> "Moved":
        logger.info("optimizer goes on with its state and %s", changed)
        state: dict[str, Any] = self.optimizer.state_dict()
        for group, new in zip(state["param_groups"], changed, strict=True):
            group.update(new)
        position = self.rate.position() if scheduling == self.scheduling else None
        if any("lr" in group for group in changed):
            if position is not None:
                logger.warning(
                    "the learning rate is a new one: its schedule begins anew"
                )
            position = None
            for group, new in zip(state["param_groups"], made, strict=True):
                group.pop("initial_lr", None)  # or a scheduler would start from it
                group["lr"] = new["lr"]
        if position is None:
            optimizer.load_state_dict(state)
            rate = LearningRate(optimizer, scheduling)
        else:
            rate = LearningRate(optimizer, scheduling)
            optimizer.load_state_dict(state)
            rate.go_on_(*position)
        return Moved(optimizer, rate, scheduling, made, self.parameters)


@dataclass(frozen=True)
class Standing:
    """What the fits of a trainer so far leave to the next one, beside the model.

    Attributes:
        moved: By the last one, or None.
        sent: How far the last one that left anything came with compression.
        epochs: Of all of them.
        class_count: Of the labels of the last one, if they are classes; else None.
        residual: That the replicas of the last one have not sent; None: nothing.
    """

    moved: Moved | None = None
    sent: CompressionState | None = None
    epochs: int = 0
    class_count: int | None = None
    residual: KeptResidual | None = None

    def going_on(
        self, model: nn.Module, optimizer: Optimizer, scheduling: Scheduling
    ) -> "Standing":
        """Drop, with a line in the log, what is not of the next fit any more.

        Args:
            model: That it starts from; not changed.
            optimizer: Of it, just made.
            scheduling: Of its learning rate.
        """
        moved = self.moved
        if moved is not None:
            moved = moved.going_on(optimizer, scheduling, model)
        kept = replace(self, moved=moved)
        if self.residual is None or self.residual.fits(model):
            return kept
        logger.warning(
            "model_ has other trainable parameters, or other values in them, than at "
            "the end of the fit before: what its replicas had not sent yet is dropped"
        )
        return replace(kept, residual=None)


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Of each group, what is not its parameters."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def parameters_of(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """Name, dtype and shape of the parameters of each group.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> parameters_of(torch.optim.SGD([layer.bias]), layer)
        [['bias float32 (1,)']]
    """
    named = {id(p): f"{n} {described(p)}" for n, p in model.named_parameters()}
    groups = [group["params"] for group in optimizer.param_groups]
    return [[named.get(id(p), described(p)) for p in group] for group in groups]


def _changed(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in new.items()
        if name not in old or not _same(value, old[name])
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    return bool(one == other)


def _switched(changed: dict[str, Any], old: dict[str, Any]) -> bool:
    """Whether a state may lack what is needed, or have what is not.

    So it is with a momentum that there was not, and an option that is on and was off.
    """
    return any(
        bool(new) != bool(old.get(name))
        for name, new in changed.items()
        if name == "momentum" or (type(new) is bool and name not in STATELESS)
    )


def _log_anew(why: str) -> None:
    logger.warning("%s: its state, and the schedule of its rate, begin anew", why)


def starting_model(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """Copy the user's module, or make it; a Keras model becomes a module of torch.

    Args:
        model: Not changed.
        seed: Of torch's generator and Python's, which are left as they were.

    Raises:
        ModelError: If it is no module, or cannot be copied.
    """
    model = as_module(model)
    if isinstance(model, nn.Module) or not callable(model):
        check_module(model)
        return copied(model)
    return made(functools.partial(_made_from, model, seed))


def _made_from(function: Callable[[], Any], seed: int) -> Any:
    with random_state_left_alone():
        torch.manual_seed(seed)
        random.seed(seed)  # from it Keras draws a seed for each of its initialisers
        return as_module(function())


def kept_residual(
    final: Final, model: nn.Module, former: KeptResidual | None
) -> KeptResidual | None:
    """What a run has not delivered.

    Args:
        final: What it ended with.
        model: That has its parameters.
        former: That it began with. If it ended before its replicas had met, `model` is
            that of its start, to which this still belongs.
    """
    if not final.met:
        return former
    counts_N, grid = final.parameters.residual_N, final.parameters.grid
    return None if counts_N is None else KeptResidual.beside(model, counts_N, grid)


def adopt(
    optimizer: Optimizer, scheduling: Scheduling, final: Final, former: Moved | None
) -> Moved:
    """Give a new optimizer, and its scheduler, the state that a run ended with.

    Args:
        optimizer: Over the model's parameters; changed in place.
        scheduling: Of the run.
        final: What the run ended with. If it ended early there is no state in it:
            then the last there is counts.
        former: Of the fit before, if there was one.
    """
    made = hyperparameters(optimizer)
    rate = LearningRate(optimizer, scheduling)
    if final.optimizer is not None:
        restore_(optimizer, final.optimizer)
        rate.load_(final.schedule)
    elif former is not None:
        state: dict[str, Any] = former.optimizer.state_dict()
        optimizer.load_state_dict(state)
        rate.load_(former.schedule(scheduling))
    return Moved(optimizer, rate, scheduling, made)


# The groups of optimizers that divide by a root of squared gradients have one of these.
ADAPTIVE = ("betas", "beta2_decay", "centered", "rho", "lr_decay")


def divides_by_noise(optimizer: Optimizer) -> bool:
    """Whether steps are shorter where gradients are noisier, as those of Adam.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> divides_by_noise(torch.optim.AdamW([weight]))
        True
        >>> divides_by_noise(torch.optim.SGD([weight], momentum=0.9))
        False
    """
    return any(key in group for group in optimizer.param_groups for key in ADAPTIVE)


def warn_of_short_steps(optimizer: Optimizer, replicas: int) -> None:
    """Warn where several replicas may learn slower than one with as large a batch.

    Each divides by the noise of its own batches, which is larger than that of all of
    them together: by up to the root of their number.

    Args:
        optimizer: As each replica has one.
        replicas: Of whose updates the mean counts.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_of_short_steps(optimizer, replicas=4)
        >>> str(caught[0].message)[:42]
        '4 replicas with AdamW may learn slower tha'
    """
    if replicas < 2 or not divides_by_noise(optimizer):
        return
    name = type(optimizer).__name__
    warnings.warn(
        f"{replicas} replicas with {name} may learn slower than one process with "
        f"{replicas} times the batch: each step is made from a smaller and noisier "
        f"batch, and {name} makes it shorter for that. Try a learning rate up to "
        f"{math.sqrt(replicas):.2g} times as high; see 'Adam and its like' in "
        "docs/tuning.md",
        stacklevel=5,  # where `fit` was called
    )


class Accepted(NamedTuple):
    """What is known of labels once all goes together."""

    labels: LabelCheck | None  # for those that are loaded later; a transform: none
    class_count: int | None  # of what the loss gets, if that are classes


@dataclass(frozen=True)
class Method:
    """What a model is trained with.

    Args:
        objective: What is to become small.
        optimizer: Makes an optimizer from parameters.
        stepping: How a step is made.
        scheduling: How the learning rate changes.
        oversight: What is watched meanwhile.
        transform: What is made of each batch before, or None.

    Raises:
        OptionError: If there is no optimizer.
    """

    objective: Objective
    optimizer: Callable[[Any], Optimizer]
    stepping: Stepping
    scheduling: Scheduling
    oversight: Oversight = field(default_factory=Oversight)
    transform: Transform | None = None

    def __post_init__(self) -> None:
        if self.optimizer is None:
            raise OptionError(
                "optimizer must be a function that makes one from parameters, such as "
                "lambda params: torch.optim.SGD(params, lr=0.1), got None"
            )

    def check(self, model: nn.Module, sources: Mapping[str, Source]) -> Accepted:
        """Refuse what does not go together; no worker is touched.

        Args:
            model: Not changed.
            sources: Of each phase, of which some rows are known.

        Returns:
            What is known of the labels then.
        """
        train = sources["train"]
        objective, transform = self.objective, self.transform
        accepted = check_step(
            model, objective, self.optimizer, *rows_like(train), transform
        )
        labels = None if transform else LabelCheck(accepted)
        if labels is not None:
            check_whole_labels(train, labels)
        self.stepping.check_model(model)
        self.scheduling.check(self.optimizer, model)
        if "validation" in sources:
            with of_validation():
                rows = rows_like(sources["validation"])
                check_rows(model, objective, *rows, transform)
                if labels is not None:
                    check_whole_labels(sources["validation"], labels)
        return Accepted(labels, None if accepted is None else accepted.classes)

    def has_accuracy(self, model: nn.Module, sources: Mapping[str, Source]) -> bool:
        """Whether the validation data, which `check` has accepted, have an accuracy.

        Args:
            model: Not changed.
            sources: As in `check`.
        """
        if "validation" not in sources:
            return False
        rows = rows_like(sources["validation"])
        return has_accuracy(model, self.objective, *rows, self.transform)

    def check_written(self, model: nn.Module) -> None:
        """Refuse an optimizer or a scheduler whose state no checkpoint can have.

        Args:
            model: Not changed.

        Raises:
            OptionError: Naming what of it cannot be written without code.
        """
        optimizer = self.optimizer(trainable(copied(model)))
        plain = Plain()
        plain.encode(optimizer.state_dict(), "the state of the optimizer")
        rate = LearningRate(optimizer, self.scheduling)
        plain.encode(rate.values(), "the state of the scheduler")

    def warn(self, model: nn.Module, replicas: int) -> None:
        """Warn of what so many replicas, of whose updates the mean counts, do worse.

        Args:
            model: Not changed.
            replicas: At the start of the fit.
        """
        warn_of_short_steps(self.optimizer(trainable(model)), replicas)

    def recipe(
        self,
        model: nn.Module,
        standing: Standing,
        callbacks: Sequence[Callback],
        train: Source,
        *,
        here: bool = False,
    ) -> Packed[Recipe]:
        """Pack what each replica needs of it.

        Args:
            model: At its start.
            standing: What it goes on from.
            callbacks: Those that stay on the client are left out.
            train: Of which some rows are known.
            here: The replicas are in this process.

        Raises:
            ModelError: If something of it cannot be pickled.
        """
        moved = standing.moved
        rows = trees.of_both(lambda tree: shown_rows(tree, 2), rows_like(train))
        recipe = Recipe(
            model,
            self.objective,
            self.optimizer,
            None if moved is None else moved.optimizer.state_dict(),
            # The others may hold what cannot be pickled.
            [callback for callback in callbacks if callback.runs_on_workers],
            rows,
            self.scheduling,
            b"" if moved is None else moved.schedule(self.scheduling),
            self.transform,
            standing.residual,
        )
        return Packed(recipe, "trainer", here=here)


@contextlib.contextmanager
def attended(
    callbacks: Sequence[Callback], fit: FitBegin, history: History
) -> Iterator[None]:
    """Run `on_fit_begin` of all callbacks, and on the way out `on_fit_end`.

    Only those are told of the end whose `on_fit_begin` came to its own, in reverse
    order.

    Args:
        callbacks: All of them.
        fit: That begins.
        history: Of this fit.
    """
    with contextlib.ExitStack() as ending:
        for callback in callbacks:
            callback.on_fit_begin(fit)
            ending.push(functools.partial(_end, callback, history))
        yield


def _end(
    callback: Callback,
    history: History,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Tell a callback; what it raises must not hide an error that is under way."""
    if error is None:
        callback.on_fit_end(FitEnd(history, None))
    else:
        guarded(
            lambda: callback.on_fit_end(FitEnd(history, error)),
            lambda own: _note(callback, error, own),
        )


def _note(callback: Callback, error: BaseException, own: Exception) -> None:
    text = "".join(traceback.format_exception(own, chain=False))
    error.add_note(f"on_fit_end of {callback!r} failed as well:\n{text}")
    logger.warning("on_fit_end of %r failed: %r", callback, own)


class Before(NamedTuple):
    """What was before a run that goes on from a checkpoint."""

    epoch: int = 0  # the first that is trained
    verdict: Verdict = Verdict()  # of early stopping, on the last row


NOTHING_YET = Before()


class Follower:
    """Turn events into rows of a history, and show how far the run is.

    Args:
        history: Gets a row after each epoch, and in the end what early stopping did.
        callbacks: Their `on_epoch_end` is called with it.
        size: Parameters of the model.
        examples: Of all epochs together, for the bar; None: not known.
        progress: Show a bar; None: if standard error is a terminal.
        judging: In which epochs the model is scored, and when the fit ends early.
        before: What was before the run.
        left_out: See `row_of`.
    """

    def __init__(
        self,
        history: History,
        callbacks: Sequence[Callback],
        size: int,
        examples: int | None,
        progress: bool | None,
        judging: Judging,
        before: Before = NOTHING_YET,
        left_out: int = 0,
    ) -> None:
        self._history = history
        self._callbacks = callbacks
        self._size = size
        self._judging = judging
        self._left_out = left_out
        self._epoch, self._verdict = before
        self._scores = judging.scores(history)
        shown = sys.stderr.isatty() if progress is None else progress
        examples_before = sum(history.column("examples"))
        self._bar = tqdm(
            total=examples, initial=examples_before, unit="ex", disable=not shown
        )
        self._before = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
        rule, verdict = self._judging.stopping, self._verdict
        if rule is not None:
            best = verdict.record.best_epoch
            self._history.stopping = Stopping(
                rule.monitor,
                verdict.reason,
                verdict.details,
                self._scores,
                None if best < 0 else best,
                verdict.record.best_score,
            )

    def follow(self, event: Mapping[str, Any]) -> None:
        """Take note of one event."""
        if event["kind"] == "progress":
            self._bar.update(event["examples"])
            self._bar.set_postfix(epoch=event["epoch"], loss=f"{event['loss']:.4f}")
        elif event["kind"] == "gathered":
            self._end_epoch(event)

    def _end_epoch(self, event: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        seconds, self._before = now - self._before, now
        epoch, columns = self._epoch, self._judging.columns
        self._epoch += 1
        row = row_of(epoch, event, self._size, seconds, columns, self._left_out)
        self._history.append(row)
        self._verdict = self._judging.judge(epoch, [note for _, note in event["notes"]])
        if self._verdict.score is not None:
            self._scores[epoch] = self._verdict.score
        for packed in event["told"]:
            self._history.steps.extend(unpack_rows(packed))
        for callback in self._callbacks:
            callback.on_epoch_end(row)


# A threshold that fits sends a hundredth or less. Where half of all entries reach it,
# it is far below what the parameters move by.
DENSE = 0.5


def hint_at_small_threshold(last: Row) -> bool:
    """Say in the log how to begin, if the last epoch was sent in too small quanta.

    What an entry is behind by more than some quanta, residual clipping drops: then a
    fit learns little, and its loss does not tell why.

    Args:
        last: Row of the history.

    Returns:
        Whether there was something to say.

    Example:
        >>> hint_at_small_threshold({"density": 0.004, "clipped": 3.0})
        False
    """
    if last["density"] < DENSE or not last["clipped"] > 0:
        return False
    logger.warning(
        "in the last epoch %.0f %% of all entries were sent, in quanta of %.1e that "
        "are too small for the steps of this model, and a mass of %.1e was dropped by "
        "clipping; begin with a larger threshold, as AdaptiveThreshold(initial=1e-2), "
        "or keep the residual, residual=KeepResidual()",
        100 * last["density"],
        last["threshold"],
        last["clipped"],
    )
    return True


WATCH_S = 0.5  # how long a question for news may wait for some


class Driver:
    """One run, from its client's thread.

    Args:
        stage: Where it takes place.

    Attributes:
        final: What it ended with: the last agreed state if it did not come to its
            end, None if there was none.
        kept: The epoch whose agreed state this is, if the replicas that had a later
            one are lost.
        begun: Whether the replicas were told to begin.
    """

    final: Final | None
    kept: int | None
    begun: bool

    def __init__(self, stage: Stage) -> None:
        self.final = self.kept = None
        self.begun = False
        self._stage = stage
        self._failure: Exception | None = None
        self._stopped: str | None = None

    def run(self, recipe: Packed[Recipe], on_event: Callable[[Event], None]) -> None:
        """Train, and leave nothing of the run on the stage.

        Args:
            recipe: The user's objects.
            on_event: Called with each event, in order, as it comes.

        Raises:
            DaskDLError: Why the run ended early. Whatever `on_event` raises, and
                Ctrl-C, end it too and come out as they are.
        """
        self._stage.open()
        with contextlib.ExitStack() as ending:
            ending.push(self._end)
            self._stage.start(recipe)
            self.begun = True
            self._follow(on_event)
        reason = self._reason()
        try:
            if reason is not None:
                raise reason
        finally:
            # Else it would hold itself, and by its frames the user's data with it.
            del reason

    def _end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the stage clean; an exception that is under way goes on."""
        try:
            if kind is not None:
                self._stage.stop(f"the client stopped it: {kind.__name__}")
            self.final = self._stage.collect()
        finally:
            self._fall_back()
            self._stage.close()

    def _fall_back(self) -> None:
        """Nothing comes from the replicas: take what was brought before, if anything.

        Neither does anything come of those that had not agreed on anything.
        """
        if self.final is not None and self.final.parameters:
            return
        kept = self._stage.kept()
        if kept is not None:
            parameters, outcome = kept.parameters, None
            if self.final is not None:
                outcome = self.final.outcome
            self.kept, self.final = kept.epoch, Final(parameters, None, outcome)

    def _follow(self, on_event: Callable[[Event], None]) -> None:
        for event in self._events():
            if event["kind"] == "failed":
                self._failure = self._failure or self._exception(event)
            self._stage.heed(event)
            on_event(event)
            if event["kind"] == "stopped":
                self._stopped = event["summary"]
                return

    def _events(self) -> Iterator[Event]:
        """News until every replica has ended."""
        seen = 0
        while True:
            ended = self._stage.ended()
            news = self._stage.news(seen, 0 if ended else WATCH_S)
            seen += len(news)
            yield from news
            self._raise_errors()
            if ended and not news:
                return

    def _raise_errors(self) -> None:
        for replica, error in self._stage.errors():
            where = f"replica {replica} on {self._stage.seats[replica]}"
            if isinstance(error, DaskDLError):
                raise type(error)(f"{where}: {error}") from error
            raise ReplicaError(
                f"{where} failed: {type(error).__name__}: {error}"
            ) from error

    def _exception(self, event: Event) -> Exception:
        kind: type[DaskDLError] = getattr(errors, event["type"])
        if "worker" not in event:
            return kind(event["summary"])
        message = f"replica {event['replica']} on {event['worker']}: {event['summary']}"
        message += self._gone()
        if kind is ReplicaError:
            message += f"\n\nTraceback of the worker:\n{event['traceback']}"
        error = kind(message)
        try:
            if event.get("pickled"):
                # User code: the class may be its own, or known on the worker alone.
                with contextlib.suppress(Exception):  # its traceback says enough
                    error.__cause__ = cloudpickle.loads(event["pickled"])
            return error
        finally:
            # The cause's traceback knows this frame.
            del error

    def _gone(self) -> str:
        """Replicas that were lost before, which may be why another one failed."""
        seats = self._stage.seats
        where = ", ".join(f"replica {r} on {seats[r]}" for r in self._stage.given_up())
        return f"; gone before: {where}" if where else ""

    def _reason(self) -> Exception | None:
        failure, self._failure = self._failure, None
        if failure is not None:
            return failure
        if self._stopped is not None:
            return RunError(f"the run was stopped: {self._stopped}")
        return None


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


def _pause_of(fields: Any) -> SyncPoint | None:
    """Read one that somebody may have written by hand.

    Raises:
        TypeError: If it is none, or a ValueError.
    """
    if fields is None:
        return None
    pause = SyncPoint.from_wire(fields)
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


SEED_BELOW = 2**63  # with a replica's number added it still fits torch's 64 bits


@dataclass(frozen=True)
class TrainerOptions:
    """Options of a trainer that every fit has; refused here if they are wrong.

    Attributes:
        master: The way of training.
        device: ``"auto"`` or a torch device.
        seed: Of the model's start, of shuffling and of torch's generators.
        callbacks: Run on workers or on the client.
        progress: Whether to show a bar; None: if standard error is a terminal.

    Raises:
        OptionError: Naming the option, what was given and what is allowed.
    """

    master: TrainingMaster
    device: str | torch.device = "auto"
    seed: int = 0
    callbacks: Sequence[Callback] = ()
    progress: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.master, TrainingMaster):
            raise OptionError(
                f"master must be a daskdl.TrainingMaster, got {self.master!r}"
            )
        if not is_whole(self.seed) or not 0 <= self.seed < SEED_BELOW:
            raise OptionError(
                f"seed must be a whole number in [0, 2**63), got {self.seed!r}"
            )
        if not isinstance(self.progress, bool | None):
            raise OptionError(
                f"progress must be True, False or None, got {self.progress!r}"
            )
        _check_callbacks(self.callbacks)
        _check_device(self.device)


@dataclass(frozen=True)
class FitOptions:
    """The arguments of a fit; refused here if they are wrong.

    Attributes:
        read: How the data are read.
        epochs: How many times to go through them.
        shuffle: Whether in a new order each time.
        prefetch: Parts with rows of so many batches are loaded meanwhile.
        approach: Whether batch files are written first.
        drop_last: Whether batches of fewer rows are not trained on.

    Raises:
        OptionError: Naming the option, what was given and what is allowed.

    Example:
        >>> FitOptions(ReadOptions(32), epochs=0)
        Traceback (most recent call last):
        daskdl.errors.OptionError: epochs must be a whole number >= 1, got 0
    """

    read: ReadOptions
    epochs: int = 1
    shuffle: bool = True
    prefetch: int = 2
    approach: Approach = "direct"
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_whole("epochs", self.epochs, 1)
        for name in ("shuffle", "drop_last"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise OptionError(f"{name} must be True or False, got {value!r}")
        check_whole("prefetch", self.prefetch, 0)
        check_choice("approach", self.approach, ("direct", "export"))


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


RELAY_BYTES = 8 * 2**20  # for each replica
FILE_BYTES = 4 * 2**20  # of a batch file for one run: large enough to be worth a look

Sources = Mapping[str, Source]  # by "train" and "validation"


class Site(ABC):
    """Does what a trainer is asked for.

    Attributes:
        client: Of the cluster; False: there is none.
    """

    client: Client | Literal[False]

    @abstractmethod
    def check_device(self, device: str) -> None:
        """Refuse a device that is not there, if that can be seen from here.

        Raises:
            OptionError: What is missing.
        """

    @contextlib.contextmanager
    def ready(self, sources: Sources, fit: FitOptions, seed: int) -> Iterator[Sources]:
        """Make the data ready to be trained on.

        Args:
            sources: As given.
            fit: How they are read.
            seed: Of the shuffling.

        Yields:
            Sources of which enough is known.
        """
        ready = dict(sources)
        for phase, source in sources.items():
            named = of_validation() if phase == "validation" else nullcontext()
            with named:
                ready[phase] = looked_at(source, self.client, skips=fit.read.skips)
        with contextlib.ExitStack() as ending:
            if fit.approach == "export":
                options = _export_options(ready["train"], fit, seed)
                exported = temporary_batches(ready["train"], options, self.client)
                ready["train"] = ending.enter_context(exported)
            yield {phase: small_together(source) for phase, source in ready.items()}

    @abstractmethod
    def stage(
        self, options: TaskOptions, sources: Sources
    ) -> AbstractContextManager[Stage]:
        """Prepare a run: choose its replicas, and put the data where they are."""

    def evaluate(
        self,
        model: nn.Module,
        loss: Objective | None,
        source: Source,
        read: ReadOptions,
        wanted: Wanted | None,
    ) -> Evaluation:
        """See :func:`daskdl.evaluation.evaluate`."""
        return evaluation.evaluate(model, loss, source, read, self.client, wanted)

    def predict(
        self, model: nn.Module, X: Any, read: ReadOptions, wanted: OutputOptions
    ) -> Any:
        """See :func:`daskdl.inference.prediction.predict`."""
        return predict(model, X, read, self.client, wanted)


class Cluster(Site):
    """The workers of a Dask cluster.

    Args:
        client: A synchronous client.
    """

    client: Client

    def __init__(self, client: Client) -> None:
        self.client = client

    @override
    def check_device(self, device: str) -> None:
        pass  # the first replica says so

    @override
    @contextlib.contextmanager
    def ready(self, sources: Sources, fit: FitOptions, seed: int) -> Iterator[Sources]:
        check_installed(self.client)
        with super().ready(sources, fit, seed) as ready:
            yield ready

    @override
    @contextlib.contextmanager
    def stage(self, options: TaskOptions, sources: Sources) -> Iterator[Stage]:
        most = most_replicas(rows_in(sources["train"]), options.step_rows)
        seats = seats_of(options.master, self.client, most)
        workers = sorted(set(seats.values()))
        bound = Timeouts.from_config().bound("request")
        with contextlib.ExitStack() as stack:
            supplies = {
                phase: stack.enter_context(
                    supply_of(sharded(own, len(seats)), self.client, workers, bound)
                )
                for phase, own in sources.items()
            }
            limits = Limits(RELAY_BYTES, most)
            yield ClusterStage(self.client, options, seats, supplies, limits)

    @override
    def predict(
        self, model: nn.Module, X: Any, read: ReadOptions, wanted: OutputOptions
    ) -> Any:
        check_installed(self.client)
        return super().predict(model, X, read, wanted)


class Process(Site):
    """This process alone: replicas are threads."""

    client: Literal[False] = False

    @override
    def check_device(self, device: str) -> None:
        check_device(device)

    @override
    @contextlib.contextmanager
    def stage(self, options: TaskOptions, sources: Sources) -> Iterator[Stage]:
        most = most_replicas(rows_in(sources["train"]), options.step_rows)
        replicas = replicas_here(options.master, most)
        own = {phase: sharded(source, replicas) for phase, source in sources.items()}
        yield LocalStage(options, replicas, own)


def _export_options(source: Source, fit: FitOptions, seed: int) -> ExportOptions:
    """Files of some size, whatever the size of a batch."""
    size = fit.read.batch_size
    rows = rows_like(source)
    row_bytes = max(trees.nbytes(rows) // trees.length(rows[0]), 1)
    batches = max(FILE_BYTES // (row_bytes * size), 1)
    return ExportOptions(size, batches, seed if fit.shuffle else None)


@contextlib.contextmanager
def site_of(client: Client | Literal[False] | None) -> Iterator[Site]:
    """Yield where to work; see :func:`daskdl.cluster.client_of`.

    Args:
        client: False: in this process.
    """
    if client is False:
        yield Process()
        return
    with client_of(client) as found:
        yield Cluster(found)


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
