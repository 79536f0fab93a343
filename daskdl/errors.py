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

MOST_CHARACTERS = 2000  # longest message: one screen
MOST_OF_A_TRACEBACK = 20_000  # longest message with a traceback


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


class DaskDLError(Exception):
    """Base class of all errors that daskdl raises."""

    _limit = MOST_CHARACTERS

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

    _limit = MOST_OF_A_TRACEBACK


class DivergedError(RunError):
    """The loss or a parameter became NaN or infinite, or the loss diverged.

    The message lists the known symptoms.
    """


class ChannelError(RunError):
    """The channel between the replicas failed."""
