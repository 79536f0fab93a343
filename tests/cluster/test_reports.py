"""Callbacks of a fit on a cluster: on the workers and on the client."""

import os
import threading

import pytest

from daskdl import Callback, ReplicaError
from tests.support.problems import rows, trainer
from tests.support.promises import FailAt
from tests.support.recording import Notes
from tests.support.watched import note, notes

X, Y = rows()


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


class Counted(Callback):
    """Counts how often it is pickled; each copy notes the process it is in."""

    def __init__(self, folder):
        self.folder, self.pickled = str(folder), 0

    def __getstate__(self):
        self.pickled += 1
        return {"folder": self.folder}

    def __setstate__(self, state):
        vars(self).update(state)
        note(self.folder, "unpickled")

    def on_epoch_begin(self, epoch):
        """Without a hook of replicas, a callback stays on the client."""


def test_a_callback_is_pickled_once_and_unpickled_by_each_replica(client, tmp_path):
    counted = Counted(tmp_path)

    trainer(client, callbacks=[counted]).fit(X, Y, epochs=3)

    assert counted.pickled == 1
    pids = [line["pid"] for line in notes(tmp_path, "unpickled")]
    assert sorted(pids) == sorted(client.run(os.getpid).values())


# ---- exceptions of the user's code on workers


class NotUnpickled(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class NotPickled(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("make", "summary"),
    [
        (lambda: NotUnpickled(1, 2), "NotUnpickled: 1 and 2"),
        (lambda: NotPickled("tight"), "NotPickled: tight"),
    ],
)
def test_the_client_gets_address_and_traceback(client, make, summary):
    failing = trainer(client, callbacks=[FailAt(make)])

    with pytest.raises(ReplicaError) as caught:
        failing.fit(X, Y, epochs=100)

    message = str(caught.value)
    worker = sorted(client.nthreads())[1]
    assert message.startswith(f"replica 1 on {worker}: {summary}")
    assert "Traceback of the worker:" in message
    assert "raise self.make()" in message  # the very line
