"""Dask clusters to measure on, and runs of the channel without training."""

import argparse
import contextlib
import functools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle
import psutil
from distributed import Client, LocalCluster
from torch import nn

import benchmarks
import daskdl
from benchmarks.work import mlp, sgd
from daskdl.channel import protocol
from daskdl.channel.leasing import WHOLE_EPOCHS, partition_sizes
from daskdl.channel.protocol import ChannelSpec
from daskdl.channel.routing import ROUTINGS
from daskdl.channel.scheduler import ChannelSchedulerPlugin
from daskdl.channel.worker import ChannelWorkerPlugin
from daskdl.config import Timeouts
from daskdl.training.dask_backend import MERGE_S

START_S = 600  # a job may wait in its queue
MAX_WORKERS = 8  # processes on this machine, however many members they have
GRID = 2.0**-24
OUTBOX_BYTES = 8 * 2**20
INBOX_BYTES = 64 * 2**20


def local_cluster(workers: int) -> LocalCluster:
    """Worker processes of one thread on this machine, the scheduler in this process."""
    return LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        dashboard_address=":0",
        silence_logs=logging.ERROR,
    )


@contextlib.contextmanager
def local_client(workers: int) -> Iterator[Client]:
    with (
        local_cluster(workers) as cluster,
        Client(cluster, set_as_default=False) as client,
        client.as_current(),  # for `wait`
    ):
        yield client


def trainer(
    client: Client, model: Callable[[], nn.Module] = mlp, **options: Any
) -> daskdl.Trainer:
    return daskdl.Trainer(
        model, nn.CrossEntropyLoss(), sgd, client=client, progress=False, **options
    )


def _queue(name: str) -> Any:
    """A cluster of dask-jobqueue; one process for each job."""
    try:
        import dask_jobqueue
    except ImportError:
        raise SystemExit(
            "--cluster needs dask-jobqueue, which is not installed: "
            "pip install 'daskdl[jobqueue]'"
        ) from None
    return getattr(dask_jobqueue, f"{name}Cluster")(processes=1)


CLUSTERS: dict[str, Callable[[], Any]] = {
    "local": lambda: local_cluster(0),
    "slurm": lambda: _queue("SLURM"),
    "pbs": lambda: _queue("PBS"),
    "sge": lambda: _queue("SGE"),
    "lsf": lambda: _queue("LSF"),
}
OPTIONS: dict[str, Any] = {
    "--scheduler": {"metavar": "URL", "help": "a running cluster, tcp://host:8786"},
    "--cluster": {
        "choices": CLUSTERS,
        "default": "local",
        "help": "without --scheduler; jobs as dask-jobqueue is configured",
    },
}


@contextlib.contextmanager
def connected(asked: argparse.Namespace) -> Iterator[tuple[Client, Any]]:
    """A client, and the cluster, or None for a cluster that was running already.

    What the workers need besides daskdl is sent to them with the functions.
    """
    cloudpickle.register_pickle_by_value(benchmarks)
    try:
        if asked.scheduler:
            with Client(asked.scheduler, set_as_default=False) as client:
                yield client, None
        else:
            with (
                CLUSTERS[asked.cluster]() as cluster,
                Client(cluster, set_as_default=False) as client,
            ):
                yield client, cluster
    finally:
        cloudpickle.unregister_pickle_by_value(benchmarks)


def sizes(client: Client, cluster: Any, wanted: Sequence[int]) -> Iterator[int]:
    """Scale a cluster to each number of workers, unless it was running already."""
    if cluster is None:
        yield len(client.scheduler_info(n_workers=-1)["workers"])
        return
    for workers in wanted:
        cluster.scale(workers)
        client.wait_for_workers(workers, timeout=START_S)
        yield workers


# ---- the channel alone


@contextlib.contextmanager
def _open_run(
    client: Client,
    places: Mapping[int, str],
    size: int,
    routing: str,
    rows: int,
) -> Iterator[Callable[[int], ChannelSpec]]:
    client.register_plugin(ChannelSchedulerPlugin())
    client.register_plugin(ChannelWorkerPlugin())
    timeouts = Timeouts.from_config()
    run, secret = secrets.randbits(63), secrets.randbits(63)
    spec = {
        "run": run,
        "secret": secret,
        "replicas": dict(places),
        "sizes": {"train": partition_sizes([rows] if rows else [], 1, len(places))},
        "seed": None,
        "epochs_before": 0,
        "synchronous": False,
        "relay_bytes": OUTBOX_BYTES,
        "min_replicas": 1,
        "timeouts": vars(timeouts),
        "relayed": ROUTINGS[routing].relayed,
        "intervals": WHOLE_EPOCHS,
        "merge_s": MERGE_S if ROUTINGS[routing].merges else 0.0,
        "parameters": size,  # as in a fit: the bound of a queue depends on it
    }
    client.sync(client.scheduler.daskdl_open, spec=spec, client=client.id)
    limits = OUTBOX_BYTES, INBOX_BYTES
    try:
        yield lambda replica: ChannelSpec(
            run,
            replica,
            size,
            GRID,
            *limits,
            timeouts,
            routing,
            secret=secret,
        )
    finally:
        client.sync(getattr(client.scheduler, protocol.CLOSE), run=run, secret=secret)


def spread(client: Client, members: int) -> dict[int, str]:
    """A worker for each member of a run."""
    workers = sorted(client.nthreads())
    return {member: workers[member % len(workers)] for member in range(members)}


def _requests_of(server: Any) -> int:
    """Requests of daskdl that a server has taken since this was called first."""
    if not hasattr(server, "requests_taken"):
        server.requests_taken = Counter()
        for name in [name for name in server.handlers if name.startswith("daskdl_")]:
            server.handlers[name] = _counting(server, name)
    return int(server.requests_taken.total())


def _counting(server: Any, name: str) -> Callable[..., Any]:
    handler = server.handlers[name]

    @functools.wraps(handler)
    def counted(*args: Any, **fields: Any) -> Any:
        server.requests_taken[name] += 1
        return handler(*args, **fields)

    return counted


class Usage(NamedTuple):
    """What the processes of a run have used, those of workers added up.

    The scheduler's process is this one.
    """

    scheduler_cpu: float  # cores
    workers_cpu: float  # cores
    scheduler_requests: int
    workers_requests: int
    memory_bytes: int  # of the workers, at the end
    seconds: float


def run_members(
    client: Client,
    members: int,
    size: int,
    routing: str,
    function: Any,
    *more: Any,
    rows: int = 0,
) -> tuple[list[Any], Usage]:
    """Call ``function(spec, *more)`` for each member of a run, at the same time.

    Args:
        client: Client of a cluster on this machine.
        members: Number of members.
        size: Parameters of the model.
        routing: Routing of the run.
        function: What each member does.
        *more: Further arguments of `function`.
        rows: Rows to lease, of an epoch.

    Returns:
        What the members return, and what all processes have used meanwhile.
    """

    def pid(dask_worker: Any) -> int:
        return psutil.Process().pid

    def of_worker(dask_worker: Any) -> int:
        return _requests_of(dask_worker)

    def of_scheduler(dask_scheduler: Any) -> int:
        return _requests_of(dask_scheduler)

    def cpu_s(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    places = spread(client, members)
    with _open_run(client, places, size, routing, rows) as spec:
        workers = [
            psutil.Process(process_id) for process_id in client.run(pid).values()
        ]
        taken = sum(client.run(of_worker).values())
        asked = client.run_on_scheduler(of_scheduler)
        before, began = [*map(cpu_s, workers)], time.perf_counter()
        scheduler_cpu_s = time.process_time()
        futures = [
            client.submit(function, spec(member), *more, workers=[worker], pure=False)
            for member, worker in places.items()
        ]
        results = client.gather(futures)
        seconds = time.perf_counter() - began
        scheduler_cpu_s = time.process_time() - scheduler_cpu_s
        usage = Usage(
            scheduler_cpu_s / seconds,
            (sum(map(cpu_s, workers)) - sum(before)) / seconds,
            client.run_on_scheduler(of_scheduler) - asked,
            sum(client.run(of_worker).values()) - taken,
            sum(process.memory_info().rss for process in workers),
            seconds,
        )
    return results, usage
