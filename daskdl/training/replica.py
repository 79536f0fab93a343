"""One replica: the loop inside a worker.

A replica leases pieces, makes the optimizer's steps on their batches, and lets
its exchange do the rest. It leaves for one of five reasons: all epochs are done,
going on does not pay, the run was stopped, its worker closes, or it failed.
"""

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from daskdl.callbacks.base import EpochBegin, Step
from daskdl.channel.base import Channel, Stopped
from daskdl.channel.messages import Barrier
from daskdl.data.models import trainable
from daskdl.errors import ChannelError, DivergedError
from daskdl.packed import Packed
from daskdl.scores import Score, score_batches
from daskdl.steps import StepRow
from daskdl.training.base import Exchange, Parameters, Seat
from daskdl.training.diagnosis import Symptoms, diagnosis
from daskdl.training.failure import failure_of
from daskdl.training.feed import Feed
from daskdl.training.learning_rate import LearningRate
from daskdl.training.loss_watch import LossWatch
from daskdl.training.optimizer_state import load_optimizer_, weigh
from daskdl.training.step_log import StepLog
from daskdl.training.stepping import Group, Stepper, rows_of
from daskdl.training.stopper import Stopper
from daskdl.training.stores import Store
from daskdl.training.task import Recipe, Result, Tally, TaskOptions


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
        self._module = recipe.model.to(device).train()
        self._steps = 0
        self._seen = 0  # examples, over all epochs
        self._weight = 0.0  # share of the examples all replicas saw
        self._tally = Tally()
        self._log = StepLog(options.oversight.telemetry_every)
        self._watch = LossWatch(options.oversight.max_loss_rise)
        self._exchange: Exchange | None = None

    def run(self) -> Result:
        """Train for all epochs, or until it is enough, or until told to leave."""
        try:
            for epoch in range(self._start(), self._options.epochs):
                if self._stopper.over:
                    break
                self._train(epoch)
                self._end(epoch)
        except Stopped:
            if self._channel.closing and self._exchange is not None:
                self._exchange.hand_over()
            return self._result(finished=False)
        except Exception as error:  # user code: whatever it raises is reported
            self._channel.fail(failure_of(error, self._steps))
            return self._result(finished=False)
        return self._result(finished=True)

    def _start(self) -> int:
        """Come into the run; return the first epoch to train in."""
        entry = self._channel.join()
        self._optimizer: Optimizer = self._recipe.optimizer(trainable(self._module))
        if self._recipe.optimizer_state is not None:
            self._optimizer.load_state_dict(self._recipe.optimizer_state)
        exchange = self._options.master.attach(
            Seat(
                self._module,
                self._channel,
                self._number,
                entry.members,
                self._options.last,
                entry.snapshot,
                self._optimizer,
            )
        )
        scheduling, before = self._recipe.scheduling, self._recipe.schedule
        self._rate = LearningRate(self._optimizer, scheduling, before)
        self._stepper = Stepper(
            self._module,
            self._recipe.objective,
            self._optimizer,
            self._options.stepping,
            self._device,
        )
        torch.manual_seed(self._options.seed + self._number)
        self._stopper = Stopper(self._options.judging, entry.snapshot)
        epoch = 0
        if entry.snapshot is not None:
            load_optimizer_(self._optimizer, entry.snapshot["optimizer"])
            self._rate.load_(entry.snapshot["schedule"])
            _, epoch, report = self._channel.activate(entry.snapshot["step"])
            self._rate.catch_up_(epoch)
            if report:
                self._stopper.catch_up(epoch - 1, _ordered(report))
        self._exchange = exchange
        self._channel.serve(self._snapshot)
        return epoch

    def _snapshot(self) -> dict[str, Any]:
        assert self._exchange is not None
        self._exchange = self._exchange.opened()
        return {
            **self._exchange.snapshot(),
            "optimizer": Packed(self._optimizer.state_dict(), "optimizer").payload,
            "schedule": self._rate.state(),
            **self._stopper.snapshot(),
        }

    def _train(self, epoch: int) -> None:
        replicas = 1 + len(self._channel.others())
        begin = EpochBegin(self._number, epoch, replicas, self._rate.value)
        for callback in self._recipe.callbacks:
            callback.on_epoch_begin(begin)
        started = time.perf_counter()
        self._tally = Tally()
        feed = self._feed("train", epoch)
        size = self._options.stepping.accumulate
        for group in feed.groups(lambda: self._live.rest(epoch), size):
            self._step(epoch, group)
            feed.loss = self._tally.loss_sum / self._tally.examples
        self._tally.seconds = time.perf_counter() - started
        self._tally.skipped = feed.skipped

    def _feed(self, phase: str, epoch: int) -> Feed:
        reading = self._options.reading(phase, epoch)
        transform = self._recipe.transform
        return Feed(self._channel, epoch, self._store, reading, transform)

    @property
    def _live(self) -> Exchange:
        assert self._exchange is not None
        return self._exchange

    def _step(self, epoch: int, group: Group) -> None:
        self._channel.check()
        started = time.perf_counter()
        exchange = self._live
        exchange.before_step(epoch)
        value, rows = self._stepper.backward(group), rows_of(group)
        if not math.isfinite(value) or self._watch.note(value):
            raise self._diverged(epoch, value)
        rate = self._rate.value * exchange.learning_rate_scale
        self._stepper.update(exchange.learning_rate_scale)
        self._rate.after_step()
        exchange.after_step(epoch, rows)
        self._steps += 1
        self._tally.loss_sum += value * rows
        self._tally.examples += rows
        step_s = time.perf_counter() - started
        if self._log.due(self._steps, exchange.exchange_tried):
            done = exchange.exchanged()
            number, made = self._number, self._steps
            self._log.add(StepRow(epoch, made, number, value, rate, *done, step_s))
        step = Step(self._number, epoch, self._steps, value, rows, rate)
        for callback in self._recipe.callbacks:
            callback.on_step_end(step)

    def _end(self, epoch: int) -> None:
        started = time.perf_counter()
        self._live.end_epoch(epoch, self._tally.examples)
        exchange = self._live
        self._tally.seconds += time.perf_counter() - started
        self._seen += self._tally.examples
        note = {
            "digest": exchange.digest(),
            "seen": self._seen,
            "step": self._steps,
            "tally": [self._tally.loss_sum, self._tally.examples, self._tally.seconds],
            "skipped": self._tally.skipped,
            "statistics": list(exchange.statistics()),
            "traffic": vars(self._channel.traffic()),
            "score": self._validate(epoch),
            **self._rate.note(),
            **self._stopper.note(),
        }
        key, rows = f"report {epoch}", self._log.take()
        gathered = self._channel.gather(key, note, Barrier.REPORT, rows)
        digests = {r: other["digest"] for r, other in gathered.notes.items()}
        if len(set(digests.values())) > 1:
            raise ChannelError(
                f"replicas differ at the end of epoch {epoch}: checksums by replica "
                f"{digests}"
            )
        seen = sum(other["seen"] for other in gathered.notes.values())
        self._weight = self._seen / seen if seen else 0.0
        judging, notes = self._options.judging, _ordered(gathered.notes)
        judged = judging.scored(epoch) or not judging.validates
        self._rate.end_epoch(notes, judged=judged)
        self._stopper.end_epoch(epoch, notes, exchange.agreed)

    def _validate(self, epoch: int) -> list[float] | None:
        if not self._options.judging.scored(epoch):
            return None
        feed = self._feed("validation", epoch)
        self._channel.serve(None)  # the module shows something else meanwhile
        with self._live.showing_agreed():
            score: Score = score_batches(
                self._module,
                self._recipe.objective,
                feed.batches(),
                self._device,
            )
        self._channel.serve(self._snapshot)
        return list(dataclasses.astuple(score))

    def _result(self, *, finished: bool) -> Result:
        exchange = self._exchange
        if exchange is None:
            nothing: Packed[Parameters] = Packed(Parameters(), "result")
            return Result(self._number, finished, nothing)
        if not finished:
            return Result(
                self._number,
                finished,
                Packed(exchange.agreed(), "result"),
                outcome=exchange.outcome(),
                steps=self._log.take(),
            )
        best = self._stopper.best()
        return Result(
            self._number,
            finished,
            Packed(exchange.final() if best is None else best, "result"),
            Packed(weigh(self._optimizer, self._weight), "optimizer state"),
            exchange.outcome(),
            self._rate.state(),
            restored=best is not None,
        )

    def _diverged(self, epoch: int, loss: float) -> DivergedError:
        exchange, statistics = self._live, self._live.statistics()
        symptoms = Symptoms(
            replica=self._number,
            epoch=epoch,
            step=self._steps + 1,
            loss=loss,
            first=self._watch.first,
            before=self._watch.last,
            high_steps=self._watch.recent if math.isfinite(loss) else 0,
            learning_rate=self._rate.value,
            scale=exchange.scale,
            replicas=1 + len(self._channel.others()),
            staleness=statistics.lead_sum / max(statistics.steps, 1),
            residual=exchange.exchanged().residual_p99,
            gradient_norm=self._stepper.gradient_norm(),
            clip_grad_norm=self._options.stepping.clip_grad_norm,
        )
        return DivergedError(diagnosis(symptoms))


def _ordered(notes: Mapping[int, Any]) -> list[Any]:
    """Of all replicas, in the order of their numbers."""
    return [notes[replica] for replica in sorted(notes)]
