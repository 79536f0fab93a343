import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdl.channel.leasing import Range, StaticPartition, shared_out
from tests.support.leases import drained, leases_of, near


def shares(rows, replicas=(0, 1), step_rows=1, lease_rows=1, seed=None):
    own = step_rows, lease_rows, replicas, seed
    return leases_of(StaticPartition, rows, *own)


def rows_of(leases, replica, starts):
    """Numbers, in the whole data, of the rows of a replica, in order."""
    ranges = [one for lease in drained(leases, replica) for one in lease.ranges]
    return [starts[p] + i for p, start, stop in ranges for i in range(start, stop)]


@st.composite
def cuts(draw, rows):
    """Lengths of parts that have so many rows together."""
    inner = draw(st.lists(st.integers(0, rows), max_size=6))
    edges = [0, *sorted(inner), rows]
    return [stop - start for start, stop in itertools.pairwise(edges)]


@given(
    st.integers(0, 60).flatmap(lambda rows: st.tuples(cuts(rows), cuts(rows))),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_steps_do_not_depend_on_how_the_data_are_cut_into_parts(
    two, step_rows, steps, replicas
):
    seen = []
    for parts in two:
        starts = [0, *itertools.accumulate(parts)]
        leases = shares(parts, range(replicas), step_rows, steps * step_rows)
        seen.append([rows_of(leases, r, starts) for r in range(replicas)])

    assert seen[0] == seen[1]
    assert list(itertools.chain(*seen[0])) == list(range(sum(two[0])))


@given(st.integers(0, 200), st.integers(1, 7), st.integers(1, 9))
def test_all_have_equally_many_steps_but_for_one(rows, step_rows, replicas):
    shares = shared_out([Range(0, 0, rows)] if rows else [], step_rows, replicas)

    sizes = [sum(one.rows for one in share) for share in shares]
    steps = [-(-size // step_rows) for size in sizes]
    assert max(steps) - min(steps) <= 1
    assert sum(sizes) == rows
    assert all(size % step_rows == 0 for size in sizes[: sum(map(bool, sizes)) - 1])


def test_pieces_go_across_parts_in_the_order_of_the_epoch():
    leases = shares([4, 3, 5], [4, 2], step_rows=2, lease_rows=4)

    assert [lease.ranges for lease in drained(leases, 2)] == [
        (Range(0, 0, 4),),
        (Range(1, 0, 2),),
    ]
    assert [lease.ranges for lease in drained(leases, 4)] == [
        (Range(1, 2, 3), Range(2, 0, 3)),
        (Range(2, 3, 5),),
    ]


def test_it_is_said_which_part_of_the_share_comes_next():
    leases = shares([5, 2, 4], [0], step_rows=1, lease_rows=2)

    aheads = [lease.ahead for lease in drained(leases, 0)]

    assert aheads == [1, 1, 2, None, None, None]


def test_neither_who_asks_first_nor_what_is_near_changes_a_share():
    leases = shares([2, 2])

    assert leases.take(1, near(0)).ranges == (Range(1, 0, 1),)
    assert leases.take(0, near(1)).ranges == (Range(0, 0, 1),)


def test_parts_of_unknown_length_are_dealt_out_whole_and_in_turn():
    leases = shares([-1, -1, -1], [0, 1])

    assert [lease.ranges for lease in drained(leases, 0)] == [
        (Range(0, 0, -1),),
        (Range(2, 0, -1),),
    ]
    assert [lease.ranges for lease in drained(leases, 1)] == [(Range(1, 0, -1),)]


def test_what_a_lost_replica_would_have_got_goes_to_others_and_is_no_repetition():
    leases = shares([2, 2])
    leases.take(0)

    leases.lose(1)

    parts = [lease.ranges[0] for lease in drained(leases, 0)]
    assert parts == [Range(0, 1, 2), Range(1, 0, 1), Range(1, 1, 2)]
    assert leases.repeated == 0


def test_one_that_comes_late_gets_nothing_of_the_epoch():
    leases = shares([4])

    assert not leases.has_one_for(9)
    assert leases.take(9) is None


@pytest.mark.parametrize("replica", [0, 1])
def test_with_less_than_a_step_for_each_some_get_nothing(replica):
    leases = shares([3], step_rows=4, lease_rows=4)

    assert len(drained(leases, replica)) == 1 - replica
