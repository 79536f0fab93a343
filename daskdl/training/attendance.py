"""The hooks of callbacks around a fit, on the client."""

import contextlib
import functools
import logging
import traceback
from collections.abc import Iterator, Sequence
from types import TracebackType

from daskdl.callbacks.base import Callback, FitBegin, FitEnd
from daskdl.guard import guarded
from daskdl.history import History

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def attended(
    callbacks: Sequence[Callback], fit: FitBegin, history: History
) -> Iterator[None]:
    """Run `on_fit_begin` of all callbacks, and on the way out `on_fit_end`.

    Only those are told of the end whose `on_fit_begin` came to its own, in reverse
    order.

    Args:
        callbacks: All of them.
        fit: That begins.
        history: Of this fit.
    """
    with contextlib.ExitStack() as ending:
        for callback in callbacks:
            callback.on_fit_begin(fit)
            ending.push(functools.partial(_end, callback, history))
        yield


def _end(
    callback: Callback,
    history: History,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """Tell a callback; what it raises must not hide an error that is under way."""
    if error is None:
        callback.on_fit_end(FitEnd(history, None))
    else:
        guarded(
            lambda: callback.on_fit_end(FitEnd(history, error)),
            lambda own: _note(callback, error, own),
        )


def _note(callback: Callback, error: BaseException, own: Exception) -> None:
    text = "".join(traceback.format_exception(own, chain=False))
    error.add_note(f"on_fit_end of {callback!r} failed as well:\n{text}")
    logger.warning("on_fit_end of %r failed: %r", callback, own)
