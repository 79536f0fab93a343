"""What first come and fixed shares have in common, whoever comes and goes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskdl.channel.leasing import (
    NOBODY,
    DynamicLeasing,
    FreeList,
    PartitionSizes,
    Range,
    RemainingWork,
    Schedule,
    StaticPartition,
    SyncIntervals,
    part_order,
    partition_sizes,
    whole_parts,
)

MEMBERS = range(4)
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "finish", "lose"]), st.sampled_from(MEMBERS)),
    max_size=80,
)
PARTS = st.lists(st.one_of(st.integers(0, 40), st.just(-1)), max_size=8)


def extent(rows, step_rows=1, lease_rows=1):
    return PartitionSizes(tuple(rows), ("",) * len(rows), step_rows, lease_rows)


def first_come(order, own):
    return DynamicLeasing(order, own)


def fixed_shares(order, own):
    return StaticPartition(order, own, MEMBERS)


BOTH = pytest.mark.parametrize("kind", [first_come, fixed_shares])


def drained(leases, replica):
    """What a replica gets that asks until there is nothing left for it."""
    return list(iter(lambda: leases.take(replica), None))


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
    leases = kind([0], extent([1]))
    number = leases.take(0).number

    assert not leases.finish(1, number)
    assert leases.finish(0, number)
    assert not leases.finish(0, number)


@BOTH
def test_rows_are_unfinished_until_their_holder_is_through(kind):
    leases = kind([0, 1], extent([3, 4], 3, 3))
    number = leases.take(0).number
    assert leases.unfinished() == 7

    leases.finish(0, number)

    assert leases.unfinished() == 4


@BOTH
def test_a_piece_that_was_lost_is_handed_out_again_as_it_was_and_counted(kind):
    leases = kind([0, 1], extent([3, 3], 1, 2))
    lost = leases.take(0)

    leases.lose(0)

    *others, again = drained(leases, 1)
    if kind is fixed_shares:  # others have a share of it
        others += drained(leases, 2) + drained(leases, 3)
    assert (again.number, again.ranges) == (lost.number, lost.ranges)
    assert lost.number not in [lease.number for lease in others]
    assert leases.repeated == 1
    assert leases.finish(1, lost.number)


@BOTH
def test_a_finished_piece_does_not_come_back_when_its_replica_is_lost(kind):
    leases = kind([0], extent([1]))
    leases.finish(0, leases.take(0).number)

    leases.lose(0)

    assert leases.take(1) is None
    assert not leases.has_one_for(1)
    assert leases.repeated == leases.unfinished() == 0


@BOTH
def test_a_piece_lost_twice_is_counted_twice(kind):
    leases = kind([0], extent([1]))
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
    is_near=st.functions(like=lambda part: None, returns=st.booleans(), pure=True),
)
def test_every_row_is_finished_exactly_once_however_replicas_come_and_go(
    kind, actions, rows, step_rows, steps, is_near
):
    own = extent(rows, step_rows, steps * step_rows)
    order = part_order(len(rows), 0, 1)
    epoch = Epoch(kind(order, own), is_near)

    for action, replica in actions:
        if replica in epoch.held:
            getattr(epoch, action)(replica)
    for replica in list(epoch.held):
        epoch.lose(replica)
    epoch.held[9] = []  # one that stays to the end
    while epoch.leases.unfinished():
        epoch.take(9)
        epoch.finish(9)

    assert epoch.finished == Counter(rows_in(whole_parts(order, rows)))
    assert epoch.leases.repeated == epoch.dropped
    assert epoch.leases.take(9) is None


def test_whole_parts_leave_out_those_without_rows():
    assert whole_parts([2, 1, 0], [4, 0, -1]) == [Range(2, 0, -1), Range(0, 0, 4)]


@given(st.integers(1, 12), st.data())
def test_searching_a_free_list_from_anywhere_finds_each_that_is_left_once_in_order(
    count, data
):
    gone = data.draw(st.sets(st.integers(0, count - 1)))
    start = data.draw(st.integers(0, count))
    most = data.draw(st.integers(0, 15))
    free = FreeList(count)
    for position in gone:
        free.remove(position)

    found = list(free.round(start, most))

    turn = [i % count for i in range(start, start + count)]
    assert found == [i for i in turn if i not in gone][:most]


# ---- epoch after epoch


def schedule(*keys, seed=None, epochs_before=0):
    extent = PartitionSizes((1,) * len(keys), keys, 1, 1)
    phases = {"train": extent, "validation": extent}
    return Schedule(phases, seed, epochs_before)


def order(own, phase, epoch, parts):
    leases = own.open(phase, epoch, None)
    return [leases.take(0).ranges[0].part for _ in range(parts)]


def test_a_lease_has_the_keys_of_its_parts_and_of_the_one_ahead():
    own = schedule("a", "b", "c", "d")
    own.replace("train", 1, "b again")
    own.open("train", 0, None)

    lease = own.lease("train", 0, lambda key: key in ("b again", "d"))

    assert ([one.part for one in lease.ranges], lease.ahead) == ([1], 3)
    assert lease.keys == {1: "b again", 3: "d"}


@pytest.mark.parametrize(("phase", "seed"), [("train", 5), ("validation", None)])
def test_only_training_parts_are_shuffled_and_in_each_fit_anew(phase, seed):
    own = schedule(*("",) * 20, seed=5, epochs_before=3)

    assert order(own, phase, 1, 20) == part_order(20, 4, seed)


def test_a_part_that_no_worker_holds_is_near_to_nobody():
    own = schedule("", "b")
    own.open("train", 0, None)

    assert own.lease("train", 0, lambda key: True).ranges[0].part == 1
    with pytest.raises(ValueError, match="no worker holds part 0 of train"):
        own.replace("train", 0, "a")


def test_an_epoch_that_is_over_is_not_opened_again():
    own = schedule("")
    own.open("train", 2, None)

    with pytest.raises(ValueError, match="epoch 1 of train is over, this is 2"):
        own.open("train", 1, None)


def test_what_is_left_is_of_the_first_epoch_alone():
    extents = {"train": partition_sizes([40], 4, 1)}
    left = [RemainingWork(NOBODY, (Range(0, 8, 40),))]
    schedule = Schedule(extents, None, 0, SyncIntervals(left=left))

    rows = [schedule.open("train", epoch, None).unfinished() for epoch in (3, 4)]

    assert rows == [32, 40]


def test_laps_are_of_the_training_data():
    extents = {phase: partition_sizes([40], 4, 2) for phase in ("train", "validation")}
    schedule = Schedule(extents, None, 0, SyncIntervals(replicas=2, rows=4))

    def taken(phase):
        leases = schedule.open(phase, 0, None)
        pieces = iter(lambda: leases.take(0), None)
        return sum(piece.rows for piece in pieces)

    assert taken("train") == 8
    assert taken("validation") == 40
    schedule.begin_interval()
    assert taken("train") == 8
