"""Workers that go while a run goes on: asked to, or killed."""

import os
import signal

import dask.array as da
import numpy as np
import pytest

from daskdl import Callback
from daskdl.channel.remote import RemoteChannel
from tests.support.clusters import cluster_of
from tests.support.problems import kept, rows, trainer
from tests.support.recording import Recorded, delivered

pytestmark = pytest.mark.slow

X, Y = rows()


class After(Callback):
    """Does something on the client after the first epoch."""

    def __init__(self, action):
        self._action = action

    def on_epoch_end(self, row):
        if row["epoch"] == 0:
            self._action()


class DiesAfterLeaving(Callback):
    """Kills the worker of replica 1 when the replica has left the run."""

    def on_epoch_begin(self, epoch):
        if epoch.replica == 1:
            leave = RemoteChannel.leave

            def last(channel, **options):
                leave(channel, **options)
                os.kill(os.getpid(), signal.SIGKILL)

            RemoteChannel.leave = last  # until this process ends


class TestKilled:
    @pytest.fixture
    def doomed(self, three):
        """The worker of replica 1, and a callback that kills its process."""
        pids = three.run(os.getpid)
        worker = sorted(pids)[1]
        # As the batch system or the kernel would.
        return worker, After(lambda: os.kill(pids[worker], signal.SIGKILL))

    def test_a_killed_worker_does_not_end_a_fit_on_lazy_data(self, three, doomed):
        _, kill = doomed
        own = trainer(three, callbacks=[kill])
        x, y = da.from_array(X, chunks=(40, 20)), da.from_array(Y, chunks=40)

        history = own.fit(x, y, epochs=6, batch_size=8)

        replicas = history.column("replicas")
        assert (replicas[0], min(replicas)) == (3, 2)
        assert history[-1]["examples"] == 480
        assert history[-1]["loss"] < history[0]["loss"]
        assert own.evaluate(X, Y)["accuracy"] > 0.8

    def test_a_killed_worker_does_not_end_a_fit_on_data_in_memory(self, three, doomed):
        worker, kill = doomed
        own = trainer(three, callbacks=[kill])

        history = own.fit(X, Y, epochs=6, batch_size=8)

        replicas = history.column("replicas")
        assert replicas[0] == 3
        assert min(replicas) == 2
        assert own.evaluate(X, Y)["accuracy"] > 0.8
        [gone] = [r for r in history.run.replicas.values() if r["worker"] == worker]
        assert "its worker is gone" in gone["reason"]
        assert 0 < gone["left"] < history.run.seconds

    def test_a_result_lost_with_its_worker_does_not_keep_a_fit_waiting(self, three):
        own = trainer(three, callbacks=[DiesAfterLeaving()])

        history = own.fit(X, Y, epochs=6, batch_size=8)

        assert history.column("replicas") == [3] * 6
        assert own.evaluate(X, Y)["accuracy"] > 0.8


def test_a_retiring_worker_hands_over_its_residual(tmp_path):
    with cluster_of(3) as client:
        leaving = sorted(client.nthreads())[2]  # the worker of replica 2
        trained = trainer(
            client,
            master=Recorded(str(tmp_path), kept()),
            callbacks=[After(lambda: client.retire_workers([leaving]))],
        )
        history = trained.fit(X, Y, epochs=6, batch_size=8)

    assert history[0]["replicas"] == 3
    assert history[-1]["replicas"] == 2
    ends = [np.load(tmp_path / f"{replica}-5.npz") for replica in (0, 1)]
    left = np.load(tmp_path / "2-left.npz")
    start = ends[0]["start"]
    gone = left["local"] - start - left["others"] * 2.0**-24
    expected = start + sum(end["progress"] for end in ends) + gone
    # Several hundred moves, each rounded to float32 at a size of about 1.
    got = delivered(trained).numpy()
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)
