"""docs/benchmarks.md and its pictures, from the newest results.

A result is a JSON file that a question has written, or a Markdown file from before
questions wrote any.

Run:      python -m benchmarks report
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.__main__ import QUESTIONS, TOOLS, purpose, question_of
from benchmarks.results import FOLDER, ROOT, Result, load, markdown, newest

PAGE = ROOT / "docs" / "benchmarks.md"

# Headings of the page, and the result below each.
SECTIONS = {
    "Other libraries": "peers",
    "Links": "links",
    "Time to accuracy": "time-to-accuracy",
    "Scaling on a Dask cluster": "scaling",
    "More replicas than cores": "emulation",
    "Replicas of one scheduler": "cost-model",
    "Cost of a step": "step",
    "Encoding": "encode",
    "Frame sizes": "wire-size",
    "Time to the first step": "first-step",
    "The channel alone": "channel",
    "Accuracy of the plan": "plan",
    "Quality of models": "convergence",
    "Quality by option": "convergence-options",
    "Quality of parameter averaging": "averaging",
    "Published rules": "published-rules",
    "Data": "data",
    "Small parts": "parts",
    "A killed worker": "kill",
    "Checkpoints": "checkpoint",
    "Evaluation": "evaluate",
    "Prediction": "predict",
    "Prediction from memory": "predict-in-memory",
    "A predictor": "predictor",
}

HEAD = """# Benchmarks

All figures about speed, size and quality, each with the command that printed it. [What
the benchmarks mean](benchmarks-meaning.md) explains how they are measured. `python -m
benchmarks report` writes this page from the files in `benchmarks/results`. Compare
figures only within one run on one machine.

| `python -m benchmarks` | Question |
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
    """The text of the page; pictures are drawn where a folder is given."""
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
                pictures.mkdir(parents=True, exist_ok=True)
                # Without metadata, the same rows give the same bytes.
                plot(result).savefig(
                    pictures / f"benchmark_{name}.png",
                    dpi=100,
                    metadata={"Software": None},
                )
            own = section(result, picture)
        parts.append(f"\n## {title}\n\n{own}\n")
    names = [*QUESTIONS, *TOOLS]
    table = "".join(f"| `{name}` | {purpose(name)} |\n" for name in names)
    return HEAD + table + "".join(parts)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=FOLDER, metavar="FOLDER")
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args(arguments)
    asked.page.write_text(page(asked.results, asked.page.parent / "images"))


# ---- pictures


def _panels(groups: Sequence[Any], width: float, height: float, **options: Any) -> Any:
    """A figure with a panel for each group."""
    from matplotlib.figure import Figure

    columns = max(1, len(groups))
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, **options)[0]
    for axis in axes:
        axis.tick_params(labelsize=7)
    return figure, list(zip(groups, axes, strict=False))


def bars(result: Result, value: str, label: str, group: str) -> Any:
    """A bar for each row, a panel for each group."""
    rows = [row for row in result.rows if row.get(value) is not None]
    groups = list(dict.fromkeys(row.get(group) for row in rows))
    height = 1.2 + 0.28 * max(1, len(rows) // max(1, len(groups)))
    figure, panels = _panels(groups, 4.2, height)
    for name, axis in panels:
        own = [row for row in rows if row.get(group) == name]
        axis.barh([str(row[label]) for row in own], [row[value] for row in own])
        axis.invert_yaxis()
        axis.set_title(str(name), fontsize=9)
        axis.set_xlabel(value.replace("_per_", "/"), fontsize=8)
        axis.grid(axis="x", alpha=0.3)
    return figure


def curves(result: Result, label: str, group: str) -> Any:
    """Score over seconds of training, of the rows that have a curve."""
    rows = [row for row in result.rows if row.get("curve")]
    figure, panels = _panels(list(dict.fromkeys(row[group] for row in rows)), 5, 3.6)
    for name, axis in panels:
        for row in (row for row in rows if row[group] == name):
            seconds, scores = zip(*row["curve"], strict=True)
            axis.plot(seconds, scores, label=row[label], linewidth=1)
        axis.set_title(str(name), fontsize=9)
        axis.set_xlabel("seconds of training", fontsize=8)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    return figure


def lines(result: Result, x: str, y: str, group: str, label: str) -> Any:
    """y over x, a panel for each group and a line for each label."""
    groups = list(dict.fromkeys(row[group] for row in result.rows))
    figure, panels = _panels(groups, 3.4, 3.2, sharey=True)
    for name, axis in panels:
        rows = [row for row in result.rows if row[group] == name]
        for value in dict.fromkeys(row[label] for row in rows):
            own = [row for row in rows if row[label] == value]
            xs, ys = [row[x] for row in own], [row[y] for row in own]
            axis.plot(xs, ys, marker="o", label=f"{label} {value}", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title(f"{group} {name}", fontsize=9)
        axis.set_xlabel(x, fontsize=8)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6)
    figure.axes[0].set_ylabel(y, fontsize=8)
    return figure
