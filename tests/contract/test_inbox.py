"""The inbox of a replica: duplicates, progress, waits, and drained updates."""

import concurrent.futures
import dataclasses
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdl import codec
from daskdl.channel.inbox import (
    UPDATE_BYTES,
    Peers,
    PendingUpdates,
    PreSnapshotBuffer,
    ReceivedSet,
)
from daskdl.channel.local import LocalChannel, LocalRun
from daskdl.channel.protocol import MessageKind, PeerProgress
from daskdl.channel.transport import Clock
from tests.support.run_states import (
    GRID,
    SIZE,
    SPEC,
    control,
    filled,
    item_of,
    plan_of,
    put,
    sparse,
)

PATIENCE_S = 20


def steps(inbox):
    return {origin: p.step for origin, p in inbox.peers.progress.items()}


class TestBarrier:
    def test_updates_that_were_neither_received_nor_agreed_on_are_held_back(self):
        inbox = filled((1, 1))

        assert inbox.hold() == {1: (1, ())}
        inbox.barrier.open({1: (2, ())})

        messages = [item_of(sparse(1, sequence, [1])) for sequence in (1, 2, 3)]
        assert [inbox.holds_back(m) for m in messages] == [False, False, True]
        assert [put(inbox, 1, sequence) for sequence in (2, 3)] == [True, False]

    def test_what_was_agreed_on_before_is_not_admitted_at_the_next_barrier(self):
        inbox = filled()
        inbox.hold()
        inbox.barrier.open({1: (1, ())})

        inbox.hold()

        assert not put(inbox, 1, 1)

    def test_afterwards_all_updates_are_admitted(self):
        inbox = filled()
        inbox.hold()
        inbox.barrier.open({1: (1, ())})

        inbox.barrier.release()

        assert [put(inbox, 1, sequence) for sequence in (1, 2)] == [True, True]


def test_a_second_copy_is_dropped():
    inbox = filled((1, 1), (1, 2))

    assert not put(inbox, 1, 1)

    assert len(inbox.pending.take()[0]) == 2
    assert inbox.received_bytes == 2 * 64


@pytest.mark.parametrize("received", [{}, {1: (5, ())}])
def test_an_update_that_no_origin_can_have_reached_is_refused(received):
    inbox = filled()
    inbox.begin(received, GRID, {})
    last = inbox.received.complete(1)

    assert not put(inbox, 1, 10**9)
    assert inbox.refused == 1
    assert put(inbox, 1, last + 2)  # one that overtakes another

    assert inbox.received.by_origin()[1] == (last, (last + 2,))


def test_a_snapshot_replaces_pending_updates():
    inbox = filled((1, 1), (1, 2), limit_bytes=0)

    inbox.begin({1: (5, (7,))}, GRID / 2, {})
    put(inbox, 1, 6)

    assert inbox.received.by_origin() == {1: (7, ())}
    assert inbox.pending.take()[1][:2].tolist() == [2, 0]


def test_no_step_counts_before_a_snapshot_without_its_updates():
    """Progress may come before a replica knows that it joins others."""
    inbox = filled()
    inbox.awaits_snapshot = True
    inbox.record_progress(7, PeerProgress(step=4, sequence=2))
    inbox.in_order = False

    inbox.begin({7: (1, ())}, GRID, {})
    before = dict(inbox.peers.progress)
    inbox.awaits_snapshot = False
    assert put(inbox, 7, 2)

    assert before == {}
    assert inbox.peers.progress[7].step == 4


def test_updates_in_a_snapshot_are_not_received_again():
    received = ReceivedSet({0: (2, (4,)), 1: [3, []]})  # lists as from the wire

    assert [received.accept(0, s) for s in (1, 2, 4, 3)] == [False] * 3 + [True]
    assert received.by_origin() == {0: (4, ()), 1: (3, ())}


class TestSkipped:
    """Updates of which no readable copy has been found."""

    def test_they_leave_no_gap_and_are_not_received(self):
        received = ReceivedSet({7: (2, (5,))})

        for sequence in (3, 4):
            received.skip(7, sequence)

        assert received.complete(7) == 5
        assert received.behind({7: 5}) == {}
        assert received.by_origin() == {7: (2, (5,))}

    def test_one_that_comes_later_is_received_once(self):
        received = ReceivedSet({7: (2, ())})
        received.skip(7, 3)

        assert [received.accept(7, 3) for _ in range(2)] == [True, False]
        assert received.by_origin() == {7: (3, ())}

    def test_an_unreadable_update_that_comes_is_requested_no_more(self):
        inbox = filled((1, 1))
        inbox.add_unreadable(item_of(sparse(1, 2, [1])))
        assert inbox.unreadable == {1: {2: 2}}

        put(inbox, 1, 2)

        assert inbox.skip_unreadable(1) == []


class TestBeforeTheSnapshot:
    """What a joining replica keeps until it has a snapshot."""

    def test_updates_that_the_snapshot_contains_are_dropped(self):
        buffer = PreSnapshotBuffer()
        for sequence in (1, 2, 3):
            buffer.keep(item_of(sparse(4, sequence, [1])), 10**9)

        buffer.drop({4: 2})

        assert [message.sequence for message in buffer.messages] == [3]

    def test_there_is_a_bound_that_one_update_may_exceed(self):
        buffer, messages = (
            PreSnapshotBuffer(),
            [item_of(sparse(4, sequence, [1]), nbytes=100) for sequence in (1, 2)],
        )

        kept = [buffer.keep(message, limit_bytes=50) for message in messages]
        buffer.drop({4: 1})

        assert kept == [True, None]
        assert buffer.keep(messages[1], limit_bytes=50)


class TestProgress:
    def test_nobody_waits_for_replicas_that_have_completed_the_interval(self):
        inbox = filled()
        inbox.record_progress(1, PeerProgress(step=3, sequence=0, interval=0))
        inbox.record_progress(2, PeerProgress(step=5, sequence=0, interval=-1))

        assert [inbox.lead(7, interval) for interval in (1, 0, -1)] == [4, 2, 0]
        assert inbox.lead(4, 0) == 0

    def test_a_step_counts_once_no_earlier_update_is_missing(self):
        inbox = filled((1, 1), (1, 3), in_order=False)
        assert steps(inbox) == {1: 1}
        assert inbox.received.behind({1: 3}) == {1: [2]}

        put(inbox, 1, 2)

        assert steps(inbox) == {1: 3}

    def test_a_step_counts_once_a_snapshot_contains_its_updates(self):
        inbox = filled(in_order=False)
        inbox.process_control(
            control(MessageKind.PROGRESS, 1, 9, payload=0, sequence=4)
        )
        assert steps(inbox) == {}

        inbox.begin({1: (4, ())}, GRID, {})

        assert steps(inbox) == {1: 9}

    def test_a_received_step_counts_though_a_later_one_is_announced(self):
        inbox = filled(in_order=False)
        inbox.record_progress(1, PeerProgress(9, 4))

        put(inbox, 1, 1)
        inbox.record_progress(1, PeerProgress(0, 0))  # a late message

        assert steps(inbox) == {1: 1}

    def test_a_failed_replica_has_no_progress(self):
        inbox = filled((1, 1), (2, 1))
        inbox.process_control(control(MessageKind.FAILED, 1, 3))

        for origin in (1, 2):
            inbox.record_progress(origin, PeerProgress(6))

        assert steps(inbox) == {2: 6}

    def test_messages_name_the_last_announcement_of_each_replica_and_its_age(self):
        now = 10.0
        peers = Peers(clock=SimpleNamespace(now=lambda: now))
        peers.record_progress(2, PeerProgress(5, 1), math.inf)
        peers.record_progress(1, PeerProgress(7, 4), math.inf)
        now = 12.0
        peers.record_progress(1, PeerProgress(7, 4), math.inf)  # nothing new
        peers.record_progress(2, PeerProgress(6, 1), math.inf)
        now = 12.5

        assert peers.described() == (
            "replica 1 at step 7, update 4, 2.5 s ago; "
            "replica 2 at step 6, update 1, 0.5 s ago"
        )


def begun_wait(inbox, ready):
    """A thread that waits and has checked `ready` once; and its result."""
    waiting, came = threading.Event(), []

    def look():
        waiting.set()
        return ready()

    thread = threading.Thread(
        target=lambda: came.append(inbox.wait_for(look, PATIENCE_S))
    )
    thread.start()
    assert waiting.wait(PATIENCE_S)
    return thread, came


@pytest.mark.parametrize(
    ("ended_at", "expected"), [(0.05, False), (500.0, True)], ids=["late", "suspended"]
)
def test_what_arrives_while_a_machine_is_suspended_comes_in_time(ended_at, expected):
    clock, looks = Clock(), iter([False, False, True])
    clock.now = iter([0.0, ended_at]).__next__
    inbox = filled(clock=clock)

    assert inbox.wait_for(looks.__next__, 0.01) is expected


@pytest.mark.parametrize(
    "message",
    [
        control(MessageKind.STOP, payload="enough"),
        control(MessageKind.FAILED, 1),
        control(MessageKind.PROGRESS, 1, 9, payload=0),
    ],
    ids=["stop", "failed", "progress"],
)
def test_a_wait_for_a_replica_ends_on_failure_progress_or_stop(message):
    inbox = filled()
    inbox.record_progress(1, PeerProgress(0))
    thread, came = begun_wait(inbox, lambda: steps(inbox).get(1, 9) == 9)

    inbox.process_control(message)
    thread.join(PATIENCE_S / 2)  # less than the timeout of the wait
    inbox.stop("later")

    assert came == [True]
    assert inbox.stopped == ("enough" if message.payload == "enough" else "later")


# ---- `Channel.drain`

EACH = UPDATE_BYTES + 4  # of an update with one entry


def channels(count=3, **options):
    """The channels of a run among threads that all have joined."""
    spec = dataclasses.replace(SPEC, **options)
    run = LocalRun(plan_of(count, synchronous=spec.in_step))
    members = [
        LocalChannel(run, dataclasses.replace(spec, replica=r)) for r in range(count)
    ]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(LocalChannel.join, members))
    return members


def publish(channel, *entries, step=0, count=1):
    entries_K = np.array(sorted(entries, key=abs), np.int32)
    frame = lambda stamp: codec.encode(stamp, SIZE, count * GRID, entries_K)  # noqa: E731
    assert channel.publish(frame, step) is not None


def stamps(drained):
    return [update.stamp[1:3] for update in drained.updates]


def folded(drained, first):
    return [] if drained.folded_N is None else drained.folded_N[:first].tolist()


def test_drained_updates_are_sorted_by_replica_and_sequence():
    channel, *others = channels()
    for replica in (2, 1, 2, 1):
        publish(others[replica - 1], replica)

    assert stamps(channel.drain()) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert stamps(channel.drain()) == []


def test_updates_are_folded_once_beyond_the_bound():
    channel, *others = channels(inbox_bytes=EACH)
    publish(others[0], 1)
    assert (stamps(channel.drain()), channel.stats().folds) == ([(1, 1)], 0)

    publish(others[0], 1)
    publish(others[1], -1, 3, count=5)
    drained = channel.drain()

    assert (stamps(drained), folded(drained, 4)) == ([], [-4, 0, 5, 0])
    assert channel.stats().folds == 1
    assert channel.drain().folded_N is None


def test_updates_up_to_a_step_are_drained_and_the_rest_counts_for_the_bound():
    channel, peer = channels(2, inbox_bytes=3 * EACH)
    for step in (1, 2, 3):
        publish(peer, 1, step=step)

    assert stamps(channel.drain(up_to_step=2)) == [(1, 1), (1, 2)]
    for step in (4, 5):
        publish(peer, 1, step=step)
    before = channel.stats().folds
    publish(peer, 1, step=5)

    assert (before, channel.stats().folds) == (0, 1)
    assert folded(channel.drain(), 1) == [4]


def test_a_fold_counts_in_steps_of_the_agreed_grid():
    channel, peer = channels(2, inbox_bytes=0)
    channel.sync(0, GRID / 2)
    publish(peer, 1)

    assert folded(channel.drain(), 2) == [2, 0]


@pytest.mark.parametrize(
    ("finer", "expected"), [(1, [-3, 3, 5]), (2, [-1, 2, 3]), (4, [-1, 1, 1])]
)
@pytest.mark.parametrize("inbox_bytes", [0, 2**20], ids=["folded", "not folded"])
def test_the_last_update_in_a_finer_grid_is_rounded_as_shared_was(
    finer, expected, inbox_bytes
):
    """Its replica left as the others changed the grid. Halves are rounded up."""
    receiver, peer = channels(2, size=3, inbox_bytes=inbox_bytes)
    for channel in (receiver, peer):
        channel.sync(0, finer * GRID)
    counts_N = np.array([-3, 3, 5], np.int32)

    peer.publish(lambda stamp: codec.encode_dense(stamp, GRID, counts_N), 0)

    drained = receiver.drain()
    if inbox_bytes:
        (update,) = drained.updates
        assert (update.grid, update.counts_N.tolist()) == (finer * GRID, expected)
    else:
        assert drained.folded_N.tolist() == expected


@pytest.mark.parametrize("factor", [2.0, 1 / 3, 2.0**-32, 2.0**-100])
def test_dense_updates_in_other_grids_are_refused(factor):
    channel, peer = channels(2, size=3)
    grid = float(np.float32(factor * GRID))
    counts_N = np.ones(3, np.int32)

    peer.publish(lambda stamp: codec.encode_dense(stamp, grid, counts_N), 0)

    assert not channel.drain().updates
    assert channel.stats().refused == 1


class TestInStep:
    def test_folded_updates_of_a_later_step_stay(self):
        channel, *others = channels(in_step=True, inbox_bytes=EACH)
        for peer in others:
            for step in (4, 5):
                publish(peer, step, step=step)

        four, nothing, five = (channel.drain(step) for step in (4, 4, 5))

        assert (stamps(four), folded(four, 5)) == ([], [0, 0, 0, 2, 0])
        assert (stamps(nothing), nothing.folded_N) == ([], None)
        assert (stamps(five), folded(five, 5)) == ([], [0, 0, 0, 0, 2])

    @pytest.mark.parametrize("order", [1, -1])
    def test_whether_a_step_is_folded_does_not_depend_on_the_order(self, order):
        channel, *others = channels(4, in_step=True, inbox_bytes=2 * EACH)
        entries = [(1, 2, 3), (4,), (5,)]  # folded with the second or the third
        for peer, moved in [*zip(others, entries, strict=True)][::order]:
            publish(peer, *moved, step=4)

        drained = channel.drain(4)

        assert (stamps(drained), folded(drained, 6)) == ([], [1, 1, 1, 1, 1, 0])

    def test_all_folded_steps_are_drained_as_one(self):
        channel, peer = channels(2, in_step=True, inbox_bytes=0)
        publish(peer, 1, step=4)
        publish(peer, 2, step=5)

        assert folded(channel.drain(), 3) == [1, 1, 0]
        assert channel.stats().folds == 2

    @pytest.mark.parametrize("limit", [0, EACH, 4 * EACH])
    def test_more_than_two_steps_are_folded_together_and_nothing_is_lost(self, limit):
        """A replica that is still joining does not hold up the others."""
        pending, sizes = PendingUpdates(SIZE, GRID, limit, in_step=True), []
        for step in range(1, 40):
            pending.add(sparse(1, step, [1, -2], step=step))
            sizes.append(pending.nbytes)

        first, rest = pending.take(1), pending.take(40)

        assert max(sizes) <= 2 * limit
        assert sum(folded(first, 1)) > 2
        counts = (len(drain.updates) + sum(folded(drain, 1)) for drain in (first, rest))
        assert sum(counts) == 39


UPDATES = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.lists(st.integers(1, SIZE), unique=True, max_size=SIZE),
        st.sampled_from([1, -1]),
        st.integers(1, 2**22),
    ),
    max_size=12,
)


@given(UPDATES, st.integers(0, 3 * EACH), st.randoms())
def test_drained_updates_add_up_to_the_published_ones_folded_or_not(
    updates, inbox_bytes, chance
):
    channel, *others = channels(inbox_bytes=inbox_bytes)
    expected_N, got_N = np.zeros(SIZE, np.int64), np.zeros(SIZE, np.int64)

    def drain():
        drained = channel.drain()
        if drained.folded_N is not None:
            got_N[:] += drained.folded_N
        for update in drained.updates:
            signs = np.sign(update.entries_K) * round(update.threshold / GRID)
            got_N[np.abs(update.entries_K) - 1] += signs

    for number, positions, sign, count in updates:
        publish(others[number], *(sign * p for p in positions), count=count)
        expected_N[np.array(positions, int) - 1] += sign * count
        if chance.random() < 0.3:
            drain()
    drain()

    assert got_N.tolist() == expected_N.tolist()
