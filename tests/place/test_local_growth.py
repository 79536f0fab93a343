"""Parameters that grow far beyond where they were at the start."""

import numpy as np
import torch
from torch import nn

from tests.support.problems import kept, trainer

X = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
WEIGHTS = np.array([[300.0], [-1000.0], [2000.0], [500.0]], np.float32)
Y = X @ WEIGHTS


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def linear():
    return nn.Linear(4, 1, bias=False)  # weights below 1/2


def test_what_all_have_follows_them():
    """The grid is coarsened at meetings: its steps are counted in 32 bits."""
    master = kept(replicas_per_worker=2, warmup_steps=1000)  # sends what it has
    own = trainer(False, model=linear, loss=nn.MSELoss(), optimizer=sgd, master=master)

    history = own.fit(X, Y, epochs=6, batch_size=8, validation=(X, Y))

    assert history[-1]["val_loss"] < 1e-3 * history[0]["loss"]
    np.testing.assert_allclose(own.model_.weight.detach().T, WEIGHTS, rtol=1e-2)
