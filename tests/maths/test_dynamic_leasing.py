"""Who gets which rows, and how busy workers are, in a queue with a time of its own."""

import heapq
import itertools
import sys
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdl.channel.leasing import (
    DynamicLeasing,
    Range,
    part_order,
    partition_sizes,
)
from tests.support.leases import leases_of, near


def first_come(rows, step_rows=1, lease_rows=1, seed=None):
    return leases_of(DynamicLeasing, rows, step_rows, lease_rows, seed=seed)


def parts(lease):
    return [one.part for one in lease.ranges]


def test_a_replica_goes_on_with_its_part_while_others_get_other_parts():
    leases = first_come([8, 8], lease_rows=2)

    taken = [leases.take(replica).ranges for replica in (0, 1, 0, 1)]

    assert taken == [
        (Range(0, 0, 2),),
        (Range(1, 0, 2),),
        (Range(0, 2, 4),),
        (Range(1, 2, 4),),
    ]


def test_small_parts_are_merged_to_pieces_of_the_size_aimed_at():
    leases = first_come([3, 3, 3, 20, 20], lease_rows=8)

    assert leases.take(0).ranges == (
        Range(0, 0, 3),
        Range(1, 0, 3),
        Range(2, 0, 2),
    )


def test_parts_come_in_the_order_of_the_epoch():
    leases = first_come([1] * 9, seed=7)

    order = [[part] for part in part_order(9, 0, 7)]
    assert [parts(leases.take(0)) for _ in range(9)] == order


def test_the_part_that_comes_next_is_named_and_kept_for_its_replica():
    leases = first_come([4] * 8, lease_rows=4)

    first, other = leases.take(0), leases.take(1)

    assert (parts(first), first.ahead) == ([0], 1)
    assert (parts(other), other.ahead) == ([2], 3)
    assert parts(leases.take(0)) == [1]


def test_nothing_is_ahead_of_the_last_part():
    leases = first_come([4], lease_rows=2)

    assert leases.take(0).ahead is None


class TestNear:
    def test_a_near_part_comes_first_and_another_near_one_is_kept(self):
        leases = first_come([1] * 6)

        lease = leases.take(0, near(3, 5))

        assert (parts(lease), lease.ahead) == ([3], 5)

    def test_without_a_near_part_the_next_one_comes(self):
        leases = first_come([1] * 3)

        assert parts(leases.take(0, near())) == [0]

    def test_what_is_kept_for_one_that_is_far_goes_to_one_that_is_near(self):
        leases = first_come([1] * 4)
        assert leases.take(0, near()).ahead == 1

        assert parts(leases.take(1, near(1))) == [1]

    def test_what_is_kept_for_one_that_is_near_stays_there(self):
        leases = first_come([1] * 4)
        assert leases.take(0, near(1, 2)).ahead == 2

        assert parts(leases.take(1, near(2))) == [0]

    def test_what_is_kept_is_judged_anew_for_each_part(self):
        leases = first_come([1] * 5)
        leases.take(0, near())
        assert leases.take(0, near(3)).ahead == 3

        assert parts(leases.take(1, near(3))) == [2]

    def test_what_a_lost_replica_would_have_got_goes_to_one_that_is_near_first(self):
        leases = first_come([4] * 4)
        assert leases.take(0).ahead == 1
        leases.lose(0)

        assert parts(leases.take(1, near(1))) == [1]

    def test_parts_are_looked_at_in_turn_until_a_near_one_is_found(self):
        leases = first_come([1] * 1000)

        tries = [parts(leases.take(0, near(*range(900, 1000)))) for _ in range(20)]

        # 64 are looked at for each that is taken or kept.
        assert [900] in tries[:16]


class TestTheEnd:
    def test_a_part_that_is_kept_for_the_busiest_is_taken_first(self):
        leases = first_come([8, 8, 20, 2], lease_rows=8)
        leases.take(0)
        leases.take(1)

        assert parts(leases.take(2)) == [3]

    def test_what_one_has_left_is_halved_from_its_end_in_whole_steps(self):
        leases = first_come([32], step_rows=2, lease_rows=4)
        leases.take(0)

        assert leases.take(1).ranges == (Range(0, 18, 22),)
        assert leases.take(0).ranges == (Range(0, 4, 8),)

    def test_who_has_to_load_the_part_for_its_half_gets_less_of_it(self):
        leases = first_come([4000], step_rows=2, lease_rows=500)
        leases.take(0)

        # In the time of 20 rows: (3500 - 20) / 2 = 1740 of 4000.
        assert leases.take(1).ranges[0].start == 2260

    def test_who_has_most_left_shares(self):
        leases = first_come([6, 12], lease_rows=2)
        leases.take(0)
        leases.take(1)
        leases.take(1)

        (one,) = leases.take(2).ranges

        assert (one.part, one.start) == (1, 8)

    def test_less_than_two_steps_are_taken_whole(self):
        leases = first_come([7], step_rows=4, lease_rows=4)
        leases.take(0)

        assert leases.take(1).ranges == (Range(0, 4, 7),)
        assert leases.take(0) is None

    def test_too_little_of_a_part_to_load_it_again_for_is_not_shared(self):
        leases = first_come([1000], lease_rows=500)
        while leases.unfinished > 5:  # as many as are trained on while it is loaded
            leases.finish(0, leases.take(0).number)

        assert not leases.has_one_for(1)
        assert leases.take(1) is None
        assert leases.has_one_for(0)

    def test_pieces_become_smaller_when_little_is_left(self):
        leases = first_come([64, 64], step_rows=2, lease_rows=16)

        turn = itertools.cycle([0, 1])
        sizes = [lease.rows for lease in iter(lambda: leases.take(next(turn)), None)]

        assert sizes[:2] == [16, 16]
        assert sorted(sizes, reverse=True) == sizes
        assert sizes[-1] == 2

    def test_a_part_of_unknown_length_is_given_whole_and_alone(self):
        leases = first_come([3, -1, 40, -1], lease_rows=8)

        taken = [leases.take(replica).ranges for replica in (0, 1, 0, 0)]

        assert taken == [
            (Range(0, 0, 3),),
            (Range(3, 0, -1),),
            (Range(1, 0, -1),),
            (Range(2, 0, 8),),
        ]


def test_of_a_part_for_several_replicas_each_gets_a_stretch():
    leases = first_come([256], lease_rows=8)  # 64 for each of four

    taken = [leases.take(replica) for replica in range(4)]

    assert [lease.ranges[0].start for lease in taken] == [0, 128, 64, 192]
    assert [lease.ahead for lease in taken] == [None] * 4  # it is there already


class TestLosses:
    def test_pieces_grow_again_when_fewer_share_what_is_left(self):
        leases = first_come([96], lease_rows=32)
        leases.take(1)
        leases.lose(1)

        assert leases.take(0).rows == 32

    def test_the_rest_of_the_parts_of_a_lost_replica_is_as_free_as_any(self):
        leases = first_come([4, 4, 4], lease_rows=2)
        leases.take(0)
        leases.lose(0)

        lease = leases.take(1)

        assert (lease.ranges, lease.ahead) == ((Range(0, 2, 4),), 1)
        assert leases.repeated == 0

    def test_what_is_free_comes_before_what_was_lost(self):
        leases = first_come([2, 2], step_rows=2, lease_rows=2)
        lost = leases.take(0)
        leases.lose(0)

        assert parts(leases.take(1)) == [1]
        assert leases.take(1).ranges == lost.ranges


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 3), st.integers(1, 5))
def test_one_alone_goes_through_all_rows_in_order(rows, step_rows, steps):
    leases = first_come(rows, step_rows, steps * step_rows)

    taken = [lease.ranges for lease in iter(lambda: leases.take(0), None)]

    seen = [(part, i) for own in taken for part, a, b in own for i in range(a, b)]
    assert seen == [(part, i) for part, count in enumerate(rows) for i in range(count)]
    whole = [sum(one.rows for one in own) % step_rows for own in taken[:-1]]
    assert not any(whole)


# ---- a queue of work


class Outcome(NamedTuple):
    busy: float  # share of the workers' time in which they load or train
    training: float  # share in which they train
    loads: int


def work(rows, workers, loading, seed=0):
    """Train an epoch; a worker trains 0.5 to 1.5 rows in a unit of time.

    Args:
        rows: Of each part.
        workers: How many.
        loading: Time to load a part, as a share of that to train on it.
        seed: Of the speeds, and of the order of the parts.
    """
    speeds = np.random.default_rng(seed).uniform(0.5, 1.5, workers)
    leases = DynamicLeasing(partition_sizes(rows, 32, workers), seed)
    leases.open(0, range(workers))
    queue = [(0.0, worker) for worker in range(workers)]
    here, ready, held = {}, {}, {}
    trained = busy = end = 0.0
    loads = 0
    while queue:
        now, worker = heapq.heappop(queue)
        leases.finish(worker, held.get(worker, -1))
        lease = leases.take(worker)
        if lease is None:
            end = max(end, now)
            continue
        held[worker], at = lease.number, now
        for part, start, stop in lease.ranges:
            if here.get(worker) != part:
                here[worker], loads = part, loads + 1
                at = max(at, ready.pop((worker, part), at + loading * rows[part]))
            at += (stop - start) / speeds[worker]
            trained += (stop - start) / speeds[worker]
        if lease.ahead is not None:  # loaded meanwhile
            ready.setdefault((worker, lease.ahead), now + loading * rows[lease.ahead])
        busy += at - now
        heapq.heappush(queue, (at, worker))
    assert leases.unfinished == 0
    return Outcome(busy / (workers * end), trained / (workers * end), loads)


def uneven(seed):
    return [int(n) for n in np.random.default_rng(seed).lognormal(9.0, 0.5, 168)]


QUEUES = {
    "168 uneven on 112": (uneven(3), 112),
    "168 equal on 112": ([8000] * 168, 112),
    "one of 10 times the others": ([8000] * 167 + [80_000], 112),
    "3 on 8": ([80_000] * 3, 8),
}
# At 2 % to load the large one takes an eighth of a worker's epoch: 92 %.
BUSY = {("one of 10 times the others", 0.02): 0.9}


@pytest.mark.parametrize("loading", [0.0, 0.01, 0.02])
@pytest.mark.parametrize("name", QUEUES)
def test_workers_are_busy(name, loading):
    outcome = work(*QUEUES[name], loading)

    assert outcome.busy > BUSY.get((name, loading), 0.95)
    assert outcome.training > 0.85


# ---- what it costs


def calls_per_lease(parts, replicas, held):
    """Functions called for each lease, in an epoch in which a lease is a part.

    Args:
        parts: How many.
        replicas: That ask in turn.
        held: Whether each part is held by one of the workers; else by none.
    """
    leases = first_come([8] * parts, 8, 8, seed=0)
    count = leased = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    former = sys.getprofile()
    sys.setprofile(profile)
    try:
        for replica in itertools.cycle(range(replicas)):
            mine = replica if held else -1
            # Not bound late: it is called before the next replica has its turn.
            if leases.take(replica, lambda key: int(key) % replicas == mine) is None:  # noqa: B023
                return count / leased
            leased += 1
    finally:
        sys.setprofile(former)


@pytest.mark.parametrize("held", [True, False], ids=["held", "elsewhere"])
def test_more_parts_do_not_make_a_lease_dearer(held):
    assert calls_per_lease(8000, 20, held) < 1.5 * calls_per_lease(1000, 20, held)


def test_a_lease_costs_no_more_than_in_proportion_to_the_replicas():
    few, many = (calls_per_lease(4000, replicas, True) for replicas in (20, 200))

    assert many < 10 * few
