"""`LinkThreshold` on a cluster: the promises, and that it uses the link there is."""

import numpy as np
import pytest

from daskdl import LinkThreshold
from tests.support.problems import kept, rows, trainer
from tests.support.recording import ATOL, Recorded, check_barrier, delivered, records

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
    np.testing.assert_allclose(delivered(own), expected, rtol=0, atol=ATOL)
    for epoch in range(3):
        check_barrier(records(tmp_path, epoch))


def test_it_goes_up_from_the_least_that_is_sent_whatever_it_takes(client):
    rule = LinkThreshold(min_density=1e-4)
    master = kept(threshold=rule)

    history = trainer(client, master=master).fit(X, Y, epochs=6, batch_size=16)

    assert max(history.column("density")[1:]) > 10 * rule.min_density
