"""Throughput of training, one replica and two, beside plain PyTorch.

Question: what does daskdl cost, per step, on a model that is expensive to send?
Counted:  optimizer steps of the MLP 784-2048-2048-10 (5.8 M parameters, 23.3 MB
          of gradient), batch 64, SGD, one torch thread for each process. Contestants
          take turns, `--rounds` times; an epoch before each is not counted, so that
          the threshold has adapted. Baselines: a plain loop over the same batches
          in one process, and two such processes at once, independent of each
          other: the machine's own limit.
Run:      python -m benchmarks.step --rounds 5
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch
from distributed import Client, LocalCluster
from torch import nn

import daskdl

BATCH = 64
WIDTH = 2048


@dataclass(frozen=True)
class Row:
    case: str
    samples_per_s: float  # of all processes together, median over rounds
    ratio: float  # to the baseline named in `against`, median over rounds
    against: str
    sent_kb_per_step: float  # kilobytes (1000 bytes) sent per step and replica
    density: float


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(784, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 10),
    )


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Ten noisy classes of 784 features: learnable, and different every row."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(10, 784))
    y = rng.integers(0, 10, count)
    x = centres[y] + rng.normal(size=(count, 784))
    return x.astype(np.float32), y


def plain(steps: int) -> float:
    """Samples/s of a plain loop, after an epoch that is not counted."""
    torch.set_num_threads(1)
    x, y = (torch.from_numpy(a) for a in samples(steps * BATCH))
    model, loss = mlp(), nn.CrossEntropyLoss()
    optimizer = sgd(model.parameters())
    for _ in range(2):
        started = time.perf_counter()
        for i in range(0, len(x), BATCH):
            optimizer.zero_grad(set_to_none=True)
            loss(model(x[i : i + BATCH]), y[i : i + BATCH]).backward()
            optimizer.step()
    return len(x) / (time.perf_counter() - started)


class Plain:
    """So many processes that each run a plain loop, at the same time."""

    def __init__(self, processes: int, steps: int) -> None:
        self._steps = steps
        self._processes = processes
        context = multiprocessing.get_context("spawn")
        self._pool = context.Pool(processes)

    def measure(self) -> tuple[float, float, float]:
        rates = self._pool.map(plain, [self._steps] * self._processes, chunksize=1)
        return sum(rates), 0.0, 0.0

    def close(self) -> None:
        self._pool.terminate()
        self._pool.join()


class Shared:
    """`fit` on so many worker processes."""

    def __init__(self, workers: int, steps: int, exchange_every: int = 1) -> None:
        self._cluster = LocalCluster(
            n_workers=workers, threads_per_worker=1, dashboard_address=":0"
        )
        self._client = Client(self._cluster, set_as_default=False)
        self._workers = workers
        self._data = samples(steps * BATCH * workers)
        self._master = daskdl.GradientSharing(exchange_every=exchange_every)

    def measure(self) -> tuple[float, float, float]:
        trainer = daskdl.Trainer(
            mlp,
            nn.CrossEntropyLoss(),
            sgd,
            master=self._master,
            client=self._client,
            progress=False,
        )
        row = trainer.fit(*self._data, epochs=2, batch_size=BATCH)[-1]
        steps = row["examples"] / BATCH
        return row["examples_per_s"], row["sent_bytes"] / steps / 1e3, row["density"]

    def close(self) -> None:
        self._client.close()
        self._cluster.close()


def table(steps: int, rounds: int) -> list[Row]:
    contestants = {
        "plain loop, 1 process": Plain(1, steps),
        "fit, 1 replica": Shared(1, steps),
        "plain loops, 2 processes": Plain(2, steps),
        "fit, 2 replicas": Shared(2, steps),
        "fit, 2 replicas, exchange_every=16": Shared(2, steps, 16),
    }
    measured: dict[str, list[tuple[float, float, float]]] = {c: [] for c in contestants}
    for _ in range(rounds):
        for case, contestant in contestants.items():
            measured[case].append(contestant.measure())
    for contestant in contestants.values():
        contestant.close()
    rows = []
    for case, rounds_of_case in measured.items():
        processes = 1 if "1 " in case else 2
        against = next(
            c for c in contestants if c.startswith("plain") and f"{processes} " in c
        )
        ratios = [
            own[0] / base[0]
            for own, base in zip(rounds_of_case, measured[against], strict=True)
        ]
        rate, sent_kb, density = (
            statistics.median(column) for column in zip(*rounds_of_case, strict=True)
        )
        ratio = statistics.median(ratios)
        rows.append(Row(case, rate, ratio, against, sent_kb, density))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=150, help="steps per epoch and process"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    arguments = parser.parse_args()

    print(f"# torch {torch.__version__}, {platform.machine()}, 1 thread per process")
    dense_kb = 4 * sum(p.numel() for p in mlp().parameters()) / 1e3
    print(f"# dense: {dense_kb:,.0f} KB per step")
    print(f"{'case':38}{'samples/s':>10}{'ratio':>8}{'KB/step':>9}{'density':>10}")
    rows = table(arguments.steps, arguments.rounds)
    for row in rows:
        print(
            f"{row.case:38}{row.samples_per_s:>10,.0f}{row.ratio:>8.3f}"
            f"{row.sent_kb_per_step:>9.1f}{row.density:>10.2e}"
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=2)


if __name__ == "__main__":
    main()
