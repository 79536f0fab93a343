"""Replicas that join while a run goes on."""

import asyncio
import functools
import threading

import numpy as np
import pytest

from daskdl.channel.base import Stopped
from daskdl.channel.protocol import BarrierKind
from daskdl.config import VERSION
from tests.support.channels import (
    EITHER,
    PATIENCE_S,
    RUN,
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


@EITHER
@two_workers()
async def test_a_snapshot_is_made_once_and_who_makes_it_goes_on_waiting(
    c, s, a, b, routing
):
    made, held, again = (threading.Event() for _ in range(3))
    async with a_run(c, s, a, b, routing=routing) as run:
        donor, make = run.channels[0], applied_by(run.channels[0])

        def counted():
            (again if made.is_set() else made).set()
            assert held.wait(PATIENCE_S)
            return make()

        donor.serve_snapshot(counted)
        waiting = begin(donor.barrier, "end", 0)
        _, channel = await newcomer(run, b)
        joining = begin(channel.join)
        await wait_until(made.is_set)

        held.set()
        # What has been made cannot be sent meanwhile: this is the event loop.
        assert not again.wait(0.3)
        await joining
        assert not waiting.done()
        await in_thread(run.channels[1].barrier, "end", 1)

        assert (await waiting).payloads == {0: 0, 1: 1}


@two_workers()
async def test_one_that_comes_before_the_founders_takes_over_the_state_of_one(
    c, s, a, b
):
    async with a_run(c, s, a, b, join=False) as run:
        replica, _ = await newcomer(run, b)
        join = run.ask("daskdl_join", run=RUN, replica=replica, version=VERSION)
        early = asyncio.ensure_future(join)
        await run.ask("daskdl_watch", run=RUN, timeout_s=0)  # it was heard

        founders = [in_thread(run.channels[r].join) for r in (0, 1)]
        entries = await asyncio.gather(*founders)

        answer = await early
        assert [entry.members for entry in entries] == [[0, 1], [0, 1]]
        assert answer["donor"] in (0, 1)
        assert list(answer["members"]) == []


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
@two_workers()
async def test_a_donor_serves_where_it_waits(c, s, a, b, routing):
    async with a_run(c, s, a, b, routing=routing) as run:
        donor = run.channels[0]
        donor.serve_snapshot(applied_by(donor))
        waiting = begin(donor.barrier, "end", None)

        _, channel = await newcomer(run, b)
        entry = await in_thread(channel.join)

        assert entry.snapshot["step"] == 3
        await in_thread(run.channels[1].barrier, "end", None)
        await waiting


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
async def test_a_newcomer_begins_between_the_barriers_of_two_epochs(
    c, s, a, b, routing
):
    async with a_run(c, s, a, b, routing=routing) as run:
        donor = run.channels[0]
        donor.serve_snapshot(applied_by(donor))
        await meet(run, "end 0", BarrierKind.AGREE)
        waiting = begin(donor.barrier, "report 0", 0, BarrierKind.REPORT)
        _, channel = await newcomer(run, b)
        entry = await in_thread(channel.join)
        activating = begin(channel.activate, entry.snapshot["step"])
        await wait_until(lambda: len(run.live._changed._waiters or ()) == 2)
        assert not activating.done()

        await in_thread(run.channels[1].barrier, "report 0", 1, BarrierKind.REPORT)

        assert (await waiting).payloads == {0: 0, 1: 1}
        assert (await activating)[1:] == (1, {0: 0, 1: 1}, 1)


@EITHER
@two_workers()
async def test_one_that_begins_as_a_barrier_is_complete_keeps_nobody_there(
    c, s, a, b, routing
):
    async with a_run(c, s, a, b, routing=routing) as run:
        donor = run.channels[0]
        donor.serve_snapshot(applied_by(donor))
        await meet(run, "end 0", BarrierKind.AGREE)
        _, channel = await newcomer(run, b)
        joining = begin(channel.join)
        await wait_until(lambda: run.link(0).snapshot_requests)
        donor.check()
        entry = await joining
        activating = begin(channel.activate, entry.snapshot["step"])
        await wait_until(lambda: run.live._changed._waiters)  # it is there first

        first = begin(donor.barrier, "report 0", 0, BarrierKind.REPORT)
        await wait_until(lambda: run.record.barriers)
        await in_thread(run.channels[1].barrier, "report 0", 1, BarrierKind.REPORT)

        assert (await first).payloads == {0: 0, 1: 1}
        assert (await activating)[1:] == (1, {0: 0, 1: 1}, 1)


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
