"""The record of a fit: a row per epoch, samples of steps and layers, and its report.

Replicas send step rows in packed form; beyond a bound the rows are thinned evenly.
"""

import html
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from typing_extensions import override

from daskdl.errors import ModelError, OptionError
from daskdl.observe import plots, report
from daskdl.observe.report import Line
from daskdl.observe.thinned import Thinned
from daskdl.observe.timeline import SPANS, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

Reason = Literal["stopped", "not_finite", "target", "patience", "max_seconds"]


@dataclass(frozen=True)
class Stopping:
    """Why a fit ended early, and the record of early stopping; `history.stopping`.

    Attributes:
        monitor: The name of the score; None without :class:`~daskdl.EarlyStopping`.
        reason: Why the fit ended early: a callback ``"stopped"`` it, the score was
            ``"not_finite"`` or reached the ``"target"``, ``"patience"`` was used up, or
            ``"max_seconds"`` had passed. None: it did not end early.
        details: The reason as text; empty without a reason.
        scores: Score of each checked epoch, by epoch, from 0.
        best_epoch: The epoch with the best score; None: no score was finite.
        best_score: Score of the best epoch; NaN without one.
        restored: Whether the fit returned the model of the best epoch.
    """

    monitor: str | None
    reason: Reason | None = None
    details: str = ""
    scores: Mapping[int, float] = field(default_factory=dict)
    best_epoch: int | None = None
    best_score: float = math.nan
    restored: bool = False


@dataclass
class RunRecord:
    """The circumstances of a fit; `history.run`.

    Attributes:
        began: Unix time of its beginning; 0: no fit has begun.
        seconds: Seconds that it took; NaN before its end.
        options: The options of trainer and fit as text, by name, without credentials.
        versions: Versions of packages and of the platform, by name, on the client.
        replicas: By number, the ``"worker"`` of each replica, when it was assigned
            there (``"joined"``) and when it ``"left"``, both in seconds of the fit, and
            the ``"reason"``. None and empty for those that stayed.
        error: The error that ended the fit, with its notes; empty without one.
    """

    began: float = 0.0
    seconds: float = math.nan
    options: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    replicas: dict[int, dict[str, Any]] = field(default_factory=dict)
    error: str = ""

    def join(self, replica: int, worker: str) -> None:
        """Record that a replica was assigned to a worker, now."""
        now = time.time() - self.began
        self.replicas[replica] = {
            "worker": worker,
            "joined": now,
            "left": None,
            "reason": "",
        }

    def leave(self, replica: int, reason: str) -> None:
        """Record that a replica has left, now; a later reason replaces a former one."""
        record = self.replicas.get(replica)
        if record is not None:
            if record["left"] is None:
                record["left"] = time.time() - self.began
            record["reason"] = reason or record["reason"]


Row = Mapping[str, Any]

# About 600 bytes of memory per row of a step, 830 of a layer: 17 MB at most.
MOST_ROWS = 20_000

STEP_COLUMNS: Mapping[str, str] = {
    "epoch": "counted from 0",
    "step": "number of the step in this replica, counted from 1",
    "replica": "number of the replica",
    "loss": "mean over the labels of this step; 0 if none counts",
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


BINS = 20  # of a histogram
LAYER_COLUMNS: Mapping[str, str] = {
    "epoch": "counted from 0",
    "step": "number of the step in this replica, counted from 1",
    "replica": "number of the replica",
    "name": "name of the parameter tensor in the model",
    "parameter_norm": "Euclidean norm of the parameter, after the optimizer step",
    "gradient_norm": "the same of its gradient, as the optimizer got it; NaN: it has "
    "none",
    "update_norm": "the same of the optimizer step: the parameter after it less before",
    "ratio": "update_norm / parameter_norm",
    "residual_norm": "Euclidean norm of the residual after the exchange; NaN: there is "
    "none",
    "parameter_low": "smallest value of the parameter",
    "parameter_high": "largest value",
    "parameter_counts": "values in each of 20 equal bins from low to high",
    "gradient_low": "the same of its gradient",
    "gradient_high": "the same",
    "gradient_counts": "the same",
    "update_low": "the same of the optimizer step",
    "update_high": "the same",
    "update_counts": "the same",
}
NORMS = ("parameter_norm", "gradient_norm", "update_norm", "ratio", "residual_norm")


class LayerRow(NamedTuple):
    """One parameter tensor in one step of one replica; see :data:`LAYER_COLUMNS`."""

    epoch: int
    step: int
    replica: int
    layer: int  # place among the names of all trainable parameters
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
    """Return the wire layout of rows of a kind, and of the number of each.

    Little-endian, no padding. The scheduler never unpacks rows.
    """
    fields = [(name, _FIELD[type]) for name, type in kind.__annotations__.items()]
    return np.dtype([("number", "<i8"), *fields])


def pack_rows(numbered: Sequence[tuple[int, R]]) -> bytes:
    """Pack rows of one kind and their numbers, see `layout_of`."""
    if not numbered:
        return b""

    def plain(value: Any) -> Any:
        return (value or "").encode() if isinstance(value, str | None) else value

    packed = [(number, *map(plain, row)) for number, row in numbered]
    return np.array(packed, layout_of(type(numbered[0][1]))).tobytes()


def unpack_rows(
    packed: bytes, kind: type[R], layout: np.dtype[Any] | None = None
) -> list[tuple[int, R]]:
    """Unpack rows from :func:`pack_rows`, perhaps of another release.

    In its layout, missing columns get their defaults, and unknown ones are ignored.
    """
    own = layout_of(kind)
    layout = own if layout is None else layout
    places = {name: i for i, name in enumerate(layout.names or ())}
    known = [name for name in own.names or () if name in places]
    if "number" not in known or any(layout[name] != own[name] for name in known):
        raise ValueError(f"no numbered rows of {kind.__name__}: {layout}")
    at, rows = places["number"], []
    for values in np.frombuffer(packed, layout).tolist():
        fields = {name: values[places[name]] for name in known[1:]}
        if "kind" in fields:
            fields["kind"] = fields["kind"].decode() or None
        try:
            rows.append((values[at], kind(**fields)))
        except TypeError as error:
            raise ValueError(f"no rows of {kind.__name__}: {error}") from error
    return rows


class _Table(Sequence[Row], Generic[R]):
    """Rows of one kind from all replicas, as mappings; at most `MOST_ROWS`."""

    _columns: ClassVar[Mapping[str, str]]

    def __init__(self) -> None:
        self._rows: Thinned[R] = Thinned(MOST_ROWS)

    def extend(self, numbered: Iterable[tuple[int, R]]) -> None:
        """Add rows, each with its number within its replica."""
        for number, row in numbered:
            self._rows.add(number, row)

    def packed(self) -> bytes:
        """Return the rows and their numbers, packed by :func:`pack_rows`."""
        return pack_rows(self._rows.numbered)

    def column(self, name: str) -> list[Any]:
        """Return one column over all rows."""
        if name not in self._columns:
            raise KeyError(name)
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
        return {name: self._value(row, name) for name in self._columns}

    @override
    def __len__(self) -> int:
        return len(self._rows.numbered)

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} rows)"


class StepTable(_Table[StepRow]):
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

    _columns = STEP_COLUMNS


class LayerTable(_Table[LayerRow]):
    """Samples of each trainable parameter tensor; a sequence of mappings.

    :class:`~daskdl.LayerMonitor` asks for them. Every row has the keys of
    :data:`LAYER_COLUMNS`; those of a step are in the order of the model's parameters.
    The rows of an epoch are added when the epoch ends, in ascending order of replica.
    The table holds at most 20,000 rows, or one step of each replica: beyond that, it
    drops every second step, among new ones too.

    NaN, infinities and values beyond 1e37 are in no bin of a histogram.

    Args:
        names: Names of all trainable parameters, in the order of the model.

    Attributes:
        names: The same.
    """

    names: Sequence[str]
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

        Replicas make the same step at different times; one that has no row of a step
        does not count.
        """
        found: dict[str, dict[int, list[list[float]]]] = {}
        for _, row in self._rows.numbered:
            own = found.setdefault(self.names[row.layer], {}).setdefault(row.step, [])
            own.append([getattr(row, name) for name in NORMS])
        return {
            layer: {
                step: dict(zip(NORMS, map(fmean, zip(*rows, strict=True)), strict=True))
                for step, rows in sorted(own.items())
            }
            for layer, own in found.items()
        }


COLUMNS: Mapping[str, str] = {
    "epoch": "counted from 0",
    "loss": "mean training loss, weighted by the labels that count, or by examples",
    "examples": "examples trained on, by all replicas",
    "seconds": "from the end of the previous epoch to the end of this one",
    "examples_per_s": "examples / seconds",
    "density": "parameters sent / parameters, mean over exchanges and "
    "replicas; 1: sent whole",
    "threshold": "mean of the replicas' (and patterns') last thresholds, "
    "parameter units",
    "learning_rate": "rate of the first parameter group at the end of the epoch",
    "rate_factor": "factor on it with adaptive optimizers, mean over steps",
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
    "withheld": "exchanges skipped because earlier updates were still unsent",
    "folds": "how often a full inbox was folded into one vector",
}


# Columns that early stopping cannot monitor: replicas cannot agree on them.
NOT_AGREED = (
    "epoch",
    "seconds",
    "examples_per_s",
    "dense_bytes",
    "waits",
    "repeated_pieces",
    "skipped_examples",
    "refused_messages",
)


def check_log_names(names: Iterable[Any]) -> None:
    """Refuse names of a step's logs that cannot be columns of a history."""
    for name in names:
        if not isinstance(name, str):
            raise ModelError(f"step must log by names that are text, got {name!r}")
        if name in COLUMNS or name.startswith("val_"):
            why = "is a column of the history already"
            if name not in COLUMNS:
                why = "is kept for scores of the validation data"
            raise ModelError(
                f"step cannot log {name!r}, which {why}; choose another name"
            )


# Of the tables and charts of a report.
MAIN_COLUMNS = (
    "epoch",
    "loss",
    "examples",
    "seconds",
    "examples_per_s",
    "learning_rate",
    "density",
    "threshold",
    "sent_bytes",
    "staleness",
    "replicas",
)
CHARTED = MAIN_COLUMNS[4:]
SUMMED = (
    "examples",
    "sent_bytes",
    "dense_bytes",
    "skipped_examples",
    "repeated_pieces",
    "refused_messages",
    "repaired_updates",
    "withheld",
    "folds",
)
MOST_EPOCHS = 200  # rows of the table of a report
MOST_LAYERS = 200  # the same
MOST_SHOWN = 5  # of the first rows, and of the last ones, in a notebook


class History(Sequence[Row]):
    """The rows of a fit, one per epoch, oldest first; a sequence of mappings.

    Every row has the keys of :data:`COLUMNS`, what a step logs, and with validation
    data ``val_loss``, for classification ``val_accuracy``, and ``val_NAME`` of each
    log: NaN in epochs without an evaluation, see :class:`~daskdl.Evaluate`.

    Attributes:
        steps: A sample of the steps of each replica.
        layers: Samples of each parameter tensor, with :class:`~daskdl.LayerMonitor`.
        timeline: What each replica did when.
        run: Options, versions, replicas, and the error if there was one.
        stopping: Why the fit ended early, and the record of early stopping; None
            without either, and until the fit ends.

    Example:
        >>> history = History([{"epoch": 0, "loss": 0.5}, {"epoch": 1, "loss": 0.25}])
        >>> history[-1]["loss"], history.column("loss")
        (0.25, [0.5, 0.25])
    """

    steps: StepTable
    layers: LayerTable
    timeline: Timeline
    run: RunRecord
    stopping: Stopping | None

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self._rows = list(rows)
        self.steps = StepTable()
        self.layers = LayerTable()
        self.timeline = Timeline()
        self.run = RunRecord()
        self.stopping = None

    def append(self, row: Row) -> None:
        """Add the row of an epoch."""
        self._rows.append(row)

    def drop_from(self, epoch: int) -> None:
        """Remove the rows of an epoch and of those after it, to train them again."""
        self._rows = [row for row in self._rows if row["epoch"] < epoch]

    def column(self, name: str) -> list[Any]:
        """Return one column over all epochs, NaN in those that lack it."""
        if self._rows and not any(name in row for row in self._rows):
            raise KeyError(name)
        return [row.get(name, math.nan) for row in self._rows]

    @property
    def _scores(self) -> list[str]:
        """Names of the columns beside :data:`COLUMNS`: logs and validation scores."""
        return [
            *dict.fromkeys(n for row in self._rows for n in row if n not in COLUMNS)
        ]

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

    # ---- pictures

    def _repr_html_(self) -> str:
        shown: Sequence[int] = range(len(self))
        if len(self) > 2 * MOST_SHOWN:
            shown = [*shown[:MOST_SHOWN], *shown[-MOST_SHOWN:]]
        few = f"<p>{html.escape(repr(self))}</p>"
        return few + self._table(shown) if self._rows else few

    def _table(self, shown: Iterable[int]) -> str:
        columns = [name for name in MAIN_COLUMNS if name in self._rows[-1]]
        columns[2:2] = self._scores
        rows = [[self._rows[i].get(name, math.nan) for name in columns] for i in shown]
        return report.table(rows, columns)

    def plot(self, *columns: str) -> "Figure":
        """Draw columns by epoch into a new figure, which notebooks show.

        Args:
            *columns: Names of columns with numbers, a picture for each; the score of
                the validation data is drawn beside ``"loss"`` and each log. None: loss,
                logs, accuracy, speed, and density.

        Raises:
            OptionError: If there is no such column, no epoch, or no matplotlib.

        Example:
            >>> history = History([{"epoch": 0, "loss": 0.5}])
            >>> history.plot("loss").axes  # doctest: +ELLIPSIS
            [<Axes: ...]
        """
        if not self._rows:
            raise OptionError("there is nothing to draw in a history without epochs")
        usual = ("loss", *self._charted, "examples_per_s", "density")
        last = self._rows[-1]
        for name in columns:
            if not isinstance(last.get(name), int | float):
                numbers = [n for n in last if isinstance(last[n], int | float)]
                raise OptionError(
                    f"columns must be among {', '.join(map(repr, numbers))}, got "
                    f"{name!r}"
                )
        chosen = columns or tuple(name for name in usual if name in last)

        def picture(name: str) -> "Callable[[SubFigure], None]":
            def draw(figure: "SubFigure") -> None:
                axes = figure.add_subplot()
                axes.set_prop_cycle(color=plots.COLORS)
                axes.set(title=name, xlabel="epoch")
                for line in self._lines(name):
                    axes.plot(line.x, line.y, marker=".", label=line.name)
                if len(axes.lines) > 1:
                    axes.legend(frameon=False)

            return draw

        return plots.figure_of([picture(name) for name in chosen])

    def _lines(self, name: str) -> list[Line]:
        """Return a column by epoch, and beside it the score of the validation data."""
        lines = []
        for one in (name, f"val_{name}"):
            rows = [(row["epoch"], row[one]) for row in self._rows if one in row]
            if rows:
                lines.append(Line(one, *zip(*rows, strict=True)))
        return lines

    @property
    def _charted(self) -> list[str]:
        """Logs and scores with a picture of their own."""
        scores = self._scores
        beside = {f"val_{name}" for name in ("loss", *scores)}
        return [name for name in scores if name not in beside]

    # ---- the report

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write a report of the fit: one HTML file that needs no network.

        It has a summary, the error if the fit ended with one, curves, layers if there
        are samples of them, where the time went, the timeline of each replica, who
        joined and left, epochs, options and versions. It grows to a few megabytes at
        most.

        Args:
            path: File to write; an existing one is replaced.

        Raises:
            OSError: If it cannot be written.
        """
        Path(path).write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        run, timeline = self.run, self.timeline
        left = {
            replica: (own["left"], own["reason"])
            for replica, own in run.replicas.items()
            if own["left"] is not None
        }
        spans = ""
        if len(timeline):
            packed = np.frombuffer(timeline.packed(), SPANS)
            spans = report.timeline(packed, timeline.began, left)
        each = -(-len(self) // MOST_EPOCHS) or 1
        shown = [*range(0, len(self), each)]
        if self._rows and shown[-1] != len(self) - 1:
            shown.append(len(self) - 1)
        of = f", {len(shown)} of {len(self)}" if len(shown) < len(self) else ""
        when = time.strftime(" of %Y-%m-%d %H:%M:%S", time.localtime(run.began))
        return report.page(
            "daskdl: fit" + (when if run.began else ""),
            [
                ("Error", f"<pre>{html.escape(run.error)}</pre>" if run.error else ""),
                ("Summary", report.table(self._facts())),
                ("Curves", f'<div class="charts">{self._charts()}</div>'),
                ("Layers", self._layer_charts() if len(self.layers) else ""),
                ("Where the time went", report.shares(timeline.seconds())),
                ("Timeline", spans),
                ("Replicas", self._replica_table()),
                (f"Epochs{of}", self._table(shown) if self._rows else ""),
                ("Options", report.table(run.options.items())),
                ("Versions", report.table(run.versions.items())),
            ],
        )

    def _facts(self) -> list[tuple[str, Any]]:
        """Return the summary: names and values."""
        run, rows = self.run, self._rows
        facts: list[tuple[str, Any]] = [("epochs", len(rows))]
        if not math.isnan(run.seconds):
            facts.append(("seconds", run.seconds))
        if rows:
            names = ("loss", *self._scores)
            facts += [(name, rows[-1][name]) for name in names if name in rows[-1]]
        if self.stopping is not None:
            best = self.stopping.best_epoch
            facts.append(("early stopping", self.stopping.details or "did not end it"))
            if self.stopping.monitor is not None:
                facts.append(("best epoch", "none" if best is None else best))
        if run.replicas:
            gone = sum(own["left"] is not None for own in run.replicas.values())
            facts += [("replicas", len(run.replicas)), ("of which left", gone)]
        for name in SUMMED:
            if any(name in row for row in rows):
                total = sum(row.get(name, 0) for row in rows)
                if total or name in SUMMED[:3]:
                    facts.append((name.replace("_", " "), total))
        spent = sum(row.get("seconds", 0) for row in rows)
        if spent:
            examples = sum(row["examples"] for row in rows)
            facts.append(("examples per second", examples / spent))
        return facts

    def _charts(self) -> str:
        steps: dict[int, tuple[list[int], list[float]]] = {}
        for step in zip(
            *map(self.steps.column, ("replica", "step", "loss")), strict=True
        ):
            own = steps.setdefault(step[0], ([], []))
            own[0].append(step[1])
            own[1].append(step[2])
        by_step = [Line(f"replica {r}", *own) for r, own in sorted(steps.items())]
        charts = [report.chart("loss", "epoch", self._lines("loss"))]
        charts.append(report.chart("loss of single steps", "step", by_step))
        charted = (*self._charted, *CHARTED)
        charts += [report.chart(n, "epoch", self._lines(n)) for n in charted]
        return "".join(charts)

    def _layer_charts(self) -> str:
        """Return norms by step, and the histograms of the newest sample."""
        charts, means = [], self.layers.means()
        for title, name in (
            ("log10 of update norm / parameter norm", "ratio"),
            ("norm of the gradient", "gradient_norm"),
            ("norm of the residual", "residual_norm"),
        ):
            lines = []
            for layer, steps in means.items():
                values = [own[name] for own in steps.values()]
                if name == "ratio":
                    values = [math.log10(v) if v > 0 else math.nan for v in values]
                lines.append(Line(layer, list(steps), values))
            charts.append(report.chart(title, "step", lines))
        newest = max(self.layers, key=lambda row: (row["step"], -row["replica"]))
        sample = [
            [row["name"], *(row[name] for name in NORMS)]
            + [
                report.histogram(*(row[f"{of}_{end}"] for end in ends))
                for of in ("parameter", "gradient", "update")
                for ends in [("low", "high", "counts")]
            ]
            for row in self.layers
            if (row["step"], row["replica"]) == (newest["step"], newest["replica"])
        ]
        columns = ["name", *(name.replace("_", " ") for name in NORMS)]
        few = f", {MOST_LAYERS} of {len(sample)} layers" if sample[MOST_LAYERS:] else ""
        return (
            f'<div class="charts">{"".join(charts)}</div><p>Lines are means over the '
            f"replicas. Step {newest['step']} of replica {newest['replica']}{few}:</p>"
            + report.table(
                sample[:MOST_LAYERS], [*columns, "parameters", "gradients", "updates"]
            )
        )

    def _replica_table(self) -> str:
        run, timeline = self.run, self.timeline
        rows = []
        for replica in sorted({*run.replicas, *timeline.replicas}):
            own = run.replicas.get(replica, {})
            left = own.get("left")
            rows.append(
                (
                    replica,
                    own.get("worker", ""),
                    own.get("joined", math.nan),
                    "" if left is None else left,
                    own.get("reason", ""),
                    report.bar(timeline.seconds(replica)),
                )
            )
        columns = ("replica", "worker", "joined, s", "left, s", "reason", "time")
        return report.table(rows, columns)
