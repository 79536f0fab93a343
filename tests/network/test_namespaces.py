"""Networks of namespaces, on which other tests train."""

import re
import socket

import pytest
from distributed.utils_test import poll_for

from benchmarks import namespaces
from benchmarks.namespaces import INNER, CommandError, Network, run
from tests.support.network import skip_if_unavailable


@pytest.fixture(autouse=True)
def _available():
    skip_if_unavailable()


def answers(address):
    """Whether a host is reached: it refuses the connection, since nobody listens."""
    try:
        socket.create_connection((address, 9), timeout=1.0)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    raise AssertionError("somebody listens")


def test_each_host_is_reached():
    with Network(3) as network:
        assert len(set(network.addresses)) == 3
        poll_for(lambda: all(map(answers, network.addresses)), timeout=20)


def test_two_networks_do_not_collide():
    with Network(1) as first, Network(1) as second:
        assert first.name(0) != second.name(0)
        assert first.addresses != second.addresses
        assert answers(first.addresses[0])
        assert answers(second.addresses[0])


def left(network):
    """Namespaces and links of a network."""
    namespaces = run("ip netns list").split()
    links = re.findall(r"^\d+: ([^@:]+)", run("ip link show"), re.MULTILINE)
    prefixes = [network.name(0), network.name(0).split("-")[0]]
    return [name for name in (*namespaces, *links) if name in prefixes]


def fail_in(network):
    with network:
        assert len(left(network)) == 3
        raise ZeroDivisionError


def test_nothing_stays_after_a_failure():
    network = Network(1)

    with pytest.raises(ZeroDivisionError):
        fail_in(network)

    assert left(network) == []


def test_nothing_stays_of_a_network_that_cannot_be_made(monkeypatch):
    network = Network(1)
    monkeypatch.setattr(namespaces, "INNER", "longer than a name may be")

    with pytest.raises(CommandError, match="ip link add"):
        network.__enter__()

    assert left(network) == []


def test_a_rate_holds_both_ways_until_it_is_restored():
    with Network(1) as network:
        network.limit("10mbit")
        limited = [run(f"tc qdisc show dev {network.name(0)}")]
        limited += [run(f"tc -n {network.name(0)} qdisc show dev {INNER}")]
        network.restore()
        restored = [run(f"tc qdisc show dev {network.name(0)}")]
        restored += [run(f"tc -n {network.name(0)} qdisc show dev {INNER}")]

    assert all("tbf" in way and "rate 10Mbit" in way for way in limited)
    assert not any("tbf" in way for way in restored)


def test_an_unplugged_host_is_not_reached_until_it_is_plugged_in():
    with Network(2) as network:
        network.unplug(0)
        assert not answers(network.addresses[0])
        assert answers(network.addresses[1])

        network.plug(0)
        poll_for(lambda: answers(network.addresses[0]), timeout=20)
