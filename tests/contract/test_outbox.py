import pytest

from daskdl.channel.protocol import MESSAGE_BYTES, Message, MessageKind
from daskdl.channel.sender import Outbox

EACH = 100 + MESSAGE_BYTES  # what one item of the tests weighs


def update(sequence, nbytes=100):
    return Message(MessageKind.UPDATE.value, 3, sequence, 0, nbytes, b"frame")


def filled(count, limit_bytes=10 * EACH):
    box = Outbox(limit_bytes)
    for sequence in range(1, count + 1):
        assert box.offer(update(sequence))
    return box


def test_items_are_taken_up_to_the_bound_exactly():
    box = Outbox(2 * EACH)

    accepted = [box.offer(update(sequence)) for sequence in (1, 2, 3)]

    assert accepted == [True, True, False]
    assert box.nbytes == 2 * EACH


def test_one_byte_less_than_two_items_takes_only_one():
    box = Outbox(2 * EACH - 1)

    assert [box.offer(update(1)), box.offer(update(2))] == [True, False]


def test_an_empty_box_takes_one_item_of_any_size():
    box = Outbox(EACH)

    assert box.has_room(10**9)
    assert box.offer(update(1, nbytes=10**9))
    assert not box.has_room(1)


def test_a_refused_offer_changes_nothing():
    box = filled(2, limit_bytes=2 * EACH)
    offers = []
    box.on_offer = lambda: offers.append(None)

    assert not box.offer(update(3))

    assert (len(box), box.nbytes, offers) == (2, 2 * EACH, [])
    assert [item.sequence for item in box.head(10**9)] == [1, 2]


def test_a_forced_item_is_taken_beyond_the_bound():
    box = filled(2, limit_bytes=2 * EACH)

    assert box.offer(update(3), force=True)

    assert box.nbytes == 3 * EACH
    assert not box.offer(update(4))


def test_each_accepted_item_is_announced_when_it_is_there():
    box = Outbox(10 * EACH)
    seen = []
    box.on_offer = lambda: seen.append(len(box))

    box.offer(update(1))
    box.offer(update(2))

    assert seen == [1, 2]


@pytest.mark.parametrize(
    ("limit_bytes", "expected"),
    [(1, [1]), (2 * EACH - 1, [1]), (2 * EACH, [1, 2]), (10**9, [1, 2, 3])],
    ids=["at least one", "a byte short", "exactly", "all"],
)
def test_the_head_is_the_oldest_items_up_to_a_size(limit_bytes, expected):
    box = filled(3)

    assert [item.sequence for item in box.head(limit_bytes)] == expected
    assert len(box) == 3


def test_the_head_of_an_empty_box_is_empty():
    assert Outbox(1).head(10**9) == []


def test_dropped_items_are_the_oldest_and_free_their_bytes():
    box = filled(3, limit_bytes=3 * EACH)

    box.drop(2)

    assert [item.sequence for item in box.head(10**9)] == [3]
    assert box.nbytes == EACH
    assert box.offer(update(4))
