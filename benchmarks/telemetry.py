"""What rows of steps cost while training.

Question: what share of training goes into the rows of steps, with `telemetry_every` at
          its default, on a model whose steps are short and on one whose are not?
Counted:  seconds of the training threads inside all that makes rows, or times for them
          what a step does (`MAKERS`), over the seconds that
          these threads train. `fit` of two epochs, 2 replicas as worker processes with
          one torch thread each. The counting itself is in it. Speeds with and without
          rows are not compared: on the machine of the tables they differ by a tenth
          from run to run, ten times what is looked for. Baseline: no rows.
Run:      python -m benchmarks telemetry --rounds 5
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from distributed import Client
from torch import nn

import daskdl
from benchmarks.clusters import local_cluster
from benchmarks.results import Question
from benchmarks.step import BATCH, samples, sgd
from benchmarks.work import mlp
from daskdl.training.gradient_sharing import GradientSharingExchange
from daskdl.training.telemetry import StepLog

SHORT_STEPS = 5  # times as many, of the small model
CASES = {"auto": "auto", "every step": 1, "none": None}


MAKERS = {
    StepLog: ("due", "add", "take"),
    GradientSharingExchange: ("step_stats",),
}

spent_s: list[float] = []  # in this process, since it was cleared


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **options)
        finally:
            spent_s.append(time.perf_counter() - began)

    return call


def count() -> None:
    """Count in this process what `MAKERS` take."""
    for owner, names in MAKERS.items():
        for name in names:
            setattr(owner, name, timed(getattr(owner, name)))


def taken() -> float:
    """Seconds since the last call."""
    total = sum(spent_s)
    spent_s.clear()
    return total


@dataclass(frozen=True)
class Row:
    case: str
    step_ms: float  # median over rounds
    share: float  # of the training threads' time, median over rounds
    largest: float  # of the rounds
    rows_per_epoch: float  # of each replica


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))


class Fit:
    """`fit` on two worker processes."""

    def __init__(self, client: Client, model: Callable[[], nn.Module], steps: int):
        self._client = client
        self._model = model
        self._steps = steps
        self._data = samples(steps * BATCH * 2)

    def measure(self, every: Any) -> tuple[float, float, float]:
        """Milliseconds of a step, the share of rows in it, and how many there are."""
        trainer = daskdl.Trainer(
            self._model,
            nn.CrossEntropyLoss(),
            sgd,
            client=self._client,
            progress=False,
            telemetry_every=every,
        )
        self._client.run(taken)
        history = trainer.fit(*self._data, epochs=2, batch_size=BATCH)
        rows_s = sum(self._client.run(taken).values())
        trained_s = sum(row["seconds"] for row in history)
        step_ms = 1000 * trained_s / (2 * self._steps)
        return step_ms, rows_s / (2 * trained_s), len(history.steps) / 4


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    with local_cluster(2) as own, Client(own, set_as_default=False) as client:
        client.run(count)
        fits = {
            "784-16-10": Fit(client, small, SHORT_STEPS * asked.steps),
            "784-2048-2048-10": Fit(client, mlp, asked.steps),
        }
        for name, fit in fits.items():
            fit.measure(None)  # compiles, and starts what is started once
            for case, every in CASES.items():
                found = [fit.measure(every) for _ in range(asked.rounds)]
                step_ms, shares, counts = zip(*found, strict=True)
                yield Row(
                    f"{name}, {case}",
                    statistics.median(step_ms),
                    statistics.median(shares),
                    max(shares),
                    statistics.median(counts),
                )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=150, help="per epoch and replica")
    parser.add_argument("--rounds", type=int, default=5)


QUESTION = Question(
    "telemetry",
    __doc__,
    options,
    rows,
    {"case": "", "step_ms": ".2f", "share": ".2%", "largest": ".2%"}
    | {"rows_per_epoch": ".1f"},
)
