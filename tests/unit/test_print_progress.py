import io

import pytest

from daskdl.callbacks import FitBegin, FitEnd, PrintProgress
from daskdl.history import History, Stopping

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
        "epoch 2/9: loss 0.2500, val_loss 0.5000, val_accuracy 0.8750, 61.0 s, "
        "1 replica\n"
    )


def test_scores_that_an_epoch_does_not_have_are_left_out(progress, stream):
    progress.on_epoch_end({**ROW, "val_loss": float("nan")})

    assert stream.getvalue() == "epoch 2/9: loss 0.2500, 61.0 s, 1 replica\n"


def test_a_fit_that_came_to_its_end_needs_no_more_words(progress, stream):
    end(progress, Stopping("loss"))

    assert stream.getvalue() == ""


def test_the_last_line_says_why_a_fit_was_stopped(progress, stream):
    end(progress, Stopping("loss", "target", "loss is 1, the target 1"))

    assert stream.getvalue() == "stopped after 2 of 9 epochs: loss is 1, the target 1\n"


def test_the_last_line_names_an_error(progress, stream):
    end(progress, Stopping("loss", "target", "loss is 1"), error=KeyboardInterrupt())

    assert stream.getvalue() == "ended after 2 of 9 epochs: KeyboardInterrupt\n"


def test_without_a_stream_it_goes_to_standard_output_as_it_is_then(capsys):
    progress = PrintProgress()
    progress.on_fit_begin(BEGIN)

    progress.on_epoch_end(ROW)

    assert capsys.readouterr().out == "epoch 2/9: loss 0.2500, 61.0 s, 1 replica\n"
