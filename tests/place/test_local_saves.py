"""A trainer that was saved and loaded goes on as if it had not been."""

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from daskdl import (
    AdaptiveThreshold,
    FixedThreshold,
    GradientSharing,
    ResidualClipping,
    Trainer,
)
from tests.support.problems import normalised, rows
from tests.support.recording import vector

X, Y = rows()
ROOT = str(Path(__file__).parents[2])


def in_step(**options):
    """Two replicas, and so a run that is repeatable bit for bit."""
    return GradientSharing(max_staleness=0, replicas_per_worker=2, **options)


def of_lambdas(**options):
    chosen = {
        "model": two_layers,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        "master": in_step(
            threshold=AdaptiveThreshold(initial=1e-3),
            residual=ResidualClipping(5.0, 5),
        ),
        "client": False,
        "progress": False,
    }
    return Trainer(**{**chosen, **options})


def two_layers():
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))


def batch_norm():
    return nn.Sequential(
        nn.Linear(20, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
    )


def in_float64():
    return nn.Sequential(nn.Linear(20, 4)).double()


def in_bfloat16():
    return nn.Sequential(nn.Linear(20, 4)).bfloat16()


def by_layer(params):
    groups = [{"params": [one], "lr": 0.01 * (i + 1)} for i, one in enumerate(params)]
    return torch.optim.SGD(groups, momentum=0.9)


def loaded_from(folder):
    return Trainer.load(folder, client=False, trusted=["tests"])


CASES = {
    "as in the design": {},
    "adam and buffers": {
        "model": batch_norm,
        "optimizer": lambda params: torch.optim.Adam(params, lr=2e-3),
    },
    # Of two, as threads, it depends on who draws first, saved or not.
    "dropout in one replica": {
        "model": normalised,
        "master": GradientSharing(max_staleness=0),
    },
    "thresholds by layer": {
        "master": in_step(
            threshold={"*.bias": FixedThreshold(1e-3), "*": AdaptiveThreshold(1e-3)}
        )
    },
    "warm-up": {"master": in_step(warmup_steps=40)},
    "one replica": {"master": GradientSharing(max_staleness=0)},
    "epoch by epoch": {"scheduler": lambda o: lr_scheduler.StepLR(o, 1, gamma=0.7)},
    "step by step": {
        "scheduler": lambda o: lr_scheduler.CosineAnnealingLR(o, 50),
        "scheduler_every": "step",
    },
    "plateau": {
        "scheduler": lambda o: lr_scheduler.ReduceLROnPlateau(
            o, patience=0, threshold=9
        )
    },
    "groups of parameters": {"optimizer": lambda params: by_layer(params)},
    "float64": {"model": in_float64},
    "bfloat16": {"model": in_bfloat16},
}


def fits(trainer, epochs):
    return trainer.fit(X, Y, epochs=epochs, batch_size=16)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_saving_and_loading_in_between_changes_no_bit(options, tmp_path, one_thread):
    without = of_lambdas(**options)
    fits(without, 2)
    without.save(tmp_path)
    loaded = loaded_from(tmp_path)

    rows_of_both = [fits(trainer, 2) for trainer in (without, loaded)]

    assert torch.equal(vector(loaded.model_), vector(without.model_))
    for name, tensor in without.model_.state_dict().items():
        assert torch.equal(loaded.model_.state_dict()[name], tensor), name
    for column in ("loss", "threshold", "density", "learning_rate", "sent_bytes"):
        ours, theirs = (history.column(column) for history in rows_of_both)
        assert ours == theirs or repr(ours) == repr(theirs), column  # or all are NaN
    assert loaded._state.epochs == without._state.epochs == 4


def test_what_was_loaded_predicts_and_scores_the_same(tmp_path):
    trainer = of_lambdas(model=normalised)
    fits(trainer, 1)
    trainer.save(tmp_path)

    loaded = loaded_from(tmp_path)

    assert (loaded.predict(X) == trainer.predict(X)).all()
    assert loaded.evaluate(X, Y) == trainer.evaluate(X, Y)
    assert list(loaded.history_) == list(trainer.history_)
    assert loaded.history_.steps[-1]["step"] == trainer.history_.steps[-1]["step"]


def test_without_the_optimizer_the_next_fit_begins_it_anew(tmp_path, one_thread):
    trainer = of_lambdas()
    fits(trainer, 2)
    trainer.save(tmp_path, optimizer=False)
    loaded = loaded_from(tmp_path)

    first = fits(loaded, 1)
    fits(trainer, 1)

    # The first thresholds again; the orders of the epochs go on.
    assert first[0]["threshold"] != trainer.history_[0]["threshold"]
    assert loaded._state.epochs == trainer._state.epochs
    assert not torch.equal(vector(loaded.model_), vector(trainer.model_))


@pytest.mark.parametrize("transform", [None, lambda batch: batch])
def test_the_number_of_classes_is_in_the_save(tmp_path, transform):
    trainer = of_lambdas(transform=transform)
    fits(trainer, 1)
    trainer.save(tmp_path)

    assert '"class_count": 4' in (tmp_path / "trainer.json").read_text()


def test_a_saved_trainer_is_not_changed(tmp_path):
    trainer = of_lambdas()
    fits(trainer, 1)
    model, state = trainer.model_, trainer.optimizer_.state_dict()
    before = vector(model).clone()

    trainer.save(tmp_path)

    assert trainer.model_ is model
    assert torch.equal(vector(model), before)
    assert repr(trainer.optimizer_.state_dict()) == repr(state)


MODULE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inner, self.outer = nn.Linear(20, width), nn.Linear(width, 4)

    def forward(self, x):
        return self.outer(self.inner(x).tanh())


def optimizer(parameters):
    first, *others = parameters
    groups = [{"params": [first], "lr": 0.1}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def loss(output, labels):
    return nn.functional.cross_entropy(output, labels)
"""
LOADING = """
import sys
import torch
from daskdl import Trainer

folder, predictions, x = sys.argv[1:]
trainer = Trainer.load(folder, client=False, trusted=["my_nets"])
x = torch.load(x)
torch.save(trainer.predict(x), predictions)
trainer.fit(x, torch.zeros(len(x), dtype=torch.int64), batch_size=16)
"""


def test_another_process_loads_it_when_told_whom_to_trust(tmp_path, monkeypatch):
    (tmp_path / "my_nets.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    nets = importlib.import_module("my_nets")
    trainer = of_lambdas(
        model=functools.partial(nets.Net, width=5),
        optimizer=nets.optimizer,
        loss=nets.loss,
    )
    fits(trainer, 1)
    trainer.save(tmp_path / "save")
    torch.save(torch.from_numpy(X), tmp_path / "x")

    paths = [tmp_path / name for name in ("save", "predictions", "x")]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOADING, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), ROOT])},
    )

    assert done.returncode == 0, done.stderr
    predictions = torch.load(tmp_path / "predictions")
    assert torch.equal(predictions, torch.from_numpy(trainer.predict(X)))
