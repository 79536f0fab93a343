"""Replicas that fail, leave or fall silent, and parts that are lost, over Dask."""

import asyncio
import re

import numpy as np
import pytest

from daskdl import codec
from daskdl.channel.base import Stopped
from daskdl.channel.protocol import BarrierKind
from tests.support.channels import (
    RUN,
    a_run,
    begin,
    bounds,
    everywhere,
    held_up,
    in_thread,
    lease,
    publish,
    totals,
    wait_until,
    workers,
)
from tests.support.run_states import GRID, SIZE


@everywhere(3)
async def test_a_lost_worker_ends_no_wait_and_its_lease_is_repeated(
    c, s, *workers, routing
):
    parts = {"train": ("p", "q")}
    async with a_run(c, s, *workers, pieces=parts, routing=routing) as run:
        assert publish(run.channels[2], 3)
        assert await lease(run.channels[2]) == (0, "p")
        await in_thread(run.channels[0].wait_for_updates, {2: 1})
        meeting = [begin(run.channels[r].barrier, "end", r) for r in (0, 1)]
        run.vanish(2)

        await workers[2].close()

        for met in await asyncio.gather(*meeting):
            assert met.payloads == {0: 0, 1: 1}
            assert met.gone.keys() == {2}
            assert routing == "mesh" or met.gone == {2: 1}
        await in_thread(run.channels[1].wait_for_updates, {2: 1})
        events = await run.events()
        while len(events) < 2:  # Dask may remove the worker later
            events += await run.events()
        lost, removed = sorted(events, key=lambda event: event["kind"])
        assert removed == {"kind": "removed", "replica": 2}
        assert (lost["kind"], lost["replica"]) == ("lost", 2)
        assert lost["summary"].startswith(f"lost replica 2 on {workers[2].address}")
        again = [await lease(run.channels[0]) for _ in range(2)]
        assert again == [(1, "q"), (0, "p")]
        assert run.record.leases["train"].repeated == 1


@everywhere(2)
async def test_a_run_without_replicas_is_stopped(c, s, a, b, routing):
    async with a_run(c, s, a, b, routing=routing) as run:
        for replica, worker in enumerate((a, b)):
            run.vanish(replica)
            await worker.close()

        await run.until(lambda: False)  # it is stopped
        kinds = [event["kind"] for event in await run.events()]
        # No replica may be left to confirm that one is removed.
        kinds = [kind for kind in kinds if kind != "removed"]
        assert kinds == ["lost", "lost", "failed", "stopped"]
        assert run.record.stopped.startswith("no replica is left: lost replica")


@everywhere(2)
async def test_the_client_reads_of_a_worker_that_goes_after_its_replica(c, s, a, b):
    async with a_run(c, s, a, b) as run:
        await in_thread(run.channels.pop(1).leave)

        await b.close()

        assert await run.events() == [{"kind": "removed", "replica": 1}]


@everywhere(2)
async def test_a_closing_worker_lets_its_replica_hand_over(c, s, a, b, routing):
    async with a_run(c, s, a, b, routing=routing) as run:
        leaver = run.channels.pop(1)
        waiting = begin(leaver.barrier, "end", None)
        await run.until(lambda: bool(run.record.barriers))
        counts_N = np.arange(SIZE, dtype=np.int32)

        def encode(stamp):
            return codec.encode_dense(stamp, GRID, counts_N)

        closing = asyncio.ensure_future(b.close())
        with pytest.raises(Stopped, match="its worker closes"):
            await waiting
        assert leaver.closing
        await in_thread(leaver.publish, encode, 4, force=True)
        await in_thread(leaver.leave)
        await asyncio.wait_for(closing, 20)

        await in_thread(run.channels[0].wait_for_updates, {1: 1})
        (update,) = run.channels[0].drain().updates
        assert update.counts_N.tolist() == counts_N.tolist()
        assert run.record.members.gone.keys() == {1}
        assert routing == "mesh" or run.record.members.gone == {1: 1}
        met = await in_thread(run.channels[0].barrier, "end", 0)
        assert met.payloads.keys() == {0, 1}


@everywhere(2)
async def test_a_silent_replica_is_removed_and_named(c, s, a, b):
    async with a_run(c, s, a, b, timeouts=bounds(silence=2.0)) as run:
        waiting = begin(run.channels[0].barrier, "end", None)
        run.channels[1].count_steps(375)
        await wait_until(lambda: run.record.members.replicas[1].steps == 375)

        run.link(1).stop_sending()

        assert (await waiting).gone == {1: 0}
        (lost,) = await run.events()
        assert (lost["kind"], lost["replica"]) == ("lost", 1)
        assert re.fullmatch(
            f"lost replica 1 on {b.address}, last seen at step 375, update 0, "
            r"\d\.\d s ago: no heartbeat for 2 s \(daskdl\.timeouts\.silence\)",
            lost["summary"],
        )


@everywhere(3)
async def test_all_have_what_a_leaving_replica_published_while_they_met(
    c, s, *workers, monkeypatch
):
    async with a_run(c, s, *workers) as run:
        payload = {"sequence": 0}
        arrived = begin(run.channels[2].barrier, "end", payload, BarrierKind.AGREE)
        await run.until(lambda: "end" in run.record.barriers)
        released = held_up(workers[1].handlers, "daskdl_deliver", monkeypatch)
        assert publish(run.channels[2], 5)
        await in_thread(run.channels[0].wait_for_updates, {2: 1})

        ends = [begin(agree, run.channels[replica]) for replica in (0, 1)]
        await arrived
        await in_thread(run.channels.pop(2).leave)
        released.set()

        assert await asyncio.gather(*ends) == [[0, 0, 0, 0, 1]] * 2


def agree(channel):
    """Agree at a barrier; return the sum of what was received until then."""
    met = channel.barrier("end", {"sequence": 0}, BarrierKind.AGREE)
    published = {r: fields["sequence"] for r, fields in met.payloads.items()}
    channel.agree("end", published, met.gone, load=None)
    return totals(channel.drain(), 5)


@workers(2)
async def test_a_part_is_lost_with_a_hanging_worker_and_gets_a_new_key(c, s, a, b):
    data = await c.scatter({"daskdl-p": 1}, workers=[b.address])
    async with a_run(c, s, a, b, pieces={"train": (*data, "gone")}) as run:
        missing = run.channels[0].missing

        assert await in_thread(missing, "train", 0, "daskdl-p") == "daskdl-p"

        run.live.hanging.add(b.address)
        for part, key in enumerate(("daskdl-p", "gone")):
            waiting = begin(missing, "train", part, key)
            (event,) = await run.events()
            assert event == {
                "kind": "missing",
                "phase": "train",
                "part": part,
                "key": key,
                "worker": a.address,
                "avoid": (b.address,),
            }
            await run.ask("daskdl_restore", run=RUN, phase="train", part=part, key="x")
            assert await waiting == "x"
