"""Pictures of results; what is drawn follows from the rows alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.results import Result


def bars(result: Result, value: str, label: str, group: str | None = None) -> Any:
    """A bar for each row, in groups."""
    from matplotlib.figure import Figure

    rows = [row for row in result.rows if row.get(value) is not None]
    groups = list(dict.fromkeys(row.get(group) if group else "" for row in rows))
    height = 1.2 + 0.28 * max(1, len(rows) // max(1, len(groups)))
    figure = Figure(figsize=(4.2 * max(1, len(groups)), height), layout="constrained")
    axes = figure.subplots(1, max(1, len(groups)), squeeze=False)[0]
    for axis, name in zip(axes, groups, strict=False):
        own = [row for row in rows if (row.get(group) if group else "") == name]
        axis.barh([str(row[label]) for row in own], [row[value] for row in own])
        axis.invert_yaxis()
        axis.set_title(str(name), fontsize=9)
        axis.set_xlabel(value.replace("_per_", "/"), fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(axis="x", alpha=0.3)
    return figure


def curves(result: Result, label: str, group: str) -> Any:
    """Score over seconds of training, of the rows that have a curve."""
    from matplotlib.figure import Figure

    rows = [row for row in result.rows if row.get("curve")]
    groups = list(dict.fromkeys(row[group] for row in rows))
    figure = Figure(figsize=(5 * max(1, len(groups)), 3.6), layout="constrained")
    axes = figure.subplots(1, max(1, len(groups)), squeeze=False)[0]
    for axis, name in zip(axes, groups, strict=False):
        for row in (row for row in rows if row[group] == name):
            seconds, scores = zip(*row["curve"], strict=True)
            axis.plot(seconds, scores, label=row[label], linewidth=1)
        axis.set_title(str(name), fontsize=9)
        axis.set_xlabel("seconds of training", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    return figure


def lines(result: Result, x: str, y: str, group: str, label: str) -> Any:
    """Of y over x: a picture for each value of `group`, a line for each of `label`."""
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(row[group] for row in result.rows))
    figure = Figure(figsize=(3.4 * max(1, len(groups)), 3.2), layout="constrained")
    axes = figure.subplots(1, max(1, len(groups)), squeeze=False, sharey=True)[0]
    for axis, name in zip(axes, groups, strict=False):
        rows = [row for row in result.rows if row[group] == name]
        for value in dict.fromkeys(row[label] for row in rows):
            own = [row for row in rows if row[label] == value]
            xs, ys = [row[x] for row in own], [row[y] for row in own]
            axis.plot(xs, ys, marker="o", label=f"{label} {value}", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title(f"{group} {name}", fontsize=9)
        axis.set_xlabel(x, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    axes[0].set_ylabel(y, fontsize=8)
    return figure


def draw(result: Result, plot: Callable[[Result], Any], path: Path) -> None:
    """Write a picture as PNG, the same bytes for the same rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plot(result).savefig(path, dpi=100, metadata={"Software": None})
