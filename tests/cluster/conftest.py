"""One real cluster of worker processes for all tests that need one."""

import time

import pytest
from distributed import Client, LocalCluster

from daskdl.channel.scheduler import NAME


def pytest_collection_modifyitems(items):
    """Tests with clusters of Dask's own test tools come first.

    They look for anything left over in this process, and would find the cluster
    below; and what they clean up at their end, they take from it.
    """
    items.sort(key=lambda item: not item.path.name.startswith("test_channel"))


@pytest.fixture(scope="session")
def cluster():
    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
    ) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def shared_client(cluster):
    with Client(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture
def client(shared_client):
    """A client of the two workers; afterwards nothing of daskdl may be left."""
    yield shared_client
    assert still_left_behind(shared_client) == {}


@pytest.fixture(scope="session")
def lone_client():
    """A client of a cluster with one worker."""
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as one,
        Client(one, set_as_default=False) as client,
    ):
        yield client


def left_behind(client):
    """What runs have left on the scheduler and the workers, by place."""

    def on_scheduler(dask_scheduler):
        plugin = dask_scheduler.extensions.get(NAME)
        runs = list(plugin.runs) if plugin is not None else []
        tasks = [key for key in dask_scheduler.tasks if str(key).startswith("daskdl")]
        return [*runs, *tasks]

    def on_worker(dask_worker):
        plugin = dask_worker.extensions.get(NAME)
        return list(plugin.links) if plugin is not None else []

    places = {"scheduler": client.run_on_scheduler(on_scheduler)}
    places |= client.run(on_worker)
    return {place: things for place, things in places.items() if things}


def still_left_behind(client, within_s=5.0):
    """The same, when Dask has had time to forget: releasing a future is a message."""
    deadline = time.monotonic() + within_s
    while (left := left_behind(client)) and time.monotonic() < deadline:
        pass  # each look asks the scheduler and every worker
    return left
