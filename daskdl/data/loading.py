"""Getting a piece where it is trained on, inside a task."""

import time
from collections.abc import Callable
from typing import Any

from distributed import Future, get_client, get_worker
from distributed.client import FutureCancelledError

from daskdl.data.futures import new_key
from daskdl.data.sources import Rows
from daskdl.errors import LostPieceError, WaitTimeoutError

ASK_S = 5.0  # for a better message, after a bound was passed anyway


def connect() -> None:
    """Open the connection that `load` needs, which takes a while the first time."""
    get_client()


def load(
    key: str,
    timeout_s: float,
    look_s: float,
    still_there: Callable[[], bool],
    wait: Callable[[Any, float], bool],
) -> Rows:
    """Get a piece from this worker's store, else from another's.

    Dask moves it, so it counts and spills like any other result. The task must have
    seceded, or its worker needs a second thread.

    Args:
        key: Of the piece, see :class:`~daskdl.data.pieces.Piece`.
        timeout_s: How long to wait for it to be computed and moved, seconds.
        look_s: How often to ask `still_there` meanwhile, seconds.
        still_there: Whether somebody who answers has the piece, or computes it. Dask
            waits for a worker that hangs as long as its connection is open.
        wait: How to wait: for a future, at most so many seconds; says whether it is
            done, or raises to give up.

    Returns:
        The arrays (x, y), to be read only: they may be the store's own.

    Raises:
        WaitTimeoutError: If it did not come in time.
        LostPieceError: If it was lost with its worker; see
            :meth:`~daskdl.data.pieces.Pieces.restore`.
        DataError: If the block cannot be trained on, see `as_piece`; what the user's
            own loading raised comes out as it is.
    """
    worker = get_worker()
    held: Any = worker.data.get(key)
    if held is not None:
        x, y = held
        return x, y
    client = get_client()
    moved = client.submit(
        _itself,
        Future(key, client),
        key=new_key("moved"),
        workers=[worker.address],
    )
    try:
        deadline = time.monotonic() + timeout_s
        while not wait(moved, max(min(look_s, deadline - time.monotonic()), 0.0)):
            if time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"piece {key} did not come to {worker.address} within "
                    f"{timeout_s:g} s (daskdl.timeouts.data); {_where(client, key)}"
                )
            if not still_there():
                raise LostPieceError(f"piece {key} is on a worker that hangs")
        # It is here: a client would fetch it through a connection to this worker.
        held = worker.data.get(moved.key)
        rows: Rows = moved.result() if held is None else held
    except FutureCancelledError as error:
        raise LostPieceError(
            f"piece {key} was lost with the worker that held it"
        ) from error
    finally:
        moved.release()
    return rows


def _where(client: Any, key: str) -> str:
    """What the scheduler says of a piece that does not come."""
    try:
        answers = client.sync(_ask_where, client, key, callback_timeout=ASK_S)
    except (OSError, TimeoutError):
        return f"the scheduler did not say within {ASK_S:g} s where it is"
    holders, computing = answers
    if holders:
        return f"it is held by {', '.join(holders)} and was not moved in time"
    if computing:
        return f"it is being computed on {', '.join(computing)}"
    return "nobody has it; it waits for Dask to compute what it is made of"


async def _ask_where(client: Any, key: str) -> tuple[list[str], list[str]]:
    held = await client.scheduler.who_has(keys=[key])
    processing = await client.scheduler.processing(workers=None)
    computing = [worker for worker, keys in processing.items() if key in keys]
    return list(held.get(key, ())), computing


def _itself(rows: Rows) -> Rows:
    return rows
