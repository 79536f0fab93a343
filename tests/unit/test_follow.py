"""What becomes of the news of a run, without a run."""

import dataclasses
import math
import sys

import pytest

from daskdl.callbacks import Callback, EarlyStopping
from daskdl.history import History, StepRow, Stopping, pack_rows
from daskdl.training.backend import EpochEnded, StepProgress
from daskdl.training.base import ExchangeStats
from daskdl.training.epoch_control import Judging
from daskdl.training.fit import ProgressReporter
from daskdl.training.telemetry import BestScore, EpochReport, EpochTotals

REPORT = EpochReport(
    totals=EpochTotals(6.0, 4),
    exchange=ExchangeStats(1, 0.5, 0.25, 0.0, 0, 2),
    learning_rate=0.1,
)
GATHERED = {
    "epoch": 0,
    "payloads": [(0, REPORT.to_wire())],
    "client_payloads": [],
    "repeated": 0,
    "refused": 0,
    "departed": [],
}
PROGRESS = StepProgress(epoch=0, examples=4, loss=1.5)


class Watching(Callback):
    def __init__(self):
        self.rows = []

    def on_epoch_end(self, row):
        self.rows.append(row)


def reporter(history, callbacks=(), progress=False, judging=None, **before):
    judging = judging or Judging(epochs=9)
    return ProgressReporter(history, callbacks, 10, 8, progress, judging, **before)


def ended_epoch(**changes):
    return EpochEnded(0, {**GATHERED, **changes})


def test_each_epoch_adds_a_row_and_calls_every_callback_with_it():
    history, callbacks = History(), [Watching(), Watching()]

    with reporter(history, callbacks) as own:
        own.end_epoch(ended_epoch())
        own.end_epoch(ended_epoch())

    assert history.column("epoch") == [0, 1]
    assert history.column("loss") == [1.5, 1.5]
    assert [callback.rows for callback in callbacks] == [list(history)] * 2


def test_the_rows_of_steps_that_came_with_an_epoch_are_added():
    history = History()
    told = [pack_rows([(1, StepRow(0, 10, replica, 0.5))]) for replica in (0, 1)]

    with reporter(history) as own:
        own.end_epoch(ended_epoch(client_payloads=[*told, b""]))
        later = pack_rows([(2, StepRow(1, 20, 0, 0.5))])
        own.end_epoch(ended_epoch(client_payloads=[later]))

    assert history.steps.column("step") == [10, 10, 20]
    assert history.steps.column("replica") == [0, 1, 0]


def test_epochs_are_counted_on_from_those_of_the_run_before():
    history = History()
    for epoch in range(2):
        with reporter(history, epoch=epoch) as own:
            own.end_epoch(ended_epoch())

    assert history.column("epoch") == [0, 1]


def test_a_bar_counts_the_examples_and_is_closed(capsys):
    with reporter(History(), progress=True) as own:
        own.show(PROGRESS)
        own.show(PROGRESS)

    assert own._bar.disable  # as tqdm says that it is closed
    shown = capsys.readouterr().err
    assert "8/8" in shown
    assert "epoch=0, loss=1.5000" in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_without_a_choice_a_terminal_gets_a_bar(monkeypatch, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)

    with reporter(History(), progress=None) as own:
        assert own._bar.disable is not terminal


def ended(history, *losses, rule):
    """Follow epochs with these training losses, each with the record so far."""
    judging, record = Judging(epochs=9, stopping=rule), BestScore()
    with reporter(history, judging=judging) as own:
        for loss in losses:
            totals = EpochTotals(loss, 1)
            report = dataclasses.replace(REPORT, totals=totals, best=record)
            own.end_epoch(ended_epoch(payloads=[(0, report.to_wire())]))
            record = judging.judge(len(history) - 1, [report]).record


def test_what_early_stopping_saw_and_did_is_said_in_the_end():
    history = History()

    ended(history, 3.0, 1.0, 2.0, rule=EarlyStopping("loss", patience=1))

    assert history.stopping == Stopping(
        "loss",
        "patience",
        "loss has not improved for 1 epoch: it is 2, the best was 1 in epoch 1",
        {0: 3.0, 1: 1.0, 2: 2.0},
        1,
        1.0,
    )


def test_without_a_finite_score_there_is_no_best_epoch():
    history = History()

    ended(history, math.inf, rule=EarlyStopping("loss", patience=1))

    assert history.stopping.reason == "not_finite"
    assert history.stopping.best_epoch is None
    assert math.isnan(history.stopping.best_score)


def test_without_early_stopping_nothing_is_said():
    history = History()

    with reporter(history) as own:
        own.end_epoch(ended_epoch())

    assert history.stopping is None
