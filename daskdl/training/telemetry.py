"""Measurements of replicas and the rows of the history made from them.

This module samples steps and layers, and sends and aggregates epoch reports.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, NamedTuple, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from daskdl.callbacks import LayerMonitor
from daskdl.channel.base import ChannelStats
from daskdl.channel.protocol import TrainedWork
from daskdl.compression.compressor import Sample
from daskdl.compression.flat import working_dtype
from daskdl.errors import DataError, count_of
from daskdl.evaluation.evaluate import Score, Sums, add_sums, means
from daskdl.observe.history import COLUMNS, History
from daskdl.observe.tables import (
    BINS,
    LayerRow,
    StepRow,
    Thinned,
    pack_rows,
    unpack_rows,
)
from daskdl.observe.timeline import SpanLog
from daskdl.training.base import ExchangeStats

# Residuals sampled for one row. Ten of them are above the highest percentile.
SAMPLE = 1024
PERCENTILES = (50, 90, 99)


def mean(thresholds: Sequence[float]) -> float:
    """Return the mean; NaN of no thresholds."""
    return math.fsum(thresholds) / len(thresholds) if thresholds else math.nan


def spread_of(samples: Iterable[Sample]) -> list[float]:
    """Estimate the norm of a residual, and its percentiles relative to the thresholds.

    Args:
        samples: Samples of all parameter groups. Residuals with a NaN threshold count
            only towards the norm.

    Returns:
        The Euclidean norm, parameter units, and the :data:`PERCENTILES` of
        |residual| / threshold, with equal weight per parameter; NaN without thresholds.

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


# Rows between two reports: 39 KB at most.
MAX_ROWS = 256
# With "auto": least steps between two rows, and the fraction of time that making rows
# may take. The documented fraction is twice as large: the clock misses some work.
SPACING = 10
TIME_FRACTION = 0.005


class StepLog:
    """Chooses the steps of one replica that get a row, and collects the rows.

    Args:
        every: Steps between rows: steps divisible by it get one. With ``"auto"``, the
            first step and then at most one in ten, limited to a fraction of the time.
            None: no rows.
        now: Returns seconds of a monotonic clock.

    Example:
        >>> log = StepLog(every=5)
        >>> [step for step in range(1, 16) if log.begin_row(step)]
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
        self._rows: Thinned[StepRow] = Thinned(MAX_ROWS)
        self._number = 0  # number of this replica's last row
        self.next_step = math.inf if every is None else 1
        self._began = 0.0
        self._next_at = -math.inf

    def begin_row(self, step: int, exchange_tried: bool = True) -> bool:
        """Return whether a step gets a row; if so, `add` must follow.

        Args:
            step: Number of the step on this replica, from 1.
            exchange_tried: Whether the step ended with an exchange; with ``"auto"``,
                only such steps get rows.
        """
        if self._every is None or step < self.next_step:
            return False
        if self._every != "auto":
            self._number, remainder = divmod(step, self._every)
            self.next_step = step - remainder + self._every
            return remainder == 0 and self._rows.wants(self._number)
        if not exchange_tried:
            return False
        self.next_step = step + SPACING
        self._began = self._now()
        if self._began < self._next_at:
            return False
        self._number += 1
        return self._rows.wants(self._number)

    def add(self, row: StepRow) -> None:
        """Add the row of a step that was due."""
        self._rows.add(self._number, row)
        if self._every == "auto":
            now = self._now()
            self._next_at = now + (now - self._began) * (1 / TIME_FRACTION - 1)

    def take(self) -> bytes:
        """Return the packed rows since the last call."""
        return pack_rows(self._rows.take())


def norm_of(values: Tensor) -> float:
    """Return the Euclidean norm of a vector.

    A float32 sum of all squares at once loses digits: 0.3 % of 50 million equal values.
    """
    parts = [torch.linalg.vector_norm(part) for part in torch.split(values, 2**16)]
    return float(torch.linalg.vector_norm(torch.stack(parts)))


# Larger values have no bin: float32 has no room for the distance of two of them.
MAX_VALUE = 1e37


def measured(tensor: Tensor | None) -> tuple[float, float, float, bytes]:
    """Return the norm, the bounds and the packed counts of a tensor's values.

    Example:
        >>> norm, low, high, counts = measured(torch.tensor([3.0, -4.0]))
        >>> norm, low, high, np.frombuffer(counts, "<i4").tolist()[::19]
        (5.0, -4.0, 3.0, [1, 1])
    """
    norm = low = high = math.nan
    counts = torch.zeros(BINS, dtype=torch.int32)
    if tensor is not None:
        dense = tensor.detach().to_dense()
        values = dense.to(working_dtype(dense.dtype)).flatten()
        norm = norm_of(values)
        values = values[values.abs() <= MAX_VALUE]
        if len(values):
            low, high = map(float, values.aminmax())
            width = (high - low) / BINS or 1.0
            places = ((values - low) / width).long().clamp_(0, BINS - 1)
            counts = torch.bincount(places, minlength=BINS).int().cpu()
    return norm, low, high, counts.numpy().astype("<i4").tobytes()


# Rows of layers between two reports: 184 KB, or one sample.
MAX_LAYER_ROWS = 512


class LayerLog:
    """Samples the parameters of one replica, their gradients and their updates.

    Args:
        replica: Number of the replica.
        rule: Chooses the steps; None: no step.
    """

    def __init__(self, replica: int, rule: LayerMonitor | None) -> None:
        self._replica = replica
        self._rule = rule
        self._parameters: dict[str, nn.Parameter] = {}
        self._measured: list[tuple[Any, ...]] = []  # in the current step
        self._samples: Thinned[list[LayerRow]] = Thinned(1)

    def watch(self, module: nn.Module) -> None:
        """Set the module to sample; its trainable parameters are those of now."""
        named = module.named_parameters()
        self._parameters = {n: p for n, p in named if p.requires_grad}
        self._samples = Thinned(max(1, MAX_LAYER_ROWS // len(self._parameters)))

    def due(self, step: int) -> bool:
        """Whether to sample a step; if so, `measuring` and `add` must follow."""
        rule = self._rule
        if rule is None or not rule.due(step):
            return False
        return self._samples.wants(step // rule.every)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Context manager around the optimizer step."""
        parameters = self._parameters.values()
        before = [parameter.detach().clone() for parameter in parameters]
        yield
        self._measured = []
        for parameter, former in zip(parameters, before, strict=True):
            # In half types, rounding the difference would lose digits.
            dtype = working_dtype(parameter.dtype)
            update = parameter.detach().to(dtype) - former.to(dtype)
            tensors = (parameter, parameter.grad, update)
            self._measured.append(tuple(chain.from_iterable(map(measured, tensors))))

    def add(self, epoch: int, step: int, residuals: Mapping[str, float]) -> None:
        """Add the sample of a step that was due."""
        assert self._rule is not None, "a step was due"
        rows = []
        for i, (name, numbers) in enumerate(
            zip(self._parameters, self._measured, strict=True)
        ):
            residual = residuals.get(name, math.nan)
            where = (epoch, step, self._replica, i)
            rows.append(LayerRow._make((*where, *numbers, residual)))
        self._samples.add(step // self._rule.every, rows)

    def take(self) -> bytes:
        """Return the packed rows since the last call."""
        samples = self._samples.take()
        return pack_rows([(number, row) for number, rows in samples for row in rows])


def telemetry_of(steps: StepLog, layers: LayerLog, spans: SpanLog) -> bytes:
    """Pack what the logs have recorded since the last call.

    The rows of steps, and those of layers, after their length in eight bytes; then the
    spans.
    """
    rows = [steps.take(), layers.take()]
    sized = b"".join(len(part).to_bytes(8, "little") + part for part in rows)
    return sized + spans.take()


def add_telemetry(history: History, packed: bytes) -> None:
    """Add the result of `telemetry_of` to a history."""
    layers = 8 + int.from_bytes(packed[:8], "little")
    spans = layers + 8 + int.from_bytes(packed[layers : layers + 8], "little")
    history.steps.extend(unpack_rows(packed[8:layers], StepRow))
    history.layers.extend(unpack_rows(packed[layers + 8 : spans], LayerRow))
    history.timeline.extend(packed[spans:])


@dataclass
class EpochTotals:
    """Sums over the steps of one replica in one epoch."""

    loss_sum: float = 0.0
    examples: int = 0
    seconds: float = 0.0
    skipped: int = 0  # examples, with on_bad_batch="skip"
    reason: str = ""  # why the first example was skipped
    dropped: int = 0  # examples, with drop_last
    logs: Sums = field(default_factory=dict)  # what a step logs
    stop: str = ""  # why a callback has stopped the fit; empty: none has
    excess: float = 0.0  # weight of the losses in their mean minus `examples`

    @property
    def loss(self) -> float:
        """The mean loss; NaN if no label counts."""
        weight = self.examples + self.excess
        return self.loss_sum / weight if weight else math.nan

    def to_wire(self) -> TrainedWork:
        """Return the sums as plain values."""
        sums = {"loss_sum": float(self.loss_sum), "excess": float(self.excess)}
        return cast(TrainedWork, {**vars(self), **sums})

    def add(self, totals: "EpochTotals") -> None:
        """Add the sums of another replica in place."""
        self.loss_sum += totals.loss_sum
        self.examples += totals.examples
        self.seconds += totals.seconds
        self.skipped += totals.skipped
        self.reason = self.reason or totals.reason
        self.dropped += totals.dropped
        self.logs = add_sums(self.logs, totals.logs)
        self.stop = self.stop or totals.stop
        self.excess += totals.excess


class BestScore(NamedTuple):
    """Progress of early stopping: the best epoch, and the last that reset patience."""

    best_epoch: int = -1  # -1: none yet
    best_score: float = math.nan
    counted_epoch: int = -1  # last epoch that improved by min_delta
    counted_score: float = math.nan


@dataclass(frozen=True)
class EpochReport:
    """A replica's report at the end of an epoch, sent to all replicas and the client.

    All decisions between two epochs depend only on the reports of all replicas, so
    replicas and the client agree on them.

    Attributes:
        digest: Checksum of the state that is equal on all replicas.
        seen: Examples this replica has trained on, over all epochs.
        totals: Sums over the steps of the epoch.
        exchange: Counters of the exchange.
        traffic: Counters of the channel.
        score: Score on this replica's share of the validation data; None: not scored.
        unscored: Why examples of this share were left out.
        scheduled: Steps of the learning rate scheduler.
        learning_rate: Learning rate of the first parameter group.
        schedule: Packed state of the scheduler.
        best: Progress of early stopping before this epoch.
        elapsed_s: Seconds since the fit began.
        checkpoint: Counters of checkpoints, see `CheckpointWriter.counters`.
        measured: Packed states of metrics on this replica's share, see `sent_states`;
            empty: there are none.
        present: Whether the replica reported. Else it is gone, and the totals and
            scores are those of the leases that it had finished.
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
    measured: bytes = b""
    present: bool = True

    def to_wire(self) -> dict[str, Any]:
        """Return the report as plain values."""
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
        """Create from the result of `to_wire`."""
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


# One per replica, by replica number; then what gone replicas had finished.
Reports = Sequence[EpochReport]


def reports_of(
    payloads: Mapping[int, Any], departed: Iterable[Mapping[str, Any]] = ()
) -> Reports:
    """Read the reports of a barrier, and the work by phase of gone replicas."""
    present = [EpochReport.from_wire(payloads[replica]) for replica in sorted(payloads)]
    return [*present, *map(_report_of_departed, departed)]


def _report_of_departed(work: Mapping[str, Any]) -> EpochReport:
    report = EpochReport(totals=EpochTotals(**work.get("train", {})), present=False)
    if "validation" not in work:
        return report
    scored = work["validation"]
    return replace(report, **{**scored, "score": Score(*scored["score"])})


def check_trained(epoch: int, reports: Reports) -> None:
    """Raise an error if all examples of an epoch were left out."""
    totals = [report.totals for report in reports]
    skipped = sum(total.skipped for total in totals)
    dropped = sum(total.dropped for total in totals)
    if (skipped or dropped) and not sum(total.examples for total in totals):
        why = []
        if dropped:
            why.append(
                f"drop_last=True left out {count_of(dropped, 'example')}, as none of "
                f"{count_of(len(reports), 'replica')} had enough for a batch; take a "
                "smaller batch_size, fewer replicas, or drop_last=False"
            )
        if skipped:
            reason = next((total.reason for total in totals if total.reason), "")
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
    """Return the mean loss of an epoch; NaN if no label of its examples counts."""
    totals = EpochTotals()
    for report in reports:
        totals.add(report.totals)
    return totals.loss


def validation(reports: Reports) -> dict[str, float]:
    """Return scores of the agreed model, by column; empty if it was not scored."""
    scores = [report.score for report in reports if report.score is not None]
    total = sum(scores[1:], start=scores[0]) if scores else None
    metrics = {} if total is None else total.metrics()
    payloads = [report.measured for report in reports if report.measured]
    if payloads:
        # Loads torchmetrics, with SciPy and matplotlib.
        from daskdl.evaluation.metric_state import measured

        metrics |= measured(payloads)
    return {f"val_{name}": value for name, value in metrics.items()}


def columns_of(reports: Reports) -> dict[str, Any]:
    """Return the columns of an epoch that follow from the reports alone.

    Replicas and the client agree on them; `daskdl.observe.history.NOT_AGREED` lists the
    other columns.
    """
    stats = [report.exchange for report in reports]
    thresholds = [s.threshold for s in stats if not math.isnan(s.threshold)]
    traffic = sum((report.traffic for report in reports), start=ChannelStats())
    steps = sum(s.steps for s in stats)
    exchanges = sum(s.exchanges for s in stats)
    # The replica with the most scheduler steps: the others continue from its state.
    farthest = max(reports, key=lambda r: r.scheduled, default=EpochReport())
    logs: Sums = {}
    for report in reports:
        logs = add_sums(logs, report.totals.logs)
    return {
        "loss": training_loss(reports),
        "examples": sum(report.totals.examples for report in reports),
        "density": sum(s.density_sum for s in stats) / max(exchanges, 1),
        "threshold": mean(thresholds),
        "learning_rate": farthest.learning_rate,
        "rate_factor": 1 + sum(s.rate_rise_sum for s in stats) / max(steps, 1),
        "sent_bytes": traffic.sent_bytes,
        "received_bytes": traffic.received_bytes,
        "staleness": sum(s.lead_sum for s in stats) / max(steps, 1),
        "clipped": sum(s.clipped for s in stats),
        "replicas": sum(report.present for report in reports),
        "repaired_updates": traffic.repaired,
        "withheld": traffic.withheld,
        "folds": traffic.folds,
        **means(logs),
        **validation(reports),
    }


class RowLog:
    """Makes the rows of a history, on the client and on replicas with checkpoints."""

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
        """Add the row of an epoch, and return it."""
        now = self._now()
        seconds, self._before = now - self._before, now
        check_trained(epoch, reports)
        traffic = sum((report.traffic for report in reports), start=ChannelStats())
        exchanges = sum(report.exchange.exchanges for report in reports)
        columns = columns_of(reports)
        columns |= {
            "epoch": epoch,
            "seconds": seconds,
            "examples_per_s": columns["examples"] / seconds,
            "dense_bytes": 4 * self._size * exchanges,
            "waits": traffic.waits_s,
            "repeated_pieces": counted["repeated"],
            "skipped_examples": self._left_out + sum(r.totals.skipped for r in reports),
            "refused_messages": counted["refused"] + traffic.refused,
        }
        row = {name: columns[name] for name in COLUMNS}
        # Logs come before validation scores, which not every epoch has.
        logs = {n: v for n, v in columns.items() if not n.startswith("val_")}
        row = {**row, **logs, **dict.fromkeys(self._columns, math.nan), **columns}
        self.rows.append(row)
        return row
