"""What happens on a worker: join, build, train each epoch, report, and leave."""

import contextlib
import dataclasses
import functools
import math
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import cloudpickle
import torch
from torch import Tensor
from torch.optim import Optimizer

from daskdl import errors
from daskdl.callbacks import EpochBegin, Step
from daskdl.channel.base import Channel, Entry, Gathered, Stopped
from daskdl.channel.leasing import SyncPoint, done_of
from daskdl.channel.protocol import Barrier
from daskdl.compression.flat import Frozen
from daskdl.data import trees
from daskdl.data.batches import floating_dtype, tensors
from daskdl.data.models import trainable
from daskdl.data.rehearsal import ShapeCheck, random_state_left_alone, transformed
from daskdl.data.trees import Rows
from daskdl.errors import ChannelError, DivergedError, OptionError
from daskdl.history import StepRow
from daskdl.objective import OwnStep
from daskdl.scores import Score, score_batches
from daskdl.serialization import Packed, copied
from daskdl.training.backend import arrays_of
from daskdl.training.base import (
    Excess,
    Exchange,
    KeptResidual,
    Parameters,
    ReplicaContext,
    SoloExchange,
    TrainingMaster,
    check_like,
    load_tensors_,
    others_in,
    restoring,
)
from daskdl.training.checkpointing import (
    Checkpoints,
    CheckpointWriter,
    Copyable,
    Fingerprint,
    RestoredState,
    awaited,
    begun,
    inherit,
)
from daskdl.training.data_feed import Feed, Store
from daskdl.training.epoch_control import LearningRate, Stopper
from daskdl.training.optimizer_step import (
    Group,
    LossWatch,
    Stepper,
    Stepping,
    Symptoms,
    diagnosis,
    load_optimizer_,
    restore_optimizer_,
    rows_of,
    state_of,
    weigh,
)
from daskdl.training.spec import Recipe, Result, Tally, TaskOptions
from daskdl.training.telemetry import RowLog, StepLog, check_trained
from daskdl.util import freed_memory_kept, guarded

_lock = threading.Lock()
_users: dict[torch.device, list[Tensor]] = {}  # the state found, once for each inside


@contextlib.contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Leave the generators as they were: the CPU's, and that of the device."""
    devices = {torch.device("cpu"), device}
    with _lock:
        for each in devices:
            users = _users.setdefault(each, [])
            users.append(users[0] if users else _state(each))
    try:
        yield
    finally:
        with _lock:
            for each in devices:
                former = _users[each].pop()
                if not _users[each]:
                    _restore(each, former)


def generators(device: torch.device) -> dict[str, Tensor]:
    """The states of the CPU's generator and of the device's, as they are now."""
    return {each.type: _state(each) for each in {torch.device("cpu"), device}}


def restore_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on from what `generators` made, as far as there is such a device."""
    for each in {torch.device("cpu"), device}:
        if each.type in states:
            _restore(each, states[each.type])


def _state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _restore(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


_lock_threads = threading.Lock()
_users_threads: list[int] = []  # the setting found by the first of those inside


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute with so many threads while inside.

    Args:
        count: Threads for one operation, >= 1.
    """
    with _lock_threads:
        _users_threads.append(
            torch.get_num_threads() if not _users_threads else _users_threads[0]
        )
        torch.set_num_threads(count)
    try:
        yield
    finally:
        with _lock_threads:
            former = _users_threads.pop()
            if not _users_threads:
                torch.set_num_threads(former)


_lock_devices = threading.Lock()
_users_devices: Counter[int] = Counter()  # replicas now, by number of the CUDA device


@contextlib.contextmanager
def device_for(device: str) -> Iterator[torch.device]:
    """Yield where a replica computes meanwhile.

    A CUDA device is the calling thread's current one too, for code of the user's that
    says ``"cuda"`` without a number.

    Args:
        device: ``"auto"`` takes the CUDA device with the fewest replicas of this
            process, the first of these, and without one the CPU. Else the name of a
            torch device.

    Raises:
        OptionError: If this process has no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device != "auto":
        check_device(device)
        found = torch.device(device)
        with _current(found):
            yield found
    elif not count:
        yield torch.device("cpu")
    else:
        with _fewest_users(count) as found, _current(found):
            yield found


def check_device(device: str) -> None:
    """Refuse a CUDA device that this process has not.

    Raises:
        OptionError: How many there are.
    """
    if device == "auto" or torch.device(device).type != "cuda":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (torch.device(device).index or 0) >= count:
        raise OptionError(
            f"device={device!r} is not there: torch finds {count} CUDA devices in this "
            "process; take device='auto', which is CUDA where there is one and else "
            "the CPU, or have the device on all workers"
        )


def _current(device: torch.device) -> AbstractContextManager[object]:
    if device.type == "cuda" and device.index is not None:
        return torch.cuda.device(device)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _fewest_users(count: int) -> Iterator[torch.device]:
    with _lock_devices:
        number = min(range(count), key=lambda i: _users_devices[i])
        _users_devices[number] += 1
    try:
        yield torch.device("cuda", number)
    finally:
        with _lock_devices:
            _users_devices[number] -= 1


@contextlib.contextmanager
def surroundings(device: str, threads: int) -> Iterator[torch.device]:
    """Share the process with other replicas; afterwards it is as it was.

    Args:
        device: Where the replica is to compute, see
            :func:`~daskdl.training.replica.device_for`.
        threads: Of torch's own, >= 1.

    Yields:
        The device.
    """
    with (
        device_for(device) as found,
        torch_threads(threads),
        freed_memory_kept(),
        random_state_kept(found),
    ):
        yield found


def warm_up(
    recipe: Recipe, master: TrainingMaster, stepping: Stepping, device: torch.device
) -> None:
    """Do once, on a copy of the model, what the first step does.

    What the user's code raises comes out as it is: the real step would raise it too.

    Args:
        recipe: Callables with a state of their own are called once more.
        master: Warms up what it does between steps.
        stepping: How a step is made.
        device: Where the replica computes.
    """
    module = copied(recipe.model).to(device)
    with random_state_left_alone():
        batch = transformed(tensors(recipe.rows), recipe.transform)
        optimizer = recipe.optimizer(trainable(module))
        stepper = Stepper(module, recipe.objective, optimizer, stepping, device)
        stepper.backward([batch])
        stepper.update(scale=1.0)
        master.warm_up(device, floating_dtype(module))


def failure_of(error: Exception, step: int) -> dict[str, Any]:
    """Say what happened, in plain values.

    Args:
        error: Of daskdl or of the user's code.
        step: Steps that the replica has made.
    """
    summary = f"{type(error).__name__}: {error}"
    own = type(error).__module__ == errors.__name__
    return {
        "type": type(error).__name__ if own else "ReplicaError",
        "summary": str(error) if own else summary,
        "traceback": "".join(traceback.format_exception(error)),
        "step": step,
        # How it is pickled may be the user's code; its traceback, as text, says enough.
        "pickled": guarded(lambda: cloudpickle.dumps(error), lambda _: b""),
    }


class Works:
    """The works of a replica, when it has come into the run.

    Args:
        number: Of the replica in the run.
        options: The same for all replicas.
        recipe: The user's objects, this replica's own copies.
        channel: This replica's end of the run.
        device: Where to compute.

    Attributes:
        module: The model, on its device.
        optimizer: Of its trainable parameters.
        rate: The learning rate of that.
        stepper: Makes its steps.
        stopper: When it is enough.
        watch: Of the losses.
        steps: That this replica has made.
        seen: Examples, over all epochs.
        weight: Share of the examples all replicas saw.
        tally: Of the epoch that runs.
        first_epoch: That is trained.
        met: Whether it has agreed with all others, after the start of the run.
        lap: That runs, counted from 0 over all epochs.
        checkpoints: That are written; None: there are none.
    """

    def __init__(
        self,
        number: int,
        options: TaskOptions,
        recipe: Recipe,
        channel: Channel,
        device: torch.device,
    ) -> None:
        self._number = number
        self._options = options
        self._channel = channel
        self._device = device
        self.module = recipe.model.to(device).train()
        self._frozen = Frozen(self.module)
        self.steps = self.seen = 0
        self.weight = 0.0
        self.tally = Tally()
        self.lap = 0
        self.met = False
        self.watch = LossWatch(options.oversight.max_loss_rise)
        entry = channel.join()
        inherited = self._inherited(entry)
        self.optimizer: Optimizer = recipe.optimizer(trainable(self.module))
        if recipe.optimizer_state is not None:
            self.optimizer.load_state_dict(recipe.optimizer_state)
        self._exchange = self._attach(entry, inherited, recipe.residual)
        self.rate = LearningRate(
            self.optimizer, recipe.scheduling, recipe.schedule, options.epochs
        )
        self.stepper = Stepper(
            self.module, recipe.objective, self.optimizer, options.stepping, device
        )
        torch.manual_seed(options.seed + number)
        self.stopper = Stopper(options.judging, entry.snapshot)
        self.checkpoints = self._checkpoints(entry, inherited)
        self.first_epoch = options.first_epoch
        if inherited is not None:
            self._resume(inherited)
        if entry.snapshot is not None:
            self._follow(entry.snapshot)
        channel.serve(self.snapshot)

    @property
    def exchange(self) -> Exchange:
        """With the others; another one may come in its place."""
        return self._exchange

    def _inherited(self, entry: Entry) -> RestoredState | None:
        """Read what a founder of a resumed run goes on from."""
        plan, members = self._options.resume, sorted(entry.members)
        if plan is None or entry.snapshot is not None:
            return None
        place = members.index(self._number)
        reading = begun(lambda: inherit(plan, place, len(members)), "daskdl-resume")
        bound = self._options.timeouts.bound("data")
        inherited = awaited(self._channel, reading, bound, f"reading {plan.url}")
        # Before anything is made of them.
        inherited.check(self.module)
        with restoring(inherited.common_at):
            load_tensors_(self.module, inherited.tensors)
        return inherited

    def _attach(
        self,
        entry: Entry,
        inherited: RestoredState | None,
        residual: KeptResidual | None,
    ) -> Exchange:
        resumed = None if inherited is None else inherited.exchange
        master = self._options.master
        context = ReplicaContext(
            self.module,
            self._channel,
            self._number,
            entry.members,
            self._options.last if resumed is None else resumed.last,
            entry.snapshot,
            self.optimizer,
            resumed,
            residual if entry.snapshot is None else None,  # founders have all of it
            self._frozen,
        )
        if context.alone and master.solo_scale is not None:
            return SoloExchange(context, master.solo_scale)
        return master.attach(context)

    def _checkpoints(
        self, entry: Entry, inherited: RestoredState | None
    ) -> Checkpoints | None:
        options = self._options
        if options.checkpoints is None:
            return None
        before = entry.snapshot or {"checkpoints": 0, "rows": ()}
        rows = before["rows"] if inherited is None else inherited.common["rows"]
        writer = CheckpointWriter(
            options.checkpoints, self._number, self._channel, options.timeouts
        )
        columns, left_out = options.judging.columns, options.left_out
        log = RowLog(options.size, columns, rows, left_out=left_out)
        return Checkpoints(options, writer, log, before["checkpoints"])

    def _resume(self, inherited: RestoredState) -> None:
        self._restore(inherited)
        self.seen = sum(part["seen"] for part in inherited.own)
        self.weight = sum(part["weight"] for part in inherited.own)
        # Nobody sends anything before all are there, on the same grid.
        gathered = self._channel.gather("resume", {"digest": self.exchange.digest()})
        check_alike(gathered, "after they have read a checkpoint")
        for part, at in zip(inherited.own, inherited.own_at, strict=True):
            with restoring(f"{at}: tally"):
                tally = Tally(**part["tally"])
                check_like(vars(Tally()), vars(tally), "it")
            self.tally.add(tally)

    def _restore(self, inherited: RestoredState) -> None:
        """Put back what was read; a wrong value is told by file and field."""
        common, donor, at = inherited.common, inherited.donor, inherited.donor_at
        of_all = "optimizer" in common
        with restoring(f"{inherited.common_at if of_all else at}: optimizer"):
            restore_optimizer_(self.optimizer, inherited.optimizer)
        with restoring(f"{at}: schedule"):
            self.rate.restore_(donor["schedule"])
        with restoring(f"{inherited.common_at}: stopper"):
            self.stopper.restore_(common["stopper"], self._options.first_epoch)
        with restoring(f"{at}: scaler"):
            self.stepper.restore_(donor["scaler"])
        for part in inherited.own[:1]:
            self.steps = part["steps"]
            with restoring(f"{at}: watch"):
                self.watch.restore_(part["watch"])
            with restoring(f"{at}: random"):
                restore_generators(part["random"], self._device)

    def _follow(self, snapshot: Mapping[str, Any]) -> None:
        """Come in later: where another replica was, but for the epoch."""
        load_optimizer_(self.optimizer, snapshot["optimizer"])
        self.rate.load_(snapshot["schedule"])
        _, epoch, report, self.lap = self._channel.activate(snapshot["step"])
        self.rate.catch_up_(epoch)
        if report:
            self.stopper.catch_up(epoch - 1, ordered(report))
        self.first_epoch = epoch

    def snapshot(self) -> dict[str, Any]:
        """What a newcomer begins with."""
        if isinstance(self._exchange, SoloExchange):
            # Ends here: whoever joins shares with this replica.
            context = self._exchange.shared_context()
            self._exchange = self._options.master.attach(context)
        checkpoints = self.checkpoints
        return {
            **self._exchange.snapshot(),
            "optimizer": Packed(state_of(self.optimizer), "optimizer").payload,
            "schedule": self.rate.state(),
            **self.stopper.snapshot(),
            **({} if checkpoints is None else checkpoints.snapshot()),
        }

    def note(self) -> dict[str, Any]:
        """What the others are told at the end of an epoch."""
        return {
            **self.rate.note(),
            **self.stopper.note(),
            **self.checkpoint_note(),
        }

    def checkpoint_note(self) -> dict[str, Any]:
        """What the others are told whenever all meet."""
        return {} if self.checkpoints is None else self.checkpoints.note()

    def checkpoint(self, epoch: int, pause: SyncPoint | None = None) -> Copyable:
        """What a checkpoint has of this replica.

        Args:
            epoch: The next one to train in, counted from 0.
            pause: What is left of it, if it has begun; None: all.
        """
        options, state = self._options, self.exchange.state()
        likeness = Fingerprint.of(self.module, self.optimizer, self.rate.scheduler)
        said = {
            "epoch": epoch,
            "pause": None if pause is None else pause.to_wire(),
            "epochs_before": options.epochs_before,
            "kind": state.kind,
            "likeness": likeness.values(),
            "verdict": self.stopper.verdict.values(),
        }
        common = {
            "exchange": state.common,
            "tensors": others_in(self.module),
            "stopper": self.stopper.values(),
        }
        own = {
            "exchange": state.own,
            "schedule": self.rate.values(),
            "scaler": self.stepper.values(),
            "tally": vars(Tally() if pause is None else self.tally),
            "watch": self.watch.values(),
            "random": generators(self._device),
            "steps": self.steps,
            "seen": self.seen,
            "weight": self.weight,
        }
        of_all = self.exchange.averages_optimizer
        (common if of_all else own)["optimizer"] = state_of(self.optimizer)
        return Copyable(said, common, own)


def check_alike(gathered: Gathered, when: str) -> None:
    """Refuse to go on if replicas that ought to be alike are not.

    Args:
        gathered: Notes with a ``"digest"`` each.
        when: For the message.

    Raises:
        ChannelError: If they differ.
    """
    digests = {r: note["digest"] for r, note in gathered.notes.items()}
    if len(set(digests.values())) > 1:
        raise ChannelError(f"replicas differ {when}: checksums by replica {digests}")


def ordered(notes: Mapping[int, Any]) -> list[Any]:
    """Of all replicas, in the order of their numbers."""
    return [notes[replica] for replica in sorted(notes)]


class Replica:
    """A live model, its optimizer, and its exchange with the others.

    Args:
        number: Of this replica in the run.
        options: The same for all replicas.
        recipe: The user's objects, this replica's own copies.
        channel: This replica's end of the run.
        device: Where to compute.
        store: Where the data are.
    """

    def __init__(
        self,
        number: int,
        options: TaskOptions,
        recipe: Recipe,
        channel: Channel,
        device: torch.device,
        store: Store,
    ) -> None:
        self._number = number
        self._options = options
        self._recipe = recipe
        self._channel = channel
        self._device = device
        self._store = store
        self._log = StepLog(options.oversight.telemetry_every)
        self._shapes = ShapeCheck(trees.kinds(recipe.rows), recipe.transform)
        self._works: Works | None = None  # before it has come into the run

    def run(self) -> Result:
        """Train for all epochs, or until it is enough, or until told to leave."""
        try:
            return guarded(self._train_all, self._fail)
        except Stopped:
            if self._channel.closing and self._works is not None:
                self._works.exchange.leave()
            return self._result(finished=False)

    def _fail(self, error: Exception) -> Result:
        """Tell of an error, which may be the user's, whatever it is."""
        steps = 0 if self._works is None else self._works.steps
        self._channel.fail(failure_of(error, steps))
        return self._result(finished=False)

    def _train_all(self) -> Result:
        self._begin()
        for epoch in range(self._live.first_epoch, self._options.epochs):
            if self._live.stopper.over:
                break
            self._train(epoch)
            self._end(epoch)
        if self._live.checkpoints is not None:
            self._live.checkpoints.finish()
        return self._result(finished=True)

    def _begin(self) -> None:
        self._works = Works(
            self._number, self._options, self._recipe, self._channel, self._device
        )

    @property
    def _live(self) -> Works:
        assert self._works is not None, "it has come into the run"
        return self._works

    def _train(self, epoch: int) -> None:
        replicas = 1 + len(self._channel.others())
        begin = EpochBegin(self._number, epoch, replicas, self._live.rate.value)
        for callback in self._recipe.callbacks:
            callback.on_epoch_begin(begin)
        feed = self._feed("train", epoch)
        self._train_lap(epoch, feed)
        while feed.pause is not None:
            self._pause(epoch, feed.pause)
            self._train_lap(epoch, feed)

    def _train_lap(self, epoch: int, feed: Feed) -> None:
        works, size = self._live, self._options.stepping.accumulate
        started, skipped = time.perf_counter(), feed.skipped
        dropped = feed.dropped
        for group in feed.groups(
            lambda: works.exchange.sync(works.lap, works.tally.examples, ended=False),
            size,
        ):
            self._step(epoch, group)
            feed.loss = works.tally.loss_sum / works.tally.examples
        works.tally.seconds += time.perf_counter() - started
        works.tally.skipped += feed.skipped - skipped
        works.tally.dropped += feed.dropped - dropped
        works.tally.reason = works.tally.reason or feed.reason

    def _pause(self, epoch: int, pause: SyncPoint) -> None:
        """All meet in the middle of an epoch, as they do at its end."""
        works = self._live
        self._meet(epoch)
        note = {"digest": works.exchange.digest(), **works.checkpoint_note()}
        gathered = self._channel.gather(f"pause {works.lap}", note, Barrier.SYNC)
        check_alike(gathered, f"in the middle of epoch {epoch}")
        works.lap += 1
        pause = pause._replace(departed=done_of(gathered.counted["departed"]))
        assert works.checkpoints is not None, "else nobody pauses"
        works.checkpoints.take(gathered, lambda: works.checkpoint(epoch, pause))

    def _meet(self, epoch: int) -> None:
        works, started = self._live, time.perf_counter()
        self._check_reach(epoch, whole=True)
        works.exchange.sync(works.lap, works.tally.examples, ended=True)
        works.met = True
        works.tally.seconds += time.perf_counter() - started

    def _feed(self, phase: str, epoch: int) -> Feed:
        reading = self._options.reading(phase, epoch)
        if not isinstance(self._recipe.objective, OwnStep):
            reading = dataclasses.replace(reading, fits=self._check_shapes)
        transform = self._recipe.transform
        return Feed(self._channel, epoch, self._store, reading, transform)

    def _check_shapes(self, rows: Rows, name: str) -> None:
        self._shapes.check(self._live.module, self._device, rows, name)

    def _step(self, epoch: int, group: Group) -> None:
        self._channel.check()
        started = time.perf_counter()
        works, exchange = self._live, self._live.exchange
        exchange.before_step(works.lap)
        value, rows = works.stepper.backward(group), rows_of(group)
        if not math.isfinite(value) or works.watch.note(value):
            raise self._diverged(epoch, value)
        rate = works.rate.value * exchange.learning_rate_scale
        works.stepper.update(exchange.learning_rate_scale)
        works.rate.after_step()
        exchange.after_step(works.lap, rows)
        works.steps += 1
        self._check_reach(epoch, whole=False)
        works.tally.loss_sum += value * rows
        works.tally.examples += rows
        step_s = time.perf_counter() - started
        if self._log.due(works.steps, exchange.exchanged):
            done = exchange.step_stats()
            number, made = self._number, works.steps
            self._log.add(StepRow(epoch, made, number, value, rate, *done, step_s))
        step = Step(self._number, epoch, works.steps, value, rows, rate)
        for callback in self._recipe.callbacks:
            callback.on_step_end(step)

    def _end(self, epoch: int) -> None:
        works = self._live
        self._meet(epoch)
        # That of the epoch before is not held while the new one is validated.
        self._channel.keep(epoch, None)
        works.seen += works.tally.examples
        gathered = self._report(epoch)
        works.tally = Tally()
        works.lap += 1
        check_alike(gathered, f"at the end of epoch {epoch}")
        seen = sum(other["seen"] for other in gathered.notes.values())
        works.weight = works.seen / seen if seen else 0.0
        judging, notes = self._options.judging, ordered(gathered.notes)
        check_trained(epoch, notes, gathered.counted["departed"])
        judged = judging.scored(epoch) or not judging.validates
        works.rate.end_epoch(notes, judged=judged)
        agreed = works.exchange.agreed
        works.stopper.end_epoch(epoch, notes, agreed)
        self._channel.keep(epoch, functools.partial(arrays_of, agreed))
        if works.checkpoints is not None:
            over = works.stopper.over or epoch + 1 == self._options.epochs
            make = functools.partial(works.checkpoint, epoch + 1)
            works.checkpoints.end_epoch(epoch, gathered, over, make)

    def _report(self, epoch: int) -> Gathered:
        works, exchange = self._live, self._live.exchange
        tally = works.tally
        score, unscored = self._validate(epoch)
        note = {
            "digest": exchange.digest(),
            "seen": works.seen,
            "step": works.steps,
            "tally": [tally.loss_sum, tally.examples, tally.seconds],
            "skipped": tally.skipped,
            "dropped": tally.dropped,
            "statistics": list(exchange.stats()),
            "traffic": vars(self._channel.traffic()),
            "score": score,
            "reasons": [tally.reason, unscored],
            **works.note(),
        }
        key, rows = f"report {epoch}", self._log.take()
        return self._channel.gather(key, note, Barrier.REPORT, rows)

    def _validate(self, epoch: int) -> tuple[list[float] | None, str]:
        """The sums of its share of the validation data, and why some was left out."""
        if not self._options.judging.scored(epoch):
            return None, ""
        works = self._live
        feed = self._feed("validation", epoch)
        self._channel.serve(None)  # the module shows something else meanwhile
        with works.exchange.showing_agreed():
            score: Score = score_batches(
                works.module,
                self._recipe.objective,
                feed.batches(),
                self._device,
            )
        self._channel.serve(works.snapshot)
        return list(dataclasses.astuple(score)), feed.reason

    def _result(self, *, finished: bool) -> Result:
        works = self._works
        if works is None:
            nothing: Packed[Parameters] = Packed(Parameters(), "result")
            return Result(self._number, finished, nothing, met=False)
        result = works.exchange.result()
        if not finished:
            return Result(
                self._number,
                finished,
                Packed(works.exchange.agreed, "result"),
                outcome=result.compression,
                steps=self._log.take(),
                met=works.met,
            )
        best = works.stopper.best()
        return Result(
            self._number,
            finished,
            Packed(result.parameters if best is None else best, "result"),
            Packed(weigh(works.optimizer, works.weight), "optimizer state"),
            result.compression,
            works.rate.state(),
            restored=best is not None,
        )

    def _check_reach(self, epoch: int, *, whole: bool) -> None:
        works = self._live
        excess = works.exchange.excess(whole=whole)
        if excess is not None:
            loss = math.nan if works.watch.last is None else works.watch.last
            raise self._diverged(epoch, loss, excess)

    def _diverged(
        self, epoch: int, loss: float, excess: Excess | None = None
    ) -> DivergedError:
        works, exchange = self._live, self._live.exchange
        statistics = exchange.stats()
        symptoms = Symptoms(
            replica=self._number,
            epoch=epoch,
            step=works.steps + (excess is None),
            loss=loss,
            first=works.watch.first,
            before=works.watch.last,
            high_steps=works.watch.recent if math.isfinite(loss) else 0,
            learning_rate=works.rate.value,
            scale=exchange.update_scale,
            replicas=1 + len(self._channel.others()),
            staleness=statistics.lead_sum / max(statistics.steps, 1),
            residual=exchange.step_stats().residual_p99,
            gradient_norm=works.stepper.gradient_norm(),
            clip_grad_norm=self._options.stepping.clip_grad_norm,
            excess=excess,
        )
        return DivergedError(diagnosis(symptoms))
