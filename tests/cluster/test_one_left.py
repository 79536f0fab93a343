"""One replica that is left of several, and what it does until others come."""

import time

import pytest
from distributed import get_worker

from daskdl import Callback, GradientSharing
from tests.support.clusters import EnoughError, cluster_of
from tests.support.problems import kept, rows, trainer

X, Y = rows()


class Leave(Callback):
    """On workers: the worker of replica 1 closes in the second epoch."""

    def on_step_end(self, step):
        if (step.replica, step.epoch) == (1, 1):
            worker = get_worker()
            worker.loop.add_callback(worker.close, executor_wait=False)
            time.sleep(0.1)


class Act(Callback):
    """On the client: does something after each epoch."""

    def __init__(self, act):
        self._act = act
        self.rows = []

    def on_epoch_end(self, row):
        self.rows.append(row)
        self._act(self.rows)


@pytest.fixture
def two():
    with cluster_of(2, processes=False) as client:
        yield client


@pytest.mark.parametrize("apply", ["eager", "strict"])
def test_it_encodes_nothing_and_what_it_learns_is_scored(two, apply):
    own = trainer(two, master=kept(apply=apply), callbacks=[Leave()])

    history = own.fit(X, Y, epochs=6, batch_size=16, validation=(X, Y))

    assert history.column("replicas") == [2, 1, 1, 1, 1, 1]
    assert history[0]["sent_bytes"] > 0
    assert history.column("sent_bytes")[2:] == [0] * 4
    losses = history.column("val_loss")[1:]
    assert len(set(losses)) == len(losses)  # each epoch is scored anew
    assert max(losses[1:]) < losses[0]  # strict steps may overshoot after that
    assert losses[-1] < 0.6 * losses[0]
    own.client = False
    assert own.evaluate(X, Y)["loss"] == pytest.approx(losses[-1], rel=1e-4)


def test_with_a_newcomer_it_shares_again(two):
    def act(rows):
        last = rows[-1]
        if last["epoch"] == 4:
            two.cluster.scale(3)
        if last["epoch"] > 5 and last["replicas"] == 2 and last["sent_bytes"] > 0:
            raise EnoughError

    own = trainer(two, master=GradientSharing(), callbacks=[Leave(), Act(act)])

    with pytest.raises(EnoughError):
        own.fit(X, Y, epochs=500, batch_size=16, validation=(X, Y))

    alone = [row for row in own.history_ if row["replicas"] == 1][1:]
    assert alone[0]["sent_bytes"] == 0
    before, after = alone[-1]["val_loss"], own.history_[-1]["val_loss"]
    assert after < 1.5 * before  # nothing was clipped that only this one had
