"""What only a mesh has to do: repair, agree without a relay, hold senders back."""

import asyncio
import re

import pytest

from daskdl.channel.protocol import BarrierKind, Message
from daskdl.errors import WaitTimeoutError
from tests.support.channels import (
    EITHER,
    SIZE,
    a_run,
    applied_by,
    begin,
    bounds,
    frame_of,
    held_up,
    in_thread,
    item_of,
    meet,
    next_stamp,
    publish,
    three_workers,
    totals,
    two_workers,
    wait_until,
)

CHAIN = {"routing": "mesh", "fan_out": 1}  # each update goes by two hops


def sent_by(run, replica, *entries):
    """An update as the replica would send it, without its being sent."""
    channel = run.channels[replica]
    stamp = next_stamp(channel, 0)
    item = item_of(stamp, frame_of(stamp, *entries))
    channel._inbox.own = channel._inbox.own._replace(sequence=stamp.sequence)
    return item


async def agree(run, replicas, key="end", load=lambda snapshot: None):
    """Let these replicas meet and come to the same updates; what each had to apply."""

    def end(channel):
        note = {"sequence": channel.published}
        gathered = channel.barrier(key, note, BarrierKind.AGREE)
        published = {r: said["sequence"] for r, said in gathered.payloads.items()}
        channel.agree(key, published, gathered.gone, load)
        return totals(channel.drain())

    ends = [in_thread(end, run.channels[r]) for r in replicas]
    return await asyncio.gather(*ends)


@three_workers()
async def test_no_update_goes_through_the_scheduler(c, s, *workers, monkeypatch):
    async with a_run(c, s, *workers, **CHAIN) as run:
        carried = []
        for operation, handler in list(s.handlers.items()):
            if operation.startswith("daskdl_"):

                async def noted(*arguments, handler=handler, **fields):
                    items = [Message(*item) for item in fields.get("messages", ())]
                    carried.extend(item.payload for item in items)
                    return await handler(*arguments, **fields)

                monkeypatch.setitem(s.handlers, operation, noted)
        for step in range(3):
            assert publish(run.channels[0], step + 1, step=step)

        await in_thread(run.channels[1].wait_for_updates, {0: 3})
        await in_thread(run.channels[2].wait_for_updates, {0: 3})

        assert [payload for payload in carried if payload is not None] == []


@three_workers()
async def test_what_is_not_passed_on_is_asked_for(c, s, *workers):
    async with a_run(c, s, *workers, **CHAIN) as run:
        middle = run.link(1).routing
        middle._may_forward = lambda message: False
        for step in range(3):
            assert publish(run.channels[0], step + 1, step=step)

        await in_thread(run.channels[2].wait_for_updates, {0: 3})

        assert middle.forwards_dropped == 3
        assert totals(run.channels[2].drain())[:4] == [1, 1, 1, 0]


@EITHER
@two_workers()
async def test_an_update_that_was_dropped_on_its_way_is_asked_for(c, s, a, b, routing):
    async with a_run(c, s, a, b, routing=routing) as run:
        link = run.link(1)
        deliver, dropped = link.deliver, []

        async def losing(item):
            if item.kind == "update" and not dropped:
                dropped.append(item)
                return True
            return await deliver(item)

        link.deliver = losing
        assert publish(run.channels[0], 1)
        assert publish(run.channels[0], 2)

        await in_thread(run.channels[1].wait_for_updates, {0: 2})

        assert len(dropped) == 1
        assert totals(run.channels[1].drain())[:3] == [1, 1, 0]


@three_workers()
async def test_what_all_have_is_forgotten(c, s, *workers):
    async with a_run(c, s, *workers, **CHAIN) as run:
        assert publish(run.channels[0])
        own = run.link(0).routing.own
        assert len(own) == 1

        await wait_until(lambda: len(own) == 0)

        assert run.link(1).inbox.received.by_origin() == {0: (1, ())}
        assert run.link(2).inbox.received.by_origin() == {0: (1, ())}


@two_workers()
async def test_who_takes_nothing_leaves_the_others_updates_with_them(
    c, s, a, b, monkeypatch
):
    async with a_run(c, s, a, b, routing="mesh", outbox_bytes=500) as run:
        released = held_up(b.handlers, "daskdl_deliver", monkeypatch)
        sender, receiver = run.channels[0], run.channels[1]

        accepted = [publish(sender, step=step) for step in range(20)]

        count = sum(accepted)
        assert accepted == [True] * count + [False] * (20 - count)
        own = run.link(0).routing.own
        weight = own.nbytes // count
        assert 500 <= own.nbytes < 500 + weight
        assert not sender.has_room()
        assert sender.published == count
        waiting = begin(sender.has_room, wait=True)
        released.set()
        await waiting
        assert publish(sender, step=20)
        await in_thread(receiver.wait_for_updates, {0: count + 1})
        assert totals(receiver.drain())[0] == count + 1


@three_workers()
async def test_what_one_survivor_has_of_a_lost_one_all_get(c, s, *workers):
    async with a_run(c, s, *workers, **CHAIN) as run:
        assert publish(run.channels[0], 9)
        first, second, third = (sent_by(run, 2, entry) for entry in (1, 2, 3))
        await run.deliver(0, first)
        await run.deliver(1, second)
        run.vanish(2)
        run.live.lose(2, "in the middle of sending")

        one, other = await agree(run, [0, 1])

        assert one == [1, 1] + [0] * (SIZE - 2)
        assert other == [1, 1] + [0] * 6 + [1] + [0] * (SIZE - 9)
        await run.deliver(0, third)  # it was long on its way
        await meet(run, "report", BarrierKind.REPORT)
        await run.deliver(1, third)
        assert run.link(0).inbox.received.by_origin()[2] == (2, ())
        assert run.link(1).inbox.received.by_origin()[2] == (2, ())


@three_workers()
async def test_who_cannot_get_an_update_any_more_takes_a_state(c, s, *workers):
    async with a_run(c, s, *workers, **CHAIN, inbox_bytes=1) as run:  # no rings
        first, second, third = (sent_by(run, 2, entry) for entry in (1, 2, 3))
        await run.deliver(0, first, second)
        await run.deliver(1, third)
        for replica in (0, 1):
            run.channels[replica].serve_snapshot(applied_by(run.channels[replica]))
        run.vanish(2)
        run.live.lose(2, "in the middle of sending")
        loaded = []

        _, rest = await agree(run, [0, 1], load=loaded.append)

        (state,) = loaded
        assert state["total_N"].tolist() == [1, 1] + [0] * (SIZE - 2)
        assert rest == [0] * SIZE
        assert run.link(0).inbox.received.by_origin()[2] == (2, ())
        assert run.link(1).inbox.received.by_origin()[2] == (2, ())


@three_workers()
async def test_a_state_that_is_older_than_what_was_told_is_not_taken(c, s, *workers):
    async with a_run(c, s, *workers, **CHAIN, inbox_bytes=1) as run:  # no rings
        first, second, third = (sent_by(run, 2, entry) for entry in (1, 2, 3))
        make, offered = applied_by(run.channels[0]), []

        def outdated_once():
            state = make()
            if not offered:
                offered.append(state)
                state = {**state, "received": [[2, 1, []]]}
            return state

        run.channels[0].serve_snapshot(outdated_once)
        run.channels[1].serve_snapshot(applied_by(run.channels[1]))
        await run.deliver(0, first, second)
        await run.deliver(1, third)
        run.vanish(2)
        run.live.lose(2, "in the middle of sending")
        loaded = []

        await agree(run, [0, 1], load=loaded.append)

        assert offered
        (state,) = loaded
        assert state["total_N"].tolist() == offered[0]["total_N"].tolist()
        assert (2, 2, ()) in state["received"]
        for replica in (0, 1):
            assert run.link(replica).inbox.received.by_origin()[2] == (2, ())


@three_workers()
async def test_those_that_never_come_to_the_same_updates_say_so_in_time(c, s, *workers):
    timeouts = bounds(data=0.3, silence=1.0, request=0.2)
    options = {"inbox_bytes": 1, "timeouts": timeouts}  # nothing is kept to send again
    async with a_run(c, s, *workers, **CHAIN, **options) as run:
        first, second, third = (sent_by(run, 2, entry) for entry in (1, 2, 3))
        await run.deliver(0, first, second)
        await run.deliver(1, third)
        run.vanish(2)
        run.live.lose(2, "in the middle of sending")

        with pytest.raises(WaitTimeoutError) as caught:  # and nobody serves its state
            await agree(run, [0, 1])

        assert re.match(
            r"replicas \[0, 1\] did not come to the same updates within 1\.3 s "
            r"\(daskdl\.timeouts\.data \+ silence\), \d+ rounds; last seen: ",
            str(caught.value),
        )


@three_workers()
async def test_one_that_is_lost_while_the_others_agree_is_left_out(c, s, *workers):
    async with a_run(c, s, *workers, **CHAIN) as run:
        first, second = (sent_by(run, 2, entry) for entry in (5, 6))
        await run.deliver(0, first)
        note = {"sequence": 2}
        ends = asyncio.ensure_future(agree(run, [0, 1]))
        await in_thread(run.channels[2].barrier, "end", note, BarrierKind.AGREE)

        run.vanish(2)
        run.live.lose(2, "in the middle of the barrier")

        one, other = await ends
        assert one == other == [0] * 4 + [1] + [0] * (SIZE - 5)
        await meet(run, "report", BarrierKind.REPORT)
        await run.deliver(0, second)  # it was long on its way
        assert run.link(0).inbox.received.by_origin()[2] == (1, ())


@two_workers()
async def test_an_older_membership_changes_nothing(c, s, a, b):
    async with a_run(c, s, a, b, **CHAIN) as run:
        routing = run.link(0).routing
        before = routing.generation, routing.workers

        routing.on_members(routing.generation - 1, {})

        assert (routing.generation, routing.workers) == before
