"""An epoch in which drop_last=True leaves out everything ends the fit with a word."""

import dask.array as da
import pytest
from torch.utils.data import IterableDataset, get_worker_info

from daskdl import Callback, DataError, GradientSharing
from tests.support.problems import rows, trainer

X, Y = rows(200)


class Stream(IterableDataset):
    """Has as many rows as there are at present; nobody knows how many."""

    rows = 200

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, Stream.rows, step):
            yield X[i], Y[i]


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setattr(Stream, "rows", 200)
    return Stream()


def fit(own, data, **options):
    return own.fit(data, batch_size=32, drop_last=True, **options)


def of(replicas, **options):
    return trainer(
        False, master=GradientSharing(replicas_per_worker=replicas), **options
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_fit_that_drops_all_says_so_in_its_first_epoch(replicas, stream):
    Stream.rows = 20

    with pytest.raises(DataError, match=r"in epoch 0: drop_last=True .*out 20 exam"):
        fit(of(replicas), stream)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_later_epoch_that_drops_all_ends_the_fit(replicas, stream):
    class Shrink(Callback):
        def on_epoch_begin(self, begin):
            Stream.rows = 20 if begin.epoch else 200

    own = of(replicas, callbacks=[Shrink()])

    with pytest.raises(DataError, match=r"epoch 1: drop_last=True .*batch_size, fewer"):
        fit(own, stream, epochs=3)

    assert [row["examples"] > 0 for row in own.history_] == [True]


def test_rows_that_cannot_be_used_are_named_beside_those_that_fill_no_batch():
    labels = Y[:40].copy()
    labels[15] = 99
    x, y = da.from_array(X[:40], chunks=(10, -1)), da.from_array(labels, chunks=10)

    message = "drop_last=True left out 30 .*; all other 10 examples .*, the first becau"
    with pytest.raises(DataError, match=message):
        fit(of(1), x, y=y, on_bad_batch="skip")
