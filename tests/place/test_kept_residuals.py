"""Fits return the validated model, and leave unsent residuals to the next fit."""

import dataclasses
import logging
import threading

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import (
    AdaptiveThreshold,
    Callback,
    FixedThreshold,
    GradientSharing,
    KeepResidual,
    ParameterAveraging,
    Trainer,
)
from tests.support.problems import (
    check_shows_what_was_validated,
    kept,
    mlp,
    normalised,
    rows,
    start_of,
    trainer,
)
from tests.support.recording import delivered, vector

X, Y = rows(600)
HELD = X[480:], Y[480:]
X, Y = X[:480], Y[:480]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=2e-3)


# Large, so that much is left that was not sent.
LARGE = AdaptiveThreshold(initial=1e-2)
MASTERS = {
    "eager": GradientSharing(threshold=LARGE),
    "strict": GradientSharing(threshold=LARGE, apply="strict"),
    "nothing clipped": GradientSharing(threshold=LARGE, residual=KeepResidual()),
    "averaging": ParameterAveraging(),
}


@pytest.mark.parametrize("master", MASTERS.values(), ids=MASTERS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_returned_model_is_the_one_validated_last(master, replicas):
    master = dataclasses.replace(master, replicas_per_worker=replicas)
    fitted = trainer(False, model=normalised, master=master, optimizer=adamw)

    for _ in range(2):  # the second one begins with what the first has left
        fitted.fit(X, Y, epochs=2, batch_size=16, validation=HELD)

        check_shows_what_was_validated(fitted, HELD)


class Book:
    """Sum of the steps of all replicas, which are threads here."""

    lock, last = threading.Lock(), threading.local()
    moved = 0.0


class Booked(torch.optim.SGD):
    """Records the length of each step, including those of dry runs."""

    def step(self, closure=None):
        before = self.now()
        super().step(closure)
        Book.last.move = self.now() - before

    def now(self):
        parameters = self.param_groups[0]["params"]
        return (
            torch.cat([p.detach().reshape(-1) for p in parameters])
            .double()
            .cpu()
            .numpy()
        )


class Enter(Callback):
    """Adds the steps of the training to the book."""

    def on_step_end(self, step):
        with Book.lock:
            Book.moved += Book.last.move


@pytest.fixture(autouse=True)
def nothing_moved():
    Book.moved = 0.0


def booked_sgd(parameters):
    return Booked(parameters, lr=0.05)


def still(parameters):
    return Booked(parameters, lr=0.0)


def booked():
    callbacks, options = [Enter()], {"optimizer": booked_sgd, "master": sharing(2)}
    return trainer(False, callbacks=callbacks, **options)


def sharing(replicas, **options):
    options = {"threshold": FixedThreshold(2.0**-7), "update_scale": "sum", **options}
    return kept(replicas_per_worker=replicas, exchange_every=1, **options)


def fit(trainer):
    trainer.fit(X, Y, batch_size=4)  # so many exchanges that residuals are kept


def load(folder):
    return Trainer.load(
        folder,
        client=False,
        model=mlp,
        optimizer=booked_sgd,
        callbacks=[],
        loss=nn.CrossEntropyLoss(),
    )


def replaced(model):
    model.load_state_dict(start_of(mlp, seed=1).state_dict())


def nudged(model):
    with torch.no_grad():
        model[2].bias[-1] += 2.0**-10


CHANGES = {"all replaced": replaced, "one moved": nudged}


def model_of(fitted):
    return vector(fitted.model_).double().numpy()


# Each move of a parameter of about 1 is rounded to float32.
CLOSE = {"rtol": 0, "atol": 1e-5}


class TestConservation:
    """Start + all updates = shared + residuals, over fits."""

    START = vector(start_of(mlp)).double().numpy()

    @pytest.mark.parametrize("options", [{}, {"apply": "strict"}], ids=str)
    @pytest.mark.parametrize("replicas", [(2,), (2, 2), (3, 2), (2, 3), (2, 1, 2)])
    def test_nothing_is_lost_and_nothing_counts_twice(self, replicas, options):
        fitted = booked()

        for count in replicas:
            fitted.master = sharing(count, **options)
            fit(fitted)
        shown = model_of(fitted)

        expected = self.START + Book.moved
        np.testing.assert_allclose(delivered(fitted), expected, **CLOSE)
        assert np.abs(shown - expected).max() > 1e-3  # there was something left

    def test_a_fit_that_fails_before_the_first_sync_keeps_the_residual(self):
        class Fail(Callback):
            def on_step_end(self, step):
                raise RuntimeError

        fitted = booked()
        fit(fitted)
        shown, expected = model_of(fitted), self.START + Book.moved
        fitted.optimizer = still

        for replicas in (2, 1):
            fitted.master, fitted.callbacks = sharing(replicas), [Fail()]
            with pytest.raises(RuntimeError):
                fit(fitted)
            np.testing.assert_array_equal(model_of(fitted), shown)

        np.testing.assert_allclose(delivered(fitted), expected, **CLOSE)

    @pytest.mark.parametrize("replicas", [1, 2])
    @pytest.mark.parametrize("outer", [None, lambda p: torch.optim.SGD(p, lr=1.0)])
    def test_averaging_starts_with_the_whole_residual(self, replicas, outer):
        fitted = booked()
        fit(fitted)
        expected = self.START + Book.moved

        fitted.optimizer = still
        fitted.master = ParameterAveraging(replicas_per_worker=replicas, outer=outer)
        for _ in range(2):  # and only once
            fit(fitted)
            np.testing.assert_allclose(model_of(fitted), expected, **CLOSE)

    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_the_next_fit_starts_from_weights_changed_by_the_user(
        self, change, caplog, tmp_path
    ):
        fitted = booked()
        fit(fitted)
        change(fitted.model_)
        expected = model_of(fitted)
        fitted.save(tmp_path)
        again = load(tmp_path)

        with caplog.at_level(logging.WARNING, logger="daskdl"):
            got = delivered(fitted)

        np.testing.assert_allclose(got, expected, **CLOSE)
        assert "unsent residuals are dropped" in caplog.text
        np.testing.assert_allclose(delivered(again), expected, **CLOSE)
