"""Runs that are equal bit for bit: promises 5 and 8."""

import numpy as np
import pytest

from tests.cluster.problems import (
    adam,
    kept,
    mlp,
    normalised,
    parameters_of,
    plain_loop,
    rows,
    sgd,
    trainer,
)

X, Y = rows()


class TestInStep:
    """Promise 5: synchronous runs depend on nothing but data and seed."""

    @pytest.mark.parametrize("model", [mlp, normalised])
    def test_synchronous_runs_repeat_bit_for_bit(self, client, model):
        runs = []
        for _ in range(2):
            own = trainer(client, model=model, master=kept(max_staleness=0), seed=7)
            history = own.fit(X, Y, epochs=2, batch_size=16)
            runs.append((parameters_of(own.model_), history.column("loss")))

        for name, value in runs[0][0].items():
            np.testing.assert_array_equal(value, runs[1][0][name])
        assert runs[0][1] == runs[1][1]

    def test_another_seed_gives_another_run(self, client):
        losses = [
            trainer(client, master=kept(max_staleness=0), seed=seed)
            .fit(X, Y, batch_size=16)
            .column("loss")
            for seed in (1, 2)
        ]

        assert losses[0] != losses[1]


class TestOneReplica:
    """Promise 8: one replica is plain PyTorch, bit for bit."""

    @pytest.mark.parametrize("optimizer", [sgd, adam])
    @pytest.mark.parametrize("model", [mlp, normalised])
    def test_equals_a_plain_loop(self, lone_client, model, optimizer):
        own = trainer(lone_client, model=model, optimizer=optimizer, seed=3)
        own.fit(X, Y, epochs=2, batch_size=50, shuffle=False)

        plain = plain_loop(model, optimizer, seed=3, epochs=2, batch_size=50, x=X, y=Y)

        for name, value in parameters_of(own.model_).items():
            np.testing.assert_array_equal(value, plain[name], err_msg=name)
