"""What is done to a cluster while a run goes on, by how many replicas take part."""

import pytest

from daskdl import Callback


class EnoughError(Exception):
    """What the test waited for has happened."""


class Script(Callback):
    """On the client: wait for a number of replicas, act, and so on; then stop.

    Args:
        acts: Pairs (replicas, what to do at the end of the first epoch with as many).
    """

    def __init__(self, *acts):
        self._acts = list(acts)
        self.rows = []

    def on_epoch_end(self, row):
        self.rows.append(row)
        replicas, act = self._acts[0]
        if row["replicas"] == replicas:
            del self._acts[0]
            act()

    def run(self, own, x, y, **options):
        own.callbacks = [*own.callbacks, self]
        with pytest.raises(EnoughError):
            own.fit(x, y, epochs=10**6, batch_size=16, **options)
        return own


def nothing():
    """It was worth waiting for, and what comes next is another number."""


def enough():
    raise EnoughError
