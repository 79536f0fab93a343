import asyncio
import dataclasses
import threading

import numpy as np
import pytest
from distributed import Client

from daskdl import codec
from daskdl.channel import scheduler as scheduler_end
from daskdl.channel.base import Stopped
from daskdl.channel.messages import Barrier
from daskdl.channel.scheduler import ChannelSchedulerPlugin
from daskdl.channel.worker import ChannelWorkerPlugin
from daskdl.errors import ChannelError
from daskdl.version import VERSION
from tests.cluster.channels import (
    EITHER,
    PATIENCE_S,
    RUN,
    SIZE,
    a_run,
    begin,
    frame_of,
    in_thread,
    publish,
    register,
    three_workers,
    totals,
    two_workers,
)


def recorded(run, replica):
    """Which updates are handed to a replica from now on, in order."""
    link, seen = run.link(replica), []
    deliver = link.deliver

    async def noting(item):
        if item.kind == "update":
            seen.append((item.origin, item.sequence))
        return await deliver(item)

    link.deliver = noting
    return seen


@two_workers()
async def test_registering_again_changes_nothing(c, s, a, b):
    async with a_run(c, s, a, b) as run:
        before = run.plugin

        await register(c)

        assert run.plugin is before
        assert list(run.plugin.runs) == [RUN]
        names = [name for name in s.plugins if name == scheduler_end.NAME]
        assert len(names) == 1
        assert publish(run.channels[0])
        await in_thread(run.channels[1].wait_for_updates, {0: 1})


@EITHER
@two_workers()
async def test_a_second_instance_on_either_end_takes_over_what_is_there(
    c, s, a, b, routing
):
    async with a_run(c, s, a, b, routing=routing) as run:
        second = ChannelSchedulerPlugin()
        await second.start(s)
        ChannelWorkerPlugin().setup(b)

        assert second.runs is run.plugin.runs
        assert s.extensions[scheduler_end.NAME] is run.plugin
        assert publish(run.channels[0])
        await in_thread(run.channels[1].wait_for_updates, {0: 1})


@EITHER
@two_workers()
async def test_joining_is_answered_when_all_have_joined(c, s, a, b, routing):
    async with a_run(c, s, a, b, join=False, routing=routing) as run:
        first = begin(run.channels[0].join)
        await run.live.until(lambda: run.record.members.present == [0], PATIENCE_S)
        assert not first.done()

        second = begin(run.channels[1].join)

        assert await first == await second == ([0, 1], None)


@EITHER
@two_workers()
async def test_joining_again_changes_nothing(c, s, a, b, routing):
    async with a_run(c, s, a, b, routing=routing) as run:
        generation, outboxes = run.record.members.generation, dict(run.record.outboxes)

        answer = await run.ask("daskdl_join", run=RUN, replica=1, version=VERSION)

        members = [[0, 0], [1, 0]]
        assert (answer["status"], list(map(list, answer["members"]))) == ("ok", members)
        assert run.record.members.generation == generation
        assert all(run.record.outboxes[r] is box for r, box in outboxes.items())


@EITHER
@three_workers()
async def test_updates_reach_all_others_once_and_in_order(c, s, *workers, routing):
    async with a_run(c, s, *workers, routing=routing, fan_out=1) as run:
        seen = [recorded(run, replica) for replica in range(3)]
        for step in range(4):
            assert publish(run.channels[0], step + 1, step=step, count=3)
        assert publish(run.channels[1], -9, step=2)

        await in_thread(run.channels[1].wait_for_updates, {0: 4, 1: 1})
        await in_thread(run.channels[2].wait_for_updates, {0: 4, 1: 1})
        await in_thread(run.channels[0].wait_for_updates, {1: 1})

        from_first = [(0, 1), (0, 2), (0, 3), (0, 4)]
        assert seen[0] == [(1, 1)]
        assert seen[1] == from_first
        assert [update for update in seen[2] if update[0] == 0] == from_first
        assert seen[2].count((1, 1)) == 1
        expected = [3] * 4 + [0] * 4 + [-1] + [0] * (SIZE - 9)
        assert totals(run.channels[2].receive()) == expected
        assert totals(run.channels[2].receive()) == [0] * SIZE


@EITHER
@two_workers()
async def test_a_frame_too_large_for_the_event_loop_arrives_whole(
    c, s, a, b, monkeypatch, routing
):
    size = 2**19  # 2 MiB of counts, which do not compress
    counts_N = np.random.default_rng(0).integers(-(2**30), 2**30, size, np.int32)
    async with a_run(c, s, a, b, size=size, inbox_bytes=2**23, routing=routing) as run:
        stamp = run.channels[0].next_stamp(step=3)
        frame = codec.encode_dense(stamp, run.endpoint.grid, counts_N)
        assert frame.nbytes > 2**20

        decode, threads = run.link(1)._reader.read_now, []
        monkeypatch.setattr(
            run.link(1)._reader,
            "read_now",
            lambda *frame: threads.append(threading.get_ident()) or decode(*frame),
        )
        assert run.channels[0].publish(stamp, frame)
        await in_thread(run.channels[1].wait_for_updates, {0: 1})

        assert threads != [threading.get_ident()]
        (update,) = run.channels[1].receive().updates
        assert update.stamp == stamp
        np.testing.assert_array_equal(update.counts_N, counts_N)


@EITHER
@two_workers()
async def test_what_was_carried_is_counted_where_it_was_carried(c, s, a, b, routing):
    async with a_run(c, s, a, b, routing=routing) as run:
        stamp = run.channels[0].next_stamp(step=1)
        frame = frame_of(stamp, 1, -5, 7)

        run.channels[0].publish(stamp, frame)
        await in_thread(run.channels[1].wait_for_updates, {0: 1})

        sent, received = (run.channels[r].traffic() for r in (0, 1))
        assert (sent.frames, sent.sent_bytes) == (1, frame.nbytes)
        assert (sent.received_bytes, received.received_bytes) == (0, frame.nbytes)
        assert received.waits_s.keys() == {"join", "updates"}
        nothing = run.channels[1].traffic()
        assert (nothing.received_bytes, nothing.waits_s) == (0, {})
        assert run.channels[0].published() == 1


@EITHER
@two_workers()
async def test_two_runs_at_once_do_not_mix(c, s, a, b, routing):
    async with (
        a_run(c, s, a, b, routing=routing) as one,
        a_run(c, s, a, b, run=8, routing=routing) as other,
    ):
        assert publish(one.channels[0], 1)
        assert publish(other.channels[0], -2)

        await in_thread(one.channels[1].wait_for_updates, {0: 1})
        await in_thread(other.channels[1].wait_for_updates, {0: 1})

        assert totals(one.channels[1].receive())[:2] == [1, 0]
        assert totals(other.channels[1].receive())[:2] == [0, -1]
        await other.ask("daskdl_stop", run=8, reason="enough")
        with pytest.raises(Stopped, match="enough"):
            await in_thread(other.channels[1].gather, "never", None)
        assert one.record.stopped is None
        one.channels[1].check()


NOTES = [
    {
        "long": np.arange(100_000, dtype=np.float64) * (replica + 1),
        "table": np.array([[1, -2], [3, 2**62 + replica]]),
        "empty": np.zeros(0, np.float32),
        "examples": 10 + replica,
    }
    for replica in range(2)
]


@EITHER
@two_workers()
async def test_everybody_reads_all_notes_of_a_barrier_arrays_included(
    c, s, a, b, routing
):
    async with a_run(c, s, a, b, routing=routing) as run:
        answers = await asyncio.gather(
            *(in_thread(run.channels[r].gather, "end", NOTES[r]) for r in (0, 1))
        )

        for gathered in answers:
            assert gathered.gone == {}
            assert gathered.notes.keys() == {0, 1}
            for replica, note in gathered.notes.items():
                assert note.keys() == NOTES[replica].keys()
                assert note["examples"] == NOTES[replica]["examples"]
                for name in ("long", "table", "empty"):
                    assert note[name].dtype == NOTES[replica][name].dtype
                    np.testing.assert_array_equal(note[name], NOTES[replica][name])


@EITHER
@two_workers()
async def test_the_client_is_told_once_of_a_barrier_that_reports(c, s, a, b, routing):
    async with a_run(c, s, a, b, routing=routing) as run:
        for key, kind in [("quiet", Barrier.MEET), ("loud", Barrier.REPORT)]:
            await asyncio.gather(
                *(
                    in_thread(channel.gather, key, {"from": r}, kind)
                    for r, channel in run.channels.items()
                )
            )

        (event,) = await run.events()
        assert (event["kind"], event["key"]) == ("gathered", "loud")
        assert [list(note) for note in event["notes"]] == [
            [0, {"from": 0}],
            [1, {"from": 1}],
        ]
        assert run.record._gatherings == {}


@two_workers()
async def test_what_was_published_before_replicas_agree_is_not_held(c, s, a, b):
    async with a_run(c, s, a, b) as run:

        def end(channel):
            # The second one has to wait for the pace of the first.
            assert publish(channel, 1)
            assert publish(channel, 2)
            return channel.gather("end", None, Barrier.AGREE)

        await asyncio.gather(*(in_thread(end, run.channels[r]) for r in (0, 1)))

        for replica in (0, 1):
            others = {1 - replica: 2}
            await in_thread(run.channels[replica].wait_for_updates, others)


@EITHER
@two_workers()
async def test_pieces_are_leased_near_first_and_progress_is_told(c, s, a, b, routing):
    near_a = await c.scatter({"a-0": 0}, workers=[a.address])
    near_b = await c.scatter({"b-0": 1}, workers=[b.address])
    keys = {"train": (*near_a, *near_b, "nowhere"), "validation": ("v",)}
    async with a_run(c, s, a, b, pieces=keys, routing=routing) as run:
        leases = [run.channels[0].lease, run.channels[1].lease]
        done = {"piece": 1, "examples": 5, "loss": 0.5}

        assert await in_thread(leases[1], "train", 0, []) == (1, "b-0")
        assert await in_thread(leases[0], "train", 0, []) == (0, "a-0")
        assert await in_thread(leases[1], "train", 0, [done]) == (2, "nowhere")
        assert await in_thread(leases[1], "train", 0, []) is None
        assert await in_thread(leases[0], "validation", 0, []) == (0, "v")

        assert await run.events() == [{"kind": "progress", "epoch": 0, **done}]


@EITHER
@two_workers()
async def test_a_replica_is_on_its_worker_once(c, s, a, b, routing):
    async with a_run(c, s, a, b, routing=routing) as run:
        endpoint = dataclasses.replace(run.endpoint, replica=1)

        with pytest.raises(ChannelError, match="replica 1 of run 7 is here already"):
            run.worker_plugin(1).open(endpoint)


@EITHER
@two_workers()
async def test_the_run_of_a_client_that_goes_is_stopped_and_closed(c, s, a, b, routing):
    await register(c)
    async with (
        Client(s.address, asynchronous=True) as second,
        a_run(c, s, a, b, routing=routing) as mine,
        a_run(second, s, a, b, run=8, routing=routing) as its,
    ):
        waiting = [begin(r.gather, "never", None) for r in its.channels.values()]
        its.client = c  # the one that asks from now on

        await second.close()

        for wait in waiting:
            with pytest.raises(Stopped, match="its client is gone"):
                await wait
        for channel in its.channels.values():
            await in_thread(channel.leave)
        its.channels.clear()
        ending = list(its.plugin._abandoning)
        await asyncio.wait_for(asyncio.gather(*ending), PATIENCE_S)
        assert list(its.plugin.runs) == [RUN]
        assert mine.record.stopped is None
