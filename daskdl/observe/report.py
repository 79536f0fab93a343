"""Parts of a report about a run, as HTML without external files.

Charts are inline SVG; a script in the page draws timelines. All text arguments are
escaped.
"""

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from daskdl.observe.timeline import ACTIVITIES, Spans

MAX_POINTS = 500  # of a line in a chart
MAX_NAMED = 8  # lines in a chart that has a legend
WIDTH, HEIGHT = 420, 180  # of a chart, in units of its view box
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 8, 22  # margins

# Okabe and Ito's palette.
_LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# Work has cool colors, waits have warm ones; no two look alike.
_COLORS = {
    "compute": "#0072b2",
    "exchange": "#009e73",
    "data": "#56b4e9",
    "callbacks": "#5e3c99",
    "validation": "#1b4b5a",
    "checkpoint": "#00d0c0",
    "setup": "#6b777b",
    "other": "#b3c0c4",
    "wait_staleness": "#d7191c",
    "wait_room": "#7a1f1f",
    "wait_lease": "#f6b26b",
    "wait_gather": "#e8710a",
    "wait_fetch": "#7a4a12",
    "wait_flush": "#f2e205",
    "wait_updates": "#ff9eb5",
    "wait_checkpoint": "#b0307a",
    "wait_data": "#ff6f7d",
    "wait_missing": "#b5d100",
    "wait_repair": "#ff3fd0",
    "wait_join": "#e3d7b5",
    "wait_snapshot": "#a8a032",
    "wait_activate": "#b98d6a",
}
assert _COLORS.keys() == ACTIVITIES.keys(), "each activity needs a color"


class Html(NamedTuple):
    """Markup that :func:`table` does not escape."""

    html: str


def label_of(activity: str) -> str:
    """Return the name of an activity as reports show it."""
    return activity.replace("wait_", "wait: ")


def number(value: Any) -> str:
    """Format a number with few digits; NaN is "-", other values become text.

    Example:
        >>> [number(value) for value in (0.123456, 12345.6, float("nan"), 1e-7, "a")]
        ['0.1235', '12,346', '-', '1e-07', 'a']
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if math.isnan(value):
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e15 else f"{value:.4g}"


def table(rows: Iterable[Sequence[Any]], columns: Sequence[str] = ()) -> str:
    """Render a table; the first cell of each row is its name.

    Cells of type :class:`Html` are not escaped. Without rows, the result is empty.
    """

    def row(cells: Sequence[Any], tag: str) -> str:
        name, *values = (
            cell.html if isinstance(cell, Html) else html.escape(number(cell))
            for cell in cells
        )
        return (
            f"<tr><th>{name}</th>{''.join(f'<{tag}>{v}</{tag}>' for v in values)}</tr>"
        )

    head = f"<thead>{row(columns, 'th')}</thead>" if columns else ""
    body = "".join(row(cells, "td") for cells in rows)
    return f"<table>{head}{body}</table>" if body else ""


@dataclass(frozen=True)
class Line:
    """A line of a chart; x is in ascending order, and y may be NaN or infinite."""

    name: str
    x: Sequence[float]
    y: Sequence[float]

    @property
    def points(self) -> list[tuple[float, float]]:
        """The finite points; if there are too many, means of neighboring points."""
        xy = [(x, y) for x, y in zip(self.x, self.y, strict=True) if math.isfinite(y)]
        size = -(-len(xy) // MAX_POINTS) or 1
        return [
            (fmean(x for x, _ in group), fmean(y for _, y in group))
            for group in (xy[i : i + size] for i in range(0, len(xy), size))
        ]


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most about `most` round numbers within a range."""
    least = (high - low) / most
    step = 10.0 ** math.floor(math.log10(least))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= least)
    multiples = range(math.ceil(low / step), math.floor(high / step) + 1)
    return [float(f"{i * step:.12g}") for i in multiples]


def _labels(marks: Sequence[float]) -> list[str]:
    """Return numbers as text, with as many digits as it takes to tell them apart.

    Example:
        >>> _labels([1.0, 1.5, 2.0]), _labels([0.99995, 0.999951])
        (['1', '1.5', '2'], ['0.99995', '0.999951'])
    """
    labels = [number(mark) for mark in marks]
    for digits in range(5, 16):
        if len(set(labels)) == len(labels):
            break
        labels = [f"{mark:.{digits}g}" for mark in marks]
    return labels


def _power(nbytes: float) -> int:
    """Return the power of 1024 in which a number of bytes is easy to read."""
    return min(int(math.log2(max(nbytes, 1)) / 10), len(UNITS) - 1)


def in_bytes(nbytes: float) -> str:
    """Return a number of bytes with its unit.

    Example:
        >>> in_bytes(50), in_bytes(1536), in_bytes(3 * 2**20)
        ('50 B', '1.50 kiB', '3.00 MiB')
    """
    power = _power(nbytes)
    return f"{nbytes / 1024**power:.{2 if power else 0}f} {UNITS[power]}"


EQUAL = 1e-9  # largest relative difference of values that count as equal
UNITS = ("B", "kiB", "MiB", "GiB", "TiB", "PiB")


def chart(title: str, x_name: str, lines: Sequence[Line], unit: str = "") -> str:
    """Draw a chart of lines; empty without finite points.

    A chart of 2 to `MAX_NAMED` lines has a legend. The y axis is logarithmic if all
    values are positive and span a factor of more than 100. If all values are equal, the
    axis begins at 0, and they are in its middle.

    Args:
        title: What y is.
        x_name: What x is.
        lines: The lines.
        unit: ``"B"`` for bytes, which the chart shows in a suitable multiple.
    """
    drawn = [(line.name, line.points) for line in lines]
    points = [point for _, line_points in drawn for point in line_points]
    if not points:
        return ""
    if unit:
        power = _power(max(abs(y) for _, y in points))
        title = f"{title}, {UNITS[power]}"
        drawn = [(n, [(x, y / 1024**power) for x, y in xy]) for n, xy in drawn]
        points = [point for _, line_points in drawn for point in line_points]
    low, high = min(y for _, y in points), max(y for _, y in points)
    logarithmic = low > 0 and high / low > 100
    scale = math.log10 if logarithmic else float
    bottom, top = scale(low), scale(high)
    if high - low <= EQUAL * abs(high):
        bottom, top = min(2 * low, 0.0), max(2 * high, 0.0) or float(not high)
    else:
        pad = 0.05 * (top - bottom)
        bottom, top = bottom - pad, top + pad
    left, right = float(min(points)[0]), float(max(points)[0])
    if left == right:
        left, right = left - 0.5, right + 0.5

    def at_x(x: float) -> float:
        return LEFT + (x - left) / (right - left) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        share = (scale(y) - bottom) / (top - bottom)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    if logarithmic:
        decades = range(math.ceil(bottom), math.floor(top) + 1)
        marks = [10.0**i for i in decades][:: len(decades) // 6 + 1]
        marks = marks if len(marks) > 1 else [low, high]
    else:
        marks = _ticks(bottom, top, 5)
    parts = [
        f'<path class="grid" d="M{LEFT} {at_y(y):.1f}H{WIDTH - RIGHT}"/>'
        f'<text x="{LEFT - 4}" y="{at_y(y) + 3:.1f}" class="y">{label}</text>'
        for y, label in zip(marks, _labels(marks), strict=True)
    ]
    whole_numbers = left.is_integer() and right.is_integer()
    parts += [
        f'<text x="{at_x(x):.1f}" y="{HEIGHT - 8}" class="x">{x:g}</text>'
        for x in _ticks(left, right, 6)
        if x.is_integer() or not whole_numbers
    ]
    legend = ""
    for i, (line_name, line_points) in enumerate(drawn):
        color, hint = _LINES[i % len(_LINES)], html.escape(line_name)
        if 1 < len(drawn) <= MAX_NAMED:
            legend += f'<span><i style="background:{color}"></i>{hint}</span>'
        if line_points:
            path = "L".join(f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in line_points)
            dot = "h0" if len(line_points) == 1 else ""
            parts.append(
                f'<path class="line" stroke="{color}" d="M{path}{dot}">'
                f"<title>{hint}</title></path>"
            )
    name = html.escape(title)
    return (
        f"<figure><figcaption>{name} <small>by {html.escape(x_name)}</small> "
        f'{legend}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{name}">{"".join(parts)}</svg></figure>'
    )


def histogram(low: float, high: float, counts: Sequence[int]) -> Html:
    """Draw the counts of equal bins above their bounds; "-" if all counts are 0."""
    most = max(counts)
    if not most:
        return Html("-")
    bin_width = WIDTH / len(counts)
    path = "".join(
        f"M{i * bin_width:.0f} {HEIGHT}v{-HEIGHT * count / most:.0f}h{bin_width:.0f}"
        f"V{HEIGHT}"
        for i, count in enumerate(counts)
        if count
    )
    return Html(
        f'<svg class="bins" role="img" aria-label="histogram" viewBox="0 0 {WIDTH} '
        f'{HEIGHT}"><path d="{path}"/></svg>'
        f"<small>{number(low)} to {number(high)}</small>"
    )


def _swatch(activity: str) -> str:
    return f'<i style="background:{_COLORS[activity]}"></i>'


def shares(seconds: Mapping[str, float]) -> str:
    """Render seconds by activity as a table with the share of each; may be empty."""
    total = sum(seconds.values())
    if not total:
        return ""
    rows = "".join(
        f'<tr data-activity="{name}"><th>{_swatch(name)}{label_of(name)}</th>'
        f"<td>{spent:,.3f}</td><td>{100 * spent / total:.1f} %</td>"
        f'<td class="text">{html.escape(ACTIVITIES[name])}</td></tr>'
        for name, spent in sorted(seconds.items(), key=lambda item: -item[1])
    )
    return (
        '<table class="shares"><thead><tr><th>activity</th><th>seconds</th>'
        f'<th>share</th><th class="text">meaning</th></tr></thead>{rows}</table>'
    )


def bar(seconds: Mapping[str, float]) -> Html:
    """Render the share of each activity as a bar."""
    total = sum(seconds.values()) or 1.0
    parts = "".join(
        f'<i style="width:{100 * spent / total:.2f}%;background:{_COLORS[name]}" '
        f'title="{label_of(name)}: {spent:,.3g} s, {100 * spent / total:.1f} %"></i>'
        for name, spent in seconds.items()
    )
    return Html(f'<div class="bar">{parts}</div>')


TOGETHER_S = 0.5  # longest time between the copies of a checkpoint


def _checkpoints(spans: Spans, began: float) -> list[float]:
    """Return the times of checkpoints, seconds; replicas copy their states together."""
    starts = np.sort(spans["start"][spans["checkpoint"] > 0]) - began
    begins = np.diff(starts, prepend=-np.inf) > TOGETHER_S
    return [round(float(start), 3) for start in starts[begins]]


def timeline(
    spans: Spans,
    began: float,
    left: Mapping[int, tuple[float, str]],
    joined: Mapping[int, float],
) -> str:
    """Render spans as JSON, with a script that draws them.

    Args:
        spans: Ordered by replica and start.
        began: Unix time at the start of the fit.
        left: By replica that left the fit, the time in seconds since the start of the
            fit, and the reason.
        joined: By replica, the time in seconds since the start of the fit.
    """
    used = [name for name in ACTIVITIES if spans[name].any()]
    rows: dict[int, list[Any]] = {replica: [] for replica in joined}
    columns = [spans[name].tolist() for name in used]
    starts, ends = spans["start"] - began, spans["end"] - began
    for i, replica in enumerate(spans["replica"].tolist()):
        start, end = float(starts[i]), float(ends[i])
        parts: list[float] = []
        for place, column in enumerate(columns):
            if column[i] > 1e-3 * (end - start):
                parts += (place, float(f"{column[i]:.3g}"))
        span = [round(start, 5), round(end, 5), *parts]
        rows.setdefault(replica, []).append(span)
    data = {
        "names": [label_of(name) for name in used],
        "colors": [_COLORS[name] for name in used],
        "rows": [
            {
                "replica": replica,
                "joined": joined.get(replica, row[0][0] if row else 0.0),
                "left": left.get(replica),
                "spans": row,
            }
            for replica, row in sorted(rows.items())
        ],
        "checkpoints": _checkpoints(spans, began),
    }
    # "<" is escaped, so that no text can close the script element.
    packed = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    legend = "".join(f"<span>{_swatch(name)}{label_of(name)}</span>" for name in used)
    return (
        f'<p class="legend">{legend}</p><div id="timeline"><canvas></canvas>'
        "<output></output></div><p><small>Scroll to zoom, drag to move, double-click "
        "to reset. Where short activities alternate, a column shows their shares. "
        "× marks the time at which a replica left; since its last report, the "
        "bar of a lost replica is empty. ◆ marks a checkpoint.</small></p>"
        f'<script type="application/json" id="spans">{packed}</script>'
        f"<script>{_SCRIPT}</script>"
    )


def page(title: str, sections: Iterable[tuple[str, str]]) -> str:
    """Render a page of sections, (heading, HTML), without the empty ones."""
    body = "".join(
        f"<section><h2>{html.escape(heading)}</h2>{content}</section>"
        for heading, content in sections
        if content
    )
    name = html.escape(title)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{name}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{name}</h1>{body}</body></html>\n"
    )


_STYLE = """
:root{--back:#fff;--text:#1c2326;--dim:#66757b;--rule:#dde3e5;--bad:#b3261e}
@media (prefers-color-scheme:dark){:root{--back:#14191b;--text:#e4e9eb;--dim:#93a1a6;
--rule:#2f383c;--bad:#ff8a80}}
body{background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif;
margin:2rem auto;max-width:1320px;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin:2rem 0 .6rem}
small,figcaption small{color:var(--dim)}
section{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{padding:.15rem .8rem .15rem 0;text-align:right;
border-bottom:1px solid var(--rule)}
th:first-child,.text{text-align:left}th{font-weight:500}
td.text{color:var(--dim)}table:not(:has(thead)) td{text-align:left}
pre{color:var(--bad);border-left:3px solid;padding-left:1rem;white-space:pre-wrap;
overflow-wrap:anywhere}
.charts{display:grid;gap:1rem 2rem;grid-template-columns:repeat(auto-fill,
minmax(min(100%,380px),1fr))}
figure{margin:0}figcaption{font-size:.9rem}
span i,th i{display:inline-block;width:.7em;height:.7em;margin-right:.4em}
figcaption span,.legend span{margin-right:1em;white-space:nowrap}
svg{width:100%;height:auto}svg text{font-size:11px;fill:var(--dim)}
svg .y{text-anchor:end}svg .x{text-anchor:middle}
.grid{stroke:var(--rule);fill:none}
.line{fill:none;stroke-width:1.5;stroke-linecap:round;stroke-linejoin:round}
@media (prefers-color-scheme:dark){.line,figcaption i,.bins{filter:brightness(1.5)}}
svg.bins{display:block;width:84px;margin-left:auto;fill:#0072b2}
.bar{display:flex;height:.9rem;width:320px;background:var(--rule)}.bar i{height:100%}
td .bar{margin:.2rem 0}
canvas{display:block;width:100%;cursor:crosshair;touch-action:pan-y}
output{position:fixed;display:none;pointer-events:none;background:var(--back);
border:1px solid var(--rule);padding:.3rem .6rem;font-size:.85rem;white-space:pre-wrap;
width:max-content;max-width:44em;z-index:1}
"""

_SCRIPT = """
(() => {
const data = JSON.parse(document.getElementById("spans").textContent);
const box = document.getElementById("timeline"), canvas = box.querySelector("canvas");
const out = box.querySelector("output"), pen = canvas.getContext("2d");
const LEFT = 40, AXIS = 22, count = data.rows.length;
const tall = Math.max(8, Math.min(28, Math.floor(900 / count)));
const gap = tall > 12 ? 4 : 1;
let from = 0, to = 0;
for (const row of data.rows) {
  const last = row.spans.length - 1;
  row.end = last < 0 ? row.joined : row.spans[last][1];  // of its last report
  from = Math.min(from, last < 0 ? row.joined : row.spans[0][0]);
  to = Math.max(to, row.end, row.left ? row.left[0] : 0);
}
const all = [from, to];
let wide = 1;
const x_of = time => LEFT + (time - from) / (to - from) * (wide - LEFT);
const time_of = x => from + (x - LEFT) / (wide - LEFT) * (to - from);
const first_after = (spans, time) => {  // index of the first span that ends after time
  let low = 0, high = spans.length;
  while (low < high) {
    const middle = low + high >> 1;
    if (spans[middle][1] <= time) low = middle + 1; else high = middle;
  }
  return low;
};
function column(x, width, top, parts, total) {
  let y = top;
  for (let i = 0; i < parts.length; i++) if (parts[i]) {
    const height = parts[i] / total * (tall - gap);
    pen.fillStyle = data.colors[i];
    pen.fillRect(x, y, width, height);
    y += height;
  }
}
function draw() {
  const style = getComputedStyle(document.documentElement), dots = devicePixelRatio;
  wide = box.clientWidth;
  const height = count * tall + AXIS;
  canvas.width = wide * dots; canvas.height = height * dots;
  canvas.style.height = height + "px";
  pen.setTransform(dots, 0, 0, dots, 0, 0);
  pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
  const dim = style.getPropertyValue("--dim");
  const named = Math.ceil(12 / tall);
  data.rows.forEach((row, at) => {
    const top = at * tall, spans = row.spans;
    if (at % named == 0) {
      pen.fillStyle = dim; pen.textAlign = "right";
      pen.fillText(row.replica, LEFT - 6, top + (tall - gap) / 2);
    }
    let parts = data.names.map(() => 0), total = 0, began = -1;
    const flush = () => {
      if (total) column(began, 1, top, parts, total);
      parts.fill(0); total = 0;
    };
    for (let i = first_after(spans, from); i < spans.length && spans[i][0] < to; i++) {
      const span = spans[i], length = span[1] - span[0];
      const left = Math.max(x_of(span[0]), LEFT), right = Math.min(x_of(span[1]), wide);
      const pixel = Math.floor(left);
      if (right - left < 1) {  // several spans in a pixel
        if (pixel != began) flush();
        began = pixel;
        for (let j = 2; j < span.length; j += 2) {
          parts[span[j]] += span[j + 1]; total += span[j + 1];
        }
        continue;
      }
      flush();
      for (let j = 2; j < span.length; j += 2) parts[span[j]] = span[j + 1];
      column(left, right - left, top, parts, length || 1);
      parts.fill(0);
    }
    flush();
    if (row.left && row.left[0] > row.end) {
      const left = Math.max(x_of(row.end), LEFT);
      const right = Math.min(x_of(row.left[0]), wide);
      pen.strokeStyle = dim;
      if (right > left) pen.strokeRect(left, top + .5, right - left, tall - gap - 1);
    }
    if (row.left && row.left[0] >= from && row.left[0] <= to) {
      pen.fillStyle = style.getPropertyValue("--bad"); pen.textAlign = "center";
      pen.fillText("×", Math.min(x_of(row.left[0]), wide - 6), top + (tall - gap) / 2);
    }
  });
  pen.fillStyle = style.getPropertyValue("--text"); pen.textAlign = "center";
  for (const time of data.checkpoints) if (time >= from && time <= to) {
    const x = x_of(time);
    pen.fillRect(x, 0, 1, count * tall);
    pen.fillText("◆", x, count * tall + 5);
  }
  pen.fillStyle = dim; pen.textAlign = "center";
  const least = (to - from) / Math.max(2, wide / 110);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].find(factor => factor * power >= least) * power;
  for (let i = Math.ceil(from / step); i * step <= to; i++) {
    const x = x_of(i * step);
    pen.fillRect(x, count * tall, 1, 4);
    if (x < wide - 16) pen.fillText(+(i * step).toPrecision(6) + " s", x, height - 8);
  }
}
function zoom(factor, at) {
  const lengths = Math.min((to - from) * factor, all[1] - all[0]);
  const share = (at - from) / (to - from);
  show(at - share * lengths, lengths);
}
function show(start, length) {
  from = Math.min(Math.max(start, all[0]), all[1] - length); to = from + length;
  draw();
}
let held = null;
canvas.addEventListener("wheel", event => {
  event.preventDefault();
  zoom(event.deltaY < 0 ? 0.8 : 1.25, time_of(Math.max(event.offsetX, LEFT)));
}, {passive: false});
canvas.addEventListener("pointerdown", event => {
  held = [event.offsetX, from]; canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointerup", () => { held = null; });
canvas.addEventListener("dblclick", () => show(all[0], all[1] - all[0]));
canvas.addEventListener("pointerleave", () => { out.style.display = "none"; });
canvas.addEventListener("pointermove", event => {
  if (held) {
    const length = to - from, moved = (held[0] - event.offsetX) / (wide - LEFT);
    show(held[1] + moved * length, length);
  }
  const row = data.rows[Math.floor(event.offsetY / tall)];
  const time = time_of(event.offsetX);
  const span = row && row.spans[first_after(row.spans, time)];
  out.style.display = "none";
  if (!span || span[0] > time || event.offsetX < LEFT) return;
  const length = span[1] - span[0], lines = [];
  for (let j = 2; j < span.length; j += 2) {
    const share = (100 * span[j + 1] / (length || 1)).toFixed(1);
    lines.push(`${data.names[span[j]]}: ${span[j + 1]} s, ${share} %`);
  }
  const when = `replica ${row.replica}, ${span[0]} to ${span[1]} s`;
  const why = row.left ? `\\nleft at ${row.left[0].toFixed(1)} s: ${row.left[1]}` : "";
  out.textContent = when + "\\n" + lines.join("\\n") + why;
  out.style.display = "block";
  const below = event.clientY + 14, fits = below + out.offsetHeight < innerHeight;
  out.style.top = (fits ? below : event.clientY - 14 - out.offsetHeight) + "px";
  const most = innerWidth - out.offsetWidth - 20;
  out.style.left = Math.min(event.clientX + 14, most) + "px";
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("resize", draw);
draw();
})();
"""
