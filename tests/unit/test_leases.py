from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdl.channel.leases import Leases, piece_order

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "finish", "lose"]), st.integers(0, 3)),
    max_size=80,
)


def drained(leases, replica):
    """What a replica gets that asks until there is nothing left for it."""
    return list(iter(lambda: leases.take(replica), None))


def test_the_order_without_a_seed_is_that_of_the_data():
    assert piece_order(4, epoch=3, seed=None) == [0, 1, 2, 3]


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_an_order_has_every_piece_once(epoch):
    assert sorted(piece_order(50, epoch, seed=1)) == list(range(50))


def test_equal_seeds_give_equal_orders():
    assert piece_order(50, 2, seed=1) == piece_order(50, 2, seed=1)


@pytest.mark.parametrize("other", [(3, 1), (2, 7)], ids=["epoch", "seed"])
def test_another_epoch_or_seed_gives_another_order(other):
    assert piece_order(50, 2, seed=1) != piece_order(50, *other)


def test_pieces_are_plain_numbers_that_travel():
    assert {type(piece) for piece in piece_order(3, 0, seed=0)} == {int}


def test_pieces_are_handed_out_in_order_to_whoever_asks():
    leases = Leases([4, 2, 9])

    assert [leases.take(0), leases.take(1), leases.take(0)] == [4, 2, 9]
    assert leases.take(1) is None


def test_a_near_piece_comes_first():
    leases = Leases([4, 2, 9])

    assert leases.take(0, lambda piece: piece == 9) == 9
    assert leases.take(0, lambda piece: piece == 9) == 4


def test_only_the_holder_can_finish_a_piece_and_only_once():
    leases = Leases([5])
    leases.take(0)

    assert not leases.finish(1, 5)
    assert leases.finish(0, 5)
    assert not leases.finish(0, 5)


def test_pieces_are_unfinished_until_their_holder_is_through():
    leases = Leases([5, 6])
    leases.take(0)
    assert leases.unfinished() == 2

    leases.finish(0, 5)

    assert leases.unfinished() == 1


def test_what_a_lost_replica_held_goes_to_others_and_is_counted():
    leases = Leases([5, 6, 7])
    leases.take(0)
    leases.take(1)

    leases.lose(0)

    assert drained(leases, 1) == [7, 5]
    assert leases.repeated == 1


def test_a_piece_lost_before_it_was_leased_is_no_repetition():
    leases = Leases([5, 6], share_among=[0, 1])
    leases.take(0)

    leases.lose(1)

    assert drained(leases, 0) == [6]
    assert leases.repeated == 0


def test_a_finished_piece_does_not_come_back_when_its_replica_is_lost():
    leases = Leases([5])
    leases.take(0)
    leases.finish(0, 5)

    leases.lose(0)

    assert leases.take(1) is None
    assert leases.repeated == 0


def test_a_piece_lost_twice_is_counted_twice():
    leases = Leases([5])
    for replica in (0, 1):
        leases.take(replica)
        leases.lose(replica)
    leases.take(2)

    assert leases.repeated == 2


def test_fixed_shares_go_in_turn_whoever_asks_first():
    leases = Leases([6, 3, 8, 1, 4], share_among=[2, 0])

    assert drained(leases, 2) == [3, 1]
    assert drained(leases, 0) == [6, 8, 4]


def test_a_near_piece_of_another_share_is_not_taken():
    leases = Leases([6, 3], share_among=[0, 1])

    assert leases.take(0, lambda piece: piece == 3) == 6


class Epoch:
    """Replicas that come and go, and an account of what they did."""

    def __init__(self, leases, is_near):
        self.leases, self.is_near = leases, is_near
        self.held = {replica: [] for replica in range(4)}
        self.taken, self.finished, self.dropped = Counter(), Counter(), Counter()

    def take(self, replica):
        piece = self.leases.take(replica, self.is_near)
        if piece is not None:
            self.held[replica].append(piece)
            self.taken[piece] += 1

    def finish(self, replica):
        if self.held[replica]:
            piece = self.held[replica].pop()
            assert self.leases.finish(replica, piece)
            self.finished[piece] += 1

    def lose(self, replica):
        self.dropped.update(self.held.pop(replica))
        self.leases.lose(replica)


@given(
    ACTIONS,
    st.integers(0, 12),
    st.booleans(),
    st.functions(like=lambda piece: None, returns=st.booleans(), pure=True),
)
def test_every_piece_is_finished_exactly_once_however_replicas_come_and_go(
    actions, pieces, fixed, is_near
):
    leases = Leases(piece_order(pieces, 0, 1), range(4) if fixed else None)
    epoch = Epoch(leases, is_near)

    for action, replica in actions:
        if replica in epoch.held:
            getattr(epoch, action)(replica)
    for replica in list(epoch.held):
        epoch.lose(replica)
    epoch.held[9] = []  # one that stays to the end
    for _ in range(pieces + 1):
        epoch.take(9)
        epoch.finish(9)

    assert epoch.finished == Counter(range(pieces))
    assert epoch.taken == epoch.finished + epoch.dropped
    assert leases.repeated == epoch.dropped.total()
    assert leases.unfinished() == 0
