"""Replicas that wait for each other, and a client for them: promises 5 and 7."""

import os
import signal
import time

import dask.config
import numpy as np
import pytest
from distributed import Event

import daskdl
from daskdl import Callback, GradientSharing
from tests.cluster.leftovers import still_left_behind
from tests.cluster.problems import kept, rows, trainer
from tests.cluster.recording import Recorded, records

X, Y = rows()


class Slow(Callback):
    """Makes one replica slower than the other."""

    def on_step(self, step):
        if step.replica == 1:
            time.sleep(0.01)  # the slowness itself, not a wait for something


class Overtaken(Callback):
    """Holds one replica at its first step until the other has made twelve."""

    def on_step(self, step):
        if step.replica == 0 and step.number == 12:
            Event("overtaken").set()
        if step.replica == 1 and step.number == 1:
            assert Event("overtaken").wait(timeout=30)


class TestBoundedStaleness:
    """Promise 5: nobody runs more than max_staleness steps ahead."""

    @pytest.mark.parametrize("bound", [0, 3])
    def test_no_replica_starts_a_step_further_ahead(self, client, tmp_path, bound):
        master = Recorded(str(tmp_path), kept(max_staleness=bound))

        trainer(client, master=master, callbacks=[Slow()]).fit(X, Y, batch_size=8)

        leads = np.concatenate([end["leads"] for end in records(tmp_path, 0).values()])
        assert leads.max() == bound

    def test_unbounded_is_not_held(self, client):
        history = trainer(
            client, master=kept(max_staleness=None), callbacks=[Overtaken()]
        ).fit(X, Y, batch_size=8)

        assert "staleness" not in history[0]["waits"]
        assert history[0]["staleness"] > 0


@pytest.fixture
def ctrl_c():
    """Python's own handler, also where a shell in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupt(Callback):
    """Presses Ctrl-C on the client after the first epoch."""

    def on_epoch(self, row):
        os.kill(os.getpid(), signal.SIGINT)


def soon(**bounds):
    """Configure time-outs; replicas that cannot leave are not waited for either."""
    bounds = {"stop": "1s", **bounds}
    return {f"daskdl.timeouts.{name}": bound for name, bound in bounds.items()}


class TestNoSilentWaits:
    """Promise 7: every wait has a time-out and says whom it waited for."""

    def test_a_worker_that_is_busy_is_named(self, client):
        worker = sorted(client.nthreads())[1]
        release = Event("release", client=client)

        def occupy():
            Event("release").wait()

        busy = client.submit(occupy, workers=[worker], pure=False)
        try:
            with (
                dask.config.set(soon(join="1s")),
                pytest.raises(daskdl.WaitTimeoutError) as caught,
            ):
                trainer(client).fit(X, Y)
        finally:
            release.set()
            busy.result()
            busy.release()
        assert "not all replicas started within 1 s (daskdl.timeouts.join)" in str(
            caught.value
        )
        assert worker in str(caught.value)

    def test_too_few_replicas_are_named_with_what_was_last_heard(self, client):
        pids = client.run(os.getpid)
        worker = sorted(pids)[1]

        class Freeze(Callback):
            def on_epoch(self, row):
                os.kill(pids[worker], signal.SIGSTOP)

        master = GradientSharing(min_replicas=2, rejoin_timeout=1.0)
        own = trainer(client, master=master, callbacks=[Freeze()])
        try:
            with (
                dask.config.set(soon(silence="3s")),
                pytest.raises(daskdl.WaitTimeoutError) as caught,
            ):
                own.fit(X, Y, epochs=500)
        finally:
            os.kill(pids[worker], signal.SIGCONT)
        message = str(caught.value)
        expected = "fewer than min_replicas=2 replicas for 1 s (daskdl.timeouts.rejoin)"
        assert expected in message
        assert f"1 left; gone: replica 1 on {worker}, last heard at step" in message

    def test_ctrl_c_ends_a_run_and_leaves_the_cluster_clean(self, client, ctrl_c):
        own = trainer(client, callbacks=[Interrupt()])

        with pytest.raises(KeyboardInterrupt):
            own.fit(X, Y, epochs=10_000)

        assert still_left_behind(client) == {}
        assert len(own.history_) >= 1
        assert own.model_ is not None
        own.callbacks = []
        assert len(own.fit(X, Y)) == 1
