"""How one run writes checkpoints, and which one it goes on from."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daskdl.callbacks.checkpoint import Checkpoint
from daskdl.channel.leasing import Pause
from daskdl.checkpoints.parts import Stamp
from daskdl.checkpoints.retention import Retention
from daskdl.checkpoints.series import Series, Whole
from daskdl.errors import SaveError


@dataclass(frozen=True)
class CheckpointPlan:
    """Of one run; plain values, the same for all its replicas.

    Attributes:
        url: Of the series, absolute.
        rule: The user's.
        origin: Of the fit.
        run: Of the run.
        first: Number of its first checkpoint.
        before: Checkpoints of the fit before this run.
    """

    url: str
    rule: Checkpoint
    origin: str
    run: str
    first: int
    before: int = 0

    def stamp(self, taken: int) -> Stamp:
        """Of a checkpoint before which this run has taken so many."""
        return Stamp(self.origin, self.run, self.first + taken)

    @property
    def retention(self) -> Retention:
        """What is kept."""
        rule = self.rule
        best = rule.keep_best is not None
        accuracy = rule.keep_best == "val_accuracy"
        return Retention(rule.keep_last, rule.keep_every, best, accuracy)

    @property
    def series(self) -> Series:
        """Where they are."""
        return Series.at(self.url)

    def prune(self) -> None:
        """Delete those of the fit that are not to be kept.

        Raises:
            SaveError: If that cannot be done.
        """
        self.series.prune(self.origin, self.retention, self._score)

    def conclude(self) -> None:
        """The run has come to its end, and has written checkpoints.

        Raises:
            SaveError: If none of them is whole here; or if what is not to be kept
                cannot be deleted.
        """
        self.prune()
        newest = self.series.newest()
        if newest is None or newest.stamp.run != self.run:
            raise SaveError(
                f"no checkpoint of this fit is whole in {self.url}; is it the same "
                "place for all workers and for the client? If so, a worker was lost "
                "while it wrote"
            )

    def _score(self, one: Whole) -> float:
        rows: Sequence[Mapping[str, Any]] = one.said["rows"]
        score = rows[-1].get(self.rule.keep_best or "") if rows else None
        return math.nan if score is None else float(score)


@dataclass(frozen=True)
class ResumePlan:
    """Where a run goes on from.

    Attributes:
        url: Of the checkpoint, absolute.
        stamp: It has.
        members: Replicas whose parts it has, ascending.
        epoch: The first that is trained, counted from 0.
        pause: What is left of that, if it has begun; None: all.
    """

    url: str
    stamp: Stamp
    members: tuple[int, ...]
    epoch: int
    pause: Pause | None = None
