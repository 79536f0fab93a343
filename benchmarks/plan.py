"""What `daskdl.plan` predicts for some workers, beside what they do.

Question: How far is the prediction for several workers from the measured speed?
Counted:  Samples/s of one and of several workers, processes of this machine with one
          torch thread, each with a core of its own as long as there are cores.
          Predicted: by ``daskdl.plan(..., link=None)``, which runs several processes at
          once, since workers of one machine share memory and caches, and takes the
          scheduler's work into account. Measured: in the second epoch of a `fit` on a
          local cluster, with the end of that epoch, which the prediction leaves out.
          Both take turns, `--rounds` times, and each round has its own ratio. Models:
          the MLP 784-2048-2048-10 (5.8 million parameters, expensive to encode), a
          small CNN (20 thousand, cheap), and a linear model (42 parameters), whose
          steps are too short to pay off. Batches of 64, SGD. "every 1" and "mesh" make
          messages expensive: an exchange each step, and without the scheduler.
Run:      python -m benchmarks plan --rounds 5
"""

import argparse
import functools
import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
from distributed import Client
from torch import nn

import daskdl
from benchmarks.clusters import local_client, trainer
from benchmarks.results import Question, medians
from benchmarks.work import BATCH, cnn, mlp, samples, sgd

# Shape of an example, and how many steps take as long as one of the MLP.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "MLP": (mlp, (784,), 1),
    "CNN": (cnn, (1, 28, 28), 3),
    "linear": (functools.partial(nn.Linear, 20, 2), (20,), 100),
}
MASTERS = {
    "default": daskdl.GradientSharing(),
    "every 1": daskdl.GradientSharing(exchange_every=1),
    "mesh": daskdl.GradientSharing(exchange_every=1, routing="mesh"),
}


def data(count: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    x, y = samples(count, math.prod(shape))
    return x.reshape(count, *shape), y % 2 if shape == (20,) else y


def pin(client: Client) -> None:
    """Keep each worker on a core of its own, as long as there are cores."""
    cores = sorted(os.sched_getaffinity(0))
    for worker, core in zip(sorted(client.nthreads()), cores, strict=False):
        client.run(_keep_on, core, workers=[worker])


def _keep_on(core: int) -> None:
    for thread in psutil.Process().threads():
        os.sched_setaffinity(thread.id, {core})


def measured(name: str, master: str, workers: int, steps: int) -> float:
    """Samples/s in the second epoch of a fit."""
    model, shape, factor = MODELS[name]
    with local_client(workers) as client:
        pin(client)
        dataset = data(steps * factor * BATCH * workers, shape)
        fitted = trainer(client, model, master=MASTERS[master]).fit(
            *dataset, epochs=2, batch_size=BATCH
        )
        return float(fitted[-1]["examples_per_s"])


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    rounds_of: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for _ in range(asked.rounds):
        for name, master in itertools.product(asked.models, asked.masters):
            model, shape, _ = MODELS[name]
            # No cluster runs meanwhile: an idle one uses a part of a core, too.
            plan = daskdl.plan(
                model,
                data(BATCH, shape),
                workers=asked.workers,
                loss=nn.CrossEntropyLoss(),
                optimizer=sgd,
                master=MASTERS[master],
                threads=1,
            )
            for row in plan.rows:
                speed = measured(name, master, row.workers, asked.steps)
                rounds_of.setdefault((name, master, row.workers), []).append(
                    {"predicted": row.samples_per_s, "measured": speed}
                    | {"step_ms": 1e3 * plan.measured.alone.step_s, "limit": row.limit}
                )
                print(
                    f"# {name}, {master}, {row.workers}: {row.samples_per_s:,.0f}, "
                    f"{speed:,.0f}"
                )
    for (name, master, workers), rounds in rounds_of.items():
        limit = statistics.mode(row.pop("limit") for row in rounds)
        for row in rounds:
            row["ratio"] = row["predicted"] / row["measured"]
        result = {"case": name, "master": master, "workers": workers}
        yield {**result, **medians(rounds), "limit": limit}


QUESTION = Question(
    "plan",
    __doc__,
    rows,
    "case master workers:d step_ms:.2f predicted:,.0f measured:,.0f ratio:.3f limit",
    {
        "--models": {"nargs": "+", "choices": MODELS, "default": ["MLP", "CNN"]},
        "--masters": {"nargs": "+", "choices": MASTERS, "default": ["default"]},
        "--workers": [1, 2],
        "--steps": 150,
        "--rounds": 5,
    },
)
