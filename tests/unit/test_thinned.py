import pytest

from daskdl.history import Thinned


def filled(most, count):
    thinned = Thinned(most)
    for number in range(1, count + 1):
        thinned.add(number, f"row {number}")
    return thinned


@pytest.mark.parametrize(
    ("most", "count", "numbers"),
    [
        (4, 4, [1, 2, 3, 4]),
        (4, 5, [2, 4]),
        (4, 9, [2, 4, 6, 8]),
        (4, 10, [4, 8]),
        (4, 40, [16, 32]),
        (1, 3, [2]),
    ],
)
def test_beyond_its_bound_every_second_one_goes(most, count, numbers):
    thinned = filled(most, count)

    assert list(thinned) == [f"row {number}" for number in numbers]
    assert len(thinned) == len(numbers)
    assert thinned[-1] == f"row {numbers[-1]}"


def test_it_never_has_more_than_its_bound():
    thinned = Thinned(8)
    for number in range(1, 2000):
        thinned.add(number, number)
        assert 4 <= len(thinned) <= 8 or number < 4


def test_it_says_beforehand_what_it_would_keep():
    thinned = filled(4, 5)

    assert [n for n in range(6, 13) if thinned.wants(n)] == [6, 8, 10, 12]


def test_what_is_numbered_alike_is_thinned_alike():
    thinned = Thinned(6)
    for number in range(1, 5):
        for name in "ab":
            thinned.add(number, f"{name}{number}")

    assert list(thinned) == ["a2", "b2", "a4", "b4"]


def test_what_was_taken_is_gone_and_it_goes_on_as_sparsely():
    thinned = filled(4, 5)

    assert thinned.take() == [(2, "row 2"), (4, "row 4")]
    thinned.add(7, "row 7")
    thinned.add(8, "row 8")

    assert thinned.take() == [(8, "row 8")]
    assert len(thinned) == 0
