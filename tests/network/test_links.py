"""Training over slow and broken links: it ends, replicas agree, and the model learns.

Four workers on three hosts, each with a link to a bridge on this host, where the
scheduler and the client are.
"""

import time

import dask.config
import pytest

from benchmarks.namespaces import Network
from daskdl import Callback
from tests.support.clusters import Script, enough, still_left_behind
from tests.support.digits import X, Y, check, check_learnt, fit, recorded
from tests.support.network import PORT, client_of, skip_if_unavailable, worker
from tests.support.recording import check_barrier, records

DOWN_S = 20.0

pytestmark = [pytest.mark.learning, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def network():
    skip_if_unavailable()
    with Network(3) as network:
        yield network


@pytest.fixture(scope="module")
def own_client(network, tmp_path_factory):
    scheduler = f"tcp://{network.address}:{PORT}"
    folder = tmp_path_factory.mktemp("workers")
    commands = [
        network.on(h, *worker(scheduler, folder, host=network.addresses[h]))
        for h in (0, 1, 2, 2)
    ]
    with client_of(network, commands) as client:
        yield client


@pytest.fixture
def four(network, own_client):
    """A client; afterwards links are restored, and nothing is left on the workers."""
    yield own_client
    network.restore()
    assert still_left_behind(own_client) == {}


@pytest.mark.parametrize(
    ("rate", "routing"),
    [(None, "plain"), ("100mbit", "mesh"), ("10mbit", "plain"), ("10mbit", "mesh")],
)
def test_it_trains_at_every_rate(network, four, rate, routing, tmp_path):
    fitted = recorded(four, routing, tmp_path)
    if rate is not None:
        network.limit(rate)

    history = fit(fitted)

    check(fitted, history, 4, tmp_path)


class Unplugs(Callback):
    """On the client: unplugs a host for a while after the first epoch."""

    def __init__(self, network, host):
        self._network = network
        self._host = host

    def on_epoch_end(self, row):
        if row["epoch"] == 0:
            self._network.unplug(self._host)
            time.sleep(DOWN_S)
            self._network.plug(self._host)


def test_a_link_that_is_down_for_a_while_costs_nothing_but_time(
    network, four, tmp_path
):
    # In a mesh, the two workers of that host exchange with each other.
    fitted = recorded(four, "mesh", tmp_path, callbacks=[Unplugs(network, host=2)])

    history = fit(fitted)

    check(fitted, history, 4, tmp_path)
    # The link was down during training: no replica passes a barrier meanwhile.
    assert max(history.column("seconds")) > 0.9 * DOWN_S


@pytest.mark.parametrize("routing", ["plain", "mesh"])
def test_a_link_that_is_down_for_longer_than_silence_costs_a_replica(
    network, four, routing, tmp_path
):
    fitted = recorded(four, routing, tmp_path)
    script = Script(
        (4, lambda: network.unplug(0)), (3, lambda: network.plug(0)), (4, enough)
    )

    with dask.config.set({"daskdl.timeouts.silence": "4s"}):
        script.run(fitted, X, Y)

    ends = [records(tmp_path, row["epoch"]) for row in script.rows]
    for end in ends:
        check_barrier(end)
    assert [len(end) for end in ends] == [row["replicas"] for row in script.rows]
    assert len(set().union(*ends)) == 5  # the returning replica has a new number
    check_learnt(fitted)
