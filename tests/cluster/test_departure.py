"""Workers that go while a run goes on: asked to, or killed."""

import os
import signal

import dask.array as da
import numpy as np
import pytest
import torch
from distributed import Client, LocalCluster
from torch import nn

from daskdl import (
    AdaptiveThreshold,
    Callback,
    DataError,
    GradientSharing,
    KeepResidual,
    Trainer,
)
from tests.cluster.problems import mlp, rows, sgd
from tests.cluster.recording import Recorded

X, Y = rows(count=960)


@pytest.fixture
def three():
    """A cluster of its own for each test: it loses a worker."""
    with (
        LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=":0") as own,
        Client(own, set_as_default=False) as client,
    ):
        yield client


def trainer(client, master, callback):
    return Trainer(
        mlp,
        nn.CrossEntropyLoss(),
        sgd,
        master=master,
        client=client,
        callbacks=[callback],
        progress=False,
    )


class After(Callback):
    """Does something on the client after the first epoch."""

    def __init__(self, action):
        self._action = action

    def on_epoch(self, row):
        if row["epoch"] == 0:
            self._action()


def test_a_worker_that_retires_hands_over_what_only_it_has(three, tmp_path):
    sharing = GradientSharing(AdaptiveThreshold(initial=1e-3), KeepResidual())
    leaving = sorted(three.nthreads())[2]
    own = trainer(
        three,
        Recorded(str(tmp_path), sharing),
        After(lambda: three.retire_workers([leaving])),
    )

    history = own.fit(X, Y, epochs=6, batch_size=8)

    assert history[0]["replicas"] == 3
    assert history[-1]["replicas"] == 2
    ends = [np.load(tmp_path / f"{replica}-5.npz") for replica in (0, 1)]
    left = np.load(tmp_path / "2-left.npz")
    start = ends[0]["start"]
    gone = left["local"] - start - left["others"] * 2.0**-24
    expected = start + ends[0]["progress"] + ends[1]["progress"] + gone
    got = torch.cat([p.detach().reshape(-1) for p in own.model_.parameters()])
    # Several hundred moves, each rounded to float32 at a size of about 1.
    np.testing.assert_allclose(got.double().numpy(), expected, rtol=0, atol=2e-5)


def killing(client):
    """Kill the last worker's process, as the batch system or the kernel would."""
    pids = client.run(os.getpid)
    return After(lambda: os.kill(pids[sorted(pids)[2]], signal.SIGKILL))


def test_a_killed_worker_does_not_end_a_run_whose_data_can_be_had_again(three):
    x, y = da.from_array(X, chunks=(40, 20)), da.from_array(Y, chunks=40)
    own = trainer(three, GradientSharing(), killing(three))

    history = own.fit(x, y, epochs=6, batch_size=8)

    assert [row["replicas"] for row in history][-1] == 2
    assert history[-1]["loss"] < history[0]["loss"]


def test_data_in_memory_that_died_with_a_worker_are_named(three):
    own = trainer(three, GradientSharing(), killing(three))

    with pytest.raises(DataError, match=r"was lost with the worker .* dask\.array"):
        own.fit(X, Y, epochs=6, batch_size=8)
