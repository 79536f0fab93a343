"""Fits on many small parts, which are leased and loaded together, among threads."""

import collections
import logging

import dask
import dask.array as da
import numpy as np
import pytest
import torch

import daskdl
from tests.support.problems import rows, trainer
from tests.support.watched import TrainedRows

COUNT, EACH = 480, 2
X, Y = rows(COUNT)
NUMBERS = np.arange(COUNT)
PARTS = [slice(start, start + EACH) for start in range(0, COUNT, EACH)]


def lazy(folder, y=Y):
    return da.from_array(X, chunks=(EACH, 20)), da.from_array(y, chunks=EACH)


def delayed(folder, y=Y):
    return ([dask.delayed((X[fitted], y[fitted])) for fitted in PARTS],)


def files(folder, y=Y):
    folder.mkdir()
    for i, fitted in enumerate(PARTS):
        np.savez(folder / f"{i:03}.npz", x=X[fitted], y=y[fitted])
    return (str(folder),)


KINDS = pytest.mark.parametrize("kind", [lazy, delayed, files])


@KINDS
def test_without_shuffling_the_steps_are_those_of_arrays_in_memory(tmp_path, kind):
    """Bit for bit."""
    fitted, in_memory = trainer(False), trainer(False)

    fitted.fit(*kind(tmp_path / "data"), batch_size=32, shuffle=False)
    in_memory.fit(X, Y, batch_size=32, shuffle=False)

    for name, value in fitted.model_.state_dict().items():
        assert torch.equal(value, in_memory.model_.state_dict()[name])


@KINDS
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_row_is_trained_on_once_in_each_epoch(tmp_path, kind, replicas, caplog):
    caplog.set_level(logging.INFO, "daskdl")
    trained = TrainedRows(tmp_path)
    master = daskdl.GradientSharing(replicas_per_worker=replicas)
    fitted = trainer(False, master=master, loss=trained, callbacks=[trained])

    fitted.fit(*kind(tmp_path / "data", NUMBERS), epochs=2, batch_size=32)

    assert trained.by_epoch() == [collections.Counter(range(COUNT))] * 2
    assert "240 parts are merged into 80" in caplog.messages


def test_parts_of_different_shapes_are_not_merged():
    parts = [
        dask.delayed((np.ones((4, 2 + i // 50, 3), np.float32), np.zeros(4, int)))
        for i in range(150)
    ]
    model = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d((1, 3)), torch.nn.Flatten())
    model.append(torch.nn.Linear(3, 2))

    history = trainer(False, model=model).fit(parts, batch_size=8)

    assert history.column("examples") == [600]


def test_a_bad_part_is_named_or_left_out_alone(tmp_path):
    wrong = Y.copy()
    wrong[123] = 7

    with pytest.raises(daskdl.DataError, match=r"part 61\b.*\[1\] is 7") as caught:
        trainer(False).fit(*lazy(tmp_path, wrong))
    assert caught.value.__notes__ == ["in part 60 and 2 more of the train data"]
    (url,) = files(tmp_path / "data", wrong)
    with pytest.raises(daskdl.DataError, match=r"061\.npz\[1\] is 7"):
        trainer(False).fit(url)
    history = trainer(False).fit(url, on_bad_batch="skip")
    assert history.column("examples") == [COUNT - EACH]
    assert history.column("skipped_examples") == [EACH]


def test_a_part_that_cannot_be_computed_goes_alone(tmp_path):
    """Its length is known, as of an array whose blocks are computed again."""
    x, numbers = lazy(tmp_path, NUMBERS)
    numbers = numbers.map_blocks(
        lambda block: 1 / 0 if 50 in block else block, meta=NUMBERS[:0]
    )
    trained = TrainedRows(tmp_path)
    fitted = trainer(False, loss=trained, callbacks=[trained])

    history = fitted.fit(x, numbers, epochs=2, on_bad_batch="skip")

    rest = collections.Counter(n for n in range(COUNT) if n not in (50, 51))
    assert trained.by_epoch() == [rest] * 2
    assert history.column("skipped_examples") == [EACH] * 2
