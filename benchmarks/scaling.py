"""How training scales with the workers of a Dask cluster, on this machine or your own.

Question: How many samples/s do n workers train together, compared with the same workers
          training independently?
Counted:  Samples/s of the last epoch of a `fit`, its end included, after a first epoch
          that is not counted; `efficiency` is that divided by the sum of plain loops
          over the same batches on the same workers at the same time, median over seeds.
          Each worker has one replica and one torch thread; both keep freed memory for
          the next step. On one machine workers share its cores and its memory, which
          `plain` shows.
Baseline: the plain loops.
Run:      python -m benchmarks scaling --workers 1 2
          python -m benchmarks scaling --scheduler tcp://host:8786
          python -m benchmarks scaling --cluster slurm --workers 1 2 4 8 16
"""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from distributed import Client

import daskdl
from benchmarks import clusters
from benchmarks.report import bars
from benchmarks.results import Question, medians
from benchmarks.work import WORKS, Task, batches, plain_speed, plain_step
from daskdl.process_settings import freed_memory_kept


def data(work: Task, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to learn from, repeated if there are fewer."""
    split = work.split()
    chosen = np.arange(rows) % len(split.x)
    return split.x[chosen], split.y[chosen]


def plain(work: Task, optimizer: str, x: Any, y: Any, steps: int) -> float:
    """Samples/s of a plain loop."""
    torch.set_num_threads(1)
    model = work.model()
    rule = work.optimizer(optimizer)(model.parameters())
    rng = np.random.default_rng(0)
    some = batches(*map(torch.from_numpy, (x, y)), work.batch_size, rng)
    with freed_memory_kept():
        step = plain_step(work.loss, model, rule)
        return work.batch_size * plain_speed(step, some, steps)


def measured(
    client: Client, asked: argparse.Namespace, workers: int, every: int, seed: int
) -> dict[str, float]:
    work, steps = WORKS[asked.work], asked.steps
    addresses = sorted(client.scheduler_info(n_workers=-1)["workers"])[:workers]
    x, y = client.scatter(
        list(data(work, steps * work.batch_size)),
        workers=addresses,
        broadcast=True,
        hash=False,
    )
    loops = [
        client.submit(
            *(plain, work, asked.optimizer, x, y, steps), workers=[worker], pure=False
        )
        for worker in addresses
    ]
    base = float(sum(client.gather(loops)))
    trainer = daskdl.Trainer(
        work.model,
        work.loss,
        work.optimizer(asked.optimizer),
        master=daskdl.GradientSharing(exchange_every=every),
        client=client,
        seed=seed,
        progress=False,
    )
    rows = data(work, steps * work.batch_size * workers)
    epoch = trainer.fit(*rows, epochs=2, batch_size=work.batch_size)[-1]
    taken = epoch["examples"] / work.batch_size
    return {
        "samples_per_s": epoch["examples_per_s"],
        "plain": base,
        "efficiency": epoch["examples_per_s"] / base,
        "sent_kb_per_step": epoch["sent_bytes"] / taken / 1e3,
        "density": epoch["density"],
        "waited": sum(epoch["waits"].values()) / epoch["seconds"] / workers,
    }


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    ones: dict[int, float] = {}  # samples/s of one worker
    with clusters.connected(asked) as (client, cluster):
        for workers in clusters.sizes(client, cluster, asked.workers):
            for every in asked.exchange_every:
                rounds = [
                    measured(client, asked, workers, every, seed)
                    for seed in asked.seeds
                ]
                median_row = medians(rounds)
                of_one = ones.setdefault(every, median_row["samples_per_s"] / workers)
                case = f"{asked.work}, exchange_every={every}"
                yield {
                    "case": case,
                    "workers": workers,
                    **median_row,
                    "rounds": rounds,
                } | {"to_one": median_row["samples_per_s"] / of_one}


QUESTION = Question(
    "scaling",
    __doc__,
    rows,
    "case workers:d samples_per_s:,.0f plain:,.0f efficiency:.3f to_one:.2f "
    "sent_kb_per_step:,.1f density:.1e waited:.3f",
    {
        **clusters.OPTIONS,
        "--workers": [1, 2],
        "--exchange-every": [1, 16],
        "--work": {"choices": WORKS, "default": "mlp"},
        "--optimizer": "SGD",
        "--steps": {"type": int, "default": 150, "help": "of a worker, per epoch"},
        "--seeds": [0, 1, 2],
    },
    lambda result: bars(result, "efficiency", "workers", group="case"),
)
