"""What every channel promises, over Dask and among threads: updates and barriers."""

import asyncio

import numpy as np
import pytest

from daskdl import codec
from daskdl.channel.base import Stopped
from daskdl.channel.inbox import UPDATE_BYTES
from daskdl.channel.local import LocalChannel
from daskdl.channel.protocol import BarrierKind, PeerProgress
from daskdl.errors import ChannelError
from daskdl.thresholds import Drained
from tests.support.channels import (
    GRID,
    PATIENCE_S,
    SIZE,
    begin,
    every_channel,
    frame_of,
    in_thread,
    meet,
    next_stamp,
    publish,
    totals,
)


def recorded(run, replica):
    """Which updates are handed to a replica from now on, in order."""
    inbox, seen = run.channels[replica]._inbox, []
    put = inbox.put

    def noting(item, update):
        seen.append((item.origin, item.sequence))
        return put(item, update)

    inbox.put = noting
    return seen


async def has_left(channel):
    """All that was published has arrived where it goes first."""
    if not isinstance(channel, LocalChannel):
        assert await in_thread(
            channel._inbox.wait_for, channel._routing.sent, PATIENCE_S
        )


class TestJoining:
    @every_channel()
    async def test_it_is_answered_when_all_have_joined(self, a_run):
        async with a_run(join=False) as run:
            first = begin(run.channels[0].join)
            await run.until(lambda: run.record.members.present == [0])
            assert not first.done()

            second = begin(run.channels[1].join)

            assert await first == await second == ([0, 1], None)
            assert [run.channels[r].peers() for r in (0, 1)] == [[1], [0]]

    @every_channel()
    async def test_a_replica_has_one_channel(self, a_run):
        async with a_run() as run:
            with pytest.raises(ChannelError, match="replica 1 of run 7 is here alre"):
                run.open_channel(1)

    @every_channel()
    async def test_nobody_comes_into_a_run_that_is_over(self, a_run):
        async with a_run(join=False) as run:
            await run.stop("enough")

            with pytest.raises(Stopped, match="enough"):
                await in_thread(run.channels[0].join)


class TestUpdates:
    @every_channel(replicas=3)
    async def test_they_reach_all_others_once_and_in_order(self, a_run):
        async with a_run() as run:
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
            assert totals(run.channels[2].drain()) == expected
            assert totals(run.channels[2].drain()) == [0] * SIZE

    @every_channel(kinds=("plain", "local"))
    async def test_one_that_is_sent_again_is_received_once(self, a_run):
        async with a_run() as run:
            channel = run.channels[0]
            for _ in range(3):
                channel._inbox.own = PeerProgress()  # as a retried request would
                assert publish(channel, 1, step=1)
            assert publish(channel, 2, step=2)

            await in_thread(run.channels[1].wait_for_updates, {0: 2})

            assert totals(run.channels[1].drain())[:2] == [1, 1]

    @every_channel()
    async def test_a_part_of_what_a_step_sends_does_not_complete_it(self, a_run):
        async with a_run() as run:
            one, other = run.channels[0], run.channels[1]
            heard = []
            for partial in (True, False):
                assert publish(one, step=1, partial=partial)
                await in_thread(other.wait_for_updates, {0: one.published})
                heard.append(other.wait_for_peers(1, 0, None))

            assert heard == [1, 0]

    @every_channel()
    async def test_what_was_carried_is_counted_where_it_was_carried(self, a_run):
        async with a_run() as run:
            stamp = next_stamp(run.channels[0], 1)
            frame = frame_of(stamp, 1, -5, 7)

            run.channels[0].publish(lambda _: frame, stamp.step)
            await in_thread(run.channels[1].wait_for_updates, {0: 1})

            sent, received = (run.channels[r].stats() for r in (0, 1))
            assert (sent.frames, sent.sent_bytes) == (1, frame.nbytes)
            assert (sent.received_bytes, received.received_bytes) == (0, frame.nbytes)
            assert received.waits_s.keys() == {"join", "updates"}
            nothing = run.channels[1].stats()
            assert (nothing.received_bytes, nothing.waits_s) == (0, {})
            assert run.channels[0].published == 1

    @every_channel(replicas=3)
    async def test_what_has_left_is_counted_until_it_is_asked_for(self, a_run):
        async with a_run() as run:
            channel, expected = run.channels[0], 0
            for step in range(3):
                expected += frame_of(next_stamp(channel, step), 1, -5, 7).nbytes
                assert publish(channel, 1, -5, 7, step=step)
            await has_left(channel)

            drained = channel.link_stats()

            # Along a tree with a fan-out of 1 only one of two others gets them from it.
            assert (drained.nbytes, drained.frames) == (expected, 3)
            remote = not isinstance(channel, LocalChannel)
            assert 1 <= drained.requests <= 3 if remote else drained.requests == 0
            assert drained.copies == (2 if run.spec.routing == "mesh" else 1)
            assert (drained.busy_s > 0) == remote
            assert channel.link_stats() == Drained(copies=drained.copies)

    @every_channel()
    async def test_the_next_frame_takes_time_of_its_own(self, a_run):
        async with a_run() as run:
            channel, taken = run.channels[0], []
            for step in range(2):
                assert publish(channel, step=step)
                await has_left(channel)
                taken.append(channel.link_stats())

            assert [drained.frames for drained in taken] == [1, 1]
            remote = not isinstance(channel, LocalChannel)
            assert [drained.busy_s > 0 for drained in taken] == [remote, remote]

    @every_channel()
    async def test_what_cannot_be_read_is_refused_by_who_gets_it(self, a_run, caplog):
        async with a_run() as run:
            stamp = next_stamp(run.channels[0], 0)
            damaged = frame_of(stamp, 1)
            damaged[-1] ^= 1
            assert run.channels[0].publish(lambda _: damaged, stamp.step)
            assert publish(run.channels[0], 2)

            await in_thread(run.channels[1]._inbox.wait_for, lambda: has(run, 2), 20)

            assert totals(run.channels[1].drain())[:2] == [0, 1]
            # Over a mesh it is asked for again, and is no better then.
            assert run.channels[1].stats().refused >= 1
            assert "replica 1 refused update 1 of replica 0" in caplog.text

    @every_channel()
    async def test_a_full_inbox_folds_and_nothing_is_lost(self, a_run):
        async with a_run(inbox_bytes=UPDATE_BYTES + 10) as run:
            for step in range(5):
                assert publish(run.channels[0], 1, -2, step=step, count=step + 1)
            await in_thread(run.channels[1].wait_for_updates, {0: 5})

            arrived = run.channels[1].drain()

            assert arrived.folded_N is not None
            assert totals(arrived)[:3] == [15, -15, 0]
            assert run.channels[1].stats().folds == 2

    @every_channel()
    async def test_the_last_one_arrives_whatever_happens_next(self, a_run):
        async with a_run() as run:
            leaver = run.channels.pop(1)
            stamp = next_stamp(leaver, 4)
            frame = codec.encode_dense(stamp, GRID, np.arange(SIZE, dtype=np.int32))

            await in_thread(leaver.publish, lambda _: frame, stamp.step, force=True)
            await in_thread(leaver.leave)

            await in_thread(run.channels[0].wait_for_updates, {1: 1})
            (update,) = run.channels[0].drain().updates
            assert update.counts_N.tolist() == list(range(SIZE))


def has(run, sequence):
    """Whether replica 1 has an update of replica 0."""
    complete, beyond = run.channels[1]._inbox.received.by_origin().get(0, (0, ()))
    return sequence <= complete or sequence in beyond


NOTES = [
    {
        "long": np.arange(100_000, dtype=np.float64) * (replica + 1),
        "table": np.array([[1, -2], [3, 2**62 + replica]]),
        "empty": np.zeros(0, np.float32),
        "examples": 10 + replica,
    }
    for replica in range(2)
]


class TestBarriers:
    @every_channel()
    async def test_everybody_reads_all_notes_arrays_included(self, a_run):
        async with a_run() as run:
            answers = await asyncio.gather(
                *(in_thread(run.channels[r].barrier, "end", NOTES[r]) for r in (0, 1))
            )

            for gathered in answers:
                assert gathered.gone == {}
                assert gathered.payloads.keys() == {0, 1}
                for replica, note in gathered.payloads.items():
                    assert note.keys() == NOTES[replica].keys()
                    assert note["examples"] == NOTES[replica]["examples"]
                    for name in ("long", "table", "empty"):
                        assert note[name].dtype == NOTES[replica][name].dtype
                        np.testing.assert_array_equal(note[name], NOTES[replica][name])

    @every_channel()
    async def test_the_client_is_told_once_of_one_that_reports(self, a_run):
        async with a_run() as run:
            await meet(run, "quiet")
            answers = await asyncio.gather(
                *(
                    in_thread(c.barrier, "loud", r, BarrierKind.REPORT, b"rows %d" % r)
                    for r, c in run.channels.items()
                )
            )

            (event,) = await run.events()
            assert (event["kind"], event["key"]) == ("report", "loud")
            assert list(event["client_payloads"]) == [b"rows 0", b"rows 1"]
            assert [dict(answer.payloads) for answer in answers] == [{0: 0, 1: 1}] * 2
            assert [list(note) for note in event["payloads"]] == [
                [0, 0],
                [1, 1],
            ]
            assert run.record.barriers == {}

    @every_channel(kinds=("plain", "local"))
    async def test_what_was_published_before_replicas_agree_is_not_held(self, a_run):
        async with a_run() as run:

            def end(channel):
                # The second one has to wait for the pace of the first.
                assert publish(channel, 1)
                assert publish(channel, 2)
                return channel.barrier("end", None, BarrierKind.AGREE)

            await asyncio.gather(*(in_thread(end, run.channels[r]) for r in (0, 1)))

            for replica in (0, 1):
                others = {1 - replica: 2}
                await in_thread(run.channels[replica].wait_for_updates, others)

    @every_channel(kinds=("plain", "local"))
    async def test_what_is_published_after_it_waits_for_the_next_one(self, a_run):
        async with a_run() as run:
            await meet(run, "end", BarrierKind.AGREE)
            assert publish(run.channels[0], 3, step=1)
            run.channels[0].progress(7)  # what comes later has overtaken nothing
            await in_thread(run.channels[1].wait_for_peers, 7, 0, 0)

            early = run.channels[1].drain()
            await meet(run, "report", BarrierKind.REPORT)
            await in_thread(run.channels[1].wait_for_updates, {0: 1})

            assert early.updates == []
            assert totals(run.channels[1].drain())[:4] == [0, 0, 1, 0]

    @every_channel(replicas=3)
    async def test_after_it_all_have_what_anybody_published_before(self, a_run):
        async with a_run() as run:

            def end(replica, channel):
                for step in range(replica + 1):
                    assert publish(channel, replica + 1, step=step)
                note = {"sequence": channel.published}
                gathered = channel.barrier("end", note, BarrierKind.AGREE)
                published = {r: n["sequence"] for r, n in gathered.payloads.items()}
                channel.agree("end", published, gathered.gone, load=None)
                return totals(channel.drain())[:3]

            ends = [in_thread(end, r, c) for r, c in run.channels.items()]

            assert await asyncio.gather(*ends) == [[0, 2, 3], [1, 0, 3], [1, 2, 0]]
