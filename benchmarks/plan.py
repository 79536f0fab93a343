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
Run:      python -m benchmarks.plan --rounds 5
"""

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from distributed import Client, LocalCluster
from torch import nn

import daskdl
from benchmarks.models import cnn, mlp
from benchmarks.step import BATCH, samples, sgd

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
        LocalCluster(
            n_workers=workers, threads_per_worker=1, dashboard_address=":0"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        trainer = daskdl.Trainer(
            case.model, nn.CrossEntropyLoss(), sgd, client=client, progress=False
        )
        data = case.data(steps * case.steps_factor * BATCH * workers)
        return trainer.fit(*data, epochs=2, batch_size=BATCH)[-1]["examples_per_s"]


def rows(steps: int, rounds: int) -> list[Row]:
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
    table = []
    for (name, workers), found in rates.items():
        said = [plan[workers] for plan in plans[name]]
        expected, rate = statistics.median(s for s, _ in said), statistics.median(found)
        ratio = statistics.median(s / f for (s, _), f in zip(said, found, strict=True))
        limit = statistics.mode(limit for _, limit in said)
        table.append(Row(name, workers, expected, rate, ratio, limit))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=150, help="steps per epoch and worker of the MLP"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    arguments = parser.parse_args()

    print(f"# torch {torch.__version__}, {platform.machine()}, 1 thread per process")
    print(
        f"{'case':6}{'workers':>8}{'predicted/s':>13}{'measured/s':>12}{'ratio':>8}"
        f"  limit"
    )
    table = rows(arguments.steps, arguments.rounds)
    for row in table:
        print(
            f"{row.case:6}{row.workers:>8}{row.predicted:>13,.0f}{row.measured:>12,.0f}"
            f"{row.ratio:>8.3f}  {row.limit}"
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(row) for row in table], file, indent=2)


if __name__ == "__main__":
    main()
