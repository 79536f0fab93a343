"""Fits on many small parts, which are leased and loaded together."""

import collections
import logging

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import wait

from daskdl import DataError
from tests.support.problems import rows, trainer
from tests.support.watched import TrainedRows

pytestmark = pytest.mark.slow

COUNT, EACH, EPOCHS = 960, 5, 2
X, _ = rows(COUNT)
NUMBERS = np.arange(COUNT)
ALL = collections.Counter(range(COUNT))


def parts():
    return [slice(start, start + EACH) for start in range(0, COUNT, EACH)]


def lazy(client, folder):
    return da.from_array(X, chunks=(EACH, 20)), da.from_array(NUMBERS, chunks=EACH)


def persisted(client, folder):
    there = client.persist(list(lazy(client, folder)))
    with client.as_current():
        wait(there)
    return there


def delayed(client, folder):
    return ([dask.delayed((X[own], NUMBERS[own])) for own in parts()],)


def files(client, folder):
    folder = folder / "files"
    folder.mkdir()
    for i, own in enumerate(parts()):
        np.savez(folder / f"{i:03}.npz", x=X[own], y=NUMBERS[own])
    return (str(folder),)


def notes(error):
    """Of an error on a worker, or here."""
    return getattr(error.__cause__ or error, "__notes__", [])


def fit(client, trained, *data, **options):
    own = trainer(client, loss=trained, callbacks=[trained])
    return own.fit(*data, epochs=EPOCHS, batch_size=8, **options)


@pytest.mark.parametrize("kind", [lazy, persisted, delayed, files])
def test_every_row_is_trained_on_once_in_each_epoch(client, tmp_path, kind, caplog):
    trained = TrainedRows(tmp_path)

    with caplog.at_level(logging.INFO, "daskdl"):
        fit(client, trained, *kind(client, tmp_path))

    assert trained.by_epoch() == [ALL] * EPOCHS
    assert trained.replicas() == {0, 1}
    assert "192 parts are put together to 64" in caplog.messages


def raising(own):
    if own.start == 50 * EACH:
        raise ValueError("no part 50")
    return X[own], NUMBERS[own]


def test_a_part_that_cannot_be_computed_goes_alone(client, tmp_path):
    """Its length is known, as of an array whose blocks are computed again."""
    trained = TrainedRows(tmp_path)
    wrong = da.from_array(NUMBERS, chunks=EACH).map_blocks(
        lambda block: 1 / 0 if 50 * EACH in block else block, meta=NUMBERS[:0]
    )
    x, _ = lazy(client, tmp_path)

    history = fit(client, trained, x, wrong, on_bad_batch="skip")

    bad = set(range(50 * EACH, 51 * EACH))
    assert trained.by_epoch() == [collections.Counter(ALL.keys() - bad)] * EPOCHS
    assert history.column("skipped_examples") == [EACH] * EPOCHS


def with_a_bad_label():
    """Lazy parts of which the fifty-first has one."""
    wrong = NUMBERS % 4
    wrong[50 * EACH + 1] = 7
    return da.from_array(X, chunks=(EACH, 20)), da.from_array(wrong, chunks=EACH)


def test_one_with_a_bad_label_is_named_as_the_user_counts(client):
    with pytest.raises(DataError, match=r"part 50\[1\] is 7") as caught:
        trainer(client).fit(*with_a_bad_label(), batch_size=8)

    assert notes(caught.value) == ["in part 48 and 2 more of the train data"]


def test_a_part_that_cannot_be_computed_is_named(client, tmp_path):
    trained = TrainedRows(tmp_path)
    data = [dask.delayed(raising)(own) for own in parts()]

    with pytest.raises(ValueError, match="no part 50"):
        fit(client, trained, data)
