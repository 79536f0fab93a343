import re

import pytest
import torch
from torch import nn

from daskdl.errors import OptionError
from daskdl.objective import OwnStep, batch_loss, is_sum, objective_of, on_device

LOSS = nn.MSELoss()


def step(model, batch):
    x, y = batch
    return (model(x, shift=1.0) - y).square().mean()


class Shifted(nn.Module):
    def forward(self, x, shift):
        return x + shift


def test_a_loss_is_taken_as_it_is():
    assert objective_of(LOSS, None) is LOSS


def test_a_step_is_told_from_a_loss():
    assert objective_of(None, step) == OwnStep(step)


@pytest.mark.parametrize(
    ("loss", "own", "message"),
    [
        (None, None, "exactly one of loss and step must be given, got neither"),
        (LOSS, step, "of loss and step must be given, got loss=MSELoss() and step=<f"),
        (None, 3, "step must be a function of (model, (x, y)) that returns the batch's "
         "mean loss, got 3"),
    ],
    ids=["neither", "both", "no function"],
)  # fmt: skip
def test_anything_else_is_refused(loss, own, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        objective_of(loss, own)


def test_a_loss_is_called_with_the_output_and_the_labels():
    x, y = torch.tensor([[2.0]]), torch.tensor([[5.0]])

    assert batch_loss(lambda out, labels: labels - out, nn.Identity(), (x, y)) == 3.0


def test_a_step_calls_the_model_itself():
    x, y = torch.tensor([[2.0]]), torch.tensor([[5.0]])

    assert batch_loss(OwnStep(step), Shifted(), (x, y)) == 4.0


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (nn.MSELoss(reduction="sum"), True),
        (nn.MSELoss(), False),
        (nn.functional.mse_loss, False),
        (OwnStep(step), False),
    ],
    ids=["sum", "mean", "function", "step"],
)
def test_a_loss_may_say_that_it_sums(objective, expected):
    assert is_sum(objective) is expected


class Weighted(nn.CrossEntropyLoss):
    """As a step: it is called with the model and a batch."""

    def forward(self, model, batch):
        return super().forward(model(batch[0]), batch[1])


@pytest.mark.parametrize("own", [False, True], ids=["loss", "step"])
def test_weights_go_where_the_model_is(own):
    module = Weighted(weight=torch.ones(2))
    objective = OwnStep(module) if own else module

    moved = on_device(objective, torch.device("meta"))

    assert moved is objective
    assert module.weight.device.type == "meta"


def test_a_function_has_nothing_to_move():
    assert on_device(step, torch.device("meta")) is step
