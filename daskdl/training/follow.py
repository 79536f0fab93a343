"""What the client does with the news of a run: history, callbacks, a bar."""

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tqdm.auto import tqdm

from daskdl.callbacks import Callback
from daskdl.history import History
from daskdl.steps import unpack_rows
from daskdl.training.rows import row_of


class Follower:
    """Turn events into rows of a history, and show how far the run is.

    Args:
        history: Gets a row after each epoch.
        callbacks: Their `on_epoch` is called with it.
        size: Parameters of the model.
        examples: Of all epochs together, for the bar; None: not known.
        progress: Show a bar; None: if standard error is a terminal.
    """

    def __init__(
        self,
        history: History,
        callbacks: Sequence[Callback],
        size: int,
        examples: int | None,
        progress: bool | None,
    ) -> None:
        self._history = history
        self._callbacks = callbacks
        self._size = size
        shown = sys.stderr.isatty() if progress is None else progress
        self._bar = tqdm(total=examples, unit="ex", disable=not shown)
        self._before = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def follow(self, event: Mapping[str, Any]) -> None:
        """Take note of one event."""
        if event["kind"] == "progress":
            self._bar.update(event["examples"])
            self._bar.set_postfix(epoch=event["epoch"], loss=f"{event['loss']:.4f}")
        elif event["kind"] == "gathered":
            self._end_epoch(event)

    def _end_epoch(self, event: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        seconds, self._before = now - self._before, now
        row = row_of(len(self._history), event, self._size, seconds)
        self._history.append(row)
        for packed in event["told"]:
            self._history.steps.extend(unpack_rows(packed))
        for callback in self._callbacks:
            callback.on_epoch(row)
