"""Freed memory, kept by the process while it trains or predicts.

Dask's nanny starts workers with ``MALLOC_TRIM_THRESHOLD_=65536``, so that freed
memory goes back to the system at once. A training step frees and takes a model's
gradients and activations: given back, each of their pages is mapped and cleared
again in every step, which took a quarter of the time of a step of a 5.8 M
parameter network (`benchmarks/allocator.py`), and nearly half of the forward passes of
a small convolutional one.

Other threads than the first have heaps of 64 MiB, and one that is empty is unmapped
whatever that setting says, unless more is to stay on top of it than a heap can have.
Whether gradients are the only ones in theirs is chance: then a step of that network
took 5 to 17 % longer, for a whole run.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

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
    """Keep what is freed for the next step, while inside.

    Works for blocks up to 32 MiB, under glibc; elsewhere nothing happens, and
    nothing has to. The last one to leave gives the memory back, and puts the
    allocator back to what the environment asks for.
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
