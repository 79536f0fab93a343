"""Evaluation with many metrics beside the forward pass alone.

Question: what do loss and the metrics of "classification" add to a pass over 1 M rows?
Counted:  seconds, in one process with one torch thread. Rows of 64 random numbers and
          10 classes, in memory. Forward: a plain loop, `model(x)` for batches of 64
          under `torch.inference_mode`, outputs dropped. After it, in each round,
          `daskdl.evaluate` with the loss, and with "classification": exact areas below
          curves, top 5, confusion matrix, all rates. Ratios are of a round.
Run:      python -m benchmarks evaluate --rounds 5
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import daskdl
from benchmarks.results import Question

BATCH = 64
CLASSES = 10
FEATURES = 64


def perceptron(width: int) -> nn.Sequential:
    """Two hidden layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


@dataclass(frozen=True)
class Row:
    parameters: int
    forward_s: float  # median over rounds
    loss: float  # times that, median of the rounds' ratios
    metrics: float


def forward_s(model: nn.Module, x: np.ndarray) -> float:
    """Seconds of a plain loop."""
    began = time.perf_counter()
    with torch.inference_mode():
        for batch in torch.from_numpy(x).split(BATCH):
            model(batch)
    return time.perf_counter() - began


def evaluate_s(
    model: nn.Module, x: np.ndarray, y: np.ndarray, metrics: object
) -> float:
    """Seconds from the call to the report."""
    began = time.perf_counter()
    daskdl.evaluate(
        model,
        x,
        y,
        loss=nn.CrossEntropyLoss(),
        metrics=metrics,
        client=False,
        batch_size=BATCH,
    )
    return time.perf_counter() - began


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, asked.rows)
    x = rng.standard_normal((asked.rows, FEATURES), np.float32)
    few = slice(50 * BATCH)
    for width in asked.widths:
        model = perceptron(width).eval()
        kinds: list[Callable[[slice], float]] = [
            lambda part, own=model: forward_s(own, x[part]),
            lambda part, own=model: evaluate_s(own, x[part], y[part], None),
            lambda part, own=model: evaluate_s(own, x[part], y[part], "classification"),
        ]
        for kind in kinds:
            kind(few)  # the first is not counted
        found = [[kind(slice(None)) for kind in kinds] for _ in range(asked.rounds)]
        size = sum(parameter.numel() for parameter in model.parameters())
        yield Row(
            size,
            statistics.median(forward for forward, _, _ in found),
            statistics.median(loss / forward for forward, loss, _ in found),
            statistics.median(metrics / forward for forward, _, metrics in found),
        )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--widths", type=int, nargs="*", default=[128, 512, 1024])


QUESTION = Question(
    "evaluate",
    __doc__,
    options,
    rows,
    {"parameters": ",", "forward_s": ".2f", "loss": ".2f", "metrics": ".2f"},
)
