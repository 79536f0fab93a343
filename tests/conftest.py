"""The cluster of worker processes that nearly all tests share."""

import logging
import multiprocessing
import signal

import pytest

from tests.cluster.clusters import cluster_of
from tests.cluster.leftovers import still_left_behind

# Two files of this name would be one module to the collection of doctests; what is
# forked from is imported nowhere else.
collect_ignore = ["conftest.py", "forked.py"]


def pytest_collection_finish():
    """What is forked is imported once; Dask, and what a test imports, may say less."""
    multiprocessing.set_forkserver_preload(["tests.forked"])


def pytest_sessionfinish():
    """Dask's threads may still log when all is over; pytest's line is the last.

    They belong to clients and workers that were threads of this process.
    """
    logging.disable()


@pytest.fixture(scope="session")
def shared_client():
    with cluster_of(2) as client:
        yield client


@pytest.fixture
def client(shared_client):
    """A client of two workers; afterwards nothing may be left on them."""
    yield shared_client
    assert still_left_behind(shared_client) == {}


@pytest.fixture
def ctrl_c():
    """Python's own handler, also where a shell in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def s3_endpoint():
    """A real S3 server on loopback, in this process."""
    from tests import s3

    with s3.server() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(s3_endpoint):
    """The URL of a new bucket there; `tests.s3.options` are its storage options."""
    from tests import s3

    return s3.new_bucket(s3_endpoint)
