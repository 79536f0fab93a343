"""What the other replicas notice when a worker is killed.

Question: how long is the longest step of a survivor, and when does the worker that is
          started in the dead one's place train?
Counted:  time from the end of one step to the end of the next, of each replica that
          was there from the start and was not killed; four worker processes, one of
          them killed with SIGKILL in the middle of an epoch, `--rounds` times. A step
          waits `--step-ms` for an accelerator that is not there, so that the
          processes do not fight for the cores, and computes a little. Baseline: the
          median step of the same replicas before the kill.
Run:      python -m benchmarks.kill --rounds 3
"""

import argparse
import functools
import json
import logging
import os
import platform
import signal
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from distributed import Client, LocalCluster
from torch import nn

import daskdl

WORKERS = 4
DOOMED = 1  # replica
KILLED_AT = 60  # step
ROWS, BATCH = 9600, 8


@dataclass(frozen=True)
class Row:
    routing: str
    median_ms: float  # of a survivor's steps before the kill
    longest_before_ms: float
    longest_after_ms: float
    ratio: float  # of the longest after the kill to the median before
    newcomer_s: float  # from the kill to the first step of the worker started again


class Clock(daskdl.Callback):
    """Waits as for an accelerator; notes each step; one replica's process dies."""

    def __init__(self, folder: str, step_s: float) -> None:
        self._folder = folder
        self._step_s = step_s

    def on_step(self, step: daskdl.Step) -> None:
        time.sleep(self._step_s)
        with Path(self._folder, str(step.replica)).open("a") as file:
            file.write(f"{time.time()}\n")
        if step.replica == DOOMED and step.number == KILLED_AT:
            Path(self._folder, "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 4))


def train(client: Client, folder: str, routing: str, step_s: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 20)).astype(np.float32)
    y = rng.integers(0, 4, ROWS)
    daskdl.Trainer(
        mlp,
        nn.CrossEntropyLoss(),
        functools.partial(torch.optim.SGD, lr=0.05),
        master=daskdl.GradientSharing(routing=routing),
        client=client,
        callbacks=[Clock(folder, step_s)],
        progress=False,
    ).fit(x, y, batch_size=BATCH)


def measure(routing: str, step_s: float) -> Row:
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            n_workers=WORKERS,
            threads_per_worker=1,
            dashboard_address=":0",
            silence_logs=logging.CRITICAL,
        ) as cluster,
        Client(cluster) as client,
    ):
        train(client, folder, routing, step_s)
        killed = float(Path(folder, "killed").read_text())
        ends = {
            int(path.name): np.loadtxt(path)
            for path in Path(folder).iterdir()
            if path.name != "killed"
        }
    # The first steps of all load what is needed for the first time.
    survivors = [ends[r][5:] for r in range(WORKERS) if r != DOOMED]
    steps = [(end[1:], np.diff(end)) for end in survivors]
    before = np.concatenate([took[at < killed] for at, took in steps])
    after = np.concatenate([took[at >= killed] for at, took in steps])
    median = float(np.median(before))
    newcomers = [end.min() for r, end in ends.items() if r >= WORKERS]
    return Row(
        routing,
        1e3 * median,
        1e3 * float(before.max()),
        1e3 * float(after.max()),
        float(after.max()) / median,
        min(newcomers) - killed if newcomers else float("nan"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    rows = []
    for routing in ("plain", "mesh"):
        rounds = [
            asdict(measure(routing, arguments.step_ms / 1e3))
            for _ in range(arguments.rounds)
        ]
        numbers = {
            name: statistics.median(each[name] for each in rounds)
            for name in rounds[0]
            if name != "routing"
        }
        rows.append(Row(routing, **numbers))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    print(f"# torch {torch.__version__}, {platform.machine()}, {WORKERS} workers")
    print(
        f"{'routing':8}{'median ms':>11}{'longest before':>16}{'longest after':>15}"
        f"{'ratio':>7}{'newcomer s':>12}"
    )
    for row in rows:
        print(
            f"{row.routing:8}{row.median_ms:11.1f}{row.longest_before_ms:16.1f}"
            f"{row.longest_after_ms:15.1f}{row.ratio:7.2f}{row.newcomer_s:12.1f}"
        )


if __name__ == "__main__":
    main()
