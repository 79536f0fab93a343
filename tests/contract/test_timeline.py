"""Spans of time: recording without gaps, merging within bounds, and the table."""

import itertools

import numpy as np
import pytest

from daskdl.channel.protocol import WaitCause
from daskdl.observe import timeline
from daskdl.observe.timeline import ACTIVITIES, SPAN_COLUMNS, SPANS, SpanLog, Timeline
from tests.support.problems import Clock

BEGAN = 1_700_000_000.0


def log_of(clock, replica=0):
    return SpanLog(replica, clock, lambda: BEGAN + clock.now)


def spend(log, clock, **activities):
    """Spend seconds on activities, in order."""
    for name, seconds in activities.items():
        log.enter(name)
        clock.now += seconds


def table(*packed):
    timeline_table = Timeline(BEGAN + 100.0)
    for spans in packed:
        timeline_table.extend(spans)
    return timeline_table


def occurred(row):
    return {name: row[name] for name in ACTIVITIES if row[name]}


def test_each_cause_of_a_wait_is_an_activity():
    waits = {name for name in ACTIVITIES if name.startswith("wait_")}

    assert waits == {f"wait_{cause}" for cause in WaitCause}


def test_long_activities_have_spans_of_their_own():
    clock = Clock()
    log = log_of(clock)
    clock.now += 2.0
    spend(log, clock, compute=1.0, data=0.5)

    rows = table(log.take())

    assert [occurred(row) for row in rows] == [
        {"setup": 2.0},
        {"compute": 1.0},
        {"data": 0.5},
    ]
    assert [(row["start"], row["end"]) for row in rows] == [(0, 2), (2, 3), (3, 3.5)]
    assert rows[0].keys() == SPAN_COLUMNS.keys()
    assert [occurred(row) for row in rows[1:]] == [{"compute": 1.0}, {"data": 0.5}]
    with pytest.raises(IndexError):
        rows[3]


def test_a_wait_interrupts_an_activity():
    clock = Clock()
    log = log_of(clock)
    log.enter("exchange")
    clock.now += 7.0

    log.wait(WaitCause.GATHER, clock.now - 4.0, clock.now - 1.0)
    rows = table(log.take())

    assert rows.seconds() == {"exchange": 4.0, "wait_gather": 3.0}
    assert [row["end"] - row["start"] for row in rows] == [3.0, 3.0, 1.0]


def test_short_activities_share_a_span():
    clock = Clock()
    log = log_of(clock)
    for _ in range(2000):
        spend(log, clock, exchange=1e-5, compute=8e-5, data=1e-5)

    rows = table(log.take())

    assert len(rows) <= 2000 * 1e-4 / timeline.MIN_SPAN_S + 1
    assert occurred(rows[1]).keys() == {"exchange", "compute", "data"}
    assert rows.seconds()["compute"] == pytest.approx(0.16)


@pytest.mark.parametrize("step_s", [1e-3, 1.0])
def test_a_replica_reports_few_spans_without_losing_time(monkeypatch, step_s):
    monkeypatch.setattr(timeline, "MAX_REPORTED", 32)
    clock = Clock()
    log = log_of(clock)
    counts = []
    merged = table()
    for _ in range(20):  # epochs
        for _ in range(100):
            spend(log, clock, exchange=0.1 * step_s, compute=step_s)
        spend(log, clock, wait_gather=5 * step_s)
        packed = log.take()
        counts.append(len(packed) // SPANS.itemsize)
        merged.extend(packed)

    assert max(counts) <= 32 + 2
    assert max(counts[10:]) <= 8
    assert merged.seconds() == pytest.approx(
        {
            "compute": 2000 * step_s,
            "exchange": 200 * step_s,
            "wait_gather": 100 * step_s,
        },
        rel=1e-5,
    )
    rows = list(merged)
    for row, after in itertools.pairwise(rows):  # no gap
        assert row["end"] == pytest.approx(after["start"], abs=1e-6)
        assert sum(occurred(row).values()) == pytest.approx(
            row["end"] - row["start"], rel=1e-3
        )


def test_the_table_is_bounded_and_long_waits_stay(monkeypatch):
    monkeypatch.setattr(timeline, "MAX_SPANS", 100)
    clock = Clock()
    logs = [log_of(clock, replica) for replica in (1, 0)]
    rows = table()
    for _ in range(10):
        for _ in range(20):
            for log in logs:
                log.enter("compute")
            clock.now += 1.0
            for log in logs:
                log.enter("data")
            clock.now += 0.5
        clock.now += 500.0
        for log in logs:
            log.wait("gather", clock.now - 500.0, clock.now)
            rows.extend(log.take())

    assert 40 < len(rows) <= 100
    assert rows.replicas == [0, 1]
    assert rows.seconds(replica=1) == rows.seconds(replica=0)
    assert rows.seconds() == {"compute": 400, "data": 200, "wait_gather": 10_000}
    assert [row["replica"] for row in rows] == sorted(row["replica"] for row in rows)
    starts = [row["start"] for row in rows if row["replica"] == 0]
    assert starts == sorted(starts)
    alone = [row for row in rows if occurred(row) == {"wait_gather": 500.0}]
    assert len(alone) == 20


def test_there_is_a_row_for_each_replica_however_many(monkeypatch):
    monkeypatch.setattr(timeline, "MAX_SPANS", 4)
    clock = Clock()
    rows = table()
    for replica in range(9):
        log = log_of(clock, replica)
        spend(log, clock, compute=1.0, data=1.0)
        rows.extend(log.take())

    assert [occurred(row) for row in rows] == [{"compute": 1.0, "data": 1.0}] * 9


def test_a_data_frame_has_a_row_for_each_span():
    clock = Clock()
    log = log_of(clock, replica=3)
    spend(log, clock, compute=1.0, data=0.5)

    frame = table(log.take()).to_pandas()

    assert list(frame.columns) == list(SPAN_COLUMNS)
    assert frame["replica"].tolist() == [3, 3]
    assert frame["start"].tolist() == [0.0, 1.0]
    assert frame["data"].tolist() == [0.0, 0.5]


def test_packed_spans_are_the_table():
    clock = Clock()
    log = log_of(clock)
    spend(log, clock, compute=1.0, data=0.5)

    rows = table(log.take())

    assert list(table(rows.packed())) == list(rows)
    assert np.frombuffer(rows.packed(), SPANS)["start"][0] == BEGAN + 100.0
    assert repr(rows) == "Timeline(2 spans of 1 replica)"
    assert table().seconds() == {}
