"""docs/benchmarks.md and its pictures, from the newest results.

A result is a JSON file that a question has written, or a Markdown file for what was
measured before questions wrote any.

Run:      python -m benchmarks report
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.__main__ import QUESTIONS, TOOLS, asked_by, question_of
from benchmarks.results import FOLDER, ROOT, Result, load, markdown, newest

PAGE = ROOT / "docs" / "benchmarks.md"

# The headings of the page, in order, and the name of the result below each.
SECTIONS = {
    "Beside others": "peers",
    "Links of every speed": "links",
    "Time to accuracy": "time-to-accuracy",
    "Workers of a Dask cluster": "scaling",
    "More replicas than cores": "emulation",
    "Replicas of one scheduler": "cost-model",
    "A training step": "step",
    "The allocator": "allocator",
    "Encoding": "encode",
    "Size on the wire": "wire-size",
    "The first step": "first-step",
    "The channel alone": "channel",
    "The plan": "plan",
    "Rows of steps": "telemetry",
    "Does it learn as well": "convergence",
    "One option at a time": "convergence-options",
    "Does averaging learn as well": "averaging",
    "Published rules": "published-rules",
    "Data": "data",
    "Small parts": "parts",
    "A worker is killed": "kill",
    "Checkpoints": "checkpoint",
    "Evaluation": "evaluate",
    "Prediction": "predict",
    "Numpy in, numpy out": "predict-in-memory",
    "A predictor": "predictor",
}

HEAD = """# Benchmarks

All figures about speed and size, each with the command that printed it. What they mean
and how to run them is on [another page](benchmarks-meaning.md). `python -m benchmarks
report` writes this page from the files in `benchmarks/results`. Compare figures of one
run on one machine only.

| `python -m benchmarks` | question |
|---|---|
"""


def section(result: Result, picture: str | None) -> str:
    """The command of a result, its table, and its picture."""
    hardware, versions = result.hardware, result.versions
    shown = ("torch", "distributed", "numba")
    made_on = [
        f"{hardware['processor']}, {hardware['cores']} cores",
        f"Python {versions['python']}",
        *(f"{name} {versions[name]}" for name in shown if name in versions),
        f"commit {result.commit or 'unknown'}",
        f"seeds {', '.join(map(str, result.seeds))}",
    ]
    lines = [f"`{result.command}`, {result.date}, {', '.join(made_on)}.", ""]
    lines += [f"- {note}" for note in result.notes]
    lines += [""] * bool(result.notes)
    lines += markdown(result.columns, result.rows)
    if picture is not None:
        lines += ["", f"![{result.question}]({picture})"]
    return "\n".join(lines)


def page(results: Path = FOLDER, pictures: Path | None = None) -> str:
    """The page, of the questions that have results."""
    found, parts = newest(results), []
    for title, name in SECTIONS.items():
        path = found.get(name)
        if path is None:
            continue
        if path.suffix == ".md":
            own = path.read_text().strip()
        else:
            result, plot = load(path), question_of(name).plot
            picture = None if plot is None else f"images/benchmark_{name}.png"
            if plot is not None and pictures is not None:
                draw(result, plot, pictures / f"benchmark_{name}.png")
            own = section(result, picture)
        parts.append(f"\n## {title}\n\n{own}\n")
    names = [*QUESTIONS, *TOOLS]
    table = "".join(f"| `{name}` | {asked_by(name)} |\n" for name in names)
    return HEAD + table + "".join(parts)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=FOLDER, metavar="FOLDER")
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args(arguments)
    asked.page.write_text(page(asked.results, asked.page.parent / "images"))


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
