"""Workers that come during a fit: what they have is seen, and where they import it."""

import logging
import re
import subprocess
import sys
import threading

import pytest
from distributed import Client

import daskdl
from tests.support.clusters import Script, enough
from tests.support.problems import rows, trainer

X, Y = rows(count=960)

pytestmark = pytest.mark.slow

OLD_DASKDL = "import daskdl.config; daskdl.config.VERSION = '0.0.9'"
OLD_TORCH = "import torch; torch.__version__ = '1.13.1+cu117'"
NO_DASKDL = "import sys; sys.modules['daskdl'] = None"
# In which threads modules are looked for: what is imported before is not.
WATCHED = """
import sys, threading

class Watch:
    def find_spec(self, name, path=None, target=None):
        sys.imported.append((name, threading.current_thread().name))

sys.imported = []
sys.meta_path.insert(0, Watch())
"""


class Grown:
    """A cluster of processes, of which the test starts each worker."""

    def __init__(self, folder):
        self.folder = folder
        self.file = str(folder / "scheduler.json")
        self.processes = []
        self.start("dask_scheduler", "--port=0")
        self.client = Client(scheduler_file=self.file, set_as_default=False)

    def start(self, program, *options):
        command = [sys.executable, "-m", f"distributed.cli.{program}", *options]
        command += ["--scheduler-file", self.file, "--no-dashboard"]
        log = (self.folder / f"log-{len(self.processes)}").open("w")
        with log:
            self.processes.append(subprocess.Popen(command, stderr=log))

    def grow(self, preload=""):
        """Start one more worker, and wait until Dask knows it."""
        file = self.folder / f"preload-{len(self.processes)}.py"
        file.write_text(preload)
        self.start("dask_worker", "--nthreads=1", "--no-nanny", "--preload", str(file))
        count = len(self.processes) - 1
        self.client.wait_for_workers(count, timeout=60)

    def close(self):
        self.client.close()
        for process in reversed(self.processes):
            process.terminate()
            process.wait(30)


@pytest.fixture
def grown(tmp_path):
    cluster = Grown(tmp_path)
    try:
        cluster.grow()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def logged():
    """Warnings of the client so far that match a pattern."""
    messages = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("daskdl")
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    yield lambda pattern: [m for m in messages if re.search(pattern, m)]
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("preload", "what"),
    [
        (OLD_DASKDL, r"daskdl 0\.0\.9"),
        (OLD_TORCH, r"torch 1\.13\.1\+cu117"),
        (NO_DASKDL, r"ModuleNotFoundError: .*daskdl"),
    ],
    ids=["older daskdl", "older torch", "no daskdl"],
)
def test_a_worker_with_other_versions_takes_no_part_and_is_reported(
    grown, logged, preload, what
):
    first = set(grown.client.nthreads())
    script = Script(
        (1, lambda: grown.grow(preload)),
        (lambda row: logged(what) or row["epoch"] > 2000, grown.grow),  # one with all
        (2, enough),
    )
    script.run(trainer(grown.client), X, Y)

    (message,) = logged(what)
    workers = set(grown.client.nthreads())
    (address,) = (worker for worker in workers - first if worker in message)
    assert f"worker {address} has joined the cluster, and is not used" in message
    assert f"the client has daskdl {daskdl.__version__} and torch" in message
    assert "install the same daskdl" in message
    assert max(row["replicas"] for row in script.rows) == 2
    assert len(workers) == 3


def test_a_new_worker_imports_daskdl_in_a_thread(grown):
    script = Script((1, lambda: grown.grow(WATCHED)), (2, enough))

    script.run(trainer(grown.client), X, Y)

    def imported():
        return getattr(sys, "imported", None), threading.main_thread().name

    answers = grown.client.run(imported).values()
    ((modules, of_the_loop),) = (one for one in answers if one[0] is not None)
    threads = dict(reversed(modules))  # where each was looked for first
    assert {"daskdl", "torch", "daskdl.training.dask_backend"} <= threads.keys()
    packages = ("daskdl", "torch", "numba")
    on_the_loop = [
        name
        for name, thread in threads.items()
        if name.split(".")[0] in packages and thread == of_the_loop
    ]
    assert on_the_loop == []
