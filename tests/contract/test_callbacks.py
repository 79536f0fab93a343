"""Callbacks: early stopping rules and printed lines."""

import io
import re

import pytest

from daskdl.callbacks import (
    Callback,
    EarlyStopping,
    Evaluate,
    FitBegin,
    FitEnd,
    PrintProgress,
)
from daskdl.errors import OptionError
from daskdl.observe.history import History, Stopping


class Counting(Callback):
    def on_step_end(self, step):
        pass


class Beginning(Callback):
    def on_epoch_begin(self, epoch):
        pass


@pytest.mark.parametrize(
    ("kind", "travels"),
    [(Callback, False), (PrintProgress, False), (Counting, True), (Beginning, True)],
)
def test_only_a_callback_that_overrides_a_worker_hook_runs_on_workers(kind, travels):
    assert kind().runs_on_workers is travels


NAN = float("nan")


@pytest.mark.parametrize(
    ("options", "largest"),
    [
        ({"monitor": "val_loss"}, False),
        ({"monitor": "loss"}, False),
        ({"monitor": "val_accuracy"}, True),
        ({"monitor": "val_accuracy", "mode": "min"}, False),
        ({"monitor": "loss", "mode": "max"}, True),
        ({"monitor": "kl", "mode": "max"}, True),
    ],
    ids=str,
)
def test_by_default_high_accuracy_and_low_loss_are_better(options, largest):
    rule = EarlyStopping(patience=1, **options)

    assert rule.largest_is_best is largest
    assert rule.is_better(2.0, than=1.0) is largest
    assert rule.is_better(1.0, than=2.0) is not largest
    assert not rule.is_better(1.0, than=1.0)
    assert rule.is_better(1.0, than=NAN)


@pytest.mark.parametrize(
    ("score", "on", "counts"),
    [(0.75, 1.0, True), (0.875, 1.0, False), (0.5, 1.0, True), (2.0, 1.0, False),
     (1.0, 1.0, False), (5.0, NAN, True)],
    ids=str,
)  # fmt: skip
def test_an_improvement_is_min_delta_or_more(score, on, counts):
    rule = EarlyStopping(patience=1, min_delta=0.25)

    assert rule.improves(score, on) is counts


@pytest.mark.parametrize(
    ("monitor", "score", "enough"),
    [("loss", 0.5, True), ("loss", 0.4, True), ("loss", 0.6, False),
     ("val_accuracy", 0.5, True), ("val_accuracy", 0.4, False)],
)  # fmt: skip
def test_a_score_that_reaches_the_target_is_enough(monitor, score, enough):
    assert EarlyStopping(monitor, target=0.5).is_enough(score) is enough


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"monitor": "val_f1"}, "mode must be 'min' or 'max' with monitor='val_f1', "
         "got 'auto', which knows only names with 'loss' or 'accuracy', such as "
         "'val_accuracy'"),
        ({"monitor": None}, "monitor must be the name of a column of the history, such "
         "as 'val_loss', got None"),
        ({"mode": "least"}, "mode must be one of 'min', 'max', 'auto', got 'least'"),
        ({"patience": 0}, "patience must be a whole number >= 1 or None, got 0"),
        ({"patience": 1.5}, "patience must be a whole number >= 1 or None, got 1.5"),
        ({"patience": True}, "patience must be a whole number >= 1 or None, got True"),
        ({"min_delta": -1.0}, "min_delta must be a number >= 0, got -1.0"),
        ({"min_delta": NAN}, "min_delta must be a number >= 0, got nan"),
        ({"target": NAN}, "target must be a number or None, got nan"),
        ({"target": "low"}, "target must be a number or None, got 'low'"),
        ({"max_seconds": 0}, "max_seconds must be > 0 or None, got 0"),
        ({"max_seconds": float("inf")}, "max_seconds must be > 0 or None, got inf"),
        ({"every": 0}, "every must be a whole number >= 1, got 0"),
        ({"check_finite": 1}, "check_finite must be True or False, got 1"),
        ({"restore_best": None}, "restore_best must be True or False, got None"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_options_of_early_stopping_are_refused(options, message):
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        EarlyStopping(**{"patience": 3, **options})


@pytest.mark.parametrize("every", [0, 1.0, True])
def test_evaluate_needs_a_whole_number_of_epochs(every):
    with pytest.raises(OptionError, match="every must be a whole number >= 1, got "):
        Evaluate(every=every)


BEGIN = FitBegin(2, 9, 0, 32, 1000, 650)
ROW = {"epoch": 1, "loss": 0.25, "seconds": 61.04, "replicas": 1}


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def progress(stream):
    progress = PrintProgress(stream)
    progress.on_fit_begin(BEGIN)
    return progress


def end(progress, stopping=None, error=None):
    history = History([ROW, ROW])
    history.stopping = stopping
    progress.on_fit_end(FitEnd(history, error))


def test_an_epoch_has_a_line_with_its_scores(progress, stream):
    progress.on_epoch_end({**ROW, "val_loss": 0.5, "val_accuracy": 0.875})

    assert stream.getvalue() == (
        "epoch 1 (2 of 9): loss 0.2500, val_loss 0.5000, val_accuracy 0.8750, 61.0 s, "
        "1 replica\n"
    )


def test_a_line_has_what_a_step_logs(progress, stream):
    progress.on_epoch_end({**ROW, "density": 0.5, "kl": 0.125, "val_kl": NAN})

    assert (
        stream.getvalue()
        == "epoch 1 (2 of 9): loss 0.2500, kl 0.1250, 61.0 s, 1 replica\n"
    )


def test_the_last_line_says_why_a_fit_was_stopped(progress, stream):
    end(progress, Stopping("loss", "target", "loss is 1, the target 1"))

    assert stream.getvalue() == "stopped after 2 of 9 epochs: loss is 1, the target 1\n"
