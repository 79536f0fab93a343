"""How do I train on data that do not fit into memory?

This example trains on a dask.array four times as large as the memory of a worker. The
array is lazy: each block is computed on the worker that trains on it, while the worker
trains on the previous block, and is dropped after its last use. Here the blocks are
random; yours would be read from files.

Run:  python examples/bigger_than_memory.py
"""

import dask.array as da
import numpy as np
import torch
from dask.distributed import Client, LocalCluster
from dask.utils import format_bytes, parse_bytes
from torch import nn

import daskdl

MEMORY = "900MB"  # per worker; torch and numba take 520 MB, Dask pauses it at 720 MB
TIMES = 4  # size of the data / memory of a worker
FEATURES = 2_000
ROWS = 1_024  # per block, 8 MB
EPOCHS = 2


def block(info):
    """Compute the rows of one block, the same ones every time."""
    (start, stop), _ = info[None]["array-location"]
    rng = np.random.default_rng(start)
    rows = rng.random((stop - start, FEATURES), dtype=np.float32)
    rows -= 0.5
    return rows


def peak_bytes():
    """Return the peak memory of this process."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main():
    blocks = TIMES * parse_bytes(MEMORY) // (4 * FEATURES * ROWS)
    chunks = ((ROWS,) * blocks, (FEATURES,))
    X = da.map_blocks(
        lambda block_info: block(block_info), chunks=chunks, dtype=np.float32
    )
    y = (X[:, :10].sum(axis=1) > 0).astype(np.int64)

    workers = {"n_workers": 2, "threads_per_worker": 1, "memory_limit": MEMORY}
    with (
        LocalCluster(**workers, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        trainer = daskdl.Trainer(
            model=lambda: nn.Linear(FEATURES, 2),
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            client=client,
        )
        history = trainer.fit(X, y, epochs=EPOCHS, batch_size=256)
        peak = max(client.run(peak_bytes).values())
        print(f"{format_bytes(X.nbytes)} in {blocks} blocks, {EPOCHS} epochs")
        print(f"loss {history.column('loss')}")
        print(f"a worker may use {MEMORY}; the largest peak was {format_bytes(peak)}")


if __name__ == "__main__":
    main()
