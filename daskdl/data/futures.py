"""Keys, futures and workers of Dask's: small things that all who have some need."""

import asyncio
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from distributed import Client

from daskdl.config import Bound
from daskdl.errors import OptionError, WaitTimeoutError


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


def answers_of(
    client: Client,
    workers: Sequence[str],
    function: Callable[[], Any],
    bound: Bound,
    what: str,
) -> dict[str, Any]:
    """Call a function on workers, beside their tasks.

    Args:
        client: Synchronous.
        workers: Their addresses.
        function: Called once on each.
        bound: How long all of them may take.
        what: They are to say, for the message.

    Returns:
        What it returned, by worker.

    Raises:
        OSError: If a worker is gone, or does not answer; the latter is a
            WaitTimeoutError.
    """

    async def ask() -> Any:
        # Dask by itself waits for a worker that hangs.
        asking = client.run(function, workers=list(workers))
        return await asyncio.wait_for(asking, bound.seconds)

    try:
        answers: dict[str, Any] = client.sync(ask)
    except TimeoutError as error:
        raise WaitTimeoutError(
            f"not all of {', '.join(workers)} said within {bound} {what}"
        ) from error
    return answers
