"""Checkpoints and saves of workers that are processes, which come and go.

Which moment a process is killed at, and what is then there, is in `test_kills`.
"""

import functools
import os
import re
import signal
import uuid

import numpy as np
import pytest
import torch
from distributed.utils_test import poll_for

from daskdl import Checkpoint, ParameterAveraging, SaveError, Trainer
from daskdl.saving.checkpoints import COMMON, Part, Series, complete_at, of_replica
from tests.support import s3
from tests.support.clusters import Script, TookPart, cluster_of, enough
from tests.support.problems import adam, kept, normalised, rows, trainer
from tests.support.recording import Recorded, delivered, records
from tests.support.watched import KillAt, TrainedRows

X, Y = rows()
MANY, LABELS = rows(count=960)
BATCH = 16


@pytest.fixture(scope="module")
def another():
    """A client of another cluster with as many workers as the one that is shared."""
    with cluster_of(2) as client:
        yield client


def with_checkpoints(client, url, **options):
    """A trainer that writes one after each epoch, and keeps all."""
    options = {"model": normalised, "optimizer": adam, **options}
    rule = Checkpoint(
        url, keep_last=None, storage_options=options.pop("storage_options", None)
    )
    callbacks = [rule, *options.pop("callbacks", ())]
    return trainer(client, callbacks=callbacks, **options)


def check_same(resumed, uninterrupted):
    """Model and optimizer are, bit for bit."""
    expected = uninterrupted.model_.state_dict()
    for name, tensor in resumed.model_.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    states = uninterrupted.optimizer_.state_dict()["state"]
    assert states
    for number, state in resumed.optimizer_.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, states[number][name]), (number, name)


@pytest.mark.parametrize(
    "master",
    [
        pytest.param(kept(max_staleness=0), id="sharing"),
        pytest.param(
            ParameterAveraging(frequency=3), id="averaging", marks=pytest.mark.slow
        ),
    ],
)
def test_a_fit_resumed_on_a_new_cluster_is_the_same(client, another, tmp_path, master):
    without = with_checkpoints(client, tmp_path, master=master)
    history = without.fit(X, Y, epochs=4, batch_size=BATCH)
    url = tmp_path / "checkpoint-000002"

    fitted = with_checkpoints(another, tmp_path / "b", master=master)
    rest = fitted.fit(X, Y, epochs=4, batch_size=BATCH, resume=url)

    check_same(fitted, without)
    assert rest.column("epoch") == [0, 1, 2, 3]
    assert rest.column("loss") == history.column("loss")
    assert Series.at(tmp_path / "b").numbers() == [1, 2]


def test_residuals_of_asynchronous_replicas_are_resumed(client, another, tmp_path):
    with_checkpoints(client, tmp_path).fit(X, Y, epochs=2, batch_size=BATCH)
    newest = Series.at(tmp_path).newest()
    start, residual = agreed_and_residual(newest)

    folder = tmp_path / "records"
    folder.mkdir()
    fitted = with_checkpoints(
        another, tmp_path, master=Recorded(str(folder), kept(), atol=4e-6)
    )
    fitted.fit(X, Y, epochs=4, batch_size=BATCH, resume=True)

    ends = records(folder, epoch=1)  # of this run
    assert np.abs(residual).max() > 1e-6  # how much it is depends on the timing
    # Above 1 a parameter of float32 has not all bits of the grid.
    np.testing.assert_array_equal(ends[0]["start"], start.astype(np.float32))
    carried = sum(end["carried"] for end in ends.values())
    np.testing.assert_allclose(carried, residual, rtol=0, atol=1e-7)
    expected = start + sum(end["progress"] for end in ends.values())
    # Two replicas, each rounded to float32 for each of 60 moves.
    got = delivered(fitted).numpy()
    np.testing.assert_allclose(got, expected, rtol=0, atol=8e-6)


@pytest.mark.slow
def test_from_s3_with_options_that_workers_do_not_have(client, bucket, s3_endpoint):
    options, url = s3.options(s3_endpoint), f"{bucket}/run-17"
    chosen = {"master": kept(max_staleness=0), "storage_options": options}
    without = with_checkpoints(client, url, **chosen)
    without.fit(X, Y, epochs=3, batch_size=BATCH)

    fitted = with_checkpoints(client, f"{url}-b", **chosen)
    resume = Checkpoint(f"{url}/checkpoint-000001", storage_options=options)
    fitted.fit(X, Y, epochs=3, batch_size=BATCH, resume=resume)

    check_same(fitted, without)
    for _ in range(2):  # the second over the first
        fitted.save(f"{url}/save", storage_options=options)
    how = {"client": client, "storage_options": options}
    loaded = Trainer.load(f"{url}/save", model=normalised, **how)
    check_same(loaded, fitted)
    assert loaded.evaluate(X, Y) == fitted.evaluate(X, Y)
    with pytest.raises(SaveError, match=f"cannot read {url}/nothing"):
        Trainer.load(f"{url}/nothing", **how)


def agreed_and_residual(whole):
    """The parameters that all agreed on, and the sum of what each has not sent."""
    _, common = Part(whole.store, COMMON).read()
    parts = [
        Part(whole.store, of_replica(r)).read()[1] for r in whole.header["members"]
    ]
    compressor = common["exchange"]["compressor"]
    (shared,) = compressor["shared"]
    start = shared.numpy() * compressor["grid"]
    exchanges = [part["exchange"] for part in parts]
    residuals = [
        (exchange["local"][0].numpy() - start) / exchange["local_factor"]
        for exchange in exchanges
    ]
    return start, sum(residuals)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["lone_client", "three"], ids=["fewer", "more"])
@pytest.mark.parametrize(
    "master", [kept(), ParameterAveraging()], ids=["sharing", "averaging"]
)
def test_on_more_or_fewer_workers_each_row_is_trained_on_once(
    client, request, place, master, tmp_path
):
    numbers = np.arange(len(X))
    notes = [tmp_path / name for name in ("before", "after")]
    for folder in notes:
        folder.mkdir()
    before, after = map(TrainedRows, notes)
    url, options = tmp_path / "checkpoints", {"optimizer": adam, "master": master}
    fitted = with_checkpoints(client, url, loss=before, callbacks=[before], **options)
    fitted.fit(X, numbers, epochs=2, batch_size=BATCH)

    others = request.getfixturevalue(place)
    fitted = with_checkpoints(others, url, loss=after, callbacks=[after], **options)
    history = fitted.fit(X, numbers, epochs=4, batch_size=BATCH, resume=True)

    assert Series.at(url).newest().header["members"] == sorted(after.replicas())
    assert history.column("replicas") == [2, 2] + [len(after.replicas())] * 2
    assert len(after.replicas()) != 2
    for epochs in (before.by_epoch(), after.by_epoch()):
        assert [set(rows) for rows in epochs] == [set(numbers)] * 2
        assert [rows.total() for rows in epochs] == [len(X)] * 2
    assert history[3]["loss"] < history[1]["loss"] < history[0]["loss"]


def each(folder, every="4 steps"):
    """A checkpoint after every few steps; all are kept."""
    return Checkpoint(folder, every, keep_last=None)


def in_the_middle(folder, epoch):
    """URLs of the checkpoints within an epoch, the first of them first."""
    series = Series.at(folder)
    checkpoints = [complete_at(series.folder(number)) for number in series.numbers()]
    inner = [
        checkpoint
        for checkpoint in checkpoints
        if checkpoint is not None and checkpoint.header["sync_point"] is not None
    ]
    return [
        checkpoint.store.url
        for checkpoint in inner
        if checkpoint.header["epoch"] == epoch
    ]


@pytest.mark.slow
def test_fewer_replicas_train_on_the_remaining_rows(three, tmp_path):
    numbers = np.arange(len(MANY))
    before, after = (TrainedRows(tmp_path / name) for name in ("before", "after"))
    for watched in (before, after):
        os.mkdir(watched.folder)
    first = trainer(three, loss=before, callbacks=[before, each(tmp_path / "all")])
    first.fit(MANY, numbers, epochs=1, batch_size=BATCH)
    (url, *_) = in_the_middle(tmp_path / "all", epoch=0)

    three.cluster.scale(1)
    poll_for(lambda: len(three.nthreads()) == 1, timeout=30)
    fitted = trainer(three, loss=after, callbacks=[after])
    fitted.fit(MANY, numbers, epochs=2, batch_size=BATCH, resume=url)

    rest, whole = after.by_epoch()
    assert max(rest.values()) == 1
    assert len(rest) == len(MANY) - 3 * 4 * BATCH
    assert whole == dict.fromkeys(range(len(MANY)), 1)
    assert fitted.history_.column("examples") == [len(MANY)] * 2


@pytest.mark.slow
def test_rows_of_a_killed_worker_count_in_the_resumed_epoch(three, tmp_path):
    first = trainer(three, callbacks=[KillAt(6), each(tmp_path / "all")])
    first.fit(MANY, LABELS, epochs=1, batch_size=BATCH)
    after = in_the_middle(tmp_path / "all", epoch=0)[2:]  # 8 steps of each

    fitted, last = trainer(three, callbacks=[each(tmp_path / "again")]), trainer(three)
    fitted.fit(MANY, LABELS, epochs=1, batch_size=BATCH, resume=after[0])
    url = in_the_middle(tmp_path / "again", epoch=0)[-1]  # and of that again
    last.fit(MANY, LABELS, epochs=2, batch_size=BATCH, resume=url)

    assert first.history_.column("examples") == [len(MANY)]
    assert fitted.history_.column("examples") == [len(MANY)]
    assert last.history_.column("examples") == [len(MANY)] * 2
    loss = first.history_[0]["loss"]
    assert fitted.history_[0]["loss"] == pytest.approx(loss, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("master", [kept(), ParameterAveraging(frequency=3)])
def test_workers_may_leave_and_join_between_sync_points(three, tmp_path, master):
    pids = three.run(os.getpid)
    worker = pids[sorted(pids)[1]]
    (tmp_path / "rows").mkdir()
    watched = TrainedRows(tmp_path / "rows")
    took_part = TookPart(tmp_path)
    kill = functools.partial(os.kill, worker, signal.SIGKILL)
    script = Script((3, kill), (took_part.by(3), enough))
    fitted = trainer(
        three,
        master=master,
        loss=watched,
        callbacks=[
            watched,
            took_part,
            Checkpoint(tmp_path / "all", "4 steps", keep_last=4),
        ],
    )

    script.run(fitted, MANY, np.arange(len(MANY)))

    # The last epoch is broken off, and the one of the death has pieces twice.
    for trained in watched.by_epoch()[: len(script.rows)]:
        assert set(trained) == set(range(len(MANY)))
    newest = Series.at(tmp_path / "all").newest()
    assert newest is not None
    again = trainer(three, master=master, loss=watched)
    epoch = newest.header["epoch"]
    again.fit(
        MANY,
        np.arange(len(MANY)),
        epochs=epoch + 1,
        batch_size=BATCH,
        resume=newest.store.url,
    )
    assert again.history_[-1]["examples"] == len(MANY)


@pytest.mark.slow
def test_checkpoints_after_a_time(client, tmp_path):
    fitted = trainer(client, callbacks=[each(tmp_path, every="50 ms")])

    fitted.fit(MANY, LABELS, epochs=2, batch_size=4)

    assert any(in_the_middle(tmp_path, epoch) for epoch in range(2))
    assert fitted.history_.column("examples") == [len(MANY)] * 2


def test_a_folder_that_workers_do_not_share_is_named(client):
    url = f"memory://{uuid.uuid4().hex}"  # of each process
    failing = with_checkpoints(client, url)

    with pytest.raises(SaveError) as caught:
        failing.fit(X, Y, epochs=4, batch_size=BATCH)

    message = (
        rf"all replicas have written their parts of {url}/checkpoint-000001, but "
        "some are missing; all workers must share this folder"
    )
    assert re.search(message, str(caught.value))
