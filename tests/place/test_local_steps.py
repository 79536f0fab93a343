"""Options of an optimizer step, among threads."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from daskdl import DivergedError, ModelError
from daskdl.objective import Penalised
from tests.support.problems import adam, kept, mlp, rows, sgd, start_of, trainer
from tests.support.recording import Notes, vector

X, Y = rows()


class TestAccumulation:
    @pytest.mark.parametrize(
        ("optimizer", "reduction"), [(sgd, "mean"), (adam, "mean"), (adam, "sum")]
    )
    def test_a_group_is_one_large_batch(self, optimizer, reduction):
        runs, loss = [], nn.CrossEntropyLoss(reduction=reduction)
        for options, batch_size in (({"accumulate": 3}, 28), ({}, 84)):
            own = trainer(False, optimizer=optimizer, loss=loss, **options)
            history = own.fit(X, Y, epochs=2, batch_size=batch_size)
            runs.append((vector(own.model_), history.column("loss")))

        torch.testing.assert_close(runs[0][0], runs[1][0], rtol=0, atol=1e-5)
        assert runs[0][1] == pytest.approx(runs[1][1], rel=1e-5)

    def test_steps_are_counted_and_not_batches(self, tmp_path):
        notes = Notes(tmp_path)
        master = kept(replicas_per_worker=2, max_staleness=0)
        own = trainer(False, master=master, accumulate=3, callbacks=[notes])

        history = own.fit(X, Y, epochs=2, batch_size=16)

        # Ten groups of 48 in an epoch, shared out evenly.
        lines = notes.read()
        assert history.column("examples") == [480, 480]
        assert [line["examples"] for line in lines] == [48] * 20
        assert {line["number"] for line in lines} == set(range(1, 11))


class Held(nn.Linear, Penalised):
    """A layer with a penalty on its weights."""

    def penalty(self):
        return self.weight.square().sum()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_penalty_counts_once_in_a_step(reduction, accumulate):
    own = trainer(
        False,
        model=lambda: Held(20, 4),
        loss=nn.CrossEntropyLoss(reduction=reduction),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        accumulate=accumulate,
    )
    module = start_of(lambda: Held(20, 4))
    loss = own.loss(module(torch.from_numpy(X)), torch.from_numpy(Y))
    (loss + module.penalty()).backward()

    # The last batch of a group has fewer rows.
    size = len(X) if accumulate == 1 else 200
    history = own.fit(X, Y, batch_size=size, shuffle=False)

    expected = module.weight - 1e-3 * module.weight.grad
    torch.testing.assert_close(own.model_.weight, expected)
    if accumulate == 1:
        penalised = loss + module.penalty()
        assert history[0]["loss"] == pytest.approx(penalised.item(), rel=1e-5)


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

    own = trainer(
        False,
        loss=None,
        step=steep,
        autocast=torch.float16,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-5),
        master=kept(replicas_per_worker=replicas),
    )

    history = own.fit(X, Y, epochs=4, batch_size=8)

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


MODES = []


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
        own = trainer(False, model=Pair, loss=None, step=own_step, master=master)

        history = own.fit(X, Y, epochs=4, batch_size=16, validation=(X, Y))
        scores = own.evaluate(X, Y)

        with torch.no_grad():
            batch = torch.from_numpy(X), torch.from_numpy(Y)
            expected = own_step(own.model_, batch).item()
        assert scores == {"loss": pytest.approx(expected, rel=1e-5)}
        assert "val_accuracy" not in history[0]
        assert history[-1]["val_loss"] < history[0]["val_loss"] / 2
        assert history[-1]["loss"] < history[0]["loss"] / 2

    def test_validation_rows_are_not_trained_on(self):
        MODES.clear()
        own = trainer(False, loss=None, step=noting_step)

        own.fit(X, Y, batch_size=40, validation=(X[:80], Y[:80]))

        rehearsed, trained, scored = MODES[:2], MODES[2:14], MODES[14:]
        assert rehearsed == [(False, False, 2)] * 2
        assert trained == [(True, True, 40)] * 12
        assert scored == [(False, False, 40)] * 2
