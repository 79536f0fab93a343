"""A replica that joins a run shortly before or after early stopping."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import Callback
from daskdl.callbacks import EarlyStopping
from daskdl.channel.base import ActivateResult, JoinResult
from daskdl.channel.local import LocalChannel, LocalRun
from daskdl.data.checks import preserved_random_state
from daskdl.data.inputs import ReadOptions
from daskdl.data.tables import InMemory
from daskdl.training.backend import run_spec_of
from daskdl.training.data_feed import LocalStore
from daskdl.training.epoch_control import EvaluationPlan
from daskdl.training.replica import Replica
from daskdl.training.telemetry import BestScore, EpochReport, EpochTotals
from tests.support.problems import replica_spec, rows

X, Y = rows(64)
EPOCHS = 6
RULE = EarlyStopping("loss", patience=2)
# The best epoch was the first, so that patience is used up in the third.
RECORD = BestScore(0, 1.0, 0, 1.0)


class Begun(Callback):
    """Records the epochs that begin."""

    def __init__(self):
        self.epochs = []

    def on_epoch_begin(self, epoch):
        self.epochs.append(epoch.epoch)


class Late(LocalChannel):
    """The channel of a joining replica, which begins with the fourth epoch.

    Args:
        loss: Of the epoch before, in which nobody was there but another replica.
    """

    def __init__(self, run, spec, snapshot, loss):
        super().__init__(run, spec)
        self.snapshot = snapshot
        report = EpochReport(totals=EpochTotals(loss, 1), best=RECORD, elapsed_s=1.0)
        self.report = {"payloads": [[0, report.to_wire()]], "departed": []}

    def join(self):
        super().join()
        return JoinResult([0], self.snapshot)

    def activate(self, step):
        return ActivateResult([0], 3, self.report)


@contextlib.contextmanager
def a_replica(make, begun, epoch=0):
    """Yield the arguments of a `Replica`, alone in its run."""
    options = replica_spec(
        nn.Linear(20, 4),
        callbacks=[begun],
        read=ReadOptions(16),
        rows=(X[:2], Y[:2]),
        epochs=EPOCHS,
        shuffle=False,
        device="cpu",
        evaluation=EvaluationPlan(EPOCHS, stopping=RULE),
    )
    sources = {"train": InMemory(X, Y, 16)}
    plan = run_spec_of(options, {0: "here"}, sources)
    run = LocalRun(dataclasses.replace(plan, first_epoch=epoch))
    channel = make(run, options.channel_spec(0))
    store = LocalStore(sources, channel, options.timeouts, options.load_threads)
    with preserved_random_state(), contextlib.closing(store):
        yield 0, options, channel, torch.device("cpu"), store


@pytest.fixture
def snapshot():
    """The snapshot of a replica that has the best model."""
    with a_replica(LocalChannel, Begun()) as arguments:
        replica = Replica(*arguments)
        replica.join()
        totals = EpochTotals(1.0, 1, 1.0)
        report = EpochReport(totals=totals, **replica.stopper.report())
        replica.stopper.end_epoch(0, [report], replica.agreed)
        start = replica.module.weight.detach().clone().numpy()
        return {**replica.snapshot(), "start": start}


def late(snapshot, loss, begun):
    return a_replica(lambda *args: Late(*args, snapshot, loss), begun, epoch=3)


def test_a_replica_that_joins_after_the_stop_begins_no_epoch(snapshot):
    begun = Begun()

    with late(snapshot, 1.5, begun) as arguments:
        result = Replica(*arguments).run()

    assert begun.epochs == []
    assert result.finished
    assert result.restored
    best = result.parameters.exact
    np.testing.assert_array_equal(best["weight"].numpy(), snapshot["start"])


def test_a_replica_that_joins_earlier_continues_the_patience_of_the_others(snapshot):
    begun = Begun()

    with late(snapshot, 1e-6, begun) as arguments:
        result = Replica(*arguments).run()

    # The epoch before its first was the best, and the next two are not better.
    assert begun.epochs == [3, 4]
    assert result.finished
    assert not result.restored  # that model it was not given
