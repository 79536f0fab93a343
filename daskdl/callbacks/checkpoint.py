"""When the state of a fit is written down, and which of what was written is kept."""

import math
import os
import re
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from dask.utils import parse_timedelta

from daskdl.callbacks.base import Callback
from daskdl.callbacks.early_stopping import MONITORS
from daskdl.callbacks.evaluate import check_every
from daskdl.errors import OptionError

_STEPS = re.compile(r"(\d+) steps?")


@dataclass(frozen=True)
class Checkpoint(Callback):
    """Write all that a fit has come to, so that another one can go on from there.

    When all replicas have met, each copies its state and trains on, while a thread
    beside it writes the copy. What was written is a checkpoint when all of it is there:
    whoever is killed meanwhile, the one before is still whole.
    ``Trainer.fit(..., resume=url)`` goes on from the newest.

    Args:
        url: A folder: a path or a URL of fsspec, such as ``s3://bucket/run-17``, which
            is the same place for all workers and for the client.
        every: ``"epoch"``, or so many epochs. Or ``"500 steps"``, so many of each
            replica, or a time, ``"10 minutes"``: in the middle of an epoch replicas
            then meet too, after as many steps or as long since they met before. The
            end of a fit always has one.
        keep_last: How many of the newest are kept, >= 1; None: all.
        keep_every: Each so many-th is kept in any case, counted from the first of the
            fit; None: none is.
        keep_best: Also the one with the best ``"val_loss"``, ``"val_accuracy"`` or
            ``"loss"``, the mean training loss of the epoch, is kept; None: it is not.

    Raises:
        OptionError: If an argument is outside what is allowed. When the fit begins, if
            there is no such score.

    Example:
        >>> rule = Checkpoint("s3://bucket/run-17", every=2, keep_last=1)
        >>> [epoch for epoch in range(6) if rule.due(epoch)]
        [1, 3, 5]
        >>> Checkpoint("s3://bucket/run-17", every="10 minutes").seconds
        600.0
    """

    url: str | os.PathLike[str]
    every: str | int = "epoch"
    _: KW_ONLY
    keep_last: int | None = 3
    keep_every: int | None = None
    keep_best: Literal["val_loss", "val_accuracy", "loss"] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.url, str | os.PathLike) or not os.fspath(self.url):
            raise OptionError(
                f"url must be a URL or a path of a folder, got {self.url!r}"
            )
        # As text, so that a trainer that has it can be saved.
        object.__setattr__(self, "url", os.fspath(self.url))
        if isinstance(self.every, str):
            self._check_text(self.every)
        else:
            check_every(self.every)
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and value >= 1):
                raise OptionError(
                    f"{name} must be a whole number >= 1 or None, got {value!r}"
                )
        if self.keep_best is not None and self.keep_best not in MONITORS:
            choices = ", ".join(map(repr, MONITORS))
            raise OptionError(
                f"keep_best must be one of {choices} or None, got {self.keep_best!r}"
            )

    def _check_text(self, every: str) -> None:
        if every == "epoch" or (self.steps is not None and self.steps >= 1):
            return
        try:
            seconds = parse_timedelta(every, default=False)
            good = self.steps is None and 0 < seconds < math.inf
        except (ValueError, LookupError):
            good = False
        if not good:
            raise OptionError(
                "every must be 'epoch', a whole number of epochs >= 1, steps such as "
                f"'500 steps', or a time such as '10 minutes', got {every!r}"
            )

    def due(self, epoch: int) -> bool:
        """Whether one is written at the end of an epoch, counted from 0."""
        return isinstance(self.every, str) or (epoch + 1) % self.every == 0

    @property
    def steps(self) -> int | None:
        """Steps of each replica after which there is one; None: no such."""
        found = _STEPS.fullmatch(str(self.every))
        return None if found is None else int(found[1])

    @property
    def seconds(self) -> float | None:
        """Time after which there is one; None: no such."""
        if (
            self.steps is not None
            or self.every == "epoch"
            or not isinstance(self.every, str)
        ):
            return None
        return float(parse_timedelta(self.every))
