"""A model with parametrizations on workers that are processes."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from tests.support.problems import rows, trainer

X, Y = rows(160)


def test_it_trains_scores_and_predicts(client):
    own = trainer(
        client,
        model=lambda: nn.Sequential(
            weight_norm(nn.Linear(20, 16)), nn.ReLU(), spectral_norm(nn.Linear(16, 4))
        ),
    )

    own.fit(X, Y, epochs=2, validation=(X, Y))

    with torch.no_grad():
        output = own.model_.eval()(torch.from_numpy(X))
    np.testing.assert_allclose(own.predict(X), output, rtol=1e-4, atol=1e-5)
    loss = nn.functional.cross_entropy(output, torch.from_numpy(Y)).item()
    assert own.evaluate(X, Y)["loss"] == pytest.approx(loss, rel=1e-4)
