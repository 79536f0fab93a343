"""Updates that wait to be applied: bounded in bytes, in no order. No lock, no I/O."""

import math
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from daskdl import kernels
from daskdl.codec import DenseUpdate, SparseUpdate, Update
from daskdl.compression.replica_vector import count_of

UPDATE_BYTES = 440  # of memory around its entries, measured by `benchmarks/queues.py`


class Arrived(NamedTuple):
    """What there is to apply, in an order that does not depend on arrival."""

    updates: list[Update]
    folded_N: NDArray[np.int32] | None  # counts of the grid; None if nothing folded


class Pile:
    """Updates that wait.

    Beyond the bound all of them are folded into one dense vector of counts, which is
    exact, because sums of whole grid steps do not depend on their order.

    In step the bound is one for each step, and what comes of a step that was folded is
    folded too: whether it is applied as one vector, which rounds local otherwise, then
    depends on how much is sent in the step, and not on what arrives when.

    Args:
        size: Parameters of the model.
        grid: Of the run, parameter units.
        limit_bytes: Bytes of memory of waiting updates beyond which they are folded; in
            step, of those of one step.
        in_step: Replicas go in step, so that updates of two steps wait at most.

    Attributes:
        grid: Of the run, parameter units.
        folds: How often the bound was reached.
    """

    grid: float
    folds: int

    def __init__(
        self, size: int, grid: float, limit_bytes: int, *, in_step: bool = False
    ) -> None:
        self.grid = grid
        self.folds = 0
        self._size = size
        self._limit_bytes = limit_bytes
        self._in_step = in_step
        self._updates: list[Update] = []
        # By step where they go in step, else all at 0.
        self._bytes: Counter[int] = Counter()
        self._folded: dict[int, NDArray[np.int32]] = {}

    def __len__(self) -> int:
        return len(self._updates)

    @property
    def nbytes(self) -> int:
        """Bytes of the updates that wait, as the bound counts them."""
        return self._bytes.total()

    def add(self, update: Update) -> None:
        """Keep an update until it is taken."""
        heap = self._heap_of(update)
        self._updates.append(update)
        self._bytes[heap] += _bytes_of(update)
        again = self._in_step and heap in self._folded
        if again or self._bytes[heap] > self._limit_bytes:
            self.folds += not again
            self._fold(heap)

    def take(self, up_to_step: int | None = None) -> Arrived:
        """Take all, or only what was sent up to a step, and what is folded."""
        last = math.inf if up_to_step is None else up_to_step
        now = [u for u in self._updates if u.stamp.step <= last]
        self._updates = [u for u in self._updates if u.stamp.step > last]
        self._bytes.clear()
        for update in self._updates:
            self._bytes[self._heap_of(update)] += _bytes_of(update)
        due = [self._folded.pop(heap) for heap in [*self._folded] if heap <= last]
        for other_N in due[1:]:
            due[0] += other_N
        return Arrived(sorted(now, key=lambda u: u.stamp), due[0] if due else None)

    def clear(self) -> None:
        """Forget what waits."""
        self._updates.clear()
        self._bytes.clear()
        self._folded.clear()

    def _heap_of(self, update: Update) -> int:
        return update.stamp.step if self._in_step else 0

    def _fold(self, heap: int) -> None:
        if heap not in self._folded:
            self._folded[heap] = np.zeros(self._size, np.int32)
        folded_N = self._folded[heap]
        for update in self._updates:
            if self._heap_of(update) != heap:
                continue
            if isinstance(update, DenseUpdate):
                folded_N += update.counts_N
            else:
                count = count_of(update.threshold, self.grid)
                entries_K = torch.from_numpy(np.require(update.entries_K, None, "W"))
                kernels.fold_(torch.from_numpy(folded_N), entries_K, count)
        self._updates = [u for u in self._updates if self._heap_of(u) != heap]
        self._bytes[heap] = 0


def _bytes_of(update: Update) -> int:
    if isinstance(update, SparseUpdate):
        return UPDATE_BYTES + update.entries_K.nbytes
    return UPDATE_BYTES + update.counts_N.nbytes
