"""Fits whose replicas are lost, one or all of them: by retirement, or killed."""

import asyncio
import logging
import os
import signal

import pytest

from daskdl import Callback, Checkpoint, RunError, WaitTimeoutError
from tests.support.clusters import cluster_of
from tests.support.problems import rows, trainer

X, Y = rows()
MANY = 10**4  # epochs: the fit ends otherwise


class AfterEpoch(Callback):
    """Does something on the client once, after an epoch."""

    def __init__(self, epoch, action):
        self._epoch = epoch
        self._action = action

    def on_epoch_end(self, row):
        if row["epoch"] == self._epoch:
            self._action()


def retire(client, *workers):
    """Let workers close as at the end of their lifetime."""

    async def begin(dask_worker):
        # Threads of this process end in their own time.
        closing = dask_worker.close(executor_wait=False)
        asyncio.ensure_future(closing)  # noqa: RUF006

    client.run(begin, workers=list(workers) or None)


def kill(client, *workers):
    """End the processes of workers, as the kernel would."""
    pids = client.run(os.getpid)
    for worker in workers or pids:
        os.kill(pids[worker], signal.SIGKILL)


@pytest.fixture
def two():
    """A client of two workers, threads of this process, for a test that ends them."""
    with cluster_of(2, processes=False) as client:
        yield client


class TestAllRetire:
    def test_the_error_says_so_and_how_to_go_on(self, two, tmp_path):
        there = sorted(two.nthreads())
        own = trainer(
            two,
            callbacks=[Checkpoint(tmp_path), AfterEpoch(2, lambda: retire(two))],
        )

        with pytest.raises(RunError) as caught:
            own.fit(X, Y, epochs=MANY, batch_size=16)

        message = str(caught.value)
        assert message.startswith("all workers have retired: ")
        assert all(worker in message for worker in there)
        assert "fit again" in message
        (note,) = [n for n in caught.value.__notes__ if "fit(resume=" in n]
        assert str(tmp_path) in note


def test_losses_are_logged_on_the_client(two, caplog):
    gone = sorted(two.nthreads())[1]
    own = trainer(two, callbacks=[AfterEpoch(1, lambda: retire(two, gone))])

    with caplog.at_level(logging.INFO, logger="daskdl.training"):
        own.fit(X, Y, epochs=6, batch_size=16)

    said = [r for r in caplog.records if r.name.startswith("daskdl.training")]
    lost = [r for r in said if "replica 1" in r.message and gone in r.message]
    assert [r.levelno for r in lost] == [logging.WARNING]
    assert "retired" in lost[0].message


@pytest.mark.slow
class TestAllKilled:
    def test_all_are_named_and_nobody_is_sent_anything(self, tmp_path, caplog):
        with cluster_of(2) as client:
            there = sorted(client.nthreads())
            own = trainer(client, callbacks=[AfterEpoch(2, lambda: kill(client))])
            caplog.set_level(logging.ERROR, logger="distributed.core")

            with pytest.raises(WaitTimeoutError) as caught:
                own.fit(X, Y, epochs=MANY, batch_size=16)

        message = str(caught.value)
        assert message.startswith("no replica is left: ")
        assert all(worker in message for worker in there)
        assert not [r for r in caplog.records if "op scatter" in r.getMessage()]
