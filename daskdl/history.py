"""The record of a fit: a row per epoch, a sample of steps, and early stopping.

Replicas send step rows in packed form; beyond a bound the rows are thinned evenly.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from typing_extensions import override

Reason = Literal["not_finite", "target", "patience", "max_seconds"]


@dataclass(frozen=True)
class Stopping:
    """The record of :class:`~daskdl.EarlyStopping` in a fit; `history.stopping`.

    Attributes:
        monitor: The name of the score.
        reason: Why the fit ended before its last epoch: the score was
            ``"not_finite"`` or reached the ``"target"``, ``"patience"`` was used up, or
            ``"max_seconds"`` had passed. None: early stopping did not end the fit.
        details: The reason as text; empty without a reason.
        scores: Score of each checked epoch, by epoch, from 0.
        best_epoch: The epoch with the best score; None: no score was finite.
        best_score: Score of the best epoch; NaN without one.
        restored: Whether the fit returned the model of the best epoch.
    """

    monitor: str
    reason: Reason | None = None
    details: str = ""
    scores: Mapping[int, float] = field(default_factory=dict)
    best_epoch: int | None = None
    best_score: float = math.nan
    restored: bool = False


Row = Mapping[str, Any]

# About 600 bytes of memory per row, 12 MB in total.
MOST_ROWS = 20_000

STEP_COLUMNS: Mapping[str, str] = {
    "epoch": "counted from 0",
    "step": "number of the step in this replica, counted from 1",
    "replica": "number of the replica",
    "loss": "mean over the rows of this step",
    "learning_rate": "rate of the first parameter group in this step",
    "threshold": "threshold of the last exchange, mean over patterns, parameter units",
    "density": "parameters sent in this step / parameters; 1: sent whole; NaN: "
    "no exchange",
    "sent_bytes": "bytes of the frames published in this step",
    "kind": "kind of the largest of these frames; None: nothing was sent",
    "residual_norm": "Euclidean norm of the residual, parameter units; "
    "estimated from a sample",
    "residual_p50": "median of abs(residual) / threshold",
    "residual_p90": "90th percentile of abs(residual) / threshold",
    "residual_p99": "99th percentile of abs(residual) / threshold",
    "staleness": "steps ahead of the slowest replica when the step began; a "
    "lower bound",
    "wait_s": "seconds waited for other replicas, because of max_staleness or for room",
    "encode_s": "seconds for finding, packing and publishing entries",
    "apply_s": "seconds for applying the updates of others",
    "step_s": "seconds for the whole step, including these",
}


class StepRow(NamedTuple):
    """One step of one replica; see :data:`STEP_COLUMNS`."""

    epoch: int
    step: int
    replica: int
    loss: float
    learning_rate: float = math.nan
    threshold: float = math.nan
    density: float = math.nan
    sent_bytes: int = 0
    kind: str | None = None
    residual_norm: float = math.nan
    residual_p50: float = math.nan
    residual_p90: float = math.nan
    residual_p99: float = math.nan
    staleness: int = 0
    wait_s: float = 0.0
    encode_s: float = 0.0
    apply_s: float = 0.0
    step_s: float = 0.0


T = TypeVar("T")


class Thinned(Generic[T]):
    """A bounded, evenly thinned sequence of numbered rows, in order of arrival.

    Beyond `most` rows, only rows with even numbers are kept, then only every fourth
    number, then every eighth, and so on. Rows with equal numbers are kept or dropped
    together.

    Attributes:
        numbered: The rows with their numbers.

    Example:
        >>> thinned = Thinned(most=3)
        >>> for number in range(1, 10):
        ...     thinned.add(number, StepRow(0, number, replica=0, loss=0.5))
        >>> [number for number, _ in thinned.numbered]
        [4, 8]
    """

    numbered: list[tuple[int, T]]

    def __init__(self, most: int) -> None:
        self.numbered = []
        self._most = most
        self._stride = 1

    def wants(self, number: int) -> bool:
        """Whether a row with this number would be kept."""
        return number % self._stride == 0

    def add(self, number: int, row: T) -> None:
        """Add a row, unless its number is thinned out."""
        if not self.wants(number):
            return
        self.numbered.append((number, row))
        while len(self.numbered) > self._most:
            self._stride *= 2
            self.numbered = [kept for kept in self.numbered if self.wants(kept[0])]

    def take(self) -> list[tuple[int, T]]:
        """Remove and return all rows with their numbers; keep the stride."""
        taken, self.numbered = self.numbered, []
        return taken


# Wire layout of a row: little-endian, no padding. The scheduler never unpacks rows.
_FIELD = {int: "<i8", float: "<f8", str | None: "S8"}
LAYOUT = np.dtype(
    [("number", "<i8")] + [(n, _FIELD[t]) for n, t in StepRow.__annotations__.items()]
)


def pack_rows(numbered: Sequence[tuple[int, StepRow]]) -> bytes:
    """Pack rows and their numbers, 152 bytes per row.

    Example:
        >>> row = StepRow(epoch=0, step=10, replica=1, loss=0.5, kind="GAPS")
        >>> len(pack_rows([(1, row)])), unpack_rows(pack_rows([(1, row)]))[0][0]
        (152, 1)
    """
    packed = [
        (number, *row._replace(kind=(row.kind or "").encode()))  # type: ignore[arg-type]
        for number, row in numbered
    ]
    return np.array(packed, LAYOUT).tobytes()


def unpack_rows(
    packed: bytes, layout: np.dtype[Any] = LAYOUT
) -> list[tuple[int, StepRow]]:
    """Unpack rows from :func:`pack_rows`.

    Args:
        packed: A whole number of rows.
        layout: Layout of the rows, perhaps of another release: missing columns get
            their defaults, and unknown columns are ignored.
    """
    names = layout.names or ()
    if "number" not in names:
        raise ValueError(f"rows of steps need their numbers, got {names}")
    columns = {name: i for i, name in enumerate(names) if name in StepRow._fields}
    rows = []
    try:
        at = names.index("number")
        for values in np.frombuffer(packed, layout).tolist():
            row = StepRow(**{name: values[i] for name, i in columns.items()})
            kind: Any = row.kind
            rows.append((values[at], row._replace(kind=kind.decode() or None)))
    except (TypeError, AttributeError) as error:
        raise ValueError(f"rows of {names} are none of steps: {error}") from error
    return rows


class StepTable(Sequence[Row]):
    """A sample of the steps of all replicas; a sequence of mappings.

    Every row has the keys of :data:`STEP_COLUMNS`. The rows of an epoch are added when
    the epoch ends, in ascending order of replica. The table holds at most 20,000 rows:
    beyond that, it drops every second row of each replica, among new rows too.

    Example:
        >>> table = StepTable()
        >>> table.extend([(1, StepRow(0, 10, 0, 0.5)), (2, StepRow(0, 20, 0, 0.25))])
        >>> table[-1]["step"], table.column("loss")
        (20, [0.5, 0.25])
    """

    def __init__(self) -> None:
        self._rows: Thinned[StepRow] = Thinned(MOST_ROWS)

    def extend(self, numbered: Iterable[tuple[int, StepRow]]) -> None:
        """Add rows, each with its number within its replica."""
        for number, row in numbered:
            self._rows.add(number, row)

    def packed(self) -> bytes:
        """Return the rows and their numbers, packed by :func:`pack_rows`."""
        return pack_rows(self._rows.numbered)

    def column(self, name: str) -> list[Any]:
        """Return one column over all rows."""
        if name not in STEP_COLUMNS:
            raise KeyError(name)
        return [getattr(row, name) for _, row in self._rows.numbered]

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`; needs pandas."""
        import pandas as pd

        rows = [row for _, row in self._rows.numbered]
        return pd.DataFrame(rows, columns=list(STEP_COLUMNS))

    @override
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._rows.numbered[index][1]._asdict()

    @override
    def __len__(self) -> int:
        return len(self._rows.numbered)

    @override
    def __repr__(self) -> str:
        return f"StepTable({len(self)} rows)"


COLUMNS: Mapping[str, str] = {
    "epoch": "counted from 0",
    "loss": "mean training loss, weighted by examples",
    "examples": "examples trained on, by all replicas",
    "seconds": "from the end of the previous epoch to the end of this one",
    "examples_per_s": "examples / seconds",
    "density": "parameters sent / parameters, mean over exchanges and "
    "replicas; 1: sent whole",
    "threshold": "mean of the replicas' (and patterns') last thresholds, "
    "parameter units",
    "learning_rate": "rate of the first parameter group at the end of the epoch",
    "rate_factor": "factor on it with Adam and its kind, mean over steps",
    "sent_bytes": "bytes of updates, of residuals sent to compare models, and of "
    "averaged buffers, by all replicas",
    "received_bytes": "bytes of the same received, by all replicas",
    "dense_bytes": "bytes that sending every update whole would have taken",
    "shared_loss": "loss of shared at the end of the epoch, on a few training batches "
    "of each replica; NaN: no other model was considered",
    "delivered_loss": "the same for shared plus all residuals; estimated if they were "
    "not sent",
    "delivered": "whether training continued from shared plus all residuals",
    "staleness": "steps ahead of the slowest replica, mean over steps; a lower bound",
    "waits": "seconds waited by cause, over all replicas",
    "clipped": "mass removed by residual clipping, sum of |removed|",
    "replicas": "replicas that completed the epoch",
    "repeated_pieces": "leases trained on again because their replica was lost",
    "skipped_examples": "examples left out because they could not be read, "
    'on_bad_batch="skip"',
    "refused_messages": "messages that could not be read and were dropped",
    "repaired_updates": "updates that did not arrive and were requested again",
    "withheld": "exchanges skipped because the outbox was full",
    "folds": "how often a full inbox was folded into one vector",
}


class History(Sequence[Row]):
    """The rows of a fit, one per epoch, oldest first; a sequence of mappings.

    Every row has the keys of :data:`COLUMNS`, and with validation data
    ``val_loss`` and, for classification, ``val_accuracy``: NaN in epochs without an
    evaluation, see :class:`~daskdl.Evaluate`.

    Attributes:
        steps: A sample of the steps of each replica.
        stopping: The record of early stopping; None without early stopping, and until
            the fit ends.

    Example:
        >>> history = History([{"epoch": 0, "loss": 0.5}, {"epoch": 1, "loss": 0.25}])
        >>> history[-1]["loss"], history.column("loss")
        (0.25, [0.5, 0.25])
    """

    steps: StepTable
    stopping: Stopping | None

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self._rows = list(rows)
        self.steps = StepTable()
        self.stopping = None

    def append(self, row: Row) -> None:
        """Add the row of an epoch."""
        self._rows.append(row)

    def column(self, name: str) -> list[Any]:
        """Return one column over all epochs."""
        return [row[name] for row in self._rows]

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`, indexed by epoch; needs pandas."""
        import pandas as pd

        columns = None if self._rows else list(COLUMNS)
        return pd.DataFrame(self._rows, columns=columns).set_index("epoch")

    @override
    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    @override
    def __len__(self) -> int:
        return len(self._rows)

    @override
    def __repr__(self) -> str:
        if not self._rows:
            return "History(no epochs)"
        last = self._rows[-1]
        return f"History({len(self)} epochs, last loss {last['loss']:.4g})"
