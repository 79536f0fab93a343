"""How much longer steps of Adam would be with the batches of all replicas."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from daskdl.training.optimizer_step import GradientNoise, scaled

SIZE = 400


def noise_of(steps, *signals, size=SIZE):
    """After gradients that are 1 with this share of their squares, and else noise."""
    parameters = [nn.Parameter(torch.zeros(size)) for _ in signals]
    noise, random = GradientNoise(parameters), np.random.default_rng(0)
    for step in range(1, steps + 1):
        for parameter, signal in zip(parameters, signals, strict=True):
            drawn = random.normal(size=size) * math.sqrt(1 - signal)
            parameter.grad = torch.tensor(math.sqrt(signal) + drawn).float()
        noise.look_(step)
    return noise


@pytest.mark.parametrize("replicas", [1, 2, 16])
@pytest.mark.parametrize("signal", [0.0, 0.1, 0.5, 1.0])
def test_the_factor_is_that_of_the_noise(signal, replicas):
    factor = noise_of(200, signal).rate_factor(replicas)

    assert factor == pytest.approx(
        1 / math.sqrt(signal + (1 - signal) / replicas), rel=0.05
    )


def test_each_tensor_counts_by_its_parameters():
    noisy, mixed = noise_of(64, 0.0), noise_of(64, 0.0, 1.0)

    assert mixed.rate_factor(4) == pytest.approx(
        (noisy.rate_factor(4) + 1) / 2, rel=0.02
    )


def test_of_a_large_tensor_a_sample_is_read():
    assert noise_of(64, 0.1, size=10**6).rate_factor(4) == pytest.approx(
        1 / math.sqrt(0.1 + 0.9 / 4), rel=0.02
    )


def test_without_gradients_nothing_is_known():
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, 2))]
    parameters[1].grad = torch.sparse_coo_tensor(
        [[0]], [[1.0, 2.0]], (3, 2), check_invariants=True
    )
    noise = GradientNoise(parameters)

    for step in range(10):
        noise.look_(step)

    assert noise.rate_factor(4) == 1


def test_an_overflow_is_left_out():
    noise = noise_of(32, 0.5)
    known = noise.rate_factor(4)

    [parameter] = noise.parameters
    parameter.grad = torch.full((SIZE,), math.inf)
    noise.look_(33)

    assert noise.rate_factor(4) == known


def test_steps_apart_are_not_compared():
    noise = noise_of(32, 0.5)
    known = noise.rate_factor(4)

    noise.look_(34)  # the gradients of step 32 once more
    noise.forget_step_()
    noise.look_(35)

    assert noise.rate_factor(4) == known


def test_restored_it_continues():
    whole, half = noise_of(32, 0.3), noise_of(32, 0.3)
    fresh = GradientNoise(half.parameters)
    fresh.restore_(half.values())
    for one in (whole, fresh):
        one.forget_step_()
        for step in (33, 34):
            one.parameters[0].grad = torch.arange(SIZE) + float(step)
            one.look_(step)

    assert fresh.rate_factor(8) == whole.rate_factor(8) != half.rate_factor(8)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_decoupled_weight_decay_stays_as_it_is(kind):
    weights = {}
    for rate_factor in (1, 3):
        weight = nn.Parameter(torch.ones(1))
        optimizer = kind([weight], lr=0.01, weight_decay=0.1)
        weight.grad = torch.full((1,), 100.0)
        with scaled(optimizer, 1.0, rate_factor):
            optimizer.step()
        weights[rate_factor] = weight.item()
        assert optimizer.param_groups[0]["lr"] == 0.01
        assert optimizer.param_groups[0]["weight_decay"] == 0.1

    decay = 0.01 * 0.1 if kind is torch.optim.AdamW else 0
    assert weights[1] == pytest.approx(1 - decay - 0.01, rel=1e-5)
    assert weights[3] == pytest.approx(1 - decay - 0.03, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "decoupled"),
    [
        (torch.optim.AdamW, True),
        (torch.optim.Adafactor, True),
        (torch.optim.Adam, False),
    ],
)
def test_decoupled_weight_decay_is_known_without_an_option(kind, decoupled):
    optimizer = kind([nn.Parameter(torch.ones(1))], weight_decay=0.1)
    [group] = optimizer.param_groups
    group.pop("decoupled_weight_decay", None)  # as before torch 2.7

    with scaled(optimizer, 1.0, 2.0):
        assert group["weight_decay"] == (0.05 if decoupled else 0.1)
    assert group["weight_decay"] == 0.1
