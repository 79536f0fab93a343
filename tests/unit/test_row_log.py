"""The rows of a history, as a replica keeps them for its checkpoints."""

import pytest

from daskdl.channel.base import ChannelStats
from daskdl.history import COLUMNS
from daskdl.training.base import ExchangeStats
from daskdl.training.telemetry import EpochReport, EpochTotals, RowLog


def note(loss, examples):
    return EpochReport(
        totals=EpochTotals(loss * examples, examples),
        exchange=ExchangeStats(2, 0.5, 0.125, 0.0, 0, 4),
        traffic=ChannelStats(3, 3, refused=3, waits_s={"end": 0.25}),
        learning_rate=0.5,
    )


REPORTS = [note(1.0, 10), note(2.0, 30)]
COUNTED = {"repeated": 1, "refused": 2, "departed": []}


class Clock:
    now = 10.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_an_epoch_is_a_row_as_in_the_history(clock):
    log = RowLog(100, ("val_loss",), now=clock)
    clock.now += 5.0

    log.end_epoch(3, REPORTS, COUNTED)

    [row] = log.rows
    assert row.keys() == {*COLUMNS, "val_loss"}
    assert (row["epoch"], row["examples"], row["loss"]) == (3, 40, 1.75)
    assert (row["seconds"], row["examples_per_s"]) == (5.0, 8.0)
    assert (row["repeated_pieces"], row["refused_messages"]) == (1, 8)
    assert row["dense_bytes"] == 4 * 100 * 4


def test_each_has_the_time_since_the_one_before(clock):
    log = RowLog(100, (), now=clock)
    for seconds in (5.0, 2.0):
        clock.now += seconds
        log.end_epoch(0, REPORTS, COUNTED)

    assert [row["seconds"] for row in log.rows] == [5.0, 2.0]


def test_rows_of_before_stay_and_are_not_changed(clock):
    before = [{"epoch": 0}]
    log = RowLog(100, (), before, now=clock)
    clock.now += 1.0

    log.end_epoch(1, REPORTS, COUNTED)

    assert [row["epoch"] for row in log.rows] == [0, 1]
    assert before == [{"epoch": 0}]
