"""The model that a fit begins with."""

import random

import pytest
import torch
from torch import nn

from daskdl.errors import ModelError
from daskdl.training.fit_spec import starting_model


class TestStartingModel:
    def test_a_built_one_is_copied(self):
        given = nn.Linear(2, 1)

        start = starting_model(given, seed=0)

        assert start is not given
        assert torch.equal(start.weight, given.weight)

    def test_a_function_is_called_under_the_seed_and_nobody_notices(self):
        state = torch.get_rng_state()

        one, same, other = (
            starting_model(lambda: nn.Linear(2, 1), seed) for seed in (3, 3, 4)
        )

        assert torch.equal(one.weight, same.weight)
        assert not torch.equal(one.weight, other.weight)
        assert torch.equal(torch.get_rng_state(), state)

    def test_pythons_generator_is_under_the_seed_too_and_nobody_notices(self):
        def drawn():
            module = nn.Linear(1, 1)
            nn.init.constant_(module.weight, random.random())
            return module

        state = random.getstate()

        one, same, other = (starting_model(drawn, seed) for seed in (3, 3, 4))

        assert torch.equal(one.weight, same.weight)
        assert not torch.equal(one.weight, other.weight)
        assert random.getstate() == state

    def test_anything_else_is_refused(self):
        with pytest.raises(ModelError, match="or a function that returns one, got 3"):
            starting_model(3, seed=0)
