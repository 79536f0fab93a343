"""What it costs to have the data in many small parts.

Question: how fast is training from 2,100 parts of 10 rows beside 21 parts of 1,000, of
          the same rows, for each kind of data that is loaded part by part?
Counted:  rows per second of the epochs after the first, 2 replicas as worker processes
          with one torch thread each; the two are turns of one round.
Run:      python -m benchmarks.parts --rounds 5
"""

import argparse
import platform
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import torch
from distributed import Client, LocalCluster, wait
from torch import nn

import daskdl

ROWS, FEATURES, CLASSES = 21_000, 20, 4
SIZES = (1000, 10)  # rows of a part
BATCH = 32
EPOCHS = 4
KINDS = ("lazy array", "persisted array", "Delayed", "bag", "npz files")


def samples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, ROWS)
    x = rng.normal(size=(CLASSES, FEATURES))[y] + rng.normal(size=(ROWS, FEATURES))
    return x.astype(np.float32), y


def part(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x, y


def given(client: Client, kind: str, size: int, folder: Path) -> tuple[Any, Any]:
    """The data in parts of so many rows, as `fit` takes them."""
    x, y = samples()
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
    history = trainer.fit(*data, epochs=EPOCHS, batch_size=BATCH)
    return statistics.median(history.column("examples_per_s")[1:])


def measured(
    client: Client, kind: str, rounds: int, folder: Path
) -> Iterator[tuple[float, float]]:
    """Rates of large and of small parts, round by round."""
    for _ in range(rounds):
        large, small = (rate(client, given(client, kind, n, folder)) for n in SIZES)
        yield large, small


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    given_ = parser.parse_args()
    print(
        f"# torch {torch.__version__}, {platform.processor()}, {given_.rounds} rounds"
    )
    print("| data | 21 x 1,000, rows/s | 2,100 x 10, rows/s | large / small |")
    print("|---|---|---|---|")
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        for kind in given_.kinds:
            found = list(measured(client, kind, given_.rounds, Path(folder)))
            large, small = (statistics.median(c) for c in zip(*found, strict=True))
            ratio = statistics.median(one / other for one, other in found)
            print(f"| {kind} | {large:,.0f} | {small:,.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
