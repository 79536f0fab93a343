"""What every channel promises: waits, leases, replicas that fail or leave."""

import asyncio

import pytest

from daskdl.channel.base import Stopped
from daskdl.channel.protocol import BarrierKind
from daskdl.training.replica import failure_of
from tests.support.channels import (
    GRID,
    begin,
    bounds,
    every_channel,
    in_thread,
    meet,
    publish,
)
from tests.support.run_states import of_one


class TestStaleness:
    @every_channel()
    async def test_nobody_runs_further_ahead_than_allowed(self, a_run):
        async with a_run() as run:
            fast, slow = run.channels[0], run.channels[1]
            await in_thread(fast.wait_for_peers, 2, 0, 2)
            assert fast.wait_for_peers(3, 0, None) == 3

            waiting = begin(fast.wait_for_peers, 3, 0, 2)
            slow.progress(1)
            await waiting

            assert fast.wait_for_peers(3, 0, None) == 2

    @every_channel()
    async def test_who_is_done_with_the_epoch_holds_nobody_up(self, a_run):
        async with a_run() as run:
            waiting = begin(run.channels[0].wait_for_peers, 9, 0, 2)

            run.channels[1].progress(1, 0)

            await waiting

    @every_channel(replicas=3)
    async def test_who_has_left_holds_nobody_up_in_any_epoch(self, a_run):
        async with a_run() as run:
            await in_thread(run.channels.pop(2).leave)
            gathers = [begin(run.channels[r].barrier, "end", None) for r in (0, 1)]
            for gather in gathers:
                await gather
            for channel in run.channels.values():
                channel.sync(5, GRID)

            run.channels[1].progress(30)

            await in_thread(run.channels[0].wait_for_peers, 30, 1, 8)
            assert run.channels[0].wait_for_peers(30, 1, None) == 0

    @every_channel()
    async def test_all_have_come_as_far_where_they_meet(self, a_run):
        async with a_run() as run:
            assert run.channels[0].wait_for_peers(5, 0, None) == 5

            run.channels[0].sync(5, GRID)

            assert run.channels[0].wait_for_peers(5, 0, None) == 0


BLOCKING = {
    "gather": lambda channel: channel.barrier("end", None),
    "updates": lambda channel: channel.wait_for_updates({1: 5}),
    "staleness": lambda channel: channel.wait_for_peers(9, 0, 2),
    "lease": lambda channel: channel.lease("train", 0, [], wait=True),
}


class TestStopping:
    @pytest.mark.parametrize("block", BLOCKING.values(), ids=BLOCKING)
    @every_channel()
    async def test_the_word_to_stop_ends_every_wait(self, a_run, block):
        async with a_run(pieces={"train": ("p",)}) as run:
            assert of_one(await in_thread(run.channels[1].lease, "train", 0, [])) == (
                0,
                "p",
            )
            waiting = begin(block, run.channels[0])

            await run.stop("enough")

            with pytest.raises(Stopped, match="enough"):
                await waiting
            with pytest.raises(Stopped, match="enough"):
                run.channels[0].check()

    @every_channel()
    async def test_closing_a_run_stops_who_is_still_in_it(self, a_run):
        async with a_run() as run:
            waiting = begin(run.channels[0].barrier, "end", None)
            await run.until(lambda: bool(run.record.barriers))

            await run.shut()

            with pytest.raises(Stopped, match="the run was closed"):
                await waiting

    @every_channel()
    async def test_events_are_waited_for_and_told_once(self, a_run):
        async with a_run() as run:
            waiting = asyncio.ensure_future(run.events())

            await run.stop("enough")

            assert await waiting == [{"kind": "stopped", "summary": "enough"}]
            assert run.record.take_events() == []

    @every_channel()
    async def test_a_replica_that_fails_ends_the_run_for_all(self, a_run):
        async with a_run() as run:
            waiting = begin(run.channels[0].barrier, "end", None)
            failure = failure_of(RuntimeError("boom"), step=3)

            await in_thread(run.channels[1].fail, failure)

            with pytest.raises(Stopped, match="replica 1 failed: RuntimeError: boom"):
                await waiting
            failed, stopped = await run.events()
            where = {"replica": 1, "worker": run.where(1)}
            assert failed == {"kind": "failed", **where, **failure}
            assert stopped["kind"] == "stopped"

    @every_channel()
    async def test_one_that_does_not_join_fails_the_run_and_is_named(self, a_run):
        async with a_run(join=False, timeouts=bounds(join=0.3)) as run:
            with pytest.raises(Stopped, match="not all replicas started within"):
                await in_thread(run.channels[0].join)

            failed, _ = await run.events()
            assert (failed["kind"], failed["type"]) == ("failed", "WaitTimeoutError")
            assert failed["summary"] == (
                "not all replicas started within 0.3 s (daskdl.timeouts.join): replica "
                f"1 on {run.where(1)}, which has not joined; is the worker busy with "
                "other tasks?"
            )


PIECES = {"train": ("p", "q"), "validation": ("v",)}


class TestLeases:
    @every_channel()
    async def test_each_piece_is_leased_once_and_progress_is_told(self, a_run):
        async with a_run(pieces=PIECES) as run:
            leases = [run.channels[0].lease, run.channels[1].lease]
            done = {"lease": 0, "examples": 5, "loss": 0.5}

            assert of_one(await in_thread(leases[1], "train", 0, [])) == (0, "p")
            assert of_one(await in_thread(leases[0], "train", 0, [])) == (1, "q")
            assert await in_thread(leases[1], "train", 0, [done]) is None
            assert of_one(await in_thread(leases[0], "validation", 0, [])) == (0, "v")
            await meet(run, "report", BarrierKind.REPORT)
            assert of_one(await in_thread(leases[0], "train", 1, [])) == (0, "p")

            progress, _ = await run.events()
            assert progress == {"kind": "progress", "epoch": 0, **done}

    @every_channel()
    async def test_who_comes_to_the_end_first_waits_for_the_others(self, a_run):
        async with a_run(pieces=PIECES) as run:
            lease = run.channels[0].lease
            done = [{"lease": i, "examples": 5, "loss": 0.5} for i in (0, 1)]
            assert of_one(await in_thread(lease, "train", 0, [])) == (0, "p")
            assert of_one(await in_thread(run.channels[1].lease, "train", 0, [])) == (
                1,
                "q",
            )
            waiting = begin(lease, "train", 0, done[:1], wait=True)
            await run.until(lambda: len(run.record.events) == 1)
            assert not waiting.done()

            assert await in_thread(run.channels[1].lease, "train", 0, done[1:]) is None

            assert await waiting is None

    @every_channel(replicas=3)
    async def test_what_one_that_leaves_had_is_free_and_ends_nobodys_wait(self, a_run):
        async with a_run(pieces={"train": ("p",)}) as run:
            assert publish(run.channels[2], 3)
            assert of_one(await in_thread(run.channels[2].lease, "train", 0, [])) == (
                0,
                "p",
            )
            await in_thread(run.channels[0].wait_for_updates, {2: 1})
            gather = begin(run.channels[0].barrier, "end", {"from": 0})
            lease = begin(run.channels[1].lease, "train", 0, [], wait=True)

            await in_thread(run.channels.pop(2).leave)

            assert of_one(await lease) == (0, "p")
            await in_thread(run.channels[1].barrier, "end", {"from": 1})
            gathered = await gather
            assert gathered.payloads == {0: {"from": 0}, 1: {"from": 1}}
            assert gathered.gone.keys() == {2}
            await in_thread(run.channels[1].wait_for_updates, {2: 1})
            assert run.record.leases["train"].repeated == 1

    @every_channel()
    async def test_with_too_few_replicas_nobody_gets_a_piece(self, a_run):
        async with a_run(pieces=PIECES, min_replicas=2) as run:
            assert of_one(await in_thread(run.channels[0].lease, "train", 0, [])) == (
                0,
                "p",
            )
            await in_thread(run.channels.pop(1).leave)

            assert await in_thread(run.channels[0].lease, "train", 0, []) is None
