"""The record of a fit: one row per epoch, tables, a timeline, and a report."""

import functools
import html
import itertools
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from typing_extensions import override

from daskdl.errors import ModelError, OptionError, count_of
from daskdl.observe import plots, report
from daskdl.observe.report import Line
from daskdl.observe.tables import (
    NORMS,
    LabelledRow,
    LayerTable,
    Row,
    StepTable,
    no_column,
)
from daskdl.observe.timeline import SPANS, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

Reason = Literal["stopped", "not_finite", "target", "patience", "max_seconds"]


@dataclass(frozen=True)
class Stopping:
    """Why a fit ended early, and the scores of early stopping; `history.stopping`.

    Attributes:
        monitor: The name of the score; None without :class:`~daskdl.EarlyStopping`.
        reason: Why the fit ended early: a callback ``"stopped"`` it, the score was
            ``"not_finite"`` or reached the ``"target"``, ``"patience"`` was exhausted,
            or ``"max_seconds"`` had passed. None if the fit ran all epochs.
        details: The reason as text; empty without a reason.
        scores: Score of each checked epoch, by epoch, counted from 0.
        best_epoch: The epoch with the best score; None if no score was finite.
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
        began: Unix time at the start of the fit; 0 if no fit has started.
        seconds: Duration of the fit, seconds; NaN until it ends.
        options: The options of trainer and fit as text, by name, without credentials.
        versions: Versions of packages and of the platform, by name, on the client.
        replicas: By replica number, a dict with the ``"worker"``, the times at which
            the replica ``"joined"`` and ``"left"``, in seconds since the start of the
            fit, and the ``"reason"`` why it left. For a replica that stayed, ``"left"``
            is None and ``"reason"`` is empty.
        error: The error that ended the fit, with its notes; empty without one.
        name: Name of the fit; empty if no fit has started.
        id: Its id in logs, on the dashboard and in metrics.
    """

    began: float = 0.0
    seconds: float = math.nan
    options: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    replicas: dict[int, dict[str, Any]] = field(default_factory=dict)
    error: str = ""
    name: str = ""
    id: str = ""

    def join(self, replica: int, worker: str) -> None:
        """Record that a replica is assigned to a worker now."""
        joined = time.time() - self.began
        record = {"worker": worker, "joined": joined, "left": None, "reason": ""}
        self.replicas[replica] = record

    def leave(self, replica: int, reason: str) -> None:
        """Record that a replica leaves now; a later reason replaces an earlier one."""
        record = self.replicas.get(replica)
        if record is not None:
            if record["left"] is None:
                record["left"] = time.time() - self.began
            record["reason"] = reason or record["reason"]


COLUMNS: Mapping[str, str] = {
    "epoch": "counted from 0",
    "loss": "mean training loss, weighted by the labels that count, or by examples",
    "examples": "examples that all replicas trained on",
    "seconds": "from the end of the previous epoch to the end of this one",
    "examples_per_s": "examples / seconds",
    "density": "parameters sent / parameters, mean over exchanges and "
    "replicas; 1 if all were sent",
    "threshold": "mean of the replicas' (and patterns') last thresholds, "
    "parameter units",
    "learning_rate": "rate of the first parameter group at the end of the epoch",
    "rate_factor": "factor by which adaptive optimizers multiply the learning rate, "
    "mean over steps",
    "sent_bytes": "bytes that all replicas sent: updates and averaged buffers",
    "received_bytes": "bytes of the same kinds that all replicas received",
    "dense_bytes": "bytes that dense updates would have taken, with every parameter",
    "staleness": "steps ahead of the slowest replica, mean over steps; a lower bound",
    "waits": "seconds spent waiting, by cause, over all replicas",
    "clipped": "progress removed by residual clipping, sum of |removed|",
    "replicas": "replicas that completed the epoch",
    "repeated_pieces": "leases trained on again because their replica was lost",
    "skipped_examples": "examples that could not be read and were skipped, with "
    'on_bad_batch="skip"',
    "refused_messages": "messages that could not be read and were dropped",
    "repaired_updates": "updates that did not arrive and were requested again",
    "withheld": "exchanges skipped because earlier updates were still unsent",
    "folds": "times that a full inbox was folded into one vector",
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
    """Refuse names of logs that cannot be columns of a history."""
    for name in names:
        if not isinstance(name, str):
            raise ModelError(f"the names of logs must be strings, got {name!r}")
        if name in COLUMNS:
            raise ModelError(
                f"step cannot log {name!r}, which is already a column of the history; "
                "choose another name"
            )
        if name.startswith("val_"):
            raise ModelError(
                f"step cannot log {name!r}: the prefix val_ is reserved for scores of "
                "the validation data; choose another name"
            )


# Columns of the tables in reports and notebooks.
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
MAX_EPOCHS = 200  # rows in a report's table of epochs
MAX_LAYERS = 200  # rows in a report's table of layers
MAX_SHOWN = 5  # first rows, and as many last rows, in a notebook


BYTES = "_bytes"  # end of the names of columns with this unit


def _with_unit(name: str, value: Any) -> Any:
    """Return a value of a column for a table: bytes with a unit."""
    is_bytes = name.endswith(BYTES) and not math.isnan(value)
    return report.in_bytes(value) if is_bytes else value


class History(Sequence[Row]):
    """The rows of a fit, one per epoch, oldest first; a sequence of mappings.

    Every row has the keys of :data:`COLUMNS` and the values that a step logs. With
    validation data, a row also has ``val_loss``, for classification ``val_accuracy``,
    and ``val_NAME`` for each log: NaN in epochs without an evaluation, see
    :class:`~daskdl.Evaluate`.

    Attributes:
        steps: A sample of the steps of each replica.
        layers: Samples of each parameter tensor, with :class:`~daskdl.LayerMonitor`.
        timeline: The activities of each replica over time.
        run: Options, versions, replicas, and the error if there was one.
        stopping: Why the fit ended early, and the scores of early stopping; None
            without either, and until the fit ends.

    Example:
        >>> history = History([{"epoch": 0, "loss": 0.5}, {"epoch": 1, "loss": 0.25}])
        >>> history[-1]["loss"], history.column("loss")
        (0.25, [0.5, 0.25])
    """

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self._rows = [LabelledRow(row) for row in rows]
        self.steps = StepTable()
        self.layers = LayerTable()
        self.timeline = Timeline()
        self.run = RunRecord()
        self.stopping: Stopping | None = None

    def append(self, row: Row) -> None:
        """Add the row of an epoch."""
        self._rows.append(LabelledRow(row))

    def drop_from(self, epoch: int) -> None:
        """Remove the rows of this epoch and later ones, which are trained again."""
        self._rows = [row for row in self._rows if row["epoch"] < epoch]

    def column(self, name: str) -> list[Any]:
        """Return one column over all epochs, NaN in epochs without a value."""
        if self._rows and not any(name in row for row in self._rows):
            raise no_column(name, itertools.chain(*self._rows))
        return [row.get(name, math.nan) for row in self._rows]

    @property
    def _scores(self) -> list[str]:
        """Names of logs and validation scores: all columns outside `COLUMNS`."""
        names = dict.fromkeys(name for row in self._rows for name in row)
        return [name for name in names if name not in COLUMNS]

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
        return f"History({count_of(len(self), 'epoch')}, last loss {last['loss']:.4g})"

    # ---- tables and plots

    def _repr_html_(self) -> str:
        rows = self._rows
        if len(rows) > 2 * MAX_SHOWN:
            rows = [*rows[:MAX_SHOWN], *rows[-MAX_SHOWN:]]
        return f"<p>{html.escape(repr(self))}</p>" + self._table(rows)

    def _table(self, rows: Sequence[Row]) -> str:
        """Render rows as a table; empty without rows."""
        columns = [name for name in MAIN_COLUMNS if rows and name in self._rows[-1]]
        columns[2:2] = self._scores
        cells = [[_with_unit(n, row.get(n, math.nan)) for n in columns] for row in rows]
        return report.table(cells, columns)

    def plot(self, *columns: str) -> "Figure":
        """Plot columns by epoch into a new figure, which notebooks show.

        Args:
            *columns: Names of numeric columns, one plot for each; plots of ``"loss"``
                and of logs also show the score of the validation data. Without names:
                loss, logs, accuracy, speed, and density.

        Raises:
            OptionError: If a column does not exist or is not numeric, if the history
                has no epochs, or if matplotlib is not installed.

        Example:
            >>> history = History([{"epoch": 0, "loss": 0.5}])
            >>> history.plot("loss").axes  # doctest: +ELLIPSIS
            [<Axes: ...]
        """
        if not self._rows:
            raise OptionError("a history without epochs has nothing to plot")
        last = self._rows[-1]
        numeric = [name for name, x in last.items() if isinstance(x, int | float)]
        for name in columns:
            if name not in numeric:
                raise OptionError(
                    f"columns must be among {', '.join(map(repr, numeric))}, got "
                    f"{name!r}"
                )
        usual = ("loss", *self._charted, "examples_per_s", "density")
        chosen = columns or tuple(name for name in usual if name in last)
        return plots.figure_of([functools.partial(self._plot, n) for n in chosen])

    def _plot(self, name: str, figure: "SubFigure") -> None:
        axes = figure.add_subplot()
        axes.set_prop_cycle(color=plots.COLORS)
        axes.set(title=name, xlabel="epoch")
        for line in self._lines(name):
            axes.plot(line.x, line.y, marker=".", label=line.name)
        if len(axes.lines) > 1:
            axes.legend(frameon=False)

    def _lines(self, name: str) -> list[Line]:
        """Return a column by epoch, and its validation score if there is one."""
        lines = []
        for column in (name, f"val_{name}"):
            rows = [(row["epoch"], row[column]) for row in self._rows if column in row]
            if rows:
                lines.append(Line(column, *zip(*rows, strict=True)))
        return lines

    @property
    def _charted(self) -> list[str]:
        """Logs and scores that have their own plot."""
        scores = self._scores
        paired = {f"val_{name}" for name in ("loss", *scores)}
        return [name for name in scores if name not in paired]

    # ---- the report

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write a report of the fit: one HTML file that needs no network.

        The report has a summary, the error if the fit failed, curves, layers if they
        were sampled, the time by activity, the timeline of each replica, the replicas
        that joined and left, epochs, options and versions. The file has a few megabytes
        at most.

        Args:
            path: File to write; an existing file is replaced.

        Raises:
            OSError: If the file cannot be written.
        """
        Path(path).write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        run, timeline = self.run, self.timeline
        left = {
            replica: (record["left"], record["reason"])
            for replica, record in run.replicas.items()
            if record["left"] is not None
        }
        spans = ""
        if len(timeline):
            packed = np.frombuffer(timeline.packed(), SPANS)
            joined = {r: record["joined"] for r, record in run.replicas.items()}
            spans = report.timeline(packed, timeline.began, left, joined)
        last = len(self) - 1
        shown = [*range(0, last, -(-len(self) // MAX_EPOCHS) or 1), last]
        epochs = [self._rows[i] for i in shown] if self._rows else []
        count = f", {len(epochs)} of {len(self)}" if len(epochs) < len(self) else ""
        return report.page(
            f"daskdl: {run.name or 'fit'}",
            [
                ("Error", f"<pre>{html.escape(run.error)}</pre>" if run.error else ""),
                ("Summary", report.table(self._facts())),
                ("Curves", f'<div class="charts">{self._charts()}</div>'),
                ("Layers", self._layer_charts() if len(self.layers) else ""),
                ("Where the time went", report.shares(timeline.seconds())),
                ("Timeline", spans),
                ("Replicas", self._replica_table()),
                (f"Epochs{count}", self._table(epochs)),
                ("Options", report.table(run.options.items())),
                ("Versions", report.table(run.versions.items())),
            ],
        )

    def _facts(self) -> list[tuple[str, Any]]:
        """Return the names and values of the summary."""
        run, rows = self.run, self._rows
        facts: list[tuple[str, Any]] = []
        if run.began:
            began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.began))
            facts += [("run", run.id), ("began", began)]
        facts.append(("epochs", len(rows)))
        if not math.isnan(run.seconds):
            facts.append(("seconds", run.seconds))
        if rows:
            names = ("loss", *self._scores)
            facts += [(name, rows[-1][name]) for name in names if name in rows[-1]]
        if self.stopping is not None:
            best = self.stopping.best_epoch
            facts.append(("early stopping", self.stopping.details or "all epochs ran"))
            if self.stopping.monitor is not None:
                facts.append(("best epoch", "none" if best is None else best))
        if run.replicas:
            gone = sum(r["left"] is not None for r in run.replicas.values())
            facts += [("replicas", len(run.replicas)), ("replicas that left", gone)]
        for name in SUMMED:
            if any(name in row for row in rows):
                total = sum(row.get(name, 0) for row in rows)
                if total or name in SUMMED[:3]:
                    facts.append((name.replace("_", " "), _with_unit(name, total)))
        seconds = sum(row.get("seconds", 0) for row in rows)
        if seconds:
            examples = sum(row["examples"] for row in rows)
            facts.append(("examples per second", examples / seconds))
        return facts

    def _charts(self) -> str:
        losses: dict[int, list[tuple[int, float]]] = {}
        for row in self.steps:
            losses.setdefault(row["replica"], []).append((row["step"], row["loss"]))
        by_step = [
            Line(f"replica {replica}", *zip(*points, strict=True))
            for replica, points in sorted(losses.items())
        ]
        charts = [report.chart("loss", "epoch", self._lines("loss"))]
        charts.append(report.chart("loss of single steps", "step", by_step))
        for name in (*self._charted, *CHARTED):
            unit = "B" if name.endswith(BYTES) else ""
            charts.append(report.chart(name, "epoch", self._lines(name), unit))
        return "".join(charts)

    def _layer_charts(self) -> str:
        """Return charts of the norms, and histograms of the latest sample."""
        charts, means = [], self.layers.means()
        for title, name in (
            ("log10 of update norm / parameter norm", "ratio"),
            ("norm of the gradient", "gradient_norm"),
            ("norm of the residual", "residual_norm"),
        ):
            lines = []
            for layer, by_step in means.items():
                values = [norms[name] for norms in by_step.values()]
                if name == "ratio":
                    values = [math.log10(v) if v > 0 else math.nan for v in values]
                lines.append(Line(layer, list(by_step), values))
            charts.append(report.chart(title, "step", lines))
        latest = max(self.layers, key=lambda row: (row["step"], -row["replica"]))
        sample = [
            [
                *(row["name"], *(row[name] for name in NORMS)),
                *(
                    report.histogram(
                        row[f"{x}_low"], row[f"{x}_high"], row[f"{x}_counts"]
                    )
                    for x in ("parameter", "gradient", "update")
                ),
            ]
            for row in self.layers
            if (row["step"], row["replica"]) == (latest["step"], latest["replica"])
        ]
        columns = ["name", *(name.replace("_", " ") for name in NORMS)]
        count = ""
        if len(sample) > MAX_LAYERS:
            count = f", {MAX_LAYERS} of {len(sample)} layers"
        return (
            f'<div class="charts">{"".join(charts)}</div><p>Lines are means over the '
            f"replicas. Step {latest['step']} of replica {latest['replica']}{count}:"
            "</p>"
            + report.table(
                sample[:MAX_LAYERS], [*columns, "parameters", "gradients", "updates"]
            )
        )

    def _replica_table(self) -> str:
        run, timeline = self.run, self.timeline
        rows = []
        for replica in sorted({*run.replicas, *timeline.replicas}):
            record = run.replicas.get(replica, {})
            left = record.get("left")
            rows.append(
                (
                    replica,
                    record.get("worker", ""),
                    record.get("joined", math.nan),
                    "" if left is None else left,
                    record.get("reason", ""),
                    report.bar(timeline.seconds(replica)),
                )
            )
        columns = ("replica", "worker", "joined, s", "left, s", "reason", "time")
        return report.table(rows, columns)
