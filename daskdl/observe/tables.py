"""Samples of steps and layers: rows, their packed form, and tables of bounded size.

Replicas send packed rows. Beyond its maximum size, a table drops rows evenly. The
scheduler imports this module, so it does not import torch.
"""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import (
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    NoReturn,
    TypeVar,
    get_type_hints,
)

import numpy as np
from typing_extensions import override

from daskdl.errors import count_of

T = TypeVar("T")


class Thinned(Generic[T]):
    """A bounded, evenly thinned sequence of numbered rows, in order of arrival.

    Beyond `most` rows, only rows with even numbers are kept, then only every fourth
    number, then every eighth, and so on. Rows with equal numbers are kept or dropped
    together; the rows of the last remaining number are kept, even if they exceed
    `most`.

    Attributes:
        numbered: The rows with their numbers.
    """

    numbered: list[tuple[int, T]]

    def __init__(self, most: int) -> None:
        self.numbered = []
        self._most = most
        self._stride = 1
        self._highest = 0

    def wants(self, number: int) -> bool:
        """Whether a row with this number would be kept."""
        return number % self._stride == 0

    def add(self, number: int, row: T) -> None:
        """Add a row if its number is wanted."""
        if not self.wants(number):
            return
        self.numbered.append((number, row))
        self._highest = max(self._highest, number)
        while len(self.numbered) > self._most and 2 * self._stride <= self._highest:
            self._stride *= 2
            self.numbered = [kept for kept in self.numbered if self.wants(kept[0])]

    def take(self) -> list[tuple[int, T]]:
        """Remove and return all rows with their numbers; keep the stride."""
        taken, self.numbered = self.numbered, []
        return taken


Row = Mapping[str, Any]


def no_column(name: str, columns: Iterable[str]) -> KeyError:
    """Return the error of a table without a column, which lists those that it has."""
    known = list(dict.fromkeys(columns))
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return KeyError(f"no column {name!r}; {hint}columns: {', '.join(known)}")


class LabelledRow(dict[str, Any]):
    """A row whose KeyError lists the columns."""

    def __missing__(self, name: str) -> NoReturn:
        raise no_column(name, self)


# Memory of a row: about 710 bytes in a table of steps, and 830 in a table of layers.
# A table takes 17 MB at most.
MAX_ROWS = 20_000

STEP_COLUMNS: Mapping[str, str] = {
    "epoch": "counted from 0",
    "step": "number of the step in this replica, counted from 1",
    "replica": "number of the replica",
    "loss": "mean over the labels of this step; 0 if none counts",
    "learning_rate": "rate of the first parameter group in this step",
    "threshold": "threshold of the last exchange, mean over patterns, parameter units",
    "density": "parameters sent in this step / parameters; 1 if all were sent; NaN "
    "without an exchange",
    "sent_bytes": "bytes of the frames published in this step",
    "kind": "kind of the largest of these frames; None if nothing was sent",
    "residual_norm": "Euclidean norm of the residual, parameter units; "
    "estimated from a sample",
    "residual_p50": "median of abs(residual) / threshold",
    "residual_p90": "90th percentile of abs(residual) / threshold",
    "residual_p99": "99th percentile of abs(residual) / threshold",
    "staleness": "steps ahead of the slowest replica when the step began; a "
    "lower bound",
    "wait_s": "seconds spent waiting for other replicas, because of max_staleness or "
    "for room in the outbox",
    "encode_s": "seconds that finding, packing and publishing entries held up training",
    "apply_s": "seconds spent applying the updates of other replicas",
    "step_s": "duration of the step in seconds, including these",
}


@dataclass(frozen=True)
class StepStats:
    """Measurements of the exchange in one step; see :data:`STEP_COLUMNS`."""

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


@dataclass(frozen=True, kw_only=True)
class StepRow(StepStats):
    """One step of one replica; see :data:`STEP_COLUMNS`."""

    epoch: int
    step: int
    replica: int
    loss: float
    learning_rate: float = math.nan
    step_s: float = 0.0


BINS = 20  # of a histogram
LAYER_COLUMNS: Mapping[str, str] = {
    "epoch": "counted from 0",
    "step": "number of the step in this replica, counted from 1",
    "replica": "number of the replica",
    "name": "name of the parameter tensor in the model",
    "parameter_norm": "Euclidean norm of the parameter, after the optimizer step",
    "gradient_norm": "Euclidean norm of the gradient given to the optimizer; NaN "
    "without one",
    "update_norm": "Euclidean norm of the optimizer step (parameter after the step "
    "minus before)",
    "ratio": "update_norm / parameter_norm",
    "residual_norm": "Euclidean norm of the residual after the exchange; NaN without "
    "one",
    "parameter_low": "smallest value of the parameter",
    "parameter_high": "largest value of the parameter",
    "parameter_counts": "number of values in each of 20 equal bins from low to high",
    "gradient_low": "smallest value of the gradient",
    "gradient_high": "largest value of the gradient",
    "gradient_counts": "number of values in each of 20 equal bins from low to high",
    "update_low": "smallest value of the optimizer step",
    "update_high": "largest value of the optimizer step",
    "update_counts": "number of values in each of 20 equal bins from low to high",
}
NORMS = ("parameter_norm", "gradient_norm", "update_norm", "ratio", "residual_norm")


class LayerRow(NamedTuple):
    """One parameter tensor in one step of one replica; see :data:`LAYER_COLUMNS`."""

    epoch: int
    step: int
    replica: int
    layer: int  # index into the names of all trainable parameters
    parameter_norm: float
    parameter_low: float
    parameter_high: float
    parameter_counts: bytes  # of `BINS` numbers, little-endian int32
    gradient_norm: float
    gradient_low: float
    gradient_high: float
    gradient_counts: bytes
    update_norm: float
    update_low: float
    update_high: float
    update_counts: bytes
    residual_norm: float = math.nan

    @property
    def ratio(self) -> float:
        norm = self.parameter_norm
        return self.update_norm / norm if norm else math.nan


R = TypeVar("R", bound=StepRow | LayerRow)


_FIELD = {int: "<i8", float: "<f8", str | None: "S8", bytes: f"|V{4 * BINS}"}


def layout_of(kind: type[R]) -> np.dtype[Any]:
    """Return the wire layout of a numbered row: little-endian, without padding.

    The scheduler never unpacks rows.
    """
    fields = [(name, _FIELD[type]) for name, type in get_type_hints(kind).items()]
    return np.dtype([("number", "<i8"), *fields])


def pack_rows(numbered: Sequence[tuple[int, R]]) -> bytes:
    """Pack numbered rows of one kind, see `layout_of`."""
    if not numbered:
        return b""

    def plain(value: Any) -> Any:
        return (value or "").encode() if isinstance(value, str | None) else value

    layout = layout_of(type(numbered[0][1]))
    _, *names = layout.names or ()
    packed = [
        (number, *(plain(getattr(row, name)) for name in names))
        for number, row in numbered
    ]
    return np.array(packed, layout).tobytes()


def unpack_rows(
    packed: bytes, kind: type[R], layout: np.dtype[Any] | None = None
) -> list[tuple[int, R]]:
    """Unpack rows from :func:`pack_rows`.

    If another release packed the rows, `layout` is the layout of that release: missing
    columns get their defaults, and unknown columns are ignored.
    """
    current = layout_of(kind)
    layout = current if layout is None else layout
    known = [name for name in current.names or () if name in (layout.names or ())]
    if "number" not in known or any(layout[name] != current[name] for name in known):
        raise ValueError(f"no numbered rows of {kind.__name__}: {layout}")
    rows = []
    for number, *values in np.frombuffer(packed, layout)[known].tolist():
        fields = dict(zip(known[1:], values, strict=True))
        if "kind" in fields:
            fields["kind"] = fields["kind"].decode() or None
        try:
            rows.append((number, kind(**fields)))
        except TypeError as error:
            raise ValueError(f"no rows of {kind.__name__}: {error}") from error
    return rows


class _Table(Sequence[Row], Generic[R]):
    """At most `MAX_ROWS` rows of one kind from all replicas, as mappings."""

    _columns: ClassVar[Mapping[str, str]]

    def __init__(self) -> None:
        self._rows: Thinned[R] = Thinned(MAX_ROWS)

    def extend(self, numbered: Iterable[tuple[int, R]]) -> None:
        """Add rows with their numbers within their replicas."""
        for number, row in numbered:
            self._rows.add(number, row)

    def packed(self) -> bytes:
        """Return the rows and their numbers, packed by :func:`pack_rows`."""
        return pack_rows(self._rows.numbered)

    def column(self, name: str) -> list[Any]:
        """Return one column over all rows."""
        if name not in self._columns:
            raise no_column(name, self._columns)
        return [self._value(row, name) for _, row in self._rows.numbered]

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`; needs pandas."""
        import pandas as pd

        return pd.DataFrame({name: self.column(name) for name in self._columns})

    def _value(self, row: R, name: str) -> Any:
        return getattr(row, name)

    @override
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self._rows.numbered[index][1]
        return LabelledRow({name: self._value(row, name) for name in self._columns})

    @override
    def __len__(self) -> int:
        return len(self._rows.numbered)

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({count_of(len(self), 'row')})"


class StepTable(_Table[StepRow]):
    """A sample of the steps of all replicas; a sequence of mappings.

    Every row has the keys of :data:`STEP_COLUMNS`. The rows of an epoch are added when
    the epoch ends, in ascending order of replica. The table holds at most 20,000 rows:
    beyond that, it drops every second row of each replica, including later rows.

    Example:
        >>> table = StepTable()
        >>> table.extend([(1, StepRow(epoch=0, step=10, replica=0, loss=0.5))])
        >>> table[-1]["step"], table.column("loss")
        (10, [0.5])
    """

    _columns = STEP_COLUMNS


class LayerTable(_Table[LayerRow]):
    """Samples of each trainable parameter tensor; a sequence of mappings.

    A :class:`~daskdl.LayerMonitor` takes them. Every row has the keys of
    :data:`LAYER_COLUMNS`; the rows of a step are in the order of the model's
    parameters. The rows of an epoch are added when the epoch ends, in ascending order
    of replica. The table holds at most 20,000 rows, or one step of each replica if that
    is more: beyond that, it drops every second step, including later steps.

    Histograms do not count NaN, infinities and values beyond 1e37.

    Attributes:
        names: Names of all trainable parameters, in the order of the model.
    """

    _columns = LAYER_COLUMNS

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__()
        self.names = list(names)

    @override
    def extend(self, numbered: Iterable[tuple[int, LayerRow]]) -> None:
        numbered = list(numbered)
        for _, row in numbered:
            if not 0 <= row.layer < len(self.names):
                raise ValueError(f"got layer {row.layer} of {len(self.names)} layers")
        super().extend(numbered)

    @override
    def _value(self, row: LayerRow, name: str) -> Any:
        if name == "name":
            return self.names[row.layer]
        value = getattr(row, name)
        return np.frombuffer(value, "<i4").tolist() if type(value) is bytes else value

    def means(self) -> dict[str, dict[int, dict[str, float]]]:
        """Return norms and ratio by name and step: means over the replicas.

        A mean covers the replicas that have a row of the step.
        """
        samples: dict[str, dict[int, list[list[float]]]] = {}
        for _, row in self._rows.numbered:
            by_step = samples.setdefault(self.names[row.layer], {})
            norms = [getattr(row, name) for name in NORMS]
            by_step.setdefault(row.step, []).append(norms)
        return {
            layer: {
                step: dict(zip(NORMS, map(fmean, zip(*rows, strict=True)), strict=True))
                for step, rows in sorted(by_step.items())
            }
            for layer, by_step in samples.items()
        }
