"""Prediction on two workers beside one process.

Question: how much faster do two workers predict than one process, and what does daskdl
          add for 10,000 rows?
Counted:  rows per second. Blocks of random rows are made where they are needed; outputs
          stay where they were made. One process: a plain loop, `model(x)` for batches
          under `torch.inference_mode`, one torch thread. After it, in each round, two
          workers of one thread each, which compute a lazy `daskdl.predict`. Overhead:
          seconds of the two workers together, less those of the one process.
Run:      python -m benchmarks.predict --rounds 5
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import torch
from distributed import Client, LocalCluster, wait
from torch import nn

import daskdl
from benchmarks.models import cnn, mlp

BATCH = 64
BLOCK = 16 * BATCH  # rows
WORKERS = 2


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    blocks: int


CASES = (
    Case("mlp", mlp, (784,), 48),
    Case("cnn", cnn, (1, 28, 28), 48),
)


@dataclass(frozen=True)
class Row:
    model: str
    rows: int
    alone: float  # rows per second of one process, median over rounds
    together: float  # of two workers, likewise
    ratio: float  # median of the rounds' ratios
    overhead_s: float  # of workers, for 10,000 rows; median


def block_of(number: int, shape: tuple[int, ...]) -> np.ndarray:
    """The rows of a block, the same wherever they are made."""
    return np.random.default_rng(number).random((BLOCK, *shape), np.float32)


def collection(case: Case) -> da.Array:
    """The same blocks, lazily."""

    def make(block: np.ndarray) -> np.ndarray:
        return block_of(int(block.flat[0]), case.shape)

    numbers = da.arange(case.blocks, chunks=1)
    chunks = ((BLOCK,) * case.blocks, *((size,) for size in case.shape))
    axes = list(range(1, len(case.shape) + 1))
    return numbers.map_blocks(make, chunks=chunks, new_axis=axes, dtype=np.float32)


def alone_s(model: nn.Module, case: Case) -> float:
    """Seconds of a plain loop."""
    began = time.perf_counter()
    outputs = []
    with torch.inference_mode():
        for number in range(case.blocks):
            x = torch.from_numpy(block_of(number, case.shape))
            outputs += [model(batch).numpy() for batch in x.split(BATCH)]
    return time.perf_counter() - began


def together_s(model: nn.Module, case: Case, client: Client) -> float:
    """Seconds of the workers, from the call until all outputs are there."""
    began = time.perf_counter()
    outputs = daskdl.predict(model, collection(case), client, batch_size=BATCH)
    done: Any = client.persist(outputs)
    wait(done)
    return time.perf_counter() - began


def measured(client: Client, rounds: int) -> Iterator[Row]:
    for case in CASES:
        model, rows = case.make().eval(), case.blocks * BLOCK
        found = []
        for _ in range(rounds + 1):  # the first is not counted
            one, two = alone_s(model, case), together_s(model, case, client)
            overhead = (WORKERS * two - one) / rows * 10_000
            found.append((rows / one, rows / two, one / two, overhead))
        middle = [statistics.median(column) for column in zip(*found[1:], strict=True)]
        yield Row(case.name, rows, *middle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"# torch {torch.__version__}, {platform.processor()}, {rounds} rounds")
    print(
        "| model | rows | one process, rows/s | two workers, rows/s | ratio | ", end=""
    )
    print("overhead, ms per 10,000 rows |\n|---|---|---|---|---|---|")
    with (
        LocalCluster(
            n_workers=WORKERS, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        for row in measured(client, rounds):
            print(
                f"| {row.model} | {row.rows:,} | {row.alone:,.0f} | "
                f"{row.together:,.0f} | {row.ratio:.2f} | "
                f"{1e3 * row.overhead_s:,.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
