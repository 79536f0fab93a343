"""How much memory a replica takes beyond a plain loop.

Question: How much more memory does a worker take that trains one of two replicas than a
          process with a plain loop?
Counted:  The memory of the process (RSS) at the end of the second epoch, and its
          highest value until then, with a small model and with one of `--mib` MiB of
          parameters; batches of 64, one torch thread, the rows in memory. Each row
          starts new processes. Baselines: the plain loop in a process of its own, and
          as a task on a Dask worker. *beyond* is the peak beyond that of the plain
          process with the same model; *per parameter* is what the large model adds to
          *beyond*, in bytes per parameter.
Run:      python -m benchmarks memory
"""

import argparse
import functools
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import daskdl
from benchmarks.clusters import local_client
from benchmarks.results import Question
from benchmarks.work import BATCH, OPTIMIZERS, batches, perceptron, plain_step, samples

MIB = 2**20
STEPS = 100  # of each replica in an epoch
EPOCHS = 2
SMALL = 16  # width


class Usage(NamedTuple):
    """Memory of a process, bytes."""

    now: float
    peak: float


def usage() -> Usage:
    """Return the memory of this process, from Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    now, peak = (1024 * int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    return Usage(now, peak)


def network(width: int) -> nn.Module:
    return perceptron(784, width, width, 10)


def width_of(mib: float) -> int:
    """The width of a network with so many MiB of parameters."""
    parameters = mib * MIB / 4
    return round((-794 + (794**2 + 4 * parameters) ** 0.5) / 2)


def plain(width: int, optimizer: str) -> Usage:
    """Train with a plain loop in this process."""
    torch.set_num_threads(1)
    x, y = map(torch.from_numpy, samples(STEPS * BATCH))
    model = network(width)
    stepper = OPTIMIZERS[optimizer](model.parameters(), lr=0.01)
    step = plain_step(nn.CrossEntropyLoss(), model, stepper)
    data = batches(x, y, BATCH, np.random.default_rng(0))
    for _ in range(EPOCHS * STEPS):
        step(*next(data))
    return usage()


def in_a_process(width: int, optimizer: str) -> Usage:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(plain, (width, optimizer))


def in_a_task(width: int, optimizer: str) -> Usage:
    with local_client(1) as client:
        return Usage(*client.submit(plain, width, optimizer).result())


class Measure(daskdl.Callback):
    """Reads the memory of the workers at the end of each epoch."""

    def __init__(self, read: Callable[[], Mapping[str, Usage]]) -> None:
        self._read = read
        self.usages: list[Usage] = []

    def on_epoch_end(self, row: Mapping[str, Any]) -> None:
        self.usages = list(self._read().values())


def fit(width: int, optimizer: str) -> Usage:
    with local_client(2) as client:
        measure = Measure(functools.partial(client.run, usage))
        fitted = daskdl.Trainer(
            functools.partial(network, width),
            nn.CrossEntropyLoss(),
            OPTIMIZERS[optimizer],
            lr=0.01,
            client=client,
            callbacks=measure,
            progress=False,
        )
        data = samples(2 * STEPS * BATCH)
        fitted.fit(*data, epochs=EPOCHS, batch_size=BATCH)
        return max(measure.usages, key=lambda seen: seen.peak)


CASES = {
    "plain loop": in_a_process,
    "plain loop in a task of Dask": in_a_task,
    "fit, one of 2 replicas": fit,
}


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    widths = SMALL, width_of(asked.mib)
    counts = [sum(p.numel() for p in network(w).parameters()) for w in widths]
    beyond: dict[tuple[str, int], float] = {}
    for width, count in zip(widths, counts, strict=True):
        peaks = {}
        for case, measured in CASES.items():
            seen = measured(width, asked.optimizer)
            peaks[case] = seen.peak
            beyond[case, width] = seen.peak - peaks["plain loop"]
            row = {
                "case": case,
                "parameters_mib": 4 * count / MIB,
                "rss_mib": seen.now / MIB,
                "peak_mib": seen.peak / MIB,
                "beyond_mib": beyond[case, width] / MIB,
            }
            if width != SMALL:
                change = beyond[case, width] - beyond[case, SMALL]
                row["bytes_per_parameter"] = change / (counts[1] - counts[0])
            yield row


QUESTION = Question(
    "memory",
    __doc__,
    rows,
    "case parameters_mib:.1f rss_mib:.0f peak_mib:.0f beyond_mib:.0f "
    "bytes_per_parameter:.1f",
    {"--mib": 32.0, "--optimizer": {"choices": OPTIMIZERS, "default": "SGD"}},
)
