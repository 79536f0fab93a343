"""A run of the channel without a training master: members do what a benchmark wants."""

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping

from distributed import Client, LocalCluster

from daskdl.channel import protocol
from daskdl.channel.leasing import WHOLE_EPOCHS, partition_sizes
from daskdl.channel.protocol import ChannelSpec
from daskdl.channel.routing import ROUTINGS
from daskdl.channel.scheduler import ChannelSchedulerPlugin
from daskdl.channel.worker import ChannelWorkerPlugin
from daskdl.config import Timeouts

GRID = 2.0**-24
LIMIT_BYTES = 8 * 2**20
INBOX_BYTES = 64 * 2**20


@contextlib.contextmanager
def bare_run(
    client: Client, seats: Mapping[int, str], size: int, routing: str
) -> Iterator[Callable[[int], ChannelSpec]]:
    """Open a run, and close it again.

    Args:
        client: Of the cluster.
        seats: The worker of each member.
        size: Parameters of the model.
        routing: ``"plain"`` or ``"mesh"``.

    Yields:
        What makes the spec of a member.
    """
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


def cluster(workers: int) -> LocalCluster:
    """Worker processes of one thread on this machine, the scheduler in this process."""
    return LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        dashboard_address=":0",
        silence_logs=logging.ERROR,
    )
