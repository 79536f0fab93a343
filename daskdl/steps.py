"""What single steps of the replicas were like: rows, as a table and on their way."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
from typing_extensions import override

from daskdl.thinned import Thinned

Row = Mapping[str, Any]

# In memory about 600 bytes each, 12 MB in all.
MOST_ROWS = 20_000

STEP_COLUMNS: Mapping[str, str] = {
    "epoch": "counted from 0",
    "step": "of this replica, counted from 1",
    "replica": "its number",
    "loss": "over the rows of this step",
    "learning_rate": "of the first parameter group, in this step",
    "threshold": "of the last exchange, mean over patterns, parameter units",
    "density": "sent in this step / parameters; 1: sent whole; NaN: no exchange",
    "sent_bytes": "of the frames that were published in this step",
    "kind": "of the largest of these frames; None: nothing was sent",
    "residual_norm": "Euclidean length of what is not sent yet, parameter units; "
    "estimated from a sample",
    "residual_p50": "half of the residuals are below so many of their thresholds",
    "residual_p90": "9 of 10 are",
    "residual_p99": "99 of 100 are",
    "staleness": "steps ahead of the slowest replica at least, when the step began",
    "wait_s": "seconds waited for others: because of max_staleness, or for room",
    "encode_s": "seconds for finding, packing and publishing what is sent",
    "apply_s": "seconds for applying what others had sent",
    "step_s": "seconds for all of the step, these included",
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


# As rows travel: little-endian, without gaps. The scheduler does not look into them.
_FIELD = {int: "<i8", float: "<f8", str | None: "S8"}
LAYOUT = np.dtype(
    [("number", "<i8")] + [(n, _FIELD[t]) for n, t in StepRow.__annotations__.items()]
)


def pack_rows(numbered: Sequence[tuple[int, StepRow]]) -> bytes:
    """Write rows and their numbers as bytes, 152 for each; nothing for none.

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
    """Read what :func:`pack_rows` wrote.

    Args:
        packed: Whole rows.
        layout: With which they were written, perhaps by another release: columns that
            it lacks are as in a row without them, and others are passed over.

    Raises:
        ValueError: If the bytes are no rows of it, or it lacks what a row must have.
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
    """Steps of all replicas, a sample of them; a sequence of mappings.

    Every row has the keys of :data:`STEP_COLUMNS`. The rows of an epoch come when it
    ends, first those of the replica with the lowest number. There are at most 20,000:
    beyond that every second one of each replica goes, and of what comes later every
    second one is not taken in.

    Example:
        >>> table = StepTable()
        >>> table.extend([(1, StepRow(0, 10, 0, 0.5)), (2, StepRow(0, 20, 0, 0.25))])
        >>> table[-1]["step"], table.column("loss")
        (20, [0.5, 0.25])
    """

    def __init__(self) -> None:
        self._rows: Thinned[StepRow] = Thinned(MOST_ROWS)

    def extend(self, numbered: Iterable[tuple[int, StepRow]]) -> None:
        """Add rows, each with its number among those of its replica."""
        for number, row in numbered:
            self._rows.add(number, row)

    def packed(self) -> bytes:
        """The rows and their numbers as :func:`pack_rows` writes them."""
        numbered = self._rows.numbered()
        return pack_rows(numbered) if numbered else b""

    def column(self, name: str) -> list[Any]:
        """One column over all rows."""
        if name not in STEP_COLUMNS:
            raise KeyError(name)
        return [getattr(row, name) for row in self._rows]

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`; needs pandas."""
        import pandas as pd

        return pd.DataFrame(list(self._rows), columns=list(STEP_COLUMNS))

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    @override
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._rows[index]._asdict()

    @override
    def __len__(self) -> int:
        return len(self._rows)

    @override
    def __iter__(self) -> Iterator[Row]:
        return (row._asdict() for row in self._rows)

    @override
    def __repr__(self) -> str:
        return f"StepTable({len(self)} rows)"
