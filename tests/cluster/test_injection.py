"""Updates that get lost between workers."""

import numpy as np
import pytest

from tests.support.losing import Loss, losing
from tests.support.problems import kept, rows, trainer
from tests.support.recording import Recorded, records

pytestmark = pytest.mark.slow

X, Y = rows()


@pytest.mark.parametrize("routing", ["plain", "mesh"])
def test_dropped_updates_are_retransmitted(client, tmp_path, routing):
    loss = Loss(origins=[0], probability=0.3, seed=1)
    master = Recorded(str(tmp_path), kept(routing=routing))

    with losing(client, loss):
        history = trainer(client, master=master).fit(X, Y, epochs=2, batch_size=16)

    ends = records(tmp_path, epoch=1)
    published = [tuple(stamp) for stamp in ends[0]["published"]]
    received = [tuple(stamp) for stamp in ends[1]["received"]]
    lost = [number for _, number in published if loss.strikes(0, number, 1)]
    assert sorted(received) == published
    assert sum(history.column("repaired_updates")) >= len(lost) > 0
    for end in ends.values():
        np.testing.assert_array_equal(end["shared"], ends[0]["shared"])
        np.testing.assert_allclose(end["shared"], end["expected"], rtol=0, atol=6e-6)
