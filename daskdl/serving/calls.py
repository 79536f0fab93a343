"""One call of a predictor: checked where it enters, then a value on its way."""

from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from daskdl.data import batching
from daskdl.data.arrays import as_numpy, check_array, check_structure, is_dask_array
from daskdl.data.batching import Tree
from daskdl.errors import DataError
from daskdl.serving.structures import structure_of


@dataclass(eq=False)
class Call:
    """Rows that somebody wants to hear the model's outputs for.

    Attributes:
        x: A tree of numpy arrays, in memory of its own.
        rows: In each of them, >= 1.
        kind: Equal for calls that go into one batch.
        tensors: Whether the caller gave tensors, and gets such.
        came: When, on the clock of the event loop, seconds.
        answer: What the caller waits for.
        losses: Replicas that were lost while they had it. Changed by the dispatcher
            only, as those that follow.
        alone: Whether it goes without others, as something went wrong with them.
        begun: Whether it has been with a replica, so that nobody can cancel it.
    """

    x: Tree
    rows: int
    kind: Hashable
    tensors: bool
    came: float
    answer: Future[Tree] = field(default_factory=Future)
    losses: int = 0
    alone: bool = False
    begun: bool = False

    def begin(self) -> bool:
        """Whether it is still wanted; from now on it cannot be cancelled."""
        if not self.begun:
            self.begun = self.answer.set_running_or_notify_cancel()
        return self.begun

    def __str__(self) -> str:
        """As messages have it."""
        leaves = ", ".join(
            f"{name}: shape {leaf.shape} and dtype {leaf.dtype}"
            for name, leaf in batching.named(self.x, "X")
        )
        return f"{self.rows} rows, {leaves}"


def call_of(x: Any, most: int, now: float) -> Call:
    """Check what somebody calls with; it is copied, and may change afterwards.

    Args:
        x: A numpy array or a torch tensor, or a tree of them, rows first.
        most: Rows that one call may have.
        now: On the clock of the event loop.

    Raises:
        DataError: If it cannot be used, or has more rows.

    Example:
        >>> call = call_of(np.zeros((3, 2), np.float32), 32, 0.0)
        >>> print(call)
        3 rows, X: shape (3, 2) and dtype float32
    """
    check_structure(x, None)
    rows = {name: _rows(leaf, name) for name, leaf in batching.named(x, "X")}
    if len(set(rows.values())) > 1:
        raise DataError(f"X must have equally many rows everywhere, got {rows}")
    count = next(iter(rows.values()))
    if count > most:
        raise DataError(
            f"X has {count} rows, of which one call may have batch_limit={most}; cut "
            "it into several calls, or use predict"
        )
    copied = batching.mapped(lambda leaf: np.array(as_numpy(leaf), order="C"), x)
    tensors = all(isinstance(leaf, Tensor) for leaf in batching.leaves(x))
    return Call(copied, count, _kind(copied), tensors, now)


def _rows(leaf: Any, name: str) -> int:
    if is_dask_array(leaf):
        raise DataError(f"{name} must be in memory, got a dask.array; use predict")
    return int(check_array(leaf, name))


def _kind(x: Tree) -> Hashable:
    leaves = batching.leaves(x)
    return structure_of(x), *((leaf.shape[1:], leaf.dtype.str) for leaf in leaves)
