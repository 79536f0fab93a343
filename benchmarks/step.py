"""Throughput of training, one replica and two, beside plain PyTorch.

Question: what does daskdl cost, per step, on a model that is expensive to send?
Counted:  optimizer steps of the MLP 784-2048-2048-10 (5.8 M parameters, 23.3 MB
          of gradient), batch 64, SGD, one torch thread for each process. Contestants
          take turns, `--rounds` times; an epoch before each is not counted, so that
          the threshold has adapted. Baselines: a plain loop over the same batches
          in one process, and two such processes at once, independent of each
          other: the machine's own limit. Both as a shell starts them, and once more
          with freed memory kept for the next step, as daskdl keeps it.
Run:      python -m benchmarks step --rounds 5
"""

import argparse
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from distributed import Client
from torch import nn

import daskdl
from benchmarks.clusters import local_cluster
from benchmarks.results import Question
from benchmarks.work import mlp
from daskdl.util import freed_memory_kept

BATCH = 64


@dataclass(frozen=True)
class Row:
    case: str
    samples_per_s: float  # of all processes together, median over rounds
    ratio: float  # to as many plain loops, median over rounds
    ratio_kept: float  # to as many plain loops that keep freed memory
    sent_kb_per_step: float  # kilobytes (1000 bytes) sent per step and replica
    density: float


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Ten noisy classes of 784 features: learnable, and different every row."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(10, 784))
    y = rng.integers(0, 10, count)
    x = centres[y] + rng.normal(size=(count, 784))
    return x.astype(np.float32), y


def plain(steps: int, kept: bool) -> float:
    """Samples/s of a plain loop, after an epoch that is not counted."""
    torch.set_num_threads(1)
    with freed_memory_kept() if kept else contextlib.nullcontext():
        return loop(steps)


def loop(steps: int) -> float:
    x, y = (torch.from_numpy(a) for a in samples(steps * BATCH))
    torch.manual_seed(0)
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

    def __init__(self, processes: int, steps: int, kept: bool = False) -> None:
        self._arguments = [(steps, kept)] * processes
        context = multiprocessing.get_context("spawn")
        self._pool = context.Pool(processes)

    def measure(self) -> tuple[float, float, float]:
        rates = self._pool.starmap(plain, self._arguments, chunksize=1)
        return sum(rates), 0.0, 0.0

    def close(self) -> None:
        self._pool.terminate()
        self._pool.join()


class Shared:
    """`fit` on so many worker processes."""

    def __init__(self, workers: int, steps: int, exchange_every: int = 1) -> None:
        self._cluster = local_cluster(workers)
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


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    steps, rounds = asked.steps, asked.rounds
    contestants = {
        "plain loop, 1 process": Plain(1, steps),
        "the same, freed memory kept": Plain(1, steps, kept=True),
        "fit, 1 replica": Shared(1, steps),
        "plain loops, 2 processes": Plain(2, steps),
        "the same 2, freed memory kept": Plain(2, steps, kept=True),
        "fit, 2 replicas": Shared(2, steps),
        "fit, 2 replicas, exchange_every=16": Shared(2, steps, 16),
    }
    measured: dict[str, list[tuple[float, float, float]]] = {c: [] for c in contestants}
    for _ in range(rounds):
        for case, contestant in contestants.items():
            measured[case].append(contestant.measure())
    for contestant in contestants.values():
        contestant.close()
    cases = list(contestants)
    for case, taken in measured.items():
        plain_case = cases[0] if cases.index(case) < 3 else cases[3]
        kept_case = cases[cases.index(plain_case) + 1]
        rate, sent_kb, density = (
            statistics.median(column) for column in zip(*taken, strict=True)
        )
        ratios = [ratio(taken, measured[base]) for base in (plain_case, kept_case)]
        yield Row(case, rate, *ratios, sent_kb, density)


def ratio(taken, base) -> float:
    """Median over rounds of samples/s to those of the same round's baseline."""
    pairs = zip(taken, base, strict=True)
    return statistics.median(own[0] / other[0] for own, other in pairs)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=int, default=150, help="of an epoch and process"
    )
    parser.add_argument("--rounds", type=int, default=5)


QUESTION = Question(
    "step",
    __doc__,
    options,
    rows,
    {"case": "", "samples_per_s": ",.0f", "ratio": ".3f", "ratio_kept": ".3f"}
    | {"sent_kb_per_step": ".1f", "density": ".2e"},
)
