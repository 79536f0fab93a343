"""Hooks of callbacks in fits among threads."""

import functools
import logging
import sys
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from daskdl import (
    Callback,
    FixedThreshold,
    PrintProgress,
    TensorBoard,
)
from tests.support.problems import kept, rows, trainer
from tests.support.recording import delivered

X, Y = rows()
TWO = kept(replicas_per_worker=2)


class Told(Callback):
    """Records the arguments of all hooks, on the client and in replicas."""

    seen = ()

    def __init__(self):
        self.fits, self.rows, self.ends = [], [], []

    def on_fit_begin(self, fit):
        self.fits.append(fit)

    def on_epoch_begin(self, epoch):
        Told.seen += ((self, epoch),)

    def on_step_end(self, step):
        Told.seen += ((self, step),)

    def on_epoch_end(self, row):
        self.rows.append(row)

    def on_fit_end(self, end):
        self.ends.append(end)


class Ends(Callback):
    """Records its end; may raise when the fit begins or ends."""

    def __init__(self, name, seen, *, begin=False, end=False):
        self.name, self.seen, self.begin, self.end = name, seen, begin, end

    def __repr__(self):
        return f"Ends({self.name})"

    def on_fit_begin(self, fit):
        if self.begin:
            raise ZeroDivisionError(f"{self.name} begins")

    def on_fit_end(self, end):
        self.seen.append(self.name)
        if self.end:
            raise ZeroDivisionError(f"{self.name} ends")


class TestHooks:
    @pytest.fixture(autouse=True)
    def nothing_seen(self, monkeypatch):
        monkeypatch.setattr(Told, "seen", ())

    def test_hooks_run_on_their_side(self):
        told = Told()
        fitted = trainer(False, master=TWO, callbacks=[told])
        fitted.fit(X, Y, epochs=2, batch_size=16)

        history = fitted.fit(X, Y, epochs=3, batch_size=16, name="deep")

        first, second = told.fits
        assert (first.epochs, first.epochs_before) == (2, 0)
        assert second._asdict() == {
            "replicas": 2,
            "epochs": 3,
            "epochs_before": 2,
            "batch_size": 16,
            "examples": 480,
            "parameters": sum(p.numel() for p in fitted.model_.parameters()),
            "name": "deep",
            "run": history.run.id,
        }
        assert told.rows[2:] == list(history)
        assert [end.error for end in told.ends] == [None, None]
        assert told.ends[1].history is history
        copies = {id(copy) for copy, _ in Told.seen}  # kept, so none is reused
        assert len(copies) == 4  # two replicas in each of two fits
        assert id(told) not in copies

    def test_an_epoch_begins_before_its_steps(self):
        halved = functools.partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)
        fitted = trainer(False, callbacks=[Told()], scheduler=halved)

        fitted.fit(X, Y, epochs=2, batch_size=240)

        shown = [(type(t).__name__, t.epoch, t.learning_rate) for _, t in Told.seen]
        first_epoch = [("EpochBegin", 0, 0.05), *[("Step", 0, 0.05)] * 2]
        assert shown == [
            *first_epoch,
            ("EpochBegin", 1, 0.025),
            *[("Step", 1, 0.025)] * 2,
        ]
        begin = Told.seen[0][1]
        assert (begin.replica, begin.replicas) == (0, 1)

    def test_an_exception_at_the_beginning_prevents_the_training(self):
        told = Told()
        fitted = trainer(
            False, master=TWO, callbacks=[told, Ends("fit", [], begin=True)]
        )

        with pytest.raises(ZeroDivisionError, match="fit begins"):
            fitted.fit(X, Y)

        assert isinstance(told.ends[0].error, ZeroDivisionError)
        assert Told.seen == ()
        assert not hasattr(fitted, "model_")

    def test_on_fit_end_runs_in_reverse_order_for_callbacks_that_began(self):
        seen = []
        callbacks = [Ends("a", seen), Ends("b", seen), Ends("c", seen, begin=True)]

        trainer(False, callbacks=callbacks[:2]).fit(X, Y)
        with pytest.raises(ZeroDivisionError, match="c begins"):
            trainer(False, callbacks=callbacks).fit(X, Y)

        assert seen == ["b", "a", "b", "a"]

    def test_an_exception_at_the_end_becomes_a_note(self):
        callbacks = [Ends("a", [], end=True), Ends("b", [], begin=True)]

        with pytest.raises(ZeroDivisionError, match="b begins") as caught:
            trainer(False, callbacks=callbacks).fit(X, Y)

        (note,) = caught.value.__notes__
        assert note.startswith("on_fit_end of Ends(a) failed as well:\nTraceback")
        assert note.endswith("ZeroDivisionError: a ends\n")
        assert "b begins" not in note


HERE = threading.local()  # the module that a replica trains
BEGUN = threading.Event()  # the replica that is changed has made a step
AHEAD = threading.Event()  # the other replica has made steps of the second epoch


class Known(nn.Linear):
    """A layer that a callback can reach."""

    def forward(self, x):
        HERE.module = self
        return super().forward(x)


class Nudges(Callback):
    """Changes a parameter of one replica, once."""

    def __init__(self, hook):
        self.hook, self.ahead = hook, 0

    def on_epoch_begin(self, epoch):
        if self.hook == "epoch" and (epoch.replica, epoch.epoch) == (0, 1):
            assert AHEAD.wait(30)
            self.nudge()

    def on_step_end(self, step):
        if self.hook == "step" and (step.replica, step.number) == (0, 3):
            self.nudge()
        if self.hook == "epoch" and step.epoch == 0:
            if step.replica == 0:
                BEGUN.set()
            assert BEGUN.wait(30)
        self.ahead += (step.replica, step.epoch) == (1, 1)
        if self.ahead == 5:
            AHEAD.set()

    def nudge(self):
        with torch.no_grad():
            HERE.module.weight.add_(0.5)


class TestChanges:
    """Every step moves every parameter by a quantum, so each update has all of them."""

    QUANTUM = 2.0**-5

    def trained(self, dtype, *callbacks, **options):
        master = kept(
            replicas_per_worker=2,
            threshold=FixedThreshold(self.QUANTUM),
            update_scale="sum",
            **options,
        )
        fitted = trainer(
            False,
            model=functools.partial(Known, 3, 1, bias=False, dtype=dtype),
            loss=lambda output, y: output.mean(),  # its gradient: the mean row
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=self.QUANTUM),
            master=master,
            callbacks=callbacks,
        )
        x = np.random.default_rng(0).uniform(1.0, 1.1, (2 * 20 * 4, 3))
        x, y = x.astype(np.float32), np.zeros(len(x))
        fitted.fit(x, y, epochs=2, batch_size=4)
        return delivered(fitted, x, y)

    @pytest.mark.parametrize(
        ("hook", "staleness"), [("step", 0), ("epoch", None)], ids=["step", "epoch"]
    )
    @pytest.mark.parametrize(
        ("dtype", "options"),
        [
            pytest.param(torch.float32, {}, id="eager"),
            pytest.param(torch.float32, {"apply": "strict"}, id="strict"),
            pytest.param(torch.bfloat16, {}, id="bfloat16"),
        ],
    )
    def test_changes_of_a_callback_reach_the_other_replica(
        self, hook, staleness, dtype, options
    ):
        BEGUN.clear()
        AHEAD.clear()
        options = {**options, "max_staleness": staleness}
        plain = self.trained(dtype, **options)

        nudged = self.trained(dtype, Nudges(hook), **options)

        moved = (nudged - plain) / self.QUANTUM
        np.testing.assert_allclose(moved, np.full(3, 0.5 / self.QUANTUM), atol=2)


def test_the_printer_sees_a_fit(capsys):
    fitted = trainer(False, master=TWO, callbacks=[PrintProgress()])

    fitted.fit(X, Y, epochs=2, validation=rows(seed=5))

    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("epoch 0 (1 of 2): loss ")
    assert second.endswith(", 2 replicas")
    assert "val_accuracy" in second


def test_tensorboard_gets_epochs_and_steps_of_several_fits(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    fitted = trainer(False, master=TWO, callbacks=[TensorBoard(tmp_path)])
    fitted.telemetry_every = 1

    first = fitted.fit(X, Y, epochs=2, validation=rows(seed=5))
    second = fitted.fit(X, Y, epochs=1, name="resnet-lr3")

    seen = accumulator.EventAccumulator(str(tmp_path))
    seen.Reload()
    losses = [(event.step, event.value) for event in seen.Scalars("epoch/loss")]
    expected = [*first.column("loss"), *second.column("loss")]
    assert losses == [*enumerate(np.float32(expected))]
    assert len(seen.Scalars("epoch/val_accuracy")) == 2
    assert all(event.value > 0 for event in seen.Scalars("epoch/waits/gather"))
    for replica in (0, 1):
        steps = [
            row["loss"]
            for history in (first, second)
            for row in history.steps
            if row["replica"] == replica
        ]
        events = seen.Scalars(f"steps/loss/replica {replica}")
        assert [event.value for event in events] == [*np.float32(steps)]
        assert len({event.step for event in events}) == len(events)
    _, text = seen.Tensors("options/text_summary")
    (options,) = text.tensor_proto.string_val
    assert f"name: resnet-lr3\n    run: {second.run.id}\n".encode() in options
    assert b"model: Sequential, " in options


@pytest.mark.parametrize("shown", [True, False])
def test_a_bar_counts_the_examples(capsys, shown):
    trainer(False, master=TWO, progress=shown).fit(X, Y, epochs=2)

    text = capsys.readouterr().err
    assert (f"{2 * len(X)}/{2 * len(X)}" in text) is shown
    assert ("epoch=1, loss=" in text) is shown
    assert (", replicas=2" in text) is shown


def lines_on_a_terminal(text):
    """What a terminal shows of a text: a carriage return goes back in the line."""
    lines = []
    for line in text.split("\n"):
        cells, column = [], 0
        for character in line:
            if character == "\r":
                column = 0
            else:
                cells[column : column + 1] = [character]
                column += 1
        lines.append("".join(cells).rstrip())
    return lines


class LogEpochs(Callback):
    """On the client: logs in each epoch, with a handler of its own and without."""

    def __init__(self, logger):
        self._logger = logger

    def on_epoch_end(self, row):
        self._logger.warning("logged in epoch %s", row["epoch"])
        bare = {"msg": f"bare in epoch {row['epoch']}", "levelno": logging.WARNING}
        logging.lastResort.handle(logging.makeLogRecord(bare))


def test_messages_do_not_share_the_line_of_the_bar(capsys):
    logger, handler = logging.getLogger("others"), logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    last = logging.lastResort
    callbacks = [LogEpochs(logger), PrintProgress(sys.stderr)]
    try:
        trainer(False, progress=True, callbacks=callbacks).fit(X, Y, epochs=2)
    finally:
        logger.removeHandler(handler)

    lines = lines_on_a_terminal(capsys.readouterr().err)
    for epoch in range(2):
        assert {f"logged in epoch {epoch}", f"bare in epoch {epoch}"} <= {*lines}
        assert any(
            line.startswith(f"epoch {epoch} ({epoch + 1} of 2): loss") for line in lines
        )
    assert sum("epoch=1, loss=" in line for line in lines) == 1  # the bar itself
    assert (handler.stream, logging.lastResort) == (sys.stderr, last)


def test_a_bar_is_shown_in_a_notebook(capsys, monkeypatch):
    shell = types.SimpleNamespace(kernel=object())
    notebook = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", notebook)

    trainer(False, master=TWO, progress=None).fit(X, Y, epochs=1)

    assert f"{len(X)}/{len(X)}" in capsys.readouterr().err
