"""A trainer that was saved and loaded goes on as if it had not been."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from daskdl import (
    AdaptiveThreshold,
    FixedThreshold,
    GradientSharing,
    ResidualClipping,
    SaveError,
    Trainer,
)
from tests.support.problems import normalised, rows
from tests.support.recording import vector

X, Y = rows(240)


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


def in_bfloat16():
    return nn.Sequential(nn.Linear(20, 4)).bfloat16()


def by_layer(params):
    groups = [{"params": [one], "lr": 0.01 * (i + 1)} for i, one in enumerate(params)]
    return torch.optim.SGD(groups, momentum=0.9)


def loaded_from(folder):
    return Trainer.load(folder, client=False, trusted=["tests"])


CASES = {
    "as in the design": {},
    "adam": {"optimizer": lambda params: torch.optim.Adam(params, lr=2e-3)},
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
    "warm-up": {"master": in_step(warmup_steps=20)},
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
    "bfloat16": {"model": in_bfloat16},
}


def fits(trainer, epochs):
    return trainer.fit(X, Y, epochs=epochs, batch_size=16)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_loaded_trainer_continues_bit_for_bit(options, tmp_path, one_thread):
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


def test_a_loaded_trainer_predicts_and_scores_the_same(tmp_path):
    trainer = of_lambdas(model=normalised)
    fits(trainer, 1)
    trainer.save(tmp_path)

    loaded = loaded_from(tmp_path)

    assert (loaded.predict(X) == trainer.predict(X)).all()
    assert loaded.evaluate(X, Y) == trainer.evaluate(X, Y)
    assert list(loaded.history_) == list(trainer.history_)
    assert loaded.history_.steps[-1]["step"] == trainer.history_.steps[-1]["step"]


def test_a_save_of_a_wrapped_model_names_the_wrapper(tmp_path):
    wrapped = nn.DataParallel(nn.Linear(20, 4))
    own = Trainer(wrapped, nn.CrossEntropyLoss(), "sgd", client=False, progress=False)
    own.fit(X, Y)
    own.save(tmp_path)

    with pytest.raises(
        SaveError, match=r"model in torch\.nn\.DataParallel, whose names"
    ):
        Trainer.load(tmp_path, model=nn.Linear(20, 4), client=False)

    again = Trainer.load(
        tmp_path, model=nn.DataParallel(nn.Linear(20, 4)), client=False
    )
    assert (again.predict(X) == own.predict(X)).all()


def test_a_wrapped_model_refuses_the_save_of_a_plain_one(tmp_path):
    plain = Trainer(
        nn.Linear(20, 4), nn.CrossEntropyLoss(), "sgd", client=False, progress=False
    )
    plain.fit(X, Y)
    plain.save(tmp_path)
    wrapped = nn.DataParallel(nn.Linear(20, 4))

    with pytest.raises(SaveError, match=r"the model is in torch\.nn\.DataParallel"):
        Trainer.load(tmp_path, model=wrapped, client=False)

    again = Trainer.load(tmp_path, model=wrapped.module, client=False)
    assert (again.predict(X) == plain.predict(X)).all()
