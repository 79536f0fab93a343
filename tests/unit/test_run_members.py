import pytest

from daskdl.channel.protocol import Item
from daskdl.channel.run_state import RunState
from tests.support.records import EACH, TIMEOUTS, joined, plan_of, said, update, waiting


def part(lease):
    """Of a lease of one part, None if it is none."""
    return None if lease is None else lease.ranges[0].part


def test_what_a_lost_replica_held_is_free_for_the_others_and_counted():
    record = joined()
    assert part(record.lease(0, "train", 0, lambda key: False)) == 0

    record.remove(0)

    rest = [part(record.lease(1, "train", 0, lambda key: False)) for _ in range(5)]
    assert rest == [1, 2, 3, 0, None]
    assert record.schedule.repeated == 1


def test_the_others_are_told_of_a_loss_with_its_last_step():
    record = joined()
    record.publish(0, [update(0, 1, step=3)], 5, -1)

    record.remove(0)

    assert record.members.present == [1, 2]
    for other in (1, 2):
        assert waiting(record, other)[-1] == Item("lost", 0, 0, 5, 0)


def test_a_loss_remembers_the_last_update_that_all_will_get():
    record = joined(relay_bytes=2 * EACH)
    record.publish(0, [update(0, s) for s in (1, 2, 3)], 3, -1)

    record.remove(0)

    assert record.members.gone == {0: 2}
    assert record.members.expected == [1, 2]


def test_one_lost_before_it_joined_is_expected_no_more():
    record = RunState(plan_of())

    record.remove(2)

    assert record.members.absent == [0, 1]
    assert record.members.gone == {2: 0}


def test_what_one_that_left_has_sent_is_remembered():
    record = joined()
    record.publish(0, [update(0, 1)], 1, -1)

    record.remove(0)

    assert record.members.present == record.members.expected == [1, 2]
    assert record.members.gone == {0: 1}
    assert waiting(record, 1)[-1].kind == "lost"  # nothing more comes from it


def test_the_word_to_stop_reaches_everybody_once():
    record = joined(2)

    record.stop("enough")
    record.stop("again")

    assert record.stopped == "enough"
    for replica in (0, 1):
        assert waiting(record, replica) == [Item("stop", 0, 0, 0, 6, "enough")]


def test_members_not_heard_of_for_too_long_are_silent():
    record = joined(now=100.0)
    record.members.replicas[1].heard_at = 105.0

    assert record.members.silent_since(100) == []
    assert record.members.silent_since(100.1) == [0, 2]
    assert record.members.silent_since(105.1) == [0, 1, 2]


def test_nobody_is_silent_while_all_wait_for_one_to_join():
    record = RunState(plan_of(2))
    record.join(0, now=100.0)

    assert record.members.silent_since(140) == []
    record.join(1, now=150.0)
    assert record.members.silent_since(145) == []
    assert record.members.silent_since(151) == [0, 1]


def test_one_that_was_lost_is_not_silent():
    record = joined()
    record.remove(1)

    assert record.members.silent_since(990) == [0, 2]


def test_a_near_piece_is_leased_by_its_key():
    record = joined()

    lease = record.lease(0, "train", 0, lambda key: key == "piece-2")

    assert part(lease) == 2


def test_each_epoch_and_phase_has_its_own_leases():
    record = joined(1)

    def drain(phase, epoch):
        take = record.lease
        return [part(take(0, phase, epoch, lambda key: False)) for _ in range(5)]

    assert drain("train", 0) == [0, 1, 2, 3, None]
    assert drain("validation", 0) == [0, 1, 2, 3, None]
    assert drain("train", 0) == [None] * 5
    assert drain("train", 1) == [0, 1, 2, 3, None]


def test_training_pieces_are_shuffled_by_seed_and_validation_pieces_never():
    record = joined(1, seed=0)
    orders = [
        [part(record.lease(0, phase, epoch, lambda key: False)) for _ in range(size)]
        for phase, epoch, size in [
            ("train", 0, 4),
            ("train", 1, 4),
            ("validation", 0, 4),
            ("validation", 1, 4),
        ]
    ]

    assert [sorted(order) for order in orders[:2]] == [[0, 1, 2, 3]] * 2
    assert orders[0] != orders[1]
    assert orders[2:] == [[0, 1, 2, 3]] * 2


def test_synchronous_runs_have_fixed_shares():
    record = joined(2, synchronous=True)

    taken = [part(record.lease(1, "train", 0, lambda key: True)) for _ in range(3)]

    assert taken == [2, 3, None]


def test_a_piece_is_finished_by_its_holder_only():
    record = joined()
    number = record.lease(0, "train", 0, lambda key: False).number

    for replica, rows_left in ((1, 4), (0, 3)):
        finished = [{"piece": number, "examples": 1}]
        record.give_back(replica, "train", 0, finished, now=0.0)
        assert record.schedule.open("train", 0, None).unfinished() == rows_left


def test_repeated_pieces_of_the_validation_are_not_counted():
    record = joined()
    record.lease(0, "validation", 0, lambda key: False)
    record.remove(0)

    for _ in range(4):
        record.lease(1, "validation", 0, lambda key: False)

    assert record.schedule.repeated == 0


def test_a_barrier_is_the_same_for_all_until_it_is_complete():
    record = joined(2)

    barrier = record.arrive("end", 0, "zero", b"", "meet")

    assert record.arrive("end", 1, "one", b"", "meet") is barrier
    assert record.arrive("other", 1, "one", b"", "meet") is not barrier
    record.complete("end", barrier)
    assert record.arrive("end", 0, "zero", b"", "meet") is not barrier


def test_everybody_reads_the_same_at_a_barrier_whoever_goes_meanwhile():
    record = joined()
    barrier = record.arrive("end", 0, "zero", b"", "meet")

    first = record.complete("end", barrier)
    record.remove(2)
    second = record.complete("end", barrier)

    assert (first, second) == (True, False)
    assert barrier.gone == {}


def test_updates_are_held_between_two_barriers_and_then_passed_on():
    record = joined()
    record.complete("end", record.arrive("end", 0, None, b"", "agree"))

    accepted = record.publish(2, [update(2, 1)], 1, -1)
    record.remove(2)
    held = said(record, 0, "update")
    record.complete("report", record.arrive("report", 0, None, b"", "report"))

    assert (accepted, held) == (1, [])
    assert said(record, 0, "update") == said(record, 1, "update") == [update(2, 1)]
    assert record.members.gone == {2: 1}
    record.complete("next", record.arrive("next", 0, None, b"", "meet"))
    assert len(said(record, 0, "update")) == 1


def test_the_client_is_told_what_all_said_and_what_was_counted():
    record = joined(2)
    record.refused = 3
    record.arrive("end", 1, "one", b"of one", "report")

    record.complete("end", record.arrive("end", 0, "zero", b"of zero", "report"))

    assert record.events.since(0) == [
        {
            "kind": "gathered",
            "key": "end",
            "epoch": 0,
            "notes": [[0, "zero"], [1, "one"]],
            "told": [b"of zero", b"of one"],
            "refused": 3,
            "repeated": 0,
            "departed": [],
        }
    ]
    assert record.report == [[0, "zero"], [1, "one"]]  # for those that come later


def test_refused_messages_are_counted_in_their_epoch_alone():
    record = joined(1)
    counted = []
    for epoch, refused in enumerate([3, 0, 2]):
        record.refused += refused
        barrier = record.arrive(f"end {epoch}", 0, "note", b"", "report")
        record.complete(f"end {epoch}", barrier)
        counted.append(barrier.counted["refused"])

    assert counted == [3, 0, 2]


def test_a_replica_is_described_by_who_where_and_what_was_heard():
    record = RunState(plan_of())
    record.join(1, 0.0)
    record.publish(1, [update(1, 4, step=9)], 9, -1)

    assert record.members.describe([1], now=2.5) == (
        "replica 1 on tcp://worker-1, last heard at step 9, update 4, 2.5 s ago"
    )
    assert (
        record.members.describe([0], now=2.5)
        == "replica 0 on tcp://worker-0, which has not joined"
    )


def test_the_bounds_on_waiting_are_those_of_the_plan():
    assert RunState(plan_of()).timeouts == TIMEOUTS


@pytest.mark.parametrize("replica", [0, 1, 2])
def test_each_replica_has_a_queue_of_the_bound_of_the_plan(replica):
    record = joined(relay_bytes=12345)

    assert record.outboxes[replica].limit_bytes == 12345
