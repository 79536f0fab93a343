from hypothesis import given
from hypothesis import strategies as st

from daskdl.channel.leasing import FreeList


def of(count, *gone):
    remaining = FreeList(count)
    for position in gone:
        remaining.remove(position)
    return remaining


def test_the_first_is_the_first_that_has_not_gone():
    remaining = of(4, 0, 1)

    assert len(remaining) == 2
    assert remaining.first() == remaining.first(2) == 2
    assert remaining.first(3) == 3


def test_there_is_no_first_when_all_have_gone():
    assert of(2, 1, 0).first() is None
    assert of(2, 1).first(1) is None
    assert of(0).first() is None


@given(st.integers(1, 12), st.data())
def test_going_round_finds_each_that_is_left_once_in_order(count, data):
    gone = data.draw(st.sets(st.integers(0, count - 1)))
    start = data.draw(st.integers(0, count))
    most = data.draw(st.integers(0, 15))

    found = list(of(count, *gone).round(start, most))

    turn = [i % count for i in range(start, start + count)]
    assert found == [i for i in turn if i not in gone][:most]
