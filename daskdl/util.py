"""Guarded calls, the only broad excepts of daskdl, and freed memory that is kept."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

T = TypeVar("T")


def guarded(action: Callable[[], T], failed: Callable[[Exception], T]) -> T:
    """Call a function; if it raises an Exception, return what `failed` makes of it.

    Args:
        action: KeyboardInterrupt, SystemExit and their like come out.
        failed: Gets the exception.
    """
    try:
        return action()
    except Exception as error:
        return failed(error)


def settle(future: "Future[T]", action: Callable[[], T]) -> None:
    """Call a function, and put what it returns or raises into a future.

    SystemExit too: in a thread nobody else would learn of it, and wait for ever.

    Args:
        future: Not done yet. The caller should not keep a name for it: the traceback
            refers to the caller's frame, and both would stay until a collection.
        action: Called once.
    """
    try:
        future.set_result(action())
    except BaseException as error:
        future.set_exception(error)
    finally:
        del future, action  # the error's traceback leads here: no circle


DEFAULT_BYTES = 128 * 1024  # of each setting, in glibc


class _Setting(NamedTuple):
    """One of glibc's, see mallopt(3)."""

    number: int
    variable: str  # in the environment
    kept_bytes: int


SETTINGS = (
    # Larger blocks are always mapped afresh: this is glibc's limit.
    _Setting(-3, "MALLOC_MMAP_THRESHOLD_", 32 * 2**20),
    _Setting(-1, "MALLOC_TRIM_THRESHOLD_", 2**30),
    # Heaps of threads are smaller. It is taken from the system, and not touched.
    _Setting(-2, "MALLOC_TOP_PAD_", 64 * 2**20),
)

_lock = threading.Lock()
_users: list[None] = []


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed memory for the next step, instead of returning it to the system.

    Works for blocks up to 32 MiB under glibc; has no effect elsewhere. The last user to
    leave returns the memory and restores the settings of the environment.
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
