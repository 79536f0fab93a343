"""What first come and fixed shares have in common, whoever comes and goes."""

from collections import Counter

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
    whole_parts,
)
from tests.support.leases import drained, leases_of

MEMBERS = range(4)
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "finish", "lose"]), st.sampled_from(MEMBERS)),
    max_size=80,
)
PARTS = st.lists(st.one_of(st.integers(0, 40), st.just(-1)), max_size=8)


BOTH = pytest.mark.parametrize("kind", [DynamicLeasing, StaticPartition])


def test_the_order_without_a_seed_is_that_of_the_data():
    assert part_order(4, epoch=3, seed=None) == [0, 1, 2, 3]


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_an_order_has_every_part_once(epoch):
    assert sorted(part_order(50, epoch, seed=1)) == list(range(50))


def test_equal_seeds_give_equal_orders():
    assert part_order(50, 2, seed=1) == part_order(50, 2, seed=1)


@pytest.mark.parametrize("other", [(3, 1), (2, 7)], ids=["epoch", "seed"])
def test_another_epoch_or_seed_gives_another_order(other):
    assert part_order(50, 2, seed=1) != part_order(50, *other)


def test_parts_are_plain_numbers_that_travel():
    assert {type(part) for part in part_order(3, 0, seed=0)} == {int}


def test_a_piece_is_an_eighth_of_a_share_in_whole_steps_and_one_step_at_least():
    assert partition_sizes([100, 61], step_rows=2, replicas=2).lease_rows == 12
    assert partition_sizes([3], step_rows=4, replicas=2).lease_rows == 4
    assert partition_sizes([-1, -1], step_rows=4, replicas=2).lease_rows == 4
    assert partition_sizes([9, -1], step_rows=1, replicas=1).lease_rows == 2


@BOTH
def test_only_the_holder_can_finish_a_piece_and_only_once(kind):
    leases = leases_of(kind, [1], replicas=MEMBERS)
    number = leases.take(0).number

    assert not leases.finish(1, number)
    assert leases.finish(0, number)
    assert not leases.finish(0, number)


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


@BOTH
def test_a_finished_piece_does_not_come_back_when_its_replica_is_lost(kind):
    leases = leases_of(kind, [1], replicas=MEMBERS)
    leases.finish(0, leases.take(0).number)

    leases.lose(0)

    assert leases.take(1) is None
    assert not leases.has_one_for(1)
    assert leases.repeated == leases.unfinished == 0


@BOTH
def test_a_piece_lost_twice_is_counted_twice(kind):
    leases = leases_of(kind, [1], replicas=MEMBERS)
    for replica in (0, 1, 2):
        leases.take(replica)
        leases.lose(replica)

    assert leases.take(3) is not None
    assert leases.repeated == 3


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


def test_whole_parts_leave_out_those_without_rows():
    assert whole_parts([2, 1, 0], [4, 0, -1]) == [Range(2, 0, -1), Range(0, 0, 4)]


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
