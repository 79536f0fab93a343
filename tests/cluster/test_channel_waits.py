"""Waiting: for the others, for room, for an answer, until told to stop."""

import asyncio

import pytest
from distributed import Event
from distributed.utils_test import async_poll_for

from daskdl import codec
from daskdl.channel import link as link_end
from daskdl.channel import pump as pump_end
from daskdl.channel.base import Stopped
from daskdl.channel.messages import ITEM_OVERHEAD_BYTES, Item
from daskdl.errors import WaitTimeoutError
from tests.cluster.channels import (
    PATIENCE_S,
    RUN,
    a_run,
    begin,
    bounds,
    frame_of,
    in_thread,
    item_of,
    publish,
    totals,
    two_workers,
)

# Dask calls back in a thread, which it keeps.
CALLBACKS = {"threads": False}

STAMP = codec.Stamp(RUN, 0, 1, 0)


def held_up(handlers, operation, monkeypatch):
    """Let requests of one kind wait; the event lets them go on."""
    released, handler = asyncio.Event(), handlers[operation]

    async def waiting(**fields):
        await released.wait()
        return await handler(**fields)

    monkeypatch.setitem(handlers, operation, waiting)
    return released


@two_workers()
async def test_nobody_runs_further_ahead_than_allowed(c, s, a, b):
    async with a_run(c, s, a, b) as run:
        fast, slow = run.channels[0], run.channels[1]
        await in_thread(fast.wait_for_others, 2, 0, 2)
        assert fast.lead(3, 0) == 3

        waiting = begin(fast.wait_for_others, 3, 0, 2)
        slow.complete(1)
        await waiting

        assert fast.lead(3, 0) == 2


@two_workers()
async def test_who_is_done_with_the_epoch_holds_nobody_up(c, s, a, b):
    async with a_run(c, s, a, b) as run:
        waiting = begin(run.channels[0].wait_for_others, 9, 0, 2)

        run.channels[1].complete(1, done=0)

        await waiting


@two_workers()
async def test_progress_waits_while_the_relay_is_full(c, s, a, b, monkeypatch):
    async with a_run(c, s, a, b, relay_bytes=200) as run:
        released = held_up(b.handlers, "daskdl_deliver", monkeypatch)
        for step in range(5):
            assert publish(run.channels[0], step=step)
        run.channels[0].complete(9)
        waiting = begin(run.channels[1].wait_for_others, 9, 0, 0)
        await async_poll_for(
            lambda: run.record.members.progress[0].sequence, PATIENCE_S
        )

        assert run.record.members.progress[0].step < 9
        released.set()
        await waiting

        assert run.channels[1].receive().updates[-1].stamp.sequence == 5


@two_workers()
async def test_progress_goes_with_the_last_update_that_waits(c, s, a, b, monkeypatch):
    async with a_run(c, s, a, b) as run:
        monkeypatch.setattr(pump_end, "BATCH_BYTES", 1)
        told, handler = [], s.handlers["daskdl_publish"]

        async def noting(origin, items, step, **fields):
            if origin == 0:
                told.append((len(items), step))
            return await handler(origin=origin, items=items, step=step, **fields)

        monkeypatch.setitem(s.handlers, "daskdl_publish", noting)
        for step in range(4):
            assert publish(run.channels[0], step=step)
        run.channels[0].complete(9)
        await in_thread(run.channels[1].wait_for_others, 9, 0, 0)

        with_items = [request for request in told if request[0]]
        assert with_items == [(1, 0), (1, 0), (1, 0), (1, 9)]


@two_workers()
async def test_a_full_outbox_refuses_and_what_it_took_all_arrives(
    c, s, a, b, monkeypatch
):
    room = 4 * Item.of(item_of(STAMP, frame_of(STAMP, 1))).weight()
    async with a_run(c, s, a, b, outbox_bytes=room, relay_bytes=room) as run:
        released = held_up(b.handlers, "daskdl_deliver", monkeypatch)
        sender, receiver = run.channels[0], run.channels[1]

        first = [publish(sender, step=step) for step in range(5)]
        await async_poll_for(lambda: len(run.record.outboxes[1]) == 4, PATIENCE_S)
        await async_poll_for(lambda: len(run.link(0).outbox) == 0, PATIENCE_S)
        more = [publish(sender, step=step) for step in range(4, 9)]
        assert first == more == [True] * 4 + [False]
        assert not sender.has_room()
        assert sender.published() == 8
        waiting = begin(sender.wait_for_room)
        released.set()
        await waiting

        assert publish(sender, step=8)
        await in_thread(receiver.wait_for_updates, {0: 9})
        assert totals(receiver.receive())[0] == 9
        assert sender.traffic().withheld == 3


@two_workers()
async def test_a_full_inbox_folds_and_nothing_is_lost(c, s, a, b):
    async with a_run(c, s, a, b, inbox_bytes=10) as run:
        for step in range(5):
            assert publish(run.channels[0], 1, -2, step=step, count=step + 1)
        await in_thread(run.channels[1].wait_for_updates, {0: 5})

        arrived = run.channels[1].receive()

        assert arrived.folded_N is not None
        assert totals(arrived)[:3] == [15, -15, 0]
        assert run.channels[1].traffic().folds == 2


BLOCKING = {
    "gather": lambda channel: channel.gather("end", None),
    "updates": lambda channel: channel.wait_for_updates({1: 5}),
    "staleness": lambda channel: channel.wait_for_others(9, 0, 2),
}


@pytest.mark.parametrize("block", BLOCKING.values(), ids=BLOCKING)
@two_workers()
async def test_the_word_to_stop_ends_every_wait(c, s, a, b, block):
    async with a_run(c, s, a, b) as run:
        waiting = begin(block, run.channels[0])

        await run.ask("daskdl_stop", run=RUN, reason="enough")

        with pytest.raises(Stopped, match="enough"):
            await waiting
        with pytest.raises(Stopped, match="enough"):
            run.channels[0].check()


@two_workers()
async def test_closing_a_run_stops_who_is_still_in_it(c, s, a, b):
    async with a_run(c, s, a, b) as run:
        waiting = begin(run.channels[0].gather, "end", None)
        await run.live.until(lambda: bool(run.record._gatherings), PATIENCE_S)

        await run.ask("daskdl_close", run=RUN)

        with pytest.raises(Stopped, match="the run was closed"):
            await waiting


@two_workers()
async def test_news_are_waited_for_and_forgotten_once_confirmed(c, s, a, b):
    async with a_run(c, s, a, b) as run:
        waiting = asyncio.ensure_future(run.events())

        await run.live.stop("enough")

        assert await waiting == [{"kind": "stopped", "summary": "enough"}]
        assert await run.events(seen=1) == []
        assert await run.events(seen=0) == []


@two_workers()
async def test_a_request_without_an_answer_is_an_error_that_names_it(
    c, s, a, b, monkeypatch
):
    async with a_run(c, s, a, b, timeouts=bounds(request=0.5)) as run:
        released = held_up(s.handlers, "daskdl_lease", monkeypatch)

        with pytest.raises(WaitTimeoutError) as caught:
            await in_thread(run.channels[0].lease, "train", 0, [])

        assert str(caught.value) == (
            "the scheduler did not answer daskdl_lease of replica 0 within 0.5 s"
        )
        released.set()


@two_workers()
async def test_a_scheduler_that_takes_no_updates_fails_the_link(
    c, s, a, b, monkeypatch
):
    async with a_run(c, s, a, b, timeouts=bounds(request=0.3)) as run:
        released = held_up(s.handlers, "daskdl_publish", monkeypatch)
        waiting = begin(run.channels[0].wait_for_updates, {1: 1})

        with pytest.raises(WaitTimeoutError, match="the scheduler did not answer"):
            await waiting

        released.set()


@two_workers()
async def test_without_room_for_too_long_a_wait_names_what_waits(
    c, s, a, b, monkeypatch
):
    options = {"outbox_bytes": 1, "timeouts": bounds(silence=1.0)}
    async with a_run(c, s, a, b, **options) as run:
        monkeypatch.setattr(run.record.members, "silent_since", lambda bound: [])
        released = held_up(s.handlers, "daskdl_publish", monkeypatch)
        assert publish(run.channels[0])

        with pytest.raises(WaitTimeoutError) as caught:
            await in_thread(run.channels[0].wait_for_room)

        waiting = len(frame_of(STAMP, 1)) + ITEM_OVERHEAD_BYTES
        assert str(caught.value) == (
            f"replica 0 waited 1 s for room: 1 updates ({waiting} bytes) could not be "
            "passed to the scheduler"
        )
        released.set()


@two_workers()
async def test_signs_of_life_are_as_frequent_as_the_time_out_needs(c, s, a, b):
    silence = 4 * link_end.BEAT_S / 2
    async with a_run(c, s, a, b, timeouts=bounds(silence=silence)) as run:
        heard = run.record.members.progress[0].heard_at
        arrived = asyncio.Event()
        publish_ = run.record.publish

        def noting(origin, *others):
            if origin == 0:
                arrived.set()
            return publish_(origin, *others)

        run.record.publish = noting
        await asyncio.wait_for(arrived.wait(), PATIENCE_S)
        arrived.clear()
        await asyncio.wait_for(arrived.wait(), PATIENCE_S)

        assert run.record.members.progress[0].heard_at - heard < 2 * link_end.BEAT_S


@two_workers(clean_kwargs=CALLBACKS)
async def test_data_are_waited_for_until_they_come(c, s, a, b):
    gate = Event("daskdl-test-gate")
    future = c.submit(gate_passed, gate.name)
    async with a_run(c, s, a, b) as run:
        channel = run.channels[0]
        assert not await in_thread(channel.wait_for_data, future, 0.1)
        waiting = begin(channel.wait_for_data, future, 2 * PATIENCE_S)
        await gate.set()

        assert await waiting
        assert channel.traffic().waits_s["data"] > 0.1


@two_workers(clean_kwargs=CALLBACKS)
async def test_a_closing_worker_waits_for_no_data(c, s, a, b):
    gate = Event("daskdl-test-gate")
    future = c.submit(gate_passed, gate.name)
    async with a_run(c, s, a, b) as run:
        waiting = begin(run.channels[0].wait_for_data, future, 2 * PATIENCE_S)
        run.link(0).close_soon()

        with pytest.raises(Stopped, match="its worker closes"):
            await waiting
        await gate.set()
        assert await future


def gate_passed(name):
    return Event(name).wait(PATIENCE_S)
