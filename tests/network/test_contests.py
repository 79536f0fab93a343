"""Contestants of the benchmarks on two hosts."""

import pytest

from benchmarks.contest import CONTESTANTS, STREAM, Contestant, Course, compete
from benchmarks.namespaces import hosts
from tests.support.network import skip_if_unavailable

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def place():
    skip_if_unavailable()
    with hosts(2, loopback=False) as place:
        yield place


def few_steps(**changes):
    course = {"work": "cnn", "seconds": 0.5, "warm_up": 0.1, "patience": 100.0}
    return Course(**course | changes)


@pytest.mark.parametrize(
    ("name", "own_core"), [("ddp", False), ("daskdl-16", False), ("daskdl-16", True)]
)
def test_a_contestant_trains_on_both_hosts_and_its_bytes_are_counted(
    place, name, own_core
):
    place.limit("100mbit")

    line = compete(CONTESTANTS[name], place, few_steps(own_core=own_core))

    assert "error" not in line
    assert line["samples_per_s"] > 0
    assert line["seconds"] >= 0.5
    assert line["startup_s"] > 0
    assert line["sent_kb_per_step"] > 0


def test_a_link_carries_its_rate(place):
    place.limit("10mbit")

    line = compete(STREAM, place, few_steps(seconds=1.0))

    assert 5 < line["mbit_per_s"] < 11


def test_a_contestant_that_cannot_run_has_its_error(place):
    line = compete(Contestant("none", "no_such_script"), place, few_steps())

    assert "no_such_script" in line["error"]
