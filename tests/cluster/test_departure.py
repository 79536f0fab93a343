"""Workers that go while a run goes on: asked to, or killed."""

import os
import re
import signal

import dask.array as da
import numpy as np
import pytest

from daskdl import Callback, DataError
from tests.cluster.problems import kept, mlp, rows, start_of, trainer
from tests.cluster.recording import Recorded, vector

X, Y = rows()


class After(Callback):
    """Does something on the client after the first epoch."""

    def __init__(self, action):
        self._action = action

    def on_epoch(self, row):
        if row["epoch"] == 0:
            self._action()


class TestKilled:
    @pytest.fixture
    def doomed(self, three):
        """The worker of replica 1, and a callback that kills its process."""
        pids = three.run(os.getpid)
        worker = sorted(pids)[1]
        # As the batch system or the kernel would.
        return worker, After(lambda: os.kill(pids[worker], signal.SIGKILL))

    def test_with_data_that_can_be_computed_again_the_others_go_on(self, three, doomed):
        _, kill = doomed
        own = trainer(three, callbacks=[kill])
        x, y = da.from_array(X, chunks=(40, 20)), da.from_array(Y, chunks=40)

        history = own.fit(x, y, epochs=6, batch_size=8)

        replicas = history.column("replicas")
        assert (replicas[0], replicas[-1]) == (3, 2)
        assert history[-1]["examples"] == 480
        assert history[-1]["loss"] < history[0]["loss"]
        assert own.evaluate(X, Y)["accuracy"] > 0.8

    def test_data_in_memory_are_lost_with_it_and_the_error_says_so(self, three, doomed):
        worker, kill = doomed
        own = trainer(three, callbacks=[kill])

        with pytest.raises(DataError) as caught:
            own.fit(X, Y, epochs=10_000, batch_size=16)

        message = str(caught.value)
        assert re.search(r"piece \S+ was lost with the worker .* dask\.array", message)
        assert f"gone before: replica 1 on {worker}" in message
        assert len(own.history_) >= 1
        assert (vector(own.model_) - vector(start_of(mlp))).abs().max() > 1e-3


class TestRetired:
    @pytest.fixture
    def leaving(self, three):
        """The worker of replica 2; later tests get another, which Dask does not do."""
        yield sorted(three.nthreads())[2]
        three.cluster.scale(4)

    def test_it_hands_over_what_only_it_has(self, three, leaving, tmp_path):
        own = trainer(
            three,
            master=Recorded(str(tmp_path), kept()),
            callbacks=[After(lambda: three.retire_workers([leaving]))],
        )

        history = own.fit(X, Y, epochs=6, batch_size=8)

        assert history[0]["replicas"] == 3
        assert history[-1]["replicas"] == 2
        ends = [np.load(tmp_path / f"{replica}-5.npz") for replica in (0, 1)]
        left = np.load(tmp_path / "2-left.npz")
        start = ends[0]["start"]
        gone = left["local"] - start - left["others"] * 2.0**-24
        expected = start + sum(end["progress"] for end in ends) + gone
        # Several hundred moves, each rounded to float32 at a size of about 1.
        got = vector(own.model_).numpy()
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)
