"""Keras models are trained by threads of this process."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import daskdl
from daskdl.keras import CrossEntropyOfProbabilities, KerasModule, from_config
from daskdl.keras.module import library
from tests.support.keras_models import MODELS, sgd
from tests.support.problems import kept, rows

keras = library()
X, Y = rows(count=160)


def trainer(model, loss=None, optimizer=sgd, *, replicas=2, **options):
    loss = loss or CrossEntropyOfProbabilities()
    master = kept(replicas_per_worker=replicas, max_staleness=0)
    return daskdl.Trainer(
        model, loss, optimizer, master=master, client=False, progress=False, **options
    )


def small(**options):
    layers = [
        keras.Input((20,)),
        keras.layers.Dense(16, activation="relu", **options),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(4),
    ]
    return keras.Sequential(layers)


@pytest.mark.parametrize("named", [False, True], ids=["tuple", "dict"])
def test_two_inputs_and_two_outputs_learn(named):
    left, right = X[:, :4], X[:, 4:7]
    inputs = {"left": left, "right": right} if named else (left, right)
    labels = (left.sum(axis=1, keepdims=True), Y % 3)

    def loss(outputs, labels):
        score, kind = outputs
        wrong = functional.nll_loss(kind.log(), labels[1])
        return functional.mse_loss(score, labels[0]) / 10 + wrong

    fitted = trainer(from_config(MODELS / "two_by_two_keras3.json"), loss)

    history = fitted.fit(inputs, labels, epochs=4, batch_size=16)
    predicted = fitted.predict(inputs)

    assert history[-1]["loss"] < 0.8 * history[0]["loss"]
    by_keras = fitted.model_.predict([left, right], verbose=0)
    for actual, expected in zip(predicted, by_keras, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


def test_a_keras_model_is_taken_as_it_is():
    model = small()
    before = model.get_weights()
    fitted = trainer(model, nn.CrossEntropyLoss())

    first = fitted.fit(X, Y, epochs=8, batch_size=16)
    second = fitted.fit(X, Y, batch_size=16)

    assert isinstance(fitted.model_, KerasModule)
    # Not by its accuracy: Keras keeps 0.99 of its running statistics at each step.
    assert second[0]["loss"] < 0.8 * first[0]["loss"]
    for weight, kept_as in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, kept_as)


def test_one_replica_is_a_plain_loop(one_thread):
    model = KerasModule(small(kernel_regularizer="l2"))
    fitted = trainer(model, nn.CrossEntropyLoss(), replicas=1)

    fitted.fit(X, Y, epochs=2, batch_size=16, shuffle=False)

    optimizer = sgd(model.parameters())
    torch.manual_seed(0)
    for start in [*range(0, len(X), 16)] * 2:
        optimizer.zero_grad()
        x, y = torch.from_numpy(X[start : start + 16]), Y[start : start + 16]
        loss = functional.cross_entropy(model(x), torch.from_numpy(y))
        (loss + model.penalty()).backward()
        optimizer.step()
    expected = model.state_dict()
    trained = fitted.model_.state_dict()
    assert all(torch.equal(trained[name], expected[name]) for name in expected)


def test_a_plan_is_made_for_a_keras_model(monkeypatch):
    monkeypatch.setattr("daskdl.planning.measure.TIMED_S", 0.0)
    network = daskdl.Network(1e9, 1e-3)

    planned = daskdl.plan(small(), (X[:32], X[:32, :4]), workers=[1, 4], link=network)

    assert [row.workers for row in planned.rows] == [1, 4]
