"""The norm of a step's gradients, and where its loss is computed."""

import copy
import math

import pytest
import torch
from torch import nn

from daskdl.training.optimizer_step import Stepper, Stepping


def batches(*sizes):
    """Batches of so many rows, all different."""
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 3, generator=draw), torch.randn(n, 2, generator=draw))
        for n in sizes
    ]


def linear():
    module = nn.Linear(3, 2)
    torch.nn.init.constant_(module.weight, 0.25)
    torch.nn.init.constant_(module.bias, -0.5)
    return module


def stepper(module, lr=0.5, **options):
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    return Stepper(
        module, nn.MSELoss(), optimizer, Stepping(**options), torch.device("cpu")
    )


def gradients(module):
    return torch.cat([p.grad.reshape(-1) for p in module.parameters()])


def test_a_loss_with_weights_goes_where_the_model_is():
    loss = nn.CrossEntropyLoss(weight=torch.ones(2))
    meta = torch.device("meta")
    module = copy.deepcopy(linear()).to(meta)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    Stepper(module, loss, optimizer, Stepping(), meta)

    assert loss.weight.device == meta


class TestGradientNorm:
    @pytest.mark.parametrize("clip", [None, 1e-3])
    def test_it_is_that_of_all_gradients_before_they_are_clipped(self, clip):
        module = linear()
        own = stepper(module, clip_grad_norm=clip)
        own.backward(batches(4, 4))

        assert own.gradient_norm() == pytest.approx(float(gradients(module).norm()))

    def test_it_is_without_the_factor_of_float16(self):
        plain, scaled_up = stepper(linear()), stepper(linear(), autocast=torch.float16)
        plain.backward(batches(4))
        while scaled_up.backward(batches(4)) and scaled_up.gradient_norm() == math.inf:
            scaled_up.update(1.0)  # moves nothing, but the factor

        norm = plain.gradient_norm()
        assert scaled_up.gradient_norm() == pytest.approx(norm, rel=0.01)

    def test_a_parameter_without_a_gradient_counts_for_nothing(self):
        own = stepper(linear())

        assert own.gradient_norm() == 0.0
