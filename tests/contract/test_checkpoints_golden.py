"""Checkpoints of version 1, kept for good: every later release goes on from them."""

import hashlib
import json

import numpy as np
import pytest

from daskdl.saving.checkpoints import Series
from tests.golden.make_checkpoint_v1 import (
    EPOCHS,
    FOLDER,
    RESULTS,
    WRITTEN,
    results,
    resumed,
)

# Of their manifests, which have those of the other files.
SHA256 = "3cafafeca125b3f5297746d18919877f79fbb18f253c122258eddb4bfd853960"


def test_they_are_the_first_ones_made():
    digest = hashlib.sha256()
    for path in sorted(FOLDER.glob("*/*/*.json")):
        digest.update(path.read_bytes())

    assert digest.hexdigest() == SHA256


@pytest.mark.parametrize("name", WRITTEN)
def test_a_fit_that_goes_on_comes_to_what_it_did(name):
    expected = json.loads(RESULTS.read_text())[name]

    own = resumed(name)

    found = results(own)
    assert found["learning_rate"] == expected["learning_rate"]
    assert len(found["loss"]) == EPOCHS
    # Another machine may add up in another order.
    for column in ("loss", "outputs"):
        np.testing.assert_allclose(found[column], expected[column], rtol=0, atol=1e-5)


@pytest.mark.parametrize("master", sorted(set(WRITTEN.values())))
def test_the_newest_is_in_the_middle_of_the_second_epoch(master):
    found = Series.at(FOLDER / master).newest()

    assert found.header["epoch"] == 1
    assert found.header["sync_point"] is not None
    assert found.members == ([0] if master == "one" else [0, 1])


def test_those_at_the_end_of_an_epoch_have_a_best_model():
    own = resumed("sharing/checkpoint-000002")

    assert own.history_.stopping.scores.keys() == {0, 1, 2}
    assert own.optimizer_.param_groups[0]["lr"] == 0.00125
    assert own._state.epochs == EPOCHS
