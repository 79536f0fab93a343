"""Fits among threads that end early."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import (
    Callback,
    EarlyStopping,
    Evaluate,
    OptionError,
)
from tests.support.problems import kept, mlp, parameters_of, rows, trainer
from tests.support.promises import Interrupt

X, Y = rows()
OTHER = rows(seed=5)  # other classes: the better on X, the worse on these
TWO = kept(replicas_per_worker=2)


class Epochs(Callback):
    """Which epochs each replica begins; on a replica's side of the class."""

    begun = ()

    def on_epoch_begin(self, epoch):
        Epochs.begun += ((epoch.replica, epoch.epoch),)


@pytest.fixture
def epochs(monkeypatch):
    """A callback, and which epochs each replica began."""
    monkeypatch.setattr(Epochs, "begun", ())
    return Epochs()


def begun(replica):
    return [epoch for own, epoch in Epochs.begun if own == replica]


class TestEarlyStopping:
    @pytest.mark.parametrize("replicas", [1, 3])
    def test_all_replicas_stop_at_the_same_epoch(self, epochs, replicas):
        own = trainer(
            False,
            master=kept(replicas_per_worker=replicas),
            callbacks=[EarlyStopping(patience=2), epochs],
        )

        history = own.fit(X, Y, epochs=50, batch_size=7, validation=OTHER)

        stopping = history.stopping
        assert stopping.reason == "patience"
        assert len(history) == stopping.best_epoch + 3 < 50
        for replica in range(replicas):
            assert begun(replica) == list(range(len(history)))
        losses = history.column("val_loss")
        assert stopping.scores == dict(enumerate(losses))
        assert stopping.best_score == min(losses) == losses[stopping.best_epoch]

    def test_with_one_replica_it_is_that_of_a_shorter_fit_bit_for_bit(self, one_thread):
        stopped = trainer(False, callbacks=[EarlyStopping(patience=2)])
        history = stopped.fit(X, Y, epochs=50, validation=OTHER)
        shorter = trainer(False)
        shorter.fit(X, Y, epochs=history.stopping.best_epoch + 1)

        expected = parameters_of(shorter.model_)
        for name, value in parameters_of(stopped.model_).items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)

    @pytest.mark.parametrize("every", [2, 3])
    def test_it_ends_when_only_some_epochs_are_looked_at(self, epochs, every):
        """In Deeplearning4j it then never did, see its issue 4038."""
        rule = EarlyStopping(patience=1, every=every)
        own = trainer(False, master=TWO, callbacks=[rule, epochs])

        history = own.fit(X, Y, epochs=50, validation=OTHER)

        assert history.stopping.reason == "patience"
        assert len(history) < 50
        assert len(history) % every == 0
        infer_metadata = list(range(every - 1, len(history), every))
        assert sorted(history.stopping.scores) == infer_metadata
        scored = [e for e, row in enumerate(history) if not math.isnan(row["val_loss"])]
        assert scored == infer_metadata
        assert [r["val_accuracy"] >= 0 for r in history] == [
            epoch in infer_metadata for epoch in range(len(history))
        ]
        assert history.to_pandas()["val_loss"].count() == len(infer_metadata)

    @pytest.mark.parametrize(
        ("options", "reason", "epochs"),
        [({"max_seconds": 1e-6}, "max_seconds", 1), ({"target": 10.0}, "target", 1)],
        ids=str,
    )
    def test_other_reasons_are_told(self, options, reason, epochs):
        own = trainer(False, master=TWO, callbacks=[EarlyStopping("loss", **options)])

        history = own.fit(X, Y, epochs=9)

        assert history.stopping.reason == reason
        assert len(history) == epochs
        assert history.stopping.monitor == "loss"

    def test_a_score_that_is_not_finite_ends_it_and_the_best_comes_back(self):
        own = trainer(
            False, model=Overflowing, callbacks=[EarlyStopping(patience=9)]
        )  # 15 steps in each epoch

        history = own.fit(X, Y, epochs=9, validation=OTHER)

        assert history.stopping.reason == "not_finite"
        assert len(history) == 3
        assert history.stopping.restored
        assert math.isfinite(own.evaluate(*OTHER)["loss"])

    def test_a_best_model_that_was_lost_is_missed_with_a_warning(
        self, monkeypatch, caplog
    ):
        monkeypatch.setattr(
            "daskdl.training.epoch_control.EarlyStopper.best", lambda own: None
        )
        own = trainer(False, callbacks=[EarlyStopping("loss", patience=99)])

        stopping = own.fit(X, Y, epochs=2).stopping

        assert (stopping.best_epoch, stopping.restored) == (1, False)
        assert "all replicas that had the model of epoch 1, the best" in caplog.text

    def test_after_ctrl_c_what_it_saw_is_there_and_nothing_was_restored(self, ctrl_c):
        callbacks = [EarlyStopping("loss", patience=10**6), Interrupt()]
        own = trainer(False, master=TWO, callbacks=callbacks)

        with pytest.raises(KeyboardInterrupt):
            own.fit(X, Y, epochs=10**6)

        stopping = own.history_.stopping
        assert list(stopping.scores) == [0]
        assert (stopping.reason, stopping.restored) == (None, False)


class Overflowing(nn.Module):
    """Its output is NaN in evaluation, from the 40th step on."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        self.steps += self.training
        broken = not self.training and self.steps > 40
        return self.layers(x) * (float("nan") if broken else 1.0)


class TestEvaluate:
    def test_only_some_epochs_are_scored(self):
        own = trainer(False, master=TWO, callbacks=[Evaluate(every=3)])

        history = own.fit(X, Y, epochs=8, validation=OTHER)

        scored = [row["val_accuracy"] >= 0 for row in history]
        assert scored == [e in (2, 5, 7) for e in range(8)]
        waits = [row["waits"] for row in history]
        assert all({"gather", "lease"} <= each.keys() for each in waits)


@pytest.mark.parametrize(
    ("callback", "options", "message"),
    [
        (EarlyStopping(patience=1), {}, "monitor='val_loss' needs validation data"),
        (Evaluate(every=2), {}, r"Evaluate\(every=2\) needs validation data"),
        (
            EarlyStopping("val_accuracy", patience=1),
            {"validation": (X, X[:, :1].copy())},
            "monitor='val_accuracy' needs labels that are class indices",
        ),
    ],
    ids=["val_loss", "evaluate", "val_accuracy"],
)
def test_what_there_will_not_be_is_refused_before_anything_begins(
    epochs, callback, options, message
):
    own = trainer(
        False,
        model=lambda: nn.Linear(20, 1),
        loss=nn.MSELoss(),
        callbacks=[callback, epochs],
    )

    with pytest.raises(OptionError, match=message):
        own.fit(X, X[:, :1].copy(), **options)

    assert begun(0) == []
    assert not hasattr(own, "history_")
