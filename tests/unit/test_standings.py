import pytest

from daskdl.channel.run_state import Standing, Standings


def standings(*replicas, floor=None):
    own = Standings()
    for replica in replicas:
        own.join(replica, floor or {})
    return own


def test_nobody_has_adopted_what_it_did_not_tell():
    own = standings(0, 1)
    own.tell(0, Standing(3))

    assert own.adopted([0], 3)
    assert not own.adopted([0, 1], 3)
    assert not own.adopted([0], 4)


def test_later_routes_will_do():
    own = standings(0)
    own.tell(0, Standing(5))

    assert own.adopted([0], 3)


def test_the_cut_is_where_the_current_routes_were_taken_up():
    own = standings(0, 1)
    assert own.tell(0, Standing(3, adopted_at=7)) is True
    assert own.tell(0, Standing(3, adopted_at=9)) is False  # said again, later

    assert own.cut([0, 1]) == {0: 7, 1: 0}


def test_an_older_word_changes_nothing():
    own = standings(0)
    own.tell(0, Standing(3, 7, {1: 4}))

    own.tell(0, Standing(2, 5, {1: 2}))

    assert own.cut([0]) == {0: 7}
    assert own.stable(1, [0], default=9) == 4


def test_stable_is_what_all_others_have():
    own = standings(0, 1, 2)
    own.tell(0, Standing(0, received={}))  # not its own
    own.tell(1, Standing(0, received={0: 5}))
    assert own.stable(0, [0, 1, 2], default=8) == 0

    own.tell(2, Standing(0, received={0: 3}))

    assert own.stable(0, [0, 1, 2], default=8) == 3


def test_with_nobody_else_all_is_stable():
    assert standings(0).stable(0, [0], default=8) == 8


def test_a_newcomer_needs_nothing_that_its_snapshot_will_have():
    own = standings(0, 1)
    own.tell(1, Standing(0, received={0: 6}))
    own.join(2, floor={0: 4})
    assert own.stable(0, [0, 1, 2], default=8) == 4

    own.raise_floor(2, {0: 5})

    assert own.stable(0, [0, 1, 2], default=8) == 5


def test_one_that_is_gone_is_not_asked():
    own = standings(0, 1)

    own.leave(1)

    with pytest.raises(KeyError):
        own.tell(1, Standing(1))
