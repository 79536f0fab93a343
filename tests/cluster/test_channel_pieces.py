"""Pieces that others take over, or that are lost, over Dask."""

import pytest

from daskdl.channel.base import Stopped
from tests.support.channels import (
    EITHER,
    a_run,
    begin,
    bounds,
    in_thread,
    two_workers,
    wait_until,
)


@EITHER
@two_workers()
async def test_who_is_through_waits_for_what_others_may_lose(c, s, a, b, routing):
    pieces = {"train": ("p", "q")}
    async with a_run(c, s, a, b, pieces=pieces, routing=routing) as run:
        one, two = (run.channels[r].lease for r in (0, 1))
        mine = await in_thread(one, "train", 0, [])
        its = await in_thread(two, "train", 0, [])
        done = {"lease": mine.number, "examples": 1, "loss": 0.0}
        waiting = begin(one, "train", 0, [done], wait=True)
        await wait_until(lambda: run.record.leases["train"].unfinished == 1)
        assert not waiting.done()

        run.live.lose(1, "for the test")

        assert await waiting == its
        done = {"lease": its.number, "examples": 1, "loss": 0.0}
        assert await in_thread(one, "train", 0, [done], wait=True) is None


@EITHER
@two_workers()
async def test_a_piece_that_was_lost_is_asked_for_under_its_new_key(
    c, s, a, b, routing
):
    async with a_run(c, s, a, b, pieces={"train": ("p",)}, routing=routing) as run:
        await in_thread(run.channels[0].lease, "train", 0, [])
        waiting = begin(run.channels[0].missing, "train", 0, "p")

        (missing,) = await run.events()
        assert missing.pop("kind") == "missing"
        assert missing.pop("worker") == a.address
        assert missing == {"phase": "train", "part": 0, "key": "p", "avoid": ()}
        await run.ask("daskdl_restore", run=7, phase="train", part=0, key="again")

        assert await waiting == "again"


@two_workers()
async def test_a_piece_that_only_takes_its_time_stays_as_it_is(c, s, a, b):
    data = await c.scatter({"daskdl-p": 1}, workers=[b.address])
    async with a_run(c, s, a, b, pieces={"train": tuple(data)}) as run:
        asked = (run.channels[0].missing, "train", 0, "daskdl-p")

        assert await in_thread(*asked) == "daskdl-p"

        run.live.hanging.add(b.address)
        waiting = begin(*asked)
        (missing,) = await run.events()
        assert missing["avoid"] == (b.address,)
        await run.ask("daskdl_restore", run=7, phase="train", part=0, key="again")
        assert await waiting == "again"


@EITHER
@two_workers()
async def test_with_too_few_replicas_nobody_gets_a_piece(c, s, a, b, routing):
    options = {"min_replicas": 2, "timeouts": bounds(rejoin=0.5)}
    async with a_run(
        c, s, a, b, pieces={"train": ("p",)}, **options, routing=routing
    ) as run:
        run.live.lose(1, "for the test")

        assert await in_thread(run.channels[0].lease, "train", 0, []) is None
        with pytest.raises(Stopped, match=r"fewer than min_replicas=2 .* for 0\.5 s"):
            await in_thread(run.channels[0].lease, "train", 0, [], wait=True)

        *_, failed, _ = await run.events()
        assert failed["type"] == "WaitTimeoutError"
        assert f"1 left; gone: replica 1 on {b.address}" in failed["summary"]
