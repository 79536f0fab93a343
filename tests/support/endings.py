"""What ends a run early: the user's own code, a loss that is no number, Ctrl-C.

The class of tests is that of a file that has the fixture `place`, where two replicas
train.
"""

import os
import re
import signal

import numpy as np
import pytest
from torch import nn

from daskdl import Callback, DivergedError, ReplicaError
from tests.support.problems import rows
from tests.support.recording import Recorded, records, vector

X, Y = rows()


class FailAt(Callback):
    """Raises on replica 1 at a step."""

    def __init__(self, make, number=3):
        self.make = make
        self.number = number

    def on_step_end(self, step):
        if step.replica == 1 and step.number == self.number:
            raise self.make()


class Diverging(nn.CrossEntropyLoss):
    """The loss of this copy is not finite from a call on."""

    def __init__(self, calls, value):
        super().__init__()
        self.calls = calls
        self.value = value

    def forward(self, output, labels):
        self.calls -= 1
        return super().forward(output, labels) + (self.value if self.calls < 0 else 0)


class Interrupt(Callback):
    """Presses Ctrl-C on the client after the first epoch."""

    def on_epoch_end(self, row):
        os.kill(os.getpid(), signal.SIGINT)


class EarlyEnds:
    """What holds wherever replicas train."""

    def test_a_run_after_a_failed_one_works(self, place):
        own = place.trainer(callbacks=[FailAt(RuntimeError, number=20)])
        with pytest.raises(ReplicaError):
            own.fit(X, Y, epochs=100, batch_size=16)
        own.callbacks = []

        history = own.fit(X, Y, epochs=5, batch_size=16)

        assert history.column("replicas") == [2] * 5
        assert own.evaluate(X, Y)["accuracy"] > 0.8

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_after_divergence_the_last_agreed_state_is_kept(
        self, place, tmp_path, value
    ):
        # In step, 15 steps of each replica in each epoch: in the third epoch.
        master = Recorded(str(tmp_path), place.sharing(max_staleness=0))
        own = place.trainer(loss=Diverging(33, value), master=master)

        with pytest.raises(DivergedError) as caught:
            own.fit(X, Y, epochs=10, batch_size=16)

        pattern = (
            rf"replica (\d) on {place.where}: the loss became {value} at step 34 of "
            r"replica \1, in epoch 2; it was \S+ at its first step and \S+ just "
            r"before; the last agreed state is that of epoch 1, and in model_; it came "
            r"from one step to the next: look for NaN in X"
        )
        assert re.match(pattern, str(caught.value))
        shared = records(tmp_path, epoch=1)[0]["shared"]
        np.testing.assert_array_equal(vector(own.model_).numpy(), shared)
        assert len(own.history_) == 2
