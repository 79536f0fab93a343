"""Freed memory, kept by the process while it trains or predicts.

Dask's nanny starts workers with ``MALLOC_TRIM_THRESHOLD_=65536``, so that freed
memory goes back to the system at once. A training step frees and takes a model's
gradients and activations: given back, each of their pages is mapped and cleared
again in every step, which took a quarter of the time of a step of a 5.8 M
parameter network (`benchmarks/allocator.py`), and nearly half of the forward passes of
a small convolutional one.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

# Numbers of glibc's mallopt(3) and its defaults.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
DEFAULT_BYTES = 128 * 1024
MOST_BYTES = 32 * 2**20  # larger blocks are always mapped afresh: glibc's limit

_lock = threading.Lock()
_users: list[None] = []


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep what is freed for the next step, while inside.

    Works for blocks up to 32 MiB, under glibc; elsewhere nothing happens, and
    nothing has to. The last one to leave gives the memory back, and puts the
    allocator back to what the environment asks for.
    """
    with _lock:
        _users.append(None)
        if len(_users) == 1:
            _set(MOST_BYTES, 2**30)
    try:
        yield
    finally:
        with _lock:
            _users.pop()
            if not _users:
                trim = os.environ.get("MALLOC_TRIM_THRESHOLD_", "")
                _set(DEFAULT_BYTES, int(trim) if trim.isdigit() else DEFAULT_BYTES)
                _give_back()


def _set(mmap_bytes: int, trim_bytes: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, mmap_bytes)
        mallopt(TRIM_THRESHOLD, trim_bytes)


def _give_back() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
