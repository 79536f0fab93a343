"""Does it learn as well as synchronous training?

Question: With as many examples and the same learning rate, how good is the model that
          daskdl returns, compared with synchronous data-parallel training and with one
          process?
Counted:  Accuracy or loss on rows that were not trained on, mean and standard deviation
          over seeds. `returned` is the model that `fit` returns. `to sync`: relative to
          synchronous training with as many replicas, the same rate and seed, in points
          of accuracy or percent of the loss, more is better; `worst` of the seeds;
          `best` compares the best epoch of each, which early stopping would return:
          who learns faster overfits sooner. NaN: a fit diverged.
          `epochs`: the first after which the model was as good as one process over its
          last three. `sent`: bytes published / bytes of whole updates. Replicas are
          threads of one process (`Trainer(client=False)`): the step, the codec and the
          run state are those of a cluster, the network is not. "synchronous" is one
          process that adds up the gradients of as many batches as there are replicas
          before each step, which is what DistributedDataParallel computes; "Polyak" is
          its moving average over 20 steps, which is how long a parameter waits if 5 %
          are sent in each; "DDP" is PyTorch's own, over gloo, with two processes. The
          last table has means over tasks, numbers of replicas and seeds.
Run:      python -m benchmarks convergence --tasks digits diabetes --seeds 0 1 2
"""

import argparse
import functools
import itertools
import json
import math
import operator
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.distributed
import torch.multiprocessing
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import daskdl
from benchmarks.results import parser_of
from benchmarks.work import OPTIMIZERS, TASKS, Task
from daskdl.compression.thresholds import Outcome, Residual, summable
from daskdl.training.pace import ExchangePace

BASELINES = ("one process", "synchronous", "Polyak", "DDP")
WINDOW = 20  # steps in Polyak's average: 1 / density of the default
PLOTTED = {
    "one process": "one process",
    "synchronous": "synchronous",
    "default": "daskdl",
    "in 8 bits": "daskdl, in 8 bits",
}

Averaging = daskdl.ParameterAveraging
Sharing = daskdl.GradientSharing


@dataclass(frozen=True)
class PaceAtCost(ExchangePace):
    """As if each exchange took a given number of steps."""

    cost: float = 0.0

    def steps_between(self, cost: float, steps_made: int) -> int:
        return super().steps_between(self.cost, steps_made)


@dataclass(frozen=True)
class SummableThreshold(daskdl.ThresholdAlgorithm):
    """The thresholds of the default, rounded as for updates that are summed."""

    def next_threshold(self, residual: Residual, last: Outcome | None) -> float:
        return summable(daskdl.SampledThreshold().next_threshold(residual, last))


@dataclass(frozen=True)
class SharingAtCost(daskdl.GradientSharing):
    """In lockstep, at the intervals of replicas whose exchanges have a given cost."""

    max_staleness: int = 0
    cost: float = 0.0  # in durations of a step

    def pace(self, *, adaptive: bool = False) -> ExchangePace:
        pace = daskdl.GradientSharing().pace(adaptive=adaptive)
        return PaceAtCost(**asdict(pace), cost=self.cost)


def diloco(**options: str) -> daskdl.ParameterAveraging:
    """With the outer rate and momentum of its authors."""
    outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    return Averaging(frequency=20, average_optimizer=False, outer=outer, **options)


# The default, and one option changed at a time.
MASTERS: dict[str, daskdl.GradientSharing | daskdl.ParameterAveraging] = {
    "default": Sharing(),
    "in 8 bits": Sharing(warmup_steps=10**9),  # all of the residual
    "target": Sharing(threshold=daskdl.TargetSparsityThreshold()),
    "strict": Sharing(apply="strict"),
    "sum": Sharing(update_scale="sum"),
    "keep": Sharing(residual=daskdl.KeepResidual()),
    "staleness 2": Sharing(max_staleness=2),
    "staleness None": Sharing(max_staleness=None),
    "every 1": Sharing(exchange_every=1),
    "every 4": Sharing(exchange_every=4),
    "every 16": Sharing(exchange_every=16),
    # Independent of time.
    **{
        f"lockstep {every} momentum {momentum}".replace(" auto", "").removesuffix(
            " momentum 0"
        ): Sharing(max_staleness=0, exchange_every=every, momentum=momentum)
        for every, momentum in itertools.product(
            ("auto", 1, 4, 16), (0, 0.3, 0.5, 0.8, 0.9)
        )
    },
    **{
        f"lockstep density {density}": Sharing(
            max_staleness=0, threshold=daskdl.SampledThreshold(density)
        )
        for density in (0.2, 0.1, 0.02, 0.00625)
    },
    "lockstep summable": Sharing(max_staleness=0, threshold=SummableThreshold()),
    "cost 0.5": SharingAtCost(cost=0.5),
    "cost 2": SharingAtCost(cost=2.0),
    "momentum 0.5": Sharing(momentum=0.5),
    "momentum 0.8": Sharing(momentum=0.8),
    "momentum 0.9": Sharing(momentum=0.9),
    "averaging": Averaging(),
    "averaging in 8": Averaging(compression="dense8"),
    "averaging 1": Averaging(frequency=1),
    "averaging 20": Averaging(frequency=20),
    "averaging own": Averaging(average_optimizer=False),
    "DiLoCo 20": diloco(),
    "DiLoCo 20 in 8": diloco(compression="dense8"),
}
WAYS = [*BASELINES, *MASTERS]


@dataclass(frozen=True)
class Run:
    task: str
    optimizer: str
    replicas: int
    way: str
    seed: int


@dataclass(frozen=True)
class Row(Run):
    returned: float  # score of the model that is returned
    scores: list[float]  # of the agreed state after each epoch
    sent: float  # bytes published / bytes of whole updates
    seconds: float


# ---- training


def synchronous(run: Run) -> list[float]:
    """One process that adds up the gradients of several batches."""
    torch.manual_seed(run.seed)
    task = TASKS[run.task]
    split, model = task.split(), task.model()
    optimizer = task.optimizer(run.optimizer)(model.parameters())
    mean = AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(1 - 1 / WINDOW), use_buffers=True
    )
    rng = np.random.default_rng(run.seed)
    x, y, x_test, y_test = map(torch.from_numpy, split)
    scores = []
    for _ in range(task.epochs):
        batches = torch.from_numpy(rng.permutation(len(x))).split(task.batch_size)
        for start in range(0, len(batches), run.replicas):
            group = batches[start : start + run.replicas]
            optimizer.zero_grad()
            for rows in group:
                (task.loss(model(x[rows]), y[rows]) / len(group)).backward()
            optimizer.step()
            if run.way == "Polyak":
                mean.update_parameters(model)
        shown = mean.module if run.way == "Polyak" else model
        scores.append(task.test(shown, x_test, y_test))
    return scores


def ddp(run: Run) -> list[float]:
    """PyTorch's DistributedDataParallel over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (run, folder), nprocs=run.replicas)
        return json.loads(Path(folder, "scores.json").read_text())


def _rank(rank: int, run: Run, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=run.replicas
    )
    task = TASKS[run.task]
    x, y, x_test, y_test = map(torch.from_numpy, task.split())
    torch.manual_seed(run.seed)
    model = nn.parallel.DistributedDataParallel(task.model())
    optimizer = task.optimizer(run.optimizer)(model.parameters())
    rng = np.random.default_rng(run.seed)
    scores = []
    for _ in range(task.epochs):
        order = torch.from_numpy(rng.permutation(len(x)))
        for rows in order.split(run.replicas * task.batch_size):
            share = rows.tensor_split(run.replicas)[rank]
            optimizer.zero_grad()
            task.loss(model(x[share]), y[share]).backward()
            optimizer.step()
        if rank == 0:
            scores.append(task.test(model.module, x_test, y_test))
        torch.distributed.barrier()
    if rank == 0:
        Path(folder, "scores.json").write_text(json.dumps(scores))
    torch.distributed.destroy_process_group()


def shared(run: Run, rate_factor: float) -> tuple[float, list[float], float]:
    """daskdl: the returned model's score, those after each epoch, and bytes sent.

    They are NaN if the fit diverged.
    """
    task = TASKS[run.task]
    split = task.split()
    trainer = daskdl.Trainer(
        task.model,
        task.loss,
        task.optimizer(run.optimizer, rate_factor),
        master=replace(MASTERS[run.way], replicas_per_worker=run.replicas),
        client=False,
        seed=run.seed,
        progress=False,
    )
    test = split.x_test, split.y_test
    options = {"epochs": task.epochs, "batch_size": task.batch_size}
    try:
        history = trainer.fit(split.x, split.y, validation=test, **options)
    except daskdl.DivergedError:
        return math.nan, [math.nan] * task.epochs, math.nan
    sent, dense = (sum(history.column(f"{name}_bytes")) for name in ("sent", "dense"))
    returned = task.test(trainer.model_, *map(torch.from_numpy, test))
    return returned, history.column(f"val_{task.score}"), sent / max(1, dense)


def trained(run: Run, rate_factor: float) -> Row:
    torch.set_num_threads(1)
    began, sent = time.perf_counter(), 1.0
    if run.way in MASTERS:
        returned, scores, sent = shared(run, rate_factor)
    else:
        scores = ddp(run) if run.way == "DDP" else synchronous(run)
        returned = scores[-1]
    seconds = time.perf_counter() - began
    if run.way in MASTERS and rate_factor != 1:
        run = replace(run, way=f"{run.way}, x{rate_factor:g}")
    return Row(**asdict(run), returned=returned, scores=scores,
               sent=sent, seconds=seconds)  # fmt: skip


# ---- results


def best_epoch(row: Row) -> float:
    """The best score after an epoch."""
    return (max if TASKS[row.task].score == "accuracy" else min)(row.scores)


def reached(scores: list[float], goal: float, task: Task) -> float:
    """The first epoch, from 1, that reached the goal; NaN if none did."""
    reached = (
        epoch for epoch, score in enumerate(scores, 1) if task.better(score, goal)
    )
    return next(reached, math.nan)


def gaps(
    rows: list[Row],
    beside: list[Row],
    *,
    higher: bool,
    score: Callable[[Row], float] = operator.attrgetter("returned"),
) -> list[float]:
    """Improvement on runs of the same seed: points, or percent of the loss."""
    others = {row.seed: score(row) for row in beside}
    pairs = [(score(row), others[row.seed]) for row in rows if row.seed in others]
    if higher:
        return [100 * (score - base) for score, base in pairs]
    return [100 * (base - score) / base for score, base in pairs]


def worst_first(gap: float) -> float:
    """A key to sort by: what diverged comes first."""
    return -math.inf if math.isnan(gap) else gap


def table(rows: list[Row]) -> str:
    """A line for each task, optimizer, number of replicas and way."""
    wide = max(14, *(len(row.way) for row in rows))
    lines = [
        f"{'task':9} {'optimizer':9} {'n':>2} {'way':{wide}} {'returned':>8} {'+-':>6} "
        f"{'to sync':>8} {'worst':>7} {'best':>6} {'epochs':>6} {'sent':>8}"
    ]
    order = {"task": list(TASKS), "optimizer": list(OPTIMIZERS), "way": WAYS}
    cases: dict[tuple[str, str, int, str], list[Row]] = {}
    for row in sorted(
        rows,
        key=lambda row: (
            order["task"].index(row.task),
            order["optimizer"].index(row.optimizer),
            row.replicas,
            order["way"].index(row.way.split(",")[0]),
        ),
    ):
        case = (row.task, row.optimizer, row.replicas, row.way)
        cases.setdefault(case, []).append(row)
    for (name, optimizer, replicas, way), repeats in cases.items():
        task = TASKS[name]
        higher = task.score == "accuracy"
        sync = cases.get((name, optimizer, replicas, "synchronous"), repeats)
        single = cases.get((name, optimizer, 1, "one process"), repeats)
        goal = (min if higher else max)(
            statistics.mean(row.scores[-3:]) for row in single
        )
        gap = gaps(repeats, sync, higher=higher)
        best = gaps(repeats, sync, higher=higher, score=best_epoch)
        returned = [row.returned for row in repeats]
        epochs = [reached(row.scores, goal, task) for row in repeats]
        lines.append(
            f"{name:9} {optimizer:9} {replicas:>2} {way:{wide}} "
            f"{np.mean(returned):8.4f} {np.std(returned):6.4f} "
            f"{statistics.mean(gap):+8.2f} {min(gap, key=worst_first):+7.2f} "
            f"{statistics.mean(best):+6.2f} "
            f"{statistics.fmean(epochs):6.1f} "
            f"{statistics.mean(row.sent for row in repeats):8.2e}"
        )
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    """A line for each optimizer and way: what it is beside synchronous training."""
    wide = max(14, *(len(row.way) for row in rows))
    lines = [
        f"{'optimizer':9} {'way':{wide}} {'to sync':>8} {'worst':>7} {'of':20} "
        f"{'best':>6} {'sent':>8}"
    ]
    beside: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        if row.way == "synchronous":
            beside.setdefault((row.task, row.optimizer, row.replicas), []).append(row)
    values: dict[tuple[str, str], list[tuple[float, float, Row]]] = {}
    for row in rows:
        if row.way in ("synchronous", "one process"):
            continue
        others = beside.get((row.task, row.optimizer, row.replicas), [])
        higher = TASKS[row.task].score == "accuracy"
        pairs = zip(
            gaps([row], others, higher=higher),
            gaps([row], others, higher=higher, score=best_epoch),
            strict=True,
        )
        for gap, best in pairs:
            values.setdefault((row.optimizer, row.way), []).append((gap, best, row))
    ways = list(dict.fromkeys(way for _, way in values))
    for optimizer, way in itertools.product(OPTIMIZERS, ways):
        if (optimizer, way) not in values:
            continue
        gap_of, best_of, of = zip(*values[optimizer, way], strict=True)
        worst, row = min(
            zip(gap_of, of, strict=True), key=lambda pair: worst_first(pair[0])
        )
        lines.append(
            f"{optimizer:9} {way:{wide}} {statistics.mean(gap_of):+8.2f} "
            f"{worst:+7.2f} {f'{row.task}, {row.replicas}':20} "
            f"{statistics.mean(best_of):+6.2f} "
            f"{statistics.mean(row.sent for row in of):8.2e}"
        )
    return "\n".join(lines)


def plot(rows: list[Row], name: str, path: Path) -> None:
    """Draw the score after each epoch: mean of the seeds, worst and best."""
    from matplotlib.figure import Figure

    of_task = [row for row in rows if row.task == name]
    most, task = max(row.replicas for row in of_task), TASKS[name]
    optimizers = [o for o in OPTIMIZERS if any(row.optimizer == o for row in of_task)]
    figure = Figure(figsize=(11, 3.4), layout="tight")
    axes = figure.subplots(1, len(optimizers), sharey=True, squeeze=False)[0]
    for axis, optimizer in zip(axes, optimizers, strict=True):
        for way, label in PLOTTED.items():
            case = (optimizer, way, 1 if way == "one process" else most)
            scores = [
                row.scores
                for row in of_task
                if (row.optimizer, row.way, row.replicas) == case
            ]
            if scores:
                epochs = range(1, len(scores[0]) + 1)
                axis.plot(epochs, np.mean(scores, axis=0), label=label)
                low, high = np.min(scores, axis=0), np.max(scores, axis=0)
                axis.fill_between(epochs, low, high, alpha=0.15)
        axis.set_title(f"{optimizer}, {most} replicas")
        axis.set_xlabel("epoch")
        axis.grid(alpha=0.3)
    tenths = statistics.quantiles([s for row in of_task for s in row.scores], n=10)
    if task.score == "accuracy":
        axes[0].set_ylim(tenths[0], 1.0)
    else:
        axes[0].set_ylim(top=tenths[-1])
    axes[0].set_ylabel(f"{task.score}, rows not trained on")
    axes[-1].legend(fontsize=8)
    figure.suptitle(name)
    figure.savefig(path, dpi=110)


def runs(asked: argparse.Namespace) -> Iterator[Run]:
    for seed, task, optimizer, replicas, way in itertools.product(
        asked.seeds, asked.tasks, asked.optimizers, asked.replicas, asked.ways
    ):
        alone = way == "one process"
        if alone == (replicas == 1) and (way != "DDP" or replicas == 2):
            yield Run(task, optimizer, replicas, way, seed)


def main(arguments: Sequence[str]) -> None:
    parser = parser_of("convergence", __doc__)
    add = parser.add_argument

    def some(name: str, metavar: str, known: Iterable[str], default: list[str]) -> None:
        of = f"of {', '.join(known)} (default: {', '.join(default)})"
        add(name, nargs="+", choices=known, default=default, metavar=metavar, help=of)

    some("--tasks", "TASK", TASKS, ["digits"])
    some("--optimizers", "NAME", OPTIMIZERS, list(OPTIMIZERS))
    add("--replicas", nargs="+", type=int, default=[1, 2, 4, 8], metavar="N")
    some("--ways", "WAY", WAYS, [*BASELINES, "default"])
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    add("--factor", type=float, default=1.0, help="on daskdl's learning rates")
    add("--jobs", type=int, default=1, metavar="N", help="runs at the same time")
    add("--rows", type=Path, metavar="FILE", help="add each run to this file")
    add(
        "--kept",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="train nothing, and show the runs in these files",
    )
    add("--plots", type=Path, metavar="FOLDER", help="draw a picture of each task")
    asked = parser.parse_args(arguments)
    rows = []
    if asked.kept:
        for path in asked.kept:
            rows += [Row(**json.loads(line)) for line in path.read_text().splitlines()]
    else:
        print(f"# torch {torch.__version__}, {platform.machine()}")
        with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn")) as pool:
            futures = [pool.submit(trained, run, asked.factor) for run in runs(asked)]
            for future in futures:
                row = future.result()
                rows.append(row)
                case = f"{row.task} {row.optimizer} {row.replicas} {row.way} {row.seed}"
                print(f"# {case}: {row.returned:.4f}, {row.seconds:.1f} s", flush=True)
                if asked.rows:
                    with asked.rows.open("a") as file:
                        file.write(json.dumps(asdict(row)) + "\n")
    print(table(rows))
    print(f"\n{summary(rows)}")
    for task in dict.fromkeys(row.task for row in rows) if asked.plots else ():
        plot(rows, task, asked.plots / f"convergence_{task}.png")
