"""The progress of a fit: rows of its history, and a bar with messages above it."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TextIO

from tqdm import TqdmWarning
from tqdm import tqdm as plain_tqdm

with warnings.catch_warnings():  # in a notebook without ipywidgets: plain text does
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

from daskdl.callbacks import Callback, run_hook
from daskdl.observe.history import COLUMNS, History, Stopping
from daskdl.training.backend import EpochEnded, StepProgress
from daskdl.training.epoch_control import StoppingDecision
from daskdl.training.fit_spec import ReplicaSpec
from daskdl.training.telemetry import RowLog, add_telemetry


class AboveBars:
    """A console stream whose text appears above the visible bars of tqdm.

    A bar leaves the cursor at its end, so that text would share its line.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text; it ends with a line break."""
        with plain_tqdm.external_write_mode(file=self._stream):
            return self._stream.write(text)


def is_watched() -> bool:
    """Whether a progress bar is visible: at a terminal, or in a notebook."""
    shell = sys.modules.get("IPython")
    in_notebook = shell is not None and hasattr(shell.get_ipython(), "kernel")
    return in_notebook or sys.stderr.isatty()


@contextlib.contextmanager
def messages_above_bars() -> Iterator[None]:
    """Context manager: write log messages on the console above progress bars.

    Affects handlers of this process, of any library, that write to the console.
    """
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {
        handler
        for logger in loggers
        if isinstance(logger, logging.Logger)
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler)
        and vars(handler).get("stream") in (sys.stdout, sys.stderr)
    }
    streams = {handler: handler.stream for handler in handlers}
    former = logging.lastResort  # used where no logger has a handler
    last = logging.StreamHandler(AboveBars(sys.stderr))
    last.setLevel(logging.WARNING if former is None else former.level)
    try:
        for handler, stream in streams.items():
            handler.setStream(AboveBars(stream))
        logging.lastResort = former and last
        yield
    finally:
        logging.lastResort = former
        for handler, stream in streams.items():
            handler.setStream(stream)


class ProgressReporter:
    """Turns events into rows of a history, and shows a progress bar."""

    def __init__(
        self,
        spec: ReplicaSpec,
        history: History,
        callbacks: Sequence[Callback],
        examples: int | None,
        *,
        shows_bar: bool,
    ) -> None:
        self._history = history
        self._callbacks = callbacks
        self._evaluation = spec.evaluation
        self._rows = RowLog(spec.size, spec.evaluation.columns, left_out=spec.left_out)
        self._bar = tqdm(
            total=None if examples is None else examples * spec.epochs,
            initial=sum(history.column("examples")),
            unit="ex",
            disable=not shows_bar,
        )
        self._ending = contextlib.ExitStack()
        self.begin(spec)

    def begin(self, spec: ReplicaSpec) -> None:
        """Begin with the first epoch of a run."""
        resume, start = spec.resume, spec.start
        self._epoch, self._decision = spec.first_epoch, StoppingDecision()
        if resume is not None:
            self._decision = resume.decision
        elif start is not None and spec.resumes_lost_run:
            self._decision = StoppingDecision.of(start.header["stopping"])
        self._scores = self._evaluation.scores(self._history)
        self._bar.n = sum(self._history.column("examples"))

    def __enter__(self) -> Self:
        if not self._bar.disable:
            self._ending.enter_context(messages_above_bars())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
        self._ending.close()
        rule, decision = self._evaluation.stopping, self._decision
        if rule is not None or decision.reason is not None:
            best = decision.best.best_epoch
            self._history.stopping = Stopping(
                None if rule is None else rule.monitor,
                decision.reason,
                decision.details,
                self._scores,
                None if best < 0 else best,
                decision.best.best_score,
            )

    def show(self, event: StepProgress) -> None:
        """Advance the progress bar."""
        self._bar.update(event.examples)
        shown = {"epoch": event.epoch, "loss": event.loss}
        if self._history:
            last = self._history[-1]
            scores = {name: last[name] for name in last if name not in COLUMNS}
            shown |= scores | {"replicas": last["replicas"]}
        self._bar.set_postfix(shown)

    def end_epoch(self, event: EpochEnded) -> None:
        """Add a row to the history, and run `on_epoch_end` of the callbacks."""
        epoch = self._epoch
        self._epoch += 1
        row = self._rows.end_epoch(epoch, event.reports, event.report)
        self._history.append(row)
        self._decision = self._evaluation.decide(epoch, event.reports)
        if self._decision.score is not None:
            self._scores[epoch] = self._decision.score
        for packed in event.report["client_payloads"]:
            add_telemetry(self._history, packed)
        for callback in self._callbacks:
            run_hook(callback.on_epoch_end, self._history[-1])
