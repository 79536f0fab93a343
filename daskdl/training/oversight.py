"""What is watched while a model trains: which steps get a row, and what ends it."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from daskdl.errors import OptionError
from daskdl.training.options import check_whole


@dataclass(frozen=True)
class Oversight:
    """The options `telemetry_every` and `max_loss_rise` of a trainer.

    Args:
        telemetry_every: Steps of a replica from one row of `history.steps` to the next;
            ``"auto"``, or None for no rows.
        max_loss_rise: How far above its first one the loss may stay; None: any.

    Raises:
        OptionError: Naming the option, what was given and what is allowed.

    Example:
        >>> Oversight(max_loss_rise=0)
        Traceback (most recent call last):
        daskdl.errors.OptionError: max_loss_rise must be a number > 0 or None, got 0
    """

    telemetry_every: int | Literal["auto"] | None = "auto"
    max_loss_rise: float | None = 10.0

    def __post_init__(self) -> None:
        if self.telemetry_every not in ("auto", None):
            check_whole("telemetry_every", self.telemetry_every, 1, "or 'auto' or None")
        rise: Any = self.max_loss_rise
        number = isinstance(rise, int | float) and not isinstance(rise, bool)
        if rise is not None and not (number and 0 < rise < math.inf):
            raise OptionError(
                f"max_loss_rise must be a number > 0 or None, got {rise!r}"
            )
