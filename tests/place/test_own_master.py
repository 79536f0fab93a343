"""A training master of a user's own: the one of `docs/extending.md`, among threads."""

import importlib.util
import sys
from pathlib import Path

import torch

from daskdl import Checkpoint
from tests.support.problems import rows, trainer
from tests.support.recording import vector

PATH = Path(__file__).parents[2] / "examples" / "own_master.py"
X, Y = rows(count=480)


def gossiping(replicas, **options):
    """Return a trainer whose master pickle can import."""
    if PATH.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
        sys.modules[PATH.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    master = sys.modules[PATH.stem].Gossip(replicas_per_worker=replicas)
    return trainer(False, master=master, **options)


def model():
    return torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.BatchNorm1d(8))


def test_several_replicas_train():
    fitted = gossiping(3, model=model)

    history = fitted.fit(X, Y, epochs=4, batch_size=8, validation=(X, Y))

    assert [row["replicas"] for row in history] == [3] * 4
    assert [row["examples"] for row in history] == [480] * 4
    assert history[-1]["val_loss"] < 0.8 * history[0]["val_loss"]


def test_one_replica_is_a_plain_loop():
    losses = [
        fitting.fit(X, Y, epochs=2, batch_size=8).column("loss")
        for fitting in (trainer(False), gossiping(1))
    ]

    assert losses[0] == losses[1]


def test_a_checkpoint_is_resumed(tmp_path):
    first = gossiping(2, model=model, callbacks=[Checkpoint(str(tmp_path))])
    first.fit(X, Y, epochs=2, batch_size=8)

    second = gossiping(2, model=model)
    history = second.fit(X, Y, epochs=3, batch_size=8, resume=str(tmp_path))

    assert [row["epoch"] for row in history] == [0, 1, 2]
    assert not torch.equal(vector(first.model_), vector(second.model_))
