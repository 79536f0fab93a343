"""The page ``/daskdl`` of Dask's dashboard, and metrics for Prometheus.

A `RunView` keeps a bounded number of the reports of a run, for a bounded time. bokeh
and prometheus_client are optional.
"""

import asyncio
import contextlib
import functools
import html
import importlib.util
import logging
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import dask
import numpy as np
from dask.utils import format_bytes, format_time
from numpy.typing import NDArray

from daskdl.channel.leasing import RunSpec
from daskdl.channel.protocol import LiveReport, run_id
from daskdl.channel.run_state import Membership, MemberState
from daskdl.errors import shown
from daskdl.observe.report import Html, number, table
from daskdl.observe.tables import Thinned

logger = logging.getLogger(__name__)

PATH = "daskdl"  # of the page, relative to the dashboard
UPDATE_MS = 1000
KEPT_S = 3600.0  # for which a finished run stays
MOST_OVER = 16  # finished runs
# A report takes 900 bytes, and an open page draws all reports each second.
MOST_REPORTS = 2048  # of all replicas of a run
MOST_EPOCHS = 512
MOST_LISTED = 64  # replicas in the table; replicas that left, in the metrics
STALE_S = 5.0  # age of the last report beyond which a replica has no speed

Columns = dict[str, NDArray[np.float64]]


# ---- the record of a run


class TimedReport(NamedTuple):
    """A report of a replica, and the time of its arrival."""

    replica: int
    second: float  # since the run began
    live: LiveReport


RATES = {  # by column, the counter whose increase per second it shows
    "examples_per_s": "examples",
    "bytes_per_s": "sent_bytes",
    "waiting": "waits_s",
}


def columns_of(reports: Sequence[TimedReport]) -> Columns:
    """Return the fields of a replica's reports, and means since the previous report.

    Args:
        reports: In order of time. The first report only starts the means.

    Returns:
        Columns by name; ``waits_s`` is the sum over all causes. NaN if not measured.
    """
    names = ("second", *LiveReport._fields)
    rows = [(r.second, *r.live[:-1], math.fsum(r.live[-1].values())) for r in reports]
    values = np.array(rows, np.float64)
    columns: Columns = dict(zip(names, values[1:].T, strict=True))
    change = dict(zip(names, np.diff(values, axis=0).T, strict=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        weight = change["examples"] + change["excess"]
        columns["loss"] = change["loss_sum"] / weight
        for rate, counter in RATES.items():
            columns[rate] = change[counter] / change["at_s"]
    return columns


class RunView:
    """The bounded record of a run that the dashboard shows; for one event loop.

    Args:
        spec: The run.
        members: The replicas of the run, which updates them.
        now: Time on the scheduler's clock, seconds.

    Attributes:
        run: Id of the run.
        name: Name of the run.
        title: Describes the model.
        epochs: Number of epochs, including those before a checkpoint; None if unknown.
        reports: Reports of all replicas, thinned evenly.
        ended: By epoch, the last report of each replica in that epoch, once the replica
            has started the next epoch.
        rows: Rows of the client's history, by epoch.
        row: The newest of these rows; empty before the first.
        version: Increases when a report or a row arrives.
        over: Time and reason of the end of the run; None before.
    """

    def __init__(self, spec: RunSpec, members: Membership, now: float) -> None:
        self.run = spec.run
        self.name = shown(spec.name)
        self.title = shown(spec.title)
        self.epochs = spec.epochs
        self.reports: Thinned[TimedReport] = Thinned(MOST_REPORTS)
        self.ended: Thinned[TimedReport] = Thinned(MOST_REPORTS)
        self.rows: Thinned[Mapping[str, Any]] = Thinned(MOST_EPOCHS)
        self.row: Mapping[str, Any] = {}
        self.version = 0
        self.over: tuple[float, str] | None = None
        self._began_at = now
        rows = spec.sizes["train"].rows
        self._per_epoch = sum(rows) if min(rows, default=-1) >= 0 else 0  # 0: unknown
        self._former: dict[int, MemberState] = {}  # before the run opened again
        self._counts: Counter[int] = Counter()  # reports by replica
        self._last: dict[int, TimedReport] = {}  # by replica
        # Two recent reports of each replica, at least a second apart.
        self._marks: dict[int, tuple[TimedReport, TimedReport]] = {}
        self._begin(spec, members)

    def _begin(self, spec: RunSpec, members: Membership) -> None:
        self.members = members
        self._first_epoch = spec.first_epoch
        self._first_report: TimedReport | None = None  # since the run opened last

    # ---- for the plugin

    def open_again(self, spec: RunSpec, members: Membership) -> None:
        """Continue with other replicas, and without the epochs that they repeat."""
        self._former |= self.members.replicas
        self._begin(spec, members)
        rows = self.rows.numbered
        self.rows.numbered = [row for row in rows if row[0] < spec.first_epoch]
        self.row = self.rows.numbered[-1][1] if self.rows.numbered else {}
        self.over = None
        self.version += 1

    def report(self, replica: int, live: LiveReport, now: float) -> None:
        """Record a live report of a replica, unless a newer report arrived before."""
        new, initial = TimedReport(replica, self.second(now), live), _initial(replica)
        last = self._last.get(replica, initial)
        if (live.epoch, live.step) < (last.live.epoch, last.live.step):
            return
        if live.epoch > last.live.epoch and last is not initial:
            self.ended.add(last.live.epoch, last)
        _, mark = self._marks.get(replica, (initial, initial))
        if not live.at_s - mark.live.at_s < 1.0:  # NaN before the first report
            self._marks[replica] = mark, new
        self._last[replica] = new
        self._counts[replica] += 1
        self.reports.add(self._counts[replica], new)
        self._first_report = self._first_report or new
        self.version += 1

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Record a row of the history: numbers, and waits by cause."""
        self.rows.add(row["epoch"], row)
        self.row = row
        self.version += 1

    # ---- for pages and collectors

    def second(self, at: float) -> float:
        """Return the seconds from the start of the run to a time on the same clock."""
        return at - self._began_at

    @property
    def present(self) -> dict[int, MemberState]:
        """Replicas that take part now, by number."""
        if self.over is not None:
            return {}
        return {r: self.members.replicas[r] for r in self.members.present}

    @property
    def replicas(self) -> dict[int, MemberState]:
        """All replicas of the run by number, from each time that it opened."""
        return {**self._former, **self.members.replicas}

    @property
    def listed(self) -> dict[int, MemberState]:
        """Replicas that take part, followed by those that left last."""
        members = self.replicas
        gone = [r for r, member in members.items() if member.joined and member.gone]
        gone.sort(key=lambda r: members[r].gone_at)
        order = *self.members.present, *sorted(gone[-MOST_LISTED:])
        return {replica: members[replica] for replica in order}

    def last(self, replica: int) -> dict[str, float]:
        """Return the columns of a replica's last report; empty before the first."""
        if replica not in self._last:
            return {}
        columns = columns_of((self._marks[replica][0], self._last[replica]))
        return {name: float(column[0]) for name, column in columns.items()}

    def waits_s(self, replica: int) -> Mapping[str, float]:
        """Return the seconds that a replica has waited, by cause."""
        return self._last[replica].live.waits_s if replica in self._last else {}

    @property
    def epoch(self) -> int:
        """The epoch of the most advanced replica, counted from 0."""
        reached = [last.live.epoch for last in self._last_now()]
        return max(reached, default=self._first_epoch)

    def _last_now(self) -> list[TimedReport]:
        """Return the last reports since the run opened last."""
        return [self._last[r] for r in self.members.replicas if r in self._last]

    def speed(self, now: float) -> float:
        """Return the examples per second of all replicas that reported recently."""
        second = self.second(now)
        speeds = [
            last["examples_per_s"]
            for last in map(self.last, self.present)
            if last and second - last["second"] <= STALE_S
        ]
        return math.fsum(speed for speed in speeds if math.isfinite(speed))

    def left_s(self, now: float) -> float | None:
        """Return the seconds left in the run at the mean speed; None if unknown."""
        if self.over is not None or self.epochs is None or self._first_report is None:
            return None
        per_epoch = self._per_epoch or self.row.get("examples", 0)
        trained = sum(last.live.examples for last in self._last_now())
        counted = trained - self._first_report.live.examples
        if not per_epoch or counted <= 0:
            return None
        left = (self.epochs - self._first_epoch) * per_epoch - trained
        return max(left, 0) * (self.second(now) - self._first_report.second) / counted

    def series(self) -> dict[int, Columns]:
        """Return the columns of each replica's reports, see `columns_of`."""
        return _by_replica(report for _, report in self.reports.numbered)

    def losses(self) -> dict[int, Columns]:
        """Return the columns of each replica's last report in each epoch."""
        ended = [report for _, report in self.ended.numbered]
        return _by_replica([*ended, *self._last.values()])


def _initial(replica: int) -> TimedReport:
    """Return the state of a replica before its first report; its clock is unknown."""
    return TimedReport(replica, 0.0, LiveReport())


def _by_replica(reports: Iterable[TimedReport]) -> dict[int, Columns]:
    by_replica: dict[int, list[TimedReport]] = {}
    for report in reports:
        initial = _initial(report.replica)
        by_replica.setdefault(report.replica, [initial]).append(report)
    return {replica: columns_of(r) for replica, r in sorted(by_replica.items())}


def total_speed(
    series: Mapping[int, Columns],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return seconds since the run began, and examples per second of all replicas."""
    if not series:
        return np.zeros(0), np.zeros(0)
    times = [columns["second"] for columns in series.values()]
    start, end = min(t[0] for t in times), max(t[-1] for t in times)
    seconds = np.linspace(start, end, int(min(end - start, 256.0)) + 1)
    examples = [np.interp(seconds, c["second"], c["examples"]) for c in series.values()]
    return seconds[1:], np.diff(np.sum(examples, 0)) / np.diff(seconds)


def scores_in(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the training loss and the validation scores of a row, without NaN."""
    return {
        name: float(value)
        for name, value in row.items()
        if (name == "loss" or name.startswith("val_")) and not math.isnan(value)
    }


class Dashboard:
    """The runs of a scheduler: those in progress and those that finished recently.

    Attributes:
        runs: Views by run, oldest first.
    """

    runs: dict[int, RunView]

    def __init__(self) -> None:
        self.runs = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}  # of finished runs

    def open(self, spec: RunSpec, members: Membership, now: float) -> RunView:
        """Show a run; one that opens again after its end continues."""
        run, view = spec.run, self.runs.get(spec.run)
        if view is None:
            view = RunView(spec, members, now)
        else:
            self._remove(run)
            view.open_again(spec, members)
        self.runs[run] = view
        return view

    def end(self, run: int, why: str, loop: asyncio.AbstractEventLoop) -> None:
        """Show a run as finished; remove it in an hour."""
        self.runs[run].over = loop.time(), shown(why, 500)
        self._timers[run] = loop.call_later(KEPT_S, self._remove, run)
        for oldest in list(self._timers)[:-MOST_OVER]:
            self._remove(oldest)

    def forget(self) -> None:
        """Remove all finished runs."""
        for run in list(self._timers):
            self._remove(run)

    def _remove(self, run: int) -> None:
        self._timers.pop(run).cancel()
        del self.runs[run]

    def connect(self, scheduler: Any) -> None:
        """Add the page and the metrics to the HTTP server of a scheduler."""
        with contextlib.suppress(ImportError):
            metrics().dashboards.add(self)
        applications = scheduler.http_application.applications
        pages = [app for app in applications if hasattr(app, "app_paths")]
        if pages:  # otherwise, the scheduler runs without a dashboard
            _add_page(self, scheduler, pages[0].prefix)
        elif importlib.util.find_spec("bokeh") is None:
            logger.info(
                "bokeh is not installed with the scheduler, so its dashboard has no "
                "page /%s: pip install daskdl[dashboard]",
                PATH,
            )


# ---- Prometheus

# Name, description, and column of a replica's last report.
METRICS = (
    ("examples_total", "Examples trained on", "examples"),
    ("sent_bytes_total", "Bytes of updates sent", "sent_bytes"),
    ("received_bytes_total", "Bytes received", "received_bytes"),
    ("wait_seconds_total", "Seconds waited", "waits_s"),
    ("examples_per_second", "Speed of training", "examples_per_s"),
    ("loss", "Mean training loss of the last second", "loss"),
    ("step", "Steps taken", "step"),
    ("density", "Parameters sent / parameters", "density"),
    ("threshold", "Threshold, parameter units", "threshold"),
    ("residual", "99th percentile of residual / threshold", "residual_p99"),
    ("staleness_steps", "Steps ahead of the slowest replica", "staleness"),
    ("learning_rate", "Learning rate", "learning_rate"),
)


class Metrics:
    """Collects the metrics of all dashboards of this process, for Prometheus."""

    def __init__(self) -> None:
        self.dashboards: weakref.WeakSet[Dashboard] = weakref.WeakSet()

    def collect(self) -> Iterator[Any]:
        """Yield the families of metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        namespace = dask.config.get("distributed.dashboard.prometheus.namespace")
        prefix = f"{namespace}_daskdl" if namespace else "daskdl"

        def family(name: str, what: str, *labels: str) -> Any:
            counts = name.endswith("_total")
            kind = CounterMetricFamily if counts else GaugeMetricFamily
            return kind(f"{prefix}_{name}", what, labels=labels)

        training = family("runs", "Runs in progress")
        present = family("replicas", "Replicas that take part", "run")
        failed = family("replicas_failed", "Replicas that have failed", "run")
        epoch = family("epoch", "Epoch of the most advanced replica, from 0", "run")
        scores = family("score", "Scores of the last finished epoch", "run", "score")
        by_replica = {m: family(*m[:2], "run", "replica") for m in METRICS}
        runs = [run for board in self.dashboards for run in list(board.runs.values())]
        training.add_metric([], sum(run.over is None for run in runs))
        for run in runs:
            label, here = run_id(run.run), run.present
            members = list(run.replicas.values())
            present.add_metric([label], len(here))
            failed.add_metric([label], sum(member.failed for member in members))
            epoch.add_metric([label], run.epoch)
            for score, value in scores_in(run.row).items():
                scores.add_metric([label, score], value)
            for replica in run.listed:
                last = run.last(replica)
                for (name, _, column), metric in by_replica.items():
                    value = last.get(column, math.nan)
                    is_current = replica in here or name.endswith("_total")
                    if is_current and not math.isnan(value):
                        metric.add_metric([label, str(replica)], value)
        yield from (training, present, failed, epoch, scores, *by_replica.values())


@functools.cache
def metrics() -> Metrics:
    """Register the collector with Prometheus, once per process, as Dask does."""
    from prometheus_client import REGISTRY

    collector = Metrics()
    REGISTRY.register(collector)
    return collector


# ---- the page

TEMPLATE = """{% extends "simple.html" %}
{% block extra_resources %}
<style>
  :root { color-scheme: light dark; }
  body { height: auto; }
  @media (prefers-color-scheme: dark) {
    html, body { background: #121212; color: #ddd; }
    .navbar ul { background-color: #2a2a2a; }
    .navbar li a { color: #ddd; }
  }
</style>
{% endblock %}
"""
STYLE = """
  h2 { font-size: 18px; margin: 12px 0 4px; }
  p { margin: 4px 0; }
  table { border-collapse: collapse; font-size: 13px; }
  th, td { padding: 2px 10px 2px 0; text-align: right; white-space: nowrap; }
  th { font-weight: normal; opacity: 0.7; }
  th:last-child, td:last-child { text-align: left; }
"""
INK = "#808080"  # legible on white and on black
RED = "#d62728"
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#17becf")
THEME = {
    "attrs": {
        "Plot": {
            "background_fill_color": None,
            "border_fill_color": None,
            "outline_line_color": None,
        },
        "Title": {"text_color": INK},
        "Axis": {
            "axis_label_text_color": INK,
            "axis_line_color": INK,
            "major_label_text_color": INK,
            "major_tick_line_color": INK,
            "minor_tick_line_color": None,
        },
        "Grid": {"grid_line_color": INK, "grid_line_alpha": 0.25},
        "Toolbar": {"logo": None, "autohide": True},
    }
}
FIGURES = (  # title, columns of the x and y axes, label of the x axis
    ("Loss by epoch", "epoch", "loss", "epoch; grey: all replicas, red: validation"),
    ("Loss by step", "step", "loss", "step of the replica"),
    ("Examples per second", "second", "examples_per_s", "seconds; grey: all replicas"),
    ("Density", "second", "density", "seconds"),
    ("Threshold", "second", "threshold", "seconds"),
    ("Residual / threshold, 99th percentile", "second", "residual_p99", "seconds"),
    ("Bytes sent per second", "second", "bytes_per_s", "seconds"),
    ("Staleness, steps", "second", "staleness", "seconds"),
    ("Fraction of the time waited", "second", "waiting", "seconds"),
)
# Column of the history, name and color of its curve.
SCORES = ("loss", "all replicas", INK), ("val_loss", "validation", RED)
REPLICA_COLUMNS = {  # by column of the table, the column of the last report
    "epoch": "epoch",
    "step": "step",
    "loss": "loss",
    "examples/s": "examples_per_s",
    "examples": "examples",
    "learning rate": "learning_rate",
    "density": "density",
    "threshold": "threshold",
    "residual p50": "residual_p50",
    "p99": "residual_p99",
    "norm": "residual_norm",
    "staleness": "staleness",
}


class Curve(NamedTuple):
    """A curve in a figure."""

    name: str
    color: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    width: float = 1.5


def heading(run: RunView, now: float) -> str:
    """Return the title and the progress of a run, as HTML."""
    row, status = run.row, [f"{len(run.present)} replicas"]
    if run.over is None:
        left = run.left_s(now)
        about = f"; about {format_time(left)} left" if left and left >= 1 else ""
        state = f"training for {format_time(run.second(now))}{about}"
        status.insert(0, f"{number(run.speed(now))} examples/s")
    else:
        at, why = run.over
        took = format_time(run.second(at))
        state = f"ended after {took}, {format_time(now - at)} ago: {why}"
    total = "" if run.epochs is None else f" of {run.epochs}"
    status.insert(0, f"epoch {min(run.epoch + 1, run.epochs or math.inf):.0f}{total}")
    status += [f"{name} {number(value)}" for name, value in scores_in(row).items()]
    paragraphs = [f"{run.title}; run {run_id(run.run)}, {state}", " · ".join(status)]
    if row:
        paragraphs.append(
            f"Epoch {row['epoch'] + 1}: density {row['density']:.3g} · "
            f"sent {format_bytes(row['sent_bytes'])} · "
            f"dense {format_bytes(row['dense_bytes'])} · "
            f"staleness {row['staleness']:.3g} · waits {_waits(row['waits'])}"
        )
    body = "".join(f"<p>{html.escape(paragraph)}</p>" for paragraph in paragraphs)
    return f"<h2>{html.escape(run.name)}</h2>{body}"


def _waits(waits_s: Mapping[str, float]) -> str:
    """Format waits by cause, longest first."""
    order = sorted(waits_s.items(), key=lambda item: -item[1])
    return ", ".join(f"{c} {s:.1f} s" for c, s in order if s >= 0.05) or "–"


def replica_table(run: RunView) -> str:
    """Return the last numbers, the worker and the fate of each replica, as HTML."""
    rows: list[Sequence[Any]] = []
    present = run.present
    for replica, member in list(run.listed.items())[:MOST_LISTED]:
        last, waits_s = run.last(replica), run.waits_s(replica)
        waits, waited_s = html.escape(_waits(waits_s)), math.fsum(waits_s.values())
        if replica not in present:
            last.pop("examples_per_s", None)
        numbers = [last.get(column, math.nan) for column in REPLICA_COLUMNS.values()]
        color = COLORS[replica % len(COLORS)]
        fate = f"{shown(member.worker)}, joined at {run.second(member.joined_at):.1f} s"
        if member.gone:
            fate += f"; at {run.second(member.gone_at):.1f} s {member.why}"
        rows.append(
            (
                Html(f'<span style="color: {color}">■</span> {replica}'),
                *numbers,
                format_bytes(int(last.get("sent_bytes", 0))),
                format_bytes(int(last.get("received_bytes", 0))),
                Html(f'<span title="{waits}">{waited_s:.1f} s</span>'),
                fate,
            )
        )
    columns = "replica", *REPLICA_COLUMNS, "sent", "received", "waited", "worker"
    return table(rows, columns)


def curves_of(run: RunView) -> list[list[Curve]]:
    """Return the curves of each of `FIGURES`, without values that were not measured."""
    series, losses = run.series(), run.losses()
    rows = [row for _, row in run.rows.numbered]
    epochs = np.array([row["epoch"] for row in rows], np.float64)
    figures = []
    for _, x, y, _ in FIGURES:
        curves = []
        if x == "epoch":
            for name, label, color in SCORES:
                scores = np.array([scores_in(row).get(name, math.nan) for row in rows])
                curves.append(Curve(label, color, epochs, scores, width=3.0))
        elif y == "examples_per_s":
            curves.append(Curve("all replicas", INK, *total_speed(series), width=3.0))
        for replica, columns in (losses if x == "epoch" else series).items():
            color = COLORS[replica % len(COLORS)]
            curves.append(Curve(f"replica {replica}", color, columns[x], columns[y]))
        measured = [(curve, np.isfinite(curve.y)) for curve in curves]
        figures.append([c._replace(x=c.x[k], y=c.y[k]) for c, k in measured if k.any()])
    return figures


class _Section:
    """The section of a run on an open page, as models of bokeh."""

    def __init__(self, run: RunView) -> None:
        from bokeh.layouts import column, row
        from bokeh.models import Div

        self._run = run
        self._shown: tuple[object, ...] = ()
        wide = {"sizing_mode": "stretch_width", "styles": {"overflow-x": "auto"}}
        self._head, self._table = (Div(stylesheets=[STYLE], **wide) for _ in range(2))
        self._sources: list[Any] = []
        figures = [self._figure(title, label) for title, _, _, label in FIGURES]
        self.root = column(
            self._head,
            row(figures, styles={"flex-wrap": "wrap"}),
            self._table,
            sizing_mode="stretch_width",
        )

    def _figure(self, title: str, label: str) -> Any:
        from bokeh.models import ColumnDataSource, HoverTool
        from bokeh.plotting import figure

        source = ColumnDataSource(_data_of(()), name=title)
        self._sources.append(source)
        plot = figure(title=title, width=400, height=220, tools="pan,wheel_zoom,reset")
        plot.xaxis.axis_label = label
        lines = plot.multi_line(
            "x", "y", line_color="color", line_width="width", source=source
        )
        plot.scatter("last_x", "last_y", color="color", size=5, source=source)
        tips = [("", "@name"), ("", "$snap_x, $snap_y")]
        hover = HoverTool(tooltips=tips, renderers=[lines], line_policy="nearest")
        plot.add_tools(hover)
        return plot

    def update(self, now: float) -> None:
        """Show the present state of the run."""
        run = self._run
        self._head.text = heading(run, now)
        version = run.version, run.members.generation, run.over
        if version == self._shown:
            return
        self._shown = version
        self._table.text = replica_table(run)
        for source, curves in zip(self._sources, curves_of(run), strict=True):
            source.data = _data_of(curves)


def _data_of(curves: Sequence[Curve]) -> dict[str, Any]:
    """Return the data of a figure's source: a row for each curve."""
    data = {name: [getattr(curve, name) for curve in curves] for name in Curve._fields}
    last = {f"last_{axis}": [points[-1] for points in data[axis]] for axis in "xy"}
    return {**data, **last}


def _add_page(dashboard: Dashboard, scheduler: Any, prefix: str) -> None:
    """Add the page to a scheduler's dashboard, and a link to it to the menu."""
    from bokeh.layouts import column
    from bokeh.models import Div
    from bokeh.themes import Theme
    from distributed.dashboard.components.scheduler import env
    from distributed.dashboard.core import BokehApplication
    from distributed.dashboard.scheduler import template_variables
    from tornado.ioloop import IOLoop

    variables = template_variables(scheduler)  # shared with Dask's own pages
    if PATH not in variables["pages"]:
        variables["pages"].append(PATH)
    loop = asyncio.get_running_loop()

    def page(_: Any, extra: Mapping[str, Any], document: Any) -> None:
        empty = Div(text="<p>No run in progress, and none within the last hour.</p>")
        root = column(empty, sizing_mode="stretch_width", name=PATH)
        sections: dict[RunView, _Section] = {}

        def update() -> None:
            runs = [*reversed(dashboard.runs.values())]
            for gone in sections.keys() - set(runs):
                del sections[gone]
            for run in runs:
                if run not in sections:
                    sections[run] = _Section(run)
                sections[run].update(loop.time())
            newest = [sections[run].root for run in runs] or [empty]
            if root.children != newest:
                root.children = newest

        update()
        document.add_root(root)
        document.add_periodic_callback(update, UPDATE_MS)
        document.title = "daskdl"
        document.template = env.from_string(TEMPLATE)
        document.template_variables.update(extra)
        document.theme = Theme(json=THEME)

    application = BokehApplication(
        {f"/{PATH}": page}, scheduler, prefix=prefix, template_variables=variables
    )
    application.initialize(IOLoop.current())
    scheduler.http_application.add_application(application)
    application.start()
