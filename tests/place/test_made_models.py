"""A module that a function has made is made where it is needed: none is pickled.

Modules with parametrizations, which torch does not pickle, are used as others.
"""

import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from daskdl import Checkpoint, GradientSharing, ModelError, ParameterAveraging, Trainer
from tests.support.problems import (
    MODELS,
    kept,
    locked,
    mlp,
    parameters_of,
    plain_loop,
    rows,
    sgd,
    trainer,
)

X, Y = rows(160)


class Own(nn.Module):
    """With all that is state, and a lock."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
        # Of generators that no seed of the trainer reaches.
        draw = np.random.default_rng().normal
        self.first, self.last = nn.Linear(20, 20), nn.Linear(20, 4)
        self.second = nn.Linear(20, 20)
        self.second.weight = self.first.weight
        shift = torch.from_numpy(draw(size=20).astype(np.float32))
        self.register_buffer("shift", shift, persistent=False)
        self.register_buffer("scale", torch.tensor(draw()).float())
        self.factor = 1.0

    def forward(self, x):
        x = self.second(self.first(x) + self.shift).tanh() * self.scale
        return self.factor * self.last(x)


KINDS = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


class Symmetric(nn.Module):
    """A parametrization of a user's own."""

    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def maker(kind):
    """A function that makes a network with it; its own layer has another one too."""

    def make():
        first = KINDS[kind](nn.Linear(20, 20))
        second = nn.Linear(20, 20)
        parametrize.register_parametrization(second, "weight", Symmetric())
        return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(20, 4))

    return make


EVERY = {model.__name__: model for model in MODELS} | {k: maker(k) for k in KINDS}


@pytest.mark.parametrize(
    ("model", "master"),
    [
        *(pytest.param(m, GradientSharing, id=name) for name, m in EVERY.items()),
        *((EVERY[name], ParameterAveraging) for name in ("locked", "orthogonal")),
    ],
)
def test_two_replicas_train_and_the_trained_model_is_used(model, master):
    fitted = trainer(False, model=model, master=master(replicas_per_worker=2))

    first = fitted.fit(X, Y, epochs=2, validation=(X, Y))
    second = fitted.fit(X, Y, epochs=2, validation=(X, Y))

    assert second[-1]["loss"] < first[0]["loss"]
    with torch.no_grad():
        output = fitted.model_.eval()(torch.from_numpy(X))
    np.testing.assert_allclose(fitted.predict(X), output, rtol=1e-4, atol=1e-5)
    loss = nn.functional.cross_entropy(output, torch.from_numpy(Y)).item()
    assert fitted.evaluate(X, Y)["loss"] == pytest.approx(loss, rel=1e-4)
    assert second[-1]["val_loss"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("model", MODELS)
class TestEveryKind:
    def test_one_replica_is_a_plain_loop(self, model):
        fitted = trainer(False, model=model, master=kept())
        expected = plain_loop(model, sgd, seed=0, epochs=2, batch_size=16, x=X, y=Y)

        fitted.fit(X, Y, epochs=2, batch_size=16, shuffle=False)

        for name, value in parameters_of(fitted.model_).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-6)

    def test_a_checkpoint_and_a_save_are_continued(self, model, tmp_path):
        point = {"callbacks": [Checkpoint(str(tmp_path / "checkpoints"))]}
        trainer(False, model=model, **point).fit(X, Y, epochs=1)
        fitted = trainer(False, model=model, **point)
        assert len(fitted.fit(X, Y, epochs=2, resume=True)) == 2
        fitted.save(tmp_path / "save")

        loaded = Trainer.load(
            tmp_path / "save", client=False, model=model, optimizer=sgd, callbacks=[]
        )

        assert loaded.evaluate(X, Y)["loss"] == fitted.evaluate(X, Y)["loss"]
        loaded.fit(X, Y)


class Other:
    """No module."""


def still(parameters):
    return torch.optim.SGD(parameters, lr=0.0)


def test_replicas_begin_with_the_state_of_the_first_module_that_was_made():
    modules = []

    def model():
        modules.append(Own())
        return modules[-1]

    fitted = trainer(
        False,
        model=model,
        optimizer=still,
        master=ParameterAveraging(replicas_per_worker=2),
    )
    fitted.fit(X, Y, batch_size=16, validation=(X, Y))

    assert len(modules) > 2
    assert fitted.model_ is modules[0]
    expected = modules[0](torch.from_numpy(X))
    loss = nn.functional.cross_entropy(expected, torch.from_numpy(Y)).item()
    assert fitted.history_[-1]["val_loss"] == pytest.approx(loss, rel=1e-4)
    np.testing.assert_allclose(
        fitted.predict(X), expected.detach(), rtol=1e-4, atol=1e-5
    )


def test_a_function_that_cannot_be_pickled_is_called_in_this_process():
    lock = threading.Lock()

    def model():
        module = mlp()
        module.lock = lock
        return module

    fitted = trainer(False, model=model, master=kept(replicas_per_worker=2))
    history = fitted.fit(X, Y, epochs=3)

    assert history[-1]["loss"] < history[0]["loss"]
    assert fitted.model_.lock is lock
    assert len(fitted.predict(X)) == len(X)


@pytest.mark.parametrize(
    ("make_another", "message"),
    [
        (
            lambda: nn.Linear(20, 5),
            "weight is a parameter float32 (5, 20), but was ",
        ),
        (lambda: nn.Linear(20, 4, bias=False), "bias is missing, but was a parameter"),
        (lambda: nn.Linear(20, 4).double(), "parameter float64 (4, 20), but was a"),
        (lambda: nn.Bilinear(20, 1, 4), "the module is a Bilinear, but was a Linear"),
        (Other, "must return a torch.nn.Module, got <"),
    ],
    ids=["shape", "fewer", "dtype", "class", "kind"],
)
def test_a_function_that_makes_another_module_each_time_is_refused(
    make_another, message
):
    modules = []

    def model():
        modules.append(nn.Linear(20, 4) if not modules else make_another())
        modules[-1].lock = threading.Lock()
        return modules[-1]

    with pytest.raises(ModelError) as caught:
        trainer(False, model=model).fit(X, Y)

    assert message in str(caught.value)


@pytest.mark.parametrize("part", [False, True], ids=["module", "layer"])
def test_a_function_that_returns_the_same_module_again_is_refused(part):
    same = locked()

    def model():
        return nn.Sequential(same) if part else same

    with pytest.raises(
        ModelError, match=r"model must return a new module at each call"
    ):
        trainer(False, model=model).fit(X, Y)
