"""Rows that show whether inputs, labels and keys belong together, in Dask collections.

Row i has the input i, the label -i and the key i. A model that returns its input has
the squared error (2i)**2, so each score names the row it belongs to.
"""

import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import torch
import xarray
import zarr
from dask import delayed
from torch import nn

from daskdl import Trainer

ROWS = 60
TABLE = pd.DataFrame(
    {
        "id": np.arange(ROWS),
        "a": np.arange(ROWS, dtype=np.float32),
        "y": -np.arange(ROWS, dtype=np.float32),
        # Dask fuses small partitions of Parquet files if few columns are read.
        **{f"other{i}": np.arange(ROWS) % 7 for i in range(20)},
    }
)


def frame(partitions=4):
    return dd.from_pandas(TABLE, npartitions=partitions)


def parquet(folder):
    for number, start in enumerate(range(0, ROWS, 20)):
        TABLE[start : start + 20].to_parquet(f"{folder}/{number}.parquet", index=False)
    return dd.read_parquet(folder)


def in_random_order(part):
    """Another order each time, as in a task that draws without a seed."""
    return part.sample(frac=1.0, random_state=np.random.default_rng())


FRAMES = {
    "pandas": lambda folder: frame(),
    "parquet": parquet,
    "filtered": lambda folder: _filtered(parquet(folder)),
    "computed columns": lambda folder: parquet(folder).assign(z=1).astype("float32"),
    "shuffled": lambda folder: parquet(folder).shuffle(on="other1"),
    "merged": lambda folder: _merged(parquet(folder)),
    "sorted": lambda folder: parquet(folder).sort_values("y"),
    "indexed": lambda folder: parquet(folder).set_index("y", drop=False),
    "deduplicated": lambda folder: parquet(folder).drop_duplicates(split_out=3),
    "sampled": lambda folder: parquet(folder).sample(frac=0.5),
    "in random order": lambda folder: parquet(folder).map_partitions(in_random_order),
    "random and shuffled": lambda folder: (
        parquet(folder).map_partitions(in_random_order).shuffle(on="other1")
    ),
    "concatenated": lambda folder: dd.concat([parquet(folder), frame()]),
    "persisted": lambda folder: parquet(folder).persist(),
}


def _filtered(table):
    return table[table["id"] % 3 != 1]


def _merged(table):
    left, right = table[["id", "a"]], table[["id", "y", "other1"]]
    return left.merge(right, on="id")


def blocks(dtype=np.float32):
    return da.arange(ROWS, chunks=17, dtype=dtype)[:, None]


def _columns(rows):
    """X, y and keys of an array whose rows are all three."""
    return (
        rows[:, :1].astype(np.float32),
        -rows[:, 0].astype(np.float32),
        rows[:, 0].astype(np.int64),
    )


def _shuffled_blocks(rows):
    return rows.map_blocks(lambda block: np.random.default_rng().permutation(block))


def _unknown(rows):
    return rows[rows[:, 0] % 3 != 1]


def _of_table(table):
    whole = table[["id", "a", "y"]].to_dask_array(lengths=True)
    return whole[:, 1:2], whole[:, 2], whole[:, 0].astype(np.int64)


NUMBERS = np.arange(ROWS, dtype=np.float32)
UNEQUAL = da.from_array(NUMBERS[:, None], chunks=((17, 0, 30, 1, 12), 1))

ARRAYS = {
    "blocks": lambda: _columns(blocks()),
    "rechunked": lambda: _columns(blocks().rechunk((13, 1))),
    "other chunks": lambda: _columns(blocks())[:2] + _columns(blocks().rechunk(9))[2:],
    "random": lambda: _columns(
        da.random.default_rng(0).integers(0, ROWS, (ROWS, 1), chunks=17)
    ),
    "permuted": lambda: _columns(da.random.default_rng(0).permutation(blocks())),
    "in random order": lambda: _columns(_shuffled_blocks(blocks())),
    "random and rechunked": lambda: _columns(
        _shuffled_blocks(blocks()).rechunk((20, 1))
    ),
    "unknown lengths": lambda: _columns(_unknown(_shuffled_blocks(blocks()))),
    "of a table": lambda: _of_table(frame()),
    # Cut like the blocks beside them.
    "labels and keys in memory": lambda: (UNEQUAL, -NUMBERS, list(range(ROWS))),
    "inputs and keys in memory": lambda: (
        NUMBERS[:, None], -UNEQUAL[:, 0], np.arange(ROWS)
    ),
    "zarr and series": lambda: (
        zarr.array(NUMBERS[:, None], chunks=(7, 1)),
        pd.Series(-NUMBERS, np.arange(ROWS)[::-1]),  # in memory, an index means nothing
        pd.Series(range(ROWS)),
    ),
    "xarray and tensors": lambda: (
        xarray.DataArray(UNEQUAL, dims=["row", "column"]),
        torch.from_numpy(-NUMBERS),
        torch.arange(ROWS),
    ),
    "table and blocks": lambda: (
        frame()[["a"]], -da.arange(ROWS, chunks=15, dtype=np.float32), range(ROWS)
    ),
}  # fmt: skip


def examples():
    """Pairs of a bag whose partitions are in another order each time."""
    numbers = db.from_sequence(range(ROWS), npartitions=4)
    shuffled = numbers.map_partitions(
        lambda partition: np.random.permutation(list(partition))
    )
    return shuffled.map(lambda row: (np.array([row], np.float32), np.float32(-row)))


def two_bags():
    pairs = examples()
    return pairs.pluck(0), pairs.pluck(1)


def rows_of(part):
    shuffled = np.random.permutation(np.arange(part * 20, part * 20 + 20))
    return shuffled.astype(np.float32)[:, None], -shuffled.astype(np.float32)


def parts():
    """X and y are items of the same random tasks."""
    pairs = [delayed(rows_of, pure=False)(part) for part in range(3)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def data_of(kind, folder):
    """X and y of any kind."""
    if kind in FRAMES:
        table = FRAMES[kind](folder)
        return table[["a"]], table["y"]
    if kind in ARRAYS:
        return ARRAYS[kind]()[:2]
    return OTHERS[kind]()


OTHERS = {"bag": lambda: (examples(), None), "two bags": two_bags, "Delayed": parts}
ARRAYS = {f"array, {kind}": make for kind, make in ARRAYS.items()}
KINDS = [*FRAMES, *ARRAYS, *OTHERS]


def trainer(client=False, **options):
    fitted = Trainer(Echo(), nn.MSELoss(), "sgd", lr=1e-12, client=client, **options)
    fitted.model_ = fitted.model
    return fitted


class Echo(nn.Linear):
    """Returns its only input, as long as nothing is learned."""

    def __init__(self):
        super().__init__(1, 1, bias=False)
        nn.init.ones_(self.weight)

    def forward(self, x):
        return super().forward(x).squeeze(-1)


def check_rows(batch):
    """A transform that refuses rows that do not belong together."""
    x, y = batch
    if not torch.equal(x[:, 0], -y):
        raise ValueError(f"rows {x[:, 0].tolist()} met labels {y.tolist()}")
    return batch


def weighted_loss(rows, weights):
    """The squared error of `Echo` for some rows and their weights."""
    return np.average((2.0 * np.asarray(rows)) ** 2, weights=weights)


def rows_of_scores(scores):
    """The rows that the scores of `Echo` belong to."""
    return np.sqrt(np.asarray(scores)) / 2
