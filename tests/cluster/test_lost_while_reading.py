"""A worker is killed while it trains: whatever it trains from, no row is lost."""

from typing import NamedTuple

import dask
import dask.array as da
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import daskdl
from tests.support.problems import mlp, rows, trainer
from tests.support.watched import KillAt, TrainedRows, Watched, watched_blocks

pytestmark = pytest.mark.slow

COUNT, EPOCHS, BATCH = 960, 4, 8
X, _ = rows(COUNT)
SHARDS = 8


class Rows(Dataset):
    """Rows and their numbers, one at a time."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return torch.from_numpy(X[index]), index


def shard(number, shards):
    """Every so manieth row with its number."""
    return ((X[i], i) for i in range(number, COUNT, shards))


class Data(NamedTuple):
    """What is trained from."""

    arguments: tuple
    repeats: int  # rows that may be trained on again when one worker is lost


def packed_rows(folder, client):
    url = str(folder / "files")
    daskdl.data.pack(X, np.arange(COUNT), url=url, per_file=5 * BATCH)
    return Data((url,), COUNT // 3)


def lazy_blocks(folder, client):
    return Data(watched_blocks(Watched(folder), COUNT), COUNT // 3)


def scattered_rows(folder, client):
    return Data((X, np.arange(COUNT)), COUNT // 3)


def small_parts(folder, client):
    """So many that some are leased, computed and trained on together."""
    cuts = [slice(start, start + 5) for start in range(0, COUNT, 5)]
    parts = [dask.delayed((X[rows], np.arange(COUNT)[rows])) for rows in cuts]
    return Data((parts,), COUNT // 3)


def small_blocks(folder, client):
    numbers = da.from_array(np.arange(COUNT), chunks=5)
    return Data((da.from_array(X, chunks=(5, 20)), numbers), COUNT // 3)


def dataset(folder, client):
    return Data((Rows(),), COUNT // 3)


def stream(folder, client):
    return Data((daskdl.data.Stream(shard, SHARDS),), COUNT // SHARDS)


@pytest.mark.parametrize(
    "kind",
    [
        packed_rows,
        lazy_blocks,
        small_parts,
        small_blocks,
        scattered_rows,
        dataset,
        stream,
    ],
)
def test_every_row_is_trained_on_in_each_epoch(three, tmp_path, kind):
    data, trained = kind(tmp_path, three), TrainedRows(tmp_path)
    # In the second epoch at the latest, in the middle of what it has leased.
    callbacks = [trained, KillAt(COUNT // BATCH // 3 + 3)]
    fitted = trainer(three, model=mlp, loss=trained, callbacks=callbacks)

    history = fitted.fit(*data.arguments, epochs=EPOCHS, batch_size=BATCH)

    seen = trained.by_epoch()
    assert len(history) == len(seen) == EPOCHS
    for epoch in seen:
        assert epoch.keys() == set(range(COUNT))
    doubled = [epoch.total() - COUNT for epoch in seen]
    again = history.column("repeated_pieces")
    assert sum(again) >= 1
    assert [epoch for epoch, pieces in enumerate(again) if not pieces] == [
        epoch for epoch, count in enumerate(doubled) if not count
    ]
    assert max(doubled) <= data.repeats
