"""The hooks of a callback, and what they are told."""

import pickle

import pytest

from daskdl.callbacks import Callback, EpochBegin, FitBegin, FitEnd, Step
from daskdl.history import History


class Counting(Callback):
    def __init__(self):
        self.steps = []

    def on_step_end(self, step):
        self.steps.append(step)


class Beginning(Callback):
    def on_epoch_begin(self, epoch):
        self.epoch = epoch


class Reading(Callback):
    def on_fit_begin(self, fit):
        self.fit = fit

    def on_epoch_end(self, row):
        self.row = row

    def on_fit_end(self, end):
        self.end = end


STEP = Step(replica=1, epoch=0, number=3, loss=0.5, examples=32, learning_rate=0.1)
TOLD = {
    "on_fit_begin": FitBegin(2, 3, 0, 32, 1000, 650),
    "on_epoch_begin": EpochBegin(1, 0, 2, 0.1),
    "on_step_end": STEP,
    "on_epoch_end": {"epoch": 0},
    "on_fit_end": FitEnd(History(), None),
}


@pytest.mark.parametrize("hook", TOLD)
def test_a_callback_does_nothing_by_itself(hook):
    callback = Callback()

    assert getattr(callback, hook)(TOLD[hook]) is None
    assert vars(callback) == {}


def test_there_are_no_other_hooks():
    assert {name for name in vars(Callback) if name.startswith("on_")} == set(TOLD)


def test_a_callback_travels_with_what_it_was_made_of():
    callback = Counting()
    callback.on_step_end(STEP)

    assert pickle.loads(pickle.dumps(callback)).steps == [STEP]


@pytest.mark.parametrize(
    ("kind", "travels"),
    [(Callback, False), (Reading, False), (Counting, True), (Beginning, True)],
)
def test_only_a_callback_with_a_hook_of_the_workers_runs_there(kind, travels):
    assert kind().runs_on_workers is travels


def test_a_step_names_its_replica_and_its_place():
    assert STEP._asdict() == {
        "replica": 1,
        "epoch": 0,
        "number": 3,
        "loss": 0.5,
        "examples": 32,
        "learning_rate": 0.1,
    }
