"""What a replica measures while it trains, and the rows of the history made from it."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from daskdl.channel.base import ChannelStats
from daskdl.compression.compressor import Sample
from daskdl.errors import DataError
from daskdl.history import StepRow, Thinned, pack_rows
from daskdl.scores import Score
from daskdl.training.base import ExchangeStats

# Residuals looked at for one row. Ten of them are above the highest percentile.
SAMPLE = 1024
PERCENTILES = (50, 90, 99)


def mean(thresholds: Sequence[float]) -> float:
    """Of what there is; NaN of nothing."""
    return math.fsum(thresholds) / len(thresholds) if thresholds else math.nan


def spread_of(samples: Iterable[Sample]) -> list[float]:
    """How long a residual is, and how it compares with its thresholds.

    Args:
        samples: Of all of it. Where a threshold is NaN, the residuals count for the
            length only.

    Returns:
        The Euclidean length, as the samples have it, and the :data:`PERCENTILES` of
        |residual| / threshold, all parameters weighing the same. NaN if there is
        nothing to say.

    Example:
        >>> import torch
        >>> spread_of([Sample(400, torch.tensor([3.0, -4.0, 0.0, 0.0]), threshold=2.0)])
        [50.0, 0.0, 2.0, 2.0]
    """
    squares = 0.0
    ratios, weights = [np.zeros(0)], [np.zeros(0)]
    for size, residuals, threshold in samples:
        values = np.abs(residuals.numpy().astype(np.float64))
        if not len(values):
            continue
        squares += size * float(np.mean(values**2))
        if not math.isnan(threshold):
            ratios.append(values / threshold)
            weights.append(np.full(len(values), size / len(values)))
    ratio, weight = np.concatenate(ratios), np.concatenate(weights)
    if not len(ratio):
        return [math.sqrt(squares), *[math.nan] * len(PERCENTILES)]
    order = np.argsort(ratio)
    below = np.cumsum(weight[order])
    ranks = np.searchsorted(below, [p / 100 * below[-1] for p in PERCENTILES])
    return [math.sqrt(squares), *ratio[order][ranks].tolist()]


# Between two reports, so that one has 39 KB of them at most.
MOST_ROWS = 256
# With "auto": steps from one row to the next, at least; and the share of the time that
# making them may take, half of what is promised, since the clock sees not all of it.
SPACING = 10
SHARE = 0.005


class StepLog:
    """Rows of one replica.

    Args:
        every: Steps from one row to the next: those whose number it divides have one.
            With ``"auto"`` the first step, and then one in ten, fewer where making
            them would take more than a share of the time. None: no step.
        now: Seconds, of a clock that never goes back.

    Attributes:
        next_step: No step before this one is due.

    Example:
        >>> log = StepLog(every=5)
        >>> [step for step in range(1, 16) if log.due(step)]
        [5, 10, 15]
    """

    next_step: float

    def __init__(
        self,
        every: int | Literal["auto"] | None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._every = every
        self._now = now
        self._rows: Thinned[StepRow] = Thinned(MOST_ROWS)
        self._number = 0  # of the last row, in the life of this replica
        self.next_step = math.inf if every is None else 1
        self._began = 0.0
        self._next_at = -math.inf

    def due(self, step: int, exchange_tried: bool = True) -> bool:
        """Whether a step is to have a row; `add` has to follow if so.

        Args:
            step: Steps this replica has made with this one.
            exchange_tried: In this step; then there is more to say of it.
        """
        if self._every is None or step < self.next_step:
            return False
        if self._every != "auto":
            self._number, rest = divmod(step, self._every)
            self.next_step = step - rest + self._every
            return rest == 0 and self._rows.wants(self._number)
        if not exchange_tried:
            return False
        self.next_step = step + SPACING
        self._began = self._now()
        if self._began < self._next_at:
            return False
        self._number += 1
        return self._rows.wants(self._number)

    def add(self, row: StepRow) -> None:
        """Keep the row of a step that was due."""
        self._rows.add(self._number, row)
        if self._every == "auto":
            now = self._now()
            self._next_at = now + (now - self._began) * (1 / SHARE - 1)

    def take(self) -> bytes:
        """Return the rows since the last call, packed."""
        return pack_rows(self._rows.take())


@dataclass
class EpochTotals:
    """Sums over the steps of one replica in one epoch."""

    loss_sum: float = 0.0
    examples: int = 0
    seconds: float = 0.0
    skipped: int = 0  # examples, with on_bad_batch="skip"
    reason: str = ""  # why the first of them was skipped
    dropped: int = 0  # examples, with drop_last

    def add(self, other: "EpochTotals") -> None:
        """Add the sums of another replica."""
        self.loss_sum += other.loss_sum
        self.examples += other.examples
        self.seconds += other.seconds
        self.skipped += other.skipped
        self.reason = self.reason or other.reason
        self.dropped += other.dropped


class BestScore(NamedTuple):
    """How far early stopping is: the best epoch, and the last one that counted."""

    best_epoch: int = -1  # none yet
    best_score: float = math.nan
    counted_epoch: int = -1  # the last one that improved by min_delta
    counted_score: float = math.nan


@dataclass(frozen=True)
class EpochReport:
    """What a replica reports at the end of an epoch, to all others and the client.

    All decisions between two epochs follow from the reports of all replicas. So all
    replicas come to the same ones, and the client does too.

    Attributes:
        digest: Checksum of what is equal on all replicas.
        seen: Examples this replica trained on in all epochs.
        totals: Of the epoch.
        exchange: What it exchanged.
        traffic: What its channel carried.
        score: Of its share of the validation data; None: it was not scored.
        unscored: Why some of that share was left out.
        scheduled: Steps of the learning rate's scheduler.
        learning_rate: Of the first parameter group.
        schedule: State of the scheduler, packed.
        best: How far early stopping was before this epoch.
        elapsed_s: Seconds since the run began.
        checkpoint: Counters of its checkpoints, see `CheckpointWriter.counters`.
    """

    digest: int = 0
    seen: int = 0
    totals: EpochTotals = field(default_factory=EpochTotals)
    exchange: ExchangeStats = field(default_factory=ExchangeStats)
    traffic: ChannelStats = field(default_factory=ChannelStats)
    score: Score | None = None
    unscored: str = ""
    scheduled: int = 0
    learning_rate: float = math.nan
    schedule: bytes = b""
    best: BestScore = field(default_factory=BestScore)
    elapsed_s: float = 0.0
    checkpoint: Mapping[str, int] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **vars(self),
            "totals": vars(self.totals),
            "exchange": vars(self.exchange),
            "traffic": vars(self.traffic),
            "score": None if self.score is None else list(self.score),
            "best": list(self.best),
        }

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> Self:
        """Read what `to_wire` returned."""
        score = fields["score"]
        return cls(
            **{
                **fields,
                "totals": EpochTotals(**fields["totals"]),
                "exchange": ExchangeStats(**fields["exchange"]),
                "traffic": ChannelStats(**fields["traffic"]),
                "score": None if score is None else Score(*score),
                "best": BestScore(*fields["best"]),
            }
        )


Reports = Sequence[EpochReport]  # of all replicas, in the order of their numbers


def reports_of(payloads: Mapping[int, Any]) -> Reports:
    """The reports at a barrier.

    Args:
        payloads: What replicas brought there, by replica.
    """
    return [EpochReport.from_wire(payloads[replica]) for replica in sorted(payloads)]


def check_trained(
    epoch: int, reports: Reports, departed: Sequence[tuple[float, int]] = ()
) -> None:
    """Refuse an epoch in which all examples were left out.

    Args:
        epoch: Counted from 0.
        reports: Of all replicas.
        departed: See `_trained`.

    Raises:
        DataError: Why the first example was left out.
    """
    totals = [report.totals for report in reports]
    skipped = sum(own.skipped for own in totals)
    dropped = sum(own.dropped for own in totals)
    if (skipped or dropped) and not _trained(reports, departed)[1]:
        why = []
        if dropped:
            why.append(
                f"drop_last=True left out {dropped} examples, as none of "
                f"{len(reports)} replicas had enough for a batch; take a smaller "
                "batch_size, fewer replicas, or drop_last=False"
            )
        if skipped:
            reason = next((own.reason for own in totals if own.reason), "")
            why.append(
                f"all {'other ' if dropped else ''}{skipped} examples were left out "
                f'(on_bad_batch="skip"), the first because {reason}'
            )
        raise DataError(f"nothing was trained on in epoch {epoch}: {'; '.join(why)}")
    scores = [report.score for report in reports if report.score is not None]
    unscored = next((report.unscored for report in reports if report.unscored), "")
    if scores and unscored and not any(score.examples for score in scores):
        raise DataError(
            "validation: nothing was scored, as all examples were left out "
            f'(on_bad_batch="skip"), the first because {unscored}'
        )


def training_loss(reports: Reports) -> float:
    """Mean over the examples of all replicas that are there.

    NaN of nothing: all who trained in the epoch may be gone.
    """
    total, examples = _trained(reports)
    return total / examples if examples else math.nan


def _trained(
    reports: Reports, departed: Sequence[tuple[float, int]] = ()
) -> tuple[float, int]:
    """Sum of the losses, and examples.

    Args:
        reports: Of the replicas that are there.
        departed: The same two of those that left, for the leases they finished.
    """
    sums = [*((r.totals.loss_sum, r.totals.examples) for r in reports), *departed]
    return sum(loss_sum for loss_sum, _ in sums), sum(count for _, count in sums)


def validation(reports: Reports) -> dict[str, float]:
    """Scores of the agreed model, by column; empty if it was not scored."""
    scores = [report.score for report in reports if report.score is not None]
    total = sum(scores[1:], start=scores[0]) if scores else None
    metrics = {} if total is None else total.metrics()
    return {f"val_{name}": value for name, value in metrics.items()}


class RowLog:
    """Makes the rows of a history, on the client and on replicas with checkpoints.

    Args:
        size: Parameters of the model.
        columns: Of the scores; NaN in epochs that were not scored.
        rows: Of the epochs before.
        now: Seconds, of a clock that never goes back.
        left_out: Examples that were in no part from the beginning.

    Attributes:
        rows: Oldest first.
    """

    rows: list[dict[str, Any]]

    def __init__(
        self,
        size: int,
        columns: Sequence[str],
        rows: Sequence[dict[str, Any]] = (),
        now: Callable[[], float] = time.perf_counter,
        left_out: int = 0,
    ) -> None:
        self.rows = list(rows)
        self._size = size
        self._columns = columns
        self._now = now
        self._left_out = left_out
        self._before = now()

    def end_epoch(
        self, epoch: int, reports: Reports, counted: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Add the row of an epoch, and return it.

        Args:
            epoch: Counted from 0.
            reports: Of all replicas.
            counted: ``"departed"``, see `_trained`, and the scheduler's counters
                ``"repeated"`` and ``"refused"``.

        Raises:
            DataError: If all examples were left out.
        """
        now = self._now()
        seconds, self._before = now - self._before, now
        departed = counted["departed"]
        check_trained(epoch, reports, departed)
        stats = [report.exchange for report in reports]
        thresholds = [s.threshold for s in stats if not math.isnan(s.threshold)]
        traffic = [report.traffic for report in reports]
        loss_sum, examples = _trained(reports, departed)
        steps = sum(s.steps for s in stats)
        exchanges = sum(s.exchanges for s in stats)
        waits: Counter[str] = Counter()
        for carried in traffic:
            waits.update(carried.waits_s)
        # The replica whose schedule is farthest: the others go on from there.
        farthest = max(reports, key=lambda r: r.scheduled, default=EpochReport())
        row = {
            "epoch": epoch,
            "loss": loss_sum / examples if examples else math.nan,
            "examples": examples,
            "seconds": seconds,
            "examples_per_s": examples / seconds,
            "density": sum(s.density_sum for s in stats) / max(exchanges, 1),
            "threshold": mean(thresholds),
            "learning_rate": farthest.learning_rate,
            "sent_bytes": sum(t.sent_bytes for t in traffic),
            "received_bytes": sum(t.received_bytes for t in traffic),
            "dense_bytes": 4 * self._size * exchanges,
            "staleness": sum(s.lead_sum for s in stats) / max(steps, 1),
            "waits": dict(waits),
            "clipped": sum(s.clipped for s in stats),
            "replicas": len(reports),
            "repeated_pieces": counted["repeated"],
            "skipped_examples": self._left_out + sum(r.totals.skipped for r in reports),
            "refused_messages": counted["refused"] + sum(t.refused for t in traffic),
            "repaired_updates": sum(t.repaired for t in traffic),
            "withheld": sum(t.withheld for t in traffic),
            "folds": sum(t.folds for t in traffic),
        }
        row.update(dict.fromkeys(self._columns, math.nan))
        row.update(validation(reports))
        self.rows.append(row)
        return row
