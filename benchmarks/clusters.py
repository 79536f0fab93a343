"""A Dask cluster to measure on: of this machine, of a queue, or your own."""

import argparse
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
from distributed import Client, LocalCluster

import benchmarks

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


def _local() -> Any:
    return LocalCluster(
        n_workers=0,
        threads_per_worker=1,
        dashboard_address=":0",
        silence_logs=logging.ERROR,
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
    "local": _local,
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
