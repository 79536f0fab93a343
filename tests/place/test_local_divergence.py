"""Steps that are too long to be sent, with a finite loss."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import DivergedError, GradientSharing, ParameterAveraging
from tests.support.problems import kept, parameters_of, start_of, trainer

X = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
POSITIVE = X @ np.array([1.0, -1.0, 2.0, 0.5], np.float32) > 0
FAR = (
    r"parameters moved by \d(\.\d+)?e\+\d+, farther than updates can express, which is "
    r"2\*\*31 - 1 of the largest quanta, 0\.25, at step \d+ of replica \d, in epoch 0; "
    r".*lower the learning rate, 1e\+30; set clip_grad_norm"
)


def linear():
    return nn.Linear(4, 1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e30)


@pytest.mark.parametrize(
    "master",
    [
        GradientSharing(replicas_per_worker=2),
        kept(replicas_per_worker=2),
        kept(replicas_per_worker=2, apply="strict"),
        GradientSharing(replicas_per_worker=2, warmup_steps=1000),
    ],
    ids=["clipped", "kept", "strict", "dense"],
)
def test_steps_too_long_for_an_update_end_the_run(master):
    loss = nn.BCEWithLogitsLoss()
    interrupted = trainer(False, model=linear, loss=loss, optimizer=sgd, master=master)

    with pytest.raises(DivergedError) as raised:
        interrupted.fit(
            X, POSITIVE.astype(np.float32)[:, None], epochs=4, batch_size=16
        )

    assert re.search(FAR, str(raised.value))
    # What all agreed on at the start, on the grid.
    start = parameters_of(start_of(linear))
    for name, value in parameters_of(interrupted.model_).items():
        np.testing.assert_allclose(value, start[name], rtol=0, atol=2**-24)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("way", [GradientSharing, ParameterAveraging])
def test_parameters_that_are_not_finite_after_the_last_step_end_the_run(way, replicas):
    """No later loss would show them."""

    def steep(model, batch):
        return 1e20 * model(batch[0]).mean()

    master = way(replicas_per_worker=replicas)
    failing = trainer(
        False, model=linear, loss=None, step=steep, optimizer=sgd, master=master
    )

    with pytest.raises(DivergedError, match=r"parameters became (inf|nan) at step 1"):
        failing.fit(X, epochs=1, batch_size=len(X))  # one step of one replica
