"""Putting data on workers that may be gone, or hang, meanwhile."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from daskdl.config import Bound
from daskdl.errors import WaitTimeoutError


def scatter(
    client: Any,
    data: Mapping[str, Any],
    workers: Sequence[str],
    bound: Bound,
    what: str,
) -> dict[str, Any]:
    """Put each value on all of these workers; returns the futures by key.

    Dask by itself waits for a worker that hangs as long as its connection is open.

    Args:
        client: Synchronous.
        data: Values by key.
        workers: Addresses, >= 1.
        bound: For all together.
        what: They are, for the message.

    Raises:
        OSError: If a worker is gone, for which Dask by itself raises KeyError or
            ValueError; WaitTimeoutError, which is one, if it takes too long.
    """

    async def send() -> Any:
        sending = asyncio.ensure_future(
            client.scatter(
                dict(data),
                workers=list(workers),
                broadcast=len(workers) > 1,
                asynchronous=True,
            )
        )
        done, _ = await asyncio.wait({sending}, timeout=bound.seconds)
        if not done:
            # Not cancelled: the scheduler goes on, and would keep what arrives late.
            sending.add_done_callback(_let_go)
            raise WaitTimeoutError(
                f"{what} could not be sent to {', '.join(workers)} within {bound}; is "
                "the way there slow, or a worker busy?"
            )
        return sending.result()

    try:
        futures: dict[str, Any] = client.sync(send)
    except (KeyError, ValueError) as error:
        raise OSError(f"Dask has removed a worker of {list(workers)}") from error
    return futures


def _let_go(sending: asyncio.Task[Mapping[str, Any]]) -> None:
    """Nobody waits any more for what was sent."""
    if sending.cancelled() or sending.exception() is not None:
        return
    for future in sending.result().values():
        future.release()
