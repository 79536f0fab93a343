"""The record of a run whose replicas send to each other."""

from daskdl.channel.protocol import PeerProgress
from daskdl.channel.run_state import RunState
from tests.support.records import joined, queued, said


def newcomer(record):
    replica = record.members.assign("tcp://worker-new")
    record.join(replica, 100.0)
    return replica


def acknowledge(record, replica, progress, generation, adopted_at=0, received=()):
    own = PeerProgress(*progress)
    return record.acknowledge(replica, own, generation, adopted_at, dict(received))


def told_routes(record, replica):
    return [item.payload for item in said(record, replica, "routes")]


def test_nobody_is_told_of_routes_before_all_founders_are_there():
    record = RunState(joined().plan)
    record.join(0, 0.0)
    record.join(1, 0.0)
    assert queued(record, 0) == []

    record.join(2, 0.0)

    members = [(r, f"tcp://worker-{r}") for r in range(3)]
    assert all(told_routes(record, r) == [(3, members)] for r in range(3))


def test_every_join_and_loss_changes_the_routes_for_all():
    record = joined(2, routing="mesh")

    replica = newcomer(record)
    record.remove(0)

    generations = [
        (generation, [r for r, _ in members])
        for generation, members in told_routes(record, 1)
    ]
    assert generations == [(3, [0, 1, 2]), (4, [1, 2])]
    assert told_routes(record, replica) == told_routes(record, 1)


def test_the_routes_come_after_the_word_of_the_loss():
    record = joined(2, routing="mesh")

    record.remove(0)

    assert [item.kind for item in queued(record, 1)] == ["lost", "routes"]


def test_a_newcomer_is_cut_off_where_all_have_heard_of_it():
    record = joined(2, routing="mesh")
    replica = newcomer(record)
    generation = record.members.generation
    acknowledge(record, 0, (1, 9, -1), generation, adopted_at=7)
    assert not record.can_cut(generation)

    acknowledge(record, 1, (1, 4, -1), generation, adopted_at=4)

    assert record.can_cut(generation)
    assert record.cut(replica) == {0: 7, 1: 4}


def test_nothing_is_forgotten_that_a_newcomer_may_still_need():
    record = joined(2, routing="mesh")
    acknowledge(record, 0, (1, 5, -1), 2)
    replica = newcomer(record)  # at that time it needs nothing up to 5
    acknowledge(record, 0, (1, 9, -1), 3, adopted_at=7)
    acknowledge(record, 1, (1, 0, -1), 3, received={0: 9})
    assert record.received_by_all(0) == 5

    record.cut(replica)
    assert record.received_by_all(0) == 7
    acknowledge(record, replica, (0, 0, -1), 3, received={0: 8})

    assert record.received_by_all(0) == 8


def test_one_that_is_lost_keeps_nothing_from_being_forgotten():
    record = joined(3, routing="mesh")
    acknowledge(record, 0, (1, 5, -1), 3)
    acknowledge(record, 1, (1, 0, -1), 3, received={0: 5})
    assert record.received_by_all(0) == 0

    record.remove(2)

    assert record.received_by_all(0) == 5


def test_the_words_are_of_those_that_train():
    record = joined(2, routing="mesh")
    newcomer(record)
    acknowledge(record, 0, (6, 5, 1), 2)

    assert record.progress() == [(0, (6, 5, 1)), (1, (0, 0, -1))]
