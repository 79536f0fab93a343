from hypothesis import given
from hypothesis import strategies as st

from daskdl.channel.inbox import ReceivedSet

ARRIVALS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), max_size=60)
TARGETS = st.dictionaries(st.integers(0, 3), st.integers(0, 14))


def received(*arrivals):
    positions = ReceivedSet()
    return positions, [positions.accept(*arrival) for arrival in arrivals]


def test_updates_in_order_are_accepted_once_each():
    positions, accepted = received((0, 1), (0, 2), (1, 1), (0, 2), (1, 1))

    assert accepted == [True, True, True, False, False]
    assert positions.by_origin() == {0: (2, ()), 1: (1, ())}


def test_a_gap_is_missing_until_it_is_filled():
    positions, _ = received((0, 1), (0, 4))

    assert positions.behind({0: 4}) == {0: [2, 3]}
    assert positions.accept(0, 3)
    assert positions.behind({0: 4}) == {0: [2]}
    assert positions.accept(0, 2)
    assert positions.behind({0: 4}) == {}


def test_a_filled_gap_is_not_filled_again():
    _, accepted = received((0, 3), (0, 1), (0, 2), (0, 1), (0, 3))

    assert accepted == [True, True, True, False, False]


def test_what_was_never_heard_of_is_behind_from_its_first_update():
    assert ReceivedSet().behind({7: 2}) == {7: [1, 2]}
    assert ReceivedSet().behind({7: 0}) == {}


def test_a_gap_beyond_the_target_is_not_waited_for():
    positions, _ = received((0, 1), (0, 2), (0, 9))

    assert positions.behind({0: 2}) == {}


def test_what_came_in_order_takes_no_memory():
    positions, _ = received((0, 3), *((0, s) for s in range(1, 100)))

    assert positions._beyond == {0: set()}  # memory is what this test is about


def test_a_sequence_number_out_of_reach_takes_no_memory():
    positions, accepted = received((0, 2**63), (0, 1), (0, 2**63))

    assert accepted == [True, True, False]
    assert positions.behind({0: 2}) == {0: [2]}


@given(ARRIVALS, TARGETS)
def test_each_update_is_accepted_exactly_once_whatever_order_they_come_in(
    arrivals, target
):
    positions, accepted = received(*arrivals)

    taken = [arrival for arrival, new in zip(arrivals, accepted, strict=True) if new]
    assert sorted(taken) == sorted(set(arrivals))
    missing = {
        origin: sorted(set(range(1, last + 1)) - {s for o, s in taken if o == origin})
        for origin, last in target.items()
    }
    assert positions.behind(target) == {o: gaps for o, gaps in missing.items() if gaps}


def test_what_was_received_is_the_run_without_a_gap_and_what_is_beyond():
    positions, _ = received((0, 1), (0, 2), (0, 6), (0, 4), (1, 3), (2, 1))

    assert positions.by_origin() == {0: (2, (4, 6)), 1: (0, (3,)), 2: (1, ())}


def test_positions_start_from_what_a_snapshot_has_received():
    positions = ReceivedSet({0: (2, (4,)), 1: [3, []]})  # lists as from the wire

    assert positions.by_origin() == {0: (2, (4,)), 1: (3, ())}
    assert [positions.accept(0, s) for s in (1, 2, 4)] == [False, False, False]
    assert positions.accept(0, 3)
    assert positions.by_origin() == {0: (4, ()), 1: (3, ())}


def test_positions_that_start_from_others_are_their_own():
    source, _ = received((0, 1), (0, 3))
    copy = ReceivedSet(source.by_origin())

    copy.accept(0, 2)

    assert source.by_origin() == {0: (1, (3,))}


@given(ARRIVALS)
def test_what_was_received_says_everything_in_one_form(arrivals):
    forward, _ = received(*arrivals)
    backward, _ = received(*reversed(arrivals))

    assert forward.by_origin() == backward.by_origin()
    assert ReceivedSet(forward.by_origin()).by_origin() == forward.by_origin()
    named = {
        (origin, sequence)
        for origin, (complete, beyond) in forward.by_origin().items()
        for sequence in [*range(1, complete + 1), *beyond]
    }
    assert named == set(arrivals)
