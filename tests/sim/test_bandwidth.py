"""Snapshots over narrow links, on which a message takes its size over the bandwidth."""

import asyncio
import math

import numpy as np
import pytest

from daskdl import codec
from daskdl.channel import protocol, transport
from daskdl.channel.protocol import MESSAGE_BYTES, Message
from daskdl.channel.remote import JOIN_PACE_S
from daskdl.channel.run_state import MAX_READERS
from daskdl.channel.transport import PROMPT, Outbox, SendLoop
from daskdl.config import Bound
from tests.sim.cluster import run_simulated, simulated
from tests.support.channels import (
    EITHER,
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
from tests.support.run_states import EACH, SIZE

REQUEST_S = 1.0
PART_BYTES = 1000
PARTS = 4
BOUNDS = bounds(request=REQUEST_S, data=10, silence=10)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(protocol, "PART_BYTES", PART_BYTES)


def serve(channel):
    """Let a replica serve snapshots of several parts; return how many it makes."""
    make, served = applied_by(channel), []

    def snapshot():
        served.append(make())
        ballast = np.zeros(PARTS * PART_BYTES - 4 * SIZE, np.uint8)
        return {**served[-1], "ballast": ballast}

    channel.serve_snapshot(snapshot)
    return served


async def begin_to_join(run, scheduler, server, part_s):
    """Let a replica join over a link that carries a part in so many seconds."""
    _, newcomer = await run.newcomer(server)
    scheduler.network.bandwidth[server.address] = PART_BYTES / part_s
    joining = begin(newcomer.join)
    await wait_until(lambda: run.link(0).snapshot_requests)
    run.channels[0].check()
    return joining


@EITHER
@simulated(2)
async def test_a_snapshot_that_takes_longer_than_a_request_may_arrives(
    c, s, a, b, routing, monkeypatch
):
    async with a_run(c, s, a, b, timeouts=BOUNDS, routing=routing) as run:
        served = serve(run.channels[0])
        requests = recorded(a.handlers, "daskdl_fetch", monkeypatch)
        joining = await begin_to_join(run, s, b, part_s=0.6 * REQUEST_S)

        snapshot = (await joining).snapshot

        assert len(snapshot["ballast"]) == PARTS * PART_BYTES - 4 * SIZE
        assert len(served) == 1
        assert [fields["part"] for fields in requests] == [*range(PARTS)]


@EITHER
@simulated(2)
async def test_a_part_that_takes_longer_than_a_request_may_is_requested_once(
    c, s, a, b, routing, monkeypatch
):
    async with a_run(c, s, a, b, timeouts=BOUNDS, routing=routing) as run:
        serve(run.channels[0])
        requests = recorded(a.handlers, "daskdl_fetch", monkeypatch)
        joining = await begin_to_join(run, s, b, part_s=1.5 * REQUEST_S)

        await joining

        assert [fields["part"] for fields in requests] == [*range(PARTS)]


@EITHER
@simulated(2)
async def test_a_wait_for_updates_goes_on_while_they_arrive_slowly(c, s, a, b, routing):
    timeouts, count = bounds(request=1, data=2, silence=2), 20
    async with a_run(c, s, a, b, timeouts=timeouts, routing=routing) as run:
        nbytes = frame_of(codec.Stamp(RUN, 0, 1, 1), 1).nbytes
        s.network.bandwidth[b.address] = nbytes / (0.5 * REQUEST_S)
        began_at = s.network.world.now

        for step in range(count):
            assert publish(run.channels[0], step=step)
        await in_thread(run.channels[1].wait_for_updates, {0: count})

        assert totals(run.channels[1].drain())[0] == count
        took_s = s.network.world.now - began_at  # virtual
        assert took_s > 2 * (timeouts.data + timeouts.silence)


@simulated(1)
async def test_a_batch_is_as_large_as_a_slow_link_carries_promptly(c, s, a):
    outbox, sizes = Outbox(math.inf), []
    each_s, lost = 0.3, [6]

    async def send(batch):
        sizes.append(len(batch))
        await asyncio.sleep(1000 if len(batch) in lost else each_s * len(batch))
        return len(batch)

    for sequence in range(1, 25):
        outbox.append(Message("update", 0, sequence, 0, nbytes=100))
    bound = Bound(4 * REQUEST_S, ("request",))
    destination = {"bound": bound, "destination": "replica 7"}
    loop = SendLoop(outbox, send, pace_s=0.0, beat_s=1e3, **destination)
    loop.wake()
    sending = asyncio.ensure_future(loop.run())
    await wait_until(lambda: not len(outbox))
    sending.cancel()

    # Four take too long, three do not. The first one is sent alone after a timeout.
    assert sizes == [1, 2, 4, 3, 6, 1, 2, 4, 3, 4]


@simulated(1)
async def test_a_large_message_that_takes_long_lets_no_batch_be_larger_than_the_bound(
    c, s, a, monkeypatch
):
    monkeypatch.setattr(transport, "BATCH_BYTES", 3 * EACH)
    outbox, sizes = Outbox(math.inf), []

    async def send(batch):
        sizes.append(len(batch))
        await asyncio.sleep(0.0 if sizes[1:] else 1.1 * PROMPT * REQUEST_S)
        return len(batch)

    for nbytes in (100 * EACH, *[EACH - MESSAGE_BYTES] * 4):
        outbox.append(Message("update", 0, len(outbox) + 1, 0, nbytes=nbytes))
    destination = {"bound": Bound(REQUEST_S, ("request",)), "destination": "replica 7"}
    loop = SendLoop(outbox, send, pace_s=0.0, beat_s=1e3, **destination)
    loop.wake()
    sending = asyncio.ensure_future(loop.run())
    await wait_until(lambda: not len(outbox))
    sending.cancel()

    assert sizes == [1, 3, 1]


@simulated(2)
async def test_a_step_of_which_an_update_is_withheld_does_not_count(
    c, s, a, b, monkeypatch
):
    async with a_run(c, s, a, b, timeouts=BOUNDS, routing="plain") as run:
        donor, peer = run.channels[0], run.channels[1]
        serve(donor)
        subscribed = held_up(s.handlers, "daskdl_subscribe", monkeypatch)
        subscribing = recorded(s.handlers, "daskdl_subscribe", monkeypatch)
        replica, newcomer = await run.newcomer(b)
        joining = begin(newcomer.join)
        await wait_until(lambda: run.link(0).snapshot_requests)
        donor.check()
        await wait_until(lambda: subscribing)
        peers = run.link(replica).inbox.peers

        assert publish(peer, step=1)
        await in_thread(donor.wait_for_updates, {1: 1})
        peer.progress(2)
        await wait_until(lambda: peers.announced.get(1, (0,))[0] == 2)
        before = peers.progress.get(1, (0,))[0]
        subscribed.set()
        await joining
        await in_thread(newcomer.wait_for_updates, {1: 1})

        assert (before, peers.progress[1].step) == (0, 2)


@EITHER
@simulated(2)
async def test_the_others_train_on_while_a_snapshot_is_on_its_way(
    c, s, a, b, routing, monkeypatch
):
    small = {"outbox_bytes": 1, "inbox_bytes": 1, "relay_bytes": 1}
    async with a_run(c, s, a, b, timeouts=BOUNDS, routing=routing, **small) as run:
        donor, peer = run.channels[0], run.channels[1]
        serve(donor)
        released = held_up(a.handlers, "daskdl_fetch", monkeypatch)
        _, newcomer = await run.newcomer(b)
        joining = begin(newcomer.join)
        await wait_until(lambda: run.link(0).snapshot_requests)
        donor.check()

        for step in range(1, 8):  # each fills a buffer or a queue
            await in_thread(peer.has_room, wait=True)
            assert publish(peer, step, step=step)
        await in_thread(donor.wait_for_updates, {1: 7})

        released.set()
        snapshot = (await joining).snapshot
        await in_thread(newcomer.wait_for_updates, {1: 7})
        known_N = snapshot["total_N"][:7] + np.array(totals(newcomer.drain(), 7))
        assert known_N.tolist() == [1] * 7


@EITHER
@simulated(3)
async def test_a_donor_that_is_lost_half_way_is_replaced_and_each_update_comes_once(
    c, s, *workers, routing, monkeypatch
):
    async with a_run(c, s, *workers, timeouts=BOUNDS, routing=routing) as run:
        first, second, third = run.channels[2], run.channels[0], run.channels[1]
        first.progress(9)  # the donor, as it has most steps
        await wait_until(lambda: run.record.members.donor_of(3) == 2)
        second.progress(5)
        await wait_until(lambda: run.record.members.replicas[0].progress.step == 5)
        serve(first)
        serve(second)
        requests = recorded(workers[2].handlers, "daskdl_fetch", monkeypatch)
        assert publish(third, 1)
        await in_thread(first.wait_for_updates, {1: 1})
        _, newcomer = await run.newcomer(workers[1])
        joining = begin(newcomer.join)
        await wait_until(lambda: run.link(2).snapshot_requests)
        s.network.bandwidth[workers[1].address] = PART_BYTES / (0.6 * REQUEST_S)
        first.check()
        await wait_until(lambda: len(requests) > 2)
        assert publish(third, 2)  # it is received, and acknowledged in a mesh
        waiting = begin(second.wait_for_updates, {1: 4})
        await wait_until(lambda: run.received(3, 1)[0] == 2)

        run.lose(2)
        assert publish(third, 3)
        snapshot = (await joining).snapshot
        assert publish(third, 4)
        await waiting
        await in_thread(newcomer.wait_for_updates, {1: 4})

        known_N = snapshot["total_N"][:4] + np.array(totals(newcomer.drain(), 4))
        assert known_N.tolist() == [1] * 4


@simulated(2)
async def test_a_snapshot_is_dropped_where_its_reader_trains(c, s, a, b):
    async with a_run(c, s, a, b) as run:
        donor, peer = run.channels[0], run.channels[1]
        donor.serve_snapshot(applied_by(donor))
        _, newcomer = await run.newcomer(b)
        joining = begin(newcomer.join)
        await wait_until(lambda: run.link(0).snapshot_requests)
        donor.check()
        await joining
        blobs = run.link(0).blobs
        met = [begin(channel.barrier, "before", 0) for channel in (donor, peer)]
        await asyncio.gather(*met)
        assert blobs.has_snapshots  # it may still be fetched

        await in_thread(newcomer.activate, 3)
        await wait_until(lambda: 2 in donor.peers())
        await meet(run, "after")

        await wait_until(lambda: not blobs.has_snapshots)


@simulated(2)
async def test_a_donor_that_refuses_at_once_is_asked_once_a_second(
    c, s, a, b, monkeypatch
):
    async with a_run(c, s, a, b, timeouts=BOUNDS) as run:
        asked_at, released = [], asyncio.Event()
        answer = a.handlers["daskdl_snapshot"]

        async def refusing(**fields):
            asked_at.append(s.network.world.now)
            if len(asked_at) < 5:
                return {"status": "unknown", "reason": "it has gone"}
            released.set()
            return await answer(**fields)

        monkeypatch.setitem(a.handlers, "daskdl_snapshot", refusing)
        run.channels[0].serve_snapshot(applied_by(run.channels[0]))
        _, newcomer = await run.newcomer(b)
        joining = begin(newcomer.join)
        await released.wait()
        await wait_until(lambda: run.link(0).snapshot_requests)
        run.channels[0].check()
        await joining

        pauses_s = np.diff(asked_at)
        assert len(asked_at) == 5
        assert pauses_s.min() > 0.9 * JOIN_PACE_S  # of virtual time


@EITHER
@simulated(2)
async def test_a_newcomer_whose_snapshot_was_dropped_requests_another_one_at_once(
    c, s, a, b, routing, monkeypatch
):
    async with a_run(c, s, a, b, timeouts=BOUNDS, routing=routing) as run:
        served, fetch = serve(run.channels[0]), a.handlers["daskdl_fetch"]
        replica, newcomer = await run.newcomer(b)
        dropped_at = []

        async def dropping(part, **fields):
            if part == 2 and not dropped_at:
                dropped_at.append(s.network.world.now)
                await run.link(0).blobs.drop_snapshots({replica})
            return await fetch(part=part, **fields)

        monkeypatch.setitem(a.handlers, "daskdl_fetch", dropping)
        joining = begin(newcomer.join)
        for _ in range(2):
            await wait_until(lambda: run.link(0).snapshot_requests)
            run.channels[0].check()
            await wait_until(lambda: not run.link(0).snapshot_requests)
        snapshot = (await joining).snapshot

        assert len(snapshot["ballast"]) == PARTS * PART_BYTES - 4 * SIZE
        assert len(served) == 2
        assert s.network.world.now - dropped_at[0] < 2 * JOIN_PACE_S  # virtual


@simulated(2)
async def test_a_donor_keeps_the_newest_two_snapshots_for_each_replica(
    c, s, a, b, monkeypatch
):
    async with a_run(c, s, a, b, timeouts=BOUNDS) as run:
        donor, peer = run.channels[0], run.channels[1]
        members = run.record.members
        answer, names = a.handlers["daskdl_snapshot"], {2: [], 4: []}

        async def losing(reader, **fields):
            snapshot = await answer(reader=reader, **fields)
            names[reader].append(snapshot["name"])
            lost = len(names[2]) < 5
            return {"status": "refused", "reason": "lost"} if lost else snapshot

        monkeypatch.setitem(a.handlers, "daskdl_snapshot", losing)
        released = held_up(a.handlers, "daskdl_fetch", monkeypatch)
        for channel in (donor, peer):
            channel.serve_snapshot(applied_by(channel))
        serving = [begin(donor.wait_for_updates, {1: 1})]
        serving.append(begin(peer.wait_for_updates, {0: 1}))
        joining = []
        for worker in (a, b, a):  # the second one has the other donor
            replica, newcomer = await run.newcomer(worker)
            joining.append(begin(newcomer.join))
            await wait_until(lambda r=replica: members.replicas[r].donor == r % 2)
        await wait_until(lambda: len(names[2]) >= 5 and names[4])
        released.set()
        for pending in joining:
            await pending
        for channel in (donor, peer):
            assert publish(channel)
        for pending in serving:
            await pending

        async def kept(name):
            part = await run.ask_worker(0, "daskdl_fetch", name=name, part=0)
            assert part["status"] in ("ok", "unknown")
            return part["status"] == "ok"

        assert [await kept(name) for name in names[2]] == [False] * 3 + [True] * 2
        assert all([await kept(name) for name in names[4][-2:]])


@EITHER
@simulated(2)
async def test_a_replica_that_has_joined_is_the_donor_of_those_that_wait(
    c, s, a, b, routing, monkeypatch
):
    async with a_run(c, s, a, routing=routing) as run:
        joins = recorded(s.handlers, "daskdl_join", monkeypatch)
        donor, members = run.channels[0], run.record.members
        donor.serve_snapshot(applied_by(donor))
        joining = {}
        for _ in range(MAX_READERS + 1):
            replica, newcomer = await run.newcomer(b)
            joining[replica] = begin(newcomer.join)
        await wait_until(lambda: len(run.link(0).snapshot_requests) == MAX_READERS)
        (queued,) = [r for r in joining if members.replicas[r].donor is None]
        await wait_until(lambda: [j["replica"] for j in joins].count(queued) > 1)
        assert queued not in run.record.outboxes  # it is sent nothing that it buffers
        donor.check()
        first = next(r for r in joining if r != queued)
        await joining[first]
        await in_thread(run.channels[first].activate, 3)

        await wait_until(lambda: run.link(first).snapshot_requests)
        run.channels[first].serve_snapshot(applied_by(run.channels[first]))
        run.channels[first].check()
        for pending in joining.values():
            assert (await pending).snapshot["step"] == 3


@pytest.mark.parametrize("routing", ["plain", "mesh"])
@pytest.mark.parametrize("count", [4, 16, pytest.param(52, marks=pytest.mark.slow)])
def test_the_time_of_many_joins_grows_with_the_logarithm_of_their_number(
    count, routing
):
    """All links are as narrow, and two replicas train before."""
    copy_s, trained = 2.0, 2
    rounds = math.ceil(math.log((trained + count) / trained, 1 + MAX_READERS))

    async def join_all(c, s, *workers):
        world, network = s.network.world, s.network
        options = {"timeouts": bounds(data=1000, silence=300), "routing": routing}
        async with a_run(c, s, *workers[:trained], **options) as run:
            served, training = [], []

            def train(channel):
                served.append(serve(channel))
                channel.wait_for_updates({0: 1, 1: 1})  # serves snapshots
                channel.drain()

            def join(channel):
                snapshot = channel.join().snapshot
                channel.activate(snapshot["step"])
                train(channel)

            training = [begin(train, channel) for channel in run.channels.values()]
            for server in (s, *workers):
                network.bandwidth[server.address] = PARTS * PART_BYTES / copy_s
            began_at = world.now
            for worker in workers[trained:]:
                _, newcomer = await run.newcomer(worker)
                training.append(begin(join, newcomer))
            await wait_until(lambda: not run.record.members.not_active)
            took_s = world.now - began_at
            network.bandwidth.clear()
            for replica in range(trained):
                assert publish(run.channels[replica])
            await asyncio.gather(*training)

        assert max(map(len, served)) <= MAX_READERS * rounds
        assert took_s < (MAX_READERS * rounds + 0.5) * copy_s  # virtual

    run_simulated(join_all, trained + count)


@simulated(2)
async def test_a_blob_is_requested_again_after_its_connection_has_broken(
    c, s, a, b, monkeypatch
):
    async with a_run(c, s, a, b) as run:
        run.channels[0].publish_blob("own", {"values": np.arange(3)})
        fetch, broken = a.handlers["daskdl_fetch"], []

        async def breaking(**fields):
            if not broken:
                broken.append(s.network.break_between(a.address, b.address))
                await asyncio.sleep(REQUEST_S)  # virtual: the error comes first
            return await fetch(**fields)

        monkeypatch.setitem(a.handlers, "daskdl_fetch", breaking)

        blob = await in_thread(run.channels[1].fetch_blob, 0, "own")

        assert broken == [1]
        assert blob["values"].tolist() == [0, 1, 2]
