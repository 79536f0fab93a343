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


def test_an_empty_box_takes_one_item_of_any_size():
    box = Outbox(EACH)

    assert box.has_room(10**9)
    assert box.offer(update(1, nbytes=10**9))
    assert not box.has_room(1)
