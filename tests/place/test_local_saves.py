"""A trainer that was saved and loaded goes on as if it had not been."""

import functools

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from daskdl import (
    AdaptiveThreshold,
    Checkpoint,
    FixedThreshold,
    GradientSharing,
    OptionError,
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


# `torch.compile` as in use, but without a C compiler.
compiled = functools.partial(torch.compile, backend="eager")
WRAPPED = {
    "plain": two_layers,
    "compiled": lambda: compiled(two_layers()),
    "data parallel": lambda: nn.DataParallel(two_layers()),
    "a compiled part": lambda: nn.Sequential(*map(compiled, two_layers())),
    "a parallel part": lambda: nn.Sequential(*map(nn.DataParallel, two_layers())),
}
PLACES = {
    "plain": "not wrapped",
    "compiled": r"wrapped in torch\.compile",
    "data parallel": r"wrapped in torch\.nn\.DataParallel",
    "a compiled part": r"wrapped in torch\.compile",
    "a parallel part": r"wrapped in torch\.nn\.DataParallel",
}


class TestWrappers:
    @pytest.mark.parametrize("model", WRAPPED.values(), ids=WRAPPED)
    def test_a_wrapped_model_continues_bit_for_bit(self, model, tmp_path, one_thread):
        without, saved = of_lambdas(model=model), of_lambdas(model=model)
        checkpoint = Checkpoint(str(tmp_path / "checkpoints"))
        stopped, resumed = (
            of_lambdas(model=model, callbacks=[checkpoint]) for _ in range(2)
        )
        for trainer, epochs in ((without, 2), (saved, 1), (stopped, 1)):
            fits(trainer, epochs)
        saved.save(tmp_path / "save")
        loaded = Trainer.load(tmp_path / "save", model=model(), client=False)

        for trainer in (saved, loaded):
            fits(trainer, 1)
        resumed.fit(X, Y, epochs=2, batch_size=16, resume=True)

        assert torch.equal(vector(loaded.model_), vector(saved.model_))
        assert torch.equal(vector(resumed.model_), vector(without.model_))

    @pytest.mark.parametrize("wrapper", [name for name in WRAPPED if name != "plain"])
    @pytest.mark.parametrize("saved", [True, False], ids=["saved", "not saved"])
    def test_a_save_of_another_wrapper_is_named(self, wrapper, saved, tmp_path):
        names = (wrapper, "plain") if saved else ("plain", wrapper)
        theirs, ours = (WRAPPED[name] for name in names)
        checkpoint = Checkpoint(str(tmp_path / "checkpoints"))
        trainer = of_lambdas(model=theirs, callbacks=[checkpoint])
        fits(trainer, 1)
        trainer.save(tmp_path / "save")
        there, here = (PLACES[name] for name in names)
        message = f"saved model is {there}, and this one is {here}.*saved, {there}"

        with pytest.raises(SaveError, match=message):
            Trainer.load(tmp_path / "save", model=ours, client=False)
        with pytest.raises(OptionError, match=message):
            of_lambdas(model=ours, callbacks=[checkpoint]).fit(X, Y, resume=True)

    def test_a_wrapper_does_not_hide_another_difference(self, tmp_path):
        trainer = of_lambdas(model=WRAPPED["compiled"])
        fits(trainer, 1)
        trainer.save(tmp_path)

        with pytest.raises(SaveError, match=r"_orig_mod\.2.* is missing|missing in"):
            Trainer.load(tmp_path, model=nn.Linear(20, 4), client=False)
