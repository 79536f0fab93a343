"""Checkpoints in the middle of an epoch, on worker processes that come and go."""

import functools
import os
import signal

import numpy as np
import pytest
from distributed.utils_test import poll_for

from daskdl import Checkpoint, ParameterAveraging
from daskdl.saving.checkpoints import Series, complete_at
from tests.support.clusters import Script, TookPart, enough
from tests.support.problems import kept, parameters_of, rows, trainer
from tests.support.watched import KillAt, TrainedRows

pytestmark = pytest.mark.slow

X, Y = rows(count=960)
BATCH = 16


def each(folder, every="4 steps"):
    """A checkpoint after every few steps; all are kept."""
    return Checkpoint(folder, every, keep_last=None)


def in_the_middle(folder, epoch):
    """URLs of the checkpoints within an epoch, the first of them first."""
    series = Series.at(folder)
    found = [complete_at(series.folder(number)) for number in series.numbers()]
    inner = [
        one for one in found if one is not None and one.header["sync_point"] is not None
    ]
    return [one.store.url for one in inner if one.header["epoch"] == epoch]


@pytest.mark.parametrize(
    "master",
    [kept(max_staleness=0), ParameterAveraging(frequency=3)],
    ids=["sharing", "averaging"],
)
def test_a_fit_goes_on_bit_for_bit(three, tmp_path, master):
    whole = trainer(three, master=master, callbacks=[each(tmp_path / "whole")])
    whole.fit(X, Y, epochs=2, batch_size=BATCH)
    inner = in_the_middle(tmp_path / "whole", epoch=1)
    assert len(inner) == 4  # of 20 steps, the last four are the end of the epoch

    again = trainer(three, master=master, callbacks=[each(tmp_path / "again")])
    again.fit(X, Y, epochs=2, batch_size=BATCH, resume=inner[1])

    expected = parameters_of(whole.model_)
    for name, value in parameters_of(again.model_).items():
        np.testing.assert_array_equal(value, expected[name])
    for column in ("loss", "examples"):
        assert again.history_.column(column) == whole.history_.column(column)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_fewer_go_on_with_the_rows_that_are_left(three, tmp_path, workers):
    numbers = np.arange(len(X))
    before, after = (TrainedRows(tmp_path / name) for name in ("before", "after"))
    for watched in (before, after):
        os.mkdir(watched.folder)
    first = trainer(three, loss=before, callbacks=[before, each(tmp_path / "all")])
    first.fit(X, numbers, epochs=1, batch_size=BATCH)
    (url, *_) = in_the_middle(tmp_path / "all", epoch=0)

    three.cluster.scale(workers)
    poll_for(lambda: len(three.nthreads()) == workers, timeout=30)
    own = trainer(three, loss=after, callbacks=[after])
    own.fit(X, numbers, epochs=2, batch_size=BATCH, resume=url)

    rest, whole = after.by_epoch()
    assert max(rest.values()) == 1
    assert len(rest) == len(X) - 3 * 4 * BATCH
    assert whole == dict.fromkeys(range(len(X)), 1)
    assert own.history_.column("examples") == [len(X)] * 2


@pytest.mark.slow
def test_what_a_killed_worker_had_trained_counts_in_the_epoch_that_goes_on(
    three, tmp_path
):
    first = trainer(three, callbacks=[KillAt(6), each(tmp_path / "all")])
    first.fit(X, Y, epochs=1, batch_size=BATCH)
    after = in_the_middle(tmp_path / "all", epoch=0)[2:]  # 8 steps of each

    own, last = trainer(three, callbacks=[each(tmp_path / "again")]), trainer(three)
    own.fit(X, Y, epochs=1, batch_size=BATCH, resume=after[0])
    url = in_the_middle(tmp_path / "again", epoch=0)[-1]  # and of that again
    last.fit(X, Y, epochs=2, batch_size=BATCH, resume=url)

    assert first.history_.column("examples") == [len(X)]
    assert own.history_.column("examples") == [len(X)]
    assert last.history_.column("examples") == [len(X)] * 2
    loss = first.history_[0]["loss"]
    assert own.history_[0]["loss"] == pytest.approx(loss, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "master", [kept(), kept(max_staleness=0), ParameterAveraging(frequency=3)]
)
def test_workers_may_die_and_come_between_two_meetings(three, tmp_path, master):
    pids = three.run(os.getpid)
    worker = pids[sorted(pids)[1]]
    (tmp_path / "rows").mkdir()
    watched = TrainedRows(tmp_path / "rows")
    took_part = TookPart(tmp_path)
    kill = functools.partial(os.kill, worker, signal.SIGKILL)
    script = Script((3, kill), (took_part.by(3), enough))
    own = trainer(
        three,
        master=master,
        loss=watched,
        callbacks=[
            watched,
            took_part,
            Checkpoint(tmp_path / "all", "4 steps", keep_last=4),
        ],
    )

    script.run(own, X, np.arange(len(X)))

    # The last epoch is broken off, and the one of the death has pieces twice.
    for trained in watched.by_epoch()[: len(script.rows)]:
        assert set(trained) == set(range(len(X)))
    newest = Series.at(tmp_path / "all").newest()
    assert newest is not None
    again = trainer(three, master=master, loss=watched)
    epoch = newest.header["epoch"]
    again.fit(
        X,
        np.arange(len(X)),
        epochs=epoch + 1,
        batch_size=BATCH,
        resume=newest.store.url,
    )
    assert again.history_[-1]["examples"] == len(X)


@pytest.mark.slow
def test_time_passes_too(client, tmp_path):
    own = trainer(client, callbacks=[each(tmp_path, every="50 ms")])

    own.fit(X, Y, epochs=2, batch_size=4)

    assert any(in_the_middle(tmp_path, epoch) for epoch in range(2))
    assert own.history_.column("examples") == [len(X)] * 2
