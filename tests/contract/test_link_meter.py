"""What leaves a replica; times are those of a clock that the test turns."""

import contextlib

import pytest

from daskdl.channel import routing
from daskdl.channel.protocol import Message, MessageKind
from daskdl.channel.routing import LinkMeter
from daskdl.thresholds import Drained


def update(nbytes=100):
    return Message(MessageKind.UPDATE.value, 3, 1, 0, nbytes)


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 50.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(routing, "time", clock)
    return clock


def test_time_counts_while_a_request_with_frames_is_under_way(clock):
    meter = LinkMeter()

    with meter.request([update()]):
        clock.now += 2.0
    clock.now += 10.0  # the pause
    with meter.request([update()]):
        clock.now += 0.5

    assert meter.take(1).busy_s == 2.5


def test_a_request_without_frames_takes_no_time(clock):
    meter = LinkMeter()

    with meter.request([]):
        clock.now += 2.0
    meter.arrived([])

    assert meter.take(1) == Drained()


def test_requests_side_by_side_count_once_and_at_the_end_of_each(clock):
    meter = LinkMeter()

    first, second = meter.request([update()]), meter.request([update()])
    first.__enter__()
    clock.now += 1.0
    second.__enter__()
    clock.now += 2.0
    first.__exit__(None, None, None)
    half_way = meter.take(1)
    clock.now += 4.0
    second.__exit__(None, None, None)

    assert (half_way.busy_s, meter.take(1).busy_s) == (3.0, 4.0)


def test_one_that_fails_took_its_time_all_the_same(clock):
    meter = LinkMeter()

    with contextlib.suppress(OSError), meter.request([update()]):
        clock.now += 2.0
        raise OSError("reset")
    with meter.request([update()]):
        clock.now += 1.0

    assert meter.take(1) == Drained(busy_s=3.0)
