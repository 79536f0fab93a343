"""Parameter averaging among threads: what it computes, to the bit or to rounding."""

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import OptionError, ParameterAveraging
from tests.support.averaged import averaged_loop
from tests.support.problems import (
    adam,
    mlp,
    parameters_of,
    plain,
    plain_loop,
    rows,
    sgd,
    start_of,
    trainer,
)

X, Y = rows(count=330)


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 5)),
        nn.Conv2d(1, 6, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(120, 4),
    )


def with_buffers():
    # A bias before it has no gradient but rounding, which Adam would blow up.
    return nn.Sequential(
        nn.Linear(20, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
    )


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def averaging(replicas, **options):
    return ParameterAveraging(replicas_per_worker=replicas, **options)


def fitted(master, *, model=mlp, optimizer=sgd, x=X, y=Y, **options):
    own = trainer(False, master=master, model=model, optimizer=optimizer)
    options = {"epochs": 2, "batch_size": 16, "shuffle": False, **options}
    own.fit(x, y, **options)
    return own


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("model", [mlp, convolutional])
def test_averaging_each_step_of_plain_sgd_is_a_larger_batch(model, replicas):
    batch, steps = 10, 6
    x, y = X[: replicas * batch * steps], Y[: replicas * batch * steps]

    own = fitted(
        averaging(replicas, frequency=1),
        model=model,
        optimizer=plain,
        x=x,
        y=y,
        batch_size=batch,
    )

    # The t-th steps of all replicas together are the t-th step of one process.
    order = np.arange(len(x)).reshape(replicas, steps, batch).swapaxes(0, 1).ravel()
    expected = plain_loop(
        model,
        plain,
        seed=0,
        epochs=2,
        batch_size=replicas * batch,
        x=x[order],
        y=y[order],
    )
    got = parameters_of(own.model_)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6, atol=1e-6)


OPTIONS = {
    "as it is": {},
    "each its own optimizer": {"average_optimizer": False},
    "outer": {"outer": nesterov},
    "all in one epoch": {"frequency": 1000},
}


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        (mlp, sgd),
        (with_buffers, adam),
        pytest.param(mlp, adam, marks=pytest.mark.slow),
        pytest.param(with_buffers, sgd, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_uneven_replicas_average_as_written_down(model, optimizer, options):
    options = {"frequency": 2, **options}

    own = fitted(averaging(3, **options), model=model, optimizer=optimizer)

    expected = averaged_loop(
        (start_of(model), optimizer),
        X,
        Y,
        replicas=3,
        batch_size=16,
        epochs=2,
        **options,
    )
    got = parameters_of(own.model_)
    for name, value in parameters_of(expected).items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6)


def test_the_optimizer_of_the_trainer_is_the_averaged_one():
    own = fitted(averaging(2, frequency=2), optimizer=adam)

    states = own.optimizer_.state_dict()["state"]

    steps = {state["step"].item() for state in states.values()}
    assert steps == {2 * 11}  # the most that one replica has made, of 21 in an epoch


def test_the_history_tells_of_averagings():
    own = fitted(averaging(3, frequency=2), epochs=1, validation=(X, Y))

    row = own.history_[0]

    assert row["examples"] == len(X)
    assert (row["density"], row["replicas"]) == (1.0, 3)
    assert row["received_bytes"] > 0
    assert row["val_accuracy"] > 0.5
    assert "MEAN" in own.history_.steps.column("kind")


def test_parameters_of_half_precision_are_averaged_in_single():
    def half():
        return mlp().to(torch.bfloat16)

    own = trainer(False, master=averaging(2, frequency=2), model=half, optimizer=sgd)

    own.fit(torch.from_numpy(X).to(torch.bfloat16), Y, epochs=1, batch_size=16)

    assert {p.dtype for p in own.model_.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frequency": 0}, "frequency must be a whole number >= 1, got 0"),
        ({"average_optimizer": 1}, "average_optimizer must be True or False, got 1"),
        ({"outer": 0.7}, "outer must be a function .* got 0.7"),
        ({"compression": "gzip"}, "compression must be 'dense8' or None, got 'gzip'"),
        ({"compression": True}, "compression must be 'dense8' or None, got True"),
        ({"replicas_per_worker": 0}, "replicas_per_worker must be a whole number >= 1"),
        ({"min_replicas": 0}, "min_replicas must be a whole number >= 1"),
        ({"fan_out": 0}, "fan_out must be a whole number >= 1"),
        ({"rejoin_timeout": 0}, "rejoin_timeout must be seconds > 0 or None, got 0"),
    ],
    ids=repr,
)
def test_an_option_is_refused_by_name(options, message):
    with pytest.raises(OptionError, match=message):
        ParameterAveraging(**options)
