"""The page ``/daskdl`` of Dask's dashboard, and metrics for Prometheus.

A `RunView` keeps a bounded number of the reports of a run, for a bounded time. The page
is a file beside this one, which draws the numbers in the browser: the event loop of the
scheduler only answers requests, and makes each answer at most once per second, for all
viewers. prometheus_client is optional.
"""

import asyncio
import base64
import contextlib
import functools
import json
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dask
import numpy as np
from dask.utils import format_bytes
from numpy.typing import NDArray
from tornado.web import RequestHandler

from daskdl.channel.protocol import LiveReport, run_id
from daskdl.channel.run_state import Membership, MemberState, RunState
from daskdl.errors import count_of, epoch_of, shown
from daskdl.observe.history import COLUMNS
from daskdl.observe.report import number
from daskdl.observe.tables import Thinned

PAGE = Path(__file__).with_suffix(".html")
PATH = "daskdl"  # of the page, relative to the dashboard
UPDATE_S = 1.0  # at most once in this time, an answer is made anew
KEPT_S = 3600.0  # for which a finished run stays
MAX_FINISHED = 16  # finished runs
# A report takes 900 bytes, and an open section gets all reports each second.
MAX_REPORTS = 2048  # of all replicas of a run
MAX_EPOCHS = 512
MAX_LISTED = 64  # replicas in the table; replicas that left, in the metrics
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


class End(NamedTuple):
    """The end of a run."""

    at: float  # time on the scheduler's clock, seconds
    phase: str  # "finished", "stopped" or "failed"
    why: str  # empty if it finished


class RunView:
    """The bounded record of a run that the dashboard shows; for one event loop.

    Args:
        state: The run, while it is open.
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
        over: The end of the run; None before.
    """

    members: Membership

    def __init__(self, state: RunState, now: float) -> None:
        spec = state.spec
        self.run = spec.run
        self.name = shown(spec.name)
        self.title = shown(spec.title)
        self.epochs = spec.epochs
        self.reports: Thinned[TimedReport] = Thinned(MAX_REPORTS)
        self.ended: Thinned[TimedReport] = Thinned(MAX_REPORTS)
        self.rows: Thinned[Mapping[str, Any]] = Thinned(MAX_EPOCHS)
        self.row: Mapping[str, Any] = {}
        self.version = 0
        self.over: End | None = None
        self._began_at = now
        rows = spec.sizes["train"].rows
        self._per_epoch = sum(rows) if min(rows, default=-1) >= 0 else 0  # 0: unknown
        self._former: dict[int, MemberState] = {}  # before the run opened again
        self._counts: Counter[int] = Counter()  # reports by replica
        self._last: dict[int, TimedReport] = {}  # by replica
        # Two recent reports of each replica, at least a second apart.
        self._marks: dict[int, tuple[TimedReport, TimedReport]] = {}
        self._begin(state)

    def _begin(self, state: RunState) -> None:
        self.members = state.members
        self._state: RunState | None = state
        self._first_epoch = state.spec.first_epoch
        self._first_report: TimedReport | None = None  # since the run opened last

    # ---- for the plugin

    def open_again(self, state: RunState) -> None:
        """Continue with other replicas, and without the epochs that they repeat."""
        self._former |= self.members.replicas
        self._begin(state)
        rows = self.rows.numbered
        self.rows.numbered = [row for row in rows if row[0] < self._first_epoch]
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

    def end(self, now: float, *, finished: bool) -> None:
        """Record the end of the run, and release its state."""
        state = self._state
        assert state is not None, "a run ends once"
        phase = "failed" if state.failed else "finished" if finished else "stopped"
        why = "" if phase == "finished" else shown(state.stopped or "", 500)
        self.over, self._state = End(now, phase, why), None

    # ---- for pages and collectors

    @property
    def phase(self) -> str:
        """What the run does.

        ``"starting"`` until the first report, then ``"training"``; ``"waiting"`` for a
        worker after the loss of all replicas; ``"ending"`` once it was stopped; after
        its end see `End`.
        """
        if self.over is not None:
            return self.over.phase
        state = self._state
        assert state is not None, "a run that has not ended has its state"
        if state.stopped is not None:
            return "waiting" if state.deserted else "ending"
        return "starting" if self._first_report is None else "training"

    @property
    def why(self) -> str:
        """Why the run has stopped; empty if it finished, or goes on."""
        if self.over is not None:
            return self.over.why
        assert self._state is not None, "a run that has not ended has its state"
        return shown(self._state.stopped or "", 500)

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
        order = *self.members.present, *sorted(gone[-MAX_LISTED:])
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
    """Return the loss, the logs and the validation scores of a row, without NaN."""
    return {
        name: float(value)
        for name, value in row.items()
        if (name == "loss" or name not in COLUMNS) and not math.isnan(value)
    }


class Announced(NamedTuple):
    """A run that has not opened yet."""

    client: str
    name: str
    title: str
    state: str  # what happens before it opens


class Dashboard:
    """The runs of a scheduler: those in progress and those that finished recently.

    Attributes:
        runs: Views by run, oldest first.
        announced: Runs that have not opened yet.
    """

    runs: dict[int, RunView]
    announced: dict[int, Announced]

    def __init__(self) -> None:
        self.runs, self.announced = {}, {}
        self._timers: dict[int, asyncio.TimerHandle] = {}  # of finished runs
        # By path, the last answer: its key and version, and the time when it was made.
        self._answers: dict[str, tuple[str, str, float, bytes]] = {}

    def open(self, state: RunState, now: float) -> RunView:
        """Show a run; one that opens again after its end continues."""
        run, view = state.spec.run, self.runs.get(state.spec.run)
        if view is None:
            view = RunView(state, now)
        else:
            self._remove(run)
            view.open_again(state)
        self.runs[run] = view
        self.announced.pop(run, None)
        return view

    def end(self, run: int, loop: asyncio.AbstractEventLoop, *, finished: bool) -> None:
        """Show a run as ended; remove it in an hour."""
        self.runs[run].end(loop.time(), finished=finished)
        self._timers[run] = loop.call_later(KEPT_S, self._remove, run)
        for oldest in list(self._timers)[:-MAX_FINISHED]:
            self._remove(oldest)

    def forget(self) -> None:
        """Remove all runs that have ended."""
        for run in list(self._timers):
            self._remove(run)

    def _remove(self, run: int) -> None:
        self._timers.pop(run).cancel()
        del self.runs[run]
        self._answers.pop(run_id(run), None)

    def connect(self, scheduler: Any) -> None:
        """Add the page and the metrics to the HTTP server of a scheduler."""
        with contextlib.suppress(ImportError):
            metrics().dashboards.add(self)
        shared = {"dashboard": self, "clock": asyncio.get_running_loop().time}
        routes = [
            (rf".*/{PATH}", PageHandler),
            (rf".*/{PATH}/runs", RunsHandler, shared),
            (rf".*/{PATH}/runs/(\w+)", RunHandler, shared),
        ]
        scheduler.http_application.add_handlers(r".*", routes)
        applications = scheduler.http_application.applications
        if any(hasattr(app, "app_paths") for app in applications):  # Dask's own pages
            from distributed.dashboard.scheduler import template_variables

            pages = template_variables(scheduler)["pages"]  # of their menu
            if PATH not in pages:
                pages.append(PATH)

    # ---- answers to the page

    def answer(self, now: float) -> bytes:
        """Return the head of each run, newest first, as JSON."""
        phases = [(run, view.phase) for run, view in self.runs.items()]
        key = f"{phases} {self.announced}"
        return self._answer("", key, "", now, lambda: self._heads(now))

    def _heads(self, now: float) -> Mapping[str, Any]:
        coming: list[dict[str, Any]] = [
            {
                "id": run_id(run),
                "name": announced.name,
                "title": announced.title,
                "phase": "starting",
                "state": f"starting: {announced.state}",
                "why": "",
                "ended": None,
                "numbers": [],
                "version": "",  # it has no section yet
            }
            for run, announced in reversed(self.announced.items())
        ]
        runs = [head_of(run, now) for run in reversed(self.runs.values())]
        return {"now": now, "runs": [*coming, *runs]}

    def answer_of(self, run: str, now: float) -> bytes | None:
        """Return what the open section of a run has, as JSON; None: it has gone."""
        view = next((v for v in self.runs.values() if run_id(v.run) == run), None)
        if view is None:
            return None
        version = version_of(view)
        return self._answer(run, view.phase, version, now, lambda: section_of(view))

    def _answer(
        self, path: str, key: str, version: str, now: float, make: Callable[[], Any]
    ) -> bytes:
        """Return an answer with this key, shared by all viewers for a time.

        The version may be older then; an answer of the same version stays longer.
        """
        if path in self._answers:
            former_key, former, made_at, answer = self._answers[path]
            is_same = version != "" and version == former
            if key == former_key and (is_same or now - made_at < UPDATE_S):
                return answer
        answer = json.dumps(make(), allow_nan=False, separators=(",", ":")).encode()
        self._answers[path] = key, version, now, answer
        return answer


# ---- Prometheus

# Of each replica: name, description, and column of its last report. Counters are those
# whose name ends in _total.
METRICS = (
    ("steps_total", "Optimizer steps", "step"),
    ("examples_total", "Examples trained on", "examples"),
    ("sent_bytes_total", "Bytes of updates, residuals and buffers sent", "sent_bytes"),
    ("received_bytes_total", "Bytes of the same kinds received", "received_bytes"),
    ("examples_per_second", "Examples per second", "examples_per_s"),
    ("loss", "Mean training loss of the last second", "loss"),
    ("density", "Parameters sent / parameters, in the last exchange", "density"),
    ("threshold", "Threshold, parameter units", "threshold"),
    (
        "residual_to_threshold_p99",
        "99th percentile of abs(residual) / threshold",
        "residual_p99",
    ),
    ("staleness_steps", "Steps ahead of the slowest replica", "staleness"),
    ("learning_rate", "Learning rate of the first parameter group", "learning_rate"),
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
        families = []

        def family(name: str, what: str, *labels: str) -> Any:
            counts = name.endswith("_total")
            kind = CounterMetricFamily if counts else GaugeMetricFamily
            families.append(kind(f"{prefix}_{name}", what, labels=labels))
            return families[-1]

        def family_of_run(name: str, what: str, *labels: str) -> Any:
            return family(name, what, "run", "name", *labels)

        training = family("runs", "Runs in progress")
        present = family_of_run("replicas", "Replicas that take part")
        failed = family_of_run("replicas_failed_total", "Replicas that failed")
        epoch = family_of_run("epoch", "Epoch of the most advanced replica, from 0")
        scores = family_of_run("score", "Scores of the last finished epoch", "score")
        waits = family_of_run(
            "wait_seconds_total", "Seconds waited", "replica", "cause"
        )
        by_replica = {
            (name, column): family_of_run(name, what, "replica")
            for name, what, column in METRICS
        }
        runs = [run for board in self.dashboards for run in list(board.runs.values())]
        training.add_metric([], sum(run.over is None for run in runs))
        for run in runs:
            labels, here = (run_id(run.run), run.name), run.present
            members = list(run.replicas.values())
            present.add_metric(labels, len(here))
            failed.add_metric(labels, sum(member.failed for member in members))
            epoch.add_metric(labels, run.epoch)
            for score, value in scores_in(run.row).items():
                scores.add_metric([*labels, score], value)
            for replica in run.listed:
                last = run.last(replica)
                for (name, column), metric in by_replica.items():
                    value = last.get(column, math.nan)
                    is_current = replica in here or name.endswith("_total")
                    if is_current and not math.isnan(value):
                        metric.add_metric([*labels, str(replica)], value)
                for cause, waited_s in run.waits_s(replica).items():
                    waits.add_metric([*labels, str(replica), cause], waited_s)
        yield from families


@functools.cache
def metrics() -> Metrics:
    """Register the collector with Prometheus, once per process, as Dask does."""
    from prometheus_client import REGISTRY

    collector = Metrics()
    REGISTRY.register(collector)
    return collector


# ---- the page

INK = "#808080"  # legible on white and on black
RED = "#d62728"
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#17becf")
# Of each replica: title, columns of the x and y axes, unit of y.
FIGURES = (
    ("Loss by step", "step", "loss", ""),
    ("Examples per second", "second", "examples_per_s", ""),
    ("Density", "second", "density", ""),
    ("Threshold", "second", "threshold", ""),
    ("Residual / threshold, 99th percentile", "second", "residual_p99", ""),
    ("Bytes sent per second", "second", "bytes_per_s", "B"),
    ("Staleness, steps", "second", "staleness", ""),
    ("Fraction of the time waited", "second", "waiting", ""),
)
AXES = {"second": "seconds", "step": "step of the replica", "epoch": "epoch, from 0"}
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
WHOLE = "epoch", "step", "examples"


class Curve(NamedTuple):
    """A curve in a figure; y is NaN where it was not measured."""

    name: str
    color: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    width: float = 1.5


class Figure(NamedTuple):
    """A figure of a section."""

    title: str
    x: str  # label of the axis
    unit: str  # of y
    curves: list[Curve]


def version_of(run: RunView) -> str:
    """Return another text whenever the section of a run has something else to show."""
    return f"{run.version}-{run.members.generation}-{run.phase}"


def duration_of(seconds: float) -> str:
    """Return a duration as text, with a precision of a percent or so.

    Example:
        >>> duration_of(0.7), duration_of(89.0), duration_of(150.0), duration_of(7500.0)
        ('1 s', '89 s', '2 min', '2 h 5 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def head_of(run: RunView, now: float) -> dict[str, Any]:
    """Return the line of a run on the page: its name, state and main numbers."""
    phase, over = run.phase, run.over
    lasted = duration_of(run.second(now if over is None else over.at))
    match phase:
        case "starting":
            state = _starting(run)
        case "training":
            state = f"training for {lasted}"
        case "waiting":
            state = "waiting for a worker"
        case "ending":
            state = "ending"
        case _:
            state = f"{phase} after {lasted}"
    numbers = []
    if run.row or run.reports.numbered:
        numbers.append(epoch_of(run.epoch, run.epochs))
    if over is None:
        left_s = run.left_s(now)
        if left_s is not None and left_s >= 1:
            state += f", about {duration_of(left_s)} left"
        if phase == "training":
            numbers.append(f"{number(run.speed(now))} examples/s")
        numbers.append(count_of(len(run.present), "replica"))
    numbers += [f"{name} {number(value)}" for name, value in scores_in(run.row).items()]
    return {
        "id": run_id(run.run),
        "name": run.name,
        "title": run.title,
        "phase": phase,
        "state": state,
        "why": run.why,
        "ended": None if over is None else over.at,
        "numbers": numbers,
        "version": version_of(run),
    }


def _starting(run: RunView) -> str:
    """Say what a run waits for that has no report yet."""
    members = run.members
    absent, count = members.absent, len(members.expected)
    if absent and not members.started:
        joined = f"{count - len(absent)} of {count_of(count, 'replica')} ready"
        workers = sorted({members.replicas[replica].worker for replica in absent})
        named = ", ".join(map(shown, workers[:MAX_NAMED]))
        if len(workers) > MAX_NAMED:
            named += f" and {len(workers) - MAX_NAMED} more"
        return f"starting: {joined}; waiting for {named} to load the model"
    return f"starting: {count_of(count, 'replica')} ready, in the first step"


MAX_NAMED = 4  # workers in a line


FLOAT32_MAX = float(np.finfo(np.float32).max)


def section_of(run: RunView) -> dict[str, Any]:
    """Return what the open section of a run has below its line.

    Equal arrays of curves are sent once, as base64 of little-endian float32.
    """
    arrays: dict[int, tuple[int, NDArray[np.float64]]] = {}  # by id: place, array

    def place(array: NDArray[np.float64]) -> int:
        return arrays.setdefault(id(array), (len(arrays), array))[0]

    figures = [
        {
            **figure._asdict(),
            "curves": [
                {**curve._asdict(), "x": place(curve.x), "y": place(curve.y)}
                for curve in figure.curves
            ],
        }
        for figure in figures_of(run)
    ]
    return {
        "version": version_of(run),
        "last": _last_epoch(run.row),
        "figures": figures,
        "arrays": [
            base64.b64encode(
                np.clip(array, -FLOAT32_MAX, FLOAT32_MAX).astype("<f4").tobytes()
            ).decode()
            for _, array in arrays.values()
        ],
        "columns": [
            "replica",
            *REPLICA_COLUMNS,
            "sent",
            "received",
            "waited",
            "worker",
        ],
        "replicas": replica_rows(run),
    }


def _last_epoch(row: Mapping[str, Any]) -> str:
    """Describe the traffic and the waits of an epoch; empty before the first."""
    if not row:
        return ""
    return (
        f"Epoch {row['epoch']}: density {row['density']:.3g} · "
        f"sent {format_bytes(row['sent_bytes'])} · "
        f"dense {format_bytes(row['dense_bytes'])} · "
        f"staleness {row['staleness']:.3g} · waits {_waits(row['waits'])}"
    )


def _waits(waits_s: Mapping[str, float]) -> str:
    """Format waits by cause, longest first."""
    order = sorted(waits_s.items(), key=lambda item: -item[1])
    return ", ".join(f"{c} {s:.1f} s" for c, s in order if s >= 0.05) or "–"


def replica_rows(run: RunView) -> list[dict[str, Any]]:
    """Return the last numbers, the worker and the fate of each replica, as text."""
    rows: list[dict[str, Any]] = []
    present = run.present
    for replica, member in list(run.listed.items())[:MAX_LISTED]:
        last, waits_s = run.last(replica), run.waits_s(replica)
        if replica not in present:
            last.pop("examples_per_s", None)
        numbers = {name: last.get(column) for name, column in REPLICA_COLUMNS.items()}
        fate = f"{shown(member.worker)}, joined at {run.second(member.joined_at):.1f} s"
        if member.gone:
            fate += f"; at {run.second(member.gone_at):.1f} s {member.why}"
        cells = [
            str(replica),
            *(
                "–"
                if n is None or math.isnan(n)
                else number(int(n) if c in WHOLE else n)
                for c, n in numbers.items()
            ),
            format_bytes(int(last.get("sent_bytes", 0))),
            format_bytes(int(last.get("received_bytes", 0))),
            f"{math.fsum(waits_s.values()):.1f} s",
            fate,
        ]
        color, waits = COLORS[replica % len(COLORS)], f"waits: {_waits(waits_s)}"
        rows.append({"cells": cells, "color": color, "waits": waits})
    return rows


def figures_of(run: RunView) -> list[Figure]:
    """Return the figures of a section that have something to show."""
    series = run.series()
    rows = [row for _, row in run.rows.numbered]
    names = dict.fromkeys(name for row in rows for name in scores_in(row))
    losses = [
        Curve(*_replica(replica), columns["epoch"], columns["loss"])
        for replica, columns in run.losses().items()
    ]
    figures = [
        Figure("Loss by epoch", AXES["epoch"], "", [*losses, *_scores(rows, "loss")])
    ]
    for title, x, y, unit in FIGURES:
        curves = [
            Curve(*_replica(replica), columns[x], columns[y])
            for replica, columns in series.items()
        ]
        if y == "examples_per_s" and len(series) > 1:
            curves.append(Curve("all replicas", INK, *total_speed(series), width=3.0))
        figures.append(Figure(title, AXES[x], unit, curves))
    figures[1:1] = [
        Figure(name, AXES["epoch"], "", _scores(rows, name))
        for name in dict.fromkeys(name.removeprefix("val_") for name in names)
        if name != "loss"
    ]
    for figure in figures:
        figure.curves[:] = [c for c in figure.curves if np.isfinite(c.y).any()]
    return [figure for figure in figures if figure.curves]


def _replica(replica: int) -> tuple[str, str]:
    """Return the name and the color of a replica's curves."""
    return f"replica {replica}", COLORS[replica % len(COLORS)]


def _scores(rows: Sequence[Mapping[str, Any]], name: str) -> list[Curve]:
    """Return the curves of a score by epoch, in training and on validation data."""
    epochs = np.array([row["epoch"] for row in rows], np.float64)
    return [
        Curve(
            label,
            color,
            epochs,
            np.array([row.get(column, math.nan) for row in rows], np.float64),
            width=3.0,
        )
        for column, label, color in (
            (name, "all replicas", INK),
            (f"val_{name}", "validation", RED),
        )
    ]


class PageHandler(RequestHandler):  # type: ignore[misc]  # tornado is untyped
    """Answers with the page, which then asks for the runs."""

    def get(self) -> None:
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.finish(_page())


@functools.cache
def _page() -> bytes:
    return PAGE.read_bytes()


class RunsHandler(RequestHandler):  # type: ignore[misc]
    """Answers with the head of each run."""

    def initialize(self, dashboard: Dashboard, clock: Callable[[], float]) -> None:
        self.dashboard, self.clock = dashboard, clock
        self.set_header("Content-Type", "application/json")
        self.set_header("Cache-Control", "no-store")

    def get(self) -> None:
        self.finish(self.dashboard.answer(self.clock()))


class RunHandler(RunsHandler):
    """Answers with the section of a run; without content if the run has gone."""

    def get(self, run: str) -> None:  # type: ignore[override]
        answer = self.dashboard.answer_of(run, self.clock())
        if answer is None:
            self.set_status(204)
            self.clear_header("Content-Type")
        self.finish(answer)
