"""What a Dask worker does beside a replica, whatever that computes."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from distributed import LocalCluster


@contextmanager
def idle_worker() -> Iterator[None]:
    """Keep a worker without a task in this process meanwhile.

    It sends heartbeats, takes samples for its profile, looks at its memory, in a
    thread of its own, with Python's lock.
    """
    with LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        processes=False,
        protocol="tcp",
        host="127.0.0.1",
        dashboard_address=":0",
        silence_logs=logging.CRITICAL,  # a heartbeat may be cut off in the end
    ):
        yield
