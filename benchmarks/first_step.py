"""How long `fit` takes to make its first step on a running cluster.

Question: How long does a user wait before training begins?
Counted:  From the call of `fit` until each replica has made its first step, on two
          worker processes. In the first three rows, torch has made a step in them
          already. The first row starts with an empty cache of compiled kernels, as on a
          machine where daskdl never ran; the second is the same cluster again; the
          third is a new cluster with the cache filled. In the fourth row, the processes
          are new and have imported nothing but Dask.
Run:      python -m benchmarks first-step
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from distributed import Client
from torch import nn

import daskdl
from benchmarks.clusters import local_client, trainer
from benchmarks.results import Question, medians
from benchmarks.work import BATCH, plain_step, samples, sgd


class FirstStep(daskdl.Callback):
    """Writes the time of each replica's first step to a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def on_step_end(self, step: daskdl.Step) -> None:
        if step.number == 1:
            Path(self._folder, str(step.replica)).write_text(repr(time.time()))


def first_step_s(client: Client) -> float:
    with tempfile.TemporaryDirectory() as folder:
        fitted = trainer(client, callbacks=[FirstStep(folder)])
        data = samples(20 * BATCH)
        began = time.time()
        fitted.fit(*data, batch_size=BATCH)
        return max(float(path.read_text()) for path in Path(folder).iterdir()) - began


def warm() -> None:
    model = nn.Linear(2, 2)
    step = plain_step(nn.MSELoss(), model, sgd(model.parameters()))
    step(torch.zeros(1, 2), torch.zeros(1, 2))


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    def row(case: str, runs: int) -> dict[str, Any]:
        rounds = [{"seconds": first_step_s(client)} for _ in range(runs)]
        return {"case": case, **medians(rounds), "runs": runs}

    with tempfile.TemporaryDirectory() as cache:
        os.environ["NUMBA_CACHE_DIR"] = cache  # inherited by the workers
        with local_client(2) as client:
            client.run(warm)
            yield row("first time ever, nothing compiled", 1)
            yield row("again on the same cluster", asked.runs)
        with local_client(2) as client:
            client.run(warm)
            yield row("first on a new cluster, compiled", 1)
        with local_client(2) as client:
            yield row("the same, torch not imported", 1)


QUESTION = Question(
    "first-step", __doc__, rows, "case seconds:.2f runs:d", {"--runs": 5}
)
