"""Keras models on workers that are processes of their own."""

import numpy as np
import pytest

from daskdl import DaskDLError, Trainer
from daskdl.keras import CrossEntropyOfProbabilities, from_config
from daskdl.keras.module import library
from tests.support.clusters import cluster_of
from tests.support.keras_models import MODELS, adam, pictures
from tests.support.problems import kept

pytestmark = pytest.mark.slow

X, Y = pictures()


def trainer(client):
    """Of the network of eight convolutions, in step."""
    return Trainer(
        lambda: from_config(MODELS / "cifar10_keras2.json"),
        CrossEntropyOfProbabilities(),
        adam,
        master=kept(max_staleness=0),
        client=client,
        progress=False,
    )


def test_two_workers_train_the_network_and_keras_says_the_same(client, tmp_path):
    fitted = trainer(client)

    history = fitted.fit(X, Y, epochs=6, batch_size=8)
    predicted = fitted.predict(X)
    fitted.model_.save(tmp_path / "trained.keras")

    assert history.column("replicas") == [2] * 6
    assert history[-1]["loss"] < 0.97 * history[0]["loss"]
    loaded = library().saving.load_model(tmp_path / "trained.keras")
    for model in (fitted.model_, loaded):
        by_keras = model.predict(X, verbose=0)
        np.testing.assert_allclose(predicted, by_keras, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_workers_on_another_backend_say_so():
    with cluster_of(1, env={"KERAS_BACKEND": "jax"}) as client:
        failing = trainer(client)

        with pytest.raises(DaskDLError, match="KERAS_BACKEND is 'jax' in this process"):
            failing.fit(X, Y, batch_size=8)
