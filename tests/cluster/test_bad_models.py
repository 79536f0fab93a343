"""Models, losses and optimizers that cannot be used are refused by name."""

import threading

import pytest
import torch
from torch import nn

from daskdl import Callback, ModelError
from tests.support.problems import mlp, rows, trainer

X, Y = rows(64)


class Locked(nn.Sequential):
    """It holds what cannot be pickled."""

    def __init__(self):
        super().__init__(nn.Linear(20, 4))
        self.lock = threading.Lock()


class LockedCallback(Callback):
    def __init__(self):
        self.lock = threading.Lock()

    def on_step_end(self, step):
        """It would have to travel."""


def locked_loss():
    loss = nn.CrossEntropyLoss()
    loss.lock = threading.Lock()
    return loss


def frozen():
    return mlp().requires_grad_(False)


def on_other_parameters(_):
    return torch.optim.SGD(mlp().parameters(), lr=0.1)


MODELS = {
    "nothing to train": (
        {"model": frozen},
        "model has no trainable parameters: Sequential has none with requires_grad",
    ),
    "no module": (
        {"model": 3},
        "model must be a torch.nn.Module or a function that returns one, got 3",
    ),
    "a function of nothing": (
        {"model": lambda: None},
        "model must be a torch.nn.Module or a function that returns one, got None",
    ),
    "not seen yet": (
        {"model": nn.LazyLinear(4)},
        "the shape of model.weight is not known yet; run the model on one batch",
    ),
    "too narrow": (
        {"model": nn.Linear(7, 4)},
        r"model failed on 2 rows of X, shape \(2, 20\)",
    ),
    "locked": ({"model": Locked()}, r"model\.lock \(a _thread\.lock\) cannot"),
    "a loss for each row": (
        {"loss": nn.CrossEntropyLoss(reduction="none")},
        r"loss must return one floating number .* got shape \(2,\).* take the mean",
    ),
    "a class of losses": (
        {"loss": nn.CrossEntropyLoss},
        r"loss is the class CrossEntropyLoss; create one, CrossEntropyLoss\(\)",
    ),
    "locked loss": ({"loss": locked_loss()}, r"loss\.lock \(a _thread\.lock\) cannot"),
    "no optimizer": (
        {"optimizer": "adam"},
        "optimizer must be a function that makes one .*; got 'adam'",
    ),
    "an optimizer": (
        {"optimizer": torch.optim.SGD(mlp().parameters(), lr=0.1)},
        "optimizer must be a function that makes one from parameters",
    ),
    "optimizer of nothing": (
        {"optimizer": lambda params: None},
        "optimizer must return a torch.optim.Optimizer, got None",
    ),
    "optimizer of another model": (
        {"optimizer": on_other_parameters},
        "optimizer works on parameters it was not given",
    ),
    "locked callback": (
        {"callbacks": [LockedCallback()]},
        r"trainer\.callbacks\[0\]\.lock \(a _thread\.lock\) cannot be pickled",
    ),
}


@pytest.mark.parametrize(("options", "message"), MODELS.values(), ids=MODELS)
def test_a_model_loss_or_optimizer_that_cannot_be_used(untouched, options, message):
    with pytest.raises(ModelError, match=message):
        trainer(untouched, **options).fit(X, Y)
