"""One replica: the loop inside a worker.

A replica leases pieces, makes the optimizer's steps on their batches, and lets
its exchange do the rest. It leaves for one of five reasons: all epochs are done,
going on does not pay, the run was stopped, its worker closes, or it failed.
"""

import dataclasses
import functools
import math
import time

import torch

from daskdl.callbacks.base import EpochBegin, Step
from daskdl.channel.base import Channel, Gathered, Stopped
from daskdl.channel.leasing import Pause, done_of
from daskdl.channel.protocol import Barrier
from daskdl.data import trees
from daskdl.data.rehearsal import ShapeCheck
from daskdl.data.trees import Rows
from daskdl.errors import DivergedError
from daskdl.guard import guarded
from daskdl.objective import OwnStep
from daskdl.packed import Packed
from daskdl.scores import Score, score_batches
from daskdl.steps import StepRow
from daskdl.training.diagnosis import Symptoms, diagnosis
from daskdl.training.exchange import Excess
from daskdl.training.failure import failure_of
from daskdl.training.feed import Feed
from daskdl.training.optimizer_state import weigh
from daskdl.training.parameters import Parameters
from daskdl.training.rows import check_trained
from daskdl.training.safekeeping import arrays_of
from daskdl.training.step_log import StepLog
from daskdl.training.stepping import Group, rows_of
from daskdl.training.stores import Store
from daskdl.training.task import Recipe, Result, Tally, TaskOptions
from daskdl.training.works import Works, check_alike, ordered


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
                self._works.exchange.hand_over()
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
        for group in feed.groups(lambda: works.exchange.rest(works.lap), size):
            self._step(epoch, group)
            feed.loss = works.tally.loss_sum / works.tally.examples
        works.tally.seconds += time.perf_counter() - started
        works.tally.skipped += feed.skipped - skipped
        works.tally.dropped += feed.dropped - dropped
        works.tally.reason = works.tally.reason or feed.reason

    def _pause(self, epoch: int, pause: Pause) -> None:
        """All meet in the middle of an epoch, as they do at its end."""
        works = self._live
        self._meet(epoch)
        note = {"digest": works.exchange.digest(), **works.checkpoint_note()}
        gathered = self._channel.gather(f"pause {works.lap}", note, Barrier.PAUSE)
        check_alike(gathered, f"in the middle of epoch {epoch}")
        works.lap += 1
        pause = pause._replace(departed=done_of(gathered.counted["departed"]))
        assert works.checkpoints is not None, "else nobody pauses"
        works.checkpoints.take(gathered, lambda: works.checkpoint(epoch, pause))

    def _meet(self, epoch: int) -> None:
        works, started = self._live, time.perf_counter()
        self._check_reach(epoch, whole=True)
        works.exchange.end_lap(works.lap, works.tally.examples)
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
        if self._log.due(works.steps, exchange.exchange_tried):
            done = exchange.exchanged()
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
        works.stopper.end_epoch(epoch, notes, works.exchange.agreed)
        agreed = works.exchange.agreed()
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
            "statistics": list(exchange.statistics()),
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
        exchange = works.exchange
        if not finished:
            return Result(
                self._number,
                finished,
                Packed(exchange.agreed(), "result"),
                outcome=exchange.outcome(),
                steps=self._log.take(),
                met=works.met,
            )
        best = works.stopper.best()
        return Result(
            self._number,
            finished,
            Packed(exchange.final() if best is None else best, "result"),
            Packed(weigh(works.optimizer, works.weight), "optimizer state"),
            exchange.outcome(),
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
        statistics = exchange.statistics()
        symptoms = Symptoms(
            replica=self._number,
            epoch=epoch,
            step=works.steps + (excess is None),
            loss=loss,
            first=works.watch.first,
            before=works.watch.last,
            high_steps=works.watch.recent if math.isfinite(loss) else 0,
            learning_rate=works.rate.value,
            scale=exchange.scale,
            replicas=1 + len(self._channel.others()),
            staleness=statistics.lead_sum / max(statistics.steps, 1),
            residual=exchange.exchanged().residual_p99,
            gradient_norm=works.stepper.gradient_norm(),
            clip_grad_norm=self._options.stepping.clip_grad_norm,
            excess=excess,
        )
        return DivergedError(diagnosis(symptoms))
