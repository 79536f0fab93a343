"""Clusters, one of each kind for all tests here that need it.

They are closed before any other folder's tests: a scheduler would go on in this
process, and so would workers that are threads of it, whose clients Dask makes default.
"""

import gc
import os

import dask
import pytest
from distributed.utils_test import poll_for

from daskdl.channel.protocol import NAME
from tests.support.clusters import cluster_of, forget_batches, still_left_behind
from tests.support.promises import Place


def pytest_collection_modifyitems(items):
    """Tests with clusters of Dask's own test tools come first.

    They look for anything left over in this process, and would find the clusters
    below; and what they clean up at their end, they take from them.
    """
    items.sort(key=lambda item: not item.path.name.startswith("test_channel"))


@pytest.fixture(scope="package", autouse=True)
def no_garbage():
    """Clients of workers that were threads here end now, and not in another test."""
    yield
    gc.collect()


@pytest.fixture(scope="package")
def shared_client():
    with cluster_of(2) as client:
        yield client


@pytest.fixture
def forgetful(client):
    """A client whose scheduler does not remember the tasks it has sent.

    It is in this process, and the tasks of a dataframe have the model's own future.
    """
    yield client

    def forget(dask_scheduler):
        forget_batches(*dask_scheduler.stream_comms.values())

    client.run_on_scheduler(forget)


@pytest.fixture(scope="package")
def lone_client():
    """A client of a cluster with one worker."""
    with cluster_of(1) as client:
        yield client


@pytest.fixture
def place(client):
    """Where several replicas train."""
    return Place(client, replicas=2)


@pytest.fixture
def lone(lone_client):
    """Where one replica trains."""
    return Place(lone_client, replicas=1)


@pytest.fixture(scope="package")
def mortal_client():
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "90s"}),
        cluster_of(3) as client,
    ):
        yield client


def all_answer(client, workers):
    """Whether so many workers are listed, and each runs what it is asked to."""
    answers = client.run(os.getpid, on_error="return").values()
    return [type(answer) for answer in answers] == [int] * workers


@pytest.fixture
def three(mortal_client):
    """A client of three workers, which may be killed: Dask starts them again."""
    mortal_client.cluster.scale(3)  # what was given up is started again
    # One that the test before has just killed may be listed beside its replacement.
    poll_for(lambda: all_answer(mortal_client, 3), timeout=60, period=0.1)
    yield mortal_client
    assert still_left_behind(mortal_client) == {}


@pytest.fixture
def growing():
    """A client of one worker, whose cluster may have more."""
    with cluster_of(1) as client:
        yield client


@pytest.fixture(scope="package")
def threads_client():
    with cluster_of(2, processes=False) as client:
        yield client


@pytest.fixture
def threads(threads_client):
    """A client of two workers that are threads of this process."""
    yield threads_client
    assert still_left_behind(threads_client) == {}


@pytest.fixture(scope="package")
def no_workers():
    """A client of a cluster without workers."""
    with cluster_of(0, processes=False) as client:
        yield client


@pytest.fixture(scope="package")
def idle():
    """A client of a cluster that must never be asked for anything."""
    with cluster_of(1, processes=False) as client:
        yield client


@pytest.fixture
def untouched(idle):
    """The same; afterwards it must not have been asked."""
    yield idle
    scheduler = idle.cluster.scheduler
    assert scheduler.transition_counter == 0
    assert NAME not in scheduler.extensions
    assert NAME not in scheduler.worker_plugins
