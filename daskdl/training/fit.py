"""One fit on the client, from its options to the trained model.

:class:`FitRun` runs a fit in three stages: `prepare` does a dry run, prepares the data
and chooses the workers; `train` drives the backend and collects the result;
`load_result_` loads the result into the model and returns the state for the next fit.
"""

import ast
import builtins
import contextlib
import functools
import logging
import math
import secrets
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from distributed import Client
from torch import nn
from torch.optim import Optimizer

from daskdl import errors
from daskdl.callbacks import Callback, FitBegin, FitEnd, LayerMonitor, run_hook
from daskdl.channel.protocol import RUN_BITS, run_id
from daskdl.compression.flat import FlatParameters, grid_for
from daskdl.config import is_number
from daskdl.data import batching
from daskdl.data.checks import (
    DryRun,
    LabelCheck,
    check_held_tensors,
    check_same_classes,
    check_training,
    dry_run,
    of_validation,
    unweighted,
)
from daskdl.data.inputs import (
    infer_metadata,
    merge_small_parts,
    scaling_of,
    with_expected_columns,
)
from daskdl.data.named_columns import NO_COLUMNS
from daskdl.data.packing import PackOptions, temporarily_packed
from daskdl.data.source import Source, is_known, rows_in
from daskdl.errors import (
    DaskDLError,
    DataError,
    OptionError,
    ReplicaError,
    RunError,
    SaveError,
    count_of,
)
from daskdl.evaluation.evaluate import has_accuracy, metrics_for
from daskdl.observe.history import (
    History,
    RunRecord,
    check_log_names,
)
from daskdl.observe.tables import LayerTable, Row
from daskdl.observe.timeline import Timeline
from daskdl.process_settings import check_device
from daskdl.saving.json_values import JsonValues
from daskdl.serialization import Packed, PackedModel, copied
from daskdl.training.backend import (
    Backend,
    EpochEnded,
    Event,
    LocalBackend,
    ReplicaFailed,
    ReplicaGone,
    ReplicaJoined,
    RunStopped,
    StepProgress,
    TaskFailed,
    replicas_here,
)
from daskdl.training.base import Parameters, checksum_of, trained_in
from daskdl.training.checkpointing import ResumePlan, checkpoints_of
from daskdl.training.dask_backend import announcer, assign_workers, dask_backend
from daskdl.training.epoch_control import (
    EvaluationPlan,
    LearningRate,
    only,
)
from daskdl.training.fit_spec import (
    FitSpec,
    FitState,
    ReplicaSpec,
    TrainedOptimizer,
)
from daskdl.training.progress import ProgressReporter, is_watched
from daskdl.training.replica import FitResult
from daskdl.training.state import ReplicaState
from daskdl.training.telemetry import add_telemetry
from daskdl.training.tree_reduce import load_optimizer_
from daskdl.util import guarded, installed_meanwhile, text_of, versions

if TYPE_CHECKING:  # torchmetrics loads SciPy and matplotlib
    from daskdl.evaluation.metric_state import MetricSpec

logger = logging.getLogger(__name__)

OUTBOX_BYTES = 2**20  # more updates would become stale; they wait in the residual
INBOX_BYTES = 64 * 2**20  # decoded entries; above this size, the inbox sums updates
FILE_BYTES = 4 * 2**20  # target size of a packed file

Sources = Mapping[str, Source]  # keys: "train" and "validation"


def steps_of_replica(
    spec: FitSpec, source: Source, client: Client | Literal[False], validation: Any
) -> int:
    """Return the optimizer steps of one replica in a fit; see `Trainer.steps`."""
    rows = rows_in(infer_metadata(source, client, skips=spec.read.skips))
    if rows is None:
        raise OptionError(
            "the number of steps is unknown for a stream of unknown length; set "
            "total_steps yourself, or step the schedule by epoch"
        )
    if is_number(validation):
        if not 0 < validation < 1:
            raise OptionError(
                "validation must be a fraction of the rows in (0, 1), got "
                f"{validation!r}"
            )
        rows -= round(rows * validation)
    full, remainder = divmod(rows, spec.read.batch_size)
    batches = full if spec.drop_last else full + bool(remainder)
    steps = math.ceil(batches / spec.stepping.accumulate)
    if client is False:
        replicas = replicas_here(spec.master, spec.device, max(steps, 1))
    else:
        assigned = assign_workers(spec.master, spec.device, client, max(steps, 1))
        replicas = len(assigned)
    return spec.epochs * math.ceil(steps / replicas)


class FitRun:
    """One fit: call `prepare`, then `train` once, then `load_result_`.

    Attributes:
        history: Gets a row after each epoch.
        classes: Names of the labels, if the data name them.
        result: The final state of the run, or the last agreed state if the run ended
            early; None before the end, or if no state is available.
    """

    history: History
    classes: Sequence[str] | None
    result: FitResult | None

    def __init__(
        self,
        spec: FitSpec,
        model: nn.Module,
        state: FitState,
        resume: ResumePlan | None = None,
    ) -> None:
        self.history = History(() if resume is None else resume.rows)
        self.classes = self.result = None
        name = f"{type(model).__name__} {time.strftime('%Y-%m-%d %H:%M:%S')}"
        self._spec = replace(spec, name=spec.name or name)
        self._run_id = secrets.randbits(RUN_BITS)
        self._model = model
        self._state = state
        self._resume = resume
        self._assigned = False  # the initial replicas have been submitted
        self._agreed: ReplicaState | None = None  # the latest that the client received
        self._agreed_epoch: int | None = None  # epoch of a fetched result
        self._deserted = False  # no replica of the current run is left
        self._losses: Counter[str] = Counter()  # of all replicas, by resumed state
        self._failure: Exception | None = None
        self._class_count: int | None = None
        self._gone: set[int] = set()  # replicas that were lost or have retired

    @property
    def shows_progress(self) -> bool:
        """Whether there is a progress bar."""
        return is_watched() if self._spec.progress is None else self._spec.progress

    # ---- before

    @contextlib.contextmanager
    def prepare(
        self, sources: Sources, client: Client | Literal[False]
    ) -> Iterator[None]:
        """Do a dry run, and prepare the data and the backend."""
        spec, model = self._spec, self._model
        self._timeouts = spec.master.timeouts()  # before anything is read
        if client is False:
            check_device(str(spec.device))
        else:
            PackedModel(model)  # raises here if the model cannot be pickled
        known = all(is_known(source) for source in sources.values())
        with contextlib.ExitStack() as stack:
            if client is False:
                accepted = self._dry_run(sources) if known else None
            else:
                title = type(model).__name__
                say = announcer(client, self._run_id, spec.name or "", title)
                stack.push(lambda kind, *_: say(None) if kind is not None else None)

                def waiting(count: int, workers: int) -> None:
                    where = count_of(workers, "worker")
                    say(f"importing torch on {count} of {where}")

                with installed_meanwhile(client, waiting):
                    accepted = self._dry_run(sources) if known else None
                say("preparing data and model")
            counted = _counted(sources, spec, client)
            run, evaluation = accepted or self._dry_run(counted)
            prepared = _prepared(counted, spec, client, run.labels)
            ready = stack.enter_context(prepared)
            train, size = ready["train"], spec.read.batch_size
            self.classes, self._rows = train.classes, rows_in(train)
            # Not those of `train`: packed files have no names for some kinds of data.
            self._columns = counted["train"].columns or NO_COLUMNS
            self._scaled_by = scaling_of(sources["train"], spec.read.transform)
            if spec.drop_last and self._rows is not None and self._rows < size:
                raise DataError(
                    f"drop_last=True drops all rows: batch_size={size}, but the data "
                    f"have {count_of(self._rows, 'row')}; use a batch_size of at most "
                    f"{self._rows}"
                )
            if self._class_count is None and train.classes is not None:
                self._class_count = len(train.classes)
            optimizer = spec.optimizer_for(model)
            self._state = self._state.continued(model, optimizer, spec.scheduling)
            self._run_spec = self._replica_spec(train, run, evaluation)

            def open_backend(spec: ReplicaSpec, first_replica: int = 0) -> Backend:
                if client is False:
                    return LocalBackend(spec, ready)
                return stack.enter_context(
                    dask_backend(client, spec, ready, first_replica)
                )

            self._open_backend = open_backend
            self._backend = open_backend(self._run_spec)
            begin = FitBegin(
                replicas=len(self._backend.workers),
                epochs=spec.epochs,
                epochs_before=self._state.epochs,
                batch_size=size,
                examples=self._rows,
                parameters=self._run_spec.size,
                name=self._run_spec.name or "",
                run=run_id(self._run_spec.run),
            )
            self._begin_record(begin, optimizer)
            stack.enter_context(callback_scope(spec.callbacks, begin, self.history))
            stack.push(self._end_record)  # before the callbacks' on_fit_end
            yield

    def _begin_record(self, begin: FitBegin, optimizer: Optimizer) -> None:
        run = RunRecord(
            name=begin.name,
            id=begin.run,
            began=time.time(),
            options=self._spec.described(self._model, optimizer),
            versions=versions(),
        )
        logger.info("run %s (%s): %s", run.name, run.id, run.options["model"])
        for replica, worker in self._backend.workers.items():
            run.join(replica, worker)
        self.history.run, self.history.timeline = run, Timeline(run.began)
        self.history.layers = LayerTable(trained_in(self._model))

    def _end_record(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        run = self.history.run
        run.seconds = time.time() - run.began
        if error is not None:
            run.error = "".join(traceback.format_exception_only(error)).strip()

    def _dry_run(self, sources: Sources) -> tuple[DryRun, EvaluationPlan]:
        """Try model, optimizer and loss on a few rows, without any worker."""
        spec, model, train = self._spec, self._model, sources["train"]
        objective, transform = spec.objective, spec.read.transform
        module = copied(model)
        check_training(module, objective, spec.optimizer)
        run = dry_run(module, train.first_rows, transform, objective)
        check_log_names(run.logs)
        check_held_tensors(module, run.batch, objective)
        if run.labels is not None:
            run.labels.check_source(train)
        spec.stepping.check_model(model)
        spec.scheduling.check(spec.optimizer, model)
        validation, accuracy = sources.get("validation"), False
        specs: tuple[MetricSpec, ...] = ()
        measured: Sequence[str] = ()
        if validation is not None:
            with of_validation():
                scored = dry_run(module, validation.first_rows, transform, objective)
                check_log_names(scored.logs)
                if scored.labels is not None:
                    scored.labels.check_source(validation)
                accuracy = has_accuracy(objective, scored.output, scored.y)
                if spec.metrics is not None:
                    sets = metrics_for(objective, spec.metrics)
                    from daskdl.evaluation.metric_state import metric_specs, numbers_of

                    specs = metric_specs(
                        sets,
                        unweighted(objective),
                        scored.output,
                        batching.labels_of(scored.y),
                        validation.classes or train.classes,
                    )
                    measured = numbers_of(specs)
        self._class_count = run.classes
        return run, EvaluationPlan.of(
            spec.callbacks,
            spec.epochs,
            validates=validation is not None,
            scheduling=spec.scheduling,
            accuracy=accuracy,
            logs=run.logs,
            specs=Packed(specs, "metrics") if specs else None,
            measured=measured,
        )

    def _replica_spec(
        self, train: Source, run: DryRun, evaluation: EvaluationPlan
    ) -> ReplicaSpec:
        """Make the specification for the replicas."""
        spec, state, resume = self._spec, self._state, self._resume
        flat = FlatParameters(copied(self._model))
        spec.master.check(flat)
        if resume is not None:
            optimizer = spec.optimizer_for(self._model)
            scheduler = spec.scheduling.of(optimizer)
            resume.check(spec.master, self._model, optimizer, scheduler)
        checkpoints = checkpoints_of(spec.callbacks, resume)
        if checkpoints is not None:  # raises here if the state cannot be written
            optimizer, values = spec.optimizer_for(copied(self._model)), JsonValues()
            values.encode(optimizer.state_dict(), "the state of the optimizer")
            rate = LearningRate(optimizer, spec.scheduling)
            values.encode(rate.values(), "the state of the scheduler")
        # The other callbacks may not be picklable.
        callbacks = [
            callback for callback in spec.callbacks if callback.runs_on_workers
        ]
        return ReplicaSpec(
            **{**vars(spec), "callbacks": callbacks, "metrics": None},
            run=self._run_id,
            model=self._model,
            start=None if resume is not None else state.start(spec.scheduling),
            epochs_before=state.epochs,
            evaluating=state.evaluating,
            columns=self._columns,
            scaled_by=self._scaled_by,
            rows=run.rows,
            evaluation=evaluation,
            layers=only(LayerMonitor, spec.callbacks),
            labels=run.labels,
            left_out=train.left_out,
            size=flat.size,
            grid=grid_for(flat),
            outbox_bytes=OUTBOX_BYTES,
            inbox_bytes=INBOX_BYTES,
            timeouts=self._timeouts,
            checkpoints=checkpoints,
            resume=resume,
        )

    # ---- training

    def train(self) -> None:
        """Train to the end.

        Exceptions of callbacks, and KeyboardInterrupt, end the run and propagate
        unchanged.

        Raises:
            DaskDLError: If the run ended early; `result` is then the last agreed state.
        """
        try:
            self._run()
            if self.result is None or self._agreed_epoch is not None:
                raise RunError("the run ended, but its result was lost")
        except DaskDLError as error:
            self._explain(error)
            raise
        finally:
            if self.result is None and self._assigned and self._resume is None:
                # The initial model is the last state that all replicas agreed on.
                self.result = FitResult(Parameters(), has_agreed=False)
        self._finish(self.result)

    def _run(self) -> None:
        """Train in one run, or in several: one more after each loss of all replicas."""
        callbacks = self._spec.callbacks
        following: tuple[ReplicaSpec, Backend] | None = self._run_spec, self._backend
        with ProgressReporter(
            self._run_spec,
            self.history,
            callbacks,
            self._rows,
            shows_bar=self.shows_progress,
        ) as shown:
            while following is not None:
                self._run_spec, self._backend = following
                shown.begin(self._run_spec)
                following = self._run_once(shown)

    def _run_once(self, shown: ProgressReporter) -> tuple[ReplicaSpec, Backend] | None:
        """Start the backend, handle its events to the end, and close the backend.

        Returns:
            The run that follows if all replicas were lost, or None.
        """
        backend, self._deserted = self._backend, False
        following: tuple[ReplicaSpec, Backend] | None = None
        with contextlib.ExitStack() as ending:
            ending.push(self._leave)
            if backend.start():
                self._assigned = True
                for event in backend.poll_events():
                    if isinstance(event, RunStopped):
                        reason = f"the run was stopped: {event.summary}"
                        self._failure = self._failure or RunError(reason)
                        break
                    self._handle_event(event, shown)
            else:
                where = ", ".join(sorted(set(backend.workers.values())))
                reason = f"all workers of the initial replicas have left: {where}"
                self._failure, self._deserted = RunError(reason), True
            if self._deserted:  # the run stays open, so that an adaptive cluster grows
                following = self._follow()
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            # Breaks a reference cycle that keeps the user's data alive.
            del failure
        return following

    def _follow(self) -> tuple[ReplicaSpec, Backend] | None:
        """Open another run after the loss of all replicas, once a worker is available.

        Returns:
            The run; None if there is none, for the reason in `_failure`.
        """
        backend, bound = self._backend, self._run_spec.timeouts.bound("rejoin")
        self._agreed = backend.agreed or self._agreed
        try:
            sent, resumed = self._following()
        except SaveError as error:
            self._give_up(f"the last checkpoint cannot be used: {error}")
            return None
        most = backend.allowed_losses
        while True:
            self._losses[resumed] += 1
            if self._losses[resumed] > most:
                self._give_up(
                    "all replicas were lost, or no worker was left at the start, "
                    f"{most} times after resuming {resumed} "
                    "(distributed.scheduler.allowed-failures)"
                )
                return None
            logger.warning(
                "%s; waiting up to %s for a worker before resuming %s",
                self._failure,
                bound,
                resumed,
            )
            if not backend.wait_for_workers(bound):
                self._give_up(
                    f"no worker joined within {bound}; cannot resume {resumed}; "
                    "increase rejoin_timeout of the master, or add a Checkpoint for "
                    "fit(resume=...)"
                )
                return None
            try:
                following = self._open_backend(sent, max(backend.workers) + 1)
            except (OSError, OptionError) as error:  # the worker has left
                logger.warning("the fit cannot be resumed yet: %s", error)
                continue
            self._failure = None
            self.history.drop_from(sent.first_epoch)
            for replica, worker in following.workers.items():
                self.history.run.join(replica, worker)
            return sent, following

    def _give_up(self, why: str) -> None:
        """Add the reason why the fit ends after the loss of all replicas."""
        assert self._failure is not None, "all replicas were lost"
        self._failure = type(self._failure)(f"{self._failure}; {why}")

    def _following(self) -> tuple[ReplicaSpec, str]:
        """Specify the run after the loss of all replicas, and name what it resumes."""
        sent = replace(self._run_spec, secret=secrets.randbits(63))
        callbacks = self._spec.callbacks
        checkpoint = None if sent.checkpoints is None else sent.checkpoints.newest()
        if checkpoint is not None:
            resume = ResumePlan.of(checkpoint)
            plan = checkpoints_of(callbacks, resume)
            sent = replace(sent, checkpoints=plan, resume=resume, start=None)
            return sent, f"from {resume.store.url}"
        sent = replace(sent, checkpoints=checkpoints_of(callbacks, self._resume))
        if self._agreed is None:
            return sent, "from the start"
        header, common, per_replica = self._agreed
        common = dict(common)
        model, epoch = copied(self._model), header["epoch"] - 1
        Parameters.from_values(common.pop("model")).load_into(model)
        rows = [dict(row) for row in self.history if row["epoch"] <= epoch]
        sent = replace(
            sent,
            model=model,
            grid=grid_for(FlatParameters(copied(model))),
            resume=None,
            start=ReplicaState({**header, "rows": rows}, common, per_replica),
        )
        lacking = ", without the optimizer's" if header["lacks_optimizer"] else ""
        return sent, f"from the state after epoch {epoch}{lacking}"

    def _handle_event(self, event: Event, reporter: ProgressReporter) -> None:
        match event:
            case StepProgress():
                reporter.show(event)
            case EpochEnded():
                reporter.end_epoch(event)
                self._backend.show(self.history[-1])
            case ReplicaJoined(replica, worker):
                self.history.run.join(replica, worker)
            case ReplicaGone(replica, reason):
                self._gone.add(replica)
                self.history.run.leave(replica, reason)
            case ReplicaFailed(replica=replica, summary=summary, deserted=deserted):
                self._deserted |= deserted
                if replica is not None:
                    self.history.run.leave(replica, summary)
                self._failure = self._failure or self._error_of(event)
            case TaskFailed(replica, error):
                where = f"replica {replica} on {self._backend.workers[replica]}"
                if isinstance(error, DaskDLError):
                    raise type(error)(f"{where}: {error}") from error
                raise ReplicaError(f"{where} failed: {text_of(error)}") from error

    def _error_of(self, event: ReplicaFailed) -> Exception:
        """Return the error that `fit` raises, with the replica's error as its cause."""
        kind: type[DaskDLError] = getattr(errors, event.type)
        if event.replica is None:
            return kind(event.summary)
        message = f"replica {event.replica} on {event.worker}: {event.summary}"
        if self._gone:  # their failure may have caused this one
            workers = self._backend.workers
            where = (f"replica {r} on {workers[r]}" for r in sorted(self._gone))
            message += f"; lost before: {', '.join(where)}"
        if kind is ReplicaError:
            message += f"\n\nTraceback of the worker:\n{event.traceback}"
        error = kind(message)
        for note in event.notes if kind is not ReplicaError else ():
            error.add_note(note)  # a traceback already contains the notes
        error.__cause__ = _built_in(event)
        return error

    def _leave(self, kind: type[BaseException] | None, *_: object) -> None:
        """Collect the result of the replicas; stop them first after an exception."""
        backend = self._backend
        try:
            if kind is not None:
                backend.stop(f"the client stopped it: {kind.__name__}")
            self._agreed_epoch, self.result = None, backend.collect()
            for packed in self.result.telemetry if self.result else ():
                add_telemetry(self.history, packed)
        finally:
            self._agreed = agreed = backend.agreed or self._agreed
            result = self.result
            # A result of replicas that agreed on no state has no parameters either.
            if agreed is not None and not (result and result.parameters):
                result = result or FitResult(Parameters())
                parameters = Parameters.from_values(agreed.common["model"])
                self.result = replace(result, parameters=parameters, has_agreed=True)
                self._agreed_epoch = agreed.header["epoch"] - 1
            backend.close()

    def _explain(self, error: DaskDLError) -> None:
        """Add notes: the state that `model_` has now, and the last checkpoint."""
        if self._agreed_epoch is not None:
            error.add_note(
                f"model_ holds the state agreed on after epoch {self._agreed_epoch}, "
                "the latest that the client received"
            )
        elif self._assigned and not self.result:
            when = "before" if self._resume else "at the start of"
            error.add_note(
                "the client received no agreed state: model_ holds the state "
                f"{when} this fit"
            )
        plan = self._run_spec.checkpoints
        if plan is None:
            return
        try:
            newest = plan.newest()
        except SaveError as save_error:
            error.add_note(f"the last checkpoint cannot be read: {save_error}")
        else:
            where = "not written yet" if newest is None else newest.store.url
            error.add_note(f"the last checkpoint, for fit(resume=...), is {where}")

    def _finish(self, result: FitResult) -> None:
        """Complete `history.stopping`, and conclude the checkpoints."""
        sent, history = self._run_spec, self.history
        rule, stopping = sent.evaluation.stopping, history.stopping
        if stopping is not None and rule is not None:
            history.stopping = replace(stopping, restored=result.restored)
            lost = rule.restore_best and not result.restored
            if lost and stopping.best_epoch is not None:
                logger.warning(
                    "model_ is the model of the last epoch: all replicas with the best "
                    "model, of epoch %s, were lost, and restore_best needs one of them",
                    stopping.best_epoch,
                )
        rows = history[sent.first_epoch :]
        # After a checkpoint in mid-epoch, no rows of that epoch may remain.
        if any(row["examples"] or sent.resume is not None for row in rows):
            if sent.checkpoints is not None:
                sent.checkpoints.conclude()
        elif sent.first_epoch < sent.epochs and not (stopping and stopping.reason):
            raise RunError(
                "the run ended, but no replica has trained on any rows; see the "
                "workers' logs for the reasons"
            )
        hint_at_small_threshold(history[-1])

    # ---- after

    def load_result_(self, model: nn.Module) -> FitState:
        """Load the result into the model, also if the fit ended early.

        Returns:
            The state from which the next fit continues.
        """
        before, result, scheduling = self._state, self.result, self._spec.scheduling
        epochs = before.epochs
        if self.history:  # includes the epochs before the resumed checkpoint
            epochs += self.history[-1]["epoch"] + 1
        if result is None:
            return replace(before, epochs=epochs)
        result.parameters.load_into(model)
        optimizer, former = self._spec.optimizer_for(model), before.optimizer
        trained = TrainedOptimizer.new(optimizer, scheduling, model)
        if result.optimizer is not None:
            load_optimizer_(optimizer, *result.optimizer)
            trained.rate.load_(result.schedule)
        elif former is not None:  # the run ended early
            training_state = former.training_state(scheduling)
            optimizer.load_state_dict(training_state["optimizer"])
            trained.rate.restore_(training_state["schedule"])
        carried, checksum = {**before.carried, **result.carried}, before.checksum
        if result.has_agreed:  # else a former residual belongs to the initial model
            for name in {"residual", "grid"} - result.carried.keys():
                carried.pop(name, None)
            checksum = checksum_of(model)
        return replace(
            before,
            optimizer=trained,
            carried=carried,
            checksum=checksum,
            epochs=epochs,
            class_count=self._class_count,
            columns=self._columns,
            scaled_by=self._scaled_by,
        )


def _counted(
    sources: Sources, spec: FitSpec, client: Client | Literal[False]
) -> Sources:
    """Return sources with known lengths and first rows, and with the same columns."""
    skips = spec.read.skips
    counted = {"train": infer_metadata(sources["train"], client, skips=skips)}
    if "validation" in sources:
        with of_validation():
            source = sources["validation"]
            columns = counted["train"].columns or NO_COLUMNS
            if sources["train"].columns is None:  # columns are not compared yet
                source = with_expected_columns(source, columns, columns)
            else:
                source = source.arranged(columns)
            counted["validation"] = infer_metadata(source, client, skips=skips)
            check_same_classes(counted["validation"], counted["train"].classes)
    return counted


@contextlib.contextmanager
def _prepared(
    sources: Sources,
    spec: FitSpec,
    client: Client | Literal[False],
    labels: LabelCheck | None,
) -> Iterator[Sources]:
    """Yield sources with small parts merged, after packing if requested."""
    ready = dict(sources)
    with contextlib.ExitStack() as stack:
        if spec.approach == "export":
            train, size = ready["train"], spec.read.batch_size
            rows = train.first_rows
            assert rows is not None, "empty data are an error"
            batches = max(FILE_BYTES // (batching.row_bytes(rows) * size), 1)
            seed = spec.seed if spec.shuffle else None
            options = PackOptions(
                size * batches, seed, labels=labels, skips=spec.read.skips
            )
            packed = temporarily_packed(train, options, client)
            ready["train"] = stack.enter_context(packed)
        yield {phase: merge_small_parts(source) for phase, source in ready.items()}


@contextlib.contextmanager
def callback_scope(
    callbacks: Sequence[Callback], fit: FitBegin, history: History
) -> Iterator[None]:
    """Run `on_fit_begin` of all callbacks on entry, and `on_fit_end` on exit.

    `on_fit_end` runs in reverse order, for callbacks whose `on_fit_begin` returned.
    """
    with contextlib.ExitStack() as ending:
        for callback in callbacks:
            run_hook(callback.on_fit_begin, fit)
            ending.push(functools.partial(_end_callback, callback, history))
        yield


def _end_callback(
    callback: Callback,
    history: History,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Run `on_fit_end`; its exception becomes a note of an error in progress."""
    if error is None:
        callback.on_fit_end(FitEnd(history, None))
        return

    def note(hook_error: Exception) -> None:
        text = "".join(traceback.format_exception(hook_error, chain=False))
        error.add_note(f"on_fit_end of {callback!r} failed as well:\n{text}")
        logger.warning("on_fit_end of %r failed: %r", callback, hook_error)

    guarded(lambda: callback.on_fit_end(FitEnd(history, error)), note)


def _built_in(event: ReplicaFailed) -> Exception | None:
    """Recreate a replica's exception from its class name; None if it is not built in.

    User classes are not looked up: a message must not decide which code is imported.
    """
    module, _, name = event.error.rpartition(".")
    kind = getattr(builtins, name, None) if module == "builtins" else None
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return None
    text = event.summary.removeprefix(f"{name}: ")
    argument: object = text
    if issubclass(kind, KeyError):  # its text is the `repr` of the key
        argument = guarded(lambda: ast.literal_eval(text), lambda _: text)
    try:
        return kind(argument)
    except TypeError:  # the class needs other arguments
        return None


# A suitable threshold sends a few percent of the parameters. A threshold that half of
# the residuals reach is far smaller than the changes between two exchanges.
DENSE = 0.5


def hint_at_small_threshold(last: Row) -> None:
    """Log a hint if the quanta of the last epoch were too small.

    Residual clipping then drops the excess of each residual over a few quanta: the fit
    learns little, and its loss does not show why.
    """
    if last["density"] >= DENSE and last["clipped"] > 0:
        logger.warning(
            "the threshold is too small for the steps of this model: in the last epoch "
            "%.0f %% of the parameters were sent, in quanta of %.1e, and clipping "
            "discarded a mass of %.1e; start with a larger threshold, such as "
            "AdaptiveThreshold(initial=1e-2), or keep the residual, "
            "residual=KeepResidual()",
            100 * last["density"],
            last["threshold"],
            last["clipped"],
        )
