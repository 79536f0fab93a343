"""Speed of training with one replica and with two, beside plain PyTorch.

Question: What does daskdl cost per step, on a model that is expensive to send?
Counted:  Samples/s of the MLP 784-2048-2048-10 (5.8 million parameters, 23.3 MB of
          gradient), batches of 64, SGD, one torch thread per process. Contestants take
          turns, `--rounds` times; of a fit, the last four of twelve epochs are counted,
          when the interval of exchanges has settled. Baselines: a plain loop in one
          process, and two such processes at once, independent of each other, which is
          the machine's limit; both as a shell starts them, and with freed memory kept
          for the next step, as daskdl keeps it.
Run:      python -m benchmarks step --rounds 5
"""

import argparse
import contextlib
import multiprocessing
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import daskdl
from benchmarks.clusters import local_client, trainer
from benchmarks.results import Question, in_turns, median_ratio, medians
from benchmarks.work import BATCH, batches, mlp, plain_speed, plain_step, samples, sgd
from daskdl.process_settings import freed_memory_kept

EPOCHS, COUNTED = 12, 4


def plain(steps: int, kept: bool) -> float:
    """Samples/s of a plain loop."""
    torch.set_num_threads(1)
    with freed_memory_kept() if kept else contextlib.nullcontext():
        x, y = map(torch.from_numpy, samples(steps * BATCH))
        model = mlp()
        step = plain_step(nn.CrossEntropyLoss(), model, sgd(model.parameters()))
        data = batches(x, y, BATCH, np.random.default_rng(0))
        return BATCH * plain_speed(step, data, steps)


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    steps, spawn = asked.steps, multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as ends:
        pools = {n: ends.enter_context(spawn.Pool(n)) for n in (1, 2)}
        clients = {n: ends.enter_context(local_client(n)) for n in (1, 2)}

        def loops(processes: int, kept: bool) -> dict[str, float]:
            results = pools[processes].starmap(
                plain, [(steps, kept)] * processes, chunksize=1
            )
            return {"samples_per_s": sum(results), "sent_kb_per_step": 0, "density": 0}

        def fit(workers: int, **options: int) -> dict[str, float]:
            master = daskdl.GradientSharing(**options)
            fitted = trainer(clients[workers], master=master)
            data = samples(steps * BATCH * workers)
            counted = fitted.fit(*data, epochs=EPOCHS, batch_size=BATCH)[-COUNTED:]
            examples = sum(row["examples"] for row in counted)
            seconds = sum(row["examples"] / row["examples_per_s"] for row in counted)
            sent = sum(row["sent_bytes"] for row in counted)
            return {
                "samples_per_s": examples / seconds,
                "sent_kb_per_step": sent / examples * BATCH / 1e3,
                "density": counted[-1]["density"],
            }

        cases = {
            ("plain loop, 1 process", 1): lambda: loops(1, False),
            ("the same, freed memory kept", 1): lambda: loops(1, True),
            ("fit, 1 replica", 1): lambda: fit(1),
            ("plain loops, 2 processes", 2): lambda: loops(2, False),
            ("the same 2, freed memory kept", 2): lambda: loops(2, True),
            ("fit, 2 replicas", 2): lambda: fit(2),
            ("the same, exchange_every=1", 2): lambda: fit(2, exchange_every=1),
            ("the same, exchange_every=16", 2): lambda: fit(2, exchange_every=16),
        }
        timings = in_turns(cases, asked.rounds)
    plain_of = {1: list(cases)[:2], 2: list(cases)[3:5]}
    for (case, processes), rounds in timings.items():
        ratio, ratio_kept = (
            median_ratio(rounds, timings[base], "samples_per_s")
            for base in plain_of[processes]
        )
        yield {
            "case": case,
            **medians(rounds),
            "ratio": ratio,
            "ratio_kept": ratio_kept,
        }


QUESTION = Question(
    "step",
    __doc__,
    rows,
    "case samples_per_s:,.0f ratio:.3f ratio_kept:.3f sent_kb_per_step:.1f density:.2e",
    {"--steps": 150, "--rounds": 5},
)
