"""Evaluation with many metrics, beside the forward pass alone.

Question: What do the loss and the metrics of "classification" add to a pass over a
          million rows?
Counted:  Seconds, in one process with one torch thread. Rows of 64 random numbers and
          10 classes, in memory. Forward: a plain loop, `model(x)` for batches of 64
          under `torch.inference_mode`, outputs dropped. After it, in each round,
          `daskdl.evaluate` with the loss, and with "classification": exact areas under
          curves, top 5, confusion matrix, all rates. Ratios are within a round.
Run:      python -m benchmarks evaluate --rounds 5
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import daskdl
from benchmarks.results import Question, in_turns, median_ratio, medians
from benchmarks.work import BATCH, perceptron

CLASSES, FEATURES = 10, 64


def forward(model: nn.Module, x: np.ndarray) -> None:
    with torch.inference_mode():
        for batch in torch.from_numpy(x).split(BATCH):
            model(batch)


def evaluate(model: nn.Module, x: np.ndarray, y: np.ndarray, metrics: Any) -> None:
    loss = nn.CrossEntropyLoss()
    options = {"metrics": metrics, "client": False, "batch_size": BATCH}
    daskdl.evaluate(model, x, y, loss=loss, **options)


def timed(work: Callable[..., None], *arguments: Any) -> dict[str, float]:
    began = time.perf_counter()
    work(*arguments)
    return {"seconds": time.perf_counter() - began}


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, asked.rows)
    x = rng.standard_normal((asked.rows, FEATURES), np.float32)
    for width in asked.widths:
        torch.manual_seed(0)
        model = perceptron(FEATURES, width, width, CLASSES).eval()
        evaluate(model, x[: 50 * BATCH], y[: 50 * BATCH], "classification")  # warm up
        cases = {
            "forward": partial(timed, forward, model, x),
            "loss": partial(timed, evaluate, model, x, y, None),
            "metrics": partial(timed, evaluate, model, x, y, "classification"),
        }
        timings = in_turns(cases, asked.rounds)
        yield {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "forward_s": medians(timings["forward"])["seconds"],
            "loss": median_ratio(timings["loss"], timings["forward"], "seconds"),
            "metrics": median_ratio(timings["metrics"], timings["forward"], "seconds"),
        }


QUESTION = Question(
    "evaluate",
    __doc__,
    rows,
    "parameters:, forward_s:.2f loss:.2f metrics:.2f",
    {"--rounds": 5, "--rows": 1_000_000, "--widths": [128, 512, 1024]},
)
