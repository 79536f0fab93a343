"""What early stopping saw in a fit, and did."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Reason = Literal["not_finite", "target", "patience", "max_seconds"]


@dataclass(frozen=True)
class Stopping:
    """What :class:`~daskdl.EarlyStopping` saw in a fit, and did; `history.stopping`.

    Attributes:
        monitor: The name of the score.
        reason: Why the fit ended before its last epoch: the score was
            ``"not_finite"``, it reached the ``"target"``, ``"patience"`` was used up,
            or ``"max_seconds"`` were over. None: it did not, or for another reason.
        details: The reason in words; empty without one.
        scores: The score of each epoch that was looked at, by epoch, from 0.
        best_epoch: That had the best score; None: none was finite.
        best_score: The score it had; NaN without one.
        restored: Whether the model that came of the fit is that of the best epoch.
    """

    monitor: str
    reason: Reason | None = None
    details: str = ""
    scores: Mapping[int, float] = field(default_factory=dict)
    best_epoch: int | None = None
    best_score: float = math.nan
    restored: bool = False
