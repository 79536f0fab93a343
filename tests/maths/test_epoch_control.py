"""Learning rate schedules over replicas and fits, and state that survives a save."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from daskdl.callbacks import EarlyStopping
from daskdl.evaluation.evaluate import Score
from daskdl.objective import objective_of
from daskdl.saving.json_values import JsonValues
from daskdl.training.base import Parameters
from daskdl.training.epoch_control import (
    EarlyStopper,
    EvaluationPlan,
    LearningRate,
    Scheduling,
)
from daskdl.training.optimizer_step import Stepper, Stepping
from daskdl.training.telemetry import EpochReport, EpochTotals
from tests.support.problems import Clock, halved, plateau


def sgd(module=None, lr=1.0):
    module = module or nn.Linear(2, 1)
    return torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)


def later(first, scheduling, module=None):
    """Return the rate in the next fit."""
    optimizer = sgd() if module is None else sgd(module)
    rate = LearningRate(optimizer, scheduling)
    optimizer.load_state_dict(first.scheduler.optimizer.state_dict())
    rate.restore_(first.carried())
    return rate


KINDS = {
    "StepLR": halved,
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=2.0, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=3),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=9),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 6]),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.StepLR(o, 3)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def groups_of(rate):
    groups = rate.scheduler.optimizer.param_groups
    return [{k: v for k, v in g.items() if k != "params"} for g in groups]


def made_step(rate):
    """Tell the schedule that the optimizer has made a step."""
    if rate.per_step:
        rate.step_()


def end_epoch(*rates):
    """All replicas exchange their reports."""
    notes = [EpochReport(totals=EpochTotals(1.0, 1), **r.report()) for r in rates]
    for rate in rates:
        rate.end_epoch(notes)


def test_without_a_scheduler_nothing_changes():
    rate = LearningRate(sgd(), Scheduling())

    made_step(rate)
    end_epoch(rate)
    rate.catch_up_(3)

    assert (rate.scheduler, rate.state(), rate.value) == (None, b"", 1.0)
    assert rate.report()["scheduled"] == 0


def test_a_plateau_scheduler_gets_the_training_loss_of_all_replicas():
    rates = [LearningRate(sgd(), Scheduling(plateau)) for _ in range(2)]
    notes = [
        EpochReport(totals=EpochTotals(total, rows), **rate.report())
        for rate, total, rows in zip(rates, (6.0, 1.0), (3, 1), strict=True)
    ]

    for rate in rates:
        rate.end_epoch(notes)

    assert [rate.scheduler.best for rate in rates] == [1.75, 1.75]


@pytest.mark.parametrize("monitor", ["kl", "val_kl"])
def test_a_plateau_scheduler_gets_the_score_that_is_named(monitor):
    rate = LearningRate(sgd(), Scheduling(plateau, monitor=monitor))
    seen = []

    for scored, kl in ((True, 5.0), (False, 4.0), (True, 3.0)):
        totals = EpochTotals(9.0, 1, logs={"kl": (kl, 1)})
        score = Score(9.0, 0, 0, 1, logs={"kl": (kl, 1)}) if scored else None
        report = EpochReport(totals=totals, score=score, **rate.report())
        rate.end_epoch([report], scored=scored)
        seen.append(rate.scheduler.best)

    assert seen == [5.0, 4.0 if monitor == "kl" else 5.0, 3.0]
    assert rate.report()["scheduled"] == (3 if monitor == "kl" else 2)


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
class TestAgreement:
    def test_replicas_with_fewer_steps_continue_from_the_one_with_most(self, make):
        rates = [LearningRate(sgd(), Scheduling(make, "step")) for _ in range(3)]
        for rate, steps in zip(rates, (2, 5, 0), strict=True):
            for _ in range(steps):
                made_step(rate)
        expected = groups_of(rates[1])

        end_epoch(*rates)
        after = [groups_of(rate) for rate in rates]
        for rate in rates:
            made_step(rate)

        assert after == [expected] * 3
        assert [groups_of(rate) for rate in rates] == [groups_of(rates[1])] * 3
        assert groups_of(rates[1]) != expected

    def test_another_fit_continues_from_the_state_of_the_last(self, make):
        whole = LearningRate(sgd(), Scheduling(make))
        for _ in range(3):
            end_epoch(whole)
        module = nn.Linear(2, 1)
        first = LearningRate(sgd(module), Scheduling(make))
        end_epoch(first)

        second = later(first, Scheduling(make), module)
        for _ in range(2):
            end_epoch(second)

        assert groups_of(second) == groups_of(whole)
        assert second.report()["scheduled"] == 3

    def test_a_joining_replica_catches_up_from_its_snapshot(self, make):
        old = LearningRate(sgd(), Scheduling(make))
        end_epoch(old)
        snapshot = old.state()
        end_epoch(old)
        end_epoch(old)

        new = LearningRate(sgd(), Scheduling(make))
        new.load_(snapshot)
        new.catch_up_(3)

        assert groups_of(new) == groups_of(old)


CPU = torch.device("cpu")


def note(stopper, loss):
    return EpochReport(totals=EpochTotals(loss, 1), **stopper.report())


def model(epoch):
    """Return an agreed model, identified by its one parameter."""
    untrained = {"floating buffers": np.zeros(1)}
    return Parameters(None, np.array([epoch], np.int32), 0.5, untrained)


def train(loss_by_epoch, stopper):
    for epoch, loss in loss_by_epoch.items():
        notes = [note(stopper, loss)]
        stopper.end_epoch(epoch, notes, model(epoch))


def travelled(values):
    """Return values as read from a file."""
    written = JsonValues()
    return JsonValues(written.tensors).decode(written.encode(values, "values"))


class TestLearningRate:
    def test_a_joining_replica_gets_the_steps_before_the_run(self):
        first = LearningRate(sgd(), Scheduling(KINDS["StepLR"]))
        end_epoch(first)
        second = later(first, Scheduling(KINDS["StepLR"]))
        end_epoch(second)
        third = LearningRate(sgd(), Scheduling(KINDS["StepLR"]))

        third.restore_(travelled(second.values()))

        values = third.values()
        assert (values["count"], values["before"]) == (2, 1)

    def test_a_joining_replica_adds_the_epochs_of_this_fit_to_those_before(self):
        donor = LearningRate(sgd(), Scheduling(KINDS["StepLR"]))
        for _ in range(3):  # epochs of an earlier fit
            end_epoch(donor)
        joining = later(donor, Scheduling(KINDS["StepLR"]))

        joining.catch_up_(2)

        assert joining.values()["count"] == 3 + 2
        assert joining.value == 0.5 ** (3 + 2)

    @pytest.mark.parametrize(
        "scheduling",
        [Scheduling(halved, "step"), Scheduling(plateau)],
        ids=["per step", "plateau"],
    )
    def test_a_joining_replica_takes_over_what_epochs_alone_do_not_tell(
        self, scheduling
    ):
        joining = LearningRate(sgd(), scheduling)

        joining.catch_up_(3)

        assert joining.report()["scheduled"] == 0

    def test_the_end_of_a_cycle_of_steps_is_warned_of_once(self, caplog):
        def one_cycle(optimizer):
            return lr_scheduler.OneCycleLR(optimizer, max_lr=2.0, total_steps=2)

        rate = LearningRate(sgd(), Scheduling(one_cycle, "step"))

        for _ in range(6):
            rate.step_()

        assert [r.message[:35] for r in caplog.records] == [
            "OneCycleLR has reached its end, tot"
        ]


class TestStopper:
    def stopper(self, clock=None, **rule):
        rule = {"monitor": "loss", "patience": 2, **rule}
        return EarlyStopper(
            EvaluationPlan(99, stopping=EarlyStopping(**rule)), now=clock or Clock()
        )

    def values(self, stopper):
        """Return the values as read from a file."""
        return travelled(stopper.values())

    @pytest.mark.parametrize("rule", [None, EarlyStopping("val_loss", patience=2)])
    def test_the_record_of_another_score_is_dropped(self, rule):
        saved, restored = (
            self.stopper(),
            EarlyStopper(EvaluationPlan(99, validates=True, stopping=rule)),
        )
        train({0: 1.0, 1: 2.0, 2: 3.0}, saved)

        restored.restore_(self.values(saved), 3)

        assert not restored.over
        assert restored.best() is None
        assert restored.report()["best"].best_epoch == -1

    def test_the_elapsed_time_continues(self):
        clock, later = Clock(), Clock()
        saved, restored = self.stopper(clock), self.stopper(later)
        clock.now += 30.0

        restored.restore_(self.values(saved), 0)
        later.now += 5.0

        assert restored.elapsed_s == pytest.approx(35.0)

    def test_the_best_model_is_that_of_the_best_epoch(self):
        stopper = self.stopper(patience=3)

        train({0: 2.0, 1: 1.0, 2: 1.5}, stopper)

        assert stopper.best().shared_N.tolist() == [1]

    def test_a_replica_without_the_best_model_has_no_older_one(self):
        stopper = self.stopper()
        train({0: 2.0}, stopper)

        stopper.end_epoch(
            1, [note(stopper, 1.0)], None
        )  # others have agreed on a model

        assert stopper.decision.best.best_epoch == 1
        assert stopper.best() is None

    def test_the_time_before_a_fit_was_resumed_counts(self):
        plan = EvaluationPlan(99, stopping=EarlyStopping("loss"))

        stopper = EarlyStopper(plan, now=Clock())
        stopper.restore_({**stopper.values(), "elapsed_s": 35.0}, None)

        assert stopper.elapsed_s == 35.0

    def test_a_time_limit_that_has_passed_ends_the_fit(self):
        clock = Clock()
        rule = {"patience": None, "max_seconds": 40.0}
        saved, restored = self.stopper(clock, **rule), self.stopper(**rule)
        clock.now += 50.0
        saved.end_epoch(0, [note(saved, 1.0)], model(0))

        restored.restore_(self.values(saved), 1)

        assert (saved.over, restored.over) == (True, True)
        assert restored.decision.reason == "max_seconds"

    def test_a_resumed_fit_counts_patience_up_to_the_epoch_that_was_decided(self):
        saved, restored = self.stopper(patience=2), self.stopper(patience=3)
        losses = {0: 1.0, 1: 2.0, 2: 3.0}
        train(losses, saved)
        assert saved.over

        restored.restore_(self.values(saved), len(losses))  # the next epoch

        assert not restored.over  # two epochs without improvement, not three


class TestStepper:
    def stepper(self, dtype):
        module = nn.Linear(2, 1)
        objective = objective_of(nn.MSELoss(), None)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return Stepper(module, objective, optimizer, Stepping(dtype), CPU)

    def test_the_loss_scale_of_float16_continues(self):
        saved, restored = (self.stepper(torch.float16) for _ in "ab")
        before = saved.values()["scale"]
        saved.backward([(torch.full((1, 2), torch.inf), torch.ones(1, 1))])
        saved.update(1.0)  # an overflow halves it

        restored.restore_(travelled(saved.values()))

        assert restored.values() == saved.values()
        assert restored.values()["scale"] == before / 2
