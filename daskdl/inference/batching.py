"""Trees on their way between processes: what they are made of, without the arrays.

One call of a predictor: checked where it enters, then a value on its way.

Which calls leave together, and when. No clock, no event loop, no arrays.

Whether more calls are to be waited for. A number of calls, no clock.

How many rows may wait, from any thread.

What a model says to a batch, and each caller's own part of it.
"""

import threading
import traceback
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from daskdl.data import batching
from daskdl.data.batching import Tree
from daskdl.data.tables import as_numpy, check_array, check_structure, is_dask_array
from daskdl.errors import BusyError, DaskDLError, DataError, ModelError

ONE_LEAF: bytes = cloudpickle.dumps(0)


def structure_of(tree: Tree) -> bytes:
    """A tree whose arrays are numbered instead; equal for equal structures.

    Example:
        >>> import numpy as np
        >>> tree_of(structure_of({"a": np.zeros(1), "b": (np.zeros(2),)}), "xy")
        {'a': 'x', 'b': ('y',)}
    """
    if not isinstance(tree, tuple | dict):
        return ONE_LEAF
    numbered = batching.filled(tree, range(len(batching.leaves(tree))))
    structure: bytes = cloudpickle.dumps(numbered)
    return structure


def tree_of(structure: bytes, leaves: Sequence[Any]) -> Tree:
    """The tree with its arrays, in order."""
    if structure == ONE_LEAF:
        return leaves[0]
    return batching.mapped(lambda number: leaves[number], cloudpickle.loads(structure))


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


class Joining:
    """Calls that wait, in one line for each kind, oldest first.

    A batch is the beginning of a line, with at most `batch_limit` rows, so that no
    call is overtaken by one of its own kind. It is due when no more fits in, or when
    its first call has waited for `wait_s`; the oldest that is due leaves first.

    Args:
        batch_limit: Rows of a batch, >= those of any call.
        wait_s: How long a call waits for others, >= 0.
    """

    _lines: dict[Hashable, deque[Call]]  # none of them is empty

    def __init__(self, batch_limit: int, wait_s: float) -> None:
        self._limit = batch_limit
        self._wait_s = wait_s
        self._lines = {}

    def __len__(self) -> int:
        """How many calls wait."""
        return sum(len(line) for line in self._lines.values())

    def add(self, call: Call) -> None:
        """A call has come: it is the last of its line."""
        self._lines.setdefault(call.kind, deque()).append(call)

    def put_back(self, calls: Sequence[Call]) -> None:
        """Calls that had left come back, in the same order: they are the first."""
        for call in reversed(calls):
            self._lines.setdefault(call.kind, deque()).appendleft(call)

    def withdraw(self, call: Call) -> bool:
        """Nobody wants it any more; whether it was waiting."""
        line = self._lines.get(call.kind, deque())
        if call not in line:
            return False
        line.remove(call)
        if not line:
            del self._lines[call.kind]
        return True

    def take(self, now: float, *, hurry: bool) -> list[Call]:
        """The calls of the next batch, which leave.

        Args:
            now: On the clock that says when calls came.
            hurry: Whether no call is to wait for others.

        Returns:
            They are >= 1, or none is due.
        """
        due = [
            line
            for line in self._lines.values()
            if hurry or self._due_in(line, now) <= 0
        ]
        if not due:
            return []
        line = min(due, key=lambda line: line[0].came)
        calls = list(self._batch(line))
        for _ in calls:
            line.popleft()
        if not line:
            del self._lines[calls[0].kind]
        return calls

    def due_in(self, now: float) -> float | None:
        """Seconds until the next batch is due, 0 if it is; None if no call waits."""
        waits = (self._due_in(line, now) for line in self._lines.values())
        return min(waits, default=None)

    def clear(self) -> list[Call]:
        """All calls leave, and nobody takes them."""
        calls = [call for line in self._lines.values() for call in line]
        self._lines.clear()
        return calls

    def _due_in(self, line: deque[Call], now: float) -> float:
        first = line[0]
        batch = list(self._batch(line))
        full = len(batch) < len(line) or sum(c.rows for c in batch) == self._limit
        if full or first.alone or first.losses:
            return 0.0
        return max(0.0, first.came + self._wait_s - now)

    def _batch(self, line: deque[Call]) -> Iterator[Call]:
        room = self._limit
        for number, call in enumerate(line):
            room -= call.rows
            if room < 0 or (number and call.alone):
                return
            yield call
            if call.alone:
                return


MEMORY = 8  # batches: fewer callers than before cost as many waits, once


class Crowd:
    """How many calls are without an answer at once, lately.

    Callers that wait for their answer before they call again are a crowd of a certain
    size. When all of them are there already nobody else will come, and to wait would
    only cost them time: one caller alone is answered at once.

    Example:
        >>> crowd = Crowd()
        >>> crowd.complete(1)
        True
        >>> crowd.came(3)
        >>> crowd.complete(2), crowd.complete(3)
        (False, True)
    """

    def __init__(self) -> None:
        self._sizes: deque[int] = deque([1], maxlen=MEMORY)
        self._peak = 0  # since the last batch left

    def came(self, unanswered: int) -> None:
        """A call has come; with it, so many have no answer."""
        self._peak = max(self._peak, unanswered)

    def left(self) -> None:
        """A batch leaves."""
        self._sizes.append(self._peak)
        self._peak = 0

    def complete(self, unanswered: int) -> bool:
        """Whether that are as many as there were lately."""
        return unanswered >= max(self._peak, *self._sizes)


class Room:
    """Counts the rows that wait for a replica, and lets no more in than a limit.

    Args:
        limit: Rows.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rows = 0
        self._calls = 0
        self._freed: Future[None] = Future()
        self._lock = threading.Lock()

    def enter(self, rows: int) -> None:
        """The rows of a call begin to wait.

        Raises:
            BusyError: If there is no room for them.
        """
        with self._lock:
            if self._rows + rows > self.limit:
                raise BusyError(
                    f"the predictor is busy: {self._calls} calls wait with "
                    f"{self._rows} rows, {rows} more are over "
                    f"queue_limit={self.limit}; call again later, give a timeout to "
                    "wait for room, or use more replicas"
                )
            self._rows += rows
            self._calls += 1

    def leave(self, rows: int) -> None:
        """The rows of a call wait no longer."""
        with self._lock:
            self._rows -= rows
            self._calls -= 1
            freed, self._freed = self._freed, Future()
        freed.set_result(None)

    def freed(self) -> Future[None]:
        """Done when rows leave for the next time; shared, so nobody may cancel it."""
        with self._lock:
            return self._freed


class Outputs(NamedTuple):
    """What a model says to the rows of a batch."""

    tree: Tree  # of numpy arrays
    dtypes: tuple[str, ...]  # that torch gave them, by leaf: numpy has no bfloat16

    @classmethod
    def of(cls, outputs: Any, rows: int) -> "Outputs":
        """Check what a model returned for so many rows.

        Raises:
            ModelError: If it is not one tensor with one row for each, or a tree of
                such.

        Example:
            >>> Outputs.of(torch.zeros(2), rows=2)
            Outputs(tree=array([0., 0.], dtype=float32), dtypes=('float32',))
        """
        for leaf in batching.leaves(outputs):
            if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != rows:
                got = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf)
                raise ModelError(
                    "model must give one tensor with one row per example, or tuples "
                    f"and dicts of such, got {got} for {rows} rows"
                )
        dtypes = [str(leaf.dtype) for leaf in batching.leaves(outputs)]
        return cls(
            batching.mapped(as_numpy, outputs),
            tuple(name.removeprefix("torch.") for name in dtypes),
        )


class Failure(NamedTuple):
    """What a model, or a transform, raised."""

    summary: str
    details: str  # the traceback, where it happened

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Describe it, without holding on to the frames it went through."""
        name = "" if isinstance(error, DaskDLError) else f"{type(error).__name__}: "
        return cls(f"{name}{error}", "".join(traceback.format_exception(error)))

    def error(self, what: str) -> ModelError:
        """The same for whoever asked.

        Args:
            what: Was done, for the message.
        """
        error = ModelError(f"{what}: {self.summary}")
        error.add_note(f"where it happened:\n{self.details}")
        return error


def inputs_of(calls: Sequence[Call]) -> Tree:
    """The rows of calls of one kind, one after the other."""
    return batching.joined([call.x for call in calls])


def answers_of(outputs: Outputs, calls: Sequence[Call]) -> list[Tree]:
    """What each of the calls is answered, in memory of its own."""
    answers, start = [], 0
    for call in calls:
        own = batching.rows(outputs.tree, slice(start, start + call.rows))
        start += call.rows
        if len(calls) > 1:
            own = batching.mapped(np.copy, own)
        answers.append(_tensors(own, outputs.dtypes) if call.tensors else own)
    return answers


def _tensors(tree: Tree, dtypes: Sequence[str]) -> Tree:
    made = [
        torch.from_numpy(leaf).to(getattr(torch, dtype))
        for leaf, dtype in zip(batching.leaves(tree), dtypes, strict=True)
    ]
    return batching.filled(tree, made)
