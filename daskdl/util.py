"""Guarded calls, with the only broad excepts in daskdl, and memory retention in glibc.

`guarded` and `settle` turn exceptions into values; `freed_memory_kept` tunes malloc.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

T = TypeVar("T")


def guarded(action: Callable[[], T], failed: Callable[[Exception], T]) -> T:
    """Call a function; if it raises an Exception, return the result of `failed`."""
    try:
        return action()
    except Exception as error:
        return failed(error)


def settle(future: "Future[T]", action: Callable[[], T]) -> None:
    """Call a function, and store its result or exception in a future.

    The future gets SystemExit as well: otherwise, in a thread, a wait for the future
    would never end.

    Args:
        future: A pending future. The caller should not keep a reference: the traceback
            refers to the caller's frame, which would form a reference cycle.
        action: Called once.
    """
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)
    finally:
        del future, action  # the traceback refers to this frame: break the cycle


DEFAULT_BYTES = 128 * 1024  # default of each setting in glibc


class _Setting(NamedTuple):
    """A malloc setting of glibc, see mallopt(3)."""

    number: int
    variable: str  # environment variable
    kept_bytes: int  # value that keeps freed memory


SETTINGS = (
    # glibc's limit: larger blocks are always mapped anew.
    _Setting(-3, "MALLOC_MMAP_THRESHOLD_", 32 * 2**20),
    _Setting(-1, "MALLOC_TRIM_THRESHOLD_", 2**30),
    # Heaps of threads are smaller. The padding is reserved, but not touched.
    _Setting(-2, "MALLOC_TOP_PAD_", 64 * 2**20),
)

_lock = threading.Lock()
_users: list[None] = []


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed memory for reuse, instead of returning it to the system.

    Works for blocks up to 32 MiB under glibc; has no effect elsewhere. When the last
    context exits, it returns the memory and restores the settings.
    """
    with _lock:
        _users.append(None)
        if len(_users) == 1:
            _set({one.number: one.kept_bytes for one in SETTINGS})
    try:
        yield
    finally:
        with _lock:
            _users.pop()
            if not _users:
                _set({one.number: _asked_for(one.variable) for one in SETTINGS})
                _give_back()


def _asked_for(variable: str) -> int:
    said = os.environ.get(variable, "")
    return int(said) if said.isdigit() else DEFAULT_BYTES


def _set(sizes: Mapping[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for number, size in sizes.items():
            mallopt(number, size)


def _give_back() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
