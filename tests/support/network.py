"""A Dask cluster whose workers are processes in network namespaces."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import dask.config
import pytest
from distributed import Client, LocalCluster

from benchmarks.namespaces import unavailable
from tests.support.clusters import end


def skip_if_unavailable():
    if reason := unavailable():
        pytest.skip(f"no network namespaces: {reason}")


ROOT = Path(__file__).parents[2]
PORT = 8786  # of the scheduler, the only one on its network
START_S = 60

# A link is down for 20 s. Dask closes a connection after 30 s without data, and up to
# 9 s may have passed before.
TCP = "60s"


def worker(scheduler, folder, **options):
    """The command of a worker with one thread; options are those of `dask worker`."""
    command = [sys.executable, "-m", "distributed.cli.dask_worker", scheduler]
    fixed = ["--nthreads=1", "--no-nanny", "--no-dashboard"]
    more = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return [*command, *fixed, f"--local-directory={folder}", *more]


@contextlib.contextmanager
def client_of(network, commands):
    """A client of a scheduler on this host, and of the workers that commands start."""
    with (
        dask.config.set({"distributed.comm.timeouts.tcp": TCP}),
        LocalCluster(
            n_workers=0,
            host=network.address,
            scheduler_port=PORT,
            protocol="tcp",
            dashboard_address=":0",
            scheduler_kwargs={"dashboard": False},
        ) as cluster,
        _running(commands),
        Client(cluster, set_as_default=False) as client,
    ):
        client.wait_for_workers(len(commands), timeout=START_S)
        yield client


@contextlib.contextmanager
def _running(commands):
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": TCP,
    }
    with contextlib.ExitStack() as ends:
        for command in commands:
            process = subprocess.Popen(command, env=environment)
            ends.callback(end, process)
        yield
