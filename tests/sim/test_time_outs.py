"""What is said when a wait ends with its time: for what, on whom, what was heard."""

import asyncio
import re

import pytest

from daskdl import codec
from daskdl.channel.protocol import MESSAGE_BYTES
from daskdl.errors import WaitTimeoutError
from tests.sim.cluster import simulated
from tests.support.channels import (
    EITHER,
    RUN,
    a_run,
    begin,
    bounds,
    frame_of,
    held_up,
    in_thread,
    publish,
    wait_until,
)

# What a replica heard of the scheduler and of the other one.
HEARD = r"the scheduler \d+\.\d s ago; replica \d at step 0, update 0, \d+\.\d s ago"


def unsent_to(destination):
    """What is said of one update of replica 0 that waits."""
    nbytes = len(frame_of(codec.Stamp(RUN, 0, 1, 0), 1)) + MESSAGE_BYTES
    return (
        rf"1 updates \({nbytes} bytes\) have not reached {destination}; last "
        rf"seen: {HEARD}"
    )


@simulated(2)
async def test_a_request_without_an_answer_is_an_error_that_names_it(
    c, s, a, b, monkeypatch
):
    async with a_run(c, s, a, b, timeouts=bounds(request=0.5)) as run:
        released = held_up(s.handlers, "daskdl_lease", monkeypatch)

        with pytest.raises(WaitTimeoutError) as caught:
            await in_thread(run.channels[0].lease, "train", 0, [])

        assert re.fullmatch(
            r"the scheduler did not answer daskdl_lease of replica 0 within 0\.5 s "
            rf"\(daskdl\.timeouts\.request\); last seen: {HEARD}",
            str(caught.value),
        )
        released.set()


def unanswered(handlers, replica, monkeypatch):
    """Let heartbeats of one replica wait for an event, which is returned."""
    released, handler = asyncio.Event(), handlers["daskdl_publish"]

    async def waiting(**fields):
        if fields["replica"] == replica:
            await released.wait()
        return await handler(**fields)

    monkeypatch.setitem(handlers, "daskdl_publish", waiting)
    return released


@simulated(2)
async def test_a_wait_ends_with_the_error_of_an_unanswered_heartbeat(
    c, s, a, b, monkeypatch
):
    async with a_run(c, s, a, b, timeouts=bounds(request=0.5)) as run:
        released = unanswered(s.handlers, 0, monkeypatch)

        with pytest.raises(WaitTimeoutError) as caught:
            await in_thread(run.channels[0].barrier, "end", None)

        assert re.match(
            r"the scheduler did not answer within 0\.5 s "
            r"\(daskdl\.timeouts\.request\), 2 times; 0 messages",
            str(caught.value),
        )
        released.set()


@simulated(2)
async def test_a_replica_that_waits_for_rows_bears_a_late_scheduler(
    c, s, a, b, monkeypatch
):
    timeouts = bounds(request=0.5, silence=60.0, rejoin=30.0)
    parts = {"train": ("p",)}
    async with a_run(c, s, a, b, timeouts=timeouts, pieces=parts) as run:
        leased = await in_thread(run.channels[0].lease, "train", 0, [])
        waiting = begin(run.channels[1].lease, "train", 0, [], wait=True)
        await run.until(lambda: run.link(1).inbox.waiting is not None)
        released = unanswered(s.handlers, 1, monkeypatch)
        s.process.loop.call_later(5.0, released.set)

        await wait_until(released.is_set)

        assert not waiting.done()
        done = {"lease": leased.number, "examples": 1, "loss": 0.5}
        await in_thread(run.channels[0].lease, "train", 0, [done])
        assert await waiting is None


@simulated(2)
async def test_a_wait_for_room_names_the_unsent_updates(c, s, a, b, monkeypatch):
    options = {"outbox_bytes": 1, "timeouts": bounds(silence=1.0)}
    async with a_run(c, s, a, b, **options) as run:
        monkeypatch.setattr(run.record.members, "timed_out", lambda bound: [])
        released = held_up(s.handlers, "daskdl_publish", monkeypatch)
        assert publish(run.channels[0])

        with pytest.raises(WaitTimeoutError) as caught:
            await in_thread(run.channels[0].has_room, wait=True)

        assert re.fullmatch(
            r"replica 0 waited 11 s \(daskdl\.timeouts\.silence \+ request\) for room: "
            + unsent_to("the scheduler"),
            str(caught.value),
        )
        released.set()


@simulated(2)
async def test_a_wait_for_a_relay_lasts_while_updates_pass(c, s, a, b, monkeypatch):
    handle, loop, last_s = s.handlers["daskdl_publish"], s.process.loop, [0.0]

    async def accept_one(messages, progress, **fields):
        """Accept an update every 0.8 s."""
        due = loop.time() - last_s[0] >= 0.8
        if messages and due:
            last_s[0] = loop.time()
        some = messages[:due]
        return await handle(messages=some, progress=[0, 0, -1], **fields)

    timeouts = bounds(silence=0.5, request=0.5)
    async with a_run(c, s, a, b, timeouts=timeouts) as run:
        monkeypatch.setitem(s.handlers, "daskdl_publish", accept_one)
        began_s = loop.time()
        for _ in range(4):
            assert publish(run.channels[0])

        await in_thread(run.channels[0].has_room, wait=True)  # by 1 s without one

        assert last_s[0] - began_s >= 2.4
        assert run.received(1, 0)[0] >= 3


@simulated(2)
async def test_a_wait_for_acknowledgements_names_the_kept_updates(c, s, a, b):
    timeouts = bounds(silence=4.0, request=0.5)
    async with a_run(c, s, a, b, timeouts=timeouts, routing="mesh") as run:
        run.link(0).routing.own_kept.has_room = lambda: False
        run.link(0).routing.own_kept.acknowledge = lambda sequence: False
        assert await in_thread(publish, run.channels[0], force=True)

        with pytest.raises(WaitTimeoutError) as caught:
            await in_thread(run.channels[0].has_room, wait=True)

        assert re.fullmatch(
            r"replica 0 waited 4\.5 s \(daskdl\.timeouts\.silence \+ request\) for "
            "room: " + unsent_to("all others"),
            str(caught.value),
        )


AHEAD = {
    "staleness": (
        lambda channel: channel.wait_for_peers(9, 0, 2),
        r"other replicas \(staleness\); state by replica: \{1: 4\}",
    ),
    "updates": (
        lambda channel: channel.wait_for_updates({1: 3}),
        r"other replicas \(updates\); state by replica: \{1: \[2, 3\]\}",
    ),
}


@pytest.mark.parametrize(("block", "what"), AHEAD.values(), ids=AHEAD)
@EITHER
@simulated(2)
async def test_a_wait_for_others_names_them_and_their_last_progress(
    c, s, a, b, block, what, routing, monkeypatch
):
    timeouts = bounds(silence=2.0, data=1.0)
    async with a_run(c, s, a, b, timeouts=timeouts, routing=routing) as run:
        monkeypatch.setattr(run.record.members, "timed_out", lambda bound: [])
        assert publish(run.channels[1], step=4)
        run.channels[1].progress(4)
        await in_thread(run.channels[0].wait_for_peers, 4, 0, 0)

        with pytest.raises(WaitTimeoutError) as caught:
            await in_thread(block, run.channels[0])

        assert re.fullmatch(
            r"replica 0 waited 3 s \(daskdl\.timeouts\.data \+ silence\) for "
            rf"{what}; last seen: the scheduler \d+\.\d s ago; replica 1 at step 4, "
            r"update 1, \d+\.\d s ago",
            str(caught.value),
        )


@simulated(2)
async def test_a_missing_snapshot_names_the_donor_and_the_cause(c, s, a, b):
    timeouts = bounds(data=1.0, silence=1.0, request=0.5)
    async with a_run(c, s, a, b, timeouts=timeouts) as run:
        _, newcomer = await run.newcomer(b)

        with pytest.raises(WaitTimeoutError) as caught:  # nobody serves
            await in_thread(newcomer.join)

        assert re.fullmatch(
            r"replica 2 waited 2 s \(daskdl\.timeouts\.data \+ silence\) for a "
            r"snapshot, 0\.5 s \(daskdl\.timeouts\.request\) for each answer, last of "
            rf"replica \d on (?:{a.address}|{b.address}): (?:no answer|it was "
            r"not ready in time); last seen: the scheduler \d+\.\d s ago.*",
            str(caught.value),
        )
