"""Dask clusters to measure on, and runs of the channel without a training master."""

import argparse
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle
from distributed import Client, LocalCluster

import benchmarks
from daskdl.channel import protocol
from daskdl.channel.leasing import WHOLE_EPOCHS, partition_sizes
from daskdl.channel.protocol import ChannelSpec
from daskdl.channel.routing import ROUTINGS
from daskdl.channel.scheduler import ChannelSchedulerPlugin
from daskdl.channel.worker import ChannelWorkerPlugin
from daskdl.config import Timeouts

START_S = 600  # a queue may let its jobs wait


def options(parser: argparse.ArgumentParser) -> None:
    """Where the cluster is."""
    parser.add_argument(
        "--scheduler", metavar="URL", help="of a cluster of yours, tcp://host:8786"
    )
    parser.add_argument(
        "--cluster",
        choices=CLUSTERS,
        default="local",
        help="without --scheduler; jobs are as the configuration of dask-jobqueue says",
    )


def _queue(name: str) -> Any:
    """Of dask-jobqueue; one process for each job, so that it has the job's cores."""
    try:
        import dask_jobqueue
    except ImportError:
        raise SystemExit(
            "--cluster needs dask-jobqueue, which is not installed: "
            "pip install daskdl[jobqueue]"
        ) from None
    return getattr(dask_jobqueue, f"{name}Cluster")(processes=1)


CLUSTERS: dict[str, Callable[[], Any]] = {
    "local": lambda: local_cluster(0),
    "slurm": lambda: _queue("SLURM"),
    "pbs": lambda: _queue("PBS"),
    "sge": lambda: _queue("SGE"),
    "lsf": lambda: _queue("LSF"),
}


@contextlib.contextmanager
def connected(asked: argparse.Namespace) -> Iterator[tuple[Client, Any]]:
    """A client, and the cluster, or None if that is the user's own.

    What the workers need besides daskdl is sent to them with the functions.
    """
    cloudpickle.register_pickle_by_value(benchmarks)
    try:
        if asked.scheduler:
            with Client(asked.scheduler, set_as_default=False) as client:
                yield client, None
            return
        with (
            CLUSTERS[asked.cluster]() as cluster,
            Client(cluster, set_as_default=False) as client,
        ):
            yield client, cluster
    finally:
        cloudpickle.unregister_pickle_by_value(benchmarks)


def sizes(client: Client, cluster: Any, wanted: list[int]) -> Iterator[int]:
    """Numbers of workers, one after the other, each as soon as so many are there.

    A cluster of the user's own is left as it is, and has the one that it has.
    """
    if cluster is None:
        yield len(client.scheduler_info(n_workers=-1)["workers"])
        return
    for workers in wanted:
        cluster.scale(workers)
        client.wait_for_workers(workers, timeout=START_S)
        yield workers


GRID = 2.0**-24
LIMIT_BYTES = 8 * 2**20
INBOX_BYTES = 64 * 2**20


@contextlib.contextmanager
def bare_run(
    client: Client, seats: Mapping[int, str], size: int, routing: str
) -> Iterator[Callable[[int], ChannelSpec]]:
    """Open a run, and close it again."""
    client.register_plugin(ChannelSchedulerPlugin())
    client.register_plugin(ChannelWorkerPlugin())
    run, timeouts = secrets.randbits(63), Timeouts.from_config()
    plan = {
        "run": run,
        "replicas": dict(seats),
        "sizes": {"train": partition_sizes([], 1, len(seats))},
        "seed": None,
        "epochs_before": 0,
        "synchronous": False,
        "relay_bytes": LIMIT_BYTES,
        "min_replicas": 1,
        "timeouts": vars(timeouts),
        "relayed": ROUTINGS[routing].relayed,
        "intervals": WHOLE_EPOCHS,
    }
    client.sync(client.scheduler.daskdl_open, spec=plan, client=client.id)

    def spec(replica: int) -> ChannelSpec:
        limits = LIMIT_BYTES, INBOX_BYTES
        return ChannelSpec(run, replica, size, GRID, *limits, timeouts, routing)

    try:
        yield spec
    finally:
        client.sync(getattr(client.scheduler, protocol.CLOSE), run=run)


def local_cluster(workers: int) -> LocalCluster:
    """Worker processes of one thread on this machine, the scheduler in this process."""
    return LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        dashboard_address=":0",
        silence_logs=logging.ERROR,
    )
