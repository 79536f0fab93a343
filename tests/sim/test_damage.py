"""Updates that arrive damaged: at one replica, or at all but their origin."""

import numpy as np
import pytest

from daskdl.channel.protocol import BarrierKind
from daskdl.errors import ChannelError
from tests.sim.cluster import simulated
from tests.support.channels import (
    EITHER,
    a_run,
    agree,
    all_wait_for,
    applied_by,
    begin,
    flipped,
    frame_of,
    in_thread,
    meet,
    publish,
    totals,
    wait_until,
)


def damaged_once(server, monkeypatch):
    """Damage the first update that is delivered to a worker."""
    deliver, damaged = server.handlers["daskdl_deliver"], []

    async def damaging(messages, **fields):
        changed = []
        for message in messages:
            if message[0] == "update" and not damaged:
                damaged.append(message[1:3])
                payload = bytearray(message[5])
                payload[-1] ^= 4
                message = (*message[:5], bytes(payload), *message[6:])
            changed.append(message)
        return await deliver(messages=changed, **fields)

    monkeypatch.setitem(server.handlers, "daskdl_deliver", damaging)
    return damaged


def publish_damaged(channel, entry, step=0):
    """Publish an update of which no readable copy is left."""
    encode = lambda stamp: flipped(frame_of(stamp, entry))  # noqa: E731
    return channel.publish(encode, step) is not None


def serve(run, *replicas):
    """Let replicas serve their states; return these functions."""
    makes = {r: applied_by(run.channels[r]) for r in replicas}
    for replica, make in makes.items():
        run.channels[replica].serve_snapshot(make)
    return makes


def states(loaded):
    return [state["total_N"].tolist()[:3] for state in loaded]


@EITHER
@simulated(2)
async def test_a_damaged_update_is_requested_again(c, s, a, b, routing, monkeypatch):
    async with a_run(c, s, a, b, routing=routing) as run:
        damaged = damaged_once(b, monkeypatch)
        assert publish(run.channels[0], 2)

        await in_thread(run.channels[1].wait_for_updates, {0: 1})

        assert damaged == [(0, 1)]
        assert totals(run.channels[1].drain(), 3) == [0, 1, 0]
        stats = run.channels[1].stats()
        assert (stats.refused, stats.repaired) == (1, 1)


@EITHER
@simulated(2)
async def test_progress_counts_once_a_damaged_update_has_been_replaced(
    c, s, a, b, routing, monkeypatch
):
    async with a_run(c, s, a, b, routing=routing) as run:
        damaged_once(b, monkeypatch)
        assert publish(run.channels[0], 1, step=1)
        assert publish(run.channels[0], 2, step=2)

        await in_thread(run.channels[1].wait_for_peers, 2, 0, 0)

        assert totals(run.channels[1].drain(), 3) == [1, 1, 0]


@EITHER
@simulated(3)
async def test_an_update_whose_origin_left_comes_with_the_state_of_another_replica(
    c, s, *workers, routing, monkeypatch
):
    """Only replica 1 got it damaged."""
    options = {"routing": routing, "fan_out": 8, "inbox_bytes": 1}
    async with a_run(c, s, *workers, **options) as run:
        serve(run, 0, 1)
        damaged = damaged_once(workers[1], monkeypatch)
        leaving = run.channels.pop(2)
        await in_thread(publish, leaving, 1, force=True)
        run.link(2).stop_sending()
        await in_thread(leaving.leave)
        loaded = []

        await agree(run, loaded.append)

        assert damaged == [(2, 1)]
        assert states(loaded) == [[1, 0, 0]]
        assert [run.received(replica, 2) for replica in (0, 1)] == [(1, ())] * 2


@EITHER
@simulated(3)
async def test_the_others_take_the_state_of_a_replica_whose_update_is_damaged(
    c, s, *workers, routing
):
    """Its origin has it, and no readable copy of it."""
    async with a_run(c, s, *workers, routing=routing) as run:
        serve(run, 0, 1)
        total_N = [0, 7, 0]
        origin = run.channels[2]

        def snapshot():
            return {**applied_by(origin)(), "total_N": np.array(total_N, np.int32)}

        origin.serve_snapshot(snapshot)
        assert publish_damaged(origin, 2)
        loaded = []

        await agree(run, loaded.append, replicas=(0, 1, 2))

        assert states(loaded) == [total_N] * 2
        assert [run.received(replica, 2) for replica in (0, 1)] == [(1, ())] * 2
        await meet(run, "report", BarrierKind.REPORT)
        assert publish(origin, 3)
        await all_wait_for(run, {2: 2})
        await agree(run, loaded.append, replicas=(0, 1, 2))
        assert len(loaded) == 2


@EITHER
@simulated(3)
async def test_an_update_that_nobody_has_is_left_out(c, s, *workers, routing):
    async with a_run(c, s, *workers, routing=routing) as run:
        serve(run, 0, 1)
        leaving = run.channels.pop(2)
        assert publish_damaged(leaving, 1)
        assert publish(leaving, 2)
        await in_thread(leaving.has_room, wait=True)
        await wait_until(lambda: run.received(0, 2)[1] == run.received(1, 2)[1] == (2,))
        await in_thread(leaving.leave)

        of_first, of_second = await agree(run, pytest.fail)

        assert of_first == of_second == [0, 1] + [0] * 7
        assert [run.received(replica, 2) for replica in (0, 1)] == [(0, (2,))] * 2


@EITHER
@simulated(2)
async def test_replicas_go_on_without_an_update_of_which_no_copy_is_readable(
    c, s, a, b, routing
):
    """Neither the receivers wait for it, nor its origin for their acknowledgement."""
    async with a_run(c, s, a, b, routing=routing, outbox_bytes=1) as run:
        origin, receiver = run.channels[0], run.channels[1]

        for step in range(1, 4):
            assert publish_damaged(origin, 1, step=step)
            await in_thread(receiver.wait_for_peers, step, 0, 0)
            await in_thread(origin.has_room, wait=True)

        assert totals(receiver.drain(), 1) == [0]
        assert run.received(1, 0) == (0, ())


@EITHER
@simulated(2)
async def test_a_joining_replica_does_not_wait_for_an_update_that_its_donor_lacks(
    c, s, a, b, routing
):
    """Its origin keeps it no more: in a mesh all others have gone on without it."""
    async with a_run(c, s, a, b, routing=routing) as run:
        donor, origin = run.channels[0], run.channels[1]
        serve(run, 0, 1)
        assert publish_damaged(origin, 1, step=1)
        await in_thread(donor.wait_for_peers, 1, 0, 0)
        donor.progress(9)
        await wait_until(lambda: run.record.members.donor_of(3) == 0)
        _, newcomer = await run.newcomer(a)
        joining = begin(newcomer.join)
        await wait_until(lambda: run.link(0).snapshot_requests)
        donor.check()
        await joining
        await in_thread(newcomer.activate, 9)
        loaded = []

        await agree(run, loaded.append, replicas=(0, 1, 2))

        assert len(loaded) == 2
        assert [run.received(replica, 1) for replica in (0, 2)] == [(1, ())] * 2


@EITHER
@simulated(2)
async def test_replicas_that_lack_updates_of_each_other_say_so(c, s, a, b, routing):
    async with a_run(c, s, a, b, routing=routing) as run:
        for replica in (0, 1):
            assert publish_damaged(run.channels[replica], 1)

        match = (
            r"updates are out of reach: .*; if the fit writes checkpoints, continue "
        )
        with pytest.raises(ChannelError, match=match + r".* fit\(resume="):
            await agree(run)
