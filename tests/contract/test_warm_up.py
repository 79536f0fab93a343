"""Warming up leaves everything as it was."""

import functools
import random

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import GradientSharing, codec
from daskdl.data.inputs import ReadOptions
from daskdl.objective import OwnStep
from daskdl.training.optimizer_step import Stepping
from daskdl.training.replica import warm_up
from tests.support.problems import replica_spec

CPU = torch.device("cpu")


class Counting(nn.Module):
    """A model with parameters, buffers and dropout, which uses the random state."""

    training_modes = ()  # of all calls, of copies too, where a test wants them

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, x):
        Counting.training_modes += (self.training,)
        return self.layers(x)


def spec(transform=None, **changes):
    options = {"optimizer": functools.partial(torch.optim.Adam, lr=0.1), **changes}
    rows = np.ones((2, 3), np.float32), np.array([0, 3])
    return replica_spec(
        Counting(), read=ReadOptions(32, transform), rows=rows, **options
    )


def test_the_model_makes_a_step_and_stays_unchanged(monkeypatch):
    steps = []
    monkeypatch.setattr(Counting, "training_modes", ())

    class Noted(torch.optim.Adam):
        def step(self):
            steps.append(
                [p.grad is not None for g in self.param_groups for p in g["params"]]
            )
            super().step()

    warmed = spec(optimizer=Noted)
    before = {k: v.clone() for k, v in warmed.model.state_dict().items()}
    state = torch.get_rng_state()

    warm_up(warmed, CPU)

    assert Counting.training_modes == (True,)
    assert steps == [[True] * 4]
    for name, value in warmed.model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert all(p.grad is None for p in warmed.model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_step_has_the_options_of_training():
    seen = []

    def step(model, batch):
        x, y = batch
        output = model(x)
        seen.append((output.dtype, y.dtype))
        return output.float().mean()

    stepping = Stepping(autocast=torch.bfloat16, clip_grad_norm=1.0)
    warm_up(spec(objective=OwnStep(step), stepping=stepping), CPU)

    assert seen == [(torch.bfloat16, torch.int64)]


@pytest.mark.parametrize("apply", ["eager", "strict"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_exchange_encodes_and_applies_an_update(apply, dtype, monkeypatch):
    bodies, framed = [], codec.framed

    def recorded(stamp, threshold, body):
        bodies.append(body)
        return framed(stamp, threshold, body)

    monkeypatch.setattr(codec, "framed", recorded)

    GradientSharing(apply=apply).warm_up(CPU, dtype)

    assert [(body.entries, body.kind.name) for body in bodies] == [(64, "LEVELS")]


def test_a_random_transform_does_not_change_random_states():
    def noisy(batch):
        noise = torch.rand(1) + random.random() + np.random.rand()
        return (batch[0] + noise).float(), batch[1]

    def states():
        legacy = np.random.get_state()[1:]
        return torch.get_rng_state().tolist(), random.getstate(), legacy

    warmed = spec(transform=noisy)
    before = states()

    warm_up(warmed, CPU)

    np.testing.assert_equal(states(), before)
