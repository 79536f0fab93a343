"""What `daskdl.plan` predicts for two workers, beside what they do.

Question: how far is the prediction for two workers from what is then measured?
Counted:  samples/s of one and of two workers of one torch thread each, processes of
          this machine. Predicted: by ``daskdl.plan(..., link=None)``, for which two
          processes rehearse at once, since two workers here share memory and caches,
          and in which the scheduler's work takes its share of the cores. Measured: of
          the second epoch of a `fit` on a `LocalCluster`; the end of that epoch is in
          it, and not in the prediction. Client and scheduler share the cores with the
          workers. One and the other take turns, `--rounds` times, and each round has a
          ratio of its own, since a machine's speed may drift. The models: the MLP
          784-2048-2048-10 (5.8 M parameters, expensive to encode), and a small CNN
          (20 thousand, cheap). Batch 64, SGD.
Run:      python -m benchmarks plan --rounds 5
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from distributed import Client
from torch import nn

import daskdl
from benchmarks.clusters import local_cluster
from benchmarks.results import Question
from benchmarks.step import BATCH, samples, sgd
from benchmarks.work import cnn, mlp

WORKERS = (1, 2)


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of an example
    steps_factor: int  # steps of this model that take as long as one of the MLP

    def data(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = samples(count)
        return x.reshape(count, *self.shape), y


@dataclass(frozen=True)
class Row:
    case: str
    workers: int
    predicted: float  # samples/s, median over rounds
    measured: float  # samples/s, median over rounds
    ratio: float  # predicted / measured, median over rounds
    limit: str  # that was predicted most often


CASES = [Case("MLP", mlp, (784,), 1), Case("CNN", cnn, (1, 28, 28), 3)]


def predicted(case: Case) -> dict[int, tuple[float, str]]:
    plan = daskdl.plan(
        case.model,
        case.data(BATCH),
        workers=WORKERS,
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        threads=1,
    )
    return {row.workers: (row.samples_per_s, row.limit) for row in plan.rows}


def measured(case: Case, workers: int, steps: int) -> float:
    """Samples/s of a fit on so many worker processes, after a first epoch."""
    with (
        local_cluster(workers) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        trainer = daskdl.Trainer(
            case.model, nn.CrossEntropyLoss(), sgd, client=client, progress=False
        )
        data = case.data(steps * case.steps_factor * BATCH * workers)
        return trainer.fit(*data, epochs=2, batch_size=BATCH)[-1]["examples_per_s"]


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    steps, rounds = asked.steps, asked.rounds
    plans: dict[str, list[dict[int, tuple[float, str]]]] = {c.name: [] for c in CASES}
    rates: dict[tuple[str, int], list[float]] = {
        (case.name, workers): [] for case in CASES for workers in WORKERS
    }
    for _ in range(rounds):
        for case in CASES:
            # No cluster is there meanwhile: an idle one takes a part of a core too.
            plans[case.name].append(predicted(case))
            for workers in WORKERS:
                rates[case.name, workers].append(measured(case, workers, steps))
                said, did = plans[case.name][-1][workers][0], rates[case.name, workers]
                print(
                    f"# {case.name} {workers}: {said:,.0f}, {did[-1]:,.0f}", flush=True
                )
    for (name, workers), found in rates.items():
        said = [plan[workers] for plan in plans[name]]
        expected, rate = statistics.median(s for s, _ in said), statistics.median(found)
        ratio = statistics.median(s / f for (s, _), f in zip(said, found, strict=True))
        limit = statistics.mode(limit for _, limit in said)
        yield Row(name, workers, expected, rate, ratio, limit)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=int, default=150, help="of an epoch and worker, MLP"
    )
    parser.add_argument("--rounds", type=int, default=5)


QUESTION = Question(
    "plan",
    __doc__,
    options,
    rows,
    {"case": "", "workers": "d", "predicted": ",.0f", "measured": ",.0f"}
    | {"ratio": ".3f", "limit": ""},
)
