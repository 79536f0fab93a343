"""How tests are ordered and marked, and what tests of several folders need."""

import asyncio
import gc
import inspect
import itertools
import logging
import os
import signal
from pathlib import Path

import dask
import distributed
import pytest
from distributed.utils import get_mp_context
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from daskdl.data.storage import store_of
from daskdl.saving.checkpoints import Series
from tests.parts import PARTS, part_of
from tests.support.clusters import still_left_behind

_numbers = itertools.count()

# Workers are forks of a process that has imported what all need: a cluster is there in
# a second, and not in ten. Dask's own tools for tests put back the configuration that
# they find when they are imported, so it is set before.
dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})

# All fits are on the CPU then, also those that take CUDA where there is some.
if os.environ.get("DASKDL_TEST_DEVICE") == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# By itself hypothesis fails an example that takes 0.2 s; on a busy machine any may.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# Folders whose tests have the marker of the folder's name.
MARKED = {"network", "learning", "examples", "chaos", "cuda"}


class ClustersTogether(LoadScopeScheduling):
    """One process has all tests that need clusters; all others are given out singly.

    On a device each file with clusters has a process: those take long to start there.
    By a folder, and not by `xdist_group`, which pytest-xdist 3.8 does not see with
    pytest 9.2.
    """

    def _split_scope(self, nodeid):
        if nodeid.startswith("tests/cuda/test_cluster"):
            return nodeid.partition("::")[0]
        return "clusters" if nodeid.startswith("tests/cluster/") else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """See `ClustersTogether`."""
    return ClustersTogether(config, log)


def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine on an event loop of its own."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    marked = {
        name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters
    }
    asyncio.run(test(**marked))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import all tests without looking for garbage between them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_ignore_collect(collection_path, config):
    """With ``-m cuda``, or another folder's marker, import only what may have it.

    A machine that has a GPU may not have the packages that other tests import.
    """
    marker = config.option.markexpr
    if marker not in MARKED or collection_path.suffix != ".py":
        return None
    folder = collection_path.relative_to(Path(__file__).parent).parts[0]
    if marker == folder or f"mark.{marker}" in collection_path.read_text():
        return None
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Leave out doctests: only daskdl has some."""
    collectors = yield
    return [collector for collector in collectors if type(collector) is pytest.Module]


def pytest_addoption(parser):
    """Add ``--part``; ``make test-part`` gives it together with the markers."""
    parser.addoption(
        "--part", type=int, choices=PARTS, help="run one part; see tests/parts.py"
    )


def pytest_collection_modifyitems(config, items):
    """Mark each test that lies in a folder of its own kind; clusters come first.

    Where the tests are divided between processes, the one that has these is the last
    to be done if it does not begin with them.
    """
    items.sort(key=lambda item: not item.nodeid.startswith("tests/cuda/test_cluster"))
    items.sort(key=lambda item: "cluster" not in item.path.parts)
    for item in items:
        for folder in MARKED.intersection(item.path.parts):
            item.add_marker(folder)
    if (part := config.getoption("part")) is not None:
        elsewhere = [item for item in items if part_of(item.nodeid) != part]
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if part_of(item.nodeid) == part]


def pytest_collection_finish():
    """Say what is forked from when Dask, which says it once, has done so."""
    get_mp_context().set_forkserver_preload(["tests.support.forked"])
    # Collections of what is garbage need not look through ten thousand tests.
    gc.freeze()


def pytest_sessionfinish():
    """Dask's threads may still log when all is over; pytest's line is the last.

    They belong to clients and workers that were threads of this process.
    """
    logging.disable()


@pytest.fixture(autouse=True)
def no_default_client(request):
    """Elsewhere than in tests/cluster there is no client unless a test makes one.

    A worker that is a thread of this process makes one of its own the default, and
    leaves Dask's configuration changed, even long after its cluster was closed.
    """
    if "cluster" not in request.path.parts:
        dask.config.set(scheduler=None)
        distributed.client._global_clients.clear()


@pytest.fixture
def client(shared_client):
    """The client of a folder or file; afterwards nothing may be left on its workers."""
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
    from tests.support import s3

    with s3.server() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(s3_endpoint):
    """The URL of a new bucket there; see `tests.support.s3` for its storage options."""
    from tests.support import s3

    return s3.new_bucket(s3_endpoint)


@pytest.fixture
def in_memory():
    """A series of checkpoints without any; its folder is not there yet."""
    store = store_of(f"memory://checkpoints-{next(_numbers)}")
    yield Series(store)
    store.delete_all()


@pytest.fixture(params=["memory", "local"])
def series(request, tmp_path):
    """The same, also on disk."""
    if request.param == "local":
        return Series(store_of(tmp_path / "checkpoints"))
    return request.getfixturevalue("in_memory")


@pytest.fixture
def store(series):
    """Its folder."""
    return series.store
