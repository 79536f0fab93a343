"""What an exchange does, in one step and in one epoch: counts and times.

The exchange says what it does; what becomes of that is here. No channel, no clock of
its own.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

import numpy as np

from daskdl import codec
from daskdl.compression.compressor import Frame, Sample
from daskdl.training.statistics import Exchanged, Statistics

# Residuals looked at for one row. Ten of them are above the highest percentile.
SAMPLE = 1024
PERCENTILES = (50, 90, 99)


class Stopwatch:
    """Adds up the times spent inside of it; a context manager, not nested in itself.

    Example:
        >>> stopwatch = Stopwatch(now=iter([1.0, 1.5, 3.0, 3.25]).__next__)
        >>> for _ in range(2):
        ...     with stopwatch:
        ...         pass
        >>> stopwatch.seconds
        0.75
    """

    seconds: float

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._since = self._now()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.seconds += self._now() - self._since


class Observer:
    """Counts and times of one exchange.

    Args:
        now: Seconds, of a clock that never goes back.

    Attributes:
        waiting: Times the waits of this step.
        encoding: Times what is done in this step to send something.
        applying: Times what is done in this step with what others sent.
    """

    waiting: Stopwatch
    encoding: Stopwatch
    applying: Stopwatch

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.waiting, self.encoding, self.applying = (Stopwatch(now) for _ in range(3))
        self._clear()
        self.begin_step()

    def _clear(self) -> None:
        self._exchanges = self._steps = self._lead_sum = 0
        self._density_sum = 0.0

    def begin_step(self) -> None:
        """A step begins; also that which follows what is sent between two steps."""
        for stopwatch in (self.waiting, self.encoding, self.applying):
            stopwatch.seconds = 0.0
        self._lead = 0
        self._density = math.nan
        self._frames: Sequence[Frame] = ()

    def leads(self, lead: int) -> None:
        """The replica is so many steps ahead of the slowest, and makes one more."""
        self._lead = lead
        self._lead_sum += lead
        self._steps += 1

    def exchanged(self, density: float, frames: Sequence[Frame]) -> None:
        """An exchange was made.

        Args:
            density: Of all of it.
            frames: That were published; they are not copied.
        """
        self._exchanges += 1
        self._density_sum += density
        self._density, self._frames = density, frames

    def statistics(self, thresholds: Sequence[float], clipped: float) -> Statistics:
        """What was done since the last call.

        Args:
            thresholds: The last ones.
            clipped: Mass removed by clipping meanwhile.
        """
        now = Statistics(
            self._exchanges,
            self._density_sum,
            mean(thresholds),
            clipped,
            self._lead_sum,
            self._steps,
        )
        self._clear()
        return now

    def step(self, samples: Sequence[Sample]) -> Exchanged:
        """What was done in this step.

        Args:
            samples: Of what it left.
        """
        thresholds = [s.threshold for s in samples if not math.isnan(s.threshold)]
        largest = max(self._frames, key=len, default=None)
        norm, p50, p90, p99 = spread_of(samples)
        return Exchanged(
            threshold=mean(thresholds),
            density=self._density,
            sent_bytes=sum(frame.nbytes for frame in self._frames),
            kind=None if largest is None else codec.read_kind(largest.data).name,
            residual_norm=norm,
            residual_p50=p50,
            residual_p90=p90,
            residual_p99=p99,
            staleness=self._lead,
            wait_s=self.waiting.seconds,
            encode_s=self.encoding.seconds,
            apply_s=self.applying.seconds,
        )


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
