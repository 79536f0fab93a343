"""Parameter averaging among threads, compared with a plain reference."""

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import ParameterAveraging
from tests.support.averaged import averaged_loop
from tests.support.problems import (
    adam,
    mlp,
    nesterov,
    parameters_of,
    plain,
    plain_loop,
    rows,
    sgd,
    start_of,
    trainer,
)

X, Y = rows(count=330)
MANY = rows(count=960)


def with_buffers():
    # A bias before it has no gradient but rounding, which Adam would blow up.
    return nn.Sequential(
        nn.Linear(20, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
    )


def averaging(replicas, **options):
    return ParameterAveraging(replicas_per_worker=replicas, **options)


def fitted(master, *, model=mlp, optimizer=sgd, data=(X, Y), **options):
    fitted = trainer(False, master=master, model=model, optimizer=optimizer)
    options = {"epochs": 2, "batch_size": 16, "shuffle": False, **options}
    fitted.fit(*data, **options)
    return fitted


def check_close(trained, expected, **close):
    got = parameters_of(trained.model_)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, **close)


@pytest.mark.parametrize("replicas", [2, 4])
def test_averaging_each_step_of_plain_sgd_is_a_larger_batch(replicas):
    batch, steps = 10, 6
    x, y = X[: replicas * batch * steps], Y[: replicas * batch * steps]

    trained = fitted(
        averaging(replicas, frequency=1),
        optimizer=plain,
        data=(x, y),
        batch_size=batch,
    )

    # The t-th steps of all replicas together are the t-th step of one process.
    order = np.arange(len(x)).reshape(replicas, steps, batch).swapaxes(0, 1).ravel()
    loop = {"seed": 0, "epochs": 2, "batch_size": replicas * batch}
    expected = plain_loop(mlp, plain, **loop, x=x[order], y=y[order])
    check_close(trained, expected, rtol=1e-6, atol=1e-6)


OPTIONS = {
    "as it is": {},
    "each its own optimizer": {"average_optimizer": False},
    "outer": {"outer": nesterov},
    "all in one epoch": {"frequency": 1000},
}
MODELS = pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        (mlp, sgd),
        (with_buffers, adam),
        pytest.param(mlp, adam, marks=pytest.mark.slow),
        pytest.param(with_buffers, sgd, marks=pytest.mark.slow),
    ],
)


def check_averaged(trained, data, start, **options):
    """Check against the reference loop."""
    expected = averaged_loop(start, *data, replicas=3, batch_size=16, **options)
    check_close(trained, parameters_of(expected), rtol=1e-5, atol=1e-6)


@MODELS
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_uneven_replicas_average_like_a_reference_loop(model, optimizer, options):
    options = {"frequency": 2, **options}

    trained = fitted(averaging(3, **options), model=model, optimizer=optimizer)

    check_averaged(trained, (X, Y), (start_of(model), optimizer), epochs=2, **options)


@pytest.mark.slow
@MODELS
@pytest.mark.parametrize("frequency", [20, 1000], ids=["completed", "whole"])
def test_with_compression_the_mean_at_the_end_of_an_epoch_is_exact(
    model, optimizer, frequency
):
    master = averaging(3, frequency=frequency, compression="dense8")

    trained = fitted(master, model=model, optimizer=optimizer, data=MANY, epochs=1)

    start = (start_of(model), optimizer)
    check_averaged(trained, MANY, start, epochs=1, frequency=frequency)


@pytest.mark.slow
def test_one_replica_with_an_outer_optimizer_rounds_nothing():
    compressed, exact = (
        fitted(averaging(1, compression=kind, frequency=3, outer=nesterov))
        for kind in ("dense8", None)
    )

    check_close(compressed, parameters_of(exact.model_), rtol=0)


def wide():
    return nn.Sequential(
        nn.Linear(20, 256), nn.ReLU(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 4)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(plain, {}), (sgd, {}), (adam, {"average_optimizer": False})],
)
def test_compression_sends_about_a_quarter_of_the_bytes(optimizer, options):
    compressed, exact = (
        fitted(
            averaging(2, compression=kind, frequency=1, **options),
            model=wide,
            optimizer=optimizer,
            data=MANY,
        ).history_
        for kind in ("dense8", None)
    )

    for name in ("dense_bytes", "density", "examples"):
        assert compressed.column(name) == exact.column(name)
    # 30 averagings, and what is left over once as it is
    for name in ("sent_bytes", "received_bytes"):
        pairs = zip(compressed.column(name), exact.column(name), strict=True)
        assert max(few / many for few, many in pairs) < 0.27 + 1 / 30
    assert set(compressed.steps.column("kind")) == {"DENSE8"}
    assert 0 < min(compressed.steps.column("residual_norm")) < 0.1


def test_the_optimizer_of_the_trainer_is_the_averaged_one():
    trained = fitted(averaging(2, frequency=2), optimizer=adam)

    states = trained.optimizer_.state_dict()["state"]

    steps = {state["step"].item() for state in states.values()}
    assert steps == {2 * 11}  # the most that one replica has made, of 21 in an epoch


def test_the_history_has_the_columns_of_averaging():
    trained = fitted(averaging(3, frequency=2), epochs=1, validation=(X, Y))

    row = trained.history_[0]

    assert row["examples"] == len(X)
    assert (row["density"], row["replicas"]) == (1.0, 3)
    assert row["received_bytes"] > 0
    assert row["val_accuracy"] > 0.5
    assert "MEAN" in trained.history_.steps.column("kind")


def test_parameters_of_half_precision_are_averaged_in_single():
    data = torch.from_numpy(X).to(torch.bfloat16), Y

    trained = fitted(
        averaging(2, frequency=2), model=lambda: mlp().bfloat16(), data=data
    )

    assert {p.dtype for p in trained.model_.parameters()} == {torch.bfloat16}
