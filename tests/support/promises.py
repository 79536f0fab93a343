"""What fits promise wherever their replicas are, on a cluster or among threads.

A test file with these classes has the fixtures `place`, where several replicas train,
and `lone`, where one does.
"""

import itertools
import math
import os
import re
import signal
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import Callback, DivergedError, ReplicaError
from tests.support.problems import (
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
from tests.support.recording import Recorded, delivered, records, vector


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
        fitted = place.trainer(callbacks=[FailAt(RuntimeError, number=20)])
        with pytest.raises(ReplicaError):
            fitted.fit(X, Y, epochs=100, batch_size=16)
        fitted.callbacks = []

        history = fitted.fit(X, Y, epochs=5, batch_size=16)

        assert history.column("replicas") == [2] * 5
        assert fitted.evaluate(X, Y)["accuracy"] > 0.8

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_after_divergence_the_last_agreed_state_is_kept(
        self, place, tmp_path, value
    ):
        # In step, 15 steps of each replica in each epoch: in the third epoch.
        sharing = place.sharing(max_staleness=0)
        fitted = place.trainer(
            loss=Diverging(33, value), master=Recorded(str(tmp_path), sharing)
        )

        with pytest.raises(DivergedError) as caught:
            fitted.fit(X, Y, epochs=10, batch_size=16)

        pattern = (
            rf"replica (\d) on {place.where}: the loss became {value} at step 34 of "
            r"replica \1, in epoch 2; it was \S+ at its first step and \S+ just "
            r"before; model_ holds the state agreed on after epoch 1; "
        )
        hint = (
            "the model's outputs are finite, so the loss itself is nan"
            if math.isnan(value)
            else "the loss jumped within one step: check X for NaN"
        )
        assert re.match(pattern + hint, str(caught.value))
        shared = records(tmp_path, epoch=1)[0]["shared"]
        np.testing.assert_array_equal(vector(fitted.model_).numpy(), shared)
        assert len(fitted.history_) == 2


X, Y = rows()
ROUNDING = 2e-6  # of each replica: float32, for each move of a parameter of about 1


class Place(NamedTuple):
    """Where replicas train."""

    client: Any  # False: among threads
    replicas: int
    per_worker: int = 1
    device: Any = "cpu"

    @property
    def where(self):
        """A pattern of what messages call it."""
        return r"tcp://\S+" if self.client else "this machine"

    def sharing(self, **options):
        return kept(replicas_per_worker=self.per_worker, **options)

    def trainer(self, **options):
        """A trainer there; options of the sharing are given as a master."""
        options = {"master": self.sharing(), "device": self.device, **options}
        return trainer(self.client, **options)


class Conservation:
    """Promise 1: start + all updates = shared + all residuals.

    Each replica checks it after every step.
    """

    atol = 2e-6  # of the check of a replica, see `Recorded`

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"exchange_every": 3},
            {"max_staleness": 0},
            {"max_staleness": None},
            {"exchange_every": 3, "momentum": 0.75},
        ],
        ids=str,
    )
    def test_at_every_step_and_at_the_end(self, place, tmp_path, options):
        sharing = place.sharing(**options)
        fitted = place.trainer(master=Recorded(str(tmp_path), sharing, atol=self.atol))

        fitted.fit(X, Y, epochs=3, batch_size=16)

        ends = records(tmp_path, epoch=2)
        assert sorted(ends) == list(range(place.replicas))
        moved = [end["progress"] for end in ends.values()]
        assert all(np.abs(progress).max() > 1e-3 for progress in moved)
        expected = ends[0]["start"] + sum(moved)
        # What comes back is what was validated, the rest is kept.
        np.testing.assert_array_equal(vector(fitted.model_), ends[0]["shared"])
        atol = max(place.replicas * ROUNDING, self.atol)
        np.testing.assert_allclose(delivered(fitted), expected, rtol=0, atol=atol)


def check_agreed(ends):
    """Shared is the same, bit for bit; and what was sent, whole steps of one grid."""
    for end in ends.values():
        np.testing.assert_array_equal(end["shared"], ends[0]["shared"])
        # The module's float32 has no room for odd steps of the grid beyond 1.
        np.testing.assert_array_equal(end["shared"], np.float32(end["expected"]))


class Agreement:
    """Promises 2, 3 and 4."""

    def test_shared_is_bit_identical_after_every_epoch(self, place, tmp_path):
        master = Recorded(str(tmp_path), place.sharing())

        place.trainer(master=master).fit(X, Y, epochs=3, batch_size=16)

        for epoch in range(3):
            check_agreed(records(tmp_path, epoch))

    @pytest.mark.parametrize("copies", [1, 3])
    def test_each_update_is_received_once(self, place, tmp_path, copies):
        master = Recorded(str(tmp_path), place.sharing(exchange_every=1), copies)

        place.trainer(master=master).fit(X, Y, epochs=3, batch_size=16)

        ends = records(tmp_path, epoch=2)
        sent = {r: [tuple(stamp) for stamp in e["published"]] for r, e in ends.items()}
        assert all(len(updates) > 10 for updates in sent.values())
        for replica in ends:
            got = [tuple(stamp) for stamp in ends[replica]["received"]]
            others = (updates for sender, updates in sent.items() if sender != replica)
            assert sorted(got) == sorted(itertools.chain(*others))

    def test_a_full_inbox_is_folded(self, place, tmp_path, monkeypatch):
        monkeypatch.setattr("daskdl.training.fit.INBOX_BYTES", 1)
        master = Recorded(str(tmp_path), place.sharing())

        history = place.trainer(master=master).fit(X, Y, epochs=2, batch_size=16)

        assert sum(history.column("folds")) > 0
        check_agreed(records(tmp_path, epoch=1))


class InStep:
    """Promise 5: synchronous runs depend on nothing but data and seed.

    There is a fixture `model`: what can be repeated there.
    """

    def test_synchronous_runs_repeat_bit_for_bit(self, place, model):
        runs = []
        for _ in range(2):
            master = place.sharing(max_staleness=0)
            fitted = place.trainer(model=model, master=master, seed=7)
            history = fitted.fit(X, Y, epochs=2, batch_size=16)
            runs.append((parameters_of(fitted.model_), history.column("loss")))

        for name, value in runs[0][0].items():
            np.testing.assert_array_equal(value, runs[1][0][name])
        assert runs[0][1] == runs[1][1]


class OneReplica:
    """Promise 8: one replica is plain PyTorch, bit for bit."""

    @pytest.mark.parametrize("optimizer", [sgd, adam])
    @pytest.mark.parametrize("model", [mlp, normalised])
    def test_equals_a_plain_loop(self, lone, model, optimizer):
        fitted = lone.trainer(model=model, optimizer=optimizer, seed=3)
        fitted.fit(X, Y, epochs=2, batch_size=50, shuffle=False)

        plain = plain_loop(
            model,
            optimizer,
            seed=3,
            epochs=2,
            batch_size=50,
            x=X,
            y=Y,
            device=lone.device,
        )

        for name, value in parameters_of(fitted.model_).items():
            np.testing.assert_array_equal(value, plain[name], err_msg=name)


class FitAgain:
    """A second fit goes on from the first."""

    @pytest.mark.parametrize("optimizer", [sgd, adam])
    def test_two_fits_of_one_replica_are_one(self, lone, optimizer):
        models = []
        for fits, epochs in ((1, 2), (2, 1)):
            fitted = lone.trainer(optimizer=optimizer)
            for _ in range(fits):
                fitted.fit(X, Y, epochs=epochs, batch_size=50, shuffle=False)
            models.append(vector(fitted.model_))

        assert torch.equal(*models)

    def test_the_optimizer_goes_on(self, place):
        fitted = place.trainer(optimizer=adam, master=place.sharing(max_staleness=0))

        steps = []
        for _ in range(2):
            fitted.fit(X, Y, batch_size=16)
            state = fitted.optimizer_.state_dict()["state"]
            steps.append([int(entry["step"]) for entry in state.values()])

        assert steps == [[15] * 4, [30] * 4]  # of 30 batches, each of two has half
        moments = [entry["exp_avg_sq"] for entry in state.values()]
        assert all(moment.max() > 0 for moment in moments)
        known = {id(p) for p in fitted.model_.parameters()}
        assert {id(p) for p in fitted.optimizer_.param_groups[0]["params"]} == known
