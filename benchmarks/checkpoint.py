"""What a checkpoint costs those who train, beside a plain `torch.save`.

Question: how long does a replica stop for a checkpoint, and what do its steps cost
          while it is being written?
Counted:  pause: the time that a replica's training thread spends on a checkpoint when
          all have met at the end of an epoch, until it trains on, of the replica that
          writes the common part too, and of the other. Two worker processes of one
          thread, a checkpoint each epoch. Baseline: `torch.save` of the state that the
          first writes (model, optimizer, residual) to the same disk, on the same worker
          while nobody trains; it does not wait for the disk as daskdl's writing does.
          step: the mean from the end of one step to the end of the next within an
          epoch, of both replicas, in the same fit without checkpoints. beside: how much
          longer the steps of an epoch with a checkpoint take in all.
          Contestants take turns, `--rounds` times; medians over rounds.
Run:      python -m benchmarks checkpoint --rounds 5
"""

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from distributed import Client
from torch import nn

import daskdl
from benchmarks.clusters import local_cluster
from benchmarks.results import Question
from daskdl.training.checkpointing import CheckpointWriter

FEATURES, CLASSES, BATCH = 256, 10, 16
WIDTHS = {1: 880, 25: 4880}  # by millions of parameters
EPOCHS = 5
OPTIMIZERS = {
    "SGD, momentum": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "Adam": functools.partial(torch.optim.Adam, lr=1e-4),
}


@dataclass(frozen=True)
class Row:
    millions: int  # of parameters
    optimizer: str
    saved_ms: float  # torch.save, which a training loop would wait for
    writer_ms: float  # pause of the replica that writes the common part too
    writer_ratio: float  # to torch.save
    other_ms: float
    other_ratio: float
    step_ms: float  # without checkpoints
    beside_ms: float  # that the steps after a checkpoint take longer in all


class Clock(daskdl.Callback):
    """Notes the end of each step in a file of its replica and epoch."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def on_step_end(self, step: daskdl.Step) -> None:
        path = Path(self._folder, f"{step.replica}-{step.epoch}.steps")
        with path.open("a") as file:
            file.write(f"{time.perf_counter()}\n")


def mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


def timed() -> None:
    """On a worker: note how long each checkpoint holds the training thread."""
    end_epoch, pauses = CheckpointWriter.end_epoch, []

    def timed_end(self, *args) -> None:
        started = time.perf_counter()
        end_epoch(self, *args)
        pauses.append(time.perf_counter() - started)

    CheckpointWriter.end_epoch = timed_end
    CheckpointWriter.pauses = pauses


def taken() -> list[float]:
    """On a worker: the pauses since the last call, seconds."""
    pauses = list(CheckpointWriter.pauses)
    CheckpointWriter.pauses.clear()
    return pauses


def saved_s(width: int, optimizer, folder: str) -> float:
    """On a worker: how long `torch.save` takes."""
    module = mlp(width)
    own = optimizer(module.parameters())
    loss = nn.functional.cross_entropy(
        module(torch.randn(BATCH, FEATURES)), torch.zeros(BATCH, dtype=torch.long)
    )
    loss.backward()
    own.step()
    state = {
        "model": module.state_dict(),
        "optimizer": own.state_dict(),
        "residual": [torch.randn_like(p) for p in module.parameters()],
    }
    started = time.perf_counter()
    torch.save(state, Path(folder, "plain.pt"))
    return time.perf_counter() - started


class Case:
    """One model with one optimizer."""

    def __init__(self, client: Client, millions: int, optimizer: str, steps: int):
        self._client = client
        self._width = WIDTHS[millions]
        self._optimizer = OPTIMIZERS[optimizer]
        self._steps = steps
        rng = np.random.default_rng(0)
        count = 2 * steps * BATCH
        self._x = rng.normal(size=(count, FEATURES)).astype(np.float32)
        self._y = rng.integers(0, CLASSES, count)

    def measure(self) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            without_ms = self._step_ms(folder, [])
        with tempfile.TemporaryDirectory() as folder:
            rule = daskdl.Checkpoint(Path(folder, "checkpoints"), keep_last=1)
            with_ms = self._step_ms(folder, [rule])
        with tempfile.TemporaryDirectory() as folder:
            saved_ms = 1e3 * self._saved_s(folder)
        # Replica 0 is on the first of the workers. Its last checkpoint is as any other.
        pauses = self._client.run(taken)
        writer_ms, other_ms = (
            1e3 * statistics.median(pauses[worker]) for worker in sorted(pauses)
        )
        return {
            "saved_ms": saved_ms,
            "writer_ms": writer_ms,
            "writer_ratio": writer_ms / saved_ms,
            "other_ms": other_ms,
            "other_ratio": other_ms / saved_ms,
            "step_ms": without_ms,
            "beside_ms": (with_ms - without_ms) * self._steps,
        }

    def _step_ms(self, folder: str, callbacks) -> float:
        daskdl.Trainer(
            functools.partial(mlp, self._width),
            nn.CrossEntropyLoss(),
            self._optimizer,
            client=self._client,
            callbacks=[Clock(folder), *callbacks],
            progress=False,
        ).fit(self._x, self._y, epochs=EPOCHS, batch_size=BATCH)
        # The first epoch loads what is needed for the first time, and no checkpoint
        # is written beside it.
        ends = [
            np.loadtxt(path)
            for path in Path(folder).glob("*.steps")
            if not path.stem.endswith("-0")
        ]
        return 1e3 * float(np.concatenate([np.diff(end) for end in ends]).mean())

    def _saved_s(self, folder: str) -> float:
        worker = min(self._client.nthreads())
        arguments = (self._width, self._optimizer, folder)
        future = self._client.submit(saved_s, *arguments, workers=[worker], pure=False)
        return future.result()


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    rounds, steps = asked.rounds, dict(zip(WIDTHS, asked.steps, strict=True))
    with (
        local_cluster(2) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        client.run(timed)
        for millions in WIDTHS:
            for optimizer in OPTIMIZERS:
                case = Case(client, millions, optimizer, steps[millions])
                measured = [case.measure() for _ in range(rounds)]
                numbers = {
                    name: statistics.median(one[name] for one in measured)
                    for name in measured[0]
                }
                yield Row(millions, optimizer, **numbers)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, nargs=2, default=(200, 40), help="per epoch and replica"
    )


QUESTION = Question(
    "checkpoint",
    __doc__,
    options,
    rows,
    {"millions": "d", "optimizer": "", "saved_ms": ".1f", "writer_ms": ".1f"}
    | {"writer_ratio": ".2f", "other_ms": ".1f", "other_ratio": ".2f"}
    | {"step_ms": ".1f", "beside_ms": ".0f"},
)
