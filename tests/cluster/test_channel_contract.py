"""What every channel promises, over Dask and among threads."""

import asyncio
from typing import NamedTuple

import numpy as np
import pytest

from daskdl import codec
from daskdl.channel import protocol
from daskdl.channel.base import Stopped
from daskdl.channel.inbox import UPDATE_BYTES
from daskdl.channel.leasing import SyncIntervals, SyncPoint
from daskdl.channel.protocol import BarrierKind
from daskdl.errors import ChannelError
from daskdl.training.replica import failure_of
from daskdl.training.telemetry import EpochTotals
from tests.support.channels import (
    GRID,
    SIZE,
    all_wait_for,
    begin,
    bounds,
    done,
    every_channel,
    frame_of,
    in_thread,
    lease,
    meet,
    publish,
    totals,
    wait_until,
)

ARRAYS = {
    "long": np.arange(100_000, dtype=np.float64),
    "table": np.array([[1, -2], [3, 2**62]]),
    "empty": np.zeros(0, np.float32),
}
NBYTES = sum(array.nbytes for array in ARRAYS.values())


def check_equal(got, expected):
    np.testing.assert_equal(dict(got), expected)
    for name, value in expected.items():
        assert getattr(got[name], "dtype", None) == getattr(value, "dtype", None)


class TestJoining:
    @every_channel()
    async def test_join_returns_once_all_have_joined(self, a_run):
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
            with pytest.raises(
                ChannelError, match="replica 1 of run 00000007 is already open"
            ):
                run.open_channel(1)

    @every_channel()
    async def test_no_replica_joins_a_run_that_is_over(self, a_run):
        async with a_run(join=False) as run:
            await run.stop("enough")

            with pytest.raises(Stopped, match="enough"):
                await in_thread(run.channels[0].join)

    @every_channel()
    async def test_a_replica_that_does_not_join_ends_the_run_and_is_named(self, a_run):
        async with a_run(join=False, timeouts=bounds(join=0.3)) as run:
            with pytest.raises(Stopped, match="not all replicas started within"):
                await in_thread(run.channels[0].join)

            failed, _ = await run.events()
            assert (failed["kind"], failed["type"]) == ("failed", "WaitTimeoutError")
            assert failed["summary"] == (
                "not all replicas started within 0.3 s (daskdl.timeouts.join): replica "
                f"1 on {run.where(1)}, which has not joined; is the worker busy with "
                "other tasks, or paused by Dask for lack of memory?"
            )
            with pytest.raises(Stopped, match="not all replicas started"):
                await in_thread(run.channels[1].join)


class TestUpdates:
    @every_channel(replicas=3)
    async def test_updates_reach_all_others_once(self, a_run):
        async with a_run() as run:
            for step in range(4):
                assert publish(run.channels[0], step + 1, step=step, count=3)
            assert publish(run.channels[1], -9, step=2)

            await all_wait_for(run, {0: 4, 1: 1})

            first, second = [3] * 4 + [0] * 5, [0] * 8 + [-1]
            both = [*first[:8], -1]
            for replica, expected in enumerate((second, first, both)):
                assert totals(run.channels[replica].drain(), 9) == expected
                assert totals(run.channels[replica].drain()) == [0] * SIZE

    @every_channel()
    async def test_a_part_of_a_steps_updates_does_not_complete_the_step(self, a_run):
        async with a_run() as run:
            channel, peer = run.channels[0], run.channels[1]
            ahead = []
            for partial in (True, False):
                assert publish(channel, step=1, partial=partial)
                await in_thread(peer.wait_for_updates, {0: channel.published})
                ahead.append(peer.wait_for_peers(1, 0, None))

            assert ahead == [1, 0]

    @every_channel()
    async def test_bytes_are_counted_at_both_ends_until_they_are_read(self, a_run):
        async with a_run() as run:
            frame = frame_of(run.next_stamp(0), 1, -5, 7)

            run.channels[0].publish(lambda _: frame, 0)
            await in_thread(run.channels[1].wait_for_updates, {0: 1})

            sent, received = (run.channels[r].stats() for r in (0, 1))
            assert (sent.frames, sent.sent_bytes) == (1, frame.nbytes)
            assert (sent.received_bytes, received.received_bytes) == (0, frame.nbytes)
            assert received.waits_s.keys() == {"join", "updates"}
            nothing = run.channels[1].stats()
            assert (nothing.received_bytes, nothing.waits_s) == (0, {})
            assert run.channels[0].published == 1

    @every_channel()
    async def test_an_unreadable_frame_is_refused_by_its_receivers(self, a_run, caplog):
        async with a_run() as run:
            damaged = frame_of(run.next_stamp(0), 1)
            damaged[-1] ^= 1
            assert run.channels[0].publish(lambda _: damaged, 0) is not None
            assert publish(run.channels[0], 2)
            arrived = []

            def drained():
                arrived.append(run.channels[1].drain())
                return arrived[-1].updates

            await wait_until(drained)

            assert totals(arrived[-1], 2) == [0, 1]
            # In a mesh it is requested again.
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
            assert totals(arrived, 3) == [15, -15, 0]
            assert run.channels[1].stats().folds == 2

    @every_channel()
    async def test_the_last_update_of_a_leaving_replica_arrives(self, a_run):
        async with a_run() as run:
            leaver = run.channels.pop(1)
            counts_N = np.arange(SIZE, dtype=np.int32)

            def encode(stamp):
                return codec.encode_dense(stamp, GRID, counts_N)

            await in_thread(leaver.publish, encode, 4, force=True)
            await in_thread(leaver.leave)

            await in_thread(run.channels[0].wait_for_updates, {1: 1})
            (update,) = run.channels[0].drain().updates
            assert update.counts_N.tolist() == counts_N.tolist()


class TestBarriers:
    @every_channel(replicas=3)
    async def test_all_read_all_payloads_and_arrays_count_once_as_sent(self, a_run):
        async with a_run() as run:
            meeting = [
                begin(channel.barrier, "meet", {"replica": replica, **ARRAYS})
                for replica, channel in run.channels.items()
            ]

            for gathered in await asyncio.gather(*meeting):
                assert gathered.gone == {}
                assert sorted(gathered.payloads) == [0, 1, 2]
                for replica, payload in gathered.payloads.items():
                    check_equal(payload, {"replica": replica, **ARRAYS})
            for channel in run.channels.values():
                traffic = channel.stats()
                assert traffic.sent_bytes == NBYTES
                assert traffic.received_bytes == 2 * NBYTES

    @every_channel()
    async def test_the_client_reads_a_report_once(self, a_run):
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
            assert [list(payload) for payload in event["payloads"]] == [[0, 0], [1, 1]]
            assert run.record.barriers == {}

    @every_channel(replicas=3)
    async def test_replicas_that_agreed_have_all_updates_published_before(self, a_run):
        async with a_run() as run:

            def end(replica, channel):
                for step in range(replica + 1):
                    assert publish(channel, replica + 1, step=step)
                payload = {"sequence": channel.published}
                met = channel.barrier("end", payload, BarrierKind.AGREE)
                published = {
                    r: fields["sequence"] for r, fields in met.payloads.items()
                }
                channel.agree("end", published, met.gone, load=None)
                return totals(channel.drain(), 3)

            ends = [in_thread(end, r, c) for r, c in run.channels.items()]

            assert await asyncio.gather(*ends) == [[0, 2, 3], [1, 0, 3], [1, 2, 0]]

    @every_channel(kinds=("plain", "local", "sim"))
    async def test_later_updates_are_held_back_until_the_next_barrier(self, a_run):
        async with a_run() as run:
            await meet(run, "end", BarrierKind.AGREE)
            assert publish(run.channels[0], 3, step=1)
            run.channels[0].progress(7)  # it has overtaken no update
            await in_thread(run.channels[1].wait_for_peers, 7, 0, 0)

            early = run.channels[1].drain()
            await meet(run, "report", BarrierKind.REPORT)
            await in_thread(run.channels[1].wait_for_updates, {0: 1})

            assert early.updates == []
            assert totals(run.channels[1].drain(), 4) == [0, 0, 1, 0]


class TestRounds:
    @every_channel()
    async def test_rounds_do_not_wait_for_replicas_that_wait_for_a_lease(self, a_run):
        async with a_run(pieces={"train": ("p",)}) as run:
            channel, peer = run.channels[0], run.channels[1]
            await lease(channel)
            peer.set_idle("idle")
            waiting = begin(peer.lease, "train", 0, [], wait=True)

            gathered = await in_thread(channel.barrier, "round", 0, BarrierKind.ROUND)

            assert gathered.payloads == {0: 0, 1: "idle"}
            await lease(channel, done(0))
            assert await waiting is None

            # Once it has its answer it is waited for.
            both = await meet(run, "round", BarrierKind.ROUND)
            assert [dict(met.payloads) for met in both] == [{0: 0, 1: 1}] * 2

    @every_channel()
    async def test_replicas_may_arrive_at_a_round_with_different_kinds(self, a_run):
        async with a_run() as run:
            kinds = BarrierKind.ROUND, BarrierKind.AGREE
            met = [
                begin(run.channels[r].barrier, "round", r, kind)
                for r, kind in enumerate(kinds)
            ]

            assert (await met[0]).payloads == (await met[1]).payloads
            assert not run.record.holding
            await meet(run, "round", BarrierKind.AGREE)
            assert run.record.holding


class Dealing(NamedTuple):
    """Parts of one row; of two replicas one is lost with two of them."""

    synchronous: bool
    parts: int
    rows: int  # of each replica in a sync interval
    first: int  # parts that the other replica gets in this interval


DEALINGS = {
    # Two rows of its own, and one of those that were lost.
    "static": Dealing(synchronous=True, parts=4, rows=3, first=3),
    # Of four rows for both two are lost.
    "dynamic": Dealing(synchronous=False, parts=3, rows=2, first=2),
}


async def train(channel):
    """Lease and finish until there is no more: the parts, and the last answer."""
    finished, parts = [], []
    while True:
        leased = await in_thread(channel.lease, "train", 0, finished, wait=True)
        if leased is None or isinstance(leased, SyncPoint):
            return parts, leased
        parts += [piece.part for piece in leased.ranges]
        finished = [done(leased.number, 1)]


class TestLeases:
    @pytest.mark.parametrize("dealing", DEALINGS.values(), ids=DEALINGS)
    @every_channel()
    async def test_a_repeated_lease_counts_in_its_sync_interval(self, a_run, dealing):
        options = {
            "pieces": {"train": tuple(f"p{i}" for i in range(dealing.parts))},
            "synchronous": dealing.synchronous,
            "intervals": SyncIntervals(replicas=2, rows=dealing.rows),
        }
        async with a_run(**options) as run:
            for _ in range(2):
                await lease(run.channels[1])
            await in_thread(run.channels.pop(1).leave)

            first, sync_point = await train(run.channels[0])

            assert len(first) == dealing.first
            assert isinstance(sync_point, SyncPoint)
            await in_thread(run.channels[0].barrier, "pause", None, BarrierKind.SYNC)
            rest, nothing = await train(run.channels[0])
            assert nothing is None
            assert sorted(first + rest) == [*range(dealing.parts)]

    @every_channel()
    async def test_each_part_is_leased_once_and_the_client_reads_the_progress(
        self, a_run
    ):
        async with a_run(pieces={"train": ("p", "q"), "validation": ("v",)}) as run:
            channel, peer = run.channels[0], run.channels[1]

            assert await lease(peer) == (0, "p")
            assert await lease(channel) == (1, "q")
            assert await lease(peer, done(0)) is None
            assert await lease(channel, phase="validation") == (0, "v")
            await meet(run, "report", BarrierKind.REPORT)
            assert await lease(channel, epoch=1) == (0, "p")

            progress, _ = await run.events()
            assert progress == {"kind": "progress", "epoch": 0, **done(0)}

    @every_channel()
    async def test_a_replica_waits_for_a_lease_until_all_rows_are_finished(self, a_run):
        async with a_run(pieces={"train": ("p", "q")}) as run:
            for replica in (0, 1):
                await lease(run.channels[replica])
            waiting = begin(run.channels[0].lease, "train", 0, [done(0)], wait=True)
            await run.until(lambda: len(run.record.events) == 1)
            assert not waiting.done()

            assert await lease(run.channels[1], done(1)) is None

            assert await waiting is None

    @every_channel()
    async def test_a_replica_ends_the_epoch_for_all(self, a_run):
        async with a_run(pieces={"train": ("p", "q", "r")}) as run:
            channel, peer = run.channels.values()
            await lease(channel)

            work = EpochTotals(stop="enough").to_wire()
            ending = begin(peer.lease, "train", 0, [], wait=True, work=work)
            await run.until(lambda: run.record.leases["train"].unfinished == 1)

            assert not ending.done()
            assert await lease(channel, done(0)) is None
            assert await ending is None

    @every_channel(replicas=3)
    async def test_a_leaving_replica_frees_its_lease_and_ends_no_wait(self, a_run):
        async with a_run(pieces={"train": ("p",)}) as run:
            assert publish(run.channels[2], 3)
            assert await lease(run.channels[2]) == (0, "p")
            await in_thread(run.channels[0].wait_for_updates, {2: 1})
            meeting = begin(run.channels[0].barrier, "end", 0)
            leasing = begin(run.channels[1].lease, "train", 0, [], wait=True)

            await in_thread(run.channels.pop(2).leave)

            assert (await leasing).keys == {0: "p"}
            await in_thread(run.channels[1].barrier, "end", 1)
            met = await meeting
            assert met.payloads == {0: 0, 1: 1}
            assert met.gone.keys() == {2}
            await in_thread(run.channels[1].wait_for_updates, {2: 1})
            assert run.record.leases["train"].repeated == 1

    @every_channel()
    async def test_with_too_few_replicas_there_are_no_leases(self, a_run):
        async with a_run(pieces={"train": ("p", "q")}, min_replicas=2) as run:
            assert await lease(run.channels[0]) == (0, "p")
            await in_thread(run.channels.pop(1).leave)

            assert await lease(run.channels[0]) is None


class TestBlobs:
    @every_channel()
    async def test_a_blob_is_fetched_in_parts_once_it_is_published(
        self, a_run, monkeypatch
    ):
        monkeypatch.setattr(protocol, "PART_BYTES", 2**16)
        async with a_run() as run:
            fetching = begin(run.channels[1].fetch_blob, 0, "mean")

            run.channels[0].publish_blob("mean", ARRAYS)

            check_equal(await fetching, ARRAYS)
            assert run.channels[1].stats().received_bytes == NBYTES

    @every_channel(replicas=3)
    async def test_a_replica_that_has_gone_has_no_blobs(self, a_run):
        async with a_run() as run:
            fetching = begin(run.channels[0].fetch_blob, 2, "mean")

            await in_thread(run.channels.pop(2).leave)

            assert await fetching is None

    @every_channel()
    async def test_a_name_keeps_its_blob_until_it_is_dropped(self, a_run):
        async with a_run() as run:
            for name in ("mean", "state"):
                run.channels[0].publish_blob(name, ARRAYS)
            run.channels[0].publish_blob("state", {})

            run.channels[0].drop_blobs(keep="state")

            check_equal(await in_thread(run.channels[1].fetch_blob, 0, "state"), ARRAYS)
            waiting = begin(run.channels[1].fetch_blob, 0, "mean")
            run.channels[0].publish_blob("mean", {})
            assert await waiting == {}


class TestStaleness:
    @every_channel()
    async def test_no_replica_is_further_ahead_than_allowed(self, a_run):
        async with a_run() as run:
            fast, slow = run.channels[0], run.channels[1]
            await in_thread(fast.wait_for_peers, 2, 0, 2)
            assert fast.wait_for_peers(3, 0, None) == 3

            waiting = begin(fast.wait_for_peers, 3, 0, 2)
            slow.progress(1)
            await waiting

            assert fast.wait_for_peers(3, 0, None) == 2
            fast.sync(3, GRID)  # all have come as far where they meet
            assert fast.wait_for_peers(3, 0, None) == 0

    @every_channel()
    async def test_a_replica_that_completed_the_interval_does_not_count(self, a_run):
        async with a_run() as run:
            waiting = begin(run.channels[0].wait_for_peers, 9, 0, 2)

            run.channels[1].progress(1, 0)

            await waiting

    @every_channel(replicas=3)
    async def test_a_replica_that_has_left_never_counts(self, a_run):
        async with a_run() as run:
            await in_thread(run.channels.pop(2).leave)
            await meet(run, "end")
            for channel in run.channels.values():
                channel.sync(5, GRID)

            run.channels[1].progress(30)

            await in_thread(run.channels[0].wait_for_peers, 30, 1, 8)
            assert run.channels[0].wait_for_peers(30, 1, None) == 0


BLOCKING = {
    "barrier": lambda channel: channel.barrier("end", None),
    "updates": lambda channel: channel.wait_for_updates({1: 5}),
    "staleness": lambda channel: channel.wait_for_peers(9, 0, 2),
    "lease": lambda channel: channel.lease("train", 0, [], wait=True),
    "blob": lambda channel: channel.fetch_blob(1, "mean"),
}


class TestStopping:
    @pytest.mark.parametrize("block", BLOCKING.values(), ids=BLOCKING)
    @every_channel()
    async def test_a_stop_ends_every_wait(self, a_run, block):
        async with a_run(pieces={"train": ("p",)}) as run:
            await lease(run.channels[1])
            waiting = begin(block, run.channels[0])
            client = asyncio.ensure_future(run.events())

            await run.stop("enough")

            with pytest.raises(Stopped, match="enough"):
                await waiting
            with pytest.raises(Stopped, match="enough"):
                run.channels[0].check()
            assert await client == [{"kind": "stopped", "summary": "enough"}]
            assert run.record.take_events() == []

    @every_channel()
    async def test_closing_a_run_stops_its_replicas(self, a_run):
        async with a_run() as run:
            waiting = begin(run.channels[0].barrier, "end", None)
            await run.until(lambda: bool(run.record.barriers))

            await run.shut()

            with pytest.raises(Stopped, match="the run was closed"):
                await waiting

    @every_channel()
    async def test_a_failing_replica_ends_the_run_for_all(self, a_run):
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
