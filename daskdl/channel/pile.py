"""Updates that wait to be applied: bounded in bytes, in no order. No lock, no I/O."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from daskdl import kernels
from daskdl.accumulator import count_of
from daskdl.codec import DenseUpdate, SparseUpdate, Update


class Arrived(NamedTuple):
    """What there is to apply, in an order that does not depend on arrival."""

    updates: list[Update]
    folded_N: NDArray[np.int32] | None  # counts of the grid; None if nothing folded


class Pile:
    """Updates that wait.

    Beyond the bound all of them are folded into one dense vector of counts, which is
    exact, because sums of whole grid steps do not depend on their order.

    Args:
        size: Parameters of the model.
        grid: Of the run, parameter units.
        limit_bytes: Bytes of waiting updates beyond which they are folded.

    Attributes:
        grid: Of the run, parameter units.
        folds: How often the bound was reached.
    """

    grid: float
    folds: int

    def __init__(self, size: int, grid: float, limit_bytes: int) -> None:
        self.grid = grid
        self.folds = 0
        self._size = size
        self._limit_bytes = limit_bytes
        self._updates: list[Update] = []
        self._bytes = 0
        self._folded_N: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self._updates)

    def add(self, update: Update) -> None:
        """Keep an update until it is taken."""
        self._updates.append(update)
        self._bytes += _bytes_of(update)
        if self._bytes > self._limit_bytes:
            self._fold()

    def take(self, up_to_step: int | None = None) -> Arrived:
        """Take all, or only what was sent up to a step, and what is folded."""
        if up_to_step is None:
            now, later = self._updates, []
        else:
            now = [u for u in self._updates if u.stamp.step <= up_to_step]
            later = [u for u in self._updates if u.stamp.step > up_to_step]
        folded_N, self._folded_N = self._folded_N, None
        self._updates = later
        self._bytes = sum(_bytes_of(update) for update in later)
        return Arrived(sorted(now, key=lambda u: u.stamp), folded_N)

    def clear(self) -> None:
        """Forget what waits."""
        self._updates, self._bytes, self._folded_N = [], 0, None

    def _fold(self) -> None:
        if self._folded_N is None:
            self._folded_N = np.zeros(self._size, np.int32)
        for update in self._updates:
            if isinstance(update, DenseUpdate):
                self._folded_N += update.counts_N
            else:
                count = count_of(update.threshold, self.grid)
                entries_K = torch.from_numpy(np.require(update.entries_K, None, "W"))
                kernels.fold_(torch.from_numpy(self._folded_N), entries_K, count)
        self._updates.clear()
        self._bytes = 0
        self.folds += 1


def _bytes_of(update: Update) -> int:
    if isinstance(update, SparseUpdate):
        return update.entries_K.nbytes
    return update.counts_N.nbytes
