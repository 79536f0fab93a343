"""Class names must keep the numbers that they had in training."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import daskdl
from daskdl.errors import DataError

NAMES = ["cat", "dog", "owl"]
Y = np.arange(60) % 3
X = np.eye(3, dtype=np.float32)[Y]


def named(labels, categories=NAMES):
    return pd.Series(pd.Categorical(np.array(NAMES)[labels], categories=categories))


@pytest.fixture(scope="module")
def trainer():
    fitted = daskdl.Trainer(
        model=lambda: nn.Linear(3, 3),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        client=False,
    )
    fitted.fit(X, named(Y), epochs=1)
    return fitted


@pytest.mark.parametrize(
    "categories", [["owl", "dog", "cat"], ["dog", "owl"]], ids=["order", "fewer"]
)
@pytest.mark.parametrize("method", ["evaluate", "score_examples"])
def test_names_with_other_numbers_are_refused(trainer, method, categories):
    kept = np.isin(np.array(NAMES)[Y], categories)

    with pytest.raises(DataError, match="'cat', 'dog', 'owl', got the names '") as told:
        getattr(trainer, method)(X[kept], named(Y[kept], categories))

    assert "set_categories" in str(told.value)


def test_other_class_numbers_of_validation_data_are_refused(trainer):
    renamed = X, named(Y, ["owl", "dog", "cat"])

    with pytest.raises(DataError, match="validation: labels must be numbered as"):
        trainer.fit(X, named(Y), validation=renamed, epochs=1)


@pytest.mark.parametrize("categories", [NAMES, NAMES[:2]], ids=["the same", "first"])
def test_names_with_the_same_numbers_give_the_same_scores(trainer, categories):
    kept = np.isin(np.array(NAMES)[Y], categories)

    by_name = trainer.evaluate(X[kept], named(Y[kept], categories))

    assert by_name == trainer.evaluate(X[kept], Y[kept])
