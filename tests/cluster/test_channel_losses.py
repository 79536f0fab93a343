"""Replicas that are lost, leave, fail or say nothing, and the run they were in.

Pieces that others take over, or that are lost, over Dask.
"""

import asyncio
import re

import numpy as np
import pytest

from daskdl import codec
from daskdl.channel.base import Stopped
from tests.support.channels import (
    EITHER,
    GRID,
    PATIENCE_S,
    SIZE,
    a_run,
    begin,
    bounds,
    in_thread,
    next_stamp,
    publish,
    three_workers,
    two_workers,
)
from tests.support.run_states import of_one


@EITHER
@three_workers()
async def test_a_lost_worker_ends_nobody_elses_wait(c, s, *workers, routing):
    async with a_run(
        c, s, *workers, pieces={"train": ("p", "q")}, routing=routing, fan_out=1
    ) as run:
        assert publish(run.channels[2], 3)
        assert of_one(await in_thread(run.channels[2].lease, "train", 0, [])) == (
            0,
            "p",
        )
        await in_thread(run.channels[0].wait_for_updates, {2: 1})
        gathers = [begin(run.channels[r].barrier, "end", {"from": r}) for r in (0, 1)]
        run.vanish(2)

        await workers[2].close()

        for gathered in await asyncio.gather(*gathers):
            assert gathered.payloads == {0: {"from": 0}, 1: {"from": 1}}
            assert gathered.gone.keys() == {2}
            assert routing == "mesh" or gathered.gone == {2: 1}
        await in_thread(run.channels[1].wait_for_updates, {2: 1})
        events = await run.events()
        while len(events) < 2:  # Dask may remove the worker after we give it up
            events += await run.events()
        lost, removed = sorted(events, key=lambda event: event["kind"])
        assert removed == {"kind": "removed", "replica": 2}
        assert (lost["kind"], lost["replica"]) == ("lost", 2)
        assert lost["summary"].startswith(f"lost replica 2 on {workers[2].address}")
        again = [await in_thread(run.channels[0].lease, "train", 0, [])]
        again += [await in_thread(run.channels[0].lease, "train", 0, [])]
        assert [of_one(piece) for piece in again] == [(1, "q"), (0, "p")]
        assert run.record.leases["train"].repeated == 1


@EITHER
@two_workers()
async def test_a_run_without_replicas_is_stopped(c, s, a, b, routing):
    async with a_run(c, s, a, b, routing=routing) as run:
        for replica, worker in enumerate((a, b)):
            run.vanish(replica)
            await worker.close()

        await run.live.until(lambda: False, PATIENCE_S)  # it is stopped
        kinds = [event["kind"] for event in await run.events()]
        # Nobody may be left to confirm that a replica is removed.
        kinds = [kind for kind in kinds if kind != "removed"]
        assert kinds == ["lost", "lost", "failed", "stopped"]
        assert run.record.stopped.startswith("no replica is left: lost replica")


@EITHER
@two_workers()
async def test_a_closing_worker_lets_its_replica_hand_over(c, s, a, b, routing):
    async with a_run(c, s, a, b, routing=routing) as run:
        leaver = run.channels.pop(1)
        waiting = begin(leaver.barrier, "end", None)
        await run.live.until(lambda: bool(run.record.barriers), PATIENCE_S)

        closing = asyncio.ensure_future(b.close())
        with pytest.raises(Stopped, match="its worker closes"):
            await waiting
        assert leaver.closing
        stamp = next_stamp(leaver, 4)
        frame = codec.encode_dense(stamp, GRID, np.arange(SIZE, dtype=np.int32))
        await in_thread(leaver.publish, lambda _: frame, stamp.step, force=True)
        await in_thread(leaver.leave)
        await asyncio.wait_for(closing, PATIENCE_S)

        await in_thread(run.channels[0].wait_for_updates, {1: 1})
        (update,) = run.channels[0].drain().updates
        assert update.counts_N.tolist() == list(range(SIZE))
        assert run.record.members.gone.keys() == {1}
        assert routing == "mesh" or run.record.members.gone == {1: 1}
        assert (await in_thread(run.channels[0].barrier, "end", 0)).payloads.keys() == {
            0,
            1,
        }


@EITHER
@two_workers()
async def test_a_silent_replica_is_given_up_and_named(c, s, a, b, routing):
    async with a_run(c, s, a, b, timeouts=bounds(silence=2.0), routing=routing) as run:
        waiting = begin(run.channels[0].barrier, "end", None)

        run.link(1).stop_sending()  # it is there, and says nothing any more

        assert (await waiting).gone == {1: 0}
        (lost,) = await run.events()
        assert (lost["kind"], lost["replica"]) == ("lost", 1)
        assert re.fullmatch(
            f"lost replica 1 on {b.address}, last seen at step 0, update 0, "
            r"\d\.\d s ago: no heartbeat for 2 s \(daskdl\.timeouts\.silence\)",
            lost["summary"],
        )


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
