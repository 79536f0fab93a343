"""What a trainer makes its steps with: checked together, packed together."""

import functools
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from daskdl import Callback
from daskdl.data.in_memory import InMemory
from daskdl.data.labels import ClassRange, LabelCheck
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.training.epoch_control import LearningRate, Scheduling
from daskdl.training.fit import Method, Moved, Standing
from daskdl.training.optimizer_step import Stepping

X = np.arange(12.0, dtype=np.float32).reshape(6, 2)
CLASSES = np.array([0, 1, 2, 0, 1, 2])
LOSS = nn.CrossEntropyLoss()


TRAIN = InMemory(X, CLASSES, batch_size=2)
BOTH = {"train": TRAIN, "validation": TRAIN}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def method(**changes):
    parts = {"objective": LOSS, "optimizer": sgd}
    parts |= {"stepping": Stepping(), "scheduling": Scheduling()}
    return Method(**{**parts, **changes})


class OnSteps(Callback):
    def on_step_end(self, step):
        """It would have to travel."""


def test_what_goes_together_tells_the_labels_that_the_loss_accepts():
    accepted = method().check(nn.Linear(2, 3), BOTH)

    assert accepted == (LabelCheck(ClassRange(3, -100)), 3)


@pytest.mark.parametrize(
    ("changes", "model", "validation", "kind", "message"),
    [
        ({"objective": nn.BCELoss()}, nn.Linear(2, 3), None, ModelError, "loss failed"),
        ({"stepping": Stepping(torch.float16)}, nn.Linear(2, 3).half(), None,
         OptionError, "autocast=torch.float16 needs"),
        ({"scheduling": Scheduling(lambda o: 3)}, nn.Linear(2, 3), None, OptionError,
         "scheduler must return .* got 3"),
        ({}, nn.Linear(2, 3), (X, CLASSES + 1), DataError, r"validation: y\[2\] is 3"),
        ({}, nn.Linear(2, 3), (X, None), DataError, "validation: y must be given"),
        ({}, nn.Linear(2, 3), (X[:, :1], CLASSES), ModelError, "validation: model fai"),
        ({"transform": lambda batch: 3}, nn.Linear(2, 3), None, ModelError,
         "transform must return a pair"),
    ],
    ids=["loss", "stepping", "scheduling", "validation", "no labels", "model",
         "transform"],
)  # fmt: skip
def test_what_does_not_is_refused(changes, model, validation, kind, message):
    sources = {"train": TRAIN}
    if validation is not None:
        sources["validation"] = InMemory(*validation, batch_size=2)

    with pytest.raises(kind, match=message):
        method(**changes).check(model, sources)


def test_labels_that_a_transform_makes_are_held_to_nothing():
    wrong = InMemory(X, CLASSES + 1, batch_size=2)
    own = method(transform=lambda batch: (batch[0], batch[1] - 1))

    accepted = own.check(nn.Linear(2, 3), {"train": wrong, "validation": wrong})

    assert accepted == (None, 3)


def test_every_label_in_memory_is_looked_at():
    labels = np.array([0, 1, 2, 0, 1, 3])
    wrong = InMemory(X, labels, batch_size=2)

    with pytest.raises(DataError, match=r"^y\[5\] is 3"):
        method().check(nn.Linear(2, 3), {"train": wrong})
    with pytest.raises(DataError, match=r"^validation: y\[5\] is 3"):
        method().check(nn.Linear(2, 3), {"train": TRAIN, "validation": wrong})


def test_there_has_to_be_an_optimizer():
    with pytest.raises(OptionError, match=r"optimizer must be a function .* got None"):
        method(optimizer=None)


def test_a_recipe_has_what_a_replica_needs_and_no_more():
    model = nn.Linear(2, 3)
    scheduling = Scheduling(lambda optimizer: StepLR(optimizer, 1))

    recipe = (
        method(scheduling=scheduling)
        .recipe(model, Standing(), [Callback(), OnSteps()], TRAIN)
        .unpack()
    )

    assert torch.equal(recipe.model.weight, model.weight)
    assert [type(callback) for callback in recipe.callbacks] == [OnSteps]
    assert [part.tolist() for part in recipe.rows] == [[[0, 1], [2, 3]], [0, 1]]
    assert (recipe.optimizer_state, recipe.schedule) == (None, b"")
    assert recipe.scheduling.make is not None


def test_a_recipe_goes_on_from_what_has_moved():
    scheduling = Scheduling(lambda optimizer: StepLR(optimizer, 1))
    optimizer = sgd(nn.Linear(2, 3).parameters())
    rate = LearningRate(optimizer, scheduling)
    rate.end_epoch([{**rate.note(), "tally": [1.0, 1, 0.0], "score": None}])

    own = method(scheduling=scheduling)
    moved = Moved(optimizer, rate, scheduling)
    recipe = own.recipe(nn.Linear(2, 3), Standing(moved), [], TRAIN).unpack()

    assert recipe.optimizer_state["param_groups"][0]["lr"] == pytest.approx(0.05)
    assert recipe.schedule == rate.state()


def test_what_cannot_travel_is_named():
    scheduling = Scheduling(functools.partial(StepLR, lock=threading.Lock()))

    with pytest.raises(ModelError, match=r"trainer cannot be sent .*scheduling"):
        method(scheduling=scheduling).recipe(nn.Linear(2, 3), Standing(), [], TRAIN)
