"""Compile what the first exchange of a process needs, while its run is being set up.

On a machine where daskdl never ran compiling takes seconds; later it is read from a
cache on disk. Both are in the way of the first step unless they were begun before.
"""

import threading

import numpy as np
import torch

from daskdl import codec, kernels

GRID = 2.0**-24
SIZE = 2**14
EVERY = 32  # an entry in so many parameters: sparse enough to be coded as gaps


def warm_up() -> None:
    """Find, take, encode, decode and apply one small update."""
    local_N = torch.zeros(SIZE)
    local_N[::EVERY] = 1.0
    shared_N = torch.zeros(SIZE, dtype=torch.int32)
    count = 2**20
    entries_K = kernels.find(local_N, shared_N, count, GRID)
    frame = codec.encode(codec.Stamp(0, 0, 1, 1), SIZE, count * GRID, entries_K.numpy())
    kernels.take_(local_N, shared_N, entries_K, count, GRID)
    update = codec.decode(frame.data)
    assert isinstance(update, codec.SparseUpdate)
    received_K = kernels.from_counts(np.array(update.entries_K))
    kernels.apply_(local_N, shared_N, received_K, count, GRID)


class Warming:
    """The one warm-up of this process, in a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Start it; does nothing if it was started before."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=warm_up, name="daskdl-warm-up", daemon=True
                )
                self._thread.start()

    def wait(self) -> None:
        """Wait until it has ended."""
        if self._thread is not None:
            self._thread.join()


warming = Warming()
