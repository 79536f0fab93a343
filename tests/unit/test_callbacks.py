import pickle

import pytest

from daskdl.callbacks import Callback, Step


class Counting(Callback):
    def __init__(self):
        self.steps = []

    def on_step(self, step):
        self.steps.append(step)


class Reading(Callback):
    def on_epoch(self, row):
        self.row = row


STEP = Step(replica=1, epoch=0, number=3, loss=0.5, examples=32)


def test_a_callback_does_nothing_by_itself():
    callback = Callback()

    assert callback.on_step(STEP) is None
    assert callback.on_epoch({"epoch": 0}) is None
    assert vars(callback) == {}


def test_a_callback_travels_with_what_it_was_made_of():
    callback = Counting()
    callback.on_step(STEP)

    assert pickle.loads(pickle.dumps(callback)).steps == [STEP]


@pytest.mark.parametrize(
    ("kind", "travels"), [(Callback, False), (Reading, False), (Counting, True)]
)
def test_only_a_callback_that_watches_steps_runs_on_workers(kind, travels):
    assert kind().runs_on_workers is travels


def test_a_step_names_its_replica_and_its_place():
    assert STEP._asdict() == {
        "replica": 1,
        "epoch": 0,
        "number": 3,
        "loss": 0.5,
        "examples": 32,
    }
