"""What a trainer makes its steps with: checked together, packed together."""

import numpy as np
import pytest
import torch
from torch import nn

from daskdl import GradientSharing
from daskdl.data.in_memory import InMemory
from daskdl.data.labels import ClassRange, LabelCheck
from daskdl.data.options import ReadOptions
from daskdl.errors import DataError, ModelError, OptionError
from daskdl.training.epoch_control import Scheduling
from daskdl.training.fit_spec import FitSpec
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
    return FitSpec(master=GradientSharing(), **{**parts, **changes})


def test_what_goes_together_tells_the_labels_that_the_loss_accepts():
    accepted = method().check(nn.Linear(2, 3), BOTH)

    assert accepted[:2] == (LabelCheck(ClassRange(3, -100)), 3)


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
        ({"read": ReadOptions(2, lambda batch: 3)}, nn.Linear(2, 3), None, ModelError,
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
    own = method(read=ReadOptions(2, lambda batch: (batch[0], batch[1] - 1)))

    accepted = own.check(nn.Linear(2, 3), {"train": wrong, "validation": wrong})

    assert accepted[:2] == (None, 3)


def test_every_label_in_memory_is_looked_at():
    labels = np.array([0, 1, 2, 0, 1, 3])
    wrong = InMemory(X, labels, batch_size=2)

    with pytest.raises(DataError, match=r"^y\[5\] is 3"):
        method().check(nn.Linear(2, 3), {"train": wrong})
    with pytest.raises(DataError, match=r"^validation: y\[5\] is 3"):
        method().check(nn.Linear(2, 3), {"train": TRAIN, "validation": wrong})
