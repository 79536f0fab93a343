"""Which steps of one replica get a row, and the rows that were not reported yet."""

import math
import time
from collections.abc import Callable
from typing import Literal

from daskdl.steps import StepRow, pack_rows
from daskdl.thinned import Thinned

# Between two reports, so that one has 39 KB of them at most.
MOST_ROWS = 256
# With "auto": steps from one row to the next, at least; and the share of the time that
# making them may take, half of what is promised, since the clock sees not all of it.
SPACING = 10
SHARE = 0.005


class StepLog:
    """Rows of one replica.

    Args:
        every: Steps from one row to the next: those whose number it divides have one.
            With ``"auto"`` the first step, and then one in ten, fewer where making
            them would take more than a share of the time. None: no step.
        now: Seconds, of a clock that never goes back.

    Example:
        >>> log = StepLog(every=5)
        >>> [step for step in range(1, 16) if log.due(step)]
        [5, 10, 15]
    """

    def __init__(
        self,
        every: int | Literal["auto"] | None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._every = every
        self._now = now
        self._rows: Thinned[StepRow] = Thinned(MOST_ROWS)
        self._number = 0  # of the last row, in the life of this replica
        self._step = 1 - SPACING  # that had it
        self._began = 0.0
        self._next_at = -math.inf

    def due(self, step: int, exchange_tried: bool = True) -> bool:
        """Whether a step is to have a row; `add` has to follow if so.

        Args:
            step: Steps this replica has made with this one.
            exchange_tried: In this step; then there is more to say of it.
        """
        if self._every is None:
            return False
        if self._every == "auto":
            return self._due_by_cost(step, exchange_tried)
        self._number, rest = divmod(step, self._every)
        return rest == 0 and self._rows.wants(self._number)

    def _due_by_cost(self, step: int, exchange_tried: bool) -> bool:
        if step - self._step < SPACING or not exchange_tried:
            return False
        self._began = self._now()
        if self._began < self._next_at:
            return False
        self._number += 1
        self._step = step
        return self._rows.wants(self._number)

    def add(self, row: StepRow) -> None:
        """Keep the row of a step that was due."""
        self._rows.add(self._number, row)
        if self._every == "auto":
            now = self._now()
            self._next_at = now + (now - self._began) * (1 / SHARE - 1)

    def take(self) -> bytes:
        """Return the rows since the last call, packed."""
        return pack_rows(self._rows.take())
