"""A cluster with TLS: daskdl uses Dask's own connections, so nobody else gets in.

`test_channel_damage.py` tests that requests of a foreign run are refused.
"""

import subprocess
import sys

import numpy as np
import pytest
from distributed import Client
from distributed.security import Security

from daskdl.channel.protocol import NAME
from tests.support.clusters import cluster_of, still_left_behind
from tests.support.problems import kept, rows, trainer

pytestmark = pytest.mark.slow

X, Y = rows()
REFUSED_S = 10  # who is not let in has to be told within this


@pytest.fixture(scope="module")
def secured_client():
    with cluster_of(2, security=Security.temporary()) as client:
        yield client


@pytest.fixture
def secured(secured_client):
    """A client of two workers that talk TLS; afterwards nothing is left on them."""
    yield secured_client
    assert still_left_behind(secured_client) == {}


@pytest.mark.parametrize("routing", ["plain", "mesh"])
def test_a_secured_cluster_trains_evaluates_and_predicts(secured, routing):
    fitted = trainer(secured, master=kept(routing=routing))

    history = fitted.fit(X, Y, epochs=5, batch_size=8, validation=(X[:64], Y[:64]))

    assert all(worker.startswith("tls://") for worker in secured.nthreads())
    assert history.column("replicas") == [2] * 5
    assert history.column("refused_messages") == [0] * 5
    assert min(history.column("received_bytes")) > 0
    score = fitted.evaluate(X, Y)
    assert score["accuracy"] > 0.9
    guesses = np.asarray(fitted.predict(X)).argmax(axis=1)
    assert (guesses == Y).mean() == pytest.approx(score["accuracy"], abs=1e-12)


STRANGERS = {
    "no certificate": ("None", "TypeError: TLS expects a `ssl_context` argument"),
    "another certificate": ("Security.temporary()", "certificate verify failed"),
    "no encryption": ("None", "CommClosedError: in <TCP (closed)"),
}

# In a process of its own, as it would be; what Dask leaves of such a client is no
# concern of these tests.
KNOCK = """
import asyncio, os, sys, traceback
from distributed import Client
from distributed.comm import connect
from distributed.security import Security

address, security, timeout = sys.argv[1], eval(sys.argv[2]), float(sys.argv[3])

async def send():
    options = (security or Security()).get_connection_args("client")
    comm = await connect(address, timeout=timeout, **options)
    await comm.write({"op": "daskdl_stop", "run": 7, "reason": "mine", "reply": True})
    print(await comm.read())

try:
    if sys.argv[4] == "client":
        print(Client(address, security=security, timeout=timeout))
    else:
        asyncio.run(send())
except Exception:
    traceback.print_exc()
sys.stdout.flush(), sys.stderr.flush()
os._exit(0)
"""


@pytest.mark.parametrize("how", ["client", "message to the scheduler", "to a worker"])
@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_is_refused_with_a_clear_error(secured, who, how):
    security, message = STRANGERS[who]
    address = secured.scheduler.address
    if how == "to a worker":
        address = sorted(secured.nthreads())[0]
    if who == "no encryption":
        address = address.replace("tls://", "tcp://")
    before = state(secured)

    done = subprocess.run(
        [sys.executable, "-c", KNOCK, address, security, str(REFUSED_S), how],
        capture_output=True,
        text=True,
        timeout=6 * REFUSED_S,
        check=True,
    )

    assert message in done.stderr
    assert done.stdout == ""
    assert state(secured) == before


def test_a_client_with_the_certificate_can_connect(secured):
    """What the strangers try works, so it is the certificate that keeps them out."""
    with Client(
        secured.scheduler.address, security=secured.security, set_as_default=False
    ) as stranger:
        assert trainer(stranger).fit(X[:64], Y[:64]).column("replicas") == [2]


def state(client):
    """Who is connected, and what daskdl keeps."""

    def on_scheduler(dask_scheduler):
        plugin = dask_scheduler.extensions.get(NAME)
        runs = list(plugin.runs) if plugin is not None else []
        return sorted(dask_scheduler.workers), runs, len(dask_scheduler.tasks)

    return client.run_on_scheduler(on_scheduler)
