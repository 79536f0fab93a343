"""Waiting for futures until a time of the clock, in a thread or on an event loop."""

import asyncio
import contextlib
import time
from concurrent.futures import Future, wait
from typing import Any

from daskdl.errors import RunError, WaitTimeoutError

LOOK_S = 1.0  # between looks at whether there is still somebody to wait for


def done_by(deadline: float, future: Future[Any]) -> bool:
    """Wait in this thread; whether the future is done.

    Args:
        deadline: Of ``time.monotonic()``.
        future: Not changed.
    """
    rest_s = max(0.0, deadline - time.monotonic())
    return bool(wait([future], rest_s).done)


def settled(future: Future[Any], loop: asyncio.AbstractEventLoop) -> None:
    """Wait in this thread until a future is done.

    Args:
        future: Not changed.
        loop: Who sets it; that of a client stops when the client is closed.

    Raises:
        RunError: If that has stopped.
    """
    while not done_by(time.monotonic() + LOOK_S, future):
        if not loop.is_running() and not future.done():
            raise RunError("the predictor's client is closed")


async def awaited(future: Future[Any]) -> None:
    """Wait on this event loop until a future is done, whatever it raises.

    A future of asyncio's own cannot be told of every error: not of a StopIteration.

    Args:
        future: Not changed, nor cancelled by whoever cancels the wait.
    """
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def tell(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(tell)
    await done.wait()


async def awaited_by(deadline: float, future: Future[Any]) -> bool:
    """Wait on this event loop; whether the future is done.

    Args:
        deadline: Of ``time.monotonic()``.
        future: See `awaited`.
    """
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            await awaited(future)
    except TimeoutError:
        return future.done()
    return True


def late(timeout_s: float | None) -> WaitTimeoutError:
    """There is no answer in time."""
    return WaitTimeoutError(
        f"no answer within timeout_s={timeout_s}; is the model slow, or are there more "
        "calls than the replicas can answer?"
    )
