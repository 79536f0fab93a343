"""Scores of examples, and the worst of them, over the workers of a cluster."""

import os

import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from daskdl import Trainer
from tests.support.clusters import cluster_of, forget_batches, still_left_behind
from tests.support.recording import executed

ROWS = 101  # a prime: no batch size or number of workers divides it
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
# Sorted, so that each part of the data has other losses than the others.
Y = np.sort(np.random.default_rng(1).integers(0, 3, ROWS))
CHUNKS = ((40, 0, 38, 23),)
IDS = np.array([f"id {i}" for i in range(ROWS)])
# Batches of another size may use another matrix kernel, which rounds otherwise.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def trainer(client, **options):
    torch.manual_seed(0)
    own = Trainer(
        nn.Linear(4, 3),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1),
        client=client,
        **({"loss": nn.CrossEntropyLoss()} | options),
    )
    own.model_ = own.model
    own.optimizer_ = own.optimizer(own.model_.parameters())
    return own


@pytest.fixture(scope="module")
def expected():
    return trainer(False).score_examples(X, Y)


def blocks():
    return da.from_array(X, chunks=(*CHUNKS, 4)), da.from_array(Y, chunks=(50,))


def table():
    whole = pd.DataFrame(X, columns=list("abcd")).assign(id=IDS, label=Y)
    return dd.from_pandas(whole, npartitions=4)


def keyed_pairs():
    elements = [(str(IDS[i]), (X[i], Y[i])) for i in range(ROWS)]
    return db.from_sequence(elements, npartitions=4)


def files(folder):
    for number in range(3):
        own = slice(34 * number, 34 * number + 34)
        np.savez(folder / f"{number}.npz", x=X[own], y=Y[own])
    return (folder,)


def cross_entropy(output, y):
    return nn.functional.cross_entropy(output, y)


def step(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="sum")


@pytest.mark.parametrize(
    "options",
    [{}, {"loss": cross_entropy}, {"loss": None, "step": step}],
    ids=["at once", "row by row", "step"],
)
def test_every_worker_scores_a_part_and_nothing_stays(client, expected, options):
    before = executed(client)

    scores = trainer(client, **options).score_examples(X, Y, batch_size=4)

    np.testing.assert_allclose(scores, expected, **CLOSE)
    after = executed(client)
    assert all(after[worker] > before[worker] for worker in after)
    assert still_left_behind(client) == {}


def test_lazy_scores_are_computed_by_the_cluster(client, expected):
    scores = trainer(client).score_examples(*blocks())
    whole, largest = client.gather(client.compute([scores, scores.max()]))

    assert scores.chunks == CHUNKS
    np.testing.assert_allclose(whole, expected, **CLOSE)
    assert largest == pytest.approx(expected.max(), rel=1e-5)
    del scores
    assert still_left_behind(client) == {}


@pytest.fixture
def forgetful(client):
    """A client whose scheduler does not remember the tasks it has sent.

    It is in this process, and the tasks of a dataframe have the model's own future.
    """
    yield client

    def forget(dask_scheduler):
        forget_batches(*dask_scheduler.stream_comms.values())

    client.run_on_scheduler(forget)


def test_lazy_scores_have_keys(forgetful, expected):
    client, own, whole = forgetful, trainer(forgetful), table()

    of_column = own.score_examples(whole[[*"abcd", "id"]], whole["label"], key="id")
    of_bag = own.score_examples(keyed_pairs(), key=True)

    series = client.compute(of_column).result()
    np.testing.assert_allclose(series[IDS], expected, **CLOSE)
    names, values = zip(*client.compute(of_bag).result(), strict=True)
    assert list(names) == list(IDS)
    np.testing.assert_allclose(values, expected, **CLOSE)


@pytest.mark.parametrize("kind", ["numpy", "array", "frame", "bag", "files"])
def test_the_worst_are_found_exactly(client, expected, tmp_path, kind):
    whole = table()
    data, key = {
        "numpy": ((X, Y), IDS),
        "array": (blocks(), da.from_array(IDS, chunks=30)),
        "frame": ((whole[[*"abcd", "id"]], whole["label"]), "id"),
        "bag": ((keyed_pairs(),), True),
        "files": (files(tmp_path) if kind == "files" else (), IDS),
    }[kind]

    worst = trainer(client).errors(*data, key=key, top=9, batch_size=4)

    rows = np.argsort(-expected, kind="stable")[:9]
    assert [one.number for one in worst] == rows.tolist()
    assert [one.key for one in worst] == IDS[rows].tolist()
    np.testing.assert_array_equal([one.x for one in worst], X[rows])
    assert still_left_behind(client) == {}


@pytest.mark.slow
def test_a_worker_that_dies_half_way_changes_no_score(expected, tmp_path):
    marker, home = tmp_path / "fallen", os.getpid()

    def loss(output, y):
        if os.getpid() != home and not marker.exists():
            marker.touch()
            os._exit(1)
        return nn.functional.cross_entropy(output, y)

    with cluster_of(2) as client:
        scores = trainer(client, loss=loss).score_examples(X, Y, batch_size=4)

    assert marker.exists()
    np.testing.assert_allclose(scores, expected, **CLOSE)
