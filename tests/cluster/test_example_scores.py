"""Scores of examples, and the worst of them, over the workers of a cluster."""

import os

import dask.array as da
import numpy as np
import pytest
from torch import nn

from tests.support.clusters import cluster_of, still_left_behind
from tests.support.recording import executed
from tests.support.scored import (
    CHUNKS,
    CLOSE,
    IDS,
    X,
    Y,
    blocks,
    files,
    keyed_lists,
    keyed_pairs,
    table,
    trainer,
)


@pytest.fixture(scope="module")
def expected():
    return trainer().score_examples(X, Y)


def step(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="sum")


@pytest.mark.parametrize(
    "options",
    [{}, {"loss": None, "step": step}],
    ids=["at once", "step"],
)
def test_every_worker_scores_a_part_and_nothing_stays(client, expected, options):
    before = executed(client)

    scores = trainer(client=client, **options).score_examples(X, Y, batch_size=4)

    np.testing.assert_allclose(scores, expected, **CLOSE)
    after = executed(client)
    assert all(after[worker] > before[worker] for worker in after)
    assert still_left_behind(client) == {}


def test_lazy_scores_are_computed_by_the_cluster(client, expected):
    scores = trainer(client=client).score_examples(*blocks())
    whole, largest = client.gather(client.compute([scores, scores.max()]))

    assert scores.chunks == CHUNKS
    np.testing.assert_allclose(whole, expected, **CLOSE)
    assert largest == pytest.approx(expected.max(), rel=1e-5)
    del scores
    assert still_left_behind(client) == {}


def test_lazy_scores_have_keys(forgetful, expected):
    client, own, whole = forgetful, trainer(client=forgetful), table()

    of_column = own.score_examples(whole[[*"abcd", "id"]], whole["label"], key="id")
    of_bag = own.score_examples(keyed_pairs(), key=True)

    series = client.compute(of_column).result()
    np.testing.assert_allclose(series[IDS], expected, **CLOSE)
    names, values = zip(*client.compute(of_bag).result(), strict=True)
    assert list(names) == IDS
    np.testing.assert_allclose(values, expected, **CLOSE)


@pytest.mark.parametrize("kind", ["numpy", "array", "bag", "futures", "files"])
def test_the_worst_are_found_exactly(client, expected, tmp_path, kind):
    data, key = {
        "numpy": ((X, Y), IDS),
        "array": (blocks(), da.from_array(np.array(IDS), chunks=17)),
        "bag": ((keyed_pairs(),), True),
        "futures": ((client.compute(keyed_lists()),), True),
        "files": (files(tmp_path) if kind == "files" else (), IDS),
    }[kind]

    worst = trainer(client=client).errors(*data, key=key, top=9, batch_size=4)

    rows = np.argsort(-expected, kind="stable")[:9]
    assert [one.number for one in worst] == rows.tolist()
    assert [one.key for one in worst] == [IDS[i] for i in rows]
    np.testing.assert_array_equal([one.x for one in worst], X[rows])
    del data  # the futures
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
        scores = trainer(client=client, loss=loss).score_examples(X, Y, batch_size=4)

    assert marker.exists()
    np.testing.assert_allclose(scores, expected, **CLOSE)
