"""How do I train on a `dask.array`, on a cluster that is already running?

The data never reach this process: each block is computed on the worker that trains on
it, and predictions are a lazy array.

Run:  python examples/dask_array.py [scheduler address]
"""

import sys

import dask.array as da
import numpy as np
import torch
from dask.distributed import Client
from torch import nn

import daskdl

ROWS, BLOCK = 40_000, 5_000


def rings(points):
    """Return the class of each point, one of four rings around the origin."""
    distance = np.sqrt((points**2).sum(axis=1))
    return np.minimum(distance * 2, 3).astype("int64")


def network():
    return nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


def main():
    # Without an address, Dask starts a cluster on this machine.
    address = sys.argv[1] if len(sys.argv) > 1 else None
    workers = {} if address else {"n_workers": 2, "threads_per_worker": 1}
    with Client(address, **workers) as client:
        random = da.random.default_rng(0)
        X = random.normal(size=(ROWS, 2), chunks=(BLOCK, 2)).astype("float32")
        y = X.map_blocks(rings, drop_axis=1, dtype="int64")
        X, y = client.persist([X, y])
        print(f"{X.shape[0]} rows in {X.numblocks[0]} blocks")

        trainer = daskdl.Trainer(
            model=network,
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.03, momentum=0.9),
            client=client,
        )
        history = trainer.fit(X, y, epochs=6, batch_size=100)
        for row in history:
            print(f"epoch {row['epoch']}  loss {row['loss']:.4f}")

        scores = trainer.predict(X)  # lazy, in the blocks of X
        right = (scores.argmax(axis=1) == y).mean().compute()
        print(f"training accuracy {right:.4f}")


if __name__ == "__main__":
    main()
