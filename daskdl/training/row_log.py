"""The rows of a history as a replica knows them, for its checkpoints."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from daskdl.channel.base import Gathered
from daskdl.training.rows import row_of


class RowLog:
    """Rows of all epochs of a fit.

    Args:
        size: Parameters of the model.
        columns: Of the scores.
        rows: Of the epochs before.
        now: Seconds, of a clock that never goes back.
        left_out: See `row_of`.

    Attributes:
        rows: Oldest first.
    """

    rows: list[dict[str, Any]]

    def __init__(
        self,
        size: int,
        columns: Sequence[str],
        rows: Sequence[dict[str, Any]] = (),
        now: Callable[[], float] = time.perf_counter,
        left_out: int = 0,
    ) -> None:
        self.rows = list(rows)
        self._size = size
        self._columns = columns
        self._now = now
        self._left_out = left_out
        self._before = now()

    def end_epoch(self, epoch: int, gathered: Gathered) -> None:
        """All have met."""
        now = self._now()
        seconds, self._before = now - self._before, now
        notes = sorted(gathered.notes.items())
        event = {"notes": notes, **gathered.counted}
        columns, left_out = self._columns, self._left_out
        row = row_of(epoch, event, self._size, seconds, columns, left_out)
        self.rows.append(row)
