"""What becomes of the news of a run, without a run."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest

from daskdl.callbacks import Callback
from daskdl.channel.traffic import Traffic
from daskdl.history import History
from daskdl.steps import StepRow, pack_rows
from daskdl.training.base import Statistics
from daskdl.training.follow import Follower

NOTE = {
    "tally": [6.0, 4, 1.0],
    "skipped": 0,
    "statistics": list(Statistics(1, 0.5, 0.25, 0.0, 0, 2)),
    "traffic": dataclasses.asdict(Traffic()),
    "score": None,
    "scheduled": 0,
    "learning_rate": 0.1,
}
GATHERED = {
    "kind": "gathered",
    "notes": [(0, NOTE)],
    "told": [],
    "repeated": 0,
    "refused": 0,
}
PROGRESS = {"kind": "progress", "examples": 4, "epoch": 0, "loss": 1.5}


class Watching(Callback):
    def __init__(self):
        self.rows = []

    def on_epoch(self, row):
        self.rows.append(row)


def follower(history, callbacks=(), progress=False):
    return Follower(history, callbacks, size=10, examples=8, progress=progress)


def test_each_epoch_adds_a_row_and_calls_every_callback_with_it():
    history, callbacks = History(), [Watching(), Watching()]

    with follower(history, callbacks) as own:
        own.follow(GATHERED)
        own.follow({"kind": "joined"})
        own.follow(GATHERED)

    assert history.column("epoch") == [0, 1]
    assert history.column("loss") == [1.5, 1.5]
    assert [callback.rows for callback in callbacks] == [list(history)] * 2


def test_the_rows_of_steps_that_came_with_an_epoch_are_added():
    history = History()
    told = [pack_rows([(1, StepRow(0, 10, replica, 0.5))]) for replica in (0, 1)]

    with follower(history) as own:
        own.follow({**GATHERED, "told": [*told, b""]})
        own.follow({**GATHERED, "told": [pack_rows([(2, StepRow(1, 20, 0, 0.5))])]})

    assert history.steps.column("step") == [10, 10, 20]
    assert history.steps.column("replica") == [0, 1, 0]


def test_epochs_are_counted_on_from_those_of_the_fit_before():
    history = History()
    for _ in range(2):
        with follower(history) as own:
            own.follow(GATHERED)

    assert history.column("epoch") == [0, 1]


def test_the_seconds_are_those_since_the_epoch_before(monkeypatch):
    clock = iter([10.0, 13.0, 14.0])
    monkeypatch.setattr(
        "daskdl.training.follow.time", SimpleNamespace(perf_counter=clock.__next__)
    )
    history = History()

    own = follower(history)
    own.follow(GATHERED)
    own.follow(GATHERED)

    assert history.column("seconds") == [3.0, 1.0]


def test_a_bar_counts_the_examples_and_is_closed(capsys):
    with follower(History(), progress=True) as own:
        own.follow(PROGRESS)
        own.follow(PROGRESS)

    assert own._bar.disable  # as tqdm says that it is closed
    shown = capsys.readouterr().err
    assert "8/8" in shown
    assert "epoch=0, loss=1.5000" in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_without_a_choice_a_terminal_gets_a_bar(monkeypatch, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)

    with follower(History(), progress=None) as own:
        assert own._bar.disable is not terminal
