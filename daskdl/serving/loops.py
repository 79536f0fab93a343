"""An event loop in a thread of its own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
