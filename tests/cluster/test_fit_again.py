"""A second fit goes on from the first: model, optimizer and threshold."""

from dataclasses import dataclass

import pytest
import torch

from daskdl import Callback, ThresholdAlgorithm
from tests.cluster.problems import adam, kept, rows, sgd, trainer
from tests.cluster.recording import vector

X, Y = rows()


@dataclass(frozen=True)
class Growing(ThresholdAlgorithm):
    """Its value tells how often it has been asked."""

    def next_threshold(self, residual, last):
        return 1e-3 if last is None else last.threshold * 1.05


class TestFitAgain:
    @pytest.mark.parametrize("optimizer", [sgd, adam])
    def test_two_fits_of_one_replica_are_one(self, lone_client, optimizer):
        models = []
        for fits, epochs in ((1, 2), (2, 1)):
            own = trainer(lone_client, optimizer=optimizer)
            for _ in range(fits):
                own.fit(X, Y, epochs=epochs, batch_size=50, shuffle=False)
            models.append(vector(own.model_))

        assert torch.equal(*models)

    def test_the_threshold_goes_on(self, client):
        master = kept(threshold=Growing(), max_staleness=0)
        own = trainer(client, master=master)

        ends = [own.fit(X, Y, batch_size=16)[-1]["threshold"] for _ in range(2)]

        # 15 exchanges of each replica in each fit.
        assert ends == pytest.approx([1e-3 * 1.05**14, 1e-3 * 1.05**29])

    def test_the_optimizer_goes_on(self, client):
        own = trainer(client, optimizer=adam, master=kept(max_staleness=0))

        steps = []
        for _ in range(2):
            own.fit(X, Y, batch_size=16)
            state = own.optimizer_.state_dict()["state"]
            steps.append([int(entry["step"]) for entry in state.values()])

        assert steps == [[15] * 4, [30] * 4]
        moments = [entry["exp_avg_sq"] for entry in state.values()]
        assert all(moment.max() > 0 for moment in moments)
        known = {id(p) for p in own.model_.parameters()}
        assert {id(p) for p in own.optimizer_.param_groups[0]["params"]} == known

    def test_a_fit_that_fails_keeps_the_optimizer_of_the_one_before(self, client):
        own = trainer(client, optimizer=adam, master=kept(max_staleness=0))
        own.fit(X, Y, batch_size=16)
        model, state = vector(own.model_), own.optimizer_.state_dict()["state"]

        class Fail(Callback):
            def on_step(self, step):
                raise RuntimeError

        own.callbacks = [Fail()]
        with pytest.raises(RuntimeError):
            own.fit(X, Y, batch_size=16)

        torch.testing.assert_close(vector(own.model_), model, rtol=0, atol=2.0**-24)
        after = own.optimizer_.state_dict()["state"]
        assert all(torch.equal(after[i]["exp_avg"], state[i]["exp_avg"]) for i in state)
