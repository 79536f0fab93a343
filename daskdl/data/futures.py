"""Keys, futures and workers of Dask's: small things that all who have some need."""

import uuid
from collections.abc import Iterable
from typing import Any

from distributed import Client

from daskdl.errors import OptionError


def new_key(what: str) -> str:
    """A key for Dask that says whose it is, and that nothing else has."""
    return f"daskdl-{what}-{uuid.uuid4().hex}"


def release(futures: Iterable[Any]) -> None:
    """Let go of Dask futures, so that what is not computed yet never is.

    Not by cancelling them, which the scheduler logs key by key.
    """
    for future in futures:
        future.release()


def workers_of(client: Client) -> list[str]:
    """Addresses of the workers of a synchronous client, in a fixed order, >= 1.

    Raises:
        OptionError: If it has none, or if it is asynchronous.
    """
    if client.asynchronous:
        raise OptionError(
            f"client must be synchronous, got {client}; use Client(...) instead of "
            "await Client(..., asynchronous=True)"
        )
    addresses = sorted(client.nthreads())
    if not addresses:
        raise OptionError(
            f"{client} has no workers; wait for some with client.wait_for_workers(1)"
        )
    return addresses
