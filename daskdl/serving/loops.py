"""Event loops in threads of their own, and who may wait for them."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from daskdl.errors import RunError


@contextmanager
def loop_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """Yield an event loop that runs in another thread meanwhile."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
        target=loop.run_forever, name="daskdl-predictor-loop", daemon=True
    )
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def check_elsewhere(loop: asyncio.AbstractEventLoop) -> None:
    """Refuse to wait where that would be for ever.

    Args:
        loop: Whose work is waited for.

    Raises:
        RunError: If this is its thread.
    """
    # What asyncio sets: `get_running_loop` raises where there is none.
    if asyncio._get_running_loop() is loop:
        raise RunError(
            "this thread answers the predictor's calls, as callbacks of its futures "
            "run there, and must not wait for them; use submit, or another thread"
        )
