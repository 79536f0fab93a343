"""Real fits on worker processes that send to each other, along trees."""

import os
import signal
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from distributed import Client, LocalCluster

from daskdl import (
    AdaptiveThreshold,
    Callback,
    GradientSharing,
    KeepResidual,
    Trainer,
)
from tests.cluster.conftest import still_left_behind
from tests.cluster.problems import mlp, rows, sgd
from tests.cluster.recording import Recorded, records

X, Y = rows(960)


@pytest.fixture(scope="module")
def three():
    """A client of three workers: with `fan_out=1` the second passes on to the third."""
    with (
        LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=":0") as own,
        Client(own, set_as_default=False) as client,
    ):
        yield client
        assert still_left_behind(client) == {}


def trainer(client, folder, **options):
    sharing = GradientSharing(
        AdaptiveThreshold(initial=1e-3),
        KeepResidual(),
        routing="mesh",
        fan_out=1,
        max_staleness=options.pop("max_staleness", 8),
    )
    return Trainer(
        mlp,
        torch.nn.CrossEntropyLoss(),
        sgd,
        master=Recorded(str(folder), sharing),
        client=client,
        progress=False,
        **options,
    )


@pytest.mark.parametrize("max_staleness", [8, 0])
def test_a_mesh_agrees_and_loses_nothing(three, tmp_path, max_staleness):
    own = trainer(three, tmp_path, max_staleness=max_staleness)

    own.fit(X, Y, epochs=3, batch_size=16)

    ends = list(records(tmp_path, epoch=2).values())
    assert len(ends) == 3
    for end in ends:
        np.testing.assert_array_equal(end["shared"], ends[0]["shared"])
        np.testing.assert_allclose(end["shared"], end["expected"], rtol=0, atol=4e-6)
        assert len({tuple(u) for u in end["received"]}) == len(end["received"]) > 0
    expected = ends[0]["start"] + sum(end["progress"] for end in ends)
    got = torch.cat([p.detach().reshape(-1) for p in own.model_.parameters()])
    np.testing.assert_allclose(got.double().numpy(), expected, rtol=0, atol=6e-6)


@dataclass
class Killing(Callback):
    """Kills the process of one replica."""

    replica: int
    step: int

    def on_step(self, step):
        if step.replica == self.replica and step.number == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def test_after_a_loss_in_the_middle_of_sending_all_go_on_with_the_same(three, tmp_path):
    own = trainer(three, tmp_path, callbacks=[Killing(replica=1, step=25)])

    history = own.fit(X, Y, epochs=6, batch_size=16)

    assert len(history) == 6
    ends = [end for r, end in records(tmp_path, epoch=5).items() if r in (0, 2)]
    assert len(ends) == 2
    for end in ends:
        np.testing.assert_array_equal(end["shared"], ends[0]["shared"])
        np.testing.assert_allclose(end["shared"], end["expected"], rtol=0, atol=6e-6)
        assert len({tuple(u) for u in end["received"]}) == len(end["received"])
