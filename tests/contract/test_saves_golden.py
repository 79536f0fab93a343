"""Saves and checkpoints of version 1, kept for good: every later release reads them."""

import hashlib
from collections import Counter

import numpy as np
import pytest
import safetensors.torch
import torch

from daskdl import Trainer
from daskdl.saving.checkpoints import COMMON, Part, Series
from tests.golden import make_checkpoint_v1 as checkpoints
from tests.golden import make_trainer_v1 as saves

# Of the manifests, which have those of the other files.
SHA256 = {
    saves: "38de7850d3c378b086108362c631906a94646d0c49956e272aad44ca2e16edfa",
    checkpoints: "083cab1e231a8d6ce94497ff30eb43c8241c5c1256ed06f073f56e3e33fefbfc",
}


def load():
    return Trainer.load(saves.FOLDER, client=False, trusted=["tests.golden"])


@pytest.mark.parametrize("writer", SHA256)
def test_the_golden_files_are_unchanged(writer):
    digest = hashlib.sha256()
    for path in sorted(writer.FOLDER.rglob("*.json")):
        digest.update(path.read_bytes())

    assert digest.hexdigest() == SHA256[writer]


def test_a_trainer_is_loaded():
    loaded = load()
    optimizer, history = loaded.optimizer_.state_dict(), loaded.history_
    [file] = saves.FOLDER.glob("model-*.safetensors")
    model = saves.model().eval()
    model.load_state_dict(safetensors.torch.load_file(file))
    x = torch.from_numpy(saves.normalizer()((saves.inputs(), None))[0])

    predictions = torch.from_numpy(loaded.predict(saves.inputs()))

    torch.testing.assert_close(predictions, model(x).detach())
    assert loaded.master == saves.MASTER
    assert loaded.transform == saves.normalizer()
    assert (loaded.telemetry_every, loaded.progress, loaded.seed) == (1, False, 0)
    assert loaded.loss.weight.tolist() == [1.0, 1.5]
    assert type(loaded.optimizer_) is torch.optim.Adam
    assert [entry["step"].item() for entry in optimizer["state"].values()] == [6.0] * 6
    assert optimizer["param_groups"][0]["lr"] == 0.0025
    assert loaded.scheduler_.last_epoch == 2
    assert history.column("epoch") == [0, 1]
    assert history.column("examples") == [48, 48]
    assert len(history.steps) == 12
    # Nothing was sent in the other steps.
    assert Counter(row["kind"] for row in history.steps) == {"GAPS": 8, None: 4}
    assert len(history.layers) == 0


def test_a_loaded_trainer_continues(tmp_path):
    trainer = load()

    history = trainer.fit(saves.inputs(), saves.labels(), batch_size=8)

    assert history[0]["learning_rate"] == 0.0025
    assert trainer.optimizer_.param_groups[0]["lr"] == 0.00125
    assert trainer.optimizer_.state_dict()["state"][0]["step"] == 9


@pytest.mark.parametrize("name", checkpoints.WRITTEN)
def test_a_fit_resumes_from_a_checkpoint(name):
    store = Series.at(checkpoints.FOLDER / name).store
    stamp, state = Part(store, COMMON).read()
    in_the_middle = stamp.number == 3

    resumed = checkpoints.resumed(name)

    assert state["members"] == ([0] if name.startswith("one") else [0, 1])
    assert state["epoch"] == 1
    assert (state["sync_point"] is not None) == in_the_middle
    np.testing.assert_equal(
        dict(resumed.history_[0]), dict(state["rows"][0])
    )  # has NaN
    assert resumed.history_.column("learning_rate") == [0.01, 0.005, 0.0025]
    assert resumed.history_.column("examples") == [48] * checkpoints.EPOCHS
    assert resumed.history_.stopping.scores.keys() == {0, 1, 2}
    assert resumed.history_[2]["loss"] < resumed.history_[0]["loss"]
    assert resumed.optimizer_.param_groups[0]["lr"] == 0.00125


@pytest.mark.parametrize("master", checkpoints.MASTERS)
def test_the_newest_checkpoint_is_found(master):
    assert Series.at(checkpoints.FOLDER / master).newest().stamp.number == 3
