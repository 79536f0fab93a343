"""Training with latency and jitter: it ends, replicas agree, and the model learns.

Two workers on two hosts, known to the others only by the address of a relay.
"""

import pytest

from benchmarks.namespaces import Network
from tests.support.clusters import still_left_behind
from tests.support.digits import check, fit, recorded
from tests.support.network import PORT, client_of, skip_if_unavailable, worker
from tests.support.relay import Relay

pytestmark = [pytest.mark.learning, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def network():
    skip_if_unavailable()
    with Network(2) as network:
        yield network


@pytest.fixture(scope="module")
def relay(network):
    here, ports = network.address, (9001, 9002)
    listening = zip(network.addresses, ports, strict=True)
    routes = {f"{here}:{port}": f"{host}:{port}" for host, port in listening}
    with Relay({f"{here}:9000": f"{here}:{PORT}", **routes}) as relay:
        yield relay


@pytest.fixture(scope="module")
def own_client(network, relay, tmp_path_factory):
    scheduler = f"tcp://{network.address}:9000"
    folder = tmp_path_factory.mktemp("workers")
    addresses = [
        {
            "listen_address": f"tcp://{address}:{9001 + h}",
            "contact_address": f"tcp://{network.address}:{9001 + h}",
        }
        for h, address in enumerate(network.addresses)
    ]
    commands = [
        network.on(h, *worker(scheduler, folder, **own))
        for h, own in enumerate(addresses)
    ]
    with client_of(network, commands) as client:
        yield client


@pytest.fixture
def two(relay, own_client):
    """A client; afterwards nothing is left on the workers."""
    yield own_client
    relay.delay(0.0, 0.0)
    assert still_left_behind(own_client) == {}


@pytest.mark.parametrize(
    ("delay_s", "jitter_s", "routing"),
    [(0.010, 0.005, "plain"), (0.050, 0.025, "mesh")],
)
def test_it_trains_with_every_latency(relay, two, delay_s, jitter_s, routing, tmp_path):
    own = recorded(two, routing, tmp_path)
    relay.delay(delay_s, jitter_s)

    history = fit(own)

    check(own, history, 2, tmp_path)
