"""What is done to a cluster while a run goes on, by how many replicas take part."""

import pytest

from daskdl import Callback


class EnoughError(Exception):
    """What the test waited for has happened."""


class Script(Callback):
    """On the client: wait for a number of replicas, act, and so on; then stop.

    Args:
        acts: Pairs (replicas, what to do at the end of the first epoch with as many);
            or instead of a number, what tells of its row whether it is that epoch.
    """

    def __init__(self, *acts):
        self._acts = list(acts)
        self.rows = []

    def on_epoch_end(self, row):
        self.rows.append(row)
        when, act = self._acts[0]
        if when(row) if callable(when) else row["replicas"] == when:
            del self._acts[0]
            act()

    def run(self, own, x, y, **options):
        own.callbacks = [*own.callbacks, self]
        with pytest.raises(EnoughError):
            own.fit(x, y, epochs=10**6, batch_size=16, **options)
        return own


class TookPart(Callback):
    """On workers: notes which replicas train in which epochs.

    A worker that was killed may be there again before an epoch has ended without it.

    Args:
        folder: For the notes.
    """

    def __init__(self, folder):
        self._folder = folder

    def on_step_end(self, step):
        self._note(step.replica, step.epoch).touch()

    def _note(self, replica, epoch):
        return self._folder / f"took-part-{replica}-{epoch}"

    def by(self, replica):
        """What tells of the row of an epoch whether a replica took part in it."""
        return lambda row: self._note(replica, row["epoch"]).exists()


def nothing():
    """It was worth waiting for, and what comes next is another number."""


def enough():
    raise EnoughError
