"""Fits on many small parts, which are leased and loaded together."""

import collections
import logging

import dask
import dask.array as da
import numpy as np
import pytest

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


def delayed(client, folder):
    return ([dask.delayed((X[own], NUMBERS[own])) for own in parts()],)


def fit(client, trained, *data, **options):
    own = trainer(client, loss=trained, callbacks=[trained])
    return own.fit(*data, epochs=EPOCHS, batch_size=8, **options)


@pytest.mark.parametrize("kind", [lazy, delayed])
def test_every_row_is_trained_on_once_in_each_epoch(client, tmp_path, kind, caplog):
    trained = TrainedRows(tmp_path)

    with caplog.at_level(logging.INFO, "daskdl"):
        fit(client, trained, *kind(client, tmp_path))

    assert trained.by_epoch() == [ALL] * EPOCHS
    assert trained.replicas() == {0, 1}
    assert "192 parts are put together to 64" in caplog.messages


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
