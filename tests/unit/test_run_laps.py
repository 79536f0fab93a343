"""How a run comes to a pause in the middle of an epoch, and goes on."""

import dataclasses

from daskdl.channel.leasing import Done, RunSpec, SyncIntervals, SyncPoint
from daskdl.channel.protocol import Barrier
from daskdl.channel.run_state import RunState
from tests.support.records import plan_of

NOBODY_IS_NEAR = {"is_near": lambda key: False}


def running(seed=None, **laps):
    """A run of two replicas, of four parts of a row each."""
    record = RunState(
        dataclasses.replace(
            plan_of(2, seed=seed), laps=SyncIntervals(replicas=2, **laps)
        )
    )
    for replica in range(2):
        record.join(replica, 0.0)
    return record


def take(record, replica, phase="train", epoch=0):
    lease = record.lease(replica, phase, epoch, **NOBODY_IS_NEAR)
    return None if isinstance(lease, SyncPoint) else lease


def pause_of(record, replica):
    lease = record.lease(replica, "train", record.epoch, **NOBODY_IS_NEAR)
    assert lease is None or isinstance(lease, SyncPoint)
    return lease


def finish(record, replica, lease, epoch=0, now=0.0):
    finished = [{"piece": lease.number, "examples": 1, "loss": 0.0}]
    record.give_back(replica, "train", epoch, finished, now)


def meet(record, kind):
    for replica in range(2):
        barrier = record.arrive(str(kind), replica, None, b"", kind)
    record.complete(str(kind), barrier)


def test_a_lap_ends_when_it_has_taken_long_enough():
    record = running(seconds=10.0)
    record.give_back(0, "train", 0, [], 50.0)
    first = take(record, 0)

    record.give_back(0, "train", 0, [], 59.9)
    second = take(record, 1)
    record.give_back(0, "train", 0, [], 60.0)

    assert second is not None
    assert take(record, 0) is None
    assert pause_of(record, 0) is None  # somebody holds a piece
    assert not record.can_lease(0, "train", 0)
    finish(record, 0, first)
    finish(record, 1, second)
    assert record.can_lease(0, "train", 0)
    pause = pause_of(record, 0)
    assert sum(one.rows for left in pause.left for one in left.ranges) == 2


def test_after_a_pause_all_go_on_in_the_same_epoch_and_time_begins_anew():
    record = running(seconds=10.0)
    record.give_back(0, "train", 0, [], 0.0)
    finish(record, 0, take(record, 0))
    record.give_back(0, "train", 0, [], 10.0)
    assert pause_of(record, 1) is not None

    meet(record, Barrier.SYNC)
    record.give_back(0, "train", 0, [], 15.0)  # the first look of the lap
    record.give_back(0, "train", 0, [], 24.0)

    assert (record.epoch, record.lap) == (0, 1)
    assert take(record, 1) is not None


def test_the_end_of_an_epoch_is_that_of_a_lap_too():
    record = running(rows=1)
    for replica in range(2):
        finish(record, replica, take(record, replica))
    assert pause_of(record, 0) is not None

    meet(record, Barrier.REPORT)

    assert (record.epoch, record.lap) == (1, 1)
    assert take(record, 0, epoch=1) is not None


def test_at_the_end_of_an_epoch_there_is_no_pause():
    record = running(rows=2)

    for replica in (0, 0, 1, 1):
        finish(record, replica, take(record, replica))

    assert record.can_lease(0, "train", 0)
    assert pause_of(record, 0) is None


def test_what_is_held_when_a_replica_is_lost_is_left():
    record = running(seconds=10.0)
    record.give_back(0, "train", 0, [], 0.0)
    take(record, 1)
    record.give_back(0, "train", 0, [], 10.0)

    record.remove(1)

    assert record.can_lease(0, "train", 0)
    pause = pause_of(record, 0)
    assert sum(one.rows for left in pause.left for one in left.ranges) == 4


def test_validation_has_no_laps():
    record = running(rows=1)

    assert [take(record, 0, "validation") is None for _ in range(5)] == [
        *[False] * 4,
        True,
    ]


def test_plan_and_pause_come_over_the_wire_as_they_were():
    record = running(rows=1)
    finish(record, 0, take(record, 0))
    finish(record, 1, take(record, 1))
    pause = pause_of(record, 0)
    pause = pause._replace(departed=[Done(0.5, 3)])
    laps = SyncIntervals(2, 1, 0.5, pause.left, pause.departed)
    plan = dataclasses.replace(record.plan, laps=laps)

    def sent(value):
        """As msgpack leaves it: tuples become lists."""
        if isinstance(value, dict):
            return {key: sent(one) for key, one in value.items()}
        return [*map(sent, value)] if isinstance(value, list | tuple) else value

    assert SyncPoint.from_wire(sent(pause.to_wire())) == pause
    again = RunSpec.from_wire(sent(vars(plan)))
    assert again.laps == plan.laps
    assert again.order != dataclasses.replace(again, seed=5).order
