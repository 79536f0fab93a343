"""Real fits on worker processes that send to each other, along trees."""

import os
import signal
from dataclasses import dataclass

import numpy as np
import pytest

from daskdl import Callback
from tests.support.problems import kept, rows, trainer
from tests.support.recording import Recorded, delivered, records

X, Y = rows(960)


def recorded(folder, **options):
    """With three replicas the second passes on to the third."""
    return Recorded(str(folder), kept(routing="mesh", fan_out=1, **options))


@pytest.mark.parametrize("max_staleness", [8, 0])
def test_a_mesh_agrees_and_loses_nothing(three, tmp_path, max_staleness):
    own = trainer(three, master=recorded(tmp_path, max_staleness=max_staleness))

    own.fit(X, Y, epochs=3, batch_size=16)

    ends = list(records(tmp_path, epoch=2).values())
    assert len(ends) == 3
    for end in ends:
        np.testing.assert_array_equal(end["shared"], ends[0]["shared"])
        np.testing.assert_allclose(end["shared"], end["expected"], rtol=0, atol=4e-6)
        assert len({tuple(u) for u in end["received"]}) == len(end["received"]) > 0
    expected = ends[0]["start"] + sum(end["progress"] for end in ends)
    got = delivered(own).numpy()
    np.testing.assert_allclose(got, expected, rtol=0, atol=6e-6)


@dataclass
class Killing(Callback):
    """Kills the process of one replica."""

    replica: int
    step: int

    def on_step_end(self, step):
        if step.replica == self.replica and step.number == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_after_a_loss_in_the_middle_of_sending_all_go_on_with_the_same(three, tmp_path):
    killing = Killing(replica=1, step=25)
    own = trainer(three, master=recorded(tmp_path), callbacks=[killing])

    history = own.fit(X, Y, epochs=6, batch_size=16)

    assert len(history) == 6
    ends = [end for r, end in records(tmp_path, epoch=5).items() if r in (0, 2)]
    assert len(ends) == 2
    for end in ends:
        np.testing.assert_array_equal(end["shared"], ends[0]["shared"])
        np.testing.assert_allclose(end["shared"], end["expected"], rtol=0, atol=6e-6)
        assert len({tuple(u) for u in end["received"]}) == len(end["received"])
