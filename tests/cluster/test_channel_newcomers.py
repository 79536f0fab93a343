"""Replicas that join while a run goes on.

Replicas that join a mesh while a run goes on.
"""

import asyncio
import functools

import numpy as np
import pytest

from daskdl.channel.base import Stopped
from daskdl.channel.protocol import BarrierKind
from tests.support.channels import (
    EITHER,
    SIZE,
    a_run,
    applied_by,
    begin,
    in_thread,
    meet,
    newcomer,
    publish,
    three_workers,
    totals,
    two_workers,
    wait_until,
)


@EITHER
@two_workers()
async def test_a_newcomer_has_each_update_once(c, s, a, b, routing):
    async with a_run(c, s, a, b, routing=routing) as run:
        donor, other = run.channels[0], run.channels[1]
        donor.serve_snapshot(applied_by(donor))
        assert publish(other, 1)
        assert publish(other, 2)
        await in_thread(donor.wait_for_updates, {1: 2})

        replica, channel = await newcomer(run, b)
        joining = begin(channel.join)
        link = run.link(0)
        await wait_until(lambda: link.snapshot_requests)
        assert publish(other, 3)  # on its way to both, before or after the snapshot
        await in_thread(donor.wait_for_updates, {1: 3})
        donor.check()
        entry = await joining
        assert publish(other, 4)
        await in_thread(channel.wait_for_updates, {1: 4})

        known_N = entry.snapshot["total_N"] + np.array(totals(channel.drain()))
        assert entry.members == [replica] == [2]
        assert known_N.tolist() == [1, 1, 1, 1] + [0] * (SIZE - 4)


@two_workers()
async def test_a_donor_that_is_behind_applies_first_what_a_newcomer_is_not_sent(
    c, s, a, b
):
    async with a_run(c, s, a, b) as run:
        donor, other = run.channels[0], run.channels[1]
        made = applied_by(donor)
        donor.serve_snapshot(made)
        run.live.relays[0].cancel()  # the relay to the donor
        assert publish(other, 1)
        await in_thread(other.has_room, wait=True)

        _, channel = await newcomer(run, b)
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


@EITHER
@three_workers()
async def test_another_donor_is_asked_if_the_first_has_gone(c, s, *workers, routing):
    async with a_run(c, s, *workers, routing=routing, fan_out=1) as run:
        first, second = run.channels[2], run.channels[0]
        first.progress(9)  # the farthest, but it serves nobody
        await wait_until(lambda: run.record.members.donor() == 2)
        second.progress(5)
        await wait_until(lambda: run.record.members.replicas[0].progress.step == 5)
        second.serve_snapshot(applied_by(second))
        waiting = begin(second.wait_for_updates, {1: 1})

        _, channel = await newcomer(run, workers[1])
        joining = begin(channel.join)
        await wait_until(lambda: run.link(2).snapshot_requests)
        run.vanish(2)
        await workers[2].close()

        assert (await joining).snapshot["step"] == 3
        assert publish(run.channels[1], 1)
        await waiting


@EITHER
@two_workers()
async def test_a_newcomer_trains_in_the_epoch_that_runs_and_is_waited_for(
    c, s, a, b, routing
):
    async with a_run(c, s, a, b, routing=routing) as run:
        donor = run.channels[0]
        donor.serve_snapshot(applied_by(donor))
        await meet(run, "end 0")
        await meet(run, "report 0", BarrierKind.REPORT)
        waiting = begin(donor.barrier, "end 1", 0)
        replica, channel = await newcomer(run, b)
        entry = await in_thread(channel.join)
        assert run.record.members.expected == [0, 1]

        seating = await in_thread(channel.activate, entry.snapshot["step"])

        assert seating == ([0, 1, 2], 1, {0: 0, 1: 1}, 1)
        assert run.record.members.expected == [0, 1, 2]
        await wait_until(lambda: replica in run.channels[1].peers())
        assert run.link(1).inbox.peers.progress[replica].step == 3
        others = [in_thread(run.channels[r].barrier, "end 1", r) for r in (1, replica)]
        for gathered in await asyncio.gather(waiting, *others):
            assert gathered.payloads == {0: 0, 1: 1, 2: 2}


@EITHER
@two_workers()
async def test_nobody_to_begin_from_is_no_failure(c, s, a, b, routing):
    async with a_run(c, s, a, b, routing=routing) as run:
        _, channel = await newcomer(run, b)
        for replica in (0, 1):
            run.record.remove(replica)

        with pytest.raises(Stopped, match="nobody is left to begin from"):
            await in_thread(channel.join)


@two_workers()
async def test_the_seat_of_a_newcomer_that_was_not_started_is_free_again(c, s, a, b):
    async with a_run(c, s, a, b) as run:
        seat = functools.partial(
            run.ask, "daskdl_assign", run=7, worker=b.address, replicas=2
        )
        (first,) = (await seat())["replicas"]
        assert (await seat())["replicas"] == ()

        await run.ask("daskdl_unassign", run=7, replica=first)
        await run.ask("daskdl_unassign", run=7, replica=1)  # it has joined long since

        assert (await seat())["replicas"] == (first + 1,)
        (lost,) = await run.events()
        assert (lost["kind"], lost["replica"]) == ("lost", first)
        assert lost["summary"].endswith("has not joined: it was not started")


@two_workers()
async def test_a_newcomer_that_is_lost_when_the_others_are_through_fails_nothing(
    c, s, a, b
):
    async with a_run(c, s, a, b) as run:
        replica, _ = await newcomer(run, b)
        for founder in (0, 1):
            await in_thread(run.channels[founder].leave)
        assert run.record.members.expected == []

        await run.ask("daskdl_unassign", run=7, replica=replica)

        assert [event["kind"] for event in await run.events()] == ["over", "lost"]
        assert run.record.stopped is None


@two_workers()
async def test_a_newcomer_in_the_middle_of_traffic_has_all_of_it_once(c, s, a, b):
    async with a_run(c, s, a, b, routing="mesh", fan_out=1) as run:
        donor, made = run.channels[0], applied_by(run.channels[0])
        donor.serve_snapshot(made)
        stop = asyncio.Event()

        async def traffic(replica):
            step = 0
            while not stop.is_set():
                publish(run.channels[replica], replica + 1, step=step)
                step += 1
                if replica == 0:
                    await in_thread(donor.check)
                await asyncio.sleep(0.001)

        senders = [asyncio.ensure_future(traffic(replica)) for replica in (0, 1)]
        await wait_until(lambda: donor.published > 20)
        replica, channel = await newcomer(run, b)
        entry = await in_thread(channel.join)
        known_N = entry.snapshot["total_N"].copy()
        (own,) = (last for o, last, _ in entry.snapshot["received"] if o == 0)
        known_N[0] += own  # what a donor has published itself does not arrive there
        at_entry = donor.published
        await wait_until(lambda: donor.published > at_entry + 20)
        stop.set()
        await asyncio.gather(*senders)

        last = {r: run.channels[r].published for r in (0, 1)}
        await in_thread(channel.wait_for_updates, last)
        known_N += np.array(totals(channel.drain()), np.int32)
        assert known_N.tolist() == [last[0], last[1]] + [0] * (SIZE - 2)
        assert replica == 2


@two_workers()
async def test_a_newcomer_waits_until_all_know_that_it_is_there(c, s, a, b):
    async with a_run(c, s, a, b, routing="mesh") as run:
        donor, other = run.channels[0], run.channels[1]
        donor.serve_snapshot(applied_by(donor))
        run.live.relays[1].cancel()  # the relay to the other one
        _, channel = await newcomer(run, b)
        joining = begin(channel.join)
        waiting = begin(donor.wait_for_updates, {1: 2})
        await wait_until(lambda: run.link(0).routing.workers.keys() == {0, 1, 2})
        assert publish(other, 1)  # by the old routes
        await wait_until(lambda: 1 in run.link(0).inbox.received.by_origin())
        assert not joining.done()

        routes = [i for i in run.record.outboxes[1].head(10**6) if i.kind == "members"]
        await run.deliver(1, *routes)
        entry = await joining
        assert publish(other, 2)
        await waiting

        assert entry.snapshot["total_N"].tolist() == [1] + [0] * (SIZE - 1)
        await in_thread(channel.wait_for_updates, {1: 2})
        assert totals(channel.drain())[:2] == [0, 1]
