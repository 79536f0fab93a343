"""A second fit goes on from the first: model, optimizer and threshold."""

from dataclasses import dataclass

import pytest
import torch

from daskdl import Callback, ThresholdAlgorithm
from tests.support import promises
from tests.support.problems import adam, kept, rows, trainer
from tests.support.recording import vector

X, Y = rows()


@dataclass(frozen=True)
class Growing(ThresholdAlgorithm):
    """Its value tells how often it has been asked."""

    def next_threshold(self, residual, last):
        return 1e-3 if last is None else last.threshold * 1.05


@pytest.mark.slow
class TestOnProcesses(promises.FitAgain):
    pass


class TestFitAgain:
    def test_the_threshold_goes_on(self, client):
        master = kept(threshold=Growing(), max_staleness=0)
        own = trainer(client, master=master)

        ends = [own.fit(X, Y, batch_size=16)[-1]["threshold"] for _ in range(2)]

        # 15 exchanges of each replica in each fit.
        assert ends == pytest.approx([1e-3 * 1.05**14, 1e-3 * 1.05**29])

    def test_a_fit_that_fails_keeps_the_optimizer_of_the_one_before(self, client):
        own = trainer(client, optimizer=adam, master=kept(max_staleness=0))
        own.fit(X, Y, batch_size=16)
        model, state = vector(own.model_), own.optimizer_.state_dict()["state"]

        class Fail(Callback):
            def on_step_end(self, step):
                raise RuntimeError

        own.callbacks = [Fail()]
        with pytest.raises(RuntimeError):
            own.fit(X, Y, batch_size=16)

        torch.testing.assert_close(vector(own.model_), model, rtol=0, atol=2.0**-24)
        after = own.optimizer_.state_dict()["state"]
        assert all(torch.equal(after[i]["exp_avg"], state[i]["exp_avg"]) for i in state)
