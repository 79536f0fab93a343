"""Examples to score, in each kind of data, and a trainer that has a model for them."""

import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import torch
from torch import nn

from daskdl import Trainer

ROWS = 90
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
# Sorted, so that each part of the data has other losses than the others.
Y = np.sort(np.random.default_rng(1).integers(0, 3, ROWS))
IDS = [f"id {i}" for i in range(ROWS)]
NAMES = list("abcd")
CHUNKS = ((31, 0, 29, 30),)
# Batches of another size may use another matrix kernel, which rounds otherwise.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def trainer(**options):
    """Return a trainer with a model that was not trained."""
    torch.manual_seed(0)
    chosen = {"loss": nn.CrossEntropyLoss(), "client": False, **options}
    fitted = Trainer(nn.Linear(4, 3), optimizer=torch.optim.SGD, **chosen)
    fitted.model_ = fitted.model
    return fitted


def frame():
    return pd.DataFrame(X, columns=NAMES, index=np.arange(ROWS) * 10).assign(
        id=IDS, label=Y
    )


def table():
    return dd.from_pandas(frame(), npartitions=4)


def blocks():
    return da.from_array(X, chunks=(*CHUNKS, 4)), da.from_array(Y, chunks=CHUNKS)


def pairs():
    return db.from_sequence([(X[i], Y[i]) for i in range(ROWS)], npartitions=4)


def keyed_pairs():
    return db.from_sequence(
        [(IDS[i], (X[i], Y[i])) for i in range(ROWS)], npartitions=4
    )


def keyed_lists():
    """The same as a list of Delayed lists."""
    return keyed_pairs().to_delayed()


def files(folder):
    for number in range(3):
        rows = slice(30 * number, 30 * number + 30)
        np.savez(folder / f"{number}.npz", x=X[rows], y=Y[rows])
    return (folder,)
