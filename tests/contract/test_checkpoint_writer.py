"""A replica's parts of checkpoints, written beside its training."""

import threading
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from daskdl import Checkpoint
from daskdl.channel.base import BarrierResult
from daskdl.errors import SaveError, WaitTimeoutError
from daskdl.saving.checkpoints import (
    COMMON,
    CheckpointPlan,
    CheckpointStamp,
    Part,
    complete_at,
    of_replica,
)
from daskdl.training.checkpointing import CheckpointWriter
from daskdl.training.state import ReplicaState
from tests.support.run_states import TIMEOUTS

BOUND_S = 20  # of a test that hangs


class Waiting:
    """A channel that only waits.

    Args:
        patience_s: Waits no longer.
    """

    def __init__(self, patience_s=BOUND_S):
        self.patience_s = patience_s
        self.waits = threading.Event()

    def wait(self, cause, future, timeout_s):
        self.waits.set()
        try:
            future.exception(min(timeout_s, self.patience_s))
        except TimeoutError:
            return False
        return True


def writer(series, replica=0, channel=None, first=1, before=0, epochs=(), **options):
    rule = Checkpoint(series.store.url, **{"keep_last": None, **options})
    plan = CheckpointPlan(series, rule, "fit", "run", first, before)
    rows = Mock(rows=[{"epoch": epoch} for epoch in epochs])
    return CheckpointWriter(plan, replica, channel or Waiting(), TIMEOUTS, rows)


def met(*written, gone=(), taken=0):
    """Replicas have met; each has written parts of checkpoints up to this one."""
    last = dict(enumerate(written))
    common = {"checkpoints": taken, "rows": 0}
    notes = {
        r: {"checkpoint": {"written": number, **common}} for r, number in last.items()
    }
    return BarrierResult(notes, dict.fromkeys(gone, 0))


def having(**fields):
    """Returns a state of a replica."""
    return lambda: ReplicaState({}, {"shared": torch.zeros(2)}, fields)


class Gate:
    """Holds back whoever writes, and counts them."""

    def __init__(self, monkeypatch):
        self.open, self.reached = threading.Event(), threading.Semaphore(0)
        self.entered = 0
        write = Part.write

        def held(part, *args):
            self.entered += 1
            self.reached.release()
            assert self.open.wait(BOUND_S)
            write(part, *args)

        monkeypatch.setattr(Part, "write", held)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()
    for thread in threading.enumerate():
        if thread.name.startswith("daskdl-checkpoint"):
            thread.join(BOUND_S)


class TestParts:
    def test_the_lowest_replica_writes_the_common_part(self, series):
        first, second = writer(series, 0), writer(series, 1)

        second.take(met(-1, -1), having(x=torch.ones(1)))
        second.finish()
        assert series.folder(1).names("*.json") == ["replica-1.json"]
        first.take(met(-1, -1), having(x=torch.zeros(1)))
        first.finish()

        complete = complete_at(series.folder(1))
        assert (complete.header["members"], complete.header["count"]) == ([0, 1], 1)
        assert complete.stamp == CheckpointStamp("fit", "run", 1)
        assert Part(complete.store, of_replica(1)).read()[1]["x"].tolist() == [1.0]

    def test_a_departed_replica_has_no_part(self, series):
        second = writer(series, 1)

        second.take(met(-1, -1, gone=[0]), having())
        second.finish()

        assert complete_at(series.folder(1)).header["members"] == [1]

    def test_a_replica_that_joined_late_counts_the_checkpoints_before(self, series):
        late, gathered = writer(series, 1), met(-1, -1, taken=4)
        gathered.payloads[1]["checkpoint"]["checkpoints"] = 0

        late.take(gathered, having())
        late.finish()

        assert series.numbers() == [5]
        assert late.counters()["checkpoints"] == 5

    def test_a_replica_with_all_rows_of_the_history_writes_the_common_part(
        self, series
    ):
        gathered = met(-1, -1)
        gathered.payloads[1]["checkpoint"]["rows"] = 3  # replica 0 joined later

        for member in (writer(series, 0), writer(series, 1, epochs=range(3))):
            member.take(gathered, having())
            member.finish()

        header = complete_at(series.folder(1)).header
        assert [row["epoch"] for row in header["rows"]] == [0, 1, 2]


class TestCopy:
    def test_later_changes_are_not_written(self, series, gate):
        weight, array = torch.zeros(2), np.zeros(2)
        header = {"losses": [1.0]}
        state = {"weight": weight, "deep": [(weight,)], "array": array, "steps": 1}
        writes = writer(series)

        writes.take(met(-1), lambda: ReplicaState(header, {"c": weight}, state))
        weight.add_(1)
        array += 1
        header["losses"].append(2.0)
        header["losses"][0] = 3.0
        gate.open.set()
        writes.finish()

        _, complete = Part(series.folder(1), of_replica(0)).read()
        tensors = complete["weight"], complete["deep"][0][0], complete["array"]
        assert [tensor.tolist() for tensor in tensors] == [[0.0, 0.0]] * 3
        _, common = Part(series.folder(1), COMMON).read()
        assert (common["losses"], common["c"].tolist()) == ([1.0], [0.0, 0.0])


def test_arrays_are_copied_as_tensors(series):
    array = np.ones(2)
    array.flags.writeable = False
    part = Part(series.folder(1), of_replica(0))

    part.write(part.copied(CheckpointStamp("fit", "run", 1), {}, {"random": [array]}))

    assert part.read()[1]["random"][0].tolist() == [1.0, 1.0]


class TestWaiting:
    def test_training_does_not_wait_for_the_writer(self, series, gate):
        channel = Waiting()
        member = writer(series, channel=channel)

        member.take(met(-1), having())

        assert gate.reached.acquire(timeout=BOUND_S)
        assert member.counters()["written"] == -1
        assert not channel.waits.is_set()

    def test_at_most_one_copy_is_pending(self, series, gate):
        channel, entered = Waiting(), []
        member = writer(series, channel=channel)

        def make():
            entered.append(gate.entered)
            return having()()

        member.end_epoch(0, met(-1), (), False, make)
        later = 1, met(-1, taken=1), (), False, make
        second = threading.Thread(target=member.end_epoch, args=later)
        second.start()
        assert channel.waits.wait(BOUND_S)
        assert len(entered) == 1
        gate.open.set()
        second.join(BOUND_S)
        member.finish()

        assert entered == [0, 2]  # a part of its own, and the common one
        assert series.numbers() == [1, 2]

    def test_a_store_that_hangs_is_named(self, series, gate):
        member = writer(series, channel=Waiting(patience_s=0.01))
        member.take(met(-1), having())

        with pytest.raises(WaitTimeoutError, match=r"writing to .*checkpoint-000001 t"):
            member.finish()


@pytest.mark.parametrize(
    ("met_again", "missing"),
    [((1, 1), True), ((1, -1), False), ((1,), False)],
    ids=["written somewhere else", "still being written", "lost while it wrote"],
)
def test_only_a_folder_that_workers_do_not_share_is_an_error(
    series, met_again, missing
):
    member = writer(series)
    member.take(met(-1, -1), having())
    member.finish()

    member.take(met(*met_again, taken=1), having())

    if missing:
        with pytest.raises(SaveError, match="but some are missing; all workers must"):
            member.finish()
    else:
        member.finish()
        assert member.counters()["written"] == 2
