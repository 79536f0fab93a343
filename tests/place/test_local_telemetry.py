"""Rows of steps among threads, and the diagnosis of training that diverges."""

import math

import pytest
import torch

from daskdl import Callback, DivergedError
from daskdl.observe.tables import STEP_COLUMNS
from tests.support.problems import kept, parameters_of, rows, trainer
from tests.support.recording import Notes

X, Y = rows()
KINDS = {"RAW32", "GAPS", "BITMAP", "LEVELS", "DENSE8", None}  # None: nothing was sent


def two(**options):
    return kept(replicas_per_worker=2, **options)


class TestRows:
    def test_every_requested_step_has_a_row(self, tmp_path):
        notes = Notes(tmp_path)
        fitted = trainer(False, master=two(), telemetry_every=3, callbacks=[notes])

        history = fitted.fit(X, Y, epochs=3, batch_size=8)

        steps = [(line, line["number"]) for line in notes.read()]
        wanted = {
            (line["replica"], number): (line["epoch"], line["loss"])
            for line, number in steps
            if number % 3 == 0
        }
        got = {
            (row["replica"], row["step"]): (row["epoch"], row["loss"])
            for row in history.steps
        }
        assert got == wanted
        assert len(history.steps) == len(wanted)
        assert all(row.keys() == STEP_COLUMNS.keys() for row in history.steps)

    def test_rows_have_bytes_sent_and_residuals(self):
        master = two(exchange_every=1)
        fitted = trainer(False, master=master, telemetry_every=1)

        history = fitted.fit(X, Y, epochs=2, batch_size=8)

        for epoch, row in enumerate(history):
            of_epoch = [s for s in history.steps if s["epoch"] == epoch]
            assert sum(s["sent_bytes"] for s in of_epoch) == row["sent_bytes"]
            for column in ("density", "staleness"):
                mean = sum(s[column] for s in of_epoch) / len(of_epoch)
                assert mean == pytest.approx(row[column])
        assert set(history.steps.column("kind")) <= KINDS
        for step in history.steps:
            assert step["residual_p50"] <= step["residual_p90"] <= step["residual_p99"]
            assert step["residual_norm"] > 0
            inside = step["wait_s"] + step["encode_s"] + step["apply_s"]
            assert 0 < inside < step["step_s"]

    def test_rows_show_the_warm_up_and_steps_without_an_exchange(self):
        master = two(exchange_every=2, warmup_steps=4, max_staleness=0)
        fitted = trainer(False, master=master, telemetry_every=1)

        steps = fitted.fit(X, Y, batch_size=24).steps

        first = [row for row in steps if row["replica"] == 0][:6]
        kinds = [row["kind"] for row in first]
        assert kinds[:4] == [None, "DENSE8", None, "DENSE8"]
        assert kinds[5] in KINDS - {"DENSE8", None}
        assert [math.isnan(row["density"]) for row in first] == [True, False] * 3
        assert [row["density"] for row in first[1:4:2]] == [1.0, 1.0]

    def test_telemetry_does_not_change_the_training(self):
        ends = []
        for every in (None, 1):
            fitted = trainer(False, master=two(max_staleness=0), telemetry_every=every)
            fitted.fit(X, Y, epochs=2, batch_size=16)
            ends.append(parameters_of(fitted.model_))

        assert all((ends[0][name] == ends[1][name]).all() for name in ends[0])

    def test_after_an_error_the_last_rows_are_there(self):
        class FailLater(Callback):
            def on_step_end(self, step):
                if step.replica == 1 and step.number == 41:
                    raise RuntimeError("enough")

        master = two(max_staleness=0)
        interrupted = trainer(
            False, master=master, telemetry_every=2, callbacks=[FailLater()]
        )

        with pytest.raises(RuntimeError, match="enough"):
            interrupted.fit(X, Y, epochs=5, batch_size=8)  # 30 steps in each epoch

        assert len(interrupted.history_) == 1
        steps = [r["step"] for r in interrupted.history_.steps if r["replica"] == 1]
        assert steps == list(range(2, 41, 2))


class Jumping(torch.nn.CrossEntropyLoss):
    """A loss that is far too high from the 61st step on, without a gradient."""

    step = 0

    def forward(self, output, target):
        self.step += self.training
        return super().forward(output, target) + 5e3 * (self.step > 60)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rising_loss_ends_the_run_with_a_diagnosis(replicas):
    interrupted = trainer(
        False,
        loss=Jumping(),
        master=kept(replicas_per_worker=replicas, update_scale="sum"),
        clip_grad_norm=1e-9,
        telemetry_every=10,
    )

    with pytest.raises(DivergedError) as caught:
        interrupted.fit(X, Y, epochs=100, batch_size=8)

    text = str(caught.value)
    assert "the loss diverged: it is 500" in text
    assert "has been too high for 200 steps; it was 1." in text
    assert "; lower the learning rate, 0.05; " in text
    assert "gradients are clipped already" in text
    assert "set max_loss_rise=None" in text
    assert ("2 replicas move 2 times as far" in text) == (replicas == 2)
    assert interrupted.history_.steps.column("loss")[-1] > 5e3
    assert len(interrupted.history_) >= 3


def test_max_loss_rise_none_allows_a_high_loss():
    fitted = trainer(False, loss=Jumping(), max_loss_rise=None)

    assert len(fitted.fit(X, Y, epochs=8, batch_size=8)) == 8
