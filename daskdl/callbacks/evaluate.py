"""In which epochs the validation data are scored."""

from dataclasses import dataclass
from typing import Any

from daskdl.callbacks.base import Callback
from daskdl.errors import OptionError


@dataclass(frozen=True)
class Evaluate(Callback):
    """Score `validation` in each so many-th epoch, and in the last one of the fit.

    Without it, that is done in every epoch. In the others the columns ``val_loss`` and
    ``val_accuracy`` of the history are NaN, and `ReduceLROnPlateau` waits. An
    :class:`~daskdl.EarlyStopping` that monitors one of them has it scored in the
    epochs it looks at as well.

    Args:
        every: Epochs from one score to the next, counted from the beginning of the
            fit.

    Raises:
        OptionError: If it is no whole number >= 1.

    Example:
        >>> [epoch for epoch in range(9) if Evaluate(every=3).due(epoch)]
        [2, 5, 8]
    """

    every: int = 1

    def __post_init__(self) -> None:
        check_every(self.every)

    def due(self, epoch: int) -> bool:
        """Whether it is time at the end of an epoch, counted from 0."""
        return (epoch + 1) % self.every == 0


def check_every(every: Any) -> None:
    """Refuse what is no number of epochs."""
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise OptionError(f"every must be a whole number >= 1, got {every!r}")
