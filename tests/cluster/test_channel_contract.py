"""What every channel promises, over Dask and among threads: updates and barriers.

What every channel promises: how much is trained on between two meetings.

What every channel promises: what replicas offer each other, and rounds.

What every channel promises: waits, leases, replicas that fail or leave.
"""

import asyncio
from typing import NamedTuple

import numpy as np
import pytest

from daskdl import codec
from daskdl.channel import protocol
from daskdl.channel.base import Stopped
from daskdl.channel.inbox import UPDATE_BYTES
from daskdl.channel.leasing import SyncIntervals, SyncPoint
from daskdl.channel.local import LocalChannel
from daskdl.channel.protocol import BarrierKind, PeerProgress
from daskdl.errors import ChannelError
from daskdl.thresholds import Drained
from daskdl.training.replica import failure_of
from tests.support.channels import (
    GRID,
    PATIENCE_S,
    SIZE,
    begin,
    bounds,
    every_channel,
    frame_of,
    in_thread,
    meet,
    next_stamp,
    publish,
    totals,
)
from tests.support.run_states import of_one


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


class Dealing(NamedTuple):
    """Pieces of one row; of two replicas one is lost with two of them."""

    synchronous: bool
    pieces: int
    rows: int  # of each replica in a lap
    first: int  # pieces that the other gets in this lap


DEALINGS = {
    # Two rows of its own, and one of those that were lost.
    "fixed shares": Dealing(synchronous=True, pieces=4, rows=3, first=3),
    # Of four rows for both the lost ones are two.
    "first come": Dealing(synchronous=False, pieces=3, rows=2, first=2),
}


async def take(channel, finished=()):
    """Lease and finish until there is no more: what came, and what came at last."""
    done, pieces = [*finished], []
    while True:
        leased = await in_thread(channel.lease, "train", 0, done, wait=True)
        if leased is None or isinstance(leased, SyncPoint):
            return pieces, leased
        pieces.append(leased)
        done = [{"lease": leased.number, "examples": 1, "loss": 0.0}]


class TestLaps:
    @pytest.mark.parametrize("dealing", DEALINGS.values(), ids=DEALINGS)
    @every_channel()
    async def test_what_is_leased_again_counts_in_its_lap(self, a_run, dealing):
        options = {
            "pieces": {"train": tuple(f"p{i}" for i in range(dealing.pieces))},
            "synchronous": dealing.synchronous,
            "intervals": SyncIntervals(replicas=2, rows=dealing.rows),
        }
        async with a_run(**options) as run:
            for _ in range(2):
                await in_thread(run.channels[1].lease, "train", 0, [])
            await in_thread(run.channels.pop(1).leave)

            first, pause = await take(run.channels[0])

            assert len(first) == dealing.first
            assert isinstance(pause, SyncPoint)
            await in_thread(run.channels[0].barrier, "pause", None, BarrierKind.SYNC)
            rest, nothing = await take(run.channels[0])
            assert nothing is None
            trained = [one.part for piece in first + rest for one in piece.ranges]
            assert sorted(trained) == [*range(dealing.pieces)]


ARRAYS = {
    "long": np.arange(100_000, dtype=np.float64),
    "table": np.array([[1, -2], [3, 2**62]]),
    "empty": np.zeros(0, np.float32),
}
NBYTES = sum(array.nbytes for array in ARRAYS.values())


class TestOffers:
    @every_channel()
    async def test_what_is_offered_can_be_fetched_in_parts(self, a_run, monkeypatch):
        monkeypatch.setattr(protocol, "PART_BYTES", 2**16)
        async with a_run() as run:
            run.channels[0].publish_blob("mean", ARRAYS)

            fetched = await in_thread(run.channels[1].fetch_blob, 0, "mean")

            assert fetched.keys() == ARRAYS.keys()
            for name, array in ARRAYS.items():
                assert fetched[name].dtype == array.dtype
                np.testing.assert_array_equal(fetched[name], array)
            assert run.channels[1].stats().received_bytes == NBYTES

    @every_channel(replicas=3)
    async def test_arrays_in_notes_count_once_as_sent(self, a_run):
        async with a_run() as run:
            meeting = [
                begin(channel.barrier, "meet", {"replica": replica, **ARRAYS})
                for replica, channel in run.channels.items()
            ]

            for gathered in await asyncio.gather(*meeting):
                assert sorted(gathered.payloads) == [0, 1, 2]

            for channel in run.channels.values():
                traffic = channel.stats()
                assert traffic.sent_bytes == NBYTES
                assert traffic.received_bytes == 2 * NBYTES

    @every_channel()
    async def test_who_comes_first_waits_for_it(self, a_run):
        async with a_run() as run:
            fetching = begin(run.channels[1].fetch_blob, 0, "mean")

            run.channels[0].publish_blob("mean", ARRAYS)

            assert (await fetching).keys() == ARRAYS.keys()

    @every_channel(replicas=3)
    async def test_one_that_has_gone_offers_nothing(self, a_run):
        async with a_run() as run:
            fetching = begin(run.channels[0].fetch_blob, 2, "mean")

            await in_thread(run.channels.pop(2).leave)

            assert await fetching is None

    @every_channel()
    async def test_what_is_withdrawn_is_not_there_but_what_is_kept_is(self, a_run):
        async with a_run() as run:
            for name in ("mean", "state"):
                run.channels[0].publish_blob(name, ARRAYS)

            run.channels[0].drop_blobs(keep="state")

            assert await in_thread(run.channels[1].fetch_blob, 0, "state")
            waiting = begin(run.channels[1].fetch_blob, 0, "mean")
            run.channels[0].publish_blob("mean", {})
            assert await waiting == {}

    @every_channel()
    async def test_the_word_to_stop_ends_the_wait(self, a_run):
        async with a_run() as run:
            waiting = begin(run.channels[0].fetch_blob, 1, "mean")

            await run.stop("enough")

            with pytest.raises(Stopped, match="enough"):
                await waiting


def arrive(channel, kind=BarrierKind.ROUND):
    return begin(channel.barrier, "round", {"of": channel._replica}, kind)


class TestRounds:
    @every_channel()
    async def test_nobody_waits_for_one_that_waits_for_a_lease(self, a_run):
        async with a_run(pieces={"train": ("p",)}) as run:
            one, other = run.channels[0], run.channels[1]
            await in_thread(one.lease, "train", 0, [])
            other.set_idle({"of": "what it said"})
            waiting = begin(other.lease, "train", 0, [], wait=True)

            gathered = await arrive(one)

            assert gathered.payloads == {0: {"of": 0}, 1: {"of": "what it said"}}
            finished = [{"lease": 0, "examples": 1, "loss": 0.0}]
            await in_thread(one.lease, "train", 0, finished)
            assert await waiting is None

    @every_channel()
    async def test_it_is_waited_for_once_it_has_its_answer(self, a_run):
        async with a_run() as run:
            one, other = run.channels[0], run.channels[1]
            other.set_idle({"of": "what it said"})
            assert await in_thread(other.lease, "train", 0, [], wait=True) is None

            first = arrive(one)
            second = arrive(other)

            assert (await first).payloads == (await second).payloads
            assert (await first).payloads == {0: {"of": 0}, 1: {"of": 1}}

    @every_channel()
    async def test_some_may_come_to_agree(self, a_run):
        async with a_run() as run:
            first = arrive(run.channels[0])
            second = arrive(run.channels[1], BarrierKind.AGREE)

            assert (await first).payloads == (await second).payloads
            assert not run.record.holding
            both = [arrive(c, BarrierKind.AGREE) for c in run.channels.values()]
            for one in both:
                await one
            assert run.record.holding


class TestStaleness:
    @every_channel()
    async def test_nobody_runs_further_ahead_than_allowed(self, a_run):
        async with a_run() as run:
            fast, slow = run.channels[0], run.channels[1]
            await in_thread(fast.wait_for_peers, 2, 0, 2)
            assert fast.wait_for_peers(3, 0, None) == 3

            waiting = begin(fast.wait_for_peers, 3, 0, 2)
            slow.progress(1)
            await waiting

            assert fast.wait_for_peers(3, 0, None) == 2

    @every_channel()
    async def test_who_is_done_with_the_epoch_holds_nobody_up(self, a_run):
        async with a_run() as run:
            waiting = begin(run.channels[0].wait_for_peers, 9, 0, 2)

            run.channels[1].progress(1, 0)

            await waiting

    @every_channel(replicas=3)
    async def test_who_has_left_holds_nobody_up_in_any_epoch(self, a_run):
        async with a_run() as run:
            await in_thread(run.channels.pop(2).leave)
            gathers = [begin(run.channels[r].barrier, "end", None) for r in (0, 1)]
            for gather in gathers:
                await gather
            for channel in run.channels.values():
                channel.sync(5, GRID)

            run.channels[1].progress(30)

            await in_thread(run.channels[0].wait_for_peers, 30, 1, 8)
            assert run.channels[0].wait_for_peers(30, 1, None) == 0

    @every_channel()
    async def test_all_have_come_as_far_where_they_meet(self, a_run):
        async with a_run() as run:
            assert run.channels[0].wait_for_peers(5, 0, None) == 5

            run.channels[0].sync(5, GRID)

            assert run.channels[0].wait_for_peers(5, 0, None) == 0


BLOCKING = {
    "gather": lambda channel: channel.barrier("end", None),
    "updates": lambda channel: channel.wait_for_updates({1: 5}),
    "staleness": lambda channel: channel.wait_for_peers(9, 0, 2),
    "lease": lambda channel: channel.lease("train", 0, [], wait=True),
}


class TestStopping:
    @pytest.mark.parametrize("block", BLOCKING.values(), ids=BLOCKING)
    @every_channel()
    async def test_the_word_to_stop_ends_every_wait(self, a_run, block):
        async with a_run(pieces={"train": ("p",)}) as run:
            assert of_one(await in_thread(run.channels[1].lease, "train", 0, [])) == (
                0,
                "p",
            )
            waiting = begin(block, run.channels[0])

            await run.stop("enough")

            with pytest.raises(Stopped, match="enough"):
                await waiting
            with pytest.raises(Stopped, match="enough"):
                run.channels[0].check()

    @every_channel()
    async def test_closing_a_run_stops_who_is_still_in_it(self, a_run):
        async with a_run() as run:
            waiting = begin(run.channels[0].barrier, "end", None)
            await run.until(lambda: bool(run.record.barriers))

            await run.shut()

            with pytest.raises(Stopped, match="the run was closed"):
                await waiting

    @every_channel()
    async def test_events_are_waited_for_and_told_once(self, a_run):
        async with a_run() as run:
            waiting = asyncio.ensure_future(run.events())

            await run.stop("enough")

            assert await waiting == [{"kind": "stopped", "summary": "enough"}]
            assert run.record.take_events() == []

    @every_channel()
    async def test_a_replica_that_fails_ends_the_run_for_all(self, a_run):
        async with a_run() as run:
            waiting = begin(run.channels[0].barrier, "end", None)
            failure = failure_of(RuntimeError("boom"), step=3)

            await in_thread(run.channels[1].fail, failure)

            with pytest.raises(Stopped, match="replica 1 failed: RuntimeError: boom"):
                await waiting
            failed, stopped = await run.events()
            where = {"replica": 1, "worker": run.where(1)}
            assert failed == {"kind": "failed", **where, **failure}
            assert stopped["kind"] == "stopped"

    @every_channel()
    async def test_one_that_does_not_join_fails_the_run_and_is_named(self, a_run):
        async with a_run(join=False, timeouts=bounds(join=0.3)) as run:
            with pytest.raises(Stopped, match="not all replicas started within"):
                await in_thread(run.channels[0].join)

            failed, _ = await run.events()
            assert (failed["kind"], failed["type"]) == ("failed", "WaitTimeoutError")
            assert failed["summary"] == (
                "not all replicas started within 0.3 s (daskdl.timeouts.join): replica "
                f"1 on {run.where(1)}, which has not joined; is the worker busy with "
                "other tasks?"
            )


PIECES = {"train": ("p", "q"), "validation": ("v",)}


class TestLeases:
    @every_channel()
    async def test_each_piece_is_leased_once_and_progress_is_told(self, a_run):
        async with a_run(pieces=PIECES) as run:
            leases = [run.channels[0].lease, run.channels[1].lease]
            done = {"lease": 0, "examples": 5, "loss": 0.5}

            assert of_one(await in_thread(leases[1], "train", 0, [])) == (0, "p")
            assert of_one(await in_thread(leases[0], "train", 0, [])) == (1, "q")
            assert await in_thread(leases[1], "train", 0, [done]) is None
            assert of_one(await in_thread(leases[0], "validation", 0, [])) == (0, "v")
            await meet(run, "report", BarrierKind.REPORT)
            assert of_one(await in_thread(leases[0], "train", 1, [])) == (0, "p")

            progress, _ = await run.events()
            assert progress == {"kind": "progress", "epoch": 0, **done}

    @every_channel()
    async def test_who_comes_to_the_end_first_waits_for_the_others(self, a_run):
        async with a_run(pieces=PIECES) as run:
            lease = run.channels[0].lease
            done = [{"lease": i, "examples": 5, "loss": 0.5} for i in (0, 1)]
            assert of_one(await in_thread(lease, "train", 0, [])) == (0, "p")
            assert of_one(await in_thread(run.channels[1].lease, "train", 0, [])) == (
                1,
                "q",
            )
            waiting = begin(lease, "train", 0, done[:1], wait=True)
            await run.until(lambda: len(run.record.events) == 1)
            assert not waiting.done()

            assert await in_thread(run.channels[1].lease, "train", 0, done[1:]) is None

            assert await waiting is None

    @every_channel(replicas=3)
    async def test_what_one_that_leaves_had_is_free_and_ends_nobodys_wait(self, a_run):
        async with a_run(pieces={"train": ("p",)}) as run:
            assert publish(run.channels[2], 3)
            assert of_one(await in_thread(run.channels[2].lease, "train", 0, [])) == (
                0,
                "p",
            )
            await in_thread(run.channels[0].wait_for_updates, {2: 1})
            gather = begin(run.channels[0].barrier, "end", {"from": 0})
            lease = begin(run.channels[1].lease, "train", 0, [], wait=True)

            await in_thread(run.channels.pop(2).leave)

            assert of_one(await lease) == (0, "p")
            await in_thread(run.channels[1].barrier, "end", {"from": 1})
            gathered = await gather
            assert gathered.payloads == {0: {"from": 0}, 1: {"from": 1}}
            assert gathered.gone.keys() == {2}
            await in_thread(run.channels[1].wait_for_updates, {2: 1})
            assert run.record.leases["train"].repeated == 1

    @every_channel()
    async def test_with_too_few_replicas_nobody_gets_a_piece(self, a_run):
        async with a_run(pieces=PIECES, min_replicas=2) as run:
            assert of_one(await in_thread(run.channels[0].lease, "train", 0, [])) == (
                0,
                "p",
            )
            await in_thread(run.channels.pop(1).leave)

            assert await in_thread(run.channels[0].lease, "train", 0, []) is None
