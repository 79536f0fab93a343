"""Reading and writing beside the training thread, which waits for it or goes on."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from daskdl.channel.base import Channel
from daskdl.errors import WaitTimeoutError
from daskdl.guard import settle
from daskdl.timeouts import Bound

T = TypeVar("T")


def begun(action: Callable[[], T], name: str) -> "Future[T]":
    """Run something in a thread of its own.

    Args:
        action: What; it may outlive whoever began it.
        name: Of the thread.
    """
    future: Future[T] = Future()
    # A store that does not answer must not keep a process from ending.
    threading.Thread(
        target=settle, args=(future, action), name=name, daemon=True
    ).start()
    return future


def awaited(channel: Channel, future: "Future[T]", bound: Bound, what: str) -> T:
    """Wait for what was begun, but leave when the run is stopped.

    Args:
        channel: Of the replica, which is not silent meanwhile.
        future: From `begun`.
        bound: On waiting.
        what: It is, for the message.

    Raises:
        WaitTimeoutError: If it takes too long. What it raises comes out as it is.
    """
    if not channel.wait_for_checkpoint(future, bound.seconds):
        raise WaitTimeoutError(f"{what} took longer than {bound}")
    return future.result()
