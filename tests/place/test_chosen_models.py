"""The better of two models at an epoch's end: shared, or with all residuals."""

import collections
import functools
import math
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import Callback, FixedThreshold
from tests.support.problems import (
    check_shows_what_was_validated,
    kept,
    mlp,
    parameters_of,
    plain,
    rows,
    trainer,
)
from tests.support.recording import ATOL, Recorded, check_barrier, delivered, records

X, Y = rows()
SEED = np.random.default_rng(0)
NOISE_X = SEED.normal(size=(1920, 20)).astype(np.float32)
NOISE_Y = SEED.integers(0, 4, 1920)


def coarse(**options):
    """Sharing of which most stays in the residuals."""
    options = {"threshold": FixedThreshold(0.06), "max_staleness": 0, **options}
    return kept(replicas_per_worker=3, **options)


def noisy(rate=0.5, **options):
    """A fit whose steps are noise."""
    return trainer(
        False,
        model=lambda: nn.Linear(20, 4),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        master=coarse(threshold=FixedThreshold(0.01), **options),
    )


def check_nothing_is_lost(fitted, folder, epochs):
    for epoch in range(epochs):
        check_barrier(records(folder, epoch))
    ends = records(folder, epochs - 1)
    expected = ends[0]["start"] + sum(end["progress"] for end in ends.values())
    np.testing.assert_allclose(delivered(fitted), expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("max_staleness", [0, 8])
def test_residuals_that_hold_progress_are_delivered(tmp_path, max_staleness):
    master = Recorded(str(tmp_path), coarse(max_staleness=max_staleness), atol=ATOL)
    fitted = trainer(False, master=master, optimizer=plain)

    history = fitted.fit(X, Y, epochs=3, batch_size=8, validation=(X, Y))

    compared = [0, 1, 2] if max_staleness == 0 else [0, 2]  # the first and the last
    for row in map(history.__getitem__, compared):
        assert row["delivered"]
        assert row["delivered_loss"] < row["shared_loss"]
    check_shows_what_was_validated(fitted, (X, Y))
    check_nothing_is_lost(fitted, tmp_path, 3)


def test_the_delivered_model_is_better_than_one_that_keeps_residuals():
    losses = []
    for compare_models in (True, False):
        master = coarse(compare_models=compare_models)
        fitted = trainer(False, master=master, optimizer=plain)
        fitted.fit(X, Y, epochs=2, batch_size=8)
        losses.append(fitted.evaluate(X, Y)["loss"])

    assert losses[0] < 0.9 * losses[1]
    assert math.isnan(fitted.history_[-1]["shared_loss"])
    assert fitted.history_.column("delivered") == [False] * 2


def test_residuals_that_are_noise_stay(tmp_path):
    fitted = noisy()
    fitted.master = Recorded(str(tmp_path), fitted.master, atol=ATOL)

    history = fitted.fit(NOISE_X, NOISE_Y, epochs=4, batch_size=8)

    assert history.column("delivered") == [False] * 4
    for row in history:
        assert row["delivered_loss"] >= row["shared_loss"]
    check_nothing_is_lost(fitted, tmp_path, 4)


class Impure(nn.Module):
    """Has statistics, changes its input, and draws random numbers in evaluation."""

    def __init__(self, in_place=True):
        super().__init__()
        self.in_place = in_place
        self.norm, self.linear = nn.BatchNorm1d(20), nn.Linear(20, 4)

    def forward(self, x):
        if not self.training:
            torch.rand(1)
        x = x.mul_(0.5) if self.in_place else x * 0.5
        return self.linear(self.norm(x))


def test_models_that_change_their_input_are_scored_on_what_was_there(one_thread):
    scores = []
    for in_place in (True, False):
        fitted = noisy()
        fitted.model = functools.partial(Impure, in_place)
        row = fitted.fit(NOISE_X, NOISE_Y, batch_size=8)[0]
        scores.append((row["shared_loss"], row["delivered_loss"]))

    assert scores[0] == scores[1]


class RandomStates(Callback):
    """Keeps the states of torch's generator in training, by epoch."""

    seen: ClassVar = collections.defaultdict(list)

    def on_step_end(self, step):
        self.seen[step.epoch].append(torch.get_rng_state().numpy().tobytes())


def test_a_comparison_without_delivery_changes_nothing(one_thread):
    runs = []
    for compare_models in (True, False):
        RandomStates.seen.clear()
        fitted = noisy(rate=2.0, compare_models=compare_models)
        fitted.model, fitted.callbacks = Impure, [RandomStates()]
        history = fitted.fit(NOISE_X, NOISE_Y, epochs=2, batch_size=8)
        assert history.column("delivered") == [False] * 2
        assert {*RandomStates.seen[1]} == {RandomStates.seen[0][-1]}
        runs.append((parameters_of(fitted.model_), history.column("loss")))

    np.testing.assert_equal(runs[0], runs[1])


def test_lockstep_runs_with_deliveries_repeat_bit_for_bit():
    runs = []
    for _ in range(2):
        fitted = trainer(False, master=coarse(), model=mlp, seed=7)
        history = fitted.fit(X, Y, epochs=3, batch_size=8)
        assert any(history.column("delivered"))
        names = "loss", "shared_loss", "delivered_loss", "delivered"
        runs.append((parameters_of(fitted.model_), [*map(history.column, names)]))

    np.testing.assert_equal(runs[0], runs[1])
