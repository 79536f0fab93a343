"""Workers that are processes or threads, and a cluster started by a fit."""

import dataclasses
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from distributed import Event
from torch import nn

from daskdl import Callback, ParameterAveraging
from tests.support.clusters import cluster_of
from tests.support.problems import adam, kept, parameters_of, rows, trainer
from tests.support.recording import Notes, executed

X, Y = rows()


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.5, nesterov=True)


def test_workers_here_are_forks_of_a_process_without_threads(client):
    (server,) = set(client.run(os.getppid).values())

    assert server != os.getpid()
    assert psutil.Process(server).num_threads() == 1


WAKES = ("profile", "tick", "memory_monitor", "monitor")


def intervals_ms(server):
    """Milliseconds between what a Dask server does now and then."""
    return [server.periodic_callbacks[name].callback_time for name in WAKES]


def of_workers(client):
    return client.run(lambda dask_worker: intervals_ms(dask_worker))


def of_scheduler(client):
    return client.run_on_scheduler(
        lambda dask_scheduler: dask_scheduler.periodic_callbacks["tick"].callback_time
    )


class Held(Callback):
    """Each replica waits in its second step until it may go on."""

    def on_step_end(self, step):
        if step.number == 2:
            Event("trains").set()
            assert Event("goes on").wait(20)


class TestWhereItRuns:
    @pytest.mark.parametrize(
        "master",
        [
            kept(max_staleness=0),
            ParameterAveraging(frequency=2, fan_out=1),
            ParameterAveraging(frequency=2, outer=nesterov),
        ],
        ids=["sharing", "averaging", "averaging, outer"],
    )
    def test_processes_threads_and_a_fit_without_a_cluster_agree_bit_for_bit(
        self, client, threads, master
    ):
        local = dataclasses.replace(master, replicas_per_worker=2)
        fits = [
            trainer(where, model=averaged, master=fitted, optimizer=adam)
            for where, fitted in ((client, master), (threads, master), (False, local))
        ]
        for fitted in fits:
            fitted.fit(X, Y, epochs=3, batch_size=16, validation=(X, Y))

        first, *others = fits
        expected = parameters_of(first.model_)
        assert first.history_.column("replicas") == [2] * 3
        assert first.history_[0]["sent_bytes"] > 0
        for elsewhere in others:
            for name, value in parameters_of(elsewhere.model_).items():
                np.testing.assert_array_equal(value, expected[name], err_msg=name)
            for column in ("loss", "examples", "val_loss", "density", "replicas"):
                values = elsewhere.history_.column(column)
                assert values == first.history_.column(column), column

    def test_the_default_client_is_used(self, client, tmp_path):
        notes = Notes(tmp_path)
        with client.as_current():
            fitted = trainer(None, callbacks=[notes])
            history = fitted.fit(X, Y)
            before = executed(client)
            score = fitted.evaluate(X, Y)

        assert history.column("replicas") == [2]
        pids = client.run(os.getpid)
        assert {line["pid"] for line in notes.read()} == set(pids.values())
        assert score["loss"] < 2
        assert sum(executed(client).values()) > sum(before.values())

    def test_dask_wakes_up_less_often_while_replicas_train(self, client):
        trains = Event("trains", client)
        goes_on = Event("goes on", client)
        before = of_workers(client), of_scheduler(client)
        with ThreadPoolExecutor(1) as pool:
            fitted = trainer(client, callbacks=[Held()])
            fit = pool.submit(fitted.fit, X, Y)
            assert trains.wait(20)
            during = of_workers(client), of_scheduler(client)
            goes_on.set()
            fit.result(60)

        configured, training = [10, 20, 100, 500], [100, 500, 500, 2000]
        assert before == (dict.fromkeys(before[0], configured), 20)
        assert during == (dict.fromkeys(before[0], training), 500)
        assert (of_workers(client), of_scheduler(client)) == before

    @pytest.mark.slow
    @pytest.mark.timeout(260)
    def test_a_cluster_started_by_a_fit_is_announced_and_closed(self):
        done = subprocess.run(
            [sys.executable, "-c", OWN_CLUSTER],
            capture_output=True,
            text=True,
            timeout=240,  # ends a hang; a busy machine needs over 80 s to start all
            check=False,
            cwd=Path(__file__).parents[2],
        )

        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["2", "[]", "480"]
        assert done.stderr == ""


def averaged():
    """A model with buffers, without dropout, whose random state threads share."""
    return nn.Sequential(
        nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
    )


OWN_CLUSTER = """
import contextlib, distributed, io, psutil, re, sys, urllib.request
from tests.support.problems import mlp, rows, sgd
from torch import nn
import daskdl  # noqa: F401

if __name__ == "__main__":
    # What LocalCluster makes of a machine, made small.
    own = distributed.LocalCluster
    def two(**options):
        return own(**{**options, "n_workers": 2, "threads_per_worker": 1})
    daskdl.util.LocalCluster = two
    X, Y = rows()
    class FindPage(daskdl.Callback):
        def on_epoch_end(self, row):
            page = re.search("dashboard: (http://.*/daskdl)\\n", sys.stderr.getvalue())
            with urllib.request.urlopen(page[1], timeout=60) as answer:
                assert answer.status == 200
    trainer = daskdl.Trainer(
        mlp, nn.CrossEntropyLoss(), sgd, progress=True, callbacks=[FindPage()]
    )
    with contextlib.redirect_stderr(io.StringIO()):
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


class TestThreads:
    @pytest.mark.parametrize(("replicas", "share"), [(1, 3), (3, 1)])
    def test_replicas_share_their_workers_threads_and_restore_them(
        self, tmp_path, replicas, share
    ):
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        notes = Notes(tmp_path)
        try:
            with cluster_of(1, threads_per_worker=3, processes=False) as client:
                master = kept(replicas_per_worker=replicas)
                trainer(client, master=master, callbacks=[notes]).fit(X, Y)
            # This thread has its own setting by now; a new one takes the process's.
            with ThreadPoolExecutor(1) as fresh:
                after = fresh.submit(torch.get_num_threads).result()
        finally:
            torch.set_num_threads(before)

        lines = notes.read()
        assert {line["replica"] for line in lines} == set(range(replicas))
        assert {line["threads"] for line in lines} == {share}
        assert after == 2
