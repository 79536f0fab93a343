"""Which steps have a row, by a clock of the test's own."""

import pytest

from daskdl.history import StepRow, unpack_rows
from daskdl.training import telemetry
from daskdl.training.telemetry import SHARE, StepLog


class Clock:
    """Goes on when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def run(log, clock, steps, step_s, row_s=0.0):
    """Make steps that take so long; return those that had a row."""
    had = []
    for step in steps:
        clock.now += step_s
        if log.due(step):
            clock.now += row_s
            log.add(StepRow(0, step, 0, 1.0))
            had.append(step)
    return had


def steps_of(packed):
    return [row.step for _, row in unpack_rows(packed)]


class TestByNumber:
    def test_the_steps_it_divides_have_one_whatever_they_cost(self):
        clock = Clock()

        had = run(StepLog(3, clock), clock, range(1, 13), 1e-3, row_s=1.0)

        assert had == [3, 6, 9, 12]

    def test_those_without_an_exchange_have_one_too(self):
        assert StepLog(3).due(3, exchange_tried=False)

    def test_none_has_one_if_none_is_wanted(self):
        clock = Clock()
        log = StepLog(None, clock)

        assert run(log, clock, range(1, 100), 1.0) == []
        assert log.take() == b""


class TestByCost:
    def test_the_first_and_then_one_in_ten_has_one(self):
        clock = Clock()

        had = run(StepLog("auto", clock), clock, range(1, 45), 1.0)

        assert had == [1, 11, 21, 31, 41]

    @pytest.mark.parametrize(
        ("step_s", "row_s"), [(1e-3, 1e-4), (1e-3, 3e-3), (1e-2, 0.2)]
    )
    def test_rows_take_no_more_than_their_share_of_the_time(self, step_s, row_s):
        clock = Clock()
        began = clock.now

        had = run(StepLog("auto", clock), clock, range(1, 20_001), step_s, row_s)

        assert 0.5 * SHARE < len(had) * row_s / (clock.now - began) <= 1.5 * SHARE

    def test_a_row_that_took_long_once_does_not_count_for_ever(self):
        clock = Clock()
        log = StepLog("auto", clock)
        run(log, clock, [1], 1.0, row_s=1.0)

        had = run(log, clock, range(2, 400), 1.0)

        assert had[0] == 201
        assert had[1] == 211

    def test_a_step_without_an_exchange_has_none(self):
        log = StepLog("auto")

        due = [step for step in range(1, 60) if log.due(step, step % 16 == 0)]

        assert due == [16, 32, 48]


class TestRows:
    def test_what_was_taken_is_gone(self):
        clock = Clock()
        log = StepLog(2, clock)
        run(log, clock, range(1, 6), 1.0)

        assert steps_of(log.take()) == [2, 4]
        assert log.take() == b""
        run(log, clock, range(6, 9), 1.0)
        assert steps_of(log.take()) == [6, 8]

    @pytest.mark.parametrize("every", [1, "auto"])
    def test_too_many_for_one_report_are_thinned_out(self, monkeypatch, every):
        monkeypatch.setattr(telemetry, "MOST_ROWS", 8)
        clock = Clock()
        log = StepLog(every, clock)

        run(log, clock, range(1, 1001), 1.0)
        first = unpack_rows(log.take())
        run(log, clock, range(1001, 1101), 1.0)
        second = unpack_rows(log.take())

        assert 4 <= len(first) <= 8
        assert [number for number, _ in first + second] == [
            first[0][0] * n for n in range(1, len(first + second) + 1)
        ]

    def test_a_row_that_would_not_be_kept_is_not_made(self, monkeypatch):
        monkeypatch.setattr(telemetry, "MOST_ROWS", 2)
        clock = Clock()

        had = run(StepLog(1, clock), clock, range(1, 13), 1.0)

        assert had == [1, 2, 3, 4, 6, 8, 12]
