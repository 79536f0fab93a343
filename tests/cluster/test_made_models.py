"""A module that cannot be pickled, on workers that are processes: they make it."""

import threading

import dask.array
import numpy as np
import pytest
import torch
from torch import nn

from daskdl import ModelError
from tests.support.clusters import Script, enough
from tests.support.problems import MODELS, hooked, locked, mlp, rows, trainer

X, Y = rows(160)


@pytest.mark.parametrize(
    "model",
    [hooked, *(pytest.param(m, marks=pytest.mark.slow) for m in MODELS if m != hooked)],
)
def test_it_trains_scores_predicts_and_answers(client, model):
    fitted = trainer(client, model=model)

    fitted.fit(X, Y, epochs=2, validation=(X, Y))
    history = fitted.fit(X, Y, epochs=2, validation=(X, Y))

    assert history[-1]["replicas"] == 2
    with torch.no_grad():
        output = fitted.model_.eval()(torch.from_numpy(X))
    np.testing.assert_allclose(fitted.predict(X), output, rtol=1e-4, atol=1e-5)
    lazy = fitted.predict(dask.array.from_array(X, chunks=(50, -1)))
    np.testing.assert_allclose(client.gather(client.compute(lazy)), output, atol=1e-4)
    loss = nn.functional.cross_entropy(output, torch.from_numpy(Y)).item()
    assert fitted.evaluate(X, Y)["loss"] == pytest.approx(loss, rel=1e-4)
    assert history[-1]["val_loss"] == pytest.approx(loss, rel=1e-4)
    with fitted.predictor(replicas=2) as ask:
        np.testing.assert_allclose(ask(X[:8]), output[:8], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_joining_replica_makes_its_own_model(growing):
    script = Script(
        (1, lambda: growing.cluster.scale(2)),
        (lambda row: row["replicas"] == 2, enough),
    )

    fitted = script.run(trainer(growing, model=locked), X, Y)

    assert script.rows[-1]["replicas"] == 2
    assert len(fitted.predict(X)) == len(X)


def beyond_reach():
    """A function that no other process can call."""
    lock = threading.Lock()

    def model():
        model = mlp()
        model.lock = lock
        return model

    return model


def test_a_function_that_cannot_be_pickled_is_refused_before_a_worker_is_touched(
    untouched,
):
    message = (
        r"^model cannot be sent to the workers, because model\.lock \(a _thread\.lock"
        r"\) cannot be pickled: .*; nor can the function that creates the model: .*; "
        r"create it on first use"
    )
    with pytest.raises(ModelError, match=message):
        trainer(untouched, model=beyond_reach()).fit(X, Y)
