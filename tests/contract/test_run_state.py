"""What the scheduler knows of a run and decides, a call at a time."""

import dataclasses
import re

from daskdl.channel.leasing import (
    NOBODY,
    Done,
    Range,
    RemainingWork,
    RunSpec,
    SyncIntervals,
    SyncPoint,
)
from daskdl.channel.protocol import BarrierKind, Message, PeerProgress
from daskdl.channel.run_state import RunState
from tests.support.run_states import (
    EACH,
    TIMEOUTS,
    joined,
    plan_of,
    said,
    update,
    waiting,
)

NOBODY_IS_NEAR = {"is_near": lambda key: False}


# ---- updates and progress


def test_an_item_for_which_one_receiver_has_no_room_goes_to_nobody():
    record = joined(relay_bytes=2 * EACH)
    record.publish(
        0, [update(0, 1)], PeerProgress(1)
    )  # fills replicas 1 and 2 a little
    record.outboxes[2].drop(2)  # and 2 has read it

    accepted = record.publish(0, [update(0, 2), update(0, 3)], PeerProgress(3))

    assert accepted == 0
    assert [item.sequence for item in said(record, 1, "update")] == [1]
    assert said(record, 2, "update") == []
    assert record.members.replicas[0].progress.sequence == 1
    assert record.members.replicas[0].progress.step == 1


def test_the_items_before_the_one_that_finds_no_room_are_taken():
    record = joined(relay_bytes=2 * EACH)

    accepted = record.publish(0, [update(0, s) for s in (1, 2, 3)], PeerProgress(9))

    assert accepted == 2
    assert [item.sequence for item in waiting(record, 1)] == [1, 2]
    assert said(record, 1, "progress") == []  # it would overtake the third


def test_progress_is_told_once_to_all_others():
    record = joined()

    record.publish(1, [], PeerProgress(4, 0, -1))
    record.publish(1, [], PeerProgress(4, 0, -1))

    for other in (0, 2):
        assert waiting(record, other) == [Message("progress", 1, 0, 4, 0, -1)]
    assert waiting(record, 1) == []


# ---- members and barriers


def test_the_others_are_told_of_a_loss_with_its_last_step():
    record = joined()
    record.publish(0, [update(0, 1, step=3)], PeerProgress(5))

    record.remove(0)

    assert record.members.present == [1, 2]
    for other in (1, 2):
        assert waiting(record, other)[-1] == Message("failed", 0, 0, 5, 0)


def test_nobody_is_silent_while_all_wait_for_one_to_join():
    record = RunState(plan_of(2))
    record.join(0, now=100.0)

    assert record.members.timed_out(140) == []
    record.join(1, now=150.0)
    assert record.members.timed_out(145) == []
    assert record.members.timed_out(151) == [0, 1]


def test_a_piece_is_finished_by_its_holder_only():
    record = joined()
    number = record.lease(0, "train", 0, lambda key: False).number

    for replica, rows_left in ((1, 4), (0, 3)):
        finished = [{"lease": number, "examples": 1}]
        record.give_back(replica, "train", 0, finished, now=0.0)
        assert record.leases["train"].unfinished == rows_left


def arrive(record, key, *replicas, kind="meet"):
    """Each is there with a payload of its own; returns where the last of them is."""
    for replica in replicas:
        barrier = record.arrive(key, replica, f"of {replica}", b"%d" % replica, kind)
    return barrier


def test_a_barrier_is_the_same_for_all_until_it_is_complete():
    record = joined(2)

    barrier = arrive(record, "end", 0)

    assert arrive(record, "other", 1) is not barrier
    assert not barrier.complete
    assert arrive(record, "end", 1) is barrier
    assert barrier.complete
    assert arrive(record, "end", 0) is not barrier


def test_everybody_reads_the_same_at_a_barrier_whoever_goes_meanwhile():
    record = joined()
    barrier = arrive(record, "end", 0, 1)
    record.remove(2)

    record.remove(1)

    assert barrier.gone == {2: 0}
    assert barrier.payloads == {0: "of 0", 1: "of 1"}


def test_no_barrier_is_complete_without_anybody_to_read_it_or_once_all_leave():
    deserted, stopped = joined(2), joined(2)
    barriers = [arrive(record, "end", 0) for record in (deserted, stopped)]

    deserted.remove(0)
    deserted.remove(1)
    stopped.stop("enough")
    stopped.remove(1)

    assert [barrier.complete for barrier in barriers] == [False, False]


def test_one_that_fails_while_it_waits_for_a_lease_has_no_part_in_later_rounds():
    record = joined(3)
    record.give_back(2, "train", 0, [], 0.0, idle_payload="of 2")
    record.remove(2)
    barrier = arrive(record, "round", 0, kind="round")
    assert not barrier.complete

    arrive(record, "round", 1, kind="round")

    assert barrier.payloads == {0: "of 0", 1: "of 1"}


def test_a_round_is_complete_once_the_others_wait_for_a_lease():
    record = joined(2)
    barrier = arrive(record, "round", 0, kind="round")

    record.give_back(1, "train", 0, [], 0.0, idle_payload="said before")

    assert barrier.payloads == {0: "of 0", 1: "said before"}


def test_updates_are_held_between_two_barriers_and_then_passed_on():
    record = joined()
    arrive(record, "end", 0, 1, 2, kind="agree")

    accepted = record.publish(2, [update(2, 1)], PeerProgress(1))
    record.remove(2)
    held = said(record, 0, "update")
    arrive(record, "report", 0, 1, kind="report")

    assert (accepted, held) == (1, [])
    assert said(record, 0, "update") == said(record, 1, "update") == [update(2, 1)]
    assert record.members.gone == {2: 1}
    arrive(record, "next", 0, 1)
    assert len(said(record, 0, "update")) == 1


def test_the_client_is_told_what_all_said_and_what_was_counted():
    record = joined(2)
    record.refused = 3

    arrive(record, "end", 1, 0, kind="report")

    assert record.take_events() == [
        {
            "kind": "report",
            "key": "end",
            "epoch": 0,
            "payloads": [[0, "of 0"], [1, "of 1"]],
            "client_payloads": [b"0", b"1"],
            "refused": 3,
            "repeated": 0,
            "departed": [],
        }
    ]
    assert record.report == [[0, "of 0"], [1, "of 1"]]  # for those that come later


def test_what_others_did_in_an_epoch_that_is_resumed_counts_in_that_epoch_alone():
    resumed = SyncPoint(0, [RemainingWork(NOBODY, (Range(1, 0, 1),))], [Done(1.5, 3)])
    intervals = SyncIntervals(resumed=resumed)
    record = RunState(dataclasses.replace(plan_of(1), intervals=intervals))
    record.join(0, 0.0)

    departed = [
        arrive(record, key, 0, kind=kind).counted["departed"]
        for key, kind in (("pause", "sync"), ("end", "report"), ("next", "report"))
    ]

    assert departed == [[Done(1.5, 3)], [Done(1.5, 3)], []]


def test_one_that_fails_at_a_sync_point_leaves_its_examples_and_no_part_of_it():
    record = joined()
    for replica in (0, 1):
        lease = take(record, replica)
        finished = [{"lease": lease.number, "examples": 5, "loss": 2.0}]
        record.give_back(replica, "train", 0, finished, now=0.0)
    arrive(record, "pause", 1, kind="sync")
    record.remove(1)

    barrier = arrive(record, "pause", 0, 2, kind="sync")

    assert barrier.counted["departed"] == [Done(10.0, 5)]


# ---- sync intervals


def in_intervals(seed=None, **intervals):
    """A run of two replicas, of four parts of a row each."""
    record = RunState(
        dataclasses.replace(
            plan_of(2, seed=seed), intervals=SyncIntervals(replicas=2, **intervals)
        )
    )
    for replica in range(2):
        record.join(replica, 0.0)
    return record


def take(record, replica, phase="train", epoch=0):
    lease = record.lease(replica, phase, epoch, **NOBODY_IS_NEAR)
    return None if isinstance(lease, SyncPoint) else lease


def pause_of(record, replica):
    lease = record.lease(replica, "train", record.epoch, **NOBODY_IS_NEAR)
    assert lease is None or isinstance(lease, SyncPoint)
    return lease


def finish(record, replica, lease, epoch=0, now=0.0):
    finished = [{"lease": lease.number, "examples": 1, "loss": 0.0}]
    record.give_back(replica, "train", epoch, finished, now)


def meet(record, kind):
    arrive(record, str(kind), 0, 1, kind=kind)


def test_a_lap_ends_when_it_has_taken_long_enough():
    record = in_intervals(seconds=10.0)
    record.give_back(0, "train", 0, [], 50.0)
    first = take(record, 0)

    record.give_back(0, "train", 0, [], 59.9)
    second = take(record, 1)
    record.give_back(0, "train", 0, [], 60.0)

    assert second is not None
    assert take(record, 0) is None
    assert pause_of(record, 0) is None  # somebody holds a piece
    assert not record.can_lease(0, "train", 0)
    finish(record, 0, first)
    finish(record, 1, second)
    assert record.can_lease(0, "train", 0)
    pause = pause_of(record, 0)
    assert sum(one.rows for work in pause.remaining for one in work.ranges) == 2


def test_after_a_pause_all_go_on_in_the_same_epoch_and_time_begins_anew():
    record = in_intervals(seconds=10.0)
    record.give_back(0, "train", 0, [], 0.0)
    finish(record, 0, take(record, 0))
    record.give_back(0, "train", 0, [], 10.0)
    assert pause_of(record, 1) is not None

    meet(record, BarrierKind.SYNC)
    record.give_back(0, "train", 0, [], 15.0)  # the first look of the lap
    record.give_back(0, "train", 0, [], 24.0)

    assert (record.epoch, record.interval) == (0, 1)
    assert take(record, 1) is not None


def test_the_end_of_an_epoch_is_that_of_a_lap_too():
    record = in_intervals(rows=1)
    for replica in range(2):
        finish(record, replica, take(record, replica))
    assert pause_of(record, 0) is not None

    meet(record, BarrierKind.REPORT)

    assert (record.epoch, record.interval) == (1, 1)
    assert take(record, 0, epoch=1) is not None


def test_plan_and_pause_come_over_the_wire_as_they_were():
    record = in_intervals(rows=1)
    finish(record, 0, take(record, 0))
    finish(record, 1, take(record, 1))
    pause = pause_of(record, 0)
    pause = pause._replace(departed=[Done(0.5, 3)])
    intervals = SyncIntervals(2, 1, 0.5, pause)
    plan = dataclasses.replace(record.spec, intervals=intervals)

    def sent(value):
        """As msgpack leaves it: tuples become lists."""
        if isinstance(value, dict):
            return {key: sent(one) for key, one in value.items()}
        return [*map(sent, value)] if isinstance(value, list | tuple) else value

    assert SyncPoint.from_wire(sent(pause.to_wire())) == pause
    again = RunSpec.from_wire(sent(vars(plan)))
    assert again.intervals == plan.intervals
    assert again.order != dataclasses.replace(again, seed=5).order


# ---- replicas that send to each other


def newcomer(record):
    replica = record.members.assign("tcp://worker-new")
    record.join(replica, 100.0)
    return replica


def acknowledge(record, replica, progress, generation, adopted_at=0, received=()):
    own = PeerProgress(*progress)
    return record.acknowledge(replica, own, generation, adopted_at, dict(received))


def told_routes(record, replica):
    return [item.payload for item in said(record, replica, "members")]


def test_every_join_and_loss_changes_the_routes_for_all():
    record = joined(2, relayed=False)

    replica = newcomer(record)
    record.remove(0)

    generations = [
        (generation, [r for r, _ in members])
        for generation, members in told_routes(record, 1)
    ]
    assert generations == [(3, [0, 1, 2]), (4, [1, 2])]
    assert told_routes(record, replica) == told_routes(record, 1)


def test_a_newcomer_is_cut_off_where_all_have_heard_of_it():
    record = joined(2, relayed=False)
    replica = newcomer(record)
    generation = record.members.generation
    acknowledge(record, 0, (1, 9, -1), generation, adopted_at=7)
    assert not record.can_cut(generation)

    acknowledge(record, 1, (1, 4, -1), generation, adopted_at=4)

    assert record.can_cut(generation)
    assert record.cut(replica) == {0: 7, 1: 4}


def test_nothing_is_forgotten_that_a_newcomer_may_still_need():
    record = joined(2, relayed=False)
    acknowledge(record, 0, (1, 5, -1), 2)
    replica = newcomer(record)  # at that time it needs nothing up to 5
    acknowledge(record, 0, (1, 9, -1), 3, adopted_at=7)
    acknowledge(record, 1, (1, 0, -1), 3, received={0: 9})
    assert record.received_by_all(0) == 5

    record.cut(replica)
    assert record.received_by_all(0) == 7
    acknowledge(record, replica, (0, 0, -1), 3, received={0: 8})

    assert record.received_by_all(0) == 8


# ---- leases


def test_a_joining_replica_is_as_far_as_the_state_that_it_has_taken():
    state = joined(1)
    replica = newcomer(state)

    state.activate(replica, 7)

    assert state.members.replicas[replica].progress.step == 7


def test_examples_of_a_lease_count_for_its_holder_alone():
    state = joined(3)
    lease = take(state, 0)
    for replica in (1, 0):
        finished = [{"lease": lease.number, "examples": 5, "loss": 2.0}]
        state.give_back(replica, "train", 0, finished, now=0.0)
    state.remove(0)
    state.remove(1)

    barrier = arrive(state, "end", 2, kind="report")

    assert barrier.counted["departed"] == [Done(10.0, 5), Done(0.0, 0)]


# ---- how a run ends


def test_a_run_is_given_up_if_not_all_have_joined_in_time():
    state = RunState(plan_of(2), now=10.0)
    state.join(0, 10.0)
    assert state.check_deadlines(10.0 + TIMEOUTS.join) == []
    assert state.stopped is None

    state.check_deadlines(10.1 + TIMEOUTS.join)

    assert state.stopped.startswith("not all replicas started within 60 s")
    assert "replica 1 on tcp://worker-1, which has not joined" in state.stopped


def test_a_run_with_too_few_replicas_is_given_up_unless_others_come_in_time():
    state = RunState(dataclasses.replace(plan_of(2), min_replicas=2))
    for replica in range(2):
        state.join(replica, 0.0)
    state.members.replicas[0].heartbeat_at = 1000.0
    state.check_deadlines(5.0)
    state.remove(1)
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


def test_a_run_that_all_have_left_at_its_end_is_no_failure():
    state = joined(2)

    state.lose(1, "it was cut off", 101.0)
    state.leave(0, 102.0)

    assert [event["kind"] for event in state.take_events()] == ["lost", "over"]
    assert state.stopped is None


def test_a_run_whose_replicas_all_failed_says_which_and_why():
    state = joined(2)

    state.leave(0, 101.0, retires=True)
    state.lose(1, "it was cut off", 102.0)

    kinds = [event["kind"] for event in state.take_events()]
    assert kinds == ["retired", "lost", "failed", "stopped"]
    assert re.fullmatch(
        r"no replica is left: lost replica 0 .*: it retired with its worker; replica 1 "
        r"on tcp://worker-1, .*: it was cut off",
        state.stopped,
    )


def test_what_a_joining_replica_cannot_do_ends_nobodys_run():
    state = joined(1)
    replica = newcomer(state)

    state.fail(replica, {"type": "ReplicaError", "summary": "boom"})
    state.lose(replica, "it was cut off", 101.0)

    assert [event["kind"] for event in state.take_events()] == ["not joined", "lost"]
    assert state.stopped is None
