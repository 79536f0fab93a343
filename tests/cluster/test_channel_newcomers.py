"""Replicas that join while a run goes on."""

import asyncio

import numpy as np
import pytest

from daskdl.channel.base import Stopped
from daskdl.channel.protocol import BarrierKind
from tests.support.channels import (
    RUN,
    a_run,
    applied_by,
    begin,
    everywhere,
    frame_of,
    held_up,
    in_thread,
    item_of,
    meet,
    publish,
    totals,
    wait_until,
)
from tests.support.run_states import SIZE


@everywhere(2)
async def test_a_joining_replica_has_each_update_once(c, s, a, b, routing):
    async with a_run(c, s, a, b, routing=routing) as run:
        donor, peer = run.channels[0], run.channels[1]
        donor.serve_snapshot(applied_by(donor))
        assert publish(peer, 1)
        assert publish(peer, 2)
        await in_thread(donor.wait_for_updates, {1: 2})

        replica, channel = await run.newcomer(b)
        joining = begin(channel.join)
        await wait_until(lambda: run.link(0).snapshot_requests)
        assert publish(peer, 3)  # on its way to both, before or after the snapshot
        await in_thread(donor.wait_for_updates, {1: 3})
        donor.check()
        result = await joining
        assert publish(peer, 4)
        await in_thread(channel.wait_for_updates, {1: 4})

        known_N = result.snapshot["total_N"] + np.array(totals(channel.drain()))
        assert result.members == [replica] == [2]
        assert known_N.tolist() == [1, 1, 1, 1] + [0] * (SIZE - 4)


@everywhere(2)
async def test_a_snapshot_waits_for_the_updates_that_it_must_contain(c, s, a, b):
    async with a_run(c, s, a, b) as run:
        donor, peer = run.channels[0], run.channels[1]
        donor.serve_snapshot(applied_by(donor))
        run.live.send_loops[0].cancel()  # the relay to the donor
        assert publish(peer, 1)
        await in_thread(peer.has_room, wait=True)

        _, channel = await run.newcomer(b)
        joining = begin(channel.join)
        await wait_until(lambda: run.link(0).snapshot_requests)
        donor.check()
        assert not joining.done()

        queue = run.record.outboxes[0].head(10**6)
        (item,) = (item for item in queue if item.kind == "update")
        await run.deliver(0, item)
        await in_thread(donor.wait_for_updates, {1: 1})
        donor.check()

        assert (await joining).snapshot["total_N"].tolist() == [1] + [0] * (SIZE - 1)


@everywhere(2)
async def test_no_snapshot_is_made_while_updates_are_held_back(c, s, a, b, routing):
    """Replicas that have met without the joining one may change the grid."""
    async with a_run(c, s, a, b, routing=routing) as run:
        donor, peer = run.channels[0], run.channels[1]
        make, held = applied_by(donor), []
        donor.serve_snapshot(lambda: held.append(run.record.holding) or make())
        await meet(run, "end", BarrierKind.AGREE)
        replica, channel = await run.newcomer(b)
        joining = begin(channel.join)
        await wait_until(lambda: run.record.members.replicas[replica].joined)

        for key in ("first", "second", "report"):
            kind = BarrierKind.REPORT if key == "report" else BarrierKind.AGREE
            both = (
                in_thread(channel.barrier, key, 0, kind) for channel in (donor, peer)
            )
            await asyncio.gather(*both)
        await wait_until(lambda: held or run.link(0).snapshot_requests)
        donor.check()
        await joining

        assert held == [False]


@everywhere(3)
async def test_a_joining_replica_asks_another_donor_if_the_first_has_gone(
    c, s, *workers, routing
):
    async with a_run(c, s, *workers, routing=routing) as run:
        first, second = run.channels[2], run.channels[0]
        first.progress(9)  # the donor, as it has most steps; but it serves none
        await wait_until(lambda: run.record.members.donor_of(3) == 2)
        second.progress(5)
        await wait_until(lambda: run.record.members.replicas[0].progress.step == 5)
        second.serve_snapshot(applied_by(second))
        waiting = begin(second.wait_for_updates, {1: 1})

        _, channel = await run.newcomer(workers[1])
        joining = begin(channel.join)
        await wait_until(lambda: run.link(2).snapshot_requests)
        run.vanish(2)
        await workers[2].close()

        assert (await joining).snapshot["step"] == 3
        assert publish(run.channels[1], 1)
        await waiting


@everywhere(3)
async def test_a_joining_replica_does_not_wait_for_one_that_has_gone(
    c, s, *workers, routing
):
    async with a_run(c, s, *workers, routing=routing) as run:
        donor = run.channels[0]
        donor.serve_snapshot(applied_by(donor))
        stamp = run.next_stamp(2)
        run.lose(2)

        replica, channel = await run.newcomer(workers[1])
        joining = begin(channel.join)
        await wait_until(lambda: run.link(0).snapshot_requests)
        donor.check()
        await joining
        await run.deliver(replica, item_of(stamp, frame_of(stamp, 1)))

        assert run.received(replica, 2) == (1, ())
        assert 2 not in channel.peers()


@everywhere(2)
async def test_a_joining_replica_does_not_wait_for_one_that_has_no_work_left(
    c, s, a, b, routing
):
    async with a_run(c, s, a, b, routing=routing) as run:
        donor = run.channels[0]
        donor.serve_snapshot(applied_by(donor))
        run.channels[1].progress(2, 0)  # the interval is over for it
        donor.progress(5, 0)
        members = run.record.members.replicas
        await wait_until(lambda: members[0].progress.step == 5)
        await wait_until(lambda: members[1].progress.interval == 0)

        _, channel = await run.newcomer(b)
        joining = begin(channel.join)
        await wait_until(lambda: run.link(0).snapshot_requests)
        donor.check()
        await joining
        await in_thread(channel.activate, 5)

        assert await in_thread(channel.wait_for_peers, 5, 0, 0) == 0


@everywhere(2)
async def test_barriers_wait_for_a_joining_replica_once_it_is_active(
    c, s, a, b, routing
):
    async with a_run(c, s, a, b, routing=routing) as run:
        donor = run.channels[0]
        donor.serve_snapshot(applied_by(donor))
        await meet(run, "end 0")
        await meet(run, "report 0", BarrierKind.REPORT)
        waiting = begin(donor.barrier, "end 1", 0)
        replica, channel = await run.newcomer(b)
        result = await in_thread(channel.join)
        assert run.record.members.expected == [0, 1]

        active = await in_thread(channel.activate, result.snapshot["step"])

        assert (active.members, active.epoch, active.interval) == ([0, 1, 2], 1, 1)
        assert dict(active.report["payloads"]) == {0: 0, 1: 1}
        assert run.record.members.expected == [0, 1, 2]
        await wait_until(lambda: replica in run.channels[1].peers())
        assert run.link(1).inbox.peers.progress[replica].step == 3
        others = [in_thread(run.channels[r].barrier, "end 1", r) for r in (1, replica)]
        for met in await asyncio.gather(waiting, *others):
            assert met.payloads == {0: 0, 1: 1, 2: 2}


@everywhere(2)
async def test_a_joining_replica_counts_on_no_step_before_its_updates(
    c, s, a, b, routing, monkeypatch
):
    async with a_run(c, s, a, b, routing=routing) as run:
        donor = run.channels[0]
        donor.serve_snapshot(applied_by(donor))
        replica, channel = await run.newcomer(b)
        joining = begin(channel.join)
        await wait_until(lambda: run.link(0).snapshot_requests)
        donor.check()
        await joining
        released = [
            held_up(b.handlers, f"daskdl_deliver{more}", monkeypatch)
            for more in ("", "_batches")
        ]
        assert publish(donor, 1, step=9)
        donor.progress(9)
        await wait_until(lambda: run.record.members.replicas[0].progress.step == 9)

        await in_thread(channel.activate, 3)

        progress = run.link(replica).inbox.peers.progress
        assert channel.peers() == [0, 1]
        assert progress[0].step == 0
        for event in released:
            event.set()
        await in_thread(channel.wait_for_updates, {0: 1})
        assert progress[0].step == 9


@everywhere(2)
async def test_a_joining_replica_without_a_donor_stops(c, s, a, b):
    async with a_run(c, s, a, b) as run:
        _, channel = await run.newcomer(b)
        for replica in (0, 1):
            run.record.remove(replica, "left", 0.0)

        with pytest.raises(Stopped, match="no replica is left to take the state from"):
            await in_thread(channel.join)


@everywhere(2)
async def test_a_replica_that_could_not_be_started_can_be_replaced(c, s, a, b):
    async with a_run(c, s, a, b) as run:

        async def assign():
            fields = {"run": RUN, "worker": b.address, "replicas": 2}
            return (await run.ask("daskdl_assign", **fields))["replicas"]

        (first,) = await assign()
        assert await assign() == ()

        await run.ask("daskdl_unassign", run=RUN, replica=first)
        await run.ask("daskdl_unassign", run=RUN, replica=1)  # it joined long since

        assert await assign() == (first + 1,)
        (lost,) = await run.events()
        assert (lost["kind"], lost["replica"]) == ("lost", first)
        assert lost["summary"].endswith("has not joined: it was not started")


@everywhere(2)
async def test_a_joining_replica_has_each_update_once_under_traffic(c, s, a, b):
    async with a_run(c, s, a, b, routing="mesh") as run:
        donor = run.channels[0]
        donor.serve_snapshot(applied_by(donor))
        stop = asyncio.Event()

        async def traffic(replica):
            while not stop.is_set():
                publish(run.channels[replica], replica + 1)
                if replica == 0:  # the donor: no replica has made more steps
                    await in_thread(donor.check)
                await asyncio.sleep(0.001)

        senders = [asyncio.ensure_future(traffic(replica)) for replica in (0, 1)]
        await wait_until(lambda: donor.published > 20)
        _, channel = await run.newcomer(b)
        snapshot = (await in_thread(channel.join)).snapshot
        known_N = snapshot["total_N"].copy()
        update, _ = snapshot["received"][0]
        known_N[0] += update  # a donor does not receive its own updates
        at_entry = donor.published
        await wait_until(lambda: donor.published > at_entry + 20)
        stop.set()
        await asyncio.gather(*senders)

        last = {r: run.channels[r].published for r in (0, 1)}
        await in_thread(channel.wait_for_updates, last)
        known_N += np.array(totals(channel.drain()), np.int32)
        assert known_N.tolist() == [last[0], last[1]] + [0] * (SIZE - 2)


@everywhere(2)
async def test_a_joining_replica_waits_until_all_send_to_it(c, s, a, b):
    async with a_run(c, s, a, b, routing="mesh") as run:
        donor, peer = run.channels[0], run.channels[1]
        donor.serve_snapshot(applied_by(donor))
        run.live.send_loops[1].cancel()  # the relay to the other one
        _, channel = await run.newcomer(b)
        joining = begin(channel.join)
        waiting = begin(donor.wait_for_updates, {1: 2})
        await wait_until(lambda: run.link(0).routing.workers.keys() == {0, 1, 2})
        assert publish(peer, 1)  # by the old topology
        await wait_until(lambda: run.received(0, 1) == (1, ()))
        assert not joining.done()

        queue = run.record.outboxes[1].head(10**6)
        await run.deliver(1, *(item for item in queue if item.kind == "member"))
        result = await joining
        assert publish(peer, 2)
        await waiting

        assert result.snapshot["total_N"].tolist() == [1] + [0] * (SIZE - 1)
        await in_thread(channel.wait_for_updates, {1: 2})
        assert totals(channel.drain(), 2) == [0, 1]
