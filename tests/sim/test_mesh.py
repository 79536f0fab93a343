"""What only a mesh has to do: repair, agree without a relay, hold senders back."""

import asyncio
import re

import numpy as np
import pytest

from daskdl.channel.protocol import BarrierKind, Message, MessageKind, unwrap, wrap
from daskdl.errors import WaitTimeoutError
from tests.sim.cluster import simulated
from tests.support.channels import (
    EITHER,
    PATIENCE_S,
    a_run,
    agree,
    all_wait_for,
    applied_by,
    begin,
    bounds,
    flipped,
    held_up,
    in_thread,
    meet,
    publish,
    recorded,
    sent_by,
    totals,
    wait_until,
)

MESH = {"routing": "mesh"}  # with a fan-out of 1 each update goes by two hops
NO_BUFFERS = {**MESH, "inbox_bytes": 1}  # no update of others is kept


@simulated(3)
async def test_no_update_goes_through_the_scheduler(c, s, *workers, monkeypatch):
    async with a_run(c, s, *workers, **MESH) as run:
        requests = recorded(s.handlers, "daskdl_publish", monkeypatch)
        for step in range(3):
            assert publish(run.channels[0], step + 1, step=step)
        run.channels[0].progress(4)

        await all_wait_for(run, {0: 3})
        await wait_until(lambda: run.record.members.replicas[0].progress.step == 4)

        assert requests
        assert not [fields for fields in requests if fields["messages"]]


@simulated(3)
async def test_an_update_that_was_not_forwarded_is_requested(
    c, s, *workers, monkeypatch
):
    async with a_run(c, s, *workers, **NO_BUFFERS) as run:
        released = held_up(workers[2].handlers, "daskdl_deliver", monkeypatch)
        for step in range(3):
            assert publish(run.channels[0], step + 1, step=step)
        await in_thread(run.channels[1].wait_for_updates, {0: 3})
        released.set()

        await in_thread(run.channels[2].wait_for_updates, {0: 3})

        assert run.link(1).routing.forwards_dropped == 2
        assert totals(run.channels[2].drain(), 4) == [1, 1, 1, 0]


@EITHER
@simulated(2)
async def test_an_update_that_was_dropped_on_its_way_is_requested(
    c, s, a, b, routing, monkeypatch
):
    async with a_run(c, s, a, b, routing=routing) as run:
        deliver, dropped = b.handlers["daskdl_deliver"], []

        async def losing(messages, **fields):
            updates = [message for message in messages if message[0] == "update"]
            if updates and not dropped:
                dropped.extend(updates[:1])
                rest = [message for message in messages if message is not updates[0]]
                answer = await deliver(messages=rest, **fields)
                return {**answer, "accepted": answer["accepted"] + 1}
            return await deliver(messages=messages, **fields)

        monkeypatch.setitem(b.handlers, "daskdl_deliver", losing)
        assert publish(run.channels[0], 1)
        assert publish(run.channels[0], 2)

        await in_thread(run.channels[1].wait_for_updates, {0: 2})

        assert len(dropped) == 1
        assert totals(run.channels[1].drain(), 3) == [1, 1, 0]


SLOW = bounds(request=10 * PATIENCE_S)  # no test waits so long for anything else


@EITHER
@simulated(3)
async def test_a_replica_that_hangs_does_not_delay_requests_to_others(
    c, s, *workers, routing, monkeypatch
):
    async with a_run(c, s, *workers, routing=routing, timeouts=SLOW) as run:
        deliver, dropped = workers[2].handlers["daskdl_deliver"], set()

        async def losing(messages, **fields):
            new = {tuple(m[1:3]) for m in messages if m[0] == "update" and m[2] == 1}
            new -= dropped
            dropped.update(new)
            kept = [message for message in messages if tuple(message[1:3]) not in new]
            answer = await deliver(messages=kept, **fields)
            lost = len(messages) - len(kept)
            return {**answer, "accepted": answer["accepted"] + lost}

        monkeypatch.setitem(workers[2].handlers, "daskdl_deliver", losing)
        released = held_up(workers[0].handlers, "daskdl_repair", monkeypatch)
        asked = recorded(workers[0].handlers, "daskdl_repair", monkeypatch)
        for _ in range(2):
            assert publish(run.channels[0])
        await wait_until(lambda: asked)

        for _ in range(2):
            assert publish(run.channels[1])
        await in_thread(run.channels[2].wait_for_updates, {1: 2})

        assert dropped == {(0, 1), (1, 1)}
        assert run.received(2, 0) == (0, (2,))
        released.set()
        await in_thread(run.channels[2].wait_for_updates, {0: 2})
        assert run.channels[2].stats().repaired == 2


@simulated(5)
async def test_a_survivor_that_hangs_does_not_delay_requests_to_others(
    c, s, *workers, monkeypatch
):
    """Updates of two lost replicas are with different survivors."""
    async with a_run(c, s, *workers, **MESH, fan_out=8, timeouts=SLOW) as run:
        for holder, origin in ((0, 3), (1, 4)):
            await run.deliver(holder, *sent_by(run, origin, origin))
        run.lose(3)
        run.lose(4)
        released = held_up(workers[0].handlers, "daskdl_repair", monkeypatch)
        asked = recorded(workers[1].handlers, "daskdl_repair", monkeypatch)

        began_at = s.network.world.now  # virtual
        ends = asyncio.ensure_future(agree(run, replicas=(0, 1, 2)))
        await wait_until(lambda: run.received(2, 4) == (1, ()))
        assert s.network.world.now - began_at < PATIENCE_S
        assert {fields["origin"] for fields in asked} == {4}

        released.set()
        assert [total[2:4] for total in await ends] == [[1, 1]] * 3


@simulated(3)
async def test_an_update_that_all_have_is_forgotten(c, s, *workers):
    async with a_run(c, s, *workers, **MESH) as run:
        assert publish(run.channels[0])
        kept = run.link(0).routing.own_kept
        assert len(kept) == 1

        await wait_until(lambda: len(kept) == 0)

        assert [run.received(replica, 0) for replica in (1, 2)] == [(1, ())] * 2


@simulated(2)
async def test_a_replica_that_acknowledges_nothing_blocks_its_peers(
    c, s, a, b, monkeypatch
):
    async with a_run(c, s, a, b, **MESH, outbox_bytes=500) as run:
        released = held_up(b.handlers, "daskdl_deliver", monkeypatch)
        sender, receiver = run.channels[0], run.channels[1]

        accepted = [publish(sender, step=step) for step in range(20)]

        count = sum(accepted)
        assert accepted == [True] * count + [False] * (20 - count)
        kept = run.link(0).routing.own_kept
        assert 500 <= kept.nbytes < 500 + kept.nbytes // count
        assert not sender.has_room()
        assert sender.published == count
        waiting = begin(sender.has_room, wait=True)
        released.set()
        await waiting
        assert publish(sender, step=20)
        await in_thread(receiver.wait_for_updates, {0: count + 1})
        assert totals(receiver.drain(), 1) == [count + 1]


@simulated(3)
async def test_readable_updates_are_taken_and_forwarded_beside_damaged_ones(
    c, s, *workers, monkeypatch
):
    async with a_run(c, s, *workers, **MESH) as run:
        held = [
            held_up(worker.handlers, "daskdl_repair", monkeypatch) for worker in workers
        ]
        first, second, third = sent_by(run, 0, 1, 2, 3)
        frame = np.frombuffer(unwrap(second[5]), np.uint8)
        damaged = (*second[:5], wrap(flipped(frame)), *second[6:])

        answer = await run.deliver(1, first, damaged, third)

        assert answer["accepted"] == 3
        assert run.received(1, 0) == (1, (3,))
        await wait_until(lambda: run.received(2, 0) == (1, (3,)))
        assert totals(run.channels[1].drain(), 3) == [1, 0, 1]
        for released in held:
            released.set()


# ---- agreement after losses


@simulated(3)
async def test_survivors_get_the_updates_of_a_lost_replica_from_each_other(
    c, s, *workers
):
    async with a_run(c, s, *workers, **MESH) as run:
        assert publish(run.channels[0], 9)
        first, second, third = sent_by(run, 2, 1, 2, 3)
        await run.deliver(0, first)
        await run.deliver(1, second)
        run.lose(2)

        of_first, of_second = await agree(run)

        assert of_first == [1, 1] + [0] * 7
        assert of_second == [1, 1] + [0] * 6 + [1]
        await run.deliver(0, third)  # it was long on its way
        await meet(run, "report", BarrierKind.REPORT)
        await run.deliver(1, third)
        assert [run.received(replica, 2) for replica in (0, 1)] == [(2, ()), (3, ())]
        await agree(run)
        assert [run.received(replica, 2) for replica in (0, 1)] == [(3, ())] * 2


@pytest.mark.parametrize("outdated", [False, True])
@simulated(3)
async def test_a_survivor_that_cannot_get_an_update_takes_a_current_state(
    c, s, *workers, outdated
):
    async with a_run(c, s, *workers, **NO_BUFFERS) as run:
        first, second, third = sent_by(run, 2, 1, 2, 3)
        make, served = applied_by(run.channels[0]), []

        def snapshot():
            served.append(make())
            if outdated and len(served) == 1:
                return {**served[0], "received": {2: (1, ())}}
            return served[-1]

        run.channels[0].serve_snapshot(snapshot)
        run.channels[1].serve_snapshot(applied_by(run.channels[1]))
        await run.deliver(0, first, second)
        await run.deliver(1, third)
        run.lose(2)
        loaded = []

        _, rest = await agree(run, loaded.append)

        (state,) = loaded
        assert len(served) == 1 + outdated
        assert state["total_N"].tolist()[:3] == [1, 1, 0]
        assert state["received"][2] == (2, ())
        assert rest == [0] * 9
        assert [run.received(replica, 2) for replica in (0, 1)] == [(2, ())] * 2


@simulated(3)
async def test_survivors_that_never_come_to_the_same_updates_fail_in_time(
    c, s, *workers
):
    timeouts = bounds(data=0.3, silence=1.0, request=0.2)
    async with a_run(c, s, *workers, **NO_BUFFERS, timeouts=timeouts) as run:
        first, second, third = sent_by(run, 2, 1, 2, 3)
        await run.deliver(0, first, second)
        await run.deliver(1, third)
        run.lose(2)

        with pytest.raises(WaitTimeoutError) as caught:  # no replica serves its state
            await agree(run)

        assert re.match(
            r"replicas \[0, 1\] did not agree on their updates within 1\.3 s "
            r"\(daskdl\.timeouts\.data \+ silence\), \d+ rounds; last seen: ",
            str(caught.value),
        )


@simulated(3)
async def test_a_replica_that_is_lost_while_the_others_agree_is_left_out(
    c, s, *workers
):
    async with a_run(c, s, *workers, **MESH) as run:
        first, second = sent_by(run, 2, 5, 6)
        await run.deliver(0, first)
        ends = asyncio.ensure_future(agree(run))
        payload = {"sequence": 2}
        await in_thread(run.channels[2].barrier, "end", payload, BarrierKind.AGREE)

        run.lose(2)

        of_first, of_second = await ends
        assert of_first == of_second == [0] * 4 + [1] + [0] * 4
        await meet(run, "report", BarrierKind.REPORT)
        await run.deliver(0, second)  # it was long on its way
        await agree(run)
        assert [run.received(replica, 2) for replica in (0, 1)] == [(2, ())] * 2


@simulated(3)
async def test_a_replica_that_leaves_does_not_wait_for_those_that_compare(
    c, s, *workers
):
    async with a_run(c, s, *workers, **MESH) as run:
        leaving = run.channels[2]
        for replica in (0, 1):
            run.link(replica).inbox.hold()

        await in_thread(publish, leaving, 1, force=True)
        await in_thread(leaving.leave)

        assert [run.received(replica, 2) for replica in (0, 1)] == [(0, ())] * 2
        assert run.record.members.gone == {2: 1}
        for replica in (0, 1):
            run.link(replica).inbox.barrier.release()
        await all_wait_for(run, {2: 1})


@simulated(2)
async def test_an_older_membership_changes_nothing(c, s, a, b):
    async with a_run(c, s, a, b, **MESH) as run:
        routing = run.link(0).routing
        before = routing.generation, routing.workers

        routing.on_members(routing.generation - 1, {})

        assert (routing.generation, routing.workers) == before


@simulated(3)
async def test_members_change_one_by_one(c, s, *workers):
    async with a_run(c, s, *workers, **MESH) as run:
        routing = run.link(0).routing
        run.lose(1)
        replica, newcomer = await run.newcomer(workers[1])
        joining = begin(newcomer.join)
        await wait_until(lambda: run.link(0).snapshot_requests)

        expected = {0: workers[0].address, 2: workers[2].address}
        expected |= {replica: workers[1].address}
        for link in (run.link(0), run.link(2), run.link(replica)):
            assert dict(link.routing.workers) == expected
            assert link.routing.generation == run.record.members.generation
        kept = routing.generation, dict(routing.workers)
        for sequence in (kept[0], kept[0] + 2):  # known; not the next
            late = Message.control(MessageKind.MEMBER, 2, sequence=sequence)
            await run.deliver(0, late.to_wire())
        assert (routing.generation, dict(routing.workers)) == kept

        run.channels[0].serve_snapshot(applied_by(run.channels[0]))
        run.channels[0].check()
        await joining
