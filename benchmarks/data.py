"""What it costs to have the data elsewhere than in memory.

Question: how fast is training from batch files and from lazy parts of a dask.array,
          beside training from data in memory, and does prefetch hide loading that takes
          half as long as computing?
Counted:  rows per second of the second epoch, 2 replicas as worker processes with one
          torch thread each; a part is 8 batches; to load one takes a wait of so much
          of the time to train on it in memory, as a disk or a server would make it
          wait. Baseline: numpy arrays in memory, before each.
Run:      python -m benchmarks.data --rounds 5
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import torch
from distributed import Client, LocalCluster

import daskdl
from benchmarks.models import mlp
from benchmarks.step import BATCH, samples, sgd

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


def measured(client: Client, rounds: int, files: str) -> Iterator[Row]:
    x, y = samples(PARTS * BATCHES_PER_PART * BATCH)
    daskdl.data.export(x, files, BATCH, y=y, batches_per_file=BATCHES_PER_PART)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(f"# torch {torch.__version__}, {platform.processor()}, {rounds} rounds")
    print("| data | load / train | prefetch | rows/s | beside memory | waiting |")
    print("|---|---|---|---|---|---|")
    with (
        tempfile.TemporaryDirectory() as files,
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        for row in measured(client, rounds, files):
            print(
                f"| {row.source} | {row.load:.1f} | {row.prefetch} | "
                f"{row.rows_per_s:,.0f} | {row.beside:.2f} | {row.waited:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
