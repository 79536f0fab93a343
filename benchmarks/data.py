"""What it costs to have the data elsewhere than in memory.

Question: how fast is training from batch files and from lazy parts of a dask.array,
          beside training from data in memory, and does prefetch hide loading that takes
          half as long as computing?
Counted:  rows per second of the second epoch, 2 replicas as worker processes with one
          torch thread each; a part is 8 batches; to load one takes a wait of so much
          of the time to train on it in memory, as a disk or a server would make it
          wait. Baseline: numpy arrays in memory, before each.
Run:      python -m benchmarks data --rounds 5
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import torch
from distributed import Client, wait
from torch import nn

import daskdl
from benchmarks.clusters import local_cluster
from benchmarks.results import Question
from benchmarks.step import BATCH, samples, sgd
from benchmarks.work import mlp

BATCHES_PER_PART = 8
PARTS = 24  # of both replicas together
LOADS = (0.0, 0.5)  # seconds to load a part / seconds to train on it
PREFETCH = (2, 0)


@dataclass(frozen=True)
class Row:
    source: str
    load: float
    prefetch: int
    rows_per_s: float  # median over rounds
    beside: float  # memory: median of the rounds' ratios
    waited: float  # for data / seconds of both replicas, median


class Slow:
    """Waits before it gives back what it is given; a loader, or a task of Dask's."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, rows: Any) -> Any:
        time.sleep(self._seconds)
        return rows


class SlowFiles(daskdl.data.BatchFiles):
    """Batch files on a store that takes its time."""

    seconds = 0.0

    def load(self, part: int) -> Any:
        time.sleep(self.seconds)
        return super().load(part)


def fit(client: Client, X: Any, y: Any, prefetch: int) -> tuple[float, float]:
    """Rows per second of the second epoch, and the share of time waited for data."""
    trainer = daskdl.Trainer(
        mlp, torch.nn.CrossEntropyLoss(), sgd, client=client, progress=False
    )
    history = trainer.fit(X, y, epochs=2, batch_size=BATCH, prefetch=prefetch)
    last = history[-1]
    waited = last["waits"].get("data", 0.0) / (last["seconds"] * last["replicas"])
    return last["examples_per_s"], waited


def sources(
    x: np.ndarray, y: np.ndarray, files: str, load_s: float
) -> Iterator[tuple[str, Any, Any]]:
    rows = BATCH * BATCHES_PER_PART
    slow = Slow(load_s)
    lazy = da.from_array(x, chunks=(rows, *x.shape[1:])).map_blocks(slow, meta=x[:0])
    yield "lazy dask.array", lazy, da.from_array(y, chunks=rows)
    batch_files = SlowFiles(files)
    batch_files.seconds = load_s
    yield "batch files", batch_files, None


def loading(client: Client, rounds: int, files: str) -> Iterator[Row]:
    x, y = samples(PARTS * BATCHES_PER_PART * BATCH)
    daskdl.data.export(
        x, y, url=files, batch_size=BATCH, batches_per_file=BATCHES_PER_PART
    )
    memory = [fit(client, x, y, 2) for _ in range(rounds + 1)][1:]
    speed = statistics.median(rate for rate, _ in memory)
    yield Row("memory", 0.0, 2, speed, 1.0, statistics.median(w for _, w in memory))
    part_s = BATCH * BATCHES_PER_PART / (speed / 2)  # of one replica
    for load in LOADS:
        for name, X, labels in sources(x, y, files, load * part_s):
            for prefetch in PREFETCH:
                found = []
                for _ in range(rounds):
                    before, _ = fit(client, x, y, 2)
                    rate, waited = fit(client, X, labels, prefetch)
                    found.append((rate, rate / before, waited))
                middle = [
                    statistics.median(column) for column in zip(*found, strict=True)
                ]
                yield Row(name, load, prefetch, *middle)


PARTS_TEXT = """What it costs to have the data in many small parts.

Question: how fast is training from 2,100 parts of 10 rows beside 21 parts of 1,000, of
          the same rows, for each kind of data that is loaded part by part?
Counted:  rows per second of the epochs after the first, 2 replicas as worker processes
          with one torch thread each; the two are turns of one round.
Run:      python -m benchmarks parts --rounds 5
"""
ROWS, FEATURES, CLASSES = 21_000, 20, 4
SIZES = (1000, 10)  # rows of a part
SMALL_BATCH = 32
EPOCHS = 4
KINDS = ("lazy array", "persisted array", "Delayed", "bag", "npz files")


def small_samples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, ROWS)
    x = rng.normal(size=(CLASSES, FEATURES))[y] + rng.normal(size=(ROWS, FEATURES))
    return x.astype(np.float32), y


def part(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x, y


def given(client: Client, kind: str, size: int, folder: Path) -> tuple[Any, Any]:
    """The data in parts of so many rows, as `fit` takes them."""
    x, y = small_samples()
    cuts = [slice(start, start + size) for start in range(0, ROWS, size)]
    if kind == "Delayed":
        return [dask.delayed(part)(x[own], y[own]) for own in cuts], None
    if kind == "bag":
        import dask.bag as db

        pairs = list(zip(x, y, strict=True))
        return db.from_sequence(pairs, npartitions=len(cuts)), None
    if kind == "npz files":
        folder = folder / str(size)
        if not folder.exists():
            folder.mkdir()
            for i, own in enumerate(cuts):
                np.savez(folder / f"{i:05}.npz", x=x[own], y=y[own])
        return str(folder), None
    X = da.from_array(x, chunks=(size, FEATURES)).map_blocks(np.negative)
    Y = da.from_array(y, chunks=size)
    if kind == "persisted array":
        X, Y = client.persist([X, Y])
        wait([X, Y])
    return X, Y


def rate(client: Client, data: tuple[Any, Any]) -> float:
    """Rows per second, the median of the epochs after the first."""
    trainer = daskdl.Trainer(
        lambda: nn.Sequential(
            nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES)
        ),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        client=client,
        progress=False,
    )
    history = trainer.fit(*data, epochs=EPOCHS, batch_size=SMALL_BATCH)
    return statistics.median(history.column("examples_per_s")[1:])


def turns(
    client: Client, kind: str, rounds: int, folder: Path
) -> Iterator[tuple[float, float]]:
    """Rates of large and of small parts, round by round."""
    for _ in range(rounds):
        large, small = (rate(client, given(client, kind, n, folder)) for n in SIZES)
        yield large, small


@contextlib.contextmanager
def begun() -> Iterator[tuple[str, Client]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        local_cluster(2) as cluster,
        Client(cluster) as client,
    ):
        yield folder, client


def rows(asked: argparse.Namespace) -> Iterator[Row]:
    with begun() as (folder, client):
        yield from loading(client, asked.rounds, folder)


def parts_rows(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with begun() as (folder, client):
        for kind in asked.kinds:
            found = list(turns(client, kind, asked.rounds, Path(folder)))
            large, small = (statistics.median(c) for c in zip(*found, strict=True))
            ratio = statistics.median(one / other for one, other in found)
            yield {"data": kind, "large": large, "small": small, "ratio": ratio}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)


def parts_options(parser: argparse.ArgumentParser) -> None:
    options(parser)
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)


QUESTION = Question(
    "data",
    __doc__,
    options,
    rows,
    {"source": "", "load": ".1f", "prefetch": "d", "rows_per_s": ",.0f"}
    | {"beside": ".2f", "waited": ".3f"},
)
SMALL_PARTS = Question(
    "parts",
    PARTS_TEXT,
    parts_options,
    parts_rows,
    {"data": "", "large": ",.0f", "small": ",.0f", "ratio": ".2f"},
)
