"""How long `fit` takes to make its first step on a cluster that is up.

Question: what does a user wait before training begins?
Counted:  from the call of `fit` to the end of the first optimizer step of the last
          replica to make one; two worker processes in which torch is warm: it has
          made a step of its own, which imports a good part of it. The
          first row starts with an empty cache of compiled kernels, as on a machine
          where daskdl never ran; the second is the same cluster again; the third a
          new cluster with the cache filled.
Run:      python -m benchmarks first-step
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from distributed import Client
from torch import nn

import daskdl
from benchmarks.clusters import local_cluster
from benchmarks.results import Question
from benchmarks.step import BATCH, samples, sgd
from benchmarks.work import mlp


@dataclass(frozen=True)
class Row:
    case: str
    seconds: float  # median over runs
    runs: int


class FirstStep(daskdl.Callback):
    """Leaves the time of each replica's first step in a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def on_step_end(self, step: daskdl.Step) -> None:
        if step.number == 1:
            Path(self._folder, str(step.replica)).write_text(repr(time.time()))


def seconds_to_first_step(client: Client, data) -> float:
    with tempfile.TemporaryDirectory() as folder:
        trainer = daskdl.Trainer(
            mlp,
            nn.CrossEntropyLoss(),
            sgd,
            client=client,
            callbacks=[FirstStep(folder)],
            progress=False,
        )
        started = time.time()
        trainer.fit(*data, batch_size=BATCH)
        return max(float(path.read_text()) for path in Path(folder).iterdir()) - started


def warm() -> None:
    """One step of plain torch."""
    model = nn.Linear(2, 2)
    optimizer = sgd(model.parameters())
    model(torch.zeros(1, 2)).sum().backward()
    optimizer.step()


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    runs = asked.runs
    data = samples(20 * BATCH)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["NUMBA_CACHE_DIR"] = cache  # inherited by the workers
        with local_cluster(2) as first, Client(first, set_as_default=False) as client:
            client.run(warm)
            yield Row(
                "first time ever, nothing compiled",
                seconds_to_first_step(client, data),
                1,
            )
            again = [seconds_to_first_step(client, data) for _ in range(runs)]
            yield Row("again on the same cluster", statistics.median(again), runs)
        with local_cluster(2) as second, Client(second, set_as_default=False) as client:
            client.run(warm)
            yield Row(
                "first on a new cluster, compiled",
                seconds_to_first_step(client, data),
                1,
            )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=5)


QUESTION = Question(
    "first-step",
    __doc__,
    options,
    rows,
    {"case": "", "seconds": ".2f", "runs": "d"},
)
