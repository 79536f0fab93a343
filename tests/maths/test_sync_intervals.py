"""Epochs in laps: what is handed out, what is left, and going on from that."""

import functools
import random
from collections import Counter

import pytest

from daskdl.channel.leasing import (
    NOBODY,
    TO_ITS_END,
    DynamicLeasing,
    Range,
    RemainingWork,
    StaticPartition,
    partition_sizes,
)
from tests.support.leases import leases_of

STEP = 4


def made(kind, rows, replicas, seed=0, interval_rows=None, remaining=None):
    """Leases of which `interval_rows` are for each replica in an interval."""
    size = partition_sizes(rows, STEP, len(replicas)).lease_rows
    own = STEP, size, replicas, seed, interval_rows, remaining
    return leases_of(kind, rows, *own)


shared = functools.partial(made, StaticPartition)
first_come = functools.partial(made, DynamicLeasing)


BOTH = pytest.mark.parametrize("make", [shared, first_come], ids=["static", "dynamic"])


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
                self.trained.update((each.part, row) for row in rows_of(each))
            self.rows[replica] += one.rows
        self._held = []


def rows_of(each):
    return ["all"] if each.stop == TO_ITS_END else range(each.start, each.stop)


def everything(rows):
    known = ((p, row) for p, count in enumerate(rows) for row in range(count))
    return Counter(known) + Counter((p, "all") for p, n in enumerate(rows) if n < 0)


def left_in(leases):
    ranges = [each for work in leases.remaining() for each in work.ranges]
    return Counter((each.part, row) for each in ranges for row in rows_of(each))


@BOTH
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


@BOTH
@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_others_go_on_with_what_is_left(make, replicas, seed):
    rows = [30, 7, -1, 50, 0, 13, -1] if make is first_come else [30, 7, 50, 0, 13]
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


def test_each_goes_on_with_its_own_share_however_much_that_is():
    left = [RemainingWork(5, (Range(0, 4, 40),)), RemainingWork(2, (Range(1, 36, 40),))]
    leases = shared([40, 40], range(2), remaining=left)

    (ranges,) = {one.ranges for one in [leases.take(0)]}

    assert ranges == (Range(1, 36, 40),)  # the lower number then has the lower one now
    assert leases.take(0) is None
    assert leases.take(1).ranges[0].part == 0


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


@BOTH
def test_a_lap_is_not_over_while_somebody_holds_a_piece(make):
    leases = make([80], range(2), interval_rows=STEP)
    held = [leases.take(0), leases.take(1)]

    leases.finish(0, held[0].number)
    assert not leases.interval_is_over(range(2))
    leases.finish(1, held[1].number)
    assert leases.interval_is_over(range(2))


@BOTH
def test_an_epoch_without_laps_has_no_end_but_its_own(make):
    leases = make([10], range(1))
    crowd = Crowd(leases, range(1), 0)

    assert not crowd.run_lap()
    assert crowd.trained == everything([10])


def test_what_lost_ones_had_belongs_to_nobody():
    leases = shared([40], range(2), interval_rows=STEP)
    crowd = Crowd(leases, range(2), 0)
    assert crowd.run_lap()
    leases.lose(1)

    owners = {work.replica: work.ranges for work in leases.remaining()}

    assert owners[NOBODY] == (Range(0, 24, 40),)
    assert RemainingWork(0, (Range(0, 4, 20),)) in leases.remaining()
