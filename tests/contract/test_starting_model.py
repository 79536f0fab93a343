"""The model that a fit begins with."""

import random

import pytest
import torch
from torch import nn

from daskdl.errors import ModelError
from daskdl.training.fit_spec import starting_model


def drawn():
    """A module whose numbers are from the generators of torch and of Python."""
    module = nn.Linear(2, 1)
    nn.init.constant_(module.bias, random.random())
    return module


def test_a_module_is_copied():
    given = drawn()

    start = starting_model(given, seed=0)

    assert start is not given
    assert torch.equal(start.weight, given.weight)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_function_is_called_under_the_seed_and_generators_are_restored(name):
    before = torch.get_rng_state(), random.getstate()

    models = [starting_model(drawn, seed) for seed in (3, 3, 4)]

    one, same, other = (model.get_parameter(name) for model in models)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_anything_else_is_refused():
    with pytest.raises(ModelError, match="or a function that returns one, got 3"):
        starting_model(3, seed=0)
