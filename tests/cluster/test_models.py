"""Every kind of model learns, and comes back as it was given."""

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import Callback
from tests.support.problems import (
    kept,
    mlp,
    normalised,
    parameters_of,
    plain,
    rows,
    start_of,
    trainer,
)
from tests.support.recording import vector

pytestmark = pytest.mark.slow

X, Y = rows()


def tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(20, 20)
            self.second = nn.Linear(20, 20)
            self.last = nn.Linear(20, 4)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.last(torch.relu(self.second(torch.relu(self.first(x)))))

    return Tied()


def bfloat16():
    return mlp().bfloat16()


class TestModels:
    @pytest.mark.parametrize("model", [normalised, bfloat16, tied])
    @pytest.mark.parametrize(
        "apply", ["eager", pytest.param("strict", marks=pytest.mark.slow)]
    )
    def test_it_learns(self, client, model, apply):
        # No momentum: strict and late, it would overshoot.
        own = trainer(client, model=model, optimizer=plain, master=kept(apply=apply))

        history = own.fit(X, Y, epochs=6, batch_size=8)

        # Guessing is right once in four.
        assert own.evaluate(X, Y)["accuracy"] > 0.6
        assert history[-1]["loss"] < 0.8 * history[0]["loss"]

    def test_a_built_one_is_not_changed(self, client):
        given = normalised().eval()
        before = parameters_of(given)
        own = trainer(client, model=given)

        own.fit(X, Y, batch_size=16)

        for name, value in parameters_of(given).items():
            np.testing.assert_array_equal(value, before[name])
        assert not any(part.training for part in given.modules())
        assert own.model_ is not given
        assert (vector(own.model_) - vector(given)).abs().max() > 1e-3

    def test_what_is_frozen_stays_as_it_is(self, client):
        def partly():
            model = mlp()
            model[0].requires_grad_(False)
            return model

        own = trainer(client, model=partly)
        own.fit(X, Y, epochs=2)

        start = start_of(partly)
        assert torch.equal(own.model_[0].weight, start[0].weight)
        assert not own.model_[0].weight.requires_grad
        assert (own.model_[2].weight - start[2].weight).abs().max() > 1e-3

    def test_what_is_tied_stays_tied(self, client):
        own = trainer(client, model=tied)
        own.fit(X, Y)

        assert own.model_.first.weight is own.model_.second.weight
        start = start_of(tied).first.weight
        assert (own.model_.first.weight - start).abs().max() > 1e-3

    def test_dtypes_stay_and_nothing_is_a_view_of_a_flat_vector(self, client):
        own = trainer(client, model=bfloat16)
        own.fit(X, Y)

        for parameter in own.model_.parameters():
            assert parameter.dtype == torch.bfloat16
            assert parameter.untyped_storage().nbytes() == 2 * parameter.numel()

    def test_groups_made_in_two_passes_over_the_parameters_are_both_trained(
        self, client
    ):
        def in_groups(parameters):
            weights = [p for p in parameters if p.ndim > 1]
            biases = [p for p in parameters if p.ndim == 1]
            return torch.optim.SGD([{"params": weights}, {"params": biases}], lr=0.1)

        own = trainer(client, optimizer=in_groups)
        own.fit(X, Y, epochs=2)

        start = start_of(mlp)
        assert (own.model_[0].bias - start[0].bias).abs().max() > 1e-3
        assert len(own.optimizer_.param_groups[1]["params"]) == 2

    def test_seeds_make_the_start(self, client):
        class Stop(Callback):
            def on_step_end(self, step):
                raise RuntimeError

        starts = []
        for seed in (0, 5):
            own = trainer(client, seed=seed, callbacks=[Stop()])
            with pytest.raises(RuntimeError):
                own.fit(X, Y)
            starts.append(vector(own.model_))

        for seed, start in zip((0, 5), starts, strict=True):
            expected = vector(start_of(mlp, seed))
            torch.testing.assert_close(start, expected, rtol=0, atol=2.0**-25)


class TestDevice:
    @pytest.mark.parametrize("device", ["auto", "cpu", torch.device("cpu")])
    def test_the_model_comes_back_on_the_cpu(self, client, device):
        own = trainer(client, device=device)

        own.fit(X, Y)

        assert {p.device.type for p in own.model_.parameters()} == {"cpu"}
