"""The console: whether somebody watches it, and messages beside a progress bar."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from tqdm import tqdm


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
        with tqdm.external_write_mode(file=self._stream):
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
