"""Models of several inputs get a dict by keyword and a tuple by position."""

import re
from collections import UserDict, namedtuple

import dask.array as da
import numpy as np
import pytest
import torch
from torch import nn

import daskdl
from daskdl.errors import ModelError
from tests.support.problems import trainer

A = np.arange(12, dtype=np.float32).reshape(6, 2)
B = A[::-1] * 3
Pair = namedtuple("Pair", ["b", "a"])
Other = namedtuple("Other", ["left", "right"])


class Both(nn.Module):
    def forward(self, a, b, scale=None):
        return a - (b if scale is None else b * scale)


class Named(nn.Module):
    def forward(self, *, a, b):
        return a - b


class Listed(nn.Module):
    def forward(self, *inputs):
        return inputs[0] - inputs[1]


class Keywords(nn.Module):
    def forward(self, **batch):
        return batch["a"] - batch["b"]


class Batch(nn.Module):
    def forward(self, batch, scale=None):
        a, b = batch.values() if isinstance(batch, dict) else batch
        return a - b


class Input(nn.Module):
    def forward(self, a):
        return a["a"] - a["b"]


class Whole(nn.Module):
    def forward(self, a, /):
        return a["a"] * 2


class Scripted(nn.Module):
    def forward(self, a, b):
        return a - b


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def predict(model, X, **options):
    return daskdl.predict(model, X, client=False, batch_size=4, **options)


@pytest.mark.parametrize(
    ("model", "X"),
    [
        (Both(), {"b": B, "a": A}),
        (Both(), (A, B)),
        (Both(), {"b": B * 2, "scale": np.full((6, 1), 0.5), "a": A}),
        (Both(), (A, B * 2, np.full((6, 1), 0.5))),
        (Both(), Pair(B, A)),
        (Both(), Other(A, B)),
        (Named(), {"b": B, "a": A}),
        (Listed(), (A, B)),
        (Keywords(), {"b": B, "a": A}),
        (Wrapper(Both()), {"b": B, "a": A}),
        (Wrapper(Wrapper(Both())), (A, B)),
        (Wrapper(nn.Sequential(Batch())), (A, B)),
        (nn.Sequential(Batch(), nn.Identity()), (A, B)),
        (Batch(), {"one": A, "other": B}),
        (Batch(), {"one": A, "scale": B}),
        (Input(), {"a": A, "b": B}),
    ],
)
def test_inputs_are_passed_as_forward_takes_them(model, X):
    np.testing.assert_allclose(predict(model, X), A - B)


@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
@pytest.mark.parametrize("X", [{"b": B, "a": A}, (A, B)], ids=["dict", "tuple"])
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda: torch.jit.script(Scripted()),
        lambda: torch.compile(Scripted(), backend="eager"),
        lambda: nn.DataParallel(Scripted()),
    ],
    ids=["script", "compile", "parallel"],
)
def test_the_forward_of_a_wrapped_model_decides(wrapped, X):
    np.testing.assert_allclose(predict(wrapped(), X), A - B)


def test_an_argument_without_a_name_gets_the_whole_dict():
    np.testing.assert_allclose(predict(Whole(), {"a": A}), A * 2)


@pytest.mark.parametrize(
    ("model", "X", "message"),
    [
        (Both(), {"a": A, "c": B}, "forward of Both takes 'a', 'b', 'scale', but X has "
         "'a', 'c': 'c' is none of them, 'b' is missing; rename the keys of X to"),
        (Both(), {"a": A}, "but X has 'a': 'b' is missing; rename"),
        (Both(), (A, B, A, B), "takes 'a', 'b', 'scale', but X is a tuple of 4; pass "
         "one value for each argument, or a dict with these keys"),
        (Batch(), {"batch": A, "scales": B}, "'scales' is none of them; rename"),
    ],
    ids=["other key", "missing key", "long tuple", "batch"],
)  # fmt: skip
def test_inputs_that_nearly_fit_are_refused_by_name(model, X, message):
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        predict(model, X)
    assert str(caught.value).startswith("forward of ")


class Towers(nn.Module):
    """Of two inputs, whose order matters."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(2, 3), nn.Linear(2, 3)
        self.dropout = nn.Dropout(0.1)

    def forward(self, user, item):
        return self.left(user) - 2 * self.dropout(self.right(item))


class OneDict(Towers):
    def forward(self, batch, /):
        return super().forward(batch["user"], batch["item"])


LABELS = np.arange(6) % 3
BY_NAME = {"item": B / 30, "user": A / 10}


@pytest.mark.parametrize(
    "X",
    [BY_NAME, (A / 10, B / 30), UserDict(BY_NAME)],
    ids=["dict", "tuple", "mapping"],
)
def test_all_that_a_trainer_does_passes_them_alike(X):
    def results(model, X):
        fitted = trainer(False, model=model)
        fitted.fit(X, LABELS, epochs=2, batch_size=4, validation=(X, LABELS))
        with fitted.predictor() as predictor:
            served = predictor(X)
        return [
            fitted.history_.column("val_loss"),
            fitted.evaluate(X, LABELS, metrics="classification")["accuracy"],
            fitted.score_examples(X, LABELS),
            fitted.predict(X),
            served,
        ]

    expected = results(OneDict, BY_NAME)

    for actual, by_name in zip(results(Towers, X), expected, strict=True):
        np.testing.assert_allclose(actual, by_name, rtol=1e-6)


def test_lazy_collections_are_passed_by_keyword():
    lazy = {name: da.from_array(x, chunks=(4, 2)) for name, x in BY_NAME.items()}
    model = Towers().eval()
    expected = predict(model, BY_NAME)

    np.testing.assert_allclose(predict(model, lazy), expected, rtol=1e-6)
