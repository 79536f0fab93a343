"""Runs that end early: the user's code raises, or the loss is no number."""

import threading

import pytest

from daskdl import ReplicaError
from tests.support.problems import rows, trainer
from tests.support.promises import FailAt

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
