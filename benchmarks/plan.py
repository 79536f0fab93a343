"""What `daskdl.plan` predicts for two workers, beside what they do.

Question: How far is the prediction for two workers from the measured speed?
Counted:  Samples/s of one and of two workers, processes of this machine with one torch
          thread. Predicted: by ``daskdl.plan(..., link=None)``, which runs two
          processes at once, since workers of one machine share memory and caches, and
          takes the scheduler's work into account. Measured: in the second epoch of a
          `fit` on a local cluster, with the end of that epoch, which the prediction
          leaves out. Both take turns, `--rounds` times, and each round has its own
          ratio. Models: the MLP 784-2048-2048-10 (5.8 million parameters, expensive to
          encode) and a small CNN (20 thousand, cheap). Batches of 64, SGD.
Run:      python -m benchmarks plan --rounds 5
"""

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import nn

import daskdl
from benchmarks.clusters import local_client, trainer
from benchmarks.results import Question, medians
from benchmarks.work import BATCH, cnn, mlp, samples, sgd

WORKERS = (1, 2)
# Shape of an example, and how many steps take as long as one of the MLP.
MODELS = {"MLP": (mlp, (784,), 1), "CNN": (cnn, (1, 28, 28), 3)}


def data(count: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    x, y = samples(count)
    return x.reshape(count, *shape), y


def measured(name: str, workers: int, steps: int) -> float:
    """Samples/s in the second epoch of a fit."""
    model, shape, factor = MODELS[name]
    with local_client(workers) as client:
        dataset = data(steps * factor * BATCH * workers, shape)
        fitted = trainer(client, model).fit(*dataset, epochs=2, batch_size=BATCH)
        return float(fitted[-1]["examples_per_s"])


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    rounds_of: dict[tuple[str, int], list[dict[str, Any]]] = {
        (name, workers): [] for name in MODELS for workers in WORKERS
    }
    for _ in range(asked.rounds):
        for name, (model, shape, _) in MODELS.items():
            # No cluster runs meanwhile: an idle one uses a part of a core, too.
            plan = daskdl.plan(
                model,
                data(BATCH, shape),
                workers=WORKERS,
                loss=nn.CrossEntropyLoss(),
                optimizer=sgd,
                threads=1,
            )
            for row in plan.rows:
                step = measured(name, row.workers, asked.steps)
                rounds_of[name, row.workers].append(
                    {"predicted": row.samples_per_s, "measured": step}
                    | {"limit": row.limit}
                )
                print(f"# {name} {row.workers}: {row.samples_per_s:,.0f}, {step:,.0f}")
    for (name, workers), rounds in rounds_of.items():
        limit = statistics.mode(row.pop("limit") for row in rounds)
        for row in rounds:
            row["ratio"] = row["predicted"] / row["measured"]
        yield {"case": name, "workers": workers, **medians(rounds), "limit": limit}


QUESTION = Question(
    "plan",
    __doc__,
    rows,
    "case workers:d predicted:,.0f measured:,.0f ratio:.3f limit",
    {"--steps": 150, "--rounds": 5},
)
