"""Exceptions of the user's code on workers."""

import threading

import pytest

from daskdl import ReplicaError
from tests.support.problems import rows, trainer
from tests.support.promises import FailAt

X, Y = rows()


class NotUnpickled(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class NotPickled(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("make", "summary"),
    [
        (lambda: NotUnpickled(1, 2), "NotUnpickled: 1 and 2"),
        (lambda: NotPickled("tight"), "NotPickled: tight"),
    ],
)
def test_the_client_gets_address_and_traceback(client, make, summary):
    own = trainer(client, callbacks=[FailAt(make)])

    with pytest.raises(ReplicaError) as caught:
        own.fit(X, Y, epochs=100)

    message = str(caught.value)
    worker = sorted(client.nthreads())[1]
    assert message.startswith(f"replica 1 on {worker}: {summary}")
    assert "Traceback of the worker:" in message
    assert "raise self.make()" in message  # the very line
