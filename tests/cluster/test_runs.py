"""Runs that fail, that lose a worker, that follow each other or go on at once."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import torch
from distributed import Client, LocalCluster
from torch import nn

from daskdl import (
    AdaptiveThreshold,
    Callback,
    DaskDLError,
    DivergedError,
    GradientSharing,
    KeepResidual,
    ReplicaError,
    Trainer,
)
from daskdl.channel.scheduler import NAME
from tests.cluster.conftest import still_left_behind
from tests.cluster.problems import mlp, normalised, parameters_of, rows, sgd
from tests.cluster.recording import Recorded, records, vector

X, Y = rows()


def trainer(client, **options):
    options = {"model": mlp, "optimizer": sgd, "progress": False, **options}
    options = {"loss": nn.CrossEntropyLoss(), "master": kept(), **options}
    return Trainer(client=client, **options)


def kept(**options):
    """Sharing that loses nothing on purpose: no clipping."""
    return GradientSharing(AdaptiveThreshold(initial=1e-3), KeepResidual(), **options)


class Odd(Exception):
    """It can be pickled, but not unpickled."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Held(Exception):
    """It cannot even be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class FailAt(Callback):
    """Raises on replica 1 at a step."""

    def __init__(self, make, number=3):
        self.make = make
        self.number = number

    def on_step(self, step):
        if step.replica == 1 and step.number == self.number:
            raise self.make()


FAILURES = {
    "plain": (lambda: KeyError("wanted"), "KeyError: 'wanted'"),
    "odd": (lambda: Odd(1, 2), "Odd: 1 and 2"),
    "held": (lambda: Held("tight"), "Held: tight"),
}


class TestFailures:
    @pytest.mark.parametrize(("make", "summary"), FAILURES.values(), ids=FAILURES)
    def test_the_client_gets_address_and_traceback(self, client, make, summary):
        own = trainer(client, callbacks=[FailAt(make)])

        with pytest.raises(ReplicaError) as caught:
            own.fit(X, Y, epochs=100)

        message = str(caught.value)
        worker = sorted(client.nthreads())[1]
        assert message.startswith(f"replica 1 on {worker}: ")
        assert summary in message
        assert "Traceback of the worker:" in message
        assert "raise self.make()" in message  # the very line

    def test_the_cause_is_the_users_own_exception(self, client):
        own = trainer(client, callbacks=[FailAt(lambda: KeyError("wanted"))])

        with pytest.raises(ReplicaError) as caught:
            own.fit(X, Y)

        assert type(caught.value.__cause__) is KeyError
        assert caught.value.__cause__.args == ("wanted",)

    def test_a_run_after_a_failed_one_works(self, client):
        own = trainer(client, callbacks=[FailAt(RuntimeError, number=20)])
        with pytest.raises(ReplicaError):
            own.fit(X, Y, epochs=100, batch_size=16)
        own.callbacks = []

        history = own.fit(X, Y, epochs=5, batch_size=16)

        assert history.column("replicas") == [2] * 5
        assert own.evaluate(X, Y)["accuracy"] > 0.8

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
    def test_a_device_that_a_worker_does_not_have_is_a_failure_there(self, client):
        with pytest.raises(
            ReplicaError, match=r"replica \d on tcp://.* failed: .*CUDA"
        ):
            trainer(client, device="cuda").fit(X, Y)


class Diverging(nn.CrossEntropyLoss):
    """The loss of this copy is not finite from a call on."""

    def __init__(self, calls, value):
        super().__init__()
        self.calls = calls
        self.value = value

    def forward(self, output, labels):
        self.calls -= 1
        return super().forward(output, labels) + (self.value if self.calls < 0 else 0)


class TestDivergence:
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_the_last_agreed_state_is_kept(self, client, tmp_path, value):
        # In step, 15 steps of each replica in each epoch: in the third epoch.
        master = Recorded(str(tmp_path), kept(max_staleness=0))
        own = trainer(client, loss=Diverging(33, value), master=master)

        with pytest.raises(DivergedError) as caught:
            own.fit(X, Y, epochs=10, batch_size=16)

        pattern = (
            rf"replica (\d) on tcp://\S+: the loss became {value} at step 34 of "
            r"replica \1, in epoch 2; the last agreed state is that of epoch 1; lower"
        )
        assert re.match(pattern, str(caught.value))
        shared = records(tmp_path, epoch=1)[0]["shared"]
        np.testing.assert_array_equal(vector(own.model_).numpy(), shared)
        assert len(own.history_) == 2

    def test_before_the_first_epoch_ends_that_is_the_start(self, client):
        given = mlp()
        own = trainer(client, model=given, loss=Diverging(3, float("nan")))

        with pytest.raises(DivergedError, match="the last agreed state is that of the"):
            own.fit(X, Y, batch_size=16)

        torch.testing.assert_close(
            vector(own.model_), vector(given), rtol=0, atol=2.0**-25
        )
        assert len(own.history_) == 0


def counts(client):
    """How often daskdl is registered, and what Dask holds."""

    def on_scheduler(dask_scheduler):
        names = [*dask_scheduler.plugins, *dask_scheduler.worker_plugins]
        return names.count(NAME), len(dask_scheduler.tasks)

    def on_worker(dask_worker):
        return list(dask_worker.plugins).count(NAME), len(dask_worker.data)

    return [client.run_on_scheduler(on_scheduler), *client.run(on_worker).values()]


def more(after, before):
    """Whether there is more of anything: earlier tests' things may still go."""
    pairs = zip(after, before, strict=True)
    return any(a[0] != b[0] or a[1] > b[1] for a, b in pairs)


class TestOneAfterTheOther:
    def test_many_runs_leave_nothing(self, client):
        own = trainer(client)
        own.fit(X[:64], Y[:64], batch_size=8)
        assert still_left_behind(client) == {}
        before = counts(client)

        for _ in range(10):
            own.fit(X[:64], Y[:64], batch_size=8)

        assert still_left_behind(client) == {}
        deadline = time.monotonic() + 5  # forgetting takes messages
        while more(after := counts(client), before) and time.monotonic() < deadline:
            pass
        assert not more(after, before)
        # One plugin each for scheduler and workers.
        assert [plugins for plugins, _ in after] == [2, 1, 1]

    def test_two_clients_register_the_plugins_once(self, client):
        for _ in range(2):
            with Client(client.scheduler.address, set_as_default=False) as other:
                history = trainer(other).fit(X, Y)
                assert history.column("replicas") == [2]

        assert counts(client)[0][0] == 2

    def test_the_random_state_of_a_worker_is_put_back(self, client):
        before = client.run(torch.initial_seed)

        trainer(client, model=normalised, seed=123).fit(X, Y)

        assert client.run(torch.initial_seed) == before


class TestTwoAtOnce:
    @pytest.mark.parametrize("clients", ["one", "two"])
    def test_both_are_right_and_unmixed(self, client, clients):
        other = client
        if clients == "two":
            other = Client(client.scheduler.address, set_as_default=False)
        data = [rows(seed=1), rows(seed=2)]
        alone = [trained(client, *pair, seed) for seed, pair in enumerate(data)]

        try:
            with ThreadPoolExecutor(2) as threads:
                runs = [
                    threads.submit(trained, by, *pair, seed)
                    for seed, (by, pair) in enumerate(
                        zip((client, other), data, strict=True)
                    )
                ]
                together = [run.result(timeout=60) for run in runs]
        finally:
            if other is not client:
                other.close()

        for one, both in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one, both)
        assert not np.array_equal(*alone)


def trained(client, x, y, seed):
    """In step, so that the result depends on nothing but the data and the seed."""
    own = trainer(client, master=kept(max_staleness=0), seed=seed)
    history = own.fit(x, y, epochs=4, batch_size=16)
    assert history.column("examples") == [480] * 4
    assert history.column("refused_messages") == [0] * 4
    return vector(own.model_).numpy()


class Kill(Callback):
    """Kills a worker process after the first epoch."""

    def __init__(self, pid):
        self.pid = pid
        self.rows = []

    def on_epoch(self, row):
        if not self.rows:
            os.kill(self.pid, signal.SIGKILL)
        self.rows.append(row)


@pytest.fixture(scope="module")
def three():
    with (
        LocalCluster(
            n_workers=3, threads_per_worker=1, dashboard_address=":0"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


class TestLostWorker:
    @pytest.fixture
    def doomed(self, three):
        """A worker, and a callback that kills it after the first epoch."""
        three.wait_for_workers(3, timeout=30)
        pids = three.run(os.getpid)
        worker = sorted(pids)[1]
        return worker, Kill(pids[worker])

    @pytest.mark.timeout(90)
    def test_data_in_memory_are_lost_with_it_and_the_error_says_so(self, three, doomed):
        worker, kill = doomed
        own = trainer(three, callbacks=[kill])

        with pytest.raises(DaskDLError) as caught:
            own.fit(X, Y, epochs=10_000, batch_size=16)

        message = str(caught.value)
        assert re.search(r"piece \S+ was lost with the worker", message)
        assert f"gone before: replica 1 on {worker}" in message
        assert len(own.history_) >= 1
        assert not torch.equal(vector(own.model_), vector(start_of_mlp()))
        assert still_left_behind(three) == {}

    @pytest.mark.timeout(90)
    def test_with_data_that_can_be_computed_again_the_others_go_on(self, three, doomed):
        _, kill = doomed
        own = trainer(three, callbacks=[kill])
        x, y = da.from_array(X, chunks=(40, 20)), da.from_array(Y, chunks=40)

        history = own.fit(x, y, epochs=6, batch_size=8)

        replicas = history.column("replicas")
        assert (replicas[0], replicas[-1]) == (3, 2)
        assert history[-1]["examples"] == 480
        assert own.evaluate(X, Y)["accuracy"] > 0.8
        assert still_left_behind(three) == {}


def start_of_mlp():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return mlp()


class TestWhereItRuns:
    def test_threads_of_one_process_are_workers_too(self, client):
        results = []
        with (
            LocalCluster(
                n_workers=2,
                threads_per_worker=1,
                processes=False,
                dashboard_address=":0",
            ) as cluster,
            Client(cluster, set_as_default=False) as threads,
        ):
            for where in (client, threads):
                own = trainer(where, model=averaged, master=kept(max_staleness=0))
                history = own.fit(X, Y, epochs=3, batch_size=16)
                assert history.column("replicas") == [2] * 3
                results.append(parameters_of(own.model_))
            assert still_left_behind(threads) == {}

        for name, value in results[0].items():
            np.testing.assert_array_equal(value, results[1][name])

    def test_the_default_client_is_taken(self, client):
        with client.as_current():
            own = trainer(None)
            history = own.fit(X, Y)
            score = own.evaluate(X, Y)

        assert history.column("replicas") == [2]
        assert score["loss"] < 2
        assert counts(client)[0][0] == 2

    @pytest.mark.timeout(90)
    def test_a_cluster_of_its_own_is_closed_again(self):
        done = subprocess.run(
            [sys.executable, "-c", OWN_CLUSTER],
            capture_output=True,
            text=True,
            timeout=80,
            check=False,
            cwd=Path(__file__).parents[2],
        )

        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["2", "[]", "480"]


def averaged():
    """Buffers to average; no dropout, whose random state is the whole process's."""
    return nn.Sequential(
        nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
    )


OWN_CLUSTER = """
import distributed, psutil
from tests.cluster.problems import mlp, rows, sgd
from torch import nn
import daskdl

if __name__ == "__main__":
    # What LocalCluster makes of a machine, made small.
    own = distributed.LocalCluster
    def two(**options):
        return own(n_workers=2, threads_per_worker=1, **options)
    daskdl.cluster.LocalCluster = two
    X, Y = rows()
    trainer = daskdl.Trainer(mlp, nn.CrossEntropyLoss(), sgd)
    history = trainer.fit(X, Y)
    left = [
        child.pid
        for child in psutil.Process().children(recursive=True)
        if "resource_tracker" not in " ".join(child.cmdline())
    ]
    print(history[0]["replicas"], left, history[0]["examples"])
    try:
        distributed.default_client()
    except ValueError:
        pass
    else:
        raise SystemExit("a client of its own has become the default")
"""
