"""What a checkpoint costs training, beside a plain `torch.save`.

Question: How long does a replica pause for a checkpoint, and what do its steps cost
          while it is being written?
Counted:  Pause: the time that a replica's training thread spends on a checkpoint at the
          end of an epoch, of the replica that also writes the common part, and of the
          other one. Two worker processes of one thread, a checkpoint per epoch.
          Baseline: `torch.save` of what the first replica writes (model, optimizer,
          residual) to the same disk, on the same worker while nothing trains; unlike
          daskdl's writing, it does not wait for the disk. step: the mean time of a step
          of both replicas, in the same fit without checkpoints. beside: the time that
          the steps of an epoch take longer in all while a checkpoint is written.
          Medians over `--rounds` rounds.
Run:      python -m benchmarks checkpoint --rounds 5
"""

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from distributed import Client
from torch import nn

import daskdl
from benchmarks.clusters import local_client
from benchmarks.results import Question, medians
from benchmarks.work import perceptron, plain_step
from daskdl.training.checkpointing import CheckpointWriter

FEATURES, CLASSES, BATCH = 256, 10, 16
WIDTHS = {1: 880, 25: 4880}  # by millions of parameters
EPOCHS = 5
OPTIMIZERS = {
    "SGD, momentum": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "Adam": functools.partial(torch.optim.Adam, lr=1e-4),
}

pauses_s: list[float] = []  # of this process


class Clock(daskdl.Callback):
    """Writes the end of each step to a file of its replica and epoch."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def on_step_end(self, step: daskdl.Step) -> None:
        path = Path(self._folder, f"{step.replica}-{step.epoch}.steps")
        with path.open("a") as file:
            file.write(f"{time.perf_counter()}\n")


def measure_pauses() -> None:
    """On a worker: record how long each checkpoint holds the training thread."""
    end_epoch = CheckpointWriter.end_epoch

    def timed_end(self: CheckpointWriter, *args: Any) -> None:
        began = time.perf_counter()
        end_epoch(self, *args)
        pauses_s.append(time.perf_counter() - began)

    CheckpointWriter.end_epoch = timed_end  # type: ignore[method-assign]


def take_pauses() -> list[float]:
    """On a worker: the pauses since the last call."""
    pauses = list(pauses_s)
    pauses_s.clear()
    return pauses


def save_s(model: Callable[[], nn.Module], optimizer: Any, folder: str) -> float:
    """On a worker: seconds of `torch.save`."""
    module = model()
    adam = optimizer(module.parameters())
    step = plain_step(nn.CrossEntropyLoss(), module, adam)
    step(torch.randn(BATCH, FEATURES), torch.zeros(BATCH, dtype=torch.long))
    state = {
        "model": module.state_dict(),
        "optimizer": adam.state_dict(),
        "residual": [torch.randn_like(p) for p in module.parameters()],
    }
    began = time.perf_counter()
    torch.save(state, Path(folder, "plain.pt"))
    return time.perf_counter() - began


def step_ms(
    client: Client,
    model: Callable[[], nn.Module],
    optimizer: Any,
    steps: int,
    checkpoints: Sequence[daskdl.Callback] = (),
) -> float:
    """Mean time of a step in a fit."""
    rng = np.random.default_rng(0)
    count = 2 * steps * BATCH
    x = rng.normal(size=(count, FEATURES)).astype(np.float32)
    y = rng.integers(0, CLASSES, count)
    with tempfile.TemporaryDirectory() as folder:
        daskdl.Trainer(
            model,
            nn.CrossEntropyLoss(),
            optimizer,
            client=client,
            callbacks=[Clock(folder), *checkpoints],
            progress=False,
        ).fit(x, y, epochs=EPOCHS, batch_size=BATCH)
        # During the first epoch no checkpoint is written.
        paths = (p for p in Path(folder).iterdir() if not p.stem.endswith("-0"))
        taken = [np.diff(np.loadtxt(path)) for path in paths]
    return 1e3 * float(np.concatenate(taken).mean())


def measured(
    client: Client, model: Callable[[], nn.Module], optimizer: Any, steps: int
) -> dict[str, float]:
    without_ms = step_ms(client, model, optimizer, steps)
    client.run(take_pauses)
    with tempfile.TemporaryDirectory() as folder:
        rule = daskdl.Checkpoint(folder, keep_last=1)
        with_ms = step_ms(client, model, optimizer, steps, [rule])
    pauses = client.run(take_pauses)
    first, second = sorted(pauses)  # replica 0 is on the first one
    with tempfile.TemporaryDirectory() as folder:
        saved = client.submit(
            save_s, model, optimizer, folder, workers=[first], pure=False
        )
        saved_ms = 1e3 * saved.result()
    writer_ms = 1e3 * statistics.median(pauses[first])
    other_ms = 1e3 * statistics.median(pauses[second])
    return {
        "saved_ms": saved_ms,
        "writer_ms": writer_ms,
        "writer_ratio": writer_ms / saved_ms,
        "other_ms": other_ms,
        "other_ratio": other_ms / saved_ms,
        "step_ms": without_ms,
        "beside_ms": (with_ms - without_ms) * steps,
    }


def rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with local_client(2) as client:
        client.run(measure_pauses)
        for (millions, width), steps in zip(WIDTHS.items(), asked.steps, strict=True):
            model = functools.partial(perceptron, FEATURES, width, width, CLASSES)
            for name, optimizer in OPTIMIZERS.items():
                rounds = [
                    measured(client, model, optimizer, steps)
                    for _ in range(asked.rounds)
                ]
                yield {"millions": millions, "optimizer": name, **medians(rounds)}


QUESTION = Question(
    "checkpoint",
    __doc__,
    rows,
    "millions:d optimizer saved_ms:.1f writer_ms:.1f writer_ratio:.2f other_ms:.1f "
    "other_ratio:.2f step_ms:.1f beside_ms:.0f",
    {
        "--rounds": 5,
        "--steps": {"type": int, "nargs": 2, "default": (200, 40)},
    },
)
