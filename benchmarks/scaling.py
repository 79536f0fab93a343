"""How training scales with the workers of a Dask cluster, this machine's or your own.

Question: how many samples/s do n workers train together, beside the same workers that
          know nothing of each other?
Counted:  samples/s of the last epoch of a `fit`, its end included, after a first epoch
          that is not counted; `efficiency` is that over the sum of plain loops over the
          same batches on the same workers at the same time, median over seeds. Each
          worker has one replica and one torch thread; freed memory is kept for the next
          step in both, as Dask's workers do not by themselves. New workers come as
          `--workers` says. On one machine they share its cores and its memory, which
          `plain` shows.
Baseline: the plain loops.
Run:      python -m benchmarks scaling --workers 1 2
          python -m benchmarks scaling --scheduler tcp://host:8786
          python -m benchmarks scaling --cluster slurm --workers 1 2 4 8 16
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from distributed import Client
from torch import nn

import daskdl
from benchmarks import clusters
from benchmarks.report import bars
from benchmarks.results import Question
from benchmarks.work import WORKS, Task, batches
from daskdl.util import freed_memory_kept

COLUMNS = {
    "case": "",
    "workers": "d",
    "samples_per_s": ",.0f",
    "plain": ",.0f",
    "efficiency": ".3f",
    "to_one": ".2f",
    "sent_kb_per_step": ",.1f",
    "density": ".1e",
    "waited": ".3f",
}


def options(parser: argparse.ArgumentParser) -> None:
    clusters.options(parser)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--exchange-every", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--work", choices=WORKS, default="mlp")
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--steps", type=int, default=150, help="of a worker, an epoch")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])


def data(work: Task, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """So many rows to learn from, the same ones again if there are fewer."""
    split = work.split()
    chosen = np.arange(rows) % len(split.x)
    return split.x[chosen], split.y[chosen]


def plain(
    new_model: Callable[[], nn.Module],
    loss: nn.Module,
    rule: Any,
    x: Any,
    y: Any,
    steps: int,
    size: int,
) -> float:
    """Samples/s of a plain loop, after a tenth of it that is not counted."""
    torch.set_num_threads(1)
    model = new_model()
    optimizer = rule(model.parameters())
    some = batches(*map(torch.from_numpy, (x, y)), size, np.random.default_rng(0))
    with freed_memory_kept():
        for step in range(-steps // 10, steps):
            if step == 0:
                began = time.perf_counter()
            inputs, labels = next(some)
            optimizer.zero_grad()
            loss(model(inputs), labels).backward()
            optimizer.step()
        return steps * size / (time.perf_counter() - began)


def plain_loops(client: Client, asked: argparse.Namespace, workers: list[str]) -> float:
    """Of all workers at once, their sum."""
    work = WORKS[asked.work]
    size = work.batch_size
    rows = data(work, asked.steps * size)
    scattered = client.scatter(list(rows), workers=workers, broadcast=True, hash=False)
    futures = [
        client.submit(
            plain,
            work.model,
            work.loss,
            work.optimizer(asked.optimizer),
            *scattered,
            asked.steps,
            size,
            workers=[worker],
            pure=False,
        )
        for worker in workers
    ]
    return float(sum(client.gather(futures)))


def fitted(
    client: Client, asked: argparse.Namespace, workers: int, every: int, seed: int
) -> dict[str, Any]:
    """The row of the history of the last epoch of a fit."""
    work = WORKS[asked.work]
    trainer = daskdl.Trainer(
        work.model,
        work.loss,
        work.optimizer(asked.optimizer),
        master=daskdl.GradientSharing(exchange_every=every),
        client=client,
        seed=seed,
        progress=False,
    )
    rows = data(work, asked.steps * work.batch_size * workers)
    return dict(trainer.fit(*rows, epochs=2, batch_size=work.batch_size)[-1])


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    ones: dict[int, float] = {}
    with clusters.connected(asked) as (client, cluster):
        for workers in clusters.sizes(client, cluster, asked.workers):
            for every in asked.exchange_every:
                own = row(client, asked, workers, every)
                ones.setdefault(every, own["samples_per_s"] / workers)
                yield own | {"to_one": own["samples_per_s"] / ones[every]}


def row(
    client: Client, asked: argparse.Namespace, workers: int, every: int
) -> dict[str, Any]:
    """One number of workers; a round for each seed, the plain loops first."""
    size = WORKS[asked.work].batch_size
    rounds = []
    for seed in asked.seeds:
        addresses = sorted(client.scheduler_info(n_workers=-1)["workers"])[:workers]
        base = plain_loops(client, asked, addresses)
        found = fitted(client, asked, workers, every, seed)
        steps = found["examples"] / size
        waited = sum(found["waits"].values()) / found["seconds"] / workers
        rounds.append(
            {
                "samples_per_s": found["examples_per_s"],
                "plain": base,
                "efficiency": found["examples_per_s"] / base,
                "sent_kb_per_step": found["sent_bytes"] / steps / 1e3,
                "density": found["density"],
                "waited": waited,
            }
        )
    medians = {k: statistics.median(own[k] for own in rounds) for k in rounds[0]}
    case = f"{asked.work}, exchange_every={every}"
    return {"case": case, "workers": workers, **medians, "rounds": rounds}


QUESTION = Question(
    "scaling",
    __doc__,
    options,
    rows,
    COLUMNS,
    lambda result: bars(result, "efficiency", "workers", "case"),
)
