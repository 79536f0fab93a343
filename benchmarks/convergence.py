"""Does it learn as well as synchronous training?

Question: with as many examples and the same learning rate, how good is the model that
          daskdl returns, beside synchronous data-parallel training and one process?
Counted:  accuracy or loss on rows that were not trained on, mean and standard
          deviation over seeds. `returned` is the model that `fit` returns, `shared`
          what all agreed on last, which is the same. `to sync`: against
          synchronous training with as many replicas, the same rate and seed, in points
          of accuracy or percent of the loss, more is better; `worst` of the seeds.
          `epochs`: at the end of which shared was first as good as one process over
          its last three. `sent`: bytes published / bytes of whole updates.
          Replicas are threads of one process (`Trainer(client=False)`): the step, the
          codec and the record of a run are those of a cluster, the network is not.
          "synchronous" is one process that adds up the gradients of as many batches as
          there are replicas before each step, which is what DistributedDataParallel
          computes; "DDP" is PyTorch's own, over gloo, with two processes.
Run:      python -m benchmarks convergence --tasks digits diabetes --seeds 0 1 2
"""

import argparse
import itertools
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.multiprocessing
from torch import nn

import daskdl
from benchmarks.work import TASKS, Split, Task

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


BASELINES = ("one process", "synchronous", "DDP")


def nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The outer optimizer of DiLoCo, with the rate and momentum of its authors."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


# What is compared, beside the default: one option changed at a time.
MASTERS: dict[str, daskdl.TrainingMaster] = {
    "default": daskdl.GradientSharing(),
    "link": daskdl.GradientSharing(threshold=daskdl.LinkThreshold()),
    "strict": daskdl.GradientSharing(apply="strict"),
    "sum": daskdl.GradientSharing(update_scale="sum"),
    "keep": daskdl.GradientSharing(residual=daskdl.KeepResidual()),
    "target": daskdl.GradientSharing(threshold=daskdl.TargetSparsityThreshold()),
    "staleness 0": daskdl.GradientSharing(max_staleness=0),
    "staleness 2": daskdl.GradientSharing(max_staleness=2),
    "staleness None": daskdl.GradientSharing(max_staleness=None),
    "every 4": daskdl.GradientSharing(exchange_every=4),
    "every 16": daskdl.GradientSharing(exchange_every=16),
    "averaging": daskdl.ParameterAveraging(),
    "averaging 1": daskdl.ParameterAveraging(frequency=1),
    "averaging 20": daskdl.ParameterAveraging(frequency=20),
    "averaging own": daskdl.ParameterAveraging(average_optimizer=False),
    "averaging in 8": daskdl.ParameterAveraging(compression="dense8"),
    "DiLoCo 20": daskdl.ParameterAveraging(
        frequency=20, average_optimizer=False, outer=nesterov
    ),
    "DiLoCo 20 in 8": daskdl.ParameterAveraging(
        frequency=20, average_optimizer=False, outer=nesterov, compression="dense8"
    ),
}


def alone(
    task: Task, split: Split, optimizer: str, replicas: int, seed: int
) -> list[float]:
    """One process; with `replicas` batches added up it is synchronous training."""
    torch.manual_seed(seed)
    model = task.model()
    rule = task.optimizer(optimizer)(model.parameters())
    rng = np.random.default_rng(seed)
    x, y = torch.from_numpy(split.x), torch.from_numpy(split.y)
    scores = []
    for _ in range(task.epochs):
        model.train()
        batches = torch.from_numpy(rng.permutation(len(x))).split(task.batch_size)
        for start in range(0, len(batches), replicas):
            group = batches[start : start + replicas]
            rule.zero_grad()
            for rows in group:
                loss = task.loss(model(x[rows]), y[rows]) / len(group)
                loss.backward()
            rule.step()
        scores.append(score(task, model, split))
    return scores


def score(task: Task, model: torch.nn.Module, split: Split) -> float:
    """On the rows that were not trained on, as the task counts."""
    model.eval()
    y = torch.from_numpy(split.y_test)
    with torch.no_grad():
        output = model(torch.from_numpy(split.x_test))
    if task.score == "accuracy":
        return float((output.argmax(1) == y).double().mean())
    return float(task.loss(output, y))


def shared(
    task: Task, split: Split, optimizer: str, replicas: int, way: str, seed: int
) -> Row:
    """One run of daskdl."""
    options: dict[str, Any] = {"replicas_per_worker": replicas}
    master = replace(MASTERS[way], **options)  # type: ignore[type-var]
    trainer = daskdl.Trainer(
        task.model,
        task.loss,
        task.optimizer(optimizer),
        master=master,
        client=False,
        seed=seed,
        progress=False,
    )
    began = time.perf_counter()
    history = trainer.fit(
        split.x,
        split.y,
        epochs=task.epochs,
        batch_size=task.batch_size,
        validation=(split.x_test, split.y_test),
    )
    seconds = time.perf_counter() - began
    scores = history.column(f"val_{task.score}")
    sent = sum(history.column("sent_bytes"))
    return Row(
        task.name,
        optimizer,
        replicas,
        way,
        seed,
        score(task, trainer.model_, split),
        scores[-1],
        scores,
        sent / max(1, sum(history.column("dense_bytes"))),
        seconds,
    )


def ddp(task_name: str, optimizer: str, replicas: int, seed: int, path: str) -> None:
    """PyTorch's DistributedDataParallel over gloo; the scores go to a file."""
    arguments = (task_name, optimizer, replicas, seed, path)
    torch.multiprocessing.spawn(_rank, arguments, nprocs=replicas)


def _rank(
    rank: int, task_name: str, optimizer: str, replicas: int, seed: int, path: str
) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"file://{path}.store", rank=rank, world_size=replicas
    )
    task = TASKS[task_name]
    split = task.split()
    torch.manual_seed(seed)
    model = nn.parallel.DistributedDataParallel(task.model())
    rule = task.optimizer(optimizer)(model.parameters())
    rng = np.random.default_rng(seed)
    x, y = torch.from_numpy(split.x), torch.from_numpy(split.y)
    scores = []
    for _ in range(task.epochs):
        model.train()
        order = torch.from_numpy(rng.permutation(len(x)))
        for rows in order.split(replicas * task.batch_size):
            own = rows.tensor_split(replicas)[rank]
            rule.zero_grad()
            task.loss(model(x[own]), y[own]).backward()
            rule.step()
        if rank == 0:
            scores.append(score(task, model.module, split))
        torch.distributed.barrier()
    if rank == 0:
        Path(path).write_text(json.dumps(scores))
    torch.distributed.destroy_process_group()


def one(
    task_name: str,
    optimizer: str,
    replicas: int,
    way: str,
    seed: int,
    factor: float = 1.0,
) -> Row:
    """One run of any way."""
    torch.set_num_threads(1)
    task = TASKS[task_name]
    split = task.split()
    if way in MASTERS:
        rates = {name: factor * rate for name, rate in task.rates.items()}
        task = replace(task, rates=rates)
        row = shared(task, split, optimizer, replicas, way, seed)
        return row if factor == 1 else replace(row, way=f"{way}, x{factor:g}")
    began = time.perf_counter()
    if way == "DDP":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "scores.json"
            ddp(task_name, optimizer, replicas, seed, str(path))
            scores = json.loads(path.read_text())
    else:
        scores = alone(task, split, optimizer, replicas, seed)
    seconds = time.perf_counter() - began
    return Row(
        *(task_name, optimizer, replicas, way, seed),
        *(scores[-1], scores[-1], scores, 1.0, seconds),
    )


def runs(a: argparse.Namespace) -> Iterator[tuple[str, str, int, str, int]]:
    """What is to be run: task, optimizer, replicas, way, seed."""
    for seed, task, optimizer in itertools.product(a.seeds, a.tasks, a.optimizers):
        for replicas in a.replicas:
            for way in a.ways:
                alone = way == "one process"
                if alone == (replicas == 1) and (way != "DDP" or replicas == 2):
                    yield task, optimizer, replicas, way, seed


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["digits"])
    parser.add_argument("--optimizers", nargs="+", default=["SGD", "momentum", "AdamW"])
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=[*BASELINES, *MASTERS],
        default=[*BASELINES, "default"],
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--factor", type=float, default=1.0, help="of daskdl's rates")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--rows", type=Path, help="file to which each run is added")
    parser.add_argument("--kept", nargs="+", type=Path, help="run nothing: these rows")
    parser.add_argument("--plots", type=Path, help="folder for a picture of each task")
    a = parser.parse_args(arguments)
    if a.kept:
        lines = [line for path in a.kept for line in path.read_text().splitlines()]
        rows = [Row(**json.loads(line)) for line in lines]
    else:
        rows = trained(a)
    print(table(rows))
    for task in dict.fromkeys(row.task for row in rows) if a.plots else ():
        curves(rows, task, a.plots / f"convergence_{task}.png")


def trained(a: argparse.Namespace) -> list[Row]:
    """Run all that is asked for."""
    print(f"# torch {torch.__version__}, {platform.machine()}")
    rows = []
    with ProcessPoolExecutor(a.jobs, mp_context=get_context("spawn")) as pool:
        for under_way in [pool.submit(one, *run, a.factor) for run in runs(a)]:
            row = under_way.result()
            rows.append(row)
            print(
                f"# {row.task} {row.optimizer} {row.replicas} {row.way} {row.seed}: "
                f"{row.returned:.4f}, {row.seconds:.1f} s",
                flush=True,
            )
            if a.rows:
                with a.rows.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    print(table(rows))
