"""A line of text for each epoch."""

import math
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from typing_extensions import override

from daskdl.callbacks.base import Callback, FitBegin, FitEnd

SCORES = ("loss", "val_loss", "val_accuracy")


class PrintProgress(Callback):
    """Write a line for each epoch, and one in the end if the fit ended early.

    It runs on the client. Scores that an epoch does not have are left out of its line.

    Args:
        stream: Where to write; None: to standard output, as it is then.

    Example:
        >>> progress = PrintProgress()
        >>> progress.on_fit_begin(FitBegin(2, 3, 0, 32, 1000, 650))
        >>> row = {"epoch": 0, "loss": 0.5, "val_loss": 0.625, "val_accuracy": 0.75}
        >>> progress.on_epoch_end({**row, "seconds": 1.25, "replicas": 2})
        epoch 1/3: loss 0.5000, val_loss 0.6250, val_accuracy 0.7500, 1.2 s, 2 replicas
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._epochs = 0

    @override
    def on_fit_begin(self, fit: FitBegin) -> None:
        self._epochs = fit.epochs

    @override
    def on_epoch_end(self, row: Mapping[str, Any]) -> None:
        scores = [
            f"{name} {row[name]:.4f}"
            for name in SCORES
            if not math.isnan(row.get(name, math.nan))
        ]
        count = row["replicas"]
        replicas = "1 replica" if count == 1 else f"{count} replicas"
        parts = [*scores, f"{row['seconds']:.1f} s", replicas]
        self._write(f"epoch {row['epoch'] + 1}/{self._epochs}: {', '.join(parts)}")

    @override
    def on_fit_end(self, end: FitEnd) -> None:
        epochs, stopping = len(end.history), end.history.stopping
        if end.error is not None:
            kind = type(end.error).__name__
            self._write(f"ended after {epochs} of {self._epochs} epochs: {kind}")
        elif stopping is not None and stopping.reason is not None:
            why = stopping.details
            self._write(f"stopped after {epochs} of {self._epochs} epochs: {why}")

    def _write(self, line: str) -> None:
        stream = sys.stdout if self._stream is None else self._stream
        stream.write(line + "\n")
        stream.flush()
