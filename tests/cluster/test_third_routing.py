"""A routing of your own takes one class and one entry of the table."""

import numpy as np
import pytest

from daskdl import GradientSharing, OptionError
from daskdl.channel.routing import ROUTINGS, Routing
from tests.support.problems import kept, rows, trainer
from tests.support.recording import Recorded, delivered, records


class Direct(Routing):
    """Each replica sends to every other one itself, however many there are."""

    relayed = False

    def destinations(self):
        others = [replica for replica in self.workers if replica != self._replica]
        return [n for r in others if (n := self.neighbour(r)) is not None]


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setitem(ROUTINGS, "direct", Direct)


def test_with_an_entry_it_is_named_among_the_options():
    with pytest.raises(OptionError, match="'plain', 'mesh' or 'direct', got 'tree'"):
        GradientSharing(routing="tree")


def test_a_fit_loses_nothing(threads, tmp_path):
    x, y = rows(480)
    own = trainer(threads, master=Recorded(str(tmp_path), kept(routing="direct")))

    own.fit(x, y, epochs=2, batch_size=16)

    ends = list(records(tmp_path, epoch=1).values())
    assert len(ends) == 2
    np.testing.assert_array_equal(ends[0]["shared"], ends[1]["shared"])
    expected = ends[0]["start"] + sum(end["progress"] for end in ends)
    np.testing.assert_allclose(delivered(own).numpy(), expected, rtol=0, atol=6e-6)
