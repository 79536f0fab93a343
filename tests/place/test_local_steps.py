"""Options of an optimizer step, among threads."""

import functools
import math
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from daskdl import DivergedError, EarlyStopping, ModelError, Trainer
from daskdl.objective import Penalized
from tests.support.problems import (
    adam,
    kept,
    mlp,
    rows,
    sgd,
    shown,
    start_of,
    trainer,
)
from tests.support.recording import Notes, vector

X, Y = rows()


class TestAccumulation:
    @pytest.mark.parametrize(
        ("optimizer", "reduction"), [(sgd, "mean"), (adam, "mean"), (adam, "sum")]
    )
    def test_a_group_is_one_large_batch(self, optimizer, reduction):
        runs, loss = [], nn.CrossEntropyLoss(reduction=reduction)
        for options, batch_size in (({"accumulate": 3}, 28), ({}, 84)):
            fitted = trainer(False, optimizer=optimizer, loss=loss, **options)
            history = fitted.fit(X, Y, epochs=2, batch_size=batch_size)
            runs.append((vector(fitted.model_), history.column("loss")))

        torch.testing.assert_close(runs[0][0], runs[1][0], rtol=0, atol=1e-5)
        assert runs[0][1] == pytest.approx(runs[1][1], rel=1e-5)

    def test_steps_are_counted_and_not_batches(self, tmp_path):
        notes = Notes(tmp_path)
        master = kept(replicas_per_worker=2, max_staleness=0)
        fitted = trainer(False, master=master, accumulate=3, callbacks=[notes])

        history = fitted.fit(X, Y, epochs=2, batch_size=16)

        # Ten groups of 48 in an epoch, shared out evenly.
        lines = notes.read()
        assert history.column("examples") == [480, 480]
        assert [line["examples"] for line in lines] == [48] * 20
        assert {line["number"] for line in lines} == set(range(1, 11))


class Held(nn.Linear, Penalized):
    """A layer with a penalty on its weights."""

    def penalty(self):
        return self.weight.square().sum()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_penalty_counts_once_in_a_step(reduction, accumulate):
    fitted = trainer(
        False,
        model=lambda: Held(20, 4),
        loss=nn.CrossEntropyLoss(reduction=reduction),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        accumulate=accumulate,
    )
    module = start_of(lambda: Held(20, 4))
    loss = fitted.loss(module(torch.from_numpy(X)), torch.from_numpy(Y))
    (loss + module.penalty()).backward()

    # The last batch of a group has fewer rows.
    size = len(X) if accumulate == 1 else 200
    history = fitted.fit(X, Y, batch_size=size, shuffle=False)

    expected = module.weight - 1e-3 * module.weight.grad
    torch.testing.assert_close(fitted.model_.weight, expected)
    if accumulate == 1:
        penalized = loss + module.penalty()
        assert history[0]["loss"] == pytest.approx(penalized.item(), rel=1e-5)


def of_model(model, lr=0.05):
    return torch.optim.SGD(model.parameters(), lr)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "sgd", "lr": 0.05},
        {"optimizer": "SGD", "lr": 0.05},
        {"optimizer": torch.optim.SGD, "lr": 0.05},
        {"optimizer": functools.partial(torch.optim.SGD, momentum=0), "lr": 0.05},
        {"optimizer": lambda module: torch.optim.SGD(module.parameters(), lr=0.05)},
        {"optimizer": of_model},
        {"optimizer": functools.partial(of_model, lr=0.05)},
    ],
    ids=shown,
)
def test_an_optimizer_is_given_in_several_forms(options):
    plain = trainer(False, optimizer=lambda params: torch.optim.SGD(params, lr=0.05))
    fitted = trainer(False, **options)

    for each in (plain, fitted):
        each.fit(X, Y)

    assert torch.equal(vector(fitted.model_), vector(plain.model_))


def test_a_function_of_the_model_makes_groups_by_name(tmp_path):
    def make(module):
        named = list(module.named_parameters())
        fixed = [p for name, p in named if name.startswith("0.")]
        others = [p for name, p in named if not name.startswith("0.")]
        groups = [{"params": fixed, "lr": 0.0}, {"params": others}]
        return torch.optim.SGD(groups, lr=0.05)

    first, last = 20 * 32 + 32, 32 * 4 + 4
    fitted = trainer(False, optimizer=make)

    fitted.fit(X, Y)

    still = vector(fitted.model_) == vector(start_of(mlp))
    assert still[:first].all()
    assert not still[-last:].all()
    fitted.save(tmp_path)
    loaded = Trainer.load(tmp_path, model=mlp, client=False)
    assert [group["lr"] for group in loaded.optimizer_.param_groups] == [0.0, 0.05]


class Gan(nn.Module):
    """Two models: one makes numbers from noise, the other tells them from real ones."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = nn.Linear(20, 3), nn.Linear(3, 1)


def gan_losses(generator, discriminator, batch):
    noise, real = batch
    fake = generator(noise)
    of_real, of_fake = discriminator(real), discriminator(fake.detach())
    judged = functional.softplus(-of_real).mean() + functional.softplus(of_fake).mean()
    fixed = {name: p.detach() for name, p in discriminator.named_parameters()}
    fooled = torch.func.functional_call(discriminator, fixed, (fake,))
    return judged, functional.softplus(-fooled).mean()


def gan_step(model, batch):
    judged, fooled = gan_losses(model.generator, model.discriminator, batch)
    return judged + fooled, {"judged": judged, "fooled": fooled}


def test_one_step_trains_two_models_as_two_optimizers_do():
    real = X[:, :3] + 1

    def make(module):
        parts = module.generator, module.discriminator
        each = zip(parts, (0.1, 0.3), strict=True)
        groups = [{"params": part.parameters(), "lr": lr} for part, lr in each]
        return torch.optim.Adam(groups)

    fitted = trainer(False, model=Gan, loss=None, step=gan_step, optimizer=make)
    history = fitted.fit(X, real, batch_size=96, shuffle=False)

    plain = start_of(Gan)
    of_generator = torch.optim.Adam(plain.generator.parameters(), lr=0.1)
    of_discriminator = torch.optim.Adam(plain.discriminator.parameters(), lr=0.3)
    for start in range(0, 480, 96):
        batch = [torch.from_numpy(t[start : start + 96]) for t in (X, real)]
        losses = gan_losses(plain.generator, plain.discriminator, batch)
        for optimizer, loss in zip(
            (of_discriminator, of_generator), losses, strict=True
        ):
            optimizer.zero_grad()
            loss.backward()
        of_generator.step()
        of_discriminator.step()
    torch.testing.assert_close(vector(fitted.model_), vector(plain))
    row = history[0]
    assert row["loss"] == pytest.approx(row["judged"] + row["fooled"])


def test_an_optimizer_without_a_rate_to_scale_is_named():
    class Signs(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self):
            raise AssertionError("its rate cannot be scaled")

    master = kept(replicas_per_worker=2, apply="strict")

    with pytest.raises(ModelError, match=r"groups \[0\] .* no 'lr' to scale by 0.5"):
        trainer(False, optimizer=Signs, master=master).fit(X, Y)


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 3}, {"clip_grad_norm": 0.3}, {"autocast": torch.float16}],
    ids=str,
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loss_that_is_not_finite_ends_the_run(replicas, options):
    bad = X.copy()
    bad[300, 7] = np.nan
    master = kept(replicas_per_worker=replicas)

    with pytest.raises(DivergedError, match="the loss became nan at step"):
        trainer(False, master=master, **options).fit(bad, Y, batch_size=16)


@pytest.mark.parametrize("replicas", [1, 2])
def test_overflowing_float16_gradients_do_not_end_the_run(replicas):
    def steep(model, batch):
        return 1e3 * functional.cross_entropy(model(batch[0]), batch[1])

    fitted = trainer(
        False,
        loss=None,
        step=steep,
        autocast=torch.float16,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-5),
        master=kept(replicas_per_worker=replicas),
    )

    history = fitted.fit(X, Y, epochs=4, batch_size=8)

    assert history[-1]["loss"] < 0.8 * history[0]["loss"]


class Pair(nn.Module):
    """A model whose forward pass needs another argument."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, x, *, temperature):
        return self.layers(x) / temperature


def own_step(model, batch):
    x, y = batch
    return functional.cross_entropy(model(x, temperature=2.0), y)


MODES, TIMES = [], []


def noting_step(model, batch):
    """A step that needs gradients in evaluation too, as physics-informed ones do."""
    x = batch[0].clone().requires_grad_()
    MODES.append((model.training, torch.is_grad_enabled(), len(x)))
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return functional.cross_entropy(model(x), batch[1]) + slope.square().mean()


class TestOwnStep:
    @pytest.mark.parametrize("replicas", [1, 2])
    def test_a_step_replaces_the_loss(self, replicas):
        master = kept(replicas_per_worker=replicas)
        fitted = trainer(False, model=Pair, loss=None, step=own_step, master=master)

        history = fitted.fit(X, Y, epochs=4, batch_size=16, validation=(X, Y))
        scores = fitted.evaluate(X, Y)

        with torch.no_grad():
            batch = torch.from_numpy(X), torch.from_numpy(Y)
            expected = own_step(fitted.model_, batch).item()
        assert scores == {"loss": pytest.approx(expected, rel=1e-5)}
        assert "val_accuracy" not in history[0]
        assert history[-1]["val_loss"] < history[0]["val_loss"] / 2
        assert history[-1]["loss"] < history[0]["loss"] / 2

    @pytest.mark.parametrize("replicas", [1, 2])
    @pytest.mark.parametrize("form", [tuple, dict])
    def test_logs_are_means_over_the_examples_of_all_replicas(self, form, replicas):
        def step(model, batch):
            loss = functional.cross_entropy(model(batch[0]), batch[1])
            logs = {"label": batch[1].float().mean(), "rows": len(batch[0])}
            return (loss, logs) if form is tuple else {"loss": loss, **logs}

        master = kept(replicas_per_worker=replicas, max_staleness=0)
        stopping = EarlyStopping("val_label", mode="max", patience=1)
        best = Y.argsort()[-100:]
        fitted = trainer(
            False, loss=None, step=step, master=master, accumulate=2,
            callbacks=[stopping],
        )  # fmt: skip

        # The last step of an epoch has 16 rows less than the others.
        history = fitted.fit(X[:464], Y[:464], epochs=9, validation=(X[best], Y[best]))

        assert history.column("label") == pytest.approx([Y[:464].mean()] * 2)
        assert history.column("rows") == pytest.approx([(14 * 32**2 + 16**2) / 464] * 2)
        assert history.column("val_label") == pytest.approx([Y[best].mean()] * 2)
        assert history.stopping.reason == "patience"
        scores = fitted.evaluate(X[best], Y[best], batch_size=50)
        assert scores.keys() == {"loss", "label", "rows"}
        assert scores["rows"] == 50

    def test_a_log_that_is_only_there_at_times_is_nan_in_other_epochs(self):
        def step(model, batch):
            loss = functional.cross_entropy(model(batch[0]), batch[1])
            TIMES.append(model.training)
            return loss, {"late": 1.0} if sum(TIMES) > 2 else {}

        TIMES.clear()
        fitted = trainer(False, loss=None, step=step)

        history = fitted.fit(X, Y, epochs=2, batch_size=240)

        assert [*map(math.isnan, history.column("late"))] == [True, False]
        assert "late" in history._repr_html_()

    def test_a_step_may_return_the_output_of_a_model_that_has_a_loss(self):
        def step(model, batch):
            logits = model(batch[0])
            loss = functional.cross_entropy(logits, batch[1])
            return types.SimpleNamespace(loss=loss, logits=logits)

        history = trainer(False, loss=None, step=step).fit(X, Y)

        assert "logits" not in history[0]

    def test_validation_rows_are_not_trained_on(self):
        MODES.clear()
        fitted = trainer(False, loss=None, step=noting_step)

        fitted.fit(X, Y, batch_size=40, validation=(X[:80], Y[:80]))

        rehearsed, trained, scored = MODES[:4], MODES[4:16], MODES[16:]
        assert sorted(rehearsed) == [(False, False, 2)] * 2 + [(False, True, 2)] * 2
        assert trained == [(True, True, 40)] * 12
        assert scored == [(False, False, 40)] * 2


def test_an_output_that_the_loss_does_not_need_is_freed_before_the_backward_pass():
    existing = []

    class Remembered(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            remembered = weakref.ref(output)
            if output.requires_grad:
                output.register_hook(lambda gradient: existing.append(remembered()))
            return output

    fitted = trainer(
        False, model=lambda: Remembered(20, 2), loss=lambda output, y: output.sum()
    )

    fitted.fit(X, Y, epochs=1, batch_size=32)

    assert existing
    assert not any(output is not None for output in existing)
