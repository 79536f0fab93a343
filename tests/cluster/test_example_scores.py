"""Scores of examples over the workers of a cluster."""

import os

import numpy as np
import pytest
from torch import nn

from tests.support.clusters import cluster_of, still_left_behind
from tests.support.recording import MeetInPass
from tests.support.scored import (
    CHUNKS,
    CLOSE,
    IDS,
    X,
    Y,
    blocks,
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
def test_every_worker_scores_a_part_and_nothing_stays(
    client, expected, options, tmp_path
):
    fitted = trainer(client=client, transform=MeetInPass(tmp_path, 2), **options)

    scores = fitted.score_examples(X, Y, batch_size=4)

    np.testing.assert_allclose(scores, expected, **CLOSE)
    assert len(list(tmp_path.iterdir())) == 2
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
    client, fitted, whole = forgetful, trainer(client=forgetful), table()

    of_column = fitted.score_examples(whole[[*"abcd", "id"]], whole["label"], key="id")
    of_bag = fitted.score_examples(keyed_pairs(), key=True)

    series = client.compute(of_column).result()
    np.testing.assert_allclose(series[IDS], expected, **CLOSE)
    names, values = zip(*client.compute(of_bag).result(), strict=True)
    assert list(names) == IDS
    np.testing.assert_allclose(values, expected, **CLOSE)


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
