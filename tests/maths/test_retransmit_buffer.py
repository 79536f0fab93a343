import threading

from hypothesis import given
from hypothesis import strategies as st

from daskdl.channel.protocol import MESSAGE_BYTES, Message, MessageKind
from daskdl.channel.sender import RetransmitBuffer

WEIGHT = 36 + MESSAGE_BYTES
KEYS = st.tuples(st.integers(0, 2), st.integers(1, 6))
KEPT = st.lists(st.tuples(KEYS, st.integers(0, 150)), max_size=40)


def update(origin, sequence, nbytes=36, payload=None):
    return Message(MessageKind.UPDATE.value, origin, sequence, 0, nbytes, payload)


def ring_of(*keys, limit_bytes=10**6):
    ring = RetransmitBuffer(limit_bytes)
    for key in keys:
        ring.keep(update(*key))
    return ring


def bytes_of(items):
    return sum(item.nbytes + MESSAGE_BYTES for item in items)


def kept(ring, origin, sequences=range(1, 10)):
    return [item.sequence for item in ring.find(origin, sequences)]


def test_one_larger_than_the_bound_is_not_kept_and_displaces_nothing():
    ring = ring_of((0, 1), limit_bytes=WEIGHT)

    ring.keep(update(0, 2, 37))

    assert kept(ring, 0) == [1]
    assert ring.nbytes == WEIGHT


def test_one_that_is_here_counts_once_and_stays_as_old_as_it_is():
    ring = ring_of((0, 1), (0, 2), (0, 1), (0, 3), limit_bytes=2 * WEIGHT)

    assert kept(ring, 0) == [2, 3]
    assert ring.nbytes == 2 * WEIGHT


@given(KEPT, st.integers(0, 1000))
def test_it_holds_the_latest_that_fit_and_counts_them(updates, limit_bytes):
    ring, expected = RetransmitBuffer(limit_bytes), []

    for key, nbytes in updates:
        item = update(*key, nbytes)
        ring.keep(item)
        if item.nbytes + MESSAGE_BYTES <= limit_bytes and key not in {
            i[1:3] for i in expected
        }:
            expected.append(item)
        while bytes_of(expected) > limit_bytes:
            expected.pop(0)

    held = [item for origin in range(3) for item in ring.find(origin, range(1, 7))]
    assert held == sorted(expected, key=lambda item: item[1:3])
    assert ring.nbytes == bytes_of(expected)
    assert len(ring) == len(expected)


def test_two_threads_lose_no_count():
    ring = RetransmitBuffer(50 * WEIGHT)

    def fill(origin):
        for sequence in range(1, 3000):
            ring.keep(update(origin, sequence))
            ring.find(1 - origin, [sequence])

    threads = [threading.Thread(target=fill, args=(origin,)) for origin in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    held = [item for origin in (0, 1) for item in ring.find(origin, range(3000))]
    assert len(held) == len(ring)
    assert ring.nbytes == len(held) * WEIGHT <= 50 * WEIGHT


class TestUntilAcknowledged:
    def test_one_of_any_size_is_taken_while_there_is_nothing(self):
        ring = RetransmitBuffer(1, evicts=False)

        assert ring.has_room()
        ring.keep(update(0, 1))
        assert not ring.has_room()
