"""The activities of each replica of a fit, as spans of time.

Recording an activity takes half a microsecond. Neighboring spans are merged into few,
which keeps the sums of seconds.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from daskdl.errors import count_of

ACTIVITIES: Mapping[str, str] = {
    "compute": "forward pass, backward pass and optimizer",
    "exchange": "finding, packing and publishing entries, applying the updates of "
    "other replicas, and agreeing with them",
    "data": "leasing rows, and cutting and transforming batches",
    "callbacks": "callbacks that run on workers",
    "validation": "scoring the validation data",
    "checkpoint": "copying the state for a checkpoint",
    "setup": "building the model, and restoring its state",
    "other": "reports and decisions between epochs",
    "wait_staleness": "waiting for a replica that is max_staleness steps behind",
    "wait_room": "waiting until the last update is passed on, with max_staleness=0 or "
    "before the whole residual is sent",
    "wait_lease": "waiting for a lease; at the end of an epoch, for leases of others",
    "wait_gather": "waiting for the slowest replica, at a barrier",
    "wait_fetch": "waiting for the sums of other replicas, in parameter averaging",
    "wait_flush": "waiting until the last update is passed on, at the end of an epoch",
    "wait_updates": "waiting for updates in flight, at the end of an epoch",
    "wait_checkpoint": "waiting until a checkpoint is written or read",
    "wait_data": "waiting until a part is loaded, computed or moved",
    "wait_missing": "waiting for a part that was lost with its worker",
    "wait_repair": "waiting for updates that other replicas have, after a loss",
    "wait_join": "waiting for the other replicas at the start, or to join",
    "wait_snapshot": "waiting for the state of another replica, when joining",
    "wait_activate": "waiting for the end of a barrier, when joining",
}
SPAN_COLUMNS: Mapping[str, str] = {
    "replica": "number of the replica",
    "start": "start of the span, in seconds since the fit began",
    "end": "end of the span, in seconds since the fit began",
} | {name: f"seconds of {what}" for name, what in ACTIVITIES.items()}

# Layout of packed spans: little-endian, no padding; times are Unix times.
SPANS = np.dtype(
    [("replica", "<i4"), ("start", "<f8"), ("end", "<f8")]
    + [(name, "<f4") for name in ACTIVITIES]
)
Spans = NDArray[np.void]

MAX_REPORTED = 256  # spans of one replica between two reports: 29 KB
MAX_SPANS = 32_768  # of all replicas: 3.7 MB
MIN_SPAN_S = 1e-3  # shorter activities are always merged


def merged(spans: Spans, width_s: float) -> Spans:
    """Merge the spans of a replica that start in the same interval of this width.

    The spans are ordered by replica and start. Spans of at least this width are kept.
    """
    if not len(spans):
        return spans
    long = spans["end"] - spans["start"] >= width_s
    begins = np.ones(len(spans), bool)
    begins[1:] = long[1:] | long[:-1] | (np.diff(spans["replica"]) != 0)
    begins[1:] |= np.diff(np.floor(spans["start"] / width_s)) != 0
    starts = np.flatnonzero(begins)
    fewer = spans[starts]
    fewer["end"] = spans["end"][np.append(starts[1:], len(spans)) - 1]
    for name in ACTIVITIES:
        fewer[name] = np.add.reduceat(spans[name], starts)
    return fewer


def bounded(spans: Spans, most: int, width_s: float) -> tuple[Spans, float]:
    """Merge spans until at most `most` are left, or one for each replica.

    Returns:
        The spans, ordered by replica and start, and the width of the last merge.
    """
    spans = spans[np.lexsort((spans["start"], spans["replica"]))]
    most = max(most, len(np.unique(spans["replica"])))
    while len(spans) > most:
        width_s *= 2
        spans = merged(spans, width_s)
    return spans, width_s


class SpanLog:
    """Records the activities of one replica, from now on without gaps.

    An activity shorter than the current width shares a span with its neighbors; a
    longer activity has its own span. The width grows with the recorded time, so a
    replica reports few spans, however long it trains.
    """

    def __init__(
        self,
        replica: int,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._replica = replica
        self._now = now
        self._began = self._start = self._since = now()
        self._offset = wall() - self._began
        self._activity = "setup"
        self._seconds = dict.fromkeys(ACTIVITIES, 0.0)  # since `_start`
        self._width = MIN_SPAN_S
        self._spans: list[tuple[float, ...]] = []

    def enter(self, activity: str) -> float:
        """End the current activity and begin another; return the time."""
        now = self._now()
        spent, width = now - self._since, self._width
        if spent >= width or now - self._start >= width:
            self._end_activity(now)
        else:
            self._seconds[self._activity] += spent
            self._since = now
        self._activity = activity
        return now

    def wait(self, cause: str, started: float, ended: float) -> None:
        """Record a wait within the current activity, which continues afterwards."""
        activity = self._activity
        self._end_activity(started)
        self._activity = f"wait_{cause}"
        self._end_activity(ended)
        self._activity = activity

    def _end_activity(self, now: float) -> None:
        spent = now - self._since
        if spent >= self._width:
            self._end_span(self._since)
        self._seconds[self._activity] += spent
        if now - self._start >= self._width:
            self._end_span(now)
        self._since = now

    def _end_span(self, now: float) -> None:
        if now <= self._start:
            return
        start, end = self._start + self._offset, now + self._offset
        self._spans.append((self._replica, start, end, *self._seconds.values()))
        self._seconds = dict.fromkeys(ACTIVITIES, 0.0)
        self._start = now
        if len(self._spans) > MAX_REPORTED:
            spans = np.array(self._spans, SPANS)
            spans, self._width = bounded(spans, MAX_REPORTED // 2, self._width)
            self._spans = spans.tolist()

    def take(self) -> bytes:
        """Return the packed spans since the last call."""
        self._end_activity(self._now())
        self._end_span(self._since)
        taken, self._spans = self._spans, []
        recorded_s = self._since - self._began
        self._width = max(self._width, recorded_s / MAX_REPORTED)
        return np.array(taken, SPANS).tobytes()


class Timeline(Sequence[Mapping[str, Any]]):
    """The activities of each replica; a sequence of mappings, one per span of time.

    Every row has the keys of :data:`SPAN_COLUMNS`. Rows are ordered by replica and
    start. A long activity has its own row; consecutive shorter activities share a row,
    which has the seconds of each. The timeline holds at most 32,768 rows: beyond that,
    neighboring rows are merged, which keeps the sums of seconds.

    Example:
        >>> log = SpanLog(replica=0)
        >>> _ = log.enter("compute")
        >>> timeline = Timeline()
        >>> timeline.extend(log.take())
        >>> sorted(timeline.seconds(replica=0))
        ['compute', 'setup']
    """

    def __init__(self, began: float = 0.0) -> None:
        self.began = began  # Unix time of the beginning of the fit
        self._parts = [np.zeros(0, SPANS)]
        self._count = 0
        self._width = MIN_SPAN_S

    def extend(self, packed: bytes, layout: np.dtype[Any] = SPANS) -> None:
        """Add spans of any replicas, packed by :class:`SpanLog`.

        Args:
            packed: Any number of spans.
            layout: Layout of the spans. If another release packed them, missing
                activities take no time, and unknown activities are ignored.
        """
        spans = np.frombuffer(packed, layout)
        if layout != SPANS:
            if not {"replica", "start", "end"} <= set(layout.names or ()):
                raise ValueError(
                    f"spans must have replica, start and end, got {layout.names}"
                )
            saved, spans = spans, np.zeros(len(spans), SPANS)
            for name in SPAN_COLUMNS.keys() & set(layout.names or ()):
                spans[name] = saved[name]
        self._parts.append(spans)
        self._count += len(spans)
        if self._count > MAX_SPANS:
            self._merged()

    def _merged(self) -> Spans:
        """Return all spans in one array; merge spans if there are too many."""
        if len(self._parts) > 1:
            spans = np.concatenate(self._parts)
            spans, self._width = bounded(spans, MAX_SPANS, self._width)
            self._parts, self._count = [spans], len(spans)
        return self._parts[0]

    def packed(self) -> bytes:
        """Return all spans, packed."""
        return self._merged().tobytes()

    @property
    def replicas(self) -> list[int]:
        """Replicas with at least one span, in ascending order."""
        numbers: list[int] = np.unique(self._merged()["replica"]).tolist()
        return numbers

    def seconds(self, replica: int | None = None) -> dict[str, float]:
        """Return the seconds of each activity that occurred.

        Args:
            replica: Number of a replica; None for the sum over all replicas.
        """
        spans = self._merged()
        if replica is not None:
            spans = spans[spans["replica"] == replica]
        sums = {name: float(spans[name].sum(dtype=np.float64)) for name in ACTIVITIES}
        return {name: seconds for name, seconds in sums.items() if seconds > 0}

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`; needs pandas."""
        import pandas as pd

        spans = self._merged()
        columns = {name: spans[name] for name in SPAN_COLUMNS}
        columns["start"] = columns["start"] - self.began
        columns["end"] = columns["end"] - self.began
        return pd.DataFrame(columns)

    @override
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = dict(zip(SPAN_COLUMNS, self._merged()[index].item(), strict=True))
        row["start"] -= self.began
        row["end"] -= self.began
        return row

    @override
    def __len__(self) -> int:
        return len(self._merged())

    @override
    def __repr__(self) -> str:
        replicas = count_of(len(self.replicas), "replica")
        return f"Timeline({count_of(len(self), 'span')} of {replicas})"
