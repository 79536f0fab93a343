"""Promise 6: workers may die, freeze, restart or join while `fit` runs."""

import functools
import logging
import os
import signal

import dask.config
import numpy as np
import pytest
from distributed.utils_test import captured_logger

from daskdl.channel.protocol import NAME
from tests.support.clusters import Script, TookPart, cluster_of, enough
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

        fitted = script.run(trainer(three, master=master, callbacks=[took_part]), X, Y)

        last = len(script.rows) - 1
        shared = agreed(tmp_path, last)
        assert sorted(shared) == [0, 2, 3]
        for replica in (2, 3):
            np.testing.assert_array_equal(shared[0], shared[replica])
        assert sum(row["repeated_pieces"] for row in script.rows) <= 1
        assert fitted.evaluate(X, Y)["accuracy"] > 0.8
        replicas = fitted.history_.run.replicas
        assert "its worker is gone" in replicas[1]["reason"]
        assert replicas[3]["joined"] > replicas[1]["left"] > 0
        assert {0, 2, 3} <= set(fitted.history_.timeline.replicas)

    @pytest.mark.slow
    def test_a_frozen_worker_is_removed_and_joins_again(self, three, worker, tmp_path):
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


MORE = {
    "scale": lambda cluster: cluster.scale(2),
    "adapt": lambda cluster: cluster.adapt(minimum=1, maximum=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("add", MORE.values(), ids=MORE)
def test_workers_that_are_added_join_the_fit(growing, add, tmp_path):
    script = Script((1, lambda: add(growing.cluster)), (2, enough))
    master = Recorded(str(tmp_path), kept())

    fitted = script.run(trainer(growing, master=master, model=normalised), X, Y)

    shared = agreed(tmp_path, len(script.rows) - 1)
    assert sorted(shared) == [0, 1]
    np.testing.assert_array_equal(shared[0], shared[1])
    assert fitted.evaluate(X, Y)["accuracy"] > 0.8


def test_a_worker_that_cannot_get_the_model_gets_it_later_and_dask_logs_no_error(
    caplog,
):
    def copies():
        [broadcast] = cluster.scheduler.extensions[NAME].copies.broadcasts.values()
        return broadcast.holders

    def forget_holders():
        held.update(copies())
        copies().clear()
        cluster.scale(2)

    held = set()
    script = Script(
        (1, forget_holders),
        (lambda _: "no replica on" in caplog.text, lambda: copies().update(held)),
        (2, enough),
    )

    with (
        cluster_of(1, processes=False) as client,
        dask.config.set({"daskdl.timeouts.request": "5s"}),
        captured_logger("distributed.worker", logging.ERROR) as errors_of_dask,
    ):
        cluster = client.cluster
        fitted = script.run(trainer(client), X, Y)

    assert "Compute Failed" not in errors_of_dask.getvalue()
    assert "no worker has the model any more" in caplog.text
    assert sorted(fitted.history_.run.replicas) == [0, 2]
