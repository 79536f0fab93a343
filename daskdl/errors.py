"""Every exception that daskdl raises on purpose.

DaskDLError
├── OptionError           an argument is out of range
│   ├── DataError         the data cannot be used as given
│   │   ├── ShapeError    a part of the data differs in shape from the others
│   │   └── LostPieceError  a part of the data was lost with its worker
│   └── ModelError        the model, loss or optimizer cannot be used
├── CodecError            bytes that are not a valid update message
├── SaveError             a save cannot be loaded or written
├── WaitTimeoutError      a wait exceeded its timeout
├── BusyError             the queue of a predictor is full
└── RunError              a run ended before it was finished
    ├── ReplicaError      user code raised on a worker
    ├── DivergedError     the loss became NaN or infinite, or diverged
    └── ChannelError      the channel between the replicas failed
"""

import functools
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_keeps_frames = False

# Frames between the user's call and the user's model: of no use to the user.
_INTERNAL = (
    str(Path(__file__).parent) + os.sep,
    os.path.join("torch", "nn", "modules", "module.py"),
    f"{os.sep}contextlib.py",
)

MAX_CHARACTERS = 2000  # longest message: one screen
MAX_TRACEBACK_CHARACTERS = 20_000  # longest message with a traceback


def shown(text: str, limit: int = 200) -> str:
    """Shorten long text by replacing its middle; escape what UTF-8 cannot encode.

    File names may contain lone surrogates, which Dask's messages cannot encode.

    Example:
        >>> shown("weight" * 1000, limit=40)
        'weightwe ... 5984 more ... htweight'
    """
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= limit:
        return text
    half = max((limit - 24) // 2, 1)
    hidden = len(text) - 2 * half
    return f"{text[:half]} ... {hidden} more ... {text[-half:]}"


def count_of(number: int, noun: str) -> str:
    """Return a number and a noun in singular or plural.

    Example:
        >>> count_of(1, "epoch"), count_of(2, "epoch")
        ('1 epoch', '2 epochs')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def epoch_of(epoch: int, epochs: int | None) -> str:
    """Return an epoch as readers see it: its number in the history, and its place.

    Example:
        >>> epoch_of(0, 3), epoch_of(4, None)
        ('epoch 0 (1 of 3)', 'epoch 4')
    """
    return f"epoch {epoch}" + ("" if epochs is None else f" ({epoch + 1} of {epochs})")


class DaskDLError(Exception):
    """Base class of all errors that daskdl raises."""

    _limit = MAX_CHARACTERS

    def __str__(self) -> str:
        """Return the message, with the middle replaced if it is too long."""
        return shown(super().__str__(), self._limit)


class OptionError(DaskDLError, ValueError):
    """An argument is out of range or has the wrong type."""


class DataError(OptionError):
    """The data cannot be used as given."""


class ShapeError(DataError):
    """A part of the data is readable but differs in shape from the others."""


class LostPieceError(DataError):
    """A part of the data was lost with its worker; a run restores the part."""


class ModelError(OptionError):
    """The model, the loss or the optimizer cannot be used as given."""


class CodecError(DaskDLError, ValueError):
    """The bytes are not an update message that this version can read."""


class SaveError(DaskDLError, ValueError):
    """A save or a checkpoint cannot be loaded or written."""


class WaitTimeoutError(DaskDLError, TimeoutError):
    """A wait exceeded its timeout; the message names the process or operation."""


class BusyError(DaskDLError, RuntimeError):
    """The queue of a predictor is full; call again later."""


class RunError(DaskDLError, RuntimeError):
    """A run ended before it was finished."""


class ReplicaError(RunError):
    """User code raised on a worker; the original traceback is in the message."""

    _limit = MAX_TRACEBACK_CHARACTERS


class DivergedError(RunError):
    """The loss or a parameter became NaN or infinite, or the loss diverged.

    The message lists the known symptoms.
    """


class ChannelError(RunError):
    """The channel between the replicas failed."""


def hide_internal_frames_(error: BaseException) -> None:
    """Remove the frames of daskdl from the tracebacks of an error and of its causes.

    An error that arose in daskdl, unless daskdl raised it on purpose, keeps all of its
    frames: somebody has to find the fault.
    """
    current: BaseException | None = error
    while current is not None:
        frames = []
        trace = current.__traceback__
        while trace is not None:
            file = trace.tb_frame.f_code.co_filename
            frames.append((trace, any(path in file for path in _INTERNAL)))
            trace = trace.tb_next
        if isinstance(current, DaskDLError) or (frames and not frames[-1][1]):
            shortened = None
            for trace, internal in reversed(frames):
                if not internal:
                    shortened = types.TracebackType(
                        shortened, trace.tb_frame, trace.tb_lasti, trace.tb_lineno
                    )
            current.__traceback__ = shortened
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)


def keep_internal_frames(keep: bool = True) -> None:
    """Show or hide the frames of daskdl in tracebacks of this process.

    Args:
        keep: Whether tracebacks are complete, to find a fault of daskdl. By default,
            errors of options, data and models show only your frames.

    Example:
        >>> keep_internal_frames()
        >>> keep_internal_frames(False)
    """
    global _keeps_frames
    _keeps_frames = keep


def short_tracebacks(function: Callable[P, T]) -> Callable[P, T]:
    """Hide the internal frames of the errors of a public function."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not _keeps_frames:
                hide_internal_frames_(error)
            raise

    return call
