"""Leases of rows: every row once, whoever comes and goes, and busy workers."""

import heapq
import itertools
import random
import sys
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdl.channel.leasing import (
    NOBODY,
    DynamicLeasing,
    PartitionSizes,
    Range,
    RemainingWork,
    StaticPartition,
    SyncIntervals,
    SyncPoint,
    part_order,
    partition_sizes,
)

BOTH = pytest.mark.parametrize("kind", [DynamicLeasing, StaticPartition])
STEP = 4


def leases_of(
    kind,
    rows,
    step_rows=1,
    lease_rows=1,
    replicas=(0,),
    seed=None,
    interval_rows=None,
    remaining=None,
):
    """A leasing in its first epoch; the key of each part is its number.

    Args:
        kind: Class of the leasing.
        rows: Rows of each part.
        interval_rows: Rows of each replica in a sync interval.
        remaining: Work of the epoch; None: all of it.
    """
    keys = tuple(map(str, range(len(rows))))
    sizes = PartitionSizes(tuple(rows), keys, step_rows, lease_rows)
    resumed = None if remaining is None else SyncPoint(0, remaining)
    intervals = SyncIntervals(len(replicas), interval_rows, None, resumed)
    leases = kind(sizes, seed, 0, intervals)
    leases.open(0, replicas)
    return leases


def in_steps(kind, rows, replicas, *more):
    """Leases of the size that is chosen for steps of `STEP` rows."""
    size = partition_sizes(rows, STEP, len(replicas)).lease_rows
    return leases_of(kind, rows, STEP, size, replicas, *more)


def drained(leases, replica):
    """All leases that a replica gets if it asks until there are none."""
    return list(iter(lambda: leases.take(replica), None))


def near(*parts):
    """Tell whether a worker holds a part."""
    return lambda key: int(key) in parts


def parts(lease):
    return [piece.part for piece in lease.ranges]


# ---- every row once


class Crowd:
    """Replicas that take leases, finish them and fail, in a random order."""

    def __init__(self, leases, replicas, seed=0):
        self.leases = leases
        self.here = list(replicas)
        self.trained = Counter()
        self.rows = Counter()  # by replica
        self.dropped = 0  # leases of failed replicas
        self._held = []
        self._random = random.Random(seed)

    def run_interval(self, losses=0, end_after=None):
        """Train until there are no leases; return whether rows remain."""
        taken = 0
        while True:
            for replica in self._random.sample(self.here, len(self.here)):
                taken += self._take(replica)
            if end_after is not None and taken >= end_after:
                self.leases.end_interval()
                end_after = None
            if not self._held:
                return self.leases.interval_is_over(self.here)
            if losses and len(self.here) > 1 and self._random.random() < 0.3:
                self._lose()
                losses -= 1
            self._finish()

    def _take(self, replica):
        promised = self.leases.has_one_for(replica)
        lease = self.leases.take(replica, lambda key: self._random.random() < 0.3)
        assert promised == (lease is not None)
        if lease is not None:
            assert lease.ranges
            self._held.append((replica, lease))
        return promised

    def _lose(self):
        lost = self.here.pop(self._random.randrange(len(self.here)))
        self.dropped += sum(replica == lost for replica, _ in self._held)
        self._held = [(r, lease) for r, lease in self._held if r != lost]
        self.leases.lose(lost)

    def _finish(self):
        for replica, lease in self._held:
            before = self.leases.unfinished
            self.leases.finish(replica + 100, lease.number)
            assert self.leases.unfinished == before
            self.leases.finish(replica, lease.number)
            assert self.leases.unfinished == before - lease.rows
            self.trained += rows_in(lease.ranges)
            self.rows[replica] += lease.rows
        self._held = []


def rows_in(ranges):
    """Each row by part and position; one row for a part of unknown length."""
    return Counter(
        (part, row)
        for part, start, stop in ranges
        for row in (range(start, stop) if stop >= 0 else [-1])
    )


def everything(rows):
    return rows_in(Range(part, 0, count) for part, count in enumerate(rows))


def left_in(leases):
    return rows_in(piece for work in leases.remaining() for piece in work.ranges)


@BOTH
@pytest.mark.parametrize("seed", range(60))
def test_each_row_is_trained_on_once_and_the_others_remain(kind, seed):
    chance = random.Random(seed)
    lengths = [0, 1, 3, 8, 17, 60, -1] if kind is DynamicLeasing else [0, 1, 3, 17, 60]
    rows = [chance.choice(lengths) for _ in range(chance.randint(1, 12))]
    replicas = range(chance.randint(1, 4))
    interval_rows = chance.choice([None, STEP, 3 * STEP])
    leases = in_steps(kind, rows, replicas, seed, interval_rows)
    crowd = Crowd(leases, replicas, seed)

    while crowd.run_interval(
        losses=chance.randint(0, 1), end_after=chance.choice([None, 2])
    ):
        assert leases.unfinished == left_in(leases).total() > 0
        assert crowd.trained + left_in(leases) == everything(rows)
        leases.begin_interval()

    assert crowd.trained == everything(rows)
    assert leases.unfinished == 0
    assert leases.repeated == crowd.dropped


@BOTH
@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_other_replicas_resume_with_what_remains(kind, replicas, seed):
    rows = [30, 7, 50, 0, 13, *([-1, -1] if kind is DynamicLeasing else [])]
    before = in_steps(kind, rows, range(3), seed, 2 * STEP)
    crowd = Crowd(before, range(3), seed)
    assert crowd.run_interval(losses=seed % 2)

    after = in_steps(kind, rows, range(replicas), seed, 2 * STEP, before.remaining())
    others = Crowd(after, range(replicas), seed)
    while others.run_interval():
        after.begin_interval()

    assert crowd.trained + others.trained == everything(rows)


@pytest.mark.parametrize("ended", [None, 4])
def test_a_resumed_partition_continues_as_without_a_break(ended):
    rows, replicas = [37, 22, 61], [0, 3, 7]

    def taken(leases, members):
        rows = {replica: [] for replica in members}
        for _ in range(50):
            for replica in members:
                lease = leases.take(replica)
                if lease is not None:
                    rows[replica].append(lease.ranges)
                    leases.finish(replica, lease.number)
            if leases.interval_is_over(members):
                leases.begin_interval()
        return list(rows.values())

    whole = in_steps(StaticPartition, rows, replicas, 0, 2 * STEP)
    Crowd(whole, replicas).run_interval(end_after=ended)
    left = whole.remaining()
    whole.begin_interval()
    # Replicas are numbered anew in another run.
    again = in_steps(StaticPartition, rows, range(3), 0, 2 * STEP, left)

    assert taken(again, range(3)) == taken(whole, replicas)


@BOTH
def test_all_leases_of_a_lost_replica_are_leased_again(kind):
    leases = leases_of(kind, [60], lease_rows=4, replicas=(0, 1))
    lost = [leases.take(0) for _ in range(3)]
    leases.lose(0)

    again = drained(leases, 1)

    assert {piece for lease in lost for piece in lease.ranges} <= {
        piece for lease in again for piece in lease.ranges
    }
    assert sum(lease.rows for lease in again) == 60


# ---- sync intervals


def test_each_replica_of_a_partition_trains_as_much_in_an_interval():
    leases = in_steps(StaticPartition, [100, 100], range(3), 0, 3 * STEP)
    crowd = Crowd(leases, range(3))

    assert crowd.run_interval()

    assert crowd.rows == dict.fromkeys(range(3), 3 * STEP)


def test_a_lease_of_a_partition_ends_where_an_interval_ends():
    leases = leases_of(StaticPartition, [100], lease_rows=6, interval_rows=10)

    sizes = [lease.rows for lease in drained(leases, 0)]

    assert sizes == [6, 4]


@pytest.mark.parametrize("turn", [(0,), (0, 1)], ids=["one asks", "both ask"])
def test_dynamic_leases_are_cut_at_the_end_of_an_interval(turn):
    leases = leases_of(
        DynamicLeasing, [400], STEP, 8 * STEP, replicas=(0, 1), interval_rows=2 * STEP
    )
    turns = itertools.cycle(turn)

    taken = list(iter(lambda: leases.take(next(turns)), None))

    assert sum(lease.rows for lease in taken) == 2 * 2 * STEP


def test_an_interval_that_is_over_stays_so_if_a_loss_frees_rows():
    leases = in_steps(StaticPartition, [300], range(3), 0, STEP)
    for replica in range(3):
        leases.finish(replica, leases.take(replica).number)
    assert leases.interval_is_over([0, 1, 2, 3])  # 3 has joined, and has no part

    leases.lose(2)

    assert leases.take(3) is None
    assert leases.interval_is_over([0, 1, 3])
    leases.begin_interval()
    assert leases.take(3) is not None


def test_an_ended_interval_has_the_same_rows_for_all():
    leases = in_steps(StaticPartition, [400], range(2))
    ahead = [leases.take(0), leases.take(0)]
    behind = [leases.take(1)]
    leases.end_interval()

    assert leases.take(0) is None
    behind.append(leases.take(1))
    assert leases.take(1) is None
    assert sum(lease.rows for lease in ahead) == sum(lease.rows for lease in behind)


@BOTH
def test_an_ended_epoch_has_only_the_rows_that_are_held(kind):
    leases = in_steps(kind, [400], range(3))
    held = [leases.take(replica) for replica in range(3)]
    leases.finish(0, held[0].number)

    leases.end_epoch()

    assert [leases.take(replica) for replica in range(3)] == [None] * 3
    assert leases.unfinished == held[1].rows + held[2].rows
    leases.lose(1)
    assert leases.take(0) is None
    leases.finish(2, held[2].number)
    assert leases.unfinished == 0
    assert not leases.interval_is_over([0, 2])
    leases.open(1, [0, 2])
    assert leases.unfinished == 400
    assert leases.take(0) is not None


# ---- epochs and keys


def leasing(*keys, seed=None, **options):
    return DynamicLeasing(PartitionSizes((1,) * len(keys), keys, 1, 1), seed, **options)


def test_a_lease_has_the_keys_of_its_parts_and_of_the_next_one():
    leases = leasing("a", "b", "c", "d")
    leases.replace_key(1, "b again")
    leases.open(0, [0])

    lease = leases.take(0, lambda key: key in ("b again", "d"))

    assert (parts(lease), lease.ahead) == ([1], 3)
    assert lease.keys == {1: "b again", 3: "d"}


@pytest.mark.parametrize("seed", [5, None])
def test_parts_are_shuffled_anew_in_each_epoch_of_each_fit(seed):
    leases = leasing(*("",) * 20, seed=seed, epochs_before=3)
    leases.open(1, [0])

    taken = [lease.ranges[0].part for lease in drained(leases, 0)]

    assert taken == part_order(20, 4, seed)


def test_epochs_have_orders_of_their_own_unless_parts_keep_theirs():
    orders = {tuple(part_order(20, epoch, seed=5)) for epoch in range(4)}

    assert len(orders) == 4
    assert all(sorted(order) == [*range(20)] for order in orders)
    assert part_order(20, 3, seed=None) == [*range(20)]


def test_a_part_that_no_worker_holds_is_near_to_none():
    leases = leasing("", "b")
    leases.open(0, [0])

    assert parts(leases.take(0, lambda key: True)) == [1]
    with pytest.raises(ValueError, match="no worker holds part 0"):
        leases.replace_key(0, "a")


def test_the_remaining_work_replaces_only_the_first_epoch():
    resumed = SyncPoint(0, [RemainingWork(NOBODY, (Range(0, 8, 40),))])
    intervals = SyncIntervals(resumed=resumed)
    leases = DynamicLeasing(partition_sizes([40], 4, 1), intervals=intervals)

    rows = []
    for epoch in (3, 4):
        leases.open(epoch, [0])
        rows.append(leases.unfinished)

    assert rows == [32, 40]
    with pytest.raises(ValueError, match="epoch 3 is over; the current epoch is 4"):
        leases.open(3, [0])


# ---- dynamic leases


def dynamic(rows, step_rows=1, lease_rows=1):
    return leases_of(DynamicLeasing, rows, step_rows, lease_rows)


def test_small_parts_are_leased_together():
    leases = dynamic([3, 3, 3, 20, 20], lease_rows=8)

    assert leases.take(0).ranges == (Range(0, 0, 3), Range(1, 0, 3), Range(2, 0, 2))


def test_a_part_reserved_for_a_far_replica_goes_to_a_near_one():
    leases = dynamic([1] * 4)
    assert leases.take(0, near()).ahead == 1

    assert parts(leases.take(1, near(1))) == [1]


def test_a_part_reserved_for_a_lost_replica_goes_to_a_near_one_first():
    leases = dynamic([4] * 4)
    assert leases.take(0).ahead == 1
    leases.lose(0)

    assert parts(leases.take(1, near(1))) == [1]


def test_the_search_for_a_near_part_is_bounded_and_resumes():
    leases = dynamic([1] * 1000)

    tries = [parts(leases.take(0, near(*range(900, 1000)))) for _ in range(20)]

    assert [900] in tries[:16]  # 64 looks for each part that is taken or reserved


class TestTheEnd:
    def test_the_rest_of_a_part_is_halved_in_whole_steps(self):
        leases = dynamic([32], step_rows=2, lease_rows=4)
        leases.take(0)

        assert leases.take(1).ranges == (Range(0, 18, 22),)
        assert leases.take(0).ranges == (Range(0, 4, 8),)

    def test_a_replica_that_has_to_load_the_part_gets_less_of_it(self):
        leases = dynamic([4000], step_rows=2, lease_rows=500)
        leases.take(0)

        # In the time of 20 rows: (3500 - 20) / 2 = 1740 of 4000.
        assert leases.take(1).ranges[0].start == 2260

    def test_a_part_is_not_loaded_again_for_few_rows(self):
        leases = dynamic([1000], lease_rows=500)
        while leases.unfinished > 5:  # trained in the time of loading the part
            leases.finish(0, leases.take(0).number)

        assert leases.take(1) is None
        assert leases.has_one_for(0)

    def test_leases_become_smaller(self):
        leases = dynamic([64, 64], step_rows=2, lease_rows=16)

        turn = itertools.cycle([0, 1])
        sizes = [lease.rows for lease in iter(lambda: leases.take(next(turn)), None)]

        assert sizes[:2] == [16, 16]
        assert sorted(sizes, reverse=True) == sizes
        assert sizes[-1] == 2

    def test_leases_grow_again_when_fewer_replicas_share_the_rest(self):
        leases = dynamic([96], lease_rows=32)
        leases.take(1)
        leases.lose(1)

        assert leases.take(0).rows == 32

    def test_a_part_of_unknown_length_is_leased_whole_and_alone(self):
        leases = dynamic([3, -1, 40, -1], lease_rows=8)

        taken = [leases.take(replica).ranges for replica in (0, 1, 0, 0)]

        assert taken == [
            (Range(0, 0, 3),),
            (Range(3, 0, -1),),
            (Range(1, 0, -1),),
            (Range(2, 0, 8),),
        ]

    def test_free_rows_come_before_lost_leases_which_are_repeated_as_they_were(self):
        leases = dynamic([2, 2], step_rows=2, lease_rows=2)
        lost = leases.take(0)
        leases.lose(0)

        assert parts(leases.take(1)) == [1]
        assert leases.take(1)[:2] == lost[:2]


class Outcome(NamedTuple):
    busy: float  # share of the workers' time in which they load or train
    training: float  # share in which they train


def simulate(rows, workers, loading):
    """Train an epoch; a worker trains 0.5 to 1.5 rows in a unit of time.

    Args:
        rows: Rows of each part.
        workers: Number of workers.
        loading: Time to load a part, as a share of the time to train on it.
    """
    speeds = np.random.default_rng(0).uniform(0.5, 1.5, workers)
    leases = DynamicLeasing(partition_sizes(rows, 32, workers), seed=0)
    leases.open(0, range(workers))
    queue = [(0.0, worker) for worker in range(workers)]
    here, ready, held = {}, {}, {}
    trained = busy = end = 0.0
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
                here[worker] = part
                at = max(at, ready.pop((worker, part), at + loading * rows[part]))
            at += (stop - start) / speeds[worker]
            trained += (stop - start) / speeds[worker]
        if lease.ahead is not None:  # loaded meanwhile
            ready.setdefault((worker, lease.ahead), now + loading * rows[lease.ahead])
        busy += at - now
        heapq.heappush(queue, (at, worker))
    assert leases.unfinished == 0
    return Outcome(busy / (workers * end), trained / (workers * end))


UNEVEN = [int(n) for n in np.random.default_rng(3).lognormal(9.0, 0.5, 168)]
QUEUES = {
    "168 uneven on 112": (UNEVEN, 112),
    "168 equal on 112": ([8000] * 168, 112),
    "one of 10 times the others": ([8000] * 167 + [80_000], 112),
    "3 on 8": ([80_000] * 3, 8),
}
# At 2 % to load the large one takes an eighth of a worker's epoch: 92 %.
BUSY = {("one of 10 times the others", 0.02): 0.9}


@pytest.mark.parametrize("loading", [0.0, 0.01, 0.02])
@pytest.mark.parametrize("name", QUEUES)
def test_workers_are_busy(name, loading):
    outcome = simulate(*QUEUES[name], loading)

    assert outcome.busy > BUSY.get((name, loading), 0.95)
    assert outcome.training > 0.85


def calls_per_lease(parts, held, replicas=20):
    """Function calls per lease in an epoch in which a lease is a part.

    Args:
        parts: Number of parts.
        held: Whether each part is held by one of the workers; else by none.
        replicas: Number of replicas, which ask in turn.
    """
    leases = leases_of(DynamicLeasing, [8] * parts, 8, 8, seed=0)
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
def test_the_cost_of_a_lease_does_not_grow_with_the_number_of_parts(held):
    assert calls_per_lease(8000, held) < 1.5 * calls_per_lease(1000, held)


# ---- static partition


def static(rows, replicas=(0, 1), step_rows=1, lease_rows=1):
    return leases_of(StaticPartition, rows, step_rows, lease_rows, replicas)


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
def test_shares_are_equal_and_do_not_depend_on_how_the_data_are_cut_into_parts(
    two, step_rows, steps, replicas
):
    seen = []
    for rows in two:
        starts = [0, *itertools.accumulate(rows)]
        leases = static(rows, range(replicas), step_rows, steps * step_rows)
        taken = [drained(leases, replica) for replica in range(replicas)]
        ranges = [
            [piece for lease in leased for piece in lease.ranges] for leased in taken
        ]
        seen.append(
            [
                [starts[p] + i for p, a, b in pieces for i in range(a, b)]
                for pieces in ranges
            ]
        )

    assert seen[0] == seen[1]
    assert list(itertools.chain(*seen[0])) == list(range(sum(two[0])))
    counts = [-(-len(share) // step_rows) for share in seen[0]]
    assert max(counts) - min(counts) <= 1
    partial = [len(share) % step_rows for share in seen[0] if share]
    assert not any(partial[:-1])


def test_leases_cross_parts_and_name_the_next_part_of_the_share():
    leases = static([4, 3, 5], [4, 2], step_rows=2, lease_rows=4)

    assert [lease.ranges for lease in drained(leases, 2)] == [
        (Range(0, 0, 4),),
        (Range(1, 0, 2),),
    ]
    later = drained(leases, 4)
    assert [lease.ranges for lease in later] == [
        (Range(1, 2, 3), Range(2, 0, 3)),
        (Range(2, 3, 5),),
    ]
    aheads = [lease.ahead for lease in drained(static([5, 2, 4], [0], 1, 2), 0)]
    assert aheads == [1, 1, 2, None, None, None]


def test_neither_the_order_of_requests_nor_near_parts_change_a_share():
    leases = static([2, 2])

    assert leases.take(1, near(0)).ranges == (Range(1, 0, 1),)
    assert leases.take(0, near(1)).ranges == (Range(0, 0, 1),)


def test_parts_of_unknown_length_are_dealt_out_whole_and_in_turn():
    leases = static([-1, -1, -1])

    assert [parts(lease) for lease in drained(leases, 0)] == [[0], [2]]
    assert [lease.ranges for lease in drained(leases, 1)] == [(Range(1, 0, -1),)]


def test_the_share_of_a_lost_replica_goes_to_others_and_does_not_count_as_repeated():
    leases = static([2, 2])
    leases.take(0)

    leases.lose(1)

    ranges = [lease.ranges[0] for lease in drained(leases, 0)]
    assert ranges == [Range(0, 1, 2), Range(1, 0, 1), Range(1, 1, 2)]
    assert leases.repeated == 0
