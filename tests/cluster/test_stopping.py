"""Early stopping on a cluster."""

import os

import numpy as np
import pytest
from torch.nn import functional

from daskdl import Callback, EarlyStopping
from tests.support.problems import kept, rows, trainer
from tests.support.recording import Recorded, records, vector
from tests.support.watched import KillAt, note, notes

X, Y = rows(count=960)


class Epochs(Callback):
    """Records the epochs that each replica begins, and when it was unpickled."""

    def __init__(self, folder):
        self.folder = str(folder)
        self.packed = 0

    def __getstate__(self):
        self.packed += 1
        return {"folder": self.folder}

    def __setstate__(self, state):
        vars(self).update(state)
        note(self.folder, "unpacked")

    def on_epoch_begin(self, epoch):
        note(self.folder, "begun", **epoch._asdict())

    def begun(self):
        """Return the epochs by replica, in order."""
        found = {}
        for line in notes(self.folder, "begun"):
            found.setdefault(line["replica"], []).append(line["epoch"])
        return found


class Enough(Epochs):
    """Also a loss, which is small from the fourth epoch with `replicas` replicas.

    Args:
        folder: Of the notes.
        replicas: How many there have to be; None: any.
        after: The first epoch that counts.
    """

    def __init__(self, folder, replicas=None, after=0):
        super().__init__(folder)
        self.replicas, self.after = replicas, after

    def __getstate__(self):
        self.packed += 1
        return {**vars(self), "seen": 0}

    def __call__(self, output, labels):
        high = 0.0 if getattr(self, "seen", 0) > 3 else 9.0
        return functional.cross_entropy(output, labels) + high

    def on_epoch_begin(self, epoch):
        super().on_epoch_begin(epoch)
        counts = self.replicas in (None, epoch.replicas) and epoch.epoch >= self.after
        self.seen = getattr(self, "seen", 0) + counts


def assert_best(own, folder):
    """Check that the model is the agreed one of the best epoch."""
    stopping = own.history_.stopping
    assert stopping.restored
    of_best = records(folder, stopping.best_epoch)
    assert of_best
    for record in of_best.values():
        np.testing.assert_array_equal(vector(own.model_).numpy(), record["shared"])


class TestTwo:
    def test_a_callback_is_pickled_once_and_unpickled_by_each_replica(
        self, client, tmp_path
    ):
        epochs = Epochs(tmp_path)

        trainer(client, callbacks=[epochs]).fit(X, Y, epochs=3)

        assert epochs.packed == 1
        pids = [line["pid"] for line in notes(tmp_path, "unpacked")]
        assert sorted(pids) == sorted(client.run(os.getpid).values())


class More(Callback):
    """On the client: adds a worker after the first epoch."""

    def __init__(self, cluster):
        self.cluster = cluster

    def on_epoch_end(self, row):
        if row["epoch"] == 0:
            self.cluster.scale(2)


@pytest.mark.slow
def test_a_joining_replica_stops_with_the_others(growing, tmp_path):
    enough = Enough(tmp_path, replicas=2)
    own = trainer(
        growing,
        loss=enough,
        master=Recorded(str(tmp_path), kept()),
        callbacks=[EarlyStopping("loss", target=5.0), enough, More(growing.cluster)],
    )

    history = own.fit(X, Y, epochs=10**6, batch_size=16)

    assert history.stopping.reason == "target"
    assert history[-1]["replicas"] == 2
    begun = enough.begun()
    assert begun[0] == list(range(len(history)))
    assert begun[1] == begun[0][-len(begun[1]) :]
    assert_best(own, tmp_path)


@pytest.mark.slow
def test_the_others_stop_together_when_a_worker_is_killed_meanwhile(three, tmp_path):
    # Two that are left, or two and the one that comes in its place. In an epoch each
    # makes ten steps, and none is eight ahead: it dies in the fourth or fifth.
    enough = Enough(tmp_path, after=6)
    own = trainer(
        three,
        loss=enough,
        master=Recorded(str(tmp_path), kept()),
        callbacks=[EarlyStopping("loss", target=5.0), enough, KillAt(40)],
    )

    history = own.fit(X, Y, epochs=10**6, batch_size=16)

    assert history.stopping.reason == "target"
    begun = enough.begun()
    for replica in (0, 2):
        assert begun[replica] == list(range(len(history)))
    assert begun[1][-1] < len(history) - 1
    assert_best(own, tmp_path)
