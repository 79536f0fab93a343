"""What counts the steps of every contestant, alike."""

import dataclasses
import json

import pytest

from benchmarks.contest import CONTESTANTS, row
from benchmarks.peers.loop import Arguments, Gauge, Least, summary


class Board:
    """A meeting of threads of nobody: what is said, is there."""

    def __init__(self):
        self.said = {}

    def wait_for_all(self, name):
        pass

    def say(self, name, value):
        self.said[name] = json.loads(json.dumps(value))

    def hear(self, name):
        return self.said[name]


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


ARGUMENTS = Arguments(
    rank=0,
    world=2,
    address="127.0.0.1",
    port=1,
    own="127.0.0.1",
    interface="lo",
    work="mlp",
    seed=0,
    optimizer="SGD",
    rate_factor=1.0,
    warm_up=2.0,
    seconds=5.0,
    target=None,
    began=0.0,
)


def begun(board, clock, block=None, score=None, least=Least(), **changes):  # noqa: B008
    gauge = Gauge(
        dataclasses.replace(ARGUMENTS, **changes), board, block, score, least, clock
    )
    gauge.begin()
    return gauge


def train(gauge, clock, step_s, most=1000):
    """Steps of so many seconds, until it is enough; how many."""
    for made in range(most):
        if not gauge.goes_on(64):
            return made
        clock.now += step_s
    raise AssertionError("it never was enough")


def test_steps_of_the_warm_up_are_not_counted():
    clock = Clock()
    gauge = begun(Board(), clock)

    made = train(gauge, clock, step_s=0.5)

    assert made == 14
    assert gauge.report.steps == 10
    assert gauge.report.rows == 640
    assert gauge.report.seconds == 5.0
    assert gauge.report.warm_up_s == 2.0


@pytest.mark.parametrize(
    ("least", "expected"),
    [(Least(), (2, 1)), (Least(warm_up=3, counted=2), (5, 2))],
    ids=["one", "several"],
)
def test_so_many_steps_count_however_long_they_take(least, expected):
    clock = Clock()
    gauge = begun(Board(), clock, least=least)

    made = train(gauge, clock, step_s=60.0)

    assert (made, gauge.report.steps) == expected
    assert gauge.report.seconds == 60.0 * expected[1]


def test_those_in_step_end_where_rank_0_says():
    board, clock = Board(), Clock()
    first = begun(board, clock, block=4)
    # By itself it would go on for longer.
    second = begun(board, clock, block=4, rank=1, seconds=1000.0)

    made = 0
    while True:  # both are as far, as they are after a collective
        going = first.goes_on(64), second.goes_on(64)
        assert going[0] == going[1]
        if not going[0]:
            break
        made += 1
        clock.now += 0.1

    assert made % 4 == 0
    assert first.report.steps == second.report.steps > 0


@pytest.mark.parametrize(
    ("block", "least_s", "most_s"), [(1, 0.0, 10.0), (None, 1000.0, 2000.0)]
)
def test_the_clock_stands_while_only_those_in_step_are_scored(block, least_s, most_s):
    clock, scores = Clock(), iter([0.5, 0.9])

    def score():
        clock.now += 1000.0
        return next(scores)

    gauge = begun(Board(), clock, block, score, target=0.8, seconds=6000.0)
    train(gauge, clock, step_s=0.5)

    assert [value for _, value in gauge.report.curve] == [0.5, 0.9]
    assert gauge.report.reached_s == gauge.report.curve[-1][0]
    assert least_s < gauge.report.reached_s < most_s


def test_only_rank_0_scores():
    clock = Clock()
    gauge = begun(Board(), clock, score=lambda: 0.9, target=0.8, rank=1)

    train(gauge, clock, step_s=0.5)

    assert gauge.report.curve == []


def test_a_target_that_is_not_reached_ends_with_the_time():
    clock = Clock()
    gauge = begun(Board(), clock, score=lambda: 0.1, target=0.8)

    train(gauge, clock, step_s=0.5)

    assert gauge.report.reached_s is None
    assert gauge.report.seconds == 5.0


def report(**changes):
    found = {
        "rows": 640,
        "seconds": 2.0,
        "steps": 10,
        "sent": 5000,
        "received": 1000,
        "startup_s": 1.0,
        "warm_up_s": 1.0,
        "curve": [],
        "reached_s": None,
    }
    return found | changes


def test_rates_are_added_up_and_bytes_are_those_of_a_step():
    line = summary([report(), report(rows=320, steps=5, sent=25_000)])

    assert line["samples_per_s"] == 480.0
    assert line["sent_kb_per_step"] == 2.0


def test_a_ratio_is_of_the_same_round_and_a_failure_is_named():
    own = [{"samples_per_s": 10.0}, {"error": "it broke"}, {"samples_per_s": 90.0}]
    base = [{"samples_per_s": speed} for speed in (10.0, 50.0, 100.0)]

    made = row(CONTESTANTS["ddp"], "1gbit", own, base)

    assert made["ratio"] == pytest.approx(0.95)
    assert (made["ratio_lowest"], made["ratio_highest"]) == (0.9, 1.0)
    assert made["samples_per_s"] == 50.0
    assert made["error"] == "it broke"
