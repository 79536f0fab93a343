"""Runs that end early: the user's code raises, or the loss is no number."""

import re
import threading

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import Callback, DivergedError, ReplicaError
from tests.cluster.problems import kept, mlp, rows, trainer
from tests.cluster.recording import Recorded, records, vector

X, Y = rows()


class Odd(Exception):
    """It can be pickled, but not unpickled."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Held(Exception):
    """It cannot even be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class FailAt(Callback):
    """Raises on replica 1 at a step."""

    def __init__(self, make, number=3):
        self.make = make
        self.number = number

    def on_step(self, step):
        if step.replica == 1 and step.number == self.number:
            raise self.make()


FAILURES = {
    "plain": (lambda: KeyError("wanted"), "KeyError: 'wanted'"),
    "odd": (lambda: Odd(1, 2), "Odd: 1 and 2"),
    "held": (lambda: Held("tight"), "Held: tight"),
}


class TestFailures:
    @pytest.mark.parametrize(("make", "summary"), FAILURES.values(), ids=FAILURES)
    def test_the_client_gets_address_and_traceback(self, client, make, summary):
        own = trainer(client, callbacks=[FailAt(make)])

        with pytest.raises(ReplicaError) as caught:
            own.fit(X, Y, epochs=100)

        message = str(caught.value)
        worker = sorted(client.nthreads())[1]
        assert message.startswith(f"replica 1 on {worker}: ")
        assert summary in message
        assert "Traceback of the worker:" in message
        assert "raise self.make()" in message  # the very line

    def test_the_cause_is_the_users_own_exception(self, client):
        own = trainer(client, callbacks=[FailAt(lambda: KeyError("wanted"))])

        with pytest.raises(ReplicaError) as caught:
            own.fit(X, Y)

        assert type(caught.value.__cause__) is KeyError
        assert caught.value.__cause__.args == ("wanted",)

    def test_a_run_after_a_failed_one_works(self, client):
        own = trainer(client, callbacks=[FailAt(RuntimeError, number=20)])
        with pytest.raises(ReplicaError):
            own.fit(X, Y, epochs=100, batch_size=16)
        own.callbacks = []

        history = own.fit(X, Y, epochs=5, batch_size=16)

        assert history.column("replicas") == [2] * 5
        assert own.evaluate(X, Y)["accuracy"] > 0.8

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
    def test_a_device_that_a_worker_does_not_have_is_a_failure_there(self, client):
        with pytest.raises(
            ReplicaError, match=r"replica \d on tcp://.* failed: .*CUDA"
        ):
            trainer(client, device="cuda").fit(X, Y)


class Diverging(nn.CrossEntropyLoss):
    """The loss of this copy is not finite from a call on."""

    def __init__(self, calls, value):
        super().__init__()
        self.calls = calls
        self.value = value

    def forward(self, output, labels):
        self.calls -= 1
        return super().forward(output, labels) + (self.value if self.calls < 0 else 0)


class TestDivergence:
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_the_last_agreed_state_is_kept(self, client, tmp_path, value):
        # In step, 15 steps of each replica in each epoch: in the third epoch.
        master = Recorded(str(tmp_path), kept(max_staleness=0))
        own = trainer(client, loss=Diverging(33, value), master=master)

        with pytest.raises(DivergedError) as caught:
            own.fit(X, Y, epochs=10, batch_size=16)

        pattern = (
            rf"replica (\d) on tcp://\S+: the loss became {value} at step 34 of "
            r"replica \1, in epoch 2; the last agreed state is that of epoch 1; lower"
        )
        assert re.match(pattern, str(caught.value))
        shared = records(tmp_path, epoch=1)[0]["shared"]
        np.testing.assert_array_equal(vector(own.model_).numpy(), shared)
        assert len(own.history_) == 2

    def test_before_the_first_epoch_ends_that_is_the_start(self, client):
        given = mlp()
        own = trainer(client, model=given, loss=Diverging(3, float("nan")))

        with pytest.raises(DivergedError, match="the last agreed state is that of the"):
            own.fit(X, Y, batch_size=16)

        torch.testing.assert_close(
            vector(own.model_), vector(given), rtol=0, atol=2.0**-25
        )
        assert len(own.history_) == 0
