"""Fits among threads that end early."""

import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import Callback, Checkpoint, EarlyStopping, OptionError
from tests.support.problems import (
    check_shows_what_was_validated,
    kept,
    mlp,
    parameters_of,
    rows,
    trainer,
)

X, Y = rows()
OTHER = rows(seed=5)  # other classes: the better on X, the worse on these


class Epochs(Callback):
    """Records the epochs that replicas begin, on the class."""

    begun = ()

    def on_epoch_begin(self, epoch):
        Epochs.begun += ((epoch.replica, epoch.epoch),)


def test_all_replicas_stop_at_the_same_epoch(monkeypatch):
    monkeypatch.setattr(Epochs, "begun", ())
    fitted = trainer(
        False,
        master=kept(replicas_per_worker=3),
        callbacks=[EarlyStopping(patience=2), Epochs()],
    )

    history = fitted.fit(X, Y, epochs=50, batch_size=7, validation=OTHER)

    stopping = history.stopping
    assert stopping.reason == "patience"
    assert len(history) == stopping.best_epoch + 3 < 50
    assert sorted(Epochs.begun) == [
        (r, e) for r in range(3) for e in range(len(history))
    ]
    losses = history.column("val_loss")
    assert stopping.scores == dict(enumerate(losses))
    assert stopping.best_score == min(losses) == losses[stopping.best_epoch]


def test_one_replica_returns_the_model_of_a_shorter_fit_bit_for_bit(one_thread):
    stopped = trainer(False, callbacks=[EarlyStopping(patience=2)])
    history = stopped.fit(X, Y, epochs=50, validation=OTHER)
    shorter = trainer(False)
    shorter.fit(X, Y, epochs=history.stopping.best_epoch + 1)

    expected = parameters_of(shorter.model_)
    for name, value in parameters_of(stopped.model_).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_a_fit_ends_when_only_some_epochs_are_checked():
    """Deeplearning4j's issue 4038: such a fit never ended."""
    fitted = trainer(False, callbacks=[EarlyStopping(patience=1, every=3)])

    history = fitted.fit(X, Y, epochs=50, validation=OTHER)

    looked_at = list(range(2, len(history), 3))
    assert history.stopping.reason == "patience"
    assert len(history) == looked_at[-1] + 1 < 50
    assert sorted(history.stopping.scores) == looked_at
    for column in ("val_loss", "val_accuracy"):
        values = history.column(column)
        assert [
            e for e, value in enumerate(values) if not math.isnan(value)
        ] == looked_at


class Overflowing(nn.Module):
    """A model whose output in evaluation is NaN from the 40th step on."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        self.steps += self.training
        broken = not self.training and self.steps > 40
        return self.layers(x) * (float("nan") if broken else 1.0)


class StopsAt(Callback):
    def __init__(self, number, reason=""):
        self.number, self.reason = number, reason

    def on_step_end(self, step):
        if (step.replica, step.number) == (0, self.number):
            step.stop(self.reason)


@pytest.mark.parametrize("reason", [None, 0, ["enough"]])
def test_a_reason_that_is_not_a_text_is_refused(reason):
    failing = trainer(False, callbacks=[StopsAt(2, reason)])

    with pytest.raises(OptionError, match=r"step\.stop must be a string, got"):
        failing.fit(X, Y)


class ReturnsAtSteps(Callback):
    def on_step_end(self, step):
        return step.number == 2


class ReturnsAtBegins(Callback):
    def on_epoch_begin(self, begin):
        return begin.epoch > 3


class ReturnsAtEpochs(Callback):
    def on_epoch_end(self, row):
        return row["loss"] < 0


@pytest.mark.parametrize(
    "callback", [ReturnsAtSteps(), ReturnsAtBegins(), ReturnsAtEpochs()]
)
def test_a_hook_that_returns_whether_to_stop_is_refused(callback):
    failing = trainer(False, callbacks=[callback])

    with pytest.raises(OptionError, match=r"returned False.*call step\.stop\(\)"):
        failing.fit(X, Y)


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_callback_ends_the_fit_for_all(monkeypatch, replicas, tmp_path):
    monkeypatch.setattr(Epochs, "begun", ())
    master = kept(replicas_per_worker=replicas)
    callbacks = [StopsAt(17, "enough"), Epochs(), Checkpoint(tmp_path)]
    fitted = trainer(False, master=master, callbacks=callbacks)

    history = fitted.fit(X, Y, epochs=50, batch_size=4, validation=OTHER)

    stopping = history.stopping
    assert (stopping.reason, stopping.monitor) == ("stopped", None)
    details = "a callback stopped the fit at step 17 of replica 0: enough"
    assert stopping.details == details
    assert sorted(Epochs.begun) == [
        (r, e) for r in range(replicas) for e in range(len(history))
    ]
    if replicas == 1:
        assert history.column("examples") == [17 * 4]
    check_shows_what_was_validated(fitted, OTHER)
    again = trainer(False, master=master, callbacks=callbacks[1:])
    resumed = again.fit(X, Y, epochs=len(history) + 1, batch_size=4, resume=True)
    assert len(resumed) == len(history) + 1
    assert resumed[-1]["examples"] == len(X)
    assert resumed.stopping is None


@pytest.mark.parametrize(
    ("reason", "details"),
    [("bad\udcff.npy", r"bad\\udcff\.npy"), ("x" * 10**6, "x+ ... [0-9]+ more ... x+")],
)
def test_the_reason_of_a_stop_is_a_bounded_text_that_can_be_sent(reason, details):
    fitted = trainer(False, callbacks=[StopsAt(2, reason)])

    stopping = fitted.fit(X, Y, epochs=2, batch_size=4).stopping

    where = "a callback stopped the fit at step 2 of replica 0: "
    assert re.fullmatch(where + details, stopping.details)
    assert len(stopping.details.encode()) < 600


def test_a_stopped_fit_returns_the_best_model():
    fitted = trainer(False, callbacks=[EarlyStopping(patience=99), StopsAt(62)])

    history = fitted.fit(X, Y, epochs=50, validation=OTHER)  # 15 steps in each epoch

    stopping = history.stopping
    assert (stopping.reason, len(history), stopping.restored) == ("stopped", 5, True)
    assert stopping.best_epoch < 4
    assert fitted.evaluate(*OTHER)["loss"] == pytest.approx(stopping.best_score)


def test_a_score_that_is_not_finite_ends_the_fit_with_the_best_model():
    rule = EarlyStopping(patience=9)
    fitted = trainer(False, model=Overflowing, callbacks=[rule])

    history = fitted.fit(X, Y, epochs=9, validation=OTHER)  # 15 steps in each epoch

    assert history.stopping.reason == "not_finite"
    assert len(history) == 3
    assert history.stopping.restored
    assert math.isfinite(fitted.evaluate(*OTHER)["loss"])


def test_a_warning_says_that_the_best_model_was_lost(monkeypatch, caplog):
    monkeypatch.setattr(
        "daskdl.training.epoch_control.EarlyStopper.best", lambda _: None
    )
    fitted = trainer(False, callbacks=[EarlyStopping("loss", patience=99)])

    stopping = fitted.fit(X, Y, epochs=2).stopping

    assert (stopping.best_epoch, stopping.restored) == (1, False)
    assert "all replicas with the best model, of epoch 1, were lost" in caplog.text
