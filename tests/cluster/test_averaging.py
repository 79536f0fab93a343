"""Parameter averaging between processes, with workers that are killed."""

import functools
import os
import signal

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import ParameterAveraging
from tests.support.clusters import Script, TookPart, enough
from tests.support.problems import (
    adam,
    normalised,
    parameters_of,
    rows,
    sgd,
    trainer,
)
from tests.support.watched import TrainedRows

pytestmark = pytest.mark.slow

X, Y = rows(count=960)


def nesterov(parameters):
    # As many epochs as these tests have would go astray with a momentum of 0.9.
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.5, nesterov=True)


def with_buffers():
    # No dropout: threads of one process share one random generator.
    return nn.Sequential(
        nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
    )


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


def averaging(**options):
    return ParameterAveraging(**{"frequency": 2, "fan_out": 1, **options})


@pytest.mark.parametrize("optimizer", [sgd, slow(adam)])
@pytest.mark.parametrize("outer", [None, slow(nesterov)])
def test_workers_average_as_threads_do_bit_for_bit(three, optimizer, outer):
    options = {"model": with_buffers, "optimizer": optimizer}
    remote = trainer(three, master=averaging(outer=outer), **options)
    local = trainer(
        False, master=averaging(outer=outer, replicas_per_worker=3), **options
    )

    for own in (remote, local):
        own.fit(X, Y, epochs=2, batch_size=16, validation=(X, Y))

    expected = parameters_of(local.model_)
    for name, value in parameters_of(remote.model_).items():
        np.testing.assert_array_equal(value, expected[name])
    for column in ("loss", "examples", "val_loss", "density"):
        assert remote.history_.column(column) == local.history_.column(column)
    assert remote.history_[0]["sent_bytes"] > 0


@pytest.mark.slow
class TestLosses:
    @pytest.fixture
    def worker(self, three):
        """The process of the worker of replica 1."""
        pids = three.run(os.getpid)
        return pids[sorted(pids)[1]]

    @pytest.mark.parametrize(
        "options",
        [{}, {"outer": nesterov}, {"compression": "dense8"}],
        ids=["mean", "outer", "compressed"],
    )
    def test_a_worker_that_is_killed_is_replaced_and_all_rows_are_trained_on(
        self, three, worker, tmp_path, options
    ):
        watched = TrainedRows(tmp_path)
        took_part = TookPart(tmp_path)
        kill = functools.partial(os.kill, worker, signal.SIGKILL)
        script = Script((3, kill), (took_part.by(3), enough))
        own = trainer(
            three,
            master=averaging(**options),
            model=normalised,
            loss=watched,
            callbacks=[watched, took_part],
        )

        script.run(own, X, np.arange(len(X)))

        # The last epoch is broken off, and the one of the death has pieces twice.
        for trained in watched.by_epoch()[: len(script.rows)]:
            assert set(trained) == set(range(len(X)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"outer": nesterov, "compression": "dense8"}],
    ids=["mean", "outer, compressed"],
)
def test_one_replica_becomes_several(growing, options):
    script = Script((1, lambda: growing.cluster.scale(3)), (3, enough))

    own = script.run(
        trainer(growing, master=averaging(**options), model=normalised), X, Y
    )

    assert own.evaluate(X, Y)["accuracy"] > 0.8
