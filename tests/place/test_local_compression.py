"""Parameter averaging with rounded differences, among threads."""

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import Checkpoint, ParameterAveraging
from tests.support.averaged import averaged_loop
from tests.support.problems import (
    adam,
    mlp,
    parameters_of,
    plain,
    rows,
    sgd,
    start_of,
    trainer,
)

pytestmark = pytest.mark.slow

X, Y = rows(count=960)


def wide():
    return nn.Sequential(
        nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 4)
    )


def with_buffers():
    return nn.Sequential(
        nn.Linear(20, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
    )


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.5, nesterov=True)


def averaging(replicas, compression="dense8", **options):
    return ParameterAveraging(
        replicas_per_worker=replicas, compression=compression, **options
    )


def fitted(master, *, model=mlp, optimizer=sgd, **options):
    own = trainer(False, master=master, model=model, optimizer=optimizer)
    options = {"epochs": 2, "batch_size": 16, "shuffle": False, **options}
    own.fit(X, Y, **options)
    return own


def differ(one, two):
    """The largest difference of any parameter or buffer."""
    others = parameters_of(two.model_)
    return max(
        np.abs(value - others[name]).max()
        for name, value in parameters_of(one.model_).items()
    )


def test_one_replica_with_an_outer_optimizer_rounds_nothing():
    own, other = (
        fitted(averaging(1, compression, frequency=3, outer=nesterov))
        for compression in ("dense8", None)
    )

    assert differ(own, other) == 0


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        (mlp, sgd),
        (with_buffers, adam),
        pytest.param(mlp, adam, marks=pytest.mark.slow),
        pytest.param(with_buffers, sgd, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("frequency", [20, 1000], ids=["completed", "whole"])
def test_at_the_end_of_an_epoch_the_mean_is_exact(model, optimizer, frequency):
    options = {"frequency": frequency, "epochs": 1}

    own = trainer(
        False,
        master=averaging(3, frequency=frequency),
        model=model,
        optimizer=optimizer,
    )
    own.fit(X, Y, epochs=1, batch_size=16, shuffle=False)

    made = (start_of(model), optimizer)
    expected = averaged_loop(made, X, Y, replicas=3, batch_size=16, **options)
    got = parameters_of(own.model_)
    for name, value in parameters_of(expected).items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(plain, {}), (sgd, {}), (adam, {"average_optimizer": False})],
)
def test_the_history_counts_about_a_quarter_of_the_bytes(optimizer, options):
    own, other = (
        fitted(
            averaging(2, compression, frequency=1, **options),
            model=wide,
            optimizer=optimizer,
            epochs=2,
        ).history_
        for compression in ("dense8", None)
    )

    for name in ("dense_bytes", "density", "examples"):
        assert own.column(name) == other.column(name)
    # 30 averagings, and what is left over once as it is
    for name in ("sent_bytes", "received_bytes"):
        pairs = zip(own.column(name), other.column(name), strict=True)
        assert max(few / many for few, many in pairs) < 0.27 + 1 / 30
    assert set(own.steps.column("kind")) == {"DENSE8"}
    assert 0 < min(own.steps.column("residual_norm")) < 0.1
    assert sum(own.steps.column("sent_bytes")) < 0.27 * sum(
        other.steps.column("sent_bytes")
    )


@pytest.mark.parametrize("options", [{}, {"outer": nesterov}], ids=["mean", "outer"])
def test_a_fit_that_is_resumed_goes_on_bit_for_bit(tmp_path, options):
    master = averaging(3, frequency=2, **options)
    whole, first, second = (
        trainer(False, master=master, model=with_buffers) for _ in range(3)
    )
    first.callbacks = [Checkpoint(str(tmp_path))]

    whole.fit(X, Y, epochs=3, batch_size=16)
    first.fit(X, Y, epochs=1, batch_size=16)
    second.fit(X, Y, epochs=3, batch_size=16, resume=str(tmp_path))

    assert differ(whole, second) == 0
