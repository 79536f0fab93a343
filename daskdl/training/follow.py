"""What the client does with the news of a run: history, callbacks, a bar."""

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from tqdm.auto import tqdm

from daskdl.callbacks.base import Callback
from daskdl.history import History
from daskdl.steps import unpack_rows
from daskdl.stopping import Stopping
from daskdl.training.judging import Judging, Verdict
from daskdl.training.rows import row_of


class Before(NamedTuple):
    """What was before a run that goes on from a checkpoint."""

    epoch: int = 0  # the first that is trained
    verdict: Verdict = Verdict()  # of early stopping, on the last row


NOTHING_YET = Before()


class Follower:
    """Turn events into rows of a history, and show how far the run is.

    Args:
        history: Gets a row after each epoch, and in the end what early stopping did.
        callbacks: Their `on_epoch_end` is called with it.
        size: Parameters of the model.
        examples: Of all epochs together, for the bar; None: not known.
        progress: Show a bar; None: if standard error is a terminal.
        judging: In which epochs the model is scored, and when the fit ends early.
        before: What was before the run.
        left_out: See `row_of`.
    """

    def __init__(
        self,
        history: History,
        callbacks: Sequence[Callback],
        size: int,
        examples: int | None,
        progress: bool | None,
        judging: Judging,
        before: Before = NOTHING_YET,
        left_out: int = 0,
    ) -> None:
        self._history = history
        self._callbacks = callbacks
        self._size = size
        self._judging = judging
        self._left_out = left_out
        self._epoch, self._verdict = before
        self._scores = judging.scores(history)
        shown = sys.stderr.isatty() if progress is None else progress
        examples_before = sum(history.column("examples"))
        self._bar = tqdm(
            total=examples, initial=examples_before, unit="ex", disable=not shown
        )
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
        rule, verdict = self._judging.stopping, self._verdict
        if rule is not None:
            best = verdict.record.best_epoch
            self._history.stopping = Stopping(
                rule.monitor,
                verdict.reason,
                verdict.details,
                self._scores,
                None if best < 0 else best,
                verdict.record.best_score,
            )

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
        epoch, columns = self._epoch, self._judging.columns
        self._epoch += 1
        row = row_of(epoch, event, self._size, seconds, columns, self._left_out)
        self._history.append(row)
        self._verdict = self._judging.judge(epoch, [note for _, note in event["notes"]])
        if self._verdict.score is not None:
            self._scores[epoch] = self._verdict.score
        for packed in event["told"]:
            self._history.steps.extend(unpack_rows(packed))
        for callback in self._callbacks:
            callback.on_epoch_end(row)
