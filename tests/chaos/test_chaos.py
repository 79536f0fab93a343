"""A model trains while its workers are killed, frozen, taken away and added.

``make chaos`` runs twenty seeds, the suite the first of them.
"""

import logging
import os
import time

import dask.config
import pytest

from daskdl import Callback, GradientSharing, KeepResidual
from daskdl.training.fit import INBOX_BYTES, OUTBOX_BYTES
from tests.support.barriers import ATOL, check_barrier
from tests.support.clusters import cluster_of
from tests.support.digits import accuracy, images, trainer
from tests.support.disturbance import SILENCE_S, Disturbance
from tests.support.leftovers import still_left_behind
from tests.support.recording import Recorded, records

logger = logging.getLogger(__name__)

SEEDS = range(int(os.environ.get("DASKDL_CHAOS_SEEDS", "1")))
WORKERS = 4
EPOCHS = 30
BATCH_SIZE = 16
STEP_S = 0.05  # a step of a larger model; the run takes long enough to be disturbed


class Larger(Callback):
    """Makes each step take as long as that of a larger model."""

    def on_step_end(self, step):
        time.sleep(STEP_S)


@pytest.fixture
def four():
    """A client of four workers that can be lost for long before Dask gives them up."""
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "90s"}),
        cluster_of(WORKERS) as client,
    ):
        yield client


def sharing(seed):
    routing = ("mesh", "plain")[seed % 2]
    return GradientSharing(residual=KeepResidual(), routing=routing, fan_out=2)


@pytest.mark.learning
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_or_doubled_and_the_model_learns(four, seed, tmp_path):
    x_train, x_test, y_train, y_test = images()
    undisturbed = trainer(four, sharing(seed), seed=seed)
    undisturbed.fit(x_train, y_train, epochs=EPOCHS, batch_size=BATCH_SIZE)

    own = trainer(
        four,
        Recorded(str(tmp_path), sharing(seed), atol=ATOL),
        seed=seed,
        callbacks=[Larger()],
    )
    with (
        dask.config.set(
            {"daskdl.timeouts.silence": SILENCE_S, "daskdl.timeouts.request": "10s"}
        ),
        Disturbance(four, seed, WORKERS) as disturbance,
    ):
        history = own.fit(x_train, y_train, epochs=EPOCHS, batch_size=BATCH_SIZE)

    for name in ("replicas", "repeated_pieces"):
        logger.info("%s: %s", name, history.column(name))
    assert {what.split()[0] for what, _ in disturbance.happened} >= {"killed", "froze"}
    assert len(history) == EPOCHS
    ends = [records(tmp_path, epoch) for epoch in range(EPOCHS)]
    for end in ends:
        check_barrier(end)
    check_memory(ends)
    best = accuracy(undisturbed.model_, x_test, y_test)
    assert accuracy(own.model_, x_test, y_test) >= best - 0.02
    assert still_left_behind(four, within_s=30) == {}


def check_memory(ends):
    """What waits in a replica stays within its bound, whatever happens to the others.

    Args:
        ends: Records at the end of each epoch, by replica.
    """
    for replica in {replica for end in ends for replica in end}:
        peaks = [int(end[replica]["peak_bytes"]) for end in ends if replica in end]
        assert peaks[-1] - peaks[0] < OUTBOX_BYTES + INBOX_BYTES, replica
