"""Every kind of model learns, and comes back as it was given."""

import pytest
import torch
from torch import nn

from daskdl import Callback
from tests.support.problems import (
    kept,
    mlp,
    rows,
    start_of,
    trainer,
)
from tests.support.recording import vector

X, Y = rows()
TWO = kept(replicas_per_worker=2)


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


class TestModels:
    def test_frozen_parameters_do_not_change(self):
        def partly():
            model = mlp()
            model[0].requires_grad_(False)
            return model

        fitted = trainer(False, master=TWO, model=partly)
        fitted.fit(X, Y, epochs=2)

        start = start_of(partly)
        assert torch.equal(fitted.model_[0].weight, start[0].weight)
        assert not fitted.model_[0].weight.requires_grad
        assert (fitted.model_[2].weight - start[2].weight).abs().max() > 1e-3

    def test_tied_parameters_stay_tied(self):
        fitted = trainer(False, master=TWO, model=tied)
        fitted.fit(X, Y)

        assert fitted.model_.first.weight is fitted.model_.second.weight
        start = start_of(tied).first.weight
        assert (fitted.model_.first.weight - start).abs().max() > 1e-3

    def test_dtypes_stay_and_nothing_is_a_view_of_a_flat_vector(self):
        fitted = trainer(False, master=TWO, model=lambda: mlp().bfloat16())
        fitted.fit(X, Y)

        for parameter in fitted.model_.parameters():
            assert parameter.dtype == torch.bfloat16
            assert parameter.untyped_storage().nbytes() == 2 * parameter.numel()

    def test_the_seed_determines_the_initial_parameters(self):
        class Stop(Callback):
            def on_step_end(self, step):
                raise RuntimeError

        starts = []
        for seed in (0, 5):
            interrupted = trainer(False, master=TWO, seed=seed, callbacks=[Stop()])
            with pytest.raises(RuntimeError):
                interrupted.fit(X, Y)
            starts.append(vector(interrupted.model_))

        for seed, start in zip((0, 5), starts, strict=True):
            expected = vector(start_of(mlp, seed))
            torch.testing.assert_close(start, expected, rtol=0, atol=2.0**-25)
