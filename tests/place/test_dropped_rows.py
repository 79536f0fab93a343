"""Incomplete batches: left out with drop_last=True, and of one row with batch norm."""

from collections import Counter

import dask
import dask.array as da
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from daskdl import (
    Callback,
    Checkpoint,
    DataError,
    GradientSharing,
    ModelError,
    ParameterAveraging,
)
from tests.support.problems import kept, mlp, normalised, rows, trainer
from tests.support.watched import TrainedRows

X, Y = rows(200)


class Stream(IterableDataset):
    """A stream whose number of rows changes."""

    rows = 200

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, Stream.rows, step):
            yield X[i], Y[i]


class Shrink(Callback):
    """Leaves 20 rows from an epoch on."""

    def __init__(self, epoch):
        self.epoch = epoch

    def on_epoch_begin(self, begin):
        Stream.rows = 20 if begin.epoch >= self.epoch else 200


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_that_drops_all_rows_ends_the_fit(replicas, epoch, monkeypatch):
    monkeypatch.setattr(Stream, "rows", 200)
    master = GradientSharing(replicas_per_worker=replicas)
    interrupted = trainer(False, master=master, callbacks=[Shrink(epoch)])
    message = f"in epoch {epoch}: drop_last=True left out 20 exam.*batch_size, fewer"

    with pytest.raises(DataError, match=message):
        interrupted.fit(Stream(), batch_size=32, drop_last=True, epochs=3)

    assert [row["examples"] > 0 for row in interrupted.history_] == [True] * epoch


def test_the_error_counts_bad_rows_and_dropped_rows():
    labels = Y[:40].copy()
    labels[15] = 99
    x, y = da.from_array(X[:40], chunks=(10, -1)), da.from_array(labels, chunks=10)

    message = "drop_last=True left out 30 .*; all other 10 examples .*, the first becau"
    with pytest.raises(DataError, match=message):
        trainer(False).fit(x, y, batch_size=32, drop_last=True, on_bad_batch="skip")


batches = []  # of inputs, in the order in which they were trained on


def step(model, batch):
    x, y = batch
    if model.training and torch.is_grad_enabled():
        batches.append(len(x))
    return nn.functional.cross_entropy(model(x), y)


def test_incomplete_batches_are_not_trained_on():
    batches.clear()
    fitted = trainer(False, loss=None, step=step, master=kept())

    history = fitted.fit(X[:100], Y[:100], batch_size=32, epochs=2, drop_last=True)

    assert batches == [32, 32, 32] * 2
    assert history.column("examples") == [96, 96]


@pytest.mark.parametrize(
    ("model", "count", "sizes"),
    [
        (normalised, 33, [33]),
        (normalised, 65, [32, 33]),
        (normalised, 34, [32, 2]),
        (mlp, 33, [32, 1]),
    ],
    ids=["one", "two", "two left", "no batch norm"],
)
def test_a_lone_row_joins_the_batch_before_it_if_there_is_batch_norm(
    model, count, sizes
):
    batches.clear()
    fitted = trainer(False, loss=None, step=step, model=model)

    fitted.fit(X[:count], Y[:count], batch_size=32)

    assert batches == sizes
    assert fitted.history_[0]["examples"] == count


def test_drop_last_leaves_a_lone_row_out():
    fitted = trainer(False, model=normalised)

    assert fitted.fit(X[:33], Y[:33], drop_last=True).column("examples") == [32]


MASTERS = {
    "sharing": GradientSharing,
    "lockstep": lambda **options: GradientSharing(max_staleness=0, **options),
    "averaging": lambda **options: ParameterAveraging(frequency=2, **options),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("master", MASTERS.values(), ids=MASTERS)
def test_a_lone_row_is_trained_on_however_rows_are_cut(master, seed, tmp_path):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 9))
    sizes = rng.choice([1, size + 1, 2 * size + 1], 1 + seed)
    starts = np.cumsum([0, *sizes])
    parts = [
        dask.delayed((X[start : start + count], np.arange(start, start + count)))
        for start, count in zip(starts, sizes, strict=False)
    ]
    trained = TrainedRows(tmp_path / "rows")
    checkpoint = Checkpoint(str(tmp_path / "saved"), every="2 steps")
    (tmp_path / "rows").mkdir()
    fitted = trainer(
        False,
        model=normalised,
        loss=trained,
        master=master(replicas_per_worker=2 + seed % 3),
        callbacks=[trained, checkpoint],
        seed=seed,
    )

    fitted.fit(parts, batch_size=size, epochs=2)

    assert trained.by_epoch() == [Counter(range(starts[-1]))] * 2


def test_a_single_row_of_its_length_is_trained_on():
    """It cannot join a batch of other rows."""
    model = nn.Sequential(
        nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.BatchNorm1d(2), nn.Linear(2, 4)
    )
    parts = [
        dask.delayed((np.ones((count, 1, length), np.float32), np.zeros(count, int)))
        for count, length in ((4, 5), (1, 7), (2, 9))
    ]
    fitted = trainer(False, model=model)

    assert fitted.fit(parts, batch_size=4).column("examples") == [7]


def test_batch_norm_with_batches_of_one_row_is_refused():
    message = r"^replica 0 .*one row: Expected more than 1 value.*batch_size > 1"

    with pytest.raises(ModelError, match=message):
        trainer(False, model=normalised).fit(X[:3], Y[:3], batch_size=1)


def without_statistics():
    norm = nn.BatchNorm1d(20, track_running_stats=False)
    return nn.Sequential(norm, nn.Linear(20, 4))


def test_batch_norm_without_running_statistics_needs_drop_last():
    master = GradientSharing(replicas_per_worker=2, max_staleness=0)
    fitted = trainer(False, model=without_statistics, master=master)

    with pytest.raises(ModelError, match=r"one row.*fit\(drop_last=True\)"):
        fitted.fit(X[:17], Y[:17], batch_size=16)

    fitted.fit(X[:17], Y[:17], batch_size=16, drop_last=True)
    assert fitted.history_[-1]["examples"] == 16
