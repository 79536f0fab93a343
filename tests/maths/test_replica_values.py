"""What parts of a replica leave to another run as plain values, and go on from."""

import numpy as np
import pytest
import torch
from torch import nn

from daskdl.callbacks import EarlyStopping
from daskdl.data.checks import preserved_random_state
from daskdl.objective import objective_of
from daskdl.saving.json_values import Plain
from daskdl.training.base import Parameters
from daskdl.training.checkpointing import plain
from daskdl.training.epoch_control import (
    EarlyStopper,
    EvaluationPlan,
    LearningRate,
    Scheduling,
)
from daskdl.training.optimizer_step import LossWatch, Stepper, Stepping
from daskdl.training.replica import restore_generators
from daskdl.training.telemetry import EpochReport, EpochTotals
from tests.maths.test_learning_rate import KINDS, end_epoch, sgd

CPU = torch.device("cpu")


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def note(own, loss):
    return EpochReport(totals=EpochTotals(loss, 1), **own.report())


def model(epoch):
    """What all agreed on, told by its one parameter."""
    untrained = {"floating buffers": np.zeros(1)}
    return Parameters(None, np.array([epoch], np.int32), None, 0.5, untrained)


def train(loss_by_epoch, stopper):
    for epoch, loss in loss_by_epoch.items():
        notes = [note(stopper, loss)]
        stopper.end_epoch(epoch, notes, model(epoch))


def travelled(values):
    """As they come out of a file."""
    written = Plain()
    return Plain(tensors=written.tensors).decode(written.encode(values, "values"))


class TestLossWatch:
    def test_it_ends_training_at_the_same_step(self):
        losses = [2.0] * 60 + [50.0] * 400

        def ends(stopped_at):
            watch = LossWatch(10.0)
            for step, loss in enumerate(losses):
                if step == stopped_at:
                    values, watch = travelled(watch.values()), LossWatch(10.0)
                    watch.restore_(values)
                if watch.note(loss):
                    return step, watch.first, watch.last, watch.recent
            return None

        assert ends(None) is not None
        for stopped_at in (0, 30, 100, 199, 275):
            assert ends(stopped_at) == ends(None)


class TestLearningRate:
    def test_a_newcomer_knows_how_many_steps_were_before_the_run(self):
        first = LearningRate(sgd(), Scheduling(KINDS["StepLR"]))
        end_epoch(first)
        second = LearningRate(sgd(), Scheduling(KINDS["StepLR"]), first.state())
        end_epoch(second)
        third = LearningRate(sgd(), Scheduling(KINDS["StepLR"]))

        third.restore_(travelled(second.values()))

        assert (third._count, third._count_before) == (2, 1)


class TestStopper:
    def own(self, clock=None, **rule):
        rule = {"monitor": "loss", "patience": 2, **rule}
        return EarlyStopper(
            EvaluationPlan(99, stopping=EarlyStopping(**rule)), now=clock or Clock()
        )

    def values(self, stopper):
        """In a file there are no arrays."""
        return travelled(plain(stopper.values()))

    @pytest.mark.parametrize("rule", [None, EarlyStopping("val_loss", patience=2)])
    def test_what_was_about_another_score_is_forgotten(self, rule):
        one, other = (
            self.own(),
            EarlyStopper(EvaluationPlan(99, validates=True, stopping=rule)),
        )
        train({0: 1.0, 1: 2.0, 2: 3.0}, one)

        other.restore_(self.values(one), 3)

        assert not other.over
        assert other.best() is None
        assert other.report()["best"].best_epoch == -1

    def test_its_time_goes_on(self):
        clock, later = Clock(), Clock()
        one, other = self.own(clock), self.own(later)
        clock.now += 30.0

        other.restore_(self.values(one), 0)
        later.now += 5.0

        assert other.elapsed_s == pytest.approx(35.0)

    def test_time_that_is_over_by_now_ends_it(self):
        clock = Clock()
        rule = {"patience": None, "max_seconds": 40.0}
        one, other = self.own(clock, **rule), self.own(**rule)
        clock.now += 50.0
        one.end_epoch(0, [note(one, 1.0)], model(0))

        other.restore_(self.values(one), 1)

        assert (one.over, other.over) == (True, True)
        assert other.decision.reason == "max_seconds"


class TestStepper:
    def own(self, dtype):
        module = nn.Linear(2, 1)
        objective = objective_of(nn.MSELoss(), None)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return Stepper(module, objective, optimizer, Stepping(dtype), CPU)

    def test_the_factor_on_float16_gradients_goes_on(self):
        one, other = (self.own(torch.float16) for _ in "ab")
        before = one.values()["scale"]
        one.backward([(torch.full((1, 2), torch.inf), torch.ones(1, 1))])
        one.update(1.0)  # an overflow halves it

        other.restore_(travelled(one.values()))

        assert other.values() == one.values()
        assert other.values()["scale"] == before / 2

    @pytest.mark.parametrize("dtype", [None, torch.bfloat16])
    def test_without_it_there_is_nothing(self, dtype):
        stepper = self.own(dtype)

        stepper.restore_(self.own(torch.float16).values())

        assert stepper.values() == {}

    def test_where_there_was_none_it_begins(self):
        stepper = self.own(torch.float16)
        before = stepper.values()

        stepper.restore_({})

        assert stepper.values() == before


class TestGenerators:
    def test_a_device_that_is_not_there_is_passed_over(self):
        with preserved_random_state():
            state = torch.get_rng_state()

            restore_generators({"cuda": state.flip(0)}, CPU)

            assert torch.equal(torch.get_rng_state(), state)
