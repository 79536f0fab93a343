"""A fraction of the rows for validation: which kinds of data are split, and how."""

import re

import dask.array as da
import dask.bag
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow
import pytest
import torch
from dask import delayed
from torch.utils.data import Dataset, TensorDataset

from daskdl import DataError, OptionError
from daskdl.data.inputs import split_rows
from tests.support.problems import ShardedStream, rows, trainer

NUMBERS = np.arange(40)
FRAME = pd.DataFrame({"a": NUMBERS, "b": -NUMBERS}, index=NUMBERS + 100)
BLOCKS = dd.from_pandas(FRAME, npartitions=4)


class Squares(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index, index * index


def items(dataset, _):
    return [(int(x), int(y)) for x, y in (dataset[i] for i in range(len(dataset)))]


def arrays(x, y):
    leaf = x["a"][0] if isinstance(x, dict) else x
    return [*zip(np.asarray(leaf).tolist(), np.asarray(y).tolist(), strict=True)]


def computed(x, y):
    return arrays(x.compute(), y.compute())


def loaded(source, _):
    return [row for part in range(source.parts) for row in arrays(*source.load(part))]


KINDS = {
    "numpy": (NUMBERS, NUMBERS**2, arrays),
    "tensors": (torch.arange(40), torch.arange(40) ** 2, arrays),
    "lists": (NUMBERS.tolist(), (NUMBERS**2).tolist(), arrays),
    "trees": ({"a": (NUMBERS,)}, NUMBERS**2, arrays),
    "pandas": (FRAME["a"], FRAME["a"] ** 2, arrays),
    "arrow": (pyarrow.array(NUMBERS), pyarrow.array(NUMBERS**2), arrays),
    "tensor dataset": (
        TensorDataset(torch.arange(40), torch.arange(40) ** 2), None, items
    ),
    "dataset": (Squares(), None, items),
    "dask.array": (
        da.from_array(NUMBERS, chunks=9), da.from_array(NUMBERS**2, chunks=9), computed
    ),
    "dask.dataframe": (BLOCKS["a"], BLOCKS["a"] ** 2, loaded),
}  # fmt: skip


@pytest.mark.parametrize(("X", "y", "read"), KINDS.values(), ids=KINDS)
def test_each_row_is_in_one_of_two_parts_with_its_label(X, y, read):
    split, same, reseeded = (
        [read(*part) for part in split_rows(X, y, 0.25, seed)] for seed in (0, 0, 1)
    )

    rest, chosen = split
    assert sorted(rest + chosen) == [(i, i * i) for i in range(40)]
    assert rest == sorted(rest)
    assert chosen == sorted(chosen)
    assert split == same != reseeded
    if X is not BLOCKS and not isinstance(X, type(BLOCKS["a"])):
        assert len(chosen) == 10


def test_a_fit_validates_on_rows_that_it_does_not_train_on():
    X, Y = rows()

    history = trainer(False).fit(X, Y, validation=0.25)

    assert history.column("examples") == [360]
    (_, _), held = split_rows(X, Y, 0.25, 0)
    fitted = trainer(False)
    fitted.fit(X, Y, validation=0.25)
    scored = fitted.evaluate(*held)["loss"]
    assert history.column("val_loss") == [pytest.approx(scored, rel=1e-5)]


LENGTHS = da.from_array(NUMBERS, chunks=9)
LENGTHS = LENGTHS[LENGTHS > 3]


@pytest.mark.parametrize(
    ("X", "y", "fraction", "error", "message"),
    [
        (NUMBERS, None, 1.0, OptionError, "a fraction of the rows in (0, 1), got 1.0"),
        (NUMBERS, None, 20, OptionError, "or a fraction of the rows in (0, 1), got 20"),
        (NUMBERS[:4], None, 0.1, DataError, "0.1 of 4 rows leaves 4 rows to train on "),
        (
            NUMBERS,
            NUMBERS[1:],
            0.1,
            DataError,
            "X and y must have the same length, got",
        ),
        (LENGTHS, None, 0.1, DataError, "does not know; call compute_chunk_sizes() fi"),
        (dask.bag.range(9, 2), None, 0.1, DataError, "but not X, a Bag; split it you"),
        ([delayed(NUMBERS)], None, 0.1, DataError, "but not X, a list; split it"),
        (ShardedStream(9), None, 0.1, DataError, "but not X, a ShardedStream; split"),
        ("a.csv", None, 0.1, DataError, "but not X, a str; split it yourself, and giv"),
    ],
)
def test_rows_that_cannot_be_split_are_refused(X, y, fraction, error, message):
    with pytest.raises(error, match=re.escape(message)):
        trainer(False, loss=None, step=print).fit(X, y, validation=fraction)
