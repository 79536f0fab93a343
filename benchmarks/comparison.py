"""Rows of the convergence study, as a table and as plots.

Run:      python -m benchmarks.comparison ROWS... --plots docs/images
"""

import argparse
import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tasks import TASKS

WAYS = [
    *("one process", "synchronous", "DDP", "default", "link", "target", "strict"),
    *("sum", "keep", "staleness 0", "staleness 2", "staleness None"),
    *("every 4", "every 16", "warm-up"),
    *("averaging", "averaging in 8", "averaging 1", "averaging 20", "averaging own"),
    *("DiLoCo 20", "DiLoCo 20 in 8"),
]
PLOTTED = {
    "one process": "one process",
    "synchronous": "synchronous",
    "default": "daskdl, AdaptiveThreshold",
    "link": "daskdl, LinkThreshold",
}


@dataclass(frozen=True)
class Row:
    """One run."""

    task: str
    optimizer: str
    replicas: int
    way: str
    seed: int
    returned: float  # score of the model that comes back
    shared: float  # of what was agreed on last
    scores: list[float]  # after each epoch, of what was agreed on
    sent: float  # bytes published / bytes of whole updates
    seconds: float


def reached(scores: list[float], goal: float, *, higher: bool) -> float:
    """The first epoch at whose end the goal was reached, from 1; NaN if never."""
    for epoch, value in enumerate(scores, 1):
        if (value >= goal) if higher else (value <= goal):
            return epoch
    return math.nan


def gaps(rows: list[Row], beside: list[Row], *, higher: bool) -> list[float]:
    """How much better than others of the same seed: points, or percent of the loss."""
    others = {row.seed: row.returned for row in beside}
    pairs = [(row.returned, others[row.seed]) for row in rows if row.seed in others]
    if higher:
        return [100 * (own - other) for own, other in pairs]
    return [100 * (other - own) / other for own, other in pairs]


def table(rows: list[Row]) -> str:
    """Means over seeds, one line for each task, optimizer, number and way."""
    lines = [
        f"{'task':9} {'optimizer':9} {'n':>2} {'way':14} {'returned':>8} {'+-':>6} "
        f"{'shared':>7} {'to sync':>8} {'worst':>7} {'epochs':>6} {'sent':>8}"
    ]
    of: dict[tuple[str, str, int, str], list[Row]] = {}
    for row in rows:
        of.setdefault((row.task, row.optimizer, row.replicas, row.way), []).append(row)
    for (task, optimizer, replicas, way), own in sorted(of.items(), key=order):
        higher = TASKS[task].score == "accuracy"
        sync = of.get((task, optimizer, replicas, "synchronous"), own)
        single = of.get((task, optimizer, 1, "one process"), own)
        ends = [statistics.mean(row.scores[-3:]) for row in single]
        goal = (min if higher else max)(ends)
        gap = gaps(own, sync, higher=higher)
        returned = [row.returned for row in own]
        epochs = [reached(row.scores, goal, higher=higher) for row in own]
        lines.append(
            f"{task:9} {optimizer:9} {replicas:>2} {way:14} "
            f"{statistics.mean(returned):8.4f} {statistics.pstdev(returned):6.4f} "
            f"{statistics.mean(row.shared for row in own):7.4f} "
            f"{statistics.mean(gap):+8.2f} {min(gap):+7.2f} "
            f"{statistics.fmean(epochs):6.1f} "
            f"{statistics.mean(row.sent for row in own):8.2e}"
        )
    return "\n".join(lines)


def order(item: tuple[tuple[str, str, int, str], object]) -> tuple[int, ...]:
    """Lines of a table: as the tasks, optimizers and ways are listed."""
    (task, optimizer, replicas, way), _ = item
    return (
        list(TASKS).index(task),
        list(TASKS[task].rates).index(optimizer),
        replicas,
        WAYS.index(way.split(",")[0]),
    )


def curves(rows: list[Row], task: str, path: Path) -> None:
    """Draw the score after each epoch: mean of the seeds, and from worst to best."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    own = [row for row in rows if row.task == task]
    most = max(row.replicas for row in own)
    optimizers = [o for o in TASKS[task].rates if any(r.optimizer == o for r in own)]
    figure, axes = plt.subplots(1, len(optimizers), figsize=(11, 3.4), sharey=True)
    for axis, optimizer in zip(axes, optimizers, strict=True):
        for way, label in PLOTTED.items():
            replicas = 1 if way == "one process" else most
            scores = [
                row.scores
                for row in own
                if (row.optimizer, row.way, row.replicas) == (optimizer, way, replicas)
            ]
            if scores:
                epochs = range(1, len(scores[0]) + 1)
                columns = list(zip(*scores, strict=True))
                axis.plot(epochs, [statistics.mean(c) for c in columns], label=label)
                low, high = [min(c) for c in columns], [max(c) for c in columns]
                axis.fill_between(epochs, low, high, alpha=0.15)
        axis.set_title(f"{optimizer}, {most} replicas")
        axis.set_xlabel("epoch")
        axis.grid(alpha=0.3)
    low = statistics.quantiles([s for r in own for s in r.scores], n=10)
    if TASKS[task].score == "accuracy":
        axes[0].set_ylim(low[0], 1.0)
    else:
        axes[0].set_ylim(top=low[-1])
    axes[0].set_ylabel(f"{TASKS[task].score}, rows not trained on")
    axes[-1].legend(fontsize=8)
    figure.suptitle(task)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("--plots", type=Path, help="folder for a PNG of each task")
    a = parser.parse_args()
    lines = [line for path in a.rows for line in path.read_text().splitlines()]
    rows = [Row(**json.loads(line)) for line in lines]
    print(table(rows))
    for task in dict.fromkeys(row.task for row in rows) if a.plots else ():
        curves(rows, task, a.plots / f"convergence_{task}.png")


if __name__ == "__main__":
    main()
