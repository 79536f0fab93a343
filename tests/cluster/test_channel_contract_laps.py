"""What every channel promises: how much is trained on between two meetings."""

from typing import NamedTuple

import pytest

from daskdl.channel.leasing import SyncIntervals, SyncPoint
from daskdl.channel.protocol import BarrierKind
from tests.support.channels import every_channel, in_thread


class Dealing(NamedTuple):
    """Pieces of one row; of two replicas one is lost with two of them."""

    synchronous: bool
    pieces: int
    rows: int  # of each replica in a lap
    first: int  # pieces that the other gets in this lap


DEALINGS = {
    # Two rows of its own, and one of those that were lost.
    "fixed shares": Dealing(synchronous=True, pieces=4, rows=3, first=3),
    # Of four rows for both the lost ones are two.
    "first come": Dealing(synchronous=False, pieces=3, rows=2, first=2),
}


async def take(channel, finished=()):
    """Lease and finish until there is no more: what came, and what came at last."""
    done, pieces = [*finished], []
    while True:
        leased = await in_thread(channel.lease, "train", 0, done, wait=True)
        if leased is None or isinstance(leased, SyncPoint):
            return pieces, leased
        pieces.append(leased)
        done = [{"lease": leased.number, "examples": 1, "loss": 0.0}]


class TestLaps:
    @pytest.mark.parametrize("dealing", DEALINGS.values(), ids=DEALINGS)
    @every_channel()
    async def test_what_is_leased_again_counts_in_its_lap(self, a_run, dealing):
        options = {
            "pieces": {"train": tuple(f"p{i}" for i in range(dealing.pieces))},
            "synchronous": dealing.synchronous,
            "intervals": SyncIntervals(replicas=2, rows=dealing.rows),
        }
        async with a_run(**options) as run:
            for _ in range(2):
                await in_thread(run.channels[1].lease, "train", 0, [])
            await in_thread(run.channels.pop(1).leave)

            first, pause = await take(run.channels[0])

            assert len(first) == dealing.first
            assert isinstance(pause, SyncPoint)
            await in_thread(run.channels[0].barrier, "pause", None, BarrierKind.SYNC)
            rest, nothing = await take(run.channels[0])
            assert nothing is None
            trained = [one.part for piece in first + rest for one in piece.ranges]
            assert sorted(trained) == [*range(dealing.pieces)]
