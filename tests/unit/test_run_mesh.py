"""The record of a run whose replicas send to each other."""

from daskdl.channel.run_state import RunRecord, Standing
from tests.support.records import joined, queued, said


def newcomer(record):
    replica = record.members.seat("tcp://worker-new")
    record.join(replica, 100.0)
    return replica


def told_routes(record, replica):
    return [item.payload for item in said(record, replica, "routes")]


def test_nobody_is_told_of_routes_before_all_founders_are_there():
    record = RunRecord(joined().plan)
    record.join(0, 0.0)
    record.join(1, 0.0)
    assert queued(record, 0) == []

    record.join(2, 0.0)

    members = [(r, f"tcp://worker-{r}") for r in range(3)]
    assert all(told_routes(record, r) == [(3, members)] for r in range(3))


def test_every_join_and_loss_changes_the_routes_for_all():
    record = joined(2)

    replica = newcomer(record)
    record.remove(0)

    generations = [
        (generation, [r for r, _ in members])
        for generation, members in told_routes(record, 1)
    ]
    assert generations == [(3, [0, 1, 2]), (4, [1, 2])]
    assert told_routes(record, replica) == told_routes(record, 1)


def test_the_routes_come_after_the_word_of_the_loss():
    record = joined(2)

    record.remove(0)

    assert [item.kind for item in queued(record, 1)] == ["lost", "routes"]


def test_a_newcomer_is_cut_off_where_all_have_heard_of_it():
    record = joined(2)
    replica = newcomer(record)
    generation = record.members.generation
    record.hear(0, 1, -1, 9, Standing(generation, adopted_at=7))
    assert not record.adopted(generation)

    record.hear(1, 1, -1, 4, Standing(generation, adopted_at=4))

    assert record.adopted(generation)
    assert record.exact_cut(replica) == {0: 7, 1: 4}


def test_nothing_is_forgotten_that_a_newcomer_may_still_need():
    record = joined(2)
    record.hear(0, 1, -1, 5, Standing(2))
    replica = newcomer(record)  # at that time it needs nothing up to 5
    record.hear(0, 1, -1, 9, Standing(3, adopted_at=7))
    record.hear(1, 1, -1, 0, Standing(3, received={0: 9}))
    assert record.stable(0) == 5

    record.exact_cut(replica)
    assert record.stable(0) == 7
    record.hear(replica, 0, -1, 0, Standing(3, received={0: 8}))

    assert record.stable(0) == 8


def test_one_that_is_lost_keeps_nothing_from_being_forgotten():
    record = joined(3)
    record.hear(0, 1, -1, 5, Standing(3))
    record.hear(1, 1, -1, 0, Standing(3, received={0: 5}))
    assert record.stable(0) == 0

    record.remove(2)

    assert record.stable(0) == 5


def test_the_words_are_of_those_that_train():
    record = joined(2)
    newcomer(record)
    record.hear(0, 6, 1, 5, Standing(2))

    assert record.words() == [(0, 5, 6, 1), (1, 0, 0, -1)]
