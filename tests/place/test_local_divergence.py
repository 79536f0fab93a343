"""Steps that are too long to be sent, though the loss is a number all the time."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import DivergedError, GradientSharing, ParameterAveraging
from tests.support.problems import kept, parameters_of, start_of, trainer

X = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
POSITIVE = X @ np.array([1.0, -1.0, 2.0, 0.5], np.float32) > 0
ONE = POSITIVE.astype(np.float32)[:, None], nn.BCEWithLogitsLoss()
TWO = POSITIVE.astype(np.int64), nn.CrossEntropyLoss()
FAR = (
    r"parameters moved by \d(\.\d+)?e\+\d+, farther than updates can say, which is "
    r"2\*\*31 - 1 of the largest quanta, 0\.25, at step \d+ of replica \d, in epoch 0; "
    r".*lower the learning rate, 1e\+30; set clip_grad_norm"
)


def sgd(rate):
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)


def linear(outputs):
    return lambda: nn.Linear(4, outputs)


def own(rate, loss, outputs, master):
    return trainer(
        False, model=linear(outputs), loss=loss, optimizer=sgd(rate), master=master
    )


@pytest.mark.parametrize(("outputs", "problem"), [(1, ONE), (2, TWO)])
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
def test_a_rate_whose_steps_no_update_can_say_ends_the_run(master, outputs, problem):
    y, loss = problem
    hopeless = own(1e30, loss, outputs, master)

    with pytest.raises(DivergedError) as raised:
        hopeless.fit(X, y, epochs=4, batch_size=16)

    assert re.search(FAR, str(raised.value))
    # What all agreed on at the start, on the grid.
    start = parameters_of(start_of(linear(outputs)))
    for name, value in parameters_of(hopeless.model_).items():
        np.testing.assert_allclose(value, start[name], rtol=0, atol=2**-24)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("way", [GradientSharing, ParameterAveraging])
def test_parameters_that_are_not_finite_after_the_last_step_end_the_run(way, replicas):
    """No loss is computed with them any more."""

    def steep(model, batch):
        return 1e20 * model(batch[0]).mean()

    endless = trainer(
        False,
        model=linear(1),
        loss=None,
        step=steep,
        optimizer=sgd(1e30),
        master=way(replicas_per_worker=replicas),
    )

    with pytest.raises(DivergedError, match=r"parameters became (inf|nan) at step 1"):
        endless.fit(X, epochs=1, batch_size=len(X))  # one step of one replica
