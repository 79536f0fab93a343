"""What the scheduler decides about a run, a call at a time."""

import dataclasses
import math
import re
from collections import Counter

import numpy as np
import pytest

from daskdl import codec
from daskdl.channel import merging as merging_module
from daskdl.channel.leasing import (
    NOBODY,
    Range,
    RemainingWork,
    RunSpec,
    SyncIntervals,
    SyncPoint,
)
from daskdl.channel.merging import merged
from daskdl.channel.protocol import (
    MESSAGE_BYTES,
    BarrierKind,
    GoneError,
    Message,
    PeerProgress,
    read,
)
from daskdl.channel.run_state import (
    EXCESS_BYTES,
    EXCESS_UPDATES,
    MAX_READERS,
    UPDATES,
    RunState,
)
from daskdl.channel.transport import RECENT, Outbox
from daskdl.codec import Stamp
from daskdl.training.telemetry import EpochTotals
from tests.support.run_states import (
    EACH,
    GRID,
    SIZE,
    SPEC,
    TIMEOUTS,
    joined,
    plan_of,
    queued,
    update,
)

# ---- updates and progress


def test_an_update_is_sent_to_nobody_if_one_receiver_has_no_room():
    state = joined(relay_bytes=2 * EACH)
    state.publish(0, [update(0, 1)], PeerProgress(1))
    state.outboxes[2].drop(2)  # replica 2 has read them, replica 1 has not

    accepted = state.publish(0, [update(0, 2), update(0, 3)], PeerProgress(3))

    assert accepted == 0
    assert [message.sequence for message in queued(state, 1, "update")] == [1]
    assert queued(state, 2, "update") == []
    assert state.members.replicas[0].progress == (1, 1, -1)


def test_updates_before_the_one_without_room_are_accepted():
    state = joined(relay_bytes=2 * EACH)

    accepted = state.publish(0, [update(0, s) for s in (1, 2, 3)], PeerProgress(9))

    assert accepted == 2
    assert [message.sequence for message in queued(state, 1)] == [1, 2]
    assert queued(state, 1, "progress") == []  # it would overtake the third


# ---- sums of updates


def framed_update(origin, sequence, *positions, step=1):
    """An update with a frame, as it arrives at the scheduler."""
    entries_K = np.array([position + 1 for position in positions], np.int32)
    stamp = Stamp(SPEC.run, origin, sequence, step)
    frame = codec.encode(stamp, SIZE, GRID, entries_K).tobytes()
    return Message.update(stamp, step, len(frame), frame)


def merging(replicas=3, **options):
    return joined(replicas, **{"merge_s": 0.1, "relay_bytes": 2**20, **options})


def merge_waiting(state):
    """What waits, merged, and the number of messages."""
    sent = state.next_waiting()
    return merged([m for m in sent if m.kind in UPDATES], SPEC.run), len(sent)


def send_merged(state):
    """Send what waits as a scheduler does after a while."""
    state.send_waiting(*merge_waiting(state))


def keep_merged(state):
    """Let the sum of what waits wait on, as a scheduler does if it is crowded."""
    (total,), count = merge_waiting(state)
    state.keep_sum(total, count)


def publish_one_each(state, sequence=1):
    for origin in (0, 1, 2):
        message = framed_update(origin, sequence, origin, 7, step=sequence)
        assert state.publish(origin, [message], PeerProgress(sequence, sequence))


def test_updates_that_wait_together_are_sent_as_their_sum_to_all():
    state = merging()
    begun = []
    state.on_waiting = lambda: begun.append(None)
    publish_one_each(state)
    before = queued(state, 0)

    send_merged(state)

    assert (before, len(begun)) == ([], 1)
    for replica in (0, 1, 2):
        (message,) = queued(state, replica)
        total = codec.decode_sum(message.payload, run=SPEC.run)
        assert total.summands == ((0, 1, 1), (1, 1, 1), (2, 1, 1))
        counts_N = np.zeros(SIZE, np.int32)
        total.add_(counts_N, 1)
        assert counts_N[:8].tolist() == [1, 1, 1, 0, 0, 0, 0, 3]


def test_what_cannot_be_read_is_sent_beside_the_sum():
    state = merging()
    publish_one_each(state)
    state.publish(1, [update(1, 2)], PeerProgress(1, 2))

    send_merged(state)

    assert [m.kind for m in queued(state, 0)] == ["sum", "update"]
    assert [m.kind for m in queued(state, 1)] == ["sum"]


def test_an_update_that_is_sent_twice_is_in_the_sum_once():
    """Its origin sends it again if the answer is lost."""
    state = merging()
    publish_one_each(state)
    state.publish(0, [framed_update(0, 1, 0, 7)], PeerProgress(1, 1))

    send_merged(state)

    assert [m.kind for m in queued(state, 1)] == ["sum", "update"]


def test_one_update_is_not_sent_as_a_sum():
    state = merging()
    state.publish(0, [framed_update(0, 1, 3)], PeerProgress(1, 1))

    send_merged(state)

    assert [m.kind for m in queued(state, 1)] == ["update"]
    assert queued(state, 0) == []


def test_progress_follows_the_updates_before_it():
    state = merging()
    publish_one_each(state)
    state.publish(0, [], PeerProgress(5, 1, 0))

    send_merged(state)

    assert [m.kind for m in queued(state, 1)] == ["sum", "progress"]
    assert [m.kind for m in queued(state, 0)] == ["sum"]


def joining(state, limit_bytes=2**20):
    """A replica that joins, and the last updates that its snapshot must contain."""
    replica = state.members.assign("tcp://new")
    state.join(replica, 100.0, Outbox(limit_bytes))
    return replica, state.cut(replica)


def names(state, replica):
    """The updates in the queue of a replica: alone, or in sums."""
    return [
        [(m.origin, m.sequence)] if m.kind == "update" else summands(m)
        for m in queued(state, replica)
        if m.kind in UPDATES
    ]


def test_a_joining_replica_gets_what_its_snapshot_lacks_and_then_the_same_sums():
    state = merging()
    publish_one_each(state)
    replica, cut = joining(state)
    send_merged(state)
    publish_one_each(state, 2)
    send_merged(state)
    before = names(state, replica)

    state.subscribe(replica, {0: 2, 1: 1, 2: 1})
    publish_one_each(state, 3)
    send_merged(state)

    assert cut == {0: 1, 1: 1, 2: 1, replica: 0}
    together = [[(origin, sequence) for origin in range(3)] for sequence in (1, 2, 3)]
    assert before == []
    assert names(state, replica) == [[(1, 2)], [(2, 2)], together[2]]
    assert names(state, 0) == together


@pytest.mark.parametrize("is_summed", [False, True])
def test_a_joining_replica_gets_no_sum_with_an_update_of_its_snapshot(is_summed):
    """It could not subtract it."""
    state = merging()
    replica, _ = joining(state)
    send_merged(state)
    publish(state, 0, 1)
    send_merged(state)
    for origin, sequence in ((0, 2), (1, 1)):
        publish(state, origin, sequence)
    if is_summed:
        keep_merged(state)

    state.subscribe(replica, {1: 1})
    send_merged(state)
    publish(state, 2, 1)
    publish(state, 1, 2)
    send_merged(state)

    assert names(state, replica) == [[(0, 1)], [(0, 2)], [(1, 2), (2, 1)]]
    assert names(state, 2) == [[(0, 1)], [(0, 2), (1, 1)], [(1, 2), (2, 1)]]


def subscribed_early(state):
    """A replica whose snapshot contains an update that the scheduler lacks."""
    replica, _ = joining(state)
    send_merged(state)
    publish(state, 0, 1)
    send_merged(state)
    state.subscribe(replica, {1: 1})
    return replica


def test_a_joining_replica_is_sent_updates_once_those_of_its_donor_have_come():
    state = merging()
    replica = subscribed_early(state)
    before = names(state, replica)

    publish(state, 1, 1)
    publish(state, 2, 1)
    send_merged(state)

    assert (before, names(state, replica)) == ([], [[(0, 1)], [(2, 1)]])


def test_a_joining_replica_does_not_wait_for_an_update_of_a_donor_that_is_lost():
    state = merging()
    replica = subscribed_early(state)

    state.lose(1, "it is gone", 100.0)

    assert names(state, replica) == [[(0, 1)]]


def test_a_joining_replica_with_a_full_queue_does_not_wait_for_its_donor():
    """There is no room for the update of the donor before the queue moves."""
    state = merging(relay_bytes=4 * EACH)
    replica, _ = joining(state, state.spec.queue_bytes)
    for sequence in (1, 2):
        publish(state, 1, sequence)
        state.send_waiting()
    refused = state.publish(0, [framed_update(0, 1, 0)], PeerProgress(1, 1)) == 0

    state.subscribe(replica, {0: 1, 1: 1})

    assert refused
    assert names(state, replica) == [[(1, 2)]]


def test_a_joining_replica_does_not_wait_for_its_donor_if_there_are_no_sums():
    state = joined()
    replica, _ = joining(state)
    publish(state, 1, 1)

    state.subscribe(replica, {0: 1})

    assert names(state, replica) == [[(1, 1)]]


def test_a_replica_that_asks_for_another_snapshot_is_sent_no_updates_until_it_has_it():
    state = merging()
    replica, cut = joining(state)
    state.subscribe(replica, cut)

    state.cut(replica)
    publish_one_each(state)
    send_merged(state)
    before = names(state, replica)
    state.subscribe(replica, {0: 1, 1: 1, 2: 1})
    publish_one_each(state, 2)
    send_merged(state)

    assert (before, names(state, replica)) == ([], [[(0, 2), (1, 2), (2, 2)]])


def test_updates_that_were_held_back_do_not_overtake_those_that_wait():
    state = merging()
    publish(state, 0)
    arrive(state, "agree", 0, 1, 2, kind=BarrierKind.AGREE)
    state.publish(1, [framed_update(1, 1, 1)], PeerProgress(1), leaves=True)

    arrive(state, "end", 0, 1, 2)

    sent = queued(state, 2)
    assert [(m.kind, m.origin) for m in sent if m.kind != "progress"] == [
        ("update", 0),
        ("passed on", 0),
        ("update", 1),
    ]


def test_a_relay_that_does_not_merge_sends_a_joining_replica_what_its_snapshot_lacks():
    state = joined(3)
    replica, _ = joining(state)
    for sequence in (1, 2):
        state.publish(0, [update(0, sequence)], PeerProgress(sequence, sequence))
    before = names(state, replica)

    state.subscribe(replica, {0: 1})
    state.publish(1, [update(1, 1)], PeerProgress(1, 1))

    assert (before, names(state, replica)) == ([], [[(0, 2)], [(1, 1)]])


def test_a_replica_that_trains_without_a_subscription_has_all_updates():
    state = merging()
    replica, _ = joining(state)
    publish_one_each(state)

    state.activate(replica, 1)
    state.send_waiting()

    assert sorted(names(state, replica)) == [[(0, 1)], [(1, 1)], [(2, 1)]]
    assert queued(state, replica, "joined") == []


@pytest.mark.parametrize(
    ("happens", "follows"),
    [
        (lambda state: arrive(state, "end", 0, 1, 2, kind="agree"), "passed on"),
        (lambda state: state.lose(2, "it is gone", 100.0), "failed"),
    ],
    ids=["barrier", "loss"],
)
def test_news_follow_the_sum_of_what_waits_and_what_comes_later_follows_them(
    happens, follows
):
    state = merging()
    publish(state, 1)
    publish(state, 0)
    due = counted(state)

    happens(state)
    assert due
    assert not queued(state, 0)
    publish(state, 0, 2)
    while state.waiting:
        send_merged(state)

    assert [m.kind for m in queued(state, 1)][:2] == ["sum", follows]
    if follows == "failed":
        assert [m.kind for m in queued(state, 1)][2:] == ["update"]


def test_a_run_that_stops_does_not_wait():
    state = merging()
    publish_one_each(state)

    state.stop("enough")

    assert [m.kind for m in queued(state, 0)] == ["stop"]


@pytest.fixture
def small_sums(monkeypatch):
    """Sums are passed on from worker to worker, whatever their size."""
    monkeypatch.setattr(merging_module, "TREE_BYTES", 0)


def publish_from(state, replicas, sequence=1):
    for origin in replicas:
        publish(state, origin, sequence)
    send_merged(state)


def test_a_few_workers_get_a_sum_and_the_others_fetch_it_from_these(small_sums):
    state = merging(9, sum_fan_out=2)
    publish_from(state, range(9))

    messages = {replica: queued(state, replica)[0] for replica in range(9)}

    (number,) = {message.sequence for message in messages.values()}
    assert number > 0
    fetching = {r: m.origin for r, m in messages.items() if m.kind == "sum at"}
    assert len(fetching) == 9 - 2
    assert max(Counter(fetching.values()).values()) == 2
    for source in fetching:  # each way leads to a worker that gets the sum
        for _ in range(3):
            source = fetching.get(source, source)
        assert messages[source].kind == "sum"


def test_workers_take_turns_to_get_a_sum_at_once(small_sums):
    state = merging(4, sum_fan_out=2)
    earliest = []
    for sequence in (1, 2):
        publish_from(state, range(4), sequence)
        kinds = [queued(state, r)[-1].kind for r in range(4)]
        earliest.append([r for r in range(4) if kinds[r] == "sum"])

    assert len(earliest[0]) == len(earliest[1]) == 2
    assert not {*earliest[0]} & {*earliest[1]}


def test_small_sums_and_those_of_few_workers_are_sent_to_all():
    state = merging(9, sum_fan_out=2)
    publish_from(state, range(9))
    few = merging(2, sum_fan_out=2)
    publish_from(few, range(2))

    assert {queued(state, r)[0].kind for r in range(9)} == {"sum"}
    assert [queued(few, r)[0].sequence for r in range(2)] == [0, 0]


def test_replicas_of_a_worker_get_the_same_message(small_sums):
    state = merging({0: "tcp://a", 1: "tcp://b", 2: "tcp://b"}, sum_fan_out=1)
    publish_from(state, range(3))

    first, second, third = (queued(state, r)[0] for r in range(3))

    assert {first.kind, second.kind} == {"sum", "sum at"}
    assert second is third


def test_a_sum_is_kept_until_all_have_it_though_only_a_note_is_sent(small_sums):
    state = merging(3, sum_fan_out=1)
    publish_from(state, range(3))
    replica = next(r for r in range(3) if queued(state, r)[0].kind == "sum at")
    message = queued(state, replica)[0]
    box = state.outboxes[replica]

    sums = codec.decode_sum(state.queued_sum(replica, message.sequence).payload)
    assert [summand.origin for summand in sums.summands] == [0, 1, 2]
    assert box.nbytes == message.nbytes + MESSAGE_BYTES
    assert message.nbytes > 64
    assert message.to_wire()[5] is None
    box.drop(1)
    with pytest.raises(GoneError):
        state.queued_sum(replica, message.sequence)


def counted(state):
    """A list that grows whenever what waits is due."""
    calls = []
    state.on_due = lambda: calls.append(state.due)
    return calls


def publish(state, origin, sequence=1, **options):
    message = framed_update(origin, sequence, origin, step=sequence)
    progress = PeerProgress(sequence, sequence)
    assert state.publish(origin, [message], progress, **options)


def test_updates_wait_until_each_replica_has_sent_one():
    state = merging()
    due = counted(state)
    publish(state, 0)
    publish(state, 1)
    publish(state, 1, 2)
    before = list(due)

    publish(state, 2)

    assert (before, due) == ([], [True])


def test_updates_wait_for_no_replica_that_joins_has_gone_or_completed_the_interval():
    state = merging(4)
    state.join(state.members.assign("tcp://new"), 100.0, Outbox(2**20))
    state.publish(0, [], PeerProgress(4, 0, 0))
    state.lose(1, "it is gone", 100.0)
    state.send_waiting()
    publish(state, 2)
    before = state.due

    publish(state, 3)

    assert (before, state.due) == (False, True)


def test_what_ends_the_wait_of_a_replica_is_sent():
    state = merging()
    publish(state, 0, needed_step=3)
    state.publish(0, [], PeerProgress(5, 1), needed_step=3)
    state.publish(1, [], PeerProgress(4, 0))
    state.publish(2, [], PeerProgress(2, 0))
    before = state.due
    state.publish(2, [], PeerProgress(3, 0))
    assert (before, state.due) == (False, True)
    send_merged(state)

    state.publish(2, [], PeerProgress(4, 0))

    assert not state.due  # the wait is over


def test_a_wait_that_has_ended_before_its_replica_says_so_needs_nothing():
    state = merging()
    for replica in (0, 1, 2):
        state.publish(replica, [], PeerProgress(5, 0))
    state.send_waiting()
    state.publish(0, [], PeerProgress(5, 0), needed_step=3)

    publish(state, 1)

    assert not state.due


def test_a_replica_that_says_again_what_it_waits_for_lets_no_others_be_sent():
    """What ends its wait is on its way to it, perhaps over a slow link."""
    state = merging()
    state.publish(0, [], PeerProgress(5, 0), needed_step=3)
    for replica in (1, 2):
        state.publish(replica, [], PeerProgress(3, 0))
    send_merged(state)
    publish(state, 1)
    state.publish(0, [], PeerProgress(5, 0), needed_step=3)

    assert state.waiting
    assert not state.due


def test_what_a_lost_replica_waited_for_may_wait():
    state = merging(4)
    state.publish(0, [], PeerProgress(5, 0), needed_step=3)
    state.lose(0, "it is gone", 100.0)
    state.send_waiting()

    for replica in (1, 2, 3):
        state.publish(replica, [], PeerProgress(3, 0))

    assert not state.due


def test_a_wait_that_a_sum_ends_is_over_once_it_was_sent():
    state = merging()
    publish(state, 0)
    publish(state, 1)
    keep_merged(state)
    publish(state, 2)
    send_merged(state)

    state.publish(0, [], PeerProgress(1, 1), needed_step=1)
    publish(state, 1, 2)

    assert not state.due


def test_what_replicas_send_that_have_completed_the_interval_waits_until_they_meet():
    """Each sends the rest of its residual, and no one waits for it."""
    state = merging()
    for origin in range(3):
        state.publish(origin, [], PeerProgress(5, 0, 0))
    send_merged(state)
    for origin in range(3):
        publish(state, origin, 1)
    before = state.due

    arrive(state, "end", 0, 1, 2, kind=BarrierKind.AGREE)

    assert (before, state.due) == (False, True)


def test_updates_wait_while_earlier_ones_are_on_their_way_to_most_replicas():
    state = merging(3, relay_bytes=2**22)
    due = counted(state)
    for origin in range(3):
        publish(state, origin)
    send_merged(state)
    due.clear()
    for replica in (0, 1):
        state.outboxes[replica].append(Message.control("sum", nbytes=2**17))

    for origin in range(3):
        publish(state, origin, 2)
    before = state.due
    box = state.outboxes[1]
    box.drop(len(box))
    state.relieve()

    assert (before, state.due, due) == (False, True, [True])


def test_one_slow_replica_does_not_hold_up_the_others():
    state = merging(3, relay_bytes=2**22)
    state.outboxes[2].append(Message.control("sum", nbytes=2**17))

    for origin in range(3):
        publish(state, origin)

    assert state.due


def test_news_of_members_do_not_send_what_waits():
    state = merging()
    publish(state, 0)
    replica = state.members.assign("tcp://new")
    state.join(replica, 100.0, Outbox(2**20))
    before = state.due
    state.activate(replica, 1)

    assert [m.origin for m in state.waiting] == [0]
    assert (before, state.due) == (False, False)
    assert [m.kind for m in queued(state, 1)] == ["joined"]


def test_what_was_sent_in_haste_lets_no_later_updates_be_sent_alone():
    """They came while it was merged."""
    state = merging()
    publish(state, 0)
    arrive(state, "start", 0, 1, 2)
    together, count = merge_waiting(state)
    publish(state, 1)

    state.send_waiting(together, count)

    assert [m.origin for m in state.waiting] == [1]
    assert not state.due


def test_updates_do_not_wait_if_they_leave_no_room():
    size = framed_update(0, 1, 0).nbytes + MESSAGE_BYTES
    state = merging(relay_bytes=size)
    due = counted(state)
    publish(state, 0)

    assert state.publish(1, [framed_update(1, 1, 0)], PeerProgress(1, 1)) == 0

    assert due == [True]


def test_updates_do_not_wait_when_replicas_meet():
    state = merging()
    publish(state, 0)
    due = counted(state)

    arrive(state, "start", 0, 1, 2)

    assert due == [True]


def test_updates_that_come_back_slowly_find_no_room():
    """A replica keeps the latest of its own, to subtract them from sums."""
    state = merging()
    accepted = []
    for sequence in range(1, RECENT + 1):
        message = framed_update(0, sum(accepted) + 1, 0)
        accepted.append(state.publish(0, [message], PeerProgress(1)))
        state.publish(1, [framed_update(1, sequence, 1)], PeerProgress(1))
        send_merged(state)
        for replica in (1, 2):
            state.outboxes[replica].drop(len(state.outboxes[replica]))

    assert sum(accepted) == RECENT // 2
    state.outboxes[0].drop(len(state.outboxes[0]))
    message = framed_update(0, RECENT // 2 + 1, 0)
    assert state.publish(0, [message], PeerProgress(1)) == 1


def test_what_waits_takes_room():
    size = framed_update(0, 1, 0).nbytes + MESSAGE_BYTES
    state = merging(relay_bytes=2 * size)
    messages = [framed_update(0, sequence, 0) for sequence in (1, 2, 3)]

    accepted = state.publish(0, messages, PeerProgress(3, 3))

    assert accepted == 2


EACH_FRAMED = framed_update(0, 1, 0).nbytes + MESSAGE_BYTES


def summands(message):
    return [tuple(name[:2]) for name in codec.decode_sum(message.payload).summands]


def test_one_sum_has_the_updates_of_all_however_many_there_are():
    state = merging(40, relay_bytes=4 * EACH_FRAMED)
    most = 0
    for origin in range(40):
        publish(state, origin)
        most = max(most, sum(m.nbytes + MESSAGE_BYTES for m in state.waiting))
        if state.crowded and not state.due:
            keep_merged(state)

    assert state.due
    send_merged(state)

    for replica in range(40):
        (message,) = queued(state, replica)
        assert summands(message) == [(origin, 1) for origin in range(40)]
    assert most < 20 * EACH_FRAMED


def test_a_sum_waits_until_each_replica_has_sent_an_update():
    state = merging(3, relay_bytes=4 * EACH_FRAMED)
    due = counted(state)
    publish(state, 0)
    publish(state, 0, 2)
    state.publish(0, [], PeerProgress(5, 2))
    called = list(due)

    keep_merged(state)
    before = state.crowded, state.due, queued(state, 1)
    publish(state, 1)
    publish(state, 2)

    assert (called, before) == ([False, False], (False, False, []))
    assert state.due
    send_merged(state)
    total, progress = queued(state, 1)
    assert summands(total) == [(0, 1), (0, 2), (1, 1), (2, 1)]
    assert (progress.kind, progress.step) == ("progress", 5)


def test_a_sum_that_waits_is_sent_in_a_run_that_has_lost_its_earliest_replicas():
    """Its replicas are numbered on from those."""
    state = merging({5: "tcp://a", 6: "tcp://b", 7: "tcp://c"})
    publish(state, 5)
    publish(state, 6)
    keep_merged(state)

    publish(state, 7)
    send_merged(state)

    assert names(state, 5) == [[(5, 1), (6, 1), (7, 1)]]


def test_a_sum_that_waits_is_sent_at_once_if_need_be():
    state = merging(3, relay_bytes=4 * EACH_FRAMED)
    publish(state, 0)
    publish(state, 1)
    keep_merged(state)

    state.send_waiting()
    for sequence in (1, 2):
        publish(state, 2, sequence)
    send_merged(state)

    for replica in range(3):
        sums = [summands(message) for message in queued(state, replica)]
        assert sums == [[(0, 1), (1, 1)], [(2, 1), (2, 2)]]


def test_what_is_kept_for_a_joining_replica_takes_the_room_of_its_queue():
    state = merging(3, relay_bytes=8 * EACH_FRAMED)
    replica, _ = joining(state, state.spec.queue_bytes)
    send_merged(state)
    box, accepted = state.outboxes[replica], 0
    for turn in range(20):
        origin, sequence = turn % 3, turn // 3 + 1
        messages = [framed_update(origin, sequence, 1)] if accepted == turn else []
        accepted += state.publish(origin, messages, PeerProgress(sequence))
        state.send_waiting()
        for each in state.outboxes.values():
            each.drop(len(each))

    assert accepted == 8
    assert box.nbytes <= box.limit_bytes


def dense_update(origin, sequence):
    stamp = Stamp(SPEC.run, origin, sequence, sequence)
    frame = codec.encode_dense(stamp, GRID, np.arange(SIZE, dtype=np.int32)).tobytes()
    return Message.update(stamp, sequence, len(frame), frame)


def unreadable_update(origin, sequence):
    """An update that no sum can contain."""
    stamp = Stamp(SPEC.run, origin, sequence, sequence)
    return Message.update(stamp, sequence, 2000, bytes(2000))


def test_dense_updates_are_merged_apart_from_the_others():
    state = merging(6)
    for origin in range(6):
        publish(state, origin)
        state.publish(origin, [dense_update(origin, 2)], PeerProgress(2))

    send_merged(state)

    each = [[(origin, sequence) for origin in range(6)] for sequence in (1, 2)]
    assert names(state, 0) == each
    _, dense = queued(state, 0)
    counts_N = np.zeros(SIZE, np.int32)
    codec.decode_sum(dense.payload).add_(counts_N, 1)
    assert (counts_N == 6 * np.arange(SIZE)).all()


@pytest.mark.parametrize(("excess", "kinds"), [(1.0, ["update"]), (5.0, ["sum"])])
def test_one_large_update_travels_along_a_tree_if_a_sum_may_take_more(excess, kinds):
    size = 2**17
    stamp = Stamp(SPEC.run, 0, 1, 1)
    counts_N = np.arange(size, dtype=np.int32)
    frame = codec.encode_dense(stamp, GRID, counts_N).tobytes()
    message = Message.update(stamp, 1, len(frame), frame)

    sent = merged([message], SPEC.run, excess)

    assert [m.kind for m in sent] == kinds


def test_an_update_that_does_not_fit_a_sum_alone_stays_as_it_is():
    stamp = Stamp(SPEC.run, 0, 1, 1)
    least_N = np.full(SIZE, np.iinfo(np.int32).min, np.int32)
    frame = codec.encode_dense(stamp, GRID, least_N)
    messages = [Message.update(stamp, 1, frame.nbytes, frame), framed_update(1, 1, 3)]

    together = merged(messages, SPEC.run)

    assert [m.origin for m in together] == [0, 1]


def test_updates_that_no_sum_can_contain_take_their_own_room_in_a_queue():
    each = unreadable_update(0, 1).nbytes + MESSAGE_BYTES
    state = merging(3, relay_bytes=4 * each)
    singles = {
        origin: [unreadable_update(origin, s) for s in (1, 2, 3)] for origin in (0, 1)
    }
    before = state.publish(0, singles[0][:2], PeerProgress(1))
    send_merged(state)

    accepted = state.publish(1, singles[1], PeerProgress(1))

    assert (before, accepted) == (2, 2)
    send_merged(state)
    for box in state.outboxes.values():
        assert box.nbytes <= box.limit_bytes


def test_what_waits_beside_a_sum_fits_an_empty_queue():
    each = unreadable_update(0, 1).nbytes + MESSAGE_BYTES
    state = merging(3, relay_bytes=4 * each)
    publish(state, 0)
    publish(state, 1)
    keep_merged(state)

    accepted = state.publish(
        2, [unreadable_update(2, s) for s in (1, 2, 3, 4)], PeerProgress(1)
    )

    assert accepted == 3
    send_merged(state)
    for box in state.outboxes.values():
        assert box.nbytes <= box.limit_bytes


def test_updates_in_a_sum_that_waits_take_the_room_of_their_origin():
    """It keeps the latest of its own, to subtract them from sums."""
    state = merging(2, relay_bytes=4 * EACH_FRAMED)
    accepted = 0
    for _ in range(RECENT):
        message = framed_update(0, accepted + 1, 0)
        accepted += state.publish(0, [message], PeerProgress(1))
        if state.crowded:
            keep_merged(state)

    assert accepted == RECENT // 2
    assert state.due  # as there is no room
    send_merged(state)
    message = framed_update(0, accepted + 1, 0)
    before = state.publish(0, [message], PeerProgress(1))
    state.outboxes[0].drop(1)
    after = state.publish(0, [message], PeerProgress(1))
    assert (before, after) == (0, 1)


def test_updates_for_which_merging_makes_room_do_not_let_others_be_sent():
    state = merging(4, relay_bytes=4 * EACH_FRAMED)
    for sequence in (1, 2):
        publish(state, 0, sequence)
        publish(state, 1, sequence)

    before = state.publish(2, [framed_update(2, 1, 2)], PeerProgress(1))

    assert (before, state.due) == (0, False)
    keep_merged(state)
    assert state.publish(2, [framed_update(2, 1, 2)], PeerProgress(1))


def test_a_queue_with_a_sum_has_room_for_the_next():
    state = merging(40, relay_bytes=8 * EACH_FRAMED)
    for sequence in (1, 2):
        for origin in range(40):
            publish(state, origin, sequence)
            if state.crowded and not state.due:
                keep_merged(state)
        send_merged(state)

    sums = [len(summands(message)) for message in queued(state, 0)]
    assert sums == [40, 40]


def test_the_room_of_a_queue_is_that_of_two_sums():
    size = 2**21
    spec = merging(2, parameters=size).spec

    assert spec.queue_bytes == 12 * size
    assert plan_of(2, parameters=size, relay_bytes=5).queue_bytes == 5


MUCH = 2**21  # bytes of an update: more than `EXCESS_UPDATES` fit
LEAVING = EXCESS_BYTES // MUCH  # updates below the bound, each a little larger


@pytest.mark.parametrize("holding", [False, True], ids=["queued", "held back"])
def test_a_replica_that_says_it_leaves_cannot_fill_the_relay(holding):
    state = joined(relay_bytes=EACH)
    if holding:
        arrive(state, "end", 0, 1, 2, kind="agree")
    many = [update(2, 1 + i, nbytes=MUCH) for i in range(LEAVING + 2)]
    state.publish(1, [update(1, 1)], PeerProgress(1))  # fills a queue

    accepted = state.publish(2, many, PeerProgress(1), leaves=True)
    again = state.publish(2, many[accepted:], PeerProgress(1), leaves=True)

    assert (accepted, again) == (LEAVING, 0)
    assert state.publish(0, [update(0, 1)], PeerProgress(1), leaves=True) == 1


HUGE = EXCESS_BYTES + 1  # bytes of an update


@pytest.mark.parametrize("holding", [False, True], ids=["queued", "held back"])
def test_the_last_updates_of_a_replica_that_leaves_are_accepted_whatever_their_size(
    holding,
):
    state = joined(relay_bytes=EACH)
    state.publish(
        2, [update(2, 1, nbytes=HUGE)], PeerProgress(1)
    )  # as a queue is empty
    if holding:
        arrive(state, "end", 0, 1, 2, kind="agree")
    last = [update(2, 2, nbytes=HUGE), update(2, 3, nbytes=4 * HUGE)]
    many = [update(2, 4 + i, nbytes=HUGE) for i in range(EXCESS_UPDATES)]

    assert state.publish(2, last, PeerProgress(1), leaves=True) == 2

    more = state.publish(2, many, PeerProgress(1), leaves=True)
    assert more == EXCESS_UPDATES - 2  # it is only its word


def test_the_allowance_without_room_is_for_one_barrier():
    state = joined(relay_bytes=EACH)
    last = [update(2, 1 + i, nbytes=HUGE) for i in range(EXCESS_UPDATES)]
    first = EXCESS_UPDATES + 1
    later = [update(2, first + i, nbytes=HUGE) for i in range(EXCESS_UPDATES + 1)]
    arrive(state, "end", 0, 1, 2, kind="agree")
    held = state.publish(2, last, PeerProgress(1))
    arrive(state, "met", 0, 1, 2)  # the held updates are passed on

    arrive(state, "end", 0, 1, 2, kind="agree")
    accepted = state.publish(2, later, PeerProgress(1))

    assert (held, accepted) == (EXCESS_UPDATES, EXCESS_UPDATES)


def test_progress_is_announced_once_to_all_others():
    state = joined()

    for _ in range(2):
        state.publish(1, [], PeerProgress(4))

    news = [Message("progress", 1, 0, 4, 0, -1)]
    assert [queued(state, replica) for replica in range(3)] == [news, [], news]


# ---- barriers


def arrive(state, key, *replicas, kind="meet"):
    """Let replicas arrive with a payload each; return the barrier of the last."""
    for replica in replicas:
        barrier = state.arrive(key, replica, f"of {replica}", b"%d" % replica, kind)
    return barrier


def test_what_came_while_others_were_merged_is_still_due_at_a_barrier():
    state = merging(2)
    publish(state, 0)
    merging_now = state.next_waiting()
    sums = merged(merging_now, SPEC.run)
    publish(state, 1)
    arrive(state, "end", 0, 1)

    state.send_waiting(sums, len(merging_now))

    assert state.waiting
    assert state.due


def test_a_barrier_is_the_same_for_all_until_it_is_complete():
    state = joined(2)

    barrier = arrive(state, "end", 0)

    assert not barrier.complete
    assert arrive(state, "end", 1) is barrier
    assert barrier.complete
    assert arrive(state, "end", 0) is not barrier


def test_a_retried_arrival_does_not_change_the_payload():
    state = joined(2)
    arrive(state, "end", 0)

    barrier = state.arrive("end", 0, "another", b"another", "meet")

    assert barrier.payloads == {0: "of 0"}
    assert barrier.client_payloads == {0: b"0"}


def test_a_failure_during_a_barrier_is_in_the_result_of_all():
    state = joined()
    barrier = arrive(state, "end", 0, 1)
    state.remove(2, "left", 0.0)

    state.remove(1, "left", 0.0)

    assert barrier.gone == {2: 0}
    assert barrier.payloads == {0: "of 0", 1: "of 1"}


def test_no_barrier_is_complete_without_members_or_after_a_stop():
    deserted, stopped = joined(2), joined(2)
    barriers = [arrive(state, "end", 0) for state in (deserted, stopped)]

    deserted.remove(0, "left", 0.0)
    deserted.remove(1, "left", 0.0)
    stopped.stop("enough")
    stopped.remove(1, "left", 0.0)

    assert [barrier.complete for barrier in barriers] == [False, False]


def test_a_replica_that_fails_while_idle_has_no_payload_in_later_rounds():
    state = joined(3)
    state.give_back(2, "train", 0, [], 0.0, idle_payload="of 2")
    state.remove(2, "left", 0.0)
    barrier = arrive(state, "round", 0, kind="round")
    assert not barrier.complete

    arrive(state, "round", 1, kind="round")

    assert barrier.payloads == {0: "of 0", 1: "of 1"}


def test_replicas_that_wait_for_a_lease_vote_in_rounds():
    state = joined(3)
    state.give_back(2, "train", 0, [], 0.0, idle_payload="of 2, idle")

    barrier = arrive(state, "round", 0, 1, kind="round")

    assert barrier.payloads == {0: "of 0", 1: "of 1", 2: "of 2, idle"}


def test_updates_are_held_back_between_two_barriers_and_then_passed_on():
    state = joined()
    arrive(state, "end", 0, 1, 2, kind="agree")

    accepted = state.publish(2, [update(2, 1, step=3)], PeerProgress(5))
    state.remove(2, "left", 0.0)
    held = queued(state, 0, "update")
    arrive(state, "report", 0, 1, kind="report")

    assert (accepted, held) == (1, [])
    assert queued(state, 0, "update") == queued(state, 1, "update")
    assert queued(state, 0, "update") == [update(2, 1, step=3)]
    assert queued(state, 0, "failed") == [Message("failed", 2, 0, 5, 0)]
    assert state.members.gone == {2: 1}
    arrive(state, "next", 0, 1)
    assert len(queued(state, 0, "update")) == 1


def test_an_update_that_leaves_a_gap_is_refused_by_a_relay():
    state = joined(2)
    state.publish(1, [update(1, 1)], PeerProgress())

    for sequences in ([10**9], [3], [2, 4]):
        with pytest.raises(ValueError, match=r"after update [12]: updates are missing"):
            state.publish(1, [update(1, each) for each in sequences], PeerProgress())

    assert queued(state, 0, "update") == [update(1, 1)]
    assert state.members.replicas[1].progress.sequence == 1
    again = [update(1, 1), update(1, 2)]
    state.publish(1, again, PeerProgress())
    assert state.members.replicas[1].progress.sequence == 2


def test_a_replica_waits_at_one_barrier_at_a_time():
    state = joined(2)
    arrive(state, "end", 0)

    with pytest.raises(ValueError, match=r"replica 0 waits at the barrier 'end'"):
        arrive(state, "another", 0)

    assert list(state.barriers) == ["end"]
    assert arrive(state, "end", 0, 1).complete
    assert not arrive(state, "another", 0).complete


def test_the_report_of_an_epoch_has_payloads_and_counters():
    state = joined(2)
    state.refused = 3

    arrive(state, "end", 1, 0, kind="report")

    [event] = state.take_events()
    assert event["payloads"] == [[0, "of 0"], [1, "of 1"]]
    assert event["client_payloads"] == [b"0", b"1"]
    assert (event["epoch"], event["refused"], event["departed"]) == (0, 3, [])


def test_each_epoch_counts_its_refused_messages():
    state = joined(2)
    state.refused = 3
    arrive(state, "end", 0, 1, kind="report")
    state.refused += 2

    arrive(state, "next", 0, 1, kind="report")

    assert [event["refused"] for event in state.take_events()] == [3, 2]


def test_work_before_a_resumed_position_counts_in_the_first_epoch_alone():
    before = trained(1.5, 3)
    resumed = SyncPoint(0, [RemainingWork(NOBODY, (Range(1, 0, 1),))], [before])
    state = joined(1, intervals=SyncIntervals(resumed=resumed))

    departed = [
        arrive(state, key, 0, kind=kind).counted["departed"]
        for key, kind in (("pause", "sync"), ("end", "report"), ("next", "report"))
    ]

    assert departed == [[before], [{"train": before}], []]


SCORED = {"score": [3.0, 1, 2, 2, 0.0, {}], "unscored": "", "measured": b"m"}


def hand_over(state, replica, work, phase="train", epoch=0):
    state.give_back(replica, phase, epoch, [], 0.0, work)


def test_the_last_work_that_a_gone_replica_handed_over_is_counted_at_a_sync_point():
    state = joined()
    for replica, examples in ((0, 4), (1, 5), (1, 10), (2, 3)):
        hand_over(state, replica, trained(2.0 * examples, examples))
    arrive(state, "pause", 1, kind="sync")
    state.remove(1, "left", 0.0)
    state.remove(0, "left", 0.0)

    barrier = arrive(state, "pause", 2, kind="sync")

    assert barrier.counted["departed"] == [trained(8.0, 4), trained(20.0, 10)]


def test_a_report_has_the_work_in_all_phases_of_replicas_without_a_payload():
    state = joined()
    for replica in range(3):
        hand_over(state, replica, trained(2.0, replica))
        hand_over(state, replica, SCORED, "validation")
    arrive(state, "end", 1, kind="report")
    state.remove(1, "left", 0.0)
    state.remove(2, "left", 0.0)

    barrier = arrive(state, "end", 0, kind="report")

    [departed] = barrier.counted["departed"]
    assert departed == {"train": trained(2.0, 2), "validation": SCORED}
    [event] = [event for event in state.take_events() if event["kind"] == "report"]
    assert event["departed"] == [departed]
    assert state.report == {
        "payloads": [[0, "of 0"], [1, "of 1"]],
        "departed": [departed],
    }


def test_what_a_replica_had_trained_before_a_resumed_position_is_not_lost_with_it():
    state = joined(2)
    for replica in range(2):
        work = trained(1.0, replica)
        state.arrive("resume", replica, {"work": work}, b"", "resume")
    state.remove(1, "left", 0.0)

    barrier = arrive(state, "end", 0, kind="report")

    assert barrier.counted["departed"] == [{"train": trained(1.0, 1)}]


def test_a_stop_ends_the_epoch_and_outlives_its_replica():
    state = joined(2)
    hand_over(state, 1, trained(1.0, 3, stop="enough"))
    state.remove(1, "left", 0.0)

    assert take(state, 0) is None
    assert state.can_lease(0, "train", 0)
    barrier = arrive(state, "end", 0, kind="report")
    assert barrier.counted["departed"] == [{"train": trained(1.0, 3, stop="enough")}]


def test_what_a_replica_trained_in_an_earlier_epoch_is_not_counted_again():
    state = joined(2)
    hand_over(state, 1, trained(1.0, 3))
    arrive(state, "end", 0, 1, kind="report")
    state.remove(1, "left", 0.0)

    barrier = arrive(state, "next", 0, kind="report")

    assert barrier.counted["departed"] == []


# ---- sync intervals


def trained(loss_sum, examples, stop=""):
    """Work over finished leases."""
    return EpochTotals(loss_sum, examples, stop=stop).to_wire()


def take(state, replica, epoch=0):
    return state.lease(replica, "train", epoch, is_near=lambda key: False)


def finish(state, replica, lease, epoch=0):
    finished = [{"lease": lease.number, "examples": 1, "loss": 0.0}]
    state.give_back(replica, "train", epoch, finished, 0.0)


def test_a_sync_interval_ends_after_its_time_and_the_next_one_begins_anew():
    state = joined(2, intervals=SyncIntervals(replicas=2, seconds=10.0))
    state.give_back(0, "train", 0, [], 50.0)
    first = take(state, 0)

    state.give_back(0, "train", 0, [], 59.9)
    second = take(state, 1)
    state.give_back(0, "train", 0, [], 60.0)

    assert take(state, 0) is None  # no sync point: other replicas hold leases
    assert not state.can_lease(0, "train", 0)
    finish(state, 0, first)
    finish(state, 1, second)
    assert state.can_lease(0, "train", 0)
    remaining = take(state, 0).remaining
    assert sum(piece.rows for work in remaining for piece in work.ranges) == 2

    arrive(state, "pause", 0, 1, kind=BarrierKind.SYNC)
    state.give_back(0, "train", 0, [], 65.0)  # the first request of the interval
    state.give_back(0, "train", 0, [], 74.0)
    assert (state.epoch, state.interval) == (0, 1)
    assert take(state, 1).ranges


def test_the_end_of_an_epoch_is_the_end_of_a_sync_interval_too():
    state = joined(2, intervals=SyncIntervals(replicas=2, rows=1))
    for replica in range(2):
        finish(state, replica, take(state, replica))
    assert isinstance(take(state, 0), SyncPoint)

    arrive(state, "end", 0, 1, kind=BarrierKind.REPORT)

    assert (state.epoch, state.interval) == (1, 1)
    assert take(state, 0, epoch=1).ranges


def test_a_plan_and_its_sync_point_survive_the_wire():
    remaining = [RemainingWork(NOBODY, (Range(1, 0, 1), Range(3, 0, -1)))]
    sync_point = SyncPoint(5, remaining, [trained(0.5, 3)])
    plan = plan_of(intervals=SyncIntervals(2, 1, 0.5, sync_point))

    def sent(value):
        """As msgpack leaves it: tuples become lists."""
        if isinstance(value, dict):
            return {key: sent(inner) for key, inner in value.items()}
        return [*map(sent, value)] if isinstance(value, list | tuple) else value

    assert read(sent(sync_point.to_wire()), SyncPoint) == sync_point
    again = RunSpec.from_wire(sent(vars(plan)))
    assert again.intervals == plan.intervals
    assert again.order != dataclasses.replace(again, seed=5).order


@pytest.mark.parametrize("option", [{"synchronous": True}, {"relayed": False}])
def test_only_a_relay_merges_and_no_updates_of_synchronous_replicas(option):
    plan = plan_of(2, merge_s=0.1, **option)

    with pytest.raises(
        ValueError, match="only a relay merges updates, and not of sync"
    ):
        RunSpec.from_wire(vars(plan))


# ---- joining replicas in a mesh


def newcomer(state):
    replica = state.members.assign("tcp://worker-new")
    state.join(replica, 100.0, Outbox(math.inf))
    return replica


def acknowledge(state, replica, sequence, generation, adopted_at=0, received=()):
    progress = PeerProgress(1, sequence)
    state.acknowledge(replica, progress, generation, adopted_at, dict(received))


def test_every_join_and_loss_changes_the_membership_of_all():
    state = joined(2, relayed=False)

    replica = newcomer(state)
    state.remove(0, "left", 0.0)

    stayed, worker = "tcp://worker-1", "tcp://worker-new"
    changes = [(m.sequence, m.origin, m.payload) for m in queued(state, 1, "member")]
    assert changes == [(3, replica, worker), (4, 0, None)]
    assert queued(state, 1, "members") == []
    (membership,) = queued(state, replica, "members")
    generation, members = membership.payload
    assert (generation, dict(members)[1], dict(members)[2]) == (3, stayed, worker)
    assert queued(state, replica, "member")[-1] == queued(state, 1, "member")[-1]


def test_what_many_joins_send_to_each_replica_grows_with_their_number():
    def named(count):
        """Replicas that the memberships in the queue to replica 0 name."""
        state = joined(2)
        for _ in range(count):
            newcomer(state)
        lists = [len(m.payload[1]) for m in queued(state, 0, "members")]
        return sum(lists) + len(queued(state, 0, "member"))

    assert [named(count) for count in (1, 8, 64)] == [1, 8, 64]


def test_the_membership_at_the_start_is_whole():
    state = RunState(plan_of({0: "tcp://a", 1: "tcp://b", 2: "tcp://c"}))
    for replica in (0, 1):
        state.join(replica, 0.0, Outbox(math.inf))
    assert queued(state, 0, "members") == []

    state.remove(2, "lost", 0.0)

    (membership,) = queued(state, 0, "members")
    assert membership.payload == (3, [(0, "tcp://a"), (1, "tcp://b")])
    assert queued(state, 0, "member") == []


def test_a_snapshot_must_contain_the_updates_sent_by_older_memberships():
    state = joined(2, relayed=False)
    replica = newcomer(state)
    generation = state.members.generation
    acknowledge(state, 0, 9, generation, adopted_at=7)
    assert not state.can_cut(generation)

    acknowledge(state, 1, 4, generation, adopted_at=4)

    assert state.can_cut(generation)
    assert state.cut(replica) == {0: 7, 1: 4}


def test_updates_that_a_joining_replica_may_need_are_not_acknowledged():
    state = joined(2, relayed=False)
    acknowledge(state, 0, 5, 2)
    replica = newcomer(state)  # it needs no update up to 5
    acknowledge(state, 0, 9, 3, adopted_at=7)
    acknowledge(state, 1, 0, 3, received={0: 9})
    assert state.received_by_all(0) == 5

    state.cut(replica)
    assert state.received_by_all(0) == 7
    acknowledge(state, replica, 0, 3, received={0: 8})

    assert state.received_by_all(0) == 8


def test_the_rounds_in_which_replicas_join_grow_with_the_logarithm_of_their_number():
    state, rounds = joined(1), 0
    members = state.members
    waiting = [newcomer(state) for _ in range(64)]
    while waiting:
        for replica in waiting:
            members.replicas[replica].donor = members.donor_of(replica)
        loading = [r for r in waiting if members.replicas[r].donor is not None]
        readers = Counter(members.replicas[r].donor for r in loading)
        assert max(readers.values()) <= MAX_READERS
        for replica in loading:
            state.activate(replica, step=0)
        waiting = members.not_active
        rounds += 1

    assert rounds == 4 == math.ceil(math.log(1 + 64, 1 + MAX_READERS))


def test_a_replica_whose_donor_fails_or_serves_the_fewest_has_another_one():
    state = joined(3)
    members = state.members
    for replica, step in ((0, 4), (1, 9), (2, 6)):
        members.replicas[replica].advance(step)
    first, second, third = (newcomer(state) for _ in range(3))

    for replica, donor in ((first, 1), (second, 2), (third, 0)):
        assert members.donor_of(replica) == donor
        members.replicas[replica].donor = donor
    assert members.donor_of(first) == 1  # itself counts as no reader
    state.lose(1, "no heartbeat", 9.0)
    assert members.donor_of(first) == 2  # with one reader, as 0, and more steps
    state.lose(third, "no heartbeat", 9.0)
    assert members.donor_of(first) == 0  # whose reader has gone


def test_a_joining_replica_whose_full_queue_does_not_move_is_stuck():
    state = merging(3, relay_bytes=4 * EACH_FRAMED)
    replica, _ = joining(state, state.spec.queue_bytes)
    box, silence_s = state.outboxes[replica], state.timeouts.silence
    box.drop(len(box))
    state.stuck(100.0)
    assert state.stuck(100.0 + 2 * silence_s) == []  # it had room
    publish(state, 0)
    publish(state, 1)

    begin_s = 100.0 + 2 * silence_s
    assert state.stuck(begin_s + silence_s) == []
    assert state.stuck(begin_s + silence_s + 1) == [replica]
    state.postpone_deadlines(2.0)
    assert state.stuck(begin_s + silence_s + 1) == []
    box.withhold()
    assert state.stuck(begin_s + 3 * silence_s) == []


def test_a_retried_activation_changes_nothing():
    state = joined(2)
    replica = newcomer(state)
    state.activate(replica, 5)
    state.publish(replica, [update(replica, 1, step=6)], PeerProgress(6))
    state.take_events()

    state.activate(replica, 5)

    assert state.members.replicas[replica].progress.step == 6
    assert state.take_events() == []
    assert len(queued(state, 0, "joined")) == 1


# ---- how a run ends


def test_no_heartbeat_is_missed_before_all_have_joined():
    state = RunState(plan_of(2))
    state.join(0, 100.0, Outbox(math.inf))

    assert state.members.timed_out(140) == []
    state.join(1, 150.0, Outbox(math.inf))
    assert state.members.timed_out(145) == []
    assert state.members.timed_out(151) == [0, 1]


def test_a_run_is_given_up_if_not_all_join_in_time():
    state = RunState(plan_of(2), now=10.0)
    state.join(0, 10.0, Outbox(math.inf))
    state.check_deadlines(10.0 + TIMEOUTS.join)
    assert state.stopped is None

    state.check_deadlines(10.1 + TIMEOUTS.join)

    assert state.stopped.startswith("not all replicas started within 60 s")
    assert "replica 1 on tcp://worker-1, which has not joined" in state.stopped


def test_a_run_with_too_few_replicas_is_given_up_unless_others_come_in_time():
    state = joined(2, now=0.0, min_replicas=2)
    state.members.replicas[0].heartbeat_at = 1000.0
    state.check_deadlines(5.0)
    state.remove(1, "left", 0.0)
    state.check_deadlines(5.0 + TIMEOUTS.rejoin)
    assert state.stopped is None

    state.check_deadlines(5.1 + TIMEOUTS.rejoin)

    assert state.stopped.startswith("fewer than min_replicas=2 replicas for 300 s")
    assert "1 left; gone: replica 1 on tcp://worker-1, last seen" in state.stopped


def test_replicas_without_a_heartbeat_have_failed():
    state = joined(2, now=100.0)
    state.members.replicas[1].heartbeat_at = 101.0

    assert state.check_deadlines(100.5 + TIMEOUTS.silence) == [0]
    assert state.stopped is None


def test_a_pause_of_the_scheduler_counts_towards_no_deadline():
    absent = RunState(plan_of(2), now=0.0)
    absent.join(0, 0.0, Outbox(math.inf))
    few = joined(2, now=0.0, min_replicas=3)
    late_s = max(TIMEOUTS.join, TIMEOUTS.silence, TIMEOUTS.rejoin)

    absent.postpone_deadlines(late_s)
    few.postpone_deadlines(late_s)

    assert absent.check_deadlines(late_s + TIMEOUTS.join) == []
    assert absent.stopped is None
    assert few.check_deadlines(late_s + TIMEOUTS.silence) == []
    few.check_deadlines(late_s + TIMEOUTS.rejoin)
    assert few.stopped is None
    few.check_deadlines(late_s + TIMEOUTS.rejoin + 0.1)
    assert few.stopped.startswith("fewer than min_replicas=3 replicas for 300 s")


def test_a_run_ends_without_failure_when_its_last_replica_leaves():
    state = joined(2)
    replica = newcomer(state)

    state.lose(1, "it was cut off", 101.0)
    state.leave(0, 102.0)
    state.lose(replica, "it was not started", 103.0)

    kinds = [event["kind"] for event in state.take_events()]
    assert kinds == ["lost", "over", "lost"]
    assert state.stopped is None


def test_a_run_without_replicas_names_the_failed_ones_and_the_causes():
    state = joined(2)

    state.leave(0, 101.0, retires=True)
    state.lose(1, "it was cut off", 102.0)

    events = state.take_events()
    kinds = [event["kind"] for event in events]
    assert kinds == ["retired", "lost", "failed", "stopped"]
    assert events[2]["deserted"]
    assert re.fullmatch(
        r"no replica is left: lost replica 0 .*: it retired with its worker; replica 1 "
        r"on tcp://worker-1, .*: it was cut off",
        state.stopped,
    )


def test_a_failure_of_a_joining_replica_does_not_end_the_run():
    state = joined(1)
    replica = newcomer(state)

    state.fail(replica, {"type": "ReplicaError", "summary": "boom"})
    state.lose(replica, "it was cut off", 101.0)

    failed, lost = state.take_events()
    assert failed == {
        "kind": "not joined",
        "replica": replica,
        "type": "ReplicaError",
        "summary": "boom",
    }
    assert lost["kind"] == "lost"
    assert state.stopped is None


def test_the_first_reason_why_a_replica_has_gone_is_kept():
    state = joined(2)
    replica = newcomer(state)

    state.fail(replica, {"type": "ReplicaError", "summary": "boom"})
    state.lose(replica, "it was cut off", 101.0)

    assert state.members.replicas[replica].why == "failed: boom"


def test_the_first_reason_for_a_stop_is_kept():
    state = joined(2)

    state.stop("enough")
    state.stop("too much")

    assert state.stopped == "enough"
    assert [event["summary"] for event in state.take_events()] == ["enough"]


def test_a_run_that_a_replica_has_completed_needs_no_more_replicas():
    state = joined(2, now=0.0, min_replicas=2)
    for replica in (0, 1):
        state.leave(replica, 1.0)

    state.check_deadlines(1000.0)

    assert state.stopped is None


def test_an_adaptive_cluster_is_asked_for_a_worker_per_lease():
    one_each, two_each = joined(3), joined({0: "tcp://a", 1: "tcp://a"})
    wanted = [state.workers_wanted for state in (one_each, two_each)]
    one_each.stop("enough")

    assert wanted == [4, 2]  # of four parts
    assert one_each.workers_wanted == 0


def test_a_run_that_has_lost_all_replicas_wants_workers_to_go_on():
    state = joined(3)
    for replica in range(3):
        state.lose(replica, "it was cut off", 101.0)

    assert state.stopped
    assert state.workers_wanted == 4


def test_a_run_that_a_replica_has_completed_wants_no_more_workers():
    state = joined(2)
    state.leave(0, 100.0)

    assert state.workers_wanted == 0


# ---- a look from outside


def test_a_description_says_who_waits_at_a_barrier_for_whom():
    state = joined(now=100.0)
    lease = take(state, 0)
    number = state.members.assign("tcp://worker-new")
    state.publish(1, [], PeerProgress(4))
    arrive(state, "a", 1, 2)
    state.lose(2, "it died", now=101.0)

    described = state.describe(now=103.0)

    assert (described["epoch"], described["rows"], described["stopped"]) == (0, 4, None)
    assert described["barriers"] == [[[1, 2], [0]]]
    short = {
        replica["replica"]: (
            replica["phase"],
            replica["step"],
            replica["silent_s"],
            replica["rows"],
        )
        for replica in described["replicas"]
    }
    assert short == {
        0: ("training", 0, 3.0, lease.rows),
        1: ("training", 4, 3.0, 0),
        2: ("gone", 0, 3.0, 0),
        number: ("starting", 0, None, 0),
    }


def test_a_round_waits_for_no_idle_replica():
    state = joined()
    state.give_back(0, "train", 0, [], now=100.0, idle_payload="idle")
    arrive(state, "a", 1, kind="round")

    assert state.describe(now=100.0)["barriers"] == [[[1], [2]]]
