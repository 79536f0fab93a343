"""The one place where whatever is raised is caught: user code may raise anything.

It goes to whoever has to know of it, and is never dropped here.
"""

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def guarded(action: Callable[[], T], failed: Callable[[Exception], T]) -> T:
    """Call something, and something else with the error it may raise.

    Args:
        action: What. An exception that is no error, as a KeyboardInterrupt, comes out.
        failed: Says what is returned instead.
    """
    try:
        return action()
    except Exception as error:
        return failed(error)


async def answered(
    action: Callable[[], Awaitable[T]], failed: Callable[[Exception], T]
) -> T:
    """Await something, or say with the error that it may raise what is answered.

    Args:
        action: What. Foreign bytes may make it raise anything.
        failed: Says what is returned instead. That it is cancelled comes out.
    """
    try:
        return await action()
    except Exception as error:
        return failed(error)


def settle(future: "Future[T]", action: Callable[[], T]) -> None:
    """Call something, and let a future have what it returns or raises.

    In a thread it gets a SystemExit too: it would be waited for without an end.

    Args:
        future: Not done yet. The caller should not have a name for it: the error leads
            to the caller's frame, and both would stay until a collection.
        action: What.
    """
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)
    finally:
        del future, action  # the error's traceback leads here: no circle
