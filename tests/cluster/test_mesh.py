"""Fits on worker processes that send to each other: along trees, or by own routings."""

import os
import signal
from dataclasses import dataclass

import numpy as np
import pytest

from daskdl import Callback, GradientSharing, OptionError
from daskdl.channel.routing import ROUTINGS, Routing
from tests.support.problems import kept, rows, trainer
from tests.support.recording import Recorded, delivered, records

X, Y = rows(960)


class Direct(Routing):
    """A routing of one's own: each replica sends to every other one itself."""

    relayed = False

    def destinations(self):
        others = [replica for replica in self.workers if replica != self._replica]
        return [n for r in others if (n := self.neighbor(r)) is not None]


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    monkeypatch.setitem(ROUTINGS, "direct", Direct)


def test_every_routing_is_named_among_the_options():
    with pytest.raises(OptionError, match="'merged', 'mesh', 'direct', got 'tree'"):
        GradientSharing(routing="tree")


def recorded(folder, **options):
    """With a fan-out of 1 each replica forwards to the next one."""
    return Recorded(str(folder), kept(**{"routing": "mesh", "fan_out": 1, **options}))


@pytest.mark.parametrize("routing", ["mesh", "direct"])
def test_replicas_agree_and_no_update_is_lost_or_repeated(threads, tmp_path, routing):
    master = recorded(tmp_path, routing=routing, replicas_per_worker=2)
    fitted = trainer(threads, master=master)

    fitted.fit(X, Y, epochs=3, batch_size=16)

    ends = check_agreement(records(tmp_path, epoch=2).values())
    expected = ends[0]["start"] + sum(end["progress"] for end in ends)
    got = delivered(fitted).numpy()
    np.testing.assert_allclose(got, expected, rtol=0, atol=6e-6)


def check_agreement(ends):
    """Check that replicas have applied the same updates, each once; return the ends."""
    first, *others = ends
    for end in (first, *others):
        np.testing.assert_array_equal(end["shared"], first["shared"])
        np.testing.assert_allclose(end["shared"], end["expected"], rtol=0, atol=6e-6)
        assert len({tuple(u) for u in end["received"]}) == len(end["received"]) > 0
    assert others
    return [first, *others]


@dataclass
class Killing(Callback):
    """Kills the process of one replica."""

    replica: int
    step: int

    def on_step_end(self, step):
        if step.replica == self.replica and step.number == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_survivors_of_a_killed_replica_agree(three, tmp_path):
    killing = Killing(replica=1, step=25)
    fitted = trainer(three, master=recorded(tmp_path), callbacks=[killing])

    history = fitted.fit(X, Y, epochs=6, batch_size=16)

    assert len(history) == 6
    left = records(tmp_path, epoch=5)
    check_agreement(left[replica] for replica in (0, 2))
