from daskdl.channel.protocol import Item
from daskdl.channel.run_state import RunState
from tests.support.records import EACH, joined, plan_of, said, update, waiting


def test_replicas_are_absent_until_they_join():
    record = RunState(plan_of())

    record.join(1, now=0.0)

    assert record.members.present == [1]
    assert record.members.absent == [0, 2]
    assert record.members.expected == [0, 1, 2]


def test_every_join_and_loss_is_a_generation():
    record = joined()
    assert record.members.generation == 3

    record.remove(0)
    record.remove(1)

    assert record.members.generation == 5


def test_an_update_goes_to_all_but_its_origin_in_order():
    record = joined()
    items = [update(1, 1), update(1, 2)]

    accepted = record.publish(1, items, step=0, done=-1)

    assert accepted == 2
    assert waiting(record, 0) == waiting(record, 2) == items
    assert waiting(record, 1) == []


def test_an_item_for_which_one_receiver_has_no_room_goes_to_nobody():
    record = joined(relay_bytes=2 * EACH)
    record.publish(0, [update(0, 1)], 1, -1)  # fills replicas 1 and 2 a little
    record.outboxes[2].drop(2)  # and 2 has read it

    accepted = record.publish(0, [update(0, 2), update(0, 3)], 3, -1)

    assert accepted == 0
    assert [item.sequence for item in said(record, 1, "update")] == [1]
    assert said(record, 2, "update") == []
    assert record.members.replicas[0].progress.sequence == 1
    assert record.members.replicas[0].progress.step == 1


def test_the_items_before_the_one_that_finds_no_room_are_taken():
    record = joined(relay_bytes=2 * EACH)

    accepted = record.publish(0, [update(0, s) for s in (1, 2, 3)], 9, -1)

    assert accepted == 2
    assert [item.sequence for item in waiting(record, 1)] == [1, 2]
    assert said(record, 1, "progress") == []  # it would overtake the third


def test_a_lone_replica_publishes_to_nobody():
    record = joined(1)

    assert record.publish(0, [update(0, 1), update(0, 2)], 2, -1) == 2


def test_progress_is_told_once_to_all_others():
    record = joined()

    record.publish(1, [], step=4, done=-1)
    record.publish(1, [], step=4, done=-1)

    for other in (0, 2):
        assert waiting(record, other) == [Item("progress", 1, 0, 4, 0, -1)]
    assert waiting(record, 1) == []


def test_progress_that_an_update_tells_already_is_not_told_again():
    record = joined()

    record.publish(1, [update(1, 1, step=4)], step=4, done=-1)

    assert said(record, 0, "progress") == []


def test_the_end_of_an_epoch_is_told_even_at_the_same_step():
    record = joined()
    record.publish(1, [], step=4, done=-1)

    record.publish(1, [], step=4, done=0)

    assert waiting(record, 0)[-1] == Item("progress", 1, 0, 4, 0, 0)


def test_progress_is_told_beyond_the_bound():
    record = joined(relay_bytes=1)
    record.publish(1, [update(1, 1)], 0, -1)

    record.publish(1, [], 5, -1)

    assert len(said(record, 0, "progress")) == 1
