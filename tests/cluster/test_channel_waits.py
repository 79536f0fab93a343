"""Waiting: for the others, for room, for an answer, until told to stop."""

import asyncio
import re

import pytest
from distributed import Event
from distributed.utils_test import async_poll_for

from daskdl import codec
from daskdl.channel import pump as pump_end
from daskdl.channel.base import Stopped
from daskdl.channel.carrier import BEAT_S
from daskdl.channel.messages import ITEM_OVERHEAD_BYTES, Item
from daskdl.errors import WaitTimeoutError
from tests.cluster.channels import (
    EITHER,
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

# What a replica heard of the scheduler and of the other one.
HEARD = r"the scheduler \d+\.\d s ago; replica \d at step 0, update 0, \d+\.\d s ago"

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
        await async_poll_for(lambda: run.link(0).carrier.sent(), PATIENCE_S)
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


@EITHER
@two_workers()
async def test_a_request_without_an_answer_is_an_error_that_names_it(
    c, s, a, b, monkeypatch, routing
):
    async with a_run(c, s, a, b, timeouts=bounds(request=0.5), routing=routing) as run:
        released = held_up(s.handlers, "daskdl_lease", monkeypatch)

        with pytest.raises(WaitTimeoutError) as caught:
            await in_thread(run.channels[0].lease, "train", 0, [])

        assert re.fullmatch(
            r"the scheduler did not answer daskdl_lease of replica 0 within 0\.5 s "
            rf"\(daskdl\.timeouts\.request\); last heard: {HEARD}",
            str(caught.value),
        )
        released.set()


@EITHER
@two_workers()
async def test_a_scheduler_that_takes_no_updates_fails_the_link(
    c, s, a, b, monkeypatch, routing
):
    async with a_run(c, s, a, b, timeouts=bounds(request=0.3), routing=routing) as run:
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
        assert re.fullmatch(
            r"replica 0 waited 1 s \(daskdl\.timeouts\.silence\) for room: 1 updates "
            rf"\({waiting} bytes\) could not be passed to the scheduler; last heard: "
            rf"{HEARD}",
            str(caught.value),
        )
        released.set()


@two_workers()
async def test_without_word_from_others_for_too_long_a_wait_names_what_waits(
    c, s, a, b
):
    timeouts = bounds(silence=4.0, request=0.5)
    async with a_run(c, s, a, b, timeouts=timeouts, routing="mesh") as run:
        run.link(0).carrier.ready = lambda: False
        run.link(0).carrier._own.confirm = lambda sequence: False
        assert publish(run.channels[0])

        with pytest.raises(WaitTimeoutError) as caught:
            await in_thread(run.channels[0].wait_for_room)

        waiting = len(frame_of(STAMP, 1)) + ITEM_OVERHEAD_BYTES
        assert re.fullmatch(
            r"replica 0 waited 4\.5 s \(daskdl\.timeouts\.silence \+ request\) for "
            rf"room: 1 updates \({waiting} bytes\) could not be passed to all others; "
            rf"last heard: {HEARD}",
            str(caught.value),
        )


AHEAD = {
    "staleness": (
        lambda channel: channel.wait_for_others(9, 0, 2),
        r"staleness; by replica: \{1: 4\}",
    ),
    "updates": (
        lambda channel: channel.wait_for_updates({1: 3}),
        r"updates; by replica: \{1: \[2, 3\]\}",
    ),
}


@pytest.mark.parametrize(("block", "what"), AHEAD.values(), ids=AHEAD)
@EITHER
@two_workers()
async def test_what_others_do_not_do_in_time_is_named_with_their_last_word(
    c, s, a, b, block, what, routing, monkeypatch
):
    timeouts = bounds(silence=2.0, data=1.0)
    async with a_run(c, s, a, b, timeouts=timeouts, routing=routing) as run:
        monkeypatch.setattr(run.record.members, "silent_since", lambda bound: [])
        assert publish(run.channels[1], step=4)
        run.channels[1].complete(4)
        await in_thread(run.channels[0].wait_for_others, 4, 0, 0)

        with pytest.raises(WaitTimeoutError) as caught:
            await in_thread(block, run.channels[0])

        assert re.fullmatch(
            r"replica 0 waited 3 s \(daskdl\.timeouts\.data \+ silence\) for "
            rf"{what}; last heard: the scheduler \d+\.\d s ago; replica 1 at step 4, "
            r"update 1, \d+\.\d s ago",
            str(caught.value),
        )


@EITHER
@two_workers()
async def test_one_that_gets_no_snapshot_names_the_donor_and_why(c, s, a, b, routing):
    timeouts = bounds(join=2.0, request=0.5)  # the founders have to join too
    async with a_run(c, s, a, b, timeouts=timeouts, routing=routing) as run:
        answer = await run.ask("daskdl_seat", run=RUN, worker=b.address, replicas=2)
        run.workers.append(b)
        newcomer = run.open_channel(answer["replicas"][0])

        with pytest.raises(WaitTimeoutError) as caught:  # nobody serves
            await in_thread(newcomer.join)

        assert re.fullmatch(
            r"replica 2 waited 2 s \(daskdl\.timeouts\.join\) for a snapshot, last "
            rf"of replica \d on (?:{a.address}|{b.address}): it (?:did not answer|was "
            r"not ready in time); last heard: the scheduler \d+\.\d s ago.*",
            str(caught.value),
        )


@two_workers()
async def test_who_leaves_with_updates_unsent_says_how_many_and_to_whom(
    c, s, a, b, monkeypatch, caplog
):
    async with a_run(c, s, a, b, timeouts=bounds(stop=0.2)) as run:
        released = held_up(s.handlers, "daskdl_publish", monkeypatch)
        leaver = run.channels[0]
        stamp = leaver.next_stamp(0)

        await in_thread(leaver.publish_last, stamp, frame_of(stamp, 1))

        waiting = len(frame_of(STAMP, 1)) + ITEM_OVERHEAD_BYTES
        assert re.search(
            r"replica 0 leaves after 0\.2 s \(daskdl\.timeouts\.stop\); 1 updates "
            rf"\({waiting} bytes\) could not be passed to the scheduler; last heard: "
            rf"{HEARD}",
            caplog.text,
        )
        released.set()


@EITHER
@two_workers()
async def test_those_that_do_not_leave_a_run_without_a_client_are_named(
    c, s, a, b, routing, caplog
):
    timeouts = bounds(stop=0.2)
    async with a_run(c, s, a, b, timeouts=timeouts, routing=routing) as run:
        await run.plugin._abandon(RUN, run.live)

        assert re.search(
            rf"run 7: after 0\.2 s \(daskdl\.timeouts\.stop\) these have not left: "
            rf"replica 0 on {a.address}, last heard at step 0, update 0, \d\.\d s ago; "
            rf"replica 1 on {b.address}, last heard at",
            caplog.text,
        )


@EITHER
@two_workers()
async def test_signs_of_life_are_as_frequent_as_the_time_out_needs(c, s, a, b, routing):
    silence = 4 * BEAT_S / 2
    async with a_run(
        c, s, a, b, timeouts=bounds(silence=silence), routing=routing
    ) as run:
        before = run.record.members.progress[0].heard_at
        arrived = asyncio.Event()
        heard = "hear" if routing == "mesh" else "publish"
        hear = getattr(run.record, heard)

        def noting(origin, *others):
            if origin == 0:
                arrived.set()
            return hear(origin, *others)

        setattr(run.record, heard, noting)
        await asyncio.wait_for(arrived.wait(), PATIENCE_S)
        arrived.clear()
        await asyncio.wait_for(arrived.wait(), PATIENCE_S)

        assert run.record.members.progress[0].heard_at - before < 2 * BEAT_S


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
