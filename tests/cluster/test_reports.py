"""Callbacks of a fit on a cluster: on the workers and on the client."""

import os
import threading

import pytest

from daskdl import Callback
from tests.support.problems import rows, trainer
from tests.support.recording import Notes

X, Y = rows()


class Enough(Exception):
    """Raised by a callback on the client."""


def test_on_step_end_runs_on_the_workers_after_each_step(client, tmp_path):
    notes = Notes(tmp_path)

    history = trainer(client, callbacks=[notes]).fit(X, Y, epochs=2, batch_size=50)

    lines = notes.read()
    pids = client.run(os.getpid)
    assert {line["pid"] for line in lines} == set(pids.values())
    for epoch, row in enumerate(history):
        of_epoch = [line for line in lines if line["epoch"] == epoch]
        assert sum(line["examples"] for line in of_epoch) == 480
        loss = sum(line["loss"] * line["examples"] for line in of_epoch) / 480
        assert row["loss"] == pytest.approx(loss)
    for replica in (0, 1):
        numbers = [line["number"] for line in lines if line["replica"] == replica]
        assert numbers == list(range(1, len(numbers) + 1))


def test_on_epoch_end_runs_on_the_client_and_is_not_pickled(client):
    class Keep(Callback):
        def __init__(self):
            self.rows = []
            self.lock = threading.Lock()  # cannot be pickled

        def on_epoch_end(self, row):
            with self.lock:
                self.rows.append(row)

    keep = Keep()
    history = trainer(client, callbacks=[keep]).fit(X, Y, epochs=3)

    assert keep.rows == list(history)


def test_an_error_in_on_epoch_end_stops_the_fit_and_reaches_the_caller(client):
    class Stop(Callback):
        def on_epoch_end(self, row):
            if row["epoch"] == 1:
                raise Enough("after two")

    own = trainer(client, callbacks=[Stop()])
    with pytest.raises(Enough, match="after two"):
        own.fit(X, Y, epochs=10_000)

    assert len(own.history_) == 2
    assert own.evaluate(X, Y)["loss"] < 1.3
