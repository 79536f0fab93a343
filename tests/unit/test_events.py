import pytest

from daskdl.channel.run_state import EventLog


def log_of(count):
    log = EventLog()
    for number in range(count):
        log.post("progress", number=number)
    return log


def numbers(events):
    return [event["number"] for event in events]


def test_an_event_has_its_kind_and_its_fields():
    log = EventLog()

    log.post("lost", replica=2, summary="gone")

    assert log.since(0) == [{"kind": "lost", "replica": 2, "summary": "gone"}]


def test_events_are_kept_in_order_until_they_are_confirmed():
    log = log_of(3)

    assert numbers(log.since(0)) == [0, 1, 2]
    assert numbers(log.since(0)) == [0, 1, 2]


def test_confirmed_events_are_forgotten_and_the_rest_stays():
    log = log_of(3)

    assert numbers(log.since(2)) == [2]
    assert numbers(log.since(0)) == [2]


def test_the_length_counts_confirmed_events_too():
    log = log_of(3)

    log.since(2)
    log.post("progress", number=3)

    assert len(log) == 4
    assert numbers(log.since(3)) == [3]


@pytest.mark.parametrize("seen", [3, 99])
def test_asking_beyond_the_end_gives_nothing(seen):
    log = log_of(3)

    assert log.since(seen) == []
    assert len(log) == 3


def test_what_a_reader_does_to_its_list_is_its_own_affair():
    log = log_of(2)

    log.since(0).clear()

    assert numbers(log.since(0)) == [0, 1]
