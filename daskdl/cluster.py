"""Which cluster to use: the user's, the default one, or one of our own."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from distributed import Client, LocalCluster, default_client

from daskdl.errors import OptionError

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def client_of(client: Client | None) -> Iterator[Client]:
    """Yield a synchronous client; one of our own is closed again, with its cluster.

    Args:
        client: None: the default client if there is one, else a
            :class:`distributed.LocalCluster` with Dask's own defaults.

    Raises:
        OptionError: If it is not a client, or an asynchronous or closed one.
    """
    found = client if client is not None else _default()
    if found is None:
        with (
            LocalCluster(dashboard_address=":0") as cluster,
            Client(cluster, set_as_default=False) as own,
        ):
            logger.info("no client was given: started %s", cluster)
            yield own
        return
    if not isinstance(found, Client):
        raise OptionError(
            f"client must be a distributed.Client, None or False, got {found!r}"
        )
    if found.asynchronous or found.status != "running":
        raise OptionError(
            "client must be synchronous and running, got one with status "
            f"{found.status!r} and asynchronous={found.asynchronous}; use "
            "Client(...) without asynchronous=True"
        )
    yield found


def check_outlives(client: Any) -> None:
    """Refuse to make something lazy for a cluster of our own, which is closed first.

    Raises:
        OptionError: If `client_of` would start one.
    """
    if client is None and _default() is None:
        raise OptionError(
            "client must be given to predict on a dask.array, whose outputs are "
            "computed later: a cluster started for the call would be closed by then"
        )


def _default() -> Client | None:
    try:
        return default_client()
    except ValueError:  # Dask's way to say that there is none
        return None
