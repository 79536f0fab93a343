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
Run:      python -m benchmarks.convergence --tasks digits diabetes --seeds 0 1 2
"""

import argparse
import itertools
import json
import platform
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.multiprocessing
from torch import nn

import daskdl
from benchmarks.comparison import Row, table
from benchmarks.tasks import TASKS, Split, Task

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


def main() -> None:
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
    a = parser.parse_args()
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


if __name__ == "__main__":
    main()
