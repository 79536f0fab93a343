"""Weights of rows: a row of weight n counts as n rows."""

import functools
import re

import dask.array as da
import dask.bag as bag
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import daskdl
from daskdl import DataError, ModelError, OptionError
from tests.support.problems import kept, rows, trainer
from tests.support.recording import vector

X, Y = rows(120)
WEIGHT = np.random.default_rng(1).integers(0, 4, len(X))
TWICE = np.repeat(X, WEIGHT, axis=0), np.repeat(Y, WEIGHT)
TARGETS = np.stack([Y, Y**2, -Y, Y + 1], axis=1).astype(np.float32)
BY_CLASS = torch.tensor([1.0, 2.0, 0.5, 1.0])
LOSSES = {
    "classes": (nn.CrossEntropyLoss(), Y),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), Y),
    "weights of classes": (nn.CrossEntropyLoss(BY_CLASS, ignore_index=3), Y),
    "function": (functional.cross_entropy, Y),
    "partial": (functools.partial(functional.cross_entropy, weight=BY_CLASS), Y),
    "numbers": (nn.MSELoss(), TARGETS),
}
EVERY_LOSS = pytest.mark.parametrize(("loss", "y"), LOSSES.values(), ids=LOSSES)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)


@EVERY_LOSS
def test_a_weight_counts_as_repeated_rows(loss, y):
    weighted, repeated = (trainer(False, loss=loss, optimizer=sgd) for _ in "ab")
    more = np.repeat(X, WEIGHT, axis=0), np.repeat(y, WEIGHT, axis=0)

    weighted.fit(X, y, sample_weight=WEIGHT, batch_size=len(X))
    repeated.fit(*more, batch_size=len(more[0]))

    torch.testing.assert_close(vector(weighted.model_), vector(repeated.model_))
    for size in (7, 120):
        scores = repeated.evaluate(X, y, sample_weight=WEIGHT, batch_size=size)
        assert scores == pytest.approx(repeated.evaluate(*more), rel=1e-5)


@pytest.mark.parametrize(
    "kind",
    [np.asarray, list, torch.as_tensor, pd.Series],
    ids=lambda kind: kind.__name__,
)
def test_validation_is_weighted_too(kind):
    fitted = trainer(False, master=kept(replicas_per_worker=2))
    weight = kind(WEIGHT)

    history = fitted.fit(X, Y, sample_weight=weight, validation=(X, Y, WEIGHT))

    expected = fitted.evaluate(*TWICE)
    assert history[0]["val_loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert history[0]["val_accuracy"] == pytest.approx(expected["accuracy"])
    assert fitted.evaluate(X, Y, sample_weight=weight) == pytest.approx(
        expected, rel=1e-5
    )


def test_a_fraction_takes_its_weights_along():
    weight = np.where(np.arange(len(X)) % 2, 1.0, 0.0).tolist()
    fitted = trainer(False)

    history = fitted.fit(X, Y, sample_weight=weight, validation=0.5)

    (_, _), (x, y) = daskdl.data.inputs.split_rows(X, Y, 0.5, 0)
    (_, _), (at, _) = daskdl.data.inputs.split_rows(np.arange(len(X)), None, 0.5, 0)
    odd = at % 2 == 1
    expected = fitted.evaluate(x[odd], y[odd])["loss"]
    assert history[0]["val_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_fraction_of_a_dataframe_takes_its_weights_along():
    table = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": Y, "weight": WEIGHT})
    lazy = dd.from_pandas(table, npartitions=3)
    model = functools.partial(nn.Linear, 2, 4)
    still = functools.partial(torch.optim.SGD, lr=1e-12)
    fitted = trainer(False, model=model, optimizer=still)
    halves = []
    for weight in (lazy["weight"], lazy["weight"] * 0 + 1):
        data = lazy[["a", "b"]], lazy["y"]
        [epoch] = fitted.fit(*data, sample_weight=weight, validation=0.5)
        halves.append((epoch["loss"], epoch["val_loss"]))

    # The same rows are drawn, so their weights alone make a difference.
    assert halves[0][0] != pytest.approx(halves[1][0], rel=1e-4)
    assert halves[0][1] != pytest.approx(halves[1][1], rel=1e-4)


def test_transforms_get_the_labels_alone():
    def doubled(batch):
        x, y = batch
        return x * 2, y.clone()

    fitted = trainer(False, transform=doubled, optimizer=sgd)
    plain = trainer(False, optimizer=sgd)

    fitted.fit(X, Y, sample_weight=WEIGHT, batch_size=30, validation=(X, Y))
    plain.fit(X * 2, Y, sample_weight=WEIGHT, batch_size=30)

    torch.testing.assert_close(vector(fitted.model_), vector(plain.model_))


def test_weights_without_a_loss_are_those_of_the_accuracy():
    model = nn.Linear(20, 4)

    scores = daskdl.evaluate(model, X, Y, sample_weight=WEIGHT, client=False)

    assert scores == pytest.approx(daskdl.evaluate(model, *TWICE, client=False))


ONE = np.ones(len(X))
DATA = X, Y


EACH = "must have one number for each of 120 rows, got "
ARRAYS = "sample_weight is for X and y that are arrays or tables, in memory or of"
LAZY = da.from_array(X, chunks=(50, 20)), Y
UNKNOWN = LAZY[0][LAZY[0][:, 0] > 0], LAZY[0][LAZY[0][:, 0] > 0][:, 1]
DATASET = (TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),)
# Data, weights, options of the trainer, and the error.
UNUSABLE = {
    "short": (DATA, ONE[1:], {}, DataError, EACH + "(119,"),
    "number": (DATA, 2.0, {}, DataError, EACH + "float"),
    "negative": (DATA, -ONE, {}, DataError, "not all zero, got sample_weight[0] = -1"),
    "nan": (DATA, ONE * np.nan, {}, DataError, "finite numbers >= 0, not all zero, g"),
    "zero": (DATA, ONE * 0, {}, DataError, "not all zero, got sample_weight[0] = 0.0"),
    "bag": ((bag.from_sequence(zip(X, Y, strict=True)),), ONE, {}, DataError, ARRAYS),
    "dataset": (DATASET, ONE, {}, DataError, ARRAYS),
    "lazy, short": (LAZY, ONE[1:], {}, DataError, EACH + "(119,"),
    "lazy, zero": (LAZY, ONE * 0, {}, DataError, "not all zero, got sample_weight[0]"),
    "lazy weights, short": (
        *(LAZY, da.ones(119), {}, DataError),
        "X and sample_weight must have the same length, got 120 and 119",
    ),
    "lazy weights, a column": (
        *(LAZY, da.ones((120, 1)), {}, DataError),
        EACH + "(120, 1)",
    ),
    "lazy weights, negative": (
        *(LAZY, -da.ones(120, chunks=40), {}, DataError),
        " must be finite numbers >= 0, not all zero, got sample_weight[0] = -1",
    ),
    "unknown lengths": (
        *(UNKNOWN, ONE, {}, DataError),
        "sample_weight is in memory, and is divided like the partitions of X, but Dask "
        "does not know their lengths: call X.compute_chunk_sizes() first",
    ),
    "unknown partitions": (
        *(UNKNOWN, da.ones(120, chunks=20), {}, DataError),
        "if the lengths of partitions are unknown, sample_weight must have as many as "
        "X, got 6 for 3",
    ),
    "loss": (
        *(DATA, ONE, {"loss": lambda out, y: functional.cross_entropy(out, y)}),
        OptionError,
        "sample_weight needs the loss of each row: a loss of torch.nn, or a func",
    ),
    "step": (
        *(DATA, ONE, {"loss": None, "step": print}, OptionError),
        "sample_weight needs loss=, such as torch.nn.CrossEntropyLoss(); a",
    ),
    "transform": (
        *(DATA, ONE, {"transform": lambda batch: (batch[0][:1], batch[1][:1])}),
        ModelError,
        "transform must keep the rows of a batch, as they have weights, g",
    ),
}


@pytest.mark.parametrize(
    ("data", "weight", "options", "error", "message"), UNUSABLE.values(), ids=UNUSABLE
)
def test_weights_that_cannot_be_used_are_refused(data, weight, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        trainer(False, **options).fit(*data, sample_weight=weight)


def test_metrics_and_exports_have_no_weights():
    fitted = trainer(False)
    fitted.fit(X, Y)

    with pytest.raises(
        OptionError, match="sample_weight applies only to loss and accuracy"
    ):
        fitted.evaluate(X, Y, metrics="classification", sample_weight=ONE)
    with pytest.raises(
        OptionError, match=r"sample_weight is for approach='direct', got "
    ):
        fitted.fit(X, Y, sample_weight=ONE, approach="export")
