"""The page ``/daskdl`` of Dask's dashboard, and numbers for Prometheus.

Hides what the scheduler keeps of a run to show it, within which bounds and for how
long, and how it is drawn. bokeh and prometheus_client are optional.
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
from daskdl.channel.protocol import LiveReport
from daskdl.channel.run_state import Member, Membership
from daskdl.errors import shown
from daskdl.observe.report import Html, number, table
from daskdl.observe.tables import Thinned

logger = logging.getLogger(__name__)

PATH = "daskdl"  # of the page, relative to the dashboard
UPDATE_MS = 1000
KEPT_S = 3600.0  # how long a run that is over stays
MOST_OVER = 16  # runs that are over
# A report takes 900 bytes, and an open page draws all of them each second.
MOST_REPORTS = 2048  # of all replicas of a run
MOST_EPOCHS = 512
MOST_LISTED = 64  # replicas in the table; replicas that have gone, in the metrics
STALE_S = 5.0  # a replica without a report for so long has no speed

Columns = dict[str, NDArray[np.float64]]


# ---- the record of a run


class Report(NamedTuple):
    """A report of a replica, and when it came."""

    replica: int
    second: float  # since the run began
    live: LiveReport


NOTHING = LiveReport()  # of a replica that has not reported; its clock is unknown
RATES = {  # column, and the counter whose increase per second it is
    "examples_per_s": "examples",
    "bytes_per_s": "sent_bytes",
    "waiting": "waits_s",
}


def columns_of(reports: Sequence[Report]) -> Columns:
    """Return the fields of reports of one replica, and means since the report before.

    Args:
        reports: In order. The first one only begins the means.

    Returns:
        Columns by name; ``waits_s`` is the sum over all causes. NaN: not measured.
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


class RunRecord:
    """What the dashboard shows of one run, within bounds; for one event loop.

    Args:
        spec: The run.
        members: Its replicas, which the run changes.
        now: Time on the scheduler's clock, seconds.

    Attributes:
        run: Id of the run.
        title: Describes the model.
        epochs: Number after the last epoch; None: unknown.
        reports: Reports of all replicas, thinned evenly.
        ended: By epoch, the last report in it of each replica that is beyond it.
        rows: Rows of the client's history, by epoch.
        row: The newest of them; empty before the first.
        version: Increases when a report or a row arrives.
        over: When and why the run ended; None before.
    """

    def __init__(self, spec: RunSpec, members: Membership, now: float) -> None:
        self.run = spec.run
        self.title = shown(spec.title)
        self.epochs = spec.epochs
        self.members = members
        self.reports: Thinned[Report] = Thinned(MOST_REPORTS)
        self.ended: Thinned[Report] = Thinned(MOST_REPORTS)
        self.rows: Thinned[Mapping[str, Any]] = Thinned(MOST_EPOCHS)
        self.row: Mapping[str, Any] = {}
        self.version = 0
        self.over: tuple[float, str] | None = None
        self._began_at = now
        rows = spec.sizes["train"].rows
        self._per_epoch = sum(rows) if min(rows, default=-1) >= 0 else 0  # 0: unknown
        self._first_epoch = spec.first_epoch
        self._counts: Counter[int] = Counter()  # reports by replica
        self._last: dict[int, Report] = {}  # by replica
        # The last two reports of each replica that are a second apart.
        self._marks: dict[int, tuple[Report, Report]] = {}
        self._first: tuple[float, int] | None = None  # second, examples before

    # ---- for the plugin

    def report(self, replica: int, live: LiveReport, now: float) -> None:
        """Record live numbers of a replica."""
        new, nothing = Report(replica, self.second(now), live), _before_all(replica)
        last = self._last.get(replica, nothing)
        if (live.epoch, live.step) < (last.live.epoch, last.live.step):
            return  # it was overtaken
        if live.epoch > last.live.epoch and last is not nothing:
            self.ended.add(last.live.epoch, last)
        _, mark = self._marks.get(replica, (nothing, nothing))
        if not live.at_s - mark.live.at_s < 1.0:  # NaN before the first
            self._marks[replica] = mark, new
        self._last[replica] = new
        self._counts[replica] += 1
        self.reports.add(self._counts[replica], new)
        self._first = self._first or (new.second, live.examples)
        self.version += 1

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Record a row of the history: its numbers, and the waits by cause."""
        self.rows.add(row["epoch"], row)
        self.row = row
        self.version += 1

    # ---- for pages and collectors

    def second(self, at: float) -> float:
        """Seconds from the beginning of the run to a time on the same clock."""
        return at - self._began_at

    @property
    def present(self) -> dict[int, Member]:
        """Replicas that have joined and not gone, by number."""
        if self.over is not None:
            return {}
        return {r: self.members.replicas[r] for r in self.members.present}

    @property
    def listed(self) -> dict[int, Member]:
        """Replicas that are present, and then the last ones that have gone."""
        members = self.members.replicas
        gone = [r for r, one in members.items() if one.joined and one.gone]
        gone.sort(key=lambda r: members[r].gone_at)
        order = *self.members.present, *sorted(gone[-MOST_LISTED:])
        return {replica: members[replica] for replica in order}

    def last(self, replica: int) -> dict[str, float]:
        """The columns of a replica's last report; empty before the first."""
        if replica not in self._last:
            return {}
        columns = columns_of((self._marks[replica][0], self._last[replica]))
        return {name: float(column[0]) for name, column in columns.items()}

    def waits_s(self, replica: int) -> Mapping[str, float]:
        """Seconds that a replica has waited, by cause."""
        return self._last[replica].live.waits_s if replica in self._last else {}

    @property
    def epoch(self) -> int:
        """The epoch of the replica that is furthest, counted from 0."""
        reached = [last.live.epoch for last in self._last.values()]
        return max(reached, default=self._first_epoch)

    def speed(self, now: float) -> float:
        """Examples per second of all replicas that have reported of late."""
        second = self.second(now)
        speeds = [
            own["examples_per_s"]
            for own in map(self.last, self.present)
            if own and second - own["second"] <= STALE_S
        ]
        return math.fsum(speed for speed in speeds if math.isfinite(speed))

    def left_s(self, now: float) -> float | None:
        """Seconds that the other examples take at the mean speed; None: unknown."""
        if self.over is not None or self.epochs is None or self._first is None:
            return None
        per_epoch = self._per_epoch or self.row.get("examples", 0)
        since, before = self._first
        trained = sum(last.live.examples for last in self._last.values())
        if not per_epoch or trained <= before:
            return None
        left = (self.epochs - self._first_epoch) * per_epoch - trained
        return max(left, 0) * (self.second(now) - since) / (trained - before)

    def series(self) -> dict[int, Columns]:
        """The columns of each replica's reports, see `columns_of`."""
        return _by_replica(report for _, report in self.reports.numbered)

    def losses(self) -> dict[int, Columns]:
        """The same with one report for each epoch, of the current one the last."""
        ended = [report for _, report in self.ended.numbered]
        return _by_replica([*ended, *self._last.values()])


def _before_all(replica: int) -> Report:
    return Report(replica, 0.0, NOTHING)


def _by_replica(reports: Iterable[Report]) -> dict[int, Columns]:
    found: dict[int, list[Report]] = {}
    for report in reports:
        own = found.setdefault(report.replica, [_before_all(report.replica)])
        own.append(report)
    return {replica: columns_of(own) for replica, own in sorted(found.items())}


def speed_of_all(
    series: Mapping[int, Columns],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds since the run began, and examples per second of all replicas."""
    found = series.values()
    if not found:
        return np.zeros(0), np.zeros(0)
    first = min(own["second"][0] for own in found)
    last = max(own["second"][-1] for own in found)
    seconds = np.linspace(first, last, int(min(last - first, 256.0)) + 1)
    examples = [np.interp(seconds, own["second"], own["examples"]) for own in found]
    return seconds[1:], np.diff(np.sum(examples, 0)) / np.diff(seconds)


def scores_in(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the training loss and the validation scores of a row, without NaN."""
    return {
        name: float(value)
        for name, value in row.items()
        if (name == "loss" or name.startswith("val_")) and not math.isnan(value)
    }


class Dashboard:
    """The runs of one scheduler: those that train, and those that ended of late.

    Attributes:
        runs: Records by run, oldest first.
    """

    runs: dict[int, RunRecord]

    def __init__(self) -> None:
        self.runs = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}  # of runs that are over

    def open(self, record: RunRecord) -> None:
        """Show a run."""
        if record.run in self._timers:
            self._remove(record.run)
        self.runs[record.run] = record

    def end(self, run: int, why: str, loop: asyncio.AbstractEventLoop) -> None:
        """Show a run as over; remove it in an hour."""
        self.runs[run].over = loop.time(), shown(why, 500)
        self._timers[run] = loop.call_later(KEPT_S, self._remove, run)
        for oldest in list(self._timers)[:-MOST_OVER]:
            self._remove(oldest)

    def forget(self) -> None:
        """Remove all runs that are over."""
        for run in list(self._timers):
            self._remove(run)

    def _remove(self, run: int) -> None:
        self._timers.pop(run).cancel()
        del self.runs[run]

    def connect(self, scheduler: Any) -> None:
        """Add the page and the numbers to the HTTP server of a scheduler."""
        with contextlib.suppress(ImportError):
            metrics().dashboards.add(self)
        applications = scheduler.http_application.applications
        pages = [one for one in applications if hasattr(one, "app_paths")]
        if pages:  # else the scheduler was started without a dashboard
            _add_page(self, scheduler, pages[0].prefix)
        elif importlib.util.find_spec("bokeh") is None:
            logger.info(
                "bokeh is not installed with the scheduler, so its dashboard has no "
                "page /%s: pip install daskdl[dashboard]",
                PATH,
            )


# ---- Prometheus

# Name, description, and the column of a replica's last report.
METRICS = (
    ("examples_total", "Examples trained on", "examples"),
    ("sent_bytes_total", "Bytes of updates sent", "sent_bytes"),
    ("received_bytes_total", "Bytes received", "received_bytes"),
    ("wait_seconds_total", "Seconds waited", "waits_s"),
    ("examples_per_second", "Speed of training", "examples_per_s"),
    ("loss", "Mean training loss of the last second", "loss"),
    ("step", "Steps made", "step"),
    ("density", "Parameters sent / parameters", "density"),
    ("threshold", "Threshold, parameter units", "threshold"),
    ("residual", "99th percentile of residual / threshold", "residual_p99"),
    ("staleness_steps", "Steps ahead of the slowest replica", "staleness"),
    ("learning_rate", "Learning rate", "learning_rate"),
)


class Metrics:
    """Collects the numbers of all dashboards of this process when Prometheus asks."""

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

        training = family("runs", "Runs that train")
        present = family("replicas", "Replicas that are here", "run")
        failed = family("replicas_failed", "Replicas that have failed", "run")
        epoch = family("epoch", "Epoch of the replica furthest, from 0", "run")
        scores = family("score", "Scores of the last epoch that ended", "run", "score")
        of_replicas = {m: family(*m[:2], "run", "replica") for m in METRICS}
        runs = [run for board in self.dashboards for run in list(board.runs.values())]
        training.add_metric([], sum(run.over is None for run in runs))
        for run in runs:
            own = f"{run.run:x}"
            members = list(run.members.replicas.values())
            present.add_metric([own], len(run.present))
            failed.add_metric([own], sum(one.failed for one in members))
            epoch.add_metric([own], run.epoch)
            for score, value in scores_in(run.row).items():
                scores.add_metric([own, score], value)
            here = run.present
            for replica in run.listed:
                last = run.last(replica)
                for metric, of_replica in of_replicas.items():
                    name, _, column = metric
                    value = last.get(column, math.nan)
                    keeps = replica in here or name.endswith("_total")
                    if keeps and not math.isnan(value):
                        of_replica.add_metric([own, str(replica)], value)
        yield from (training, present, failed, epoch, scores, *of_replicas.values())


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
FIGURES = (  # title, columns of both axes, label of the horizontal axis
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
OF_ALL = ("loss", "all replicas", INK), ("val_loss", "validation", RED)
REPLICA_COLUMNS = {  # of the table, and of the last report
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


class Line(NamedTuple):
    """One line of a figure."""

    name: str
    color: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    width: float = 1.5


def heading(run: RunRecord, now: float) -> str:
    """Return the title of a run, and how far it is, as HTML."""
    row, took = run.row, format_time(run.second(run.over[0] if run.over else now))
    if run.over is None:
        left = run.left_s(now)
        about = f"; about {format_time(left)} left" if left and left >= 1 else ""
        state = f"training for {took}{about}"
    else:
        at, why = run.over
        state = f"over after {took}, {format_time(now - at)} ago: {why}"
    of = "" if run.epochs is None else f" of {run.epochs}"
    parts = [f"epoch {min(run.epoch + 1, run.epochs or math.inf):.0f}{of}"]
    if run.over is None:
        parts.append(f"{number(run.speed(now))} examples/s")
    parts.append(f"{len(run.present)} replicas")
    parts += [f"{name} {number(value)}" for name, value in scores_in(row).items()]
    lines = [f"Run {run.run:x}, {state}", " · ".join(parts)]
    if row:
        lines.append(
            f"Epoch {row['epoch'] + 1}: density {row['density']:.3g} · "
            f"sent {format_bytes(row['sent_bytes'])} · "
            f"dense {format_bytes(row['dense_bytes'])} · "
            f"staleness {row['staleness']:.3g} · waits {_waits(row['waits'])}"
        )
    paragraphs = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    return f"<h2>{html.escape(run.title)}</h2>{paragraphs}"


def _waits(waits_s: Mapping[str, float]) -> str:
    """Name the causes of waits, longest first."""
    order = sorted(waits_s.items(), key=lambda item: -item[1])
    return ", ".join(f"{c} {s:.1f} s" for c, s in order if s >= 0.05) or "–"


def replica_table(run: RunRecord) -> str:
    """Return the last numbers of each replica, where it is and how it went, as HTML."""
    rows: list[Sequence[Any]] = []
    present = run.present
    for replica, member in list(run.listed.items())[:MOST_LISTED]:
        last, waits_s = run.last(replica), run.waits_s(replica)
        waits, waited_s = html.escape(_waits(waits_s)), math.fsum(waits_s.values())
        if replica not in present:
            last.pop("examples_per_s", None)
        numbers = [last.get(column, math.nan) for column in REPLICA_COLUMNS.values()]
        color = COLORS[replica % len(COLORS)]
        came = f"{shown(member.worker)}, joined at {run.second(member.joined_at):.1f} s"
        gone = f"; at {run.second(member.gone_at):.1f} s {member.why}"
        rows.append(
            (
                Html(f'<span style="color: {color}">■</span> {replica}'),
                *numbers,
                format_bytes(int(last.get("sent_bytes", 0))),
                format_bytes(int(last.get("received_bytes", 0))),
                Html(f'<span title="{waits}">{waited_s:.1f} s</span>'),
                came + (gone if member.gone else ""),
            )
        )
    more = "sent", "received", "waited", "worker"
    return table(rows, ("replica", *REPLICA_COLUMNS, *more))


def lines_of(run: RunRecord) -> list[list[Line]]:
    """Return the lines of each of `FIGURES`, without what was not measured."""
    series, losses = run.series(), run.losses()
    rows = [row for _, row in run.rows.numbered]
    epochs = np.array([row["epoch"] for row in rows], np.float64)
    figures = []
    for _, x, y, _ in FIGURES:
        lines = []
        if x == "epoch":
            scores = [scores_in(row) for row in rows]
            for name, label, color in OF_ALL:
                column = np.array([own.get(name, math.nan) for own in scores])
                lines.append(Line(label, color, epochs, column, width=3.0))
        elif y == "examples_per_s":
            lines.append(Line("all replicas", INK, *speed_of_all(series), width=3.0))
        for replica, columns in (losses if x == "epoch" else series).items():
            color, own = COLORS[replica % len(COLORS)], (columns[x], columns[y])
            lines.append(Line(f"replica {replica}", color, *own))
        measured = [(line, np.isfinite(line.y)) for line in lines]
        figures.append([o._replace(x=o.x[k], y=o.y[k]) for o, k in measured if k.any()])
    return figures


class _Section:
    """One run on one open page, as models of bokeh."""

    def __init__(self, run: RunRecord) -> None:
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
        """Show what the record has now."""
        run = self._run
        self._head.text = heading(run, now)
        version = run.version, run.members.generation, run.over
        if version == self._shown:
            return
        self._shown = version
        self._table.text = replica_table(run)
        for source, lines in zip(self._sources, lines_of(run), strict=True):
            source.data = _data_of(lines)


def _data_of(lines: Sequence[Line]) -> dict[str, Any]:
    """Make the data of a figure's source: a row for each line."""
    data = {name: [getattr(line, name) for line in lines] for name in Line._fields}
    last = {f"last_{axis}": [points[-1] for points in data[axis]] for axis in "xy"}
    return {**data, **last}


def _add_page(dashboard: Dashboard, scheduler: Any, prefix: str) -> None:
    """Add the page to a scheduler's dashboard, and a link to its menu."""
    from bokeh.layouts import column
    from bokeh.models import Div
    from bokeh.themes import Theme
    from distributed.dashboard.components.scheduler import env
    from distributed.dashboard.core import BokehApplication
    from distributed.dashboard.scheduler import template_variables
    from tornado.ioloop import IOLoop

    variables = template_variables(scheduler)  # pages of Dask have the same
    if PATH not in variables["pages"]:
        variables["pages"].append(PATH)
    loop = asyncio.get_running_loop()

    def page(_: Any, extra: Mapping[str, Any], document: Any) -> None:
        empty = Div(text="<p>No run trains here, and none has within the hour.</p>")
        root = column(empty, sizing_mode="stretch_width", name=PATH)
        sections: dict[RunRecord, _Section] = {}

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
