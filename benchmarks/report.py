"""Write docs/benchmarks.md and its pictures from the newest results.

A result is a JSON file that a question has written, or a Markdown file written by hand.

Run:      python -m benchmarks report
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.__main__ import QUESTIONS, TOOLS, purpose, question_of
from benchmarks.results import (
    FOLDER,
    ROOT,
    Result,
    Row,
    cell,
    load,
    markdown,
    newest,
    parser_of,
    title,
)

PAGE = ROOT / "docs" / "benchmarks.md"

# Headings of the page, and the result below each.
SECTIONS = {
    "Other libraries": "peers",
    "Links": "links",
    "Links, first and later steps": "links-steps",
    "Time to accuracy": "time-to-accuracy",
    "Steps to accuracy": "lockstep",
    "Scaling on a Dask cluster": "scaling",
    "More replicas than cores": "emulation",
    "Merged updates": "merged",
    "Replicas of one scheduler": "cost-model",
    "Cost of a step": "step",
    "Encoding": "encode",
    "On a GPU": "cuda",
    "Frame sizes": "wire-size",
    "Time to the first step": "first-step",
    "Start on slow links": "start",
    "Memory of a worker": "memory",
    "The channel alone": "channel",
    "Accuracy of the plan": "plan",
    "Quality of models": "convergence-defaults",
    "Quality of models, in lockstep": "convergence-lockstep",
    "Momentum": "momentum",
    "Momentum, 4 and 16 replicas": "momentum-replicas",
    "Intervals with AdamW": "intervals-adamw",
    "Progress that was not sent": "residuals",
    "Quality of models, longer runs": "convergence-longer",
    "Quality of models, earlier defaults": "convergence",
    "Quality by option": "convergence-options",
    "Density": "density",
    "Quality of parameter averaging": "averaging",
    "Published rules": "published-rules",
    "Data": "data",
    "Small parts": "parts",
    "A killed worker": "kill",
    "The page on the dashboard": "page",
    "Checkpoints": "checkpoint",
    "Evaluation": "evaluate",
    "Prediction": "predict",
    "Prediction from memory": "predict-in-memory",
    "A predictor": "predictor",
    "Rows that are touched rarely": "recommender",
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
        *([hardware["accelerator"]] if "accelerator" in hardware else []),
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
    newest_results, parts = newest(results), []
    for heading, name in SECTIONS.items():
        path = newest_results.get(name)
        if path is None:
            continue
        if path.suffix == ".md":
            prose = path.read_text().strip()
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
            prose = section(result, picture)
        parts.append(f"\n## {heading}\n\n{prose}\n")
    names = [*QUESTIONS, *TOOLS]
    table = "".join(f"| `{name}` | {purpose(name)} |\n" for name in names)
    return HEAD + table + "".join(parts)


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("report", __doc__)
    parser.add_argument(
        "--results",
        type=Path,
        default=FOLDER,
        metavar="FOLDER",
        help="where the results are (%(default)s)",
    )
    parser.add_argument(
        "--page",
        type=Path,
        default=PAGE,
        metavar="FILE",
        help="written, with pictures in the folder images beside it (%(default)s)",
    )
    asked = parser.parse_args(arguments)
    asked.page.write_text(page(asked.results, asked.page.parent / "images"))


# ---- pictures


def _panels(
    rows: Sequence[Row], group: str | None, height: float, **options: Any
) -> Any:
    """A figure with the rows of each group and a panel for them, in two columns."""
    from matplotlib.figure import Figure

    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(row[group]) if group else "", []).append(row)
    columns = min(2, len(groups)) or 1
    lines = -(-len(groups) // columns) or 1
    size = (8 if columns == 2 else 6.5, height * lines)
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False, **options).flat)
    for axis in axes:
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    for axis in axes[len(groups) :]:
        axis.set_visible(False)
    return figure, zip(groups.items(), axes, strict=False)


def bars(result: Result, value: str, *labels: str, group: str | None = None) -> Any:
    """A bar for each row, a panel for each group."""

    def named(row: Row, label: str) -> str:
        style = result.columns[label]
        return f"{title(label)} " * bool(style) + cell(row, label, style)

    rows = [row for row in result.rows if row.get(value) is not None]
    groups = len({row[group] for row in rows}) if group else 1
    height = 0.9 + 0.24 * len(rows) / max(1, groups)
    figure, panels = _panels(rows, group, height)
    for (name, panel_rows), axis in panels:
        names = [", ".join(named(row, label) for label in labels) for row in panel_rows]
        bars = axis.barh(names, [row[value] for row in panel_rows])
        shown = [cell(row, value, result.columns[value]) for row in panel_rows]
        axis.bar_label(bars, shown, fontsize=7, padding=2)
        axis.margins(x=0.2)
        axis.invert_yaxis()
        axis.set_title(f"{title(group)}: {name}" if group else "", fontsize=9)
        axis.set_xlabel(title(value), fontsize=9)
    return figure


def curves(result: Result, label: str, group: str) -> Any:
    """Score over seconds of training, of the rows that have a curve."""
    rows = [row for row in result.rows if row.get("curve")]
    figure, panels = _panels(rows, group, 3.2, sharey=True)
    for (name, panel_rows), axis in panels:
        for row in panel_rows:
            seconds, scores = zip(*row["curve"], strict=True)
            axis.plot(seconds, scores, label=row[label], linewidth=1)
        axis.set_title(f"{title(group)}: {name}", fontsize=9)
        axis.set_xlabel("seconds of training", fontsize=9)
        axis.legend(fontsize=7)
    return figure


def lines(result: Result, x: str, y: str, group: str, label: str) -> Any:
    """y over x, a panel for each group and a line for each label."""
    figure, panels = _panels(result.rows, group, 2.8, sharey=True)
    for (name, rows), axis in panels:
        for value in dict.fromkeys(row[label] for row in rows):
            labelled = [row for row in rows if row[label] == value]
            xs, ys = [row[x] for row in labelled], [row[y] for row in labelled]
            axis.plot(xs, ys, marker="o", markersize=4, label=f"{title(label)} {value}")
        axis.set_xscale("log", base=2)
        axis.set_xticks(xs, [f"{value:g}" for value in xs])
        axis.set_title(f"{title(group)}: {name}", fontsize=9)
        axis.set_xlabel(title(x), fontsize=9)
        axis.set_ylabel(title(y), fontsize=9)
        axis.legend(fontsize=7)
    axis.set_ylim(bottom=0)  # of all, when their lines are there
    return figure
