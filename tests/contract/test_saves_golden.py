"""A save of version 1, kept for good: every later release loads it."""

import hashlib
import json

import numpy as np
import pytest
import torch

from daskdl import Trainer
from daskdl.thresholds import Sent
from tests.golden.make_trainer_v1 import (
    FOLDER,
    MASTER,
    PREDICTIONS,
    inputs,
    labels,
    normalizer,
)

# Of the manifest, which has those of the other files.
SHA256 = "dd39752c7a6431211f8360ddff74bd612b9b75003ef77e10393165611683731d"


@pytest.fixture(scope="module")
def loaded():
    return Trainer.load(FOLDER, client=False, trusted=["tests.golden"])


def test_the_save_is_the_first_one_made():
    index = (FOLDER / "trainer.json").read_bytes()

    assert hashlib.sha256(index).hexdigest() == SHA256


def test_its_model_predicts_what_it_did(loaded):
    expected = json.loads(PREDICTIONS.read_text())

    # Another machine may add up in another order: some ulps of numbers about 1.
    np.testing.assert_allclose(loaded.predict(inputs()), expected, atol=1e-5)


def test_its_options_are_what_they_were(loaded):
    assert loaded.master == MASTER
    assert loaded.transform == normalizer()
    assert (loaded.telemetry_every, loaded.progress, loaded.seed) == (1, False, 0)
    assert loaded.loss.weight.tolist() == [1.0, 1.5]


def test_its_history_is_what_it_was(loaded):
    assert loaded.history_.column("epoch") == [0, 1]
    assert loaded.history_.column("examples") == [48, 48]
    assert len(loaded.history_.steps) == 12
    assert {row["kind"] for row in loaded.history_.steps} <= {"GAPS", "BITMAP"}


def test_optimizer_scheduler_and_thresholds_are_where_they_were(loaded):
    optimizer, state = loaded.optimizer_.state_dict(), loaded._state

    assert type(loaded.optimizer_) is torch.optim.Adam
    assert [entry["step"].item() for entry in optimizer["state"].values()] == [6.0] * 6
    assert optimizer["param_groups"][0]["lr"] == 0.0025
    assert loaded.scheduler_.last_epoch == 2
    assert (state.epochs, state.class_count, state.compression.steps) == (2, 2, 6)
    assert state.compression.sent["*.bias"] == Sent(1e-2, pytest.approx(0.5, abs=0.5))


def test_it_is_fitted_on():
    trainer = Trainer.load(FOLDER, client=False, trusted=["tests.golden"])

    history = trainer.fit(inputs(), labels(), batch_size=8)

    assert history[0]["learning_rate"] == 0.0025
    assert trainer.optimizer_.param_groups[0]["lr"] == 0.00125
    assert trainer._state.epochs == 3
