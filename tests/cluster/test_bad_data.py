"""Data that cannot be trained on are refused by name, with the remedy."""

import re

import dask.array as da
import numpy as np
import pytest
from torch import nn

import daskdl
from daskdl import DataError, ModelError
from tests.support.problems import rows, trainer

X, Y = rows(64)


def changed(array, position, value):
    array = array.copy()
    array[position] = value
    return array


BLOCKS = da.from_array(X, chunks=(16, 20))

TARGETS = changed(Y.astype(np.float32)[:, None], 2, np.nan)

DATA = {
    "lengths": (X[:-1], Y, {}, "X and y must have the same length, got 63 and 64"),
    "empty": (X[:0], Y[:0], {}, r"X must not be empty, got the shape \(0, 20\)"),
    "a list": (X.tolist(), Y, {}, r"X must be a .* got a list; convert it with"),
    "no label": (X, None, {}, r"y must be given, or data of pairs \(x, y\): the loss"),
    "too large": (X, changed(Y, 3, 4), {}, r"y\[3\] is 4, .* must be in \[0, 4\)"),
    "negative": (X, changed(Y, 5, -1), {}, r"y\[5\] is -1, .* must be in \[0, 4\)"),
    "kept apart": (BLOCKS, Y, {}, r"y is in memory .* use dask.array.from_array\(y, "),
    "unlike": (
        BLOCKS[BLOCKS[:, 0] > 0],
        da.from_array(Y, chunks=32),
        {},
        "lengths are not known must be partitioned alike, got 4 of X, 2 of y part",
    ),
    "validation lengths": (
        X,
        Y,
        {"validation": (X, Y[:-1])},
        "validation: X and y must have the same length, got 64 and 63",
    ),
    "validation label": (
        X,
        Y,
        {"validation": (X, changed(Y, 7, 9))},
        r"validation: y\[7\] is 9, but the model gives 4 outputs",
    ),
}


@pytest.mark.parametrize(("x", "y", "options", "message"), DATA.values(), ids=DATA)
def test_data_that_cannot_be_trained_on(untouched, x, y, options, message):
    with pytest.raises(DataError, match=message):
        trainer(untouched).fit(x, y, **options)


def test_a_target_that_is_missing(untouched):
    own = trainer(untouched, model=nn.Linear(20, 1), loss=nn.MSELoss())

    with pytest.raises(DataError, match=r"y\[2, 0\] is nan; remove such examples"):
        own.fit(X, TARGETS)


def test_validation_data_that_the_model_does_not_fit(untouched):
    with pytest.raises(ModelError, match="validation: model failed on 2 rows of X"):
        trainer(untouched).fit(X, Y, validation=(X[:, :3], Y))


class TestOnWorkers:
    """What only a worker can see: the content of blocks that no client has loaded."""

    def test_a_wrong_label_in_a_block_is_named(self, client):
        y = changed(Y, 37, 9)

        with pytest.raises(DataError) as caught:
            trainer(client).fit(BLOCKS, da.from_array(y, chunks=16))

        assert "y of part 2 of the train data[5] is 9" in str(caught.value)
        assert "labels must be in [0, 4)" in str(caught.value)
        assert any(worker in str(caught.value) for worker in client.nthreads())

    def test_a_wrong_label_in_a_block_of_validation_data_is_named(self, client):
        wrong = (BLOCKS, da.from_array(changed(Y, 20, -3), chunks=16))

        with pytest.raises(
            DataError, match=r"y of part 1 of the validation data\[4\] is -3"
        ):
            trainer(client).fit(X, Y, validation=wrong)

    def test_rows_of_unknown_number_that_do_not_go_with_the_labels_are_named(
        self, client
    ):
        some = BLOCKS[BLOCKS[:, 0] > 0]

        with pytest.raises(DataError) as caught:
            trainer(client).fit(some, da.from_array(Y, chunks=16))

        assert re.search(
            r"replica \d on tcp://\S+: part \d has rows that do not go together: "
            r"\d+ of X, 16 of y; partition X and y alike",
            str(caught.value),
        )

    def test_a_missing_target_in_a_block_is_named(self, client):
        targets = changed(X[:, :1], 50, np.nan)
        own = trainer(client, model=nn.Linear(20, 1), loss=nn.MSELoss())

        with pytest.raises(
            daskdl.DaskDLError, match=r"y of part 3 of the train data\[2, 0\] is nan"
        ):
            own.fit(BLOCKS, da.from_array(targets, chunks=(16, 1)))
