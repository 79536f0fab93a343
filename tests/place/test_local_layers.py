"""Samples of layers in fits among threads: norms, histograms, bounds, reports."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import (
    LayerMonitor,
    OptionError,
    ParameterAveraging,
    TensorBoard,
    Trainer,
)
from daskdl.observe.tables import BINS
from daskdl.training import telemetry
from tests.contract.test_report import page_of
from tests.support.problems import SIZE, kept, mlp, parameters_of, plain, rows, trainer

X, Y = rows()  # 480
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
TWO = kept(replicas_per_worker=2, max_staleness=0)


def sampled(every=1, epochs=1, batch_size=48, **options):
    """A fitted trainer, by default of one replica and plain SGD at a rate of 0.02."""
    options = {"optimizer": plain, "callbacks": [LayerMonitor(every)], **options}
    fitted = trainer(False, **options)
    fitted.fit(X, Y, epochs=epochs, batch_size=batch_size)
    return fitted


class TestOneReplica:
    @pytest.fixture(scope="class")
    @classmethod
    def fitted(cls):
        return sampled(every=4, epochs=2)

    def test_only_steps_that_are_due_have_rows(self, fitted):
        layers = fitted.history_.layers

        assert layers.column("step") == [s for s in (4, 8, 12, 16, 20) for _ in NAMES]
        assert layers.column("epoch") == [0] * 8 + [1] * 12
        assert layers.column("name") == NAMES * 5
        assert set(layers.column("replica")) == {0}

    def test_parameters_are_those_after_the_step(self, fitted):
        last = fitted.history_.layers[-4:]  # of the last step

        for row, values in zip(last, fitted.model_.parameters(), strict=True):
            values = values.detach().cpu().numpy()
            assert row["parameter_norm"] == pytest.approx(np.linalg.norm(values))
            bounds = row["parameter_low"], row["parameter_high"]
            assert bounds == (values.min(), values.max())
            counts, _ = np.histogram(values.astype(np.float64), BINS)
            assert np.abs(counts - row["parameter_counts"]).sum() <= 2  # on an edge

    def test_an_update_of_plain_sgd_is_the_gradient_times_the_rate(self, fitted):
        for row in fitted.history_.layers:
            expected = 0.02 * row["gradient_norm"]
            assert row["update_norm"] == pytest.approx(expected, rel=1e-4)
            assert row["update_norm"] > 0
            assert row["ratio"] == row["update_norm"] / row["parameter_norm"]
            assert row["update_low"] == pytest.approx(
                -0.02 * row["gradient_high"], rel=1e-3, abs=1e-8
            )

    def test_every_value_is_counted(self, fitted):
        sizes = dict(zip(NAMES, (640, 32, 128, 4), strict=True))

        for row in fitted.history_.layers:
            for of in ("parameter", "gradient", "update"):
                counts = row[f"{of}_counts"]
                assert (len(counts), sum(counts)) == (BINS, sizes[row["name"]])
                assert counts[0] > 0
                assert counts[-1] > 0

    def test_it_has_no_residual(self, fitted):
        assert all(map(math.isnan, fitted.history_.layers.column("residual_norm")))


@pytest.mark.parametrize(
    "options",
    [{}, {"autocast": torch.float16}, {"accumulate": 2}],
    ids=lambda options: next(iter(options), "float32"),
)
def test_gradients_are_those_that_the_optimizer_got(options):
    layers = sampled(clip_grad_norm=0.5, **options).history_.layers

    norms = np.reshape(layers.column("gradient_norm"), (-1, len(NAMES)))
    assert np.linalg.norm(norms, axis=1) == pytest.approx(0.5, rel=1e-3)
    updates = np.array(layers.column("update_norm")).reshape(norms.shape)
    assert updates == pytest.approx(0.02 * norms, rel=1e-3)


def test_scaled_gradients_are_divided_by_the_scale():
    layers = sampled(autocast=torch.float16).history_.layers

    rates = np.divide(layers.column("update_norm"), layers.column("gradient_norm"))
    assert rates[-len(NAMES) :] == pytest.approx(0.02, rel=1e-3)


class Partly(nn.Module):
    """One parameter is never used, one is frozen, one has sparse gradients."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.words = nn.Embedding(10, 4, sparse=True)

    def forward(self, x):
        return self.words(x)


def test_unused_and_sparse_parameters_have_rows_and_frozen_ones_none():
    x = np.arange(8) % 2  # each index several times
    fitted = Trainer(
        Partly, nn.CrossEntropyLoss(), plain, client=False, callbacks=[LayerMonitor(1)]
    )

    fitted.fit(x, x, batch_size=8)

    unused, words = fitted.history_.layers
    assert (unused["name"], words["name"]) == ("unused", "words.weight")
    assert math.isnan(unused["gradient_norm"])
    assert sum(unused["gradient_counts"]) == 0
    assert (unused["update_norm"], unused["ratio"]) == (0.0, 0.0)
    assert sum(words["gradient_counts"]) == 40
    assert words["update_norm"] == pytest.approx(0.02 * words["gradient_norm"], 1e-4)


def test_half_types_are_measured_in_float32():
    fitted = sampled(model=lambda: mlp().to(torch.bfloat16))

    last = fitted.history_.layers[-len(NAMES) :]
    for row, values in zip(last, fitted.model_.parameters(), strict=True):
        norm = float(values.detach().float().norm())
        assert row["parameter_norm"] == pytest.approx(norm, rel=1e-6)
        assert row["gradient_norm"] > 0
        assert row["update_norm"] > 0


class TestTwoReplicas:
    @pytest.mark.parametrize("apply", ["eager", "strict"])
    def test_residuals_of_all_layers_are_the_residual_of_the_step(self, apply):
        master = kept(replicas_per_worker=2, apply=apply, exchange_every=2)
        fitted = sampled(master=master, telemetry_every=1, epochs=2)

        steps = {(s["replica"], s["step"]): s for s in fitted.history_.steps}
        values = {}
        for row in fitted.history_.layers:
            step = row["replica"], row["step"]
            values.setdefault(step, []).append(row["residual_norm"])
        assert values.keys() == steps.keys()
        assert len({replica for replica, _ in values}) == 2
        for step, norms in values.items():
            # Of so few parameters the sample of the step has all.
            assert SIZE < telemetry.SAMPLE
            expected = steps[step]["residual_norm"]
            assert math.hypot(*norms) == pytest.approx(expected, rel=1e-4)

    def test_averaging_has_no_residuals(self):
        fitted = sampled(master=ParameterAveraging(replicas_per_worker=2))

        layers = fitted.history_.layers
        assert set(layers.column("replica")) == {0, 1}
        assert all(map(math.isnan, layers.column("residual_norm")))
        rates = np.divide(layers.column("update_norm"), layers.column("gradient_norm"))
        assert rates == pytest.approx(0.02, rel=1e-3)

    def test_sampling_does_not_change_the_training(self):
        ends = [
            parameters_of(sampled(master=TWO, callbacks=callbacks).model_)
            for callbacks in ([], [LayerMonitor(1)])
        ]

        assert all((ends[0][name] == ends[1][name]).all() for name in ends[0])

    def test_a_replica_reports_a_bounded_number_of_rows(self, monkeypatch):
        monkeypatch.setattr(telemetry, "MAX_LAYER_ROWS", 8)  # two samples

        layers = sampled(master=TWO, batch_size=8, epochs=3).history_.layers

        for epoch in range(3):
            for replica in range(2):
                shown_rows = [
                    row
                    for row in layers
                    if (row["epoch"], row["replica"]) == (epoch, replica)
                ]
                assert len(shown_rows) <= 8
                names = [row["name"] for row in shown_rows]
                assert names == NAMES * (len(shown_rows) // len(NAMES))
        assert len(layers) > 0


def test_without_the_callback_there_are_no_rows():
    fitted = sampled(callbacks=[])

    assert len(fitted.history_.layers) == 0
    assert fitted.history_.layers.to_pandas().empty


@pytest.mark.parametrize("every", [0, 1.5, True, "epoch"])
def test_a_wrong_number_of_steps_is_refused(every):
    with pytest.raises(OptionError, match="every must be a whole number >= 1, got "):
        LayerMonitor(every)


def test_two_monitors_are_refused():
    with pytest.raises(OptionError, match="at most one LayerMonitor"):
        sampled(callbacks=[LayerMonitor(1), LayerMonitor(2)])


def test_a_saved_trainer_has_the_samples_and_the_callback(tmp_path):
    fitted = sampled(every=5, model=mlp())

    fitted.save(tmp_path)
    loaded = Trainer.load(tmp_path, model=mlp, optimizer=plain, client=False)

    assert loaded.callbacks == [LayerMonitor(5)]
    again, layers = loaded.history_.layers, fitted.history_.layers
    assert repr(list(again)) == repr(list(layers))
    assert len(layers) == 2 * len(NAMES)


def test_the_report_has_every_layer(tmp_path):
    name = "<img src=x>"

    fitted = sampled(every=5, model=lambda: nn.ModuleDict({name: mlp()})[name])
    page = page_of(fitted.history_, tmp_path)
    assert [cells[0] for cells in page.tables["Layers"][1:]] == NAMES

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({name: mlp()})

        def forward(self, x):
            return self.layers[name](x)

    page = page_of(sampled(every=5, model=Named).history_, tmp_path)

    names = [f"layers.{name}.{parameter}" for parameter in NAMES]
    assert [cells[0] for cells in page.tables["Layers"][1:]] == names
    assert "img" not in {tag for tag, _ in page.tags}


def test_tensorboard_gets_the_norms_of_several_fits(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    callbacks = [LayerMonitor(5), TensorBoard(tmp_path)]
    fitted = trainer(False, master=TWO, callbacks=callbacks, telemetry_every=None)

    first = fitted.fit(X, Y, batch_size=12)
    second = fitted.fit(X, Y, batch_size=12)

    seen = accumulator.EventAccumulator(str(tmp_path))
    seen.Reload()
    events = seen.Scalars("layers/ratio/0.weight")
    means = [
        mean["ratio"]
        for history in (first, second)
        for mean in history.layers.means()["0.weight"].values()
    ]
    assert [event.value for event in events] == [*np.float32(means)]
    steps = [event.step for event in events]
    assert steps == sorted(set(steps))
    assert len(seen.Scalars("layers/residual_norm/2.bias")) == len(events)
