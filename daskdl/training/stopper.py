"""Early stopping in one replica: how far it has come, and the best model so far."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from daskdl.packed import Packed
from daskdl.training.judging import Judging, Record, Verdict
from daskdl.training.parameters import Parameters


class Stopper:
    """Of one replica, from when all were there. One thread uses it.

    Args:
        judging: Decides; the same for all replicas.
        snapshot: Of another replica, where this one comes later; else None.
        now: Seconds, of a clock that never goes back.

    Attributes:
        over: Whether the fit has ended, before its last epoch.
    """

    over: bool

    def __init__(
        self,
        judging: Judging,
        snapshot: Mapping[str, Any] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.over = False
        self._judging = judging
        self._verdict = Verdict()
        self._best: Parameters | None = None
        self._best_epoch = -1
        self._now = now
        self._began_at = now()
        if snapshot is not None:
            self._began_at -= snapshot["elapsed_s"]
            self._take(snapshot["best_epoch"], snapshot["best"])

    def _take(self, epoch: int, packed: Any) -> None:
        if packed is not None:
            own: Packed[Parameters] = Packed.of(np.asarray(packed), "best")
            self._best_epoch, self._best = epoch, own.unpack()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return self._now() - self._began_at

    def snapshot(self) -> dict[str, Any]:
        """What a newcomer begins with, beside the notes of the last epoch."""
        best = None if self._best is None else Packed(self._best, "best").payload
        return {
            "elapsed_s": self.elapsed_s,
            "best_epoch": self._best_epoch,
            "best": best,
        }

    def values(self) -> dict[str, Any]:
        """How far it has come, as plain values and tensors, for another run."""
        return {
            "verdict": self._verdict.values(),
            "monitor": self._monitor,
            "elapsed_s": self.elapsed_s,
            "best_epoch": self._best_epoch,
            "best": None if self._best is None else self._best.values(),
        }

    @property
    def _monitor(self) -> str | None:
        rule = self._judging.stopping
        return None if rule is None else rule.monitor

    def restore_(self, values: Mapping[str, Any], epoch: int) -> None:
        """Go on from what `values` made, unless it was about another score.

        Args:
            values: Of the fit.
            epoch: The next one, counted from 0.
        """
        self._began_at = self._now() - values["elapsed_s"]
        if values["monitor"] != self._monitor:
            return
        verdict = Verdict.of(values["verdict"])
        if verdict.reason is not None:  # a rule with more patience may go on
            elapsed_s = values["elapsed_s"]
            verdict = self._judging.reconsidered(epoch - 1, verdict, elapsed_s)
        self._conclude(verdict)
        if values["best"] is not None:
            self._best_epoch = values["best_epoch"]
            self._best = Parameters.from_values(values["best"])

    def note(self) -> dict[str, Any]:
        """What the others are told at the end of an epoch; plain values."""
        return {"record": list(self._record), "elapsed_s": self.elapsed_s}

    def end_epoch(
        self,
        epoch: int,
        notes: Sequence[Mapping[str, Any]],
        agreed: Callable[[], Parameters],
    ) -> None:
        """All have met: decide whether to go on, and keep the model if it is the best.

        Args:
            epoch: Counted from 0.
            notes: What all replicas reported, in an order that is the same for all.
            agreed: The parameters on which they agree.
        """
        self.catch_up(epoch, notes)
        rule = self._judging.stopping
        if rule is not None and rule.restore_best and self._record.best_epoch == epoch:
            self._best_epoch, self._best = epoch, agreed()

    def catch_up(self, epoch: int, notes: Sequence[Mapping[str, Any]]) -> None:
        """Decide as the others have, who met without this replica; as `end_epoch`."""
        self._conclude(self._judging.judge(epoch, notes))

    def _conclude(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self.over = verdict.reason is not None

    @property
    def verdict(self) -> Verdict:
        """Of the last epoch."""
        return self._verdict

    @property
    def _record(self) -> Record:
        return self._verdict.record

    def best(self) -> Parameters | None:
        """The agreed model of the best epoch; None if it is not to come back.

        Nor does it if this replica came after that epoch and was not given it.
        """
        return self._best if self._best_epoch == self._record.best_epoch else None
