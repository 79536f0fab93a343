"""A routing of one's own: one class, and one entry of the table."""

import pytest

from daskdl.channel.routing import ROUTINGS, Routing


class Direct(Routing):
    """Each replica sends to every other one itself, however many there are."""

    relayed = False

    def destinations(self):
        others = [replica for replica in self.workers if replica != self._replica]
        return [n for r in others if (n := self.neighbour(r)) is not None]


@pytest.fixture
def direct(monkeypatch):
    monkeypatch.setitem(ROUTINGS, "direct", Direct)
