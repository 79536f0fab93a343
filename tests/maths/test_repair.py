import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdl.channel.inbox import DeliveryBarrier, ReceivedSet
from daskdl.channel.recovery import donors, helpers, missing, settle
from daskdl.errors import ChannelError

UPDATES = st.sets(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=20)
HAVE = st.dictionaries(st.integers(0, 5), UPDATES, min_size=1)


def received(updates):
    positions = ReceivedSet()
    for update in sorted(updates):
        positions.accept(*update)
    return positions.by_origin()


def updates_in(received):
    return {
        (origin, sequence)
        for origin, (complete, beyond) in received.items()
        for sequence in [*range(1, complete + 1), *beyond]
    }


def told(have):
    return {replica: received(updates) for replica, updates in have.items()}


# ---- the target


def test_the_target_is_the_furthest_of_each_origin():
    have = {0: {7: (3, ()), 8: (1, ())}, 1: {7: (2, ()), 8: (4, ())}}

    assert settle(have) == {7: (3, ()), 8: (4, ())}


def test_a_gap_of_one_survivor_is_filled_by_another():
    have = {0: {7: (5, (7,))}, 1: {7: (6, ())}}

    assert settle(have) == {7: (7, ())}


def test_what_is_beyond_a_gap_nobody_can_fill_is_in_the_target_without_the_gap():
    have = {0: {7: (5, (7, 8))}, 1: {7: (3, ())}}
    target = settle(have)

    assert target == {7: (5, (7, 8))}
    assert missing(have[1], target) == {7: [4, 5, 7, 8]}
    assert missing(have[0], target) == {}


def test_an_origin_that_only_one_has_heard_of_is_in_the_target():
    assert settle({0: {}, 1: {7: (0, (2,))}}) == {7: (0, (2,))}


def test_notes_that_came_over_the_wire_as_lists_are_understood():
    assert settle({0: {7: [1, [3]]}, 1: {7: (1, (2,))}}) == {7: (3, ())}


@given(HAVE)
def test_the_target_is_what_anybody_has(have):
    target = settle(told(have))

    assert updates_in(target) == set().union(*have.values())
    assert target == received(updates_in(target))  # in the same form


@given(UPDATES, UPDATES)
def test_missing_is_the_difference(mine, target):
    lacking = missing(received(mine), received(target))

    assert {(o, s) for o, gaps in lacking.items() for s in gaps} == target - mine
    assert all(gaps == sorted(gaps) for gaps in lacking.values())


# ---- helpers


def test_the_origin_is_asked_first_while_it_is_alive():
    have = {n: {2: (9, ())} for n in range(5)}

    assert helpers(2, [8, 9], have, alive=range(5), asker=0)[0] == 2
    assert 2 not in helpers(2, [8, 9], have, alive=[0, 1, 3, 4], asker=0)


def test_who_has_all_is_asked_before_who_has_some_and_who_has_none_is_not():
    have = {0: {}, 1: {9: (4, ())}, 2: {9: (4, (6,))}, 3: {9: (6, ())}, 4: {9: (3, ())}}

    assert helpers(9, [4, 5, 6], have, alive=range(5), asker=0) == [3, 2, 1]


def test_only_the_alive_are_asked():
    have = {n: {9: (1, ())} for n in range(1, 4)}

    assert helpers(9, [1], have, alive=[0, 2], asker=0) == [2]


def test_nobody_is_asked_for_what_nobody_has():
    have = {0: {}, 1: {9: (4, ())}, 2: {}}

    assert helpers(9, [5, 6], have, alive=range(3), asker=0) == []


def test_nobody_asks_itself():
    have = {n: {1: (5, ())} for n in range(3)}

    assert helpers(1, [5], have, alive=range(3), asker=1) == [2, 0]
    assert helpers(1, [5], have, alive=range(3), asker=0) == [1, 2]


def test_askers_spread_over_the_helpers():
    lacking, full = range(12), range(12, 16)
    have = {n: {99: (0, ())} for n in lacking} | {n: {99: (1, ())} for n in full}

    first = [helpers(99, [1], have, range(16), asker)[0] for asker in lacking]

    assert sorted(first) == sorted([*full] * 3)


@given(HAVE, UPDATES, st.integers(0, 5))
def test_helpers_are_exactly_those_who_have_some_of_it(have, wanted, asker):
    for origin in range(10, 12):  # no replica of `have`
        moved = {n: {(10 + o, s) for o, s in u} for n, u in have.items()}
        sequences = [s for o, s in wanted if 10 + o == origin]
        held = {
            n: sum((origin, s) in updates for s in sequences)
            for n, updates in moved.items()
        }

        order = helpers(origin, sequences, told(moved), list(have), asker)

        assert sorted(order) == sorted(n for n in have if n != asker and held[n])
        amounts = [held[n] for n in order]
        assert amounts == sorted(amounts, reverse=True)


# ---- donors


def test_who_has_the_whole_target_gives_and_who_is_behind_takes():
    full, less = {7: (5, ()), 8: (2, ())}, {7: (5, ()), 8: (1, ())}
    have = {0: full, 1: less, 2: full, 3: less}

    assert sorted(donors(have, asker=1)) == [0, 2]
    assert donors(have, asker=0) == donors(have, asker=2) == []
    assert donors(have, asker=1)[0] != donors({**have, 4: less}, asker=4)[0]


def test_where_nobody_has_it_all_everybody_takes_the_state_of_one():
    have = {0: {7: (3, (9,))}, 1: {7: (5, ())}, 2: {7: (2, ())}}

    assert [donors(have, asker) for asker in (0, 1, 2)] == [[1], [], [1]]


def test_as_many_updates_are_not_the_same_updates():
    have = {0: {7: (1, ())}, 1: {8: (1, ())}, 2: {7: (1, ())}}

    assert [donors(have, asker) for asker in (0, 1, 2)] == [[], [0, 2][::-1], []]


def test_the_same_in_another_form_is_the_same():
    have = {0: {7: (2, (4,))}, 1: {7: [2, [4]], 8: (0, ())}}

    assert donors(have, asker=0) == donors(have, asker=1) == []


def test_no_state_is_taken_that_lacks_an_update_of_a_survivor():
    # Replica 1 has more, but nothing of what replica 0 has published.
    have = {0: {0: (1, ()), 1: (1, ())}, 1: {1: (1, ()), 7: (9, ())}}

    assert donors(have, asker=1) == [0]
    assert donors(have, asker=0) == []


def test_survivors_who_have_lost_updates_of_each_other_are_an_error():
    have = {0: {0: (1, ())}, 1: {1: (2, ())}}

    with pytest.raises(ChannelError, match="updates are out of reach") as caught:
        donors(have, asker=0)
    assert "{0: (1, ()), 1: (2, ())}" in str(caught.value)


@given(HAVE)
def test_after_all_took_a_state_they_are_the_same(have):
    have = {n: {(o, s) for o, s in u if o not in have} for n, u in have.items()}
    notes = told(have)

    after = {n: have[(donors(notes, n) or [n])[0]] for n in have}

    assert len({frozenset(updates) for updates in after.values()}) == 1
    everything = set().union(*have.values())
    if everything in have.values():
        assert after == dict.fromkeys(have, everything)


# ---- the fence


def test_a_closed_fence_admits_nothing_of_the_lost_and_everything_of_others():
    fence = DeliveryBarrier()
    before = fence.admits(7, 1)

    fence.close([7])

    assert before
    assert not fence.admits(7, 1)
    assert fence.admits(8, 1)


def test_an_open_fence_admits_what_was_settled_and_no_more():
    fence = DeliveryBarrier()
    fence.close([7, 8])
    fence.open({7: (2, (4,))})

    assert [fence.admits(7, s) for s in range(1, 6)] == [True, True, False, True, False]
    assert not fence.admits(8, 1)


def test_closing_again_forgets_the_target_and_not_the_lost():
    fence = DeliveryBarrier()
    fence.close([7])
    fence.open({7: (2, ())})
    fence.close([8])

    assert not fence.admits(7, 1)
    assert not fence.admits(8, 1)


def test_while_it_holds_it_admits_of_everybody_only_what_was_settled():
    fence = DeliveryBarrier()
    fence.holding = True
    fence.open({8: (2, ())})

    assert fence.holding
    assert [fence.admits(8, s) for s in (2, 3)] == [True, False]
    assert not fence.admits(9, 1)


def test_after_a_release_only_the_lost_are_kept_out():
    fence = DeliveryBarrier()
    fence.close([7])
    fence.holding = True
    fence.open({7: (2, ())})

    fence.release()

    assert not fence.holding
    assert fence.admits(8, 1)
    assert not fence.admits(7, 1)


# ---- all of it


@pytest.mark.parametrize("seed", range(30))
def test_after_settling_and_asking_all_survivors_have_the_same(seed):
    chance = random.Random(seed)
    published = {(o, s) for o in range(6) for s in range(1, 9)}
    have = {
        n: {u for u in published if u[0] == n or chance.random() < 0.6}
        for n in range(4)  # of the origins, 4 and 5 are lost
    }
    notes = told(have)
    target = settle(notes)

    for asker in have:
        for origin, sequences in missing(notes[asker], target).items():
            asked = set()
            for helper in helpers(origin, sequences, notes, list(have), asker):
                asked |= {u for u in have[helper] if u[0] == origin}
            have[asker] = have[asker] | {u for u in asked if u[1] in sequences}

    assert all(updates == updates_in(target) for updates in have.values())
    assert all(donors(told(have), asker) == [] for asker in have)
