"""Early stopping in one replica: its clock, its best model, those who come later."""

import numpy as np
import pytest

from daskdl.callbacks import EarlyStopping
from daskdl.training.base import Parameters
from daskdl.training.epoch_control import Judging, Stopper
from daskdl.training.telemetry import EpochReport, EpochTotals

RULE = EarlyStopping("loss", patience=2)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def stopper(rule=RULE, **options):
    return Stopper(Judging(99, stopping=rule), **options)


def note(own, loss):
    return EpochReport(totals=EpochTotals(loss, 1), **own.report())


def model(epoch):
    return Parameters(None, np.array([epoch], np.int32), None, 0.5)


def train(loss_by_epoch, *stoppers):
    for epoch, loss in loss_by_epoch.items():
        notes = [note(own, loss) for own in stoppers]
        for own in stoppers:
            own.end_epoch(epoch, notes, model(epoch))


def epoch_of(best):
    return None if best is None else int(best.shared_N[0])


def test_it_is_over_when_the_notes_say_so_and_has_the_best_model():
    own = stopper()

    train({0: 2.0, 1: 1.0, 2: 1.5}, own)
    assert not own.over
    train({3: 1.25}, own)

    assert own.over
    assert epoch_of(own.best()) == 1


def test_the_best_is_not_kept_if_it_is_not_to_come_back():
    own = stopper(EarlyStopping("loss", patience=2, restore_best=False))

    train({0: 2.0, 1: 1.0}, own)

    assert own.best() is None
    assert own.snapshot()["best"] is None


def test_without_a_rule_it_never_is_over():
    own = stopper(rule=None)

    train({0: float("nan"), 1: 1.0, 2: 1.0}, own)

    assert not own.over
    assert own.best() is None


def test_time_passes_from_when_it_was_made():
    clock = Clock()
    own = stopper(now=clock)

    clock.now += 12.5

    assert own.report()["elapsed_s"] == 12.5


class TestNewcomer:
    """It has a snapshot, and what all said at the end of the epoch before."""

    def test_it_decides_as_the_others_do(self):
        first = stopper()
        train({0: 1.0, 1: 2.0}, first)
        later = stopper(snapshot=first.snapshot())

        report = [note(first, 2.0)]  # the end of an epoch that it did not see
        first.end_epoch(2, report, model(2))
        later.catch_up(2, report)

        assert first.over
        assert later.over
        assert later.report()["best"] == first.report()["best"]

    def test_it_goes_on_with_the_others(self):
        first = stopper(EarlyStopping("loss", patience=3))
        train({0: 1.0}, first)
        later = stopper(EarlyStopping("loss", patience=3), snapshot=first.snapshot())
        report = [note(first, 2.0)]
        first.end_epoch(1, report, model(1))
        later.catch_up(1, report)

        train({2: 0.5, 3: 0.75}, later, first)

        assert later.report()["best"] == first.report()["best"]
        assert [epoch_of(own.best()) for own in (first, later)] == [2, 2]

    def test_it_has_the_best_model_of_before_its_time(self):
        first = stopper()
        train({0: 1.0, 1: 2.0}, first)
        report = [note(first, 2.0)]

        later = stopper(snapshot=first.snapshot())
        later.catch_up(2, report)

        best = later.best()
        np.testing.assert_array_equal(best.shared_N, [0])
        assert best.grid == 0.5

    def test_a_best_model_that_it_was_not_given_does_not_come_back(self):
        first = stopper()
        train({0: 2.0}, first)
        later = stopper(snapshot=first.snapshot())

        later.catch_up(1, [note(first, 1.0)])

        assert later.best() is None

    def test_its_time_goes_on(self):
        clock, other = Clock(), Clock()
        first = stopper(now=clock)
        clock.now += 30.0

        later = stopper(snapshot=first.snapshot(), now=other)
        other.now += 5.0

        assert later.elapsed_s == pytest.approx(35.0)
