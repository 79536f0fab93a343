from daskdl.channel.protocol import Message
from daskdl.channel.sender import UnackedBuffer

WEIGHT = Message("update", 0, 1, 0, 100).weight()


def item(sequence):
    return Message("update", 0, sequence, 0, 100)


def kept(*sequences, limit_bytes=3 * WEIGHT):
    own = UnackedBuffer(limit_bytes)
    for sequence in sequences:
        own.keep(item(sequence))
    return own


def test_there_is_room_below_the_bound_and_none_at_it():
    own = kept(1, 2)
    assert own.has_room()

    own.keep(item(3))

    assert not own.has_room()


def test_nothing_is_forgotten_at_the_bound():
    own = kept(1, 2, 3, 4, 5)

    assert [i.sequence for i in own.find(range(9))] == [1, 2, 3, 4, 5]
    assert own.nbytes == 5 * WEIGHT


def test_what_is_confirmed_is_forgotten_up_to_there():
    own = kept(1, 2, 3)

    assert own.acknowledge(2) is True
    assert own.acknowledge(2) is False

    assert [i.sequence for i in own.find([3, 2, 1])] == [3]
    assert (len(own), own.nbytes) == (1, WEIGHT)
    assert own.has_room()


def test_one_of_any_size_is_taken_while_there_is_nothing():
    assert kept(limit_bytes=1).has_room()
    assert not kept(1, limit_bytes=1).has_room()


def test_what_is_kept_already_is_kept_once():
    own = kept(1, 1)

    assert (len(own), own.nbytes) == (1, WEIGHT)


def test_it_is_pressed_above_half_of_its_bound():
    assert not kept(1).pressed
    assert kept(1, 2).pressed
