"""Runs that end early: the user's code raises, or the loss is no number."""

import threading

import pytest
import torch

from daskdl import DivergedError, ReplicaError
from tests.support.problems import mlp, rows, trainer
from tests.support.promises import Diverging, EarlyEnds, FailAt
from tests.support.recording import vector

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


FAILURES = {
    "plain": (lambda: KeyError("wanted"), "KeyError: 'wanted'"),
    "odd": (lambda: Odd(1, 2), "Odd: 1 and 2"),
    "held": (lambda: Held("tight"), "Held: tight"),
}


@pytest.mark.slow
class TestOnProcesses(EarlyEnds):
    pass


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


class TestDivergence:
    def test_before_the_first_epoch_ends_that_is_the_start(self, client):
        given = mlp()
        own = trainer(client, model=given, loss=Diverging(3, float("nan")))

        with pytest.raises(DivergedError, match="the last agreed state is that of the"):
            own.fit(X, Y, batch_size=16)

        torch.testing.assert_close(
            vector(own.model_), vector(given), rtol=0, atol=2.0**-25
        )
        assert len(own.history_) == 0
