"""Promise 6: workers may die, freeze, restart or join while `fit` runs."""

import functools
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask.config
import numpy as np
import pytest
from distributed import Event
from distributed.utils_test import poll_for

from daskdl import Callback
from daskdl.training import dask_backend
from tests.support.clusters import Script, TookPart, enough
from tests.support.problems import kept, normalised, rows, trainer
from tests.support.recording import Recorded, records

X, Y = rows(count=960)


def agreed(folder, epoch):
    """What all replicas had in common after an epoch, by replica."""
    return {r: record["shared"] for r, record in records(folder, epoch).items()}


class TestThree:
    @pytest.fixture
    def worker(self, three):
        """Address and process of the worker of replica 1."""
        pids = three.run(os.getpid)
        return sorted(pids)[1], pids[sorted(pids)[1]]

    def test_a_worker_that_is_restarted_takes_part_again(self, three, worker, tmp_path):
        _, pid = worker
        took_part = TookPart(tmp_path)
        kill = functools.partial(os.kill, pid, signal.SIGKILL)
        script = Script((3, kill), (took_part.by(3), enough))
        master = Recorded(str(tmp_path), kept())

        own = script.run(trainer(three, master=master, callbacks=[took_part]), X, Y)

        last = len(script.rows) - 1
        shared = agreed(tmp_path, last)
        assert sorted(shared) == [0, 2, 3]
        for other in (2, 3):
            np.testing.assert_array_equal(shared[0], shared[other])
        assert sum(row["repeated_pieces"] for row in script.rows) <= 1
        assert own.evaluate(X, Y)["accuracy"] > 0.8

    @pytest.mark.slow
    def test_a_frozen_worker_is_given_up_and_begins_again(
        self, three, worker, tmp_path
    ):
        _, pid = worker
        script = Script(
            (3, lambda: os.kill(pid, signal.SIGSTOP)),
            (2, lambda: os.kill(pid, signal.SIGCONT)),
            (3, enough),
        )
        try:
            with dask.config.set({"daskdl.timeouts.silence": "4s"}):
                script.run(trainer(three, master=Recorded(str(tmp_path), kept())), X, Y)
        finally:
            os.kill(pid, signal.SIGCONT)

        shared = agreed(tmp_path, len(script.rows) - 1)
        assert sorted(shared) == [0, 2, 3]
        np.testing.assert_array_equal(shared[0], shared[3])

    @pytest.mark.slow
    def test_what_died_with_a_worker_is_there_before_a_replica_asks_for_it(
        self, three, worker, tmp_path
    ):
        address, pid = worker
        go = Event("go", client=three)
        with ThreadPoolExecutor(1) as pool:
            own = trainer(three, callbacks=[Stalled(tmp_path)])
            fit = pool.submit(own.fit, X, Y, batch_size=16)
            poll_for(lambda: len(list(tmp_path.iterdir())) == 3, timeout=60)
            there = parts_there(three)

            os.kill(pid, signal.SIGKILL)
            poll_for(lambda: address not in three.nthreads(), timeout=60)
            poll_for(lambda: len(parts_there(three)) == len(X) // 16, timeout=60)

            assert parts_there(three) - there
            go.set()
            history = fit.result(60)
        go.clear()
        assert history[0]["examples"] >= 2 * len(X) // 3

    @pytest.mark.slow
    def test_a_worker_that_dies_while_the_fit_begins_is_left_out(
        self, three, worker, monkeypatch
    ):
        (address, pid), scatter, killed = worker, dask_backend.scatter, []

        def kill_first(client, *args):
            if not killed:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)
                poll_for(lambda: address not in client.nthreads(), timeout=60)
            return scatter(client, *args)

        monkeypatch.setattr(dask_backend, "scatter", kill_first)

        history = trainer(three).fit(X, Y, batch_size=16)

        assert killed
        assert history[0]["examples"] == len(X)


def parts_there(client):
    """Keys of the parts that some worker has."""

    def keys(dask_scheduler):
        tasks = dask_scheduler.tasks.values()
        return {t.key for t in tasks if t.who_has and "daskdl-part" in str(t.key)}

    return client.run_on_scheduler(keys)


class Stalled(Callback):
    """Replicas make their first step only when the test says so."""

    def __init__(self, folder):
        self._folder = folder

    def on_step_end(self, step):
        if step.number == 1:
            Path(self._folder, str(step.replica)).touch()
            assert Event("go").wait(90)


MORE = {
    "scale": lambda cluster: cluster.scale(2),
    "adapt": lambda cluster: cluster.adapt(minimum=2, maximum=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("add", MORE.values(), ids=MORE)
def test_one_replica_becomes_several(growing, add, tmp_path):
    script = Script((1, lambda: add(growing.cluster)), (2, enough))
    master = Recorded(str(tmp_path), kept())

    own = script.run(trainer(growing, master=master, model=normalised), X, Y)

    shared = agreed(tmp_path, len(script.rows) - 1)
    assert sorted(shared) == [0, 1]
    np.testing.assert_array_equal(shared[0], shared[1])
    assert own.evaluate(X, Y)["accuracy"] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("what", ["scatter", "replicas_on"])
def test_a_newcomer_that_could_not_be_started_is_tried_again(
    growing, monkeypatch, what
):
    function, refused = getattr(dask_backend, what), []

    def refuse_once(first, second, workers, *args):
        if workers != founder and not refused:
            refused.append(workers)
            raise TimeoutError("it did not take it")
        return function(first, second, workers, *args)

    founder = list(growing.nthreads())
    monkeypatch.setattr(dask_backend, what, refuse_once)
    script = Script((1, lambda: growing.cluster.scale(2)), (2, enough))

    with dask.config.set({"daskdl.timeouts.request": "5s"}):
        script.run(trainer(growing, model=normalised), X, Y)

    assert len(refused) == 1
