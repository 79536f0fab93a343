"""Checkpoints of workers that are processes: who goes on from them, and who is missed.

Which moment a process is killed at, and what is then there, is in `test_kills`.
"""

import contextlib
import os
import re
import signal
import uuid

import numpy as np
import pytest
import torch

from daskdl import Checkpoint, ParameterAveraging, SaveError, WaitTimeoutError
from daskdl.saving.checkpoints import COMMON, Part, Series, of_replica
from tests.support import s3
from tests.support.clusters import Script, cluster_of, enough, nothing
from tests.support.problems import adam, kept, normalised, rows, trainer
from tests.support.recording import Recorded, delivered, records
from tests.support.watched import TrainedRows

X, Y = rows()
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


class TestAsMany:
    @pytest.mark.parametrize(
        "master",
        [kept(max_staleness=0), ParameterAveraging(frequency=3)],
        ids=["sharing", "averaging"],
    )
    def test_on_a_new_cluster_it_is_as_if_there_had_been_no_break(
        self, client, another, tmp_path, master
    ):
        without = with_checkpoints(client, tmp_path, master=master)
        history = without.fit(X, Y, epochs=4, batch_size=BATCH)
        url = tmp_path / "checkpoint-000002"

        own = with_checkpoints(another, tmp_path / "b", master=master)
        rest = own.fit(X, Y, epochs=4, batch_size=BATCH, resume=url)

        check_same(own, without)
        assert rest.column("epoch") == [0, 1, 2, 3]
        assert rest.column("loss") == history.column("loss")
        assert Series.at(tmp_path / "b").numbers() == [1, 2]

    def test_nothing_is_lost_where_replicas_do_not_wait_for_each_other(
        self, client, another, tmp_path
    ):
        with_checkpoints(client, tmp_path).fit(X, Y, epochs=2, batch_size=BATCH)
        newest = Series.at(tmp_path).newest()
        start, residual = agreed_and_residual(newest)

        folder = tmp_path / "records"
        folder.mkdir()
        own = with_checkpoints(
            another, tmp_path, master=Recorded(str(folder), kept(), atol=4e-6)
        )
        own.fit(X, Y, epochs=4, batch_size=BATCH, resume=True)

        ends = records(folder, epoch=1)  # of this run
        assert np.abs(residual).max() > 1e-5
        # Above 1 a parameter of float32 has not all bits of the grid.
        np.testing.assert_array_equal(ends[0]["start"], start.astype(np.float32))
        carried = sum(end["carried"] for end in ends.values())
        np.testing.assert_allclose(carried, residual, rtol=0, atol=1e-7)
        expected = start + sum(end["progress"] for end in ends.values())
        # Two replicas, each rounded to float32 for each of 60 moves.
        got = delivered(own).numpy()
        np.testing.assert_allclose(got, expected, rtol=0, atol=8e-6)

    @pytest.mark.slow
    def test_from_s3_with_options_that_workers_do_not_have(
        self, client, bucket, s3_endpoint
    ):
        options, url = s3.options(s3_endpoint), f"{bucket}/run-17"
        chosen = {"master": kept(max_staleness=0), "storage_options": options}
        without = with_checkpoints(client, url, **chosen)
        without.fit(X, Y, epochs=3, batch_size=BATCH)

        own = with_checkpoints(client, f"{url}-b", **chosen)
        resume = {"resume": f"{url}/checkpoint-000001", "storage_options": options}
        own.fit(X, Y, epochs=3, batch_size=BATCH, **resume)

        check_same(own, without)


def agreed_and_residual(whole):
    """The parameters that all agreed on, and the sum of what each has not sent."""
    _, common = Part(whole.store, COMMON).read()
    parts = [Part(whole.store, of_replica(r)).read()[1] for r in whole.members]
    compressor = common["exchange"]["compressor"]
    (shared,) = compressor["shared"]
    start = shared.numpy() * compressor["grid"]
    owns = [part["exchange"] for part in parts]
    residuals = [(own["local"][0].numpy() - start) / own["lead"] for own in owns]
    return start, sum(residuals)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["lone_client", "three"], ids=["fewer", "more"])
@pytest.mark.parametrize(
    "master", [kept(), ParameterAveraging()], ids=["sharing", "averaging"]
)
def test_on_another_number_of_workers_each_row_is_trained_on_once(
    client, request, place, master, tmp_path
):
    numbers = np.arange(len(X))
    notes = [tmp_path / name for name in ("before", "after")]
    for folder in notes:
        folder.mkdir()
    before, after = map(TrainedRows, notes)
    url, options = tmp_path / "checkpoints", {"optimizer": adam, "master": master}
    own = with_checkpoints(client, url, loss=before, callbacks=[before], **options)
    own.fit(X, numbers, epochs=2, batch_size=BATCH)

    others = request.getfixturevalue(place)
    own = with_checkpoints(others, url, loss=after, callbacks=[after], **options)
    history = own.fit(X, numbers, epochs=4, batch_size=BATCH, resume=True)

    assert Series.at(url).newest().members == sorted(after.replicas())
    assert history.column("replicas") == [2, 2] + [len(after.replicas())] * 2
    assert len(after.replicas()) != 2
    for epochs in (before.by_epoch(), after.by_epoch()):
        assert [set(rows) for rows in epochs] == [set(numbers)] * 2
        assert [rows.total() for rows in epochs] == [len(X)] * 2
    assert history[3]["loss"] < history[1]["loss"] < history[0]["loss"]


@pytest.mark.slow
def test_one_that_joined_before_has_its_part(growing, another, tmp_path):
    script = Script((1, lambda: growing.cluster.scale(2)), (2, nothing), (2, enough))
    script.run(with_checkpoints(growing, tmp_path), X, Y)
    series = Series.at(tmp_path)

    newest = series.newest()

    assert newest.members == [0, 1]
    assert newest.header["rows"][-1]["replicas"] == 2
    own = with_checkpoints(another, tmp_path)
    epochs = newest.header["epoch"] + 1
    history = own.fit(X, Y, epochs=epochs, batch_size=BATCH, resume=True)
    assert history.column("epoch") == list(range(epochs))
    assert history.column("replicas")[-1] == 2


def ends_at_part(number):
    """In a worker: its process ends when it is to write its part of a checkpoint."""
    write = Part.write

    def end(part, copy):
        if part.store.url.endswith(f"-{number:06d}"):
            os.kill(os.getpid(), signal.SIGKILL)
        write(part, copy)

    Part.write = end


@pytest.mark.slow
def test_a_part_that_was_never_written_leaves_the_checkpoint_before(
    client, another, tmp_path
):
    master = kept(max_staleness=0)
    without = with_checkpoints(client, tmp_path / "a", master=master)
    without.fit(X, Y, epochs=3, batch_size=BATCH)
    with cluster_of(2) as doomed:
        own = with_checkpoints(doomed, tmp_path / "b", master=master)
        doomed.run(ends_at_part, 3, workers=sorted(doomed.nthreads())[1:])
        # Where the other had come to its end before, there is nobody left.
        with contextlib.suppress(WaitTimeoutError):
            own.fit(X, Y, epochs=3, batch_size=BATCH)
    series = Series.at(tmp_path / "b")
    assert Part(series.folder(3), COMMON).header()[1]["members"] == [0, 1]

    newest = series.newest()
    own = with_checkpoints(another, tmp_path / "b", master=master)
    own.fit(X, Y, epochs=3, batch_size=BATCH, resume=True)

    assert newest.stamp.number == 2
    check_same(own, without)
    assert series.numbers() == [1, 2, 4]  # what was broken off is gone
    assert series.newest().members == [0, 1]


def test_a_folder_that_each_worker_has_for_itself_is_named(client):
    url = f"memory://{uuid.uuid4().hex}"  # of each process
    own = with_checkpoints(client, url)

    with pytest.raises(SaveError) as caught:
        own.fit(X, Y, epochs=4, batch_size=BATCH)

    message = (
        rf"all replicas have written their parts of {url}/checkpoint-000001, and they "
        "are not all there; it has to be the same place for all workers"
    )
    assert re.search(message, str(caught.value))
