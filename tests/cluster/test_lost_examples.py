"""What lost and retired replicas had trained on is in the history of its epoch."""

import math
import time

import pytest
from distributed import get_worker
from torch import nn

from daskdl import Callback, FailureInjection
from tests.support.clusters import cluster_of
from tests.support.problems import rows, trainer

X, Y = rows(960)
STEP = 40  # of replica 1, in the second of the epochs; it is through with some pieces


class Retire(Callback):
    """On workers: the worker of replica 1 closes after a step."""

    def on_step_end(self, step):
        if (step.replica, step.number) == (1, STEP):
            worker = get_worker()
            worker.loop.add_callback(worker.close, executor_wait=False)
        if step.epoch == 1:
            time.sleep(0.005)  # so that both get pieces, and it closes in this epoch


class One(nn.CrossEntropyLoss):
    """A loss whose mean is known."""

    def forward(self, output, labels):
        return 0.0 * super().forward(output, labels) + 1.0


def check(history):
    assert history.column("replicas") == [2, 1, 1]
    assert history.column("examples") == [len(X)] * 3
    assert all(math.isclose(loss, 1.0) for loss in history.column("loss"))


def test_of_one_that_retires():
    with cluster_of(2, processes=False) as client:
        own = trainer(client, loss=One(), callbacks=[Retire()])
        check(own.fit(X, Y, epochs=3, batch_size=16))


@pytest.mark.slow
def test_of_one_that_is_killed():
    with cluster_of(2) as client:
        killed = FailureInjection("exit", replicas=[1], steps=[STEP])
        own = trainer(client, loss=One(), callbacks=[killed, Slowly()])
        history = own.fit(X, Y, epochs=2, batch_size=16)

    # Dask starts a killed worker again; it may take part before the epoch ends.
    assert history.column("examples") == [len(X)] * 2
    assert all(math.isclose(loss, 1.0) for loss in history.column("loss"))


class Slowly(Callback):
    """On workers: the second epoch takes long enough."""

    def on_step_end(self, step):
        if step.epoch == 1:
            time.sleep(0.005)
