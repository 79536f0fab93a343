"""Leases of one epoch, as the tests make them.

What first come and fixed shares have in common, whoever comes and goes.

Who gets which rows, and how busy workers are, in a queue with a time of its own.



Epochs in laps: what is handed out, what is left, and going on from that.
"""

import functools
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
    TO_ITS_END,
    DynamicLeasing,
    PartitionSizes,
    Range,
    RemainingWork,
    StaticPartition,
    SyncIntervals,
    SyncPoint,
    part_order,
    partition_sizes,
    shared_out,
    whole_parts,
)


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
        kind: Of the leasing.
        rows: Of each part.
        remaining: Of the epoch; None: all of it.
    """
    keys = tuple(map(str, range(len(rows))))
    sizes = PartitionSizes(tuple(rows), keys, step_rows, lease_rows)
    resumed = None if remaining is None else SyncPoint(0, remaining)
    intervals = SyncIntervals(len(replicas), interval_rows, None, resumed)
    leases = kind(sizes, seed, 0, intervals)
    leases.open(0, replicas)
    return leases


def drained(leases, replica):
    """What a replica gets that asks until there is nothing left for it."""
    return list(iter(lambda: leases.take(replica), None))


def near(*parts):
    """What tells whether a worker holds a part."""
    return lambda key: int(key) in parts


MEMBERS = range(4)
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "finish", "lose"]), st.sampled_from(MEMBERS)),
    max_size=80,
)
PARTS = st.lists(st.one_of(st.integers(0, 40), st.just(-1)), max_size=8)


BOTH = pytest.mark.parametrize("kind", [DynamicLeasing, StaticPartition])


@BOTH
def test_rows_are_unfinished_until_their_holder_is_through(kind):
    leases = leases_of(kind, [3, 4], 3, 3, MEMBERS)
    number = leases.take(0).number
    assert leases.unfinished == 7

    leases.finish(0, number)

    assert leases.unfinished == 4


@BOTH
def test_a_piece_that_was_lost_is_handed_out_again_as_it_was_and_counted(kind):
    leases = leases_of(kind, [3, 3], 1, 2, MEMBERS)
    lost = leases.take(0)

    leases.lose(0)

    *others, again = drained(leases, 1)
    if kind is StaticPartition:  # others have a share of it
        others += drained(leases, 2) + drained(leases, 3)
    assert (again.number, again.ranges) == (lost.number, lost.ranges)
    assert lost.number not in [lease.number for lease in others]
    assert leases.repeated == 1
    assert leases.finish(1, lost.number)


class Epoch:
    """Replicas that come and go, and an account of what they did."""

    def __init__(self, leases, is_near):
        self.leases, self.is_near = leases, is_near
        self.held = {replica: [] for replica in MEMBERS}
        self.finished, self.dropped = Counter(), 0

    def take(self, replica):
        promised = self.leases.has_one_for(replica)
        lease = self.leases.take(replica, self.is_near)
        assert promised == (lease is not None)
        if lease is not None:
            assert lease.ranges
            self.held[replica].append(lease)

    def finish(self, replica):
        if self.held[replica]:
            lease = self.held[replica].pop()
            assert self.leases.finish(replica, lease.number)
            self.finished.update(rows_in(lease.ranges))

    def lose(self, replica):
        self.dropped += len(self.held.pop(replica))
        self.leases.lose(replica)


def rows_in(ranges):
    """Each row by part and position; of a part of unknown length one."""
    for part, start, stop in ranges:
        yield from [(part, i) for i in range(start, stop)] or [(part, -1)]


@BOTH
@given(
    actions=ACTIONS,
    rows=PARTS,
    step_rows=st.integers(1, 3),
    steps=st.integers(1, 5),
    is_near=st.functions(like=lambda key: None, returns=st.booleans(), pure=True),
)
def test_every_row_is_finished_exactly_once_however_replicas_come_and_go(
    kind, actions, rows, step_rows, steps, is_near
):
    leases = leases_of(kind, rows, step_rows, steps * step_rows, MEMBERS, seed=1)
    epoch = Epoch(leases, is_near)

    for action, replica in actions:
        if replica in epoch.held:
            getattr(epoch, action)(replica)
    for replica in list(epoch.held):
        epoch.lose(replica)
    epoch.held[9] = []  # one that stays to the end
    while epoch.leases.unfinished:
        epoch.take(9)
        epoch.finish(9)

    assert epoch.finished == Counter(rows_in(whole_parts(range(len(rows)), rows)))
    assert epoch.leases.repeated == epoch.dropped
    assert epoch.leases.take(9) is None


# ---- epoch after epoch


def leasing(*keys, seed=None, **options):
    return DynamicLeasing(PartitionSizes((1,) * len(keys), keys, 1, 1), seed, **options)


def test_a_lease_has_the_keys_of_its_parts_and_of_the_one_ahead():
    leases = leasing("a", "b", "c", "d")
    leases.replace_key(1, "b again")
    leases.open(0, [0])

    lease = leases.take(0, lambda key: key in ("b again", "d"))

    assert ([one.part for one in lease.ranges], lease.ahead) == ([1], 3)
    assert lease.keys == {1: "b again", 3: "d"}


@pytest.mark.parametrize("seed", [5, None])
def test_parts_are_shuffled_in_each_fit_anew(seed):
    leases = leasing(*("",) * 20, seed=seed, epochs_before=3)
    leases.open(1, [0])

    taken = [lease.ranges[0].part for lease in drained(leases, 0)]

    assert taken == part_order(20, 4, seed)


def test_a_part_that_no_worker_holds_is_near_to_nobody():
    leases = leasing("", "b")
    leases.open(0, [0])

    assert leases.take(0, lambda key: True).ranges[0].part == 1
    with pytest.raises(ValueError, match="no worker holds part 0"):
        leases.replace_key(0, "a")


def test_an_epoch_that_is_over_is_not_opened_again():
    leases = leasing("")
    leases.open(2, [0])

    with pytest.raises(ValueError, match="epoch 1 is over, this is 2"):
        leases.open(1, [0])


def test_what_remains_is_of_the_first_epoch_alone():
    resumed = SyncPoint(0, [RemainingWork(NOBODY, (Range(0, 8, 40),))])
    intervals = SyncIntervals(resumed=resumed)
    leases = DynamicLeasing(partition_sizes([40], 4, 1), intervals=intervals)

    rows = []
    for epoch in (3, 4):
        leases.open(epoch, [0])
        rows.append(leases.unfinished)

    assert rows == [32, 40]


def first_come(rows, step_rows=1, lease_rows=1, seed=None):
    return leases_of(DynamicLeasing, rows, step_rows, lease_rows, seed=seed)


def parts(lease):
    return [one.part for one in lease.ranges]


def test_small_parts_are_merged_to_pieces_of_the_size_aimed_at():
    leases = first_come([3, 3, 3, 20, 20], lease_rows=8)

    assert leases.take(0).ranges == (
        Range(0, 0, 3),
        Range(1, 0, 3),
        Range(2, 0, 2),
    )


class TestNear:
    def test_what_is_kept_for_one_that_is_far_goes_to_one_that_is_near(self):
        leases = first_come([1] * 4)
        assert leases.take(0, near()).ahead == 1

        assert parts(leases.take(1, near(1))) == [1]

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


class TestLosses:
    def test_pieces_grow_again_when_fewer_share_what_is_left(self):
        leases = first_come([96], lease_rows=32)
        leases.take(1)
        leases.lose(1)

        assert leases.take(0).rows == 32

    def test_what_is_free_comes_before_what_was_lost(self):
        leases = first_come([2, 2], step_rows=2, lease_rows=2)
        lost = leases.take(0)
        leases.lose(0)

        assert parts(leases.take(1)) == [1]
        assert leases.take(1).ranges == lost.ranges


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


def shares(rows, replicas=(0, 1), step_rows=1, lease_rows=1, seed=None):
    own = step_rows, lease_rows, replicas, seed
    return leases_of(StaticPartition, rows, *own)


def rows_taken(leases, replica, starts):
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
        seen.append([rows_taken(leases, r, starts) for r in range(replicas)])

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


STEP = 4


def made(kind, rows, replicas, seed=0, interval_rows=None, remaining=None):
    """Leases of which `interval_rows` are for each replica in an interval."""
    size = partition_sizes(rows, STEP, len(replicas)).lease_rows
    own = STEP, size, replicas, seed, interval_rows, remaining
    return leases_of(kind, rows, *own)


shared = functools.partial(made, StaticPartition)
dynamic = functools.partial(made, DynamicLeasing)


EACH_KIND = pytest.mark.parametrize(
    "make", [shared, dynamic], ids=["static", "dynamic"]
)


class Crowd:
    """Replicas that take pieces, finish them, and are lost, in a random order."""

    def __init__(self, leases, replicas, seed):
        self.leases = leases
        self.here = list(replicas)
        self.trained = Counter()
        self.rows = Counter()  # by replica
        self._held = []
        self._random = random.Random(seed)

    def run_lap(self, losses=0, end_after=None):
        """Go on until nobody gets anything; True if it was only the lap."""
        taken = 0
        while True:
            asking = self._random.sample(self.here, len(self.here))
            leased = [(r, self.leases.take(r)) for r in asking]
            self._held += [(r, one) for r, one in leased if one is not None]
            taken += sum(one is not None for _, one in leased)
            if end_after is not None and taken >= end_after:
                self.leases.end_interval()
                end_after = None
            if not self._held:
                break
            if losses and len(self.here) > 1 and self._random.random() < 0.3:
                self._lose()
                losses -= 1
            self._finish()
        return self.leases.interval_is_over(self.here)

    def _lose(self):
        lost = self.here.pop(self._random.randrange(len(self.here)))
        self._held = [(r, one) for r, one in self._held if r != lost]
        self.leases.lose(lost)

    def _finish(self):
        for replica, one in self._held:
            assert self.leases.finish(replica, one.number)
            for each in one.ranges:
                self.trained.update((each.part, row) for row in all_rows(each))
            self.rows[replica] += one.rows
        self._held = []


def all_rows(each):
    return ["all"] if each.stop == TO_ITS_END else range(each.start, each.stop)


def everything(rows):
    known = ((p, row) for p, count in enumerate(rows) for row in range(count))
    return Counter(known) + Counter((p, "all") for p, n in enumerate(rows) if n < 0)


def left_in(leases):
    ranges = [each for work in leases.remaining() for each in work.ranges]
    return Counter((each.part, row) for each in ranges for row in all_rows(each))


@EACH_KIND
@pytest.mark.parametrize("seed", range(40))
def test_each_row_is_trained_on_once_and_the_others_are_left(make, seed):
    chance = random.Random(seed)
    rows = [chance.choice([0, 1, 3, 8, 17, 60]) for _ in range(chance.randint(1, 12))]
    replicas = range(chance.randint(1, 4))
    interval_rows = chance.choice([None, STEP, 3 * STEP])
    leases = make(rows, replicas, seed, interval_rows)
    crowd = Crowd(leases, replicas, seed)

    while crowd.run_lap(
        losses=chance.randint(0, 1), end_after=chance.choice([None, 2])
    ):
        assert leases.unfinished == left_in(leases).total() > 0
        assert crowd.trained + left_in(leases) == everything(rows)
        leases.begin_interval()

    assert crowd.trained == everything(rows)
    assert leases.unfinished == 0


@EACH_KIND
@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_others_go_on_with_what_is_left(make, replicas, seed):
    rows = [30, 7, -1, 50, 0, 13, -1] if make is dynamic else [30, 7, 50, 0, 13]
    before = make(rows, range(3), seed, interval_rows=2 * STEP)
    crowd = Crowd(before, range(3), seed)
    assert crowd.run_lap()

    after = make(rows, range(replicas), seed, 2 * STEP, before.remaining())
    others = Crowd(after, range(replicas), seed)
    while others.run_lap():
        after.begin_interval()

    assert crowd.trained + others.trained == everything(rows)


@pytest.mark.parametrize("ended", [None, 4])
def test_fixed_shares_go_on_as_if_nothing_had_been(ended):
    rows, replicas = [37, 22, 61], [0, 3, 7]

    def pieces(leases, members):
        found = {replica: [] for replica in members}
        for _ in range(50):
            for replica in members:
                one = leases.take(replica)
                if one is not None:
                    found[replica].append(one.ranges)
                    leases.finish(replica, one.number)
            if leases.interval_is_over(members):
                leases.begin_interval()
        return list(found.values())

    whole = shared(rows, replicas, interval_rows=2 * STEP)
    Crowd(whole, replicas, 0).run_lap(end_after=ended)
    left = whole.remaining()
    whole.begin_interval()
    # Numbered anew, as those of another run are.
    again = shared(rows, range(3), interval_rows=2 * STEP, remaining=left)

    assert pieces(again, range(3)) == pieces(whole, replicas)


def test_each_replica_makes_as_many_steps_in_a_lap():
    leases = shared([100, 100], range(3), interval_rows=3 * STEP)
    crowd = Crowd(leases, range(3), 0)

    assert crowd.run_lap()

    assert crowd.rows == dict.fromkeys(range(3), 3 * STEP)


def test_a_lap_that_is_ended_ends_for_all_after_as_many_rows():
    leases = shared([400], range(2))
    ahead = [leases.take(0), leases.take(0)]
    behind = [leases.take(1)]
    leases.end_interval()

    assert leases.take(0) is None
    behind.append(leases.take(1))
    assert leases.take(1) is None
    assert sum(one.rows for one in ahead) == sum(one.rows for one in behind)


@EACH_KIND
def test_a_lap_is_not_over_while_somebody_holds_a_piece(make):
    leases = make([80], range(2), interval_rows=STEP)
    held = [leases.take(0), leases.take(1)]

    leases.finish(0, held[0].number)
    assert not leases.interval_is_over(range(2))
    leases.finish(1, held[1].number)
    assert leases.interval_is_over(range(2))


def test_what_lost_ones_had_belongs_to_nobody():
    leases = shared([40], range(2), interval_rows=STEP)
    crowd = Crowd(leases, range(2), 0)
    assert crowd.run_lap()
    leases.lose(1)

    owners = {work.replica: work.ranges for work in leases.remaining()}

    assert owners[NOBODY] == (Range(0, 24, 40),)
    assert RemainingWork(0, (Range(0, 4, 20),)) in leases.remaining()
