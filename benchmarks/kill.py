"""How training continues when a worker is killed.

Question: When a worker is killed, how long is the longest step of a surviving replica,
          and how soon does the worker's replacement train?
Counted:  Time from the end of one step to the end of the next, of replicas that were
          there from the start and were not killed. One of four worker processes is
          killed (SIGKILL) in the middle of an epoch, `--rounds` times. A step sleeps
          for `--step-ms`, in place of an accelerator, so that the processes do not
          compete for the cores, and computes a little. Baselines: the median step of
          the same replicas before the kill, and the longest step of a run without one.
Run:      python -m benchmarks kill --rounds 3
"""

import argparse
import functools
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import daskdl
from benchmarks.clusters import local_client, trainer
from benchmarks.results import Question, medians
from benchmarks.work import perceptron

WORKERS = 4
KILLED = 1  # replica
KILLED_AT = 60  # step
ROWS, BATCH = 9600, 8


class Clock(daskdl.Callback):
    """Sleeps in each step and writes down when it ended; kills one process."""

    def __init__(self, folder: str, step_s: float, *, kills: bool) -> None:
        self._folder, self._step_s, self._kills = folder, step_s, kills

    def on_step_end(self, step: daskdl.Step) -> None:
        time.sleep(self._step_s)
        with Path(self._folder, str(step.replica)).open("a") as file:
            file.write(f"{time.time()}\n")
        if step.replica == KILLED and step.number == KILLED_AT:
            Path(self._folder, "killed").write_text(str(time.time()))
            if self._kills:
                os.kill(os.getpid(), signal.SIGKILL)


def run(
    routing: str, step_s: float, *, kills: bool
) -> tuple[float, dict[int, np.ndarray]]:
    """When a worker was killed, and the ends of steps by replica."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 20)).astype(np.float32)
    y = rng.integers(0, 4, ROWS)
    with tempfile.TemporaryDirectory() as folder, local_client(WORKERS) as client:
        trainer(
            client,
            functools.partial(perceptron, 20, 256, 4),
            master=daskdl.GradientSharing(routing=routing),
            callbacks=[Clock(folder, step_s, kills=kills)],
        ).fit(x, y, batch_size=BATCH)
        killed = float(Path(folder, "killed").read_text())
        paths = (path for path in Path(folder).iterdir() if path.name != "killed")
        return killed, {int(path.name): np.loadtxt(path) for path in paths}


def survivors_s(
    killed: float, ends: dict[int, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of their steps before and after the kill, without the first steps."""
    step_ends = [ends[replica][5:] for replica in range(WORKERS) if replica != KILLED]
    before = [np.diff(end)[end[1:] < killed] for end in step_ends]
    after = [np.diff(end)[end[1:] >= killed] for end in step_ends]
    return np.concatenate(before), np.concatenate(after)


def measured(routing: str, step_s: float) -> dict[str, float]:
    _, undisturbed = survivors_s(*run(routing, step_s, kills=False))
    killed, ends = run(routing, step_s, kills=True)
    before, after = survivors_s(killed, ends)
    joined = [end.min() for replica, end in ends.items() if replica >= WORKERS]
    return {
        "median_ms": 1e3 * float(np.median(before)),
        "undisturbed_ms": 1e3 * float(undisturbed.max()),
        "longest_ms": 1e3 * float(after.max()),
        "ratio": float(after.max() / np.median(before)),
        "rejoin_s": float(min(joined) - killed) if joined else None,
    }


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for routing in ("plain", "mesh"):
        rounds = [measured(routing, asked.step_ms / 1e3) for _ in range(asked.rounds)]
        yield {"routing": routing, **medians(rounds)}


QUESTION = Question(
    "kill",
    __doc__,
    rows,
    "routing median_ms:.1f undisturbed_ms:.1f longest_ms:.1f ratio:.2f rejoin_s:.1f",
    {"--rounds": 3, "--step-ms": 50.0},
)
