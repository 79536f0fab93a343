"""The training loop of one replica: join, build, train each epoch, report, leave."""

import contextlib
import functools
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from daskdl import errors
from daskdl.callbacks import EpochBegin, Step, run_hook
from daskdl.channel.base import (
    BarrierResult,
    Channel,
    ChannelStats,
    Stopped,
)
from daskdl.channel.leasing import SyncPoint
from daskdl.channel.protocol import (
    MAX_TEXT,
    BarrierKind,
    LiveReport,
    ValidatedWork,
)
from daskdl.compression.flat import Untrained
from daskdl.data import batching
from daskdl.data.batching import floating_dtype
from daskdl.data.checks import (
    ShapeCheck,
    preserved_random_state,
    transformed_batch,
)
from daskdl.errors import ChannelError, DivergedError, hide_internal_frames_, shown
from daskdl.evaluation.evaluate import Score, add_sums, score_batches
from daskdl.objective import OwnStep
from daskdl.observe.tables import StepRow
from daskdl.observe.timeline import SpanLog
from daskdl.process_settings import (
    generators,
    restore_generators,
    seed_generators,
)
from daskdl.serialization import copied
from daskdl.training.base import (
    Exchange,
    Parameters,
    ReplicaContext,
    SoloExchange,
    largest_in,
    load_tensors_,
    others_in,
    train_,
)
from daskdl.training.checkpointing import (
    CheckpointWriter,
    Fingerprint,
    ResumePlan,
    check_checkpoint,
    run_in_thread,
    start_state,
    wait_for,
)
from daskdl.training.data_feed import Feed, PartStore
from daskdl.training.epoch_control import EarlyStopper, LearningRate
from daskdl.training.fit_spec import ReplicaSpec
from daskdl.training.optimizer_step import (
    BatchGroup,
    LossWatch,
    Stepper,
    Symptoms,
    diagnosis,
    restore_optimizer_,
    state_of,
)
from daskdl.training.state import (
    UNSHARED,
    ReplicaState,
    StartState,
    State,
    copied_state,
    decoded,
    encoded,
    restoring,
)
from daskdl.training.telemetry import (
    EpochReport,
    EpochTotals,
    LayerLog,
    Reports,
    RowLog,
    StepLog,
    check_trained,
    reports_of,
    telemetry_of,
)
from daskdl.training.tree_reduce import Reduced, optimizer_arrays, rest_of
from daskdl.util import guarded, text_of

if TYPE_CHECKING:  # torchmetrics loads SciPy and matplotlib
    from daskdl.evaluation.metric_state import MetricSpec


OUT_OF_MEMORY = (
    "use a smaller batch_size, with accumulate= for the same optimizer step, or "
    "autocast=torch.bfloat16; other processes and replicas may use the same device"
)
DEVICE_ASSERT = (
    "an index was out of range, for example one of an embedding: with device='cpu', "
    "the traceback shows the line; this process can no longer use the device: restart "
    "it, or the workers with client.restart()"
)


@dataclass
class FitResult:
    """The result of one replica, or the merged result of all replicas.

    Attributes:
        parameters: The agreed parameters.
        optimizer: One replica's weighted share of the optimizer state, or the sum of
            all shares, and the `rest_of` one optimizer; None if the run did not finish.
        carried: See `Exchange.carried`; empty if no replica carries anything.
        schedule: State of the scheduler; empty without scheduler or optimizer.
        telemetry: Packed step rows and spans that were not reported before, see
            `telemetry_of`; one for each replica.
        restored: Whether the parameters are those of the best epoch.
        has_agreed: Whether the replicas have agreed since the start; otherwise the
            parameters are the initial ones.
        finished: Whether the replica, or any replica, reached the end of the run;
            otherwise the other fields describe the last agreed state.
        senders: Number of replicas whose mean is carried for each pattern; 1 if it is
            not named.
    """

    parameters: Parameters
    optimizer: tuple[Reduced, Mapping[str, Any]] | None = None
    carried: State = field(default_factory=dict)
    schedule: bytes = b""
    telemetry: Sequence[bytes] = ()
    restored: bool = False
    has_agreed: bool = True
    finished: bool = True
    senders: Mapping[str, int] = field(default_factory=dict)


MAX_REASON = 500  # characters of `Step.stop`, sent with every later lease request
LIVE_S = 1.0  # least time between two reports for the dashboard, in an epoch


class Replica:
    """One replica on a worker: a live model, its optimizer, and its exchange.

    Attributes:
        module: The model, on its device.
        optimizer: Optimizer of the trainable parameters.
        rate: Learning rate of the optimizer.
        stepper: Makes the optimizer steps.
        exchange: Exchange with the other replicas.
        stopper: Decides whether the fit ends early.
        loss_watch: Detects diverging losses.
        steps: Steps of this replica, over all epochs.
        seen: Examples this replica has trained on, over all epochs.
        weight: This replica's share of the examples of all replicas.
        totals: Sums of the current epoch.
        first_epoch: The first epoch to train in.
        interval: Number of the current sync interval, from 0 over all epochs.
        agreed: Parameters that all replicas agreed on last; at first the initial ones.
        has_agreed: Whether all replicas have agreed since the start of the run.
        checkpoints: Writes checkpoints; None: the fit has none.
    """

    module: nn.Module
    optimizer: Optimizer
    rate: LearningRate
    stepper: Stepper
    exchange: Exchange
    stopper: EarlyStopper
    agreed: Parameters
    checkpoints: CheckpointWriter | None

    def __init__(
        self,
        number: int,
        spec: ReplicaSpec,
        channel: Channel,
        device: torch.device,
        store: PartStore,
    ) -> None:
        self._number = number
        self._spec = spec
        self._channel = channel
        self._device = device
        self._store = store
        self._log = StepLog(spec.telemetry_every)
        self._layers = LayerLog(number, spec.layers)
        self._spans = SpanLog(number, channel.clock.now)
        channel.on_wait = self._spans.wait
        self._shapes = ShapeCheck(batching.row_spec(spec.rows), spec.read.transform)
        self._joined = False
        self.loss_watch = LossWatch(spec.max_loss_rise)
        self.steps = self.seen = self.interval = 0
        self.weight = 0.0
        self.totals = EpochTotals()
        self._ended_totals, self._traffic = (
            EpochTotals(),
            ChannelStats(),
        )  # of ended epochs
        self._live_at = -math.inf if channel.has_dashboard else math.inf
        self.first_epoch = spec.first_epoch
        self.has_agreed = spec.resumes_lost_run

    def run(self) -> FitResult:
        """Join the run, train, and leave.

        Returns:
            The replica's result, partial if it was stopped or failed. A failure has
            been reported to the channel.
        """
        try:
            return guarded(self._run, self._fail)
        except Stopped:
            if self._channel.closing and self._joined:
                self.exchange.leave()
            return self._unfinished()

    def _run(self) -> FitResult:
        self.join()
        self.train()
        return self._finished()

    def _fail(self, error: Exception) -> FitResult:
        """Report an error of daskdl or of the user's code."""
        if isinstance(error, torch.OutOfMemoryError):
            error.add_note(OUT_OF_MEMORY)
        elif "device-side assert" in text_of(error):
            error.add_note(DEVICE_ASSERT)
        self._channel.fail(failure_of(error, self.steps))
        return self._unfinished()

    # ---- join, build, restore

    def join(self) -> None:
        """Join the run, build the model and exchange, and restore their state."""
        joined = self._channel.join()  # waits for the other initial replicas
        start, header, step = None, dict[str, Any](), None
        if joined.snapshot is not None:
            state, step = decoded(joined.snapshot), joined.snapshot["step"]
            start = StartState.of(state, "the state of another replica")
            header = dict(state.header)
        elif self._spec.resume is not None:
            start = self._read_checkpoint(self._spec.resume, joined.members)
        elif self._spec.start is not None:
            start = StartState.of(self._spec.start, "the state on the client")
        self._build(joined.members, start, header, joins=step is not None)
        if start is not None:
            self._load_(start)
            if step is not None:
                self._catch_up(start, step)
            elif self._spec.resume is not None or self._spec.resumes_lost_run:
                self._resume(start)
        self._channel.serve_snapshot(self.snapshot)
        self._joined = True

    def _read_checkpoint(self, plan: ResumePlan, members: Sequence[int]) -> StartState:
        place = sorted(members).index(self._number)
        reading = run_in_thread(
            lambda: start_state(plan, place, len(members)), "daskdl-resume"
        )
        bound = self._spec.timeouts.bound("data")
        return wait_for(self._channel, reading, bound, f"reading {plan.store.url}")

    def _build(
        self,
        members: Sequence[int],
        start: StartState | None,
        header: Mapping[str, Any],
        *,
        joins: bool,
    ) -> None:
        """Build the model and what trains it.

        Args:
            members: See `ReplicaContext`.
            start: Provides the model; None: the model is that of the specification.
            header: Header of the state of another replica; empty if there is none.
            joins: See `ReplicaContext`.
        """
        spec, channel, number = self._spec, self._channel, self._number
        self.module = train_(spec.model.to(self._device), spec.evaluating)
        self._untrained = Untrained(self.module)  # before loading, as on the client
        if start is not None:
            if spec.resume is not None and not joins:
                check_checkpoint(start, self.module)
            with restoring(start.common.at):
                load_tensors_(self.module, start.tensors)
            self._untrained.find_changed()
        self._layers.watch(self.module)
        self.optimizer = spec.optimizer_for(self.module)
        if start is not None:
            self._load_optimizer_(start)
        context = ReplicaContext(
            self.module,
            channel,
            number,
            members,
            joins=joins,
            optimizer=self.optimizer,
            untrained=self._untrained,
        )
        scale, alone = spec.master.solo_scale, len(members) == 1 and not joins
        begins = start is None or start.kind == UNSHARED
        if alone and scale is not None and begins:
            self.exchange = SoloExchange(context, scale)
        else:
            self.exchange = spec.master.attach(context)
        if start is not None:
            common = start.common.values["exchange"]
            parts = [part.values["exchange"] for part in start.parts]
            files = " or ".join(part.at for part in (start.common, *start.parts))
            with restoring(f"{files}: exchange"):
                self.exchange.load_(common, parts)
        self.agreed = self.exchange.agreed()
        self.rate = LearningRate(self.optimizer, spec.scheduling, spec.epochs)
        self.stepper = Stepper(
            self.module,
            spec.objective,
            self.optimizer,
            spec.stepping,
            self._device,
            spec.read.batch_size,
        )
        seed_generators(spec.seed + number, self._device)
        self.stopper = EarlyStopper(spec.evaluation, now=channel.clock.now)
        self.checkpoints = None
        if spec.checkpoints is not None:
            rows: Sequence[Mapping[str, Any]]
            rows = () if spec.start is None else spec.start.header.get("rows", ())
            rows = rows if spec.resume is None else spec.resume.rows
            self.checkpoints = CheckpointWriter(
                spec.checkpoints,
                number,
                channel,
                spec.timeouts,
                RowLog(
                    spec.size,
                    spec.evaluation.columns,
                    header.get("rows", rows),
                    now=channel.clock.now,
                    left_out=spec.left_out,
                ),
                header.get("checkpoints", 0),
            )

    def _load_(self, start: StartState) -> None:
        """Load optimizer, schedule and loss scaler; errors name file and field."""
        donor, at = start.donor
        if donor.get("schedule") is not None:
            self._load_optimizer_(start)  # a new scheduler has changed the rate
            with restoring(f"{at}: schedule"):
                self.rate.restore_(donor["schedule"])
        with restoring(f"{at}: scaler"):
            self.stepper.restore_(donor.get("scaler", {}))

    def _load_optimizer_(self, start: StartState) -> None:
        state = start.optimizer
        if state is None:  # the trainer has another optimizer now
            return
        with restoring(f"{state.at}: optimizer"):
            if self._spec.resume is None:
                self.optimizer.load_state_dict(dict(state.values))
            else:
                restore_optimizer_(self.optimizer, state.values)

    def _resume(self, start: StartState) -> None:
        """Take over the progress of earlier replicas; errors name file and field."""
        resume, stopping = self._spec.resume, start.common.values["early_stopping"]
        with restoring(f"{start.common.at}: early_stopping"):
            self.stopper.restore_(stopping, None if resume is None else resume.epoch)
        for part, at in start.parts[:1]:
            self.steps = part["steps"]
            with restoring(f"{at}: loss_watch"):
                self.loss_watch.restore_(part["loss_watch"])
            with restoring(f"{at}: random"):
                restore_generators(part["random"], self._device)
        for part, at in start.parts:
            self.seen += part["examples"]
            self.weight += part["weight"]
            with restoring(f"{at}: totals"):
                self.totals.add(EpochTotals(**part["totals"]))
        # No replica sends updates before all replicas have the same state and grid.
        note = {"digest": self.agreed.digest, "work": self.totals.to_wire()}
        gathered = self._channel.barrier("resume", note, BarrierKind.RESUME)
        check_alike(gathered, "after they have read a checkpoint")

    def _catch_up(self, start: StartState, step: int) -> None:
        """Continue from another replica's state, in the current epoch of the run."""
        _, epoch, report, self.interval = self._channel.activate(step)
        self.rate.catch_up_(epoch)
        self.stopper.restore_(start.common.values["early_stopping"], epoch)
        if report:
            reports = reports_of(dict(report["payloads"]), report["departed"])
            self.stopper.end_epoch(epoch - 1, reports, None)
        self.first_epoch = epoch

    def snapshot(self) -> dict[str, Any]:
        """Return the state that a joining replica starts from."""
        if isinstance(self.exchange, SoloExchange):
            # The joining replica is the second one.
            alone = self.exchange.state()
            self.exchange = self._spec.master.attach(self.exchange.context)
            self.exchange.load_(alone.common, [])
        admitted = self.exchange.admit()
        self._untrained.find_changed()
        common, training_state = self._parts(self._untrained.tensors())
        header = {} if self.checkpoints is None else self.checkpoints.header()
        state = ReplicaState(
            {"kind": self.exchange.kind, **header}, common, training_state
        )
        return {**admitted, **encoded(state)}

    def _parts(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], ...]:
        """Return the common state, and this replica's optimizer, schedule and scaler.

        Args:
            tensors: Buffers and frozen parameters to include.
        """
        common = {
            "exchange": self.exchange.state().common,
            "tensors": tensors,
            "early_stopping": self.stopper.values(),
        }
        training_state = {
            "schedule": self.rate.values(),
            "scaler": self.stepper.values(),
        }
        averaged = self.exchange.averages_optimizer
        (common if averaged else training_state)["optimizer"] = state_of(self.optimizer)
        return common, training_state

    # ---- train

    def train(self) -> None:
        """Train for all epochs, or until early stopping ends the fit."""
        for epoch in range(self.first_epoch, self._spec.epochs):
            if self.stopper.over:
                break
            self._train_epoch(epoch)
            self._end_epoch(epoch)
        if self.checkpoints is not None:
            self.checkpoints.finish()

    def _train_epoch(self, epoch: int) -> None:
        replicas = 1 + len(self._channel.peers())
        begin = EpochBegin(self._number, epoch, replicas, self.rate.value)
        self._spans.enter("callbacks")
        for callback in self._spec.callbacks:
            run_hook(callback.on_epoch_begin, begin)
        totals, feed = self.totals, self._feed("train", epoch, self.totals)

        def wait() -> None:
            self._spans.enter("exchange")
            self.exchange.sync(self.interval, totals.examples, ended=False)
            self._spans.enter("data")

        while True:
            started = self._spans.enter("data")
            groups = feed.groups(wait, self._spec.stepping.accumulate)
            for group in groups:
                self._step(epoch, group, feed.rows)
            totals.seconds += self._spans.enter("other") - started
            if feed.sync_point is None:
                return
            self._take_checkpoint(epoch, feed.sync_point)

    def _step(self, epoch: int, group: BatchGroup, rows: int) -> None:
        self._channel.check()
        enter, exchange, totals = self._spans.enter, self.exchange, self.totals
        started = enter("exchange")
        exchange.before_step(self.interval)
        enter("compute")
        loss, weight = self.stepper.backward(group)
        if weight and (not math.isfinite(loss) or self.loss_watch.note(loss)):
            is_nan = math.isnan(loss)
            only_loss_is_nan = is_nan and self.stepper.has_finite_outputs(group)
            raise self._diverged(epoch, loss, only_loss_is_nan=only_loss_is_nan)
        callbacks, rate = self._spec.callbacks, math.nan
        if callbacks or self.steps + 1 >= self._log.next_step:
            scale = exchange.learning_rate_scale * exchange.rate_factor
            rate = self.rate.value * scale
        sampled = self._layers.due(self.steps + 1)
        with self._layers.measuring() if sampled else contextlib.nullcontext():
            self.stepper.update(exchange.learning_rate_scale, exchange.rate_factor)
        self.steps += 1
        self._channel.count_steps(self.steps)
        if self.rate.per_step:
            self.rate.step_()
        if callbacks:
            # Before the exchange, which also shares changes made by callbacks.
            paused = enter("callbacks")
            step = Step(self._number, epoch, self.steps, loss, rows, rate)
            for callback in callbacks:
                run_hook(callback.on_step_end, step)
            if step.stopped is not None:
                reason = shown(f": {step.stopped}", MAX_REASON) if step.stopped else ""
                where = f"at step {self.steps} of replica {self._number}"
                totals.stop = f"a callback stopped the fit {where}{reason}"
        resumed = enter("exchange")
        if callbacks:
            started += resumed - paused
        try:
            exchange.after_step(self.interval, rows)
        except DivergedError as error:
            raise self._diverged(epoch, loss, str(error)) from None
        if sampled:
            self._layers.add(epoch, self.steps, exchange.residual_norms())
        totals.loss_sum += loss * weight
        totals.examples += rows
        totals.excess += weight - rows
        now = enter("data")
        step_s = now - started
        if self.steps >= self._log.next_step and self._log.begin_row(
            self.steps, exchange.exchanged
        ):
            row = StepRow(
                epoch=epoch,
                step=self.steps,
                replica=self._number,
                loss=loss,
                learning_rate=rate,
                step_s=step_s,
                **vars(exchange.step_stats()),
            )
            self._log.add(row)
        # Prefer a step with an exchange, as others have no density; wait for one up to
        # `LIVE_S` longer.
        if now >= self._live_at + (0.0 if exchange.exchanged else LIVE_S):
            self._report_live(epoch, now)

    def _report_live(self, epoch: int, now: float) -> None:
        """Report numbers to the dashboard, as plain ones: the scheduler checks them."""
        self._live_at = now + LIVE_S
        totals, before, stats = (
            self.totals,
            self._ended_totals,
            self.exchange.step_stats(),
        )
        traffic = self._traffic + self._channel.stats_so_far()
        live = LiveReport(
            at_s=now,
            epoch=epoch,
            step=self.steps,
            loss_sum=float(before.loss_sum + totals.loss_sum),
            examples=int(before.examples + totals.examples),
            excess=float(before.excess + totals.excess),
            sent_bytes=int(traffic.sent_bytes),
            received_bytes=int(traffic.received_bytes),
            learning_rate=float(self.rate.value),
            threshold=float(stats.threshold),
            density=float(stats.density),
            staleness=float(stats.staleness),
            residual_norm=float(stats.residual_norm),
            residual_p50=float(stats.residual_p50),
            residual_p99=float(stats.residual_p99),
            waits_s=traffic.waits_s,
        )
        self._channel.report_live(live)

    def _feed(self, phase: str, epoch: int, totals: EpochTotals) -> Feed:
        own_step = isinstance(self._spec.objective, OwnStep)
        check = self._shapes.check
        fits = None if own_step else functools.partial(check, self.module, self._device)
        logs = self.stepper.logs.take
        return Feed(
            self._spec, phase, epoch, self._channel, self._store, totals, logs, fits
        )

    # ---- sync points

    def _sync(self, epoch: int) -> None:
        """Agree with all replicas."""
        started = self._spans.enter("exchange")
        self.totals.logs = add_sums(self.totals.logs, self.stepper.logs.take())
        loss = math.nan if self.loss_watch.last is None else self.loss_watch.last
        largest = largest_in(self.module)
        if not math.isfinite(largest):
            raise self._diverged(epoch, loss, f"parameters became {largest}")
        try:
            self.exchange.sync(self.interval, self.totals.examples, ended=True)
        except DivergedError as error:
            raise self._diverged(epoch, loss, str(error)) from None
        self.agreed = self.exchange.agreed()
        self.has_agreed = True
        self.totals.seconds += self._spans.enter("other") - started

    def _take_checkpoint(self, epoch: int, sync_point: SyncPoint) -> None:
        """Take a checkpoint at a sync point in the middle of an epoch."""
        assert self.checkpoints is not None, "else there are no such sync points"
        self._sync(epoch)
        note = {
            "digest": self.agreed.digest,
            "checkpoint": self.checkpoints.counters(),
        }
        gathered = self._channel.barrier(
            f"pause {self.interval}", note, BarrierKind.SYNC
        )
        check_alike(gathered, f"in the middle of epoch {epoch}")
        self.interval += 1
        sync_point = sync_point._replace(departed=gathered.counted["departed"])
        self.checkpoints.take(gathered, lambda: self._checkpoint(epoch, sync_point))

    def _end_epoch(self, epoch: int) -> None:
        self._sync(epoch)
        # Drops the state of the epoch before while the new one is validated.
        self._channel.keep_state(epoch, None)
        self.seen += self.totals.examples
        report = self._report(epoch)
        self._traffic += report.traffic
        if self._channel.has_dashboard:
            self._report_live(epoch, self._channel.clock.now())
        gathered = self._channel.barrier(
            f"report {epoch}",
            report.to_wire(),
            BarrierKind.REPORT,
            telemetry_of(self._log, self._layers, self._spans),
        )
        check_alike(gathered, f"at the end of epoch {epoch}")
        reports = reports_of(gathered.payloads, gathered.counted["departed"])
        check_trained(epoch, reports)
        self._ended_totals.add(self.totals)
        self.totals = EpochTotals()
        self.interval += 1
        seen = sum(report.seen for report in reports)
        self.weight = self.seen / seen if seen else 0.0
        self._decide(epoch, reports)
        if self._channel.has_client:
            present = gathered.payloads.keys() - gathered.gone.keys()
            is_first = self._number == min(present, default=self._number)
            state = self._agreed_state(epoch, with_optimizer=is_first)
            self._channel.keep_state(epoch, functools.partial(encoded, state))
        if self.checkpoints is not None:
            over = self.stopper.over or epoch + 1 == self._spec.epochs
            make = functools.partial(self._checkpoint, epoch + 1)
            self.checkpoints.end_epoch(epoch, gathered, reports, over, make)

    def _agreed_state(self, epoch: int, *, with_optimizer: bool) -> ReplicaState:
        """Copy the state at the end of an epoch for the client.

        After the loss of all replicas, the fit resumes from this state. The model and
        the counters are equal on all replicas; the optimizer is that of this one.

        Args:
            epoch: Epoch that has ended, counted from 0.
            with_optimizer: Whether to copy the tensors of the optimizer too, which
                with Adam take twice the memory of the model. The client fetches from
                the first replica, so the others leave these tensors out.
        """
        optimizer = state_of(self.optimizer)
        lacks_optimizer = not with_optimizer and bool(optimizer["state"])
        if not with_optimizer:
            optimizer["state"] = {}
        header = {
            "kind": UNSHARED,
            "epoch": epoch + 1,
            "lacks_optimizer": lacks_optimizer,
            "stopping": self.stopper.decision.values(),
        }
        common = {
            "model": self.agreed.values(),
            "exchange": self.exchange.carried(ended=False),
            "early_stopping": self.stopper.values(),
        }
        training_state = {
            "optimizer": optimizer,
            "schedule": self.rate.values(),
            "scaler": self.stepper.values(),
        }
        return ReplicaState(header, common, copied_state(training_state))

    def _decide(self, epoch: int, reports: Reports) -> None:
        """Step the scheduler, and decide whether the fit continues."""
        evaluation = self._spec.evaluation
        scored = evaluation.scored(epoch) or not evaluation.validates
        self.rate.end_epoch(reports, scored=scored)
        self.stopper.end_epoch(epoch, reports, self.agreed)

    def _report(self, epoch: int) -> EpochReport:
        validated = self._validate(epoch)
        return EpochReport(
            digest=self.agreed.digest,
            seen=self.seen,
            totals=self.totals,
            exchange=self.exchange.stats(),
            traffic=self._channel.stats(),
            score=validated and Score(*validated["score"]),
            unscored=validated["unscored"] if validated else "",
            measured=validated["measured"] if validated else b"",
            **self.rate.report(),
            **self.stopper.report(),
            checkpoint={} if self.checkpoints is None else self.checkpoints.counters(),
        )

    def _validate(self, epoch: int) -> ValidatedWork | None:
        """Score this replica's share of the validation data; None: not in this epoch.

        The scores go with the leases, so they count even if the replica fails before it
        reports.
        """
        plan = self._spec.evaluation
        if not plan.scored(epoch):
            return None
        specs: tuple[MetricSpec, ...] = ()
        observe = None
        if plan.specs is not None:
            from daskdl.evaluation.metric_state import MetricAccumulator, sent_states

            specs = plan.specs.shared()
            accumulator = MetricAccumulator(specs, "the validation data")
            observe = accumulator.add_
        self._spans.enter("validation")
        totals = EpochTotals()
        feed = self._feed("validation", epoch, totals)
        score, measured, has_leases = Score(), b"", True
        self._channel.serve_snapshot(None)  # the module shows the agreed parameters
        with self.exchange.showing_agreed():
            while has_leases:
                score += score_batches(
                    self.module,
                    self._spec.objective,
                    feed.batches(),
                    self._device,
                    observe,
                    accuracy=plan.accuracy,
                )
                if specs and score.examples:
                    measured = sent_states(specs, accumulator.states())
                work: ValidatedWork = {
                    "score": list(score),
                    "unscored": totals.reason,
                    "measured": measured,
                }
                has_leases = feed.hand_over(work)
        self._channel.serve_snapshot(self.snapshot)
        self._spans.enter("other")
        return work

    def _checkpoint(
        self, epoch: int, sync_point: SyncPoint | None = None
    ) -> ReplicaState:
        """Return the state of this replica for a checkpoint."""
        self._spans.enter("checkpoint")
        fingerprint = Fingerprint.of(self.module, self.optimizer, self.rate.scheduler)
        header = {
            "epoch": epoch,
            "sync_point": None if sync_point is None else sync_point.to_wire(),
            "epochs_before": self._spec.epochs_before,
            "columns": dict(self._spec.columns),
            "scaled_by": list(self._spec.scaled_by),
            "kind": self.exchange.kind,
            "fingerprint": list(fingerprint),
            "stopping": self.stopper.decision.values(),
        }
        common, training_state = self._parts(others_in(self.module))
        per_replica = {
            **training_state,
            "exchange": self.exchange.state().per_replica,
            "totals": vars(EpochTotals() if sync_point is None else self.totals),
            "loss_watch": self.loss_watch.values(),
            "random": generators(self._device),
            "steps": self.steps,
            "examples": self.seen,
            "weight": self.weight,
        }
        return ReplicaState(header, common, per_replica)

    # ---- leave

    def _unfinished(self) -> FitResult:
        """Return the result before the end: the parameters agreed on last."""
        telemetry = [telemetry_of(self._log, self._layers, self._spans)]
        if not self._joined:
            return FitResult(
                Parameters(), telemetry=telemetry, has_agreed=False, finished=False
            )
        return FitResult(
            self.agreed,
            carried=self.exchange.carried(ended=False),
            telemetry=telemetry,
            has_agreed=self.has_agreed,
            finished=False,
        )

    def _finished(self) -> FitResult:
        """Return the result at the end, with the residual of the agreed parameters."""
        best = self.stopper.best()
        return FitResult(
            best or self.agreed,
            (optimizer_arrays(self.optimizer, self.weight), rest_of(self.optimizer)),
            self.exchange.carried(ended=best is None),
            self.rate.state(),
            [telemetry_of(self._log, self._layers, self._spans)],
            restored=best is not None,
        )

    # ---- divergence

    def _diverged(
        self,
        epoch: int,
        loss: float,
        event: str = "",
        *,
        only_loss_is_nan: bool = False,
    ) -> DivergedError:
        """Return the error for a diverged loss, or for the `event` of an exchange.

        With `only_loss_is_nan`, the loss is NaN for finite outputs of the model.
        """
        exchange, stats = self.exchange, self.exchange.stats()
        symptoms = Symptoms(
            replica=self._number,
            epoch=epoch,
            step=self.steps + (not event),
            loss=loss,
            first_loss=self.loss_watch.first_loss,
            before=self.loss_watch.last,
            high_steps=self.loss_watch.recent if math.isfinite(loss) else 0,
            learning_rate=self.rate.value,
            scale=exchange.update_scale,
            adds_up=exchange.adds_up,
            momentum=exchange.momentum,
            replicas=1 + len(self._channel.peers()),
            staleness=stats.lead_sum / max(stats.steps, 1),
            residual=exchange.step_stats().residual_p99,
            gradient_norm=self.stepper.gradient_norm(),
            clip_grad_norm=self._spec.stepping.clip_grad_norm,
            event=event,
            only_loss_is_nan=only_loss_is_nan,
        )
        return DivergedError(diagnosis(symptoms))


def check_alike(gathered: BarrierResult, when: str) -> None:
    """Check that all replicas have the same state."""
    digests = {r: note["digest"] for r, note in gathered.payloads.items()}
    if len(set(digests.values())) > 1:
        raise ChannelError(f"replicas differ {when}: checksums by replica {digests}")


def failure_of(error: Exception, step: int) -> dict[str, Any]:
    """Describe an exception in plain values."""
    hide_internal_frames_(error)
    kind = type(error)
    is_ours = kind.__module__ == errors.__name__
    notes = getattr(error, "__notes__", ())
    return {
        "type": kind.__name__ if is_ours else "ReplicaError",
        "error": shown(f"{kind.__module__}.{kind.__qualname__}"),
        "summary": shown(text_of(error, named=not is_ours), MAX_TEXT),
        "notes": tuple(
            shown(note, MAX_TEXT)
            for note in (notes if isinstance(notes, list | tuple) else ())
            if isinstance(note, str)
        ),
        "traceback": shown("".join(traceback.format_exception(error)), MAX_TEXT),
        "step": step,
    }


def warm_up(spec: ReplicaSpec, device: torch.device) -> None:
    """Make one step with a copy of the model, so that the first real step is not slow.

    Exceptions of the user's code propagate unchanged: the real step would raise them.
    """
    module = train_(copied(spec.model).to(device), spec.evaluating)
    with preserved_random_state(device):
        batch = transformed_batch(spec.rows, spec.read.transform)
        optimizer = spec.optimizer_for(module)
        stepper = Stepper(module, spec.objective, optimizer, spec.stepping, device)
        stepper.backward([batch])
        stepper.update(scale=1.0)
        spec.master.warm_up(device, floating_dtype(module))
