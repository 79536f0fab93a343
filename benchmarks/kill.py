"""What the other replicas notice when a worker is killed.

Question: how long is the longest step of a survivor, and when does the worker that is
          started in the dead one's place train?
Counted:  time from the end of one step to the end of the next, of each replica that
          was there from the start and was not killed; four worker processes, one of
          them killed with SIGKILL in the middle of an epoch, `--rounds` times. A step
          waits `--step-ms` for an accelerator that is not there, so that the
          processes do not fight for the cores, and computes a little. Baselines: the
          median step of the same replicas before the kill, and the longest step of
          the same length of a run in which nobody is killed.
Run:      python -m benchmarks kill --rounds 3
"""

import argparse
import functools
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import torch
from distributed import Client
from torch import nn

import daskdl
from benchmarks.clusters import local_cluster
from benchmarks.results import Question

WORKERS = 4
DOOMED = 1  # replica
KILLED_AT = 60  # step
ROWS, BATCH = 9600, 8


@dataclass(frozen=True)
class Row:
    routing: str
    median_ms: float  # of a survivor's steps before the kill
    undisturbed_ms: float  # the longest of a run in which nobody is killed
    longest_ms: float  # of a survivor's steps after the kill
    ratio: float  # of the longest after the kill to the median before
    rejoin_s: float  # from the kill to the first step of the worker started again


class Clock(daskdl.Callback):
    """Waits as for an accelerator; notes each step; one replica's process may die."""

    def __init__(self, folder: str, step_s: float, *, kills: bool) -> None:
        self._folder = folder
        self._step_s = step_s
        self._kills = kills

    def on_step_end(self, step: daskdl.Step) -> None:
        time.sleep(self._step_s)
        with Path(self._folder, str(step.replica)).open("a") as file:
            file.write(f"{time.time()}\n")
        if step.replica == DOOMED and step.number == KILLED_AT:
            Path(self._folder, "killed").write_text(str(time.time()))
            if self._kills:
                os.kill(os.getpid(), signal.SIGKILL)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 4))


def train(client: Client, clock: Clock, routing: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 20)).astype(np.float32)
    y = rng.integers(0, 4, ROWS)
    daskdl.Trainer(
        mlp,
        nn.CrossEntropyLoss(),
        functools.partial(torch.optim.SGD, lr=0.05),
        master=daskdl.GradientSharing(routing=routing),
        client=client,
        callbacks=[clock],
        progress=False,
    ).fit(x, y, batch_size=BATCH)


def run(routing: str, step_s: float, *, kills: bool) -> tuple[float, dict]:
    """Train on four workers; when one was killed, and the ends of steps by replica."""
    with (
        tempfile.TemporaryDirectory() as folder,
        local_cluster(WORKERS) as cluster,
        Client(cluster) as client,
    ):
        train(client, Clock(folder, step_s, kills=kills), routing)
        return float(Path(folder, "killed").read_text()), {
            int(path.name): np.loadtxt(path)
            for path in Path(folder).iterdir()
            if path.name != "killed"
        }


def survivors(killed: float, ends: dict) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of their steps before and after the kill."""
    # The first steps of all load what is needed for the first time.
    there = [ends[replica][5:] for replica in range(WORKERS) if replica != DOOMED]
    steps = [(end[1:], np.diff(end)) for end in there]
    before = np.concatenate([took[at < killed] for at, took in steps])
    after = np.concatenate([took[at >= killed] for at, took in steps])
    return before, after


def measure(routing: str, step_s: float) -> Row:
    _, undisturbed = survivors(*run(routing, step_s, kills=False))
    killed, ends = run(routing, step_s, kills=True)
    before, after = survivors(killed, ends)
    median = float(np.median(before))
    joined = [end.min() for replica, end in ends.items() if replica >= WORKERS]
    return Row(
        routing,
        1e3 * median,
        1e3 * float(undisturbed.max()),
        1e3 * float(after.max()),
        float(after.max()) / median,
        min(joined) - killed if joined else float("nan"),
    )


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    for routing in ("plain", "mesh"):
        rounds = [measure(routing, asked.step_ms / 1e3) for _ in range(asked.rounds)]
        numbers = zip(*(astuple(each)[1:] for each in rounds), strict=True)
        yield Row(routing, *map(statistics.median, numbers))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=50.0)


QUESTION = Question(
    "kill",
    __doc__,
    options,
    rows,
    {"routing": "", "median_ms": ".1f", "undisturbed_ms": ".1f"}
    | {"longest_ms": ".1f", "ratio": ".2f", "rejoin_s": ".1f"},
)
