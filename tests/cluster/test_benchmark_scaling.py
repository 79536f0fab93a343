"""The table of how training scales, on a cluster that is there."""

import argparse

import pytest

from benchmarks import clusters, scaling

pytestmark = pytest.mark.slow

ASKED = argparse.Namespace(work="cnn", optimizer="SGD", steps=4, seeds=[0])


@pytest.fixture
def own(client):
    """A client of the benchmarks, of a cluster of somebody else's."""
    there = argparse.Namespace(scheduler=client.scheduler.address, cluster="local")
    with clusters.connected(there) as (own, cluster):
        yield own, cluster


def test_a_cluster_of_the_users_own_has_the_workers_that_it_has(own):
    assert list(clusters.sizes(*own, [1, 2, 4])) == [2]


def test_a_row_is_beside_plain_loops_on_the_same_workers(own):
    row = scaling.row(own[0], ASKED, workers=2, every=2)

    assert row["case"] == "cnn, exchange_every=2"
    assert row["workers"] == 2
    assert row["plain"] > 0
    assert row["efficiency"] == pytest.approx(row["samples_per_s"] / row["plain"])
    assert row["sent_kb_per_step"] > 0
