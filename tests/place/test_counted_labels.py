"""A mean over batches counts the labels that count, and not the rows.

Labels are ignored, or their class has a weight, so batches of equal rows weigh unequal;
and in some batches, no label counts.
"""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from daskdl import Callback, DivergedError, ParameterAveraging
from daskdl.keras.compiled import CategoricalCrossentropy
from tests.support.problems import kept, parameters_of, rows, sgd, start_of, trainer

X, Y = rows(96)
Y[np.random.default_rng(1).random(96) < 0.5] = -100
Y[8:16] = Y[32:64] = -100  # a batch of 8, and one of 32
WEIGHT = np.random.default_rng(2).integers(0, 3, 96)
BY_CLASS = torch.tensor([1.0, 5.0, 0.0, 0.2])


def net():
    return nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 4))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(20, 4), nn.Linear(20, 4)

    def forward(self, x):
        return {"a": self.a(x), "b": self.b(x)}


class ForEachPosition(nn.Module):
    """Scores (B, C, T) of classes, for labels (B, T)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(20, 12)

    def forward(self, x):
        return self.linear(x).reshape(-1, 4, 3)


def log_probabilities():
    return nn.Sequential(net(), nn.LogSoftmax(1))


BOTH = {"a": Y, "b": Y[::-1].copy()}
SEQUENCES = np.stack([Y, Y[::-1], np.roll(Y, 5)], axis=1)
CASES = {
    "ignored": (net, nn.CrossEntropyLoss(), Y),
    "another index": (net, nn.CrossEntropyLoss(ignore_index=2), Y.clip(0)),
    "weights": (net, nn.CrossEntropyLoss(BY_CLASS, label_smoothing=0.1), Y),
    "NLL": (log_probabilities, nn.NLLLoss(BY_CLASS), Y),
    "function": (net, functional.cross_entropy, Y),
    "partial": (net, functools.partial(functional.cross_entropy, weight=BY_CLASS), Y),
    "sequences": (ForEachPosition, nn.CrossEntropyLoss(BY_CLASS), SEQUENCES),
    "Keras": (net, CategoricalCrossentropy(True, ignore_index=0), Y.clip(0)),
    "sum": (net, nn.CrossEntropyLoss(BY_CLASS, reduction="sum"), Y),
    "numbers": (net, nn.MSELoss(), X[:, :4]),
    "several": (TwoHeads, {"a": nn.CrossEntropyLoss(), "b": "cross_entropy"}, BOTH),
}


def plain(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def fitted(case, batch_size, accumulate, **options):
    model, loss, y = case
    fitted = trainer(
        False, model=model, loss=loss, optimizer=plain, accumulate=accumulate, **options
    )
    fitted.fit(X, y, batch_size=batch_size, epochs=2, shuffle=False)
    return fitted


@pytest.mark.parametrize(
    ("case", "master"),
    [
        *((case, kept()) for case in CASES.values()),
        (CASES["weights"], ParameterAveraging(frequency=2)),
    ],
    ids=[*CASES, "averaging"],
)
def test_accumulated_batches_are_one_large_batch(case, master):
    large, small = (fitted(case, *sizes, master=master) for sizes in ((32, 1), (8, 4)))

    for name, value in parameters_of(large.model_).items():
        close = {"rtol": 1e-4, "atol": 1e-6, "err_msg": name}
        np.testing.assert_allclose(parameters_of(small.model_)[name], value, **close)
    assert small.history_[1]["loss"] == pytest.approx(large.history_[1]["loss"], 1e-4)


@pytest.mark.parametrize("name", [name for name in CASES if name != "several"])
def test_scores_do_not_depend_on_the_batch_size(name):
    model, loss, y = CASES[name]
    fitted = trainer(False, model=model, loss=loss, optimizer=plain)
    fitted.fit(X, y, batch_size=96)

    whole, cut = (fitted.evaluate(X, y, batch_size=size) for size in (96, 5))

    assert cut == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("name", ["ignored", "weights", "sequences"])
def test_weights_of_rows_and_labels_are_multiplied(name):
    model, loss, y = CASES[name]
    large, small = (
        trainer(False, model=model, loss=loss, optimizer=plain, accumulate=accumulate)
        for accumulate in (1, 4)
    )
    options = {"sample_weight": WEIGHT, "shuffle": False, "validation": (X, y, WEIGHT)}

    large.fit(X, y, batch_size=32, **options)
    small.fit(X, y, batch_size=8, **options)

    for key, value in parameters_of(large.model_).items():
        close = {"rtol": 1e-4, "atol": 1e-6, "err_msg": key}
        np.testing.assert_allclose(parameters_of(small.model_)[key], value, **close)
    for column in ("loss", "val_loss"):
        expected = pytest.approx(large.history_[0][column], rel=1e-4)
        assert small.history_[0][column] == expected


def test_the_loss_of_an_epoch_is_the_mean_over_its_labels():
    """With a rate of almost 0, the model of all steps is the same."""

    def still(parameters):
        return torch.optim.SGD(parameters, lr=1e-30)

    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 1.0, 0.2]))
    fitted = trainer(False, model=net, loss=loss, optimizer=still)

    fitted.fit(X, Y, batch_size=8, validation=(X, Y))

    mean = loss(fitted.model_(torch.from_numpy(X)), torch.from_numpy(Y)).item()
    assert fitted.history_[0]["loss"] == pytest.approx(mean, rel=1e-5)
    assert fitted.history_[0]["val_loss"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_without_labels_trains_as_in_a_plain_loop(one_thread, accumulate):
    """Its gradients are 0, and the momentum moves the parameters."""
    model = start_of(net)
    optimizer = sgd(model.parameters())
    for start in range(0, 96, 8 * accumulate):
        optimizer.zero_grad()
        output = model(torch.from_numpy(X[start : start + 8 * accumulate]))
        labels = torch.from_numpy(Y[start : start + 8 * accumulate])
        functional.cross_entropy(output, labels).backward()
        optimizer.step()

    fitted = trainer(False, model=net, accumulate=accumulate)
    fitted.fit(X, Y, batch_size=8, shuffle=False)

    for name, value in parameters_of(model).items():
        if accumulate == 1:
            assert (parameters_of(fitted.model_)[name] == value).all(), name
        else:
            np.testing.assert_allclose(parameters_of(fitted.model_)[name], value, 1e-4)


class Losses(Callback):
    def __init__(self):
        self.losses = []

    def on_step_end(self, step):
        self.losses.append(step.loss)


@pytest.mark.parametrize("autocast", [None, torch.float16])
def test_no_label_at_all_is_no_divergence(autocast):
    nothing, watch = np.full(96, -100), Losses()
    fitted = trainer(False, model=net, callbacks=[watch], autocast=autocast)

    fitted.fit(X, nothing, validation=(X, nothing))

    assert np.isnan([fitted.history_[0]["loss"], fitted.history_[0]["val_loss"]]).all()
    assert np.isnan(fitted.evaluate(X, nothing)["loss"])
    start = parameters_of(start_of(net))
    for name, value in parameters_of(fitted.model_).items():
        assert (value == start[name]).all(), name


def divided_by_zero(output, y):
    counted = y != -100
    losses = functional.cross_entropy(output, y, reduction="none")
    return (losses * counted).sum() / counted.sum()


def with_remedy(output, y):
    counted = y != -100
    losses = functional.cross_entropy(output, y, reduction="none")
    return (losses * counted).sum() / counted.sum().clamp(min=1)


def as_a_step(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


OWN = {
    "function": {"loss": lambda output, y: functional.cross_entropy(output, y) * 1},
    "division": {"loss": divided_by_zero},
    "step": {"loss": None, "step": as_a_step},
}


@pytest.mark.parametrize("objective", OWN.values(), ids=OWN)
def test_a_loss_of_the_users_own_that_divides_by_no_label_is_named(objective):
    failing = trainer(False, model=net, **objective)

    with pytest.raises(DivergedError, match="no label of this batch counts") as caught:
        failing.fit(X, Y, batch_size=8, shuffle=False)

    assert "learning rate" not in str(caught.value)


REMEDIES = [
    with_remedy,
    nn.CrossEntropyLoss(ignore_index=-100),
    functools.partial(functional.cross_entropy, ignore_index=-100),
]


@pytest.mark.parametrize("loss", REMEDIES, ids=["clamp", "module", "partial"])
def test_the_remedies_of_its_message_work(loss):
    trainer(False, model=net, loss=loss).fit(X, Y, batch_size=8, shuffle=False)


def test_nan_in_x_is_not_blamed_on_the_loss():
    broken = X.copy()
    broken[40] = np.nan

    with pytest.raises(DivergedError) as caught:
        trainer(False, model=net).fit(broken, Y.clip(0), batch_size=8, shuffle=False)

    assert "check X for NaN" in str(caught.value)
