"""What a fit did, one row for each epoch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from typing_extensions import override

from daskdl.steps import StepTable
from daskdl.stopping import Stopping

Row = Mapping[str, Any]

COLUMNS: Mapping[str, str] = {
    "epoch": "counted from 0",
    "loss": "mean training loss, weighted by examples",
    "examples": "trained on, all replicas together",
    "seconds": "from the end of the epoch before to the end of this one",
    "examples_per_s": "examples / seconds",
    "density": "sent / parameters, mean over exchanges and replicas; 1: sent whole",
    "threshold": "mean of the replicas' (and patterns') last ones, parameter units",
    "learning_rate": "of the first parameter group at the end of the epoch",
    "sent_bytes": "of updates and averaged buffers sent, all replicas together",
    "received_bytes": "of the same received, all replicas together",
    "dense_bytes": "what sending every update whole would have taken instead",
    "staleness": "steps ahead of the slowest replica at least, mean over steps",
    "waits": "seconds waited by cause, all replicas together",
    "clipped": "mass removed by residual clipping, sum of |removed|",
    "replicas": "that ended the epoch",
    "repeated_pieces": "trained on again because their replica was lost",
    "skipped_examples": 'of parts that could not be read, on_bad_batch="skip"',
    "refused_messages": "that could not be read and were dropped",
    "repaired_updates": "that did not arrive, and came when they were asked for",
    "withheld": "exchanges skipped because the outbox was full",
    "folds": "how often a full inbox was folded into one vector",
}


class History(Sequence[Row]):
    """Rows of a fit, oldest first; a sequence of mappings.

    Every row has the keys of :data:`COLUMNS`, and with validation data
    ``val_loss`` and, for classification, ``val_accuracy``: NaN in epochs in which these
    were not computed, see :class:`~daskdl.Evaluate`.

    Attributes:
        steps: A sample of the steps of each replica.
        stopping: What early stopping saw and did; None without it, and while the fit
            runs.

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
        """One column over all epochs."""
        return [row[name] for row in self._rows]

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`, indexed by epoch; needs pandas."""
        import pandas as pd

        columns = None if self._rows else list(COLUMNS)
        return pd.DataFrame(self._rows, columns=columns).set_index("epoch")

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    @override
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self._rows[index]

    @override
    def __len__(self) -> int:
        return len(self._rows)

    @override
    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    @override
    def __repr__(self) -> str:
        if not self._rows:
            return "History(no epochs)"
        last = self._rows[-1]
        return f"History({len(self)} epochs, last loss {last['loss']:.4g})"
