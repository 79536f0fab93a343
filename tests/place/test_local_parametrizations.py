"""Modules with parametrizations, which torch does not pickle, are used as others."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from daskdl import Checkpoint, GradientSharing, ParameterAveraging, Trainer
from tests.support.problems import kept, parameters_of, plain_loop, rows, sgd, trainer

X, Y = rows(160)
KINDS = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


class Symmetric(nn.Module):
    """A parametrization of a user's own."""

    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def made(kind):
    """A function that makes a network with it; its own layer has another one too."""

    def make():
        first = KINDS[kind](nn.Linear(20, 20))
        second = nn.Linear(20, 20)
        parametrize.register_parametrization(second, "weight", Symmetric())
        return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(20, 4))

    return make


MASTERS = {"sharing": GradientSharing, "averaging": ParameterAveraging}


@pytest.mark.parametrize("kind", KINDS)
class TestEveryKind:
    @pytest.mark.parametrize("master", MASTERS)
    def test_two_replicas_train_and_what_comes_of_it_is_used(self, kind, master):
        own = trainer(
            False, model=made(kind), master=MASTERS[master](replicas_per_worker=2)
        )

        first = own.fit(X, Y, epochs=2, validation=(X, Y))
        second = own.fit(X, Y, epochs=2, validation=(X, Y))

        assert second[-1]["loss"] < first[0]["loss"]
        assert parametrize.is_parametrized(own.model_[0], "weight")
        with torch.no_grad():
            output = own.model_.eval()(torch.from_numpy(X))
        np.testing.assert_allclose(own.predict(X), output, rtol=1e-4, atol=1e-5)
        loss = nn.functional.cross_entropy(output, torch.from_numpy(Y)).item()
        assert own.evaluate(X, Y)["loss"] == pytest.approx(loss, rel=1e-4)

    def test_a_checkpoint_and_a_save_are_gone_on_from(self, kind, tmp_path):
        options = {"model": made(kind)}
        point = {"callbacks": [Checkpoint(str(tmp_path / "checkpoints"))]}
        trainer(False, **options, **point).fit(X, Y, epochs=1)
        own = trainer(False, **options, **point)
        assert len(own.fit(X, Y, epochs=2, resume=True)) == 2
        own.save(tmp_path / "save")

        loaded = Trainer.load(
            tmp_path / "save", client=False, optimizer=sgd, callbacks=[], **options
        )

        assert loaded.evaluate(X, Y)["loss"] == own.evaluate(X, Y)["loss"]
        loaded.fit(X, Y)

    def test_one_replica_is_a_plain_loop(self, kind):
        own = trainer(False, model=made(kind), master=kept())
        expected = plain_loop(
            made(kind), sgd, seed=0, epochs=2, batch_size=16, x=X, y=Y
        )

        own.fit(X, Y, epochs=2, batch_size=16, shuffle=False)

        for name, value in parameters_of(own.model_).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-6)
