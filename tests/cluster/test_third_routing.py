"""A routing of one's own: one class and one entry of the table, and nothing else."""

import asyncio

import numpy as np
import pytest

from daskdl import GradientSharing, OptionError
from daskdl.channel.protocol import Barrier
from daskdl.channel.routing import ROUTINGS, Routing
from tests.support.channels import a_run, in_thread, publish, three_workers, totals
from tests.support.problems import kept, rows, trainer
from tests.support.recording import Recorded, delivered, records


class Direct(Routing):
    """Each replica sends to every other one itself, however many there are."""

    relayed = False

    def destinations(self):
        others = [replica for replica in self.workers if replica != self._replica]
        return [n for r in others if (n := self.neighbour(r)) is not None]


@pytest.fixture
def direct(monkeypatch):
    monkeypatch.setitem(ROUTINGS, "direct", Direct)


def test_without_an_entry_it_is_no_option():
    with pytest.raises(OptionError, match="routing must be 'auto', 'plain' or 'mesh'"):
        GradientSharing(routing="direct")


@pytest.mark.usefixtures("direct")
def test_with_an_entry_it_is_named_among_the_options():
    with pytest.raises(OptionError, match="'plain', 'mesh' or 'direct', got 'tree'"):
        GradientSharing(routing="tree")


@pytest.mark.usefixtures("direct")
@three_workers()
async def test_its_updates_arrive_and_all_agree(c, s, *workers):
    async with a_run(c, s, *workers, routing="direct", fan_out=1) as run:
        for replica, channel in run.channels.items():
            assert publish(channel, replica + 1)

        def end(channel):
            note = {"sequence": channel.published}
            met = channel.barrier("end", note, Barrier.AGREE)
            published = {r: said["sequence"] for r, said in met.payloads.items()}
            channel.agree("end", published, met.gone, lambda snapshot: None)
            return totals(channel.drain())

        ends = [in_thread(end, channel) for channel in run.channels.values()]
        for replica, total in enumerate(await asyncio.gather(*ends)):
            assert total[:3] == [int(other != replica) for other in range(3)]


@pytest.mark.usefixtures("direct")
def test_a_fit_loses_nothing(threads, tmp_path):
    x, y = rows(480)
    own = trainer(threads, master=Recorded(str(tmp_path), kept(routing="direct")))

    own.fit(x, y, epochs=2, batch_size=16)

    ends = list(records(tmp_path, epoch=1).values())
    assert len(ends) == 2
    np.testing.assert_array_equal(ends[0]["shared"], ends[1]["shared"])
    expected = ends[0]["start"] + sum(end["progress"] for end in ends)
    np.testing.assert_allclose(delivered(own).numpy(), expected, rtol=0, atol=6e-6)
