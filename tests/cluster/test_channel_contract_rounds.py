"""What every channel promises: what replicas offer each other, and rounds."""

import asyncio

import numpy as np
import pytest

from daskdl.channel import protocol
from daskdl.channel.base import Stopped
from daskdl.channel.protocol import BarrierKind
from tests.support.channels import begin, every_channel, in_thread

ARRAYS = {
    "long": np.arange(100_000, dtype=np.float64),
    "table": np.array([[1, -2], [3, 2**62]]),
    "empty": np.zeros(0, np.float32),
}
NBYTES = sum(array.nbytes for array in ARRAYS.values())


class TestOffers:
    @every_channel()
    async def test_what_is_offered_can_be_fetched_in_parts(self, a_run, monkeypatch):
        monkeypatch.setattr(protocol, "PART_BYTES", 2**16)
        async with a_run() as run:
            run.channels[0].publish_blob("mean", ARRAYS)

            fetched = await in_thread(run.channels[1].fetch_blob, 0, "mean")

            assert fetched.keys() == ARRAYS.keys()
            for name, array in ARRAYS.items():
                assert fetched[name].dtype == array.dtype
                np.testing.assert_array_equal(fetched[name], array)
            assert run.channels[1].stats().received_bytes == NBYTES

    @every_channel()
    async def test_what_was_fetched_was_sent(self, a_run):
        async with a_run() as run:
            run.channels[0].publish_blob("mean", ARRAYS)
            run.channels[0].publish_blob("nobody fetches it", ARRAYS)

            await in_thread(run.channels[1].fetch_blob, 0, "mean")

            assert run.channels[0].stats().sent_bytes == NBYTES

    @every_channel(replicas=3)
    async def test_arrays_in_notes_count_once_as_sent(self, a_run):
        async with a_run() as run:
            meeting = [
                begin(channel.barrier, "meet", {"replica": replica, **ARRAYS})
                for replica, channel in run.channels.items()
            ]

            for gathered in await asyncio.gather(*meeting):
                assert sorted(gathered.payloads) == [0, 1, 2]

            for channel in run.channels.values():
                traffic = channel.stats()
                assert traffic.sent_bytes == NBYTES
                assert traffic.received_bytes == 2 * NBYTES

    @every_channel()
    async def test_who_comes_first_waits_for_it(self, a_run):
        async with a_run() as run:
            fetching = begin(run.channels[1].fetch_blob, 0, "mean")

            run.channels[0].publish_blob("mean", ARRAYS)

            assert (await fetching).keys() == ARRAYS.keys()

    @every_channel(replicas=3)
    async def test_one_that_has_gone_offers_nothing(self, a_run):
        async with a_run() as run:
            fetching = begin(run.channels[0].fetch_blob, 2, "mean")

            await in_thread(run.channels.pop(2).leave)

            assert await fetching is None

    @every_channel()
    async def test_what_is_withdrawn_is_not_there_but_what_is_kept_is(self, a_run):
        async with a_run() as run:
            for name in ("mean", "state"):
                run.channels[0].publish_blob(name, ARRAYS)

            run.channels[0].drop_blobs(keep="state")

            assert await in_thread(run.channels[1].fetch_blob, 0, "state")
            waiting = begin(run.channels[1].fetch_blob, 0, "mean")
            run.channels[0].publish_blob("mean", {})
            assert await waiting == {}

    @every_channel()
    async def test_the_word_to_stop_ends_the_wait(self, a_run):
        async with a_run() as run:
            waiting = begin(run.channels[0].fetch_blob, 1, "mean")

            await run.stop("enough")

            with pytest.raises(Stopped, match="enough"):
                await waiting


def arrive(channel, kind=BarrierKind.ROUND):
    return begin(channel.barrier, "round", {"of": channel._replica}, kind)


class TestRounds:
    @every_channel()
    async def test_nobody_waits_for_one_that_waits_for_a_lease(self, a_run):
        async with a_run(pieces={"train": ("p",)}) as run:
            one, other = run.channels[0], run.channels[1]
            await in_thread(one.lease, "train", 0, [])
            other.set_idle({"of": "what it said"})
            waiting = begin(other.lease, "train", 0, [], wait=True)

            gathered = await arrive(one)

            assert gathered.payloads == {0: {"of": 0}, 1: {"of": "what it said"}}
            finished = [{"lease": 0, "examples": 1, "loss": 0.0}]
            await in_thread(one.lease, "train", 0, finished)
            assert await waiting is None

    @every_channel()
    async def test_it_is_waited_for_once_it_has_its_answer(self, a_run):
        async with a_run() as run:
            one, other = run.channels[0], run.channels[1]
            other.set_idle({"of": "what it said"})
            assert await in_thread(other.lease, "train", 0, [], wait=True) is None

            first = arrive(one)
            second = arrive(other)

            assert (await first).payloads == (await second).payloads
            assert (await first).payloads == {0: {"of": 0}, 1: {"of": 1}}

    @every_channel()
    async def test_rounds_follow_each_other_under_one_name(self, a_run):
        async with a_run() as run:
            for _ in range(3):
                arrivals = [arrive(channel) for channel in run.channels.values()]
                for arrival in arrivals:
                    assert len((await arrival).payloads) == 2

    @every_channel()
    async def test_some_may_come_to_agree(self, a_run):
        async with a_run() as run:
            first = arrive(run.channels[0])
            second = arrive(run.channels[1], BarrierKind.AGREE)

            assert (await first).payloads == (await second).payloads
            assert not run.record.holding
            both = [arrive(c, BarrierKind.AGREE) for c in run.channels.values()]
            for one in both:
                await one
            assert run.record.holding
