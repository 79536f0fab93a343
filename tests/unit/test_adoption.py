"""What a fit begins with, and what the next one goes on from."""

import random

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from daskdl.errors import ModelError
from daskdl.training.epoch_control import LearningRate, Scheduling
from daskdl.training.fit_spec import TrainedOptimizer, starting_model, trained_optimizer
from daskdl.training.optimizer_step import weigh
from daskdl.training.telemetry import EpochReport, EpochTotals


def halved(optimizer):
    return StepLR(optimizer, 1, gamma=0.5)


def adam(rate=1.0):
    return torch.optim.Adam(nn.Linear(2, 1).parameters(), lr=rate)


def trained(scheduling, epochs):
    """An optimizer that has made a step in each epoch, and its rate."""
    optimizer = adam()
    rate = LearningRate(optimizer, scheduling)
    for _ in range(epochs):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        rate.end_epoch([EpochReport(totals=EpochTotals(1.0, 1), **rate.report())])
    return optimizer, rate


def steps_of(optimizer):
    return [int(state["step"]) for state in optimizer.state_dict()["state"].values()]


class TestStartingModel:
    def test_a_built_one_is_copied(self):
        given = nn.Linear(2, 1)

        start = starting_model(given, seed=0)

        assert start is not given
        assert torch.equal(start.weight, given.weight)

    def test_a_function_is_called_under_the_seed_and_nobody_notices(self):
        state = torch.get_rng_state()

        one, same, other = (
            starting_model(lambda: nn.Linear(2, 1), seed) for seed in (3, 3, 4)
        )

        assert torch.equal(one.weight, same.weight)
        assert not torch.equal(one.weight, other.weight)
        assert torch.equal(torch.get_rng_state(), state)

    def test_pythons_generator_is_under_the_seed_too_and_nobody_notices(self):
        def drawn():
            module = nn.Linear(1, 1)
            nn.init.constant_(module.weight, random.random())
            return module

        state = random.getstate()

        one, same, other = (starting_model(drawn, seed) for seed in (3, 3, 4))

        assert torch.equal(one.weight, same.weight)
        assert not torch.equal(one.weight, other.weight)
        assert random.getstate() == state

    def test_anything_else_is_refused(self):
        with pytest.raises(ModelError, match="or a function that returns one, got 3"):
            starting_model(3, seed=0)


class TestAdopt:
    SCHEDULING = Scheduling(halved)

    def ended(self, epochs):
        """The states of optimizer and scheduler at the end of a run."""
        optimizer, rate = trained(self.SCHEDULING, epochs)
        return weigh(optimizer, 1.0), rate.state()

    def former(self, epochs):
        optimizer, rate = trained(self.SCHEDULING, epochs)
        return TrainedOptimizer(optimizer, rate, self.SCHEDULING)

    def test_what_the_run_ended_with(self):
        optimizer = adam()

        moved = trained_optimizer(
            optimizer, self.SCHEDULING, *self.ended(3), self.former(1)
        )

        assert moved.optimizer is optimizer
        assert steps_of(optimizer) == [3, 3]
        assert optimizer.param_groups[0]["lr"] == 0.125
        assert moved.rate.scheduler.last_epoch == 3
        assert moved.rate.scheduler.optimizer is optimizer

    def test_after_a_run_that_ended_early_what_was_there_before(self):
        optimizer = adam()

        moved = trained_optimizer(optimizer, self.SCHEDULING, None, b"", self.former(2))

        assert steps_of(optimizer) == [2, 2]
        assert optimizer.param_groups[0]["lr"] == 0.25
        assert moved.rate.scheduler.last_epoch == 2

    def test_after_a_first_run_that_ended_early_the_start(self):
        optimizer = adam()

        moved = trained_optimizer(optimizer, self.SCHEDULING, None, b"", None)

        assert steps_of(optimizer) == []
        assert moved.rate.scheduler.last_epoch == 0

    def test_the_schedule_of_another_scheduler_is_not_gone_on_with(self):
        former = self.former(2)

        assert former.schedule(Scheduling(halved)) == former.rate.state()
        assert former.schedule(Scheduling(lambda o: StepLR(o, 2))) == b""
        assert former.schedule(Scheduling(halved, "step")) == b""
