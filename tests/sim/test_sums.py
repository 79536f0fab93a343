"""A relay that sends the sum of updates: what replicas take in from sums."""

import asyncio
import contextlib

import numpy as np
import pytest

from daskdl import FixedThreshold, GradientSharing, KeepResidual, codec
from daskdl.channel import merging, scheduler
from daskdl.channel.merging import merged
from daskdl.channel.protocol import (
    GoneError,
    Message,
    MessageKind,
    PeerProgress,
    unwrap,
    wrap,
)
from daskdl.channel.worker import AVOIDED_REQUESTS, SUMS_KEPT, KeptSums
from tests.sim.cluster import simulated
from tests.sim.fit import Cluster, Setup
from tests.support.channels import (
    RUN,
    a_run,
    begin,
    bounds,
    flipped,
    frame_of,
    held_up,
    in_thread,
    item_of,
    publish,
    recorded,
    wait_until,
)
from tests.support.run_states import GRID, SIZE

LIMIT_S = 300.0


def checks_of_fit(**options):
    """Let six workers fit without an error; return what was checked how often."""
    cluster = Cluster(3, Setup(workers=6, **options))
    try:
        cluster.fit(LIMIT_S)
    finally:
        cluster.close()
    assert cluster.client.error is None
    return cluster.oracle.checks


@pytest.mark.parametrize("inline_bytes", [0, 2**20], ids=["thread", "inline"])
def test_most_updates_of_a_fit_arrive_in_sums(inline_bytes):
    checks = checks_of_fit(routing="merged", merge_s=0.1, inline_bytes=inline_bytes)

    assert checks["shared is the sum of the updates"] > 0
    assert checks["updates taken in sums"] > checks["updates taken once"] / 2


def sum_of(*frames):
    """The message of a sum, on the wire."""
    updates = [codec.decode(frame) for frame in frames]
    frame = codec.encode_sum(RUN, updates)
    kind = MessageKind.SUM
    return Message.control(kind, nbytes=frame.nbytes, payload=wrap(frame)).to_wire()


def counts(drained):
    """The sum of what was drained, in steps of the grid."""
    total_N = np.zeros(SIZE, np.int64)
    for update in drained.updates:
        if isinstance(update, codec.DenseUpdate):
            assert update.grid == GRID
            total_N += update.counts_N
        else:
            total_N[np.abs(update.entries_K) - 1] += update.quanta_K
    return total_N.tolist()[:3]


def stamps(run, *names):
    return [codec.Stamp(run.spec.run, o, sequence, 1) for o, sequence in names]


@simulated(3)
async def test_a_replica_subtracts_its_own_update_from_a_sum(c, s, *workers):
    async with a_run(c, s, *workers) as run:
        assert publish(run.channels[2], 3, step=1)
        first, second = stamps(run, (0, 1), (1, 1))
        (last,) = stamps(run, (2, 1))
        total = sum_of(frame_of(first, 1), frame_of(second, 2), frame_of(last, 3))

        answers = [(await run.deliver(2, total))["accepted"] for _ in range(2)]

        assert answers == [1, 1]
        assert counts(run.channels[2].drain()) == [1, 1, 0]
        assert run.received(2, 0) == run.received(2, 1) == (1, ())


def dense_frame(stamp, *values):
    counts_N = np.zeros(SIZE, np.int32)
    counts_N[: len(values)] = values
    return codec.encode_dense(stamp, GRID, counts_N)


@simulated(3)
async def test_a_dense_update_is_subtracted_from_a_sum(c, s, *workers):
    async with a_run(c, s, *workers) as run:
        channel = run.channels[2]
        assert channel.publish(lambda stamp: dense_frame(stamp, 5, 6, 7), 1) is not None
        first, second = stamps(run, (0, 1), (1, 1))
        (last,) = stamps(run, (2, 1))
        total = sum_of(
            dense_frame(first, 1), dense_frame(second, 2, 4), dense_frame(last, 5, 6, 7)
        )

        await run.deliver(2, total)

        assert counts(channel.drain()) == [3, 4, 0]


@simulated(2)
async def test_a_sum_completes_no_step_of_which_an_earlier_update_is_missing(
    c, s, a, b
):
    async with a_run(c, s, a, b, merge_s=1000.0) as run:
        earlier, later = stamps(run, (0, 1), (0, 2))

        await run.deliver(1, sum_of(frame_of(later, 1)))
        before = await in_thread(run.channels[1].wait_for_peers, 1, 0, None)
        await run.deliver(1, item_of(earlier, frame_of(earlier, 2)))
        after = await in_thread(run.channels[1].wait_for_peers, 1, 0, None)

        assert [before, after] == [1, 0]


@simulated(3)
async def test_a_sum_of_known_updates_changes_nothing(c, s, *workers):
    async with a_run(c, s, *workers) as run:
        first, second = stamps(run, (0, 1), (1, 1))
        frames = frame_of(first, 1), frame_of(second, 2)
        await run.deliver(2, sum_of(*frames))

        await run.deliver(2, sum_of(*frames[::-1]), sum_of(frames[1]))

        assert counts(run.channels[2].drain()) == [1, 1, 0]


def lost_once(server, monkeypatch, name):
    """Lose an update on its way to a worker."""
    deliver = server.handlers["daskdl_deliver"]

    async def losing(messages, **fields):
        left = [message for message in messages if tuple(message[1:3]) != name]
        answer = await deliver(messages=left, **fields)
        return {**answer, "accepted": len(messages)}

    monkeypatch.setitem(server.handlers, "daskdl_deliver", losing)


@simulated(3)
async def test_new_updates_of_a_sum_that_cannot_be_divided_are_requested(
    c, s, *workers, monkeypatch
):
    """The sum has an update of another replica that this one has already."""
    async with a_run(c, s, *workers) as run:
        lost_once(workers[2], monkeypatch, (1, 1))
        assert publish(run.channels[0], 1, step=1)
        await in_thread(run.channels[2].wait_for_updates, {0: 1})
        first, second = stamps(run, (0, 1), (1, 1))
        total = sum_of(frame_of(first, 1), frame_of(second, 2))
        assert publish(run.channels[1], 2, step=1)

        await run.deliver(2, total)
        await in_thread(run.channels[2].wait_for_updates, {1: 1})

        assert counts(run.channels[2].drain()) == [1, 1, 0]
        assert run.channels[2].stats().repaired == 1


@simulated(2)
async def test_a_damaged_sum_is_counted_and_its_updates_are_requested(c, s, a, b):
    async with a_run(c, s, a, b) as run:
        (first,) = stamps(run, (0, 1))
        message = list(sum_of(frame_of(first, 1)))
        frame = codec.encode_sum(RUN, [codec.decode(frame_of(first, 1))])
        frame[-1] ^= 4
        message[5] = wrap(frame)

        answer = await run.deliver(1, tuple(message))

        assert answer["accepted"] == 1
        assert publish(run.channels[0], 1, step=1)
        await wait_until(lambda: run.received(1, 0) == (1, ()))
        assert counts(run.channels[1].drain()) == [1, 0, 0]
        assert run.channels[1].stats().refused == 1


@simulated(3)
async def test_what_a_replica_waits_for_does_not_wait_in_the_relay(c, s, *workers):
    async with a_run(c, s, *workers, merge_s=1000.0) as run:
        ahead, slow, slowest = run.channels.values()
        ahead.progress(3)
        waiting = begin(ahead.wait_for_peers, 3, 0, 1)
        await wait_until(lambda: run.record.members.replicas[0].needed_step == 2)
        slow.progress(2)
        assert publish(slowest, 1, step=2)

        assert await waiting == 1


def test_nothing_waits_in_vain_for_others_to_be_merged():
    """It would wait for longer than any replica waits."""
    master = GradientSharing(
        FixedThreshold(2.0**-6), KeepResidual(), exchange_every=4, max_staleness=1
    )
    checks = checks_of_fit(
        routing="merged", merge_s=1000.0, master=master, step_s={0: 0.02, 1: 0.2}
    )

    assert checks["updates taken in sums"] > 0


FETCH = "daskdl_fetch_sum"


@contextlib.asynccontextmanager
async def merging_run(c, s, *workers, monkeypatch, **options):
    """A run that passes all sums on from worker to worker, in a chain."""
    monkeypatch.setattr(merging, "TREE_BYTES", 0)
    options = {"merge_s": 1000.0, "sum_fan_out": 1, **options}
    async with a_run(c, s, *workers, **options) as run:
        yield run


async def publish_all(run, step=1):
    for replica, channel in run.channels.items():
        assert publish(channel, 1 + replica, step=step)


async def all_arrive(run, sequence=1):
    last = dict.fromkeys(run.channels, sequence)
    for channel in run.channels.values():
        await in_thread(channel.wait_for_updates, last)


@simulated(3)
async def test_sums_are_passed_on_from_worker_to_worker(c, s, *workers, monkeypatch):
    async with merging_run(c, s, *workers, monkeypatch=monkeypatch) as run:
        fetched = [recorded(w.handlers, FETCH, monkeypatch) for w in workers]
        relayed = recorded(s.handlers, FETCH, monkeypatch)

        await publish_all(run)
        await all_arrive(run)

        assert sorted(map(len, fetched)) == [0, 1, 1]
        assert not relayed
        assert counts(run.channels[0].drain()) == [0, 1, 1]
        assert counts(run.channels[1].drain()) == [1, 0, 1]


@simulated(3)
async def test_a_sum_is_read_once(c, s, *workers, monkeypatch):
    async with merging_run(c, s, *workers, monkeypatch=monkeypatch) as run:
        read, decode_sum = [], codec.decode_sum

        def reading(frame, **options):
            read.append(options)
            return decode_sum(frame, **options)

        monkeypatch.setattr(codec, "decode_sum", reading)

        await publish_all(run)
        await all_arrive(run)

        assert len(read) == len(workers)


async def gone(**fields):
    return {"status": "unknown", "reason": "no such replica here"}


async def silent(**fields):
    await asyncio.sleep(1e3)


def damaging(handler):
    async def answering(**fields):
        answer = await handler(**fields)
        return {**answer, "frame": flipped(unwrap(answer["frame"])).tobytes()}

    return answering


@pytest.mark.parametrize("how", ["gone", "damaged", "silent"])
@simulated(3)
async def test_a_sum_that_a_worker_does_not_pass_on_comes_from_the_scheduler(
    c, s, *workers, how, monkeypatch
):
    async with merging_run(c, s, *workers, monkeypatch=monkeypatch) as run:
        for worker in workers:
            damaged = damaging(worker.handlers[FETCH])
            answering = {"gone": gone, "damaged": damaged, "silent": silent}[how]
            monkeypatch.setitem(worker.handlers, FETCH, answering)
        relayed = recorded(s.handlers, FETCH, monkeypatch)

        await publish_all(run)
        await all_arrive(run)

        assert len(relayed) == 2
        assert counts(run.channels[0].drain()) == [0, 1, 1]
        assert run.channels[0].stats().refused == 0


SHORT = bounds(request=3.0)


@pytest.mark.parametrize("each", [1, 3])
@simulated(2)
async def test_a_sum_that_takes_longer_than_a_request_arrives(
    c, s, a, b, each, monkeypatch
):
    """It comes on over a slow link, however often the scheduler asks meanwhile."""
    options = {"monkeypatch": monkeypatch, "timeouts": SHORT}
    async with merging_run(c, s, *[a, b] * each, **options) as run:
        for worker in (a, b):
            monkeypatch.setitem(worker.handlers, FETCH, gone)
        answering = s.handlers[FETCH]

        async def slow(**fields):
            await asyncio.sleep(3 * SHORT.request)
            return await answering(**fields)

        monkeypatch.setitem(s.handlers, FETCH, slow)
        relayed = recorded(s.handlers, FETCH, monkeypatch)

        await publish_all(run)
        await all_arrive(run)

        assert len(relayed) == 1


@simulated(2)
async def test_a_replica_waits_for_room_while_a_sum_is_on_its_way_to_another(
    c, s, a, b, monkeypatch
):
    timeouts = bounds(request=2.0, silence=2.0)
    options = {"relay_bytes": 800, "outbox_bytes": 1, "timeouts": timeouts}
    async with merging_run(c, s, a, b, monkeypatch=monkeypatch, **options) as run:
        for worker in (a, b):
            monkeypatch.setitem(worker.handlers, FETCH, gone)
        answering = s.handlers[FETCH]

        async def slow(**fields):
            await asyncio.sleep(12.0)
            return await answering(**fields)

        monkeypatch.setitem(s.handlers, FETCH, slow)
        await publish_all(run)
        boxes = run.record.outboxes
        await wait_until(lambda: sorted(map(len, boxes.values())) == [0, 1])
        (fast,) = (replica for replica, box in boxes.items() if not len(box))

        for step in (2, 3):  # there is room for the first
            assert await in_thread(run.channels[fast].has_room, wait=True)
            assert publish(run.channels[fast], step=step)

        assert await in_thread(run.channels[fast].has_room, wait=True)


@simulated(2)
async def test_a_replica_waits_for_room_as_long_as_the_queues_of_a_relay_move(
    c, s, a, b, monkeypatch
):
    timeouts = bounds(request=2.0, silence=2.0)
    options = {"relay_bytes": 1, "outbox_bytes": 1, "timeouts": timeouts}
    async with a_run(c, s, a, b, **options) as run:
        deliver = b.handlers["daskdl_deliver"]

        async def slow(messages, **fields):
            answer = await deliver(messages=messages[:1], **fields)
            await asyncio.sleep(1.5 * bool(messages))
            return answer

        monkeypatch.setitem(b.handlers, "daskdl_deliver", slow)
        box = run.record.outboxes[1]
        for step in range(1, 7):
            box.append(Message.control("progress", 0, step=step, payload=-1))

        assert publish(run.channels[0])

        assert await in_thread(run.channels[0].has_room, wait=True)


@simulated(2)
async def test_a_worker_that_does_not_answer_is_not_asked_for_sums_for_a_while(
    c, s, a, b, monkeypatch
):
    options = {"monkeypatch": monkeypatch, "timeouts": SHORT}
    async with merging_run(c, s, a, b, **options) as run:
        answering = a.handlers[FETCH]
        monkeypatch.setitem(a.handlers, FETCH, silent)
        asked = recorded(a.handlers, FETCH, monkeypatch)
        for step in range(1, 7):  # every other sum is to be fetched from this worker
            await publish_all(run, step)
            await all_arrive(run, step)
        in_vain = len(asked)
        monkeypatch.setitem(a.handlers, FETCH, answering)
        asked = recorded(a.handlers, FETCH, monkeypatch)

        await asyncio.sleep(AVOIDED_REQUESTS * SHORT.request)  # virtual
        for step in (7, 8):
            await publish_all(run, step)
            await all_arrive(run, step)

        assert (in_vain, len(asked)) == (1, 1)


@simulated(3)
async def test_a_worker_that_waits_for_a_sum_itself_is_asked_for_the_next(
    c, s, *workers, monkeypatch
):
    """In a chain of workers, only the earliest one does not answer."""
    async with merging_run(c, s, *workers, monkeypatch=monkeypatch) as run:
        total, places = Message.control(MessageKind.SUM, sequence=1), "abc"
        sent = merging.along_tree(total, {"a": 0, "b": 1, "c": 2}, fan_out=1)
        (place,) = (p for p in places if sent[p].kind == MessageKind.SUM)
        earliest = places.index(place)
        handlers = workers[earliest].handlers
        answering = handlers[FETCH]
        monkeypatch.setitem(handlers, FETCH, silent)
        await publish_all(run)
        await all_arrive(run)
        monkeypatch.setitem(handlers, FETCH, answering)
        asked = [recorded(w.handlers, FETCH, monkeypatch) for w in workers]

        await publish_all(run, 2)
        await all_arrive(run, 2)

        assert sorted(map(len, asked)) == [0, 1, 1]


def refusing_once(server, monkeypatch):
    """Let a server refuse the next request for a sum."""
    handler, refused = server.handlers[FETCH], []

    async def answering(**fields):
        if refused:
            return await handler(**fields)
        refused.append(fields)
        return {"status": "refused", "reason": "not now"}

    monkeypatch.setitem(server.handlers, FETCH, answering)


@simulated(2)
async def test_a_sum_that_nobody_can_provide_is_announced_again(
    c, s, a, b, monkeypatch
):
    async with merging_run(c, s, a, b, monkeypatch=monkeypatch) as run:
        for server in (a, b, s):
            refusing_once(server, monkeypatch)

        await publish_all(run)
        await all_arrive(run)

        assert counts(run.channels[0].drain()) == [0, 1, 0]


@simulated(2)
async def test_what_follows_a_sum_is_delivered_after_it(c, s, a, b, monkeypatch):
    async with a_run(c, s, a, b) as run:
        released = held_up(a.handlers, FETCH, monkeypatch)
        fetched = recorded(a.handlers, FETCH, monkeypatch)
        first, second = stamps(run, (0, 1), (0, 2))
        frame = unwrap(sum_of(frame_of(first, 1))[5])
        await run.link(0).sums.keep(5, frame)
        note = Message.control(MessageKind.SUM_AT, sequence=5, nbytes=frame.nbytes)

        following = item_of(second, frame_of(second, 2))
        delivering = asyncio.ensure_future(run.deliver(1, note.to_wire(), following))
        await wait_until(lambda: fetched)
        before = run.received(1, 0)
        released.set()

        assert (await delivering)["accepted"] == 2
        assert (before, run.received(1, 0)) == ((0, ()), (2, ()))


@simulated(2)
async def test_the_replicas_of_a_worker_fetch_a_sum_once(c, s, a, b, monkeypatch):
    async with merging_run(c, s, a, b, b, b, monkeypatch=monkeypatch) as run:
        fetched = [recorded(w.handlers, FETCH, monkeypatch) for w in (a, b)]

        for step in (1, 2):  # workers take turns
            await publish_all(run, step)
            await all_arrive(run, step)

        assert sorted(map(len, fetched)) == [1, 1]
        for channel in run.channels.values():
            assert sum(counts(channel.drain())) > 0


def test_a_worker_keeps_the_latest_sums_within_a_bound():
    kept = KeptSums(limit_bytes=10, request_s=1.0)

    async def keep_some():
        for number in range(1, SUMS_KEPT + 2):
            await kept.keep(number, bytes(2))
        before = [kept.find(number) for number in (1, 2)]
        await kept.keep(9, bytes(20))
        assert await kept.wait_for(9, 0.01) == bytes(20)
        with pytest.raises(GoneError):
            await kept.wait_for(3, 0.01)
        with pytest.raises(TimeoutError):
            await kept.wait_for(10, 0.01)
        return before

    assert asyncio.run(keep_some()) == [None, bytes(2)]
    assert kept.nbytes == 20


def kinds(requests):
    return [message[0] for request in requests for message in request["messages"]]


@simulated(3)
async def test_what_is_sent_while_it_is_merged_is_not_sent_again(
    c, s, *workers, monkeypatch
):
    """A replica that is lost, for example, lets all be sent at once."""
    async with a_run(c, s, *workers, merge_s=0.5) as run:
        requests = recorded(workers[2].handlers, "daskdl_deliver", monkeypatch)

        def interrupted(updates, *options):
            run.record.send_waiting()
            run.record.publish(2, [], PeerProgress(1))  # begins to wait meanwhile
            return merged(updates, *options)

        monkeypatch.setattr(scheduler, "merged", interrupted)
        for replica in (0, 1):
            assert publish(run.channels[replica], 1 + replica, step=1)
        await in_thread(run.channels[2].wait_for_updates, {0: 1, 1: 1})
        monkeypatch.setattr(scheduler, "merged", merged)
        for replica in (0, 1):
            assert publish(run.channels[replica], 1 + replica, step=2)
        await in_thread(run.channels[2].wait_for_updates, {0: 2, 1: 2})

        assert counts(run.channels[2].drain()) == [2, 2, 0]
        sent = [kind for kind in kinds(requests) if kind in ("update", "sum")]
        assert sent == ["update", "update", "sum"]


@simulated(6)
async def test_updates_for_which_there_is_no_room_together_are_sent_as_one_sum(
    c, s, *workers, monkeypatch
):
    async with a_run(c, s, *workers, merge_s=1000.0, relay_bytes=1500) as run:
        requests = recorded(workers[0].handlers, "daskdl_deliver", monkeypatch)
        members = run.record.members.replicas
        for replica, channel in run.channels.items():
            assert publish(channel, 1 + replica, step=1)
            await wait_until(lambda r=replica: members[r].progress.sequence == 1)
        await all_arrive(run)

        sent = [kind for kind in kinds(requests) if kind in ("update", "sum")]
        assert sent == ["sum"]
        assert counts(run.channels[0].drain()) == [0, 1, 1]
