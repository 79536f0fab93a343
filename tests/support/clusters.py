"""Clusters of worker processes on this machine, closed again."""

import contextlib

from distributed import Client, LocalCluster


@contextlib.contextmanager
def cluster_of(workers, **options):
    """A client of so many workers, each with one thread, and of nothing else.

    Args:
        workers: How many.
        options: Of `LocalCluster`.
    """
    options = {"threads_per_worker": 1, "dashboard_address": ":0", **options}
    with (
        LocalCluster(n_workers=workers, **options) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client
