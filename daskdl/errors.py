"""Every exception daskdl raises on purpose.

DaskDLError
├── OptionError           an argument is outside what is allowed
│   ├── DataError         the data cannot be trained on as it was given
│   │   ├── ShapeError    a part can be read, and has another shape than others
│   │   └── LostPieceError  a part of them died with the worker that held it
│   └── ModelError        the model, loss or optimizer cannot be used
├── CodecError            bytes that are not a valid update message
├── SaveError             what was saved cannot be loaded, or nothing can be saved there
├── WaitTimeoutError      something awaited did not come in time
├── BusyError             a predictor has as many calls waiting as it may
└── RunError              a run ended before it was finished
    ├── ReplicaError      user code raised on a worker
    ├── DivergedError     the loss became NaN or infinite, or ran away
    └── ChannelError      the channel between the replicas failed
"""

MOST_CHARACTERS = 2000  # of a message: a screen
MOST_OF_A_TRACEBACK = 20_000  # of a message that contains one


def shown(text: str, limit: int = 200) -> str:
    """A text that came from elsewhere, without its middle if it is long.

    Example:
        >>> shown("weight" * 1000, limit=40)
        'weightwe ... 5984 more ... htweight'
    """
    if len(text) <= limit:
        return text
    half = max((limit - 24) // 2, 1)
    more = len(text) - 2 * half
    return f"{text[:half]} ... {more} more ... {text[-half:]}"


class DaskDLError(Exception):
    """Base class; catch it to catch any failure daskdl itself reports."""

    _most = MOST_CHARACTERS

    def __str__(self) -> str:
        """The message, without its middle if it is longer than a screen."""
        return shown(super().__str__(), self._most)


class OptionError(DaskDLError, ValueError):
    """An argument is outside what is allowed."""


class DataError(OptionError):
    """The data cannot be trained on as it was given."""


class ShapeError(DataError):
    """A part of the data can be read, and has another shape than the others."""


class LostPieceError(DataError):
    """A part of the data died with the worker that held it; a run restores it."""


class ModelError(OptionError):
    """The model, the loss or the optimizer cannot be used as it was given."""


class CodecError(DaskDLError, ValueError):
    """The bytes are not an update message this version can read."""


class SaveError(DaskDLError, ValueError):
    """What was saved cannot be loaded, or nothing can be saved there."""


class WaitTimeoutError(DaskDLError, TimeoutError):
    """Something awaited did not come in time; the message says from whom."""


class BusyError(DaskDLError, RuntimeError):
    """A predictor has as many calls waiting as it may; call again later."""


class RunError(DaskDLError, RuntimeError):
    """A run ended before it was finished."""


class ReplicaError(RunError):
    """User code raised on a worker; the original traceback is in the message."""

    _most = MOST_OF_A_TRACEBACK


class DivergedError(RunError):
    """The loss became NaN or infinite, or ran away, or the parameters did.

    The message says what is known.
    """


class ChannelError(RunError):
    """The channel between the replicas failed."""
