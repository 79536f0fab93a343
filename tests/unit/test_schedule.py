"""Which keys a lease comes with, and in which order each epoch goes."""

import pytest

from daskdl.channel.leasing import (
    NOBODY,
    Lease,
    PartitionSizes,
    Range,
    RemainingWork,
    Schedule,
    SyncIntervals,
    part_order,
    partition_sizes,
)


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

    lease = Lease(0, (Range(1, 0, 1), Range(2, 0, 1)), ahead=3)

    assert own.keys("train", lease) == {1: "b again", 2: "c", 3: "d"}


@pytest.mark.parametrize(("phase", "seed"), [("train", 5), ("validation", None)])
def test_only_training_parts_are_shuffled_and_in_each_fit_anew(phase, seed):
    own = schedule(*("",) * 20, seed=5, epochs_before=3)

    assert order(own, phase, 1, 20) == part_order(20, 4, seed)


def test_where_workers_hold_no_part_none_is_near():
    assert schedule("", "").nearest("train", lambda key: True) is None


def test_a_part_that_no_worker_holds_is_near_to_nobody():
    is_near = schedule("", "b").nearest("train", lambda key: True)

    assert [is_near(0), is_near(1)] == [False, True]


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
