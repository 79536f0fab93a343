"""Waiting: for the others, for room, for an answer, until told to stop."""

import asyncio

import pytest
from distributed.utils_test import async_poll_for

from daskdl import codec
from daskdl.channel import routing as routings
from daskdl.channel import scheduler as scheduling
from daskdl.channel import transport
from daskdl.channel.protocol import MESSAGE_BYTES
from daskdl.channel.recovery import Repairs
from daskdl.channel.routing import BEAT_S
from daskdl.channel.transport import RECENT
from daskdl.errors import ChannelError
from tests.sim.cluster import simulated
from tests.sim.world import Process
from tests.support.channels import (
    EITHER,
    PATIENCE_S,
    RUN,
    a_run,
    applied_by,
    begin,
    bounds,
    frame_of,
    held_up,
    in_thread,
    meet,
    publish,
    recorded,
    totals,
    wait_until,
)

STAMP = codec.Stamp(RUN, 0, 1, 0)


@simulated(2)
async def test_progress_is_sent_with_the_last_queued_update(c, s, a, b, monkeypatch):
    async with a_run(c, s, a, b) as run:
        monkeypatch.setattr(transport, "BATCH_BYTES", 1)
        told, handler = [], s.handlers["daskdl_publish"]

        async def noting(replica, messages, progress, **fields):
            if replica == 0:
                told.append((len(messages), progress[0]))
            fields |= {"replica": replica, "messages": messages, "progress": progress}
            return await handler(**fields)

        monkeypatch.setitem(s.handlers, "daskdl_publish", noting)
        for step in range(4):
            assert publish(run.channels[0], step=step)
        run.channels[0].progress(9)
        await in_thread(run.channels[1].wait_for_peers, 9, 0, 0)

        with_messages = [request for request in told if request[0]]
        assert with_messages == [(1, 0), (1, 0), (1, 0), (1, 9)]


@simulated(2)
async def test_a_full_outbox_refuses_updates_and_accepted_ones_arrive(
    c, s, a, b, monkeypatch
):
    room = 4 * (frame_of(STAMP, 1).nbytes + MESSAGE_BYTES)
    async with a_run(c, s, a, b, outbox_bytes=room, relay_bytes=room) as run:
        released = held_up(b.handlers, "daskdl_deliver", monkeypatch)
        sender, receiver = run.channels[0], run.channels[1]

        first = [publish(sender, step=step) for step in range(5)]
        await async_poll_for(lambda: len(run.record.outboxes[1]) == 4, PATIENCE_S)
        await async_poll_for(lambda: run.link(0).routing.all_sent(), PATIENCE_S)
        more = [publish(sender, step=step) for step in range(4, 9)]
        assert first == more == [True] * 4 + [False]
        assert not sender.has_room()
        assert sender.published == 8
        waiting = begin(sender.has_room, wait=True)
        released.set()
        await waiting

        assert publish(sender, step=8)
        await in_thread(receiver.wait_for_updates, {0: 9})
        assert totals(receiver.drain())[0] == 9
        assert sender.stats().withheld == 3


def note_answers(handlers, operation, monkeypatch, answered):
    """Add the operation to a list whenever a request with messages is answered."""
    answer = handlers[operation]

    async def noting(**fields):
        result = await answer(**fields)
        if fields["messages"]:
            answered.append(operation)
        return result

    monkeypatch.setitem(handlers, operation, noting)


@simulated(2)
async def test_an_update_counts_as_sent_once_those_before_it_have_arrived(
    c, s, a, b, monkeypatch
):
    monkeypatch.setattr(scheduling, "UNSENT_BYTES", 0)
    async with a_run(c, s, a, b) as run:
        sender, answered = run.channels[0], []
        released = held_up(b.handlers, "daskdl_deliver", monkeypatch)
        note_answers(b.handlers, "daskdl_deliver", monkeypatch, answered)
        note_answers(s.handlers, "daskdl_publish", monkeypatch, answered)

        assert publish(sender)
        await wait_until(lambda: sender.has_room(unsent=0))
        assert publish(sender, step=1)
        await wait_until(lambda: len(run.record.outboxes[1]) == 2)
        assert not sender.has_room(unsent=0)
        released.set()
        await wait_until(lambda: sender.has_room(unsent=0))

        assert answered[:3] == ["daskdl_publish", "daskdl_deliver", "daskdl_publish"]


@simulated(2)
async def test_an_update_counts_as_sent_though_it_does_not_arrive_for_long(
    c, s, a, b, monkeypatch
):
    monkeypatch.setattr(scheduling, "UNSENT_BYTES", 0)
    async with a_run(c, s, a, b) as run:
        released = held_up(b.handlers, "daskdl_deliver", monkeypatch)

        for step in range(2):
            assert publish(run.channels[0], step=step)
            await wait_until(lambda: run.channels[0].has_room(unsent=0))

        assert len(run.record.outboxes[1]) == 2
        released.set()
        await in_thread(run.channels[1].wait_for_updates, {0: 2})


@simulated(3)
async def test_a_full_relay_accepts_the_last_updates_of_a_leaving_replica(
    c, s, *workers, monkeypatch
):
    async with a_run(c, s, *workers, relay_bytes=1) as run:
        released = held_up(workers[1].handlers, "daskdl_deliver", monkeypatch)
        leaver = run.channels[2]
        assert [publish(leaver, 2, step=step) for step in range(2)] == [True] * 2
        await async_poll_for(lambda: len(run.record.outboxes[1]) == 1, PATIENCE_S)
        assert not run.link(2).routing.all_sent()

        await in_thread(publish, leaver, 1, step=2, force=True)

        assert run.link(2).routing.all_sent()
        await in_thread(run.channels.pop(2).leave)
        released.set()
        await in_thread(run.channels[1].wait_for_updates, {2: 3})
        assert totals(run.channels[1].drain(), 3) == [1, 2, 0]


@simulated(4)
async def test_the_replicas_of_a_large_mesh_share_the_rate_of_heartbeats(
    c, s, *workers, monkeypatch
):
    monkeypatch.setattr(routings, "BEATS_PER_S", 1)  # so that four replicas are many
    bound = bounds(silence=60.0, request=60.0)
    async with a_run(c, s, *workers, timeouts=bound, routing="mesh") as run:
        await meet(run, "all have adopted the last membership")
        requests = recorded(s.handlers, "daskdl_publish", monkeypatch)
        loop = asyncio.get_running_loop()
        began_s = loop.time()

        await async_poll_for(lambda: len(requests) == 12, 60.0)

        assert 8.0 < loop.time() - began_s < 16.0


@simulated(2)
async def test_a_relay_keeps_only_the_latest_updates_for_retransmission(c, s, a, b):
    async with a_run(c, s, a, b, outbox_bytes=300) as run:  # less than one
        for step in range(RECENT + 4):
            await in_thread(publish, run.channels[0], step=step, force=True)

        kept = run.link(0).lookup(0, range(1, RECENT + 5))

        assert [message.sequence for message in kept] == [*range(5, RECENT + 5)]


@EITHER
@simulated(2)
async def test_heartbeats_are_frequent_enough_for_the_timeout(c, s, a, b, routing):
    silence = 4 * BEAT_S / 2
    async with a_run(
        c, s, a, b, timeouts=bounds(silence=silence), routing=routing
    ) as run:
        before = run.record.members.replicas[0].heartbeat_at
        arrived = asyncio.Event()
        heard = "acknowledge" if routing == "mesh" else "publish"
        hear = getattr(run.record, heard)

        def noting(origin, *others, **options):
            if origin == 0:
                arrived.set()
            return hear(origin, *others, **options)

        setattr(run.record, heard, noting)
        await asyncio.wait_for(arrived.wait(), PATIENCE_S)
        arrived.clear()
        await asyncio.wait_for(arrived.wait(), PATIENCE_S)

        assert run.record.members.replicas[0].heartbeat_at - before < 2 * BEAT_S


@simulated(2)
async def test_a_bug_in_a_task_of_the_channel_ends_a_wait_with_its_cause(
    c, s, a, b, monkeypatch
):
    async def broken(self):
        raise KeyError("bug")

    monkeypatch.setattr(Repairs, "run", broken)
    async with a_run(c, s, a, b) as run:
        with pytest.raises(ChannelError, match=r"channel failed: KeyError\('bug'\)"):
            await in_thread(run.channels[0].barrier, "never", None)


@EITHER
@simulated(2)
async def test_a_joining_replica_waits_for_a_donor_that_is_busy(
    c, s, a, b, routing, monkeypatch
):
    timeouts = bounds(join=2.0, request=0.5)
    async with a_run(c, s, a, b, timeouts=timeouts, routing=routing) as run:
        donor, peer = run.channels[0], run.channels[1]
        donor.serve_snapshot(None)
        requests = recorded(a.handlers, "daskdl_snapshot", monkeypatch)
        _, newcomer = await run.newcomer(b)
        joining = begin(newcomer.join)
        await wait_until(lambda: len(requests) > 12 or joining.done())  # for 6 s

        donor.serve_snapshot(applied_by(donor))
        serving = begin(donor.wait_for_updates, {1: 1})
        assert (await joining).snapshot["step"] == 3

        assert publish(peer)
        await serving


@simulated(2)
async def test_a_joining_replica_does_not_hold_up_the_others_while_it_waits(c, s, a, b):
    options = {"outbox_bytes": 1, "inbox_bytes": 1, "relay_bytes": 1}
    timeouts = bounds(request=0.5)
    async with a_run(c, s, a, b, timeouts=timeouts, **options) as run:
        donor, peer = run.channels[0], run.channels[1]
        _, newcomer = await run.newcomer(b)
        joining = begin(newcomer.join)
        await wait_until(lambda: run.link(0).snapshot_requests)

        for _ in range(5):  # each fills a buffer or a queue
            await in_thread(peer.has_room, wait=True)
            assert publish(peer)
        await in_thread(donor.wait_for_updates, {1: 5})

        donor.serve_snapshot(applied_by(donor))
        serving = begin(donor.wait_for_updates, {1: 6})
        assert (await joining).snapshot["total_N"].tolist()[0] == 5
        await in_thread(peer.has_room, wait=True)
        assert publish(peer)
        await serving
        await in_thread(newcomer.wait_for_updates, {1: 6})
        assert totals(newcomer.drain(), 1) == [1]


@simulated(2)
async def test_a_pause_of_the_scheduler_is_no_silence_of_the_replicas(c, s, a, b):
    async with a_run(c, s, a, b, timeouts=bounds(silence=2.0)) as run:
        members, world = run.record.members, s.network.world
        outside = Process(world, "outside")
        world.after(0.5, outside, s.process.freeze)
        world.after(10.5, outside, s.process.thaw)
        await wait_until(lambda: s.process.thawed_at > 0)

        def heard_again():
            beats = (member.heartbeat_at for member in members.replicas.values())
            return min(beats) > s.process.thawed_at + 2.0

        await wait_until(heard_again)

        assert members.present == [0, 1]
        run.link(1).stop_sending()
        await wait_until(lambda: members.present == [0])


@simulated(3)
async def test_a_replica_that_waits_for_room_outlasts_one_that_hangs(
    c, s, *workers, monkeypatch
):
    """The queue for that one is full until the scheduler removes it."""
    timeouts = bounds(silence=4.0, request=3.0)
    options = {"relay_bytes": 1, "outbox_bytes": 1, "timeouts": timeouts}
    async with a_run(c, s, *workers, **options) as run:

        async def silent(**fields):
            await asyncio.sleep(1e3)

        hanging = run.record.members.replicas[2]
        heard_at = hanging.heartbeat_at
        await wait_until(lambda: hanging.heartbeat_at > heard_at)
        monkeypatch.setitem(workers[2].handlers, "daskdl_deliver", silent)
        run.link(2).stop_sending()
        assert publish(run.channels[0])
        await wait_until(lambda: run.record.members.replicas[0].progress.sequence)

        assert publish(run.channels[1])

        assert await in_thread(run.channels[1].has_room, wait=True)
        assert hanging.gone
