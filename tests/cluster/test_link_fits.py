"""`LinkThreshold` on a cluster: the promises, and that it uses the link there is."""

import numpy as np
import pytest

from daskdl import AdaptiveThreshold, LinkThreshold
from tests.cluster.barriers import ATOL, check_barrier
from tests.cluster.problems import kept, rows, trainer
from tests.cluster.recording import Recorded, records, vector

X, Y = rows()


@pytest.mark.parametrize(
    "options",
    [{"routing": "plain"}, {"routing": "mesh"}, {"warmup_steps": 10}],
    ids=str,
)
def test_nothing_is_lost_and_all_agree(client, tmp_path, options):
    master = Recorded(str(tmp_path), kept(threshold=LinkThreshold(), **options))
    own = trainer(client, master=master)

    own.fit(X, Y, epochs=3, batch_size=16)

    ends = records(tmp_path, epoch=2)
    expected = ends[0]["start"] + sum(end["progress"] for end in ends.values())
    np.testing.assert_allclose(vector(own.model_), expected, rtol=0, atol=ATOL)
    for epoch in range(3):
        check_barrier(records(tmp_path, epoch))


def test_more_is_sent_than_by_a_rule_that_does_not_look_at_the_link(client):
    densities = []
    for rule in (LinkThreshold(), AdaptiveThreshold(initial=1e-2)):
        history = trainer(client, master=kept(threshold=rule)).fit(
            X, Y, epochs=6, batch_size=16
        )
        densities.append(max(history.column("density")[1:]))

    by_link, adaptive = densities
    assert by_link > 2 * adaptive
